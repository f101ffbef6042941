package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"resilient/mcp"
)

// The revisions, newest first, and what finding one out is called.
const (
	auto  = "auto"
	v2026 = "2026-07-28"
	v2511 = "2025-11-25"
	v2506 = "2025-06-18"
	v2503 = "2025-03-26"
	v2411 = "2024-11-05"
)

var (
	every     = []string{auto, v2026, v2511, v2506, v2503, v2411}
	handshake = []string{auto, v2511, v2506, v2503, v2411}
)

// TestMain makes the test binary the Go server too, so that nothing else has
// to be built.
func TestMain(m *testing.M) {
	if os.Getenv("INTEROP_SERVER") != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// A peer is a server, the way to it, and what can be had of it there.
type peer struct {
	name     string
	config   mcp.Config
	versions []string
	finds    string // what "auto" agrees on
	server   *process

	cut       bool // streams can be resumed: the tool cut is there to be called
	json      bool // answers are JSON: nothing can come before them
	stateless bool // what is older than 2026-07-28 has no session
}

// interactive reports whether the server can reach the client during a call.
func (p *peer) interactive(version string) bool {
	return version == v2026 || !p.stateless
}

// goStdio is the Go server as a child.
func goStdio(t *testing.T) *peer {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return &peer{
		name: "go/stdio", versions: every, finds: v2026,
		config: mcp.Config{Command: []string{exe}, Env: map[string]string{"INTEROP_SERVER": "1", "INTEROP_WORD": "hello"}},
	}
}

// goHTTP starts the Go server with those flags.
func goHTTP(t *testing.T, name, path string, flags ...string) *peer {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &peer{name: "go/" + name, versions: every, finds: v2026}
	p.server = start(t, []string{"INTEROP_SERVER=1"}, append([]string{exe, "-http", "127.0.0.1:0"}, flags...)...)
	p.config.Endpoint = p.server.listening() + path
	return p
}

// npm returns the folder that run.sh has filled, or skips the test.
func npm(t *testing.T) string {
	dir := os.Getenv("MCP_INTEROP_NPM")
	if dir == "" {
		t.Skip("MCP_INTEROP_NPM names no folder with the packages of npm/package.json: see run.sh")
	}
	return dir
}

func tsStdio(t *testing.T) *peer {
	return &peer{
		name: "ts/stdio", versions: every, finds: v2026,
		config: mcp.Config{Command: []string{"node", filepath.Join(npm(t), "peer.mjs"), "stdio"}, Env: map[string]string{"INTEROP_WORD": "hello"}, EnvAllow: []string{"PATH"}},
	}
}

func tsHTTP(t *testing.T, name string, args ...string) *peer {
	p := &peer{name: "ts/" + name, versions: every, finds: v2026, stateless: true}
	p.server = start(t, nil, append([]string{"node", filepath.Join(npm(t), "peer.mjs"), "http"}, args...)...)
	p.config.Endpoint = p.server.listening() + "/mcp"
	return p
}

// A process is a server that runs beside the tests, which is one over HTTP.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	line chan string // the address that it names
}

// start starts a server, which ends with the test.
func start(t *testing.T, env []string, argv ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(argv[0], argv[1:]...), line: make(chan string, 1)}
	p.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir()}, env...)
	p.cmd.Stdout = io.Discard
	stderr, err := p.cmd.StderrPipe()
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for s := bufio.NewScanner(stderr); s.Scan(); {
			if addr, ok := strings.CutPrefix(s.Text(), "listening "); ok {
				p.line <- addr
			}
		}
	}()
	t.Cleanup(p.stop)
	return p
}

func (p *process) stop() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// listening waits for the server to say where it listens.
func (p *process) listening() string {
	select {
	case addr := <-p.line:
		return addr
	case <-time.After(30 * time.Second):
		p.t.Fatal("the server does not listen")
		return ""
	}
}

