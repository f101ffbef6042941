package mcp

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// Fault cases without a wire: results against schemas, and policies under a
// virtual clock.

type schemaEntry struct {
	Tool   json.RawMessage `json:"tool"`
	Result json.RawMessage `json:"result"`
}

func (e *schemaEntry) check() error {
	if (e.Tool == nil) == (e.Result == nil) {
		return errors.New("want either a tool or a result")
	}
	return nil
}

// A schemaWorld has no server: each result is served by a RecordingTransport.
type schemaWorld struct{ r *caseRun }

func (schemaWorld) config(*Config, string) {}
func (w schemaWorld) session(Config, *Options) Session {
	return NewSession(new(RecordingTransport), Config{}, nil)
}
func (schemaWorld) seen() caseSeen { return caseSeen{getDelay: -1} }

// validateCase calls the tool that stands before result n, which is its answer.
func validateCase(ctx context.Context, r *caseRun, n int) (*Result, error) {
	var tool, result json.RawMessage
	for _, e := range r.c.schema {
		if e.Tool != nil {
			tool = e.Tool
			continue
		}
		if n--; n < 0 {
			result = e.Result
			break
		}
	}
	if tool == nil || result == nil {
		return nil, errors.New("the script has no such result")
	}
	tr := NewRecordingTransport(map[string]any{
		"tools/list": map[string]any{"tools": []any{tool}},
		"tools/call": result,
	})
	cfg, o := r.options("server", "")
	cfg.Arguments = "off"
	client := NewClient(NewResilientSession(NewSession(tr, cfg, o), cfg, o), cfg, o)
	defer client.Close()
	a, err := client.Adopt(ctx)
	if err != nil {
		return nil, err
	}
	if len(a.Tools) == 0 {
		return nil, &SchemaError{Detail: fmt.Sprint(a.Rejected)}
	}
	// A tool whose output schema cannot be held is adopted, and that is
	// reported; who is strict goes by the report.
	for _, p := range a.Partial {
		if r.c.Action.Policy.Validate == "strict" && strings.HasPrefix(p.Reason, "output schema is not checked") {
			return nil, &SchemaError{Detail: p.Reason}
		}
	}
	return client.Call(ctx, &Call{Tool: a.Tools[0].Name})
}

// Of policies, under a virtual clock.

type policyEntry struct {
	Server           string   `json:"server"`
	Attempt          string   `json:"attempt"`
	LatencyMS        millis   `json:"latency_ms"`
	Times            *natural `json:"times"`
	Code             int      `json:"code"`
	RetryAfterMS     millis   `json:"retry_after_ms"`
	RetryAfterDateMS millis   `json:"retry_after_date_ms"`
}

func (e *policyEntry) check() error {
	if e.Code != 0 && e.Attempt != "rpc_error" {
		return fmt.Errorf("%s has no code", e.Attempt)
	}
	if after := e.RetryAfterMS + e.RetryAfterDateMS; after > 0 && e.Attempt != "http_429" && e.Attempt != "http_503" || e.RetryAfterMS > 0 && e.RetryAfterDateMS > 0 {
		return fmt.Errorf("%s says not when to retry, or says it twice", e.Attempt)
	}
	switch e.Attempt {
	case "ok", "tool_error", "rpc_error", "invalid_result", "connect_ok", "list_ok", "connect_refused", "disconnect_before_send",
		"disconnect_after_send", "timeout", "hang", "http_401", "http_429", "http_503":
		return nil
	}
	return fmt.Errorf("unknown attempt %q", e.Attempt)
}

// connects reports whether the entry is meant for a connect.
func (e *policyEntry) connects() bool {
	return e.Attempt == "connect_ok" || e.Attempt == "connect_refused"
}

// A policyWorld is scripted servers, by name.
type policyWorld struct {
	servers  map[string]*policyServer
	tools    []Tool
	sessions []*policySession
}

