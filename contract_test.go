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
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// One suite for every Transport: a limit that only one of them keeps is a limit
// that nobody can rely on. The server of the suite is the same behind each; what
// it does is asked for by the method of a request.

// A contractServer does what the methods of its requests say.
type contractServer struct {
	mu       sync.Mutex // guards the fields below
	pings    int        // x/ping notifications so far
	running  int
	most     int // requests at once, at most
	ended    int // x/hang requests whose context ended
	received int // requests in all
}

// A contractPeer is the way back to the client during a request.
type contractPeer struct {
	notify func(method string, params any)
	ask    func(method string) json.RawMessage // the whole answer of the client
	stray  func(message string)                // writes a message that answers nothing
	lose   func()                              // loses the connection
	broken func() json.RawMessage              // an answer that is none
}

func (s *contractServer) handle(ctx context.Context, method string, params json.RawMessage, peer contractPeer) (any, *RPCError) {
	var p struct {
		N      int    `json:"n"`
		Method string `json:"method"`
	}
	json.Unmarshal(params, &p) // other params are no concern of the methods that use p
	s.mu.Lock()
	s.received++
	s.running++
	s.most = max(s.most, s.running)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.running--
		s.mu.Unlock()
	}()
	switch method {
	case "initialize":
		return json.RawMessage(`{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"contract","version":"1"}}`), nil
	case "x/echo":
		if params == nil {
			return map[string]any{"absent": true}, nil
		}
		return params, nil
	case "x/sleep":
		select {
		case <-time.After(time.Duration(p.N) * time.Millisecond):
		case <-ctx.Done():
		}
		return params, nil
	case "x/hang":
		<-ctx.Done()
		s.mu.Lock()
		s.ended++
		s.mu.Unlock()
		return nil, &RPCError{Code: 1}
	case "x/refuse":
		return nil, &RPCError{Code: p.N, Message: canary, Data: json.RawMessage(`{"why":"` + canary + `"}`)}
	case "x/big":
		return map[string]any{"big": strings.Repeat("x", p.N)}, nil
	case "x/notify":
		for i := range p.N {
			peer.notify("notifications/x", map[string]any{"i": i})
		}
		return map[string]any{}, nil
	case "x/ask":
		return map[string]any{"answer": peer.ask(p.Method)}, nil
	case "x/askmany":
		var wg sync.WaitGroup
		for range p.N {
			wg.Go(func() { peer.ask("x/slow") })
		}
		wg.Wait()
		return map[string]any{}, nil
	case "x/stray":
		peer.stray(`{"jsonrpc":"2.0","id":987654,"result":{"x":"` + canary + `"}}`)
		peer.stray(`{"jsonrpc":"2.0","id":"other","error":{"code":1,"message":"` + canary + `"}}`)
		peer.stray(`{"jsonrpc":"2.0","method":"notifications/x","params":{"i":0}}`)
		return map[string]any{"ok": true}, nil
	case "x/broken":
		return peer.broken(), nil
	case "x/lose":
		peer.lose()
		return map[string]any{}, nil
	case "x/forget":
		s.mu.Lock()
		defer s.mu.Unlock()
		s.most = s.running
		return map[string]any{}, nil
	case "x/count":
		s.mu.Lock()
		defer s.mu.Unlock()
		return map[string]any{"pings": s.pings, "most": s.most, "running": s.running, "ended": s.ended, "received": s.received}, nil
	}
	return nil, &RPCError{Code: -32601, Message: canary}
}

func (s *contractServer) notified(method string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if method == "x/ping" {
		s.pings++
	}
}

// contractAnswer writes the answer of handle as a message.
func contractAnswer(id json.RawMessage, v any, refusal *RPCError) []byte {
	if raw, ok := v.(contractRaw); ok {
		return raw
	}
	if refusal != nil {
		b, _ := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": id, "error": map[string]any{"code": refusal.Code, "message": refusal.Message, "data": refusal.Data}})
		return b
	}
	b, _ := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": id, "result": v})
	return b
}

// contractRaw is a whole message in place of an answer.
type contractRaw []byte

