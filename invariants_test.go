package mcp

// The invariants of the policy, by number. 2 to 4 are in breaker_test.go; 24,
// which is about fleets, is elsewhere.

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// exact makes every draw 0: windows are exactly R, waits are none.
func exact(int64) int64 { return 0 }

// The reaches that the tests are made of.
var (
	errDown  = &TransportError{Reason: ReasonUnavailable, Sent: true}
	answers  = func(context.Context) error { return nil }
	faults   = func(context.Context) error { return errDown }
	hangs    = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	anyCall  = Operation{Name: "tools/call"}
	readOnly = Operation{Name: "tools/list", Repeatable: true}
)

func TestInvariant01OneProbePerWindow(t *testing.T) {
	const callers, windows = 10_000, 5
	synctest.Test(t, func(t *testing.T) {
		g := NewGuard(Config{BreakerFailures: 1}, &Options{Rand: exact})
		var reached atomic.Int64
		down := func(context.Context) error {
			reached.Add(1)
			time.Sleep(time.Second)
			return errDown
		}
		g.Do(t.Context(), anyCall, down)
		reached.Store(0)
		for range windows {
			time.Sleep(30 * time.Second)
			var wg sync.WaitGroup
			for range callers {
				wg.Go(func() { g.Do(t.Context(), anyCall, down) })
			}
			wg.Wait()
		}
		if got := reached.Load(); got != windows {
			t.Errorf("%d callers in %d windows reached the server %d times", callers, windows, got)
		}
		if h := g.Health(); h.Refused != windows*(callers-1) || h.Calls != windows+1 {
			t.Errorf("health %v", h)
		}
	})
}

func TestInvariant05NthFaultOpens(t *testing.T) {
	for _, n := range []int{1, 2, 5, 100} {
		synctest.Test(t, func(t *testing.T) {
			g := NewGuard(Config{BreakerFailures: n}, &Options{Rand: exact})
			for round, end := range []func(context.Context) error{answers, faults} {
				for range n - 1 {
					g.Do(t.Context(), anyCall, faults)
				}
				if h := g.Health(); h.State != BreakerClosed || h.ConsecutiveFailures != n-1 {
					t.Errorf("N=%d round %d: after N-1 faults: %v", n, round, h)
				}
				g.Do(t.Context(), anyCall, end)
			}
			if h := g.Health(); h.State != BreakerOpen || h.ConsecutiveFailures != n || h.Opened != 1 {
				t.Errorf("N=%d: after N faults: %v", n, h)
			}
		})
	}
}

// opened returns a guard whose breaker has just opened, and the events since.
func opened(t *testing.T, cfg Config) (*Guard, *[]BreakerState) {
	t.Helper()
	states := new([]BreakerState)
	cfg.BreakerFailures = 1
	g := NewGuard(cfg, &Options{Rand: exact, OnState: func(h Health) { *states = append(*states, h.State) }})
	g.Do(t.Context(), anyCall, faults)
	if h := g.Health(); h.State != BreakerOpen {
		t.Fatalf("not open: %v", h)
	}
	return g, states
}

func TestInvariant06ResetIsExact(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := opened(t, Config{BreakerReset: 30 * time.Second})
		time.Sleep(30*time.Second - 1)
		var refused *UnavailableError
		if err := g.Do(t.Context(), anyCall, answers); !errors.As(err, &refused) || refused.RetryAfter != 1 || refused.State != BreakerOpen {
			t.Errorf("at R - 1 ns: %v, want a refusal with 1 ns to go", err)
		}
		time.Sleep(time.Nanosecond)
		if err := g.Do(t.Context(), anyCall, answers); err != nil {
			t.Errorf("at R: %v", err)
		}
	})
}

func TestInvariant07CancelledProbeGivesTheSlotBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, states := opened(t, Config{})
		time.Sleep(30 * time.Second)
		out, most := 0, 0
		for range 1000 {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Millisecond, cancel)
			err := g.Do(ctx, anyCall, func(ctx context.Context) error {
				out++
				most = max(most, out)
				<-ctx.Done()
				out--
				return ctx.Err()
			})
			if !errors.Is(err, context.Canceled) || !errors.Is(err, ReasonCancelled) {
				t.Fatalf("a cancelled probe: %v", err)
			}
		}
		if most != 1 {
			t.Errorf("%d probes out at once", most)
		}
		if err := g.Do(t.Context(), anyCall, answers); err != nil {
			t.Error(err)
		}
		if want := []BreakerState{BreakerOpen, BreakerHalfOpen, BreakerClosed}; !equal(*states, want) {
			t.Errorf("events %v, want %v", *states, want)
		}
	})
}

func equal(a, b []BreakerState) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

func TestInvariant08PanicAndGoexitAreFaults(t *testing.T) {
	for name, end := range map[string]func(context.Context) error{
		"panic":  func(context.Context) error { panic("boom") },
		"goexit": func(context.Context) error { runtime.Goexit(); return nil },
	} {
		synctest.Test(t, func(t *testing.T) {
			g, _ := opened(t, Config{})
			for range 100 {
				time.Sleep(30 * time.Second)
				var value any
				var wg sync.WaitGroup
				wg.Go(func() {
					defer func() { value = recover() }()
					g.Do(t.Context(), anyCall, end)
				})
				wg.Wait()
				if want := map[string]any{"panic": "boom", "goexit": nil}[name]; value != want {
					t.Fatalf("%s: recovered %v, want %v", name, value, want)
				}
				if h := g.Health(); h.State != BreakerOpen || h.RetryAfter != 30*time.Second || h.ErrorType != "panic" {
					t.Fatalf("%s: %v", name, h)
				}
			}
		})
	}
}

func TestInvariant09HungProbeLosesItsLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := opened(t, Config{CallTimeout: 10 * time.Second, BreakerReset: 30 * time.Second})
		time.Sleep(30 * time.Second)
		hung, second := make(chan struct{}), make(chan struct{})
		var oldErr error
		var wg sync.WaitGroup
		wg.Go(func() {
			oldErr = g.Do(t.Context(), anyCall, func(context.Context) error { <-hung; return nil })
		})
		synctest.Wait()
		time.Sleep(40*time.Second - 1)
		var refused *UnavailableError
		if err := g.Do(t.Context(), anyCall, answers); !errors.As(err, &refused) || refused.State != BreakerHalfOpen {
			t.Errorf("at B + R - 1 ns: %v, want a refusal", err)
		}
		time.Sleep(time.Nanosecond)
		wg.Go(func() {
			g.Do(t.Context(), anyCall, func(context.Context) error { <-second; return errDown })
		})
		synctest.Wait()
		close(hung)
		synctest.Wait()
		if h := g.Health(); h.State != BreakerHalfOpen || h.Late != 1 || h.ConsecutiveFailures != 1 {
			t.Errorf("after the old answer: %v", h)
		}
		close(second)
		wg.Wait()
		if h := g.Health(); h.State != BreakerOpen || h.Late != 1 || oldErr != nil {
			t.Errorf("after the second probe: %v; the first got %v", h, oldErr)
		}
	})
}

func TestInvariant10LateFaultsDoNotExtend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		events := 0
		g := NewGuard(Config{BreakerFailures: 5, MaxInFlight: 100}, &Options{Rand: exact, OnState: func(Health) { events++ }})
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				g.Do(t.Context(), anyCall, func(context.Context) error {
					time.Sleep(time.Duration(i+1) * time.Millisecond)
					return errDown
				})
			})
		}
		time.Sleep(5 * time.Millisecond)
		synctest.Wait()
		if h := g.Health(); h.RetryAfter != 30*time.Second {
			t.Errorf("after the fifth fault: %v", h)
		}
		wg.Wait()
		if h := g.Health(); h.Late != 95 || h.Faults != 5 || h.Opened != 1 || h.RetryAfter != 30*time.Second-95*time.Millisecond || events != 1 {
			t.Errorf("after the last: %v, %d events", h, events)
		}
	})
}

