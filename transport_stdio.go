package mcp

// A server as a child process: one JSON message a line, over its stdin and
// stdout. In this order: the transport, which has one child at a time; the child,
// from its start to the end of its tree; its reader, which looks for an answer's
// id only and hands the line to its caller, so that a bad line costs its caller
// alone; the writer, which is each caller in turn; the lines. What systems do
// differently is in the siblings. Nothing here knows sessions or the policy.
//
// A child has two goroutines, the reader and one that drains stderr, and, from its
// first slow call on (a slow handshake is one), a third that waits for the process
// itself, since an orphan that holds stdout open hides the end of its parent.

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	stdioGrace   = 500 * time.Millisecond // Close: from the end of stdin to TERM
	stdioLimit   = 5 * time.Second        // from the end of stdin to KILL
	stdioParting = 200 * time.Millisecond // between the end of stdout and the child's own end
	stdioLinger  = 100 * time.Millisecond // for what a dead child has left in its pipes
	stdioSweep   = 500 * time.Millisecond // for the killed to be gone; an init that reaps nothing keeps them
	stdioPulse   = 100 * time.Millisecond // until a call begins to wait for the process too
	stdioSlice   = 50 * time.Millisecond  // a blocked write looks at its context this often
	stdioCancel  = 50 * time.Millisecond  // for telling the server that a call was given up
	stdioAnswer  = 5 * time.Second        // for writing the answer to a request of the server
	stdioQueue   = 64                     // lines of stderr on their way to Options.Stderr
	tailLines    = 50                     // of stderr that are kept,
	tailLine     = 1 << 10                // and bytes of each
	smallLine    = 4 << 10                // lines up to here are copied; longer ones change hands
	lineRest     = 64                     // bytes at the end of a line over the limit that are looked at,
	resultFirst  = `{"result":`           // if it begins like this
)

// StdioTransport carries requests to a child process over its stdin and stdout.
// The command is an argv, never a shell string, and gets the variables that
// the Config names, nothing else. The child leads a process group of its own
// (a job on Windows), so that what it starts ends with it; a descendant that
// leaves the group is out of reach.
//
// When the child is gone, Open starts another. The methods are safe for
// concurrent use, and their errors those of a [Transport].
type StdioTransport struct {
	cfg     *Config // not changed; a pointer, behind which fmt does not look for secrets
	stderr  io.Writer
	log     *slog.Logger
	large   *spares        // buffers for long lines
	slots   chan *exchange // one for each request in flight; nil until it is used
	opening chan struct{}  // holds a token while a child is started or replaced
	inbound *Inbound       // of the first Open; belongs to the token
	starts  int            // children so far; belongs to the token
	child   atomic.Pointer[child]
	closed  atomic.Bool
	lastID  atomic.Int64
	skipped atomic.Uint64
	late    atomic.Uint64 // answers that nobody waited for any more
}

func newStdioTransport(cfg Config, o *Options) *StdioTransport {
	t := &StdioTransport{
		cfg:     &cfg,
		stderr:  o.Stderr,
		log:     o.Logger,
		large:   newSpares(),
		slots:   make(chan *exchange, max(cfg.MaxInFlight, 1)),
		opening: make(chan struct{}, 1),
	}
	for range cap(t.slots) {
		t.slots <- nil
	}
	return t
}

// Open starts the child unless it runs, and reports whether it did.
func (t *StdioTransport) Open(ctx context.Context, in Inbound) (fresh bool, err error) {
	if c := t.child.Load(); c != nil && c.alive() {
		return false, nil
	}
	select {
	case t.opening <- struct{}{}:
	case <-ctx.Done():
		return false, t.fault(ctx, "connect", ReasonCancelled, false, "waiting for another start")
	}
	type opened struct {
		fresh bool
		err   error
	}
	done := make(chan opened)
	// The system may take its time over a start, and cannot be told to stop.
	// This goroutine ends with the start, and ends a child that nobody waited
	// for; the next Open, and Close, wait for it by the token.
	go func() {
		defer func() { <-t.opening }()
		fresh, err := t.start(ctx, in)
		select {
		case done <- opened{fresh, err}:
		case <-ctx.Done():
			if fresh {
				t.child.Load().end(0, "start given up")
			}
		}
	}()
	select {
	case o := <-done:
		return o.fresh, o.err
	case <-ctx.Done():
		return false, t.fault(ctx, "connect", ReasonCancelled, false, "starting")
	}
}

// start is Open with the token.
func (t *StdioTransport) start(ctx context.Context, in Inbound) (fresh bool, err error) {
	if c := t.child.Load(); c != nil {
		if c.alive() {
			return false, nil
		}
		select { // no two trees at a time
		case <-c.done:
		case <-ctx.Done():
		}
	}
	switch {
	case ctx.Err() != nil:
		return false, t.fault(ctx, "connect", ReasonCancelled, false, "not started")
	case t.closed.Load():
		return false, t.fault(ctx, "connect", ReasonDisconnected, false, "transport closed")
	}
	if t.inbound == nil {
		t.inbound = &in
	}
	if err := t.spawn(); err != nil {
		e := t.fault(ctx, "connect", ReasonUnavailable, false, "the command did not start")
		e.Err = err
		return false, e
	}
	return true, nil
}

