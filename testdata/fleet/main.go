// Command fleet shows whether a configuration of MCP servers works: which
// servers answer, which tools they offer, what is missing and why.
//
//	go run ./testdata/fleet                          three servers of its own
//	go run ./testdata/fleet -config FILE             those of a file
//	go run ./testdata/fleet -config FILE -call TOOL -args '{"name":"value"}'
//
// Without a file it brings its servers along: itself as a child process, an
// endpoint on the loopback, and an optional server that is down.
//
// The exit status is 0 if all is well, 1 if a required server is missing or a
// call failed, 2 if the command line or the configuration is wrong, 130 after
// an interrupt.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"
	"unicode"

	"resilient/mcp"
)

const (
	statusFailed      = 1
	statusUsage       = 2
	statusInterrupted = 130
)

func main() {
	if len(os.Args) == 2 && os.Args[1] == "serve" { // the child of the demonstration
		if err := clock.Serve(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

func run(args []string, stdout, stderr io.Writer) (status int) {
	flags := flag.NewFlagSet("fleet", flag.ContinueOnError)
	flags.SetOutput(stderr)
	config := flags.String("config", "", "check the servers of this `file`")
	tool := flags.String("call", "", "call this `tool`, by the name in the list")
	arguments := flags.String("args", "{}", "the arguments of the call, a `JSON` object")
	asJSON := flags.Bool("json", false, "print one JSON object")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return statusUsage
	}
	usage := func(problem string) int {
		fmt.Fprintln(stderr, "fleet: "+problem)
		return statusUsage
	}
	if flags.NArg() > 0 {
		return usage("unexpected argument " + strconv.Quote(flags.Arg(0)) + "; a file is given with -config")
	}
	var object map[string]any
	if err := json.Unmarshal([]byte(*arguments), &object); err != nil || object == nil {
		return usage("-args is not a JSON object")
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var cfgs []mcp.Config
	var calls []*mcp.Call
	if *config != "" {
		var err error
		if cfgs, err = mcp.LoadConfigs(*config); err != nil {
			fmt.Fprintln(stderr, err) // one line for each problem
			return statusUsage
		}
		if len(cfgs) == 0 {
			return usage(*config + " declares no server")
		}
	} else {
		demo, err := demonstrate()
		if err != nil {
			fmt.Fprintln(stderr, "fleet:", err)
			return statusFailed
		}
		defer demo.close()
		cfgs, calls = demo.cfgs, demo.calls
	}
	if *tool != "" {
		calls = []*mcp.Call{{Tool: *tool, Arguments: json.RawMessage(*arguments)}}
	}

	r, err := check(ctx, cfgs, calls)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(stderr, "fleet: interrupted; every server has been ended")
		return statusInterrupted
	case err != nil:
		fmt.Fprintln(stderr, err)
		return statusUsage
	}
	if *asJSON {
		e := json.NewEncoder(stdout)
		e.SetEscapeHTML(false)
		e.SetIndent("", "  ")
		e.Encode(r)
	} else {
		r.print(stdout, *tool != "")
	}
	if !r.OK || *tool != "" && (r.Calls[0].Error != "" || r.Calls[0].Failed) {
		return statusFailed
	}
	return 0
}

// A report is what became of a configuration.
type report struct {
	OK      bool     `json:"ok"` // no required server is missing
	Servers []server `json:"servers"`
	Notice  string   `json:"notice,omitempty"`
	Calls   []call   `json:"calls,omitempty"`
}

type server struct {
	Name      string     `json:"name"`
	Transport string     `json:"transport"`
	State     string     `json:"state"` // "ready", "degraded", or "missing" if it is required
	Program   string     `json:"program,omitempty"`
	Protocol  string     `json:"protocol,omitempty"`
	Tools     []tool     `json:"tools"`
	LeftOut   []string   `json:"left_out,omitempty"`
	Unchecked []string   `json:"unchecked,omitempty"` // parts of schemas
	Fault     *fault     `json:"fault,omitempty"`
	Health    mcp.Health `json:"health"`
}

type tool struct {
	Name        string `json:"name"`
	Remote      string `json:"remote"`
	Description string `json:"description,omitempty"`
}

// A fault is why a server is missing. Raw and Stderr are the server's words.
type fault struct {
	Error  string   `json:"error"`
	Raw    string   `json:"raw,omitempty"`
	Stderr []string `json:"stderr,omitempty"`
	Advice string   `json:"advice,omitempty"`
}

type call struct {
	Tool     string  `json:"tool"`
	Seconds  float64 `json:"seconds"`
	Result   string  `json:"result,omitempty"` // the server's words
	Failed   bool    `json:"failed,omitempty"` // the tool said so itself
	Error    string  `json:"error,omitempty"`
	ForModel string  `json:"for_model,omitempty"` // the error as a model reads it
}

// A link is the chain to one server, of which the transport is kept: it has the
// last words of a child.
type link struct {
	cfg       mcp.Config
	transport mcp.Transport
	client    *mcp.Client
}

// check assembles the servers, makes the calls and ends the servers again. The
// error is a problem of the configuration as a whole.
func check(ctx context.Context, cfgs []mcp.Config, calls []*mcp.Call) (*report, error) {
	o := &mcp.Options{ClientInfo: mcp.ServerInfo{Name: "fleet", Version: "1"}}
	if info, err := os.Stderr.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
		p := &progress{running: map[mcp.Reach]time.Time{}}
		o.Trace = p.trace
		defer p.show(os.Stderr)()
	}
	links := make([]link, len(cfgs))
	clients := make([]*mcp.Client, len(cfgs))
	for i, cfg := range cfgs {
		t, err := mcp.NewTransport(cfg, o)
		if err != nil {
			return nil, err
		}
		// A fleet gives up at its first required server that is missing. Here
		// all are to be seen, so to the fleet they are all optional.
		lax := cfg
		lax.Optional = true
		clients[i] = mcp.NewClient(mcp.NewResilientSession(mcp.NewSession(t, lax, o), lax, o), lax, o)
		links[i] = link{cfg, t, clients[i]}
	}
	f, err := mcp.Assemble(ctx, clients...)
	if err != nil {
		return nil, err
	}
	defer f.Close()

	r := &report{OK: true, Notice: f.Notice()}
	missing := map[string]error{}
	for _, d := range f.Degraded() {
		missing[d.Server] = d.Err
	}
	for _, l := range links {
		s := l.describe(missing[l.cfg.Name])
		if s.State == "missing" {
			r.OK, r.Notice = false, "" // nobody would be told: there would be no run
		}
		r.Servers = append(r.Servers, s)
	}
	for _, c := range calls {
		r.Calls = append(r.Calls, makeCall(ctx, f, c))
	}
	for i, h := range f.Health() {
		r.Servers[i].Health = h
	}
	return r, nil
}

// describe says what became of one server; err is why it is missing.
func (l link) describe(err error) server {
	s := server{Name: l.cfg.Name, Transport: "http", State: "ready", Tools: []tool{}}
	if _, ok := l.transport.(*mcp.StdioTransport); ok {
		s.Transport = "stdio"
	}
	if err != nil {
		s.State = "missing"
		if l.cfg.Optional {
			s.State = "degraded"
		}
		s.Fault = l.explain(err)
		return s
	}
	a := l.client.Adoption()
	s.Program, s.Protocol = strings.TrimSpace(a.Server.Name+" "+a.Server.Version), a.Server.Protocol
	for _, t := range a.Tools {
		s.Tools = append(s.Tools, tool{t.Name, t.Remote, t.Description})
	}
	s.LeftOut, s.Unchecked = reasons(a.Rejected), reasons(a.Partial)
	return s
}

func reasons(list []mcp.Rejection) (out []string) {
	for _, r := range list {
		out = append(out, r.Tool+": "+r.Reason)
	}
	return out
}

// explain gathers all that is known about a failure.
func (l link) explain(err error) *fault {
	out := &fault{Error: err.Error(), Advice: advice(l.cfg, err)}
	var (
		te *mcp.TransportError
		pe *mcp.ProtocolError
		re *mcp.RPCError
	)
	switch {
	case errors.As(err, &te):
		out.Raw = string(te.Raw)
	case errors.As(err, &pe):
		out.Raw = string(pe.Raw)
	case errors.As(err, &re):
		out.Raw = re.Message
	}
	if t, ok := l.transport.(*mcp.StdioTransport); ok {
		if n := t.Skipped(); n > 0 && te != nil && te.Reason == mcp.ReasonTimeout {
			out.Advice = fmt.Sprintf("the command wrote %d lines to its stdout that are not MCP: check that it serves stdio", n)
		}
		out.Stderr = t.StderrTail()
		if te != nil && te.Reason == mcp.ReasonDisconnected {
			out.Raw = "" // it is the end of the same lines
		}
	}
	return out
}

// advice says what to do about an error, in a sentence, where that is known.
func advice(cfg mcp.Config, err error) string {
	var (
		te *mcp.TransportError
		re *mcp.RPCError
		ce *mcp.ConfigError
	)
	stdio := len(cfg.Command) > 0
	switch {
	case errors.As(err, &ce): // says so itself
		return ""
	case errors.As(err, &re):
		return "the server understood and refused: check its own settings and credentials"
	case !errors.As(err, &te):
		return ""
	case te.Status == 401 || te.Status == 403:
		return "give credentials the server accepts, as Authorization under headers"
	case te.Status == 404 || te.Status == 405:
		return "check the path of the endpoint: a server is there, but it does not speak MCP at this path"
	case te.Status == 429:
		return "the server asks to be left alone for a while; try again later"
	case te.Status >= 300 && te.Status < 400:
		return "redirects are not followed: if the target is right, make it the endpoint"
	case te.Status >= 500:
		return "the server has failed or is overloaded: look at its own log"
	case te.Reason == mcp.ReasonUnavailable && stdio:
		return "check that the command exists and is executable, that each argument is a text of its own, and that dir is right"
	case te.Reason == mcp.ReasonUnavailable:
		return "check host and port of the endpoint, and that the server is running"
	case te.Reason == mcp.ReasonDisconnected && stdio:
		return "the command ran and ended: run it by hand; it sees only the variables in env and env_allow"
	case te.Reason == mcp.ReasonTimeout && stdio:
		return "the command runs but does not answer: is it an MCP server on stdio? A slow start needs a higher connect_timeout_seconds"
	case te.Reason == mcp.ReasonTimeout:
		return "the endpoint takes requests but does not answer; a slow start needs a higher connect_timeout_seconds"
	case te.Reason == mcp.ReasonProtocol && stdio:
		return "the command writes to stdout what is not MCP: check that it serves stdio"
	case te.Reason == mcp.ReasonProtocol:
		return "something else answers there, a proxy or a login page perhaps: check the endpoint"
	case te.Reason == mcp.ReasonLimit:
		return "a message of the server is larger than max_message_bytes"
	}
	return ""
}

// makeCall calls a tool. The text of the result is the server's.
func makeCall(ctx context.Context, f *mcp.Fleet, c *mcp.Call) call {
	start := time.Now()
	res, err := f.Call(ctx, c)
	out := call{Tool: c.Tool, Seconds: time.Since(start).Seconds()}
	if err != nil {
		out.Error, out.ForModel = err.Error(), mcp.ErrorResult(err).Text()
		return out
	}
	out.Failed = res.IsError
	var parts []string
	for _, b := range res.Content {
		switch {
		case b.Text != "" || b.Type == "text":
			parts = append(parts, b.Text)
		case b.Data != "":
			parts = append(parts, fmt.Sprintf("[%s, %s, %d bytes of base64]", b.Type, b.MIMEType, len(b.Data)))
		default:
			parts = append(parts, fmt.Sprintf("[%s %s]", b.Type, b.URI))
		}
	}
	if len(parts) == 0 && res.Structured != nil {
		parts = append(parts, string(res.Structured))
	}
	out.Result = strings.Join(parts, "\n")
	return out
}

// print writes the report for a person: all of it, or only what a call came to
// and what is wrong.
func (r *report) print(w io.Writer, brief bool) {
	if !brief {
		r.printServers(w)
	}
	r.printFaults(w)
	if !brief {
		r.printTools(w)
	}
	r.printCalls(w)
	if !brief {
		r.printHealth(w)
	}
	if !r.OK {
		fmt.Fprintln(w, "\nA required server is missing: an agent with this configuration would not start.")
	}
}

func (r *report) printServers(w io.Writer) {
	var rows [][]string
	for _, s := range r.Servers {
		rows = append(rows, []string{s.Name, s.Transport, s.State, strconv.Itoa(len(s.Tools)), cmp.Or(s.Protocol, "-"), cmp.Or(printable(s.Program, 40), "-")})
	}
	table(w, "SERVERS", []string{"server", "transport", "state", "tools", "protocol", "program"}, rows)
}

func (r *report) printFaults(w io.Writer) {
	for _, s := range r.Servers {
		if s.Fault == nil {
			continue
		}
		fmt.Fprintf(w, "\n%s: %s\n  %s\n", strings.ToUpper(s.State), s.Name, s.Fault.Error)
		if s.Fault.Advice != "" {
			fmt.Fprintln(w, "  To do: "+s.Fault.Advice+".")
		}
		quote(w, "The server answered, in its own words", s.Fault.Raw, 8)
		quote(w, "The server's stderr, in its own words", strings.Join(s.Fault.Stderr, "\n"), 12)
	}
}

func (r *report) printTools(w io.Writer) {
	var rows [][]string
	for _, s := range r.Servers {
		for _, t := range s.Tools {
			rows = append(rows, []string{s.Name, t.Name, printable(t.Description, 70)})
		}
	}
	fmt.Fprintln(w)
	table(w, "TOOLS", []string{"server", "tool", "description, the server's"}, rows)
	for _, s := range r.Servers {
		list(w, "LEFT OUT: tools of "+s.Name, s.LeftOut)
		list(w, "NOT CHECKED: parts of schemas of "+s.Name, s.Unchecked)
	}
	if r.Notice != "" {
		fmt.Fprintf(w, "\nNOTICE, as a model reads it\n  %s\n", strings.ReplaceAll(r.Notice, "\n", "\n  "))
	}
}

func (r *report) printCalls(w io.Writer) {
	for _, c := range r.Calls {
		end := "ok"
		switch {
		case c.Error != "":
			end = c.Error
		case c.Failed:
			end = "the tool failed"
		}
		fmt.Fprintf(w, "\nCALL %s, %s: %s\n", c.Tool, milliseconds(c.Seconds), end)
		quote(w, "The server's result", c.Result, 200)
		quote(w, "What a model reads", c.ForModel, 20)
	}
}

func (r *report) printHealth(w io.Writer) {
	var rows [][]string
	for _, s := range r.Servers {
		h := s.Health
		last := h.Operation + " " + string(h.Outcome)
		if h.ErrorType != "" {
			last += " (" + h.ErrorType + ")"
		}
		rows = append(rows, []string{s.Name, h.State.String(), fmt.Sprint(h.Calls), fmt.Sprint(h.Faults), fmt.Sprint(h.Retried),
			fmt.Sprint(h.Refused), last, milliseconds(h.Latency.Seconds())})
	}
	fmt.Fprintln(w)
	table(w, "HEALTH", []string{"server", "breaker", "calls", "faults", "retried", "refused", "last", "took"}, rows)
}

// table prints aligned columns.
func table(w io.Writer, title string, head []string, rows [][]string) {
	fmt.Fprintln(w, title)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{head}, rows...) {
		fmt.Fprintln(t, "  "+strings.Join(row, "\t"))
	}
	t.Flush()
}

