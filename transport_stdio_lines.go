package mcp

// What a child writes, cut into lines under a bound: stdout, whole messages
// for their callers; stderr, the last lines for whoever asks why it died.

import (
	"bytes"
	"strings"
	"sync"
)

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