// Call sends a request and waits for its answer.
func (t *StdioTransport) Call(ctx context.Context, req *Request) (json.RawMessage, error) {
	until := req.Deadline
	if d, ok := ctx.Deadline(); ok && !d.After(until) {
		until = time.Time{} // the context ends first; a tie is the caller's
	}
	x, why := t.admit(ctx, until, req.Stream)
	if why != "" {
		return nil, t.fault(ctx, req.Method, why, false, "no free slot")
	}
	defer t.leave(x)
	c := t.child.Load()
	if c == nil || req.conn != 0 && req.conn != c.number {
		return nil, t.fault(ctx, req.Method, ReasonDisconnected, false, "not connected")
	}
	x.id, x.until = t.lastID.Add(1), until
	if n := len(req.Params); n > smallLine && n <= t.cfg.MaxMessageBytes {
		x.line = t.grab(n + smallLine)
	}
	x.line = appendRequest(x.line[:0], x.id, req.Method, req.Params)
	if len(x.line) > t.cfg.MaxMessageBytes {
		return nil, t.fault(ctx, req.Method, ReasonLimit, false, "request over max_message_bytes")
	}
	x.line = frame(x.line)
	if !c.register(x) {
		return nil, c.lost(ctx, req.Method, false)
	}
	sent, why := c.write(ctx, x)
	if why != "" && why != ReasonDisconnected { // of the latter, the reply says more
		var r reply
		if c.claim(x.id) == nil {
			r = <-x.reply
			t.discard(r)
		}
		return nil, t.fault(ctx, req.Method, why, sent, cmp.Or(r.detail, "the server does not read"))
	}
	var r reply
	select {
	case r = <-x.reply:
	case <-ctx.Done():
		if c.claim(x.id) != nil {
			r.why = ReasonCancelled
		} else {
			r = <-x.reply
		}
	}
	switch r.why {
	case "":
		return t.result(ctx, req, x.id, r)
	case ReasonDisconnected:
		return nil, c.lost(ctx, req.Method, sent)
	case ReasonTimeout, ReasonCancelled:
		if sent {
			c.cancel(req.Method, x.id, r.why)
		}
	}
	return nil, t.fault(ctx, req.Method, r.why, sent, r.detail)
}

// Notify sends a notification.
func (t *StdioTransport) Notify(ctx context.Context, req *Request) error {
	c := t.child.Load()
	if c == nil {
		return t.fault(ctx, req.Method, ReasonDisconnected, false, "not connected")
	}
	x := &exchange{line: appendNotification(nil, req.Method, req.Params), until: req.Deadline}
	if len(x.line) > t.cfg.MaxMessageBytes {
		return t.fault(ctx, req.Method, ReasonLimit, false, "notification over max_message_bytes")
	}
	x.line = frame(x.line)
	sent, why := c.write(ctx, x)
	switch why {
	case "":
		return nil
	case ReasonDisconnected:
		return c.lost(ctx, req.Method, sent)
	}
	return t.fault(ctx, req.Method, why, sent, "the server does not read")
}

// connection returns the number of the child that there is.
func (t *StdioTransport) connection() int { return t.child.Load().number }

// abandon ends a child that no session could be agreed with, so that nothing of
// it is left although nobody has called Close. The next Open starts another.
func (t *StdioTransport) abandon() {
	if c := t.child.Load(); c != nil {
		c.end(stdioGrace, "the handshake failed")
	}
}

// Close ends the child and what it has started: its stdin is closed, after a
// short grace the group is told to terminate, and after five seconds in all it
// is killed. Calls under way fail at once. The error is nil unless the system keeps a
// process alive for a second more than that.
func (t *StdioTransport) Close() error {
	t.closed.Store(true)
	limit := time.After(stdioLimit + time.Second)
	if c := t.child.Load(); c != nil {
		c.end(stdioGrace, "transport closed")
	}
	select {
	case t.opening <- struct{}{}: // no child is born after this
		defer func() { <-t.opening }()
	case <-limit:
		return t.fault(context.Background(), "close", ReasonTimeout, false, "a start is stuck in the system")
	}
	c := t.child.Load()
	if c == nil {
		return nil
	}
	c.end(stdioGrace, "transport closed")
	select {
	case <-c.done:
		return nil
	case <-limit:
		return t.fault(context.Background(), "close", ReasonTimeout, false, "the child has not ended")
	}
}

