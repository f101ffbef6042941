package mcp

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"time"
)

// Fault cases over HTTP: two servers on loopback play the script.

type httpEntry struct {
	Server    string `json:"server"`
	Handshake *struct {
		Session string `json:"session"`
		Path    string `json:"path"`
		Version string `json:"version"`
	} `json:"handshake"`
	On *struct {
		Method     string            `json:"method"`
		Path       string            `json:"path"`
		RPC        string            `json:"rpc"`
		HasHeaders map[string]string `json:"has_headers"`
		NoHeaders  []string          `json:"no_headers"`
	} `json:"on"`
	Times       *natural          `json:"times"`
	Status      int               `json:"status"`
	Headers     map[string]string `json:"headers"`
	Body        []bodyChunk       `json:"body"`
	HangHeaders yes               `json:"hang_headers"`
}

type bodyChunk struct {
	Text     *string   `json:"text"`
	B64      *string   `json:"b64"`
	Fill     *caseFill `json:"fill"`
	DelayMS  millis    `json:"delay_ms"`
	UntilRPC string    `json:"until_rpc"`
	Reset    yes       `json:"reset"`
	Cut      yes       `json:"cut"`
	Hang     yes       `json:"hang"`

	b64 string // decoded
}

func (c *bodyChunk) UnmarshalJSON(b []byte) error {
	type plain bodyChunk
	if err := strictly(b, (*plain)(c)); err != nil {
		return err
	}
	if given, err := membersOf(b); err != nil || len(given) != 1 {
		return errors.New("a chunk is one thing")
	}
	if c.B64 != nil {
		b, err := base64.StdEncoding.DecodeString(*c.B64)
		c.b64 = string(b)
		return err
	}
	return nil
}

func (e *httpEntry) check() error {
	switch {
	case (e.Handshake == nil) == (e.On == nil):
		return errors.New("want either a handshake or an on")
	case e.Handshake != nil && (e.Status != 0 || e.Headers != nil || e.Body != nil || bool(e.HangHeaders)):
		return errors.New("a handshake has its own reply")
	case e.Server != "" && e.Server != "A" && e.Server != "B":
		return fmt.Errorf("unknown server %q", e.Server)
	case e.On != nil && e.On.Method != strings.ToUpper(e.On.Method):
		return fmt.Errorf("no request has the method %q", e.On.Method)
	case e.On != nil && !bool(e.HangHeaders) && (e.Status < 200 || e.Status > 599):
		return errors.New("want a status from 200 to 599")
	}
	return nil
}

// matches reports whether the entry is meant for a request.
func (e *httpEntry) matches(server string, r *http.Request, rpc string, vars *placeholders) bool {
	if cmp.Or(e.Server, "A") != server {
		return false
	}
	at := func(path string) bool { // with its query, if it names one
		path = cmp.Or(path, "/mcp")
		return path == r.URL.Path || path == r.URL.RequestURI()
	}
	if h := e.Handshake; h != nil {
		return r.Method == "POST" && rpc == "initialize" && at(h.Path)
	}
	if e.On.Method != "" && e.On.Method != r.Method || !at(e.On.Path) || e.On.RPC != "" && e.On.RPC != rpc {
		return false
	}
	for name, want := range e.On.HasHeaders {
		if got := r.Header.Values(name); got == nil || want != "*" && got[0] != vars.text(want) {
			return false
		}
	}
	return !slices.ContainsFunc(e.On.NoHeaders, func(name string) bool { return r.Header.Values(name) != nil })
}

// An httpWorld is the servers A and B on loopback.
type httpWorld struct {
	r    *caseRun
	a, b *httptest.Server

	mu       sync.Mutex // guards the fields below
	vars     *placeholders
	used     []int
	posts    map[string]int // by RPC method, to wait for
	had      caseSeen
	calling  int // tools/call requests being served
	streamAt time.Time
	conns    map[net.Conn]bool
}

