package mcp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// vars makes a lookup function of a map.
func vars(m map[string]string) func(string) (string, bool) {
	return func(k string) (string, bool) { v, ok := m[k]; return v, ok }
}

func TestParseConfigs(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		file string
		env  map[string]string
		want []Config
	}{
		{"a list", `[{"name":"a","command":["x","y"]},{"name":"b","endpoint":"http://h/mcp","required":false,"timeout_seconds":1.5}]`, nil,
			[]Config{{Name: "a", Command: []string{"x", "y"}}, {Name: "b", Endpoint: "http://h/mcp", Optional: true, CallTimeout: 1500 * time.Millisecond}}},
		{"required given", `[{"name":"a","command":["x"],"required":true}]`, nil,
			[]Config{{Name: "a", Command: []string{"x"}}}},
		{"retry", `[{"name":"a","command":["x"],"retry":{"max_attempts":3,"base_delay_seconds":0.1}}]`, nil,
			[]Config{{Name: "a", Command: []string{"x"}, Retry: RetryConfig{MaxAttempts: 3, BaseDelay: 100 * time.Millisecond}}}},
		{"other hosts' form, in its order", `{"mcpServers":{"z":{"command":"npx","args":["-y","p"],"env":{"K":"v"},"cwd":"/d"},"My Server":{"type":"streamable-http","url":"https://h/"},"off":{"command":"x","disabled":true}}}`, nil,
			[]Config{{Name: "z", Command: []string{"npx", "-y", "p"}, Env: map[string]string{"K": "v"}, Dir: "/d", EnvAllow: hostEnv}, {Name: "My-Server", Transport: "http", Endpoint: "https://h/"}}},
		{"byte order mark", "\ufeff" + `[{"name":"a","command":["x"]}]`, nil, []Config{{Name: "a", Command: []string{"x"}}}},
		{"variables", `[{"name":"a","command":["${BIN}","${NONE:-d}","a${BIN}b${X"],"env":{"K":"${BIN}"}}]`, map[string]string{"BIN": "x"},
			[]Config{{Name: "a", Command: []string{"x", "d", "axb${X"}, Env: map[string]string{"K": "x"}}}},
		{"environment over file", `[{"name":"my-a","command":["x"],"timeout_seconds":5}]`,
			map[string]string{"MCP_MY_A_TIMEOUT_SECONDS": "7", "MCP_MY_A_ALLOW": "p, q", "MCP_MY_A_REQUIRED": "false", "MCP_MY_A_RETRY_MAX_ATTEMPTS": "4"},
			[]Config{{Name: "my-a", Command: []string{"x"}, CallTimeout: 7 * time.Second, Allow: []string{"p", "q"}, Optional: true, Retry: RetryConfig{MaxAttempts: 4}}}},
		{"a transport from above discards the other's reach", `[{"name":"h","transport":"stdio","command":["uvx","h"],"env_allow":["PATH"]}]`,
			map[string]string{"MCP_H_TRANSPORT": "http", "MCP_H_ENDPOINT": "http://c/mcp"},
			[]Config{{Name: "h", Transport: "http", Endpoint: "http://c/mcp"}}},
		{"and the other way", `[{"name":"h","endpoint":"http://c/mcp","headers":{"X":"y"}}]`, map[string]string{"MCP_H_COMMAND": `["uvx","h"]`},
			[]Config{{Name: "h", Command: []string{"uvx", "h"}}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := ParseConfigs([]byte(tt.file), vars(tt.env))
			if err != nil {
				t.Fatalf("ParseConfigs: %v", err)
			}
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("ParseConfigs = %#v\nwant %#v", fmt.Sprint(got), fmt.Sprint(tt.want))
			}
		})
	}
}

func TestParseConfigsReportsEveryProblem(t *testing.T) {
	t.Parallel()
	file := `[
	 {"name":"bad name","command":["x"]},
	 {"name":"a","command":"x","timout_seconds":5,"env":{"SECRET":7}},
	 {"name":"b","transport":"stdio","endpoint":"http://u:hunter2@h/mcp?token=hunter2"},
	 {"name":"c","endpoint":"ftp://u:hunter2@h/","headers":{"Mcp-Session-Id":"hunter2"}},
	 {"name":"d","command":["${NOPE}"]},
	 {"name":"ok","command":["x"]},
	 {"name":"ok","command":["x"]},
	 7
	]`
	got, err := ParseConfigs([]byte(file), vars(map[string]string{"MCP_OK_MAX_TOOLS": "many"}))
	want := []string{
		`server "bad name": name = "bad name" (file): use letters`,
		`server "a": command = "x" (file): want a list of texts, like ["a", "b"]`,
		`server "a": env = *** (file): want an object of texts`,
		`server "a": timout_seconds (file): unknown key; did you mean "timeout_seconds"?`,
		`server "b": command (file): a stdio server needs an argv`,
		`server "c": endpoint = "ftp://h/" (file): want an absolute http or https URL`,
		`server "c": headers = "Mcp-Session-Id" (file): the protocol sets this header itself`,
		`server "d": command = ["${NOPE}"] (file): variable NOPE is not set; set it, or write ${NOPE:-default}`,
		`server "ok": max_tools = "many" (environment): want a whole number`,
		`server "#8" (file): want an object`,
	}
	for _, w := range want {
		if !strings.Contains(fmt.Sprint(err), w) {
			t.Errorf("no problem %q in\n%v", w, err)
		}
	}
	if strings.Contains(fmt.Sprint(err), "hunter2") {
		t.Errorf("a secret is shown:\n%v", err)
	}
	if len(got) != 0 {
		t.Errorf("configs with problems were returned: %v", got)
	}
	var ce *ConfigError
	if !errors.As(err, &ce) {
		t.Errorf("%T is no *ConfigError", err)
	}
	for _, bad := range []string{``, `{}`, `[`, `7`, `{"mcpservers":{}}`, `{"mcpServers":[]}`, `[{"name":"a","command":["x"]},{"name":"A","command":["x"]}]`,
		`[{"name":"a","command":["x"],"connect_timeout_seconds":1e300}]`, `[{"name":"a","command":["x"],"name":"b"}]`, `[{"name":"a","command":["x"],"retry":5}]`, `[{"name":"a"}]`, `[{"name":"a","command":["x"],"timeout":5}]`} {
		if _, err := ParseConfigs([]byte(bad), nil); err == nil {
			t.Errorf("ParseConfigs(%s) = nil error", bad)
		}
	}
}

