package mcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// order is the params of a request to the serving child: the method says what
// it does, the members how.
type order struct {
	Text string   `json:"text,omitempty"`
	N    int      `json:"n,omitempty"`
	List []string `json:"list,omitempty"`
}

// serveChild is a server that does as the requests say. "stay" ignores the end
// of stdin, "deaf" ignores TERM.
func serveChild(args []string) int {
	if slices.Contains(args, "deaf") {
		signal.Ignore(syscall.SIGTERM)
	}
	var mu sync.Mutex // held while a line is written
	say := func(line string) {
		mu.Lock()
		defer mu.Unlock()
		io.WriteString(os.Stdout, line)
	}
	var seen []string
	in := bufio.NewReader(os.Stdin)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			if slices.Contains(args, "stay") {
				time.Sleep(time.Minute)
			}
			return 0
		}
		seen = append(seen, strings.TrimSpace(line))
		var m struct {
			ID     json.RawMessage
			Method string
			Params json.RawMessage
		}
		var o order
		if json.Unmarshal([]byte(line), &m) == nil {
			json.Unmarshal(m.Params, &o)
		}
		answer := func(v any) {
			b, _ := json.Marshal(v)
			say(fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":%s}`+"\n", m.ID, b))
		}
		switch m.Method {
		case "echo":
			answer(m.Params)
		case "raw": // Text as it is
			say(strings.ReplaceAll(o.Text, "{{id}}", string(m.ID)))
		case "endless": // Text, N bytes, the rest of List
			say(strings.ReplaceAll(o.Text+strings.Repeat("x", o.N)+strings.Join(o.List, ""), "{{id}}", string(m.ID)))
		case "drip": // an answer in small pieces
			for b := range slices.Chunk(fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%s,"result":{"text":"ok"}}`+"\n", m.ID), 7) {
				say(string(b))
				time.Sleep(time.Millisecond)
			}
		case "big":
			answer(order{Text: strings.Repeat("x", o.N)})
		case "later":
			time.AfterFunc(time.Duration(o.N)*time.Millisecond, func() { answer(o) })
		case "env":
			have := []string{}
			for _, k := range o.List {
				if v, ok := os.LookupEnv(k); ok {
					have = append(have, k+"="+v)
				}
			}
			answer(order{List: have})
		case "dir":
			dir, _ := os.Getwd()
			answer(order{Text: dir})
		case "seen":
			answer(order{List: seen})
		case "stderr":
			io.WriteString(os.Stderr, o.Text)
			answer(order{})
		case "ask": // N requests of its own
			for i := range o.N {
				say(fmt.Sprintf(`{"jsonrpc":"2.0","id":"s%d","method":%q,"params":{"i":%d}}`+"\n", i, o.Text, i))
			}
			answer(order{})
		case "exit":
			io.WriteString(os.Stderr, o.Text)
			return o.N
		case "die":
			p, _ := os.FindProcess(os.Getpid())
			p.Kill()
			time.Sleep(time.Minute)
		case "mute":
			os.Stdout.Close()
		case "nap": // read nothing for N ms, and say Text again and again
			answer(order{})
			for until := time.Now().Add(time.Duration(o.N) * time.Millisecond); time.Now().Before(until); {
				time.Sleep(20 * time.Millisecond)
				say(o.Text)
			}
		case "sulk": // read nothing more
			answer(order{})
			time.Sleep(time.Minute)
		case "spawn":
			spawnRelative(o.List)
			answer(order{})
		}
	}
}

// spawnRelative starts a process of the behaviour that list names first.
func spawnRelative(list []string) {
	exe, _ := os.Executable()
	cmd := exec.Command(exe, list[1:]...)
	cmd.Env = append(os.Environ(), childEnv+"="+list[0])
	if slices.Contains(list, "hold") {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	}
	cmd.Start()
}

// sleepChild sleeps. Its first argument is where it reports, on a connection
// that lasts as long as it lives. "deaf" ignores TERM.
func sleepChild(args []string) int {
	if slices.Contains(args, "deaf") {
		signal.Ignore(syscall.SIGTERM)
	}
	conn, err := net.Dial("tcp", args[0])
	if err != nil {
		return 1
	}
	defer conn.Close()
	fmt.Fprintln(conn, os.Getpid())
	time.Sleep(30 * time.Second)
	return 0
}

// doubleChild starts a sleeping child and leaves it.
func doubleChild(args []string) int {
	spawnRelative(append([]string{"sleep"}, args...))
	return 0
}

// killed is the exit code of a child that was killed.
var killed = map[bool]int{true: 1, false: -1}[runtime.GOOS == "windows"]

// A relative is a process that the serving child has started.
type relative struct {
	pid  int
	life net.Conn    // ends with it
	proc *os.Process // on Windows, where others than children can be waited for
}

// spawn has the serving child start a process of the behaviour that list names
// first, and waits until it runs.
func spawn(t *testing.T, tr *StdioTransport, list []string) (r relative) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.(*net.TCPListener).SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := do(t, tr, "spawn", order{List: slices.Insert(slices.Clone(list), 1, l.Addr().String())}); err != nil {
		t.Fatalf("Call(spawn) = %v", err)
	}
	if r.life, err = l.Accept(); err != nil {
		t.Fatalf("%v did not start: %v", list, err)
	}
	t.Cleanup(func() { r.life.Close() })
	r.report(t)
	return r
}

// report learns who is at the other end of the connection.
func (r *relative) report(t *testing.T) {
	t.Helper()
	_, err := fmt.Fscanln(r.life, &r.pid)
	if err == nil && runtime.GOOS == "windows" {
		r.proc, err = os.FindProcess(r.pid)
	}
	if err != nil {
		t.Fatalf("no report: %v", err)
	}
}

// wantEnded fails the test if one of the processes runs.
func wantEnded(t *testing.T, relatives ...relative) {
	t.Helper()
	for _, r := range relatives {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if r.proc != nil {
				r.proc.Wait()
			} else {
				r.life.Read(make([]byte, 1))
			}
		}()
		if !within(ended, stdioLinger) { // for the word to come through
			t.Errorf("process %d is left", r.pid)
		}
		wantGone(t, r.pid)
	}
}

// stdioConfig declares the serving child.
func stdioConfig(t testing.TB, args ...string) Config {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return Config{
		Name:    "test",
		Command: append([]string{exe}, args...),
		// GOCOVERDIR: a covered child without it complains on stderr.
		Env: map[string]string{childEnv: "serve", "GORACE": "atexit_sleep_ms=0", "GOCOVERDIR": t.TempDir()},
	}.withDefaults()
}

// openStdio opens a transport, and closes it at the end of the test.
func openStdio(t testing.TB, cfg Config, o *Options, in Inbound) *StdioTransport {
	t.Helper()
	if o == nil {
		o = &Options{}
	}
	tr := newStdioTransport(cfg, o)
	t.Cleanup(func() {
		if err := tr.Close(); err != nil {
			t.Errorf("Close() = %v", err)
		}
	})
	if fresh, err := tr.Open(t.Context(), in); err != nil || !fresh {
		t.Fatalf("Open() = %v, %v want true, nil", fresh, err)
	}
	return tr
}

// do makes a call that may take ten seconds.
func do(t testing.TB, tr *StdioTransport, method string, o order) (order, error) {
	return doWithin(t, tr, 10*time.Second, method, o)
}

func doWithin(t testing.TB, tr *StdioTransport, d time.Duration, method string, o order) (got order, err error) {
	t.Helper()
	params, _ := json.Marshal(o)
	req := &Request{Method: method, Params: params, Deadline: time.Now().Add(d)}
	res, err := tr.Call(t.Context(), req)
	noWordOfTheChild(t, err)
	if err == nil {
		if err := json.Unmarshal(res, &got); err != nil {
			t.Errorf("Call(%s) = %.100s, no JSON: %v", method, res, err)
		}
	}
	return got, err
}

// noWordOfTheChild fails the test if the server's words are in the error's.
func noWordOfTheChild(t testing.TB, err error) {
	t.Helper()
	if err != nil && strings.Contains(err.Error(), canary) {
		t.Errorf("error text has the server's words: %v", err)
	}
}

// mustEcho fails the test unless a plain call works.
func mustEcho(t testing.TB, tr *StdioTransport) {
	t.Helper()
	got, err := do(t, tr, "echo", order{Text: "still here"})
	if err != nil || got.Text != "still here" {
		t.Fatalf("Call(echo) = %v, %v; the session should have gone on", got, err)
	}
}

// wantChildFault fails the test unless err is a TransportError like that.
func wantChildFault(t testing.TB, err error, why Reason, sent bool) *TransportError {
	t.Helper()
	var e *TransportError
	if !errors.As(err, &e) || e.Reason != why || e.Sent != sent || !errors.Is(err, why) {
		t.Fatalf("error = %#v (%v) want reason %q, sent %v", err, err, why, sent)
	}
	if e.Server != "test" || e.Op == "" {
		t.Errorf("error has origin %+v, want server and op", e.Origin)
	}
	return e
}

func TestStdioAnswers(t *testing.T) {
	const ok = `"result":{"text":"ok"}}` + "\n"
	tests := []struct {
		name, raw string
		skipped   uint64
		why       Reason
		code      int // of an RPCError
	}{
		{name: "plain", raw: `{"jsonrpc":"2.0","id":{{id}},` + ok},
		{name: "id last", raw: `{"result":{"text":"ok"},"jsonrpc":"2.0","id":{{id}}}` + "\n"},
		{name: "id as text", raw: `{"jsonrpc":"2.0","id":"{{id}}",` + ok},
		{name: "CR LF", raw: `{"jsonrpc":"2.0","id":{{id}},"result":{"text":"ok"}}` + "\r\n"},
		{name: "BOM", raw: "\ufeff" + `{"jsonrpc":"2.0","id":{{id}},` + ok},
		{name: "blank lines", raw: "\n\r\n  \n" + `{"jsonrpc":"2.0","id":{{id}},` + ok},
		{name: "white space", raw: " \t" + `{"jsonrpc":"2.0","id":{{id}},"result":{"text":"ok"}} ` + "\n"},
		{name: "noise", raw: "starting " + canary + "\n{not json\n42\nnull\n\"text\"\n{}\n[1]\n" + `{"jsonrpc":"2.0","id":{{id}},` + ok, skipped: 7},
		{name: "noise with NUL", raw: "\x00\xff\xfe\n" + `{"jsonrpc":"2.0","id":{{id}},` + ok, skipped: 1},
		{name: "unknown ids", raw: `{"jsonrpc":"2.0","id":99999,"result":{}}` + "\n" + `{"jsonrpc":"2.0","id":0,"result":{}}` + "\n" + `{"jsonrpc":"2.0","id":{{id}},` + ok},
		{name: "batch", raw: `[{"jsonrpc":"2.0","method":"n"},{"jsonrpc":"2.0","id":{{id}},"result":{"text":"ok"}}]` + "\n"},
		{name: "null id, no error", raw: `{"jsonrpc":"2.0","id":null,"result":{}}` + "\n" + `{"jsonrpc":"2.0","id":{{id}},` + ok, skipped: 1},
		{name: "an error about a notification", raw: `{"jsonrpc":"2.0","id":null,"error":{"code":-32601,"message":"` + canary + `"}}` + "\n" + `{"jsonrpc":"2.0","error":{"code":-32602,"message":"` + canary + `"}}` + "\n" + `{"jsonrpc":"2.0","id":{{id}},` + ok, skipped: 2},
		{name: "request with a null id", raw: `{"jsonrpc":"2.0","id":null,"method":"ping"}` + "\n" + `{"jsonrpc":"2.0","id":{{id}},` + ok, skipped: 1},

		{name: "error", raw: `{"jsonrpc":"2.0","id":{{id}},"error":{"code":-32602,"message":"` + canary + `"}}` + "\n", code: -32602},
		{name: "error with null id", raw: `{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"` + canary + `"}}` + "\n", code: -32700},
		{name: "error without id", raw: `{"jsonrpc":"2.0","error":{"code":-32700,"message":"` + canary + `"}}` + "\n", code: -32700},
		{name: "error that is none", raw: `{"jsonrpc":"2.0","id":{{id}},"error":"` + canary + `"}` + "\n", why: ReasonProtocol},
		{name: "neither", raw: `{"jsonrpc":"2.0","id":{{id}}}` + "\n", why: ReasonProtocol},
		{name: "both", raw: `{"jsonrpc":"2.0","id":{{id}},"result":{},"error":{"code":1,"message":"` + canary + `"}}` + "\n", why: ReasonProtocol},
		{name: "broken off", raw: `{"jsonrpc":"2.0","id":{{id}},"result":{"text":"` + canary + "\n", why: ReasonProtocol},
		{name: "no version", raw: `{"id":{{id}},"result":{"text":"` + canary + `"}}` + "\n", why: ReasonProtocol},
	}
	tr := openStdio(t, stdioConfig(t), nil, Inbound{})
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			skipped := tr.Skipped()
			got, err := doWithin(t, tr, 5*time.Second, "raw", order{Text: test.raw})
			switch {
			case test.code != 0:
				var rpc *RPCError
				if !errors.As(err, &rpc) || rpc.Code != test.code || rpc.Message != canary || rpc.Op != "raw" {
					t.Errorf("Call() = %v, %#v want RPCError %d", got, err, test.code)
				}
			case test.why != "":
				if e := wantChildFault(t, err, test.why, true); len(e.Raw) == 0 {
					t.Error("error has no Raw")
				}
			case err != nil || got.Text != "ok":
				t.Errorf("Call() = %v, %v want ok", got, err)
			}
			if n := tr.Skipped() - skipped; n != test.skipped {
				t.Errorf("Skipped() rose by %d want %d", n, test.skipped)
			}
			mustEcho(t, tr)
		})
	}
	if got := tr.late.Load(); got != 2 {
		t.Errorf("late answers = %d want 2", got)
	}
	if got, err := do(t, tr, "drip", order{}); err != nil || got.Text != "ok" {
		t.Errorf("Call(drip) = %v, %v", got, err)
	}
}

// A newline in params is white space, but would cut the message in two.
func TestStdioNewlineInParams(t *testing.T) {
	tr := openStdio(t, stdioConfig(t), nil, Inbound{})
	res, err := tr.Call(t.Context(), &Request{Method: "echo", Params: json.RawMessage("{\n\"text\":\n\"a\\nb\"}")})
	if err != nil || !strings.Contains(string(res), `"a\nb"`) {
		t.Errorf("Call() = %s, %v", res, err)
	}
}

func TestStdioLimits(t *testing.T) {
	cfg := stdioConfig(t)
	cfg.MaxMessageBytes = 64 << 10
	tr := openStdio(t, cfg, nil, Inbound{})
	for _, n := range []int{0, 100, smallLine - 40, smallLine, 30 << 10, 64<<10 - 100} {
		if got, err := do(t, tr, "big", order{N: n}); err != nil || len(got.Text) != n {
			t.Errorf("Call(big %d) = %d bytes, %v", n, len(got.Text), err)
		}
	}
	for _, n := range []int{64 << 10, 1 << 20, 32 << 20} {
		_, err := do(t, tr, "big", order{N: n})
		wantChildFault(t, err, ReasonLimit, true)
		mustEcho(t, tr)
	}
	_, err := do(t, tr, "echo", order{Text: strings.Repeat("x", 64<<10)})
	wantChildFault(t, err, ReasonLimit, false)
	noWordOfTheChild(t, tr.Notify(t.Context(), &Request{Method: "n", Params: make([]byte, 64<<10)}))
	wantChildFault(t, tr.Notify(t.Context(), &Request{Method: "n", Params: make([]byte, 64<<10)}), ReasonLimit, false)

	// The id may come last.
	for _, n := range []int{64 << 10, 1 << 20} {
		_, err = do(t, tr, "endless", order{N: n, Text: `{"result":{"text":"`, List: []string{`"},"jsonrpc":"2.0","id":{{id}}}`, "\n"}})
		wantChildFault(t, err, ReasonLimit, true)
		mustEcho(t, tr)
	}
	// A request of the server's is no answer, whatever its id and wherever that stands.
	for _, n := range []int{64<<10 - 40, 64 << 10, 1 << 20} {
		for _, ask := range []string{`{"method":"ping","params":{"text":"`, `{"jsonrpc":"2.0","id":{{id}},"method":"ping","params":{"text":"`} {
			tail := []string{`"},"jsonrpc":"2.0","id":{{id}}}`, "\n", `{"jsonrpc":"2.0","id":{{id}},"result":{}}`, "\n"}
			if _, err := do(t, tr, "endless", order{N: n, Text: ask, List: tail}); err != nil {
				t.Errorf("after a request of %d bytes that has the same id: %v", n, err)
			}
		}
	}
	// The limit is told before the line ends, which it may never do.
	_, err = do(t, tr, "endless", order{N: 1 << 20, Text: `{"jsonrpc":"2.0","id":{{id}},"result":"`})
	wantChildFault(t, err, ReasonLimit, true)
	// A line that is nobody's is noise, of whatever length.
	skipped := tr.Skipped()
	if _, err := do(t, tr, "endless", order{N: 1 << 20, Text: "\n", List: []string{"\n", `{"jsonrpc":"2.0","id":{{id}},"result":{}}` + "\n"}}); err != nil {
		t.Errorf("Call(endless) = %v", err)
	}
	if n := tr.Skipped() - skipped; n != 1 {
		t.Errorf("Skipped() rose by %d want 1", n)
	}
}

func TestStdioTimeout(t *testing.T) {
	tr := openStdio(t, stdioConfig(t), nil, Inbound{})
	late := tr.late.Load()
	_, err := doWithin(t, tr, 50*time.Millisecond, "later", order{N: 300})
	wantChildFault(t, err, ReasonTimeout, true)
	if errors.Is(err, context.DeadlineExceeded) {
		t.Error("a ceiling of ours looks like the caller's")
	}
	_, err = doWithin(t, tr, 20*time.Millisecond, "initialize", order{})
	wantChildFault(t, err, ReasonTimeout, true)
	_, err = doWithin(t, tr, -time.Second, "never", order{})
	wantChildFault(t, err, ReasonTimeout, false)

	causeErr := errors.New("had enough")
	ended := []struct {
		name string
		ctx  func() (context.Context, context.CancelFunc)
		is   []error
	}{
		{"cancel", func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(30*time.Millisecond, cancel)
			return ctx, cancel
		}, []error{context.Canceled}},
		{"deadline", func() (context.Context, context.CancelFunc) {
			return context.WithTimeout(t.Context(), 30*time.Millisecond)
		}, []error{context.DeadlineExceeded}},
		{"cause", func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(30*time.Millisecond, func() { cancel(causeErr) })
			return ctx, func() { cancel(nil) }
		}, []error{context.Canceled, causeErr}},
	}
	for _, test := range ended {
		ctx, cancel := test.ctx()
		_, err := tr.Call(ctx, &Request{Method: "silent"})
		cancel()
		wantChildFault(t, err, ReasonCancelled, true)
		for _, is := range test.is {
			if !errors.Is(err, is) {
				t.Errorf("%s: errors.Is(%v, %v) = false", test.name, err, is)
			}
		}
		_, err = tr.Call(ctx, &Request{Method: "never"})
		wantChildFault(t, err, ReasonCancelled, false)
	}

	// By now the late answer has come, and it was nobody's.
	if _, err := do(t, tr, "later", order{N: 300}); err != nil {
		t.Fatal(err)
	}
	if n := tr.late.Load() - late; n != 1 {
		t.Errorf("%d late answers want 1", n)
	}
	got, err := do(t, tr, "seen", order{})
	if err != nil {
		t.Fatal(err)
	}
	count := func(s string) (n int) {
		for _, line := range got.List {
			if strings.Contains(line, s) {
				n++
			}
		}
		return n
	}
	for s, want := range map[string]int{
		`"notifications/cancelled"`:        4, // later, silent three times; not initialize
		`"requestId":1,"reason":"timeout"`: 1,
		`"reason":"cancelled"`:             3,
		`"never"`:                          0,
	} {
		if n := count(s); n != want {
			t.Errorf("the server saw %s %d times want %d", s, n, want)
		}
	}
}

func TestStdioSlots(t *testing.T) {
	cfg := stdioConfig(t)
	cfg.MaxInFlight = 2
	tr := openStdio(t, cfg, nil, Inbound{})
	ctx, cancel := context.WithCancel(t.Context())
	var held sync.WaitGroup
	for range 2 {
		held.Go(func() { tr.Call(ctx, &Request{Method: "silent"}) })
	}
	for len(tr.slots) > 0 {
		runtime.Gosched()
	}
	_, err := doWithin(t, tr, 30*time.Millisecond, "never", order{})
	wantChildFault(t, err, ReasonTimeout, false)
	short, stop := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer stop()
	_, err = tr.Call(short, &Request{Method: "never"})
	wantChildFault(t, err, ReasonCancelled, false)
	cancel()
	held.Wait()
	got, err := do(t, tr, "seen", order{})
	if err != nil || strings.Contains(strings.Join(got.List, "\n"), "never") {
		t.Errorf("Call(seen) = %v, %v; a call without a slot left a trace", got, err)
	}
}

// Both ways of writing: with deadlines of the system, and beside.
func TestStdioNeverReads(t *testing.T) {
	for _, aside := range []bool{false, true} {
		t.Run(fmt.Sprintf("aside=%v", aside), func(t *testing.T) {
			tr := openStdio(t, stdioConfig(t), nil, Inbound{})
			blind := func() { // takes the deadlines away
				if c := tr.child.Load(); aside && c.deadline != nil {
					c.deadline.SetWriteDeadline(time.Time{})
					c.deadline = nil
				}
			}
			blind()
			mustEcho(t, tr)
			do(t, tr, "sulk", order{})
			waiting := make(chan error, 1) // has been written, and is lost with the child
			go func() {
				_, err := tr.Call(t.Context(), &Request{Method: "silent"})
				waiting <- err
			}()
			for c := tr.child.Load(); ; runtime.Gosched() {
				c.mu.Lock()
				n := len(c.table)
				c.mu.Unlock()
				if n == 1 {
					break
				}
			}
			start := time.Now()
			_, err := doWithin(t, tr, 150*time.Millisecond, "echo", order{Text: strings.Repeat("x", 1<<20)})
			wantChildFault(t, err, ReasonTimeout, true)
			if d := time.Since(start); d > 2*time.Second {
				t.Errorf("a deadline of 150 ms took %v", d)
			}
			wantChildFault(t, <-waiting, ReasonDisconnected, true)
			_, err = do(t, tr, "echo", order{})
			wantChildFault(t, err, ReasonDisconnected, false)
			if fresh, err := tr.Open(t.Context(), Inbound{}); err != nil || !fresh {
				t.Fatalf("Open() = %v, %v want true, nil", fresh, err)
			}
			blind()
			mustEcho(t, tr)

			// The caller's cancel frees a write as well.
			do(t, tr, "sulk", order{})
			ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond)
			defer cancel()
			_, err = tr.Call(ctx, &Request{Method: "echo", Params: []byte(`"` + strings.Repeat("x", 1<<20) + `"`)})
			wantChildFault(t, err, ReasonCancelled, true)
		})
	}
}

// A message of which nothing was written is not sent, and the stream is whole.
func TestStdioFullPipe(t *testing.T) {
	tr := openStdio(t, stdioConfig(t), nil, Inbound{})
	if tr.child.Load().deadline == nil {
		t.Skip("no write deadlines here")
	}
	do(t, tr, "sulk", order{})
	pad := []byte(`"` + strings.Repeat("x", 1000) + `"`)
	var err error
	for err == nil {
		err = tr.Notify(t.Context(), &Request{Method: "n", Params: pad, Deadline: time.Now().Add(100 * time.Millisecond)})
	}
	wantChildFault(t, err, ReasonTimeout, false)
	var calls sync.WaitGroup
	for range 8 { // one writes, the others wait for their turn
		calls.Go(func() {
			_, err := tr.Call(t.Context(), &Request{Method: "echo", Params: pad, Deadline: time.Now().Add(100 * time.Millisecond)})
			var e *TransportError
			if !errors.As(err, &e) || e.Reason != ReasonTimeout || e.Sent {
				t.Errorf("Call() = %v want a timeout, not sent", err)
			}
		})
	}
	calls.Wait()
	if !tr.child.Load().alive() {
		t.Error("the child was ended for a message that was never begun")
	}
}

// An answer to what has not been written yet, because another message holds the
// pipe, is none, and costs nobody but its caller.
func TestStdioAnsweredBeforeSent(t *testing.T) {
	for _, answer := range []string{
		`{"jsonrpc":"2.0","id":3,"result":{"text":"` + canary + `"}}`,
		`{"jsonrpc":"2.0","id":3,"error":{"code":1,"message":"` + canary + `"}}`,
	} {
		tr := openStdio(t, stdioConfig(t), nil, Inbound{})
		do(t, tr, "nap", order{N: 1500, Text: answer + "\n"})
		large := strings.Repeat("x", 1<<20)
		writing := make(chan error, 1)
		go func() {
			got, err := doWithin(t, tr, time.Minute, "echo", order{Text: large})
			if err == nil && got.Text != large {
				err = errors.New("another text")
			}
			writing <- err
		}()
		for tr.lastID.Load() < 2 || len(tr.child.Load().turn) == 0 {
			runtime.Gosched()
		}
		_, err := doWithin(t, tr, 5*time.Second, "never", order{})
		wantChildFault(t, err, ReasonProtocol, false)
		if err := <-writing; err != nil {
			t.Errorf("the call that was being written: %v", err)
		}
		if got, err := do(t, tr, "seen", order{}); err != nil || strings.Contains(strings.Join(got.List, "\n"), "never") {
			t.Errorf("Call(seen) = %.300q, %v", got.List, err)
		}
	}
}

func TestStdioExit(t *testing.T) {
	tests := []struct {
		name   string
		before []string // a relative to start first
		method string
		order  order
		detail string
		code   int
	}{
		{name: "exit", method: "exit", order: order{N: 3, Text: canary + ": no database\n"}, detail: "exit status 3", code: 3},
		{name: "exit 0", method: "exit", order: order{Text: canary}, detail: "exit status 0"},
		{name: "killed", method: "die", detail: "signal: killed", code: killed},
		{name: "stdout closed", method: "mute", detail: "the child closed a pipe", code: killed},
		{name: "orphan", before: []string{"sleep"}, method: "exit", order: order{N: 4}, detail: "exit status 4", code: 4},
		{name: "orphan with pipes", before: []string{"sleep", "hold", "deaf"}, method: "exit", order: order{N: 5, Text: canary}, detail: "exit status 5", code: 5},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			args := []string{}
			if test.code == killed {
				args = append(args, "stay")
			}
			tr := openStdio(t, stdioConfig(t, args...), nil, Inbound{})
			var orphans []relative
			if test.before != nil {
				orphans = append(orphans, spawn(t, tr, test.before))
			}
			start := time.Now()
			_, err := do(t, tr, test.method, test.order)
			e := wantChildFault(t, err, ReasonDisconnected, true)
			if d := time.Since(start); d > 3*time.Second {
				t.Errorf("the exit was noticed after %v", d)
			}
			if e.Detail != test.detail && (runtime.GOOS != "windows" || test.name != "killed") {
				t.Errorf("Detail = %q want %q", e.Detail, test.detail)
			}
			if want := strings.TrimSpace(test.order.Text); string(e.Raw) != want {
				t.Errorf("Raw = %q want %q", e.Raw, want)
			}
			_, err = do(t, tr, "echo", order{})
			wantChildFault(t, err, ReasonDisconnected, false)
			first := tr.child.Load()
			if fresh, err := tr.Open(t.Context(), Inbound{}); err != nil || !fresh {
				t.Fatalf("Open() = %v, %v want true, nil", fresh, err)
			}
			wantGone(t, first.proc.Pid)
			wantEnded(t, orphans...)
			if code, ok := tr.ExitCode(); ok {
				t.Errorf("ExitCode() = %d of a child that runs", code)
			}
			if first.code != test.code {
				t.Errorf("exit code = %d want %d", first.code, test.code)
			}
			mustEcho(t, tr)
		})
	}
}

// wantGone fails the test if one of the processes runs. One that has ended and
// waits to be reaped by its new parent does not.
func wantGone(t *testing.T, pids ...int) {
	t.Helper()
	for _, pid := range pids {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if pid == 0 || err != nil || runtime.GOOS != "linux" {
			continue
		}
		if _, state, _ := bytes.Cut(stat, []byte(") ")); !bytes.HasPrefix(state, []byte("Z")) && !bytes.HasPrefix(state, []byte("X")) {
			t.Errorf("process is left: %s", stat)
		}
	}
}

// What was agreed with one child is not asked of the next, which has not shaken
// hands yet: a call that was ready to go when the child died is not sent.
func TestStdioNextChild(t *testing.T) {
	tr := openStdio(t, stdioConfig(t), nil, Inbound{})
	first := tr.connection()
	do(t, tr, "exit", order{})
	if fresh, err := tr.Open(t.Context(), Inbound{}); err != nil || !fresh {
		t.Fatalf("Open() = %v, %v want true, nil", fresh, err)
	}
	_, err := tr.Call(t.Context(), &Request{Method: "never", Version: version2511, conn: first})
	wantChildFault(t, err, ReasonDisconnected, false)
	if got, err := do(t, tr, "seen", order{}); err != nil || len(got.List) != 1 {
		t.Errorf("the next child saw %q, %v", got.List, err)
	}

	// Whoever started the child, a session shakes hands with it.
	cfg := stdioConfig(t)
	cfg.Env[childEnv], cfg.Protocol = "puppet", version2511
	shared := newStdioTransport(cfg, &Options{})
	defer shared.Close()
	one, other := NewSession(shared, cfg, nil), NewSession(shared, cfg, nil)
	for range 2 {
		for _, s := range []*TransportSession{one, other} {
			if res, err := s.CallTool(t.Context(), &Call{Tool: "t"}); err != nil || s.link.Load().conn != shared.connection() {
				t.Errorf("CallTool() = %v, %v", res, err)
			}
		}
		one.CallTool(t.Context(), &Call{Tool: "t", Arguments: map[string]any{"do": "exit"}})
	}
}

func TestStdioClose(t *testing.T) {
	tests := []struct {
		name  string
		shell string // a wrapper; $0 is the child
		args  []string
		spawn [][]string
		code  int
		limit time.Duration
	}{
		{name: "polite", limit: 400 * time.Millisecond},
		{name: "ignores the end of stdin", args: []string{"stay"}, code: killed, limit: 2 * time.Second},
		{name: "ignores TERM", args: []string{"stay", "deaf"}, code: killed, limit: 7 * time.Second},
		{name: "shell", shell: `"$0"; exit 3`, code: 3, limit: 400 * time.Millisecond},
		{name: "shell, stubborn", shell: `"$0" stay; exit 3`, args: []string{"stay"}, code: killed, limit: 2 * time.Second},
		{name: "shell, background", shell: `exec 3<&0; "$0" <&3 & wait`, limit: 400 * time.Millisecond},
		{name: "child", spawn: [][]string{{"sleep"}}, limit: 400 * time.Millisecond},
		{name: "child that holds the pipes", spawn: [][]string{{"sleep", "hold"}}, limit: time.Second},
		{name: "deaf child that holds the pipes", spawn: [][]string{{"sleep", "hold", "deaf"}}, limit: time.Second},
		{name: "double fork", spawn: [][]string{{"double", "hold", "deaf"}, {"double"}}, limit: time.Second},
		{name: "all of it", shell: `"$0" stay; exit 3`, args: []string{"stay"}, spawn: [][]string{{"double", "hold", "deaf"}, {"sleep", "deaf"}}, code: killed, limit: 2 * time.Second},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			cfg := stdioConfig(t, test.args...)
			if test.shell != "" {
				if runtime.GOOS == "windows" {
					t.Skip("no shell")
				}
				cfg.Command = []string{"/bin/sh", "-c", test.shell, cfg.Command[0]}
			}
			tr := newStdioTransport(cfg, &Options{})
			if _, err := tr.Open(t.Context(), Inbound{}); err != nil {
				t.Fatal(err)
			}
			pid := tr.child.Load().proc.Pid
			var relatives []relative
			for _, list := range test.spawn {
				relatives = append(relatives, spawn(t, tr, list))
			}
			mustEcho(t, tr)
			pending := make(chan error, 1)
			go func() {
				_, err := tr.Call(t.Context(), &Request{Method: "silent"})
				pending <- err
			}()
			for len(tr.slots) == cap(tr.slots) {
				runtime.Gosched()
			}
			start := time.Now()
			if err := tr.Close(); err != nil {
				t.Errorf("Close() = %v", err)
			}
			if d := time.Since(start); d > test.limit+time.Second { // of other tests on the same machine
				t.Errorf("Close took %v want at most %v", d, test.limit)
			}
			wantGone(t, pid)
			wantEnded(t, relatives...)
			if code, ok := tr.ExitCode(); !ok || code != test.code {
				t.Errorf("ExitCode() = %d, %v want %d, true", code, ok, test.code)
			}
			var e *TransportError
			if err := <-pending; !errors.As(err, &e) || e.Reason != ReasonDisconnected {
				t.Errorf("pending call = %v want disconnected", err)
			}
			if err := tr.Close(); err != nil {
				t.Errorf("second Close() = %v", err)
			}
			_, err := tr.Open(t.Context(), Inbound{})
			wantChildFault(t, err, ReasonDisconnected, false)
			_, err = do(t, tr, "echo", order{})
			wantChildFault(t, err, ReasonDisconnected, false)
		})
	}
}

