package mcp

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// A runner for the fault cases of testdata/cases, whose README is the format.
// MCP_CASES names another folder of such files. The runner is strict: a field
// or a verb that it does not know fails the case, because a case that is half
// understood proves nothing.

const caseDir = "testdata/cases"

func TestCases(t *testing.T) {
	dir := cmp.Or(os.Getenv("MCP_CASES"), caseDir)
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if len(files) == 0 && dir == caseDir {
		t.Skip("a copy of the package without its testdata")
	}
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
	files, err := filepath.Glob(filepath.Join(caseDir, "*.json"))
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
	log     lockedBuilder // of the library
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
