package mcp

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"
)

// httpMessage is what a test server is sent.
type httpMessage struct {
	ID     json.RawMessage
	Method string
	Params json.RawMessage
	Result json.RawMessage
	Error  json.RawMessage
}

func readHTTPMessage(r *http.Request) (m httpMessage) {
	b, _ := io.ReadAll(r.Body)
	_ = json.Unmarshal(b, &m)
	return m
}

// httpResult is a response to m, with text in it.
func httpResult(m httpMessage, text string) string {
	return fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"text":%q}}`, m.ID, text)
}

func writeJSON(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}

func writeEvents(w http.ResponseWriter, events ...string) {
	w.Header().Set("Content-Type", "text/event-stream")
	for _, ev := range events {
		_, _ = io.WriteString(w, ev)
		w.(http.Flusher).Flush()
	}
}

// newHTTPTest returns a transport to a loopback server, opened.
func newHTTPTest(t *testing.T, h http.HandlerFunc, change ...func(*Config, *Options)) (*HTTPTransport, *httptest.Server) {
	t.Helper()
	srv := httptest.NewServer(h)
	tr := newHTTPTo(t, srv.URL+"/mcp", change...)
	t.Cleanup(func() {
		_ = tr.Close()
		srv.CloseClientConnections()
		srv.Close()
	})
	return tr, srv
}

func newHTTPTo(t *testing.T, endpoint string, change ...func(*Config, *Options)) *HTTPTransport {
	t.Helper()
	cfg, o := Config{Name: "srv", Endpoint: endpoint}, &Options{}
	cfg.Retry.BaseDelay = time.Millisecond
	for _, f := range change {
		f(&cfg, o)
	}
	tr, err := newHTTPTransport(cfg.withDefaults(), o)
	if err != nil {
		t.Fatal(err)
	}
	if fresh, err := tr.Open(t.Context(), Inbound{}); err != nil || !fresh {
		t.Fatalf("Open = %v, %v want true, nil", fresh, err)
	}
	return tr
}

// inbound replaces the Inbound of a transport that newHTTPTest has opened.
func inbound(tr *HTTPTransport, in Inbound) { tr.in, tr.inbox = in, newInbox(in, tr.limit) }

func toolCall(version string) *Request {
	return &Request{Method: "tools/call", Version: version, Name: "echo", Params: json.RawMessage(`{"name":"echo"}`)}
}

// initialize makes a session on tr.
func initialize(t *testing.T, tr *HTTPTransport) {
	t.Helper()
	if _, err := tr.Open(t.Context(), Inbound{}); err != nil {
		t.Fatal(err)
	}
	if _, err := tr.Call(t.Context(), &Request{Method: "initialize"}); err != nil {
		t.Fatal(err)
	}
}

// wantFault checks an error's fields, and that its text is ours.
func wantFault(t *testing.T, err error, reason Reason, sent bool, status int) *TransportError {
	t.Helper()
	var e *TransportError
	if !errors.As(err, &e) {
		t.Fatalf("error = %v (%T) want a TransportError, %s", err, err, reason)
	}
	if e.Reason != reason || e.Sent != sent || e.Status != status {
		t.Errorf("error = %v: reason %s, sent %v, status %d want %s, %v, %d", e, e.Reason, e.Sent, e.Status, reason, sent, status)
	}
	if e.Server != "srv" || e.Op == "" {
		t.Errorf("origin = %+v", e.Origin)
	}
	if strings.Contains(err.Error(), canary) {
		t.Errorf("the text has the server's words: %v", err)
	}
	if len(e.Raw) > rawLimit {
		t.Errorf("Raw has %d bytes", len(e.Raw))
	}
	return e
}

func TestHTTPHeaders(t *testing.T) {
	heads := make(chan http.Header, 1)
	tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
		m := readHTTPMessage(r)
		heads <- r.Header
		w.Header().Set("Mcp-Session-Id", "s1")
		writeJSON(w, 200, httpResult(m, "ok"))
	}, func(cfg *Config, o *Options) {
		cfg.Headers = map[string]string{"X-Key": "k"}
		o.Authorize = func(context.Context, string) (string, error) { return "Bearer tok", nil }
	})
	modern := toolCall(version2026)
	modern.Header = map[string]string{"Region": "us-west1", "Who": "世"}
	for _, tt := range []struct {
		name string
		req  *Request
		want map[string]string
	}{
		{"initialize", &Request{Method: "initialize", Version: version2511}, map[string]string{"Mcp-Protocol-Version": "", "Mcp-Session-Id": ""}},
		{"legacy", toolCall(version2511), map[string]string{
			"Mcp-Protocol-Version": version2511, "Mcp-Session-Id": "s1", "Mcp-Method": "", "Mcp-Name": ""}},
		{"no version yet", &Request{Method: "ping"}, map[string]string{"Mcp-Protocol-Version": "", "Mcp-Session-Id": "s1"}},
		{"modern", modern, map[string]string{
			"Mcp-Protocol-Version": version2026, "Mcp-Session-Id": "", "Mcp-Method": "tools/call", "Mcp-Name": "echo",
			"Mcp-Param-Region": "us-west1", "Mcp-Param-Who": "=?base64?5LiW?="}},
	} {
		result, err := tr.Call(t.Context(), tt.req)
		if err != nil || string(result) != `{"text":"ok"}` {
			t.Fatalf("%s: Call = %s, %v", tt.name, result, err)
		}
		h := <-heads
		for k, want := range tt.want {
			if got := h.Get(k); got != want {
				t.Errorf("%s: %s = %q want %q", tt.name, k, got, want)
			}
		}
		for k, want := range map[string]string{
			"Accept": "application/json, text/event-stream", "Content-Type": "application/json",
			"X-Key": "k", "Authorization": "Bearer tok", "Last-Event-Id": "",
		} {
			if got := h.Get(k); got != want {
				t.Errorf("%s: %s = %q want %q", tt.name, k, got, want)
			}
		}
	}
}

// TestHTTPStatus is the table of statuses: what each means for a tool call of
// 2025-11-25 within a session and without, for initialize, and for a
// notification.
func TestHTTPStatus(t *testing.T) {
	const (
		session = 1 << iota // the request carries a session id
		initial             // it is initialize
		auth                // there is an Authorize
	)
	ours, null, foreign := `%s`, `null`, `4711`
	rpc := func(code int, id string) string {
		return fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"error":{"code":%d,"message":"`+canary+`"}}`, id, code)
	}
	for _, tt := range []struct {
		status int
		body   string
		mode   int
		reason Reason // or the JSON-RPC code:
		code   int
		sent   bool
		fresh  bool // the session is lost
	}{
		{status: 301, reason: ReasonProtocol, sent: true},
		{status: 302, reason: ReasonProtocol, sent: true},
		{status: 307, reason: ReasonProtocol, sent: true},
		{status: 308, mode: session, reason: ReasonProtocol, sent: true},
		{status: 400, body: canary, reason: ReasonProtocol, sent: true},
		{status: 400, body: canary, mode: session, reason: ReasonProtocol, sent: true},
		{status: 400, body: rpc(-32602, ours), code: -32602},
		{status: 400, body: "\uFEFF" + rpc(-32602, ours), code: -32602},
		{status: 400, body: rpc(-32022, ours), code: -32022},
		{status: 400, body: rpc(-32000, ours), mode: session, code: -32000},
		{status: 400, body: rpc(-32000, null), code: -32000},
		{status: 400, body: rpc(-32000, null), mode: session, reason: ReasonDisconnected, fresh: true},
		{status: 400, body: rpc(-32019, foreign), mode: session, reason: ReasonDisconnected, fresh: true},
		{status: 400, body: rpc(-32020, null), mode: session, code: -32020},
		{status: 400, body: rpc(-32700, null), mode: session, code: -32700},
		{status: 400, body: rpc(-32600, foreign), mode: session, reason: ReasonProtocol, sent: true},
		{status: 400, body: `{"jsonrpc":"2.0","id":1,"result":{}}`, reason: ReasonProtocol, sent: true},
		{status: 401, reason: ReasonProtocol, sent: true},
		{status: 401, mode: session | auth, reason: ReasonProtocol},
		{status: 403, mode: auth, reason: ReasonProtocol, sent: true},
		{status: 404, reason: ReasonProtocol, sent: true},
		{status: 404, body: rpc(-32601, ours), code: -32601},
		{status: 404, mode: session, reason: ReasonDisconnected, fresh: true},
		{status: 404, body: rpc(-32001, null), mode: session, reason: ReasonDisconnected, fresh: true},
		{status: 404, mode: session | initial, reason: ReasonProtocol, sent: true},
		{status: 405, reason: ReasonProtocol, sent: true},
		{status: 406, mode: session, reason: ReasonProtocol, sent: true},
		{status: 408, reason: ReasonUnavailable, sent: true},
		{status: 413, reason: ReasonProtocol, sent: true},
		{status: 415, reason: ReasonProtocol, sent: true},
		{status: 429, body: rpc(-32000, ours), reason: ReasonUnavailable},
		{status: 500, body: rpc(-32603, ours), reason: ReasonUnavailable, sent: true},
		{status: 501, reason: ReasonUnavailable, sent: true},
		{status: 502, body: "<html>" + canary, reason: ReasonUnavailable, sent: true},
		{status: 503, mode: session, reason: ReasonUnavailable, sent: true},
		{status: 504, reason: ReasonUnavailable, sent: true},
		{status: 599, reason: ReasonUnavailable, sent: true},
		{status: 200, reason: ReasonProtocol, sent: true},
		{status: 202, reason: ReasonProtocol, sent: true},
		{status: 204, reason: ReasonProtocol, sent: true},
		{status: 600, reason: ReasonProtocol, sent: true},
	} {
		t.Run(fmt.Sprintf("%d %s %d", tt.status, tt.body, tt.mode), func(t *testing.T) {
			armed := false
			seen := 0
			tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
				m := readHTTPMessage(r)
				if !armed && m.Method == "initialize" {
					w.Header().Set("Mcp-Session-Id", "s1")
					writeJSON(w, 200, httpResult(m, "hello"))
					return
				}
				if r.Method == http.MethodGet || r.Method == http.MethodDelete {
					w.WriteHeader(405)
					return
				}
				seen++
				w.Header().Set("Location", "http://"+canary+"/")
				w.Header().Set("Www-Authenticate", "Bearer "+canary)
				body := tt.body
				if strings.Contains(body, "%s") {
					body = fmt.Sprintf(body, m.ID)
				}
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(tt.status)
				_, _ = io.WriteString(w, body)
			}, func(cfg *Config, o *Options) {
				if tt.mode&auth != 0 {
					o.Authorize = func(context.Context, string) (string, error) { return "t", nil }
				}
			})
			if tt.mode&session != 0 {
				initialize(t, tr)
			}
			armed = true
			req := toolCall(version2511)
			if tt.mode&initial != 0 {
				req = &Request{Method: "initialize"}
			}
			_, err := tr.Call(t.Context(), req)
			var r *RPCError
			switch {
			case tt.code != 0 && !errors.As(err, &r):
				t.Fatalf("error = %v want JSON-RPC error %d", err, tt.code)
			case tt.code != 0:
				if r.Code != tt.code || r.Status != tt.status || r.Message != canary || strings.Contains(r.Error(), canary) || r.Server != "srv" {
					t.Errorf("error = %+v", r)
				}
			default:
				e := wantFault(t, err, tt.reason, tt.sent, tt.status)
				if tt.status/100 == 3 && string(e.Raw) != "http://"+canary+"/" {
					t.Errorf("Raw = %q want the target", e.Raw)
				}
				if (tt.status == 401 || tt.status == 403) && string(e.Raw) != "Bearer "+canary {
					t.Errorf("Raw = %q want the challenge", e.Raw)
				}
			}
			want := 1
			if tt.status == 401 && tt.mode&auth != 0 {
				want = 2
			}
			if seen != want {
				t.Errorf("the server saw %d requests want %d", seen, want)
			}
			if fresh, err := tr.Open(t.Context(), Inbound{}); fresh != tt.fresh || err != nil {
				t.Errorf("Open = %v, %v want %v", fresh, err, tt.fresh)
			}
			seen = 0
			err = tr.Notify(t.Context(), &Request{Method: "notifications/x"})
			if tt.status/100 == 2 {
				if err != nil {
					t.Errorf("Notify = %v", err)
				}
			} else if err == nil {
				t.Errorf("Notify succeeded")
			}
		})
	}
}

