package mcp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// The files in testdata/wire are conversations between a client and a server,
// as the protocol has them. TestWire has a session hold the client's part, over
// a pipe or HTTP, and plays the server's part from the file. Each line says by
// its first word what it is:
//
//	#       a comment
//	config  members of the Config, as in a configuration file
//	answer  a method, and what the handler for it answers
//	let     a name, and what stands for $name in the lines below
//	do      what the user of the session does; see wireUser.do
//	=       what came of it, one line of it
//	>       what the client must send
//	<       what the server sends
//
// Over a pipe, > and < are messages, and "> EOF" is the end of the client's
// input. Over HTTP, a > line with a method begins a request; "Name: value" is a
// header that it must have, "Name: -" one that it must not have, and an object
// its body. "after D" behind the path is the time that must have passed since
// the last answer ended. A < line with a number begins the answer; "|" begins a
// line of an event stream, and << is a line on the stream that was left open
// by "< open". "> closes" means that the client gives the request up.

// A wireLine is one line of a conversation.
type wireLine struct {
	number int
	word   string
	text   string
}

// readWire reads a file of conversation, with its names resolved.
func readWire(name string) (lines []wireLine, err error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	var names []string
	for i, l := range strings.Split(string(data), "\n") {
		word, text, _ := strings.Cut(strings.TrimSpace(l), " ")
		text = strings.NewReplacer(names...).Replace(strings.TrimSpace(text))
		switch word {
		case "", "#":
		case "let":
			k, v, _ := strings.Cut(text, " ")
			names = append([]string{"$" + k, v}, names...)
		case "config", "answer", "do", "=", ">", "<", "<<":
			lines = append(lines, wireLine{i + 1, word, text})
		default:
			return nil, fmt.Errorf("line %d: unknown word %q", i+1, word)
		}
	}
	return lines, nil
}

// sameMessage compares two JSON values.
func sameMessage(want, got string) error {
	var w, g any
	for _, v := range []struct {
		text string
		into *any
	}{{want, &w}, {got, &g}} {
		d := json.NewDecoder(strings.NewReader(v.text))
		d.UseNumber()
		if err := d.Decode(v.into); err != nil {
			return fmt.Errorf("%w in %.500s", err, v.text)
		}
	}
	if !reflect.DeepEqual(w, g) {
		return fmt.Errorf("the client sent\n\t%.2000s\nand not\n\t%s", got, want)
	}
	return nil
}

func TestWire(t *testing.T) {
	files, err := filepath.Glob("testdata/wire/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no conversations: %v", err)
	}
	for _, f := range files {
		t.Run(strings.TrimSuffix(filepath.Base(f), ".txt"), func(t *testing.T) {
			t.Parallel()
			lines, err := readWire(f)
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(filepath.Base(f), "stdio") {
				playStdio(t, f, lines)
			} else {
				playHTTP(t, lines)
			}
		})
	}
}

// playStdio has this test binary be the server; it leaves its complaint in a
// file, which is empty if it has none.
func playStdio(t *testing.T, file string, lines []wireLine) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	complaint := filepath.Join(t.TempDir(), "complaint")
	u := newWireUser(t, lines, map[string]any{
		"command": []string{exe, file, complaint}, "env": map[string]string{childEnv: "wire"},
	})
	u.play(t, lines)
	switch text, err := os.ReadFile(complaint); {
	case err != nil:
		t.Error("the server did not get to its end")
	case len(text) > 0:
		t.Errorf("%s:%s", file, text)
	}
}

func init() { children["wire"] = wireChild }

// wireChild plays the server's part of a conversation over stdin and stdout.
func wireChild(args []string) int {
	err := func() error {
		lines, err := readWire(args[0])
		if err != nil {
			return err
		}
		in := bufio.NewReader(os.Stdin)
		for _, l := range lines {
			switch l.word {
			case "<":
				fmt.Println(l.text)
			case ">":
				got, err := in.ReadString('\n')
				switch {
				case l.text == "EOF" && err == io.EOF && got == "":
				case l.text == "EOF":
					err = fmt.Errorf("the client sent %.500s and not the end of its input", got)
				case err == nil:
					err = sameMessage(l.text, got)
				}
				if err != nil && l.text != "EOF" || l.text == "EOF" && err != io.EOF {
					return fmt.Errorf("%d: %w", l.number, err)
				}
			}
		}
		return nil
	}()
	f, ferr := os.OpenFile(args[1], os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600) // a second child complains beside the first
	if ferr != nil {
		return 2
	}
	defer f.Close()
	if err != nil {
		fmt.Fprintln(f, err)
		return 1
	}
	return 0
}

// A wireExchange is one HTTP request and its answer.
type wireExchange struct {
	number  int
	method  string
	path    string
	after   time.Duration
	headers map[string]string
	body    string // "" if there is none
	status  int    // 0 if there is no answer
	answer  http.Header
	reply   string // the body
	open    bool   // the stream stays open
	closes  bool   // the client gives the request up
	later   string // what is then written to the stream that was left open before
}