func milliseconds(seconds float64) string { return fmt.Sprintf("%.1f ms", seconds*1e3) }

// quote prints what a server wrote, marked as that and bounded. The last lines
// say the most.
func quote(w io.Writer, what, text string, most int) {
	text = strings.TrimRight(text, "\n")
	if text == "" {
		return
	}
	lines := strings.Split(text, "\n")
	if n := len(lines) - most; n > 0 {
		lines = lines[n:]
		what += ", the last " + strconv.Itoa(most) + " lines"
	}
	fmt.Fprintf(w, "  %s:\n", what)
	for _, l := range lines {
		fmt.Fprintln(w, "  | "+printable(l, 400))
	}
}

// list prints lines of ours, a few of many.
func list(w io.Writer, head string, lines []string) {
	const most = 10
	if len(lines) == 0 {
		return
	}
	fmt.Fprintf(w, "\n%s\n", head)
	for i, l := range lines {
		if i == most && len(lines) > most+1 {
			fmt.Fprintf(w, "  and %d more\n", len(lines)-most)
			return
		}
		fmt.Fprintln(w, "  "+printable(l, 200))
	}
}

// printable keeps a server's text from moving the cursor, and cuts it to n
// characters.
func printable(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return ' '
		case !unicode.IsPrint(r):
			return unicode.ReplacementChar
		}
		return r
	}, s)
	if runes := []rune(s); len(runes) > n {
		return string(runes[:n-1]) + "…"
	}
	return s
}