func TestHTTPRetryAfter(t *testing.T) {
	date := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, tt := range []struct {
		value string
		want  time.Duration
	}{
		{"", 0}, {"0", 0}, {"1", time.Second}, {"5", 5 * time.Second}, {"3600", time.Hour},
		{"9223372036", 9223372036 * time.Second}, {"9223372037", 0}, {"9223372036854775808", 0}, {"-1", 0}, {"1.5", 0}, {"soon", 0}, {"+5", 0},
		{date.Add(time.Hour).Format(http.TimeFormat), time.Hour},
		{date.Add(-time.Hour).Format(http.TimeFormat), 0},
	} {
		h := http.Header{"Retry-After": {tt.value}, "Date": {date.Format(http.TimeFormat)}}
		if got := retryAfter(h); got != tt.want {
			t.Errorf("retryAfter(%q) = %v want %v", tt.value, got, tt.want)
		}
	}
	synctest.Test(t, func(t *testing.T) { // without Date, our clock
		h := http.Header{"Retry-After": {time.Now().Add(time.Hour).UTC().Format(http.TimeFormat)}}
		if got := retryAfter(h); got != time.Hour {
			t.Errorf("without Date: %v want 1h", got)
		}
	})
	for status, want := range map[int]time.Duration{408: 7 * time.Second, 429: 7 * time.Second, 503: 7 * time.Second, 500: 0, 502: 0, 404: 0} {
		tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Retry-After", "7")
			w.WriteHeader(status)
		})
		_, err := tr.Call(t.Context(), toolCall(version2511))
		if e := new(TransportError); !errors.As(err, &e) || e.RetryAfter != want {
			t.Errorf("status %d: RetryAfter = %v want %v", status, e.RetryAfter, want)
		}
	}
}

func TestHTTPNeverRedirects(t *testing.T) {
	var other atomic.Int32
	b := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { other.Add(1) }))
	defer b.Close()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, b.URL, http.StatusTemporaryRedirect)
	}, func(_ *Config, o *Options) { o.HTTPClient = client })
	for _, m := range []string{"initialize", "tools/call"} {
		_, err := tr.Call(t.Context(), &Request{Method: m})
		wantFault(t, err, ReasonProtocol, true, 307)
	}
	if n := other.Load(); n != 0 {
		t.Errorf("the target saw %d requests", n)
	}
	if client.CheckRedirect != nil {
		t.Error("the caller's client was changed")
	}
}

// TestHTTPReplies is the table of what may stand in a reply with status 200.
func TestHTTPReplies(t *testing.T) {
	const sse = "text/event-stream"
	answer := `{"jsonrpc":"2.0","id":%s,"result":{"text":"ok"}}`
	note := `{"jsonrpc":"2.0","method":"notifications/message","params":{"n":1}}`
	other := `{"jsonrpc":"2.0","id":4711,"result":{"text":"` + canary + `"}}`
	for _, tt := range []struct {
		name, media, body string
		reason            Reason // "": the answer
		code              int    // of a JSON-RPC error
		detail            string
		notes             int
	}{
		{name: "plain", media: "application/json", body: answer},
		{name: "parameters and case", media: "Application/JSON; charset=utf-8", body: answer},
		{name: "bad parameters", media: "application/json; x", body: answer},
		{name: "id as text", media: "application/json", body: strings.Replace(answer, "%s", `"%s"`, 1)},
		{name: "batch", media: "application/json", body: "\n[" + note + "," + answer + "]", notes: 1},
		{name: "batch with what is no message", media: "application/json", body: `[7,{"` + canary + `":1},` + answer + "]"},
		{name: "batch with another answer", media: "application/json", body: "[" + other + "," + answer + "]"},
		{name: "byte order mark in JSON", media: "application/json", body: "\uFEFF" + answer},
		{name: "error", media: "application/json", body: `{"jsonrpc":"2.0","id":%s,"error":{"code":-32603,"message":"` + canary + `"}}`, code: -32603},
		{name: "error for nobody", media: "application/json", body: `{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"m"}}`, code: -32700},
		{name: "error without an id", media: "application/json", body: `{"jsonrpc":"2.0","error":{"code":-32700,"message":"m"}}`, code: -32700},
		{name: "error without a code", media: "application/json", body: `{"jsonrpc":"2.0","id":%s,"error":{"message":"` + canary + `"}}`, reason: ReasonProtocol, detail: "not a JSON-RPC error"},
		{name: "another id", media: "application/json", body: other, reason: ReasonProtocol, detail: "answer to another request"},
		{name: "null id", media: "application/json", body: `{"jsonrpc":"2.0","id":null,"result":{}}`, reason: ReasonProtocol, detail: "answer to another request"},
		{name: "no message", media: "application/json", body: `{"` + canary + `":1}`, reason: ReasonProtocol, detail: "not JSON-RPC"},
		{name: "no JSON", media: "application/json", body: canary, reason: ReasonProtocol, detail: "not JSON-RPC"},
		{name: "both", media: "application/json", body: `{"jsonrpc":"2.0","id":%s,"result":{},"error":{"code":1,"message":"m"}}`, reason: ReasonProtocol, detail: "not JSON-RPC"},
		{name: "notification only", media: "application/json", body: note, reason: ReasonProtocol, detail: "no answer", notes: 1},
		{name: "empty batch", media: "application/json", body: "[]", reason: ReasonProtocol, detail: "no answer"},
		{name: "empty", media: "application/json", body: " \n", reason: ReasonProtocol, detail: "empty body"},
		{name: "html", media: "text/html; charset=utf-8", body: "<html>" + canary, reason: ReasonProtocol, detail: "text/html"},
		{name: "plain text", media: "text/plain", body: answer, reason: ReasonProtocol, detail: "text/plain"},
		{name: "unknown type", media: "text/" + canary, body: canary, reason: ReasonProtocol, detail: "unknown media type"},
		{name: "malformed type", media: canary + ";;/", body: canary, reason: ReasonProtocol, detail: "unknown media type"},
		{name: "empty html", media: "text/html", reason: ReasonProtocol, detail: "empty body"},

		{name: "event", media: sse, body: "data: " + answer + "\n\n"},
		{name: "event, type and case", media: "Text/Event-Stream;charset=utf-8", body: "event: message\ndata:" + answer + "\n\n"},
		{name: "CR", media: sse, body: "data: " + answer + "\r\r"},
		{name: "CRLF", media: sse, body: "data: " + answer + "\r\n\r\n"},
		{name: "byte order mark", media: sse, body: "\uFEFFdata: " + answer + "\n\n"},
		{name: "several lines", media: sse, body: "data: {\"jsonrpc\":\ndata:\"2.0\",\ndata:  \"id\":%s,\ndata\ndata: \"result\":{\"text\":\"ok\"}}\n\n"},
		{name: "priming, comments, retry", media: sse, body: "id: 1\ndata: \n\n: keep-alive\n\nretry: 10\n\nid\n\n:\n: x\nnonsense\nevent\ndata: " + note + "\n\ndata: " + answer + "\n\n", notes: 1},
		{name: "other event types", media: sse, body: "event: ping\ndata: " + canary + "\n\ndata: " + answer + "\n\n"},
		{name: "another answer first", media: sse, body: "data: " + other + "\n\ndata: " + answer + "\n\n"},
		{name: "batch in an event", media: sse, body: "data: [" + note + "," + answer + "]\n\n", notes: 1},
		{name: "error in an event", media: sse, body: "data: {\"jsonrpc\":\"2.0\",\"id\":%s,\"error\":{\"code\":-32603,\"message\":\"m\"}}\n\n", code: -32603},
		{name: "not JSON in an event", media: sse, body: "data: " + canary + "\n\ndata: " + answer + "\n\n", reason: ReasonProtocol, detail: "event is not JSON-RPC"},
		{name: "unfinished event", media: sse, body: "data: " + answer + "\n", reason: ReasonDisconnected},
		{name: "no event", media: sse, body: ": hi\n\n", reason: ReasonDisconnected},
		{name: "only another answer", media: sse, body: "data: " + other + "\n\n", reason: ReasonProtocol, detail: "answer to another request"},
		{name: "notification only, in an event", media: sse, body: "data: " + note + "\n\n", reason: ReasonDisconnected, notes: 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, version := range []string{version2511, version2026} {
				tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
					w.Header().Set("Content-Type", tt.media)
					_, _ = io.WriteString(w, strings.Replace(tt.body, "%s", string(readHTTPMessage(r).ID), 1))
				})
				notes := 0
				inbound(tr, Inbound{Notify: func(method string, params json.RawMessage) {
					if method != "notifications/message" || string(params) != `{"n":1}` {
						t.Errorf("Notify(%q, %s)", method, params)
					}
					notes++
				}})
				req := toolCall(version)
				result, err := tr.Call(t.Context(), req)
				switch {
				case tt.code != 0:
					var r *RPCError
					if !errors.As(err, &r) || r.Code != tt.code || strings.Contains(err.Error(), canary) {
						t.Errorf("error = %v want JSON-RPC error %d", err, tt.code)
					}
				case tt.reason == "":
					if err != nil || string(result) != `{"text":"ok"}` {
						t.Errorf("Call = %s, %v", result, err)
					}
				default:
					status := 200
					if tt.reason == ReasonDisconnected {
						status = 0
					}
					e := wantFault(t, err, tt.reason, true, status)
					if tt.detail != "" && e.Detail != tt.detail {
						t.Errorf("Detail = %q want %q", e.Detail, tt.detail)
					}
				}
				if notes != tt.notes {
					t.Errorf("%d notifications want %d", notes, tt.notes)
				}
			}
		})
	}
}

// TestHTTPSessionLost has 32 callers find out at once that their session is gone.
func TestHTTPSessionLost(t *testing.T) {
	var mu sync.Mutex
	alive, inits := "s0", 0
	tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
		m := readHTTPMessage(r)
		mu.Lock()
		defer mu.Unlock()
		switch id := r.Header.Get("Mcp-Session-Id"); {
		case m.Method == "initialize":
			if id != "" {
				t.Errorf("initialize carries session %q", id)
			}
			inits++
			alive = "s" + strconv.Itoa(inits)
			w.Header().Set("Mcp-Session-Id", alive)
			writeJSON(w, 200, httpResult(m, "hello"))
		case id == "":
			t.Errorf("%s %s without a session", r.Method, m.Method)
			w.WriteHeader(400)
		case id != alive:
			w.WriteHeader(404)
		default:
			writeJSON(w, 200, httpResult(m, "ok"))
		}
	})
	initialize(t, tr)
	for round := range 3 {
		mu.Lock()
		alive = "none"
		mu.Unlock()
		var fresh atomic.Int32
		var init sync.Mutex // what the session above does: one handshake for all
		var wg sync.WaitGroup
		for range 32 {
			wg.Go(func() {
				for try := 0; ; try++ {
					init.Lock()
					isNew, err := tr.Open(t.Context(), Inbound{})
					if err != nil {
						t.Error(err)
					}
					if isNew {
						fresh.Add(1)
						if _, err := tr.Call(t.Context(), &Request{Method: "initialize"}); err != nil {
							t.Error(err)
						}
					}
					init.Unlock()
					_, err = tr.Call(t.Context(), toolCall(version2511))
					if err == nil {
						return
					}
					var e *TransportError
					if !errors.As(err, &e) || e.Reason != ReasonDisconnected || e.Sent {
						t.Errorf("error = %v", err)
						return
					}
					if try == 2 {
						t.Errorf("try %d: %v", try, err)
						return
					}
				}
			})
		}
		wg.Wait()
		if n := fresh.Load(); n != 1 || inits != round+2 {
			t.Fatalf("round %d: %d fresh connections, %d handshakes in all", round, n, inits)
		}
	}
}

