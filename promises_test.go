package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
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

// An ender is what ends a wait that the server does not: a ceiling of ours, the
// run, the caller.
type ender struct {
	name  string
	apply func(cfg *Config)
	run   func(ctx context.Context) (context.Context, context.CancelFunc)
	check func(t *testing.T, err error, sent bool)
}

const brief = 300 * time.Millisecond

var enders = []ender{
	{
		"ceiling",
		func(cfg *Config) { cfg.CallTimeout, cfg.ConnectTimeout, cfg.DiscoveryTimeout = brief, brief, brief },
		func(ctx context.Context) (context.Context, context.CancelFunc) { return context.WithCancel(ctx) },
		func(t *testing.T, err error, sent bool) {
			var te *TransportError
			if !errors.As(err, &te) || te.Reason != ReasonTimeout || te.Sent != sent || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v (%+v), want a timeout with Sent %v", err, te, sent)
			}
		},
	},
	{
		"run",
		func(cfg *Config) {},
		func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, brief)
		},
		func(t *testing.T, err error, sent bool) {
			var be *BudgetError
			if !errors.As(err, &be) || be.Sent != sent || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v (%+v), want a run out of time with Sent %v", err, be, sent)
			}
		},
	},
	{
		"caller",
		func(cfg *Config) {},
		func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(brief, cancel)
			return ctx, cancel
		},
		func(t *testing.T, err error, sent bool) {
			var te *TransportError
			if !errors.As(err, &te) || te.Reason != ReasonCancelled || te.Sent != sent || !errors.Is(err, context.Canceled) {
				t.Errorf("%v (%+v), want a cancel with Sent %v", err, te, sent)
			}
		},
	},
}

