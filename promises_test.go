package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"
)

// The promises of the package comment that no single file keeps alone. Those
// about a carrier are kept in its own tests and in the contract suite.

// TestCanary is the promise that no word of a server is in the text of an error,
// in a log line or in a span: whatever a server says, and wherever it says it.
func TestCanary(t *testing.T) {
	t.Parallel()
	rpc := func(code int, id string) string {
		return fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"error":{"code":%d,"message":"%s","data":{"%[3]s":"%[3]s"}}}`, id, code, canary)
	}
	result := func(r string) string {
		return `{"jsonrpc":"2.0","id":{{id}},"result":` + strings.ReplaceAll(r, "!", canary) + `}`
	}
	const call = "tools/call"
	tests := []struct {
		name   string
		method string // whose answer it is
		status int
		media  string
		body   string
		header [2]string
	}{
		{"JSON-RPC errors", call, 200, "application/json", rpc(-32602, "{{id}}"), [2]string{}},
		{"an error with another id", call, 200, "application/json", rpc(-32000, `"`+canary+`"`), [2]string{}},
		{"an internal error", call, 500, "application/json", rpc(-32603, "{{id}}"), [2]string{}},
		{"an error under 400", call, 400, "application/json", rpc(-32600, "null"), [2]string{}},
		{"a redirect", call, 307, "text/plain", canary, [2]string{"Location", "http://" + canary + ".example/"}},
		{"a challenge", call, 401, "text/plain", canary, [2]string{"WWW-Authenticate", `Bearer realm="` + canary + `"`}},
		{"forbidden", call, 403, "text/" + canary, canary, [2]string{}},
		{"too many", call, 429, "text/plain", canary, [2]string{"Retry-After", canary}},
		{"unavailable", call, 503, "text/plain", canary, [2]string{"Retry-After", "3600"}},
		{"gone", call, 404, "text/plain", canary, [2]string{}},
		{"HTML", call, 200, "text/html; title=" + canary, "<html>" + canary, [2]string{}},
		{"a media type of its own", call, 200, "application/" + canary, canary, [2]string{}},
		{"no JSON", call, 200, "application/json", "{" + canary, [2]string{}},
		{"cut short", call, 200, "application/json", `{"jsonrpc":"2.0","id":{{id}},"result":{"content":[{"type":"text","text":"` + canary, [2]string{}},
		{"an event without an answer", call, 200, "text/event-stream", "event: " + canary + "\ndata: " + canary + "\n\n", [2]string{}},
		{"a result of another shape", call, 200, "application/json", result(`{"content":"!"}`), [2]string{}},
		{"a result outside its schema", call, 200, "application/json", result(`{"content":[],"structuredContent":{"!":"!","n":"!"}}`), [2]string{}},
		{"a promise not kept", call, 200, "application/json", result(`{"content":[{"type":"text","text":"!"}]}`), [2]string{}},
		{"a revision of its own", "initialize", 200, "application/json", result(`{"protocolVersion":"!","serverInfo":{"name":"!"}}`), [2]string{}},
		{"discover with versions of its own", "server/discover", 200, "application/json", result(`{"supportedVersions":["!"],"instructions":"!"}`), [2]string{}},
		{"no list", "tools/list", 200, "application/json", result(`{"tools":{"!":"!"}}`), [2]string{}},
		{"a cursor that comes back", "tools/list", 200, "application/json", result(`{"tools":[],"nextCursor":"!"}`), [2]string{}},
		{"tools that are none", "tools/list", 200, "application/json", result(`{"tools":[{"name":"!","inputSchema":{"type":"!"}},{"name":"!2","inputSchema":{"$ref":"http://!/"}},{"name":"!3","inputSchema":{"type":"object","properties":{"!":{"pattern":7}}}}]}`), [2]string{}},
	}
	// Also what fits, so that every case reaches the method that it is about.
	fine := map[string]string{
		"server/discover": rpc(-32601, "{{id}}"),
		"initialize":      result(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{},"!":"!"},"serverInfo":{"name":"!","version":"!"},"instructions":"!"}`),
		"tools/list":      result(`{"tools":[{"name":"t","title":"!","description":"!","inputSchema":{"type":"object","title":"!","properties":{"!":{"type":"integer"}},"required":["!"]},"outputSchema":{"type":"object","properties":{"n":{"type":"integer","description":"!"}},"additionalProperties":false}}]}`),
		"tools/call":      result(`{"content":[{"type":"text","text":"!"}],"structuredContent":{}}`),
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				b, _ := io.ReadAll(r.Body)
				env, err := scanEnvelope(b)
				if err != nil || env.id == nil {
					w.WriteHeader(http.StatusAccepted)
					return
				}
				status, media, body := 200, "application/json", fine[env.method]
				if env.method == tt.method {
					status, media, body = tt.status, tt.media, tt.body
					if tt.header[0] != "" {
						w.Header().Set(tt.header[0], tt.header[1])
					}
				}
				w.Header().Set("Content-Type", media)
				w.Header().Set("Mcp-Session-Id", canary)
				w.WriteHeader(status)
				io.WriteString(w, strings.ReplaceAll(body, "{{id}}", string(env.id)))
			}))
			defer server.Close()
			var seen lockedBuilder
			o := &Options{
				Logger: slog.New(slog.NewTextHandler(&seen, nil)), // Info and above
				Trace: func(ctx context.Context, r Reach) (context.Context, func(Health, error)) {
					fmt.Fprintln(&seen, r.Name(), r.Attrs())
					return ctx, func(h Health, err error) { fmt.Fprintln(&seen, h, err) }
				},
			}
			cfg := Config{Name: "s", Endpoint: server.URL, Optional: true, Retry: RetryConfig{MaxAttempts: 2, BaseDelay: time.Millisecond}, ReadTimeout: 2 * time.Second}
			c, err := New(cfg, o)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			a, err := c.Adopt(t.Context())
			failed := err != nil || a != nil && len(a.Rejected) > 0
			errs := []error{err}
			for _, args := range []any{map[string]any{canary: 1}, map[string]any{}, map[string]any{canary: "x"}, 7} {
				_, err := c.Call(t.Context(), &Call{Tool: "t", Arguments: args, IdempotencyKey: "k"})
				failed = failed || err != nil && args != any(7)
				errs = append(errs, err)
			}
			f, err := Assemble(t.Context(), c)
			errs = append(errs, err)
			if f != nil {
				fmt.Fprintln(&seen, f.Notice(), f.String(), f.Health())
			}
			if !failed {
				t.Errorf("the case met no error at all")
			}
			for _, err := range errs {
				checkOurs(t, err)
			}
			if strings.Contains(seen.String(), canary) {
				t.Errorf("in a log line, a span or a health:\n%s", seen.String())
			}
		})
	}
}

// checkOurs checks an error and all that it wraps: no word of the server in any
// text, and the type one of ours or the caller's own.
func checkOurs(t *testing.T, err error) {
	t.Helper()
	if err == nil {
		return
	}
	if s := err.Error() + fmt.Sprint(err) + ErrorResult(err).Text(); strings.Contains(strings.ReplaceAll(s, `"/`+canary, ""), canary) {
		var ae *ArgumentError
		if !errors.As(err, &ae) || strings.Contains(err.Error(), canary) { // feedback names fields, for the model
			t.Errorf("a word of the server in %T: %v", err, s)
		}
	}
	var o interface{ origin() *Origin }
	var ce *ConfigError
	var se *SchemaError
	if !errors.As(err, &o) && !errors.As(err, &ce) && !errors.As(err, &se) && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%T is no error of this package: %v", err, err)
	}
	switch w := err.(type) {
	case interface{ Unwrap() []error }:
		for _, e := range w.Unwrap() {
			checkText(t, e)
		}
	case interface{ Unwrap() error }:
		checkText(t, w.Unwrap())
	}
}

// checkText checks the text of an error and of what it wraps.
func checkText(t *testing.T, err error) {
	t.Helper()
	for ; err != nil; err = errors.Unwrap(err) {
		if strings.Contains(err.Error(), canary) {
			t.Errorf("a word of the server inside, in %T: %v", err, err)
		}
	}
}

// lockedBuilder is a strings.Builder for many writers.
type lockedBuilder struct {
	mu sync.Mutex // guards b
	b  strings.Builder
}

func (l *lockedBuilder) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuilder) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestConcurrentErrorsAreOwn has many callers share one failed connecting: each
// gets an error of its own, since the policy writes into it.
func TestConcurrentErrorsAreOwn(t *testing.T) {
	t.Parallel()
	rt := NewRecordingTransport(map[string]any{"initialize": func(context.Context, json.RawMessage) (any, error) {
		time.Sleep(20 * time.Millisecond)
		return nil, &TransportError{Reason: ReasonUnavailable, Tries: 3}
	}})
	cfg := Config{Name: "s", Protocol: "2025-11-25", BreakerFailures: -1}
	s := NewResilientSession(NewSession(rt, cfg, nil), cfg, nil)
	defer s.Close()
	var mu sync.Mutex
	calls := map[string]bool{}
	pointers := map[uintptr]bool{}
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			_, err := s.CallTool(t.Context(), &Call{Tool: "x"})
			var te *TransportError
			if !errors.As(err, &te) {
				t.Errorf("CallTool: %v", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			calls[te.Call] = true
			pointers[reflect.ValueOf(te).Pointer()] = true
		})
	}
	wg.Wait()
	if len(calls) != 16 || len(pointers) != 16 {
		t.Errorf("%d call ids and %d errors for 16 callers", len(calls), len(pointers))
	}
}