// What was agreed in one session is not asked in the next, which may speak another
// revision: a call that waited for its slot meanwhile is not sent.
func TestHTTPNextSession(t *testing.T) {
	var calls atomic.Int32
	tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
		switch m := readHTTPMessage(r); m.Method {
		case "initialize":
			w.Header().Set("Mcp-Session-Id", "always-this")
			writeJSON(w, 200, httpResult(m, "hello"))
		case "x/lose":
			w.WriteHeader(404)
		case "tools/call":
			calls.Add(1)
			writeJSON(w, 200, httpResult(m, "ok"))
		}
	})
	initialize(t, tr)
	call := toolCall(version2511)
	for round := range 3 {
		call.conn = tr.connection()
		_, err := tr.Call(t.Context(), &Request{Method: "x/lose", Version: version2511})
		wantFault(t, err, ReasonDisconnected, false, 404)
		initialize(t, tr)
		_, err = tr.Call(t.Context(), call)
		wantFault(t, err, ReasonDisconnected, false, 0)
		call.conn = tr.connection()
		if _, err := tr.Call(t.Context(), call); err != nil || calls.Load() != int32(round+1) {
			t.Errorf("round %d: error = %v, the server saw %d calls", round, err, calls.Load())
		}
	}
}

func TestHTTPSessionID(t *testing.T) {
	for id, ok := range map[string]bool{"": true, "!~": true, strings.Repeat("x", maxToken): true, strings.Repeat("x", maxToken+1): false, "a b": false, "\u00e9": false} {
		deleted := make(chan string, 1)
		tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodDelete {
				deleted <- r.Header.Get("Mcp-Session-Id") + " " + r.Header.Get("Mcp-Protocol-Version")
				w.WriteHeader(405)
				return
			}
			w.Header().Set("Mcp-Session-Id", id)
			writeEvents(w, "data: "+httpResult(readHTTPMessage(r), "hello")+"\n\n")
		})
		_, err := tr.Call(t.Context(), &Request{Method: "initialize"})
		if (err == nil) != ok {
			t.Errorf("session id %.20q: error = %v", id, err)
		}
		if !ok {
			wantFault(t, err, ReasonProtocol, true, 200)
			continue
		}
		if err := tr.Notify(t.Context(), &Request{Method: "notifications/initialized", Version: version2506}); err != nil {
			t.Error(err)
		}
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
		if id == "" {
			if len(deleted) != 0 {
				t.Error("DELETE without a session")
			}
		} else if got, want := <-deleted, id+" "+version2506; got != want {
			t.Errorf("DELETE with %q want %q", got, want)
		}
	}
}

func TestHTTPAuthorize(t *testing.T) {
	var asked []string
	secret := "Bearer two"
	tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != secret {
			w.Header().Add("Www-Authenticate", `Bearer realm="a"`)
			w.Header().Add("Www-Authenticate", "Basic")
			w.WriteHeader(401)
			return
		}
		writeJSON(w, 200, httpResult(readHTTPMessage(r), "ok"))
	}, func(_ *Config, o *Options) {
		o.Authorize = func(_ context.Context, challenge string) (string, error) {
			asked = append(asked, challenge)
			switch challenge {
			case "":
				return "Bearer one", nil
			case `Bearer realm="a", Basic`:
				return "Bearer two", nil
			}
			return "", errors.New("no")
		}
	})
	if _, err := tr.Call(t.Context(), toolCall(version2511)); err != nil {
		t.Error(err)
	}
	if len(asked) != 2 {
		t.Errorf("asked with %q want once without and once with the challenge", asked)
	}
	secret = "nobody's"
	_, err := tr.Call(t.Context(), toolCall(version2511))
	wantFault(t, err, ReasonProtocol, false, 401)
	if len(asked) != 4 {
		t.Errorf("asked %d times want 4", len(asked))
	}

	mine := errors.New("no token")
	tr.o.Authorize = func(context.Context, string) (string, error) { return "", mine }
	_, err = tr.Call(t.Context(), toolCall(version2511))
	if e := wantFault(t, err, ReasonUnavailable, false, 0); !errors.Is(e, mine) {
		t.Errorf("error = %v does not wrap the caller's", err)
	}
	tr.o.Authorize = func(context.Context, string) (string, error) { return "a\r\nX: " + canary, nil }
	_, err = tr.Call(t.Context(), toolCall(version2511))
	if e := wantFault(t, err, ReasonUnavailable, false, 0); e.Tries != 1 {
		t.Errorf("%d tries", e.Tries)
	}
}

func TestHTTPBounds(t *testing.T) {
	const limit = 64 << 10
	big := strings.Repeat("x", limit)
	pour := func(w io.Writer, s string) (n int) {
		for n < 64<<20 {
			m, err := io.WriteString(w, s)
			if n += m; err != nil {
				break
			}
		}
		return n
	}
	poured := make(chan int, 1)
	for _, tt := range []struct {
		name   string
		h      func(w http.ResponseWriter, r *http.Request)
		reason Reason
		status int
	}{
		{"endless body", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			poured <- pour(w, big)
		}, ReasonLimit, 0},
		{"declared length", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Content-Length", "1000000000000")
			_, _ = io.WriteString(w, "{")
		}, ReasonLimit, 0},
		{"endless line", func(w http.ResponseWriter, r *http.Request) {
			writeEvents(w, "data: ")
			poured <- pour(w, big)
		}, ReasonLimit, 0},
		{"endless event", func(w http.ResponseWriter, r *http.Request) {
			writeEvents(w, "")
			poured <- pour(w, "data: "+big[:1000]+"\n")
		}, ReasonLimit, 0},
		{"endless comment", func(w http.ResponseWriter, r *http.Request) {
			writeEvents(w, ":")
			poured <- pour(w, big)
		}, ReasonLimit, 0},
		{"endless error body", func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(400)
			poured <- pour(w, canary+big)
		}, ReasonProtocol, 400},
		{"endless page", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			poured <- pour(w, canary+big)
		}, ReasonProtocol, 200},
		{"gzip bomb", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			pour(z, big)
			_ = z.Close()
		}, ReasonLimit, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
				_ = readHTTPMessage(r)
				tt.h(w, r)
			}, func(cfg *Config, _ *Options) { cfg.MaxMessageBytes = limit })
			_, err := tr.Call(t.Context(), toolCall(version2026))
			wantFault(t, err, tt.reason, true, tt.status)
			if strings.HasPrefix(tt.name, "endless") {
				if n := <-poured; n > 16<<20 {
					t.Errorf("the server could send %d bytes", n)
				}
			}
		})
	}

	// A message of exactly the bound gets through, in either form; the bound is
	// on the message.
	for _, media := range []string{"application/json", "text/event-stream"} {
		for _, over := range []int{0, 1} {
			tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
				m := readHTTPMessage(r)
				body := httpResult(m, big[:limit-len(httpResult(m, ""))+over])
				if media == "text/event-stream" {
					writeEvents(w, "id: 1\ndata: ", body, "\n\n")
				} else {
					writeJSON(w, 200, body)
				}
			}, func(cfg *Config, _ *Options) { cfg.MaxMessageBytes = limit })
			_, err := tr.Call(t.Context(), toolCall(version2026))
			if over == 0 && err != nil {
				t.Errorf("%s: %v", media, err)
			} else if over == 1 {
				wantFault(t, err, ReasonLimit, true, 0)
			}
			req := toolCall(version2026)
			req.Params = json.RawMessage(`"` + big + `"`)
			_, err = tr.Call(t.Context(), req)
			wantFault(t, err, ReasonLimit, false, 0)
			err = tr.Notify(t.Context(), req)
			wantFault(t, err, ReasonLimit, false, 0)
		}
	}
}

// TestHTTPCutOff ends replies before their end.
func TestHTTPCutOff(t *testing.T) {
	for name, raw := range map[string]string{
		"no reply":          "",
		"half a head":       "HTTP/1.1 200 OK\r\nContent-",
		"half a body":       "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"jsonrpc\"",
		"half a chunk":      "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n100\r\n{\"jsonrpc\"",
		"no last chunk":     "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
		"length unknown":    "HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{\"jsonrpc\"",
		"event, half":       "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n6\r\ndata: \r\n",
		"not HTTP":          canary + " 220 ESMTP\r\n\r\n",
		"not HTTP, status":  "HTTP/1.1 " + canary + "\r\n\r\n",
		"not HTTP, chunked": "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: " + canary + "\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			var seen atomic.Int32
			tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
				_ = readHTTPMessage(r)
				seen.Add(1)
				conn, _, _ := w.(http.Hijacker).Hijack()
				_, _ = io.WriteString(conn, raw)
				_ = conn.Close()
			})
			_, err := tr.Call(t.Context(), toolCall(version2511))
			want := ReasonDisconnected
			if strings.HasPrefix(name, "not HTTP") && name != "not HTTP, chunked" {
				want = ReasonProtocol
			}
			e := wantFault(t, err, want, true, 0+func() int {
				if name == "length unknown" {
					return 200
				}
				return 0
			}())
			if seen.Load() != 1 || e.Tries > 1 {
				t.Errorf("the server saw %d requests, %d tries", seen.Load(), e.Tries)
			}
		})
	}
}

// TestHTTPReusedConnection races calls with a server that closes idle
// connections: what was not written is sent once more, and nothing twice.
func TestHTTPReusedConnection(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]int{}
	tr, srv := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
		m := readHTTPMessage(r)
		mu.Lock()
		seen[string(m.Params)]++
		mu.Unlock()
		writeJSON(w, 200, httpResult(m, "ok"))
	})
	failed, unsent := 0, 0
	for i := range 300 {
		req := &Request{Method: "m", Version: version2511, Params: json.RawMessage(strconv.Itoa(i))}
		_, err := tr.Call(t.Context(), req)
		var e *TransportError
		if errors.As(err, &e) {
			failed++
			if !e.Sent {
				unsent++
			}
		}
		if i%2 == 0 {
			go srv.CloseClientConnections()
		}
	}
	mu.Lock()
	defer mu.Unlock()
	for k, n := range seen {
		if n > 1 {
			t.Errorf("request %s was served %d times", k, n)
		}
	}
	t.Logf("%d of 300 calls failed, %d of them not sent, %d served", failed, unsent, len(seen))
}

// TestHTTPResendsUnwritten has a used connection fail its first write.
func TestHTTPResendsUnwritten(t *testing.T) {
	var seen atomic.Int32
	tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
		seen.Add(1)
		writeJSON(w, 200, httpResult(readHTTPMessage(r), "ok"))
	})
	var broken atomic.Int32
	dial := tr.own.DialContext
	tr.own.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if cc, ok := conn.(*countedConn); ok {
			cc.Conn = &brittleConn{Conn: cc.Conn, left: &broken}
		}
		return conn, err
	}
	if _, err := tr.Call(t.Context(), toolCall(version2511)); err != nil {
		t.Fatal(err)
	}
	broken.Store(1)
	if _, err := tr.Call(t.Context(), toolCall(version2511)); err != nil {
		t.Errorf("after one failed write: %v", err)
	}
	broken.Store(2)
	_, err := tr.Call(t.Context(), toolCall(version2511))
	e := wantFault(t, err, ReasonDisconnected, true, 0)                     // on a new connection: who knows
	if !errors.Is(e, syscall.EPIPE) && !errors.Is(e, io.ErrUnexpectedEOF) { // net/http may hear of the end first
		t.Errorf("cause = %v want EPIPE", e.Err)
	}
	if n := seen.Load(); n != 2 {
		t.Errorf("the server saw %d requests want 2", n)
	}
}

// Net/http may find that a used connection is dead and take a new one by itself.
// The dead one, to which nothing was written, then says nothing of the new.
func TestHTTPAnotherConnection(t *testing.T) {
	c := &httpCall{t: &HTTPTransport{}}
	c.gotConn(httptrace.GotConnInfo{Conn: &countedConn{}, Reused: true})
	if !c.unwritten() {
		t.Error("unwritten() = false for a used connection with nothing written to it")
	}
	c.gotConn(httptrace.GotConnInfo{Conn: &countedConn{}})
	if c.unwritten() {
		t.Error("unwritten() = true for a new connection")
	}
}

// brittleConn fails writes while there are failures left.
type brittleConn struct {
	net.Conn
	left *atomic.Int32
}

func (c *brittleConn) Write(b []byte) (int, error) {
	if c.left.Load() > 0 {
		c.left.Add(-1)
		return 0, &net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.EPIPE)}
	}
	return c.Conn.Write(b)
}

