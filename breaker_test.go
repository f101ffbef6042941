package mcp

import (
	"encoding/json"
	"math"
	"testing"
	"time"
)

func TestBreakerTransitions(t *testing.T) {
	const b, r = 10, 30 // bound and reset
	type step struct {
		at     time.Duration
		do     string // admit, refused, good, fault, neither, late: the last four settle ticket n
		n      int
		state  BreakerState
		faults int
		wait   time.Duration
	}
	for _, tt := range []struct {
		name  string
		limit int
		steps []step
	}{
		{"T1 T7 T8 T13: closed", 3, []step{
			{0, "admit", 0, BreakerClosed, 0, 0}, {1, "fault", 0, BreakerClosed, 1, 0},
			{1, "admit", 1, BreakerClosed, 1, 0}, {2, "neither", 1, BreakerClosed, 1, 0},
			{2, "admit", 2, BreakerClosed, 1, 0}, {3, "good", 2, BreakerClosed, 0, 0},
		}},
		{"T9 T2 T3 T10: opens, probes, closes", 2, []step{
			{0, "admit", 0, BreakerClosed, 0, 0}, {1, "fault", 0, BreakerClosed, 1, 0},
			{1, "admit", 1, BreakerClosed, 1, 0}, {2, "fault", 1, BreakerOpen, 2, r},
			{31, "refused", 0, BreakerOpen, 2, 1}, {32, "admit", 2, BreakerHalfOpen, 2, 0},
			{33, "good", 2, BreakerClosed, 0, 0},
		}},
		{"T4 T11: a probe is out, and fails", 1, []step{
			{0, "admit", 0, BreakerClosed, 0, 0}, {0, "fault", 0, BreakerOpen, 1, r},
			{30, "admit", 1, BreakerHalfOpen, 1, 0}, {39, "refused", 0, BreakerHalfOpen, 1, 0},
			{40, "fault", 1, BreakerOpen, 2, r}, {69, "refused", 0, BreakerOpen, 2, 1}, {70, "admit", 2, BreakerHalfOpen, 2, 0},
		}},
		{"T12: a probe is given back", 1, []step{
			{0, "admit", 0, BreakerClosed, 0, 0}, {0, "fault", 0, BreakerOpen, 1, r},
			{30, "admit", 1, BreakerHalfOpen, 1, 0}, {31, "neither", 1, BreakerHalfOpen, 1, 0},
			{31, "admit", 2, BreakerHalfOpen, 1, 0}, {31, "refused", 0, BreakerHalfOpen, 1, 0},
		}},
		{"T5 T6: a probe is lost", 1, []step{
			{0, "admit", 0, BreakerClosed, 0, 0}, {0, "fault", 0, BreakerOpen, 1, r},
			{30, "admit", 1, BreakerHalfOpen, 1, 0}, {30 + b + r - 1, "refused", 0, BreakerHalfOpen, 1, 0},
			{30 + b + r, "admit", 2, BreakerHalfOpen, 1, 0}, {71, "late", 1, BreakerHalfOpen, 1, 0},
			{72, "fault", 2, BreakerOpen, 2, r},
		}},
		{"no breaker", -1, []step{
			{0, "admit", 0, BreakerClosed, 0, 0}, {0, "fault", 0, BreakerClosed, 1, 0},
			{0, "admit", 1, BreakerClosed, 1, 0}, {0, "fault", 1, BreakerClosed, 2, 0},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k := breaker{limit: tt.limit, reset: r}
			tickets := map[int]ticket{}
			for i, s := range tt.steps {
				switch s.do {
				case "admit", "refused":
					tk, ok := k.admit(s.at, b)
					if ok != (s.do == "admit") {
						t.Fatalf("step %d: admit(%d) = %v, want %s", i, s.at, ok, s.do)
					}
					if ok {
						tickets[s.n] = tk
					}
				default:
					v := map[string]verdict{"good": good, "fault": fault, "neither": neither, "late": good}[s.do]
					if late := k.settle(tickets[s.n], v, s.at); late != (s.do == "late") {
						t.Fatalf("step %d: settle late = %v, want %s", i, late, s.do)
					}
				}
				if k.state(s.at) != s.state || k.faults != s.faults || k.wait(s.at) != s.wait {
					t.Fatalf("step %d: state %v faults %d wait %d, want %v %d %d",
						i, k.state(s.at), k.faults, k.wait(s.at), s.state, s.faults, s.wait)
				}
			}
		})
	}
}

