package mcp

// The policy: what happens when a server is slow, unavailable or wrong. First
// what on-call sees (Outcome, Health, Reach); then Guard, whose one loop bounds,
// breaks, retries and observes; classify, the table of what each ending means;
// and the sessions and the Saga that are made of these. Nothing here has a
// goroutine, or a timer that outlives a call.

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// An Outcome is the class of what came of a reach.
type Outcome string

const (
	OutcomeOK        Outcome = "ok"        // an answer, even if the tool says that it failed
	OutcomeFault     Outcome = "fault"     // no answer: disconnected, unavailable, an internal error
	OutcomeTimeout   Outcome = "timeout"   // no answer within the ceiling, or a read stalled
	OutcomeProtocol  Outcome = "protocol"  // an answer that is none; always worth an alert
	OutcomeRefused   Outcome = "refused"   // the answer was no
	OutcomeCancelled Outcome = "cancelled" // the caller gave up
	OutcomeBudget    Outcome = "budget"    // the run was out of time
)

// Health is what on-call sees of a server: one value, read under one lock, so
// that its parts belong together. The fields from Outcome to Latency describe
// the last reach that was settled in time; the counters only rise.
type Health struct {
	Server              string        `json:"server"`
	State               BreakerState  `json:"state"`
	Outcome             Outcome       `json:"outcome"`    // empty before the first reach
	ErrorType           string        `json:"error_type"` // OpenTelemetry's error.type; empty if there is none
	Operation           string        `json:"operation"`
	Retries             int           `json:"retries"`         // of the same operation, before this reach
	Latency             time.Duration `json:"latency_seconds"` // in JSON a number of seconds, like RetryAfter
	ConsecutiveFailures int           `json:"consecutive_failures"`
	RetryAfter          time.Duration `json:"retry_after_seconds"` // until a probe may go; 0 if one may, or is out

	Calls     uint64 `json:"calls"`     // reaches that were admitted
	Faults    uint64 `json:"faults"`    // of these, faults of the server, settled in time
	Late      uint64 `json:"late"`      // of these, settled after the breaker had moved on
	Retried   uint64 `json:"retried"`   // of these, not the first of their operation
	Opened    uint64 `json:"opened"`    // how often the breaker opened
	Refused   uint64 `json:"refused"`   // operations that the breaker refused
	Fallbacks uint64 `json:"fallbacks"` // results that a FallbackSession gave instead
}

// MarshalJSON renders durations as seconds.
func (h Health) MarshalJSON() ([]byte, error) {
	type plain Health
	return json.Marshal(struct {
		plain
		Latency    float64 `json:"latency_seconds"`
		RetryAfter float64 `json:"retry_after_seconds"`
	}{plain(h), h.Latency.Seconds(), h.RetryAfter.Seconds()})
}

// String renders the value as JSON.
func (h Health) String() string {
	b, _ := h.MarshalJSON() // nothing in it can fail
	return string(b)
}

// LogValue implements [slog.LogValuer].
func (h Health) LogValue() slog.Value {
	return slog.GroupValue(slog.String("server", h.Server), slog.String("state", h.State.String()),
		slog.String("outcome", string(h.Outcome)), slog.String("error_type", h.ErrorType),
		slog.String("operation", h.Operation), slog.Int("retries", h.Retries), slog.Duration("latency", h.Latency),
		slog.Int("consecutive_failures", h.ConsecutiveFailures), slog.Duration("retry_after", h.RetryAfter),
		slog.Uint64("calls", h.Calls), slog.Uint64("faults", h.Faults), slog.Uint64("late", h.Late),
		slog.Uint64("retried", h.Retried), slog.Uint64("opened", h.Opened), slog.Uint64("refused", h.Refused), slog.Uint64("fallbacks", h.Fallbacks))
}

// A Reach is one attempt against a server, as [Options.Trace] sees it begin.
type Reach struct {
	Server    string
	Operation string       // "connect", "tools/call", …
	Tool      string       // of a call
	Call      string       // the id of the operation, as in its errors and log lines
	Attempt   int          // from 1; the transport's own tries in reaches before are counted
	State     BreakerState // at admission
	Protocol  string       // the revision agreed upon; empty if unknown
	Transport string       // "stdio" or "http"; empty if unknown
}

// Name is the name of the reach's span: "mcp.<server>.<operation>".
func (r Reach) Name() string { return "mcp." + r.Server + "." + r.Operation }

// Attrs are the attributes of the reach's span: ours, and those that
// OpenTelemetry's conventions for MCP name. No argument or result is among
// them. The span's error.type, when it ends, is [Health.ErrorType].
func (r Reach) Attrs() []slog.Attr {
	method, execute := r.Operation, ""
	if method == "connect" {
		method = "initialize"
	}
	if r.Tool != "" {
		execute = "execute_tool"
	}
	wire := map[string][2]string{"stdio": {"pipe", ""}, "http": {"tcp", "http"}}[r.Transport]
	return slices.DeleteFunc([]slog.Attr{
		slog.String("adk.mcp.server", r.Server), slog.String("adk.mcp.operation", r.Operation),
		slog.String("adk.mcp.breaker", r.State.String()), slog.String("adk.mcp.call", r.Call),
		slog.Int("adk.mcp.attempt", r.Attempt), slog.String("mcp.method.name", method),
		slog.String("gen_ai.tool.name", r.Tool), slog.String("gen_ai.operation.name", execute),
		slog.String("mcp.protocol.version", r.Protocol),
		slog.String("network.transport", wire[0]), slog.String("network.protocol.name", wire[1]),
	}, func(a slog.Attr) bool { return a.Value.String() == "" })
}

