package mcp

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"expvar"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var (
	_ Session        = (*ResilientSession)(nil)
	_ Session        = (*FallbackSession)(nil)
	_ requester      = (*ResilientSession)(nil)
	_ requester      = (*FallbackSession)(nil)
	_ expvar.Var     = (*ResilientSession)(nil)
	_ expvar.Var     = (*FallbackSession)(nil)
	_ expvar.Var     = (*Guard)(nil)
	_ slog.LogValuer = Health{}
)

// endings are the rows of the table that classify is, as errors of a transport
// or a session.
var endings = []struct {
	name    string
	err     error
	class   Outcome
	verdict verdict
	retry   retry
	kind    string
}{
	{"result", nil, OutcomeOK, good, never, ""},
	{"result with isError", errToolFailed, OutcomeOK, good, never, "tool_error"},
	{"result outside its schema", &ProtocolError{}, OutcomeProtocol, good, never, "protocol"},
	{"-32600", &RPCError{Code: -32600}, OutcomeRefused, good, never, "-32600"},
	{"-32601", &RPCError{Code: -32601}, OutcomeRefused, good, never, "-32601"},
	{"-32602", &RPCError{Code: -32602}, OutcomeRefused, good, never, "-32602"},
	{"-32700", &RPCError{Code: -32700}, OutcomeRefused, good, never, "-32700"},
	{"-32603", &RPCError{Code: -32603}, OutcomeFault, fault, never, "-32603"},
	{"-32000", &RPCError{Code: -32000}, OutcomeRefused, good, never, "-32000"},
	{"-32002", &RPCError{Code: -32002}, OutcomeRefused, good, never, "-32002"},
	{"-32019", &RPCError{Code: -32019}, OutcomeRefused, good, never, "-32019"},
	{"-32020", &RPCError{Code: -32020, Status: 400}, OutcomeRefused, good, never, "-32020"},
	{"-32022", &RPCError{Code: -32022, Status: 400}, OutcomeRefused, good, never, "-32022"},
	{"-32042", &RPCError{Code: -32042}, OutcomeRefused, good, never, "-32042"},
	{"code 0", &RPCError{}, OutcomeRefused, good, never, "0"},
	{"404 with -32601", &RPCError{Code: -32601, Status: 404}, OutcomeRefused, good, never, "-32601"},
	{"500 with -32000", &RPCError{Code: -32000, Status: 500}, OutcomeFault, fault, ifSafe, "500"},
	{"501 with -32601", &RPCError{Code: -32601, Status: 501}, OutcomeFault, fault, never, "501"},
	{"400", status(400), OutcomeProtocol, neither, never, "400"},
	{"401", status(401), OutcomeRefused, neither, never, "401"},
	{"403", status(403), OutcomeRefused, neither, never, "403"},
	{"404", status(404), OutcomeProtocol, neither, never, "404"},
	{"404, session lost again", &TransportError{Reason: ReasonDisconnected, Status: 404}, OutcomeRefused, neither, never, "404"},
	{"400, session lost again", &TransportError{Reason: ReasonDisconnected, Status: 400}, OutcomeRefused, neither, never, "400"},
	{"405", status(405), OutcomeProtocol, neither, never, "405"},
	{"408", status(408), OutcomeFault, fault, ifSafe, "408"},
	{"413", status(413), OutcomeRefused, neither, never, "413"},
	{"415", status(415), OutcomeProtocol, neither, never, "415"},
	{"429", &TransportError{Reason: ReasonUnavailable, Status: 429}, OutcomeRefused, neither, always, "429"},
	{"500", status(500), OutcomeFault, fault, ifSafe, "500"},
	{"501", status(501), OutcomeFault, fault, never, "501"},
	{"502", status(502), OutcomeFault, fault, ifSafe, "502"},
	{"503", status(503), OutcomeFault, fault, ifSafe, "503"},
	{"504", status(504), OutcomeFault, fault, ifSafe, "504"},
	{"505", status(505), OutcomeFault, fault, never, "505"},
	{"307", status(307), OutcomeProtocol, fault, never, "307"},
	{"200 with HTML", &TransportError{Reason: ReasonProtocol, Status: 200, Sent: true}, OutcomeProtocol, fault, never, "protocol"},
	{"not JSON-RPC", &TransportError{Reason: ReasonProtocol, Sent: true}, OutcomeProtocol, fault, never, "protocol"},
	{"stream ended early", &TransportError{Reason: ReasonDisconnected, Status: 200, Sent: true}, OutcomeFault, fault, ifSafe, "disconnected"},
	{"child exited", &TransportError{Reason: ReasonDisconnected, Sent: true}, OutcomeFault, fault, ifSafe, "disconnected"},
	{"pipe closed before the write", &TransportError{Reason: ReasonDisconnected}, OutcomeFault, fault, ifSafe, "disconnected"},
	{"refused dial", &TransportError{Reason: ReasonUnavailable, Tries: 3}, OutcomeFault, fault, ifSafe, "unavailable"},
	{"bad certificate", &TransportError{Reason: ReasonUnavailable, Err: fmt.Errorf("dial: %w", &tls.CertificateVerificationError{Err: io.EOF})}, OutcomeFault, fault, never, "unavailable"},
	{"message over the limit", &TransportError{Reason: ReasonLimit, Sent: true}, OutcomeProtocol, neither, never, "limit"},
	{"read stalled, or ceiling of the session", &TransportError{Reason: ReasonTimeout, Sent: true}, OutcomeTimeout, fault, ifSafe, "timeout"},
	{"cancelled within", &TransportError{Reason: ReasonCancelled, Sent: true, Err: context.Canceled}, OutcomeCancelled, neither, ended, "cancelled"},
	{"deadline within", &TransportError{Reason: ReasonCancelled, Sent: true, Err: context.DeadlineExceeded}, OutcomeBudget, neither, ended, "run_deadline"},
	{"arguments refused within", &ArgumentError{}, OutcomeRefused, neither, never, "refused"},
	{"breaker open within", &UnavailableError{State: BreakerOpen}, OutcomeRefused, neither, never, "breaker_open"},
	{"run over within", &BudgetError{Sent: true}, OutcomeBudget, neither, ended, "run_deadline"},
	{"somebody else's error", io.ErrUnexpectedEOF, OutcomeFault, fault, ifSafe, "_OTHER"},
}

func status(code int) error {
	return &TransportError{Reason: ReasonProtocol, Status: code, Sent: true}
}

// Invariant 25: every row gives its class, verdict and retry, alone and wrapped.
func TestInvariant25EveryRow(t *testing.T) {
	for _, tt := range endings {
		for _, err := range []error{tt.err, fmt.Errorf("wrapped: %w", tt.err)} {
			if tt.err == nil || tt.err == errToolFailed && err != tt.err {
				continue
			}
			r := classify(err, "")
			if r.class != tt.class || r.verdict != tt.verdict || r.retry != tt.retry || r.kind != tt.kind {
				t.Errorf("%s: classify(%v) = %s, %d, %d, %s; want %s, %d, %d, %s", tt.name, err,
					r.class, r.verdict, r.retry, r.kind, tt.class, tt.verdict, tt.retry, tt.kind)
			}
		}
		// The same through the whole policy, once.
		g := NewGuard(Config{Name: "s"}, nil)
		err := g.Do(t.Context(), anyCall, func(context.Context) error { return tt.err })
		h := g.Health()
		if h.Outcome != tt.class || h.ErrorType != tt.kind || g.breaker.settled[tt.verdict] == 0 {
			t.Errorf("%s: health %v, settled %v", tt.name, h, g.breaker.settled)
		}
		if (err == nil) != (tt.class == OutcomeOK) {
			t.Errorf("%s: error %v", tt.name, err)
		}
	}
}