// contractAsks keeps the requests of the server that await an answer.
type contractAsks struct {
	mu   sync.Mutex
	next int
	open map[string]chan json.RawMessage
}

func (a *contractAsks) begin(method string) (message string, wait func() json.RawMessage) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.next++
	id := "s" + strconv.Itoa(a.next)
	c := make(chan json.RawMessage, 1)
	if a.open == nil {
		a.open = map[string]chan json.RawMessage{}
	}
	a.open[`"`+id+`"`] = c
	return `{"jsonrpc":"2.0","id":"` + id + `","method":"` + method + `"}`, func() json.RawMessage {
		select {
		case m := <-c:
			return m
		case <-time.After(5 * time.Second):
			return json.RawMessage(`"no answer"`)
		}
	}
}

func (a *contractAsks) end(id, message json.RawMessage) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.open[string(id)]; c != nil {
		c <- bytes.Clone(message)
		delete(a.open, string(id))
	}
}

// contractChild is the server as a child process.
func contractChild(args []string) int {
	s := new(contractServer)
	var asks contractAsks
	var mu sync.Mutex // guards stdout and cancels
	cancels := map[string]context.CancelFunc{}
	write := func(line []byte) {
		mu.Lock()
		defer mu.Unlock()
		os.Stdout.Write(append(line, '\n'))
	}
	peer := func(id json.RawMessage) contractPeer {
		return contractPeer{
			notify: func(method string, params any) {
				b, _ := json.Marshal(map[string]any{"jsonrpc": "2.0", "method": method, "params": params})
				write(b)
			},
			ask: func(method string) json.RawMessage {
				message, wait := asks.begin(method)
				write([]byte(message))
				return wait()
			},
			stray: func(message string) { write([]byte(message)) },
			lose:  func() { os.Exit(7) },
			broken: func() json.RawMessage {
				write([]byte(`{"jsonrpc":"2.0","id":` + string(id) + `,"result":{"` + canary))
				select {}
			},
		}
	}
	in := bufio.NewReaderSize(os.Stdin, 1<<20)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return 0
		}
		e, err := scanEnvelope(bytes.TrimSpace(line))
		if err != nil {
			continue
		}
		switch {
		case e.method == "":
			asks.end(e.id, line)
		case e.id == nil:
			s.notified(e.method)
			if e.method == "notifications/cancelled" {
				mu.Lock()
				if cancel := cancels[string(member(e.params, "requestId"))]; cancel != nil {
					cancel()
				}
				mu.Unlock()
			}
		default:
			ctx, cancel := context.WithCancel(context.Background())
			mu.Lock()
			cancels[string(e.id)] = cancel
			mu.Unlock()
			go func() {
				v, refusal := s.handle(ctx, e.method, e.params, peer(e.id))
				if ctx.Err() == nil {
					write(contractAnswer(e.id, v, refusal))
				}
			}()
		}
	}
}

// A contractHTTP is the server behind an endpoint, with a session.
type contractHTTP struct {
	*contractServer
	sse  bool
	asks contractAsks

	smu     sync.Mutex // guards the fields below
	session string
	named   int
	cancels map[string]context.CancelFunc
}