// TestBounded is the promise that no operation outlives its ceiling, the run or
// its caller, wherever it blocks, and that its error says whether the server
// may have run it. The bounds here are those of sanity: the machine may be busy.
func TestBounded(t *testing.T) {
	t.Parallel()
	trickle := func(head, media string) func(w http.ResponseWriter, r *http.Request, id string) {
		return func(w http.ResponseWriter, r *http.Request, id string) {
			w.Header().Set("Content-Type", media)
			io.WriteString(w, head)
			for {
				io.WriteString(w, " ")
				if http.NewResponseController(w).Flush() != nil {
					return
				}
				select {
				case <-time.After(time.Second):
				case <-r.Context().Done():
					return
				}
			}
		}
	}
	pipe := func(args ...string) func(t *testing.T) Config {
		return func(t *testing.T) Config {
			cfg, _ := puppetConfig(t, args...)
			return cfg
		}
	}
	web := func(method string, act func(w http.ResponseWriter, r *http.Request, id string)) func(t *testing.T) Config {
		return func(t *testing.T) Config {
			p := newPuppetServer(t, 0)
			p.method, p.spoil = method, act
			return Config{Endpoint: p.URL}
		}
	}
	hold := func(w http.ResponseWriter, r *http.Request, id string) { <-r.Context().Done() }
	tests := []struct {
		name  string
		cfg   func(t *testing.T) Config
		adopt bool // the fault lies before the call
		call  *Call
		sent  bool
	}{
		{"a child that never answers", pipe("silent"), true, nil, true},
		{"a child that never lists its tools", pipe("spoil=tools/list:trickle"), true, nil, true},
		{"a child that never reads 1 MiB", pipe("deaf"), false, &Call{Tool: "t", Arguments: map[string]any{"pad": strings.Repeat("x", 1<<20)}}, true},
		{"a child that trickles its answer", pipe("spoil=tools/call:trickle"), false, doCall(""), true},
		{"a server that accepts and is silent", func(t *testing.T) Config {
			return Config{Endpoint: rawServer(t, func(c net.Conn) { io.Copy(io.Discard, c) })}
		}, true, nil, true},
		{"a server that never reads", func(t *testing.T) Config {
			return Config{Endpoint: rawServer(t, func(c net.Conn) { time.Sleep(2 * time.Second) })}
		}, true, nil, true},
		{"a head that trickles", func(t *testing.T) Config {
			return Config{Endpoint: rawServer(t, func(c net.Conn) {
				c.Read(make([]byte, 4<<10))
				for _, b := range []byte("HTTP/1.1 200 OK\r\nX: yyyyy") {
					if _, err := c.Write([]byte{b}); err != nil {
						return
					}
					time.Sleep(time.Second)
				}
			})}
		}, true, nil, true},
		{"a list held by a proxy", web("tools/list", hold), true, nil, true},
		{"a call held by a proxy", web("tools/call", hold), false, doCall(""), true},
		{"a body that trickles", web("tools/call", trickle("{", "application/json")), false, doCall(""), true},
		{"an event that trickles", web("tools/call", trickle("data: {", "text/event-stream")), false, doCall(""), true},
		{"comments that trickle", web("tools/call", trickle(":\n:", "text/event-stream")), false, doCall(""), true},
		{"an error that trickles", web("tools/call", func(w http.ResponseWriter, r *http.Request, id string) {
			w.WriteHeader(200)
			trickle("", "text/html")(w, r, id)
		}), false, doCall(""), true},
	}
	for _, tt := range tests {
		for _, end := range enders {
			t.Run(tt.name+"/"+end.name, func(t *testing.T) {
				t.Parallel()
				if runtime.GOOS == "windows" && strings.Contains(tt.name, "reads 1 MiB") {
					t.Skip("pipes without deadlines: the child ends with the call")
				}
				cfg := tt.cfg(t)
				if tt.adopt {
					end.apply(&cfg)
				} else {
					cfg.CallTimeout = time.Minute
					if end.name == "ceiling" {
						cfg.CallTimeout = brief
					}
				}
				c := openPuppetClient(t, cfg, nil)
				if !tt.adopt {
					if _, err := c.Adopt(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				ctx, cancel := end.run(t.Context())
				defer cancel()
				start := time.Now()
				var err error
				if tt.adopt {
					_, err = c.Adopt(ctx)
				} else {
					_, err = c.Call(ctx, tt.call)
				}
				soon(t, start)
				checkOurs(t, err)
				if !strings.Contains(tt.name, "an error") { // which is one, whoever ends the wait for its body
					end.check(t, err, tt.sent)
				}
				start = time.Now()
				c.Close()
				if d := time.Since(start); d > 8*time.Second {
					t.Errorf("Close took %v", d)
				}
			})
		}
	}
}

// TestBlastRadius is the promise that a fault of one call costs that call. Of 32
// calls in flight on one session some meet a fault each, all at once, and the
// others and all that follow must not notice.
func TestBlastRadius(t *testing.T) {
	t.Parallel()
	const calls = 32
	check := func(t *testing.T, cfg Config, faults []struct{ act, want string }, same func() string) {
		cfg.BreakerFailures = calls // so many faults in a row are no accident here
		c := newPuppetClient(t, cfg, nil)
		before := same()
		errs := make([]error, calls)
		var wg sync.WaitGroup
		for i := range calls {
			act := ""
			if i%2 == 0 && i/2 < len(faults) {
				act = faults[i/2].act
			}
			wg.Go(func() { _, errs[i] = c.Call(t.Context(), doCall(act)) })
		}
		wg.Wait()
		for i, err := range errs {
			act, want := "", "ok"
			if i%2 == 0 && i/2 < len(faults) {
				act, want = faults[i/2].act, faults[i/2].want
			}
			checkOurs(t, err)
			if got := fateOf(err); got != want {
				t.Errorf("%q came to %q, want %q: %v", act, got, want, err)
			}
		}
		for range calls {
			wg.Go(func() {
				if _, err := c.Call(t.Context(), doCall("")); err != nil {
					t.Errorf("afterwards: %v", err)
				}
			})
		}
		wg.Wait()
		if after := same(); after != before {
			t.Errorf("the session was %s and is %s", before, after)
		}
	}
	t.Run("stdio", func(t *testing.T) {
		t.Parallel()
		var faults []struct{ act, want string }
		for _, f := range pipeFaults {
			faults = append(faults, struct{ act, want string }{f.name, f.want})
		}
		for faults := range slices.Chunk(faults, calls/2) {
			t.Run("", func(t *testing.T) {
				cfg, marker := puppetConfig(t, "wait=32")
				cfg.CallTimeout, cfg.MaxMessageBytes = 2*time.Second, 64<<10
				check(t, cfg, faults, func() string { return fmt.Sprint(living(t, marker)) })
			})
		}
	})
	for _, stream := range []bool{false, true} {
		t.Run(map[bool]string{false: "HTTP", true: "events"}[stream], func(t *testing.T) {
			t.Parallel()
			var faults []struct{ act, want string }
			for _, f := range webFaults {
				faults = append(faults, struct{ act, want string }{f.name, f.want})
			}
			for faults := range slices.Chunk(faults, calls/2) {
				t.Run("", func(t *testing.T) {
					p := newPuppetServer(t, calls)
					p.stream = stream
					for _, f := range webFaults {
						p.acts[f.name] = f.act
					}
					cfg := Config{Endpoint: p.URL, CallTimeout: 2 * time.Second, MaxMessageBytes: 64 << 10}
					check(t, cfg, faults, func() string { return fmt.Sprint(p.initialized.Load()) })
				})
			}
		})
	}
}

// TestSessionsLost has a server forget its sessions, refuse new ones and hang up, now
// and then, while many call: no call runs twice, none is said not to have run that
// has, and each gets its own answer.
func TestSessionsLost(t *testing.T) {
	t.Parallel()
	const callers, calls = 16, 12
	for _, slots := range []int{1, 3, callers} {
		t.Run(strconv.Itoa(slots), func(t *testing.T) {
			t.Parallel()
			var (
				mu      sync.Mutex // guards the fields below
				random  = rand.New(rand.NewPCG(1, uint64(slots)))
				session int // the number of the one that is known
				ran     = map[string]int{}
			)
			serve := func(w http.ResponseWriter, r *http.Request) {
				mu.Lock()
				defer mu.Unlock()
				sometimes := func() bool { return random.IntN(10) == 0 }
				b, err := io.ReadAll(r.Body)
				e, _ := scanEnvelope(b)
				known := r.Header.Get("Mcp-Session-Id") == strconv.Itoa(session)
				switch {
				case err != nil || r.Method != http.MethodPost:
					w.WriteHeader(http.StatusMethodNotAllowed)
				case e.method == "server/discover":
					w.WriteHeader(http.StatusNotFound)
				case e.method == "initialize" && sometimes():
					w.WriteHeader(http.StatusServiceUnavailable)
				case e.method == "initialize":
					session++
					w.Header().Set("Mcp-Session-Id", strconv.Itoa(session))
					writeJSON(w, 200, puppetAnswer(e))
				case !known, sometimes():
					session++
					w.WriteHeader(http.StatusNotFound)
				case e.id == nil:
					w.WriteHeader(http.StatusAccepted)
				case e.method != "tools/call":
					writeJSON(w, 200, puppetAnswer(e))
				default:
					do := puppetDo(e)
					ran[do]++
					if sometimes() {
						hangUp(w, "")
						return
					}
					writeJSON(w, 200, `{"jsonrpc":"2.0","id":`+string(e.id)+`,"result":{"content":[{"type":"text","text":"`+do+`"}]}}`)
				}
			}
			srv := httptest.NewServer(http.HandlerFunc(serve))
			t.Cleanup(srv.Close)
			c := openPuppetClient(t, Config{Endpoint: srv.URL, MaxInFlight: slots, BreakerFailures: -1}, nil)
			for i := 0; ; i++ {
				if _, err := c.Adopt(t.Context()); err == nil {
					break
				} else if i == 100 {
					t.Fatal(err)
				}
			}
			var wg sync.WaitGroup
			for caller := range callers {
				wg.Go(func() {
					for call := range calls {
						do := fmt.Sprint(caller, "-", call)
						r, err := c.Call(t.Context(), doCall(do))
						mu.Lock()
						n := ran[do]
						mu.Unlock()
						var te *TransportError
						switch {
						case n > 1:
							t.Errorf("%s ran %d times: %v", do, n, err)
						case err == nil && r.Text() != do:
							t.Errorf("%s got the answer %q", do, r.Text())
						case errors.As(err, &te) && !te.Sent && n > 0:
							t.Errorf("%s ran: %v", do, err)
						}
						checkOurs(t, err)
					}
				})
			}
			wg.Wait()
		})
	}
}

// fateOf says in a word or two what became of a call.
func fateOf(err error) string {
	var te *TransportError
	var re *RPCError
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &re):
		return "refused"
	case errors.As(err, &te) && !te.Sent:
		return string(te.Reason) + ", not sent"
	case errors.As(err, &te):
		return string(te.Reason)
	}
	return fmt.Sprintf("%T", err)
}