// An Operation says what a [Guard] is asked to do.
type Operation struct {
	Name string // for errors, spans and health: "tools/call"
	Tool string // of a call; may be empty
	// Repeatable says that running the operation twice does no harm: it only
	// reads, or whoever runs it knows its idempotency key.
	Repeatable bool
	// Timeout is the ceiling of one attempt: 0 means [Config.CallTimeout],
	// negative none.
	Timeout time.Duration
}

// A Guard is the policy of one server, or of anything else that can be slow,
// unavailable or wrong: a tool handler may keep one for its database. It reads
// Name, CallTimeout, MaxInFlight, Retry, BreakerFailures and BreakerReset of its
// Config, is safe for concurrent use, and has no goroutine.
type Guard struct {
	cfg    *Config // not changed; a pointer, behind which fmt does not look for secrets
	opt    Options
	info   func() *ServerInfo // for spans; may be nil
	slots  chan struct{}      // an element for each reach in flight
	base   time.Time          // instants are durations since
	prefix string             // of call ids
	ids    atomic.Uint64      // call ids made

	mu         sync.Mutex // guards the fields below; held while opt.Rand is called
	breaker    breaker
	cause      error    // what the last fault was, in one word; may be nil
	health     Health   // but for what the breaker knows
	events     []func() // transitions to tell of, oldest first
	delivering bool     // somebody is telling
}

// NewGuard returns the policy that cfg declares. A nil o means defaults.
func NewGuard(cfg Config, o *Options) *Guard {
	cfg = cfg.withDefaults()
	g := &Guard{cfg: &cfg, base: time.Now(), prefix: fmt.Sprintf("%08x-", rand.Uint32())}
	if o != nil {
		g.opt = *o
	}
	if g.opt.Rand == nil {
		g.opt.Rand = rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())).Int64N
	}
	if cfg.MaxInFlight < 0 {
		cfg.MaxInFlight = math.MaxInt32 // no limit, and a channel of nothing takes no memory
	}
	g.slots = make(chan struct{}, cfg.MaxInFlight)
	g.breaker = breaker{limit: g.cfg.BreakerFailures, reset: max(0, g.cfg.BreakerReset), draw: g.drawLocked}
	g.health.Server = g.cfg.Name
	return g
}

// Do runs fn under the policy: at most MaxInFlight at once, each attempt within
// its ceiling and within what is left of the run, none while the breaker is
// open, and again after a jittered wait where that is safe.
//
// An error of this package is judged by what it says: an answer, be it a refusal,
// shows that the server is alive; a missing answer is a fault. Any other error of
// fn is a fault; an fn that has a "no" to report keeps it and returns nil. A fault
// is retried if the operation is repeatable, or if a [TransportError] is certain
// that nothing was sent. A panic of fn counts as a fault, and goes on.
//
// The error is that of the last attempt; or an [UnavailableError], if the breaker refused
// the first; or a [TransportError] with [ReasonLimit], if no slot came free within the
// ceiling; or, around the last fault, a [BudgetError] or a TransportError with
// [ReasonCancelled], if the run or the caller ended it. In an error of this package, Sent
// covers all attempts, and GaveUp says why there was no other:
//
//	answered   what came back settles it, or would come again
//	unsafe     the operation may have run, and may not run twice
//	exhausted  all attempts were used, no slot came free, or the server asked for too long a wait
//	deadline   the run is over, or would be before another attempt
//	breaker    the breaker is open
//	cancelled  the caller gave up
func (g *Guard) Do(ctx context.Context, op Operation, fn func(ctx context.Context) error) error {
	return g.do(ctx, op, 0, reachFunc(fn))
}

// Health returns the state of the breaker and what came of the last reach.
func (g *Guard) Health() Health {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.fillLocked(g.health, g.now())
}

// String renders [Guard.Health] as JSON, which makes g an [expvar.Var].
func (g *Guard) String() string { return g.Health().String() }

// A reacher makes one reach. It is an interface so that a call of a tool needs
// one allocation for all that it captures.
type reacher interface {
	reach(ctx context.Context) error
}

type reachFunc func(ctx context.Context) error

func (f reachFunc) reach(ctx context.Context) error { return f(ctx) }

// An operation is an Operation on its way.
type operation struct {
	Operation
	id       string        // made when first needed
	self     time.Duration // positive: the session keeps the ceiling itself, and may need this much more to connect
	end      time.Duration // the run's; the largest duration if it has none
	ownEnd   bool          // that is Options.Deadline, of which the context knows nothing
	reaches  int           // admitted
	attempts int           // ended, and each with what the transport tried within it
	sent     bool          // the server may have run one of them
	fault    error         // the last one that was followed by another attempt
}

// do is the loop: retry outside, breaker inside, ceiling innermost.
func (g *Guard) do(ctx context.Context, op Operation, self time.Duration, w reacher) error {
	o := operation{Operation: op, self: self, end: math.MaxInt64}
	o.Timeout = cmp.Or(op.Timeout, g.cfg.CallTimeout)
	if d, ok := ctx.Deadline(); ok {
		o.end = d.Sub(g.base)
	}
	if d := g.opt.Deadline; !d.IsZero() && d.Sub(g.base) < o.end {
		o.end, o.ownEnd = d.Sub(g.base), true
	}
	for {
		r, err := g.attempt(ctx, &o, w)
		if err == nil || r.retry == ended {
			return err
		}
		if r.class == OutcomeProtocol {
			g.log(ctx, slog.LevelWarn, "protocol outcome", &o, r.class, err)
		}
		wait, gaveUp := g.decide(&o, r)
		if gaveUp != "" {
			return g.stamp(&o, err, gaveUp)
		}
		o.fault = err
		g.log(ctx, slog.LevelDebug, "retry", &o, r.class, err, slog.Duration("wait", wait))
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done(): // the next attempt says so
			timer.Stop()
		}
	}
}