// wireExchanges puts the lines of an HTTP conversation together.
func wireExchanges(t *testing.T, lines []wireLine) (script []*wireExchange) {
	var e *wireExchange
	for _, l := range lines {
		head, value, isHeader := strings.Cut(l.text, ": ")
		switch {
		case l.word != ">" && l.word != "<" && l.word != "<<":
		case l.word == ">" && !strings.HasPrefix(l.text, "{") && strings.Contains(l.text, " /"):
			f := strings.Fields(l.text)
			e = &wireExchange{number: l.number, method: f[0], path: f[1], headers: map[string]string{}, answer: http.Header{}}
			if len(f) == 4 {
				d, err := time.ParseDuration(f[3])
				if err != nil {
					t.Fatal(err)
				}
				e.after = d
			}
			script = append(script, e)
		case e == nil:
			t.Fatalf("line %d: there is no request yet", l.number)
		case l.word == "<<":
			e.later += strings.TrimPrefix(strings.TrimPrefix(l.text, "|"), " ") + "\n"
		case strings.HasPrefix(l.text, "{"):
			if l.word == ">" {
				e.body = l.text
			} else {
				e.reply = l.text
			}
		case strings.HasPrefix(l.text, "|"):
			e.reply += strings.TrimPrefix(strings.TrimPrefix(l.text, "|"), " ") + "\n"
		case l.text == "open":
			e.open = true
		case l.text == "closes":
			e.closes = true
		case isHeader && l.word == ">":
			e.headers[head] = value
		case isHeader:
			e.answer.Set(head, value)
		default:
			status, err := strconv.Atoi(l.text)
			if err != nil {
				t.Fatalf("line %d: %v", l.number, err)
			}
			e.status = status
		}
	}
	return script
}

// A wireServer plays the server's part of a conversation over HTTP.
type wireServer struct {
	script []*wireExchange
	end    chan struct{} // closed when the conversation is over

	mu     sync.Mutex
	next   int
	ended  time.Time   // of the last answer
	stream chan string // of the answer that was left open
	errs   []error
}

func playHTTP(t *testing.T, lines []wireLine) {
	s := &wireServer{script: wireExchanges(t, lines), end: make(chan struct{}), stream: make(chan string)}
	server := httptest.NewServer(s)
	defer server.Close()
	defer close(s.end)
	u := newWireUser(t, lines, map[string]any{"endpoint": server.URL + s.script[0].path})
	u.settle = s.settle
	u.play(t, lines)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, err := range s.errs {
		t.Error(err)
	}
	if s.next < len(s.script) {
		t.Errorf("line %d: the client never sent this", s.script[s.next].number)
	}
}