func TestStdioCloseWhileCalling(t *testing.T) {
	for range 5 {
		cfg := stdioConfig(t)
		cfg.MaxInFlight = 8
		tr := newStdioTransport(cfg, &Options{})
		if _, err := tr.Open(t.Context(), Inbound{}); err != nil {
			t.Fatal(err)
		}
		mustEcho(t, tr)
		var calls sync.WaitGroup
		for range 24 {
			calls.Go(func() {
				for {
					_, err := tr.Call(t.Context(), &Request{Method: "echo", Params: []byte(`{"text":"` + strings.Repeat("x", 6000) + `"}`)})
					if err != nil {
						if !errors.Is(err, ReasonDisconnected) {
							t.Errorf("Call() = %v want disconnected", err)
						}
						return
					}
				}
			})
		}
		var closers sync.WaitGroup
		for range 3 {
			closers.Go(func() { tr.Close() })
		}
		closers.Wait()
		calls.Wait()
	}
}

func TestStdioOpen(t *testing.T) {
	cfg := stdioConfig(t)
	exe := cfg.Command[0]
	t.Run("does not start", func(t *testing.T) {
		for _, argv := range [][]string{{"no-such-command-here"}, {filepath.Join(t.TempDir(), "none")}, {t.TempDir()}, nil} {
			cfg := cfg
			cfg.Command = argv
			tr := newStdioTransport(cfg, &Options{})
			for range 2 {
				_, err := tr.Open(t.Context(), Inbound{})
				if e := wantChildFault(t, err, ReasonUnavailable, false); e.Op != "connect" || e.Err == nil || e.Detail == "" {
					t.Errorf("Open(%q) = %#v", argv, e)
				}
			}
			_, err := do(t, tr, "echo", order{})
			wantChildFault(t, err, ReasonDisconnected, false)
			wantChildFault(t, tr.Notify(t.Context(), &Request{Method: "n"}), ReasonDisconnected, false)
			if err := tr.Close(); err != nil {
				t.Errorf("Close() = %v", err)
			}
		}
	})
	t.Run("once for all", func(t *testing.T) {
		tr := newStdioTransport(cfg, &Options{})
		defer tr.Close()
		var wg sync.WaitGroup
		fresh := make(chan bool, 16)
		for range cap(fresh) {
			wg.Go(func() {
				f, err := tr.Open(t.Context(), Inbound{})
				if err != nil {
					t.Errorf("Open() = %v", err)
				}
				fresh <- f
			})
		}
		wg.Wait()
		close(fresh)
		n := 0
		for f := range fresh {
			if f {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%d of 16 were told of a new child, want 1", n)
		}
	})
	t.Run("given up", func(t *testing.T) {
		tr := newStdioTransport(cfg, &Options{})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for range 20 { // the start may be ahead of the cancel, or not
			if fresh, err := tr.Open(ctx, Inbound{}); err == nil {
				if !fresh {
					t.Fatal("a child was started that nobody was told of")
				}
				tr.child.Load().end(0, "again")
			} else {
				wantChildFault(t, err, ReasonCancelled, false)
			}
		}
		tr.Close()
	})
	t.Run("environment", func(t *testing.T) {
		cfg := cfg
		t.Setenv("MCP_TEST_SECRET", canary)
		t.Setenv("MCP_TEST_ALLOWED", "a")
		t.Setenv("MCP_TEST_BOTH", "theirs")
		cfg.EnvAllow = []string{"MCP_TEST_ALLOWED", "MCP_TEST_BOTH", "MCP_TEST_UNSET"}
		cfg.Env = map[string]string{childEnv: "serve", "MCP_TEST_BOTH": "ours"}
		cfg.Dir = t.TempDir()
		tr := openStdio(t, cfg, nil, Inbound{})
		got, err := do(t, tr, "env", order{List: []string{"MCP_TEST_SECRET", "PATH", "HOME", "MCP_TEST_ALLOWED", "MCP_TEST_BOTH", "MCP_TEST_UNSET"}})
		if want := []string{"MCP_TEST_ALLOWED=a", "MCP_TEST_BOTH=ours"}; err != nil || !slices.Equal(got.List, want) {
			t.Errorf("the child has %q, %v want %q", got.List, err, want)
		}
		got, err = do(t, tr, "dir", order{})
		want, _ := filepath.EvalSymlinks(cfg.Dir)
		if err != nil || got.Text != want {
			t.Errorf("the child is in %q, %v want %q", got.Text, err, want)
		}
	})
	t.Run("exits at once", func(t *testing.T) {
		cfg := cfg
		cfg.Env = map[string]string{childEnv: "no such behaviour"}
		cfg.Command = []string{exe}
		tr := openStdio(t, cfg, nil, Inbound{})
		_, err := do(t, tr, "initialize", order{})
		var e *TransportError
		if !errors.As(err, &e) || e.Reason != ReasonDisconnected || e.Detail != "exit status 2" || !strings.Contains(string(e.Raw), "no child behaviour") {
			t.Errorf("Call() = %#v", err)
		}
		if code, ok := tr.ExitCode(); ok && code != 2 {
			t.Errorf("ExitCode() = %d, %v want 2, true", code, ok)
		}
		if got := strings.Join(tr.StderrTail(), ""); !strings.Contains(got, "no child behaviour") {
			t.Errorf("StderrTail() = %q", got)
		}
	})
}

// One fault of each kind among calls that must not notice.
func TestStdioBlastRadius(t *testing.T) {
	cfg := stdioConfig(t)
	cfg.MaxMessageBytes = 256 << 10
	tr := openStdio(t, cfg, nil, Inbound{})
	faults := []struct {
		method string
		order  order
		within time.Duration
		why    Reason
	}{
		{"raw", order{Text: `{"jsonrpc":"2.0","id":{{id}},"result":{"a":` + canary + "}}\n"}, time.Minute, ReasonProtocol},
		{"raw", order{Text: `{"jsonrpc":"2.0","id":{{id}},"id":{{id}},"result":{}}` + "\n"}, 200 * time.Millisecond, ReasonTimeout},
		{"raw", order{Text: `{"jsonrpc":"2.0","id":{{id}}}` + "\n"}, time.Minute, ReasonProtocol},
		{"raw", order{Text: "not JSON " + canary + "\n"}, 200 * time.Millisecond, ReasonTimeout},
		{"big", order{N: 4 << 20}, time.Minute, ReasonLimit},
		{"echo", order{Text: strings.Repeat("x", 300<<10)}, time.Minute, ReasonLimit},
		{"silent", order{}, 100 * time.Millisecond, ReasonTimeout},
		{"later", order{N: 400}, 100 * time.Millisecond, ReasonTimeout},
	}
	var calls sync.WaitGroup
	for i := range 32 {
		calls.Go(func() {
			if i < len(faults) {
				f := faults[i]
				_, err := doWithin(t, tr, f.within, f.method, f.order)
				if !errors.Is(err, f.why) {
					t.Errorf("Call(%s %.60s) = %v want %s", f.method, f.order.Text, err, f.why)
				}
				return
			}
			for n := range 20 {
				want := strings.Repeat(strconv.Itoa(i), 100*n+1)
				got, err := do(t, tr, "echo", order{Text: want})
				if err != nil || got.Text != want {
					t.Errorf("Call(echo) = %.20s, %v; a fault of another call was felt", got.Text, err)
					return
				}
			}
		})
	}
	calls.Wait()
	mustEcho(t, tr)
	if fresh, err := tr.Open(t.Context(), Inbound{}); fresh || err != nil {
		t.Errorf("Open() = %v, %v want false, nil: the session was lost", fresh, err)
	}
}

func TestStdioStall(t *testing.T) {
	cfg := stdioConfig(t)
	cfg.ReadTimeout = 200 * time.Millisecond
	tr := openStdio(t, cfg, nil, Inbound{})
	if d, ok := tr.child.Load().stdout.(*os.File); !ok || d.SetReadDeadline(time.Time{}) != nil {
		t.Skip("no read deadlines here")
	}
	mustEcho(t, tr)
	time.Sleep(2 * cfg.ReadTimeout) // an idle pipe is no stall
	mustEcho(t, tr)
	if _, err := do(t, tr, "later", order{N: 500}); err != nil {
		t.Errorf("Call(later) = %v; silence between lines is no stall", err)
	}
	other := make(chan error, 1)
	go func() {
		_, err := do(t, tr, "later", order{N: 800})
		other <- err
	}()
	_, err := do(t, tr, "raw", order{Text: `{"jsonrpc":"2.0","id":{{id}},"result":{"text":"`})
	wantChildFault(t, err, ReasonTimeout, true)
	_, err = doWithin(t, tr, 50*time.Millisecond, "raw", order{Text: "the end\"}}\n"})
	wantChildFault(t, err, ReasonTimeout, true)
	if err := <-other; err != nil {
		t.Errorf("another call = %v; the stall was not its own", err)
	}
	// A line that does not say whose it is holds up everyone.
	_, err = do(t, tr, "raw", order{Text: `{"jsonrpc":"2.0",`})
	wantChildFault(t, err, ReasonTimeout, true)
}

func TestStdioNotify(t *testing.T) {
	type note struct{ method, params string }
	var mu sync.Mutex // guards got
	var got []note
	tr := openStdio(t, stdioConfig(t), nil, Inbound{Notify: func(method string, params json.RawMessage) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, note{method, string(params)})
	}})
	text := ""
	var want []note
	for i := range 100 {
		params := fmt.Sprintf(`{"i":%d}`, i)
		text += `{"jsonrpc":"2.0","method":"n","params":` + params + "}\n"
		want = append(want, note{"n", params})
	}
	text += `{"jsonrpc":"2.0","id":{{id}},"result":{}}` + "\n"
	if _, err := do(t, tr, "raw", order{Text: text}); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(got, want) {
		t.Errorf("got %v want %v", got, want)
	}
}