func TestInvariant11OldSuccessDoesNotClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGuard(Config{BreakerFailures: 1}, &Options{Rand: exact})
		old, probe := make(chan struct{}), make(chan struct{})
		var wg sync.WaitGroup
		var oldErr error
		wg.Go(func() { oldErr = g.Do(t.Context(), anyCall, func(context.Context) error { <-old; return nil }) })
		synctest.Wait()
		g.Do(t.Context(), anyCall, faults)
		time.Sleep(30 * time.Second)
		wg.Go(func() { g.Do(t.Context(), anyCall, func(context.Context) error { <-probe; return nil }) })
		synctest.Wait()
		close(old)
		synctest.Wait()
		if h := g.Health(); h.State != BreakerHalfOpen || h.Late != 1 || h.Outcome != OutcomeFault {
			t.Errorf("after the old success: %v", h)
		}
		if oldErr != nil {
			t.Errorf("the old call got %v, want its own answer", oldErr)
		}
		close(probe)
		wg.Wait()
		if h := g.Health(); h.State != BreakerClosed {
			t.Errorf("after the probe: %v", h)
		}
	})
}

func TestInvariant12CancelsNeverCount(t *testing.T) {
	// Any interleaving of eight callers: a thousand cancels and some answers
	// from each of a thousand starts.
	cancelled := classify(&TransportError{Reason: ReasonCancelled, Err: context.Canceled}, OutcomeCancelled).verdict
	for seed := range uint64(1000) {
		r := rand.New(rand.NewPCG(seed, 12))
		b := breaker{limit: 1, reset: 30}
		var out []ticket
		for cancels := 0; cancels < 1000; {
			if len(out) < 8 && r.IntN(2) == 0 {
				tk, ok := b.admit(0, 10)
				if !ok {
					t.Fatalf("seed %d: refused after %d cancels", seed, cancels)
				}
				out = append(out, tk)
			} else if i := len(out); i > 0 {
				i = r.IntN(i)
				v := good
				if r.IntN(10) > 0 {
					v = cancelled
					cancels++
				}
				b.settle(out[i], v, 0)
				out[i] = out[len(out)-1]
				out = out[:len(out)-1]
			}
			if b.faults != 0 || b.mode != BreakerClosed {
				t.Fatalf("seed %d: %d faults, %v", seed, b.faults, b.mode)
			}
		}
	}
	// The same through the whole policy, with goroutines.
	synctest.Test(t, func(t *testing.T) {
		g := NewGuard(Config{BreakerFailures: 1, MaxInFlight: -1}, nil)
		var wg sync.WaitGroup
		for i := range 1000 {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Duration(1+rand.IntN(10))*time.Millisecond, cancel)
			wg.Go(func() { g.Do(ctx, anyCall, hangs) })
			if i%10 == 0 {
				wg.Go(func() { g.Do(t.Context(), anyCall, answers) })
			}
		}
		wg.Wait()
		if h := g.Health(); h.State != BreakerClosed || h.Faults != 0 || h.Calls != 1100 {
			t.Errorf("after 1000 cancels: %v", h)
		}
	})
}

// bounded is a session's way to hang: it keeps the ceiling itself.
func bounded(ceiling time.Duration) reachFunc {
	return func(ctx context.Context) error {
		select {
		case <-ctx.Done():
			return &TransportError{Reason: ReasonCancelled, Sent: true, Err: ctx.Err()}
		case <-time.After(ceiling):
			return &TransportError{Reason: ReasonTimeout, Sent: true}
		}
	}
}