// TestDefaultsAreDocumented holds the table of the README to withDefaults.
func TestDefaultsAreDocumented(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("README.md")
	if os.IsNotExist(err) {
		t.Skip("this copy has no README")
	}
	c := Config{}.withDefaults()
	for _, want := range []string{
		fmt.Sprintf("| `protocol` | `%s` |", c.Protocol),
		fmt.Sprintf("| `connect_timeout_seconds` | %v |", c.ConnectTimeout.Seconds()),
		fmt.Sprintf("| `discovery_timeout_seconds` | %v |", c.DiscoveryTimeout.Seconds()),
		fmt.Sprintf("| `timeout_seconds` | %v |", c.CallTimeout.Seconds()),
		fmt.Sprintf("| `read_timeout_seconds` | %v |", c.ReadTimeout.Seconds()),
		fmt.Sprintf("| `max_message_bytes` | %d MiB |", c.MaxMessageBytes>>20),
		fmt.Sprintf("| `max_in_flight` | %d |", c.MaxInFlight),
		fmt.Sprintf("| `max_tools`, `max_schema_bytes` | %d, %d MiB |", c.MaxTools, c.MaxSchemaBytes>>20),
		fmt.Sprintf("| `max_result_bytes` | %d KiB |", c.MaxResultBytes>>10),
		fmt.Sprintf("`max_attempts` %d, `base_delay_seconds` %v, `max_delay_seconds` %v, `max_retry_after_seconds` %v |",
			c.Retry.MaxAttempts, c.Retry.BaseDelay.Seconds(), c.Retry.MaxDelay.Seconds(), c.Retry.MaxRetryAfter.Seconds()),
		fmt.Sprintf("| `breaker_failures`, `breaker_reset_seconds` | %d, %v |", c.BreakerFailures, c.BreakerReset.Seconds()),
		fmt.Sprintf("| `arguments`, `results` | `%s` |", c.Arguments),
		strings.Join(hostEnv, ", "),
	} {
		if !strings.Contains(string(b), want) {
			t.Errorf("README.md does not say %s", want)
		}
	}
	for key := range hostKeys {
		if !strings.Contains(string(b), "`"+key+"`") {
			t.Errorf("README.md does not mention the key %s of other hosts", key)
		}
	}
}

func TestConfigValidate(t *testing.T) {
	t.Parallel()
	good := Config{Name: "a", Command: []string{"x"}}
	if err := good.Validate(); err != nil {
		t.Errorf("Validate(%v) = %v", good, err)
	}
	bad := Config{Name: "", Command: []string{"x"}, Endpoint: "http://h", Protocol: "1999-01-01", CallTimeout: -1, MaxTools: -1, Arguments: "maybe",
		Headers: map[string]string{"a b": "", "X": "1\r\n2", "Idempotency-Key": "k"}, Env: map[string]string{"A=B": ""}, Retry: RetryConfig{BaseDelay: 2, MaxDelay: 1}}
	err := bad.Validate()
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok || len(joined.Unwrap()) != 11 {
		t.Errorf("Validate reports\n%v\nwant 11 problems", err)
	}
	if err := (Config{Name: "a", Command: []string{"x"}, BreakerFailures: -1}).Validate(); err != nil {
		t.Errorf("a negative BreakerFailures is an off switch: %v", err)
	}
}

func TestConfigShowsNoSecret(t *testing.T) {
	t.Parallel()
	c := Config{Name: "a", Command: []string{"srv", "--token=hunter2"}, Env: map[string]string{"KEY": "hunter2"}}
	h := Config{Name: "b", Endpoint: "https://u:hunter2@h/mcp?k=hunter2#hunter2", Headers: map[string]string{"Authorization": "hunter2"}}
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "c", c, "h", h)
	for _, s := range []string{fmt.Sprint(c, h), fmt.Sprintf("%v %+v %#v %s", c, c, c, c), fmt.Sprintf("%v %+v %#v", h, h, h), log.String()} {
		if strings.Contains(s, "hunter2") || !strings.Contains(s, "a") {
			t.Errorf("shown as %s", s)
		}
	}
	if want := `mcp.Config{"b" endpoint="https://h/mcp" headers=Authorization}`; h.String() != want {
		t.Errorf("String() = %s, want %s", h, want)
	}

	// A slip of the hand puts the value into the key.
	c.Env = map[string]string{"KEY=hunter2": "", "OTHER": "x"}
	h.Headers = map[string]string{"Authorization: hunter2": "", "B hunter2": "", "C": ""}
	for _, c := range []Config{c, h} {
		err := c.Validate()
		if text := fmt.Sprint(c, err); err == nil || strings.Contains(text, "hunter2") || !strings.Contains(text, "…") {
			t.Errorf("shown as %s", text)
		}
	}
	if want := `mcp.Config{"a" command="srv" +1 env=KEY…,OTHER}`; c.String() != want {
		t.Errorf("String() = %s, want %s", c, want)
	}
}

// TestSharedErrorOfTransport has a transport hand one error to many sessions.
func TestSharedErrorOfTransport(t *testing.T) {
	t.Parallel()
	one := &TransportError{Reason: ReasonUnavailable}
	var wg sync.WaitGroup
	for i := range 8 {
		cfg := Config{Protocol: version2511, MaxMessageBytes: math.MaxInt}
		s := NewSession(NewRecordingTransport(map[string]any{"initialize": one}), cfg, nil)
		s.cfg.Name = strconv.Itoa(i)
		wg.Go(func() {
			_, err := s.Initialize(t.Context())
			if o, ok := err.(originator); !ok || o.origin().Server != strconv.Itoa(i) || one.Server != "" {
				t.Errorf("%d: error = %v", i, err)
			}
		})
	}
	wg.Wait()
}

// TestSharedErrorAtCeiling has a transport hand everybody one error when a context
// ends, which is a timeout only for who had a ceiling.
func TestSharedErrorAtCeiling(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		one := &TransportError{Reason: ReasonCancelled, Err: context.Canceled}
		_, rt := session(map[string]any{"server/discover": json.RawMessage(modernDiscover)}, Config{}, nil)
		s := NewSession(sharer{rt, one}, Config{Name: "s", Protocol: version2026}, nil)
		if _, err := s.CallTool(t.Context(), &Call{Tool: "x"}); !errors.Is(err, ReasonTimeout) {
			t.Errorf("CallTool = %v want %v", err, ReasonTimeout)
		}
		if one.Reason != ReasonCancelled || one.Err != context.Canceled || one.Server != "" {
			t.Errorf("the shared error became %+v", one)
		}
		s.Close()
	})
}

// A sharer is a Transport written elsewhere, whose calls end with one error.
type sharer struct {
	Transport
	err error
}

func (s sharer) Call(ctx context.Context, req *Request) (json.RawMessage, error) {
	if req.Method != "tools/call" {
		return s.Transport.Call(ctx, req)
	}
	<-ctx.Done()
	return nil, s.err
}

// A leaver is a Transport that leaves its goroutine, as a hook in it may.
type leaver struct{ Transport }

func (l leaver) Call(context.Context, *Request) (json.RawMessage, error) {
	runtime.Goexit()
	return nil, nil
}

// TestProbeLeaves has the probe's goroutine left by a hook.
func TestProbeLeaves(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		_, rt := session(nil, Config{}, nil)
		s := NewSession(leaver{rt}, Config{Name: "s"}, nil)
		done := make(chan error, 1)
		go func() {
			_, err := s.Initialize(t.Context())
			done <- err
		}()
		select {
		case err := <-done:
			if err == nil {
				t.Error("Initialize succeeded")
			}
		case <-time.After(time.Hour):
			t.Fatal("Initialize hangs")
		}
		s.Close()
	})
}