func (h *contractHTTP) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != "POST" {
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	body, _ := io.ReadAll(r.Body)
	e, err := scanEnvelope(body)
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	h.smu.Lock()
	if e.method == "initialize" {
		h.named++
		h.session = "s" + strconv.Itoa(h.named)
		w.Header().Set("Mcp-Session-Id", h.session)
	} else if r.Header.Get("Mcp-Session-Id") != h.session {
		h.smu.Unlock()
		w.WriteHeader(http.StatusNotFound)
		io.WriteString(w, canary)
		return
	}
	// As MCP 2025-11-25 has it, a client that goes away has not cancelled.
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
	defer cancel()
	switch {
	case e.method == "":
		h.asks.end(e.id, body)
	case e.id == nil:
		h.notified(e.method)
		if stop := h.cancels[string(member(e.params, "requestId"))]; e.method == "notifications/cancelled" && stop != nil {
			stop()
		}
	default:
		h.cancels[string(e.id)] = cancel
	}
	h.smu.Unlock()
	if e.method == "" || e.id == nil {
		w.WriteHeader(http.StatusAccepted)
		return
	}
	flush := http.NewResponseController(w).Flush
	var mu sync.Mutex // guards w
	write := func(message string) {
		mu.Lock()
		defer mu.Unlock()
		io.WriteString(w, "event: message\ndata: "+message+"\n\n")
		flush()
	}
	w.Header().Set("Content-Type", "application/json")
	peer := contractPeer{
		lose:   func() { panic(http.ErrAbortHandler) },
		broken: func() json.RawMessage { return nil },
	}
	if h.sse {
		w.Header().Set("Content-Type", "text/event-stream")
		flush()
		peer.notify = func(method string, params any) {
			b, _ := json.Marshal(map[string]any{"jsonrpc": "2.0", "method": method, "params": params})
			write(string(b))
		}
		peer.ask = func(method string) json.RawMessage {
			message, wait := h.asks.begin(method)
			write(message)
			return wait()
		}
		peer.stray = write
	}
	v, refusal := h.handle(ctx, e.method, e.params, peer)
	if ctx.Err() != nil {
		return
	}
	b := contractAnswer(e.id, v, refusal)
	if e.method == "x/broken" {
		b = []byte(`{"jsonrpc":"2.0","id":` + string(e.id) + `,"result":{"` + canary)
	}
	if h.sse {
		write(string(b))
	} else {
		w.Write(b)
	}
}

// quickExit lets a child that was built with the race detector end at once: it
// would sleep for a second in case of late reports, and none reads them.
var quickExit = [2]string{"GORACE", "atexit_sleep_ms=0"}

// A carrier is a way to reach the contract's server.
type carrier struct {
	name  string
	open  func(t *testing.T, cfg Config) (tr Transport, lose func())
	talks bool // the server can speak during a call
	wire  bool // there are bytes that can be wrong
}

var carriers = []carrier{
	{name: "stdio", talks: true, wire: true, open: func(t *testing.T, cfg Config) (Transport, func()) {
		exe, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cfg.Command = []string{exe}
		cfg.Env = map[string]string{childEnv: "contract", quickExit[0]: quickExit[1]}
		tr := newTestTransport(t, cfg)
		return tr, func() {
			_, err := tr.Call(t.Context(), &Request{Method: "x/lose"})
			wantReason(t, err, ReasonDisconnected, true)
		}
	}},
	{name: "http", wire: true, open: func(t *testing.T, cfg Config) (Transport, func()) { return openContractHTTP(t, cfg, false) }},
	{name: "sse", talks: true, wire: true, open: func(t *testing.T, cfg Config) (Transport, func()) { return openContractHTTP(t, cfg, true) }},
	{name: "fake", talks: true, open: openContractFake},
}

func newTestTransport(t *testing.T, cfg Config) Transport {
	cfg.Name = "contract"
	tr, err := NewTransport(cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.Close() })
	return tr
}

func openContractHTTP(t *testing.T, cfg Config, sse bool) (Transport, func()) {
	h := &contractHTTP{contractServer: new(contractServer), sse: sse, cancels: map[string]context.CancelFunc{}}
	srv := httptest.NewServer(h)
	t.Cleanup(func() {
		h.smu.Lock()
		for _, cancel := range h.cancels {
			cancel() // else Close waits for calls that hang
		}
		h.smu.Unlock()
		srv.Close()
	})
	cfg.Endpoint = srv.URL
	tr := newTestTransport(t, cfg)
	return tr, func() {
		h.smu.Lock()
		h.session = "" // as a server that was started again
		h.smu.Unlock()
		_, err := tr.Call(t.Context(), &Request{Method: "x/echo", Version: version2511})
		var te *TransportError
		if !errors.As(err, &te) || te.Sent || te.Status != 404 {
			t.Fatalf("a lost session: %v (%+v), want status 404 with Sent false", err, te)
		}
	}
}

