package mcp

// A server as a child process: one JSON message a line, over its stdin and
// stdout. Here is the transport, which has at most one child at a time and
// writes each request on its caller's goroutine; transport_stdio_child.go has
// the process, transport_stdio_pipes.go what goes through its pipes, and the
// other siblings what systems do differently. They know Config, Request and the
// errors; they know no session and no policy.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

const (
	stdioGrace    = 500 * time.Millisecond // Close: from the end of stdin to TERM
	stdioLimit    = 5 * time.Second        // from the end of stdin to KILL
	stdioParting  = 200 * time.Millisecond // between the end of stdout and the child's own end
	stdioLinger   = 100 * time.Millisecond // for what a dead child has left in its pipes
	stdioSweep    = 500 * time.Millisecond // for the killed to be gone; an init that reaps nothing keeps them
	stdioPulse    = 100 * time.Millisecond // until a call begins to wait for the process too
	stdioSlice    = 50 * time.Millisecond  // a blocked write looks at its context this often
	stdioCancel   = 50 * time.Millisecond  // for telling the server that a call was given up
	stdioAnswer   = 5 * time.Second        // for writing the answer to a request of the server
	stdioHandlers = 8                      // requests of the server answered at a time
	stdioQueue    = 64                     // requests of the server that wait for that
	smallLine     = 4 << 10                // lines up to here are copied; longer ones change hands
)

// StdioTransport carries requests to a child process over its stdin and stdout.
// The command is an argv, never a shell string, and gets the variables that
// the Config names, nothing else. The child leads a process group of its own
// (a job on Windows), so that what it starts ends with it; a descendant that
// leaves the group is out of reach.
//
// When the child is gone, Open starts another. The methods are safe for
// concurrent use.
type StdioTransport struct {
	cfg     Config
	stderr  io.Writer
	log     *slog.Logger
	recycle func([]byte)   // give, as a value made once
	large   sync.Pool      // of *[]byte: buffers for long lines
	slots   chan *exchange // one for each request in flight; nil until it is used
	opening chan struct{}  // holds a token while a child is started or replaced
	inbound *Inbound       // of the first Open; belongs to the token
	child   atomic.Pointer[child]
	closed  atomic.Bool
	lastID  atomic.Int64
	skipped atomic.Uint64
	late    atomic.Uint64 // answers that nobody waited for any more
}

func newStdioTransport(cfg Config, o *Options) *StdioTransport {
	t := &StdioTransport{
		cfg:     cfg,
		stderr:  o.Stderr,
		log:     o.Logger,
		slots:   make(chan *exchange, max(cfg.MaxInFlight, 1)),
		opening: make(chan struct{}, 1),
	}
	t.recycle = t.give
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
	x, why := t.admit(ctx, until)
	if why != "" {
		return nil, t.fault(ctx, req.Method, why, false, "no free slot")
	}
	defer t.leave(x)
	c := t.child.Load()
	if c == nil {
		return nil, t.fault(ctx, req.Method, ReasonDisconnected, false, "not connected")
	}
	x.id, x.until, x.stream = t.lastID.Add(1), until, req.Stream
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
		if !c.withdraw(x) {
			t.discard(<-x.reply)
		}
		return nil, t.fault(ctx, req.Method, why, sent, "the server does not read")
	}
	var r reply
	select {
	case r = <-x.reply:
	case <-ctx.Done():
		if c.withdraw(x) {
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
	if ctx.Err() != nil { // a pipe with room would take it all the same
		return t.fault(ctx, req.Method, ReasonCancelled, false, "")
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

// abandon ends a child that no session could be agreed with, so that nothing of
// it is left although nobody has called Close. The next Open starts another.
func (t *StdioTransport) abandon() {
	if c := t.child.Load(); c != nil {
		c.end(stdioGrace, "the handshake failed")
	}
}

// Close ends the child and what it has started: its stdin is closed, after a
// short grace the group is told to terminate, and after five seconds in all it
// is killed. Calls under way fail at once.
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
// It is -1 for a child that a signal has ended.
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

// admit waits for a slot.
func (t *StdioTransport) admit(ctx context.Context, until time.Time) (x *exchange, why Reason) {
	now := time.Now()
	switch {
	case ctx.Err() != nil:
		return nil, ReasonCancelled
	case !until.IsZero() && !now.Before(until):
		return nil, ReasonTimeout
	}
	select {
	case x = <-t.slots:
	default:
		expired, stop := after(until)
		defer stop()
		select {
		case x = <-t.slots:
		case <-ctx.Done():
			return nil, ReasonCancelled
		case <-expired:
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
		t.give(x.line)
		x.line = nil
	}
	t.slots <- x
}

// after returns a channel that is sent to at until, or never if that is zero,
// and a function that frees the timer.
func after(until time.Time) (<-chan time.Time, func() bool) {
	if until.IsZero() {
		return nil, func() bool { return false }
	}
	t := time.NewTimer(time.Until(until))
	return t.C, t.Stop
}

// result reads the answer to a request.
func (t *StdioTransport) result(ctx context.Context, req *Request, id int64, r reply) (json.RawMessage, error) {
	e, err := scanEnvelope(r.line)
	if n, ok := intID(e.id); err == nil && !r.blind && (!ok || n != id) {
		err = errSyntax
	}
	if err == nil && e.method == "" && e.err == nil && e.result != nil {
		if r.large {
			req.buf, req.free = r.line, t.recycle
		}
		return e.result, nil
	}
	defer t.discard(r)
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
	if p, _ := t.large.Get().(*[]byte); p != nil && cap(*p) >= n {
		return (*p)[:cap(*p)]
	}
	return make([]byte, n)
}

// give takes such a buffer back.
func (t *StdioTransport) give(b []byte) { t.large.Put(&b) }

// discard drops a reply that nobody wants.
func (t *StdioTransport) discard(r reply) {
	if r.large {
		t.give(r.line)
	}
}