// TestListenerLeaves has the user leave the goroutine that delivers notifications:
// those behind are delivered.
func TestListenerLeaves(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		seen := 0
		s, rt := session(nil, Config{}, &Options{OnNotification: func(string, string, json.RawMessage) {
			if seen++; seen%2 == 1 {
				runtime.Goexit()
			}
		}})
		if _, err := s.Initialize(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range 10 {
			rt.SendNotification("notifications/message", nil)
		}
		synctest.Wait()
		if seen != 10 {
			t.Errorf("%d notifications of 10", seen)
		}
		s.Close()
	})
}

// session returns a session over a scripted transport.
func session(script map[string]any, cfg Config, o *Options) (*TransportSession, *RecordingTransport) {
	rt := NewRecordingTransport(script)
	cfg.Name = "s"
	return NewSession(rt, cfg, o), rt
}

// methods lists what a transport was asked, in order.
func methods(rt *RecordingTransport) string {
	var m []string
	for _, c := range rt.Calls() {
		m = append(m, c.Method)
	}
	return strings.Join(m, " ")
}

// TestSlowDeathOfProbe has a server start slowly, and then die of the probe, when
// initialize has been asked as well.
func TestSlowDeathOfProbe(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, rt := session(nil, Config{}, nil)
		var starts atomic.Int32
		rt.Script("server/discover", func(context.Context, json.RawMessage) (any, error) {
			time.Sleep(5 * time.Second)
			rt.Disconnect()
			return nil, &TransportError{Reason: ReasonDisconnected, Sent: true}
		})
		rt.Script("initialize", func(ctx context.Context, _ json.RawMessage) (any, error) {
			if starts.Add(1) == 1 {
				<-ctx.Done() // it never gets there
			}
			return json.RawMessage(`{"protocolVersion":"2025-11-25","capabilities":{}}`), nil
		})
		if info, err := s.Initialize(t.Context()); err != nil || info.Protocol != version2511 {
			t.Errorf("Initialize = %+v, %v after %s", info, err, methods(rt))
		}
		s.Close()
	})
}

const modernDiscover = `{"resultType":"complete","supportedVersions":["2026-07-28"],"capabilities":{"tools":{}},"_meta":{"io.modelcontextprotocol/serverInfo":{"name":"m","version":"2"}}}`

// TestEra walks the decision table for the answer to the probe
// (MCP 2026-07-28, versioning).
func TestEra(t *testing.T) {
	t.Parallel()
	old := "server/discover initialize notifications/initialized"
	status := func(code int, r Reason) error { return &TransportError{Reason: r, Status: code, Sent: true} }
	broken := func(code int, body string) error {
		return &TransportError{Reason: ReasonUnavailable, Status: code, Raw: []byte(body), Sent: true}
	}
	supported := func(code int, list string) error {
		return &RPCError{Code: code, Data: json.RawMessage(`{"supported":` + list + `}`)}
	}
	tests := []struct {
		name     string
		discover any // nil: never asked
		protocol string
		want     string // the requests that were made
		version  string // agreed; "" = an error
	}{
		{"modern", json.RawMessage(modernDiscover), "", "server/discover", "2026-07-28"},
		{"serverInfo at the top", json.RawMessage(`{"supportedVersions":["2026-07-28"],"serverInfo":{"name":"m"}}`), "", "server/discover", "2026-07-28"},
		{"only an older revision is mutual", json.RawMessage(`{"supportedVersions":["2027-01-01","2025-06-18"]}`), "", old, "2025-06-18"},
		{"nothing is mutual", json.RawMessage(`{"supportedVersions":["2027-01-01"]}`), "", "server/discover", ""},
		{"a result without versions", json.RawMessage(`{}`), "", old, "2025-11-25"},
		{"unsupported, older ones named", supported(-32022, `["2025-03-26"]`), "", old, "2025-03-26"},
		{"unsupported, none mutual", supported(-32022, `["2030-01-01"]`), "", "server/discover", ""},
		{"unsupported, no data", &RPCError{Code: -32022}, "", "server/discover", ""},
		{"header mismatch proves a modern server", &RPCError{Code: -32020}, "", "server/discover", ""},
		{"missing capability too", &RPCError{Code: -32021}, "", "server/discover", ""},
		{"method not found", &RPCError{Code: -32601}, "", old, "2025-11-25"},
		{"invalid params", &RPCError{Code: -32602}, "", old, "2025-11-25"},
		{"a vendor's code", &RPCError{Code: -32000}, "", old, "2025-11-25"},
		{"404", status(404, ReasonProtocol), "", old, "2025-11-25"},
		{"400", status(400, ReasonProtocol), "", old, "2025-11-25"},
		{"no JSON", status(0, ReasonProtocol), "", old, "2025-11-25"},
		{"401 without credentials", status(401, ReasonProtocol), "", "server/discover", ""},
		{"503", status(503, ReasonUnavailable), "", "server/discover", ""},
		{"429", status(429, ReasonUnavailable), "", "server/discover", ""},
		{"500 with a refusal", broken(500, `{"jsonrpc":"2.0","id":1,"error":{"code":-32603,"message":"x"}}`), "", old, "2025-11-25"},
		{"500 with another body", broken(500, `{"detail":"x"}`), "", "server/discover", ""},
		{"429 with a refusal", broken(429, `{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"x"}}`), "", "server/discover", ""},
		{"redirect", status(307, ReasonProtocol), "", "server/discover", ""},
		{"died of it", status(0, ReasonDisconnected), "", old, "2025-11-25"},
		{"pinned to an older revision", nil, "2025-06-18", "initialize notifications/initialized", "2025-06-18"},
		{"pinned to the modern one", json.RawMessage(modernDiscover), "2026-07-28", "server/discover", "2026-07-28"},
		{"pinned, and discover is missing", &RPCError{Code: -32601}, "2026-07-28", "server/discover", "2026-07-28"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			script := map[string]any{}
			if tt.discover != nil {
				script["server/discover"] = tt.discover
			}
			s, rt := session(script, Config{Protocol: tt.protocol}, nil)
			defer s.Close()
			info, err := s.Initialize(t.Context())
			if got := methods(rt); got != tt.want {
				t.Errorf("requests %q, want %q", got, tt.want)
			}
			if (err == nil) != (tt.version != "") {
				t.Fatalf("Initialize: %v", err)
			}
			if err == nil && info.Protocol != tt.version {
				t.Errorf("agreed on %q, want %q", info.Protocol, tt.version)
			}
		})
	}
}