// pipeNet is a network inside a synctest bubble.
type pipeNet struct {
	conns chan net.Conn
	done  chan struct{}
}

func (p *pipeNet) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}
func (p *pipeNet) Close() error   { close(p.done); return nil }
func (p *pipeNet) Addr() net.Addr { return &net.TCPAddr{} }
func (p *pipeNet) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	a, b := net.Pipe()
	select {
	case p.conns <- a:
		return b, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// inBubble runs f in a bubble with a transport to h.
func inBubble(t *testing.T, h http.HandlerFunc, change func(*Config, *Options), f func(t *testing.T, tr *HTTPTransport)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		p := &pipeNet{conns: make(chan net.Conn), done: make(chan struct{})}
		srv := &http.Server{Handler: h}
		go srv.Serve(p) // ended and awaited below
		client := &http.Client{}
		tr := newHTTPTo(t, "http://pipe/mcp", func(cfg *Config, o *Options) {
			client.Transport = &http.Transport{DialContext: p.dial}
			o.HTTPClient = client
			o.Rand = func(n int64) int64 { return n - 1 }
			cfg.Retry.BaseDelay = 0
			if change != nil {
				change(cfg, o)
			}
		})
		f(t, tr)
		_ = tr.Close()
		client.CloseIdleConnections()
		_ = srv.Close()
		synctest.Wait()
	})
}

// An h2Net is a network on which HTTP/2 is spoken, without TLS.
type h2Net struct {
	*pipeNet
	first func(c net.Conn) // serves the first connection; nil leaves it to the server
	open  atomic.Int32     // connections of the client
	stuck atomic.Bool      // the connections that there are take no more of the client,
	deaf  atomic.Bool      // or take it nowhere
}

func (n *h2Net) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if first := n.first; first != nil {
		n.first = nil
		a, b := net.Pipe()
		go first(a) // ends with the connection
		n.open.Add(1)
		return &h2Conn{Conn: b, net: n, closed: make(chan struct{})}, nil
	}
	c, err := n.pipeNet.dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	n.open.Add(1)
	return &h2Conn{Conn: c, net: n, later: n.deaf.Load(), closed: make(chan struct{})}, nil
}

// An h2Conn is the client's end.
type h2Conn struct {
	net.Conn
	net    *h2Net
	later  bool // it works
	once   sync.Once
	closed chan struct{}
}

func (c *h2Conn) Write(b []byte) (int, error) {
	if c.net.stuck.Load() {
		<-c.closed
	}
	if c.net.deaf.Load() && !c.later {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

func (c *h2Conn) Close() error {
	c.once.Do(func() { c.net.open.Add(-1); close(c.closed) })
	return c.Conn.Close()
}

// overHTTP2 runs f in a bubble with a transport of our own to h. It takes the place
// of net/http's default, of which ours is a copy, so that the test is not parallel.
func overHTTP2(t *testing.T, h http.HandlerFunc, first func(net.Conn), f func(t *testing.T, tr *HTTPTransport, n *h2Net)) {
	t.Helper()
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	defer func(rt http.RoundTripper) { http.DefaultTransport = rt }(http.DefaultTransport)
	synctest.Test(t, func(t *testing.T) {
		n := &h2Net{pipeNet: &pipeNet{conns: make(chan net.Conn), done: make(chan struct{})}, first: first}
		http.DefaultTransport = &http.Transport{DialContext: n.dial, Protocols: protocols}
		srv := &http.Server{Handler: h, Protocols: protocols}
		go srv.Serve(n) // ended and awaited below
		tr := newHTTPTo(t, "http://pipe/mcp")
		f(t, tr, n)
		_ = tr.Close()
		_ = srv.Close()
		synctest.Wait()
	})
}

// After Close no connection is left, not even one on which the end of its calls
// cannot be said.
func TestHTTP2Close(t *testing.T) {
	overHTTP2(t, hold, nil, func(t *testing.T, tr *HTTPTransport, n *h2Net) {
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := tr.Call(t.Context(), toolCall(version2026))
			wantFault(t, err, ReasonDisconnected, true, 0)
		})
		synctest.Wait()
		n.stuck.Store(true)
		if n.open.Load() == 0 {
			t.Error("no connection")
		}
		_ = tr.Close()
		wg.Wait()
		synctest.Wait()
		if left := n.open.Load(); left != 0 {
			t.Errorf("%d connections left", left)
		}
	})
}

// A connection of HTTP/2 whose other end is gone without a word is found out, also
// while a stream is held open on it, which keeps it from being idle.
func TestHTTP2Silence(t *testing.T) {
	overHTTP2(t, func(w http.ResponseWriter, r *http.Request) {
		m := readHTTPMessage(r)
		if m.Method == "stream" {
			<-r.Context().Done()
			return
		}
		writeJSON(w, 200, httpResult(m, "ok"))
	}, nil, func(t *testing.T, tr *HTTPTransport, n *h2Net) {
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := tr.Call(t.Context(), &Request{Method: "stream", Version: version2026, Stream: true})
			wantFault(t, err, ReasonDisconnected, true, 0)
		})
		time.Sleep(time.Hour) // silence is no fault
		n.deaf.Store(true)
		for i, want := range []Reason{ReasonDisconnected, ""} {
			req := toolCall(version2026)
			req.Deadline = time.Now().Add(30 * time.Second)
			if _, err := tr.Call(t.Context(), req); (err != nil || want != "") && !errors.Is(err, want) {
				t.Errorf("call %d: %v want %q", i, err, want)
			}
		}
		wg.Wait()
	})
}

// What a server of HTTP/2 says it has not begun is begun elsewhere, and nothing else.
func TestHTTP2NotTaken(t *testing.T) {
	frame := func(kind, stream byte, payload ...byte) []byte {
		return append([]byte{0, 0, byte(len(payload)), kind, 0, 0, 0, 0, stream}, payload...)
	}
	for _, tt := range []struct {
		name  string
		say   []byte
		taken bool
	}{
		{"GOAWAY before it", frame(7, 0, 0, 0, 0, 0, 0, 0, 0, 0), false},
		{"refused", append(frame(3, 1, 0, 0, 0, 7), frame(7, 0, 0, 0, 0, 1, 0, 0, 0, 0)...), false},
		{"GOAWAY after it", frame(7, 0, 0, 0, 0, 1, 0, 0, 0, 0), true},
		{"broken off", frame(3, 1, 0, 0, 0, 1), true},
		{"hung up", nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			served := 0
			overHTTP2(t, func(w http.ResponseWriter, r *http.Request) {
				served++
				writeJSON(w, 200, httpResult(readHTTPMessage(r), "ok"))
			}, func(c net.Conn) {
				defer c.Close()
				r := bufio.NewReader(c)
				_, _ = r.Discard(24) // the preface
				settled := make(chan struct{})
				go func() {
					defer close(settled)
					_, _ = c.Write(frame(4, 0)) // SETTINGS
				}()
				for asked := false; !asked; {
					var head [9]byte
					if _, err := io.ReadFull(r, head[:]); err != nil {
						return
					}
					_, _ = r.Discard(int(head[0])<<16 | int(head[1])<<8 | int(head[2]))
					asked = head[3] == 0 // DATA
				}
				left := make(chan struct{})
				go func() { // ends with the connection
					defer close(left)
					_, _ = io.Copy(io.Discard, r)
				}()
				<-settled
				_, _ = c.Write(tt.say)
				if !tt.taken {
					<-left
				}
			}, func(t *testing.T, tr *HTTPTransport, n *h2Net) {
				_, err := tr.Call(t.Context(), toolCall(version2511))
				if tt.taken {
					wantFault(t, err, ReasonDisconnected, true, 0)
				} else if err != nil {
					t.Error(err)
				}
				if want := map[bool]int{false: 1}[tt.taken]; served != want {
					t.Errorf("served %d times more, want %d", served, want)
				}
			})
		})
	}
}

// hold keeps a request open until its client leaves.
func hold(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	<-r.Context().Done()
}