// attempt makes one reach, under one slot and one ticket. The order is the
// promise: who waits for a slot holds no ticket, since a queued probe would hold
// the window and do nothing with it; and a run without time asks nobody.
func (g *Guard) attempt(ctx context.Context, o *operation, w reacher) (r ruling, err error) {
	if err = g.acquire(ctx, o); err != nil {
		return ruling{retry: ended}, err
	}
	start := g.now()
	bound, runBinds := o.bound(start, o.self)
	t, state, err := g.admit(ctx, o, start, bound)
	if err != nil {
		g.release()
		return ruling{retry: ended}, err
	}
	h, spanEnd := Health{}, func(Health, error) {}
	// What holds if this function is left by a panic or runtime.Goexit: of a
	// hook, until the reach begins.
	r, err = ruling{class: OutcomeFault, verdict: neither, kind: "panic"}, errAbandoned
	// Last to first. Each is done whatever becomes of those before: hooks panic.
	defer g.deliver()
	defer func() { spanEnd(h, err) }()
	defer g.release()
	defer func() { h = g.settle(o, t, r, start) }()
	g.deliver() // that a probe goes out
	rctx, cancel := ctx, func() {}
	if g.opt.Trace != nil {
		var end func(Health, error)
		if rctx, end = g.opt.Trace(ctx, g.describe(o, state)); end != nil {
			spanEnd = end
		}
	}
	// A derived context is most of what a policy costs. None is needed where
	// the caller's, or the session itself, bounds the reach.
	if runBinds && o.ownEnd {
		rctx, cancel = context.WithDeadline(rctx, g.opt.Deadline)
	} else if !runBinds && o.self == 0 {
		rctx, cancel = context.WithTimeoutCause(rctx, bound, ReasonTimeout)
	}
	defer cancel()
	r.verdict = fault // from here on the server's
	if err = w.reach(rctx); err == nil {
		return ruling{class: OutcomeOK, verdict: good}, nil
	}
	var by Outcome // who ended it, if it was not the other side
	switch {
	case gone(ctx):
		by = OutcomeCancelled
	case runBinds && (rctx.Err() != nil || g.now() >= o.end):
		by = OutcomeBudget
	case rctx.Err() != nil:
		by = OutcomeTimeout
	}
	r = classify(err, by)
	return r, g.dress(o, r, err)
}

// bound says how long an attempt may take that begins now, and whether it is the
// run that ends it. That is settled by arithmetic, beforehand: read from errors
// afterwards, a tie would go either way. It goes to the run.
func (o *operation) bound(now, more time.Duration) (d time.Duration, runBinds bool) {
	d = plus(max(0, o.Timeout), more)
	if left := o.end - now; o.Timeout < 0 || left <= d {
		return left, true
	}
	return d, false
}

// acquire takes a slot. The wait for one is bounded like an attempt, but is none:
// a queue of ours says nothing about the server.
func (g *Guard) acquire(ctx context.Context, o *operation) error {
	select {
	case g.slots <- struct{}{}:
		return nil
	default:
	}
	patience, runBinds := o.bound(g.now(), 0)
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case g.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return g.ended(o, gone(ctx))
	case <-timer.C:
		if runBinds {
			return g.ended(o, false)
		}
		return g.stamp(o, &TransportError{Reason: ReasonLimit, Err: o.fault,
			Detail: "all " + strconv.Itoa(cap(g.slots)) + " slots stayed taken"}, "exhausted")
	}
}

func (g *Guard) release() { <-g.slots }