// When several things are true at once, the first of these wins: an answer or a
// status, the caller's cancel, the run's end, the ceiling, the transport's word.
func TestPrecedence(t *testing.T) {
	gone := &TransportError{Reason: ReasonDisconnected, Sent: true}
	for _, tt := range []struct {
		name string
		err  error
		by   Outcome
		want Outcome
	}{
		{"answer and cancel", &RPCError{Code: -32602}, OutcomeCancelled, OutcomeRefused},
		{"schema and deadline", &ProtocolError{}, OutcomeBudget, OutcomeProtocol},
		{"503 and deadline", status(503), OutcomeBudget, OutcomeFault},
		{"503 and cancel", status(503), OutcomeCancelled, OutcomeFault},
		{"disconnect and cancel", gone, OutcomeCancelled, OutcomeCancelled},
		{"disconnect and deadline", gone, OutcomeBudget, OutcomeBudget},
		{"disconnect and ceiling", gone, OutcomeTimeout, OutcomeTimeout},
		{"200 with HTML and cancel", &TransportError{Reason: ReasonProtocol, Status: 200}, OutcomeCancelled, OutcomeCancelled},
		{"context error and ceiling", &TransportError{Reason: ReasonCancelled, Err: context.DeadlineExceeded}, OutcomeTimeout, OutcomeTimeout},
		{"somebody's error and cancel", io.EOF, OutcomeCancelled, OutcomeCancelled},
		{"somebody's error and ceiling", io.EOF, OutcomeTimeout, OutcomeTimeout},
	} {
		if got := classify(tt.err, tt.by).class; got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

// Invariant 19: an operation that may not be repeated is run exactly once,
// whatever comes, unless it certainly did not run; another at most max_attempts
// times.
func TestInvariant19NoSecondRun(t *testing.T) {
	for _, tt := range endings {
		if tt.err == nil {
			continue
		}
		sent := true
		var te *TransportError
		if errors.As(tt.err, &te) {
			sent = te.Sent
		}
		for _, repeatable := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				s := &fakeSession{call: func(context.Context, *Call) (*Result, error) {
					if tt.err == errToolFailed {
						return &Result{IsError: true}, nil
					}
					return nil, tt.err
				}}
				rs := NewResilientSession(s, Config{Name: "s", Retry: RetryConfig{MaxAttempts: 3}, BreakerFailures: -1}, nil)
				call := &Call{Tool: "echo"}
				if repeatable {
					call.IdempotencyKey = "key"
				}
				_, err := rs.CallTool(t.Context(), call)
				want, gaveUp := 1, "answered"
				switch {
				case tt.retry == always, tt.retry == ifSafe && (repeatable || !sent):
					if want, gaveUp = 3, "exhausted"; te != nil && te.Tries == 3 {
						want = 1
					}
				case tt.retry == ifSafe:
					gaveUp = "unsafe"
				case tt.class == OutcomeCancelled:
					gaveUp = "cancelled"
				case tt.class == OutcomeBudget:
					gaveUp = "deadline"
				}
				if len(s.calls) != want {
					t.Errorf("%s, repeatable %v: %d reaches, want %d", tt.name, repeatable, len(s.calls), want)
				}
				for _, c := range s.calls {
					if c.IdempotencyKey != call.IdempotencyKey {
						t.Errorf("%s: the key changed to %q", tt.name, c.IdempotencyKey)
					}
				}
				if ours := origins(err); ours != nil {
					if o := ours.origin(); o.GaveUp != gaveUp || o.Server != "s" || o.Op != "tools/call" || o.Call == "" {
						t.Errorf("%s, repeatable %v: origin %+v, want %s", tt.name, repeatable, *o, gaveUp)
					}
				} else if err != nil && tt.err != io.ErrUnexpectedEOF {
					t.Errorf("%s: %v has no origin", tt.name, err)
				}
			})
		}
	}
}

// fakeSession is a Session in memory.
type fakeSession struct {
	mu    sync.Mutex // guards calls
	calls []*Call
	call  func(ctx context.Context, c *Call) (*Result, error)
	list  func(ctx context.Context) ([]Tool, error)
	init  func(ctx context.Context) (*ServerInfo, error)
}

func (s *fakeSession) CallTool(ctx context.Context, c *Call) (*Result, error) {
	s.mu.Lock()
	s.calls = append(s.calls, c)
	s.mu.Unlock()
	return s.call(ctx, c)
}
func (s *fakeSession) ListTools(ctx context.Context) ([]Tool, error)       { return s.list(ctx) }
func (s *fakeSession) Initialize(ctx context.Context) (*ServerInfo, error) { return s.init(ctx) }
func (s *fakeSession) Close() error                                        { return io.ErrClosedPipe }

// fullSession has every optional method.
type fullSession struct {
	fakeSession
	methods []string
}

func (s *fullSession) Request(ctx context.Context, method string, params, out any) error {
	s.methods = append(s.methods, method)
	return &TransportError{Reason: ReasonDisconnected, Sent: true}
}
func (s *fullSession) boundsItself()           {}
func (s *fullSession) serverInfo() *ServerInfo { return &ServerInfo{Protocol: version2511} }

func text(s string) *Result { return &Result{Content: []Content{{Type: "text", Text: s}}} }

func TestResilientSessionPassesOn(t *testing.T) {
	full := &fullSession{fakeSession: fakeSession{
		call: func(context.Context, *Call) (*Result, error) { return text("hi"), nil },
		list: func(context.Context) ([]Tool, error) { return []Tool{{Name: "echo"}}, nil },
		init: func(context.Context) (*ServerInfo, error) { return &ServerInfo{Name: "n"}, nil },
	}}
	s := NewResilientSession(full, Config{Name: "s"}, nil)
	info, err := s.Initialize(t.Context())
	if err != nil || info.Name != "n" {
		t.Errorf("Initialize = %v, %v", info, err)
	}
	if h := s.Health(); h.Operation != "connect" {
		t.Errorf("after Initialize: %v", h)
	}
	tools, err := s.ListTools(t.Context())
	if err != nil || len(tools) != 1 {
		t.Errorf("ListTools = %v, %v", tools, err)
	}
	r, err := s.CallTool(t.Context(), &Call{Tool: "echo"})
	if err != nil || r.Text() != "hi" {
		t.Errorf("CallTool = %v, %v", r, err)
	}
	if h := s.Health(); h.Operation != "tools/call" || h.Calls != 3 || h.Outcome != OutcomeOK {
		t.Errorf("health %v", h)
	}
	if innermost(s) != full || s.guard.info().Protocol != version2511 {
		t.Error("the session that speaks with the server is not found")
	}
	if s.Close() != io.ErrClosedPipe {
		t.Error("Close is not passed on")
	}
	bare := NewResilientSession(&fakeSession{}, Config{Name: "s"}, nil)
	if bare.guard.info != nil {
		t.Error("a session without optional methods has some")
	}
	if err := bare.Request(t.Context(), "ping", nil, nil); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("Request = %v, want unsupported", err)
	}
}