func newPolicyWorld(c *faultCase) *policyWorld {
	w := &policyWorld{servers: map[string]*policyServer{}}
	for name := range c.Action.Policy.Servers {
		w.server(name)
	}
	for _, e := range c.attempts {
		w.server(e.Server).script = append(w.server(e.Server).script, e)
	}
	names := map[string]bool{}
	for _, s := range c.Action.Steps {
		for step := &s; step != nil; step = step.Step {
			if step.Op == "call" {
				names[step.Tool] = true
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		w.tools = append(w.tools, Tool{Name: name, InputSchema: json.RawMessage(`{"type":"object"}`),
			OutputSchema: json.RawMessage(`{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}`)})
	}
	return w
}

func (w *policyWorld) server(name string) *policyServer {
	if w.servers[name] == nil {
		w.servers[name] = new(policyServer)
	}
	return w.servers[name]
}

// config gives the tools of a fleet names of their own.
func (w *policyWorld) config(cfg *Config, url string) {
	if _, scripted := w.servers[cfg.Name]; scripted {
		cfg.Prefix = cfg.Name
	}
}

func (w *policyWorld) session(cfg Config, o *Options) Session {
	cfg = cfg.withDefaults()
	_, scripted := w.servers[cfg.Name]
	s := &policySession{cfg: cfg, tools: w.tools, fleet: scripted}
	if scripted {
		s.server = w.server(cfg.Name)
	} else {
		s.server = w.server("")
	}
	w.sessions = append(w.sessions, s)
	return s
}

func (w *policyWorld) seen() caseSeen {
	seen := caseSeen{getDelay: -1}
	for _, s := range w.sessions {
		if s.connected {
			seen.open++
		}
	}
	for _, s := range w.servers {
		seen.inFlight = max(seen.inFlight, s.most)
	}
	return seen
}

// A policyServer is a list of what becomes of attempts.
type policyServer struct {
	mu      sync.Mutex // guards the fields below
	script  []policyEntry
	at      int
	used    int
	running int
	most    int
}

// take uses the next entry up, if wanted likes it. The last one stays.
func (s *policyServer) take(wanted func(*policyServer, *policyEntry) bool) *policyEntry {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.script) == 0 {
		return &policyEntry{Attempt: "ok"}
	}
	e := &s.script[s.at]
	if !wanted(s, e) {
		return nil
	}
	times := 1
	if e.Times != nil {
		times = int(*e.Times)
	}
	if s.used++; times > 0 && s.used >= times && s.at+1 < len(s.script) {
		s.at, s.used = s.at+1, 0
	}
	return e
}

// A policySession is a session whose attempts go as the script says. It keeps
// its ceilings itself, as a TransportSession does.
type policySession struct {
	server *policyServer
	cfg    Config
	tools  []Tool
	fleet  bool // a member of one
	aside  bool // the tools are being listed aside of the script

	mu        sync.Mutex // guards the fields below
	connected bool
	cold      bool // the next connect is one that the script may hang
	closed    bool
}

func (s *policySession) boundsItself() {}

func (s *policySession) disconnect() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.connected, s.cold = false, true
}

// connect connects, if need be. Asked says that the caller asked for just that.
func (s *policySession) connect(ctx context.Context, asked bool) error {
	s.mu.Lock()
	connected, asked, closed := s.connected, asked || s.cold, s.closed
	s.cold = false
	s.mu.Unlock()
	if connected || closed {
		return nil
	}
	e := s.server.take(func(_ *policyServer, e *policyEntry) bool { return e.connects() || asked && e.Attempt == "hang" })
	if e != nil {
		if err := s.attempt(ctx, e, s.cfg.ConnectTimeout, false); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.connected = !s.closed
	return nil
}

// attempt does what the entry says. Sent says that a request had left.
func (s *policySession) attempt(ctx context.Context, e *policyEntry, ceiling time.Duration, sent bool) error {
	end := time.Now().Add(ceiling)
	ours := true // or the caller's deadline comes first
	if d, ok := ctx.Deadline(); ok && d.Before(end) {
		end, ours = d, false
	}
	// A try ends by its own deadline, so before the caller's.
	timedOut := func(at time.Time) error {
		timer := time.NewTimer(time.Until(at))
		defer timer.Stop()
		select {
		case <-timer.C:
			return &TransportError{Reason: ReasonTimeout, Sent: sent}
		case <-ctx.Done():
			return &TransportError{Reason: ReasonCancelled, Sent: sent, Err: ctx.Err()}
		}
	}
	if e.LatencyMS > 0 {
		done := time.Now().Add(ms(e.LatencyMS))
		if done.After(end) {
			return timedOut(end)
		}
		timer := time.NewTimer(ms(e.LatencyMS))
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return &TransportError{Reason: ReasonCancelled, Sent: sent, Err: ctx.Err()}
		}
	}
	after := ms(e.RetryAfterMS)
	if e.RetryAfterDateMS > 0 {
		at, _ := http.ParseTime(time.Now().Add(ms(e.RetryAfterDateMS)).UTC().Format(http.TimeFormat))
		after = time.Until(at)
	}
	switch e.Attempt {
	case "rpc_error":
		return &RPCError{Code: cmp.Or(e.Code, -32000)}
	case "connect_refused":
		return &TransportError{Reason: ReasonUnavailable}
	case "disconnect_before_send", "disconnect_after_send":
		s.mu.Lock()
		s.connected = false
		s.mu.Unlock()
		return &TransportError{Reason: ReasonDisconnected, Sent: e.Attempt == "disconnect_after_send"}
	case "timeout":
		if !ours {
			end = end.Add(-time.Millisecond)
		}
		return timedOut(end)
	case "hang":
		return timedOut(end)
	case "http_401":
		return &TransportError{Reason: ReasonProtocol, Status: 401, Sent: sent}
	case "http_429":
		return &TransportError{Reason: ReasonUnavailable, Status: 429, RetryAfter: after}
	case "http_503":
		return &TransportError{Reason: ReasonUnavailable, Status: 503, RetryAfter: after, Sent: sent}
	}
	return nil
}

