package mcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func openFake(t *testing.T, rt *RecordingTransport) *RecordingTransport {
	t.Helper()
	if fresh, err := rt.Open(t.Context(), Inbound{}); !fresh || err != nil {
		t.Fatalf("Open = %v, %v, want a fresh connection", fresh, err)
	}
	return rt
}

// wantReason checks err, and whether it says that the request may have run.
func wantReason(t *testing.T, err error, reason Reason, sent bool) *TransportError {
	t.Helper()
	var te *TransportError
	if !errors.As(err, &te) || te.Reason != reason || te.Sent != sent {
		t.Errorf("error = %v (%+v), want %s with Sent %v", err, te, reason, sent)
		return new(TransportError)
	}
	return te
}

func TestRecordingTransportAnswers(t *testing.T) {
	rt := openFake(t, NewRecordingTransport(map[string]any{
		"map":       map[string]any{"a": 1},
		"raw":       json.RawMessage(`{"id":9007199254740993}`),
		"nil":       nil,
		"result":    &Result{Content: []Content{{Type: "text", Text: "hi"}}, Structured: json.RawMessage(`{"n":1}`), IsError: true},
		"tools":     []Tool{{Name: "t", Description: "d", ReadOnly: true, OutputSchema: json.RawMessage(`{}`)}},
		"error":     &RPCError{Code: -32602, Message: "no"},
		"reason":    ReasonTimeout,
		"unreached": ReasonUnavailable,
		"func":      func(p json.RawMessage) (any, error) { return p, nil },
		"ctxfunc":   func(ctx context.Context, p json.RawMessage) (any, error) { return nil, io.ErrClosedPipe },
		"answers":   Answers{map[string]any{"n": 1}, ReasonDisconnected, func(json.RawMessage) (any, error) { return map[string]any{"n": 3}, nil }},
		"chan":      make(chan int),
	}))
	call := func(method, params string) (string, error) {
		b, err := rt.Call(t.Context(), &Request{Method: method, Params: json.RawMessage(params)})
		return string(b), err
	}
	for _, tt := range []struct{ method, params, want string }{
		{"map", `{}`, `{"a":1}`},
		{"raw", `{}`, `{"id":9007199254740993}`},
		{"nil", `{}`, `{}`},
		{"func", `{"x":[]}`, `{"x":[]}`},
		{"ping", ``, `{}`},
		{"initialize", `{"protocolVersion":"2025-03-26"}`, `{"protocolVersion":"2025-03-26","capabilities":{"tools":{}},"serverInfo":{"name":"recording","version":"1"}}`},
		{"initialize", `{"protocolVersion":"9"}`, `{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"recording","version":"1"}}`},
		{"answers", `{}`, `{"n":1}`},
	} {
		if got, err := call(tt.method, tt.params); got != tt.want || err != nil {
			t.Errorf("%s = %s, %v, want %s", tt.method, got, err, tt.want)
		}
	}
	_, err := call("answers", "")
	wantReason(t, err, ReasonDisconnected, true)
	if got, err := call("answers", ""); got != `{"n":3}` || err != nil {
		t.Errorf("third answer = %s, %v", got, err)
	}
	_, err = call("answers", "")
	wantReason(t, err, ReasonProtocol, true)
	_, err = call("reason", "")
	wantReason(t, err, ReasonTimeout, true)
	_, err = call("unreached", "")
	wantReason(t, err, ReasonUnavailable, false)
	_, err = call("chan", "")
	wantReason(t, err, ReasonProtocol, true)
	_, err = call("nobody/scripted", "")
	if te := wantReason(t, err, ReasonProtocol, true); !strings.Contains(te.Error(), `no answer to "nobody/scripted"`) {
		t.Errorf("error text %q does not name the method", te)
	}
	if _, err = call("ctxfunc", ""); err != io.ErrClosedPipe {
		t.Errorf("a foreign error became %v", err)
	}
	var refusal *RPCError
	if _, err = call("server/discover", ""); !errors.As(err, &refusal) || refusal.Code != -32601 {
		t.Errorf("server/discover = %v, want a refusal with -32601", err)
	}
	// An error's Origin is its receiver's to fill in, so nobody else has it.
	_, err = call("error", "")
	errors.As(err, &refusal)
	refusal.Server = "one"
	if _, err = call("error", ""); !errors.As(err, &refusal) || refusal.Server != "" {
		t.Errorf("the scripted error is shared: %v", err)
	}

	b, err := call("result", "")
	if err != nil {
		t.Fatal(err)
	}
	res, err := decodeToolResult([]byte(b))
	if err != nil || res.Text() != "hi" || !res.IsError || string(res.Structured) != `{"n":1}` {
		t.Errorf("result = %s, %v", b, err)
	}
	b, err = call("tools", "")
	if err != nil {
		t.Fatal(err)
	}
	page, err := decodeToolPage([]byte(b))
	if err != nil || len(page.tools) != 1 || page.tools[0].Name != "t" || page.tools[0].OutputSchema == nil || !strings.Contains(b, `"readOnlyHint":true`) {
		t.Errorf("tools = %s, %v", b, err)
	}
}