// A user is a client, and what it has been told.
type user struct {
	*mcp.Client
	version  string // as agreed
	adoption *mcp.Adoption

	mu    sync.Mutex
	notes []string // the methods of notifications
}

// connect composes a client for a peer and adopts its tools. It declares every
// capability, watches the list, and is closed with the test, when nothing may
// be left of a child.
func connect(t *testing.T, cfg mcp.Config, version string) *user {
	t.Helper()
	u := &user{}
	cfg.Name, cfg.Protocol, cfg.Watch = "peer", version, true
	answer := func(v any) mcp.HandlerFunc {
		return func(context.Context, string, json.RawMessage) (any, error) { return v, nil }
	}
	o := &mcp.Options{
		Handlers: map[string]mcp.HandlerFunc{
			"elicitation/create": answer(map[string]any{"action": "accept", "content": map[string]any{"name": "ada"}}),
			"roots/list":         answer(map[string]any{"roots": []any{map[string]any{"uri": "file:///srv/a", "name": "a"}}}),
			"sampling/createMessage": answer(map[string]any{
				"role": "assistant", "model": "m1", "stopReason": "endTurn",
				"content": map[string]any{"type": "text", "text": "a thought"},
			}),
		},
		OnNotification: func(_, method string, _ json.RawMessage) {
			u.mu.Lock()
			defer u.mu.Unlock()
			u.notes = append(u.notes, method)
		},
	}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	transport, err := mcp.NewTransport(cfg, o)
	if err != nil {
		t.Fatal(err)
	}
	u.Client = mcp.NewClient(mcp.NewResilientSession(mcp.NewSession(transport, cfg, o), cfg, o), cfg, o)
	t.Cleanup(func() {
		begun := time.Now()
		if err := u.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		if d := time.Since(begun); d > 6*time.Second {
			t.Errorf("Close took %v", d)
		}
		if s, ok := transport.(*mcp.StdioTransport); ok {
			if _, exited := s.ExitCode(); !exited {
				t.Error("the child has no exit status after Close")
			}
		}
	})
	if u.adoption, err = u.Adopt(t.Context()); err != nil {
		t.Fatalf("Adopt: %v", err)
	}
	u.version = u.adoption.Server.Protocol
	return u
}

// count returns how often a notification has come.
func (u *user) count(method string) (n int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, m := range u.notes {
		if m == method {
			n++
		}
	}
	return n
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within ten seconds: %s", what)
		}
	}
}

type args = map[string]any

// call calls a tool that must succeed.
func (u *user) call(t *testing.T, tool string, a args) *mcp.Result {
	t.Helper()
	r, err := u.Call(t.Context(), &mcp.Call{Tool: tool, Arguments: a})
	if err != nil {
		t.Fatalf("%s: %v", tool, err)
	}
	if r.IsError {
		t.Fatalf("%s: the tool failed: %.200q", tool, r.Text())
	}
	return r
}

// says calls a tool whose text is known.
func (u *user) says(t *testing.T, tool string, a args, want string) {
	t.Helper()
	if got := u.call(t, tool, a).Text(); got != want {
		t.Errorf("%s: %.200q, want %.200q", tool, got, want)
	}
}

// counters reads what became of the calls of the tool work.
func (u *user) counters(t *testing.T) (c struct{ Started, Finished, Cancelled int }) {
	t.Helper()
	if err := json.Unmarshal(u.call(t, "counters", nil).Structured, &c); err != nil {
		t.Fatalf("counters: %v", err)
	}
	return c
}

// withPatience returns a context that is cancelled after d, as a user does it.
func withPatience(t *testing.T, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, stop := context.WithCancel(t.Context())
	time.AfterFunc(d, stop)
	return ctx, stop
}

// TestStdio drives the servers of the two SDKs over a pipe.
func TestStdio(t *testing.T) {
	for name, peer := range map[string]func(*testing.T) *peer{"go": goStdio, "ts": tsStdio} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			drive(t, peer(t))
		})
	}
}