func openContractFake(t *testing.T, cfg Config) (Transport, func()) {
	s := new(contractServer)
	rt := new(RecordingTransport)
	rt.MaxMessageBytes, rt.MaxInFlight = cfg.MaxMessageBytes, cfg.MaxInFlight
	peer := contractPeer{
		notify: func(method string, params any) { rt.SendNotification(method, params) },
		ask: func(method string) json.RawMessage {
			b, err := rt.SendRequest(context.Background(), method, nil)
			var refusal *RPCError
			if errors.As(err, &refusal) {
				return contractAnswer(json.RawMessage("1"), nil, refusal)
			} else if err != nil {
				return contractAnswer(json.RawMessage("1"), nil, &RPCError{Code: -32603})
			}
			return contractAnswer(json.RawMessage("1"), b, nil)
		},
	}
	for _, method := range []string{"initialize", "x/echo", "x/sleep", "x/hang", "x/refuse", "x/big", "x/notify", "x/ask", "x/askmany", "x/count", "x/forget", "x/nothing"} {
		rt.Script(method, func(ctx context.Context, params json.RawMessage) (any, error) {
			v, refusal := s.handle(ctx, method, params, peer)
			if refusal != nil {
				return nil, refusal
			}
			return v, nil
		})
	}
	rt.Script("x/ping", func(json.RawMessage) (any, error) { s.notified("x/ping"); return nil, nil })
	t.Cleanup(func() { rt.Close() })
	return rt, rt.Disconnect
}

// connectTransport opens tr and shakes hands.
func connectTransport(t *testing.T, tr Transport, in Inbound) {
	t.Helper()
	fresh, err := tr.Open(t.Context(), in)
	if err != nil || !fresh {
		t.Fatalf("Open = %v, %v, want a fresh connection", fresh, err)
	}
	if _, err := tr.Call(t.Context(), &Request{Method: "initialize", Params: json.RawMessage(`{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"c","version":"1"}}`)}); err != nil {
		t.Fatalf("initialize: %v", err)
	}
	if err := tr.Notify(t.Context(), &Request{Method: "notifications/initialized", Version: version2511}); err != nil {
		t.Fatalf("initialized: %v", err)
	}
}

// ask makes a call whose params are the formatted text.
func ask(ctx context.Context, tr Transport, method, format string, args ...any) (string, error) {
	req := &Request{Method: method, Version: version2511}
	if format != "" {
		req.Params = fmt.Appendf(nil, format, args...)
	}
	b, err := tr.Call(ctx, req)
	if err != nil && strings.Contains(err.Error(), canary) {
		err = fmt.Errorf("the server's words are in an error: %w", err)
	}
	return string(b), err
}

// count asks the server for one of its counters.
func count(t *testing.T, tr Transport, name string) int {
	t.Helper()
	b, err := ask(t.Context(), tr, "x/count", "")
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(string(member([]byte(b), name)))
	if err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	return n
}

// eventually waits for something that a server does in its own time.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within five seconds: %s", what)
		}
	}
}

// soon checks that something that ends a wait did so at once; the slack is for
// busy machines.
func soon(t *testing.T, start time.Time) {
	t.Helper()
	if d := time.Since(start); d > 2*time.Second {
		t.Errorf("took %v", d)
	}
}

func TestContract(t *testing.T) {
	for _, c := range carriers {
		t.Run(c.name, func(t *testing.T) {
			run := func(name string, applies bool, cfg Config, in Inbound, test func(t *testing.T, tr Transport, lose func())) {
				t.Run(name, func(t *testing.T) {
					if !applies {
						t.Skip("nothing that this transport could do")
					}
					tr, lose := c.open(t, cfg)
					connectTransport(t, tr, in)
					test(t, tr, lose)
				})
			}
			run("open", true, Config{}, Inbound{}, contractOpen)
			run("call", true, Config{}, Inbound{}, contractCall)
			run("concurrent", true, Config{}, Inbound{}, contractConcurrent)
			run("notify", true, Config{}, Inbound{}, contractNotify)
			run("refusals", true, Config{}, Inbound{}, contractRefusals)
			run("cancel", true, Config{}, Inbound{}, contractCancel)
			run("deadline", true, Config{}, Inbound{}, contractDeadline)
			run("message size", true, Config{MaxMessageBytes: 64 << 10}, Inbound{}, contractSize)
			run("in flight", true, Config{MaxInFlight: 2}, Inbound{}, contractInFlight)
			run("stream", true, Config{MaxInFlight: 2}, Inbound{}, contractStream)
			run("reconnect", true, Config{}, Inbound{}, contractReconnect)
			run("close", true, Config{}, Inbound{}, contractClose)
			run("close while calling", true, Config{}, Inbound{}, contractCloseCalling)
			run("broken answer", c.wire, Config{}, Inbound{}, contractBroken)
			run("strays", c.wire && c.talks, Config{}, Inbound{}, contractStrays)
			t.Run("notifications", func(t *testing.T) { contractNotifications(t, c) })
			t.Run("server requests", func(t *testing.T) { contractServerRequests(t, c) })
			t.Run("leak", func(t *testing.T) { contractLeak(t, c) })
		})
	}
}