func TestRequestRepeatsWhatReads(t *testing.T) {
	for method, want := range map[string]int{
		"tools/list": 2, "resources/templates/list": 2, "resources/read": 2, "prompts/get": 2, "completion/complete": 2,
		"server/discover": 2, "ping": 2, "tools/call": 1, "logging/setLevel": 1, "resources/subscribe": 1, "tasks/cancel": 1,
	} {
		synctest.Test(t, func(t *testing.T) {
			full := &fullSession{}
			s := NewResilientSession(full, Config{Retry: RetryConfig{MaxAttempts: 2}}, nil)
			if err := s.Request(t.Context(), method, nil, nil); !errors.Is(err, ReasonDisconnected) || len(full.methods) != want {
				t.Errorf("%s: %d reaches, %v, want %d", method, len(full.methods), err, want)
			}
		})
	}
}

// Each operation has the ceiling that its Config declares.
func TestCeilings(t *testing.T) {
	s := &fakeSession{
		call: func(ctx context.Context, _ *Call) (*Result, error) { return nil, hangs(ctx) },
		list: func(ctx context.Context) ([]Tool, error) { return nil, hangs(ctx) },
		init: func(ctx context.Context) (*ServerInfo, error) { return nil, hangs(ctx) },
	}
	synctest.Test(t, func(t *testing.T) {
		rs := NewResilientSession(s, Config{Name: "s", ConnectTimeout: 1 * time.Second, DiscoveryTimeout: 2 * time.Second, CallTimeout: 3 * time.Second}, nil)
		for i, op := range []func() error{
			func() error { _, err := rs.Initialize(t.Context()); return err },
			func() error { _, err := rs.ListTools(t.Context()); return err },
			func() error { _, err := rs.CallTool(t.Context(), &Call{}); return err },
			func() error { return rs.guard.Do(t.Context(), Operation{Name: "x", Timeout: 4 * time.Second}, hangs) },
		} {
			start := time.Now()
			err := op()
			var te *TransportError
			if got, want := time.Since(start), time.Duration(i+1)*time.Second; got != want || !errors.As(err, &te) || te.Reason != ReasonTimeout || !te.Sent {
				t.Errorf("operation %d: %v after %v, want a timeout after %v", i, err, got, want)
			}
			if want := fmt.Sprintf("timeout: no answer within %ds", i+1); !strings.HasSuffix(te.Error(), want) {
				t.Errorf("operation %d: %v, want … %s", i, err, want)
			}
		}
		// Negative means none.
		time.AfterFunc(time.Hour, func() { rs.Close() })
		if err := rs.guard.Do(t.Context(), Operation{Timeout: -1}, func(ctx context.Context) error {
			if _, ok := ctx.Deadline(); ok {
				t.Error("an operation without a ceiling has one")
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	})
}

// The ceiling is visible to whoever asks the context, and is not ours to be
// confused with a deadline of the caller.
func TestCeilingCause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGuard(Config{CallTimeout: time.Second}, nil)
		err := g.Do(t.Context(), anyCall, func(ctx context.Context) error {
			<-ctx.Done()
			if context.Cause(ctx) != ReasonTimeout {
				t.Errorf("cause %v", context.Cause(ctx))
			}
			return fmt.Errorf("query: %w", context.Cause(ctx))
		})
		if !errors.Is(err, ReasonTimeout) || errors.Is(err, context.DeadlineExceeded) || origins(err) == nil {
			t.Errorf("got %#v", err)
		}
	})
}

// What an earlier attempt may have done, the error of the last one says.
func TestSentCoversAllAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ends := []error{&TransportError{Reason: ReasonTimeout, Sent: true}, &TransportError{Reason: ReasonUnavailable}}
		n := 0
		next := func(context.Context) error { n++; return ends[n-1] }
		g := NewGuard(Config{Retry: RetryConfig{MaxAttempts: 2}}, nil)
		err := g.Do(t.Context(), readOnly, next)
		var te *TransportError
		if !errors.As(err, &te) || te.Reason != ReasonUnavailable || !te.Sent || te.Attempts != 2 {
			t.Errorf("got %+v, want unavailable, sent", err)
		}
		if ends[1].(*TransportError).Sent || ends[1].(*TransportError).Call != "" {
			t.Error("the session's own error was changed")
		}
	})
}

// A caller that leaves during the wait is told of both, and so is a run that
// ends before the next attempt.
func TestEndedAfterFault(t *testing.T) {
	lost := &TransportError{Reason: ReasonDisconnected, Sent: true, Raw: []byte("x")}
	cfg := Config{Retry: RetryConfig{MaxAttempts: 3, BaseDelay: time.Second}}
	full := &Options{Rand: func(n int64) int64 { return n - 1 }}
	synctest.Test(t, func(t *testing.T) {
		g := NewGuard(cfg, full)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		start := time.Now()
		err := g.Do(ctx, readOnly, func(context.Context) error { return lost })
		var te *TransportError
		if !errors.Is(err, context.Canceled) || !errors.Is(err, ReasonDisconnected) || !errors.As(err, &te) ||
			te.Reason != ReasonCancelled || te.GaveUp != "cancelled" || te.Attempts != 1 || !te.Sent {
			t.Errorf("cancelled in the wait: %+v", err)
		}
		if got := time.Since(start); got != time.Millisecond {
			t.Errorf("took %v", got)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		g := NewGuard(cfg, full)
		ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		n := 0
		err := g.Do(ctx, readOnly, func(ctx context.Context) error {
			if n++; n > 1 {
				return hangs(ctx)
			}
			return lost
		})
		var be *BudgetError
		if !errors.As(err, &be) || !errors.Is(err, ReasonDisconnected) || !errors.Is(err, context.DeadlineExceeded) || be.Attempts != 2 || !be.Sent {
			t.Errorf("the run ended in the second attempt: %+v", err)
		}
	})
}

// A session that gives up by itself says why; its words are kept.
func TestCancelledWithin(t *testing.T) {
	g := NewGuard(Config{Name: "s"}, nil)
	err := g.Do(t.Context(), anyCall, func(context.Context) error {
		return &TransportError{Reason: ReasonCancelled, Sent: true, Detail: "the handler failed", Err: io.EOF}
	})
	var te *TransportError
	if !errors.As(err, &te) || te.Detail != "the handler failed" || !errors.Is(err, io.EOF) || te.GaveUp != "cancelled" || te.Attempts != 1 {
		t.Errorf("got %+v", err)
	}
}

func TestSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGuard(Config{Name: "s", MaxInFlight: 2, CallTimeout: 10 * time.Second, BreakerFailures: 1}, nil)
		release := make(chan struct{})
		inFlight, most := 0, 0
		var mu sync.Mutex // guards inFlight and most
		work := func(context.Context) error {
			mu.Lock()
			inFlight++
			most = max(most, inFlight)
			mu.Unlock()
			<-release
			mu.Lock()
			inFlight--
			mu.Unlock()
			return nil
		}
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() { g.Do(t.Context(), anyCall, work) })
		}
		synctest.Wait()
		for _, tt := range []struct {
			name  string
			ctx   func() (context.Context, context.CancelFunc)
			after time.Duration
			check func(err error) bool
		}{
			{"cancelled", func() (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(time.Second, cancel)
				return ctx, cancel
			}, time.Second, func(err error) bool { return errors.Is(err, context.Canceled) && errors.Is(err, ReasonCancelled) }},
			{"run over", func() (context.Context, context.CancelFunc) {
				return context.WithTimeout(t.Context(), 2*time.Second)
			}, 2 * time.Second, func(err error) bool { return errors.As(err, new(*BudgetError)) }},
			{"ceiling", func() (context.Context, context.CancelFunc) {
				return context.WithCancel(t.Context())
			}, 10 * time.Second, func(err error) bool {
				var te *TransportError
				return errors.As(err, &te) && te.Reason == ReasonLimit && !te.Sent && te.GaveUp == "exhausted" && te.Attempts == 0
			}},
		} {
			ctx, cancel := tt.ctx()
			start, before := time.Now(), g.Health()
			err := g.Do(ctx, anyCall, work)
			cancel()
			if got := time.Since(start); !tt.check(err) || got != tt.after {
				t.Errorf("%s: %v after %v", tt.name, err, got)
			}
			if after := g.Health(); after != before {
				t.Errorf("%s: health moved from %v to %v", tt.name, before, after)
			}
		}
		for range 8 {
			wg.Go(func() { g.Do(t.Context(), anyCall, work) })
		}
		synctest.Wait()
		close(release)
		wg.Wait()
		if most != 2 || g.Health().Calls != 10 {
			t.Errorf("%d at once, want 2; %v", most, g.Health())
		}
	})
}

