package mcp

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// A runner for the fault cases of testdata/cases, whose README is the format.
// MCP_CASES names another folder of such files. The runner is strict: a field
// or a verb that it does not know fails the case, because a case that is half
// understood proves nothing.

func TestCases(t *testing.T) {
	dir := cmp.Or(os.Getenv("MCP_CASES"), filepath.Join("testdata", "cases"))
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no cases in %s: %v", dir, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".json"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			c, err := parseCase(data)
			if err != nil {
				t.Fatal(err)
			}
			if !c.alone() {
				t.Parallel()
			}
			for range max(1, c.Expect.Detail.Repeat) {
				for _, f := range runCase(t, c) {
					t.Error(f)
				}
			}
		})
	}
}

// The runner has to fail on what it does not understand.
func TestCasesAreStrict(t *testing.T) {
	const form = `{"id":"X","kind":"k","title":"t","transport":%q,"server_script":%s,"client_action":{"policy":%s,"steps":%s},"expect":{"outcome":"ok","detail":%s}}`
	for _, tt := range []struct{ transport, script, policy, steps, detail string }{
		{"carrier-pigeon", `[]`, `{}`, `[{"op":"connect"}]`, `{}`},
		{"stdio", `[{"shout":"hi"}]`, `{}`, `[{"op":"connect"}]`, `{}`},
		{"stdio", `[{"raw":"a","stderr":"b"}]`, `{}`, `[{"op":"connect"}]`, `{}`},
		{"stdio", `[{"raw":"a","as":"b"}]`, `{}`, `[{"op":"connect"}]`, `{}`},
		{"stdio", `[{"ignore":["hup"]}]`, `{}`, `[{"op":"connect"}]`, `{}`},
		{"http", `[{"on":{"method":"POST","verb":1}}]`, `{}`, `[{"op":"connect"}]`, `{}`},
		{"http", `[{"on":{},"status":200,"body":[{"sing":true}]}]`, `{}`, `[{"op":"connect"}]`, `{}`},
		{"schema", `[{"tool":{"name":"t"},"result":{}}]`, `{}`, `[{"op":"validate"}]`, `{}`},
		{"policy", `[{"attempt":"shrug"}]`, `{}`, `[{"op":"call"}]`, `{}`},
		{"policy", `[{"attempt":"ok"}]`, `{"patience":1}`, `[{"op":"call"}]`, `{}`},
		{"policy", `[{"attempt":"ok"}]`, `{"validate":"maybe"}`, `[{"op":"call"}]`, `{}`},
		{"policy", `[{"attempt":"ok"}]`, `{}`, `[{"op":"dance"}]`, `{}`},
		{"policy", `[{"attempt":"ok"}]`, `{}`, `[{"op":"call","loud":true}]`, `{}`},
		{"policy", `[{"attempt":"ok"}]`, `{}`, `[{"op":"parallel","n":2}]`, `{}`},
		{"policy", `[{"attempt":"ok"}]`, `{}`, `[{"op":"call"}]`, `{"mood":"good"}`},
		{"policy", `[{"attempt":"ok"}]`, `{}`, `[{"op":"call"}]`, `{"judge_step":7}`},
	} {
		text := fmt.Sprintf(form, tt.transport, tt.script, tt.policy, tt.steps, tt.detail)
		if _, err := parseCase([]byte(text)); err == nil {
			t.Errorf("accepted: %s", text)
		}
	}
}

// A check that cannot fail is none: with one expectation made wrong, a case has
// to fail. Each kind of expectation is tried once over each transport.
func TestCasesCanFail(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("testdata", "cases", "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	tried := map[string]bool{}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		c, err := parseCase(data)
		if err != nil {
			t.Fatal(err)
		}
		for key, wrong := range wrongDetails(t, member(member(data, "expect"), "detail")) {
			if tried[c.Transport+key] {
				continue
			}
			tried[c.Transport+key] = true
			t.Run(c.ID+"/"+key, func(t *testing.T) {
				if !c.alone() {
					t.Parallel()
				}
				broken := *c
				broken.Expect.Detail = caseDetail{}
				if err := strictly(wrong, &broken.Expect.Detail); err != nil {
					t.Fatal(err)
				}
				if runCase(t, &broken) == nil {
					t.Errorf("passes with %s", wrong)
				}
			})
		}
	}
}

// wrongDetails returns the details of a case with one of them made wrong, by
// the one that is.
func wrongDetails(t *testing.T, detail json.RawMessage) map[string]json.RawMessage {
	var right map[string]any
	if err := json.Unmarshal(detail, &right); err != nil {
		t.Fatal(err)
	}
	all := map[string]json.RawMessage{}
	for key, v := range right {
		wrong := wrongValue(key, v)
		if wrong == nil {
			continue
		}
		m := maps.Clone(right)
		m[key] = wrong
		delete(m, "repeat")
		if key == "steps" {
			delete(m, "steps_also_ok")
		}
		all[key] = appendCase(m)
	}
	return all
}

// wrongValue returns what key cannot rightly be, or nil if anything may be.
func wrongValue(key string, v any) any {
	switch key {
	case "note", "repeat", "also_ok", "steps_also_ok", "judge_step", "initialize_without_session", "tools_may_skip", "skips_reported", "tools_if_ok", "b_must_not_see_headers":
		return nil // it allows, or holds only with others
	case "error_not_contains":
		return []string{""}
	case "client_replies":
		return append(slices.Clone(v.([]any)), map[string]any{})
	case "last_step":
		return "limit"
	case "goroutine_growth_max":
		return -1000 // others may end meanwhile
	case "steps":
		classes := slices.Clone(v.([]any))
		if classes[0] == "limit" {
			classes[0] = "refused"
		} else {
			classes[0] = "limit"
		}
		return classes
	}
	return wrongLike(strings.Contains(key, "max"), v)
}

// wrongLike changes every text, number and bool in v.
func wrongLike(less bool, v any) any {
	switch v := v.(type) {
	case string:
		return v + " wrong"
	case bool:
		return !v
	case float64:
		if less {
			return -1
		}
		return v + 1e6
	case []any:
		out := []any{}
		for _, e := range v {
			out = append(out, wrongLike(less, e))
		}
		if len(v) == 0 {
			out = append(out, "wrong")
		}
		return out
	case map[string]any:
		out := map[string]any{}
		for k, e := range v {
			out[k] = wrongLike(less, e)
		}
		return out
	}
	return v
}

// The format.

type faultCase struct {
	ID        string            `json:"id"`
	Kind      string            `json:"kind"`
	Title     string            `json:"title"`
	Transport string            `json:"transport"`
	Script    []json.RawMessage `json:"server_script"`
	Action    struct {
		Policy casePolicy `json:"policy"`
		Steps  []caseStep `json:"steps"`
	} `json:"client_action"`
	Expect struct {
		Outcome string     `json:"outcome"`
		Detail  caseDetail `json:"detail"`
	} `json:"expect"`

	// The script of the case's transport.
	stdio    []stdioStep
	http     []httpEntry
	schema   []schemaEntry
	attempts []policyEntry
}

type casePolicy struct {
	ConnectDeadlineMS float64 `json:"connect_deadline_ms"`
	MaxTotalMS        float64 `json:"max_total_ms"`
	ProgressExtends   bool    `json:"progress_extends"`
	Retries           int     `json:"retries"`
	BackoffBaseMS     float64 `json:"backoff_base_ms"`
	BackoffMaxMS      float64 `json:"backoff_max_ms"`
	Jitter            any     `json:"jitter"`
	Breaker           *struct {
		Threshold   int     `json:"threshold"`
		CooldownMS  float64 `json:"cooldown_ms"`
		HalfOpenMax int     `json:"half_open_max"`
	} `json:"breaker"`
	MaxMessageBytes    int                        `json:"max_message_bytes"`
	MaxPages           int                        `json:"max_pages"`
	MaxInFlight        int                        `json:"max_in_flight"`
	Queue              any                        `json:"queue"`
	QueueWaitMS        float64                    `json:"queue_wait_ms"`
	CloseGraceMS       float64                    `json:"close_grace_ms"`
	KillGraceMS        float64                    `json:"kill_grace_ms"`
	Restart            any                        `json:"restart"`
	StderrTailBytes    int                        `json:"stderr_tail_bytes"`
	Env                map[string]string          `json:"env"`
	Headers            map[string]string          `json:"headers"`
	Redirects          any                        `json:"redirects"`
	ProtocolVersions   []string                   `json:"protocol_versions"`
	ClientCapabilities map[string]json.RawMessage `json:"client_capabilities"`
	Validate           string                     `json:"validate"`
	Servers            map[string]struct {
		Required bool `json:"required"`
	} `json:"servers"`
}

type caseStep struct {
	Op           string          `json:"op"`
	URL          string          `json:"url"`
	Tool         string          `json:"tool"`
	Args         json.RawMessage `json:"args"`
	ArgsPadBytes int             `json:"args_pad_bytes"`
	DeadlineMS   float64         `json:"deadline_ms"`
	Idempotent   bool            `json:"idempotent"`
	Server       string          `json:"server"`
	Cold         bool            `json:"cold"`
	NeedsList    bool            `json:"needs_list"`
	N            int             `json:"n"`
	Step         *caseStep       `json:"step"`
	Result       int             `json:"result"`
	Name         string          `json:"name"`
	Value        string          `json:"value"`
	MS           float64         `json:"ms"`
}