// Reading never changes anything: the state is half-open when the window has
// passed, and nothing moved.
func TestBreakerStateIsPure(t *testing.T) {
	b := breaker{limit: 1, reset: 30}
	tk, _ := b.admit(0, 10)
	b.settle(tk, fault, 0)
	before := b
	if got := b.state(30); got != BreakerHalfOpen {
		t.Errorf("state(30) = %v, want half_open", got)
	}
	if b.mode != before.mode || b.gen != before.gen || b.next != before.next {
		t.Errorf("state changed the breaker")
	}
}

// A ticket that is settled without a verdict is a fault.
func TestBreakerSilence(t *testing.T) {
	var silence verdict
	b := breaker{limit: 1, reset: 30}
	tk, _ := b.admit(0, 10)
	if b.settle(tk, silence, 0); b.mode != BreakerOpen {
		t.Errorf("after silence the breaker is %v, want open", b.mode)
	}
}

func TestBreakerWindow(t *testing.T) {
	for _, tt := range []struct {
		reset    time.Duration
		draw     func(int64) int64
		min, max time.Duration
	}{
		{30 * time.Second, nil, 30 * time.Second, 30 * time.Second},
		{30 * time.Second, func(int64) int64 { return 0 }, 30 * time.Second, 30 * time.Second},
		{30 * time.Second, func(n int64) int64 { return n - 1 }, 33 * time.Second, 33 * time.Second},
		{5, func(n int64) int64 { return n - 1 }, 5, 5},
		{0, func(n int64) int64 { return n - 1 }, 0, 0},
		{math.MaxInt64, func(n int64) int64 { return n - 1 }, math.MaxInt64, math.MaxInt64},
	} {
		b := breaker{reset: tt.reset, draw: tt.draw}
		if got := b.window(); got < tt.min || got > tt.max {
			t.Errorf("window of %v = %v, want %v to %v", tt.reset, got, tt.min, tt.max)
		}
	}
}

func TestBreakerStateText(t *testing.T) {
	b, err := json.Marshal([]BreakerState{BreakerClosed, BreakerOpen, BreakerHalfOpen, 7})
	if got, want := string(b), `["closed","open","half_open","BreakerState(7)"]`; got != want || err != nil {
		t.Errorf("Marshal = %s, %v, want %s", got, err, want)
	}
}

// reference is the breaker told once more, without generations: a ticket is out
// of date as soon as the breaker opens or a probe goes out, so these events void
// all tickets. The slot of the half-open state has an owner.
type reference struct {
	limit       int
	bound, wait time.Duration
	state       BreakerState
	faults      int
	until       time.Duration // end of the open window, or of the owner's lease
	owner       int           // the caller whose probe is out, or -1
	valid       [3]bool       // by caller
}

func (m *reference) admit(i int, now time.Duration) bool {
	if m.state == BreakerOpen && now < m.until || m.state == BreakerHalfOpen && m.owner >= 0 && now < m.until {
		return false
	}
	if m.state != BreakerClosed {
		m.state, m.owner, m.until, m.valid = BreakerHalfOpen, i, now+m.bound+m.wait, [3]bool{}
	}
	m.valid[i] = true
	return true
}

func (m *reference) settle(i int, v verdict, now time.Duration) (late bool) {
	valid := m.valid[i]
	m.valid[i] = false
	switch {
	case !valid:
		return true
	case v == good:
		m.state, m.faults, m.owner = BreakerClosed, 0, -1
	case v == neither:
		m.owner = -1
	case m.state == BreakerHalfOpen, m.faults+1 >= m.limit:
		m.state, m.until, m.owner, m.valid = BreakerOpen, now+m.wait, -1, [3]bool{}
		fallthrough
	default:
		m.faults++
	}
	return false
}