// A hook may come back in with the only slot.
func TestHooksHoldNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g *Guard
		depth := 0
		again := func() {
			if depth++; depth < 4 {
				g.Health()
				g.Do(context.Background(), anyCall, faults)
			}
		}
		g = NewGuard(Config{MaxInFlight: 1, BreakerFailures: 2}, &Options{
			OnState: func(Health) { again() },
			Trace: func(ctx context.Context, r Reach) (context.Context, func(Health, error)) {
				return ctx, func(Health, error) { again() }
			},
		})
		g.Do(t.Context(), anyCall, faults)
		if h := g.Health(); h.State != BreakerOpen {
			t.Errorf("health %v", h)
		}
	})
}

func TestTrace(t *testing.T) {
	type key struct{}
	type span struct {
		reach Reach
		end   Health
		err   error
	}
	synctest.Test(t, func(t *testing.T) {
		var spans []span
		o := &Options{Rand: exact, Trace: func(ctx context.Context, r Reach) (context.Context, func(Health, error)) {
			i := len(spans)
			spans = append(spans, span{reach: r})
			return context.WithValue(ctx, key{}, i), func(h Health, err error) { spans[i].end, spans[i].err = h, err }
		}}
		n := 0
		full := &fullSession{fakeSession: fakeSession{call: func(ctx context.Context, _ *Call) (*Result, error) {
			if got := ctx.Value(key{}); got != n {
				t.Errorf("reach %d ran in the context of span %v", n, got)
			}
			switch n++; n {
			case 1:
				return nil, status(503)
			case 3:
				panic("boom")
			}
			return &Result{IsError: true}, nil
		}}}
		s := NewResilientSession(full, Config{Name: "weather", Endpoint: "https://example.com", Retry: RetryConfig{MaxAttempts: 2}, BreakerFailures: 2}, o)
		if _, err := s.CallTool(t.Context(), &Call{Tool: "forecast", IdempotencyKey: "k"}); err != nil {
			t.Fatal(err)
		}
		func() {
			defer func() { recover() }()
			s.CallTool(t.Context(), &Call{Tool: "forecast"})
		}()
		if len(spans) != 3 {
			t.Fatalf("%d spans, want one for each reach", len(spans))
		}
		r := spans[1].reach
		want := Reach{Server: "weather", Operation: "tools/call", Tool: "forecast", Call: r.Call, Attempt: 2, Protocol: version2511, Transport: "http"}
		if r != want || r.Call == "" || r.Call != spans[0].reach.Call || r.Call == spans[2].reach.Call {
			t.Errorf("reaches %+v", spans)
		}
		for i, want := range []string{"503", "tool_error", "panic"} {
			if got := spans[i].end.ErrorType; got != want || (spans[i].err == nil) != (i == 1) {
				t.Errorf("span %d ends with %q and %v, want %q", i, got, spans[i].err, want)
			}
		}
		if got, want := r.Name(), "mcp.weather.tools/call"; got != want {
			t.Errorf("Name() = %q, want %q", got, want)
		}
		got := map[string]string{}
		for _, a := range r.Attrs() {
			got[a.Key] = a.Value.String()
		}
		wantAttrs := map[string]string{"adk.mcp.server": "weather", "adk.mcp.operation": "tools/call", "adk.mcp.breaker": "closed",
			"adk.mcp.call": r.Call, "adk.mcp.attempt": "2", "mcp.method.name": "tools/call", "gen_ai.tool.name": "forecast",
			"gen_ai.operation.name": "execute_tool", "mcp.protocol.version": version2511, "network.transport": "tcp", "network.protocol.name": "http"}
		if fmt.Sprint(got) != fmt.Sprint(wantAttrs) {
			t.Errorf("Attrs() = %v, want %v", got, wantAttrs)
		}
	})
	attrs := fmt.Sprint(Reach{Server: "s", Operation: "connect", Transport: "stdio"}.Attrs())
	if !strings.Contains(attrs, "mcp.method.name=initialize") || !strings.Contains(attrs, "network.transport=pipe") || strings.Contains(attrs, "gen_ai") {
		t.Errorf("attributes of a connect: %s", attrs)
	}
}

// What a refused probe sees at admission.
func TestTraceStateAtAdmission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var states []BreakerState
		o := &Options{Rand: exact, Trace: func(ctx context.Context, r Reach) (context.Context, func(Health, error)) {
			states = append(states, r.State)
			return ctx, nil
		}}
		g := NewGuard(Config{BreakerFailures: 1}, o)
		g.Do(t.Context(), anyCall, faults)
		g.Do(t.Context(), anyCall, faults) // refused: no reach, no span
		time.Sleep(30 * time.Second)
		g.Do(t.Context(), anyCall, answers)
		if want := []BreakerState{BreakerClosed, BreakerHalfOpen}; !slices.Equal(states, want) {
			t.Errorf("states %v, want %v", states, want)
		}
	})
}

func TestHealthForms(t *testing.T) {
	h := Health{Server: "s", State: BreakerOpen, Outcome: OutcomeTimeout, ErrorType: "timeout", Operation: "tools/call", Retries: 1,
		Latency: 1500 * time.Millisecond, ConsecutiveFailures: 5, RetryAfter: 30 * time.Second,
		Calls: 1, Faults: 2, Late: 3, Retried: 4, Opened: 5, Refused: 6, Fallbacks: 7}
	var got map[string]any
	if err := json.Unmarshal([]byte(h.String()), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"server": "s", "state": "open", "outcome": "timeout", "error_type": "timeout", "operation": "tools/call",
		"retries": 1., "latency_seconds": 1.5, "consecutive_failures": 5., "retry_after_seconds": 30.,
		"calls": 1., "faults": 2., "late": 3., "retried": 4., "opened": 5., "refused": 6., "fallbacks": 7.}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("String() = %v, want %v", got, want)
	}
	var b bytes.Buffer
	slog.New(slog.NewTextHandler(&b, nil)).Info("m", "h", h)
	for key := range want {
		key = strings.TrimSuffix(key, "_seconds")
		if !strings.Contains(b.String(), "h."+key+"=") {
			t.Errorf("the log line lacks %s: %s", key, b.String())
		}
	}
	if s := NewGuard(Config{Name: "g"}, nil).String(); !strings.HasPrefix(s, `{"server":"g","state":"closed"`) {
		t.Errorf("Guard.String() = %s", s)
	}
}