func TestInvariant13WhoseTime(t *testing.T) {
	const ceiling = 10 * time.Second
	for _, tt := range []struct {
		run    time.Duration
		class  Outcome
		faults uint64
		times  int
	}{
		{ceiling - 1, OutcomeBudget, 0, 1},
		{ceiling, OutcomeBudget, 0, 1000},
		{ceiling + 1, OutcomeTimeout, 1, 1},
	} {
		for _, how := range []string{"context", "options", "session", "session and options"} {
			synctest.Test(t, func(t *testing.T) {
				for range tt.times {
					ctx, o := t.Context(), &Options{}
					switch how {
					case "context", "session":
						c, cancel := context.WithTimeout(ctx, tt.run)
						defer cancel()
						ctx = c
					default:
						o.Deadline = time.Now().Add(tt.run)
					}
					g := NewGuard(Config{CallTimeout: ceiling}, o)
					var self time.Duration
					var w reacher = reachFunc(hangs)
					if how == "session" || how == "session and options" {
						self, w = time.Second, bounded(ceiling)
					}
					start := time.Now()
					err := g.do(ctx, anyCall, self, w)
					h := g.Health()
					if h.Outcome != tt.class || h.Faults != tt.faults {
						t.Fatalf("%s, run %v: %v", how, tt.run, h)
					}
					var budget *BudgetError
					if isBudget := errors.As(err, &budget); isBudget != (tt.class == OutcomeBudget) || !isBudget && !errors.Is(err, ReasonTimeout) {
						t.Fatalf("%s, run %v: %v", how, tt.run, err)
					}
					if budget != nil && (budget.Breached != "run_seconds" || !budget.Sent || !errors.Is(err, context.DeadlineExceeded)) {
						t.Fatalf("%s, run %v: %+v", how, tt.run, budget)
					}
					if budget == nil && errors.Is(err, context.DeadlineExceeded) {
						t.Fatalf("%s: our ceiling looks like the caller's deadline: %v", how, err)
					}
					if got := time.Since(start); got != min(tt.run, ceiling) {
						t.Fatalf("%s, run %v: took %v", how, tt.run, got)
					}
				}
			})
		}
	}
}

func TestInvariant14NothingLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := opened(t, Config{})
		time.Sleep(30 * time.Second)
		before := g.Health()
		expired, cancel := context.WithDeadline(t.Context(), time.Now())
		defer cancel()
		gone, stop := context.WithCancel(t.Context())
		stop()
		for range 2 {
			var budget *BudgetError
			err := g.Do(expired, anyCall, func(context.Context) error { t.Error("reached"); return nil })
			if !errors.As(err, &budget) || budget.Breached != "run_seconds" || budget.Attempts != 0 || budget.Sent || budget.GaveUp != "deadline" {
				t.Errorf("an expired run: %+v", err)
			}
			var te *TransportError
			err = g.Do(gone, anyCall, func(context.Context) error { t.Error("reached"); return nil })
			if !errors.As(err, &te) || te.Reason != ReasonCancelled || te.Sent || te.GaveUp != "cancelled" || !errors.Is(err, context.Canceled) {
				t.Errorf("a cancelled caller: %+v", err)
			}
		}
		if after := g.Health(); after != before {
			t.Errorf("health moved from %v to %v", before, after)
		}
		g.opt.Deadline = time.Now()
		if err := g.Do(t.Context(), anyCall, answers); !errors.As(err, new(*BudgetError)) {
			t.Errorf("Options.Deadline has passed: %v", err)
		}
		g.opt.Deadline = time.Time{}
		if err := g.Do(t.Context(), anyCall, answers); err != nil { // the slot is still free
			t.Error(err)
		}
	})
}

func TestInvariant15Ceiling(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 15))
	bounds := []time.Duration{-1, 0, 1, time.Millisecond, time.Second, time.Hour, math.MaxInt64}
	for _, base := range bounds {
		for _, limit := range bounds {
			prev := time.Duration(0)
			for n := 1; n <= 10_000; n++ {
				c := ceiling(base, limit, n)
				if c < prev || c > max(0, limit) {
					t.Fatalf("ceiling(%d, %d, %d) = %d after %d", base, limit, n, c, prev)
				}
				prev = c
				if d := jitter(c, r.Int64N); d < 0 || d > c {
					t.Fatalf("jitter(%d) = %d", c, d)
				}
			}
		}
	}
}