// begin notes an attempt in the log of its step.
func (s *policySession) begin(ctx context.Context) (end func()) {
	s.server.mu.Lock()
	s.server.running++
	s.server.most = max(s.server.most, s.server.running)
	s.server.mu.Unlock()
	noted := func() {}
	if l, ok := ctx.Value(reachLogKey{}).(*reachLog); ok {
		noted = l.begin()
	}
	return func() {
		noted()
		s.server.mu.Lock()
		s.server.running--
		s.server.mu.Unlock()
	}
}

func (s *policySession) Initialize(ctx context.Context) (*ServerInfo, error) {
	info := &ServerInfo{Name: "policy", Protocol: version2511}
	if s.aside {
		return info, nil
	}
	s.mu.Lock()
	connected := s.connected
	s.mu.Unlock()
	if !connected { // else nothing reaches the server
		defer s.begin(ctx)()
	}
	return info, s.connect(ctx, true)
}

func (s *policySession) ListTools(ctx context.Context) ([]Tool, error) {
	if s.aside {
		return s.tools, nil
	}
	e := s.server.take(func(server *policyServer, e *policyEntry) bool {
		if l, ok := ctx.Value(reachLogKey{}).(*reachLog); ok && l.op == "list_tools" || e.Attempt == "list_ok" {
			return true
		}
		// A list that no step asks for is scripted if a list_ok comes at last.
		return e.Attempt != "ok" && slices.ContainsFunc(server.script[server.at:], func(e policyEntry) bool { return e.Attempt == "list_ok" })
	})
	if !s.fleet {
		defer s.begin(ctx)()
	}
	if err := s.connect(ctx, false); err != nil {
		return nil, err
	}
	if e != nil {
		if err := s.attempt(ctx, e, s.cfg.DiscoveryTimeout, true); err != nil {
			return nil, err
		}
	}
	return s.tools, nil
}

func (s *policySession) CallTool(ctx context.Context, call *Call) (*Result, error) {
	defer s.begin(ctx)()
	if err := s.connect(ctx, false); err != nil {
		return nil, err
	}
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return nil, &TransportError{Reason: ReasonDisconnected}
	}
	e := s.server.take(func(*policyServer, *policyEntry) bool { return true })
	if err := s.attempt(ctx, e, s.cfg.CallTimeout, true); err != nil {
		return nil, err
	}
	text := []Content{{Type: "text", Text: "ok"}}
	switch e.Attempt {
	case "tool_error":
		return &Result{Content: text, IsError: true}, nil
	case "invalid_result":
		return &Result{Content: text, Structured: json.RawMessage(`{"n":"no number"}`)}, nil
	}
	return &Result{Content: text, Structured: json.RawMessage(`{"n":1}`)}, nil
}

func (s *policySession) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.connected, s.closed = false, true
	return nil
}