// silent reports whether the step gives no outcome.
func (s *caseStep) silent() bool { return s.Op == "setenv" || s.Op == "sleep" || s.Op == "advance" }

type caseDetail struct {
	Steps                    []string                       `json:"steps"`
	AlsoOK                   []string                       `json:"also_ok"`
	StepsAlsoOK              map[int][]string               `json:"steps_also_ok"`
	JudgeStep                *int                           `json:"judge_step"`
	MaxMS                    *float64                       `json:"max_ms"`
	StepMaxMS                map[int]float64                `json:"step_max_ms"`
	StepMinMS                map[int]float64                `json:"step_min_ms"`
	VirtualMaxMS             *float64                       `json:"virtual_max_ms"`
	Text                     *string                        `json:"text"`
	Texts                    map[int]string                 `json:"texts"`
	TextLen                  map[int]int                    `json:"text_len"`
	StructuredRaw            json.RawMessage                `json:"structured_raw"`
	IsError                  map[int]bool                   `json:"is_error"`
	RPCCodes                 map[int]int                    `json:"rpc_codes"`
	HTTPStatus               *int                           `json:"http_status"`
	RetryAfterMS             *caseSpan                      `json:"retry_after_ms"`
	MayHaveRun               *bool                          `json:"may_have_run"`
	MayHaveRunSteps          map[int]bool                   `json:"may_have_run_steps"`
	ErrorContains            []string                       `json:"error_contains"`
	ErrorContainsAny         []string                       `json:"error_contains_any"`
	ErrorNotContains         []string                       `json:"error_not_contains"`
	ServerSaw                map[string]caseSpan            `json:"server_saw"`
	ServerSawMax             map[string]int                 `json:"server_saw_max"`
	FinalPathSaw             map[string]map[string]caseSpan `json:"final_path_saw"`
	InitializeWithoutSession bool                           `json:"initialize_without_session"`
	ClientReplies            []clientReply                  `json:"client_replies"`
	GetMinDelayMS            *float64                       `json:"get_min_delay_ms"`
	BRequests                *caseSpan                      `json:"b_requests"`
	BMustNotSeeHeaders       []string                       `json:"b_must_not_see_headers"`
	ServerSentMaxBytes       *int64                         `json:"server_sent_max_bytes"`
	ToolsExact               []string                       `json:"tools_exact"`
	ToolsInclude             []string                       `json:"tools_include"`
	ToolsMaySkip             []string                       `json:"tools_may_skip"`
	SkipsReported            bool                           `json:"skips_reported"`
	ToolsIfOK                []string                       `json:"tools_if_ok"`
	Negotiated               *string                        `json:"negotiated"`
	Attempts                 []caseSpan                     `json:"attempts"`
	AttemptsTotal            *caseSpan                      `json:"attempts_total"`
	AttemptsEach             *caseSpan                      `json:"attempts_each"`
	WaitBeforeAttempt2MS     []caseSpan                     `json:"wait_before_attempt_2_ms"`
	WaitsMS                  json.RawMessage                `json:"waits_ms"`
	DistinctFirstWaitsMin    *int                           `json:"distinct_first_waits_min"`
	Breaker                  *string                        `json:"breaker"`
	ParallelCounts           map[string]caseSpan            `json:"parallel_counts"`
	ParallelCountsRange      map[string]caseSpan            `json:"parallel_counts_range"`
	LastStep                 words                          `json:"last_step"`
	MaxInFlightSeen          *int                           `json:"max_in_flight_seen"`
	Ready                    []string                       `json:"ready"`
	Down                     []string                       `json:"down"`
	OpenConnectionsAfter     *int                           `json:"open_connections_after"`
	ProcessesLeft            *int                           `json:"processes_left"`
	GoroutineGrowthMax       *int                           `json:"goroutine_growth_max"`
	Repeat                   int                            `json:"repeat"`
	Note                     string                         `json:"note"`
}

type clientReply struct {
	ID        json.RawMessage `json:"id"`
	ErrorCode *int            `json:"error_code"`
	Result    json.RawMessage `json:"result"`
}

// A caseSpan is a number, or [least, most]; null is any number.
type caseSpan struct {
	lo, hi float64
	any    bool
}

func (s *caseSpan) UnmarshalJSON(b []byte) error {
	var pair []float64
	switch {
	case string(b) == "null":
		s.any = true
		return nil
	case json.Unmarshal(b, &s.lo) == nil:
		s.hi = s.lo
		return nil
	case json.Unmarshal(b, &pair) == nil && len(pair) == 2:
		s.lo, s.hi = pair[0], pair[1]
		return nil
	}
	return fmt.Errorf("want a number or a pair of them, not %s", b)
}

func (s caseSpan) has(v float64) bool { return s.any || s.lo <= v && v <= s.hi }

func (s caseSpan) String() string {
	if s.lo == s.hi {
		return fmt.Sprint(s.lo)
	}
	return fmt.Sprintf("%v to %v", s.lo, s.hi)
}

// words is one text, or a list of which any will do.
type words []string

func (w *words) UnmarshalJSON(b []byte) error {
	var one string
	if json.Unmarshal(b, &one) == nil {
		*w = words{one}
		return nil
	}
	return json.Unmarshal(b, (*[]string)(w))
}

var caseClasses = []string{"ok", "disconnected", "timeout", "protocol", "limit", "unavailable", "refused", "invalid"}

// strictly decodes one JSON value that holds nothing unknown.
func strictly(data []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("something follows the value")
	}
	return nil
}

func parseCase(data []byte) (*faultCase, error) {
	c := new(faultCase)
	if err := strictly(data, c); err != nil {
		return nil, err
	}
	for _, step := range c.Action.Steps {
		if err := step.check(); err != nil {
			return nil, err
		}
	}
	switch c.Action.Policy.Validate {
	case "", "strict", "enforce", "warn", "lenient", "advise", "off", "none":
	default:
		return nil, fmt.Errorf("unknown validate %q", c.Action.Policy.Validate)
	}
	classes := slices.Concat(c.Expect.Detail.Steps, c.Expect.Detail.AlsoOK, []string{c.Expect.Outcome})
	for _, also := range c.Expect.Detail.StepsAlsoOK {
		classes = append(classes, also...)
	}
	for _, class := range classes {
		if !slices.Contains(caseClasses, class) && class != "mixed" {
			return nil, fmt.Errorf("unknown class %q", class)
		}
	}
	if outcomes := c.outcomes(); outcomes == 0 || c.judged() < 0 || c.judged() >= outcomes || c.Expect.Detail.Steps != nil && len(c.Expect.Detail.Steps) != outcomes {
		return nil, fmt.Errorf("%d outcomes do not fit the judged step %d and the expected %q", outcomes, c.judged(), c.Expect.Detail.Steps)
	}
	var err error
	switch c.Transport {
	case "stdio":
		c.stdio, err = parseStdio(c.Script)
	case "http":
		c.http, err = parseEach[httpEntry](c.Script)
	case "schema":
		c.schema, err = parseEach[schemaEntry](c.Script)
	case "policy":
		c.attempts, err = parseEach[policyEntry](c.Script)
	default:
		err = fmt.Errorf("unknown transport %q", c.Transport)
	}
	return c, err
}

func (s *caseStep) check() error {
	switch s.Op {
	case "connect", "list_tools", "call", "start_fleet", "validate", "close", "sleep", "advance":
	case "setenv":
		if s.Name == "" {
			return errors.New("setenv without a name")
		}
	case "parallel", "parallel_clients":
		if s.Step == nil || s.N < 1 || s.Step.silent() {
			return errors.New("a parallel step without number or step")
		}
		return s.Step.check()
	default:
		return fmt.Errorf("unknown op %q", s.Op)
	}
	return nil
}

// outcomes counts the steps that give one.
func (c *faultCase) outcomes() (n int) {
	for _, s := range c.Action.Steps {
		if !s.silent() {
			n++
		}
	}
	return n
}

// alone reports whether the case cannot run beside others: what it changes or
// counts is the whole process's.
func (c *faultCase) alone() bool {
	setenv := slices.ContainsFunc(c.Action.Steps, func(s caseStep) bool { return s.Op == "setenv" })
	return setenv || c.Expect.Detail.GoroutineGrowthMax != nil
}

// judged is the step whose outcome is the case's.
func (c *faultCase) judged() int {
	if p := c.Expect.Detail.JudgeStep; p != nil {
		return *p
	}
	return c.outcomes() - 1
}

// A caseEntry is an entry that knows what is allowed beside what.
type caseEntry[T any] interface {
	*T
	check() error
}

func parseEach[T any, P caseEntry[T]](script []json.RawMessage) ([]T, error) {
	entries := make([]T, len(script))
	for i, raw := range script {
		if err := strictly(raw, &entries[i]); err != nil {
			return nil, fmt.Errorf("script entry %d: %w", i, err)
		}
		if err := P(&entries[i]).check(); err != nil {
			return nil, fmt.Errorf("script entry %d: %w", i, err)
		}
	}
	return entries, nil
}

// Placeholders.

type placeholders struct {
	id       json.RawMessage            // of the request being answered
	saved    map[string]json.RawMessage // by the name in "as"
	latest   map[string]json.RawMessage // by method
	version  json.RawMessage
	progress json.RawMessage
	n        int
	base     map[string]string // A and B
}