func TestInvariant16FullJitterIsUniform(t *testing.T) {
	const draws, c = 100_000, 1600 * time.Millisecond
	r := rand.New(rand.NewPCG(1, 16))
	var sum float64
	var deciles [10]int
	for range draws {
		d := jitter(ceiling(200*time.Millisecond, 20*time.Second, 4), r.Int64N)
		sum += d.Seconds()
		deciles[min(9, int(10*d/c))]++
	}
	if mean := sum / draws; math.Abs(mean-0.8) > 0.016 {
		t.Errorf("mean %v s, want 0.8 s within 2 %%", mean)
	}
	for _, n := range deciles {
		if n < draws/10*9/10 || n > draws/10*11/10 {
			t.Errorf("deciles %v, want %d each within 10 %%", deciles, draws/10)
		}
	}
}

func TestInvariant17HopelessWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGuard(Config{Name: "s", Retry: RetryConfig{MaxAttempts: 3, BaseDelay: time.Minute, MaxDelay: time.Minute}},
			&Options{Rand: func(n int64) int64 { return n - 1 }})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		start := time.Now()
		err := g.Do(ctx, readOnly, faults)
		var te *TransportError
		if !errors.As(err, &te) || te.Reason != ReasonUnavailable || te.GaveUp != "deadline" || te.Attempts != 1 {
			t.Errorf("with 5 s left and a wait of 60 s: %+v, want the fault", err)
		}
		if got := time.Since(start); got != 0 {
			t.Errorf("took %v, want no time", got)
		}
	})
}

func TestInvariant18RetryAfter(t *testing.T) {
	const s = time.Second
	for _, tt := range []struct {
		after, left time.Duration
		waited      time.Duration
		gaveUp      string // empty: tried again
	}{
		{0, 0, 50 * time.Millisecond, ""}, // the jitter alone
		{1 * s, 0, s + 50*time.Millisecond, ""},
		{5 * s, 0, 5*s + 50*time.Millisecond, ""},
		{60 * s, 0, 60*s + 50*time.Millisecond, ""},
		{60*s + 1, 0, 0, "exhausted"},
		{3600 * s, 0, 0, "exhausted"},
		{math.MaxInt64, 0, 0, "exhausted"},
		{-1, 0, 50 * time.Millisecond, ""},
		{5 * s, 5 * s, 0, "deadline"},
		{5 * s, 6 * s, 5*s + 50*time.Millisecond, ""},
	} {
		for _, status := range []int{408, 429, 503, 502} {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				if tt.left > 0 {
					c, cancel := context.WithTimeout(ctx, tt.left)
					defer cancel()
					ctx = c
				}
				g := NewGuard(Config{Retry: RetryConfig{MaxAttempts: 2, BaseDelay: 50 * time.Millisecond}},
					&Options{Rand: func(n int64) int64 { return n - 1 }})
				var at []time.Duration
				start := time.Now()
				err := g.Do(ctx, readOnly, func(context.Context) error {
					at = append(at, time.Since(start))
					if len(at) > 1 {
						return nil
					}
					return &TransportError{Reason: ReasonUnavailable, Status: status, RetryAfter: tt.after, Sent: status != 429}
				})
				waited, gaveUp := tt.waited, tt.gaveUp
				if status == 502 { // says nothing about when
					waited, gaveUp = 50*time.Millisecond, ""
				}
				if gaveUp == "" {
					if err != nil || len(at) != 2 || at[1] != waited {
						t.Errorf("%d, Retry-After %v, left %v: reaches at %v, %v, want a second at %v", status, tt.after, tt.left, at, err, waited)
					}
					return
				}
				var te *TransportError
				if !errors.As(err, &te) || te.GaveUp != gaveUp || te.RetryAfter != tt.after || len(at) != 1 || time.Since(start) != 0 {
					t.Errorf("%d, Retry-After %v, left %v: %+v after %v, want %s at once", status, tt.after, tt.left, err, time.Since(start), gaveUp)
				}
			})
		}
	}
}