// world is a breaker, the reference, and three callers.
type world struct {
	now  time.Duration
	mode BreakerState
	gen  uint64
	nfs  int
	next time.Duration
	ref  reference
	out  [3]bool
	tk   [3]ticket
}

func (w *world) breaker() breaker {
	return breaker{limit: w.ref.limit, reset: w.ref.wait, mode: w.mode, gen: w.gen, faults: w.nfs, next: w.next}
}

func (w *world) keep(b *breaker) { w.mode, w.gen, w.nfs, w.next = b.mode, b.gen, b.faults, b.next }

// Invariants 2, 3 and 4, and agreement with the reference, in every history of
// three callers and a clock. A world that was met before with as many events to
// come is not walked again.
func TestInvariant02to04EveryHistory(t *testing.T) {
	for _, c := range []struct {
		limit        int
		reset, bound time.Duration
		depth        int
	}{{1, 1, 1, 16}, {2, 1, 1, 16}, {2, 2, 1, 18}, {3, 2, 2, 20}} {
		seen := map[world]int{}
		steps := 0
		var walk func(w world, left int)
		walk = func(w world, left int) {
			steps++
			// 2: from every world a wait of R + B admits someone.
			if b := w.breaker(); true {
				if _, ok := b.admit(w.now+c.reset+c.bound, c.bound); !ok {
					t.Fatalf("stuck: %+v", w)
				}
			}
			probes := 0
			for i := range w.out {
				if w.out[i] && w.tk[i].probe && w.tk[i].gen == w.gen {
					probes++
				}
			}
			b := w.breaker()
			state := w.ref.state
			if state == BreakerOpen && w.now >= w.ref.until {
				state = BreakerHalfOpen
			}
			if probes > 1 || b.state(w.now) != state || w.nfs != w.ref.faults {
				t.Fatalf("%d probes, state %v, %d faults: %+v", probes, b.state(w.now), w.nfs, w)
			}
			if left == 0 || seen[w] >= left {
				return
			}
			seen[w] = left

			tick := w
			tick.now++
			walk(tick, left-1)
			for i := range w.out {
				if !w.out[i] {
					n := w
					b := n.breaker()
					tk, ok := b.admit(n.now, c.bound)
					if want := n.ref.admit(i, n.now); ok != want {
						t.Fatalf("caller %d: admitted %v, want %v: %+v", i, ok, want, w)
					}
					n.keep(&b)
					if n.out[i] = ok; ok {
						n.tk[i] = tk
					}
					walk(n, left-1)
					continue
				}
				for v := range verdicts {
					n := w
					b := n.breaker()
					late := b.settle(n.tk[i], v, n.now)
					if want := n.ref.settle(i, v, n.now); late != want {
						t.Fatalf("caller %d, verdict %d: late %v, want %v: %+v", i, v, late, want, w)
					}
					n.keep(&b)
					moved := n.mode != w.mode || n.gen != w.gen || n.nfs != w.nfs || n.next != w.next
					// 3: a ticket of an older generation changes nothing.
					// 4: open is left only by time.
					if moved && (w.tk[i].gen != w.gen || w.mode == BreakerOpen) {
						t.Fatalf("caller %d, verdict %d moved the breaker: %+v", i, v, w)
					}
					if b.settled[v]+b.late != 1 {
						t.Fatalf("caller %d, verdict %d is not counted once: %+v", i, v, w)
					}
					n.out[i], n.tk[i] = false, ticket{}
					walk(n, left-1)
				}
			}
		}
		walk(world{ref: reference{limit: c.limit, bound: c.bound, wait: c.reset, owner: -1}}, c.depth)
		t.Logf("limit %d, reset %d, bound %d: every history to depth %d, %d steps, %d worlds", c.limit, c.reset, c.bound, c.depth, steps, len(seen))
	}
}

func TestBreakerAllocs(t *testing.T) {
	b := breaker{limit: 5, reset: time.Second}
	if n := testing.AllocsPerRun(1000, func() {
		tk, _ := b.admit(1, 1)
		b.settle(tk, good, 2)
	}); n != 0 {
		t.Errorf("admit and settle: %v allocations, want 0", n)
	}
}
