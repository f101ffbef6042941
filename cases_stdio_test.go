package mcp

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Fault cases over a child process: the test binary plays the script.

// A stdioStep is one verb of a child's script, with its options.
type stdioStep struct {
	Handshake *struct {
		Version string `json:"version"`
	} `json:"handshake"`
	Wait            string          `json:"wait"`
	As              string          `json:"as"`
	ParamsRequestID json.RawMessage `json:"params_request_id"`
	Reply           json.RawMessage `json:"reply"`
	ReplyError      json.RawMessage `json:"reply_error"`
	Send            json.RawMessage `json:"send"`
	Raw             *string         `json:"raw"`
	RawB64          *string         `json:"raw_b64"`
	Fill            *caseFill       `json:"fill"`
	Stderr          *string         `json:"stderr"`
	StderrFill      *caseFill       `json:"stderr_fill"`
	DelayMS         millis          `json:"delay_ms"`
	Repeat          *struct {
		Times   natural         `json:"times"`
		EveryMS millis          `json:"every_ms"`
		Send    json.RawMessage `json:"send"`
	} `json:"repeat"`
	Serve *struct {
		Results map[string]json.RawMessage `json:"results"`
		Times   natural                    `json:"times"`
	} `json:"serve"`
	ReplyEnv    []string `json:"reply_env"`
	Ignore      []string `json:"ignore"`
	StopReading yes      `json:"stop_reading"`
	Grandchild  *struct {
		HoldStdout bool     `json:"hold_stdout"`
		IgnoreTerm bool     `json:"ignore_term"`
		Seconds    positive `json:"seconds"`
	} `json:"grandchild"`
	Exit      *int `json:"exit"`
	KillSelf  yes  `json:"kill_self"`
	Hang      yes  `json:"hang"`
	NextStart yes  `json:"next_start"`
}

// A caseFill is text that is too long to write down.
type caseFill struct {
	Head  string  `json:"head"`
	Unit  string  `json:"unit"`
	Count natural `json:"count"`
	Tail  string  `json:"tail"`
}

func (f *caseFill) UnmarshalJSON(b []byte) error {
	type plain caseFill
	if err := strictly(b, (*plain)(f)); err != nil {
		return err
	}
	if f.Unit == "" || f.Count == 0 {
		return errors.New("a fill of nothing")
	}
	return nil
}

// write writes the fill in pieces of at most 64 KiB and some.
func (f *caseFill) write(w io.Writer, p *placeholders) error {
	if _, err := io.WriteString(w, p.text(f.Head)); err != nil {
		return err
	}
	each := max(1, 64<<10/len(f.Unit))
	piece := strings.Repeat(f.Unit, each)
	for left := int(f.Count); left > 0; left -= each {
		if _, err := io.WriteString(w, piece[:len(f.Unit)*min(each, left)]); err != nil {
			return err
		}
	}
	_, err := io.WriteString(w, p.text(f.Tail))
	return err
}

var stdioVerbs = []string{"handshake", "wait", "reply", "reply_error", "send", "raw", "raw_b64", "fill", "stderr", "stderr_fill", "delay_ms",
	"repeat", "serve", "reply_env", "ignore", "stop_reading", "grandchild", "exit", "kill_self", "hang", "next_start"}