// pipeFaults are lines that a child writes in place of an answer, and what that
// comes to for the call that they answer.
var pipeFaults = []struct{ name, line, want string }{
	{"noise first", "starting up\n\x00\xff\xfe\n\r\n[1]\n{\n{}\nnull\n{{ok}}", "ok"},
	{"BOM", "\ufeff{{ok}}", "ok"},
	{"CR LF", "{{ok}}\r", "ok"},
	{"twice", "{{ok}}\n{{ok}}", "ok"},
	{"a batch", "[{{ok}}]", "ok"},
	{"another's id first", `{"jsonrpc":"2.0","id":987654321,"result":{"content":[]}}` + "\n{{ok}}", "ok"},
	{"a request of the same id first", `{"jsonrpc":"2.0","id":{{id}},"method":"ping"}` + "\n{{ok}}", "ok"},
	{"no UTF-8 in a text", `{"jsonrpc":"2.0","id":{{id}},"result":{"content":[{"type":"text","text":"` + "\xff\xc0" + `"}]}}`, "ok"},
	{"an oversized line that is nobody's first", "{{big}}\n{{ok}}", "ok"},
	{"noise", "Traceback (most recent call last):", "timeout"},
	{"HTML", "<html><body>" + canary + "</body></html>", "timeout"},
	{"nothing", "", "timeout"},
	{"another's id", `{"jsonrpc":"2.0","id":987654321,"result":{"content":[]}}`, "timeout"},
	{"no id", `{"jsonrpc":"2.0","result":{"content":[]}}`, "timeout"},
	{"a null id", `{"jsonrpc":"2.0","id":null,"result":{"content":[]}}`, "timeout"},
	{"an error with a null id", `{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"` + canary + `"}}`, "timeout"},
	{"a misspelt id", `{"jsonrpc":"2.0","ID":{{id}},"result":{"content":[]}}`, "timeout"},
	{"an id with a fraction", `{"jsonrpc":"2.0","id":{{id}}.5,"result":{"content":[]}}`, "timeout"},
	{"an oversized line that is nobody's", "{{big}}", "timeout"},
	{"two ids", `{"jsonrpc":"2.0","id":{{id}},"id":{{id}},"result":{"content":[]}}`, "timeout"},
	{"two results", `{"jsonrpc":"2.0","id":{{id}},"result":{"content":[]},"result":{"content":[]}}`, "protocol"},
	{"a misspelt result", `{"jsonrpc":"2.0","id":{{id}},"Result":{"content":[]}}`, "protocol"},
	{"a result and an error", `{"jsonrpc":"2.0","id":{{id}},"result":{"content":[]},"error":{"code":1,"message":"` + canary + `"}}`, "protocol"},
	{"neither", `{"jsonrpc":"2.0","id":{{id}}}`, "protocol"},
	{"no version", `{"id":{{id}},"result":{"content":[]}}`, "protocol"},
	{"cut off", `{"jsonrpc":"2.0","id":{{id}},"result":{"content":[{"type":"text","text":"` + canary, "protocol"},
	{"a null result", `{"jsonrpc":"2.0","id":{{id}},"result":null}`, "protocol"},
	{"a result of another kind", `{"jsonrpc":"2.0","id":{{id}},"result":{"tools":[]}}`, "protocol"},
	{"an error without a code", `{"jsonrpc":"2.0","id":{{id}},"error":{"message":"` + canary + `"}}`, "protocol"},
	{"too deep", `{"jsonrpc":"2.0","id":{{id}},"result":{{deep}}}`, "protocol"},
	{"oversized", `{"jsonrpc":"2.0","id":{{id}},"result":"{{big}}"}`, "limit"},
	{"an error", `{"jsonrpc":"2.0","id":{{id}},"error":{"code":-32602,"message":"` + canary + `"}}`, "refused"},
}