func TestLogTable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		drop := func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey || a.Key == "call" {
				return slog.Attr{}
			}
			return a
		}
		logger := slog.New(slog.NewTextHandler(&b, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: drop}))
		g := NewGuard(Config{Name: "s", BreakerFailures: 2, Retry: RetryConfig{MaxAttempts: 2}}, &Options{Rand: exact, Logger: logger})
		g.Do(t.Context(), readOnly, faults)
		time.Sleep(30 * time.Second)
		g.Do(t.Context(), anyCall, answers)
		g.Do(t.Context(), anyCall, func(context.Context) error { return status(307) })
		want := `level=DEBUG msg="mcp: retry" wait=0s server=s op=tools/list class=fault attempt=1 err="mcp: unavailable"
level=WARN msg="mcp: breaker open" state=open server=s op=tools/list class=fault attempt=2
level=INFO msg="mcp: breaker half_open" state=half_open server=s op=tools/call class=fault attempt=1
level=INFO msg="mcp: breaker closed" state=closed server=s op=tools/call class=ok attempt=1
level=WARN msg="mcp: protocol outcome" server=s op=tools/call class=protocol attempt=1 err="mcp: protocol: HTTP status 307"
`
		if got := b.String(); got != want {
			t.Errorf("log:\n%s\nwant:\n%s", got, want)
		}
	})
}

// brokenPromise is a check that no result passes.
type brokenPromise struct{}

func (brokenPromise) check(context.Context, *Result) error { return &ProtocolError{Detail: "missing"} }

// A result outside its schema is an outcome of the reach that brought it.
func TestBrokenPromise(t *testing.T) {
	var b bytes.Buffer
	inner := &fakeSession{call: func(context.Context, *Call) (*Result, error) { return &Result{}, nil }}
	s := NewResilientSession(inner, Config{Name: "s"}, &Options{Logger: slog.New(slog.NewTextHandler(&b, nil))})
	if _, err := s.CallTool(t.Context(), &Call{Tool: "x", tool: brokenPromise{}}); !errors.Is(err, ReasonProtocol) {
		t.Errorf("CallTool: %v", err)
	}
	if h := s.Health(); h.Outcome != OutcomeProtocol || h.ErrorType != "protocol" || h.State != BreakerClosed {
		t.Errorf("health %v", h)
	}
	if !strings.Contains(b.String(), "level=WARN") {
		t.Errorf("log %s", b.String())
	}
}

// One Guard inside another: the inner one's errors are its own, and no fault of
// what the outer one guards.
func TestNestedGuards(t *testing.T) {
	inner := NewGuard(Config{Name: "db", BreakerFailures: 1}, nil)
	outer := NewGuard(Config{Name: "tool", BreakerFailures: 1, Retry: RetryConfig{MaxAttempts: 3}}, nil)
	inner.Do(t.Context(), anyCall, faults)
	err := outer.Do(t.Context(), readOnly, func(ctx context.Context) error { return inner.Do(ctx, readOnly, answers) })
	var ue *UnavailableError
	if !errors.As(err, &ue) || ue.Server != "db" || ue.Err != ReasonUnavailable {
		t.Errorf("got %+v", err)
	}
	if h := outer.Health(); h.State != BreakerClosed || h.Calls != 1 || h.ErrorType != "breaker_open" {
		t.Errorf("outer %v", h)
	}
}

// The ceiling of a policy is the end of the run to another one within it, and a
// ceiling all the same.
func TestNestedCeiling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inner := NewGuard(Config{Name: "in"}, nil)
		outer := NewGuard(Config{Name: "out", CallTimeout: time.Second, BreakerFailures: 1}, nil)
		hang := func(ctx context.Context) error {
			return inner.Do(ctx, anyCall, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		}
		err := outer.Do(t.Context(), anyCall, hang)
		if h := outer.Health(); !errors.Is(err, ReasonTimeout) || h.Outcome != OutcomeTimeout || h.State != BreakerOpen || inner.Health().Outcome != OutcomeBudget {
			t.Errorf("the outer ceiling: %v, %v", err, h)
		}
		time.Sleep(time.Minute)
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		var be *BudgetError
		if err := outer.Do(ctx, anyCall, hang); !errors.As(err, &be) || outer.Health().Outcome != OutcomeBudget {
			t.Errorf("the run: %v, %v", err, outer.Health())
		}
	})
}

func TestUnboundedProbeHasALease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := opened(t, Config{CallTimeout: 10 * time.Second, BreakerReset: 30 * time.Second})
		time.Sleep(30 * time.Second)
		stuck := make(chan struct{})
		go g.Do(t.Context(), Operation{Name: "wait", Timeout: -1}, func(context.Context) error { <-stuck; return nil }) // ended by close(stuck)
		synctest.Wait()
		time.Sleep(40 * time.Second)
		if err := g.Do(t.Context(), anyCall, answers); err != nil {
			t.Error(err)
		}
		close(stuck)
	})
}

// A source that breaks its word bends no wait.
func TestRandOutOfRange(t *testing.T) {
	for _, bad := range []int64{-1, 1 << 62} {
		synctest.Test(t, func(t *testing.T) {
			g := NewGuard(Config{BreakerFailures: 1, Retry: RetryConfig{MaxAttempts: 2}}, &Options{Rand: func(int64) int64 { return bad }})
			g.Do(t.Context(), anyCall, faults)
			if h := g.Health(); h.RetryAfter < 30*time.Second || h.RetryAfter > 33*time.Second {
				t.Errorf("window %v", h.RetryAfter)
			}
		})
	}
}

// scripted is what a fake transport does on one attempt, in the words of the fault cases.
func scripted(kind string) (*Result, error) {
	switch kind {
	case "tool_error":
		return &Result{IsError: true}, nil
	case "refusal":
		return nil, &RPCError{Code: -32602}
	case "invalid_result":
		return nil, &ProtocolError{Detail: "missing"}
	case "disconnect_before_send":
		return nil, &TransportError{Reason: ReasonDisconnected}
	case "disconnect_after_send":
		return nil, &TransportError{Reason: ReasonDisconnected, Sent: true}
	case "timeout":
		return nil, &TransportError{Reason: ReasonTimeout, Sent: true}
	case "http_429":
		return nil, &TransportError{Reason: ReasonUnavailable, Status: 429, RetryAfter: time.Second}
	case "http_503":
		return nil, &TransportError{Reason: ReasonUnavailable, Status: 503, RetryAfter: time.Second, Sent: true}
	}
	return text("ok"), nil
}

