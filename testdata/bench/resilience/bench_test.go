// Package resiliencebench measures what a policy costs around a call that
// answers at once, ours beside those of others, in one run.
package resiliencebench

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/avast/retry-go/v4"
	"github.com/cenkalti/backoff/v5"
	"github.com/failsafe-go/failsafe-go"
	"github.com/failsafe-go/failsafe-go/circuitbreaker"
	"github.com/failsafe-go/failsafe-go/retrypolicy"
	"github.com/failsafe-go/failsafe-go/timeout"
	"github.com/sony/gobreaker/v2"

	"resilient/mcp"
)

var (
	errFault = errors.New("fault")
	sink     int
)

//go:noinline
func answer() (int, error) { return 42, nil }

func answers(context.Context) error {
	v, err := answer()
	sink = v
	return err
}

// run measures f by one goroutine, and by as many as there are cores.
func run(b *testing.B, f func() error) {
	b.Run("one", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := f(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("contended", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				f()
			}
		})
	})
}

// refused turns a refusal, which is what is measured, into success.
func refused(err error) error {
	if err == nil {
		return errors.New("not refused")
	}
	return nil
}

func withCancel(b *testing.B) context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	b.Cleanup(cancel)
	return ctx
}

// ---- the floor

func BenchmarkFloor_DirectCall(b *testing.B) { run(b, func() error { return answers(nil) }) }

func BenchmarkFloor_WithTimeoutCause(b *testing.B) {
	p := withCancel(b)
	run(b, func() error {
		ctx, cancel := context.WithTimeoutCause(p, 10*time.Second, errFault)
		defer cancel()
		return answers(ctx)
	})
}

func BenchmarkFloor_TwoMutexPairs(b *testing.B) {
	var mu sync.Mutex
	n := 0
	run(b, func() error {
		mu.Lock()
		n++
		mu.Unlock()
		mu.Lock()
		n--
		mu.Unlock()
		return nil
	})
}

func BenchmarkFloor_TwoClockReads(b *testing.B) {
	base := time.Now()
	run(b, func() error {
		if time.Since(base) < 0 || time.Since(base) < 0 {
			return errFault
		}
		return nil
	})
}

// ---- ours

var op = mcp.Operation{Name: "tools/call"}

func config() mcp.Config {
	return mcp.Config{Name: "s", CallTimeout: 10 * time.Second, Retry: mcp.RetryConfig{MaxAttempts: 3}}
}

// Slots, breaker, ceiling, retry, latency, health.
func BenchmarkOurs_Guard(b *testing.B) {
	g, ctx := mcp.NewGuard(config(), nil), withCancel(b)
	run(b, func() error { return g.Do(ctx, op, answers) })
}

func BenchmarkOurs_Guard_RunBinds(b *testing.B) {
	cfg := config()
	cfg.CallTimeout = 2 * time.Hour
	g := mcp.NewGuard(cfg, nil)
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	run(b, func() error { return g.Do(ctx, op, answers) })
}

func BenchmarkOurs_Guard_NoCeiling(b *testing.B) {
	g, ctx, op := mcp.NewGuard(config(), nil), withCancel(b), op
	op.Timeout = -1
	run(b, func() error { return g.Do(ctx, op, answers) })
}

// A session under the policy, which calls a tool.
func BenchmarkOurs_ResilientSession(b *testing.B) {
	s, ctx := mcp.NewResilientSession(session{}, config(), nil), withCancel(b)
	call := &mcp.Call{Tool: "echo"}
	run(b, func() error { _, err := s.CallTool(ctx, call); return err })
}

func BenchmarkOurs_Open_Refuse(b *testing.B) {
	cfg := config()
	cfg.BreakerFailures, cfg.BreakerReset = 1, time.Hour
	g, ctx := mcp.NewGuard(cfg, nil), withCancel(b)
	g.Do(ctx, op, func(context.Context) error { return errFault })
	run(b, func() error { return refused(g.Do(ctx, op, answers)) })
}

type session struct{ mcp.Session }

var result = &mcp.Result{}

func (session) CallTool(ctx context.Context, _ *mcp.Call) (*mcp.Result, error) {
	return result, answers(ctx)
}

// ---- others

func BenchmarkGobreaker(b *testing.B) {
	cb := gobreaker.NewCircuitBreaker[int](gobreaker.Settings{Name: "b"})
	run(b, func() error { _, err := cb.Execute(answer); return err })
}

func BenchmarkGobreaker_Open_Refuse(b *testing.B) {
	cb := gobreaker.NewCircuitBreaker[int](gobreaker.Settings{Timeout: time.Hour,
		ReadyToTrip: func(gobreaker.Counts) bool { return true }})
	cb.Execute(func() (int, error) { return 0, errFault })
	run(b, func() error { _, err := cb.Execute(answer); return refused(err) })
}

// gobreaker has no ceiling; this is what a user would add.
func BenchmarkGobreaker_WithTimeout(b *testing.B) {
	cb := gobreaker.NewCircuitBreaker[int](gobreaker.Settings{Name: "b"})
	p := withCancel(b)
	run(b, func() error {
		_, err := cb.Execute(func() (int, error) {
			ctx, cancel := context.WithTimeout(p, 10*time.Second)
			defer cancel()
			return 0, answers(ctx)
		})
		return err
	})
}

func BenchmarkFailsafe_Breaker(b *testing.B) {
	ex := failsafe.With[int](circuitbreaker.NewBuilder[int]().WithFailureThreshold(5).WithDelay(30 * time.Second).Build())
	run(b, func() error { _, err := ex.Get(answer); return err })
}

func BenchmarkFailsafe_RetryBreakerTimeout(b *testing.B) {
	ex := failsafe.With[int](
		retrypolicy.NewBuilder[int]().WithMaxRetries(2).WithBackoff(100*time.Millisecond, time.Second).Build(),
		circuitbreaker.NewBuilder[int]().WithFailureThreshold(5).WithDelay(30*time.Second).Build(),
		timeout.New[int](10*time.Second))
	run(b, func() error { _, err := ex.Get(answer); return err })
}

func BenchmarkFailsafe_Open_Refuse(b *testing.B) {
	cb := circuitbreaker.NewBuilder[int]().WithFailureThreshold(1).WithDelay(time.Hour).Build()
	ex := failsafe.With[int](cb)
	ex.Get(func() (int, error) { return 0, errFault })
	run(b, func() error { _, err := ex.Get(answer); return refused(err) })
}

func BenchmarkCenkalti_Retry(b *testing.B) {
	ctx := context.Background()
	run(b, func() error { _, err := backoff.Retry(ctx, answer, backoff.WithMaxTries(3)); return err })
}

func BenchmarkAvast_Retry(b *testing.B) {
	ctx := context.Background()
	run(b, func() error {
		_, err := retry.DoWithData(answer, retry.Context(ctx), retry.Attempts(3))
		return err
	})
}