func contractOpen(t *testing.T, tr Transport, _ func()) {
	for range 2 {
		if fresh, err := tr.Open(t.Context(), Inbound{}); fresh || err != nil {
			t.Errorf("Open on a standing connection = %v, %v", fresh, err)
		}
	}
}

func contractCall(t *testing.T, tr Transport, _ func()) {
	for _, params := range []string{
		`{}`,
		`{"n":9007199254740993,"f":1.50,"s":"\u00e9é 𝄞 \\ \" \n","a":[null,true]}`,
		`{"line":"` + strings.Repeat("é", 200_000) + `"}`,
	} {
		got, err := ask(t.Context(), tr, "x/echo", "%s", params)
		if err != nil || !sameValue(t, got, params) {
			t.Errorf("echo of %.60s = %.60s, %v", params, got, err)
		}
	}
	if got, err := ask(t.Context(), tr, "x/echo", ""); err != nil || !sameValue(t, got, `{"absent":true}`) {
		t.Errorf("echo of nothing = %s, %v", got, err)
	}
	// The caller owns what it gets, and keeps what it gave.
	req := &Request{Method: "x/echo", Params: json.RawMessage(`{"a":"bc"}`), Version: version2511}
	first, err := tr.Call(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	kept := string(first)
	for range 3 {
		b, err := tr.Call(t.Context(), &Request{Method: "x/echo", Params: json.RawMessage(`{"z":"yx"}`), Version: version2511})
		if err != nil {
			t.Fatal(err)
		}
		for i := range b {
			b[i] = '#'
		}
	}
	if string(first) != kept || string(req.Params) != `{"a":"bc"}` {
		t.Errorf("a later call changed %s to %s, or the params to %s", kept, first, req.Params)
	}
}

// sameValue compares JSON by value, numbers by their digits.
func sameValue(t *testing.T, a, b string) bool {
	t.Helper()
	parse := func(s string) any {
		d := json.NewDecoder(strings.NewReader(s))
		d.UseNumber()
		var v any
		if err := d.Decode(&v); err != nil {
			t.Errorf("%.60q: %v", s, err)
		}
		return v
	}
	x, _ := json.Marshal(parse(a))
	y, _ := json.Marshal(parse(b))
	return bytes.Equal(x, y)
}

func contractConcurrent(t *testing.T, tr Transport, _ func()) {
	var wg sync.WaitGroup
	for i := range 24 { // the first ones are the last to be answered
		wg.Go(func() {
			want := fmt.Sprintf(`{"n":%d,"i":%d}`, 2*(24-i), i)
			got, err := ask(t.Context(), tr, "x/sleep", "%s", want)
			if err != nil || !sameValue(t, got, want) {
				t.Errorf("call %d got %s, %v", i, got, err)
			}
		})
	}
	wg.Wait()
}

func contractNotify(t *testing.T, tr Transport, _ func()) {
	for i := range 50 {
		if err := tr.Notify(t.Context(), &Request{Method: "x/ping", Version: version2511}); err != nil {
			t.Fatal(err)
		}
		if i%10 == 9 {
			if got := count(t, tr, "pings"); got != i+1 {
				t.Errorf("the server had %d of %d notifications when the next request came", got, i+1)
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantReason(t, tr.Notify(ctx, &Request{Method: "x/ping", Version: version2511}), ReasonCancelled, false)
}

func contractRefusals(t *testing.T, tr Transport, _ func()) {
	for _, code := range []int{-32602, -32603, 0, 42} {
		_, err := ask(t.Context(), tr, "x/refuse", `{"n":%d}`, code)
		var refusal *RPCError
		if !errors.As(err, &refusal) || refusal.Code != code || refusal.Message != canary || !sameValue(t, string(refusal.Data), `{"why":"`+canary+`"}`) {
			t.Errorf("refusal with %d: %v (%+v)", code, err, refusal)
		}
	}
	_, err := ask(t.Context(), tr, "x/nothing", "{}")
	var refusal *RPCError
	if !errors.As(err, &refusal) || refusal.Code != -32601 {
		t.Errorf("unknown method: %v", err)
	}
}

func contractCancel(t *testing.T, tr Transport, _ func()) {
	done, cancel := context.WithCancel(t.Context())
	cancel()
	before := count(t, tr, "received")
	_, err := ask(done, tr, "x/echo", "{}")
	wantReason(t, err, ReasonCancelled, false)
	if got := count(t, tr, "received"); got != before+1 {
		t.Errorf("a call under an ended context was sent: %d requests", got-before)
	}

	ctx, cancel := context.WithCancel(t.Context())
	start := time.Now()
	time.AfterFunc(30*time.Millisecond, cancel)
	_, err = ask(ctx, tr, "x/hang", "{}")
	soon(t, start)
	wantReason(t, err, ReasonCancelled, true)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v does not unwrap to the caller's error", err)
	}

	ctx, cancel = context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	start = time.Now()
	_, err = ask(ctx, tr, "x/hang", "{}")
	soon(t, start)
	wantReason(t, err, ReasonCancelled, true)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v does not unwrap to the caller's error", err)
	}
	eventually(t, "the server hears of both cancellations", func() bool { return count(t, tr, "ended") == 2 })
}

func contractDeadline(t *testing.T, tr Transport, _ func()) {
	bounded, ok := tr.(honoursDeadline)
	if !ok {
		t.Skipf("%T does not obey Request.Deadline", bounded)
	}
	call := func(method string, d time.Duration) error {
		_, err := tr.Call(t.Context(), &Request{Method: method, Version: version2511, Deadline: time.Now().Add(d)})
		return err
	}
	before := count(t, tr, "received")
	wantReason(t, call("x/echo", -time.Second), ReasonTimeout, false)
	if got := count(t, tr, "received"); got != before+1 {
		t.Errorf("a call past its deadline was sent: %d requests", got-before)
	}
	start := time.Now()
	err := call("x/hang", 30*time.Millisecond)
	soon(t, start)
	if te := wantReason(t, err, ReasonTimeout, true); !te.Timeout() || !te.Retryable() || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v passes for the caller's own deadline", err)
	}
	eventually(t, "the server hears that the call has ended", func() bool { return count(t, tr, "ended") == 1 })
	if err := call("x/echo", time.Minute); err != nil {
		t.Errorf("after a timeout: %v", err)
	}
}

func contractSize(t *testing.T, tr Transport, _ func()) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { // whoever else is under way is not concerned
		if _, err := ask(t.Context(), tr, "x/sleep", `{"n":300}`); err != nil {
			t.Errorf("a call beside the oversized ones: %v", err)
		}
	})
	_, err := ask(t.Context(), tr, "x/echo", `{"s":"%s"}`, strings.Repeat("x", 64<<10))
	wantReason(t, err, ReasonLimit, false)
	_, err = ask(t.Context(), tr, "x/big", `{"n":%d}`, 64<<10)
	wantReason(t, err, ReasonLimit, true)
	_, err = ask(t.Context(), tr, "x/big", `{"n":%d}`, 4<<20)
	wantReason(t, err, ReasonLimit, true)
	got, err := ask(t.Context(), tr, "x/echo", `{"s":"%s"}`, strings.Repeat("x", 63<<10))
	if err != nil || len(got) < 63<<10 {
		t.Errorf("a message within the limit: %d bytes, %v", len(got), err)
	}
}