func TestRecordingTransportRecords(t *testing.T) {
	rt := openFake(t, new(RecordingTransport))
	rt.Script("tools/call", map[string]any{})
	params := json.RawMessage(`{"name":"t","n":2}`)
	if _, err := rt.Call(t.Context(), &Request{Method: "tools/call", Params: params, Version: version2511, Name: "t", Header: map[string]string{"A": "b"}}); err != nil {
		t.Fatal(err)
	}
	if err := rt.Notify(t.Context(), &Request{Method: "notifications/initialized"}); err != nil {
		t.Fatal(err)
	}
	copy(params, "overwritten") // what a caller does to its buffer later is no matter
	want := []Recorded{
		{Method: "tools/call", Params: map[string]any{"name": "t", "n": 2.0}, Raw: json.RawMessage(`{"name":"t","n":2}`), Version: version2511, Name: "t", Header: map[string]string{"A": "b"}},
		{Method: "notifications/initialized"},
	}
	if got := rt.Calls(); !reflect.DeepEqual(got, want) {
		t.Errorf("Calls = %+v, want %+v", got, want)
	}
	rt.Calls()[0].Method = "changed"
	if got := rt.Calls()[0].Method; got != "tools/call" {
		t.Errorf("Calls returned the record itself: %q", got)
	}
	rt.Script("notifications/y", func(json.RawMessage) (any, error) { return nil, io.ErrClosedPipe })
	if err := rt.Notify(t.Context(), &Request{Method: "notifications/y"}); err != io.ErrClosedPipe {
		t.Errorf("Notify = %v", err)
	}
	rt.Script("notifications/x", ReasonDisconnected)
	wantReason(t, rt.Notify(t.Context(), &Request{Method: "notifications/x"}), ReasonDisconnected, true)
}