// Scripts of attempts, one call after another: the cases RB-01, RB-03 and RB-05.
func TestScriptedCalls(t *testing.T) {
	type call struct {
		keyed    bool
		attempts int
		wait     time.Duration // before the last attempt
		want     error         // nil: a result
	}
	same := func(n int, c call) []call { return slices.Repeat([]call{c}, n) }
	refusal, invalid := errors.New("refusal"), errors.New("invalid")
	for _, tt := range []struct {
		name   string
		cfg    Config
		script []string
		calls  []call
	}{
		{"RB-01", Config{Retry: RetryConfig{MaxAttempts: 4}, BreakerFailures: 10},
			[]string{"disconnect_after_send", "disconnect_after_send", "ok", "disconnect_before_send", "ok", "timeout", "ok"},
			[]call{{attempts: 1, want: ReasonDisconnected}, {keyed: true, attempts: 2}, {attempts: 2}, {attempts: 1, want: ReasonTimeout}, {attempts: 1}}},
		{"RB-03", Config{Retry: RetryConfig{MaxAttempts: 4}, BreakerFailures: 3},
			slices.Concat(slices.Repeat([]string{"tool_error"}, 4), slices.Repeat([]string{"refusal"}, 4), slices.Repeat([]string{"invalid_result"}, 3),
				[]string{"disconnect_after_send", "disconnect_after_send", "tool_error", "disconnect_after_send", "disconnect_after_send", "ok"}),
			slices.Concat(same(4, call{attempts: 1}), same(4, call{attempts: 1, want: refusal}), same(3, call{attempts: 1, want: invalid}),
				same(2, call{attempts: 1, want: ReasonDisconnected}), same(1, call{attempts: 1}), same(2, call{attempts: 1, want: ReasonDisconnected}), same(1, call{attempts: 1}))},
		{"RB-05", Config{Retry: RetryConfig{MaxAttempts: 3}}, []string{"http_429", "ok", "http_503", "ok", "http_503"},
			[]call{{attempts: 2, wait: time.Second}, {keyed: true, attempts: 2, wait: time.Second}, {attempts: 1, want: ReasonUnavailable}}},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := 0
			var at []time.Time
			s := NewResilientSession(&fakeSession{call: func(context.Context, *Call) (*Result, error) {
				at = append(at, time.Now())
				n++
				return scripted(tt.script[n-1])
			}}, tt.cfg, &Options{Rand: exact})
			for i, c := range tt.calls {
				at = nil
				call := &Call{Tool: "echo"}
				if c.keyed {
					call.IdempotencyKey = "k"
				}
				_, err := s.CallTool(t.Context(), call)
				ok := errors.Is(err, c.want)
				switch c.want {
				case refusal:
					ok = errors.As(err, new(*RPCError))
				case invalid:
					ok = errors.As(err, new(*ProtocolError))
				}
				if !ok || len(at) != c.attempts || at[len(at)-1].Sub(at[0]) != c.wait {
					t.Errorf("%s, call %d: %d attempts over %v, %v; want %d over %v, %v", tt.name, i, len(at), at[len(at)-1].Sub(at[0]), err, c.attempts, c.wait, c.want)
				}
			}
			if h := s.Health(); h.State != BreakerClosed || n != len(tt.script) {
				t.Errorf("%s: %d attempts, %v", tt.name, n, h)
			}
		})
	}
}

// A dead child is the same error for all who waited. Each gets a copy that says
// whose it is.
func TestSharedError(t *testing.T) {
	dead := &TransportError{Reason: ReasonDisconnected, Sent: true}
	g := NewGuard(Config{Name: "s", MaxInFlight: -1, BreakerFailures: -1}, nil)
	ids := make(chan string, 32)
	var wg sync.WaitGroup
	for range cap(ids) {
		wg.Go(func() {
			var te *TransportError
			if errors.As(g.Do(t.Context(), anyCall, func(context.Context) error { return dead }), &te) {
				ids <- te.Call
			}
		})
	}
	wg.Wait()
	close(ids)
	seen := map[string]bool{}
	for id := range ids {
		seen[id] = true
	}
	if len(seen) != cap(ids) || dead.Call != "" {
		t.Errorf("%d ids for %d calls; the error itself has %q", len(seen), cap(ids), dead.Call)
	}
}

// So is one that a session has wrapped, whatever its type: the copy is found in it,
// and what it wraps is found, too.
func TestSharedErrorWrapped(t *testing.T) {
	for _, inner := range []error{&TransportError{Reason: ReasonDisconnected}, &RPCError{Code: -32603}, &ProtocolError{},
		&UnavailableError{State: BreakerOpen}, &ArgumentError{}} {
		shared := fmt.Errorf("wrapped: %w", inner)
		g := NewGuard(Config{Name: "s", MaxInFlight: -1, BreakerFailures: -1}, nil)
		ids := make(chan string, 32)
		var wg sync.WaitGroup
		for range cap(ids) {
			wg.Go(func() {
				err := g.Do(t.Context(), anyCall, func(context.Context) error { return shared })
				if !errors.Is(err, shared) || !errors.Is(err, inner) || err.Error() != shared.Error() {
					t.Errorf("%T: %v is not what was returned", inner, err)
				}
				ids <- origins(err).origin().Call
			})
		}
		wg.Wait()
		close(ids)
		seen := map[string]bool{}
		for id := range ids {
			seen[id] = true
		}
		if len(seen) != cap(ids) || origins(inner).origin().Call != "" {
			t.Errorf("%T: %d ids for %d calls", inner, len(seen), cap(ids))
		}
	}
}

// A source of jitter that panics leaves no lock and no slot behind.
func TestPanickingRand(t *testing.T) {
	for _, limit := range []int{1, 9} { // it is asked for a window, or for a wait
		broken := true
		g := NewGuard(Config{BreakerFailures: limit, MaxInFlight: 1, Retry: RetryConfig{MaxAttempts: 2}}, &Options{Rand: func(int64) int64 {
			if broken {
				panic("rand")
			}
			return 0
		}})
		for range 2 {
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%d: no panic", limit)
					}
				}()
				g.Do(t.Context(), Operation{Name: "x", Repeatable: true}, faults)
			}()
		}
		broken = false
		if err := g.Do(t.Context(), anyCall, answers); err != nil || g.Health().State != BreakerClosed || len(g.slots) != 0 {
			t.Errorf("%d: afterwards: %v, %v, %d slots taken", limit, err, g.Health(), len(g.slots))
		}
	}
}

// unannounced is a context that ends as a deadline does, and names none.
type unannounced struct {
	context.Context
	done chan struct{}
}

func (c unannounced) Done() <-chan struct{} { return c.done }

func (c unannounced) Err() error {
	select {
	case <-c.done:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// A deadline of the caller that is not where it said, as when the clock on the
// wall is set, is no fault of the server.
func TestDeadlineUnannounced(t *testing.T) {
	g := NewGuard(Config{BreakerFailures: 1}, nil)
	ctx := unannounced{t.Context(), make(chan struct{})}
	err := g.Do(ctx, Operation{Name: "x", Timeout: -1}, func(ctx context.Context) error { close(ctx.(unannounced).done); return ctx.Err() })
	var be *BudgetError
	if h := g.Health(); !errors.As(err, &be) || h.Outcome != OutcomeBudget || h.State != BreakerClosed {
		t.Errorf("%v, %v", err, h)
	}
}

// A hook that panics while the probe goes out is no fault of the server, and
// leaves the slot free.
func TestPanickingHookIsNoFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, hook := range []string{"OnState", "Trace"} {
			fail := false
			g := NewGuard(Config{BreakerFailures: 1}, &Options{
				OnState: func(Health) {
					if fail && hook == "OnState" {
						panic("hook")
					}
				},
				Trace: func(ctx context.Context, r Reach) (context.Context, func(Health, error)) {
					if fail && hook == "Trace" {
						panic("hook")
					}
					return ctx, nil
				},
			})
			g.Do(t.Context(), anyCall, faults)
			time.Sleep(33 * time.Second)
			fail = true
			func() {
				defer func() { recover() }()
				g.Do(t.Context(), anyCall, answers)
				t.Errorf("%s: no panic", hook)
			}()
			fail = false
			if err := g.Do(t.Context(), anyCall, answers); err != nil || len(g.slots) != 0 {
				t.Errorf("%s: afterwards: %v, %d slots taken", hook, err, len(g.slots))
			}
		}
	})
}