func contractInFlight(t *testing.T, tr Transport, _ func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() { ask(ctx, tr, "x/hang", "{}") })
	}
	// Both are on their way when a third one gets no slot.
	eventually(t, "the slots are taken", func() bool {
		short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		_, err := ask(short, tr, "x/echo", "{}")
		var te *TransportError
		return errors.As(err, &te) && te.Reason == ReasonCancelled && !te.Sent
	})
	if _, ok := tr.(honoursDeadline); ok {
		_, err := tr.Call(t.Context(), &Request{Method: "x/echo", Version: version2511, Deadline: time.Now().Add(20 * time.Millisecond)})
		wantReason(t, err, ReasonTimeout, false)
	}
	wg.Go(func() {
		if _, err := ask(t.Context(), tr, "x/echo", "{}"); err != nil {
			t.Errorf("a call that waited for its slot: %v", err)
		}
	})
	time.Sleep(10 * time.Millisecond)
	cancel()
	wg.Wait()
	eventually(t, "the cancelled ones have ended", func() bool { return count(t, tr, "ended") == 2 })
	if _, err := ask(t.Context(), tr, "x/forget", ""); err != nil {
		t.Fatal(err)
	}
	for range 8 {
		wg.Go(func() { ask(t.Context(), tr, "x/sleep", `{"n":5}`) })
	}
	wg.Wait()
	if got := count(t, tr, "most"); got > 2 {
		t.Errorf("%d requests at once, want 2", got)
	}
}