// TestSilentProbe has a server that ignores the probe, or answers it late: it
// must not be lost for that.
func TestSilentProbe(t *testing.T) {
	t.Parallel()
	hang := func(ctx context.Context, _ json.RawMessage) (any, error) { <-ctx.Done(); return nil, ctx.Err() }
	after := func(d time.Duration, v any) func(context.Context, json.RawMessage) (any, error) {
		return func(ctx context.Context, _ json.RawMessage) (any, error) {
			select {
			case <-time.After(d):
				return v, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
	agreed := map[string]any{"protocolVersion": "2025-11-25", "capabilities": map[string]any{"tools": map[string]any{}}}
	tests := []struct {
		name           string
		discover, init any
		version        string
	}{
		{"ignored for ever", hang, agreed, "2025-11-25"},
		{"a slow start of an old server", after(20*time.Second, &RPCError{Code: -32601}), after(21*time.Second, agreed), "2025-11-25"},
		{"a slow start of a modern server", after(20*time.Second, json.RawMessage(modernDiscover)), hang, "2026-07-28"},
		{"a modern server that refuses the second question first", after(5*time.Second, json.RawMessage(modernDiscover)), after(time.Second, &RPCError{Code: -32601}), "2026-07-28"},
		{"ignored, and the second refused", hang, after(time.Second, &RPCError{Code: -32000}), ""},
		{"both refused", after(5*time.Second, &RPCError{Code: -32601}), after(time.Second, &RPCError{Code: -32000}), ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s, _ := session(map[string]any{"server/discover": tt.discover, "initialize": tt.init}, Config{}, nil)
				defer s.Close()
				start := time.Now()
				info, err := s.Initialize(t.Context())
				var re *RPCError
				if tt.version == "" && errors.As(err, &re) && re.Code == -32000 && time.Since(start) < 10*time.Second {
					return
				}
				if err != nil || info.Protocol != tt.version {
					t.Fatalf("Initialize = %+v, %v after %v, want %s", info, err, time.Since(start), tt.version)
				}
			})
		})
	}
}

func init() {
	strands["a refusal, and its end"] = func(w io.Writer, id string) {
		io.WriteString(w, `{"jsonrpc":"2.0","id":`+id+`,"error":{"code":-32601,"message":"`+canary+`"}}`+"\n")
		w.(interface{ Flush() error }).Flush()
		os.Exit(3)
	}
}

// TestProbeOfOldServers has servers meet the probe in ways that must not cost them
// the connection: over either transport, and with one slot for everything.
func TestProbeOfOldServers(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, carrier, act string }{
		{"ignores it", "stdio", "nothing"},
		{"answers it, and dies of it", "stdio", "a refusal, and its end"},
		{"ignores it", "JSON", ""},
	} {
		t.Run(tt.carrier+" "+tt.name, func(t *testing.T) {
			t.Parallel()
			cfg, _ := puppetConfig(t, "spoil=server/discover:"+tt.act)
			if tt.carrier != "stdio" {
				p := newPuppetServer(t, 0)
				p.method, p.spoil = "server/discover", func(w http.ResponseWriter, r *http.Request, id string) { <-r.Context().Done() }
				cfg = Config{Endpoint: p.URL}
			}
			cfg.MaxInFlight, cfg.ConnectTimeout = 1, 10*time.Second
			usable(t, newPuppetClient(t, cfg, nil))
		})
	}
}

// TestEraOfReplacement has a modern server replaced by an older one: what is new is
// asked anew.
func TestEraOfReplacement(t *testing.T) {
	t.Parallel()
	s, rt := session(map[string]any{
		"server/discover": Answers{json.RawMessage(modernDiscover), &RPCError{Code: -32601}},
		"initialize":      map[string]any{"protocolVersion": version2506, "capabilities": map[string]any{}},
		"tools/call":      map[string]any{"content": []any{}},
	}, Config{}, nil)
	defer s.Close()
	for _, want := range []string{version2026, version2506} {
		if _, err := s.CallTool(t.Context(), &Call{Tool: "x"}); err != nil {
			t.Error(err)
		}
		if info := s.serverInfo(); info.Protocol != want {
			t.Errorf("spoke %s want %s", info.Protocol, want)
		}
		rt.Disconnect()
	}
}

// TestEraOfRollback has a modern server replaced by an older one behind the same
// address: it refuses what belongs to no session, and is then asked what it speaks.
func TestEraOfRollback(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		err    error
		probes int
	}{
		{"server not initialized", &RPCError{Code: -32000, Status: 400}, 2},
		{"session not found", &RPCError{Code: -32001, Status: 404}, 2},
		{"no JSON-RPC", &TransportError{Reason: ReasonProtocol, Sent: true, Status: 400}, 2},
		{"a modern refusal", &RPCError{Code: -32602, Status: 400}, 1},
		{"an error of the tool's own", &RPCError{Code: -32001, Status: 200}, 1},
		{"no permission", &TransportError{Reason: ReasonProtocol, Sent: true, Status: 403}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ok := map[string]any{"content": []any{}, "resultType": "complete"}
			s, rt := session(map[string]any{
				"server/discover": Answers{json.RawMessage(modernDiscover), &RPCError{Code: -32601}},
				"initialize":      map[string]any{"protocolVersion": version2506, "capabilities": map[string]any{}},
				"tools/call":      Answers{ok, tt.err, ok},
			}, Config{}, nil)
			defer s.Close()
			for i := range 3 {
				if _, err := s.CallTool(t.Context(), &Call{Tool: "x"}); (err != nil) != (i == 1) {
					t.Errorf("call %d: %v", i, err)
				}
			}
			if n := strings.Count(methods(rt), "server/discover"); n != tt.probes {
				t.Errorf("%d probes want %d: %s", n, tt.probes, methods(rt))
			}
		})
	}
}

func TestConnectCeiling(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		hang := func(ctx context.Context, _ json.RawMessage) (any, error) { <-ctx.Done(); return nil, ctx.Err() }
		s, _ := session(map[string]any{"server/discover": hang, "initialize": hang}, Config{ConnectTimeout: 8 * time.Second}, nil)
		defer s.Close()
		begun := time.Now()
		_, err := s.Initialize(t.Context())
		if !errors.Is(err, ReasonTimeout) || errors.Is(err, context.DeadlineExceeded) || time.Since(begun) != 8*time.Second {
			t.Errorf("after %v: %v, want a timeout after 8s that is not the caller's", time.Since(begun), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := s.Initialize(ctx); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ReasonTimeout) {
			t.Errorf("with a caller who gives up first: %v", err)
		}
	})
}

// TestReconnectOnce has many callers notice one lost connection.
func TestReconnectOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		starts := 0
		initialize := func(ctx context.Context, p json.RawMessage) (any, error) {
			time.Sleep(time.Second) // in the bubble: let the others come
			mu.Lock()
			defer mu.Unlock()
			starts++
			return map[string]any{"protocolVersion": "2025-11-25", "capabilities": map[string]any{"tools": map[string]any{}}}, nil
		}
		s, rt := session(map[string]any{
			"initialize": initialize,
			"tools/call": map[string]any{"content": []any{map[string]any{"type": "text", "text": "ok"}}},
		}, Config{Protocol: "2025-11-25"}, nil)
		renewed := 0
		s.onReconnect(func(context.Context) { renewed++ })
		for want := 1; want <= 3; want++ {
			var wg sync.WaitGroup
			for range 32 {
				wg.Go(func() {
					if _, err := s.CallTool(t.Context(), &Call{Tool: "x"}); err != nil {
						t.Errorf("CallTool: %v", err)
					}
				})
			}
			wg.Wait()
			if starts != want || renewed != want-1 {
				t.Errorf("%d handshakes and %d renewals, want %d and %d", starts, renewed, want, want-1)
			}
			rt.Disconnect()
		}
		s.Close()
	})
}