func TestHTTPTime(t *testing.T) {
	within := func(d time.Duration) *Request {
		req := toolCall(version2026)
		req.Deadline = time.Now().Add(d)
		return req
	}
	elapsed := func(t *testing.T, start time.Time, want time.Duration) {
		t.Helper()
		if got := time.Since(start); got != want {
			t.Errorf("took %v want %v", got, want)
		}
	}
	t.Run("headers held", func(t *testing.T) {
		inBubble(t, hold, nil, func(t *testing.T, tr *HTTPTransport) {
			start := time.Now()
			_, err := tr.Call(t.Context(), within(50*time.Second)) // ReadTimeout is 30 s: no stall before the reply
			e := wantFault(t, err, ReasonTimeout, true, 0)
			elapsed(t, start, 50*time.Second)
			if errors.Is(e, context.DeadlineExceeded) || !e.Timeout() {
				t.Errorf("error = %v unwraps to the context's", err)
			}
		})
	})
	t.Run("caller cancels", func(t *testing.T) {
		inBubble(t, hold, nil, func(t *testing.T, tr *HTTPTransport) {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(3*time.Second, cancel)
			start := time.Now()
			_, err := tr.Call(ctx, within(5*time.Second))
			wantFault(t, err, ReasonCancelled, true, 0)
			elapsed(t, start, 3*time.Second)
			if !errors.Is(err, context.Canceled) {
				t.Errorf("error = %v does not unwrap to the caller's", err)
			}
			_, err = tr.Call(ctx, within(time.Second))
			wantFault(t, err, ReasonCancelled, false, 0)
			ctx, cancel = context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err = tr.Call(ctx, within(time.Second)) // a tie goes to the run
			wantFault(t, err, ReasonCancelled, true, 0)
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("error = %v does not unwrap to the caller's", err)
			}
		})
	})
	t.Run("deadline passed", func(t *testing.T) {
		inBubble(t, hold, nil, func(t *testing.T, tr *HTTPTransport) {
			_, err := tr.Call(t.Context(), within(0))
			wantFault(t, err, ReasonTimeout, false, 0)
		})
	})
	for name, first := range map[string]string{"JSON": "{", "events": ": hi\n\n"} {
		t.Run("stall "+name, func(t *testing.T) {
			inBubble(t, func(w http.ResponseWriter, r *http.Request) {
				media := map[bool]string{true: "application/json", false: "text/event-stream"}[name == "JSON"]
				w.Header().Set("Content-Type", media)
				for range 5 { // any byte resets it
					_, _ = io.WriteString(w, first)
					w.(http.Flusher).Flush()
					time.Sleep(20 * time.Second)
				}
				hold(w, r)
			}, nil, func(t *testing.T, tr *HTTPTransport) {
				start := time.Now()
				_, err := tr.Call(t.Context(), within(time.Hour))
				wantFault(t, err, ReasonTimeout, true, 0)
				elapsed(t, start, 110*time.Second)
			})
		})
	}
	t.Run("trickle", func(t *testing.T) {
		inBubble(t, func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				writeEvents(w, ":")
				select {
				case <-time.After(time.Second):
				case <-r.Context().Done():
				}
			}
		}, func(cfg *Config, _ *Options) { cfg.MaxMessageBytes = 200 }, func(t *testing.T, tr *HTTPTransport) {
			start := time.Now()
			_, err := tr.Call(t.Context(), within(30*time.Second))
			wantFault(t, err, ReasonTimeout, true, 0)
			elapsed(t, start, 30*time.Second)
			_, err = tr.Call(t.Context(), within(time.Hour)) // the bound on a line has some slack
			wantFault(t, err, ReasonLimit, true, 0)
			elapsed(t, start, (30+200+eventSlack-1)*time.Second)
		})
	})
	t.Run("stream has no stall", func(t *testing.T) {
		inBubble(t, func(w http.ResponseWriter, r *http.Request) {
			m := readHTTPMessage(r)
			writeEvents(w, ": hi\n\n")
			time.Sleep(time.Hour)
			writeEvents(w, "data: "+httpResult(m, "end")+"\n\n")
		}, func(cfg *Config, _ *Options) { cfg.MaxInFlight = 1 }, func(t *testing.T, tr *HTTPTransport) {
			listen := &Request{Method: "subscriptions/listen", Version: version2026, Stream: true}
			done := make(chan error)
			go func() {
				_, err := tr.Call(t.Context(), listen)
				done <- err
			}()
			synctest.Wait()
			if len(tr.slots) != 0 {
				t.Error("a stream holds a slot")
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	})
	t.Run("slots", func(t *testing.T) {
		inBubble(t, hold, func(cfg *Config, _ *Options) { cfg.MaxInFlight = 1 }, func(t *testing.T, tr *HTTPTransport) {
			go tr.Call(t.Context(), within(10*time.Second))
			synctest.Wait()
			start := time.Now()
			_, err := tr.Call(t.Context(), within(4*time.Second))
			wantFault(t, err, ReasonTimeout, false, 0)
			elapsed(t, start, 4*time.Second)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err = tr.Call(ctx, within(4*time.Second))
			wantFault(t, err, ReasonCancelled, false, 0)
			_, err = tr.Call(t.Context(), within(10*time.Second)) // gets the slot at 10 s
			wantFault(t, err, ReasonTimeout, true, 0)
			elapsed(t, start, 15*time.Second)
		})
	})
	t.Run("error body held", func(t *testing.T) {
		inBubble(t, func(w http.ResponseWriter, r *http.Request) {
			writeJSON(w, 503, "{")
			w.(http.Flusher).Flush()
			hold(w, r)
		}, nil, func(t *testing.T, tr *HTTPTransport) {
			start := time.Now()
			_, err := tr.Call(t.Context(), within(20*time.Second))
			wantFault(t, err, ReasonUnavailable, true, 503)
			elapsed(t, start, errorBodyWait)
		})
	})
	t.Run("stream held after the answer", func(t *testing.T) {
		inBubble(t, func(w http.ResponseWriter, r *http.Request) {
			writeEvents(w, "data: "+httpResult(readHTTPMessage(r), "ok")+"\n\n")
			hold(w, r)
		}, nil, func(t *testing.T, tr *HTTPTransport) {
			start := time.Now()
			if _, err := tr.Call(t.Context(), within(20*time.Second)); err != nil {
				t.Error(err)
			}
			elapsed(t, start, drainWait)
		})
	})
	t.Run("close", func(t *testing.T) {
		inBubble(t, hold, nil, func(t *testing.T, tr *HTTPTransport) {
			errs := make(chan error)
			for range 8 {
				go func() {
					_, err := tr.Call(t.Context(), within(time.Hour))
					errs <- err
				}()
			}
			synctest.Wait()
			start := time.Now()
			for range 2 {
				go tr.Close()
			}
			for range 8 {
				wantFault(t, <-errs, ReasonDisconnected, true, 0)
			}
			if err := tr.Close(); err != nil {
				t.Error(err)
			}
			elapsed(t, start, 0)
			_, err := tr.Call(t.Context(), within(time.Hour))
			wantFault(t, err, ReasonDisconnected, false, 0)
			wantFault(t, tr.Notify(t.Context(), within(time.Hour)), ReasonDisconnected, false, 0)
			_, err = tr.Open(t.Context(), Inbound{})
			wantFault(t, err, ReasonDisconnected, false, 0)
		})
	})
	t.Run("another protocol", func(t *testing.T) { // 101 makes the connection ours, and deaf to the context
		inBubble(t, func(w http.ResponseWriter, r *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			_, _ = io.WriteString(conn, "HTTP/1.1 101 "+canary+"\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n")
			_, _ = io.Copy(io.Discard, conn)
		}, nil, func(t *testing.T, tr *HTTPTransport) {
			start := time.Now()
			_, err := tr.Call(t.Context(), within(time.Millisecond))
			wantFault(t, err, ReasonProtocol, true, 101)
			elapsed(t, start, 0)
		})
	})
	t.Run("close with a server that hangs", func(t *testing.T) {
		inBubble(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodDelete {
				hold(w, r)
				return
			}
			w.Header().Set("Mcp-Session-Id", "s")
			writeJSON(w, 200, httpResult(readHTTPMessage(r), "ok"))
		}, nil, func(t *testing.T, tr *HTTPTransport) {
			initialize(t, tr)
			start := time.Now()
			_ = tr.Close()
			elapsed(t, start, closeWait)
		})
	})
}

// A request is its caller's again when Call returns: a session changes it for the
// next round. The race detector sees who still looks at it.
func TestHTTPRequestReused(t *testing.T) {
	tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		for b := range slices.Chunk([]byte(httpResult(readHTTPMessage(r), "ok")), 9) {
			_, _ = w.Write(b)
			w.(http.Flusher).Flush()
			time.Sleep(10 * time.Millisecond)
		}
	}, func(c *Config, _ *Options) { c.ReadTimeout = 40 * time.Millisecond }) // so that the timer runs
	req := toolCall(version2511)
	for range 3 {
		req.Deadline = time.Now().Add(time.Minute)
		if _, err := tr.Call(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		*req = *toolCall(version2511)
	}
}

func TestHTTPConnectTries(t *testing.T) {
	dials := 0
	refuse := func(context.Context, string, string) (net.Conn, error) {
		dials++
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	}
	with := func(dial func(context.Context, string, string) (net.Conn, error)) func(*Config, *Options) {
		return func(cfg *Config, o *Options) {
			o.HTTPClient.Transport = &http.Transport{DialContext: dial}
			cfg.Retry.BaseDelay = 200 * time.Millisecond
		}
	}
	call := func(tr *HTTPTransport, bound time.Duration) error {
		req := toolCall(version2511)
		req.Deadline = time.Now().Add(bound)
		_, err := tr.Call(context.Background(), req)
		return err
	}
	inBubble(t, hold, with(refuse), func(t *testing.T, tr *HTTPTransport) {
		start := time.Now()
		e := wantFault(t, call(tr, time.Minute), ReasonUnavailable, false, 0)
		if dials != 3 || e.Tries != 3 || !errors.Is(e, syscall.ECONNREFUSED) {
			t.Errorf("%d dials, error = %v", dials, e)
		}
		if got := time.Since(start); got < 590*time.Millisecond || got > 600*time.Millisecond { // the draw is the ceiling
			t.Errorf("waited %v want 600ms", got)
		}
		if want := `mcp: server "srv": tools/call: unavailable: ` + syscall.ECONNREFUSED.Error() + ` (3 tries)`; e.Error() != want {
			t.Errorf("text = %q want %q", e, want)
		}
		// No wait that the deadline would cut short; the fault stays the fault.
		dials, start = 0, time.Now()
		e = wantFault(t, call(tr, 300*time.Millisecond), ReasonUnavailable, false, 0)
		if dials != 2 || e.Tries != 2 || time.Since(start) >= 300*time.Millisecond {
			t.Errorf("%d dials in %v, error = %v", dials, time.Since(start), e)
		}
	})
	hang := func(ctx context.Context, _, _ string) (net.Conn, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	inBubble(t, hold, with(hang), func(t *testing.T, tr *HTTPTransport) {
		e := wantFault(t, call(tr, time.Second), ReasonTimeout, false, 0)
		if e.Tries != 1 {
			t.Errorf("error = %v", e)
		}
	})
	for name, err := range map[string]error{
		"no such host": &net.DNSError{Err: "no such host", Name: "pipe", IsNotFound: true},
		"reset":        &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)},
		"unknown":      errors.New(canary),
		"EOF":          io.EOF,
	} {
		t.Run(name, func(t *testing.T) {
			n := 0
			inBubble(t, hold, with(func(context.Context, string, string) (net.Conn, error) { n++; return nil, err }), func(t *testing.T, tr *HTTPTransport) {
				if e := wantFault(t, call(tr, time.Minute), ReasonUnavailable, false, 0); n != 3 {
					t.Errorf("%d dials, error = %v", n, e)
				}
			})
		})
	}
}

func TestHTTPCertificate(t *testing.T) {
	var seen atomic.Int32
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen.Add(1)
		writeJSON(w, 200, httpResult(readHTTPMessage(r), "ok"))
	}))
	srv.Config.ErrorLog = nil
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()
	tr := newHTTPTo(t, srv.URL)
	defer tr.Close()
	_, err := tr.Call(t.Context(), toolCall(version2511))
	e := wantFault(t, err, ReasonUnavailable, false, 0)
	if e.Tries != 1 || e.Detail != "certificate of an unknown authority" {
		t.Errorf("error = %v, %d tries", e, e.Tries)
	}
	pool := srv.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	for _, h2 := range []bool{true, false} {
		tr = newHTTPTo(t, srv.URL)
		tr.own.TLSClientConfig = &tls.Config{RootCAs: pool}
		tr.own.ForceAttemptHTTP2 = h2
		for range 3 {
			if _, err := tr.Call(t.Context(), toolCall(version2511)); err != nil {
				t.Fatal(err)
			}
		}
		_ = tr.Close()
	}
	plain := newHTTPTo(t, strings.Replace(srv.URL, "https", "http", 1))
	defer plain.Close()
	_, err = plain.Call(t.Context(), toolCall(version2511))
	wantFault(t, err, ReasonProtocol, true, 400) // Go's server says so in plain text
	if seen.Load() != 6 {
		t.Errorf("served %d want 6", seen.Load())
	}
}

// roundTripper is a foreign RoundTripper.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestHTTPForeignRoundTripper(t *testing.T) {
	wrapped := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	}}
	for _, tt := range []struct {
		name   string
		rt     roundTripper
		reason Reason
		sent   bool
		tries  int
	}{
		{"of its own", func(*http.Request) (*http.Response, error) { return nil, errors.New(canary) }, ReasonDisconnected, true, 1},
		{"around net/http", wrapped.RoundTrip, ReasonUnavailable, false, 3},
	} {
		tr := newHTTPTo(t, "http://user:"+canary+"@host/?k="+canary, func(_ *Config, o *Options) { o.HTTPClient = &http.Client{Transport: tt.rt} })
		_, err := tr.Call(t.Context(), toolCall(version2511))
		if e := wantFault(t, err, tt.reason, tt.sent, 0); e.Tries != tt.tries {
			t.Errorf("%s: %d tries want %d", tt.name, e.Tries, tt.tries)
		}
		_ = tr.Close()
	}
}

func TestHTTPConfig(t *testing.T) {
	for _, endpoint := range []string{"", "host", "/mcp", "ftp://host/", "http://", "http://" + canary + ":x/", "://", "http://a b/", "https:opaque"} {
		_, err := newHTTPTransport(Config{Name: "srv", Endpoint: endpoint}.withDefaults(), &Options{})
		var ce *ConfigError
		if !errors.As(err, &ce) || ce.Key != "endpoint" || ce.Server != "srv" || strings.Contains(err.Error(), canary) {
			t.Errorf("endpoint %q: error = %v", endpoint, err)
		}
	}
}