func TestRecordingTransportConnection(t *testing.T) {
	rt := new(RecordingTransport)
	ctx := t.Context()
	_, err := rt.Call(ctx, &Request{Method: "ping"})
	wantReason(t, err, ReasonDisconnected, false)

	var got []string
	first := Inbound{
		Notify: func(method string, params json.RawMessage) { got = append(got, method+string(params)) },
		Request: func(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
			if method == "wait" {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return nil, &RPCError{Code: -32601}
		},
	}
	if fresh, err := rt.Open(ctx, first); !fresh || err != nil {
		t.Fatal(fresh, err)
	}
	if fresh, err := rt.Open(ctx, Inbound{}); fresh || err != nil {
		t.Fatal("second Open:", fresh, err)
	}
	rt.Disconnect()
	rt.Disconnect()
	_, err = rt.Call(ctx, &Request{Method: "ping"})
	wantReason(t, err, ReasonDisconnected, false)
	wantReason(t, rt.SendNotification("n", nil), ReasonDisconnected, false)
	if fresh, err := rt.Open(ctx, Inbound{}); !fresh || err != nil {
		t.Fatal("Open after Disconnect:", fresh, err)
	}
	if err := rt.SendNotification("notifications/x", map[string]any{"a": 1}); err != nil || len(got) != 1 || got[0] != `notifications/x{"a":1}` {
		t.Errorf("the first Inbound got %q, %v", got, err)
	}
	var refusal *RPCError
	if _, err := rt.SendRequest(ctx, "roots/list", nil); !errors.As(err, &refusal) || refusal.Code != -32601 {
		t.Errorf("SendRequest = %v", err)
	}
	asked := make(chan error)
	go func() {
		_, err := rt.SendRequest(ctx, "wait", nil)
		asked <- err
	}()
	rt.Disconnect()
	if err := <-asked; err == nil {
		t.Error("a server request outlived its connection")
	}
	for range 2 {
		if err := rt.Close(); err != nil {
			t.Error(err)
		}
	}
	_, err = rt.Open(ctx, Inbound{})
	wantReason(t, err, ReasonDisconnected, false)
}

func TestRecordingTransportTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := func(json.RawMessage) (any, error) { time.Sleep(time.Minute); return "late", nil }
		rt := NewRecordingTransport(map[string]any{
			"slow": slow,
			"ctx":  func(ctx context.Context, _ json.RawMessage) (any, error) { <-ctx.Done(); return nil, ctx.Err() },
		})
		rt.MaxInFlight = 1
		openFake(t, rt)
		start := time.Now()
		after := func(d time.Duration) {
			t.Helper()
			if got := time.Since(start); got != d {
				t.Errorf("took %v, want %v", got, d)
			}
			start = time.Now()
		}

		_, err := rt.Call(t.Context(), &Request{Method: "slow", Deadline: start.Add(time.Second)})
		wantReason(t, err, ReasonTimeout, true)
		after(time.Second)

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = rt.Call(ctx, &Request{Method: "ctx", Deadline: start.Add(time.Hour)})
		wantReason(t, err, ReasonCancelled, true)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v does not unwrap to the caller's error", err)
		}
		after(time.Second)

		_, err = rt.Call(ctx, &Request{Method: "ping"})
		wantReason(t, err, ReasonCancelled, false)
		_, err = rt.Call(t.Context(), &Request{Method: "ping", Deadline: start})
		wantReason(t, err, ReasonTimeout, false)

		// One call holds the only slot; the others wait no longer than they may.
		held, release := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { rt.Call(held, &Request{Method: "ctx"}) })
		synctest.Wait()
		n := len(rt.Calls())
		_, err = rt.Call(t.Context(), &Request{Method: "ping", Deadline: start.Add(time.Second)})
		wantReason(t, err, ReasonTimeout, false)
		after(time.Second)
		if len(rt.Calls()) != n {
			t.Error("a request without a slot was recorded")
		}
		release()
		wg.Wait()

		wg.Go(func() {
			_, err := rt.Call(t.Context(), &Request{Method: "slow"})
			wantReason(t, err, ReasonDisconnected, true)
		})
		synctest.Wait()
		rt.Disconnect()
		wg.Wait()
		after(0)
		time.Sleep(time.Minute) // until the functions that were left behind have ended
	})
}

func TestRecordingTransportLimits(t *testing.T) {
	rt := NewRecordingTransport(map[string]any{"big": strings.Repeat("x", 100)})
	rt.MaxMessageBytes = 100
	openFake(t, rt)
	_, err := rt.Call(t.Context(), &Request{Method: "big"})
	wantReason(t, err, ReasonLimit, true)
	_, err = rt.Call(t.Context(), &Request{Method: "ping", Params: bytes.Repeat([]byte(" "), 101)})
	wantReason(t, err, ReasonLimit, false)
	if _, err = rt.Call(t.Context(), &Request{Method: "ping", Params: bytes.Repeat([]byte(" "), 100)}); err != nil {
		t.Error(err)
	}
}

// A scripted function that ends its goroutine, as t.FailNow does, must not
// leave its caller waiting.
func TestRecordingTransportGoexit(t *testing.T) {
	rt := openFake(t, NewRecordingTransport(map[string]any{
		"exit": func(json.RawMessage) (any, error) { runtime.Goexit(); return nil, nil },
	}))
	_, err := rt.Call(t.Context(), &Request{Method: "exit"})
	wantReason(t, err, ReasonDisconnected, true)
}