func TestInvariant20TriesAddUp(t *testing.T) {
	for _, tt := range []struct{ tries, attempts, reaches, total int }{
		{3, 3, 1, 3}, {0, 3, 3, 3}, {1, 3, 3, 3}, {2, 3, 2, 4}, {3, 4, 2, 6}, {3, 1, 1, 3},
	} {
		synctest.Test(t, func(t *testing.T) {
			g := NewGuard(Config{Retry: RetryConfig{MaxAttempts: tt.attempts}, BreakerFailures: 100}, nil)
			reaches := 0
			err := g.Do(t.Context(), anyCall, func(context.Context) error {
				reaches++
				return &TransportError{Reason: ReasonUnavailable, Tries: tt.tries}
			})
			var te *TransportError
			if !errors.As(err, &te) || te.Attempts != tt.total || te.GaveUp != "exhausted" || reaches != tt.reaches {
				t.Errorf("tries %d, attempts %d: %d reaches, %+v", tt.tries, tt.attempts, reaches, err)
			}
			if h := g.Health(); h.Faults != uint64(tt.reaches) {
				t.Errorf("tries %d, attempts %d: %d verdicts, want one for each reach", tt.tries, tt.attempts, h.Faults)
			}
		})
	}
}

func TestInvariant21BreakerOpensInTheLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGuard(Config{Name: "s", BreakerFailures: 2, Retry: RetryConfig{MaxAttempts: 3, BaseDelay: time.Second}},
			&Options{Rand: func(n int64) int64 { return n - 1 }})
		reaches := 0
		start := time.Now()
		err := g.Do(t.Context(), readOnly, func(context.Context) error { reaches++; return errDown })
		var te *TransportError
		if !errors.As(err, &te) || te.Reason != ReasonUnavailable || te.GaveUp != "breaker" || te.Attempts != 2 || reaches != 2 {
			t.Errorf("%d reaches, %+v", reaches, err)
		}
		if got := time.Since(start); got != time.Second {
			t.Errorf("took %v, want the wait between the two and none after", got)
		}
	})
	// It opens while we wait, by somebody else's faults: the last fault, too.
	synctest.Test(t, func(t *testing.T) {
		g := NewGuard(Config{BreakerFailures: 2, Retry: RetryConfig{MaxAttempts: 3, BaseDelay: time.Second}},
			&Options{Rand: func(n int64) int64 { return n - 1 }})
		time.AfterFunc(time.Millisecond, func() { g.Do(context.Background(), anyCall, faults) })
		err := g.Do(t.Context(), readOnly, func(context.Context) error { return &TransportError{Reason: ReasonDisconnected, Sent: true} })
		var te *TransportError
		if !errors.As(err, &te) || te.Reason != ReasonDisconnected || te.GaveUp != "breaker" || te.Attempts != 1 {
			t.Errorf("refused after the wait: %+v", err)
		}
	})
	// Three attempts of one operation are three faults.
	synctest.Test(t, func(t *testing.T) {
		g := NewGuard(Config{Retry: RetryConfig{MaxAttempts: 3}}, nil)
		g.Do(t.Context(), readOnly, faults)
		if h := g.Health(); h.ConsecutiveFailures != 3 || h.Retries != 2 || h.Retried != 2 || h.Calls != 3 {
			t.Errorf("after one exhausted operation: %v", h)
		}
	})
}