// TestSubscribe watches a server that refuses the stream on its first connection,
// ends it at once on the second, and then holds it.
func TestSubscribe(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var streams atomic.Int32
		s, rt := session(map[string]any{
			"server/discover": json.RawMessage(modernDiscover),
			"tools/call":      json.RawMessage(`{"resultType":"complete","content":[]}`),
			"subscriptions/listen": func(ctx context.Context, _ json.RawMessage) (any, error) {
				switch streams.Add(1) {
				case 1:
					return nil, &RPCError{Code: -32601}
				case 2:
					return map[string]any{"resultType": "complete"}, nil
				}
				<-ctx.Done()
				return nil, ctx.Err()
			},
		}, Config{Protocol: version2026, Watch: true}, nil)
		for _, want := range []int32{1, 3} {
			if _, err := s.CallTool(t.Context(), &Call{Tool: "x"}); err != nil {
				t.Fatalf("CallTool: %v", err)
			}
			time.Sleep(time.Hour)
			if n := streams.Load(); n != want {
				t.Errorf("the stream was asked for %d times, want %d", n, want)
			}
			if missed := want > 1; s.stale() != missed { // what happened between two streams was not announced
				t.Errorf("stale = %v, want %v", s.stale(), missed)
			}
			rt.Disconnect()
		}
		s.Close()
	})
}

// TestSubscribeAgain replaces a watched server, by itself and by an older one: each
// connection is watched from its beginning, once, and what changed between two
// streams is not missed, though the list was read in that time.
func TestSubscribeAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var asked, open atomic.Int32
		end := make(chan bool)
		s, rt := session(map[string]any{
			"server/discover": Answers{json.RawMessage(modernDiscover), json.RawMessage(modernDiscover), &RPCError{Code: -32601}},
			"initialize":      map[string]any{"protocolVersion": version2511, "capabilities": map[string]any{}},
			"tools/call":      json.RawMessage(`{"resultType":"complete","content":[]}`),
			"tools/list":      json.RawMessage(`{"resultType":"complete","tools":[]}`),
			"subscriptions/listen": func(ctx context.Context, _ json.RawMessage) (any, error) {
				asked.Add(1)
				open.Add(1)
				defer open.Add(-1)
				select {
				case <-end:
				case <-ctx.Done():
				}
				return map[string]any{"resultType": "complete"}, nil
			},
		}, Config{Watch: true}, nil)
		reach := func(streams int32) {
			t.Helper()
			begun := asked.Load()
			if _, err := s.CallTool(t.Context(), &Call{Tool: "x"}); err != nil {
				t.Fatalf("CallTool: %v", err)
			}
			synctest.Wait()
			if open.Load() != streams || asked.Load()-begun != streams {
				t.Errorf("%d streams, asked for %d times, want %d", open.Load(), asked.Load()-begun, streams)
			}
		}
		reach(1)
		rt.SendNotification("notifications/subscriptions/acknowledged", nil)
		if s.stale() {
			t.Error("stale when the first stream has begun")
		}

		end <- true
		synctest.Wait()
		if _, err := s.ListTools(t.Context()); err != nil || s.stale() {
			t.Errorf("stale = %v after ListTools, %v", s.stale(), err)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		for range 2 { // but once a stream
			rt.SendNotification("notifications/subscriptions/acknowledged", nil)
			if stale := s.stale(); !stale {
				t.Error("what happened between two streams is missed")
			}
		}
		if _, err := s.ListTools(t.Context()); err != nil {
			t.Error(err)
		}
		if rt.SendNotification("notifications/subscriptions/acknowledged", nil); s.stale() {
			t.Error("stale without a reason")
		}

		rt.Disconnect()
		time.Sleep(time.Hour) // how eagerly it was asked for is forgotten
		reach(1)
		rt.Disconnect()
		time.Sleep(time.Hour)
		reach(0) // an older one
		begun := asked.Load()
		if time.Sleep(time.Hour); asked.Load() != begun {
			t.Error("an older server was asked for the stream")
		}
		s.Close()
	})
}

// TestReconnectAfterFailedHandshake has the handshake on a new connection fail:
// the transport does not call it new a second time, and it is due all the same.
func TestReconnectAfterFailedHandshake(t *testing.T) {
	t.Parallel()
	agreed := map[string]any{"protocolVersion": "2025-11-25", "capabilities": map[string]any{"tools": map[string]any{}}}
	s, rt := session(map[string]any{
		"initialize": Answers{agreed, ReasonUnavailable, agreed},
		"tools/call": map[string]any{"content": []any{}},
	}, Config{Protocol: "2025-11-25"}, nil)
	defer s.Close()
	call := func() error {
		_, err := s.CallTool(t.Context(), &Call{Tool: "x"})
		return err
	}
	if err := call(); err != nil {
		t.Fatal(err)
	}
	rt.Disconnect()
	if err := call(); !errors.Is(err, ReasonUnavailable) {
		t.Errorf("with a handshake that fails: %v, want %v", err, ReasonUnavailable)
	}
	if err := call(); err != nil {
		t.Errorf("after it: %v", err)
	}
	handshakes := 0
	for _, c := range rt.Calls() {
		if c.Method == "initialize" {
			handshakes++
		}
	}
	if handshakes != 3 {
		t.Errorf("%d handshakes, want 3", handshakes)
	}
}

// TestLeaderGivesUp has the caller who leads the connecting give up: the others
// must not inherit its cancellation.
// A connection that is lost again while the hook reads the tools costs the hook its
// answer, and nobody the whole ceiling.
func TestReconnectHookLosesConnection(t *testing.T) {
	t.Parallel()
	s, rt := session(map[string]any{
		"server/discover": json.RawMessage(modernDiscover),
		"tools/list":      json.RawMessage(`{"tools":[]}`),
		"x":               json.RawMessage(`{}`),
	}, Config{}, nil)
	defer s.Close()
	if _, err := s.Initialize(t.Context()); err != nil {
		t.Fatal(err)
	}
	hooked := 0
	s.onReconnect(func(ctx context.Context) {
		if hooked++; hooked == 1 {
			rt.Disconnect()
			if _, err := s.ListTools(ctx); !errors.Is(err, ReasonDisconnected) {
				t.Errorf("the hook of a lost connection: %v", err)
			}
		}
	})
	rt.Disconnect()
	begun := time.Now()
	for err := error(ReasonDisconnected); err != nil; {
		if err = s.Request(t.Context(), "x", nil, nil); err != nil && !errors.Is(err, ReasonDisconnected) {
			t.Fatal(err)
		}
	}
	if d := time.Since(begun); d > 5*time.Second || hooked != 2 {
		t.Errorf("the session took %v to come back, and called its hook %d times want 2", d, hooked)
	}
}

func TestLeaderGivesUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		slow := func(ctx context.Context, p json.RawMessage) (any, error) {
			select {
			case <-time.After(2 * time.Second):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			return map[string]any{"protocolVersion": "2025-11-25"}, nil
		}
		s, _ := session(map[string]any{"initialize": slow}, Config{Protocol: "2025-11-25"}, nil)
		defer s.Close()
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := s.Initialize(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("the leader: %v", err)
			}
		})
		synctest.Wait()
		wg.Go(func() {
			if _, err := s.Initialize(t.Context()); err != nil {
				t.Errorf("the follower: %v", err)
			}
		})
		synctest.Wait()
		cancel()
		wg.Wait()
	})
}

func TestListToolsPages(t *testing.T) {
	t.Parallel()
	page := func(name, cursor string) json.RawMessage {
		if cursor != "" {
			cursor = `,"nextCursor":` + cursor
		}
		return json.RawMessage(`{"tools":[{"name":"` + name + `","inputSchema":{"type":"object"}}]` + cursor + `}`)
	}
	endless := func(json.RawMessage) (any, error) {
		endlessPages++
		return page("t", fmt.Sprintf(`"c%d"`, endlessPages)), nil
	}
	tests := []struct {
		name   string
		list   any
		want   string
		reason Reason
	}{
		{"one", page("a", ""), "a", ""},
		{"null is the end", page("a", "null"), "a", ""},
		{"an empty cursor is a cursor", Answers{page("a", `""`), page("b", "")}, "a b", ""},
		{"the same cursor", page("a", `"c"`), "", ReasonProtocol},
		{"a cycle", Answers{page("a", `"c"`), page("b", `"d"`), page("c", `"c"`)}, "", ReasonProtocol},
		{"no end", endless, "", ReasonLimit},
		{"not a list", json.RawMessage(`{"tools":7}`), "", ReasonProtocol},
		{"an entry that is no tool", json.RawMessage(`{"tools":[7,{"inputSchema":{}},{"name":"a","inputSchema":{}}]}`), "a", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s, _ := session(map[string]any{"tools/list": tt.list}, Config{}, nil)
			defer s.Close()
			tools, err := s.ListTools(t.Context())
			if got := strings.Join(names(tools), " "); got != tt.want {
				t.Errorf("ListTools = %q, want %q", got, tt.want)
			}
			if (err != nil) != (tt.reason != "") || err != nil && !errors.Is(err, tt.reason) {
				t.Errorf("ListTools: %v, want %q", err, tt.reason)
			}
		})
	}
}

var endlessPages int // of TestListToolsPages, whose cases run in turn

// TestInputRequired answers a result that asks for input
// (MCP 2026-07-28, multi round-trip requests; protocol example in testdata).
func TestInputRequired(t *testing.T) {
	t.Parallel()
	ask := json.RawMessage(`{"resultType":"input_required","inputRequests":{"ok":{"method":"elicitation/create","params":{"mode":"form","requestedSchema":{"type":"object","properties":{"yes":{"type":"boolean"},"n":{"type":"integer","default":12345678901234567890}}}}}},"requestState":"v1.\u0000é"}`)
	done := json.RawMessage(`{"resultType":"complete","content":[{"type":"text","text":"deployed"}]}`)
	handlers := map[string]HandlerFunc{"elicitation/create": func(ctx context.Context, server string, params json.RawMessage) (any, error) {
		return map[string]any{"action": "accept", "content": map[string]any{"yes": true}}, nil
	}}
	tests := []struct {
		name     string
		answers  any
		handlers map[string]HandlerFunc
		calls    int
		reason   Reason
	}{
		{"one round", Answers{ask, done}, handlers, 2, ""},
		{"two rounds", Answers{ask, ask, done}, handlers, 3, ""},
		{"state only", Answers{json.RawMessage(`{"resultType":"input_required","requestState":"s"}`), done}, nil, 2, ""},
		{"nothing asked", json.RawMessage(`{"resultType":"input_required"}`), handlers, 1, ReasonProtocol},
		{"not declared", ask, nil, 1, ReasonProtocol},
		{"without end", ask, handlers, maxRounds + 1, ReasonLimit},
		{"a type of its own", json.RawMessage(`{"resultType":"task","taskId":"1"}`), handlers, 1, ReasonProtocol},
		{"no content", json.RawMessage(`{"resultType":"complete"}`), handlers, 1, ReasonProtocol},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s, rt := session(map[string]any{"server/discover": json.RawMessage(modernDiscover), "tools/call": tt.answers}, Config{}, &Options{Handlers: tt.handlers})
			defer s.Close()
			r, err := s.CallTool(t.Context(), &Call{Tool: "deploy", Arguments: map[string]any{"env": "prod"}})
			if (err != nil) != (tt.reason != "") || err != nil && !errors.Is(err, tt.reason) {
				t.Fatalf("CallTool: %v, want %q", err, tt.reason)
			}
			if err == nil && r.Text() != "deployed" {
				t.Errorf("CallTool = %q", r.Text())
			}
			var calls []Recorded
			for _, c := range rt.Calls() {
				if c.Method == "tools/call" {
					calls = append(calls, c)
				}
			}
			if len(calls) != tt.calls {
				t.Fatalf("%d calls, want %d", len(calls), tt.calls)
			}
			if tt.name == "one round" {
				want := `"inputResponses":{"ok":{"action":"accept","content":{"n":12345678901234567890,"yes":true}}},"requestState":"v1.\u0000é"`
				if !strings.Contains(string(calls[1].Raw), want) || !strings.Contains(string(calls[1].Raw), `"arguments":{"env":"prod"}`) {
					t.Errorf("second round %s\nlacks %s", calls[1].Raw, want)
				}
				if strings.Contains(string(calls[0].Raw), "inputResponses") {
					t.Errorf("first round %s", calls[0].Raw)
				}
			}
		})
	}
}