func TestFallback(t *testing.T) {
	lost := &TransportError{Origin: Origin{Server: "weather"}, Reason: ReasonDisconnected, Sent: true}
	for _, tt := range []struct {
		name  string
		err   error
		stand bool
	}{
		{"disconnected", lost, true},
		{"timeout", &TransportError{Reason: ReasonTimeout, Sent: true}, true},
		{"unavailable", &TransportError{Reason: ReasonUnavailable}, true},
		{"breaker open", &UnavailableError{State: BreakerOpen}, true},
		{"wrapped", fmt.Errorf("wrapped: %w", lost), true},
		{"429", &TransportError{Reason: ReasonUnavailable, Status: 429}, true},
		{"503", status(503), true},
		{"401", status(401), false},
		{"404", status(404), false},
		{"session lost again", &TransportError{Reason: ReasonDisconnected, Status: 404}, false},
		{"limit", &TransportError{Reason: ReasonLimit}, false},
		{"protocol", &TransportError{Reason: ReasonProtocol}, false},
		{"refusal", &RPCError{Code: -32602}, false},
		{"internal error", &RPCError{Code: -32603}, false},
		{"arguments", &ArgumentError{}, false},
		{"schema", &ProtocolError{}, false},
		{"cancelled", &TransportError{Reason: ReasonCancelled, Err: errors.Join(lost, context.Canceled)}, false},
		{"budget", &BudgetError{Err: errors.Join(lost, context.DeadlineExceeded)}, false},
		{"somebody else's", io.EOF, false},
	} {
		in := &fakeSession{call: func(context.Context, *Call) (*Result, error) { return nil, tt.err }}
		s := &FallbackSession{Session: in, Stub: func(*Call) *Result { return text("stub") }}
		r, err := s.CallTool(t.Context(), &Call{Tool: "forecast"})
		if tt.stand != (err == nil) || tt.stand && (r.Degraded != "stub" || r.Content[1].Text != "stub") || !tt.stand && err != tt.err {
			t.Errorf("%s: %+v, %v", tt.name, r, err)
		}
		if h := s.Health(); (h.Fallbacks == 1) != tt.stand {
			t.Errorf("%s: health %v", tt.name, h)
		}
	}
}

func TestFallbackOrderAndAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var fail error
		in := &fakeSession{call: func(_ context.Context, c *Call) (*Result, error) {
			if fail != nil {
				return nil, fail
			}
			if c.Tool == "broken" {
				return &Result{IsError: true}, nil
			}
			return &Result{Content: []Content{{Type: "text", Text: "sunny", Raw: json.RawMessage("{}")}}, Structured: json.RawMessage(`{"a":1}`)}, nil
		}}
		alternatives := []func(context.Context, *Call) (*Result, error){
			func(context.Context, *Call) (*Result, error) { return nil, io.EOF },
			func(context.Context, *Call) (*Result, error) { return &Result{IsError: true}, nil },
			func(context.Context, *Call) (*Result, error) { return text("from afar"), nil },
		}
		rs := NewResilientSession(in, Config{Name: "weather"}, nil)
		s := &FallbackSession{Session: rs, MaxAge: time.Minute, Alternatives: alternatives}
		oslo := &Call{Tool: "forecast", Arguments: map[string]any{"city": "Oslo", "days": 2}}
		genuine, err := s.CallTool(t.Context(), oslo)
		if err != nil || genuine.Degraded != "" || len(genuine.Content) != 1 {
			t.Fatalf("genuine: %+v, %v", genuine, err)
		}
		genuine.Content[0].Text, genuine.Structured[2] = "changed by the caller", 'x'
		s.CallTool(t.Context(), &Call{Tool: "broken"})
		fail = &TransportError{Reason: ReasonTimeout, Sent: true}
		time.Sleep(time.Minute)
		same := &Call{Tool: "forecast", Arguments: json.RawMessage(`{"city":"Oslo", "days":2}`)}
		for range 2 { // a result given away is not given again
			r, err := s.CallTool(t.Context(), same)
			if err != nil || r.Degraded != "cached 1m0s ago" || r.Content[1].Text != "sunny" || string(r.Structured) != `{"a":1}` {
				t.Fatalf("cached: %+v, %v", r, err)
			}
			want := `The server "weather" did not answer this call. What follows is not its answer to it, but a substitute (cached 1m0s ago). The call may have been carried out all the same.`
			if got := r.Content[0].Text; got != want {
				t.Errorf("text %q, want %q", got, want)
			}
			r.Content[1].Text, r.Structured[2] = "changed", 'x'
		}
		for _, c := range []*Call{{Tool: "other", Arguments: oslo.Arguments}, {Tool: "forecast"}, {Tool: "broken"},
			{Tool: "forecast", Arguments: oslo.Arguments, Meta: map[string]any{"tenant": "another"}}} {
			if r, err := s.CallTool(t.Context(), c); err != nil || r.Degraded != "alternative 3" {
				t.Errorf("%v: %+v, %v, want the third alternative", c, r, err)
			}
		}
		time.Sleep(time.Nanosecond)
		if r, err := s.CallTool(t.Context(), oslo); err != nil || r.Degraded != "alternative 3" {
			t.Errorf("too old: %+v, %v", r, err)
		}
		if h := s.Health(); h.Fallbacks != 7 || h.Server != "weather" || !strings.Contains(s.String(), `"fallbacks":7`) {
			t.Errorf("health %v", h)
		}
		s.Alternatives = nil
		if _, err := s.CallTool(t.Context(), oslo); !errors.Is(err, ReasonUnavailable) && !errors.Is(err, ReasonTimeout) {
			t.Errorf("nothing left: %v", err)
		}
		if s.unwrap() != rs {
			t.Error("unwrap")
		}
	})
}

// A substitute that has structured content alone is handed to a model as well as
// the answer was: the remark in front of it does not stand in its place.
func TestFallbackStructuredAlone(t *testing.T) {
	server := serving("x")
	server.Handler = func(context.Context, *Call) (*Result, error) {
		return &Result{Structured: json.RawMessage(`{"n":1}`)}, nil
	}
	cfg := Config{Name: "s"}
	f, err := Assemble(t.Context(), NewClient(&FallbackSession{Session: NewResilientSession(server, cfg, nil), MaxAge: time.Hour}, cfg, nil))
	if err != nil {
		t.Fatal(err)
	}
	for _, fault := range []Fault{FaultNone, FaultUnreachable} {
		server.SetFault(fault)
		r := f.Answer(t.Context(), &Call{Tool: "x"})
		if !strings.Contains(r.Text(), `{"n":1}`) || (r.Degraded != "") != (fault != FaultNone) {
			t.Errorf("%v: %q, degraded %q", fault, r.Text(), r.Degraded)
		}
	}
}

func TestFallbackMemoryIsBounded(t *testing.T) {
	size := 10
	in := &fakeSession{call: func(context.Context, *Call) (*Result, error) { return text(strings.Repeat("x", size)), nil }}
	s := &FallbackSession{Session: in, MaxAge: time.Hour}
	for i := range 1000 {
		size = 10 + 100*i
		s.CallTool(t.Context(), &Call{Tool: "t", Arguments: map[string]any{"i": i}})
		sum := 0
		for _, a := range s.kept {
			sum += a.size
		}
		if len(s.kept) > keptAnswers || s.bytes > keptBytes || s.bytes != sum || len(s.kept) == 0 {
			t.Fatalf("after %d: %d answers, %d bytes, counted %d", i, len(s.kept), sum, s.bytes)
		}
	}
	before := len(s.kept)
	size = keptBytes
	s.CallTool(t.Context(), &Call{Tool: "big"})
	if len(s.kept) != before {
		t.Errorf("an answer too big to keep left %d of %d", len(s.kept), before)
	}
	s.CallTool(t.Context(), &Call{Tool: "odd", Arguments: func() {}}) // encodes to nothing
}