func newHTTPWorld(r *caseRun) *httpWorld {
	w := &httpWorld{r: r, vars: newPlaceholders(), used: make([]int, len(r.c.http)), posts: map[string]int{}, conns: map[net.Conn]bool{},
		had: caseSeen{saw: map[string]int{}, paths: map[string]map[string]int{}, bHeaders: http.Header{}, getDelay: -1}}
	start := func(name string) *httptest.Server {
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) { w.serve(name, rw, req) }))
		s.Config.ErrorLog = log.New(io.Discard, "", 0)
		s.Config.ConnState = func(c net.Conn, state http.ConnState) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.conns[c] = true
			if state == http.StateClosed || state == http.StateHijacked {
				delete(w.conns, c)
			}
		}
		s.Start()
		r.Cleanup(func() {
			s.CloseClientConnections()
			s.Close()
		})
		w.vars.base[name] = s.URL
		return s
	}
	w.a, w.b = start("A"), start("B")
	return w
}

func (w *httpWorld) config(cfg *Config, url string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	home := "{{A}}/mcp"
	if cfg.Name == "b" || cfg.Name == "B" { // a member of a fleet
		home = "{{B}}/mcp"
	}
	cfg.Endpoint = w.vars.text(cmp.Or(url, home))
	if cfg.Headers != nil {
		cfg.Headers = maps.Clone(cfg.Headers)
		for k, v := range cfg.Headers {
			cfg.Headers[k] = w.vars.text(v)
		}
	}
}

func (w *httpWorld) session(cfg Config, o *Options) Session { return newCaseSession(w.r, cfg, o) }

func (w *httpWorld) seen() caseSeen {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := w.had
	seen.open = len(w.conns)
	seen.saw, seen.bHeaders = maps.Clone(seen.saw), seen.bHeaders.Clone()
	return seen
}

// serve answers one request by the script.
func (w *httpWorld) serve(server string, rw http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	var e envelope
	rpc := ""
	if r.Method == "POST" {
		var err error
		if e, err = scanEnvelope(body); err != nil {
			w.fail("the client posted what is no message: %.200q", body)
		}
		rpc = cmp.Or(e.method, "response")
	}
	w.mu.Lock()
	at := -1
	for i := range w.r.c.http {
		he := &w.r.c.http[i]
		times := 1
		if he.Times != nil {
			times = int(*he.Times)
		}
		if (times == 0 || w.used[i] < times) && he.matches(server, r, rpc, w.vars) {
			at = i
			w.used[i]++
			break
		}
	}
	asked := at >= 0 && w.r.c.http[at].On != nil && w.r.c.http[at].On.RPC == rpc
	if rpc != "server/discover" || asked {
		w.countLocked(server, r, rpc, body)
	}
	w.vars.note(e)
	if at >= 0 {
		w.vars.answering(e)
	}
	vars := *w.vars // of this request
	vars.latest = maps.Clone(vars.latest)
	posts := map[string]int{} // that came too early to be waited for
	for method, n := range w.posts {
		// A handshake is before everything else, and a stream that the client
		// listens on may be open too late for what it asks on it.
		if method != "initialize" && method != "notifications/initialized" && (r.Method == "POST" || method == "response") {
			posts[method] = n
		}
	}
	w.mu.Unlock()
	answered := func() {}
	if rpc == "tools/call" {
		answered = sync.OnceFunc(func() {
			w.mu.Lock()
			w.calling--
			w.mu.Unlock()
		})
		defer answered()
	}
	if at < 0 {
		w.unexpected(rw, r, rpc)
		return
	}
	he := w.r.c.http[at]
	if h := he.Handshake; h != nil {
		version := string(vars.version)
		if h.Version != "" {
			version = string(appendCase(h.Version))
		}
		text := `{"jsonrpc":"2.0","id":` + string(vars.id) + `,"result":{"protocolVersion":` + version + `,"capabilities":{"tools":{}},"serverInfo":{"name":"case","version":"1"}}}`
		he = httpEntry{Status: 200, Headers: map[string]string{"Content-Type": "application/json"}, Body: []bodyChunk{{Text: &text}}}
		if h.Session != "" {
			he.Headers["Mcp-Session-Id"] = h.Session
		}
	}
	w.play(&he, rw, r, &vars, posts, answered)
}

func (w *httpWorld) fail(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.had.failures = append(w.had.failures, fmt.Sprintf(format, args...))
}