// TestHTTPResume has streams break and go on elsewhere.
func TestHTTPResume(t *testing.T) {
	type step struct {
		on     string // Last-Event-ID of the GET
		after  time.Duration
		status int
		events string
	}
	for _, tt := range []struct {
		name    string
		version string
		first   string
		steps   []step
		reason  Reason // "": the answer
	}{
		{"default delay", version2511, "id: a\ndata:\n\n", []step{{"a", 1124999999, 200, "data: ANSWER\n\n"}}, ""},
		{"retry, comments", version2506, "id: a\nretry: 500\ndata:\n\n: x\n\n", []step{{"a", 562500000, 200, ": y\n\nid: b\ndata: ANSWER\n\n"}}, ""},
		{"twice", version2503, "retry: 80\nid: a\n\n", []step{
			{"a", 90 * time.Millisecond, 200, "id: b\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"n\"}\n\n"},
			{"b", 90 * time.Millisecond, 200, "data: ANSWER\n\n"}}, ""},
		{"server is away for a while", version2511, "retry: 80\nid: a\n\n", []step{
			{"a", 90 * time.Millisecond, 503, ""},
			{"a", 2250 * time.Millisecond, 200, "data: ANSWER\n\n"}}, ""},
		{"gone", version2511, "retry: 80\nid: a\n\n", []step{{"a", 90 * time.Millisecond, 404, ""}}, ReasonDisconnected},
		{"not offered", version2511, "retry: 80\nid: a\n\n", []step{{"a", 90 * time.Millisecond, 405, ""}}, ReasonDisconnected},
		{"no id", version2511, "data: {\"jsonrpc\":\"2.0\",\"method\":\"n\"}\n\n", nil, ReasonDisconnected},
		{"id not whole", version2511, "id: a\n", nil, ReasonDisconnected},
		{"id cleared", version2511, "id: a\n\nid\n\n", nil, ReasonDisconnected},
		{"id no header carries", version2511, "id: \u00e9\n\n", nil, ReasonDisconnected},
		{"modern", version2026, "id: a\ndata:\n\n", nil, ReasonDisconnected},
		{"oldest", version2411, "id: a\ndata:\n\n", nil, ReasonDisconnected},
		{"retry past the deadline", version2511, "id: a\nretry: 3600000\n\n", nil, ReasonDisconnected},
		{"no progress", version2511, "id: a\nretry: 0\n\n", []step{
			{"a", 0, 200, ""}, {"a", 2250 * time.Millisecond, 200, ""}, {"a", 4500 * time.Millisecond, 200, ""},
			{"a", 9 * time.Second, 200, ""}, {"a", 18 * time.Second, 200, ""}}, ReasonDisconnected},
	} {
		t.Run(tt.name, func(t *testing.T) {
			steps, posts := tt.steps, 0
			var id json.RawMessage
			var last time.Time
			inBubble(t, func(w http.ResponseWriter, r *http.Request) {
				defer func() { last = time.Now() }()
				if r.Method == http.MethodPost {
					m := readHTTPMessage(r)
					if m.Method == "initialize" {
						w.Header().Set("Mcp-Session-Id", "s")
						writeJSON(w, 200, httpResult(m, ""))
						return
					}
					posts++
					id = m.ID
					writeEvents(w, tt.first)
					return
				}
				if r.Method == http.MethodDelete {
					return
				}
				if len(steps) == 0 {
					t.Errorf("GET, Last-Event-ID %q", r.Header.Get("Last-Event-Id"))
					return
				}
				s := steps[0]
				steps = steps[1:]
				if got := r.Header.Get("Last-Event-Id"); got != s.on || r.Header.Get("Mcp-Session-Id") != "s" || r.Header.Get("Mcp-Protocol-Version") != tt.version {
					t.Errorf("GET after %q with %v", got, r.Header)
				}
				if got := time.Since(last).Round(time.Millisecond); got != s.after.Round(time.Millisecond) {
					t.Errorf("GET after %v want %v", got, s.after)
				}
				if s.status != 200 {
					w.WriteHeader(s.status)
					return
				}
				writeEvents(w, strings.Replace(s.events, "ANSWER", `{"jsonrpc":"2.0","id":`+string(id)+`,"result":{"text":"ok"}}`, 1))
			}, nil, func(t *testing.T, tr *HTTPTransport) {
				initialize(t, tr)
				req := toolCall(tt.version)
				req.Deadline = time.Now().Add(10 * time.Minute)
				result, err := tr.Call(t.Context(), req)
				if tt.reason == "" && (err != nil || string(result) != `{"text":"ok"}`) {
					t.Errorf("Call = %s, %v", result, err)
				} else if tt.reason != "" {
					wantFault(t, err, tt.reason, true, 0)
				}
				if len(steps) > 0 || posts != 1 {
					t.Errorf("%d GETs did not come; %d POSTs", len(steps), posts)
				}
			})
		})
	}
}

// TestHTTPServerRequests answers the server while its stream goes on.
func TestHTTPServerRequests(t *testing.T) {
	answers, begun := make(chan httpMessage, 20), make(chan bool)
	tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
		m := readHTTPMessage(r)
		switch m.Method {
		case "initialize":
			w.Header().Set("Mcp-Session-Id", "s")
			writeJSON(w, 200, httpResult(m, ""))
		case "":
			if r.Method == http.MethodDelete {
				return
			}
			if r.Header.Get("Mcp-Session-Id") != "s" || r.Header.Get("Mcp-Protocol-Version") != version2511 {
				t.Errorf("answer with %v", r.Header)
			}
			answers <- m
			w.WriteHeader(202)
		case "tools/call":
			writeEvents(w,
				`data: {"jsonrpc":"2.0","id":"slow","method":"elicitation/create","params":{}}`+"\n\n",
				`data: {"jsonrpc":"2.0","id":1,"method":"ping"}`+"\n\n",
				`data: {"jsonrpc":"2.0","id":2,"method":"fail"}`+"\n\n",
				`data: {"jsonrpc":"2.0","id":3,"method":"refuse"}`+"\n\n",
				`data: {"jsonrpc":"2.0","id":4,"method":"silent"}`+"\n\n",
				`data: {"jsonrpc":"2.0","id":5,"method":"huge"}`+"\n\n",
				`data: {"jsonrpc":"2.0","id":null,"method":"ping"}`+"\n\n")
			<-begun
			writeEvents(w,
				`data: {"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"slow"}}`+"\n\n",
				"data: "+httpResult(m, "ok")+"\n\n")
		}
	}, func(c *Config, _ *Options) { c.MaxMessageBytes = 4 << 10 })
	ended := make(chan error, 1)
	inbound(tr, Inbound{Request: func(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
		switch method {
		case "ping":
			return json.RawMessage(`{}`), nil
		case "fail":
			return nil, errors.New("secret")
		case "refuse":
			return nil, &RPCError{Code: -32601, Message: "no"}
		case "silent":
			return nil, errNoAnswer
		case "huge":
			return json.RawMessage(`"` + strings.Repeat("x", 4<<10-3) + `"`), nil
		}
		begun <- true
		<-ctx.Done()
		ended <- ctx.Err()
		return json.RawMessage(`{}`), nil
	}})
	initialize(t, tr)
	if _, err := tr.Call(t.Context(), toolCall(version2511)); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil {
		t.Error("a withdrawn request was not cancelled")
	}
	got := map[string]string{}
	for range 4 {
		select {
		case m := <-answers:
			got[string(m.ID)] = string(m.Result) + string(m.Error)
		case <-time.After(5 * time.Second):
			t.Fatalf("no more answers than %v", got)
		}
	}
	for id, want := range map[string]string{"1": `{}`, "2": "-32603", "3": "-32601", "5": "-32603"} {
		if !strings.Contains(got[id], want) || strings.Contains(got[id], "secret") {
			t.Errorf("answer to %s = %q want %s in it", id, got[id], want)
		}
	}
	_ = tr.Close()
	if len(answers) > 0 {
		t.Errorf("answer to a withdrawn or silent request: %s", (<-answers).ID)
	}
}