// settle waits until all requests above a line have come, or for a while: not
// all of them belong to an operation that waits for them.
func (s *wireServer) settle(line int) {
	for range 2000 {
		s.mu.Lock()
		done := s.next >= len(s.script) || s.script[s.next].number > line || len(s.errs) > 0
		s.mu.Unlock()
		if done {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

func (s *wireServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	fail := func(format string, args ...any) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.errs = append(s.errs, fmt.Errorf(format, args...))
	}
	s.mu.Lock()
	if s.next >= len(s.script) {
		s.mu.Unlock()
		fail("the client sent more than was expected: %s %s %.500s", r.Method, r.URL, body)
		w.WriteHeader(http.StatusTeapot)
		return
	}
	e := s.script[s.next]
	s.next++
	waited := time.Since(s.ended)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.ended = time.Now()
	}()

	if r.Method != e.method || r.URL.RequestURI() != e.path {
		fail("line %d: the client sent %s %s, and not %s %s", e.number, r.Method, r.URL.RequestURI(), e.method, e.path)
	}
	if waited < e.after {
		fail("line %d: the client waited for %v, and not for %v", e.number, waited, e.after)
	}
	for k, want := range e.headers {
		if got := r.Header.Values(k); want == "-" && len(got) > 0 || want != "-" && !slices.Equal(got, []string{want}) {
			fail("line %d: the client sent %s: %q, and not %q", e.number, k, got, want)
		}
	}
	if e.body == "" && len(body) > 0 {
		fail("line %d: the client sent a body: %.500s", e.number, body)
	} else if e.body != "" {
		if err := sameMessage(e.body, string(body)); err != nil {
			fail("line %d: %w", e.number, err)
		}
	}
	if e.status != 0 {
		for k := range e.answer {
			w.Header().Set(k, e.answer.Get(k))
		}
		w.WriteHeader(e.status)
		io.WriteString(w, e.reply)
		w.(http.Flusher).Flush()
	}
	if e.later != "" {
		go func() { // ends at the end of the conversation at the latest
			select {
			case s.stream <- e.later:
			case <-s.end:
			}
		}()
	}
	limit := time.After(10 * time.Second)
	for e.open || e.closes {
		select {
		case text := <-s.stream:
			io.WriteString(w, text)
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		case <-s.end:
			if e.closes {
				fail("line %d: the client has not given the request up", e.number)
			}
			return
		case <-limit:
			if e.closes {
				fail("line %d: the client has not given the request up", e.number)
			}
			return
		}
	}
}

// A wireUser is the user of the session.
type wireUser struct {
	s      *TransportSession
	c      *Client
	settle func(line int) // waits for what is above the line; nil if nothing is late

	mu  sync.Mutex
	saw []string // what came of the operation
}

// newWireUser composes a session from the config lines and reach.
func newWireUser(t *testing.T, lines []wireLine, reach map[string]any) *wireUser {
	u := &wireUser{}
	o := &Options{
		ClientInfo: ServerInfo{Name: "acme-client", Version: "0.3.0"},
		Handlers:   map[string]HandlerFunc{},
	}
	reach["name"] = "peer"
	for _, l := range lines {
		switch l.word {
		case "config":
			if err := json.Unmarshal([]byte(l.text), &reach); err != nil {
				t.Fatalf("line %d: %v", l.number, err)
			}
		case "answer":
			method, answer, _ := strings.Cut(l.text, " ")
			o.Handlers[method] = func(context.Context, string, json.RawMessage) (any, error) {
				return json.RawMessage(answer), nil
			}
		}
	}
	text, err := json.Marshal([]any{reach})
	if err != nil {
		t.Fatal(err)
	}
	cfgs, err := ParseConfigs(text, nil)
	if err != nil {
		t.Fatal(err)
	}
	transport, err := NewTransport(cfgs[0], o)
	if err != nil {
		t.Fatal(err)
	}
	u.s = NewSession(transport, cfgs[0], o)
	u.c = NewClient(u.s, cfgs[0], o)
	t.Cleanup(func() { u.s.Close() })
	return u
}

// play does what the do lines say, one after another, and compares what came
// of it.
func (u *wireUser) play(t *testing.T, lines []wireLine) {
	for i, l := range lines {
		if l.word != "do" {
			continue
		}
		if u.settle != nil {
			u.settle(l.number)
		}
		u.saw = nil
		u.do(t, l)
		var want []string
		for _, w := range lines[i+1:] {
			if w.word == "do" {
				break
			}
			if w.word == "=" {
				want = append(want, w.text)
			}
		}
		if !slices.Equal(u.saw, want) {
			t.Errorf("line %d: %s: got %q, want %q", l.number, l.text, u.saw, want)
		}
	}
	if err := u.s.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
}

func (u *wireUser) see(text string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.saw = append(u.saw, text)
}

// do carries out one operation:
//
//	initialize             sees the revision
//	list                   sees the names
//	adopt                  the same, of the tools that a Client adopts
//	call TOOL ARGS         sees the text, or the error; "progress" before the
//	                       tool asks for it, a duration is the caller's patience
//	use TOOL ARGS          the same through the Client
//	stale                  waits for the tool list to be called stale
//	close
func (u *wireUser) do(t *testing.T, l wireLine) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	word, rest, _ := strings.Cut(l.text, " ")
	var err error
	switch word {
	case "initialize":
		var info *ServerInfo
		if info, err = u.s.Initialize(ctx); err == nil {
			u.see(info.Protocol)
		}
	case "list", "adopt":
		var tools []Tool
		if word == "list" {
			tools, err = u.s.ListTools(ctx)
		} else if _, err = u.c.Adopt(ctx); err == nil {
			tools = u.c.Tools()
		}
		if err == nil {
			u.see(strings.Join(names(tools), " "))
		}
	case "call", "use":
		call := &Call{}
		for call.Tool == "" {
			word, rest, _ = strings.Cut(rest, " ")
			if d, err := time.ParseDuration(word); err == nil {
				ctx, cancel = context.WithTimeout(ctx, d)
				defer cancel()
			} else if word == "progress" {
				call.OnProgress = func(p Progress) { u.see(fmt.Sprintf("progress %g of %g", p.Progress, p.Total)) }
			} else {
				call.Tool = word
			}
		}
		if rest != "" {
			call.Arguments = json.RawMessage(rest)
		}
		var r *Result
		if strings.HasPrefix(l.text, "use") {
			r, err = u.c.Call(ctx, call)
		} else {
			r, err = u.s.CallTool(ctx, call)
		}
		if err == nil {
			u.see(r.Text())
		}
	case "stale":
		for !u.s.stale() {
			select {
			case <-ctx.Done():
				t.Errorf("line %d: the list is not stale", l.number)
				return
			case <-time.After(time.Millisecond):
			}
		}
	case "close":
		err = u.s.Close()
	default:
		t.Fatalf("line %d: unknown operation %q", l.number, word)
	}
	var te *TransportError
	var re *RPCError
	switch {
	case errors.As(err, &re):
		u.see("refused " + strconv.Itoa(re.Code))
	case errors.As(err, &te):
		u.see("failed " + string(te.Reason))
	case err != nil:
		t.Errorf("line %d: %v", l.number, err)
	}
}