func (w *httpWorld) countLocked(server string, r *http.Request, rpc string, body []byte) {
	if server == "B" {
		w.had.bRequests++
		for name, v := range r.Header {
			w.had.bHeaders[name] = append(w.had.bHeaders[name], v...)
		}
	}
	w.posts[rpc]++
	if w.had.paths[r.URL.Path] == nil {
		w.had.paths[r.URL.Path] = map[string]int{}
	}
	whats := []string{r.Method}
	if rpc != "" {
		whats = append(whats, rpc)
	}
	for _, what := range whats {
		w.had.saw[what]++
		w.had.paths[r.URL.Path][what]++
	}
	switch {
	case rpc == "response":
		w.had.replies = append(w.had.replies, bytes.Clone(body))
	case rpc == "initialize":
		w.had.initializeWithSession = w.had.initializeWithSession || r.Header.Values("Mcp-Session-Id") != nil
	case rpc == "tools/call":
		w.calling++
		w.had.inFlight = max(w.had.inFlight, w.calling)
	case r.Method == "GET" && r.Header.Get("Last-Event-ID") != "" && !w.streamAt.IsZero():
		if d := time.Since(w.streamAt); w.had.getDelay < 0 || d < w.had.getDelay {
			w.had.getDelay = d
		}
	}
}

// unexpected answers what no entry is meant for.
func (w *httpWorld) unexpected(rw http.ResponseWriter, r *http.Request, rpc string) {
	rw.Header()["Content-Type"] = nil
	switch {
	case r.Method == "GET":
		rw.WriteHeader(http.StatusMethodNotAllowed)
	case r.Method == "DELETE":
		rw.WriteHeader(http.StatusOK)
	case rpc == "response" || strings.HasPrefix(rpc, "notifications/"):
		rw.WriteHeader(http.StatusAccepted)
	case rpc == "server/discover":
		rw.WriteHeader(http.StatusNotFound)
	default:
		w.fail("nothing in the script answers %s %s %s", r.Method, r.URL.Path, rpc)
		rw.WriteHeader(http.StatusInternalServerError)
	}
}

// play sends the reply of an entry. Posts holds those of each method that it must
// not take for one to wait for; before its last words it calls answered.
func (w *httpWorld) play(he *httpEntry, rw http.ResponseWriter, r *http.Request, vars *placeholders, posts map[string]int, answered func()) {
	if he.HangHeaders {
		<-r.Context().Done()
		return
	}
	rw.Header()["Content-Type"] = nil
	for name, v := range he.Headers {
		rw.Header().Set(name, vars.text(v))
		if strings.HasPrefix(v, "text/event-stream") {
			defer func() {
				w.mu.Lock()
				w.streamAt = time.Now()
				w.mu.Unlock()
			}()
		}
	}
	if len(he.Body) == 0 && he.Status >= 200 && he.Status != 204 && he.Status != 304 {
		rw.Header().Set("Content-Length", "0")
	}
	if len(he.Body) == 0 {
		answered()
	}
	rw.WriteHeader(he.Status)
	ctl := http.NewResponseController(rw)
	ctl.Flush()
	out := &countingWriter{w: rw}
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.had.sentMax = max(w.had.sentMax, out.n)
	}()
	for i, c := range he.Body {
		if c.Text != nil && (i == len(he.Body)-1 || strings.Contains(*c.Text, `"result"`)) {
			answered()
		}
		var err error
		switch {
		case c.Text != nil:
			_, err = io.WriteString(out, vars.text(*c.Text))
		case c.B64 != nil:
			_, err = io.WriteString(out, vars.text(c.b64))
		case c.Fill != nil:
			err = c.Fill.write(out, vars)
		case c.DelayMS > 0:
			select {
			case <-time.After(ms(c.DelayMS)):
			case <-r.Context().Done():
				return
			}
		case c.UntilRPC != "":
			for w.came(c.UntilRPC) <= posts[c.UntilRPC] {
				select {
				case <-time.After(2 * time.Millisecond):
				case <-r.Context().Done():
					return
				}
			}
			posts[c.UntilRPC]++ // the next one is another
		case bool(c.Reset):
			if conn, _, err := ctl.Hijack(); err == nil {
				if tcp, ok := conn.(*net.TCPConn); ok {
					tcp.SetLinger(0)
				}
				conn.Close()
			}
			return
		case bool(c.Cut):
			panic(http.ErrAbortHandler)
		case bool(c.Hang):
			<-r.Context().Done()
			return
		}
		if err != nil || ctl.Flush() != nil {
			return // the client has left
		}
	}
}

func (w *httpWorld) came(rpc string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.posts[rpc]
}

type countingWriter struct {
	w io.Writer
	n int64
}

func (c *countingWriter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}