// StderrTail returns the last lines that the child wrote to its stderr, at most
// 50, each cut to 1 KiB. They are the server's words.
func (t *StdioTransport) StderrTail() []string {
	c := t.child.Load()
	if c == nil {
		return nil
	}
	return c.tail.lines()
}

// ExitCode returns the exit code of the child; ok is false while there is none.
// It is -1 for a child that a signal has ended, and 1 for one that was killed on
// Windows, which has no signals.
func (t *StdioTransport) ExitCode() (code int, ok bool) {
	c := t.child.Load()
	if c == nil {
		return 0, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.code, c.reaped
}

// Skipped returns how many lines were no message, or were one that belongs to
// no request and came in excess of what is kept.
func (t *StdioTransport) Skipped() uint64 { return t.skipped.Load() }

func (t *StdioTransport) honoursDeadline() {}

// An exchange is what a request in flight needs. It is kept for the next one.
type exchange struct {
	id     int64
	since  time.Time  // when it was admitted
	until  time.Time  // when its time is up; zero for never
	stream bool       // Request.Stream
	line   []byte     // the message as it is written
	short  []byte     // a short answer; the reader's, until it has replied
	reply  chan reply // of capacity 1; filled by whoever takes the exchange off the table
}

// A reply is how an exchange ends.
type reply struct {
	why    Reason // why there is no answer, or empty
	detail string // more about why
	line   []byte // the answer, unread
	large  bool   // line lies in a buffer that can be used again
	blind  bool   // line has no id and was laid to the only request there is
}

// admit waits for a slot. A stream, which lasts, takes none.
func (t *StdioTransport) admit(ctx context.Context, until time.Time, stream bool) (x *exchange, why Reason) {
	now := time.Now()
	switch {
	case ctx.Err() != nil:
		return nil, ReasonCancelled
	case !until.IsZero() && !now.Before(until):
		return nil, ReasonTimeout
	case stream:
		return &exchange{since: now, stream: true, reply: make(chan reply, 1)}, ""
	}
	select {
	case x = <-t.slots:
	default:
		select {
		case x = <-t.slots:
		case <-ctx.Done():
			return nil, ReasonCancelled
		case <-after(until):
			return nil, ReasonTimeout
		}
	}
	if x == nil {
		x = &exchange{reply: make(chan reply, 1)}
	}
	x.since = now
	return x, ""
}

// leave gives the slot back.
func (t *StdioTransport) leave(x *exchange) {
	if cap(x.line) > smallLine {
		t.large.give(x.line)
		x.line = nil
	}
	if !x.stream {
		t.slots <- x
	}
}

// after returns a channel that is sent to at until, or never if that is zero.
func after(until time.Time) <-chan time.Time {
	if until.IsZero() {
		return nil
	}
	return time.After(time.Until(until))
}

// result reads the answer to a request.
func (t *StdioTransport) result(ctx context.Context, req *Request, id int64, r reply) (json.RawMessage, error) {
	defer t.discard(r)
	if req.settle(r.line, id) {
		return nil, nil
	}
	e, err := scanEnvelope(r.line)
	if n, ok := intID(e.id); err == nil && !r.blind && (!ok || n != id) {
		err = errSyntax
	}
	if err == nil && e.method == "" && e.err == nil && e.result != nil {
		if req.to == nil {
			return bytes.Clone(e.result), nil
		}
		return nil, req.to.receive(e.result)
	}
	if err == nil && e.method == "" && e.err != nil && e.result == nil {
		if rpc, err := decodeError(e.err); err == nil {
			rpc.Origin = Origin{Server: t.cfg.Name, Op: req.Method}
			return nil, rpc
		}
	}
	f := t.fault(ctx, req.Method, ReasonProtocol, true, "the answer is no JSON-RPC response")
	f.Raw = clip(r.line)
	return nil, f
}

// fault returns the error of op. A cancelled one unwraps to the context's.
func (t *StdioTransport) fault(ctx context.Context, op string, why Reason, sent bool, detail string) *TransportError {
	e := &TransportError{Origin: Origin{Server: t.cfg.Name, Op: op}, Reason: why, Sent: sent, Detail: detail}
	if why == ReasonCancelled {
		e.Err = context.Cause(ctx)
		if !errors.Is(e.Err, ctx.Err()) {
			e.Err = fmt.Errorf("%w: %w", ctx.Err(), e.Err)
		}
	}
	return e
}

// grab returns a buffer of at least n bytes for a long line.
func (t *StdioTransport) grab(n int) []byte {
	b := t.large.take(n)
	return b[:cap(b)]
}

// discard drops a reply that nobody wants.
func (t *StdioTransport) discard(r reply) {
	if r.large {
		t.large.give(r.line)
	}
}

// A child is one process and what serves it, from its start to the end of its
// tree.
type child struct {
	t              *StdioTransport
	number         int // from 1
	in             Inbound
	inbox          *inbox
	proc           *os.Process
	tree           tree
	stdin          io.WriteCloser
	deadline       interface{ SetWriteDeadline(time.Time) error } // of stdin; nil if it knows none
	slice          time.Time                                      // what it was last set to; belongs to the turn
	stdout, stderr io.ReadCloser
	lines          lineCutter // the reader's
	idLast         bool       // the line over the limit begins as an answer that ends with its id
	tail           tail
	turn           chan struct{}    // holds a token while a message is written
	state          *os.ProcessState // set before exit is closed, or after that by bury
	// Closed when the process has ended; the reader; the drain; the copying to
	// Options.Stderr; nothing of the child is left.
	exit, heard, drained, copied, done chan struct{}

	mu      sync.Mutex          // guards the fields below
	table   map[int64]*exchange // requests that wait for their replies
	timer   *time.Timer         // calls sweep; nil until it is used
	wake    time.Time           // when it does; zero if it does not
	watched bool                // the process is being waited for
	ending  bool                // bury runs, or has run
	dead    bool                // nothing is registered any more
	detail  string              // why it is dead
	raw     []byte              // its last words
	code    int
	reaped  bool // code is valid
}

// spawn starts a child.
func (t *StdioTransport) spawn() error {
	if len(t.cfg.Command) == 0 {
		return errors.New("no command")
	}
	cmd := exec.Command(t.cfg.Command[0], t.cfg.Command[1:]...)
	cmd.Dir = t.cfg.Dir
	cmd.Env = []string{} // nil would mean all of ours
	for _, k := range t.cfg.EnvAllow {
		if v, ok := os.LookupEnv(k); ok {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
	}
	for k, v := range t.cfg.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	t.starts++
	c := &child{
		t: t, number: t.starts, in: *t.inbound, inbox: newInbox(*t.inbound, t.cfg.MaxMessageBytes), table: make(map[int64]*exchange),
		lines: lineCutter{max: t.cfg.MaxMessageBytes, grab: t.grab, give: t.large.give}, turn: make(chan struct{}, 1),
	}
	c.lines.dropped = c.dropped
	for _, ch := range []*chan struct{}{&c.exit, &c.heard, &c.drained, &c.copied, &c.done} {
		*ch = make(chan struct{})
	}
	var errs [3]error
	c.stdin, errs[0] = cmd.StdinPipe()
	c.stdout, errs[1] = cmd.StdoutPipe()
	c.stderr, errs[2] = cmd.StderrPipe()
	if err := cmp.Or(errs[:]...); err != nil {
		cmd.Err = err // Start returns it, and closes what was opened
	}
	c.tree.prepare(cmd)
	if err := cmd.Start(); err != nil {
		return err
	}
	if d, ok := c.stdin.(*os.File); ok && d.SetWriteDeadline(time.Time{}) == nil {
		c.deadline = d
	}
	c.proc = cmd.Process
	c.tree.adopt(c.proc)
	t.child.Store(c)
	go c.read()          // both end with their pipe, at the latest when bury
	go c.drain(t.stderr) // closes it, and bury waits for them
	return nil
}

// alive reports whether the child is still meant to be used.
func (c *child) alive() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.ending && !c.dead
}

// register puts x on the table. It reports false if the child is dead.
func (c *child) register(x *exchange) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.dead {
		c.table[x.id] = x
		c.wakeLocked(x)
	}
	return !c.dead
}