// TestHTTP drives them over HTTP, in every mode that they have.
func TestHTTP(t *testing.T) {
	for _, c := range []struct {
		name string
		peer func(*testing.T) *peer
	}{
		{"go/sessions", func(t *testing.T) *peer {
			p := goHTTP(t, "sessions", "/mcp")
			p.versions, p.finds = handshake, v2511
			return p
		}},
		{"go/sessions+resume", func(t *testing.T) *peer {
			p := goHTTP(t, "sessions+resume", "/mcp", "-resume")
			p.versions, p.finds, p.cut = handshake, v2511, true
			return p
		}},
		{"go/sessions+json", func(t *testing.T) *peer {
			p := goHTTP(t, "sessions+json", "/mcp", "-json")
			p.versions, p.finds, p.json = handshake, v2511, true
			return p
		}},
		{"go/stateless", func(t *testing.T) *peer {
			p := goHTTP(t, "stateless", "/mcp", "-mode", "stateless")
			p.stateless = true
			return p
		}},
		{"go/stateless+json", func(t *testing.T) *peer {
			p := goHTTP(t, "stateless+json", "/mcp", "-mode", "stateless", "-json")
			p.stateless, p.json = true, true
			return p
		}},
		{"go/dual", func(t *testing.T) *peer { return goHTTP(t, "dual", "/mcp", "-mode", "dual") }},
		{"go/dual+resume", func(t *testing.T) *peer {
			p := goHTTP(t, "dual+resume", "/mcp", "-mode", "dual", "-resume")
			p.cut = true
			return p
		}},
		{"go/dual+json", func(t *testing.T) *peer {
			p := goHTTP(t, "dual+json", "/mcp", "-mode", "dual", "-json")
			p.json = true
			return p
		}},
		{"go/sse", func(t *testing.T) *peer {
			p := goHTTP(t, "sse", "/sse")
			p.versions, p.finds = handshake, v2511
			return p
		}},
		{"ts", func(t *testing.T) *peer { return tsHTTP(t, "http") }},
		{"ts/json", func(t *testing.T) *peer {
			p := tsHTTP(t, "json", "json")
			p.json = true
			return p
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			drive(t, c.peer(t))
		})
	}
}

// drive does with a peer what can be done with one, at each revision.
func drive(t *testing.T, p *peer) {
	for _, version := range p.versions {
		t.Run(version, func(t *testing.T) {
			u := connect(t, p.config, version)
			want := version
			if version == auto {
				want = p.finds
			}
			if u.version != want {
				t.Fatalf("agreed on %s, want %s", u.version, want)
			}
			if u.adoption.Server.Instructions != "A peer for tests." {
				t.Errorf("instructions %q", u.adoption.Server.Instructions)
			}
			tools(t, p, u)
			results(t, p, u)
			parallel(t, u)
			progress(t, p, u)
			cancel(t, p, u)
			input(t, p, u)
			beyondTools(t, u)
			logging(t, p, u)
			changes(t, p, u, version)
			if p.cut && u.version != v2026 {
				resumption(t, u)
			}
			if p.server == nil {
				childEnds(t, u)
			}
		})
	}
}