func parseStdio(script []json.RawMessage) ([]stdioStep, error) {
	steps := make([]stdioStep, len(script))
	for i, raw := range script {
		if err := strictly(raw, &steps[i]); err != nil {
			return nil, fmt.Errorf("script entry %d: %w", i, err)
		}
		keys, err := membersOf(raw)
		if err != nil {
			return nil, err
		}
		verbs := 0
		for _, v := range stdioVerbs {
			if _, ok := keys[v]; ok {
				verbs++
				delete(keys, v)
			}
		}
		if steps[i].Wait != "" {
			delete(keys, "as")
			delete(keys, "params_request_id")
		}
		if verbs != 1 || len(keys) > 0 {
			return nil, fmt.Errorf("script entry %d is not one verb with its options", i)
		}
		if ignore := steps[i].Ignore; ignore != nil && len(ignore) == 0 {
			return nil, fmt.Errorf("script entry %d: ignore of nothing", i)
		}
		for _, what := range steps[i].Ignore {
			if what != "eof" && what != "term" {
				return nil, fmt.Errorf("script entry %d: unknown %q", i, what)
			}
		}
		if b := steps[i].RawB64; b != nil {
			text, err := base64.StdEncoding.DecodeString(*b)
			if err != nil {
				return nil, fmt.Errorf("script entry %d: %w", i, err)
			}
			decoded := string(text)
			steps[i].Raw = &decoded
		}
		if r := steps[i].Repeat; r != nil && r.Send == nil {
			return nil, fmt.Errorf("script entry %d: repeat of nothing", i)
		}
		if g := steps[i].Grandchild; g != nil && g.Seconds == 0 {
			return nil, fmt.Errorf("script entry %d: a grandchild of no time", i)
		}
		if s := steps[i].Serve; s != nil && s.Results == nil {
			return nil, fmt.Errorf("script entry %d: serve of nothing", i)
		}
	}
	return steps, nil
}

// A stdioWorld starts the script as children, which report into a directory.
type stdioWorld struct {
	r   *caseRun
	dir string
}

const caseDirEnv = "MCP_CASE_DIR"

func newStdioWorld(r *caseRun) *stdioWorld {
	w := &stdioWorld{r: r, dir: r.TempDir()}
	if err := os.WriteFile(filepath.Join(w.dir, "script.json"), appendCase(r.c.Script), 0o600); err != nil {
		r.Fatal(err)
	}
	return w
}

func (w *stdioWorld) config(cfg *Config, url string) {
	exe, err := os.Executable()
	if err != nil {
		w.r.Fatal(err)
	}
	cfg.Command = []string{exe}
	cfg.EnvAllow = hostEnv
	cfg.Env = map[string]string{childEnv: "case", caseDirEnv: w.dir, quickExit[0]: quickExit[1]}
	maps.Copy(cfg.Env, w.r.c.Action.Policy.Env)
}

func (w *stdioWorld) session(cfg Config, o *Options) Session { return newCaseSession(w.r, cfg, o) }

// newCaseSession is a session over a transport of the library.
func newCaseSession(r *caseRun, cfg Config, o *Options) Session {
	tr, err := NewTransport(cfg, o)
	if err != nil {
		r.Fatal(err)
	}
	return NewSession(tr, cfg, o)
}

// processes lists those of the tree that are alive. They are found by the
// environment that all of them have inherited.
// Known is false on a system that does not tell.
func (w *stdioWorld) processes() (pids []string, known bool) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		env, err := os.ReadFile(filepath.Join(dir, "environ"))
		if err != nil || !bytes.Contains(env, []byte(caseDirEnv+"="+w.dir)) {
			continue
		}
		stat, err := os.ReadFile(filepath.Join(dir, "stat"))
		_, state, _ := strings.Cut(string(stat), ") ")
		if err == nil && !strings.HasPrefix(state, "Z") && !strings.HasPrefix(state, "X") {
			pids = append(pids, filepath.Base(dir))
		}
	}
	return pids, len(dirs) > 0
}

// A caseEvent is a line of a child's report.
type caseEvent struct {
	Saw   string          `json:",omitempty"`
	Reply json.RawMessage `json:",omitempty"`
	Fail  string          `json:",omitempty"`
	Open  int             // requests that await their reply
}