func newPlaceholders() *placeholders {
	return &placeholders{id: json.RawMessage("null"), saved: map[string]json.RawMessage{}, latest: map[string]json.RawMessage{},
		version: json.RawMessage("null"), progress: json.RawMessage("0"), base: map[string]string{}}
}

// note takes what a message of the client fills in.
func (p *placeholders) note(e envelope) {
	if e.method == "" || e.id == nil {
		return
	}
	p.latest[e.method] = bytes.Clone(e.id)
	if v := member(e.params, "protocolVersion"); e.method == "initialize" && v != nil {
		p.version = bytes.Clone(v)
	}
}

// answering makes e the request that is being answered, if it is one.
func (p *placeholders) answering(e envelope) {
	if e.method == "" || e.id == nil {
		return
	}
	p.id, p.progress = bytes.Clone(e.id), json.RawMessage("0")
	if token := member(member(e.params, "_meta"), "progressToken"); token != nil {
		p.progress = bytes.Clone(token)
	}
}

var (
	placeholderForm  = regexp.MustCompile(`\{\{(idtext|id|version|ptoken|n|A|B|id\.[\w-]+|id:[\w/]+)\}\}`)
	placeholderAlone = regexp.MustCompile(`"` + placeholderForm.String() + `"`)
)

// value is the JSON of a placeholder; text says that it stands for a text.
func (p *placeholders) value(name string) (v string, text bool) {
	switch {
	case name == "id":
		return string(p.id), false
	case name == "idtext":
		return strings.Trim(string(p.id), `"`), true
	case name == "version":
		return string(p.version), false
	case name == "ptoken":
		return string(p.progress), false
	case name == "n":
		return strconv.Itoa(p.n), false
	case strings.HasPrefix(name, "id."):
		return cmp.Or(string(p.saved[name[3:]]), "null"), false
	case strings.HasPrefix(name, "id:"):
		return cmp.Or(string(p.latest[name[3:]]), "null"), false
	}
	return p.base[name], true
}

// text fills in a text.
func (p *placeholders) text(s string) string {
	return placeholderForm.ReplaceAllStringFunc(s, func(m string) string {
		v, _ := p.value(m[2 : len(m)-2])
		return v
	})
}

// json fills in a JSON value, in one line. A string that is nothing but a
// placeholder becomes its value.
func (p *placeholders) json(raw json.RawMessage) []byte {
	var b bytes.Buffer
	if err := json.Compact(&b, raw); err != nil {
		panic(err) // it was decoded from a file
	}
	if !bytes.Contains(b.Bytes(), []byte("{{")) {
		return b.Bytes()
	}
	out := placeholderAlone.ReplaceAllFunc(b.Bytes(), func(m []byte) []byte {
		v, text := p.value(string(m[3 : len(m)-3]))
		if text {
			return appendString(nil, v)
		}
		return []byte(v)
	})
	return placeholderForm.ReplaceAllFunc(out, func(m []byte) []byte {
		v, _ := p.value(string(m[2 : len(m)-2]))
		quoted := appendString(nil, v)
		return quoted[1 : len(quoted)-1]
	})
}

// The client under test.

// A caseRun is one run of a case.
type caseRun struct {
	*testing.T
	c       *faultCase
	world   caseWorld
	log     caseLog
	clients []*caseClient
	fleet   *Fleet
	results []stepResult // of the steps that give an outcome

	failures []string // what is not as expected
}

// A caseWorld is the other side: the script being played.
type caseWorld interface {
	// session makes a session of its own connection.
	session(cfg Config, o *Options) Session
	// config adds to a Config how the script is reached; url is that of a
	// connect step.
	config(cfg *Config, url string)
	// seen collects what it saw so far.
	seen() caseSeen
}

// caseSeen is what the other side saw.
type caseSeen struct {
	saw      map[string]int
	paths    map[string]map[string]int
	replies  []json.RawMessage
	failures []string
	// of HTTP
	initializeWithSession bool
	getDelay              time.Duration // the least; negative if none
	bRequests             int
	bHeaders              http.Header
	sentMax               int64
	open                  int
	inFlight              int
}

type caseClient struct {
	name   string
	rs     *ResilientSession
	client *Client
}

type stepResult struct {
	step     *caseStep
	class    string
	err      error
	res      *Result
	tools    []Tool
	rejected []Rejection
	info     *ServerInfo
	took     time.Duration
	reaches  *reachLog
	parallel []stepResult
}

// caseLog is the log of the library.
type caseLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *caseLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *caseLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func ms(n float64) time.Duration { return time.Duration(n * float64(time.Millisecond)) }

// runCase runs a case once, and returns what was not as expected, the story of
// the run last.
func runCase(t *testing.T, c *faultCase) []string {
	r := &caseRun{T: t, c: c}
	switch c.Transport {
	case "stdio":
		r.world = newStdioWorld(r)
	case "http":
		r.world = newHTTPWorld(r)
	case "schema":
		r.world = schemaWorld{r}
	case "policy":
		synctest.Test(t, func(t *testing.T) {
			r.T = t
			r.world = newPolicyWorld(c)
			r.run()
		})
		return r.failures
	}
	r.run()
	return r.failures
}