// A server that becomes an older one between two rounds has answered when it has:
// the call is not made once more.
func TestInputRequiredThenOlder(t *testing.T) {
	t.Parallel()
	s, rt := session(map[string]any{
		"server/discover": json.RawMessage(modernDiscover),
		"initialize":      json.RawMessage(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"n"}}`),
		"tools/call": Answers{
			json.RawMessage(`{"resultType":"input_required","requestState":"s"}`),
			&RPCError{Code: -32022, Data: json.RawMessage(`{"supported":["2025-11-25"]}`)},
			json.RawMessage(`{"content":[{"type":"text","text":"done"}]}`),
		},
	}, Config{}, nil)
	defer s.Close()
	if r, err := s.CallTool(t.Context(), &Call{Tool: "t"}); err != nil || r.Text() != "done" {
		t.Errorf("CallTool = %+v, %v after %s", r, err, methods(rt))
	}
}

func TestMetaOfRequests(t *testing.T) {
	t.Parallel()
	ok := json.RawMessage(`{"content":[]}`)
	o := &Options{
		ClientInfo: ServerInfo{Name: "acme-client", Version: "0.3.0"},
		Meta: func(context.Context) map[string]any {
			return map[string]any{"traceparent": "00-1", "io.modelcontextprotocol/protocolVersion": "1"}
		},
	}
	s, rt := session(map[string]any{"tools/call": ok}, Config{}, o)
	defer s.Close()
	m, mrt := session(map[string]any{"tools/call": ok, "server/discover": json.RawMessage(modernDiscover)}, Config{}, o)
	defer m.Close()
	call := &Call{Tool: "x", IdempotencyKey: "k", Meta: map[string]any{"a": 1, "progressToken": "mine"}}
	for _, tt := range []struct {
		s    *TransportSession
		rt   *RecordingTransport
		want string
	}{
		{s, rt, `{"name":"x","arguments":{},"_meta":{"idempotency-key":"k","a":1,"traceparent":"00-1"}}`},
		{m, mrt, `{"name":"x","arguments":{},"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"acme-client","version":"0.3.0"},"io.modelcontextprotocol/clientCapabilities":{},"idempotency-key":"k","a":1,"traceparent":"00-1"}}`},
	} {
		if _, err := tt.s.CallTool(t.Context(), call); err != nil {
			t.Fatal(err)
		}
		calls := tt.rt.Calls()
		if got := string(calls[len(calls)-1].Raw); got != tt.want {
			t.Errorf("params %s\nwant   %s", got, tt.want)
		}
	}
}

func TestServerRequests(t *testing.T) {
	t.Parallel()
	o := &Options{Handlers: map[string]HandlerFunc{
		"elicitation/create": func(context.Context, string, json.RawMessage) (any, error) {
			return map[string]any{"action": "decline"}, nil
		},
		"roots/list": func(context.Context, string, json.RawMessage) (any, error) { return nil, errors.New("secret") },
	}}
	tests := []struct {
		method, params, want string
		code                 int
	}{
		{"ping", ``, `{}`, 0},
		{"elicitation/create", `{"message":"?"}`, `{"action":"decline"}`, 0},
		{"elicitation/create", `{"mode":"url"}`, ``, -32602},
		{"sampling/createMessage", `{}`, ``, -32601},
		{"tasks/get", `{}`, ``, -32601},
	}
	s, rt := session(nil, Config{}, o)
	defer s.Close()
	if _, err := s.Initialize(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, tt := range tests {
		var params any
		if tt.params != "" {
			params = json.RawMessage(tt.params)
		}
		got, err := rt.SendRequest(t.Context(), tt.method, params)
		var re *RPCError
		if string(got) != tt.want || (err != nil) != (tt.code != 0) || err != nil && (!errors.As(err, &re) || re.Code != tt.code) {
			t.Errorf("%s %s: %s, %v; want %s, %d", tt.method, tt.params, got, err, tt.want, tt.code)
		}
	}
	m, mrt := session(map[string]any{"server/discover": json.RawMessage(modernDiscover)}, Config{}, o)
	defer m.Close()
	if _, err := m.Initialize(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := mrt.SendRequest(t.Context(), "ping", nil); !errors.Is(err, errNoAnswer) {
		t.Errorf("a request under 2026-07-28: %v, want no answer", err)
	}
}

func TestProgressAndNotifications(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var rt *RecordingTransport
		var seen []string
		o := &Options{OnNotification: func(server, method string, params json.RawMessage) {
			seen = append(seen, method)
		}}
		script := map[string]any{"tools/call": func(p json.RawMessage) (any, error) {
			token, _ := decodeValue(member(member(p, "_meta"), "progressToken"))
			for i := range 5 {
				rt.SendNotification("notifications/progress", map[string]any{"progressToken": token, "progress": i + 1, "total": 5})
			}
			rt.SendNotification("notifications/progress", map[string]any{"progressToken": "other", "progress": 9})
			rt.SendNotification("notifications/tools/list_changed", nil)
			return json.RawMessage(`{"content":[]}`), nil
		}}
		s, transport := session(script, Config{}, o)
		rt = transport
		var got []float64
		_, err := s.CallTool(t.Context(), &Call{Tool: "x", OnProgress: func(p Progress) {
			time.Sleep(time.Millisecond)
			got = append(got, p.Progress)
		}})
		if err != nil || !slices.Equal(got, []float64{1, 2, 3, 4, 5}) {
			t.Errorf("progress %v, %v", got, err)
		}
		if !s.stale() {
			t.Errorf("stale() = false after list_changed")
		}
		s.Close()
		if len(seen) != 7 || seen[6] != "notifications/tools/list_changed" {
			t.Errorf("notifications %v", seen)
		}
	})
}

// TestProgressOfAbandonedCall gives a call up while its progress waits for a slow
// user, who sees none of it once the call has returned.
func TestProgressOfAbandonedCall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var rt *RecordingTransport
		s, transport := session(map[string]any{"tools/call": func(ctx context.Context, p json.RawMessage) (any, error) {
			token, _ := decodeValue(member(member(p, "_meta"), "progressToken"))
			for i := range 9 {
				rt.SendNotification("notifications/progress", map[string]any{"progressToken": token, "progress": i})
			}
			<-ctx.Done()
			return nil, ctx.Err()
		}}, Config{}, nil)
		rt = transport
		defer s.Close()
		ctx, cancel := context.WithCancel(t.Context())
		seen := make(chan float64)
		time.AfterFunc(time.Second, cancel)
		_, err := s.CallTool(ctx, &Call{Tool: "x", OnProgress: func(p Progress) {
			select {
			case seen <- p.Progress:
			case <-time.After(time.Minute):
			}
		}})
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		select {
		case p := <-seen: // the one that had begun
			if p != 0 {
				t.Errorf("progress %v after the call", p)
			}
		case <-time.After(time.Second):
			t.Error("the first progress is lost")
		}
		select {
		case p := <-seen:
			t.Errorf("progress %v after the call", p)
		case <-time.After(time.Hour):
		}
	})
}

// TestSlowListener floods a session whose user does not keep up: the queue is
// bounded, and Close does not wait for the user.
func TestSlowListener(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		stuck := make(chan struct{})
		o := &Options{OnNotification: func(string, string, json.RawMessage) { <-stuck }}
		s, rt := session(nil, Config{}, o)
		if _, err := s.Initialize(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range 10 * maxQueue {
			rt.SendNotification("notifications/message", map[string]any{"data": "x"})
		}
		if len(s.queue) > maxQueue || s.dropped < 9*maxQueue-1 {
			t.Errorf("%d queued, %d dropped", len(s.queue), s.dropped)
		}
		begun := time.Now()
		s.Close()
		if d := time.Since(begun); d > handover {
			t.Errorf("Close took %v", d)
		}
		close(stuck)
	})
}

// A rewriter is a Transport written elsewhere, around one of ours.
type rewriter struct{ Transport }

func (r rewriter) Call(ctx context.Context, req *Request) (json.RawMessage, error) {
	raw, err := r.Transport.Call(ctx, req)
	return bytes.ReplaceAll(raw, []byte("secret"), []byte("******")), err
}

// An embedder is the same, with all that our transport has.
type embedder struct{ *HTTPTransport }

func (e embedder) Call(ctx context.Context, req *Request) (json.RawMessage, error) {
	return rewriter{e.HTTPTransport}.Call(ctx, req)
}