// What lasts takes no slot: a stream would leave none to the calls.
func contractStream(t *testing.T, tr Transport, _ func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for range 3 { // there are two slots
		wg.Go(func() {
			_, err := tr.Call(ctx, &Request{Method: "x/hang", Version: version2511, Stream: true})
			wantReason(t, err, ReasonCancelled, true)
		})
	}
	eventually(t, "the streams are open", func() bool { return count(t, tr, "running") == 4 }) // with the question itself
	if _, err := ask(t.Context(), tr, "x/echo", "{}"); err != nil {
		t.Errorf("a call beside the streams: %v", err)
	}
}

func contractReconnect(t *testing.T, tr Transport, lose func()) {
	for range 2 {
		lose()
		if fresh, err := tr.Open(t.Context(), Inbound{}); !fresh || err != nil {
			t.Fatalf("Open after a loss = %v, %v", fresh, err)
		}
		if _, err := tr.Call(t.Context(), &Request{Method: "initialize", Params: json.RawMessage(`{"protocolVersion":"2025-11-25"}`)}); err != nil {
			t.Fatal(err)
		}
		if got, err := ask(t.Context(), tr, "x/echo", `{"a":1}`); err != nil || !sameValue(t, got, `{"a":1}`) {
			t.Errorf("after reconnecting: %s, %v", got, err)
		}
	}
	if fresh, err := tr.Open(t.Context(), Inbound{}); fresh || err != nil {
		t.Errorf("Open = %v, %v", fresh, err)
	}
}

func contractClose(t *testing.T, tr Transport, _ func()) {
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := tr.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
	}
	wg.Wait()
	_, err := tr.Open(t.Context(), Inbound{})
	var te *TransportError
	if !errors.As(err, &te) || te.Sent {
		t.Errorf("Open after Close: %v", err)
	}
	_, err = ask(t.Context(), tr, "x/echo", "{}")
	if !errors.As(err, &te) || te.Sent {
		t.Errorf("Call after Close: %v", err)
	}
	if err := tr.Notify(t.Context(), &Request{Method: "x/ping", Version: version2511}); err == nil {
		t.Error("Notify after Close succeeds")
	}
}

func contractCloseCalling(t *testing.T, tr Transport, _ func()) {
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			_, err := ask(t.Context(), tr, "x/hang", "{}")
			wantReason(t, err, ReasonDisconnected, true)
		})
	}
	eventually(t, "all calls have arrived", func() bool { return count(t, tr, "running") == 9 })
	start := time.Now()
	if err := tr.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	soon(t, start)
}