func (r *caseRun) failf(format string, args ...any) {
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

func (r *caseRun) run() {
	goroutines, start := runtime.NumGoroutine(), time.Now()
	ctx := r.Context()
	if r.c.Transport != "policy" {
		limited, cancel := context.WithTimeout(ctx, time.Minute) // whatever happens
		defer cancel()
		ctx = limited
	}
	defer r.close()
	for i := range r.c.Action.Steps {
		step := &r.c.Action.Steps[i]
		switch step.Op {
		case "setenv":
			r.Setenv(step.Name, step.Value)
		case "sleep", "advance":
			time.Sleep(ms(step.MS))
		default:
			r.results = append(r.results, r.do(ctx, step))
		}
	}
	elapsed := time.Since(start)
	r.checkLeft(goroutines)
	r.check(r.settled(), elapsed)
	if r.failures != nil {
		story := "what happened:"
		for i, s := range r.results {
			story += fmt.Sprintf("\nstep %d %s: %s after %v: %v", i, s.step.Op, s.class, s.took, s.err)
			for _, p := range s.parallel {
				story += fmt.Sprintf("\n  %s %s after %v: %v", p.step.Op, p.class, p.took, p.err)
			}
		}
		r.failf("%s\n%s", story, r.log.String())
	}
}

// settled returns what the other side saw. What it is to see in the end may
// still be on its way: a cancellation is not waited for.
func (r *caseRun) settled() caseSeen {
	for n := 0; ; n++ {
		seen := r.world.seen()
		missing := len(seen.replies) < len(r.c.Expect.Detail.ClientReplies)
		for method, want := range r.c.Expect.Detail.ServerSaw {
			missing = missing || float64(seen.saw[method]) < want.lo
		}
		if want := r.c.Expect.Detail.OpenConnectionsAfter; want != nil {
			missing = missing || seen.open > *want
		}
		if !missing || n == 50 {
			return seen
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (r *caseRun) close() {
	for _, c := range r.clients {
		c.client.Close()
	}
	if r.fleet != nil {
		r.fleet.Close()
	}
}

// options maps the policy of the case to ours. What we have no setting for
// stays our own way.
func (r *caseRun) options(name, url string) (Config, *Options) {
	p := &r.c.Action.Policy
	cfg := Config{
		Name:            name,
		ConnectTimeout:  ms(p.ConnectDeadlineMS),
		MaxMessageBytes: p.MaxMessageBytes,
		MaxInFlight:     p.MaxInFlight,
		Headers:         p.Headers,
		Retry:           RetryConfig{MaxAttempts: 1 + p.Retries, BaseDelay: ms(p.BackoffBaseMS), MaxDelay: ms(p.BackoffMaxMS)},
		BreakerFailures: -1, // a case without a breaker is not about one
	}
	if b := p.Breaker; b != nil {
		// Seven nanoseconds less tell its draws from those of the backoff.
		cfg.BreakerFailures, cfg.BreakerReset = b.Threshold, ms(b.CooldownMS)-7
	}
	if v := p.ProtocolVersions; len(v) > 0 && v[0] != version2026 && v[0] != version2511 {
		cfg.Protocol = v[0] // else the best one is offered anyhow
	}
	switch p.Validate {
	case "warn", "lenient", "advise":
		cfg.Results = "advise"
	case "off", "none":
		cfg.Results = "off"
	}
	if s, ok := p.Servers[name]; ok {
		cfg.Optional = !s.Required
	}
	o := &Options{Logger: slog.New(slog.NewTextHandler(&r.log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	o.Rand = func(n int64) int64 {
		switch {
		case n == int64(cfg.BreakerReset/10)+1:
			return 0 // how much longer than the cooldown the breaker stays open
		case p.Jitter == false:
			return n - 1 // the whole of each wait
		}
		return rand.Int64N(n)
	}
	for capability := range p.ClientCapabilities {
		if o.Handlers == nil {
			o.Handlers = map[string]HandlerFunc{}
		}
		answer := func(method string, v any, err error) {
			o.Handlers[method] = func(context.Context, string, json.RawMessage) (any, error) { return v, err }
		}
		switch capability {
		case "roots":
			answer("roots/list", map[string]any{"roots": []any{}}, nil)
		case "elicitation":
			answer("elicitation/create", map[string]any{"action": "decline"}, nil)
		case "sampling":
			answer("sampling/createMessage", nil, &RPCError{Code: -1, Message: "the user declined"})
		}
	}
	r.world.config(&cfg, url)
	return cfg, o
}

func (r *caseRun) newClient(name, url string) *caseClient {
	cfg, o := r.options(name, url)
	rs := NewResilientSession(r.world.session(cfg, o), cfg, o)
	c := &caseClient{name: name, rs: rs, client: NewClient(rs, cfg, o)}
	r.clients = append(r.clients, c)
	if s, ok := innermost(rs).(*policySession); ok && !s.fleet {
		// A call needs to know the tools, which no step asks for.
		s.aside = true
		if _, err := c.client.Adopt(r.Context()); err != nil {
			r.Fatal(err)
		}
		s.aside = false
	}
	return c
}

// client returns the client of a server, which in most cases is the only one;
// url asks for one that goes there.
func (r *caseRun) client(server, url string) *caseClient {
	name := cmp.Or(server, "server")
	if url == "" {
		for _, c := range slices.Backward(r.clients) {
			if c.name == name {
				return c
			}
		}
	}
	return r.newClient(name, url)
}

// do runs a step that gives an outcome.
func (r *caseRun) do(ctx context.Context, step *caseStep) stepResult {
	switch step.Op {
	case "parallel", "parallel_clients":
		return r.doParallel(ctx, step)
	case "start_fleet", "close", "validate":
		return r.timed(ctx, step, nil)
	}
	return r.timed(ctx, step, r.client(step.Server, step.URL))
}

func (r *caseRun) doParallel(ctx context.Context, step *caseStep) stepResult {
	out := stepResult{step: step, parallel: make([]stepResult, step.N)}
	start := time.Now()
	var clients []*caseClient
	for range step.N {
		if step.Op == "parallel" {
			clients = append(clients, r.client(step.Step.Server, ""))
		} else {
			clients = append(clients, r.newClient("server", step.Step.URL))
		}
	}
	var wg sync.WaitGroup
	for i := range step.N {
		wg.Go(func() { out.parallel[i] = r.timed(ctx, step.Step, clients[i]) })
	}
	wg.Wait()
	out.took = time.Since(start)
	out.class, out.err, out.res = out.parallel[0].class, out.parallel[0].err, out.parallel[0].res
	for _, p := range out.parallel {
		if p.class != out.class {
			out.class = "mixed"
		}
	}
	return out
}

func (r *caseRun) timed(ctx context.Context, step *caseStep, c *caseClient) stepResult {
	out := stepResult{step: step, reaches: new(reachLog)}
	ctx = context.WithValue(ctx, reachLogKey{}, out.reaches)
	if d := cmp.Or(step.DeadlineMS, r.c.Action.Policy.MaxTotalMS); d > 0 {
		limited, cancel := context.WithTimeout(ctx, ms(d))
		defer cancel()
		ctx = limited
	}
	start := time.Now()
	r.act(ctx, step, c, &out)
	out.took = time.Since(start)
	out.class = caseClass(out.err)
	return out
}

func (r *caseRun) act(ctx context.Context, step *caseStep, c *caseClient, out *stepResult) {
	switch step.Op {
	case "connect":
		out.info, out.err = c.rs.Initialize(ctx)
	case "list_tools":
		d := &r.c.Expect.Detail
		if d.ToolsExact == nil && d.ToolsInclude == nil && d.ToolsMaySkip == nil && d.ToolsIfOK == nil {
			out.tools, out.err = c.rs.ListTools(ctx)
			return
		}
		var a *Adoption
		if a, out.err = c.client.Adopt(ctx); out.err == nil {
			out.tools, out.rejected = a.Tools, a.Rejected
		}
	case "call":
		call := &Call{Tool: step.Tool, Arguments: caseArguments(step)}
		if step.Idempotent {
			call.IdempotencyKey = fmt.Sprintf("key-%p", out)
		}
		s, scripted := innermost(c.rs).(*policySession)
		if step.Cold && scripted {
			s.disconnect()
		}
		if scripted || step.NeedsList {
			out.res, out.err = c.client.Call(ctx, call)
		} else {
			out.res, out.err = c.rs.CallTool(ctx, call)
		}
	case "start_fleet":
		var clients []*Client
		for _, name := range slices.Sorted(maps.Keys(r.c.Action.Policy.Servers)) {
			clients = append(clients, r.newClient(name, "").client)
		}
		r.fleet, out.err = Assemble(ctx, clients...)
	case "validate":
		out.res, out.err = validateCase(ctx, r, step.Result)
	case "close":
		if r.fleet != nil {
			out.err = r.fleet.Close()
		}
		for _, c := range r.clients {
			out.err = errors.Join(out.err, c.client.Close())
		}
	}
}

func caseArguments(step *caseStep) any {
	if step.ArgsPadBytes == 0 {
		if step.Args == nil {
			return nil
		}
		return step.Args
	}
	args := map[string]any{}
	if step.Args != nil {
		v, _ := decodeValue(step.Args)
		args, _ = v.(map[string]any)
	}
	args["pad"] = strings.Repeat("x", step.ArgsPadBytes)
	return args
}

// caseClass is the class of an error, by the outermost error of ours in it.
func caseClass(err error) string {
	if err == nil {
		return "ok"
	}
	switch e := err.(type) {
	case *BudgetError:
		return "timeout"
	case *SchemaError:
		return "invalid"
	case *ProtocolError:
		if e.Result != nil || len(e.Issues) > 0 {
			return "invalid"
		}
		return "protocol"
	case *UnavailableError:
		return "unavailable"
	case *RPCError, *ArgumentError:
		return "refused"
	case *TransportError:
		switch {
		case e.Status >= 300 && e.Status < 500 && e.Status != 408 && e.Status != 429:
			return "refused"
		case e.Status == 429:
			return "unavailable"
		case e.Reason == ReasonCancelled && errors.Is(e, context.DeadlineExceeded):
			return "timeout"
		}
		return string(e.Reason)
	case interface{ Unwrap() error }:
		return caseClass(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			if class := caseClass(err); class != "" {
				return class
			}
		}
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return "timeout"
	}
	return ""
}

// mayHaveRun is what an error says about that.
func mayHaveRun(err error) bool {
	var te *TransportError
	var be *BudgetError
	var ue *UnavailableError
	switch {
	case errors.As(err, &ue):
		return false
	case errors.As(err, &be):
		return be.Sent
	case errors.As(err, &te):
		return te.Sent
	}
	return true // it was answered
}

// errorWords is everything that an error says: its texts, and, if asked for,
// its bounded fields.
func errorWords(err error, fields bool) string {
	if err == nil {
		return ""
	}
	words := err.Error() + "\n"
	switch e := err.(type) {
	case *TransportError:
		if fields {
			words += e.Detail + "\n" + string(e.Raw) + "\n"
		}
	case *ProtocolError:
		if fields {
			words += e.Detail + "\n" + string(e.Raw) + "\n"
		}
	case *RPCError:
		if fields {
			words += e.Message + "\n" + string(e.Data) + "\n"
		}
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		words += errorWords(e.Unwrap(), fields)
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			words += errorWords(err, fields)
		}
	}
	return words
}

// result is the result of a step, also the one that an error keeps.
func (s *stepResult) result() *Result {
	var pe *ProtocolError
	if s.res == nil && errors.As(s.err, &pe) {
		return pe.Result
	}
	return s.res
}

func (s *stepResult) text() (string, bool) {
	r := s.result()
	if r == nil {
		return "", false
	}
	for _, c := range r.Content {
		if c.Type == "text" {
			return c.Text, true
		}
	}
	return "", false
}

// What is expected.

func (r *caseRun) check(seen caseSeen, elapsed time.Duration) {
	d := &r.c.Expect.Detail
	for _, f := range seen.failures {
		r.failf("the server: %s", f)
	}
	r.checkOutcomes()
	r.checkTimes(elapsed)
	r.checkResults()
	r.checkErrors()
	r.checkTools()
	r.checkSeen(&seen)
	r.checkAttempts()
	if d.Breaker != nil {
		for _, c := range r.clients {
			if got := c.rs.Health().State.String(); strings.ReplaceAll(got, "_", "-") != strings.ReplaceAll(*d.Breaker, "_", "-") {
				r.failf("the breaker is %s, want %s", got, *d.Breaker)
			}
		}
	}
	if d.Negotiated != nil {
		got := ""
		for _, s := range r.results {
			if s.info != nil {
				got = s.info.Protocol
			}
		}
		if got == "" && len(r.clients) > 0 {
			if info, err := r.clients[0].rs.Initialize(r.Context()); err == nil {
				got = info.Protocol
			}
		}
		if got != *d.Negotiated {
			r.failf("agreed on %q, want %q", got, *d.Negotiated)
		}
	}
	if d.Ready != nil || d.Down != nil {
		r.checkFleet()
	}
}

func (r *caseRun) checkOutcomes() {
	d := &r.c.Expect.Detail
	for i, want := range d.Steps {
		if i < len(r.results) && r.results[i].class != want && !slices.Contains(d.StepsAlsoOK[i], r.results[i].class) {
			r.failf("step %d is %q, want %q: %v", i, r.results[i].class, want, r.results[i].err)
		}
	}
	j := r.c.judged()
	if got := r.results[j].class; got != r.c.Expect.Outcome && !slices.Contains(d.AlsoOK, got) && !slices.Contains(d.StepsAlsoOK[j], got) {
		r.failf("the outcome is %q, want %q: %v", got, r.c.Expect.Outcome, r.results[j].err)
	}
	if last := r.results[len(r.results)-1].class; d.LastStep != nil && !slices.Contains(d.LastStep, last) {
		r.failf("the last step is %q, want %q", last, d.LastStep)
	}
	for _, counts := range []map[string]caseSpan{d.ParallelCounts, d.ParallelCountsRange} {
		for class, want := range counts {
			got := 0
			for _, s := range r.results {
				for _, p := range s.parallel {
					if p.class == class {
						got++
					}
				}
			}
			if !want.has(float64(got)) {
				r.failf("%d of the parallel steps are %q, want %v", got, class, want)
			}
		}
	}
}

func (r *caseRun) checkTimes(elapsed time.Duration) {
	d := &r.c.Expect.Detail
	limit := maps.Clone(d.StepMaxMS)
	if d.MaxMS != nil {
		if limit == nil {
			limit = map[int]float64{}
		}
		limit[r.c.judged()] = *d.MaxMS
	}
	for i, most := range limit {
		if took := r.results[i].took; took > ms(most) {
			r.failf("step %d took %v, at most %v was wanted", i, took, ms(most))
		}
	}
	for i, least := range d.StepMinMS {
		if took := r.results[i].took; took < ms(least) {
			r.failf("step %d took %v, at least %v was wanted", i, took, ms(least))
		}
	}
	if d.VirtualMaxMS != nil && elapsed > ms(*d.VirtualMaxMS) {
		r.failf("the run took %v, at most %v was wanted", elapsed, ms(*d.VirtualMaxMS))
	}
}

func (r *caseRun) checkResults() {
	d := &r.c.Expect.Detail
	if d.Text != nil {
		judged := r.c.judged()
		got, ok := r.results[judged].text()
		for i := len(r.results) - 1; i >= 0 && !ok; i-- {
			got, ok = r.results[i].text()
		}
		if got != *d.Text {
			r.failf("the text is %q, want %q", got, *d.Text)
		}
	}
	for i, want := range d.Texts {
		if got, _ := r.results[i].text(); got != want {
			r.failf("the text of step %d is %q, want %q", i, got, want)
		}
	}
	for i, want := range d.TextLen {
		if got, _ := r.results[i].text(); len(got) != want && len([]rune(got)) != want {
			r.failf("the text of step %d has %d bytes, want %d", i, len(got), want)
		}
	}
	for i, want := range r.structured() {
		var got bytes.Buffer
		if res := r.results[i].result(); res != nil && res.Structured != nil {
			json.Compact(&got, res.Structured)
		}
		if got.String() != want {
			r.failf("the structured content of step %d is %s, want %s", i, &got, want)
		}
	}
	for i, want := range d.IsError {
		if res := r.results[i].result(); res == nil || res.IsError != want {
			r.failf("step %d: IsError is not %v: %+v, %v", i, want, res, r.results[i].err)
		}
	}
}

// structured is the expected structured content by step.
func (r *caseRun) structured() map[int]string {
	raw := r.c.Expect.Detail.StructuredRaw
	if raw == nil {
		return nil
	}
	var one string
	if json.Unmarshal(raw, &one) == nil {
		return map[int]string{r.c.judged(): one}
	}
	steps := map[int]string{}
	if err := json.Unmarshal(raw, &steps); err != nil {
		r.failf("structured_raw: %v", err)
	}
	return steps
}

func (r *caseRun) checkErrors() {
	d := &r.c.Expect.Detail
	for i, want := range d.RPCCodes {
		var re *RPCError
		if !errors.As(r.results[i].err, &re) || re.Code != want {
			r.failf("step %d: %v, want JSON-RPC code %d", i, r.results[i].err, want)
		}
	}
	judged := r.results[r.c.judged()].err
	var errs []error // the judged one, or else all
	for i, s := range r.results {
		if s.err != nil && (judged == nil || i == r.c.judged()) {
			errs = append(errs, s.err)
		}
	}
	all := errors.Join(errs...)
	var te *TransportError
	var re *RPCError
	if d.HTTPStatus != nil {
		got := 0
		if errors.As(all, &te) {
			got = te.Status
		} else if errors.As(all, &re) {
			got = re.Status
		}
		if got != *d.HTTPStatus {
			r.failf("the error has status %d, want %d: %v", got, *d.HTTPStatus, all)
		}
	}
	if d.RetryAfterMS != nil {
		var after time.Duration
		var ue *UnavailableError
		if errors.As(all, &te) {
			after = te.RetryAfter
		}
		if after == 0 && errors.As(all, &ue) {
			after = ue.RetryAfter
		}
		if !d.RetryAfterMS.has(float64(after) / 1e6) {
			r.failf("the error says to retry after %v, want %v ms: %v", after, d.RetryAfterMS, all)
		}
	}
	if d.MayHaveRun != nil {
		if len(errs) == 0 {
			r.failf("no step has an error that could say whether the call ran")
		}
		for _, err := range errs {
			if mayHaveRun(err) != *d.MayHaveRun {
				r.failf("may have run is not %v: %v", *d.MayHaveRun, err)
			}
		}
	}
	for i, want := range d.MayHaveRunSteps {
		if err := r.results[i].err; err == nil || mayHaveRun(err) != want {
			r.failf("step %d: may have run is not %v: %v", i, want, err)
		}
	}
	said := errorWords(all, true) + r.log.String()
	for _, want := range d.ErrorContains {
		if !strings.Contains(said, want) {
			r.failf("%q is not in the error or the log: %s", want, said)
		}
	}
	if d.ErrorContainsAny != nil && !slices.ContainsFunc(d.ErrorContainsAny, func(w string) bool { return strings.Contains(said, w) }) {
		r.failf("none of %q is in the error or the log: %s", d.ErrorContainsAny, said)
	}
	said = r.log.String()
	for _, s := range r.results {
		said += errorWords(s.err, false)
		for _, p := range s.parallel {
			said += errorWords(p.err, false)
		}
	}
	for _, bad := range d.ErrorNotContains {
		if strings.Contains(said, bad) {
			r.failf("%q is in an error or the log: %s", bad, said)
		}
	}
}

func (r *caseRun) checkTools() {
	d := &r.c.Expect.Detail
	var list *stepResult
	for i := range r.results {
		if r.results[i].step.Op == "list_tools" {
			list = &r.results[i]
		}
	}
	if list == nil {
		return
	}
	var got []string
	for _, t := range list.tools {
		got = append(got, cmp.Or(t.Remote, t.Name))
	}
	same := func(want []string) bool {
		return slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want)))
	}
	if d.ToolsExact != nil && !same(d.ToolsExact) {
		r.failf("the tools are %q, want %q (rejected: %v)", got, d.ToolsExact, list.rejected)
	}
	if d.ToolsIfOK != nil && list.err == nil && !same(d.ToolsIfOK) {
		r.failf("the tools are %q, want %q (rejected: %v)", got, d.ToolsIfOK, list.rejected)
	}
	for _, want := range d.ToolsInclude {
		if !slices.Contains(got, want) {
			r.failf("the tools are %q, without %q (rejected: %v)", got, want, list.rejected)
		}
	}
	for _, name := range d.ToolsMaySkip {
		reported := slices.ContainsFunc(list.rejected, func(rej Rejection) bool { return rej.Tool == name && rej.Reason != "" })
		if d.SkipsReported && !slices.Contains(got, name) && !reported {
			r.failf("tool %q was left out without a word (rejected: %v)", name, list.rejected)
		}
	}
	if d.ToolsMaySkip != nil {
		for _, rej := range list.rejected {
			if rej.Tool != "" && !slices.Contains(d.ToolsMaySkip, rej.Tool) {
				r.failf("tool %q was left out: %s", rej.Tool, rej.Reason)
			}
		}
	}
}

func (r *caseRun) checkSeen(seen *caseSeen) {
	d := &r.c.Expect.Detail
	for method, want := range d.ServerSaw {
		if got := seen.saw[method]; !want.has(float64(got)) {
			r.failf("the server saw %q %d times, want %v (all: %v)", method, got, want, seen.saw)
		}
	}
	for method, most := range d.ServerSawMax {
		if got := seen.saw[method]; got > most {
			r.failf("the server saw %q %d times, want at most %d", method, got, most)
		}
	}
	for path, methods := range d.FinalPathSaw {
		for method, want := range methods {
			if got := seen.paths[path][method]; !want.has(float64(got)) {
				r.failf("path %s saw %q %d times, want %v (all: %v)", path, method, got, want, seen.paths)
			}
		}
	}
	if d.InitializeWithoutSession && seen.initializeWithSession {
		r.failf("initialize was sent with a session id")
	}
	if d.ClientReplies != nil {
		r.checkReplies(seen.replies)
	}
	if d.GetMinDelayMS != nil && (seen.getDelay < 0 || seen.getDelay < ms(*d.GetMinDelayMS)) {
		r.failf("the stream was resumed after %v, want at least %v", seen.getDelay, ms(*d.GetMinDelayMS))
	}
	if d.BRequests != nil && !d.BRequests.has(float64(seen.bRequests)) {
		r.failf("server B got %d requests, want %v", seen.bRequests, d.BRequests)
	}
	for _, name := range d.BMustNotSeeHeaders {
		if v := seen.bHeaders.Values(name); v != nil {
			r.failf("server B saw the header %s", name)
		}
	}
	if d.ServerSentMaxBytes != nil && seen.sentMax > *d.ServerSentMaxBytes {
		r.failf("a reply went on for %d bytes, want at most %d", seen.sentMax, *d.ServerSentMaxBytes)
	}
	if d.OpenConnectionsAfter != nil && seen.open != *d.OpenConnectionsAfter {
		r.failf("%d connections are open, want %d", seen.open, *d.OpenConnectionsAfter)
	}
	if d.MaxInFlightSeen != nil && seen.inFlight > *d.MaxInFlightSeen {
		r.failf("%d requests were in flight at once, want at most %d", seen.inFlight, *d.MaxInFlightSeen)
	}
}

func (r *caseRun) checkReplies(got []json.RawMessage) {
	want := r.c.Expect.Detail.ClientReplies
	if len(got) != len(want) {
		r.failf("the client answered %s, want %d answers", got, len(want))
		return
	}
	for i, w := range want {
		id, code, result := member(got[i], "id"), member(member(got[i], "error"), "code"), member(got[i], "result")
		if w.ID != nil && string(id) != string(w.ID) ||
			w.ErrorCode != nil && string(code) != strconv.Itoa(*w.ErrorCode) ||
			w.Result != nil && (result == nil || !sameValue(r.T, string(result), string(w.Result))) {
			r.failf("answer %d of the client is %s, want %s", i, got[i], appendCase(w))
		}
	}
}

func appendCase(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		return []byte(err.Error())
	}
	return b
}

func (r *caseRun) checkAttempts() {
	d := &r.c.Expect.Detail
	total := 0
	first := map[time.Duration]bool{}
	for i, s := range r.results {
		each := s.parallel
		if each == nil {
			each = []stepResult{s}
		}
		sum := 0
		for _, e := range each {
			n := len(e.reaches.starts)
			sum += n
			if d.AttemptsEach != nil && s.parallel != nil && !d.AttemptsEach.has(float64(n)) {
				r.failf("a parallel step of step %d made %d attempts, want %v", i, n, d.AttemptsEach)
			}
			if waits := e.reaches.waits(); len(waits) > 0 {
				first[waits[0]] = true
			}
		}
		total += sum
		if i < len(d.Attempts) && !d.Attempts[i].has(float64(sum)) {
			r.failf("step %d made %d attempts, want %v", i, sum, d.Attempts[i])
		}
		if i < len(d.WaitBeforeAttempt2MS) && !d.WaitBeforeAttempt2MS[i].any {
			waits := each[0].reaches.waits()
			if len(waits) == 0 || !d.WaitBeforeAttempt2MS[i].has(float64(waits[0])/1e6) {
				r.failf("step %d waited %v between attempts, want first %v ms", i, waits, d.WaitBeforeAttempt2MS[i])
			}
		}
	}
	if d.AttemptsTotal != nil && !d.AttemptsTotal.has(float64(total)) {
		r.failf("%d attempts in all, want %v", total, d.AttemptsTotal)
	}
	if d.DistinctFirstWaitsMin != nil && len(first) < *d.DistinctFirstWaitsMin {
		r.failf("%d different first waits, want at least %d", len(first), *d.DistinctFirstWaitsMin)
	}
	for i, want := range r.expectedWaits() {
		got := r.results[i].reaches.waits()
		if len(got) != len(want) {
			r.failf("step %d waited %v, want %v", i, got, want)
			continue
		}
		for k := range want {
			if !want[k].has(float64(got[k]) / 1e6) {
				r.failf("step %d: wait %d is %v, want %v ms", i, k, got[k], want[k])
			}
		}
	}
}

// expectedWaits reads waits_ms: a list of waits for the judged step, a list of
// such lists, or an object of them by step.
func (r *caseRun) expectedWaits() map[int][]caseSpan {
	raw := r.c.Expect.Detail.WaitsMS
	if raw == nil {
		return nil
	}
	var judged []caseSpan
	if json.Unmarshal(raw, &judged) == nil {
		return map[int][]caseSpan{r.c.judged(): judged}
	}
	steps := map[int][]caseSpan{}
	if json.Unmarshal(raw, &steps) == nil {
		return steps
	}
	var all [][]caseSpan
	if err := json.Unmarshal(raw, &all); err != nil {
		r.failf("waits_ms: %v", err)
	}
	for i, waits := range all {
		if waits != nil {
			steps[i] = waits
		}
	}
	return steps
}

func (r *caseRun) checkFleet() {
	d := &r.c.Expect.Detail
	var ready, down []string
	if r.fleet != nil {
		for _, g := range r.fleet.Degraded() {
			down = append(down, g.Server)
		}
		for name := range r.c.Action.Policy.Servers {
			if !slices.Contains(down, name) {
				ready = append(ready, name)
			}
		}
	}
	slices.Sort(ready)
	slices.Sort(down)
	if d.Ready != nil && !slices.Equal(ready, slices.Sorted(slices.Values(d.Ready))) {
		r.failf("ready are %q, want %q", ready, d.Ready)
	}
	if d.Down != nil && !slices.Equal(down, slices.Sorted(slices.Values(d.Down))) {
		r.failf("down are %q, want %q", down, d.Down)
	}
}

// checkLeft looks for what the steps have left behind.
func (r *caseRun) checkLeft(goroutines int) {
	d := &r.c.Expect.Detail
	if d.GoroutineGrowthMax != nil {
		growth := 0
		for range 100 {
			if growth = runtime.NumGoroutine() - goroutines; growth <= *d.GoroutineGrowthMax {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
		if growth > *d.GoroutineGrowthMax {
			r.failf("%d goroutines more than before, want at most %d", growth, *d.GoroutineGrowthMax)
		}
	}
	if w, ok := r.world.(*stdioWorld); ok && d.ProcessesLeft != nil {
		left, known := w.processes()
		for range 50 { // for a second, unless none is left sooner
			if len(left) == 0 {
				break
			}
			time.Sleep(20 * time.Millisecond)
			left, known = w.processes()
		}
		if known && len(left) != *d.ProcessesLeft {
			r.failf("processes %v are left, want %d", left, *d.ProcessesLeft)
		}
	}
}

// A reachLog is when the attempts of one step began and ended.
type reachLog struct {
	mu           sync.Mutex
	starts, ends []time.Time
}

type reachLogKey struct{}

func (l *reachLog) begin() (end func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.starts = append(l.starts, time.Now())
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.ends = append(l.ends, time.Now())
	}
}

func (l *reachLog) waits() (waits []time.Duration) {
	if l == nil {
		return nil
	}
	for i := 1; i < len(l.starts) && i <= len(l.ends); i++ {
		waits = append(waits, l.starts[i].Sub(l.ends[i-1]))
	}
	return waits
}

// Over a child process.

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
	DelayMS         float64         `json:"delay_ms"`
	Repeat          *struct {
		Times   int             `json:"times"`
		EveryMS float64         `json:"every_ms"`
		Send    json.RawMessage `json:"send"`
	} `json:"repeat"`
	Serve *struct {
		Results map[string]json.RawMessage `json:"results"`
		Times   int                        `json:"times"`
	} `json:"serve"`
	ReplyEnv    []string `json:"reply_env"`
	Ignore      []string `json:"ignore"`
	StopReading bool     `json:"stop_reading"`
	Grandchild  *struct {
		HoldStdout bool    `json:"hold_stdout"`
		IgnoreTerm bool    `json:"ignore_term"`
		Seconds    float64 `json:"seconds"`
	} `json:"grandchild"`
	Exit      *int `json:"exit"`
	KillSelf  bool `json:"kill_self"`
	Hang      bool `json:"hang"`
	NextStart bool `json:"next_start"`
}

// A caseFill is text that is too long to write down.
type caseFill struct {
	Head  string `json:"head"`
	Unit  string `json:"unit"`
	Count int    `json:"count"`
	Tail  string `json:"tail"`
}

// write writes the fill in pieces of at most 64 KiB and some.
func (f *caseFill) write(w io.Writer, p *placeholders) error {
	if _, err := io.WriteString(w, p.text(f.Head)); err != nil {
		return err
	}
	if each := max(1, 64<<10/max(1, len(f.Unit))); f.Unit != "" {
		piece := strings.Repeat(f.Unit, each)
		for left := f.Count; left > 0; left -= each {
			if _, err := io.WriteString(w, piece[:len(f.Unit)*min(each, left)]); err != nil {
				return err
			}
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
		var keys map[string]json.RawMessage
		if err := json.Unmarshal(raw, &keys); err != nil {
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
		for _, what := range steps[i].Ignore {
			if what != "eof" && what != "term" {
				return nil, fmt.Errorf("script entry %d: unknown %q", i, what)
			}
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

// take reads a line that next has given. E is what it holds; mine says that the
// script need not see it. Ended is the end of stdin.
func (s *caseServer) take(line []byte, ok bool, awaited string) (e envelope, mine bool) {
	if !ok {
		if !s.ignoreEOF {
			os.Exit(0)
		}
		select {} // until a signal
	}
	s.asked = false
	line = bytes.TrimSpace(line)
	e, err := scanEnvelope(line)
	if err != nil {
		s.tell(caseEvent{Fail: fmt.Sprintf("the client wrote what is no message: %.200q", line)})
		return e, true
	}
	if e.method == "server/discover" && awaited != e.method {
		s.write(appendResponse(nil, e.id, nil, &RPCError{Code: -32601, Message: "method not found"}))
		return e, true
	}
	s.note(e)
	event := caseEvent{Saw: cmp.Or(e.method, "response")}
	if e.method == "" {
		event.Reply = line
	} else if e.id != nil {
		s.open[string(e.id)] = true
		event.Open = len(s.open)
	}
	s.tell(event)
	return e, false
}

func (s *caseServer) tell(e caseEvent) { s.report.Write(append(appendCase(e), '\n')) }

func (s *caseServer) write(b []byte) {
	e, err := scanEnvelope(b)
	if err == nil && e.method == "" {
		delete(s.open, string(e.id))
	}
	os.Stdout.Write(append(b, '\n'))
}

// wait reads up to a message with this method.
func (s *caseServer) wait(method string) envelope {
	for {
		line, ok := <-s.next()
		if !ok && method == "eof" {
			return envelope{}
		}
		e, mine := s.take(line, ok, method)
		if !mine && (method == "any" || method == cmp.Or(e.method, "response")) {
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
	case step.Raw != nil:
		io.WriteString(os.Stdout, s.text(*step.Raw))
	case step.RawB64 != nil:
		b, err := base64.StdEncoding.DecodeString(*step.RawB64)
		if err != nil {
			s.tell(caseEvent{Fail: err.Error()})
		}
		os.Stdout.Write(b)
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
		for s.n = 1; s.n <= step.Repeat.Times; s.n++ {
			s.write(s.json(step.Repeat.Send))
			if s.pause(ms(step.Repeat.EveryMS)) {
				break
			}
		}
	case step.Serve != nil:
		s.serve(step.Serve.Results, step.Serve.Times)
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
	case step.StopReading:
		s.deaf = true
	case step.Grandchild != nil:
		s.grandchild(step.Grandchild.HoldStdout, step.Grandchild.IgnoreTerm, ms(1000*step.Grandchild.Seconds))
	case step.Exit != nil:
		os.Exit(*step.Exit)
	case step.KillSelf:
		if p, err := os.FindProcess(os.Getpid()); err == nil {
			p.Kill()
		}
		select {}
	case step.Hang:
		s.drain()
	}
}

func (s *caseServer) reply(kind string, value []byte) {
	s.write([]byte(`{"jsonrpc":"2.0","id":` + string(s.id) + `,"` + kind + `":` + string(value) + `}`))
}

// pause sleeps while it reads, and reports whether stdin has ended.
func (s *caseServer) pause(d time.Duration) (ended bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case line, ok := <-s.next():
			if !ok {
				return true
			}
			s.take(line, ok, "")
		case <-timer.C:
			return false
		}
	}
}

// serve answers requests until it has answered so many, or for ever.
func (s *caseServer) serve(results map[string]json.RawMessage, times int) {
	for n := 0; times == 0 || n < times; {
		line, ok := <-s.next()
		e, mine := s.take(line, ok, "")
		if mine || e.id == nil {
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
		line, ok := <-s.next()
		s.take(line, ok, "")
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

// Over HTTP.

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
	Times       *int              `json:"times"`
	Status      int               `json:"status"`
	Headers     map[string]string `json:"headers"`
	Body        []bodyChunk       `json:"body"`
	HangHeaders bool              `json:"hang_headers"`
}

type bodyChunk struct {
	Text     *string   `json:"text"`
	B64      *string   `json:"b64"`
	Fill     *caseFill `json:"fill"`
	DelayMS  float64   `json:"delay_ms"`
	UntilRPC string    `json:"until_rpc"`
	Reset    bool      `json:"reset"`
	Cut      bool      `json:"cut"`
	Hang     bool      `json:"hang"`
}

func (e *httpEntry) check() error {
	switch {
	case (e.Handshake == nil) == (e.On == nil):
		return errors.New("want either a handshake or an on")
	case e.Handshake != nil && (e.Status != 0 || e.Headers != nil || e.Body != nil || e.HangHeaders):
		return errors.New("a handshake has its own reply")
	case e.Server != "" && e.Server != "A" && e.Server != "B":
		return fmt.Errorf("unknown server %q", e.Server)
	case e.On != nil && !e.HangHeaders && e.Status == 0:
		return errors.New("want a status")
	}
	for _, c := range e.Body {
		n := 0
		for _, is := range []bool{c.Text != nil, c.B64 != nil, c.Fill != nil, c.DelayMS > 0, c.UntilRPC != "", c.Reset, c.Cut, c.Hang} {
			if is {
				n++
			}
		}
		if n != 1 {
			return errors.New("a chunk is one thing")
		}
	}
	return nil
}

// matches reports whether the entry is meant for a request.
func (e *httpEntry) matches(server string, r *http.Request, rpc string, vars *placeholders) bool {
	if cmp.Or(e.Server, "A") != server {
		return false
	}
	if h := e.Handshake; h != nil {
		return r.Method == "POST" && rpc == "initialize" && r.URL.Path == cmp.Or(h.Path, "/mcp")
	}
	if e.On.Method != "" && e.On.Method != r.Method || r.URL.Path != cmp.Or(e.On.Path, "/mcp") || e.On.RPC != "" && e.On.RPC != rpc {
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
	cfg.Endpoint = w.vars.text(cmp.Or(url, "{{A}}/mcp"))
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
			times = *he.Times
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
	w.vars.answering(e)
	vars := *w.vars // of this request
	vars.latest = maps.Clone(vars.latest)
	posts := maps.Clone(w.posts)
	w.mu.Unlock()
	if rpc == "tools/call" {
		defer func() {
			w.mu.Lock()
			w.calling--
			w.mu.Unlock()
		}()
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
	w.play(&he, rw, r, &vars, posts)
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
	what := cmp.Or(rpc, r.Method)
	w.had.saw[what]++
	w.posts[rpc]++
	if w.had.paths[r.URL.Path] == nil {
		w.had.paths[r.URL.Path] = map[string]int{}
	}
	w.had.paths[r.URL.Path][what]++
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

// play sends the reply of an entry.
func (w *httpWorld) play(he *httpEntry, rw http.ResponseWriter, r *http.Request, vars *placeholders, posts map[string]int) {
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
	rw.WriteHeader(he.Status)
	ctl := http.NewResponseController(rw)
	ctl.Flush()
	out := &countingWriter{w: rw}
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.had.sentMax = max(w.had.sentMax, out.n)
	}()
	for _, c := range he.Body {
		var err error
		switch {
		case c.Text != nil:
			_, err = io.WriteString(out, vars.text(*c.Text))
		case c.B64 != nil:
			var b []byte
			if b, err = base64.StdEncoding.DecodeString(*c.B64); err != nil {
				w.fail("%v", err)
			}
			_, err = out.Write(b)
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
		case c.Reset:
			if conn, _, err := ctl.Hijack(); err == nil {
				if tcp, ok := conn.(*net.TCPConn); ok {
					tcp.SetLinger(0)
				}
				conn.Close()
			}
			return
		case c.Cut:
			panic(http.ErrAbortHandler)
		case c.Hang:
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

// Of schemas.

type schemaEntry struct {
	Tool   json.RawMessage `json:"tool"`
	Result json.RawMessage `json:"result"`
}

func (e *schemaEntry) check() error {
	if (e.Tool == nil) == (e.Result == nil) {
		return errors.New("want either a tool or a result")
	}
	return nil
}

// A schemaWorld has no server: each result is served by a RecordingTransport.
type schemaWorld struct{ r *caseRun }

func (schemaWorld) config(*Config, string) {}
func (w schemaWorld) session(Config, *Options) Session {
	return NewSession(new(RecordingTransport), Config{}, nil)
}
func (schemaWorld) seen() caseSeen { return caseSeen{getDelay: -1} }

// validateCase calls the tool that stands before result n, which is its answer.
func validateCase(ctx context.Context, r *caseRun, n int) (*Result, error) {
	var tool, result json.RawMessage
	for _, e := range r.c.schema {
		if e.Tool != nil {
			tool = e.Tool
			continue
		}
		if n--; n < 0 {
			result = e.Result
			break
		}
	}
	if tool == nil || result == nil {
		return nil, errors.New("the script has no such result")
	}
	tr := NewRecordingTransport(map[string]any{
		"tools/list": map[string]any{"tools": []any{tool}},
		"tools/call": result,
	})
	cfg, o := r.options("server", "")
	cfg.Arguments = "off"
	client := NewClient(NewResilientSession(NewSession(tr, cfg, o), cfg, o), cfg, o)
	defer client.Close()
	a, err := client.Adopt(ctx)
	if err != nil {
		return nil, err
	}
	if len(a.Tools) == 0 {
		return nil, &SchemaError{Detail: fmt.Sprint(a.Rejected)}
	}
	// A tool whose output schema cannot be held is adopted, and that is
	// reported; who is strict goes by the report.
	for _, p := range a.Partial {
		if r.c.Action.Policy.Validate == "strict" && strings.HasPrefix(p.Reason, "output schema is not checked") {
			return nil, &SchemaError{Detail: p.Reason}
		}
	}
	return client.Call(ctx, &Call{Tool: a.Tools[0].Name})
}

// Of policies, under a virtual clock.

type policyEntry struct {
	Server           string  `json:"server"`
	Attempt          string  `json:"attempt"`
	LatencyMS        float64 `json:"latency_ms"`
	Times            *int    `json:"times"`
	Code             int     `json:"code"`
	RetryAfterMS     float64 `json:"retry_after_ms"`
	RetryAfterDateMS float64 `json:"retry_after_date_ms"`
}

func (e *policyEntry) check() error {
	switch e.Attempt {
	case "ok", "tool_error", "rpc_error", "invalid_result", "connect_ok", "list_ok", "connect_refused", "disconnect_before_send",
		"disconnect_after_send", "timeout", "hang", "http_401", "http_429", "http_503":
		return nil
	}
	return fmt.Errorf("unknown attempt %q", e.Attempt)
}

// connects reports whether the entry is meant for a connect.
func (e *policyEntry) connects() bool {
	return e.Attempt == "connect_ok" || e.Attempt == "connect_refused"
}

// A policyWorld is scripted servers, by name.
type policyWorld struct {
	servers  map[string]*policyServer
	tools    []Tool
	sessions []*policySession
}

func newPolicyWorld(c *faultCase) *policyWorld {
	w := &policyWorld{servers: map[string]*policyServer{}}
	for _, e := range c.attempts {
		w.server(e.Server).script = append(w.server(e.Server).script, e)
	}
	names := map[string]bool{}
	for _, s := range c.Action.Steps {
		for step := &s; step != nil; step = step.Step {
			if step.Op == "call" {
				names[step.Tool] = true
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		w.tools = append(w.tools, Tool{Name: name, InputSchema: json.RawMessage(`{"type":"object"}`),
			OutputSchema: json.RawMessage(`{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}`)})
	}
	return w
}

func (w *policyWorld) server(name string) *policyServer {
	if w.servers[name] == nil {
		w.servers[name] = new(policyServer)
	}
	return w.servers[name]
}

// config gives the tools of a fleet names of their own.
func (w *policyWorld) config(cfg *Config, url string) {
	if _, scripted := w.servers[cfg.Name]; scripted {
		cfg.Prefix = cfg.Name
	}
}

func (w *policyWorld) session(cfg Config, o *Options) Session {
	cfg = cfg.withDefaults()
	_, scripted := w.servers[cfg.Name]
	s := &policySession{cfg: cfg, tools: w.tools, fleet: scripted}
	if scripted {
		s.server = w.server(cfg.Name)
	} else {
		s.server = w.server("")
	}
	w.sessions = append(w.sessions, s)
	return s
}

func (w *policyWorld) seen() caseSeen {
	seen := caseSeen{getDelay: -1}
	for _, s := range w.sessions {
		if s.connected {
			seen.open++
		}
	}
	for _, s := range w.servers {
		seen.inFlight = max(seen.inFlight, s.most)
	}
	return seen
}

// A policyServer is a list of what becomes of attempts.
type policyServer struct {
	mu      sync.Mutex // guards the fields below
	script  []policyEntry
	at      int
	used    int
	running int
	most    int
}

// take uses the next entry up, if wanted likes it. The last one stays.
func (s *policyServer) take(wanted func(*policyServer, *policyEntry) bool) *policyEntry {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.script) == 0 {
		return &policyEntry{Attempt: "ok"}
	}
	e := &s.script[s.at]
	if !wanted(s, e) {
		return nil
	}
	times := 1
	if e.Times != nil {
		times = *e.Times
	}
	if s.used++; times > 0 && s.used >= times && s.at+1 < len(s.script) {
		s.at, s.used = s.at+1, 0
	}
	return e
}

// A policySession is a session whose attempts go as the script says. It keeps
// its ceilings itself, as a TransportSession does.
type policySession struct {
	server *policyServer
	cfg    Config
	tools  []Tool
	fleet  bool // a member of one
	aside  bool // the tools are being listed aside of the script

	mu        sync.Mutex // guards the fields below
	connected bool
	cold      bool // the next connect is one that the script may hang
	closed    bool
}

func (s *policySession) boundsItself() {}

func (s *policySession) disconnect() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.connected, s.cold = false, true
}

// connect connects, if need be. Asked says that the caller asked for just that.
func (s *policySession) connect(ctx context.Context, asked bool) error {
	s.mu.Lock()
	connected, asked, closed := s.connected, asked || s.cold, s.closed
	s.cold = false
	s.mu.Unlock()
	if connected || closed {
		return nil
	}
	e := s.server.take(func(_ *policyServer, e *policyEntry) bool { return e.connects() || asked && e.Attempt == "hang" })
	if e != nil {
		if err := s.attempt(ctx, e, s.cfg.ConnectTimeout, false); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.connected = !s.closed
	return nil
}

// attempt does what the entry says. Sent says that a request had left.
func (s *policySession) attempt(ctx context.Context, e *policyEntry, ceiling time.Duration, sent bool) error {
	end := time.Now().Add(ceiling)
	ours := true // or the caller's deadline comes first
	if d, ok := ctx.Deadline(); ok && d.Before(end) {
		end, ours = d, false
	}
	// A try ends by its own deadline, so before the caller's.
	timedOut := func(at time.Time) error {
		timer := time.NewTimer(time.Until(at))
		defer timer.Stop()
		select {
		case <-timer.C:
			return &TransportError{Reason: ReasonTimeout, Sent: sent}
		case <-ctx.Done():
			return &TransportError{Reason: ReasonCancelled, Sent: sent, Err: ctx.Err()}
		}
	}
	if e.LatencyMS > 0 {
		done := time.Now().Add(ms(e.LatencyMS))
		if done.After(end) {
			return timedOut(end)
		}
		timer := time.NewTimer(ms(e.LatencyMS))
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return &TransportError{Reason: ReasonCancelled, Sent: sent, Err: ctx.Err()}
		}
	}
	after := ms(e.RetryAfterMS)
	if e.RetryAfterDateMS > 0 {
		at, _ := http.ParseTime(time.Now().Add(ms(e.RetryAfterDateMS)).UTC().Format(http.TimeFormat))
		after = time.Until(at)
	}
	switch e.Attempt {
	case "rpc_error":
		return &RPCError{Code: cmp.Or(e.Code, -32000)}
	case "connect_refused":
		return &TransportError{Reason: ReasonUnavailable}
	case "disconnect_before_send", "disconnect_after_send":
		s.mu.Lock()
		s.connected = false
		s.mu.Unlock()
		return &TransportError{Reason: ReasonDisconnected, Sent: e.Attempt == "disconnect_after_send"}
	case "timeout":
		if !ours {
			end = end.Add(-time.Millisecond)
		}
		return timedOut(end)
	case "hang":
		return timedOut(end)
	case "http_401":
		return &TransportError{Reason: ReasonProtocol, Status: 401, Sent: sent}
	case "http_429":
		return &TransportError{Reason: ReasonUnavailable, Status: 429, RetryAfter: after}
	case "http_503":
		return &TransportError{Reason: ReasonUnavailable, Status: 503, RetryAfter: after, Sent: sent}
	}
	return nil
}

// begin notes an attempt in the log of its step.
func (s *policySession) begin(ctx context.Context) (end func()) {
	s.server.mu.Lock()
	s.server.running++
	s.server.most = max(s.server.most, s.server.running)
	s.server.mu.Unlock()
	noted := func() {}
	if l, ok := ctx.Value(reachLogKey{}).(*reachLog); ok {
		noted = l.begin()
	}
	return func() {
		noted()
		s.server.mu.Lock()
		s.server.running--
		s.server.mu.Unlock()
	}
}

func (s *policySession) Initialize(ctx context.Context) (*ServerInfo, error) {
	info := &ServerInfo{Name: "policy", Protocol: version2511}
	if s.aside {
		return info, nil
	}
	defer s.begin(ctx)()
	return info, s.connect(ctx, true)
}

func (s *policySession) ListTools(ctx context.Context) ([]Tool, error) {
	if s.aside {
		return s.tools, nil
	}
	e := s.server.take(func(server *policyServer, e *policyEntry) bool {
		if !s.fleet || e.Attempt == "list_ok" {
			return true
		}
		// The list of a fleet's member is scripted if a list_ok comes at last.
		return e.Attempt != "ok" && slices.ContainsFunc(server.script[server.at:], func(e policyEntry) bool { return e.Attempt == "list_ok" })
	})
	if !s.fleet {
		defer s.begin(ctx)()
	}
	if err := s.connect(ctx, false); err != nil {
		return nil, err
	}
	if e != nil {
		if err := s.attempt(ctx, e, s.cfg.DiscoveryTimeout, true); err != nil {
			return nil, err
		}
	}
	return s.tools, nil
}

func (s *policySession) CallTool(ctx context.Context, call *Call) (*Result, error) {
	defer s.begin(ctx)()
	if err := s.connect(ctx, false); err != nil {
		return nil, err
	}
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return nil, &TransportError{Reason: ReasonDisconnected}
	}
	e := s.server.take(func(*policyServer, *policyEntry) bool { return true })
	if err := s.attempt(ctx, e, s.cfg.CallTimeout, true); err != nil {
		return nil, err
	}
	text := []Content{{Type: "text", Text: "ok"}}
	switch e.Attempt {
	case "tool_error":
		return &Result{Content: text, IsError: true}, nil
	case "invalid_result":
		return &Result{Content: text, Structured: json.RawMessage(`{"n":"no number"}`)}, nil
	}
	return &Result{Content: text, Structured: json.RawMessage(`{"n":1}`)}, nil
}

func (s *policySession) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.connected, s.closed = false, true
	return nil
}