// TestHTTPServerRequestFlood keeps handlers to eight, and ends them with Close.
// What a server asked in a session that is gone is not answered in the next, which
// may ask something else under the same id.
func TestHTTPServerRequestOfLostSession(t *testing.T) {
	var sessions, calls atomic.Int32
	answers, begun, asked := make(chan string, 20), make(chan bool), make(chan bool)
	tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
		m := readHTTPMessage(r)
		session := r.Header.Get("Mcp-Session-Id")
		switch {
		case m.Method == "initialize":
			w.Header().Set("Mcp-Session-Id", fmt.Sprint("s", sessions.Add(1)))
			writeJSON(w, 200, httpResult(m, ""))
		case m.Method == "x/lose":
			w.WriteHeader(404)
		case m.Method == "tools/call":
			question := fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"method":"elicitation/create","params":{"n":%d}}`, calls.Add(1))
			writeEvents(w, "data: "+question+"\n\n")
			<-asked
			writeEvents(w, "data: "+httpResult(m, "ok")+"\n\n")
		case m.Result != nil:
			answers <- session + string(m.Result)
			w.WriteHeader(202)
		}
	})
	first := make(chan bool)
	inbound(tr, Inbound{Request: func(_ context.Context, _ string, params json.RawMessage) (json.RawMessage, error) {
		begun <- true
		if string(member(params, "n")) == "1" {
			<-first // as a person who takes a while, and has no context
		}
		return params, nil
	}})
	initialize(t, tr)
	var wg sync.WaitGroup
	call := func() { tr.Call(t.Context(), toolCall(version2511)) }
	wg.Go(call)
	<-begun
	_, err := tr.Call(t.Context(), &Request{Method: "x/lose", Version: version2511})
	wantFault(t, err, ReasonDisconnected, false, 404)
	initialize(t, tr)
	wg.Go(call)
	select {
	case <-begun:
	case <-time.After(5 * time.Second):
		t.Error("the question of the new session was dropped")
	}
	close(first)
	if got := <-answers; got != `s2{"n":2}` {
		t.Errorf("answer %s", got)
	}
	close(asked)
	wg.Wait()
	_ = tr.Close()
	if len(answers) > 0 {
		t.Errorf("another answer: %s", <-answers)
	}
}

func TestHTTPServerRequestFlood(t *testing.T) {
	var now, most, all atomic.Int32
	inBubble(t, func(w http.ResponseWriter, r *http.Request) {
		if m := readHTTPMessage(r); m.Method != "" {
			for i := range 1000 {
				writeEvents(w, fmt.Sprintf(`data: {"jsonrpc":"2.0","id":%d,"method":"x"}`+"\n\n", i))
			}
			writeEvents(w, "data: "+httpResult(m, "ok")+"\n\n")
		}
	}, nil, func(t *testing.T, tr *HTTPTransport) {
		inbound(tr, Inbound{Request: func(ctx context.Context, _ string, _ json.RawMessage) (json.RawMessage, error) {
			all.Add(1)
			most.Store(max(most.Load(), now.Add(1)))
			defer now.Add(-1)
			<-ctx.Done()
			return nil, ctx.Err()
		}})
		if _, err := tr.Call(t.Context(), toolCall(version2511)); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if all.Load() != maxHandlers || len(tr.inbox.asked) != maxAsked {
			t.Errorf("%d handlers, %d requests kept", all.Load(), len(tr.inbox.asked))
		}
		_ = tr.Close()
		if now.Load() != 0 || most.Load() > maxHandlers {
			t.Errorf("%d handlers left, %d at once", now.Load(), most.Load())
		}
	})
}

func TestHTTPCancelled(t *testing.T) {
	for _, tt := range []struct {
		method, version string
		want            bool
	}{
		{"tools/call", version2511, true}, {"tools/call", version2503, true}, {"tools/call", version2026, false},
		{"initialize", "", false}, {"server/discover", version2026, false},
	} {
		var mu sync.Mutex
		var ids []string
		inBubble(t, func(w http.ResponseWriter, r *http.Request) {
			m := readHTTPMessage(r)
			mu.Lock()
			if m.Method == tt.method {
				ids = append(ids, string(m.ID))
			} else {
				ids = append(ids, m.Method+string(m.Params))
			}
			mu.Unlock()
			hold(w, r)
		}, nil, func(t *testing.T, tr *HTTPTransport) {
			start := time.Now()
			_, err := tr.Call(t.Context(), &Request{Method: tt.method, Version: tt.version, Deadline: start.Add(time.Second)})
			wantFault(t, err, ReasonTimeout, true, 0)
			if time.Since(start) != time.Second {
				t.Errorf("%s: took %v: the caller waits for the cancellation", tt.method, time.Since(start))
			}
			_ = tr.Close() // which lets the cancellation go out
			mu.Lock()
			defer mu.Unlock()
			want := ids[:1]
			if tt.want {
				want = []string{ids[0], `notifications/cancelled{"requestId":` + ids[0] + `}`}
			}
			if !slices.Equal(ids, want) {
				t.Errorf("%s %s: the server saw %q want %q", tt.method, tt.version, ids, want)
			}
		})
	}
}

func TestHTTPListen(t *testing.T) {
	var gets []string
	var begun time.Time
	live := true
	inBubble(t, func(w http.ResponseWriter, r *http.Request) {
		m := readHTTPMessage(r)
		switch {
		case m.Method == "initialize":
			w.Header().Set("Mcp-Session-Id", "s")
			writeJSON(w, 200, httpResult(m, ""))
		case r.Method == http.MethodPost && !live:
			w.WriteHeader(404)
		case r.Method == http.MethodGet:
			gets = append(gets, fmt.Sprintf("%s %v", r.Header.Get("Last-Event-Id"), time.Since(begun).Round(time.Millisecond)))
			switch len(gets) {
			case 1:
				writeEvents(w, "id: a\nretry: 80\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"n1\"}\n\n", "data: "+canary+"\n\n")
			case 2, 3:
				w.WriteHeader(503)
			case 4:
				writeEvents(w, "data: {\"jsonrpc\":\"2.0\",\"method\":\"n2\"}\n\n")
				hold(w, r)
			default:
				w.WriteHeader(405)
			}
		}
	}, nil, func(t *testing.T, tr *HTTPTransport) {
		var notes []string
		inbound(tr, Inbound{Notify: func(method string, _ json.RawMessage) { notes = append(notes, method) }})
		initialize(t, tr)
		begun = time.Now()
		tr.listen(t.Context(), version2511)
		tr.listen(t.Context(), version2511)
		time.Sleep(time.Hour)
		synctest.Wait()
		if want := []string{" 0s", "a 90ms", "a 2.34s", "a 6.84s"}; !slices.Equal(gets, want) {
			t.Errorf("GETs %q want %q", gets, want)
		}
		if !slices.Equal(notes, []string{"n1", "n2"}) {
			t.Errorf("notifications %q", notes)
		}
		live = false
		_, err := tr.Call(t.Context(), toolCall(version2511))
		wantFault(t, err, ReasonDisconnected, false, 404)
		synctest.Wait()
		if tr.listening != nil || len(tr.calls) != 0 {
			t.Error("the stream of a lost session goes on")
		}
		live = true
		initialize(t, tr)
		tr.listen(t.Context(), version2511)
		synctest.Wait()
		if len(gets) != 5 || !strings.HasPrefix(gets[4], " ") || tr.listening != nil {
			t.Errorf("GETs %q: want one more, from the beginning", gets)
		}
		tr.listen(t.Context(), version2511)
		time.Sleep(time.Hour)
		synctest.Wait()
		if len(gets) != 6 {
			t.Errorf("GETs %q: a stream that is not offered was asked for again", gets)
		}
	})
}

// A server that ends each stream after an event, and wants us back at once, does
// not set our pace.
func TestHTTPReconnectFloor(t *testing.T) {
	gets := 0
	inBubble(t, func(w http.ResponseWriter, r *http.Request) {
		event := "id: a\nretry: 0\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"n\"}\n\n"
		if r.Method == http.MethodGet {
			gets++
		} else if m := readHTTPMessage(r); m.Method == "initialize" {
			writeJSON(w, 200, httpResult(m, ""))
			return
		}
		writeEvents(w, event)
	}, func(c *Config, _ *Options) { c.ReadTimeout = time.Hour }, func(t *testing.T, tr *HTTPTransport) {
		initialize(t, tr)
		req := toolCall(version2511)
		req.Deadline = time.Now().Add(time.Second)
		_, err := tr.Call(t.Context(), req)
		wantFault(t, err, ReasonDisconnected, true, 0)
		synctest.Wait()
		if gets < 15 || gets > 21 {
			t.Errorf("%d GETs for a call of a second", gets)
		}
		gets = 0
		tr.listen(t.Context(), version2511)
		time.Sleep(time.Second)
		synctest.Wait()
		if gets < 15 || gets > 22 {
			t.Errorf("%d GETs in a second of listening", gets)
		}
	})
}

// A server without a stream of its own may have no route for GET either. That is
// no word about the session.
func TestHTTPListenRefused(t *testing.T) {
	for name, refuse := range map[string]func(w http.ResponseWriter){
		"404": func(w http.ResponseWriter) { w.WriteHeader(404) },
		"404 with an error": func(w http.ResponseWriter) {
			writeJSON(w, 404, `{"jsonrpc":"2.0","id":null,"error":{"code":-32601,"message":"`+canary+`"}}`)
		},
		"400 with an error": func(w http.ResponseWriter) {
			writeJSON(w, 400, `{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"`+canary+`"}}`)
		},
	} {
		t.Run(name, func(t *testing.T) {
			gets := 0
			tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
				m := readHTTPMessage(r)
				switch {
				case r.Method == http.MethodGet:
					gets++
					refuse(w)
				case m.Method == "initialize":
					w.Header().Set("Mcp-Session-Id", "s")
					writeJSON(w, 200, httpResult(m, ""))
				default:
					writeJSON(w, 200, httpResult(m, "ok"))
				}
			})
			initialize(t, tr)
			tr.listen(t.Context(), version2511)
			if _, err := tr.Call(t.Context(), toolCall(version2511)); err != nil || gets != 1 {
				t.Errorf("Call after %d refused GETs: %v", gets, err)
			}
		})
	}
}

// oldServer is a server of 2024-11-05.
type oldServer struct {
	mu       sync.Mutex
	streams  int
	posts    int
	out      chan string
	stop     chan struct{}
	endpoint string
}

func (s *oldServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.Method == http.MethodGet:
		s.mu.Lock()
		s.streams++
		out, stop := make(chan string, 100), make(chan struct{})
		s.out, s.stop = out, stop
		s.mu.Unlock()
		writeEvents(w, "event: endpoint\ndata: "+s.endpoint+"\n\n")
		for {
			select {
			case m := <-out:
				writeEvents(w, "event: message\ndata: "+m+"\n\n")
			case <-stop:
				return
			case <-r.Context().Done():
				return
			}
		}
	case r.URL.Path == "/messages" && r.URL.Query().Get("sessionId") == "9a":
		m := readHTTPMessage(r)
		s.mu.Lock()
		s.posts++
		out, stop := s.out, s.stop
		s.mu.Unlock()
		if r.Header.Get("Mcp-Protocol-Version") != "" || r.Header.Get("Mcp-Session-Id") != "" {
			w.WriteHeader(500)
			return
		}
		switch {
		case m.Method == "die":
			close(stop)
		case len(m.ID) > 0:
			out <- canary + " is no message"
			out <- httpResult(m, m.Method)
		}
		w.WriteHeader(202)
		if m.Method == "held" { // the reply to a POST does not end
			w.(http.Flusher).Flush()
			hold(w, r)
		}
	default:
		w.WriteHeader(405)
	}
}

func TestHTTPOldTransport(t *testing.T) {
	s := &oldServer{endpoint: "/messages?sessionId=9a"}
	tr, _ := newHTTPTest(t, s.ServeHTTP)
	for round := 1; round <= 2; round++ {
		initialize(t, tr)
		if err := tr.Notify(t.Context(), &Request{Method: "notifications/initialized", Version: version2411}); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for i := range 32 {
			wg.Go(func() {
				method := "m" + strconv.Itoa(i)
				result, err := tr.Call(t.Context(), &Request{Method: method, Version: version2411})
				if err != nil || string(result) != `{"text":"`+method+`"}` {
					t.Errorf("%s = %s, %v", method, result, err)
				}
			})
		}
		wg.Wait()
		if _, err := tr.Call(t.Context(), &Request{Method: "held", Version: version2411, Deadline: time.Now().Add(5 * time.Second)}); err != nil {
			t.Errorf("an answer on the stream beside a reply without end: %v", err)
		}
		tr.listen(t.Context(), version2411) // has nothing to listen to
		if fresh, _ := tr.Open(t.Context(), Inbound{}); fresh {
			t.Error("fresh while the stream stands")
		}
		_, err := tr.Call(t.Context(), &Request{Method: "die", Version: version2411})
		wantFault(t, err, ReasonDisconnected, true, 0)
		_, err = tr.Call(t.Context(), toolCall(version2411))
		wantFault(t, err, ReasonDisconnected, false, 0)
		if fresh, _ := tr.Open(t.Context(), Inbound{}); !fresh || s.streams != round {
			t.Errorf("not fresh after the stream was lost; %d streams", s.streams)
		}
	}
}

func TestHTTPOldTransportRefused(t *testing.T) {
	for _, tt := range []struct {
		name   string
		post   int
		get    string // a status, or the events
		detail string
		gets   int
	}{
		{"no stream", 405, "404", "POST refused, and GET: HTTP status 404", 1},
		{"not allowed either", 404, "405", "POST refused, and GET: HTTP status 405", 1},
		{"another event", 400, "data: x\n\n", "POST refused, and GET: HTTP status 200 (no endpoint event)", 1},
		{"another host", 405, "event: endpoint\ndata: http://" + canary + "/\n\n", "POST refused, and GET: HTTP status 200 (endpoint on another origin)", 1},
		{"another scheme", 405, "event: endpoint\ndata: https://HOST/\n\n", "POST refused, and GET: HTTP status 200 (endpoint on another origin)", 1},
		{"ends at once", 405, "", "POST refused, and GET: HTTP status 200 (no endpoint event)", 1},
		{"unauthorized", 401, "", "", 0},
		{"forbidden", 403, "", "", 0},
		{"busy", 429, "", "", 0},
		{"down", 503, "", "", 0},
	} {
		gets := 0
		tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost {
				w.WriteHeader(tt.post)
				return
			}
			gets++
			if status, err := strconv.Atoi(tt.get); err == nil {
				w.WriteHeader(status)
				return
			}
			writeEvents(w, strings.Replace(tt.get, "HOST", r.Host, 1))
		})
		_, err := tr.Call(t.Context(), &Request{Method: "initialize"})
		var e *TransportError
		if !errors.As(err, &e) || e.Status != tt.post || e.Detail != tt.detail || gets != tt.gets || strings.Contains(e.Error(), canary) {
			t.Errorf("%s: %d GETs, error = %v", tt.name, gets, err)
		}
	}
	// A modern server that cannot speak our revision is not an old one.
	tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			t.Error("GET")
		}
		writeJSON(w, 400, fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"error":{"code":-32022,"message":"m"}}`, readHTTPMessage(r).ID))
	})
	var rpc *RPCError
	if _, err := tr.Call(t.Context(), &Request{Method: "initialize"}); !errors.As(err, &rpc) {
		t.Errorf("error = %v", err)
	}
	// A stream that never says where to post is bounded by the call.
	inBubble(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			w.WriteHeader(405)
			return
		}
		writeEvents(w, ": hi\n\n")
		hold(w, r)
	}, nil, func(t *testing.T, tr *HTTPTransport) {
		start := time.Now()
		_, err := tr.Call(t.Context(), &Request{Method: "initialize", Deadline: start.Add(time.Second)})
		wantFault(t, err, ReasonTimeout, true, 0)
		synctest.Wait()
		if time.Since(start) != time.Second || len(tr.calls) != 0 {
			t.Errorf("took %v, %d calls left", time.Since(start), len(tr.calls))
		}
	})
}

// TestHTTPLeaks closes a transport that does everything at once.
func TestHTTPLeaks(t *testing.T) {
	before := runtime.NumGoroutine()
	for range 10 {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			m := readHTTPMessage(r)
			switch m.Method {
			case "initialize":
				w.Header().Set("Mcp-Session-Id", "s")
				writeJSON(w, 200, httpResult(m, ""))
			case "json":
				writeJSON(w, 200, httpResult(m, "ok"))
			case "ask":
				writeEvents(w, `data: {"jsonrpc":"2.0","id":1,"method":"x"}`+"\n\n", "data: "+httpResult(m, "ok")+"\n\n")
			case "":
				if r.Method == http.MethodDelete {
					return
				}
				writeEvents(w, "id: 1\n\n")
				hold(w, r)
			default:
				hold(w, r)
			}
		}))
		tr := newHTTPTo(t, srv.URL)
		inbound(tr, Inbound{Request: func(ctx context.Context, _ string, _ json.RawMessage) (json.RawMessage, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}})
		initialize(t, tr)
		tr.listen(t.Context(), version2511)
		var wg sync.WaitGroup
		for i := range 24 {
			wg.Go(func() {
				method := []string{"json", "ask", "hang"}[i%3]
				_, _ = tr.Call(t.Context(), &Request{Method: method, Version: version2511, Deadline: time.Now().Add(20 * time.Millisecond)})
			})
		}
		wg.Wait()
		_ = tr.Close()
		if n := len(tr.calls); n != 0 {
			t.Errorf("%d calls left", n)
		}
		srv.CloseClientConnections()
		srv.Close()
	}
	for i := 0; runtime.NumGoroutine() > before; i++ {
		if i == 100 {
			buf := make([]byte, 1<<16)
			t.Fatalf("%d goroutines, %d before\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
		}
		time.Sleep(20 * time.Millisecond) // net/http's own take a moment
	}
}