// tools checks the whole list, which takes several pages at the Go server.
func tools(t *testing.T, p *peer, u *user) {
	want := []string{"ask", "counters", "echo", "env", "learn", "mixed", "quit", "refuse", "repeat", "sum", "talk", "think", "where", "work"}
	if strings.HasPrefix(p.name, "go/") {
		want = append(want, "cut")
	}
	slices.Sort(want)
	var got []string
	for _, tool := range u.Tools() {
		if !strings.HasPrefix(tool.Name, "learnt") { // from before, in the same process
			got = append(got, tool.Name)
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("tools %q, want %q", got, want)
	}
	if r := u.adoption.Rejected; r != nil {
		t.Errorf("rejected: %v", r)
	}
}

// results checks the kinds of results.
func results(t *testing.T, p *peer, u *user) {
	for _, text := range []string{"plain", "", "Zürich 漢字 \U0001f600", "line\nline\ttab \"quoted\" \\ \u0000\u2028"} {
		u.says(t, "echo", args{"text": text}, text)
	}
	var sum struct{ Sum float64 }
	if r := u.call(t, "sum", args{"numbers": []any{1, 2.5, -4}}); json.Unmarshal(r.Structured, &sum) != nil || sum.Sum != -0.5 {
		t.Errorf("sum: %s", r.Structured)
	}
	if r, err := u.Call(t.Context(), &mcp.Call{Tool: "refuse"}); err != nil || !r.IsError || !strings.Contains(r.Text(), "refused on purpose") {
		t.Errorf("refuse: %+v, %v", r, err)
	}
	var kinds []string
	for _, c := range u.call(t, "mixed", nil).Content {
		kinds = append(kinds, c.Type+" "+c.Text+c.Data+" "+c.URI)
	}
	if want := []string{"text mixed ", "resource_link  test://note", "resource inline test://inline", "image cG5n "}; !slices.Equal(kinds, want) {
		t.Errorf("mixed: %q, want %q", kinds, want)
	}
	const times = 3000
	kilo := strings.Repeat("0123456789abcde\n", 64)
	if got := u.call(t, "repeat", args{"text": kilo, "times": times}).Text(); got != strings.Repeat(kilo, times) {
		t.Errorf("repeat: %d bytes, or not the right ones", len(got))
	}
	var ae *mcp.ArgumentError
	if _, err := u.Call(t.Context(), &mcp.Call{Tool: "echo", Arguments: args{"text": 5}}); !errors.As(err, &ae) {
		t.Errorf("echo with a number: %v", err)
	}
	if p.server == nil {
		u.says(t, "env", args{"name": "INTEROP_WORD"}, "hello")
		u.says(t, "env", args{"name": "HOME"}, "")
	}
}

// parallel makes many calls at a time: each must get its own answer.
func parallel(t *testing.T, u *user) {
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			text := strings.Repeat(strconv.Itoa(i)+" ", 1+i*100)
			r, err := u.Call(t.Context(), &mcp.Call{Tool: "echo", Arguments: args{"text": text}})
			if err != nil || r.Text() != text {
				t.Errorf("call %d of many: %v", i, err)
			}
		})
	}
	wg.Wait()
}

func progress(t *testing.T, p *peer, u *user) {
	var got []string
	r, err := u.Call(t.Context(), &mcp.Call{
		Tool: "work", Arguments: args{"steps": 3, "millis": 30},
		OnProgress: func(p mcp.Progress) { got = append(got, fmt.Sprintf("%g/%g %s", p.Progress, p.Total, p.Message)) },
	})
	if err != nil || r.Text() != "worked" {
		t.Fatalf("work: %v, %v", r, err)
	}
	if want := []string{"1/3 step 1", "2/3 step 2", "3/3 step 3"}; !p.json && !slices.Equal(got, want) {
		t.Errorf("progress %q, want %q", got, want)
	}
}

// cancel gives a call up, of which the server must hear.
func cancel(t *testing.T, p *peer, u *user) {
	before := u.counters(t)
	ctx, stop := withPatience(t, 150*time.Millisecond)
	defer stop()
	begun := time.Now()
	_, err := u.Call(ctx, &mcp.Call{Tool: "work", Arguments: args{"steps": 20, "millis": 50}})
	if !errors.Is(err, mcp.ReasonCancelled) || !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if d := time.Since(begun); d > time.Second {
		t.Errorf("the call went on for %v", d)
	}
	eventually(t, "the server hears of the cancellation", func() bool {
		now := u.counters(t)
		if !p.interactive(u.version) {
			return now.Finished+now.Cancelled > before.Finished+before.Cancelled // it works on
		}
		return now.Cancelled == before.Cancelled+1
	})
}