// What a Transport returns is what a session reads, also if it got it from one
// of ours.
func TestWrappedTransport(t *testing.T) {
	t.Parallel()
	tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
		m := readHTTPMessage(r)
		switch {
		case m.ID == nil:
			w.WriteHeader(http.StatusAccepted)
		case m.Method == "initialize":
			writeJSON(w, 200, string(contractAnswer(m.ID, json.RawMessage(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"n"}}`), nil)))
		default:
			writeJSON(w, 200, string(contractAnswer(m.ID, json.RawMessage(`{"content":[{"type":"text","text":"secret"}]}`), nil)))
		}
	})
	for _, wrapped := range []Transport{rewriter{tr}, embedder{tr}} {
		s := NewSession(wrapped, Config{Name: "s", Protocol: version2511}, nil)
		if res, err := s.CallTool(t.Context(), &Call{Tool: "t"}); err != nil || res.Text() != "******" {
			t.Errorf("CallTool over %T = %+v, %v", wrapped, res, err)
		}
		var raw json.RawMessage
		if err := s.Request(t.Context(), "x/y", nil, &raw); err != nil || !strings.Contains(string(raw), "******") {
			t.Errorf("Request over %T = %s, %v", wrapped, raw, err)
		}
	}
}

func TestRequest(t *testing.T) {
	t.Parallel()
	s, rt := session(map[string]any{"resources/read": json.RawMessage(`{"contents":[{"uri":"u","text":"t"}]}`), "x/y": json.RawMessage(`[1]`)}, Config{}, nil)
	defer s.Close()
	var out struct{ Contents []struct{ URI, Text string } }
	if err := s.Request(t.Context(), "resources/read", map[string]string{"uri": "u"}, &out); err != nil || len(out.Contents) != 1 || out.Contents[0].Text != "t" {
		t.Errorf("Request = %+v, %v", out, err)
	}
	calls := rt.Calls()
	if last := calls[len(calls)-1]; last.Name != "u" || string(last.Raw) != `{"uri":"u"}` {
		t.Errorf("sent %+v", last)
	}
	var raw json.RawMessage
	if err := s.Request(t.Context(), "x/y", nil, &raw); err != nil || string(raw) != `[1]` {
		t.Errorf("Request = %s, %v", raw, err)
	}
	if err := s.Request(t.Context(), "x/y", nil, &out); !errors.Is(err, ReasonProtocol) {
		t.Errorf("a result of another shape: %v", err)
	}
	var ae *ArgumentError
	if err := s.Request(t.Context(), "x/y", 7, nil); !errors.As(err, &ae) {
		t.Errorf("params that are no object: %v", err)
	}
}

// TestInbox has requests answered by handlers of every kind, more at a time than
// are kept, and closes the inbox while some are being answered.
func TestInbox(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		answers := map[string]int{} // by what they are
		b := newInbox(Inbound{Request: func(ctx context.Context, method string, _ json.RawMessage) (json.RawMessage, error) {
			switch method {
			case "leave":
				runtime.Goexit()
			case "large":
				return json.RawMessage(`"` + strings.Repeat("x", 2000) + `"`), nil
			case "refuse":
				return nil, &RPCError{Code: -1, Message: "no"}
			case "fail":
				return nil, errors.New("a secret")
			case "silent":
				return nil, errNoAnswer
			case "hang":
				<-ctx.Done()
			}
			return json.RawMessage(`"fine"`), nil
		}}, 2000)
		send := func(_ context.Context, answer []byte) {
			mu.Lock()
			defer mu.Unlock()
			for _, what := range []string{"fine", "-32603", "no", "secret"} {
				if bytes.Contains(answer, []byte(what)) {
					answers[what]++
				}
			}
		}
		ask := func(n int, method string) (taken int) {
			for i := range n {
				if b.take(envelope{id: json.RawMessage(strconv.Itoa(i)), method: method}, send) {
					taken++
				}
			}
			return taken
		}
		for _, method := range []string{"leave", "large", "refuse", "fail", "silent", "well"} {
			if n := ask(20, method); n != 20 {
				t.Errorf("%d of 20 requests %q were taken", n, method)
			}
			synctest.Wait()
		}
		want := map[string]int{"fine": 20, "-32603": 60, "no": 20}
		if !reflect.DeepEqual(answers, want) || b.size != 0 || b.handlers != 0 || len(b.asked) != 0 {
			t.Errorf("answers %v, want %v; left: %d bytes, %d handlers, %d requests", answers, want, b.size, b.handlers, len(b.asked))
		}
		if n := ask(100, "hang"); n != maxAsked {
			t.Errorf("%d requests were taken, want %d", n, maxAsked)
		}
		synctest.Wait()
		b.withdraw(json.RawMessage("0"))
		b.withdraw(json.RawMessage("63"))
		synctest.Wait()
		if len(b.asked) != maxAsked-2 || b.handlers != maxHandlers {
			t.Errorf("%d requests and %d handlers, want %d and %d", len(b.asked), b.handlers, maxAsked-2, maxHandlers)
		}
		b.close()
		b.close()
		<-b.idle
		if n := ask(1, "well"); n != 0 || b.size != 0 || b.handlers != 0 || !reflect.DeepEqual(answers, want) {
			t.Errorf("after Close %d taken, %d bytes, %d handlers, answers %v", n, b.size, b.handlers, answers)
		}
	})
}

// TestInboxLeft has who sends an answer leave the goroutine: that is no answer, and
// is not tried for ever.
func TestInboxLeft(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newInbox(Inbound{}, 2000)
		var sends atomic.Int32
		for range maxAsked {
			b.take(envelope{id: json.RawMessage("1"), method: "x"}, func(context.Context, []byte) {
				if sends.Add(1) <= 10*maxAsked {
					runtime.Goexit()
				}
			})
		}
		synctest.Wait()
		if n := sends.Load(); n != maxAsked || b.size != 0 || b.handlers != 0 || len(b.asked) != 0 {
			t.Errorf("%d answers sent, want %d; left: %d bytes, %d handlers, %d requests", n, maxAsked, b.size, b.handlers, len(b.asked))
		}
		b.close()
		<-b.idle
	})
}

// TestInboxClose closes inboxes while requests come: they are not taken, or end.
func TestInboxClose(t *testing.T) {
	t.Parallel()
	for range 40 {
		b := newInbox(Inbound{Request: func(ctx context.Context, _ string, _ json.RawMessage) (json.RawMessage, error) {
			<-ctx.Done()
			return nil, errNoAnswer
		}}, 2000)
		var wg sync.WaitGroup
		var refused atomic.Bool
		begun := make(chan bool, 4)
		for range cap(begun) {
			wg.Go(func() {
				begun <- true
				for !refused.Load() {
					b.take(envelope{id: json.RawMessage("1"), method: "x"}, func(context.Context, []byte) {})
					b.withdraw(json.RawMessage("1")) // so that there is room
				}
			})
		}
		for range cap(begun) {
			<-begun
		}
		b.close()
		b.mu.Lock()
		left := len(b.asked)
		for _, a := range b.asked {
			if a.ctx.Err() == nil {
				t.Error("a request goes on in a closed inbox")
			}
		}
		b.mu.Unlock()
		refused.Store(true)
		wg.Wait()
		if <-b.idle; t.Failed() {
			t.Fatalf("%d requests were left", left)
		}
	}
}