func (w *stdioWorld) seen() caseSeen {
	seen := caseSeen{saw: map[string]int{}, getDelay: -1}
	time.Sleep(20 * time.Millisecond) // for what should not be on its way to a child
	reports, _ := filepath.Glob(filepath.Join(w.dir, "report-*"))
	slices.Sort(reports)
	for _, name := range reports {
		data, err := os.ReadFile(name)
		if err != nil {
			w.r.Fatal(err)
		}
		for line := range bytes.Lines(data) {
			var e caseEvent
			if json.Unmarshal(line, &e) != nil {
				continue // the child was killed while it wrote
			}
			if e.Saw != "" {
				seen.saw[e.Saw]++
			}
			if e.Reply != nil {
				seen.replies = append(seen.replies, e.Reply)
			}
			if e.Fail != "" {
				seen.failures = append(seen.failures, e.Fail)
			}
			seen.inFlight = max(seen.inFlight, e.Open)
		}
	}
	return seen
}

// A caseServer is the child: it plays one part of the script.
type caseServer struct {
	*placeholders
	report    *os.File
	demand    chan struct{}
	lines     chan []byte // closed at the end of stdin
	asked     bool
	open      map[string]bool // requests that await their reply
	kept      []envelope      // read and not yet waited for
	ignoreEOF bool
	deaf      bool
}

