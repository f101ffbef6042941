package mcp

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// The servers of the promises: a puppet does what the arguments of a call say,
// as a child process and over HTTP. Whatever it is not told to spoil it does
// well, so that a test can see what a fault costs and what it does not.

// A strand is one act of a puppet: how it answers the request with an id. It
// ends early when a write fails, because then the client has left.
type strand func(w io.Writer, id string)

// strands are the acts that do not depend on the carrier, by name.
var strands = map[string]strand{
	"trickle": func(w io.Writer, id string) { // a byte a second
		for _, b := range []byte(puppetOK(id)) {
			w.Write([]byte{b})
			w.(interface{ Flush() error }).Flush()
			time.Sleep(time.Second)
		}
	},
}

// puppetOK is the answer of the tool when nothing is wrong.
func puppetOK(id string) string {
	return `{"jsonrpc":"2.0","id":` + id + `,"result":{"content":[{"type":"text","text":"ok ` + strconv.Itoa(os.Getpid()) + `"}]}}`
}

// puppetAnswer answers everything but tools/call.
func puppetAnswer(e envelope) string {
	head := `{"jsonrpc":"2.0","id":` + string(e.id)
	switch e.method {
	case "initialize":
		version := string(member(e.params, "protocolVersion"))
		return head + `,"result":{"protocolVersion":` + version + `,"capabilities":{"tools":{}},"serverInfo":{"name":"puppet","version":"1"}}}`
	case "tools/list":
		return head + `,"result":{"tools":[{"name":"t","inputSchema":{"type":"object"}},{"name":"s","inputSchema":{"type":"object"},"outputSchema":` +
			`{"type":"object","properties":{"n":{"type":["array","number"],"uniqueItems":true,"items":{"multipleOf":0.5}}},"required":["n"]}}]}}`
	case "ping":
		return head + `,"result":{}}`
	}
	return head + `,"error":{"code":-32601,"message":"` + canary + `"}}`
}

// puppetDo is the act that a call asks for.
func puppetDo(e envelope) string {
	return textMember(member(e.params, "arguments"), "do")
}

const puppetEnv = "MCP_PUPPET" // marks the processes of one test

// puppetChild is a puppet on a pipe. Its arguments are acts for its whole life:
//
//	silent      never answers anything
//	foreign     speaks a revision of its own
//	eof, term   ignores the end of stdin, ignores TERM
//	deaf        reads nothing after it has listed its tool
//	wait=N      answers no call before N of them have come
//	spoil=M:A   does act A for the answer to the first request of method M
//	flood=TEXT  writes 32 MiB of it to stderr before anything else
//	once=DIR    does so only in the first process that is given this directory
func puppetChild(args []string) int {
	set := map[string]string{}
	for _, a := range args {
		k, v, _ := strings.Cut(a, "=")
		set[k] = v
	}
	has := func(k string) bool { _, ok := set[k]; return ok }
	if has("term") {
		signal.Ignore(syscall.SIGTERM)
	}
	if unit := set["flood"]; unit != "" {
		piece := strings.Repeat(unit, 64<<10/len(unit))
		for range 32 << 20 / len(piece) {
			io.WriteString(os.Stderr, piece)
		}
	}
	method, act, _ := strings.Cut(set["spoil"], ":")
	if has("once") {
		if os.Mkdir(set["once"], 0o700) != nil {
			method = "" // an earlier start has done it
		}
	}
	wait, _ := strconv.Atoi(set["wait"])
	var held []envelope
	in := bufio.NewReaderSize(os.Stdin, 64<<10)
	out := bufio.NewWriterSize(os.Stdout, 64<<10)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			if has("eof") {
				time.Sleep(time.Hour)
			}
			return 0
		}
		e, err := scanEnvelope(bytes.TrimSpace(line))
		if err != nil || e.id == nil || e.method == "" || has("silent") {
			continue
		}
		switch {
		case e.method == method:
			method = ""
			strands[act](out, string(e.id))
			io.WriteString(out, "\n")
		case e.method == "initialize" && has("foreign"):
			fmt.Fprintln(out, strings.ReplaceAll(puppetAnswer(e), `"20`, `"19`))
		case e.method != "tools/call":
			fmt.Fprintln(out, puppetAnswer(e))
		default:
			held = append(held, e)
			if len(held) < wait {
				continue
			}
			wait = 0
			for _, e := range held {
				if raw := textMember(member(e.params, "arguments"), "raw"); raw != "" {
					fmt.Fprintln(out, strings.ReplaceAll(raw, "{{id}}", string(e.id)))
				} else if do := puppetDo(e); do == "exit" {
					return 3
				} else if do == "silence" {
					continue
				} else if strands[do] != nil {
					strands[do](out, string(e.id))
					io.WriteString(out, "\n")
				} else {
					fmt.Fprintln(out, puppetOK(string(e.id)))
				}
			}
			held = nil
		}
		out.Flush()
		if e.method == "tools/list" && has("deaf") {
			time.Sleep(time.Hour)
		}
	}
}

// puppetConfig declares a puppet on a pipe. Marker finds its processes.
func puppetConfig(t *testing.T, args ...string) (cfg Config, marker string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	marker = t.Name() + strconv.FormatInt(time.Now().UnixNano(), 36)
	return Config{
		Name: "puppet", Command: append([]string{exe}, args...), EnvAllow: hostEnv,
		Env: map[string]string{childEnv: "puppet", puppetEnv: marker},
	}, marker
}