// input has the server want something of the client during a call.
func input(t *testing.T, p *peer, u *user) {
	if !p.interactive(u.version) {
		// The server has no way to ask, and says so at once.
		if r, err := u.Call(t.Context(), &mcp.Call{Tool: "where"}); err == nil && !r.IsError {
			t.Errorf("where: %q", r.Text())
		}
		return
	}
	u.says(t, "ask", nil, "accept ada green asked")
	u.says(t, "think", args{"prompt": "why?"}, "m1 a thought")
	u.says(t, "where", nil, "file:///srv/a")
}

// beyondTools checks resources, prompts and completion.
func beyondTools(t *testing.T, u *user) {
	ctx := t.Context()
	resources, err := u.Resources(ctx)
	if err != nil || len(resources) != 1 || resources[0].URI != "test://note" {
		t.Errorf("resources: %+v, %v", resources, err)
	}
	note, err := u.ReadResource(ctx, "test://note")
	if err != nil || len(note) != 1 || note[0].Text != "a note" {
		t.Errorf("resource: %+v, %v", note, err)
	}
	var re *mcp.RPCError
	if _, err := u.ReadResource(ctx, "test://none"); !errors.As(err, &re) || re.Code != -32002 && re.Code != -32602 {
		t.Errorf("no such resource: %v", err)
	}
	prompts, err := u.Prompts(ctx)
	if err != nil || len(prompts) != 1 || prompts[0].Name != "greet" || len(prompts[0].Arguments) != 1 {
		t.Errorf("prompts: %+v, %v", prompts, err)
	}
	greet, err := u.Prompt(ctx, "greet", map[string]string{"name": "ada"})
	if err != nil || len(greet) != 1 || greet[0].Role != "user" || greet[0].Content.Text != "Greet ada" {
		t.Errorf("prompt: %+v, %v", greet, err)
	}
	names, err := u.Complete(ctx, args{"type": "ref/prompt", "name": "greet"}, "name", "a")
	if err != nil || !slices.Equal(names, []string{"ada", "alan"}) {
		t.Errorf("completion: %q, %v", names, err)
	}
	if u.version != v2026 {
		if err := u.Request(ctx, "ping", nil, nil); err != nil {
			t.Errorf("ping: %v", err)
		}
	}
	// The Go SDK refuses an unknown method with a status and plain text.
	var te *mcp.TransportError
	if err := u.Request(ctx, "no/such", nil, nil); !(errors.As(err, &re) && re.Code == -32601) && !(errors.As(err, &te) && te.Status == 400) {
		t.Errorf("no such method: %v", err)
	}
}

// logging has the server send notifications that belong to a call. Since
// 2026-07-28 it sends them on demand only, which this client does not make.
func logging(t *testing.T, p *peer, u *user) {
	if u.version == v2026 || p.stateless || p.json {
		return
	}
	if err := u.Request(t.Context(), "logging/setLevel", args{"level": "info"}, nil); err != nil {
		t.Fatalf("logging/setLevel: %v", err)
	}
	before := u.count("notifications/message")
	u.says(t, "talk", args{"lines": 5}, "talked")
	eventually(t, "five lines of log", func() bool { return u.count("notifications/message") == before+5 })
}

// changes has the server learn a tool, and say so where it can.
func changes(t *testing.T, p *peer, u *user, version string) {
	name := "learnt_" + strings.ReplaceAll(version, "-", "_")
	u.says(t, "learn", args{"name": name}, "knows "+name)
	if p.interactive(u.version) {
		eventually(t, "the list is called stale", u.Stale)
	}
	a, err := u.Adopt(t.Context())
	if err != nil {
		t.Fatalf("Adopt: %v", err)
	}
	if len(a.Drift) != 1 || a.Drift[0].Tool != name || a.Drift[0].Change != "added" {
		t.Errorf("drift: %+v", a.Drift)
	}
	u.says(t, name, nil, "learnt")
}