// caseChild plays a script as the child process of the library.
func caseChild([]string) int {
	dir := os.Getenv(caseDirEnv)
	s := &caseServer{placeholders: newPlaceholders(), demand: make(chan struct{}), lines: make(chan []byte), open: map[string]bool{}}
	data, err := os.ReadFile(filepath.Join(dir, "script.json"))
	var script []json.RawMessage
	if err == nil {
		err = json.Unmarshal(data, &script)
	}
	steps, perr := parseStdio(script)
	start := 0 // which start of the process this is
	for ; err == nil; start++ {
		s.report, err = os.OpenFile(filepath.Join(dir, fmt.Sprintf("report-%03d", start)), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err == nil || !errors.Is(err, os.ErrExist) {
			break
		}
		err = nil
	}
	if err = errors.Join(err, perr); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	go s.read()                 // ends with the process
	parts := [][]stdioStep{nil} // one for each start, the last for all further ones
	for _, step := range steps {
		if step.NextStart {
			parts = append(parts, nil)
			continue
		}
		parts[len(parts)-1] = append(parts[len(parts)-1], step)
	}
	for _, step := range parts[min(start, len(parts)-1)] {
		s.play(&step)
	}
	s.drain()
	return 0
}

// read hands out a line of stdin whenever one is asked for.
func (s *caseServer) read() {
	in := bufio.NewReaderSize(os.Stdin, 4<<10)
	for range s.demand {
		line, err := in.ReadBytes('\n')
		if err != nil {
			close(s.lines)
			return
		}
		s.lines <- line
	}
}

// next asks for a message. It is there when the channel has it.
func (s *caseServer) next() <-chan []byte {
	if s.deaf {
		return nil
	}
	if !s.asked {
		s.asked = true
		select {
		case s.demand <- struct{}{}:
		case <-s.lines: // closed
		}
	}
	return s.lines
}

// take reads a line that next has given. Mine says that the script need not see
// it: it is not a message, or one that awaited does not ask for.
func (s *caseServer) take(line []byte, awaited func(string) bool) (e envelope, mine bool) {
	s.asked = false
	line = bytes.TrimSpace(line)
	e, err := scanEnvelope(line)
	if err != nil {
		s.tell(caseEvent{Fail: fmt.Sprintf("the client wrote what is no message: %.200q", line)})
		return e, true
	}
	if e.method == "server/discover" && !awaited(e.method) {
		s.write(appendResponse(nil, e.id, nil, &RPCError{Code: -32601, Message: "method not found"}))
		return e, true
	}
	s.note(e)
	event := caseEvent{Saw: cmp.Or(e.method, "response")}
	switch {
	case e.method == "":
		event.Reply = line
	case e.id != nil:
		s.open[string(e.id)] = true
		event.Open = len(s.open)
	case e.method == "notifications/cancelled":
		delete(s.open, string(member(e.params, "requestId")))
	}
	s.tell(event)
	return e, false
}

// message returns the next message that the script may see; ok is false at the
// end of stdin.
func (s *caseServer) message(awaited func(string) bool) (e envelope, ok bool) {
	if len(s.kept) > 0 {
		e, s.kept = s.kept[0], s.kept[1:]
		return e, true
	}
	for {
		line, ok := <-s.next()
		if !ok {
			return envelope{}, false
		}
		if e, mine := s.take(line, awaited); !mine {
			return e, true
		}
	}
}

// ended is what the end of stdin means to a child that has not been told to
// expect it.
func (s *caseServer) ended() {
	if !s.ignoreEOF {
		os.Exit(0)
	}
	select {} // until a signal
}

func noMethod(string) bool { return false }

func (s *caseServer) tell(e caseEvent) { s.report.Write(append(appendCase(e), '\n')) }

// write writes a line.
func (s *caseServer) write(b []byte) { s.raw(append(b, '\n')) }

// raw writes bytes. What is answered in them is not in flight any more.
func (s *caseServer) raw(b []byte) {
	for line := range bytes.Lines(b) {
		if e, err := scanEnvelope(bytes.TrimSpace(line)); err == nil && e.method == "" {
			delete(s.open, string(e.id))
		}
	}
	os.Stdout.Write(b)
}

// wait reads up to a message with this method.
func (s *caseServer) wait(method string) envelope {
	for {
		e, ok := s.message(func(m string) bool { return m == method })
		if !ok && method == "eof" {
			return envelope{}
		}
		if !ok {
			s.ended()
		}
		if method == "any" || method == cmp.Or(e.method, "response") {
			s.answering(e)
			return e
		}
	}
}

func (s *caseServer) play(step *stdioStep) {
	switch {
	case step.Handshake != nil:
		s.wait("initialize")
		version := string(s.version)
		if v := step.Handshake.Version; v != "" {
			version = string(appendCase(v))
		}
		s.write([]byte(`{"jsonrpc":"2.0","id":` + string(s.id) + `,"result":{"protocolVersion":` + version + `,"capabilities":{"tools":{}},"serverInfo":{"name":"case","version":"1"}}}`))
		s.wait("notifications/initialized")
	case step.Wait != "":
		e := s.wait(step.Wait)
		if step.As != "" {
			s.saved[step.As] = bytes.Clone(e.id)
		}
		if want := step.ParamsRequestID; want != nil && string(member(e.params, "requestId")) != string(s.json(want)) {
			s.tell(caseEvent{Fail: fmt.Sprintf("requestId of %s is %s, want %s", step.Wait, member(e.params, "requestId"), s.json(want))})
		}
	case step.Reply != nil:
		s.reply("result", s.json(step.Reply))
	case step.ReplyError != nil:
		s.reply("error", s.json(step.ReplyError))
	case step.Send != nil:
		s.write(s.json(step.Send))
	case step.Raw != nil: // or raw_b64, decoded
		s.raw([]byte(s.text(*step.Raw)))
	case step.Fill != nil:
		out := bufio.NewWriter(os.Stdout)
		step.Fill.write(out, s.placeholders)
		out.Flush()
	case step.Stderr != nil:
		io.WriteString(os.Stderr, *step.Stderr)
	case step.StderrFill != nil:
		step.StderrFill.write(os.Stderr, s.placeholders)
	case step.DelayMS > 0:
		time.Sleep(ms(step.DelayMS))
	case step.Repeat != nil:
		for s.n = 1; step.Repeat.Times == 0 || s.n <= int(step.Repeat.Times); s.n++ {
			s.write(s.json(step.Repeat.Send))
			if s.pause(ms(step.Repeat.EveryMS)) {
				break
			}
		}
	case step.Serve != nil:
		s.serve(step.Serve.Results, int(step.Serve.Times))
	case step.ReplyEnv != nil:
		set := []string{}
		for _, name := range step.ReplyEnv {
			if _, ok := os.LookupEnv(name); ok {
				set = append(set, name)
			}
		}
		s.reply("result", appendCase(map[string]any{"content": []any{map[string]any{"type": "text", "text": string(appendCase(set))}}}))
	case step.Ignore != nil:
		s.ignoreEOF = s.ignoreEOF || slices.Contains(step.Ignore, "eof")
		if slices.Contains(step.Ignore, "term") {
			signal.Ignore(syscall.SIGTERM)
		}
	case bool(step.StopReading):
		s.deaf = true
	case step.Grandchild != nil:
		s.grandchild(step.Grandchild.HoldStdout, step.Grandchild.IgnoreTerm, ms(1000*step.Grandchild.Seconds))
	case step.Exit != nil:
		os.Exit(*step.Exit)
	case bool(step.KillSelf):
		if p, err := os.FindProcess(os.Getpid()); err == nil {
			p.Kill()
		}
		select {}
	case bool(step.Hang):
		s.drain()
	}
}

func (s *caseServer) reply(kind string, value []byte) {
	s.write([]byte(`{"jsonrpc":"2.0","id":` + string(s.id) + `,"` + kind + `":` + string(value) + `}`))
}

// pause sleeps while it reads, and reports whether stdin has ended. What it has
// read is there for whoever waits for it later.
func (s *caseServer) pause(d time.Duration) (ended bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case line, ok := <-s.next():
			if !ok {
				return true
			}
			if e, mine := s.take(line, noMethod); !mine {
				s.kept = append(s.kept, e)
			}
		case <-timer.C:
			return false
		}
	}
}

