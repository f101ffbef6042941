package mcp

// The process behind a StdioTransport: how it is started, read, written to and
// ended. One goroutine reads stdout, looks for the id only, and hands the line
// to the caller that waits for it, so that a bad line costs its caller alone. A
// second drains stderr. A third waits for the process itself from the first slow
// call on, since an orphan that holds stdout open hides the end of its parent.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"time"
)

// A child is one process and what serves it, from its start to the end of its
// tree.
type child struct {
	t              *StdioTransport
	in             Inbound
	proc           *os.Process
	tree           tree
	stdin          io.WriteCloser
	deadline       interface{ SetWriteDeadline(time.Time) error } // of stdin; nil if it knows none
	slice          time.Time                                      // what it was last set to; belongs to the turn
	stdout, stderr io.ReadCloser
	lines          lineCutter // the reader's
	tail           tail
	turn           chan struct{}      // holds a token while a message is written
	cancelled      context.CancelFunc // ends the handlers of the server's requests
	exit           chan struct{}      // closed when the process has ended
	state          *os.ProcessState   // set before exit is closed, or after that by bury
	heard, drained chan struct{}      // closed at the end of the reader, of the drain
	idle           chan struct{}      // closed when the child is dead and no handler runs
	copied         chan struct{}      // closed when Options.Stderr gets no more
	done           chan struct{}      // closed when nothing of the child is left

	mu       sync.Mutex          // guards the fields below
	table    map[int64]*exchange // requests that wait for their replies
	timer    *time.Timer         // calls sweep; nil until it is used
	wake     time.Time           // when it does; zero if it does not
	queue    []envelope          // requests of the server that wait for a handler
	queued   int                 // bytes in queue
	handlers int
	watched  bool   // the process is being waited for
	ending   bool   // bury runs, or has run
	dead     bool   // nothing is registered any more
	detail   string // why it is dead
	raw      []byte // its last words
	code     int
	reaped   bool // code is valid
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
	c := &child{
		t: t, in: *t.inbound, table: make(map[int64]*exchange),
		turn: make(chan struct{}, 1), exit: make(chan struct{}), heard: make(chan struct{}),
		drained: make(chan struct{}), idle: make(chan struct{}), done: make(chan struct{}),
		copied: make(chan struct{}),
	}
	c.lines = lineCutter{max: t.cfg.MaxMessageBytes, grab: t.grab, give: t.give}
	var errs [3]error
	c.stdin, errs[0] = cmd.StdinPipe()
	c.stdout, errs[1] = cmd.StdoutPipe()
	c.stderr, errs[2] = cmd.StderrPipe()
	if err := errors.Join(errs[:]...); err != nil {
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
	ctx, cancel := context.WithCancel(context.Background())
	c.cancelled = cancel
	t.child.Store(c)
	go c.read(ctx)       // both end with their pipe, at the latest when bury
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

// claim takes the exchange with an id off the table, or nil. Whoever gets it
// owes it a reply.
func (c *child) claim(id int64) *exchange {
	c.mu.Lock()
	defer c.mu.Unlock()
	x := c.table[id]
	delete(c.table, id)
	return x
}

// claimOnly is claim for an answer that does not say what it answers.
func (c *child) claimOnly() *exchange {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.table) != 1 {
		return nil
	}
	for id, x := range c.table {
		delete(c.table, id)
		return x
	}
	return nil
}

// withdraw takes x off the table. It reports false if a reply is there, or
// about to be.
func (c *child) withdraw(x *exchange) bool { return c.claim(x.id) != nil }

// write writes x.line when its turn comes, and until its time is up. Sent
// reports whether the server may have got it. A line that is cut off has
// spoilt the stream: it costs the child.
func (c *child) write(ctx context.Context, x *exchange) (sent bool, why Reason) {
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
// by its reply, which stays there for the caller.
func (c *child) await(ctx context.Context, x *exchange) Reason {
	var expired <-chan time.Time
	if x.reply == nil {
		ch, stop := after(x.until)
		defer stop()
		expired = ch
	}
	select {
	case c.turn <- struct{}{}:
		return ""
	case <-ctx.Done():
		return ReasonCancelled
	case <-expired:
		return ReasonTimeout
	case r := <-x.reply:
		x.reply <- r
		return r.why
	}
}

// setSlice sets a deadline for a write at which it looks whether it should go
// on, until at the latest. What an earlier write has set may do.
func (c *child) setSlice(now, until time.Time) {
	left := c.slice.Sub(now)
	early := !until.IsZero() && until.Before(c.slice)
	if left > stdioSlice/2 && !early {
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
	expired, stop := after(x.until)
	defer stop()
	select {
	case err := <-written:
		if err != nil {
			c.end(stdioParting, "")
			return true, ReasonDisconnected
		}
		return true, ""
	case <-ctx.Done():
		why = ReasonCancelled
	case <-expired:
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
	line := frame(appendNotification(nil, "notifications/cancelled", []byte(params)))
	c.write(context.Background(), &exchange{line: line, until: time.Now().Add(stdioCancel)})
}

// read is the reader. ctx is for the handlers of the server's requests.
func (c *child) read(ctx context.Context) {
	defer close(c.heard)
	d, _ := c.stdout.(interface{ SetReadDeadline(time.Time) error })
	stalled, armed := false, false
	for {
		for {
			line, over, ok := c.lines.next()
			if !ok {
				break
			}
			c.take(ctx, line, over)
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
			if b := c.lines.rest(); len(b) > 0 {
				if _, err := scanEnvelope(b); err == nil {
					c.message(ctx, bytes.Clone(b), false)
				}
			}
			c.end(stdioParting, "")
			return
		}
	}
}

// take takes one line.
func (c *child) take(ctx context.Context, line []byte, over bool) {
	if over {
		id, ok := peekID(line)
		if !ok {
			c.t.skipped.Add(1)
		} else if x := c.claim(id); x != nil {
			x.reply <- reply{why: ReasonLimit, detail: "answer over max_message_bytes"}
		}
		return
	}
	if line[0] != '[' {
		c.message(ctx, line, true)
		return
	}
	elems, ok := scanBatch(line) // allowed by 2025-03-26
	if !ok {
		c.t.skipped.Add(1)
	}
	for _, e := range elems {
		c.message(ctx, e, false)
	}
}

// message takes one message: a line as the cutter returned it, or a part of it.
func (c *child) message(ctx context.Context, b []byte, line bool) {
	id, answer := peekID(b)
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
	switch {
	case answer:
		if x := c.claim(id); x != nil {
			c.deliver(x, b, line, false)
		} else {
			c.t.late.Add(1)
		}
	case string(e.id) == "null" && e.method != "":
		c.t.skipped.Add(1)
	case e.method == "":
		var x *exchange
		if e.err != nil && (e.id == nil || string(e.id) == "null") {
			x = c.claimOnly()
		}
		if x != nil {
			c.deliver(x, b, line, true)
		} else {
			c.t.skipped.Add(1)
		}
	case e.id == nil:
		if c.in.Notify != nil {
			c.in.Notify(e.method, bytes.Clone(e.params))
		}
	default:
		c.enqueue(ctx, envelope{id: bytes.Clone(e.id), method: e.method, params: bytes.Clone(e.params)})
	}
}

// deliver hands x its answer.
func (c *child) deliver(x *exchange, b []byte, line, blind bool) {
	r := reply{blind: blind}
	if line {
		r.line, r.large = c.lines.own(b)
	} else {
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
			return
		}
	}
}

// enqueue has a request of the server answered, unless too many wait for that.
func (c *child) enqueue(ctx context.Context, e envelope) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead || len(c.queue) >= stdioQueue || c.queued+len(e.params) > c.t.cfg.MaxMessageBytes {
		c.t.skipped.Add(1)
		return
	}
	c.queue = append(c.queue, e)
	c.queued += len(e.params)
	if c.handlers < stdioHandlers {
		c.handlers++
		go c.handle(ctx) // ends with the queue; bury waits for idle
	}
}

// handle answers requests of the server until none waits.
func (c *child) handle(ctx context.Context) {
	for {
		c.mu.Lock()
		if len(c.queue) == 0 {
			c.handlers--
			if c.dead && c.handlers == 0 {
				close(c.idle)
			}
			c.mu.Unlock()
			return
		}
		e := c.queue[0]
		c.queue = slices.Delete(c.queue, 0, 1)
		c.queued -= len(e.params)
		c.mu.Unlock()

		var result json.RawMessage
		err := error(&RPCError{Code: -32601, Message: "method not found"})
		if c.in.Request != nil {
			result, err = c.in.Request(ctx, e.method, e.params)
		}
		if err == errNoAnswer {
			continue
		}
		var rpc *RPCError
		if err != nil && !errors.As(err, &rpc) || len(result) > c.t.cfg.MaxMessageBytes {
			rpc = &RPCError{Code: -32603, Message: "internal error"}
		}
		line := frame(appendResponse(nil, e.id, result, rpc))
		c.write(ctx, &exchange{line: line, until: time.Now().Add(stdioAnswer)})
	}
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
	c.queue = nil
	c.cancelled()
	if c.handlers == 0 {
		close(c.idle)
	}
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
	c.stdin.Close()
	exited := within(c.exit, grace)
	if !exited {
		c.fail("its output has ended")
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
	detail := "the process cannot be killed"
	if within(c.exit, time.Second) {
		if c.state == nil {
			c.state, _ = c.proc.Wait()
		}
		if c.state != nil {
			detail = c.state.String()
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
	within(c.idle, stdioLinger)
	within(c.copied, stdioLinger)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != nil {
		c.code, c.reaped = c.state.ExitCode(), true
	}
}

// within waits until ch is closed, and reports whether it was in time.
func within(ch <-chan struct{}, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ch:
		return true
	case <-t.C:
		select {
		case <-ch:
			return true
		default:
			return false
		}
	}
}