// living lists the processes with a marker. Those that only wait to be reaped
// by a new parent do not count.
func living(t *testing.T, marker string) (pids []string) {
	t.Helper()
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	if len(dirs) == 0 {
		t.Skip("no /proc here, so no telling which processes are left")
	}
	for _, dir := range dirs {
		env, err := os.ReadFile(filepath.Join(dir, "environ"))
		if err != nil || !bytes.Contains(env, []byte(puppetEnv+"="+marker)) {
			continue
		}
		stat, err := os.ReadFile(filepath.Join(dir, "stat"))
		_, state, _ := strings.Cut(string(stat), ") ")
		if err == nil && !strings.HasPrefix(state, "Z") && !strings.HasPrefix(state, "X") {
			pids = append(pids, filepath.Base(dir))
		}
	}
	return pids
}

// A puppetServer is a puppet over HTTP.
type puppetServer struct {
	*httptest.Server
	stream bool // answers come as events
	acts   map[string]func(w http.ResponseWriter, r *http.Request, id string)

	wait        int // calls to come before one is answered
	arrived     atomic.Int32
	full        chan struct{}
	initialized atomic.Int32

	mu     sync.Mutex
	method string // of the next request that is spoilt
	spoil  func(w http.ResponseWriter, r *http.Request, id string)
}

func newPuppetServer(t *testing.T, wait int) *puppetServer {
	p := &puppetServer{wait: wait, full: make(chan struct{}), acts: map[string]func(http.ResponseWriter, *http.Request, string){}}
	if wait == 0 {
		close(p.full)
	}
	p.Server = httptest.NewUnstartedServer(http.HandlerFunc(p.serve))
	p.Config.ErrorLog = log.New(io.Discard, "", 0)
	p.Start()
	t.Cleanup(func() {
		p.CloseClientConnections()
		p.Close()
	})
	return p
}

func (p *puppetServer) serve(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	e, err := scanEnvelope(b)
	if err != nil || e.id == nil || e.method == "" {
		w.WriteHeader(http.StatusAccepted)
		return
	}
	p.mu.Lock()
	var spoil func(http.ResponseWriter, *http.Request, string)
	if e.method == p.method {
		p.method, spoil = "", p.spoil
	}
	p.mu.Unlock()
	id := string(e.id)
	switch {
	case spoil != nil:
		spoil(w, r, id)
	case e.method == "tools/call":
		if int(p.arrived.Add(1)) == p.wait {
			close(p.full)
		}
		select {
		case <-p.full:
		case <-r.Context().Done():
			return
		}
		do := puppetDo(e)
		if act := p.acts[do]; act != nil {
			act(w, r, id)
		} else if strands[do] != nil {
			p.play(w, id, strands[do])
		} else {
			p.play(w, id, func(w io.Writer, id string) { io.WriteString(w, puppetOK(id)) })
		}
	default:
		if e.method == "initialize" {
			p.initialized.Add(1)
			w.Header().Set("Mcp-Session-Id", "s")
		}
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, puppetAnswer(e))
	}
}

// play answers with an act, as the puppet's answers come.
func (p *puppetServer) play(w http.ResponseWriter, id string, act strand) {
	if !p.stream {
		w.Header().Set("Content-Type", "application/json")
		act(w, id)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	act(&eventWriter{w: w}, id)
	io.WriteString(w, "\n\n")
}

// An eventWriter makes an event of each line.
type eventWriter struct {
	w     io.Writer
	begun bool
}

func (e *eventWriter) Write(b []byte) (int, error) {
	n := len(b)
	for len(b) > 0 {
		if !e.begun {
			e.begun = true
			if _, err := io.WriteString(e.w, "data: "); err != nil {
				return 0, err
			}
		}
		line, rest, ended := bytes.Cut(b, []byte("\n"))
		if _, err := e.w.Write(line); err != nil {
			return 0, err
		}
		if b = rest; ended {
			e.begun = false
			if _, err := io.WriteString(e.w, "\n\n"); err != nil {
				return 0, err
			}
		}
	}
	return n, nil
}

// fillWith writes unit again and again until n bytes are written, or for ever
// if n is negative, or until a write fails.
func fillWith(w io.Writer, unit string, n int) {
	piece := []byte(strings.Repeat(unit, max(1, 32<<10/len(unit))))
	for left := n; left != 0; {
		b := piece
		if n > 0 && len(b) > left {
			b = b[:max(len(unit), left/len(unit)*len(unit))]
		}
		m, err := w.Write(b)
		if err != nil {
			return
		}
		if n > 0 {
			left = max(0, left-m)
		}
	}
}

// rawServer answers each connection by hand. It is for what net/http does not
// let a handler do.
func rawServer(t *testing.T, serve func(c net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var conns []net.Conn
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			wg.Go(func() {
				defer c.Close()
				serve(c)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return "http://" + l.Addr().String()
}

// newPuppetClient is the whole chain to a server, with its tools adopted.
func newPuppetClient(t *testing.T, cfg Config, o *Options) *Client {
	t.Helper()
	c := openPuppetClient(t, cfg, o)
	if _, err := c.Adopt(t.Context()); err != nil {
		t.Fatal(err)
	}
	return c
}

func openPuppetClient(t *testing.T, cfg Config, o *Options) *Client {
	t.Helper()
	if cfg.Name == "" {
		cfg.Name = "puppet"
	}
	c, err := New(cfg, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// doCall is a call that asks the puppet for an act.
func doCall(act string) *Call {
	return &Call{Tool: "t", Arguments: json.RawMessage(`{"do":` + strconv.Quote(act) + `}`)}
}
