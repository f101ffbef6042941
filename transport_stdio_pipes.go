package mcp

// What goes through the pipes of a child. The reader looks for the id of an
// answer only, and hands the line to the caller that waits for it: a bad line
// costs its caller alone. Callers write their requests themselves, one at a
// time, and stop when their time is up, whether the child reads or not.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strconv"
	"time"
)

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
	switch {
	case over:
		if id, ok := peekID(line); !ok {
			c.t.skipped.Add(1)
		} else if x := c.claim(id); x != nil {
			x.reply <- reply{why: ReasonLimit, detail: "answer over max_message_bytes"}
		} else {
			c.t.late.Add(1)
		}
	case line[0] == '[': // a batch, allowed by 2025-03-26
		elems, ok := scanBatch(line)
		if !ok {
			c.t.skipped.Add(1)
			return
		}
		for _, e := range elems {
			c.message(ctx, e, false)
		}
	default:
		c.message(ctx, line, true)
	}
}

// message takes one message: a whole line as the cutter returned it, or a part
// of one.
func (c *child) message(ctx context.Context, b []byte, whole bool) {
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
	null := string(e.id) == "null"
	switch {
	case answer:
		if x := c.claim(id); x != nil {
			c.deliver(x, b, whole, false)
		} else {
			c.t.late.Add(1)
		}
	case e.method == "" && e.err != nil && (e.id == nil || null):
		if x := c.claimOnly(); x != nil {
			c.deliver(x, b, whole, true)
		} else {
			c.t.skipped.Add(1)
		}
	case e.method == "" || null:
		c.t.skipped.Add(1)
	case e.id != nil:
		c.enqueue(ctx, envelope{id: bytes.Clone(e.id), method: e.method, params: bytes.Clone(e.params)})
	case c.in.Notify != nil:
		c.in.Notify(e.method, bytes.Clone(e.params))
	}
}

// deliver hands x its answer.
func (c *child) deliver(x *exchange, b []byte, whole, blind bool) {
	r := reply{blind: blind}
	if whole {
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

// enqueue has a request of the server answered, unless too many wait for that.
func (c *child) enqueue(ctx context.Context, e envelope) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead || len(c.queue) >= stdioQueue || c.queued+e.size() > c.t.cfg.MaxMessageBytes {
		c.t.skipped.Add(1)
		return
	}
	c.queue = append(c.queue, e)
	c.queued += e.size()
	if c.handlers < stdioHandlers {
		c.handlers++
		go c.handle(ctx) // ends with the queue; bury waits for idle
	}
}

// handle answers requests of the server until none waits.
func (c *child) handle(ctx context.Context) {
	held := 0 // bytes of the request in hand
	for {
		c.mu.Lock()
		c.queued -= held
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
		held = e.size()
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

// write writes x.line when its turn comes, and until its time is up. Sent
// reports whether the server may have got it. A line that is cut off has
// spoilt the stream: it costs the child.
func (c *child) write(ctx context.Context, x *exchange) (sent bool, why Reason) {
	if ctx.Err() != nil {
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

// frame makes a line of a message. Its newlines, white space all of them, would
// end it too early.
func frame(msg []byte) []byte {
	if bytes.IndexByte(msg, '\n') >= 0 {
		for i, b := range msg {
			if b == '\n' {
				msg[i] = ' '
			}
		}
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
	skip       bool   // what comes up to the next newline is dropped

	grab func(n int) []byte // where large buffers come from
	give func([]byte)       // and go to
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

// next returns the next line, trimmed and not empty, or the first max bytes of
// one that is over the limit, as soon as it is.
func (l *lineCutter) next() (line []byte, over, ok bool) {
	for {
		i := bytes.IndexByte(l.buf[l.seen:l.end], '\n')
		if i < 0 {
			line, l.seen = l.buf[l.start:l.end], l.end
			if l.skip {
				l.start = l.end
			} else if len(line) > l.max+1 { // one more might be a CR
				l.start, l.skip = l.end, true
				return line[:l.max], true, true
			}
			return nil, false, false
		}
		line = bytes.TrimSuffix(l.buf[l.start:l.seen+i], []byte("\r"))
		l.start = l.seen + i + 1
		l.seen = l.start
		switch {
		case l.skip:
			l.skip = false
		case len(line) > l.max:
			return line[:l.max], true, true
		default:
			line = bytes.TrimSpace(bytes.TrimPrefix(line, []byte("\ufeff")))
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