// wakeLocked has sweep look after x in time. Timers are dear beside the rest of
// a call: as a rule the one that runs for an earlier call will do.
func (c *child) wakeLocked(x *exchange) {
	at := x.until
	if pulse := x.since.Add(stdioPulse); !c.watched && (at.IsZero() || pulse.Before(at)) {
		at = pulse
	}
	if at.IsZero() || !c.wake.IsZero() && !at.Before(c.wake) {
		return
	}
	c.wake = at
	if d := time.Until(at); c.timer == nil {
		c.timer = time.AfterFunc(d, c.sweep)
	} else {
		c.timer.Reset(d)
	}
}

// sweep fails the calls whose time is up. When one has waited for a while, it
// has the process watched.
func (c *child) sweep() {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	c.wake = time.Time{}
	for id, x := range c.table {
		if !x.until.IsZero() && !now.Before(x.until) {
			delete(c.table, id)
			x.reply <- reply{why: ReasonTimeout}
		} else if !now.Before(x.since.Add(stdioPulse)) {
			c.watchLocked()
		}
	}
	for _, x := range c.table {
		c.wakeLocked(x)
	}
}

// claim takes the exchange with an id off the table. Whoever gets it owes it a
// reply, save its own caller, for whom nil means that one is there, or about to be.
func (c *child) claim(id int64) *exchange {
	c.mu.Lock()
	defer c.mu.Unlock()
	x := c.table[id]
	delete(c.table, id)
	return x
}