func TestStdioServerRequests(t *testing.T) {
	var mu sync.Mutex // guards running, most
	running, most := 0, 0
	hold := make(chan struct{})
	in := Inbound{Request: func(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
		mu.Lock()
		running++
		most = max(most, running)
		mu.Unlock()
		defer func() {
			mu.Lock()
			running--
			mu.Unlock()
		}()
		switch method {
		case "ping":
			return json.RawMessage("{\n}"), nil
		case "refuse":
			return nil, &RPCError{Code: -1, Message: "no"}
		case "fail":
			return nil, errors.New(canary)
		case "quiet":
			return nil, errNoAnswer
		case "huge":
			return json.RawMessage(`"` + strings.Repeat("x", 70<<10) + `"`), nil
		}
		select {
		case <-hold:
		case <-ctx.Done():
		}
		return nil, ctx.Err()
	}}
	cfg := stdioConfig(t)
	cfg.MaxMessageBytes = 64 << 10
	tr := openStdio(t, cfg, nil, in)
	for _, test := range []struct{ method, want string }{
		{"ping", `{"jsonrpc":"2.0","id":"s0","result":{ }}`},
		{"refuse", `{"jsonrpc":"2.0","id":"s0","error":{"code":-1,"message":"no"}}`},
		{"fail", `{"jsonrpc":"2.0","id":"s0","error":{"code":-32603,"message":"internal error"}}`},
		{"huge", `{"jsonrpc":"2.0","id":"s0","error":{"code":-32603,"message":"internal error"}}`},
		{"quiet", ""},
	} {
		if _, err := do(t, tr, "ask", order{Text: test.method, N: 1}); err != nil {
			t.Fatal(err)
		}
		tr.waitIdle()
		got, err := do(t, tr, "seen", order{})
		if err != nil {
			t.Fatal(err)
		}
		last := got.List[len(got.List)-2] // before the seen itself
		if test.want == "" && !strings.Contains(last, `"ask"`) || test.want != "" && last != test.want {
			t.Errorf("answer to %s = %s want %s", test.method, last, test.want)
		}
	}
	// A burst is answered, as far as it is not absurd.
	skipped := tr.Skipped()
	if _, err := do(t, tr, "ask", order{Text: "ping", N: maxAsked}); err != nil {
		t.Fatal(err)
	}
	tr.waitIdle()
	if n := tr.Skipped() - skipped; n != 0 {
		t.Errorf("%d of %d requests were dropped", n, maxAsked)
	}
	// What the server cancels is given up, and not answered.
	var text strings.Builder
	for i := range maxHandlers + 4 {
		fmt.Fprintf(&text, `{"jsonrpc":"2.0","id":"w%d","method":"hang"}`+"\n", i)
	}
	for i := range maxHandlers + 4 {
		fmt.Fprintf(&text, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"w%d"}}`+"\n", i)
	}
	if _, err := do(t, tr, "raw", order{Text: text.String() + `{"jsonrpc":"2.0","id":{{id}},"result":{}}` + "\n"}); err != nil {
		t.Fatal(err)
	}
	tr.waitIdle()
	if got, err := do(t, tr, "seen", order{}); err != nil || strings.Contains(strings.Join(got.List, "\n"), `"id":"w`) {
		t.Errorf("Call(seen) = %q, %v: a cancelled request was answered", got.List, err)
	}
	// Handlers that hang hold nothing up, and take no more than their share.
	if _, err := do(t, tr, "ask", order{Text: "hang", N: 1000}); err != nil {
		t.Fatal(err)
	}
	mustEcho(t, tr)
	mu.Lock()
	if most > maxHandlers {
		t.Errorf("%d handlers at a time want at most %d", most, maxHandlers)
	}
	mu.Unlock()
	if n := tr.Skipped() - skipped; n < 1000-maxAsked {
		t.Errorf("%d requests dropped, the rest is held in memory", n)
	}
	if err := tr.Close(); err != nil {
		t.Error(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if running != 0 {
		t.Errorf("%d handlers run after Close", running)
	}
}

// waitIdle waits until no request of the server is being answered.
func (t *StdioTransport) waitIdle() {
	for b := t.child.Load().inbox; ; time.Sleep(time.Millisecond) {
		b.mu.Lock()
		n := b.handlers
		b.mu.Unlock()
		if n == 0 {
			return
		}
	}
}

// stuck is a writer that takes nothing.
type stuck struct{ free chan struct{} }

func (s stuck) Write(p []byte) (int, error) {
	<-s.free
	return len(p), nil
}

func TestStdioStderr(t *testing.T) {
	s := stuck{make(chan struct{})}
	defer close(s.free)
	tr := openStdio(t, stdioConfig(t), &Options{Stderr: s}, Inbound{})
	flood := strings.Repeat("warn: slow disk\n", 16384) + strings.Repeat("10%\r", 65536) + "\nlast\n"
	if _, err := do(t, tr, "stderr", order{Text: flood}); err != nil {
		t.Fatal(err)
	}
	var got []string
	for len(got) == 0 || got[len(got)-1] != "last" {
		got = tr.StderrTail()
		runtime.Gosched()
	}
	if len(got) != 50 || got[47] != "warn: slow disk" || got[48] != "10%" {
		t.Errorf("StderrTail() = %q", got)
	}

	var mu sync.Mutex // guards copied
	var copied bytes.Buffer
	w := writerFunc(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return copied.Write(p)
	})
	tr = openStdio(t, stdioConfig(t), &Options{Stderr: w}, Inbound{})
	if _, err := do(t, tr, "stderr", order{Text: "one\ntwo\r\nthree"}); err != nil {
		t.Fatal(err)
	}
	tr.Close()
	if got := copied.String(); got != "one\ntwo\nthree\n" {
		t.Errorf("copy of stderr = %q", got)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestTail(t *testing.T) {
	tests := []struct {
		in   string
		want []string
	}{
		{"", nil},
		{"a", []string{"a"}},
		{"a\nb\n", []string{"a", "b"}},
		{"a\r\nb\r\r\nc", []string{"a", "b", "c"}},
		{"10%\r20%\r30%", []string{"30%"}},
		{"10%\r20%\r\nx", []string{"20%", "x"}},
		{"\rx\r\ry\n\nz\n", []string{"y", "", "z"}},
		{strings.Repeat("x", 5000) + "\ny", []string{strings.Repeat("x", tailLine), "y"}},
		{strings.Repeat("x", 5000) + "\ry", []string{"y"}},
	}
	for _, test := range tests {
		for _, chunk := range []int{1, 2, 3, 7, 1 << 20} {
			var tl tail
			for b := range slices.Chunk([]byte(test.in), chunk) {
				tl.write(b)
			}
			if got := tl.lines(); !slices.Equal(got, test.want) {
				t.Errorf("tail of %.40q in pieces of %d = %.80q want %.80q", test.in, chunk, got, test.want)
			}
		}
	}
	var tl tail
	for i := range 1000 {
		fmt.Fprintf(writerFunc(func(p []byte) (int, error) { tl.write(p); return len(p), nil }), "%d\n", i)
	}
	tl.write([]byte("end"))
	if got := tl.lines(); len(got) != tailLines || got[0] != "951" || got[49] != "end" {
		t.Errorf("lines() = %q", got)
	}
	if got := string(tl.last(8)); got != "\n999\nend" {
		t.Errorf("last(8) = %q", got)
	}
}

// cutAll cuts a stream that comes in pieces as sizes say, over and over.
func cutAll(t *testing.T, stream, sizes []byte, max int) (lines []string) {
	t.Helper()
	held := 0
	var ends []string
	l := lineCutter{max: max, give: func([]byte) {}, grab: func(n int) []byte {
		held = n
		return make([]byte, n)
	}, dropped: func(end []byte) { ends = append(ends, "end: "+string(end)) }}
	for i := 0; len(stream) > 0; i++ {
		room := l.room()
		n := 1 + i%3
		if len(sizes) > 0 {
			n = 1 + int(sizes[i%len(sizes)])*16
		}
		n = min(n, len(room), len(stream))
		if n == 0 {
			t.Fatalf("no room, though only %d bytes are held", len(l.rest()))
		}
		l.add(copy(room, stream[:n]))
		stream = stream[n:]
		for {
			line, over, ok := l.next()
			if !ok {
				break
			}
			if len(line) > max {
				t.Fatalf("a line of %d bytes, over the limit of %d", len(line), max)
			}
			if over {
				lines = append(lines, "over: "+string(line))
				continue
			}
			line, _ = l.own(line)
			lines = append(lines, string(line))
		}
		if len(l.buf) > max+2 && len(l.buf) > smallLine || held > max+2 {
			t.Fatalf("%d and %d bytes held, the limit is %d", len(l.buf), held, max)
		}
	}
	return append(append(lines, ends...), "rest: "+string(l.rest()))
}

// FuzzLines checks that it does not matter in which pieces a stream comes, and
// that no more is held than the limit.
func FuzzLines(f *testing.F) {
	for _, s := range []string{
		"", "\n", "a\n", "a", "a\r\nb\r\n", "\ufeffa\n", "\r\r\n \n", strings.Repeat("x", 100) + "\nshort\n",
		strings.Repeat("x", 9000) + "\n" + strings.Repeat("y", 9001) + "\r\n", "12345678\r\n123456789\r\n1234567\n",
	} {
		f.Add([]byte(s), []byte{0}, uint16(8))
		f.Add([]byte(s), []byte{3, 0, 9, 255}, uint16(9000))
	}
	f.Fuzz(func(t *testing.T, stream, sizes []byte, limit uint16) {
		max := 1 + int(limit)
		got, want := cutAll(t, stream, sizes, max), cutAll(t, stream, []byte{255, 255, 255}, max)
		if !slices.Equal(got, want) {
			t.Fatalf("in other pieces: %.300q want %.300q", got, want)
		}
		// The plain way, without a bound on memory.
		var plain, ends []string
		parts := strings.Split(string(stream), "\n")
		for _, p := range parts[:len(parts)-1] {
			raw := p
			p = strings.TrimSuffix(p, "\r")
			if len(p) > max {
				plain = append(plain, "over: "+p[:max])
				ends = append(ends, "end: "+string(bytes.TrimSpace([]byte(raw[len(raw)-min(len(raw), lineRest):]))))
			} else if p = string(bytes.TrimSpace([]byte(strings.TrimPrefix(p, "\ufeff")))); p != "" {
				plain = append(plain, p)
			}
		}
		rest := parts[len(parts)-1]
		if len(rest) > max+1 {
			plain, rest = append(plain, "over: "+rest[:max]), ""
		}
		if plain = append(append(plain, ends...), "rest: "+rest); !slices.Equal(got, plain) {
			t.Fatalf("got %.300q want %.300q", got, plain)
		}
	})
}

// descriptors counts the open files of this process, where the system tells.
func descriptors() int {
	fds, _ := os.ReadDir("/proc/self/fd")
	return len(fds)
}

func TestStdioLeavesNothing(t *testing.T) {
	round := func() {
		tr := newStdioTransport(stdioConfig(t), &Options{Stderr: io.Discard})
		for _, method := range []string{"exit", "mute", "die"} {
			if _, err := tr.Open(t.Context(), Inbound{}); err != nil {
				t.Fatal(err)
			}
			if method != "mute" { // nobody could tell, with another one holding stdout
				spawn(t, tr, []string{"sleep", "hold"}).life.Close()
			}
			doWithin(t, tr, 10*time.Millisecond, "silent", order{})
			do(t, tr, method, order{})
		}
		tr.Close()
	}
	round()
	fds, gs := descriptors(), runtime.NumGoroutine()
	for range 3 {
		round()
	}
	// Goroutines that have said they are done may still be on their way out.
	for limit := time.Now().Add(2 * time.Second); runtime.NumGoroutine() > gs && time.Now().Before(limit); {
		time.Sleep(time.Millisecond)
	}
	if n := runtime.NumGoroutine(); n > gs {
		t.Errorf("%d goroutines, were %d:\n%s", n, gs, strings.Join(goroutines(), "\n\n"))
	}
	if n := descriptors(); n > fds {
		t.Errorf("%d descriptors, were %d", n, fds)
	}
	if left := childProcesses(); len(left) > 0 {
		t.Errorf("left: %s", left)
	}
}

func TestStdioIdle(t *testing.T) {
	before := runtime.NumGoroutine()
	tr := openStdio(t, stdioConfig(t), nil, Inbound{})
	mustEcho(t, tr)
	want, c := 2, tr.child.Load()
	c.mu.Lock()
	if c.watched { // a start slower than the pulse, on a busy machine
		want = 3
	}
	c.mu.Unlock()
	if n := runtime.NumGoroutine() - before; n > want {
		t.Errorf("an idle session has %d goroutines want %d", n, want)
	}
}

// dropped is a result that is read and not kept.
type dropped struct{}

func (dropped) receive(result []byte) error { return decode(result) }

func TestStdioAllocs(t *testing.T) {
	tr := openStdio(t, stdioConfig(t), nil, Inbound{})
	params := json.RawMessage(`{"text":"` + strings.Repeat("x", 100) + `"}`)
	n := testing.AllocsPerRun(200, func() {
		req := Request{Method: "echo", Params: params, Deadline: time.Now().Add(time.Minute), to: dropped{}}
		if _, err := tr.Call(t.Context(), &req); err != nil {
			t.Error(err)
		}
	})
	if n > 10 {
		t.Errorf("%v allocations a call want at most 10", n)
	}
}

func BenchmarkStdio(b *testing.B) {
	for _, bench := range []struct {
		name    string
		callers int
		bytes   int
	}{{"100B", 1, 100}, {"100B×64", 64, 100}, {"1MiB", 1, 1 << 20}} {
		b.Run(bench.name, func(b *testing.B) {
			cfg := stdioConfig(b)
			cfg.MaxInFlight = 64
			tr := openStdio(b, cfg, nil, Inbound{})
			params := json.RawMessage(`{"text":"` + strings.Repeat("x", bench.bytes) + `"}`)
			b.ReportAllocs()
			b.SetBytes(2 * int64(bench.bytes))
			var calls sync.WaitGroup
			for i := range bench.callers {
				calls.Go(func() {
					for range (b.N + i) / bench.callers {
						req := Request{Method: "echo", Params: params, Deadline: time.Now().Add(time.Minute), to: dropped{}}
						if _, err := tr.Call(b.Context(), &req); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			calls.Wait()
		})
	}
}