// resumption has the server end the stream of a call before its answer.
func resumption(t *testing.T, u *user) {
	r, err := u.Call(t.Context(), &mcp.Call{Tool: "cut", Arguments: args{"millis": 100}})
	if u.version == v2511 {
		if err != nil || r.Text() != "answered after the cut" {
			t.Errorf("cut: %v, %v", r, err)
		}
		return
	}
	// Before 2025-11-25 the server sends no event to come back to.
	if err == nil && r.IsError || err != nil && !errors.Is(err, mcp.ReasonDisconnected) {
		t.Errorf("cut: %v, %v", r, err)
	}
}

// childEnds has a child end in the middle of a call: the call is lost, and the
// next one finds another child.
func childEnds(t *testing.T, u *user) {
	_, err := u.Call(t.Context(), &mcp.Call{Tool: "quit", Arguments: args{"status": 3}})
	var te *mcp.TransportError
	if !errors.As(err, &te) || te.Reason != mcp.ReasonDisconnected || !te.Sent {
		t.Errorf("quit: %v", err)
	}
	u.says(t, "echo", args{"text": "again"}, "again")
	if c := u.counters(t); c.Started != 0 {
		t.Errorf("the child has not been replaced: %+v", c)
	}
	if d := u.Drift(); len(d) != 1 || d[0].Change != "removed" { // what the child before had learnt
		t.Errorf("drift: %+v", d)
	}
}

// TestSessionLost has a server lose the sessions, over and over and under many
// calls: the calls of one client are to notice nothing, and begin one session.
func TestSessionLost(t *testing.T) {
	for _, flags := range [][]string{nil, {"-json"}, {"-resume"}, {"-mode", "dual"}} {
		t.Run(strings.Join(append(flags, "sessions"), " "), func(t *testing.T) {
			t.Parallel()
			p := goHTTP(t, "sessions", "/mcp", flags...)
			for _, version := range handshake[1:] {
				t.Run(version, func(t *testing.T) {
					u := connect(t, p.config, version)
					for range 3 {
						resp, err := http.Post(strings.TrimSuffix(p.config.Endpoint, "/mcp")+"/forget", "", nil)
						if err != nil {
							t.Fatal(err)
						}
						resp.Body.Close()
						parallel(t, u)
						u.says(t, "where", nil, "file:///srv/a")
					}
				})
			}
		})
	}
}

// TestServerReplaced ends a server in the middle of a call, and starts another
// at the same address.
func TestServerReplaced(t *testing.T) {
	servers := map[string]func(t *testing.T, addr string) *process{
		"go": func(t *testing.T, addr string) *process {
			exe, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			return start(t, []string{"INTEROP_SERVER=1"}, exe, "-http", addr, "-mode", "dual")
		},
		"ts": func(t *testing.T, addr string) *process {
			return start(t, nil, "node", filepath.Join(npm(t), "peer.mjs"), "http", "auto", addr[strings.LastIndexByte(addr, ':')+1:])
		},
	}
	for name, server := range servers {
		for _, version := range []string{v2026, v2511} {
			t.Run(name+"/"+version, func(t *testing.T) {
				t.Parallel()
				addr := freeAddr(t)
				first := server(t, addr)
				u := connect(t, mcp.Config{Endpoint: first.listening() + "/mcp"}, version)
				u.says(t, "echo", args{"text": "before"}, "before")
				_, err := u.Call(t.Context(), &mcp.Call{Tool: "quit", Arguments: args{"status": 0}})
				var te *mcp.TransportError
				if !errors.As(err, &te) || te.Reason != mcp.ReasonDisconnected || !te.Sent {
					t.Errorf("quit: %v", err)
				}
				first.stop()
				_, err = u.Call(t.Context(), &mcp.Call{Tool: "echo", Arguments: args{"text": "between"}})
				if !errors.As(err, &te) || te.Reason != mcp.ReasonUnavailable || te.Sent {
					t.Errorf("between: %v", err)
				}
				server(t, addr).listening()
				u.says(t, "echo", args{"text": "after"}, "after")
			})
		}
	}
}