func echoServer(f Fault) *FaultyServer {
	return &FaultyServer{Tools: []Tool{{Name: "echo"}}, Fault: f}
}

func TestFaultySession(t *testing.T) {
	call := &Call{Tool: "echo", Arguments: map[string]any{"a": 1}}
	for _, tt := range []struct {
		fault  Fault
		reason Reason
		sent   bool
	}{
		{FaultUnreachable, ReasonUnavailable, false},
		{FaultFlapping, ReasonUnavailable, false},
		{FaultMalformed, ReasonProtocol, true},
		{FaultTruncated, ReasonDisconnected, true},
	} {
		s := echoServer(tt.fault)
		_, err := s.CallTool(t.Context(), call)
		wantReason(t, err, tt.reason, tt.sent)
		_, err = s.ListTools(t.Context())
		if tt.fault == FaultFlapping {
			if err != nil {
				t.Errorf("%v: second reach: %v", tt.fault, err)
			}
		} else {
			wantReason(t, err, tt.reason, tt.sent)
		}
		_, err = s.Initialize(t.Context())
		wantReason(t, err, tt.reason, tt.sent)
		if s.Seen("tools/call") != 1 || s.Seen("tools/list") != 1 || s.Seen("initialize") != 1 {
			t.Errorf("%v: the faulty reaches were not counted", tt.fault)
		}
		s.SetFault(FaultNone)
		if res, err := s.CallTool(t.Context(), call); err != nil || res.Text() != `{"a":1}` {
			t.Errorf("%v: after recovery: %v, %v", tt.fault, res, err)
		}
	}
}

func TestFaultySessionRecovers(t *testing.T) {
	s := echoServer(FaultUnreachable)
	s.RecoverAfter = 2
	for i := range 5 {
		if i == 3 {
			s.SetFault(FaultMalformed) // which counts from the start
		}
		_, err := s.ListTools(t.Context())
		if broken := i != 2; (err != nil) != broken {
			t.Errorf("reach %d: %v", i, err)
		}
	}
}

func TestFaultySessionSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := echoServer(FaultSlow)
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_, err := s.ListTools(ctx) // no Delay: as long as the caller waits
		wantReason(t, err, ReasonCancelled, true)
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Hour {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		s = echoServer(FaultSlow)
		s.Delay = 3 * time.Second
		start = time.Now()
		if tools, err := s.ListTools(t.Context()); err != nil || len(tools) != 1 || time.Since(start) != s.Delay {
			t.Errorf("%v, %v after %v", tools, err, time.Since(start))
		}
	})
}

func TestFaultySessionHandler(t *testing.T) { synctest.Test(t, faultySessionHandler) }