// claimOnly is claim for an error that does not say what it answers. A server that
// does not know the method, or its params, has read the message, and would have
// named its id: it complains about a notification of ours, as many do.
func (c *child) claimOnly(err []byte) *exchange {
	if e, _ := decodeError(err); e != nil && (e.Code == -32601 || e.Code == -32602) {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, x := range c.table {
		if len(c.table) == 1 {
			delete(c.table, id)
			return x
		}
	}
	return nil
}

// watchLocked begins to wait for the process, if that is not done yet. The
// system is asked not to reap it (see [tree.await]), so that the number of its
// group stays ours until the group has been killed. It is called with c.mu held.
func (c *child) watchLocked() {
	if c.watched {
		return
	}
	c.watched = true
	// It ends with the process; bury, which it starts, waits for it.
	go func() {
		if !c.tree.await(c.proc) {
			c.state, _ = c.proc.Wait()
		}
		close(c.exit)
		c.end(stdioParting, "")
	}()
}

// fail ends all exchanges, and those to come.
func (c *child) fail(detail string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead {
		return
	}
	c.dead, c.detail, c.raw = true, detail, c.tail.last(rawLimit)
	for _, x := range c.table {
		x.reply <- reply{why: ReasonDisconnected}
	}
	clear(c.table)
	if c.timer != nil {
		c.timer.Stop()
	}
	c.inbox.close()
}

// lost returns the error of a request that the child's death has ended.
func (c *child) lost(ctx context.Context, op string, sent bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.t.fault(ctx, op, ReasonDisconnected, sent, c.detail)
	e.Raw = c.raw
	return e
}

// end has the child ended. Exchanges fail at once if why says why; otherwise
// when it is known how the process ended. The first grace is the one that
// holds.
func (c *child) end(grace time.Duration, why string) {
	if why != "" {
		c.fail(why)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ending {
		c.ending = true
		c.watchLocked()
		go c.bury(grace) // ends within its bounds; Close and Open wait for done
	}
}

// bury ends the process, its tree, and everything that serves them.
func (c *child) bury(grace time.Duration) {
	defer close(c.done)
	if c.deadline != nil {
		c.stdin.Close()
	} else {
		go c.stdin.Close() // it may wait for a write, which the end of the child sets free
	}
	exited := within(c.exit, grace)
	if !exited {
		c.fail("the child closed a pipe")
		if c.tree.terminate(c.proc) == nil {
			exited = within(c.exit, stdioLimit-grace)
		}
	}
	if exited { // a grandchild may hold the pipes; otherwise they end at once
		until := time.Now().Add(stdioLinger)
		within(c.heard, time.Until(until))
		within(c.drained, time.Until(until))
	}
	c.tree.kill(c.proc)
	code, detail, reaped := 0, "the process cannot be killed", false
	if within(c.exit, time.Second) {
		if c.state == nil {
			c.state, _ = c.proc.Wait()
		}
		if reaped = c.state != nil; reaped {
			code, detail = c.state.ExitCode(), c.state.String()
		}
		for until := time.Now().Add(stdioSweep); !c.tree.gone(c.proc) && time.Now().Before(until); {
			time.Sleep(time.Millisecond)
		}
	}
	within(c.drained, stdioLinger)
	c.stdout.Close()
	c.stderr.Close()
	within(c.heard, stdioLinger)
	within(c.drained, stdioLinger)
	c.fail(detail)
	if c.t.log != nil {
		c.t.log.Debug("mcp: child ended", "server", c.t.cfg.Name, "status", detail,
			"skipped", c.t.skipped.Load(), "late", c.t.late.Load())
	}
	within(c.inbox.idle, stdioLinger)
	within(c.copied, stdioLinger)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.code, c.reaped = code, reaped
}

// drain keeps stderr from filling up.
func (c *child) drain(w io.Writer) {
	defer close(c.drained)
	if w == nil {
		close(c.copied)
	} else {
		queue := make(chan []byte, stdioQueue)
		defer close(queue)
		c.tail.forward = queue
		// It ends when drain does, unless w never returns; bury waits a
		// little for it.
		go func() {
			defer close(c.copied)
			for b := range queue {
				w.Write(b)
			}
		}()
	}
	buf := make([]byte, 2<<10)
	for {
		n, err := c.stderr.Read(buf)
		c.tail.write(buf[:n])
		if err != nil {
			c.tail.end()
			return
		}
	}
}

// read is the reader.
func (c *child) read() {
	defer close(c.heard)
	d, _ := c.stdout.(interface{ SetReadDeadline(time.Time) error })
	stalled, armed := false, false
	for {
		for {
			line, over, ok := c.lines.next()
			if !ok {
				break
			}
			c.take(line, over)
		}
		if mid := len(c.lines.rest()) > 0 && !stalled && c.t.cfg.ReadTimeout > 0; d != nil && (mid || armed) {
			var until time.Time
			if mid {
				until = time.Now().Add(c.t.cfg.ReadTimeout)
			}
			d.SetReadDeadline(until)
			armed = mid
		}
		n, err := c.stdout.Read(c.lines.room())
		c.lines.add(n)
		if stalled = errors.Is(err, os.ErrDeadlineExceeded); stalled {
			c.stall()
		} else if err != nil {
			if last := bytes.TrimSpace(c.lines.rest()); isValue(last) { // it lacks no more than its newline
				c.take(last, false)
			}
			c.end(stdioParting, "")
			return
		}
	}
}

// take takes one line.
func (c *child) take(line []byte, over bool) {
	switch {
	case over:
		c.idLast = bytes.HasPrefix(line, []byte(resultFirst))
		if id, ok := peekID(line); !ok {
			c.t.skipped.Add(1)
		} else if !c.tooLong(id) {
			c.t.late.Add(1)
		}
	case line[0] == '[': // a batch, allowed by 2025-03-26
		elems, ok := scanBatch(line)
		if !ok {
			c.t.skipped.Add(1)
			return
		}
		for _, e := range elems {
			c.message(e, false)
		}
	default:
		c.message(line, true)
	}
}

// tooLong fails the call whose answer is over the limit, if somebody waits for it.
func (c *child) tooLong(id int64) bool {
	x := c.claim(id)
	if x != nil {
		x.reply <- reply{why: ReasonLimit, detail: "answer over max_message_bytes"}
	}
	return x != nil
}

// dropped takes the end of a line over the limit, whose head need not have said
// what it answers: the TypeScript SDK writes the id last, of its requests as well.
func (c *child) dropped(end []byte) {
	if id, _, ok := cutAnswer(append([]byte(resultFirst), end...)); ok && c.idLast {
		c.tooLong(id)
	}
}

// message takes one message: a whole line as the cutter returned it, or a part
// of one.
func (c *child) message(b []byte, whole bool) {
	id, _, answer := cutAnswer(b)
	if !answer {
		id, answer = peekID(b)
	}
	var e envelope
	if !answer {
		var err error
		if e, err = scanEnvelope(b); err != nil {
			c.t.skipped.Add(1)
			return
		}
		if e.method == "" {
			id, answer = intID(e.id)
		}
	}
	null := string(e.id) == "null"
	switch {
	case answer:
		if x := c.claim(id); x != nil {
			c.deliver(x, b, whole, false)
		} else {
			c.t.late.Add(1)
		}
	case e.method == "" && e.err != nil && (e.id == nil || null):
		if x := c.claimOnly(e.err); x != nil {
			c.deliver(x, b, whole, true)
		} else {
			c.t.skipped.Add(1)
		}
	case e.method == "" || null:
		c.t.skipped.Add(1)
	case e.id != nil:
		if !c.inbox.take(e, c.answer) {
			c.t.skipped.Add(1)
		}
	default:
		if e.method == farewell {
			if id := member(e.params, "requestId"); id != nil {
				c.inbox.withdraw(id)
			}
		}
		if c.in.Notify != nil {
			c.in.Notify(e.method, bytes.Clone(e.params))
		}
	}
}

// deliver hands x its answer.
func (c *child) deliver(x *exchange, b []byte, whole, blind bool) {
	r := reply{blind: blind}
	switch {
	case len(b) <= smallLine:
		x.short = append(x.short[:0], b...)
		r.line = x.short
	case whole:
		r.line, r.large = c.lines.own(b)
	default:
		r.line = bytes.Clone(b)
	}
	x.reply <- r
}

// stall fails the calls that a line without an end holds up: the one it
// answers, or, if it does not say, all that have waited as long.
func (c *child) stall() {
	r := reply{why: ReasonTimeout, detail: "a line stalled before its end"}
	if id, ok := peekID(c.lines.rest()); ok {
		if x := c.claim(id); x != nil {
			x.reply <- r
		}
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, x := range c.table {
		if !x.stream && time.Since(x.since) >= c.t.cfg.ReadTimeout {
			delete(c.table, id)
			x.reply <- r
		}
	}
}

// answer sends the answer to a request of the server.
func (c *child) answer(ctx context.Context, msg []byte) {
	c.write(ctx, &exchange{line: frame(msg), until: time.Now().Add(stdioAnswer)})
}

// write writes x.line when its turn comes, and until its time is up. Sent
// reports whether the server may have got it. A line that is cut off has
// spoilt the stream: it costs the child.
func (c *child) write(ctx context.Context, x *exchange) (sent bool, why Reason) {
	if ctx.Err() != nil { // a pipe with room would take it all the same
		return false, ReasonCancelled
	}
	select {
	case c.turn <- struct{}{}:
	default:
		if why := c.await(ctx, x); why != "" {
			return false, why
		}
	}
	if c.deadline == nil {
		return c.writeAside(ctx, x)
	}
	defer func() { <-c.turn }()
	for n := 0; ; {
		c.setSlice(time.Now(), x.until)
		m, err := c.stdin.Write(x.line[n:])
		n += m
		switch {
		case err == nil:
			return true, ""
		case !errors.Is(err, os.ErrDeadlineExceeded):
			c.end(stdioParting, "")
			return n > 0, ReasonDisconnected
		case ctx.Err() != nil:
			why = ReasonCancelled
		case !x.until.IsZero() && !time.Now().Before(x.until):
			why = ReasonTimeout
		default:
			continue
		}
		if n > 0 {
			c.end(0, "a request was cut off")
		}
		return n > 0, why
	}
}

// await waits for the turn, as long as x has time: what is on the table is told
// by its reply, which stays there for the caller. No reply can be an answer yet.
func (c *child) await(ctx context.Context, x *exchange) Reason {
	var expired <-chan time.Time
	if x.reply == nil {
		expired = after(x.until)
	}
	select {
	case c.turn <- struct{}{}:
		return ""
	case <-ctx.Done():
		return ReasonCancelled
	case <-expired:
		return ReasonTimeout
	case r := <-x.reply:
		if r.why == "" {
			c.t.discard(r)
			r = reply{why: ReasonProtocol, detail: "answered before it was sent"}
		}
		x.reply <- r
		return r.why
	}
}

// setSlice gives the coming write a deadline, at which it looks whether it
// should go on. What an earlier write was given will do if it is neither near
// nor after until.
func (c *child) setSlice(now, until time.Time) {
	fits := until.IsZero() || !until.Before(c.slice)
	if fits && c.slice.Sub(now) > stdioSlice/2 {
		return
	}
	c.slice = now.Add(stdioSlice)
	if !until.IsZero() && until.Before(c.slice) {
		c.slice = until
	}
	c.deadline.SetWriteDeadline(c.slice)
}

// writeAside is write where the system knows no deadlines for pipes (Windows,
// Plan 9). It is called with the turn.
func (c *child) writeAside(ctx context.Context, x *exchange) (sent bool, why Reason) {
	line, written := x.line, make(chan error, 1)
	// It ends with the write, which the end of the child sets free.
	go func() {
		_, err := c.stdin.Write(line)
		<-c.turn
		written <- err
	}()
	select {
	case err := <-written:
		if err != nil {
			c.end(stdioParting, "")
			why = ReasonDisconnected
		}
		return true, why
	case <-ctx.Done():
		why = ReasonCancelled
	case <-after(x.until):
		why = ReasonTimeout
	}
	x.line = nil // still being written
	c.end(0, "a request was cut off")
	return true, why
}

// cancel tells the server that a request was given up, if that can be said at
// once. The handshake is not cancellable (MCP, cancellation).
func (c *child) cancel(method string, id int64, why Reason) {
	if method == "initialize" || method == "server/discover" {
		return
	}
	params := `{"requestId":` + strconv.FormatInt(id, 10) + `,"reason":"` + string(why) + `"}`
	line := frame(appendNotification(nil, farewell, []byte(params)))
	c.write(context.Background(), &exchange{line: line, until: time.Now().Add(stdioCancel)})
}

// frame makes a line of a message. Its newlines, white space all of them, would
// end it too early.
func frame(msg []byte) []byte {
	if bytes.IndexByte(msg, '\n') >= 0 {
		msg = bytes.ReplaceAll(msg, []byte("\n"), []byte(" "))
	}
	return append(msg, '\n')
}

// A lineCutter cuts a stream into lines. It holds one line at most, and of that
// no more than max bytes and its end.
type lineCutter struct {
	max        int
	small, buf []byte // buf is small, or a large buffer while a long line lies in it
	start, end int    // buf[start:end] is yet to be cut
	seen       int    // buf[start:seen] has no newline
	skip       bool   // what comes up to the next newline is dropped,
	last       []byte // but for this much of its end

	grab    func(n int) []byte // where large buffers come from
	give    func([]byte)       // and go to
	dropped func(end []byte)   // gets the end of a line of which the rest was dropped
}

// room returns where the next bytes go. It ends the life of the last line.
func (l *lineCutter) room() []byte {
	if l.small == nil {
		l.small = make([]byte, min(smallLine, l.max+2))
		l.buf = l.small
	}
	switch rest := l.end - l.start; {
	case rest == 0:
		l.move(l.small)
	case l.start > 0 && len(l.buf)-l.end < len(l.buf)/4:
		l.move(l.buf)
	case l.end == len(l.buf):
		b := l.grab(min(2*len(l.buf), l.max+2))
		l.move(b[:min(len(b), l.max+2)])
	}
	return l.buf[l.end:]
}

// move moves what is yet to be cut to the start of buf.
func (l *lineCutter) move(buf []byte) {
	n := copy(buf, l.buf[l.start:l.end])
	if len(l.buf) > len(l.small) && &buf[0] != &l.buf[0] {
		l.give(l.buf)
	}
	l.buf, l.start, l.end, l.seen = buf, 0, n, l.seen-l.start
}

// add says that n bytes have been put into the room.
func (l *lineCutter) add(n int) { l.end += n }

// rest returns the line of which the end has not come.
func (l *lineCutter) rest() []byte { return l.buf[l.start:l.end] }

// drop keeps the end of what is dropped.
func (l *lineCutter) drop(b []byte) {
	l.last = append(l.last, b[max(len(b)-lineRest, 0):]...)
	l.last = append(l.last[:0], l.last[max(len(l.last)-lineRest, 0):]...)
}

// next returns the next line, trimmed and not empty, or the first max bytes of
// one that is over the limit, as soon as it is.
func (l *lineCutter) next() (line []byte, over, ok bool) {
	for {
		i := bytes.IndexByte(l.buf[l.seen:l.end], '\n')
		if i < 0 {
			line, l.seen = l.buf[l.start:l.end], l.end
			if l.skip {
				l.drop(line)
				l.start = l.end
			} else if len(line) > l.max+1 { // one more might be a CR
				l.start, l.skip, l.last = l.end, true, l.last[:0]
				l.drop(line)
				return line[:l.max], true, true
			}
			return nil, false, false
		}
		raw := l.buf[l.start : l.seen+i]
		line = bytes.TrimSuffix(raw, []byte("\r"))
		l.start = l.seen + i + 1
		l.seen = l.start
		switch {
		case l.skip:
			l.skip = false
			l.drop(raw)
			l.dropped(bytes.TrimSpace(l.last))
		case len(line) > l.max:
			l.skip, l.last = true, l.last[:0]
			l.start -= min(len(raw), lineRest) + 1 // its end comes next
			l.seen = l.start
			return line[:l.max], true, true
		default:
			line = bytes.TrimSpace(bytes.TrimPrefix(line, []byte(byteOrderMark)))
			if len(line) > 0 {
				return line, false, true
			}
		}
	}
}

// own makes line, the last that next returned, the caller's: by copying, or,
// if it is long and fills its buffer, with the buffer.
func (l *lineCutter) own(line []byte) (own []byte, large bool) {
	rest := l.rest()
	if len(l.buf) == len(l.small) || len(line) < len(l.buf)/4 || len(rest) > len(line) {
		return bytes.Clone(line), false
	}
	to := l.small
	if len(rest) > len(to) {
		to = l.grab(len(rest))
	}
	l.buf, l.start, l.end, l.seen = to, 0, copy(to, rest), 0
	return line, true
}

// A tail keeps the last lines of stderr. Of a line that is written over and
// over by CR, it keeps the last state.
type tail struct {
	forward chan<- []byte // gets a copy of each line, unless it is full

	mu   sync.Mutex // guards the fields below
	ring [tailLines][]byte
	n    int    // lines written to ring, ever
	line []byte // the line of which the end has not come
	cr   bool   // what comes next, unless a newline, starts the line again
}

// write takes what the child wrote.
func (t *tail) write(p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for len(p) > 0 {
		part, rest, ended := bytes.Cut(p, []byte("\n"))
		p = rest
		if s := bytes.TrimRight(part, "\r"); len(s) > 0 {
			if i := bytes.LastIndexByte(s, '\r'); i >= 0 || t.cr {
				t.line, s = t.line[:0], s[i+1:]
			}
			t.line = append(t.line, s[:min(len(s), tailLine-len(t.line))]...)
			t.cr = len(s) < len(part) && part[len(part)-1] == '\r'
		} else if len(part) > 0 {
			t.cr = true
		}
		if ended {
			t.endLocked()
		}
	}
}

// end ends a line that has no newline.
func (t *tail) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.line) > 0 {
		t.endLocked()
	}
}

// endLocked ends the line. It is called with t.mu held.
func (t *tail) endLocked() {
	slot := &t.ring[t.n%tailLines]
	*slot = append((*slot)[:0], t.line...)
	t.n++
	if t.forward != nil {
		select {
		case t.forward <- append(bytes.Clone(t.line), '\n'):
		default:
		}
	}
	t.line, t.cr = t.line[:0], false
}

// lines returns what is kept, the oldest first.
func (t *tail) lines() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var s []string
	for i := max(0, t.n-tailLines); i < t.n; i++ {
		s = append(s, string(t.ring[i%tailLines]))
	}
	if len(t.line) > 0 {
		s = append(s, string(t.line))
	}
	return s[max(0, len(s)-tailLines):]
}

// last returns the last n bytes of what is kept.
func (t *tail) last(n int) []byte {
	b := []byte(strings.Join(t.lines(), "\n"))
	return b[max(0, len(b)-n):]
}

// within waits until ch is closed, and reports whether it was in time.
func within(ch <-chan struct{}, d time.Duration) bool {
	select {
	case <-ch:
		return true
	default:
	}
	select {
	case <-ch:
		return true
	case <-time.After(d):
		return false
	}
}