// admit asks the run, the caller and then the breaker. If the breaker refuses a
// further attempt the error is the last fault, because the caller wants to know
// what became of its own operation.
func (g *Guard) admit(ctx context.Context, o *operation, now, bound time.Duration) (ticket, BreakerState, error) {
	if o.end <= now || ctx.Err() != nil {
		return ticket{}, 0, g.ended(o, gone(ctx))
	}
	if o.Timeout < 0 { // no ceiling for the reach, but one for its lease if it is a probe
		bound = min(bound, max(0, g.cfg.CallTimeout))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	was := g.breaker.mode
	t, ok := g.breaker.admit(now, bound)
	state := g.breaker.mode
	if !ok && o.fault != nil {
		return t, state, g.stamp(o, o.fault, "breaker")
	}
	if !ok {
		g.health.Refused++
		e := &UnavailableError{Origin: Origin{Server: g.cfg.Name, Op: o.Name, GaveUp: "breaker"},
			State: state, RetryAfter: g.breaker.wait(now), Err: g.cause}
		if g.opt.Trace != nil || g.opt.Logger != nil { // else the id could be found nowhere, and costs an allocation
			e.Call = g.id(o)
		}
		return t, state, e
	}
	g.health.Calls++
	if o.reaches++; o.reaches > 1 {
		g.health.Retried++
	}
	g.movedLocked(o, was, now)
	return t, state, nil
}

// settle tells the breaker what came of a reach, and returns the health as the
// reach leaves it, if there are spans. A reach that ends too late leaves all as it
// is: it speaks of a time gone by, to nobody but its caller.
func (g *Guard) settle(o *operation, t ticket, r ruling, start time.Duration) (h Health) {
	now := g.now()
	g.mu.Lock()
	defer g.mu.Unlock()
	was := g.breaker.mode
	if late := g.breaker.settle(t, r.verdict, now); !late {
		if r.verdict == fault {
			g.cause = r.cause
		}
		g.health.take(o, r, now-start)
		g.movedLocked(o, was, now)
	}
	if g.opt.Trace != nil {
		h = g.fillLocked(g.health, now)
		h.take(o, r, now-start)
	}
	return h
}

// take notes what came of a reach.
func (h *Health) take(o *operation, r ruling, took time.Duration) {
	h.Outcome, h.ErrorType, h.Operation, h.Retries, h.Latency = r.class, r.kind, o.Name, o.reaches-1, took
}

// fillLocked returns h with what the breaker knows. It requires that g.mu is held.
func (g *Guard) fillLocked(h Health, now time.Duration) Health {
	b := &g.breaker
	h.State, h.RetryAfter = b.state(now), b.wait(now)
	h.ConsecutiveFailures, h.Faults, h.Late = b.faults, b.settled[fault], b.late
	return h
}

// movedLocked queues the transition of the breaker, if there was one.
func (g *Guard) movedLocked(o *operation, was BreakerState, now time.Duration) {
	state := g.breaker.mode
	if state == was {
		return
	}
	level := slog.LevelInfo
	if state == BreakerOpen {
		level = slog.LevelWarn
		g.health.Opened++
	}
	if g.opt.OnState == nil && g.opt.Logger == nil {
		return
	}
	h := g.fillLocked(g.health, now)
	h.State = state
	by := operation{Operation: o.Operation, id: g.id(o), attempts: o.reaches}
	g.events = append(g.events, func() {
		g.log(context.Background(), level, "breaker "+state.String(), &by, h.Outcome, nil, slog.String("state", state.String()))
		if g.opt.OnState != nil {
			g.opt.OnState(h)
		}
	})
}

// deliver tells of transitions in order and outside the lock. One goroutine at a
// time does so; the others, and a hook that comes back in here, leave theirs to
// it. A gauge that is fed out of order stays wrong for ever.
func (g *Guard) deliver() {
	if g.opt.OnState == nil && g.opt.Logger == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for !g.delivering && len(g.events) > 0 {
		tell := g.events[0]
		g.events = slices.Delete(g.events, 0, 1)
		g.delivering = true
		func() {
			g.mu.Unlock()
			defer func() { // even if the hook panics
				g.mu.Lock()
				g.delivering = false
			}()
			tell()
		}()
	}
}

// log writes a line: at Warn that the breaker opened and each protocol outcome,
// at Info its other transitions, at Debug each retry. No word of a server is in
// a line at Info or above.
func (g *Guard) log(ctx context.Context, level slog.Level, msg string, o *operation, class Outcome, err error, more ...slog.Attr) {
	l := g.opt.Logger
	if l == nil || !l.Enabled(ctx, level) {
		return
	}
	attrs := append(more, slog.String("server", g.cfg.Name), slog.String("op", o.Name), slog.String("call", g.id(o)),
		slog.String("class", string(class)), slog.Int("attempt", o.attempts))
	if err != nil {
		attrs = append(attrs, slog.String("err", err.Error()))
	}
	l.LogAttrs(ctx, level, "mcp: "+msg, attrs...)
}

// id returns the id of an operation; most never need one.
func (g *Guard) id(o *operation) string {
	if o.id == "" {
		o.id = g.prefix + strconv.FormatUint(g.ids.Add(1), 10)
	}
	return o.id
}

func (g *Guard) describe(o *operation, state BreakerState) Reach {
	r := Reach{Server: g.cfg.Name, Operation: o.Name, Tool: o.Tool, Call: g.id(o), Attempt: o.attempts + 1,
		State: state, Transport: g.cfg.Transport}
	if g.info != nil && g.info() != nil { // if there is one, there stays one
		r.Protocol = g.info().Protocol
	}
	return r
}

// decide says how long to wait for the next attempt, or why there is none. This
// is the one place where a retry is granted.
func (g *Guard) decide(o *operation, r ruling) (wait time.Duration, gaveUp string) {
	c := &g.cfg.Retry
	switch {
	case r.retry == never:
		return 0, "answered"
	case r.retry == ifSafe && r.sent && !o.Repeatable:
		return 0, "unsafe"
	case o.attempts >= c.MaxAttempts || r.after > max(0, c.MaxRetryAfter):
		return 0, "exhausted"
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.breaker.mode == BreakerOpen {
		return 0, "breaker"
	}
	wait = plus(r.after, jitter(ceiling(c.BaseDelay, c.MaxDelay, o.attempts), g.drawLocked))
	if wait >= o.end-g.now() { // said now, with the fault in hand, and not when the run is over
		return 0, "deadline"
	}
	return wait, ""
}

// dress books an attempt that ended in err, and returns the error that tells of
// it; nil if that is a result whose tool failed.
func (g *Guard) dress(o *operation, r ruling, err error) error {
	o.attempts += max(1, r.tries)
	o.sent = o.sent || r.sent
	te, _ := origins(err).(*TransportError)
	switch {
	case r.class == OutcomeOK:
		return nil
	case r.class == OutcomeCancelled && o.fault == nil && te != nil && te.Reason == ReasonCancelled && te.Err != nil:
		return g.stamp(o, te, "cancelled") // the session knows more of it than we do
	case r.retry == ended:
		return g.ended(o, r.class == OutcomeCancelled)
	case r.class != OutcomeTimeout || te != nil && te.Reason == ReasonTimeout:
		return err
	}
	// The ceiling passed, and the session speaks of its context, in which the
	// caller would see a deadline of its own.
	e := TransportError{Sent: r.sent}
	if te != nil {
		e = *te
	}
	e.Reason, e.Detail, e.Err = ReasonTimeout, "no answer within "+o.Timeout.String(), nil
	return &e
}

// ended is the error of an operation that its caller or its run ended.
func (g *Guard) ended(o *operation, cancelled bool) error {
	cause, gaveUp := context.DeadlineExceeded, "deadline"
	if cancelled {
		cause, gaveUp = context.Canceled, "cancelled"
	}
	if o.fault != nil {
		cause = errors.Join(g.stamp(o, o.fault, gaveUp), cause)
	}
	if cancelled {
		return g.stamp(o, &TransportError{Reason: ReasonCancelled, Err: cause}, gaveUp)
	}
	return g.stamp(o, &BudgetError{Breached: "run_seconds", Sent: o.sent, Err: cause}, gaveUp)
}

// stamp says on err which operation it ended, and why. It does so on a copy: a
// session may hand one error to many callers.
func (g *Guard) stamp(o *operation, err error, gaveUp string) error {
	ours := origins(err)
	if ours == nil {
		return err
	}
	own := ownCopy(ours).(originator)
	if e, ok := own.(*TransportError); ok {
		e.Sent = e.Sent || o.sent // an earlier attempt may have run, whatever became of the last
	}
	if by := own.origin(); by.Call == "" { // else a policy further in has signed it
		*by = Origin{cmp.Or(by.Server, g.cfg.Name), cmp.Or(by.Op, o.Name), g.id(o), o.attempts, gaveUp}
	}
	if err == error(ours) {
		return own
	}
	return &stamped{err, own}
}

// A stamped error is one of somebody else's, around one of ours that he may have
// handed to others too: a copy is found in its place.
type stamped struct {
	error
	own originator
}

func (e *stamped) Unwrap() error { return e.error }

// As finds the copy first.
func (e *stamped) As(target any) bool { return errors.As(e.own, target) }

// drawLocked returns a number in [0, n), whatever the source does. It requires
// that g.mu is held.
func (g *Guard) drawLocked(n int64) int64 { return min(max(0, g.opt.Rand(n)), n-1) }

func (g *Guard) now() time.Duration { return time.Since(g.base) }

// origins returns the outermost error of this package in err, or nil.
func origins(err error) originator {
	if err == nil {
		return nil
	}
	var o originator // which escapes: a call that succeeds does not pay for it
	errors.As(err, &o)
	return o
}

// gone reports whether the caller gave up, which is not to run out of time.
func gone(ctx context.Context) bool {
	return ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded)
}

// ceiling is the longest wait after attempt n: base, doubled n-1 times, at most
// limit, and never a number on the way there that does not fit.
func ceiling(base, limit time.Duration, n int) time.Duration {
	if base <= 0 || limit <= 0 || n < 1 {
		return 0
	}
	if s := n - 1; s < 63 && base <= limit>>s {
		return base << s
	}
	return limit
}

// jitter draws a wait from [0, c]: full jitter, the least work for all together.
func jitter(c time.Duration, draw func(n int64) int64) time.Duration {
	if c <= 0 {
		return 0
	}
	return time.Duration(draw(min(int64(c), math.MaxInt64-1) + 1))
}

// A ruling is what an ending means. Its zero value is a fault that is not retried.
type ruling struct {
	class   Outcome
	verdict verdict
	retry   retry
	kind    string        // OpenTelemetry's error.type
	sent    bool          // the server may have run the request
	after   time.Duration // how long it asked to be left alone
	tries   int           // of the transport
	cause   error         // one word, for those whom the breaker will refuse
}

// A retry says whether another attempt may follow.
type retry uint8

const (
	never  retry = iota // it would come out the same
	ifSafe              // if nothing was sent, or the operation is repeatable
	always              // the answer was "not run"
	ended               // the run or the caller ended the operation
)

var (
	errToolFailed = errors.New("mcp: the tool failed")                   // of a reach: a result with isError
	errAbandoned  = errors.New("mcp: it panicked or left its goroutine") // a reach, or a compensation
)

// classify is the table of what each ending means. When several things are true
// at once, a definite answer or status is what it is, whatever the contexts say
// since; then come the caller's cancel, the run's end and the ceiling, one of
// which by is, if it is not empty; and last what the transport reports.
func classify(err error, by Outcome) ruling {
	switch e := origins(err).(type) {
	case *RPCError:
		r := ruling{class: OutcomeRefused, verdict: good, kind: strconv.Itoa(e.Code), sent: true}
		if e.Status >= 500 { // whatever the body says
			r.byStatus(&TransportError{Status: e.Status})
		} else if e.Code == -32603 { // what HTTP calls a 500
			r.class, r.verdict = OutcomeFault, fault
		}
		return r
	case *ProtocolError: // it answered: one bad tool must not hide the others
		return ruling{class: OutcomeProtocol, verdict: good, kind: "protocol", sent: true}
	case *ArgumentError:
		return ruling{class: OutcomeRefused, verdict: neither, kind: "refused"}
	case *UnavailableError: // of another policy, further in
		return ruling{class: OutcomeRefused, verdict: neither, kind: "breaker_open"}
	case *BudgetError: // of another policy, for which our ceiling was the end of the run
		r := ruling{sent: e.Sent}
		r.byReason(&TransportError{}, cmp.Or(by, OutcomeBudget))
		return r
	case *TransportError:
		r := ruling{kind: string(e.Reason), sent: e.Sent, tries: e.Tries, cause: e.Reason}
		if e.Status >= 300 {
			r.byStatus(e)
		} else {
			r.byReason(e, by)
		}
		return r
	}
	if err == errToolFailed {
		return ruling{class: OutcomeOK, verdict: good, kind: "tool_error"}
	}
	r := ruling{kind: "_OTHER", sent: true}
	r.byReason(&TransportError{Reason: ReasonDisconnected, Sent: true}, by)
	return r
}

// byReason is the part of the table for what is neither an answer nor a status.
func (r *ruling) byReason(e *TransportError, by Outcome) {
	if by == "" && e.Reason == ReasonCancelled {
		by = OutcomeCancelled
		if errors.Is(e.Err, context.DeadlineExceeded) {
			by = OutcomeBudget
		}
	}
	switch {
	case by == OutcomeCancelled:
		r.class, r.verdict, r.retry, r.kind = by, neither, ended, "cancelled"
	case by == OutcomeBudget:
		r.class, r.verdict, r.retry, r.kind = by, neither, ended, "run_deadline"
	case by == OutcomeTimeout || e.Reason == ReasonTimeout:
		r.class, r.retry, r.kind, r.cause = OutcomeTimeout, ifSafe, "timeout", ReasonTimeout
	case e.Reason == ReasonLimit: // it does answer, and our limit stops it: no fault, and no proof of health
		r.class, r.verdict = OutcomeProtocol, neither
	case e.Reason == ReasonProtocol: // nobody answered our request
		r.class = OutcomeProtocol
	default:
		r.class, r.retry = OutcomeFault, ifSafe
		if cert := (*tls.CertificateVerificationError)(nil); errors.As(e.Err, &cert) {
			r.retry = never
		}
	}
}

// byStatus is the part of the table that HTTP decides. A 4xx may be the word of a
// gateway, and proves nothing about the server behind it.
func (r *ruling) byStatus(e *TransportError) {
	switch s := e.Status; {
	case s == 429: // alive, asking for less, and "not run"
		r.class, r.verdict, r.retry = OutcomeRefused, neither, always
	case s == 408, s >= 500 && s != 501 && s != 505:
		r.class, r.verdict, r.retry = OutcomeFault, fault, ifSafe
	case s >= 500:
		r.class, r.verdict = OutcomeFault, fault
	case s == 401, s == 403, s == 413, e.Reason == ReasonDisconnected && (s == 400 || s == 404): // a lost session
		r.class, r.verdict = OutcomeRefused, neither
	case s >= 400:
		r.class, r.verdict = OutcomeProtocol, neither
	default: // a redirect, which answers nothing
		r.class, r.verdict = OutcomeProtocol, fault
	}
	r.kind = strconv.Itoa(e.Status)
	if e.Status == 408 || e.Status == 429 || e.Status == 503 {
		r.after = max(0, e.RetryAfter)
	}
}

// A ResilientSession puts the policy of a [Guard] around a [Session]. It is a
// Session itself, so nothing above it changes; it has no lock and no goroutine of
// its own, and is safe for concurrent use if the session within is.
type ResilientSession struct {
	inner Session
	guard *Guard
	self  time.Duration // see operation.self
}

// NewResilientSession returns s under the policy that cfg declares. A nil o means
// defaults.
func NewResilientSession(s Session, cfg Config, o *Options) *ResilientSession {
	r := &ResilientSession{inner: s, guard: NewGuard(cfg, o)}
	if _, ok := s.(boundsItself); ok {
		r.self = max(1, r.guard.cfg.ConnectTimeout)
	}
	if speaker, ok := innermost(s).(interface{ serverInfo() *ServerInfo }); ok {
		r.guard.info = speaker.serverInfo
	}
	return r
}

// Initialize connects, if need be, within [Config.ConnectTimeout]. It is
// repeatable. Its errors, like those of the other methods, are those of [Guard.Do].
func (s *ResilientSession) Initialize(ctx context.Context) (info *ServerInfo, err error) {
	err = s.read(ctx, "connect", s.guard.cfg.ConnectTimeout, func(ctx context.Context) (err error) {
		info, err = s.inner.Initialize(ctx)
		return err
	})
	return info, err
}

// ListTools reads the whole tool list, within [Config.DiscoveryTimeout]. It is
// repeatable.
func (s *ResilientSession) ListTools(ctx context.Context) (tools []Tool, err error) {
	err = s.read(ctx, "tools/list", s.guard.cfg.DiscoveryTimeout, func(ctx context.Context) (err error) {
		tools, err = s.inner.ListTools(ctx)
		return err
	})
	return tools, err
}

func (s *ResilientSession) read(ctx context.Context, name string, timeout time.Duration, fn reachFunc) error {
	return s.guard.do(ctx, Operation{Name: name, Repeatable: true, Timeout: timeout}, s.self, fn)
}

// CallTool calls a tool, each attempt within [Config.CallTimeout]. The call is
// repeatable if it has an idempotency key, or if its tool is annotated so and
// [Config.TrustAnnotations] is set.
func (s *ResilientSession) CallTool(ctx context.Context, call *Call) (*Result, error) {
	w := &toolReach{session: s.inner, call: call}
	op := Operation{Name: "tools/call", Tool: call.Tool, Repeatable: call.IdempotencyKey != "" || call.repeatable}
	if err := s.guard.do(ctx, op, s.self, w); err != nil {
		return nil, err
	}
	return w.result, nil
}

type toolReach struct {
	session Session
	call    *Call
	result  *Result
}

func (t *toolReach) reach(ctx context.Context) (err error) {
	t.result, err = t.session.CallTool(ctx, t.call)
	if err == nil && t.call.tool != nil {
		// Here and not above, so that a promise that was not kept is an
		// outcome of this reach, in its span and in Health.
		t.call.checked = true
		err = t.call.tool.check(ctx, t.result)
	}
	if err == nil && t.result != nil && t.result.IsError {
		return errToolFailed
	}
	return err
}

// Request carries any other method, if the session within can; the error wraps
// [errors.ErrUnsupported] if not. Methods that only read are repeatable.
func (s *ResilientSession) Request(ctx context.Context, method string, params, out any) error {
	inner, ok := s.inner.(requester)
	if !ok {
		return toolsOnly(s.guard.cfg.Name, method) // asks nobody, so it is no reach
	}
	verb := method[strings.LastIndexByte(method, '/')+1:]
	reads := slices.Contains([]string{"list", "read", "get", "complete", "discover", "ping"}, verb)
	reach := func(ctx context.Context) error { return inner.Request(ctx, method, params, out) }
	return s.guard.do(ctx, Operation{Name: method, Repeatable: reads}, s.self, reachFunc(reach))
}

// Health is that of the policy; see [Guard.Health].
func (s *ResilientSession) Health() Health { return s.guard.Health() }

// String renders the health as JSON, which makes s an [expvar.Var].
func (s *ResilientSession) String() string { return s.guard.String() }

// Close closes the session below.
func (s *ResilientSession) Close() error { return s.inner.Close() }

func (s *ResilientSession) unwrap() Session { return s.inner }

// innermost follows the wrappers of this package down to the session that
// speaks with the server. What only that one knows is asked of it directly.
func innermost(s Session) Session {
	for {
		w, ok := s.(interface{ unwrap() Session })
		if !ok {
			return s
		}
		s = w.unwrap()
	}
}

// toolsOnly is the refusal of a request that the session within cannot carry.
func toolsOnly(server, method string) error {
	return &TransportError{Origin: Origin{Server: server, Op: method}, Reason: ReasonProtocol,
		Detail: "the session carries tools only", Err: errors.ErrUnsupported}
}

// A FallbackSession is a [Session] with something to fall back on where the server
// is unavailable (or asks for fewer calls), timed out or was disconnected, and for no other
// reason: a refusal, bad arguments, a cancel and a run out of time stay errors. What it
// answers instead is marked, in [Result.Degraded] and by a first block of text.
// It belongs around a [ResilientSession], and only around tools that read: a
// remembered "sent" sends nothing.
//
//	session := &mcp.FallbackSession{Session: resilient, MaxAge: time.Hour}
//
// Each way out is left out if it is zero; the first that has something wins. The
// fields are not changed once the session is in use.
type FallbackSession struct {
	Session

	// MaxAge is how old the last good answer to the same call may be. At most
	// 128 answers and 1 MiB are kept.
	MaxAge time.Duration
	// Alternatives are asked in order: another server, a simpler tool. One that
	// fails, or whose tool fails, is passed over.
	Alternatives []func(ctx context.Context, call *Call) (*Result, error)
	// Stub makes a result out of nothing, so that an agent can go on; or nil.
	Stub func(call *Call) *Result

	count atomic.Uint64 // results given instead

	mu    sync.Mutex // guards the fields below
	kept  map[string]answer
	bytes int // of all that is kept
}

const keptAnswers, keptBytes = 128, 1 << 20

// An answer is one that may be given again.
type answer struct {
	result *Result
	at     time.Time
	size   int
}

// CallTool calls a tool, or says what is known instead.
func (s *FallbackSession) CallTool(ctx context.Context, call *Call) (*Result, error) {
	r, err := s.Session.CallTool(ctx, call)
	if err == nil {
		s.keep(call, r)
		return r, nil
	}
	if !missing(err) || ctx.Err() != nil {
		return nil, err
	}
	if r, age := s.recall(call); r != nil {
		return s.degraded(r, err, "cached "+age.Round(time.Second).String()+" ago"), nil
	}
	for i, alternative := range s.Alternatives {
		if r, altErr := alternative(ctx, call); altErr == nil && r != nil && !r.IsError {
			return s.degraded(r, err, "alternative "+strconv.Itoa(i+1)), nil
		}
	}
	if s.Stub != nil {
		if r := s.Stub(call); r != nil {
			return s.degraded(r, err, "stub"), nil
		}
	}
	return nil, err
}

// Request passes through: there is nothing to fall back on. If the session within carries
// tools only, the error wraps [errors.ErrUnsupported].
func (s *FallbackSession) Request(ctx context.Context, method string, params, out any) error {
	if in, ok := s.Session.(requester); ok {
		return in.Request(ctx, method, params, out)
	}
	return toolsOnly("", method)
}

// Health is that of the session within, with the results given instead counted.
func (s *FallbackSession) Health() (h Health) {
	if in, ok := s.Session.(interface{ Health() Health }); ok {
		h = in.Health()
	}
	h.Fallbacks += s.count.Load()
	return h
}

// String renders the health as JSON, which makes s an [expvar.Var].
func (s *FallbackSession) String() string { return s.Health().String() }

func (s *FallbackSession) unwrap() Session { return s.Session }

// missing reports whether err says that there is no server to answer.
func missing(err error) bool {
	switch e := origins(err).(type) {
	case *UnavailableError:
		return true
	case *TransportError:
		r := classify(e, "")
		return r.class == OutcomeFault || r.class == OutcomeTimeout || r.retry == always
	}
	return false
}

// degraded returns a copy of r that says what it is.
func (s *FallbackSession) degraded(r *Result, err error, how string) *Result {
	s.count.Add(1)
	c := r.clone()
	c.Degraded = how
	if len(c.Content) == 0 && c.Structured != nil { // which stands for the content, as long as there is none
		c.Content = []Content{{Type: "text", Text: string(c.Structured)}}
	}
	text := "The server"
	if o := origins(err); o.origin().Server != "" {
		text += " " + strconv.Quote(o.origin().Server)
	}
	text += " did not answer this call. What follows is not its answer to it, but a substitute (" + how + ")."
	if te, ok := origins(err).(*TransportError); ok && te.Sent {
		text += " The call may have been carried out all the same."
	}
	c.Content = slices.Insert(c.Content, 0, Content{Type: "text", Text: text})
	return c
}

// clone copies r so that neither copy sees what becomes of the other.
func (r *Result) clone() *Result {
	c := *r
	c.Content = slices.Clone(r.Content)
	for i := range c.Content {
		c.Content[i].Raw = slices.Clone(c.Content[i].Raw)
	}
	c.Structured, c.Meta, c.Issues = slices.Clone(r.Structured), slices.Clone(r.Meta), slices.Clone(r.Issues)
	return &c
}

// key returns what answers to call are kept under: all of it that may bear on the
// answer, as JSON with sorted keys. It is empty if that cannot be had.
func key(call *Call) string {
	args := call.Arguments
	if args == nil {
		args = struct{}{}
	}
	b, _ := json.Marshal([]any{call.Tool, args, call.Meta}) // nothing, if it cannot be written
	return string(b)
}

// keep remembers a good answer. What is over the bounds goes, in no order.
func (s *FallbackSession) keep(call *Call, r *Result) {
	if s.MaxAge <= 0 || r == nil || r.IsError || r.Degraded != "" {
		return
	}
	k := key(call)
	a := answer{r.clone(), time.Now(), 256 + len(k) + len(r.Structured) + len(r.Meta)}
	for _, c := range r.Content {
		a.size += 256 + len(c.Text) + len(c.Data) + len(c.Raw) + len(c.MIMEType) + len(c.URI) + len(c.Name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forgetLocked(k)
	if a.size > keptBytes || k == "" {
		return
	}
	for other := range s.kept {
		if len(s.kept) < keptAnswers && s.bytes+a.size <= keptBytes {
			break
		}
		s.forgetLocked(other)
	}
	if s.kept == nil {
		s.kept = map[string]answer{}
	}
	s.kept[k] = a
	s.bytes += a.size
}

func (s *FallbackSession) forgetLocked(k string) {
	s.bytes -= s.kept[k].size
	delete(s.kept, k)
}

// recall returns the last good answer to call and its age, or nil.
func (s *FallbackSession) recall(call *Call) (*Result, time.Duration) {
	k := key(call)
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.kept[k]
	if age := time.Since(a.at); a.result != nil && age <= s.MaxAge {
		return a.result, age
	}
	s.forgetLocked(k)
	return nil, 0
}

// A Saga runs steps that each have an effect of their own, and undoes what was
// done when one of them fails. The zero value is ready for use, by one goroutine.
//
//	var s mcp.Saga
//	s.Step("debit", debit, refund)
//	s.Step("credit", credit, clawBack)
//	s.Step("log", record, nil)
//	err := s.Run(ctx)
type Saga struct {
	// Timeout bounds each compensation; 30 s. The caller's context does not:
	// what was done has to be undone when the caller has gone, too.
	Timeout time.Duration
	// Logger hears of each compensation that failed, at Error; or nil. It is the
	// only one who does if a step panicked.
	Logger *slog.Logger

	steps []sagaStep
}

type sagaStep struct {
	name     string
	do, undo func(ctx context.Context) error
}

// Step adds a step. Undo takes its effect back and may be nil; it runs only if do
// has returned nil, so a do that may have had its effect and fails cleans up
// after itself.
func (s *Saga) Step(name string, do, undo func(ctx context.Context) error) {
	s.steps = append(s.steps, sagaStep{name, do, undo})
}

// Run runs the steps in order; none begins once ctx has ended. If one fails, or panics,
// or ends its goroutine, those before it are undone in reverse order. The error is a *[SagaError].
func (s *Saga) Run(ctx context.Context) error {
	done, failed := 0, &SagaError{}
	defer func() {
		if done < len(s.steps) {
			s.undo(ctx, s.steps[:done], failed)
		}
	}()
	for ; done < len(s.steps); done++ {
		step := s.steps[done]
		err := ctx.Err()
		if err == nil {
			err = step.do(ctx)
		}
		if err != nil {
			failed.Step, failed.Err = step.name, err
			return failed
		}
	}
	return nil
}

// A SagaError is a saga that failed. If Stuck is not empty the world is neither
// as it was nor as it should be, and a human has to look at it.
type SagaError struct {
	Step   string   // the step that failed
	Err    error    // why; what the error unwraps to
	Undone []string // the steps that were undone, in that order
	Stuck  []error  // the compensations that failed, in that order
}

func (e *SagaError) Error() string {
	s := "mcp: saga: step " + strconv.Quote(e.Step) + ": " + e.Err.Error()
	for _, err := range e.Stuck {
		s += "; NOT UNDONE: " + err.Error()
	}
	return s
}

// Unwrap returns the error of the step.
func (e *SagaError) Unwrap() error { return e.Err }

// undo runs the compensations of done, last first, each whatever became of those
// before it: hence the defers, which runtime.Goexit does not pass over either.
func (s *Saga) undo(ctx context.Context, done []sagaStep, failed *SagaError) {
	if len(done) == 0 {
		return
	}
	step := done[len(done)-1]
	defer s.undo(ctx, done[:len(done)-1], failed)
	if step.undo == nil {
		return
	}
	err := errAbandoned
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
		if err == nil {
			failed.Undone = append(failed.Undone, step.name)
			return
		}
		err = fmt.Errorf("step %q: %w", step.name, err)
		failed.Stuck = append(failed.Stuck, err)
		if s.Logger != nil {
			s.Logger.Error("mcp: saga: a step was not undone", "step", step.name, "err", err)
		}
	}()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cmp.Or(max(0, s.Timeout), 30*time.Second))
	defer cancel()
	err = step.undo(ctx)
}
