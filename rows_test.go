package mcp

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestInvariant25OverBothTransports plays the rows of the table of outcomes over
// a real child and a real endpoint: each gives its class, its verdict, and a
// second reach only where that is safe. TestInvariant25EveryRow has the rows
// that no server can cause.
func TestInvariant25OverBothTransports(t *testing.T) {
	t.Parallel()
	rpc := func(code int) string {
		return `{"jsonrpc":"2.0","id":{{id}},"error":{"code":` + strconv.Itoa(code) + `,"message":"no"}}`
	}
	result := func(r string) string { return `{"jsonrpc":"2.0","id":{{id}},"result":` + r + `}` }
	type row struct {
		name    string
		args    map[string]any // raw, do; over HTTP also status and media
		tool    string         // "s" has an output schema
		class   Outcome
		verdict verdict
		again   bool // a keyed call is repeated
		always  bool // and one without a key too
	}
	raw := func(name, text string, class Outcome, v verdict) row {
		return row{name: name, args: map[string]any{"raw": text}, class: class, verdict: v}
	}
	both := []row{
		raw("a result", result(`{"content":[]}`), OutcomeOK, good),
		raw("a tool's own failure", result(`{"content":[],"isError":true}`), OutcomeOK, good),
		raw("invalid request", rpc(-32600), OutcomeRefused, good),
		raw("method not found", rpc(-32601), OutcomeRefused, good),
		raw("invalid params", rpc(-32602), OutcomeRefused, good),
		raw("parse error", rpc(-32700), OutcomeRefused, good),
		raw("internal error", rpc(-32603), OutcomeFault, fault),
		raw("a server's own code", rpc(-32000), OutcomeRefused, good),
		raw("not found", rpc(-32002), OutcomeRefused, good),
		raw("missing capability", rpc(-32021), OutcomeRefused, good),
		raw("URL elicitation", rpc(-32042), OutcomeRefused, good),
		raw("code 0", rpc(0), OutcomeRefused, good),
		raw("no result of a tool", result(`{"content":7}`), OutcomeProtocol, fault),
		raw("over the limit", result(`{"content":[{"type":"text","text":"`+strings.Repeat("x", 70_000)+`"}]}`), OutcomeProtocol, neither),
		{name: "outside its schema", tool: "s", args: map[string]any{"raw": result(`{"content":[],"structuredContent":{"n":"x"}}`)}, class: OutcomeProtocol, verdict: good},
		{name: "a promise not kept", tool: "s", args: map[string]any{"raw": result(`{"content":[]}`)}, class: OutcomeProtocol, verdict: good},
		{name: "gone before the answer", args: map[string]any{"do": "exit"}, class: OutcomeFault, verdict: fault, again: true},
		{name: "silence until the ceiling", args: map[string]any{"do": "silence"}, class: OutcomeTimeout, verdict: fault, again: true},
	}
	status := func(code int, class Outcome, v verdict, again bool) row {
		return row{name: "HTTP " + strconv.Itoa(code), args: map[string]any{"status": code}, class: class, verdict: v, again: again}
	}
	tooMany := status(429, OutcomeRefused, neither, true)
	tooMany.always = true
	html := row{name: "HTML with 200", args: map[string]any{"media": "text/html", "raw": "<html>"}, class: OutcomeProtocol, verdict: fault}
	foreign := raw("another id", `{"jsonrpc":"2.0","id":"other","result":{}}`, OutcomeProtocol, fault)
	broken := raw("no JSON", `{"jsonrpc":`, OutcomeProtocol, fault)
	overHTTP := append([]row{
		status(307, OutcomeProtocol, fault, false), status(400, OutcomeProtocol, neither, false), status(401, OutcomeRefused, neither, false),
		status(403, OutcomeRefused, neither, false), status(404, OutcomeProtocol, neither, false), status(405, OutcomeProtocol, neither, false),
		status(408, OutcomeFault, fault, true), status(413, OutcomeRefused, neither, false), tooMany,
		status(500, OutcomeFault, fault, true), status(501, OutcomeFault, fault, false), status(502, OutcomeFault, fault, true),
		status(503, OutcomeFault, fault, true), status(504, OutcomeFault, fault, true), status(505, OutcomeFault, fault, false),
		html, foreign, broken,
	}, both...)

	endpoint := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		e, err := scanEnvelope(b)
		if err != nil || e.id == nil {
			w.WriteHeader(http.StatusAccepted)
			return
		}
		args := member(e.params, "arguments")
		media, text := textMember(args, "media"), textMember(args, "raw")
		switch {
		case e.method != "tools/call":
			text = puppetAnswer(e)
		case puppetDo(e) == "exit":
			conn, _, err := w.(http.Hijacker).Hijack()
			if err == nil {
				conn.Close()
			}
			return
		case puppetDo(e) == "silence":
			<-r.Context().Done()
			return
		}
		if media == "" {
			media = "application/json"
		}
		w.Header().Set("Content-Type", media)
		if code, err := strconv.Atoi(string(member(args, "status"))); err == nil {
			w.WriteHeader(code)
		}
		io.WriteString(w, strings.ReplaceAll(text, "{{id}}", string(e.id)))
	}))
	t.Cleanup(endpoint.Close)

	play := func(t *testing.T, cfg Config, r row) {
		cfg.MaxMessageBytes, cfg.CallTimeout = 64<<10, 400*time.Millisecond
		cfg.Retry = RetryConfig{MaxAttempts: 2, BaseDelay: time.Millisecond}
		cfg.BreakerFailures = 100
		c, err := New(cfg, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Adopt(t.Context()); err != nil {
			t.Fatal(err)
		}
		tool := "t"
		if r.tool != "" {
			tool = r.tool
		}
		for _, key := range []string{"", "k"} {
			// A fault first, so that a good answer shows by clearing it.
			c.Call(t.Context(), &Call{Tool: "t", Arguments: map[string]any{"raw": rpc(-32603)}})
			before := c.Health()
			_, err := c.Call(t.Context(), &Call{Tool: tool, Arguments: r.args, IdempotencyKey: key})
			h := c.Health()
			reaches := 1
			if r.always || key != "" && r.again {
				reaches = 2
			}
			if h.Outcome != r.class || int(h.Calls-before.Calls) != reaches {
				t.Errorf("key %q: %v: class %s, %d reaches, want %s, %d", key, err, h.Outcome, h.Calls-before.Calls, r.class, reaches)
			}
			want := map[verdict]int{good: 0, neither: before.ConsecutiveFailures, fault: before.ConsecutiveFailures + reaches}[r.verdict]
			if h.ConsecutiveFailures != want {
				t.Errorf("key %q: %v: %d faults in a row after %d, want %d", key, err, h.ConsecutiveFailures, before.ConsecutiveFailures, want)
			}
		}
		// The endings that the caller causes are the same everywhere.
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		before := c.Health()
		_, err = c.Call(ctx, &Call{Tool: "t", Arguments: map[string]any{"do": "silence"}, IdempotencyKey: "k"})
		var be *BudgetError
		if h := c.Health(); !errors.As(err, &be) || h.Outcome != OutcomeBudget || h.ConsecutiveFailures != before.ConsecutiveFailures {
			t.Errorf("out of time: %v, %v", err, h)
		}
	}
	for _, r := range overHTTP {
		t.Run("http/"+r.name, func(t *testing.T) {
			t.Parallel()
			play(t, Config{Name: "s", Endpoint: endpoint.URL}, r)
		})
	}
	for _, r := range both {
		t.Run("stdio/"+r.name, func(t *testing.T) {
			t.Parallel()
			cfg, _ := puppetConfig(t)
			play(t, cfg, r)
		})
	}
}