func TestSaga(t *testing.T) {
	errStep, errUndo := errors.New("no credit"), errors.New("no refund")
	for _, tt := range []struct {
		name   string
		end    func(cancel context.CancelFunc) error // of the third of four steps
		undo   map[string]func(ctx context.Context) error
		log    string // what was done, in order
		undone string
		stuck  int
		is     error
	}{
		{name: "done", end: func(context.CancelFunc) error { return nil }, log: "a b c d"},
		{name: "fails", end: func(context.CancelFunc) error { return errStep }, log: "a b c -b -a", undone: "b a", is: errStep},
		{name: "the caller has gone", end: func(cancel context.CancelFunc) error { cancel(); return nil },
			log: "a b c -c -b -a", undone: "c b a", is: context.Canceled},
		{name: "a compensation fails", end: func(context.CancelFunc) error { return errStep },
			undo: map[string]func(context.Context) error{"b": func(context.Context) error { return errUndo }},
			log:  "a b c -b -a", undone: "a", stuck: 1, is: errStep},
		{name: "a compensation panics", end: func(context.CancelFunc) error { return errStep },
			undo: map[string]func(context.Context) error{"b": func(context.Context) error { panic("boom") }},
			log:  "a b c -b -a", undone: "a", stuck: 1, is: errStep},
		{name: "a compensation hangs", end: func(context.CancelFunc) error { return errStep },
			undo: map[string]func(context.Context) error{"b": func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }},
			log:  "a b c -b -a", undone: "a", stuck: 1, is: errStep},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var b bytes.Buffer
			s := Saga{Logger: slog.New(slog.NewTextHandler(&b, nil))}
			var log []string
			for _, name := range []string{"a", "b", "c", "d"} {
				s.Step(name, func(context.Context) error {
					if log = append(log, name); name == "c" {
						return tt.end(cancel)
					}
					return nil
				}, func(ctx context.Context) error {
					log = append(log, "-"+name)
					if _, ok := ctx.Deadline(); !ok || ctx.Err() != nil {
						t.Errorf("%s: the compensation of %s has no time of its own", tt.name, name)
					}
					if undo := tt.undo[name]; undo != nil {
						return undo(ctx)
					}
					return nil
				})
			}
			start := time.Now()
			err := s.Run(ctx)
			if got := strings.Join(log, " "); got != tt.log {
				t.Errorf("%s: did %s, want %s", tt.name, got, tt.log)
			}
			if got := time.Since(start); got > 30*time.Second {
				t.Errorf("%s: took %v", tt.name, got)
			}
			if tt.is == nil {
				if err != nil {
					t.Errorf("%s: %v", tt.name, err)
				}
				return
			}
			var se *SagaError
			if !errors.As(err, &se) || !errors.Is(err, tt.is) || strings.Join(se.Undone, " ") != tt.undone || len(se.Stuck) != tt.stuck {
				t.Fatalf("%s: %#v", tt.name, err)
			}
			if got, want := strings.Contains(err.Error(), `NOT UNDONE: step "b"`), tt.stuck > 0; got != want || (b.Len() > 0) != want {
				t.Errorf("%s: %v, logged %q", tt.name, err, b.String())
			}
		})
	}
}

type panickingHandler struct{ slog.Handler }

func (panickingHandler) Enabled(context.Context, slog.Level) bool  { return true }
func (panickingHandler) Handle(context.Context, slog.Record) error { panic("log") }

// A step that panics or ends its goroutine is undone, too, and the panic goes on.
func TestSagaPanic(t *testing.T) {
	for name, end := range map[string]func(){"panic": func() { panic("boom") }, "goexit": runtime.Goexit} {
		var s Saga
		var log []string
		var value any
		s.Step("a", func(context.Context) error { return nil }, func(context.Context) error { log = append(log, "-a"); return nil })
		s.Step("b", func(context.Context) error { end(); return nil }, nil)
		var wg sync.WaitGroup
		wg.Go(func() {
			defer func() { value = recover() }()
			s.Run(t.Context())
		})
		wg.Wait()
		if len(log) != 1 || (value == "boom") != (name == "panic") {
			t.Errorf("%s: undone %v, recovered %v", name, log, value)
		}
	}

	// A compensation that ends its goroutine, or whose failure cannot be logged,
	// does not spare those before it.
	for name, end := range map[string]func() error{"goexit": func() error { runtime.Goexit(); return nil }, "logger": func() error { return io.EOF }} {
		s := Saga{Logger: slog.New(panickingHandler{})}
		var log []string
		for _, step := range []string{"a", "b", "c"} {
			s.Step(step, func(context.Context) error { return nil }, func(context.Context) error {
				if log = append(log, "-"+step); step != "a" {
					return end()
				}
				return nil
			})
		}
		s.Step("d", func(context.Context) error { return io.EOF }, nil)
		var wg sync.WaitGroup
		wg.Go(func() {
			defer func() { recover() }()
			s.Run(t.Context())
		})
		wg.Wait()
		if got := strings.Join(log, " "); got != "-c -b -a" {
			t.Errorf("%s: undone %s", name, got)
		}
	}
	var empty Saga
	if err := empty.Run(t.Context()); err != nil {
		t.Errorf("an empty saga: %v", err)
	}
}

func TestPolicyAllocs(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	near, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	result := text("hi")
	s := &countless{result: result}
	cfg := Config{Name: "s", CallTimeout: time.Hour}
	plain, self := NewResilientSession(s, cfg, nil), NewResilientSession(&selfish{countless{result: result}}, cfg, nil)
	g := NewGuard(cfg, nil)
	open := NewGuard(Config{BreakerFailures: 1, BreakerReset: time.Hour}, nil)
	open.Do(ctx, anyCall, faults)
	call := &Call{Tool: "echo"}
	for _, tt := range []struct {
		name string
		max  float64
		f    func()
	}{
		{"guard, ceiling binds", 4, func() { g.Do(ctx, anyCall, answers) }},
		{"guard, run binds", 0, func() { g.Do(near, anyCall, answers) }},
		{"session, ceiling binds", 5, func() { plain.CallTool(ctx, call) }},
		{"session, run binds", 1, func() { plain.CallTool(near, call) }},
		{"session that bounds itself", 1, func() { self.CallTool(ctx, call) }},
		{"refusal", 1, func() { open.Do(ctx, anyCall, answers) }},
	} {
		if n := testing.AllocsPerRun(100, tt.f); n > tt.max {
			t.Errorf("%s: %v allocations, want at most %v", tt.name, n, tt.max)
		} else {
			t.Logf("%s: %v allocations", tt.name, n)
		}
	}
}

// countless is a session that costs nothing.
type countless struct {
	fakeSession
	result *Result
}

func (s *countless) CallTool(context.Context, *Call) (*Result, error) { return s.result, nil }

type selfish struct{ countless }

func (s *selfish) boundsItself() {}

func BenchmarkPolicy(b *testing.B) {
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	near, stop := context.WithTimeout(b.Context(), 30*time.Minute)
	defer stop()
	cfg := Config{Name: "s", CallTimeout: time.Hour}
	g := NewGuard(cfg, nil)
	open := NewGuard(Config{BreakerFailures: 1, BreakerReset: time.Hour}, nil)
	open.Do(ctx, anyCall, faults)
	self := NewResilientSession(&selfish{countless{result: text("hi")}}, cfg, nil)
	call := &Call{Tool: "echo"}
	for _, bb := range []struct {
		name string
		f    func()
	}{
		{"CeilingBinds", func() { g.Do(ctx, anyCall, answers) }},
		{"RunBinds", func() { g.Do(near, anyCall, answers) }},
		{"BoundsItself", func() { self.CallTool(ctx, call) }},
		{"Refusal", func() { open.Do(ctx, anyCall, answers) }},
	} {
		b.Run(bb.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				bb.f()
			}
		})
		b.Run(bb.name+"Contended", func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					bb.f()
				}
			})
		})
	}
}