// freeAddr returns an address at which nothing listens. It lies below the ports
// that outgoing connections take.
func freeAddr(t *testing.T) string {
	t.Helper()
	for port := 20000 + os.Getpid()%5000; port < 32000; port++ {
		l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port))
		if err != nil {
			continue
		}
		defer l.Close()
		if _, taken := handedOut.LoadOrStore(port, true); !taken {
			return l.Addr().String()
		}
	}
	t.Fatal("no free port")
	return ""
}

var handedOut sync.Map // ports that freeAddr has returned

// A cutter passes requests on to a server, and breaks the connection of the
// first event stream that answers a call, in the middle of an event.
type cutter struct {
	to   string // the server
	cuts atomic.Int32
}

func (c *cutter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	out, err := http.NewRequestWithContext(r.Context(), r.Method, c.to+r.URL.Path, bytes.NewReader(body))
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	out.Header = r.Header.Clone()
	resp, err := http.DefaultTransport.RoundTrip(out)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer resp.Body.Close()
	maps.Copy(w.Header(), resp.Header)
	w.WriteHeader(resp.StatusCode)
	cut := bytes.Contains(body, []byte(`"work"`))
	var passed []byte
	for buf := make([]byte, 512); ; {
		n, err := resp.Body.Read(buf)
		passed = append(passed, buf[:n]...)
		if cut && bytes.Contains(passed, []byte("step 2")) && c.cuts.Add(1) == 1 {
			w.Write(buf[:n/2])
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}
		w.Write(buf[:n])
		w.(http.Flusher).Flush()
		if err != nil {
			return
		}
	}
}

// TestStreamBroken breaks the connection during a call. Where the server keeps
// its events the client misses nothing; elsewhere the call is lost.
func TestStreamBroken(t *testing.T) {
	for _, c := range []struct {
		flags    []string
		versions []string
		resumed  bool
	}{
		{[]string{"-resume"}, handshake[1:], true},
		{nil, handshake[1:], false},
		{[]string{"-mode", "stateless"}, []string{v2026}, false},
	} {
		t.Run(strings.Join(append(c.flags, "go"), " "), func(t *testing.T) {
			t.Parallel()
			p := goHTTP(t, "cut", "", c.flags...)
			for _, version := range c.versions {
				t.Run(version, func(t *testing.T) {
					cut := &cutter{to: p.config.Endpoint}
					s := httptest.NewServer(cut)
					t.Cleanup(s.Close) // after the client's
					u := connect(t, mcp.Config{Endpoint: s.URL + "/mcp"}, version)
					var steps []float64
					r, err := u.Call(t.Context(), &mcp.Call{
						Tool: "work", Arguments: args{"steps": 5, "millis": 50},
						OnProgress: func(p mcp.Progress) { steps = append(steps, p.Progress) },
					})
					if cut.cuts.Load() == 0 {
						t.Fatal("nothing was cut")
					}
					if c.resumed && version != v2411 { // which knows no event ids
						if err != nil || r.Text() != "worked" || !slices.Equal(steps, []float64{1, 2, 3, 4, 5}) {
							t.Errorf("work: %v, progress %v", err, steps)
						}
						return
					}
					var te *mcp.TransportError
					if !errors.As(err, &te) || te.Reason != mcp.ReasonDisconnected || !te.Sent {
						t.Errorf("work: %v", err)
					}
					u.says(t, "echo", args{"text": "on"}, "on")
				})
			}
		})
	}
}