// progress says on a terminal what is being waited for. It listens where spans
// are made.
type progress struct {
	mu      sync.Mutex // guards running
	running map[mcp.Reach]time.Time
}

func (p *progress) trace(ctx context.Context, r mcp.Reach) (context.Context, func(mcp.Health, error)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running[r] = time.Now()
	return ctx, func(mcp.Health, error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.running, r)
	}
}

// show prints until the function that it returns is called, which wipes the
// line.
func (p *progress) show(w io.Writer) (stop func()) {
	end, ended := make(chan struct{}), make(chan struct{})
	go func() { // stop ends it and waits
		defer close(ended)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		shown := ""
		say := func(line string) {
			if line != shown {
				io.WriteString(w, "\r\x1b[K"+line)
			}
			shown = line
		}
		for {
			select {
			case <-end:
				say("")
				return
			case <-tick.C:
				say(p.line())
			}
		}
	}()
	return func() { close(end); <-ended }
}

// line names what has taken a moment already.
func (p *progress) line() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var parts []string
	for r, since := range p.running {
		if d := time.Since(since); d > 300*time.Millisecond {
			parts = append(parts, fmt.Sprintf("%s (%s, %.0f s)", r.Server, r.Operation, d.Seconds()))
		}
	}
	if parts == nil {
		return ""
	}
	slices.Sort(parts)
	return printable("waiting for "+strings.Join(parts, ", "), 78)
}

