package mcp

// The breaker: a pure state machine. It reads no clock, takes no lock, starts
// no goroutine and knows nothing of MCP; whoever owns one passes the time and
// holds a lock around each method. Instants are durations since the owner's
// base, so that only the monotonic clock counts.
//
// Open and half-open are one mechanism: the instant next, before which nobody
// is let through. "A probe is out" is a next in the future, "the slot is free"
// one in the past; there is no flag to forget.

import (
	"math"
	"strconv"
	"time"
)

// BreakerState is the state of a server's breaker.
type BreakerState int

const (
	BreakerClosed   BreakerState = iota // calls go through
	BreakerOpen                         // calls are refused
	BreakerHalfOpen                     // one probe may go, or is out
)

func (s BreakerState) String() string {
	switch s {
	case BreakerClosed:
		return "closed"
	case BreakerOpen:
		return "open"
	case BreakerHalfOpen:
		return "half_open"
	}
	return "BreakerState(" + strconv.Itoa(int(s)) + ")"
}

// MarshalText returns the text of [BreakerState.String].
func (s BreakerState) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// A verdict is what the breaker learns from a reach. The zero value is fault:
// leaving without a word, by a panic or runtime.Goexit, is one.
type verdict uint8

const (
	fault   verdict = iota // no answer, and the reason is the server's
	good                   // an answer, even one that says no
	neither                // no answer, and the reason is ours or the caller's
	verdicts
)

// A ticket is the right to reach the server once, and the only way to report a
// verdict.
type ticket struct {
	gen   uint64
	probe bool
}

// A breaker opens after limit consecutive faults, and lets one probe through
// once its window has passed.
type breaker struct {
	limit int           // consecutive faults that open it; none does if it is not positive
	reset time.Duration // the open window, before the draw
	// draw returns a number in [0, n), by which a window is lengthened. Nil
	// means windows of exactly reset.
	draw func(n int64) int64

	mode   BreakerState
	gen    uint64        // raised in two places only: on opening, and when a probe goes out
	faults int           // consecutive; kept while open, cleared by a good answer alone
	next   time.Duration // the earliest instant of a probe; no meaning when closed

	settled [verdicts]uint64 // tickets settled in time, by verdict
	late    uint64           // tickets of an older generation
}

// admit hands out a ticket, or reports that it does not. Bound is how long the
// reach may take: a probe that has not come back that long and a window after
// it left loses the slot to the next caller.
func (b *breaker) admit(now, bound time.Duration) (t ticket, ok bool) {
	if b.mode == BreakerClosed {
		return ticket{gen: b.gen}, true
	}
	if now < b.next {
		return ticket{}, false
	}
	b.mode = BreakerHalfOpen
	b.gen++
	b.next = plus(plus(now, bound), b.reset)
	return ticket{gen: b.gen, probe: true}, true
}

// settle takes the verdict of a ticket, and reports whether it came too late:
// since the ticket was handed out the breaker has opened, or another probe has
// gone. Then nothing changes, and so open is left by time alone.
func (b *breaker) settle(t ticket, v verdict, now time.Duration) (late bool) {
	if t.gen != b.gen {
		b.late++
		return true
	}
	b.settled[v]++
	switch v {
	case good:
		b.faults = 0
		b.mode = BreakerClosed
	case fault:
		b.faults++
		if b.limit > 0 && b.faults >= b.limit { // a failed probe too: the count was kept
			b.next = plus(now, b.window()) // first: the draw is somebody else's, and may panic
			b.mode = BreakerOpen
			b.gen++
		}
	case neither:
		if t.probe {
			b.next = now // gives the slot back
		}
	}
	return false
}

// window draws how long the breaker stays open: from [R, 1.1R], where R is
// reset. Thousands of replicas that one outage opened in the same second would
// otherwise all probe in the same second, window after window, and the one
// burst would undo the recovery that the other probes have found. Longer only,
// so that R stays a promise.
func (b *breaker) window() time.Duration {
	if b.draw == nil || b.reset <= 0 {
		return b.reset
	}
	return plus(b.reset, time.Duration(b.draw(int64(b.reset/10)+1)))
}

// state says what a caller would meet: half-open as soon as a probe may go,
// although nothing moves before one does.
func (b *breaker) state(now time.Duration) BreakerState {
	if b.mode == BreakerOpen && now >= b.next {
		return BreakerHalfOpen
	}
	return b.mode
}

// wait returns how long nobody is let through for certain: the rest of an open
// window. It is 0 while a probe is out, which may answer at any moment.
func (b *breaker) wait(now time.Duration) time.Duration {
	if b.mode != BreakerOpen {
		return 0
	}
	return max(0, b.next-now)
}

// plus adds two durations of which d is not negative, and stops at the largest.
func plus(t, d time.Duration) time.Duration {
	if t > math.MaxInt64-d {
		return math.MaxInt64
	}
	return t + d
}