func contractBroken(t *testing.T, tr Transport, _ func()) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		if _, err := ask(t.Context(), tr, "x/sleep", `{"n":100}`); err != nil {
			t.Errorf("a call beside the broken one: %v", err)
		}
	})
	_, err := ask(t.Context(), tr, "x/broken", "{}")
	if te := wantReason(t, err, ReasonProtocol, true); strings.Contains(err.Error(), canary) {
		t.Errorf("%v has the server's words", te)
	}
	if _, err := ask(t.Context(), tr, "x/echo", "{}"); err != nil {
		t.Errorf("after a broken answer: %v", err)
	}
}

func contractStrays(t *testing.T, tr Transport, _ func()) {
	for range 3 {
		if got, err := ask(t.Context(), tr, "x/stray", "{}"); err != nil || got != `{"ok":true}` {
			t.Errorf("beside answers to nothing: %s, %v", got, err)
		}
	}
}

func contractNotifications(t *testing.T, c carrier) {
	if !c.talks {
		t.Skip("no way for the server to speak")
	}
	tr, _ := c.open(t, Config{})
	var mu sync.Mutex
	var got []string
	connectTransport(t, tr, Inbound{Notify: func(method string, params json.RawMessage) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, method+" "+string(member(params, "i")))
	}})
	const n = 200
	if _, err := ask(t.Context(), tr, "x/notify", `{"n":%d}`, n); err != nil {
		t.Fatal(err)
	}
	mu.Lock() // what came before the answer has been delivered before it
	defer mu.Unlock()
	if len(got) != n {
		t.Fatalf("%d notifications, want %d", len(got), n)
	}
	for i, m := range got {
		if m != "notifications/x "+strconv.Itoa(i) {
			t.Fatalf("notification %d is %q", i, m)
		}
	}
}

func contractServerRequests(t *testing.T, c carrier) {
	if !c.talks {
		t.Skip("no way for the server to ask")
	}
	tr, _ := c.open(t, Config{})
	var running, most atomic.Int32
	connectTransport(t, tr, Inbound{Request: func(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
		now := running.Add(1)
		defer running.Add(-1)
		for old := most.Load(); now > old && !most.CompareAndSwap(old, now); old = most.Load() {
		}
		switch method {
		case "ping":
			return json.RawMessage(`{}`), nil
		case "x/slow":
			time.Sleep(20 * time.Millisecond)
			return json.RawMessage(`{}`), nil
		case "x/trouble":
			return nil, errors.New("trouble at home")
		}
		return nil, &RPCError{Code: -32601, Message: "method not found"}
	}})
	answer := func(method string) json.RawMessage {
		t.Helper()
		b, err := ask(t.Context(), tr, "x/ask", `{"method":"%s"}`, method)
		if err != nil {
			t.Fatal(err)
		}
		return member([]byte(b), "answer")
	}
	if b := answer("ping"); string(member(b, "result")) != "{}" {
		t.Errorf("ping was answered with %s", b)
	}
	if b := answer("x/unknown"); string(member(member(b, "error"), "code")) != "-32601" {
		t.Errorf("an unknown method was answered with %s", b)
	}
	if b := answer("x/trouble"); member(b, "error") == nil || bytes.Contains(b, []byte("home")) {
		t.Errorf("a failure of ours was answered with %s", b)
	}
	if _, err := ask(t.Context(), tr, "x/askmany", `{"n":20}`); err != nil {
		t.Fatal(err)
	}
	if most.Load() > 8 && c.wire {
		t.Errorf("%d requests of the server at once, want 8", most.Load())
	}
}

func contractLeak(t *testing.T, c carrier) {
	before := runtime.NumGoroutine()
	for range 3 {
		t.Run("one", func(t *testing.T) { // whose cleanup ends the server
			tr, lose := c.open(t, Config{})
			connectTransport(t, tr, Inbound{})
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			ask(ctx, tr, "x/hang", "{}")
			ask(t.Context(), tr, "x/echo", "{}")
			lose()
			if _, err := tr.Open(t.Context(), Inbound{}); err != nil {
				t.Error(err)
			}
			tr.Close()
		})
	}
	eventually(t, "all goroutines have ended", func() bool {
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
		return runtime.NumGoroutine() <= before
	})
}