// A demo is three servers that need no set-up.
type demo struct {
	cfgs  []mcp.Config
	calls []*mcp.Call
	web   *http.Server
}

func demonstrate() (*demo, error) {
	self, err := os.Executable()
	if err != nil { // needs /proc, which a bare container lacks
		if self, err = exec.LookPath(os.Args[0]); err == nil {
			self, err = filepath.Abs(self)
		}
	}
	if err != nil {
		return nil, err
	}
	up, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	down, err := net.Listen("tcp", "127.0.0.1:0") // for a port on which nobody listens
	if err != nil {
		return nil, errors.Join(err, up.Close())
	}
	down.Close()
	d := &demo{web: &http.Server{Handler: handbook, ReadHeaderTimeout: 10 * time.Second}}
	go d.web.Serve(up) // close ends it
	d.cfgs = []mcp.Config{
		{Name: "clock", Command: []string{self, "serve"}},
		{Name: "handbook", Endpoint: "http://" + up.Addr().String() + "/mcp", Prefix: "handbook"},
		{Name: "weather", Endpoint: "http://" + down.Addr().String() + "/mcp", Optional: true},
	}
	d.calls = []*mcp.Call{
		{Tool: "add_days", Arguments: map[string]any{"date": "2028-02-28", "days": 2}},
		{Tool: "handbook-lookup", Arguments: map[string]any{"topic": "leave"}},
		{Tool: "forecast", Arguments: map[string]any{"place": "Bergen"}},
	}
	return d, nil
}

