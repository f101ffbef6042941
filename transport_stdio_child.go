package mcp

// The process behind a StdioTransport, from its start to the end of its tree,
// and the table of the requests that wait for it. It is served by a goroutine
// that reads stdout, another that drains stderr, and, from the first slow call
// on, a third that waits for the process itself, since an orphan that holds
// stdout open hides the end of its parent. transport_stdio_pipes.go has what is
// read and written.

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"
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
	stop           context.CancelFunc // ends the handlers of the server's requests
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
	queued   int                 // bytes in queue and in the hands of handlers
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
	c.stop = cancel
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
	c.queue = nil
	c.stop()
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
	within(c.idle, stdioLinger)
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

const (
	tailLines = 50
	tailLine  = 1 << 10
)

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