// serve answers requests until it has answered so many, or to the end of stdin.
func (s *caseServer) serve(results map[string]json.RawMessage, times int) {
	for n := 0; times == 0 || n < times; {
		e, ok := s.message(func(m string) bool { return results[m] != nil })
		if !ok && times == 0 {
			return
		}
		if !ok {
			s.ended()
		}
		if e.id == nil || e.method == "" {
			continue
		}
		if result, ok := results[e.method]; ok {
			s.answering(e)
			s.reply("result", s.json(result))
			n++
		} else if e.method == "ping" {
			s.write(appendResponse(nil, e.id, json.RawMessage("{}"), nil))
		}
	}
}

// drain reads to the end of stdin, which is the end of the process.
func (s *caseServer) drain() {
	for {
		if _, ok := s.message(noMethod); !ok {
			s.ended()
		}
	}
}

func (s *caseServer) grandchild(hold, ignoreTerm bool, d time.Duration) {
	up := filepath.Join(os.Getenv(caseDirEnv), "up-"+strconv.Itoa(os.Getpid()))
	exe, err := os.Executable()
	if err != nil {
		s.tell(caseEvent{Fail: err.Error()})
		return
	}
	cmd := exec.Command(exe, up, d.String(), strconv.FormatBool(ignoreTerm))
	cmd.Env = append(os.Environ(), childEnv+"=case-grandchild")
	if hold {
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	}
	if err := cmd.Start(); err != nil {
		s.tell(caseEvent{Fail: err.Error()})
		return
	}
	go cmd.Wait() // reaps it, should this process live longer
	for range 400 {
		if _, err := os.Stat(up); err == nil {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	s.tell(caseEvent{Fail: "the grandchild did not start"})
}

// caseGrandchild sleeps. Its arguments are the file that says that it runs, how
// long it sleeps, and whether TERM is ignored.
func caseGrandchild(args []string) int {
	if args[2] == "true" {
		signal.Ignore(syscall.SIGTERM)
	}
	d, err := time.ParseDuration(args[1])
	if err != nil || os.WriteFile(args[0], nil, 0o600) != nil {
		return 2
	}
	time.Sleep(d)
	return 0
}