func TestHTTPHeaderValue(t *testing.T) {
	for s, want := range map[string]string{
		"":                   "",
		"us-west1":           "us-west1",
		"a b":                "a b",
		"Hello, 世界":          "=?base64?SGVsbG8sIOS4lueVjA==?=",
		" padded ":           "=?base64?IHBhZGRlZCA=?=",
		"line1\nline2":       "=?base64?bGluZTEKbGluZTI=?=",
		"a\tb":               "=?base64?YQli?=",
		"=?base64?literal?=": "=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?=",
		"=?base64?literal":   "=?base64?literal",
		"\x7f":               "=?base64?fw==?=",
	} {
		if got := encodeHeaderValue(s); got != want {
			t.Errorf("encodeHeaderValue(%q) = %q want %q", s, got, want)
		}
	}
}

func FuzzHeaderValue(f *testing.F) {
	for _, s := range []string{"", "a", " a", "a ", "\t", "é", "\xff", "a\x00b", "=?base64??=", "=?base64?a?=", "\u00a0", "\u2028x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		v := encodeHeaderValue(s)
		for i := range len(v) {
			if v[i] < ' ' || v[i] > '~' {
				t.Fatalf("encodeHeaderValue(%q) = %q: byte %d", s, v, i)
			}
		}
		if strings.Trim(v, " \t") != v {
			t.Fatalf("encodeHeaderValue(%q) = %q: HTTP trims it", s, v)
		}
		got := v
		if b, ok := strings.CutPrefix(v, "=?base64?"); ok && strings.HasSuffix(b, "?=") {
			raw, err := base64.StdEncoding.DecodeString(strings.TrimSuffix(b, "?="))
			if err != nil {
				t.Fatal(err)
			}
			got = string(raw)
		}
		var want string // what the message says
		b, _ := json.Marshal(s)
		_ = json.Unmarshal(b, &want)
		if got != want {
			t.Fatalf("%q decodes to %q want %q", v, got, want)
		}
	})
}

// sseEvent is what a stream comes down to.
type sseEvent struct{ name, data, id string }

// plainEvents parses a whole stream by the letter of the standard.
func plainEvents(s string) (events []sseEvent, lastID string, retry time.Duration) {
	retry = -1
	s = strings.TrimPrefix(s, "\uFEFF")
	s = strings.ReplaceAll(s, "\r\n", "\n")
	s = strings.ReplaceAll(s, "\r", "\n")
	lines := strings.Split(s, "\n")
	var data, name, id string
	for _, line := range lines[:len(lines)-1] { // what has no end is not a line yet
		if line == "" {
			lastID = id
			if data != "" {
				events = append(events, sseEvent{name, strings.TrimSuffix(data, "\n"), id})
			}
			data, name = "", ""
			continue
		}
		field, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch field {
		case "data":
			data += value + "\n"
		case "event":
			name = value
		case "id":
			if !strings.Contains(value, "\x00") {
				id = value
			}
		case "retry":
			if ms, err := strconv.ParseUint(value, 10, 31); err == nil {
				retry = time.Duration(ms) * time.Millisecond
			}
		}
	}
	return events, lastID, retry
}

func FuzzSSE(f *testing.F) {
	for _, s := range []string{
		"", "\n", "\r", "\uFEFF", "\uFEFFdata: x\n\n", "data: a\n\ndata:b\r\n\r\ndata\r\r", "data: a\ndata: b\ndata\ndata:\n\n",
		"id: 1\nretry: 5\n\n: c\n:\nevent: e\nid\ndata: x\n\n", "data: x\n", "id: a\x00b\n\nretry: -1\nretry: 1x\n\n", "data: a\r\n\ndata: b\n\r\n",
		"event: a\n\ndata: x\n\n", "data:  two\n\n", ":data: x\n\n\r\n\n", "data: \uFEFF\n\n",
	} {
		f.Add(s, uint8(0), uint8(1))
		f.Add(s, uint8(3), uint8(40))
	}
	f.Fuzz(func(t *testing.T, s string, chunk, limit uint8) {
		if len(s) > 1<<12 {
			return
		}
		want, id, retry := plainEvents(s)
		src := io.Reader(strings.NewReader(s))
		switch {
		case chunk == 0:
			src = iotest.DataErrReader(src)
		case chunk == 1:
			src = iotest.OneByteReader(src)
		default:
			src = &chunkReader{src, int(chunk)}
		}
		check := func(max int) (whole bool) {
			r := eventReader{r: src, max: max, retry: -1}
			for i := 0; ; i++ {
				name, data, err := r.next()
				if len(r.buf) > max+eventSlack {
					t.Fatalf("holds %d bytes, the bound is %d", len(r.buf), max)
				}
				if err == errTooBig {
					return false
				}
				if err != nil {
					if i != len(want) || r.id != id || r.retry != retry {
						t.Fatalf("%q: %d events, id %q, retry %v want %d, %q, %v", s, i, r.id, r.retry, len(want), id, retry)
					}
					return true
				}
				if got := (sseEvent{name, string(data), r.id}); i >= len(want) || got != want[i] {
					t.Fatalf("%q: event %d = %q want %q", s, i, got, want)
				}
			}
		}
		if limit == 0 {
			if !check(1 << 16) {
				t.Fatalf("%q: over a bound that it is under", s)
			}
			return
		}
		check(int(limit))
	})
}

// chunkReader gives at most n bytes at a time.
type chunkReader struct {
	r io.Reader
	n int
}

func (c *chunkReader) Read(p []byte) (int, error) { return c.r.Read(p[:min(len(p), c.n)]) }

// TestSSECost reads streams that are made to be slow.
func TestSSECost(t *testing.T) {
	const size = 1 << 20
	for name, unit := range map[string]string{"CR": "\r", "LF": "\n", "comments": ":\n", "data": "data\r", "bytes": "x"} {
		s := strings.Repeat(unit, size/len(unit))
		start := time.Now()
		r := eventReader{r: strings.NewReader("data: " + strings.Repeat("y", size/2) + "\n\n" + s), max: size}
		for {
			if _, _, err := r.next(); err != nil {
				break
			}
		}
		if d := time.Since(start); d > 5*time.Second {
			t.Errorf("%s: %v for %d bytes", name, d, size)
		}
	}
}

// TestHTTPAllocs compares an echo with the least that net/http takes for it. What
// reading and writing JSON takes is not ours, and is counted apart.
func TestHTTPAllocs(t *testing.T) {
	for _, media := range []string{"application/json", "text/event-stream"} {
		text := strings.Repeat("x", 100)
		reply := []byte(httpResult(httpMessage{ID: json.RawMessage("7")}, text))
		events := media == "text/event-stream"
		if events {
			reply = []byte("data: " + string(reply) + "\n\n")
		}
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header()["Content-Type"] = []string{media}
			_, _ = w.Write(reply)
		}))
		tr := newHTTPTo(t, srv.URL)
		params := json.RawMessage(`{"name":"echo","arguments":{"text":"` + text + `"}}`)
		ours := testing.AllocsPerRun(500, func() {
			tr.lastID.Store(6)
			req := &Request{Method: "tools/call", Version: version2511, Params: params, Deadline: time.Now().Add(time.Minute), to: dropped{}}
			if _, err := tr.Call(context.Background(), req); err != nil {
				t.Fatal(err)
			}
		})
		body := appendRequest(nil, 7, "tools/call", params)
		ours -= testing.AllocsPerRun(100, func() {
			body = appendRequest(body[:0], 7, "tools/call", params)
			env, _ := scanEnvelope(bytes.TrimPrefix(reply, []byte("data: ")))
			_, _ = intID(env.id)
		})
		client := &http.Client{Transport: ownHTTPTransport(context.Background(), 4)}
		floor := testing.AllocsPerRun(500, func() {
			req, _ := http.NewRequest(http.MethodPost, srv.URL, bytes.NewReader(body))
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("Accept", "application/json, text/event-stream")
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		})
		t.Logf("%s: %.0f allocations, the floor has %.0f, the server included", media, ours, floor)
		if ours > floor+6 {
			t.Errorf("%s: %.0f allocations, the floor has %.0f", media, ours, floor)
		}
		client.CloseIdleConnections()
		_ = tr.Close()
		srv.Close()
	}
}

// BenchmarkHTTPCall compares calls with the least that net/http takes for them.
func BenchmarkHTTPCall(b *testing.B) {
	for _, size := range []int{100, 1 << 20} {
		for _, media := range []string{"application/json", "text/event-stream"} {
			reply := []byte(httpResult(httpMessage{ID: json.RawMessage("7")}, strings.Repeat("x", size)))
			if media == "text/event-stream" {
				reply = []byte("data: " + string(reply) + "\n\n")
			}
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header()["Content-Type"] = []string{media}
				if media == "application/json" {
					w.Header()["Content-Length"] = []string{strconv.Itoa(len(reply))}
				}
				_, _ = w.Write(reply)
			}))
			params := json.RawMessage(`{"name":"echo","arguments":{"text":"x"}}`)
			b.Run(fmt.Sprintf("%s/%d", media, size), func(b *testing.B) {
				tr, err := newHTTPTransport(Config{Name: "srv", Endpoint: srv.URL}.withDefaults(), &Options{})
				if err != nil {
					b.Fatal(err)
				}
				defer tr.Close()
				b.ReportAllocs()
				for b.Loop() {
					tr.lastID.Store(6)
					req := &Request{Method: "tools/call", Version: version2511, Params: params, Deadline: time.Now().Add(time.Minute), to: dropped{}}
					if _, err := tr.Call(context.Background(), req); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.Run(fmt.Sprintf("floor/%s/%d", media, size), func(b *testing.B) {
				client := &http.Client{Transport: ownHTTPTransport(context.Background(), 4)}
				defer client.CloseIdleConnections()
				body := appendRequest(nil, 7, "tools/call", params)
				b.ReportAllocs()
				for b.Loop() {
					resp, err := client.Post(srv.URL, "application/json", bytes.NewReader(body))
					if err != nil {
						b.Fatal(err)
					}
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
			})
			srv.Close()
		}
	}
}

// A panicker is a result that panics when it is decoded.
type panicker struct{}

func (*panicker) UnmarshalJSON([]byte) error { panic("not decoded") }

// TestHTTPPanicOfReceiver has the user's own decoding panic: of the buffers that
// were read into, none is in use twice after that.
func TestHTTPPanicOfReceiver(t *testing.T) {
	for _, stream := range []bool{false, true} {
		tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
			body := httpResult(readHTTPMessage(r), strings.Repeat("x", smallestSpare*3/2))
			if stream {
				writeEvents(w, "data: "+body+"\n\n")
				return
			}
			w.Header().Set("Content-Type", "application/json")
			w.(http.Flusher).Flush() // no length
			_, _ = io.WriteString(w, body)
		})
		s := NewSession(tr, Config{Name: "s", Protocol: version2026}, nil)
		s.link.Store(&link{version: version2026, info: &ServerInfo{}})
		tr.kept.spares.give(make([]byte, 0, smallestSpare))
		func() {
			defer func() { _ = recover() }()
			_ = s.Request(t.Context(), "x", nil, &panicker{})
			t.Error("nothing panicked")
		}()
		seen := map[*byte]bool{}
		for range 4 {
			b := tr.kept.spares.take(1)[:1]
			if seen[&b[0]] {
				t.Errorf("stream %v: a buffer has two owners", stream)
			}
			seen[&b[0]] = true
		}
	}
}

// TestHTTPTraceOfCaller has the caller trace a long request.
func TestHTTPTraceOfCaller(t *testing.T) {
	tr, _ := newHTTPTest(t, func(w http.ResponseWriter, r *http.Request) {
		writeJSON(w, 200, httpResult(readHTTPMessage(r), ""))
	})
	for _, n := range []int{1, 2 * smallestSpare} {
		var wrote atomic.Int32
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { wrote.Add(1) }})
		req := toolCall(version2511)
		req.Params = json.RawMessage(`{"name":"` + strings.Repeat("x", n) + `"}`)
		if _, err := tr.Call(ctx, req); err != nil || wrote.Load() != 1 {
			t.Errorf("%d bytes: the caller heard %d times that the request was written, %v", n, wrote.Load(), err)
		}
	}
}