func (d *demo) close() { d.web.Close() }

// clock is the server in the child process.
var clock = &mcp.FaultyServer{
	Tools: []mcp.Tool{{
		Name:        "add_days",
		Description: "Return the date that lies a number of days after another.",
		InputSchema: json.RawMessage(`{"type":"object","properties":{"date":{"type":"string","description":"YYYY-MM-DD"},"days":{"type":"integer"}},"required":["date","days"],"additionalProperties":false}`),
		ReadOnly:    true,
	}, {
		Name:        "now",
		Description: "Return the present time.",
		InputSchema: json.RawMessage(`{"type":"object","additionalProperties":false}`),
		ReadOnly:    true,
	}},
	Handler: func(_ context.Context, c *mcp.Call) (*mcp.Result, error) {
		if c.Tool == "now" {
			return text(time.Now().UTC().Format(time.RFC3339)), nil
		}
		var in struct {
			Date string
			Days int
		}
		if err := decode(c, &in); err != nil {
			return nil, err
		}
		day, err := time.Parse(time.DateOnly, in.Date)
		if err != nil {
			return nil, errors.New("the date is not of the form YYYY-MM-DD")
		}
		return text(day.AddDate(0, 0, in.Days).Format(time.DateOnly)), nil
	},
}

// handbook is the server at the endpoint.
var handbook = &mcp.FaultyServer{
	Sessions: true,
	SSE:      true,
	Tools: []mcp.Tool{{
		Name:         "lookup",
		Description:  "Look a topic up in the handbook.",
		InputSchema:  json.RawMessage(`{"type":"object","properties":{"topic":{"type":"string"}},"required":["topic"]}`),
		OutputSchema: json.RawMessage(`{"type":"object","properties":{"topic":{"type":"string"},"rule":{"type":"string"}},"required":["topic","rule"]}`),
		ReadOnly:     true,
	}},
	Handler: func(_ context.Context, c *mcp.Call) (*mcp.Result, error) {
		var in struct{ Topic string }
		if err := decode(c, &in); err != nil {
			return nil, err
		}
		rule, ok := rules[in.Topic]
		if !ok {
			return nil, errors.New("there are rules about " + strings.Join(slices.Sorted(maps.Keys(rules)), ", "))
		}
		b, err := json.Marshal(map[string]string{"topic": in.Topic, "rule": rule})
		if err != nil {
			return nil, err
		}
		r := text(rule)
		r.Structured = b
		return r, nil
	},
}

var rules = map[string]string{
	"leave":  "Ask two weeks ahead.",
	"travel": "Take the train where it takes less than five hours.",
}

func decode(c *mcp.Call, v any) error {
	b, ok := c.Arguments.(json.RawMessage)
	if !ok {
		return errors.New("no arguments")
	}
	return json.NewDecoder(bytes.NewReader(b)).Decode(v)
}

func text(s string) *mcp.Result {
	return &mcp.Result{Content: []mcp.Content{{Type: "text", Text: s}}}
}
