package mcp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A fuzzedServer answers without a network: by the method of a request, with a
// body that somebody made up.
type fuzzedServer struct {
	status int
	header http.Header
	bodies map[string]string // by method; "{{id}}" is the id of the request
}

func (s *fuzzedServer) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	if r.Method != http.MethodPost {
		w.WriteHeader(http.StatusMethodNotAllowed)
		return w.Result(), nil
	}
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	e, err := scanEnvelope(b)
	if err != nil {
		return nil, fmt.Errorf("the client wrote %q: %w", b, err)
	}
	body, ok := s.bodies[e.method]
	if !ok {
		w.WriteHeader(http.StatusAccepted)
		return w.Result(), nil
	}
	maps.Copy(w.Header(), s.header)
	if e.method == "tools/call" {
		w.WriteHeader(s.status)
	}
	io.WriteString(w, strings.ReplaceAll(body, "{{id}}", string(e.id)))
	return w.Result(), nil
}

// FuzzSession has a server say anything at all to each of the four questions
// that a client asks. There is no panic, every error is one of ours, no word of
// the server is in its text, and a result means that there was an answer. An '@'
// stands for the word.
func FuzzSession(f *testing.F) {
	answer := func(r string) string { return `{"jsonrpc":"2.0","id":{{id}},"result":` + r + `}` }
	refuse := `{"jsonrpc":"2.0","id":{{id}},"error":{"code":-32601,"message":"@","data":{"@":"@"}}}`
	hello := answer(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"@","version":"@"},"instructions":"@"}`)
	tools := answer(`{"tools":[{"name":"t","description":"@","inputSchema":{"type":"object","properties":{"a":{"type":"integer"}}},"outputSchema":{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}}]}`)
	result := answer(`{"content":[{"type":"text","text":"@"}],"structuredContent":{"n":1}}`)
	modern := answer(`{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{}},"_meta":{}}`)
	f.Add(uint16(200), false, refuse, hello, tools, result)
	f.Add(uint16(200), false, modern, "", answer(`{"tools":[{"name":"t","inputSchema":{"type":"object","properties":{"a":{"type":"string","x-mcp-header":"@"}}}}],"ttlMs":5}`), answer(`{"resultType":"input_required","requestState":"@","inputRequests":{"@":{"method":"roots/list"}}}`))
	f.Add(uint16(200), false, answer(`{"supportedVersions":["@"]}`), hello, tools, result)
	f.Add(uint16(200), true, "data: "+refuse+"\n\n", "data: "+hello+"\n\n", "id: @\nretry: 1\ndata: "+tools+"\n\n", ": @\n\nevent: @\ndata: "+result+"\n\n")
	f.Add(uint16(404), false, refuse, hello, tools, `{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"@"}}`)
	f.Add(uint16(400), false, refuse, hello, answer(`{"tools":[],"nextCursor":"@"}`), refuse)
	f.Add(uint16(500), false, refuse, hello, answer(`{"tools":[{"name":"@"},7,{"name":"t","inputSchema":{"$ref":"@"}}]}`), "@")
	f.Add(uint16(200), false, refuse, hello, tools, "["+answer(`{"content":[]}`)+"]")
	f.Add(uint16(200), false, "@", answer(`{"protocolVersion":"@"}`), "", "")
	f.Fuzz(func(t *testing.T, status uint16, stream bool, discover, initialize, list, call string) {
		word := func(s string) string { return strings.ReplaceAll(s, "@", canary) }
		server := &fuzzedServer{
			status: 200 + int(status-200)%400, header: http.Header{"Content-Type": {"application/json"}, "Mcp-Session-Id": {canary}, "Retry-After": {canary}},
			bodies: map[string]string{"server/discover": word(discover), "initialize": word(initialize), "tools/list": word(list), "tools/call": word(call)},
		}
		if server.status < 200 || server.status == 101 {
			server.status = 200
		}
		if stream {
			server.header.Set("Content-Type", "text/event-stream")
		}
		const short = 20 * time.Millisecond
		cfg := Config{
			Name: "s", Endpoint: "http://s.example/", BreakerFailures: -1, ConnectTimeout: time.Second, DiscoveryTimeout: short, CallTimeout: short,
			MaxMessageBytes: 64 << 10, Retry: RetryConfig{MaxAttempts: 2, BaseDelay: 1},
		}
		roots := func(context.Context, string, json.RawMessage) (any, error) {
			return map[string]any{"roots": []any{}}, nil
		}
		c, err := New(cfg, &Options{HTTPClient: &http.Client{Transport: server}, Handlers: map[string]HandlerFunc{"roots/list": roots}})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		a, err := c.Adopt(t.Context())
		checkOurs(t, err)
		if (a == nil) == (err == nil) {
			t.Errorf("Adopt = %v, %v", a, err)
		}
		for _, args := range []any{nil, map[string]any{"a": 1}} {
			r, err := c.Call(t.Context(), &Call{Tool: "t", Arguments: args, IdempotencyKey: "k"})
			checkOurs(t, err)
			if (r == nil) == (err == nil) {
				t.Fatalf("Call = %v, %v", r, err)
			}
			if err == nil && (server.status/100 != 2 || !stream && !json.Valid([]byte(strings.ReplaceAll(word(call), "{{id}}", "1")))) {
				t.Errorf("a result out of %q with status %d", call, server.status)
			}
			if r != nil {
				ErrorResult(err)
				_ = r.Text()
			}
		}
		if s := c.Health().String(); strings.Contains(s, canary) {
			t.Errorf("a word of the server in %s", s)
		}
	})
}

// FuzzRetryAfter has any text for a Retry-After: it never asks for less than
// nothing, digits are seconds, and what is no date either is nothing.
func FuzzRetryAfter(f *testing.F) {
	for _, v := range []string{"", "0", "5", "-1", "+1", "1.5", "1e3", " 7", "007", "9223372036", "9223372037", "18446744073709551616", "soon",
		"Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994", "Fri, 31 Dec 9999 23:59:59 GMT"} {
		f.Add(v, "Sun, 06 Nov 1994 08:49:00 GMT")
		f.Add(v, "")
	}
	f.Fuzz(func(t *testing.T, v, date string) {
		h := http.Header{"Retry-After": {v}, "Date": {date}}
		got := retryAfter(h)
		if got < 0 {
			t.Fatalf("%q with date %q: %v", v, date, got)
		}
		if v != "" && strings.Trim(v, "0123456789") == "" {
			want := time.Duration(0)
			if n, err := strconv.ParseUint(v, 10, 64); err == nil && n <= math.MaxInt64/uint64(time.Second) {
				want = time.Duration(n) * time.Second
			}
			if got != want {
				t.Errorf("%q is %v, want %v", v, got, want)
			}
		} else if _, err := http.ParseTime(v); err != nil && got != 0 {
			t.Errorf("%q is %v", v, got)
		}
	})
}

// FuzzChallenge has any text for a WWW-Authenticate: whoever gives out
// authorizations gets it as it is, and once, and the error has it outside its
// text and cut short.
func FuzzChallenge(f *testing.F) {
	for _, v := range []string{"", "Bearer", `Bearer realm="@", scope="a b"`, "Basic @", "a\r\nX-Injected: 1", "é", "\x00", strings.Repeat("@", 4<<10)} {
		f.Add(v)
	}
	f.Fuzz(func(t *testing.T, v string) {
		v = strings.ReplaceAll(v, "@", canary)
		for _, ask := range []bool{false, true} {
			server := &refusingServer{challenge: v}
			var heard []string
			o := &Options{HTTPClient: &http.Client{Transport: server}}
			if ask {
				o.Authorize = func(_ context.Context, challenge string) (string, error) {
					heard = append(heard, challenge)
					return challenge, nil
				}
			}
			tr, err := NewTransport(Config{Name: "s", Endpoint: "http://s.example/"}, o)
			if err != nil {
				t.Fatal(err)
			}
			_, err = tr.Call(t.Context(), &Request{Method: "x", Version: version2511})
			tr.Close()
			checkOurs(t, err)
			var te *TransportError
			if !errors.As(err, &te) || len(te.Raw) > rawLimit {
				t.Fatalf("%v (%+v)", err, te)
			}
			if ask && (len(heard) != 2 || heard[0] != "" || v != "" && heard[1] != v) {
				t.Errorf("asked with %q for the challenge %q", heard, v)
			}
			if !ask && server.asked != 1 || ask && server.asked != 2 {
				t.Errorf("%d requests", server.asked)
			}
			if v != "" && !bytes.HasPrefix([]byte(v), te.Raw) {
				t.Errorf("Raw is %q, and the challenge %q", te.Raw, v)
			}
		}
	})
}

// A refusingServer answers everything with a 401.
type refusingServer struct {
	challenge string
	asked     int
}

func (s *refusingServer) RoundTrip(r *http.Request) (*http.Response, error) {
	s.asked++
	return &http.Response{StatusCode: 401, ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{"Www-Authenticate": {s.challenge}}, Body: http.NoBody, Request: r}, nil
}