func faultySessionHandler(t *testing.T) {
	s := echoServer(FaultNone)
	s.Handler = func(ctx context.Context, c *Call) (*Result, error) {
		switch string(c.Arguments.(json.RawMessage)) {
		case `{"refuse":true}`:
			return nil, &RPCError{Code: -32000}
		case `{"fail":true}`:
			return nil, io.ErrClosedPipe
		case `{"nothing":true}`:
			return nil, nil
		}
		<-ctx.Done()
		return nil, ctx.Err()
	}
	call := func(ctx context.Context, key string) (*Result, error) {
		return s.CallTool(ctx, &Call{Tool: "echo", Arguments: map[string]any{key: true}})
	}
	var refusal *RPCError
	if _, err := call(t.Context(), "refuse"); !errors.As(err, &refusal) {
		t.Errorf("refuse = %v", err)
	}
	if _, err := s.CallTool(t.Context(), &Call{Tool: "other"}); !errors.As(err, &refusal) || refusal.Code != -32602 {
		t.Errorf("unknown tool = %v", err)
	}
	if res, err := call(t.Context(), "fail"); err != nil || !res.IsError {
		t.Errorf("fail = %v, %v", res, err)
	}
	if res, err := call(t.Context(), "nothing"); err != nil || res == nil {
		t.Errorf("nothing = %v, %v", res, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err := call(ctx, "wait")
	wantReason(t, err, ReasonCancelled, true)
	var ae *ArgumentError
	if _, err := s.CallTool(t.Context(), &Call{Tool: "echo", Arguments: func() {}}); !errors.As(err, &ae) {
		t.Errorf("bad arguments = %v", err)
	}
	s.Close()
	_, err = call(t.Context(), "fail")
	wantReason(t, err, ReasonDisconnected, false)
	if s.Seen("close") != 1 {
		t.Errorf("close was seen %d times", s.Seen("close"))
	}
}

func TestFaultString(t *testing.T) {
	want := "none unreachable slow flapping malformed truncated Fault(6) Fault(-1)"
	if got := fmt.Sprint(FaultNone, FaultUnreachable, FaultSlow, FaultFlapping, FaultMalformed, FaultTruncated, Fault(6), Fault(-1)); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// post sends one message to a FaultyServer over HTTP.
func post(t *testing.T, url, body string, header ...string) (*http.Response, string, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "POST", url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp, string(b), err
}

func TestFaultyHTTP(t *testing.T) {
	const call = `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"echo","arguments":{"a":1}}}`
	const ok = `{"jsonrpc":"2.0","id":7,"result":{"content":[{"text":"{\"a\":1}","type":"text"}]}}`
	for _, tt := range []struct {
		fault   Fault
		sse     bool
		status  int
		media   string
		body    string
		cut     bool
		counted int
	}{
		{FaultNone, false, 200, "application/json", ok, false, 1},
		{FaultNone, true, 200, "text/event-stream", "event: message\ndata: " + ok + "\n\n", false, 1},
		{FaultUnreachable, false, 503, "", "", false, 1},
		{FaultFlapping, true, 503, "", "", false, 1},
		{FaultSlow, false, 200, "application/json", ok, false, 1},
		{FaultSlow, true, 200, "text/event-stream", "event: message\ndata: " + ok + "\n\n", false, 1},
		{FaultMalformed, false, 200, "text/html; charset=utf-8", fakePage, false, 1},
		{FaultMalformed, true, 200, "text/event-stream", "event: message\ndata: " + `{"jsonrpc":"2.0","id":7,"result":{"content":[}` + "\n\n", false, 1},
		{FaultTruncated, false, 200, "application/json", `{"jsonrpc":"2.0","id":7,"result":{"content":[`, true, 1},
		{FaultTruncated, true, 200, "text/event-stream", "event: message\ndata: " + `{"jsonrpc":"2.0","id":7,"result":{"content":[`, true, 1},
	} {
		s := echoServer(tt.fault)
		s.SSE, s.Delay = tt.sse, time.Millisecond
		srv := httptest.NewServer(s)
		resp, body, err := post(t, srv.URL, call)
		if !sameJSON(body, tt.body) {
			t.Errorf("%v, SSE %v: body %q, want %q", tt.fault, tt.sse, body, tt.body)
		}
		if resp.StatusCode != tt.status || resp.Header.Get("Content-Type") != tt.media || (err != nil) != tt.cut {
			t.Errorf("%v, SSE %v: %d %q, %v", tt.fault, tt.sse, resp.StatusCode, resp.Header.Get("Content-Type"), err)
		}
		if s.Seen("tools/call") != tt.counted {
			t.Errorf("%v: seen %d", tt.fault, s.Seen("tools/call"))
		}
		srv.Close()
	}
}

// sameJSON compares texts with the members of their objects in any order.
func sameJSON(a, b string) bool {
	sorted := func(s string) string {
		i := strings.Index(s, "{")
		if i < 0 {
			return s
		}
		var v any
		if json.Unmarshal([]byte(strings.TrimSpace(s[i:])), &v) != nil {
			return s
		}
		out, _ := json.Marshal(v)
		return s[:i] + string(out)
	}
	return sorted(a) == sorted(b)
}

func TestFaultyHTTPProtocol(t *testing.T) {
	s := echoServer(FaultNone)
	s.Sessions = true
	srv := httptest.NewServer(s)
	defer srv.Close()
	const list = `{"jsonrpc":"2.0","id":"x","method":"tools/list"}`
	status := func(want int, body string, header ...string) *http.Response {
		t.Helper()
		resp, got, _ := post(t, srv.URL, body, header...)
		if resp.StatusCode != want {
			t.Errorf("%s: status %d %s, want %d", body, resp.StatusCode, got, want)
		}
		return resp
	}
	status(404, list)
	id := status(200, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18"}}`).Header.Get("Mcp-Session-Id")
	status(202, `{"jsonrpc":"2.0","method":"notifications/initialized"}`, "Mcp-Session-Id", id)
	status(202, `{"jsonrpc":"2.0","id":1,"result":{}}`, "Mcp-Session-Id", id)
	status(200, list, "Mcp-Session-Id", id)
	status(404, list, "Mcp-Session-Id", "other")
	s.ForgetSessions()
	status(404, list, "Mcp-Session-Id", id)
	status(400, `{`)
	status(404, `{"jsonrpc":"2.0","id":1,"method":"server/discover"}`, "Mcp-Session-Id", id)

	id = status(200, `{"jsonrpc":"2.0","id":1,"method":"initialize"}`).Header.Get("Mcp-Session-Id")
	req, _ := http.NewRequestWithContext(t.Context(), "DELETE", srv.URL, nil)
	req.Header.Set("Mcp-Session-Id", id)
	for _, want := range []int{204, 405} {
		resp, err := http.DefaultClient.Do(req)
		if err != nil || resp.StatusCode != want {
			t.Fatalf("%s: %v, %v", req.Method, resp, err)
		}
		resp.Body.Close()
		req.Method = "GET"
	}
	status(404, list, "Mcp-Session-Id", id)

	modern := echoServer(FaultNone)
	modern.Modern, modern.Sessions = true, true
	srv2 := httptest.NewServer(modern)
	defer srv2.Close()
	for _, method := range []string{"server/discover", "tools/list", "tools/call"} {
		resp, body, _ := post(t, srv2.URL, `{"jsonrpc":"2.0","id":1,"method":"`+method+`","params":{"name":"echo","_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}}}`, "MCP-Protocol-Version", version2026)
		if resp.StatusCode != 200 || !strings.Contains(body, `"resultType":"complete"`) {
			t.Errorf("%s: %d %s", method, resp.StatusCode, body)
		}
	}
}

// stdioPair runs Serve on pipes. Its result arrives on done.
func stdioPair(t *testing.T, s *FaultyServer) (in io.WriteCloser, out *bufio.Reader, done chan error) {
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	done = make(chan error, 1)
	go func() {
		err := s.Serve(inR, outW)
		inR.Close()
		outW.Close()
		done <- err
	}()
	t.Cleanup(func() { inW.Close() })
	return inW, bufio.NewReader(outR), done
}

func TestFaultyStdio(t *testing.T) {
	const call = `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"echo","arguments":{"a":1}}}` + "\n"
	const head = `{"jsonrpc":"2.0","id":7,"result":{"content":[`
	for _, tt := range []struct {
		fault Fault
		line  string
		ends  bool
	}{
		{FaultNone, `{"jsonrpc":"2.0","id":7,"result":{"content":[{"text":"{\"a\":1}","type":"text"}]}}` + "\n", false},
		{FaultSlow, `{"jsonrpc":"2.0","id":7,"result":{"content":[{"text":"{\"a\":1}","type":"text"}]}}` + "\n", false},
		{FaultUnreachable, "", true},
		{FaultFlapping, "", true},
		{FaultMalformed, head + "}\n", false},
		{FaultTruncated, head, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := echoServer(tt.fault)
			s.Delay = time.Minute
			in, out, done := stdioPair(t, s)
			io.WriteString(in, "\n"+call)
			line, err := out.ReadString('\n')
			if !sameJSON(line, tt.line) || (err == io.EOF) != tt.ends {
				t.Errorf("%v: %q, %v, want %q", tt.fault, line, err, tt.line)
			}
			in.Close()
			if err := <-done; (err != nil) != tt.ends {
				t.Errorf("%v: Serve = %v", tt.fault, err)
			}
		})
	}
}

func TestFaultyStdioConcurrent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := echoServer(FaultNone)
		s.Handler = func(ctx context.Context, c *Call) (*Result, error) {
			if c.OnProgress != nil {
				c.OnProgress(Progress{Progress: 1, Total: 2, Message: "m"})
			}
			if c.IdempotencyKey == "quick" {
				return &Result{}, nil
			}
			<-ctx.Done()
			return nil, ctx.Err()
		}
		in, out, done := stdioPair(t, s)
		io.WriteString(in, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo"}}`+"\n")
		io.WriteString(in, `{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"echo","_meta":{"idempotency-key":"quick","progressToken":"p"}}}`+"\n")
		for _, want := range []string{
			`{"jsonrpc":"2.0","method":"notifications/progress","params":{"message":"m","progress":1,"progressToken":"p","total":2}}` + "\n",
			`{"jsonrpc":"2.0","id":2,"result":{"content":[]}}` + "\n",
		} {
			if line, err := out.ReadString('\n'); !sameJSON(line, want) || err != nil {
				t.Errorf("%q, %v, want %q", line, err, want)
			}
		}
		io.WriteString(in, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}`+"\n")
		io.WriteString(in, `{"jsonrpc":"2.0","id":3,"method":"nothing/known"}`+"\n")
		if line, err := out.ReadString('\n'); !strings.Contains(line, "-32601") || err != nil {
			t.Errorf("%q, %v", line, err)
		}
		io.WriteString(in, `{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{"name":"echo"}}`+"\n")
		synctest.Wait()
		in.Close() // with a call under way
		if err := <-done; err != nil {
			t.Error(err)
		}
		if rest, _ := io.ReadAll(out); len(rest) != 0 {
			t.Errorf("a cancelled call was answered: %q", rest)
		}
	})
}

// What a FaultyServer writes is read back as it was.
func TestFaultyEncoding(t *testing.T) {
	tools := []Tool{
		{Name: "plain", InputSchema: json.RawMessage(`{"type":"object"}`), Destructive: true},
		{Name: "full", Title: "T", Description: "<d> & \u2028", InputSchema: json.RawMessage(`{"type":"object","maximum":9007199254740993}`),
			OutputSchema: json.RawMessage(`{"type":"object"}`), ReadOnly: true, Idempotent: true, TaskSupport: "optional"},
	}
	b, err := encodeTools(tools, false)
	if err != nil {
		t.Fatal(err)
	}
	page, err := decodeToolPage(b)
	if err != nil || page.bad != 0 || page.cursor != nil {
		t.Fatalf("%s: %+v, %v", b, page, err)
	}
	for i := range page.tools {
		page.tools[i].Raw = nil // the annotations, which the fields tell of
	}
	if !reflect.DeepEqual(page.tools, tools) {
		t.Errorf("tools came back as %+v, want %+v", page.tools, tools)
	}
	raw := json.RawMessage(`{"annotations":{"destructiveHint":false},"icons":[]}`)
	b, err = encodeTools([]Tool{{Name: "raw", Raw: raw}}, true)
	if err != nil {
		t.Fatal(err)
	}
	if page, err = decodeToolPage(b); err != nil || page.tools[0].Destructive || page.ttlMs != 0 {
		t.Errorf("%s: %+v, %v", b, page, err)
	}
	if _, err := encodeTools([]Tool{{Name: "bad", Raw: json.RawMessage(`[`)}}, false); err == nil {
		t.Error("Raw that is no JSON passes")
	}

	res := &Result{Content: []Content{
		{Type: "text", Text: "t"},
		{Type: "image", Data: "aGk=", MIMEType: "image/png"},
		{Type: "resource_link", URI: "file:///a", Name: "a"},
		{Type: "resource", URI: "file:///a", MIMEType: "text/plain", Text: "t"},
		{Type: "resource", URI: "file:///b", Data: "aGk="},
		{Raw: json.RawMessage(`{"type":"new","x":1}`)},
	}, Structured: json.RawMessage(`{"n":9007199254740993}`), Meta: json.RawMessage(`{"m":1}`), IsError: true}
	for _, modern := range []bool{false, true} {
		b, err = encodeResult(res, modern)
		if err != nil {
			t.Fatal(err)
		}
		got, err := decodeToolResult(b)
		if err != nil {
			t.Fatalf("%s: %v", b, err)
		}
		for i := range got.Content {
			got.Content[i].Raw = nil
		}
		want := *res
		want.Content = append([]Content(nil), res.Content...)
		want.Content[5] = Content{Type: "new"}
		if !reflect.DeepEqual(got.Result, want) {
			t.Errorf("the result came back as %+v, want %+v", got.Result, want)
		}
	}
}

// faultyChild serves a FaultyServer over stdio, whose fault, the first
// argument, begins with the first call.
func faultyChild(args []string) int {
	var f Fault
	for f.String() != args[0] {
		f++
	}
	s := echoServer(FaultNone)
	calls := readerFunc(func(p []byte) (int, error) {
		n, err := os.Stdin.Read(p)
		if bytes.Contains(p[:n], []byte(`"tools/call"`)) {
			s.SetFault(f)
		}
		return n, err
	})
	if err := s.Serve(calls, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// Each fault comes to the same, whichever way the server is reached.
func TestFaultyWaysAgree(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ways := map[string]func(t *testing.T, f Fault, cfg Config) (Session, func()){
		"session": func(t *testing.T, f Fault, cfg Config) (Session, func()) {
			s := echoServer(FaultNone)
			return s, func() { s.SetFault(f) }
		},
		"stdio": func(t *testing.T, f Fault, cfg Config) (Session, func()) {
			cfg.Command = []string{exe, f.String()}
			cfg.Env = map[string]string{childEnv: "faulty", quickExit[0]: quickExit[1]}
			return NewSession(newTestTransport(t, cfg), cfg, nil), func() {}
		},
	}
	for name, set := range map[string]func(*FaultyServer){
		"http":         func(s *FaultyServer) {},
		"sse":          func(s *FaultyServer) { s.SSE = true },
		"sessions":     func(s *FaultyServer) { s.Sessions = true },
		"modern":       func(s *FaultyServer) { s.Modern = true },
		"modern + sse": func(s *FaultyServer) { s.Modern, s.SSE = true, true },
	} {
		ways[name] = func(t *testing.T, f Fault, cfg Config) (Session, func()) {
			s := echoServer(FaultNone)
			set(s)
			srv := httptest.NewServer(s)
			t.Cleanup(srv.Close)
			cfg.Endpoint = srv.URL
			return NewSession(newTestTransport(t, cfg), cfg, nil), func() { s.SetFault(f) }
		}
	}
	for name, open := range ways {
		for _, tt := range []struct {
			fault  Fault
			reason Reason
		}{
			{FaultNone, ""},
			{FaultUnreachable, ReasonUnavailable},
			{FaultFlapping, ReasonUnavailable},
			{FaultSlow, ReasonCancelled},
			{FaultMalformed, ReasonProtocol},
			{FaultTruncated, ReasonDisconnected},
		} {
			t.Run(name+"/"+tt.fault.String(), func(t *testing.T) {
				t.Parallel()
				s, begin := open(t, tt.fault, Config{Name: "faulty"})
				defer s.Close()
				info, err := s.Initialize(t.Context())
				if err != nil || info.Name != "faulty" {
					t.Fatalf("Initialize = %+v, %v", info, err)
				}
				if tools, err := s.ListTools(t.Context()); err != nil || len(tools) != 1 || tools[0].Name != "echo" {
					t.Fatalf("ListTools = %+v, %v", tools, err)
				}
				begin()
				ctx := t.Context()
				if tt.fault == FaultSlow {
					limited, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
					defer cancel()
					ctx = limited
				}
				res, err := s.CallTool(ctx, &Call{Tool: "echo", Arguments: map[string]any{"a": 1}})
				if tt.reason == "" {
					if err != nil || res.Text() != `{"a":1}` {
						t.Fatalf("CallTool = %+v, %v", res, err)
					}
					return
				}
				reason := tt.reason
				if name == "stdio" && reason == ReasonUnavailable {
					reason = ReasonDisconnected // the pipe closes
				}
				var te *TransportError
				if !errors.As(err, &te) || te.Reason != reason {
					t.Errorf("CallTool = %v, want %s", err, reason)
				}
			})
		}
	}
}