func TestInvariant22EachAdmissionIsSettledOnce(t *testing.T) {
	const goroutines, each = 50, 2000
	synctest.Test(t, func(t *testing.T) {
		g := NewGuard(Config{BreakerFailures: 10, BreakerReset: 100 * time.Microsecond, CallTimeout: time.Millisecond, Retry: RetryConfig{MaxAttempts: 2}}, nil)
		var reached atomic.Uint64
		endings := []func(context.Context) error{answers, answers, answers, faults, hangs,
			func(context.Context) error { panic("boom") },
			func(context.Context) error { runtime.Goexit(); return nil },
			func(context.Context) error { return &RPCError{Code: -32602} },
			func(context.Context) error { time.Sleep(5 * time.Millisecond); return nil }, // deaf to its ceiling
		}
		var wg sync.WaitGroup
		for i := range goroutines {
			r := rand.New(rand.NewPCG(uint64(i), 22))
			wg.Go(func() {
				for range each {
					end := endings[r.IntN(len(endings))]
					ctx, cancel := t.Context(), context.CancelFunc(func() {})
					if r.IntN(5) == 0 {
						ctx, cancel = context.WithTimeout(ctx, time.Duration(r.IntN(2000))*time.Microsecond)
					}
					done := make(chan struct{})
					go func() { // for Goexit; ended by its own call, awaited below
						defer close(done)
						defer func() { recover() }()
						g.Do(ctx, readOnly, func(ctx context.Context) error {
							reached.Add(1)
							return end(ctx)
						})
					}()
					<-done
					cancel()
					time.Sleep(time.Duration(r.IntN(3)) * time.Millisecond / 2)
				}
			})
		}
		wg.Wait()
		s := g.breaker.settled
		sum := s[good] + s[fault] + s[neither] + g.breaker.late
		h := g.Health()
		if sum != reached.Load() || h.Calls != reached.Load() || h.Faults != s[fault] || h.Late != g.breaker.late {
			t.Errorf("%d settled (%v and %d late), %d reached, %v", sum, s, g.breaker.late, reached.Load(), h)
		}
		t.Logf("good %d, fault %d, neither %d, late %d, refused %d, opened %d", s[good], s[fault], s[neither], h.Late, h.Refused, h.Opened)
		if len(g.slots) != 0 {
			t.Errorf("%d slots are still taken", len(g.slots))
		}
	})
}

func TestInvariant23EventsAreAChain(t *testing.T) {
	const goroutines, transitions = 16, 1000
	synctest.Test(t, func(t *testing.T) {
		var g *Guard
		var states []BreakerState // of the hook alone: it is never called twice at once
		var running, told atomic.Int32
		last := uint64(0)
		g = NewGuard(Config{BreakerFailures: 1, BreakerReset: 1}, &Options{Rand: exact, OnState: func(h Health) {
			if running.Add(1) != 1 {
				t.Error("two hooks at once")
			}
			defer running.Add(-1)
			states = append(states, h.State)
			told.Add(1)
			if h.Opened < last {
				t.Errorf("opened %d after %d", h.Opened, last)
			}
			last = h.Opened
			g.Health()
			g.Do(context.Background(), anyCall, faults) // comes back in here
			if len(states)%7 == 0 {
				panic("a hook that fails")
			}
		}})
		var wg sync.WaitGroup
		for i := range goroutines {
			r := rand.New(rand.NewPCG(uint64(i), 23))
			wg.Go(func() {
				for told.Load() < goroutines*transitions {
					func() {
						defer func() { recover() }()
						g.Do(t.Context(), anyCall, []func(context.Context) error{answers, faults}[r.IntN(2)])
					}()
					time.Sleep(time.Duration(r.IntN(3)))
				}
			})
		}
		wg.Wait()
		g.deliver() // what a failing hook left behind
		from := BreakerClosed
		for i, to := range states {
			ok := map[[2]BreakerState]bool{
				{BreakerClosed, BreakerOpen}: true, {BreakerOpen, BreakerHalfOpen}: true,
				{BreakerHalfOpen, BreakerOpen}: true, {BreakerHalfOpen, BreakerClosed}: true,
			}[[2]BreakerState{from, to}]
			if !ok {
				t.Fatalf("event %d: from %v to %v", i, from, to)
			}
			from = to
		}
		if h := g.Health(); len(states) < goroutines*transitions || len(g.events) != 0 || h.Opened != last {
			t.Errorf("%d events told, %d not: %v", len(states), len(g.events), h)
		}
		t.Logf("%d events", len(states))
	})
}