func init() {
	for _, f := range pipeFaults {
		strands[f.name] = func(w io.Writer, id string) {
			strings.NewReplacer("{{id}}", id, "{{ok}}", puppetOK(id), "{{big}}", strings.Repeat("x", 100<<10),
				"{{deep}}", strings.Repeat("[", 20<<10)).WriteString(w, f.line)
		}
	}
}

// webFaults are replies to a POST, and what each comes to for its call.
var webFaults = []struct {
	name, want string
	act        func(w http.ResponseWriter, r *http.Request, id string)
}{
	{"HTML", "protocol", webReply(200, "text/html", "<html>"+canary)},
	{"plain text", "protocol", webReply(200, "text/plain", "{{ok}}")},
	{"no type", "protocol", webReply(200, "", "{{ok}}")},
	{"an empty body", "protocol", webReply(200, "application/json", "")},
	{"no content", "protocol", webReply(204, "", "")},
	{"accepted", "protocol", webReply(202, "", "")},
	{"another's id", "protocol", webReply(200, "application/json", `{"jsonrpc":"2.0","id":987654321,"result":{"content":[]}}`)},
	{"not JSON", "protocol", webReply(200, "application/json", "{"+canary)},
	{"two results", "protocol", webReply(200, "application/json", `{"jsonrpc":"2.0","id":{{id}},"result":{"content":[]},"result":{"content":[]}}`)},
	{"a misspelt result", "protocol", webReply(200, "application/json", `{"jsonrpc":"2.0","id":{{id}},"RESULT":{"content":[]}}`)},
	{"no UTF-8 in a text", "ok", webReply(200, "application/json", `{"jsonrpc":"2.0","id":{{id}},"result":{"content":[{"type":"text","text":"`+"\xff\xc0"+`"}]}}`)},
	{"no UTF-8 at all", "protocol", webReply(200, "application/json", "\xff\xfe{\x00")},
	{"too deep", "protocol", webReply(200, "application/json", `{"jsonrpc":"2.0","id":{{id}},"result":`+strings.Repeat("[", 20<<10))},
	{"oversized", "limit", webReply(200, "application/json", strings.Repeat("x", 100<<10))},
	{"an oversized event", "limit", webReply(200, "text/event-stream", "data: "+strings.Repeat("x", 100<<10))},
	{"an event that is no JSON", "protocol", webReply(200, "text/event-stream", "data: "+canary+"\n\n{{event}}")},
	{"events of its own first", "ok", webReply(200, "text/event-stream", "event: "+canary+"\ndata: "+canary+"\n\n{{event}}")},
	{"a stream that ends", "disconnected", webReply(200, "text/event-stream", ": hello\n\n")},
	{"a stream cut in an event", "disconnected", webReply(200, "text/event-stream", "data: {{ok}}")},
	{"400", "protocol", webReply(400, "text/plain", canary)},
	{"400 for another", "protocol", webReply(400, "application/json", `{"jsonrpc":"2.0","id":987654321,"error":{"code":-32600,"message":"`+canary+`"}}`)},
	{"401", "protocol", webReply(401, "text/plain", canary)},
	{"403", "protocol", webReply(403, "text/plain", canary)},
	{"405", "protocol", webReply(405, "text/plain", canary)},
	{"413", "protocol", webReply(413, "text/plain", canary)},
	{"429", "unavailable, not sent", webReply(429, "text/plain", canary)},
	{"500", "unavailable", webReply(500, "text/html", canary)},
	{"500 with an answer", "unavailable", webReply(500, "application/json", "{{ok}}")},
	{"502", "unavailable", webReply(502, "text/html", canary)},
	{"a redirect", "protocol", webReply(302, "", "")},
	{"a reset", "disconnected", func(w http.ResponseWriter, r *http.Request, id string) { hangUp(w, "") }},
	{"a cut body", "disconnected", func(w http.ResponseWriter, r *http.Request, id string) {
		hangUp(w, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
	}},
	{"a cut chunk", "disconnected", func(w http.ResponseWriter, r *http.Request, id string) {
		hangUp(w, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{")
	}},
	{"a body as long as the connection", "disconnected", func(w http.ResponseWriter, r *http.Request, id string) {
		hangUp(w, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{")
	}},
	{"no HTTP", "protocol", func(w http.ResponseWriter, r *http.Request, id string) { hangUp(w, "SSH-2.0-"+canary+"\r\n") }},
	{"an endless event", "limit", endless("text/event-stream", "data: ", "x")},
	{"endless comments", "timeout", endless("text/event-stream", "", ":\n")},
	{"an endless body", "limit", endless("application/json", "", " ")},
	{"an endless error", "unavailable", func(w http.ResponseWriter, r *http.Request, id string) {
		w.WriteHeader(503)
		fillWith(w, canary, -1)
	}},
}

// webReply is a whole reply.
func webReply(status int, media, body string) func(w http.ResponseWriter, r *http.Request, id string) {
	return func(w http.ResponseWriter, r *http.Request, id string) {
		w.Header()["Content-Type"] = nil
		if media != "" {
			w.Header().Set("Content-Type", media)
		}
		if status/100 == 3 {
			w.Header().Set("Location", "http://"+canary+".example/")
		}
		w.WriteHeader(status)
		strings.NewReplacer("{{id}}", id, "{{ok}}", puppetOK(id), "{{event}}", "data: "+puppetOK(id)+"\n\n").WriteString(w, body)
	}
}

func endless(media, head, unit string) func(w http.ResponseWriter, r *http.Request, id string) {
	return func(w http.ResponseWriter, r *http.Request, id string) {
		w.Header().Set("Content-Type", media)
		io.WriteString(w, head)
		fillWith(w, unit, -1)
	}
}

// hangUp writes a reply by hand, and closes the connection: with a reset if
// there is no reply.
func hangUp(w http.ResponseWriter, reply string) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer conn.Close()
	if tcp, ok := conn.(*net.TCPConn); ok && reply == "" {
		tcp.SetLinger(0)
	}
	io.WriteString(conn, reply)
}

// TestNoOrphan is the promise that nothing of a child is left: not the child,
// not what it has started, whichever way the connection ends, and whatever they
// do about it.
func TestNoOrphan(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("needs sh")
	}
	wrappers := []struct{ name, shell string }{
		{"a shell around it", `"$0" "$@"; exit 3`},
		{"in the background of a shell", `exec 3<&0; "$0" "$@" <&3 & wait`},
		{"a double fork beside it", `(sleep 300 &); exec "$0" "$@"`},
		{"a double fork that holds the pipes and ignores TERM", `(trap "" TERM; sleep 300 &) ; exec "$0" "$@"`},
		{"all of them ignore TERM", `trap "" TERM; sleep 300 & "$0" "$@"; sleep 300`},
	}
	ends := []struct {
		name string
		args []string
		end  func(t *testing.T, c *Client)
	}{
		{"close", nil, func(t *testing.T, c *Client) {
			if _, err := c.Adopt(t.Context()); err != nil {
				t.Fatal(err)
			}
			c.Close()
		}},
		{"close while calling", []string{"wait=2"}, func(t *testing.T, c *Client) {
			if _, err := c.Adopt(t.Context()); err != nil {
				t.Fatal(err)
			}
			time.AfterFunc(100*time.Millisecond, func() { c.Close() })
			_, err := c.Call(t.Context(), doCall(""))
			if got := fateOf(err); got != "disconnected" {
				t.Errorf("the call came to %s: %v", got, err)
			}
			c.Close()
		}},
		{"cancel while connecting", []string{"silent", "eof"}, func(t *testing.T, c *Client) {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(200*time.Millisecond, cancel)
			if _, err := c.Adopt(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("Adopt: %v", err)
			}
		}},
		{"connecting takes too long", []string{"silent"}, func(t *testing.T, c *Client) {
			if _, err := c.Adopt(t.Context()); !errors.Is(err, ReasonTimeout) {
				t.Errorf("Adopt: %v", err)
			}
		}},
		{"failed handshake", []string{"foreign", "eof"}, func(t *testing.T, c *Client) {
			if _, err := c.Adopt(t.Context()); !errors.Is(err, ReasonProtocol) {
				t.Errorf("Adopt: %v", err)
			}
		}},
	}
	for _, w := range wrappers {
		for _, end := range ends {
			t.Run(w.name+"/"+end.name, func(t *testing.T) {
				t.Parallel()
				cfg, marker := puppetConfig(t, end.args...)
				cfg.Command = append([]string{"/bin/sh", "-c", w.shell}, cfg.Command...)
				cfg.ConnectTimeout = 2 * time.Second
				c := openPuppetClient(t, cfg, nil)
				end.end(t, c)
				if closed := strings.HasPrefix(end.name, "close"); closed {
					if left := living(t, marker); len(left) > 0 {
						t.Errorf("left after Close: %v", left)
					}
					return
				}
				for until := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
					left := living(t, marker)
					if len(left) == 0 {
						break
					}
					if time.Now().After(until) {
						t.Errorf("left without Close: %v", left)
						break
					}
				}
			})
		}
	}
}

// TestNothingLeft is the promise that after Close nothing of ours is left. It
// counts goroutines, descriptors, children and timers before and after a bout
// of everything that can go wrong.
func TestNothingLeft(t *testing.T) {
	rate := runtime.MemProfileRate
	runtime.MemProfileRate = 1 // every timer that is made, so that none is missed
	defer func() { runtime.MemProfileRate = rate }()
	bout := func(t *testing.T) {
		var wg sync.WaitGroup
		defer wg.Wait()
		for _, b := range []struct {
			acts []string
			cfg  func(t *testing.T) Config
		}{
			{[]string{"", "noise", "cut off", "oversized", "twice", "an error"}, func(t *testing.T) Config {
				cfg, _ := puppetConfig(t)
				return cfg
			}},
			{[]string{"", "HTML", "401", "500", "a reset", "a cut chunk", "endless comments", "an endless event", "a stream that ends", "an endless error"}, func(t *testing.T) Config {
				p := newPuppetServer(t, 0)
				for _, f := range webFaults {
					p.acts[f.name] = f.act
				}
				return Config{Endpoint: p.URL}
			}},
			{[]string{""}, func(t *testing.T) Config { // dies of it
				cfg, _ := puppetConfig(t)
				cfg.Command = []string{"/bin/sh", "-c", `(sleep 300 &); exec "$0"`, cfg.Command[0]}
				return cfg
			}},
			{nil, func(t *testing.T) Config { return Config{Command: []string{"/nowhere/at/all"}} }},
			{nil, func(t *testing.T) Config { return Config{Endpoint: "http://127.0.0.1:1/"} }},
			{nil, func(t *testing.T) Config { cfg, _ := puppetConfig(t, "silent"); return cfg }},
			{nil, func(t *testing.T) Config { cfg, _ := puppetConfig(t, "foreign"); return cfg }},
		} {
			cfg := b.cfg(t)
			cfg.CallTimeout, cfg.ConnectTimeout, cfg.MaxMessageBytes = 200*time.Millisecond, time.Second, 64<<10
			cfg.Watch, cfg.BreakerFailures = true, -1
			cfg.Retry = RetryConfig{MaxAttempts: 3, BaseDelay: 5 * time.Millisecond}
			c := openPuppetClient(t, cfg, &Options{OnNotification: func(string, string, json.RawMessage) {}})
			c.Adopt(t.Context())
			for i := range 4 * len(b.acts) {
				call := doCall(b.acts[i%len(b.acts)])
				call.OnProgress = func(Progress) {}
				if i%2 == 0 {
					call.IdempotencyKey = "k"
				}
				wg.Go(func() {
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					if i%5 == 0 {
						time.AfterFunc(time.Duration(i)*time.Millisecond, cancel)
					}
					c.Call(ctx, call)
				})
			}
			if len(b.acts) == 1 {
				c.Close() // with calls in flight
			}
		}
	}
	once := func() { t.Run("bout", bout) } // whose cleanup closes the clients and servers
	once()                                 // what is made once in a life
	settle := func() (goroutines, descriptors int, timers map[string]int, children []string) {
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
		runtime.GC()
		runtime.GC() // a profile is as of the last but one
		fds, _ := os.ReadDir("/proc/self/fd")
		return runtime.NumGoroutine(), len(fds), liveTimers(), childrenOf()
	}
	goroutines, descriptors, timers, _ := settle()
	const bouts = 3
	for range bouts {
		once()
	}
	var left []string
	for until := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		g, d, tm, children := settle()
		left = nil
		if g > goroutines || d > descriptors || len(children) > 0 {
			left = append(left, fmt.Sprintf("%d goroutines and %d descriptors have become %d and %d; children left: %q", goroutines, descriptors, g, d, children))
		}
		for maker, n := range tm {
			if n-timers[maker] >= bouts { // the runtime keeps a stopped one for a while; what leaks does so in each bout
				left = append(left, fmt.Sprintf("%d timers of %s have become %d", timers[maker], maker, n))
			}
		}
		if left == nil || time.Now().After(until) {
			break
		}
	}
	if left != nil {
		t.Errorf("%s", strings.Join(left, "; "))
		buf := make([]byte, 1<<20)
		t.Logf("%s", buf[:runtime.Stack(buf, true)])
	}
}

// liveTimers counts the timers that this package has made and that are still in
// memory, by who made them: those that are stopped and let go are not.
func liveTimers() map[string]int {
	makers := map[string]int{}
	here := reflect.TypeFor[Client]().PkgPath() // a copy has another
	records := make([]runtime.MemProfileRecord, 10_000)
	n, ok := runtime.MemProfile(records, false)
	for !ok {
		records = make([]runtime.MemProfileRecord, 2*n)
		n, ok = runtime.MemProfile(records, false)
	}
	for _, r := range records[:n] {
		makes, ours := false, ""
		frames := runtime.CallersFrames(r.Stack())
		for {
			f, more := frames.Next()
			makes = makes || f.Function == "time.newTimer" || f.Function == "time.NewTimer" || f.Function == "time.AfterFunc"
			if ours == "" && strings.HasPrefix(f.Function, here+".(*") && !strings.HasSuffix(f.File, "_test.go") {
				ours = f.Function
			}
			if !more {
				break
			}
		}
		if makes && ours != "" {
			makers[ours] += int(r.InUseObjects())
		}
	}
	return makers
}

// childrenOf lists the children of this process.
func childrenOf() (pids []string) {
	tasks, _ := filepath.Glob("/proc/self/task/*/children")
	for _, name := range tasks {
		b, _ := os.ReadFile(name)
		pids = append(pids, strings.Fields(string(b))...)
	}
	return pids
}
