package mcp

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
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
			c := readCase(t, file)
			if !c.alone() {
				t.Parallel()
			}
			for range max(1, c.Expect.Detail.Repeat) {
				failures, late := runCase(t, c, 5*time.Second)
				for try := 0; late && try < 2; try++ {
					t.Logf("again, since the machine may have been busy:\n%s", strings.Join(failures, "\n"))
					failures, late = runCase(t, c, 5*time.Second)
				}
				for _, f := range failures {
					t.Error(f)
				}
			}
		})
	}
}

func readCase(t *testing.T, file string) *faultCase {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	c, err := parseCase(data)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// The runner has to fail on what it does not understand.
func TestCasesAreStrict(t *testing.T) {
	const form = `{"id":"X","kind":"k","title":"t","transport":%q,"server_script":%s,"client_action":{"policy":%s,"steps":%s},"expect":{"outcome":"ok","detail":%s}}`
	for _, tt := range []struct{ transport, script, policy, steps, detail, why string }{
		{"carrier-pigeon", `[]`, `{}`, `[{"op":"connect"}]`, `{}`, `unknown transport "carrier-pigeon"`},
		{"stdio", `[{"shout":"hi"}]`, `{}`, `[{"op":"connect"}]`, `{}`, `unknown field "shout"`},
		{"stdio", `[{"raw":"a","stderr":"b"}]`, `{}`, `[{"op":"connect"}]`, `{}`, `is not one verb with its options`},
		{"stdio", `[{"raw":"a","as":"b"}]`, `{}`, `[{"op":"connect"}]`, `{}`, `is not one verb with its options`},
		{"stdio", `[{"ignore":["hup"]}]`, `{}`, `[{"op":"connect"}]`, `{}`, `unknown "hup"`},
		{"http", `[{"on":{"method":"POST","verb":1},"status":200}]`, `{}`, `[{"op":"connect"}]`, `{}`, `on: unknown field "verb"`},
		{"http", `[{"on":{},"status":200,"body":[{"sing":true}]}]`, `{}`, `[{"op":"connect"}]`, `{}`, `unknown field "sing"`},
		{"schema", `[{"tool":{"name":"t"},"result":{}}]`, `{}`, `[{"op":"validate","result":0}]`, `{}`, `want either a tool or a result`},
		{"policy", `[{"attempt":"shrug"}]`, `{}`, `[{"op":"call","tool":"t"}]`, `{}`, `unknown attempt "shrug"`},
		{"policy", `[{"attempt":"ok"}]`, `{"patience":1}`, `[{"op":"call","tool":"t"}]`, `{}`, `unknown field "patience"`},
		{"policy", `[{"attempt":"ok"}]`, `{"validate":"maybe"}`, `[{"op":"call","tool":"t"}]`, `{}`, `unknown validate "maybe"`},
		{"policy", `[{"attempt":"ok"}]`, `{}`, `[{"op":"dance"}]`, `{}`, `unknown op "dance"`},
		{"policy", `[{"attempt":"ok"}]`, `{}`, `[{"op":"call","tool":"t","loud":true}]`, `{}`, `unknown field "loud"`},
		{"policy", `[{"attempt":"ok"}]`, `{}`, `[{"op":"parallel","n":2}]`, `{}`, `parallel without step`},
		{"policy", `[{"attempt":"ok"}]`, `{}`, `[{"op":"call","tool":"t"}]`, `{"mood":"good"}`, `unknown field "mood"`},
		{"policy", `[{"attempt":"ok"}]`, `{}`, `[{"op":"call","tool":"t"}]`, `{"judge_step":7}`, `there is no step 7`},

		// What encoding/json would let pass.
		{"stdio", `[{"handshake":null}]`, `{}`, `[{"op":"connect"}]`, `{}`, `handshake: null says nothing`},
		{"stdio", `[{"Handshake":{}}]`, `{}`, `[{"op":"connect"}]`, `{}`, `unknown field "Handshake"`},
		{"stdio", `[]`, `{}`, `[{"op":"connect"}]`, `null`, `null says nothing`},
		{"stdio", `[]`, `{}`, `[{"op":"connect"}]`, `{"negotiated":null}`, `negotiated: null says nothing`},
		{"stdio", `[]`, `{}`, `[{"op":"connect"}]`, `{"negotiated":"a","negotiated":"b"}`, `"negotiated" is there twice`},
		{"stdio", `[]`, `{}`, `[{"op":"connect"}]`, `{"server_saw":{"initialize":null}}`, `server_saw: initialize: null says nothing`},
		{"stdio", `[]`, `{}`, `[{"op":"connect"}]`, `{"structured_raw":null}`, `structured_raw: null says nothing`},
		{"stdio", `[]`, `{"breaker":null}`, `[{"op":"connect"}]`, `{}`, `breaker: null says nothing`},
		{"stdio", `[]`, `{"queue":null}`, `[{"op":"connect"}]`, `{}`, `queue: null says nothing`},

		// What would have no effect.
		{"stdio", `[{"fill":{"unit":"x"}}]`, `{}`, `[{"op":"connect"}]`, `{}`, `a fill of nothing`},
		{"stdio", `[{"ignore":[]}]`, `{}`, `[{"op":"connect"}]`, `{}`, `ignore of nothing`},
		{"http", `[{"on":{"method":"post"},"status":200}]`, `{}`, `[{"op":"connect"}]`, `{}`, `no request has the method "post"`},
		{"http", `[]`, `{"breaker":{"threshold":0.5}}`, `[{"op":"connect"}]`, `{}`, `want a whole number above zero, not 0.5`},
		{"http", `[]`, `{"jitter":2}`, `[{"op":"connect"}]`, `{}`, `unknown jitter 2`},
		{"stdio", `[{"hang":false}]`, `{}`, `[{"op":"connect"}]`, `{}`, `want true, not false`},
		{"stdio", `[{"raw_b64":"?"}]`, `{}`, `[{"op":"connect"}]`, `{}`, `illegal base64 data at input byte 0`},
		{"stdio", `[{"raw":"{{idd}}"}]`, `{}`, `[{"op":"connect"}]`, `{}`, `nothing stands for {{idd}}`},
		{"stdio", `[{"raw":"{{id.a}}"}]`, `{}`, `[{"op":"connect"}]`, `{}`, `nothing stands for {{id.a}}`},
		{"stdio", `[{"repeat":{"times":1,"every_ms":1}}]`, `{}`, `[{"op":"connect"}]`, `{}`, `repeat of nothing`},
		{"http", `[{"on":{},"status":200,"body":[{"hang":false}]}]`, `{}`, `[{"op":"connect"}]`, `{}`, `want true, not false`},
		{"http", `[{"on":{},"status":200,"body":[{"text":"a","hang":true}]}]`, `{}`, `[{"op":"connect"}]`, `{}`, `a chunk is one thing`},
		{"http", `[{"on":{},"status":200,"times":-1,"body":[]}]`, `{}`, `[{"op":"connect"}]`, `{}`, `want a whole number, not -1`},
		{"http", `[]`, `{"max_in_flight":0}`, `[{"op":"connect"}]`, `{}`, `want a whole number above zero, not 0`},
		{"http", `[]`, `{"client_capabilities":{"flying":{}}}`, `[{"op":"connect"}]`, `{}`, `unknown capability "flying"`},
		{"http", `[]`, `{}`, `[{"op":"connect","tool":"t"}]`, `{}`, `connect takes no tool`},
		{"http", `[]`, `{}`, `[{"op":"call"}]`, `{}`, `call without tool`},
		{"http", `[]`, `{}`, `[{"op":"call","tool":"t","deadline_ms":0}]`, `{}`, `want a number above zero, not 0`},
		{"http", `[]`, `{}`, `[{"op":"call","tool":"t","args":[],"args_pad_bytes":9}]`, `{}`, `args_pad_bytes pads an object`},
		{"http", `[]`, `{}`, `[{"op":"parallel","n":2,"step":{"op":"parallel","n":2,"step":{"op":"connect"}}}]`, `{}`, `parallel is no step of parallel`},
		{"http", `[]`, `{}`, `[{"op":"parallel","n":2,"step":{"op":"sleep","ms":2}}]`, `{}`, `sleep is no step of parallel`},
		{"http", `[]`, `{}`, `[{"op":"validate","result":0}]`, `{}`, `validate over http`},
		{"schema", `[{"tool":{"name":"t"}},{"result":{}}]`, `{}`, `[{"op":"validate","result":1}]`, `{}`, `there is no result 1`},
		{"policy", `[{"attempt":"ok","code":1}]`, `{}`, `[{"op":"call","tool":"t"}]`, `{}`, `ok has no code`},
		{"policy", `[{"attempt":"ok","retry_after_ms":1}]`, `{}`, `[{"op":"call","tool":"t"}]`, `{}`, `ok says not when to retry, or says it twice`},
		{"policy", `[{"attempt":"ok","server":"a"},{"attempt":"ok","server":"b"}]`, `{}`, `[{"op":"call","tool":"t"}]`, `{}`, `call goes to server "", of which nothing is known`},
		{"policy", `[{"attempt":"ok"}]`, `{}`, `[{"op":"call","tool":"t","server":"a"}]`, `{}`, `call goes to server "a", of which nothing is known`},

		// What nothing could fail.
		{"stdio", `[]`, `{}`, `[{"op":"connect"}]`, `{"texts":{"1":"a"}}`, `there is no step 1`},
		{"stdio", `[]`, `{}`, `[{"op":"connect"}]`, `{"attempts":[1,1]}`, `there is no step 1`},
		{"stdio", `[]`, `{}`, `[{"op":"connect"}]`, `{"open_connections_after":0}`, `nothing tells open_connections_after`},
		{"stdio", `[]`, `{}`, `[{"op":"connect"}]`, `{"b_must_not_see_headers":["a"]}`, `nothing tells b_requests`},
		{"stdio", `[]`, `{}`, `[{"op":"connect"}]`, `{"tools_exact":[]}`, `nothing tells tools`},
		{"stdio", `[]`, `{}`, `[{"op":"connect"}]`, `{"down":[]}`, `nothing tells ready and down`},
		{"stdio", `[]`, `{}`, `[{"op":"connect"}]`, `{"parallel_counts":{"limit":0}}`, `nothing tells parallel_counts`},
		{"stdio", `[]`, `{}`, `[{"op":"connect"}]`, `{"initialize_without_session":false}`, `want true, not false`},
		{"http", `[]`, `{}`, `[{"op":"connect"}]`, `{"processes_left":0}`, `nothing tells processes_left`},
		{"policy", `[]`, `{}`, `[{"op":"call","tool":"t"}]`, `{"server_saw":{"tools/call":0}}`, `nothing tells server_saw`},
	} {
		text := fmt.Sprintf(form, tt.transport, tt.script, tt.policy, tt.steps, tt.detail)
		if _, err := parseCase([]byte(text)); err == nil || !strings.Contains(err.Error(), tt.why) {
			t.Errorf("%v, want %s: %s", err, tt.why, text)
		}
	}
	if _, err := parseCase(fmt.Appendf(nil, form, "stdio", `[]`, `{}`, `[{"op":"connect"}]`, `{}`)); err != nil {
		t.Errorf("the form itself: %v", err)
	}
}

// A check that cannot fail is none: with one expectation made wrong, a case has
// to fail. Each kind of expectation is tried once over each transport. Those that
// no rule makes wrong are wrong in cases of their own.
func TestCasesCanFail(t *testing.T) {
	wrong, err := filepath.Glob(filepath.Join(caseDir, "wrong", "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range wrong {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".json"), func(t *testing.T) {
			t.Parallel()
			c := readCase(t, file)
			if failures, _ := runCase(t, c, 300*time.Millisecond); failures == nil {
				t.Error("passes")
			}
		})
	}
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
				if err := broken.checkDetail(); err != nil {
					t.Fatal(err)
				}
				if failures, _ := runCase(t, &broken, 300*time.Millisecond); failures == nil {
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
	ConnectDeadlineMS positive `json:"connect_deadline_ms"`
	MaxTotalMS        positive `json:"max_total_ms"`
	ProgressExtends   bool     `json:"progress_extends"`
	Retries           natural  `json:"retries"`
	BackoffBaseMS     *millis  `json:"backoff_base_ms"`
	BackoffMaxMS      *millis  `json:"backoff_max_ms"`
	Jitter            any      `json:"jitter"` // false, 0 and "none" are none
	Breaker           *struct {
		Threshold   counting `json:"threshold"`
		CooldownMS  positive `json:"cooldown_ms"`
		HalfOpenMax counting `json:"half_open_max"`
	} `json:"breaker"`
	MaxMessageBytes    counting                  `json:"max_message_bytes"`
	MaxPages           counting                  `json:"max_pages"`
	MaxInFlight        counting                  `json:"max_in_flight"`
	Queue              any                       `json:"queue"`
	QueueWaitMS        millis                    `json:"queue_wait_ms"`
	CloseGraceMS       millis                    `json:"close_grace_ms"`
	KillGraceMS        millis                    `json:"kill_grace_ms"`
	Restart            any                       `json:"restart"`
	StderrTailBytes    natural                   `json:"stderr_tail_bytes"`
	Env                map[string]string         `json:"env"`
	Headers            map[string]string         `json:"headers"`
	Redirects          any                       `json:"redirects"`
	ProtocolVersions   []string                  `json:"protocol_versions"`
	ClientCapabilities map[string]map[string]any `json:"client_capabilities"`
	Validate           string                    `json:"validate"`
	Servers            map[string]struct {
		Required *bool `json:"required"` // true, if it is left out
	} `json:"servers"`
}

type caseStep struct {
	Op           string          `json:"op"`
	URL          string          `json:"url"`
	Tool         string          `json:"tool"`
	Args         json.RawMessage `json:"args"`
	ArgsPadBytes natural         `json:"args_pad_bytes"`
	DeadlineMS   positive        `json:"deadline_ms"`
	Idempotent   bool            `json:"idempotent"`
	Server       string          `json:"server"`
	Cold         bool            `json:"cold"`
	NeedsList    bool            `json:"needs_list"`
	N            counting        `json:"n"`
	Step         *caseStep       `json:"step"`
	Result       natural         `json:"result"`
	Name         string          `json:"name"`
	Value        string          `json:"value"`
	MS           millis          `json:"ms"`
}

// stepOptions are what a step needs, and what it may have beside.
var stepOptions = map[string]struct{ needs, may string }{
	"connect":          {"", "url server deadline_ms"},
	"list_tools":       {"", "server deadline_ms"},
	"call":             {"tool", "args args_pad_bytes deadline_ms idempotent server cold needs_list"},
	"parallel":         {"n step", ""},
	"parallel_clients": {"n step", ""},
	"start_fleet":      {"", "deadline_ms"},
	"validate":         {"result", ""},
	"close":            {"", "deadline_ms"},
	"setenv":           {"name value", ""},
	"sleep":            {"ms", ""},
	"advance":          {"ms", ""},
}

func (s *caseStep) UnmarshalJSON(b []byte) error {
	type plain caseStep
	if err := strictly(b, (*plain)(s)); err != nil {
		return err
	}
	given, err := membersOf(b)
	if err != nil {
		return err
	}
	options, known := stepOptions[s.Op]
	if !known {
		return fmt.Errorf("unknown op %q", s.Op)
	}
	delete(given, "op")
	for need := range strings.FieldsSeq(options.needs) {
		if _, ok := given[need]; !ok {
			return fmt.Errorf("%s without %s", s.Op, need)
		}
		delete(given, need)
	}
	for name := range given {
		if !slices.Contains(strings.Fields(options.may), name) {
			return fmt.Errorf("%s takes no %s", s.Op, name)
		}
	}
	if v, _ := decodeValue(s.Args); s.ArgsPadBytes > 0 && s.Args != nil {
		if _, ok := v.(map[string]any); !ok {
			return errors.New("args_pad_bytes pads an object")
		}
	}
	if s.Step == nil {
		return nil
	}
	switch s.Step.Op {
	case "connect", "list_tools", "call":
	case "close", "validate":
		if s.Op == "parallel_clients" {
			return fmt.Errorf("%s is no step of a client of its own", s.Step.Op)
		}
	default:
		return fmt.Errorf("%s is no step of %s", s.Step.Op, s.Op)
	}
	return nil
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
	StepMinMS                map[int]millis                 `json:"step_min_ms"`
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
	ErrorContains            words                          `json:"error_contains"`
	ErrorContainsAny         words                          `json:"error_contains_any"`
	ErrorNotContains         words                          `json:"error_not_contains"`
	ServerSaw                map[string]caseSpan            `json:"server_saw"`
	ServerSawMax             map[string]int                 `json:"server_saw_max"`
	FinalPathSaw             map[string]map[string]caseSpan `json:"final_path_saw"`
	InitializeWithoutSession yes                            `json:"initialize_without_session"`
	ClientReplies            []clientReply                  `json:"client_replies"`
	GetMinDelayMS            *millis                        `json:"get_min_delay_ms"`
	BRequests                *caseSpan                      `json:"b_requests"`
	BMustNotSeeHeaders       []string                       `json:"b_must_not_see_headers"`
	ServerSentMaxBytes       *int64                         `json:"server_sent_max_bytes"`
	ToolsExact               []string                       `json:"tools_exact"`
	ToolsInclude             []string                       `json:"tools_include"`
	ToolsMaySkip             []string                       `json:"tools_may_skip"`
	SkipsReported            bool                           `json:"skips_reported"`
	ToolsIfOK                []string                       `json:"tools_if_ok"`
	Negotiated               *string                        `json:"negotiated"`
	Attempts                 spans                          `json:"attempts"`
	AttemptsTotal            *caseSpan                      `json:"attempts_total"`
	AttemptsEach             *caseSpan                      `json:"attempts_each"`
	WaitBeforeAttempt2MS     spans                          `json:"wait_before_attempt_2_ms"`
	WaitsMS                  json.RawMessage                `json:"waits_ms"`
	DistinctFirstWaitsMin    *counting                      `json:"distinct_first_waits_min"`
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
	Repeat                   natural                        `json:"repeat"`
	Note                     string                         `json:"note"`
}

// positive is a number above zero, millis one from zero on, counting and natural are
// the whole ones of these, and yes is true: what else a case might say there would
// have no effect, or none that anybody could have meant.
type (
	positive float64
	millis   float64
	counting int
	natural  int
	yes      bool
)

func (p *positive) UnmarshalJSON(b []byte) error {
	return number(b, (*float64)(p), false, "a number above zero")
}

func (m *millis) UnmarshalJSON(b []byte) error {
	return number(b, (*float64)(m), true, "milliseconds")
}

func (c *counting) UnmarshalJSON(b []byte) error {
	return number(b, (*int)(c), false, "a whole number above zero")
}

func (n *natural) UnmarshalJSON(b []byte) error {
	return number(b, (*int)(n), true, "a whole number")
}

// number reads a number from zero on, or above it if zero will not do.
func number[T int | float64](b []byte, to *T, zero bool, want string) error {
	if json.Unmarshal(b, to) != nil || *to < 0 || *to == 0 && !zero || string(b) == "null" {
		return fmt.Errorf("want %s, not %s", want, b)
	}
	return nil
}

func (y *yes) UnmarshalJSON(b []byte) error {
	if *y = string(b) == "true"; !*y {
		return fmt.Errorf("want true, not %s", b)
	}
	return nil
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
	case strictly(b, &pair) == nil && len(pair) == 2:
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

// spans are numbers by step: a list that starts with step 0, or an object.
type spans map[int]caseSpan

func (s *spans) UnmarshalJSON(b []byte) error {
	var list []caseSpan
	if json.Unmarshal(b, &list) != nil || list == nil {
		return strictly(b, (*map[int]caseSpan)(s))
	}
	*s = spans{}
	for i, span := range list {
		(*s)[i] = span
	}
	return nil
}

// words is one text, or a list of them.
type words []string

func (w *words) UnmarshalJSON(b []byte) error {
	var one string
	if err := strictly(b, &one); err == nil {
		*w = words{one}
		return nil
	}
	return strictly(b, (*[]string)(w))
}

var caseClasses = []string{"ok", "disconnected", "timeout", "protocol", "limit", "unavailable", "refused", "invalid"}

// strictly decodes one JSON value that holds nothing unknown, nothing twice, no
// name in another case, and no null, all of which encoding/json lets pass.
func strictly(data []byte, v any) error {
	if err := shaped(data, reflect.TypeOf(v).Elem()); err != nil {
		return err
	}
	return json.Unmarshal(data, v)
}

// shaped reports whether data has members and elements as t has. What decodes
// itself is left to itself.
func shaped(data []byte, t reflect.Type) error {
	if reflect.PointerTo(t).Implements(reflect.TypeFor[json.Unmarshaler]()) {
		return nil
	}
	if string(bytes.TrimSpace(data)) == "null" {
		return errors.New("null says nothing")
	}
	switch t.Kind() {
	case reflect.Pointer:
		return shaped(data, t.Elem())
	case reflect.Slice:
		var all []json.RawMessage
		if err := json.Unmarshal(data, &all); err != nil {
			return err
		}
		for i, e := range all {
			if err := shaped(e, t.Elem()); err != nil {
				return fmt.Errorf("[%d]: %w", i, err)
			}
		}
	case reflect.Map, reflect.Struct:
		all, err := membersOf(data)
		if err != nil {
			return err
		}
		for name, e := range all {
			of, ok := reflect.Type(nil), true
			if t.Kind() == reflect.Map {
				if of = t.Elem(); of == reflect.TypeFor[caseSpan]() {
					of = reflect.PointerTo(of) // a count by name is given, or left out
				}
			} else if of, ok = fieldType(t, name); !ok {
				return fmt.Errorf("unknown field %q", name)
			}
			if err := shaped(e, of); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return nil
}

// fieldType returns the type of the field of t that is called so in JSON.
func fieldType(t reflect.Type, name string) (reflect.Type, bool) {
	for i := range t.NumField() {
		if f := t.Field(i); f.Tag.Get("json") == name {
			return f.Type, true
		}
	}
	return nil, false
}

// membersOf returns the members of an object, each of which is there once.
func membersOf(data []byte) (map[string]json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	if open, err := d.Token(); err != nil || open != json.Delim('{') {
		return nil, fmt.Errorf("want an object, not %.40s (%v)", data, err)
	}
	all := map[string]json.RawMessage{}
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil, err
		}
		var v json.RawMessage
		if err := d.Decode(&v); err != nil {
			return nil, err
		}
		if _, ok := all[name.(string)]; ok {
			return nil, fmt.Errorf("%q is there twice", name)
		}
		all[name.(string)] = v
	}
	return all, nil
}

func parseCase(data []byte) (*faultCase, error) {
	c := new(faultCase)
	if err := strictly(data, c); err != nil {
		return nil, err
	}
	if c.Script == nil {
		return nil, errors.New("no server_script")
	}
	switch c.Action.Policy.Validate {
	case "", "strict", "enforce", "warn", "lenient", "advise", "off", "none":
	default:
		return nil, fmt.Errorf("unknown validate %q", c.Action.Policy.Validate)
	}
	switch j := c.Action.Policy.Jitter.(type) {
	case nil, bool:
	default:
		if part, ok := j.(float64); j != "none" && j != "full" && j != "equal" && (!ok || part < 0 || part > 1) {
			return nil, fmt.Errorf("unknown jitter %v", j)
		}
	}
	for capability := range c.Action.Policy.ClientCapabilities {
		if !slices.Contains([]string{"roots", "sampling", "elicitation"}, capability) {
			return nil, fmt.Errorf("unknown capability %q", capability)
		}
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
	return c, cmp.Or(err, c.checkPlaceholders(), c.checkSteps(), c.checkDetail())
}

// checkPlaceholders looks for those that would be left standing.
func (c *faultCase) checkPlaceholders() error {
	if c.Transport != "stdio" && c.Transport != "http" {
		return nil
	}
	saved := map[string]bool{}
	for _, s := range c.stdio {
		saved["id."+s.As] = true
	}
	for _, raw := range c.Script {
		for _, m := range placeholderLike.FindAllSubmatch(raw, -1) {
			name := string(m[1])
			if !placeholderForm.MatchString("{{"+name+"}}") || strings.HasPrefix(name, "id.") && !saved[name] || (name == "A" || name == "B") && c.Transport != "http" {
				return fmt.Errorf("nothing stands for {{%s}}", name)
			}
		}
	}
	return nil
}

// checkSteps looks for steps that have no meaning over the case's transport.
func (c *faultCase) checkSteps() error {
	servers := map[string]bool{"": c.home() != "", "A": c.Transport == "http", "B": c.Transport == "http"}
	for name := range c.Action.Policy.Servers {
		servers[name] = true
	}
	for _, e := range c.attempts {
		servers[e.Server] = servers[e.Server] || e.Server != ""
	}
	results := 0
	for _, e := range c.schema {
		if e.Result != nil {
			results++
		}
	}
	for i := range c.Action.Steps {
		for s := &c.Action.Steps[i]; s != nil; s = s.Step {
			switch {
			case s.URL != "" && c.Transport != "http":
				return fmt.Errorf("a url over %s", c.Transport)
			case (s.Op == "validate") != (c.Transport == "schema") && !s.silent() && s.Step == nil:
				return fmt.Errorf("%s over %s", s.Op, c.Transport)
			case s.Op == "validate" && int(s.Result) >= results:
				return fmt.Errorf("there is no result %d", s.Result)
			case (s.Op == "connect" || s.Op == "list_tools" || s.Op == "call") && !servers[s.Server]:
				return fmt.Errorf("%s goes to server %q, of which nothing is known", s.Op, s.Server)
			}
		}
	}
	return nil
}

// home is the server of a step that names none, "" if it could be one of many.
func (c *faultCase) home() string {
	names := map[string]bool{}
	for name := range c.Action.Policy.Servers {
		names[name] = true
	}
	for _, e := range c.attempts {
		names[e.Server] = true
	}
	switch {
	case len(names) == 0 || names[""]:
		return "server"
	case len(names) > 1:
		return ""
	}
	return slices.Collect(maps.Keys(names))[0]
}

// checkDetail looks for expectations that nothing could fail.
func (c *faultCase) checkDetail() error {
	d := &c.Expect.Detail
	classes := slices.Concat(d.Steps, d.AlsoOK, d.LastStep, slices.Collect(maps.Keys(d.ParallelCounts)), slices.Collect(maps.Keys(d.ParallelCountsRange)), []string{c.Expect.Outcome})
	for _, also := range d.StepsAlsoOK {
		classes = append(classes, also...)
	}
	for _, class := range classes {
		if !slices.Contains(caseClasses, class) && class != "mixed" {
			return fmt.Errorf("unknown class %q", class)
		}
	}
	outcomes := c.outcomes()
	if outcomes == 0 || d.Steps != nil && len(d.Steps) != outcomes {
		return fmt.Errorf("%d outcomes, and expectations for another number of them", outcomes)
	}
	structured, err := c.structured()
	if err != nil {
		return fmt.Errorf("structured_raw: %w", err)
	}
	waits, err := c.waits()
	if err != nil {
		return fmt.Errorf("waits_ms: %w", err)
	}
	for _, steps := range []any{map[int]bool{c.judged(): true}, d.StepsAlsoOK, d.StepMaxMS, d.StepMinMS, d.Texts, d.TextLen, d.IsError, d.RPCCodes, d.MayHaveRunSteps, d.Attempts, d.WaitBeforeAttempt2MS, structured, waits} {
		for _, k := range reflect.ValueOf(steps).MapKeys() {
			if k.Int() < 0 || k.Int() >= int64(outcomes) {
				return fmt.Errorf("there is no step %d", k.Int())
			}
		}
	}
	has := func(ops ...string) bool {
		return slices.ContainsFunc(c.Action.Steps, func(s caseStep) bool {
			return slices.Contains(ops, s.Op) || s.Step != nil && slices.Contains(ops, s.Step.Op)
		})
	}
	wire, http, policy := c.Transport == "stdio" || c.Transport == "http", c.Transport == "http", c.Transport == "policy"
	for _, e := range []struct {
		name         string
		given, makes bool // sense here
	}{
		{"server_saw", d.ServerSaw != nil || d.ServerSawMax != nil || d.ClientReplies != nil, wire},
		{"final_path_saw", d.FinalPathSaw != nil, http},
		{"initialize_without_session", bool(d.InitializeWithoutSession), http},
		{"get_min_delay_ms", d.GetMinDelayMS != nil, http},
		{"b_requests", d.BRequests != nil || d.BMustNotSeeHeaders != nil, http},
		{"server_sent_max_bytes", d.ServerSentMaxBytes != nil, http},
		{"open_connections_after", d.OpenConnectionsAfter != nil, http || policy},
		{"max_in_flight_seen", d.MaxInFlightSeen != nil, wire || policy},
		{"processes_left", d.ProcessesLeft != nil, c.Transport == "stdio"},
		{"virtual_max_ms", d.VirtualMaxMS != nil, policy},
		{"tools", d.ToolsExact != nil || d.ToolsInclude != nil || d.ToolsMaySkip != nil || d.ToolsIfOK != nil || d.SkipsReported, has("list_tools", "start_fleet")},
		{"parallel_counts", d.ParallelCounts != nil || d.ParallelCountsRange != nil, has("parallel", "parallel_clients")},
		{"ready and down", d.Ready != nil || d.Down != nil, has("start_fleet")},
		{"attempts", d.Attempts != nil || d.AttemptsTotal != nil || d.AttemptsEach != nil || d.WaitBeforeAttempt2MS != nil || d.WaitsMS != nil ||
			d.DistinctFirstWaitsMin != nil || d.Breaker != nil || d.Negotiated != nil, wire || policy},
	} {
		if e.given && !e.makes {
			return fmt.Errorf("nothing tells %s over %s with such steps", e.name, c.Transport)
		}
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
	placeholderForm  = regexp.MustCompile(`\{\{(idtext|id|version|ptoken|n|A|B|id[.:][^{}"\\]+)\}\}`)
	placeholderAlone = regexp.MustCompile(`"` + placeholderForm.String() + `"(:?)`)
	placeholderLike  = regexp.MustCompile(`\{\{([A-Za-z][^{}"\\]*)\}\}`)
)

// value is the JSON of a placeholder; text says that it stands for a text.
func (p *placeholders) value(name string) (v string, text bool) {
	switch {
	case name == "id":
		return string(p.id), false
	case name == "idtext":
		var text string
		if json.Unmarshal(p.id, &text) != nil {
			text = string(p.id)
		}
		return text, true
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
		if m[len(m)-1] == ':' {
			return m // the name of a member stays a text
		}
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
	url     string        // where the last connect went
	results []stepResult  // of the steps that give an outcome
	wait    time.Duration // for what the other side is to see in the end

	failures []string // what is not as expected
	late     bool     // a step took too long
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
	aside  bool // the tools were listed aside of the script
	closed bool
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

// each lists the results that a step has: more than one if it was a parallel one.
func (s *stepResult) each() []stepResult {
	if s.parallel != nil {
		return s.parallel
	}
	return []stepResult{*s}
}

// forget makes the client list its tools again, unless it did by the script.
func (c *caseClient) forget() {
	c.client.mu.Lock()
	defer c.client.mu.Unlock()
	if c.aside {
		c.client.list, c.aside = nil, false
	}
}

func ms[N ~int | ~float64](n N) time.Duration {
	return time.Duration(float64(n) * float64(time.Millisecond))
}

// runCase runs a case once, and returns what was not as expected, the story of
// the run last. Late says that a step took too long by a clock that others share,
// or that the machine had far more to do than it could, and that the rest may
// follow from that. Wait is how long what the other side is to see may take to
// get there.
func runCase(t *testing.T, c *faultCase, wait time.Duration) (failures []string, late bool) {
	r := &caseRun{T: t, c: c, wait: wait}
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
		return r.failures, false
	}
	r.run()
	return r.failures, r.late || r.failures != nil && busy()
}

// busy reports whether so much wants to run that a sleep tells nothing about how
// far others have come meanwhile. Where the system does not say, nothing does.
func busy() bool {
	b, _ := os.ReadFile("/proc/loadavg")
	first, _, _ := strings.Cut(string(b), " ")
	load, err := strconv.ParseFloat(first, 64)
	return err == nil && load > 2*float64(runtime.NumCPU())
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
			if step.Op == "close" || step.Step != nil && step.Step.Op == "close" {
				for _, c := range r.clients {
					c.closed = true
				}
			}
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
	for start := time.Now(); ; {
		seen := r.world.seen()
		missing := len(seen.replies) < len(r.c.Expect.Detail.ClientReplies)
		for method, want := range r.c.Expect.Detail.ServerSaw {
			missing = missing || float64(seen.saw[method]) < want.lo
		}
		for path, methods := range r.c.Expect.Detail.FinalPathSaw {
			for method, want := range methods {
				missing = missing || float64(seen.paths[path][method]) < want.lo
			}
		}
		if want := r.c.Expect.Detail.OpenConnectionsAfter; want != nil {
			missing = missing || seen.open > *want && time.Since(start) < time.Second
		}
		if !missing || time.Since(start) > r.wait {
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
		MaxMessageBytes: int(p.MaxMessageBytes),
		MaxInFlight:     int(p.MaxInFlight),
		Headers:         p.Headers,
		Retry:           RetryConfig{MaxAttempts: 1 + int(p.Retries)},
		BreakerFailures: -1, // a case without a breaker is not about one
	}
	if d := p.BackoffBaseMS; d != nil {
		cfg.Retry.BaseDelay = max(1, ms(*d)) // zero would be the default
	}
	if d := p.BackoffMaxMS; d != nil {
		cfg.Retry.MaxDelay = max(1, ms(*d))
	}
	if b := p.Breaker; b != nil {
		// Seven nanoseconds less tell its draws from those of the backoff.
		cfg.BreakerFailures, cfg.BreakerReset = int(b.Threshold), ms(b.CooldownMS)-7
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
		cfg.Optional = s.Required != nil && !*s.Required
	}
	o := &Options{Logger: slog.New(slog.NewTextHandler(&r.log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	o.Rand = func(n int64) int64 {
		switch {
		case n == int64(cfg.BreakerReset/10)+1:
			return 0 // how much longer than the cooldown the breaker stays open
		case p.Jitter == false, p.Jitter == 0.0, p.Jitter == "none":
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
	if r.c.Transport != "policy" { // where the script knows what reached it
		o.Trace = func(ctx context.Context, _ Reach) (context.Context, func(Health, error)) {
			end := func() {}
			if l, ok := ctx.Value(reachLogKey{}).(*reachLog); ok {
				end = l.begin()
			}
			return ctx, func(Health, error) { end() }
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
		s.aside, c.aside = true, true
		if _, err := c.client.Adopt(r.Context()); err != nil {
			r.Fatal(err)
		}
		s.aside = false
	}
	return c
}

// client returns the client for a step, which in most cases is the only one. A
// connect to an address, one after a close, and a cold call over a wire have one
// of their own.
func (r *caseRun) client(step *caseStep) *caseClient {
	name := cmp.Or(step.Server, r.c.home())
	if step.URL != "" {
		r.url = step.URL
		return r.newClient(name, r.url)
	}
	for _, c := range slices.Backward(r.clients) {
		if c.name != name {
			continue
		}
		if c.closed && step.Op == "connect" || step.Cold && r.c.Transport != "policy" {
			break
		}
		return c
	}
	return r.newClient(name, r.url)
}

// do runs a step that gives an outcome.
func (r *caseRun) do(ctx context.Context, step *caseStep) stepResult {
	switch step.Op {
	case "parallel", "parallel_clients":
		return r.doParallel(ctx, step)
	case "start_fleet", "close", "validate":
		return r.timed(ctx, step, nil)
	}
	return r.timed(ctx, step, r.client(step))
}

func (r *caseRun) doParallel(ctx context.Context, step *caseStep) stepResult {
	out := stepResult{step: step, parallel: make([]stepResult, step.N)}
	var clients []*caseClient
	for i := range step.N {
		switch {
		case step.Step.Op == "close" || step.Step.Op == "validate":
			clients = append(clients, nil)
		case step.Op == "parallel_clients":
			clients = append(clients, r.newClient(cmp.Or(step.Step.Server, r.c.home()), cmp.Or(step.Step.URL, r.url)))
		case i == 0:
			clients = append(clients, r.client(step.Step))
		default:
			clients = append(clients, clients[0])
		}
	}
	start := time.Now()
	var wg sync.WaitGroup
	for i := range step.N {
		wg.Go(func() { out.parallel[i] = r.timed(ctx, step.Step, clients[i]) })
	}
	wg.Wait()
	out.took = time.Since(start)
	out.class, out.err, out.res, out.info = out.parallel[0].class, out.parallel[0].err, out.parallel[0].res, out.parallel[0].info
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
	out.reaches.op = step.Op
	deadline := step.DeadlineMS
	if most := r.c.Action.Policy.MaxTotalMS; most > 0 && (step.Op == "call" || step.Op == "list_tools") && (deadline == 0 || most < deadline) {
		deadline = most
	}
	if deadline > 0 {
		limited, cancel := context.WithTimeout(ctx, ms(deadline))
		defer cancel()
		ctx = limited
	}
	start := time.Now()
	r.act(ctx, step, c, &out)
	out.took = time.Since(start)
	out.class = caseClass(out.err)
	if step.Op == "close" && deadline > 0 && out.took > ms(deadline) {
		out.class = "timeout" // Close takes no context
	}
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
		if step.NeedsList {
			c.forget()
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
		if r.fleet, out.err = Assemble(ctx, clients...); out.err == nil {
			out.tools = r.fleet.Tools()
		}
	case "validate":
		out.res, out.err = validateCase(ctx, r, int(step.Result))
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
	args["pad"] = strings.Repeat("x", int(step.ArgsPadBytes))
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

// mayHaveRun is what an error says about that, by the outermost error of ours.
func mayHaveRun(err error) bool {
	switch e := err.(type) {
	case *BudgetError:
		return e.Sent
	case *TransportError:
		return e.Sent
	case *RPCError, *ProtocolError:
		return true // it was answered
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), mayHaveRun)
	case *UnavailableError, *SchemaError, *ArgumentError, *ConfigError:
		return false // it was not let out
	case interface{ Unwrap() error }:
		return mayHaveRun(e.Unwrap())
	}
	return false
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
		if len(r.clients) == 0 {
			r.failf("nobody has a breaker")
		}
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
	j := r.c.judged()
	for i, want := range d.Steps {
		also := d.StepsAlsoOK[i]
		if i == j {
			also = append(slices.Clone(also), d.AlsoOK...)
		}
		if !r.comesTo(i, append(also, want)) {
			r.late = r.late || slices.ContainsFunc(r.results[i].each(), func(s stepResult) bool { return s.class == "timeout" })
			r.failf("step %d is %q, want %q: %v", i, r.results[i].class, want, r.results[i].err)
		}
	}
	if !r.comesTo(j, slices.Concat(d.AlsoOK, d.StepsAlsoOK[j], []string{r.c.Expect.Outcome})) {
		r.late = r.late || slices.ContainsFunc(r.results[j].each(), func(s stepResult) bool { return s.class == "timeout" })
		r.failf("the outcome is %q, want %q: %v", r.results[j].class, r.c.Expect.Outcome, r.results[j].err)
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

// comesTo reports whether step i has one of the outcomes. A parallel step has one
// if all have one of them, or, where the case counts them, if one has.
func (r *caseRun) comesTo(i int, classes []string) bool {
	s, fits := &r.results[i], func(s stepResult) bool { return slices.Contains(classes, s.class) }
	if d := &r.c.Expect.Detail; d.ParallelCounts != nil || d.ParallelCountsRange != nil {
		return fits(*s) || slices.ContainsFunc(s.parallel, fits)
	}
	return fits(*s) || !slices.ContainsFunc(s.each(), func(s stepResult) bool { return !fits(s) })
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
			r.late = true
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
		i := r.c.judged()
		if last := r.lastText(); r.results[i].step.Op != "call" || r.results[i].result() == nil {
			i = max(0, last)
		}
		r.checkText(i, *d.Text)
	}
	for i, want := range d.Texts {
		r.checkText(i, want)
	}
	structured, _ := r.c.structured()
	for i := range r.results {
		for _, s := range r.results[i].each() {
			got, _ := s.text()
			if want, ok := d.TextLen[i]; ok && len(got) != want && len([]rune(got)) != want {
				r.failf("the text of step %d has %d bytes, want %d", i, len(got), want)
			}
			var raw bytes.Buffer
			if res := s.result(); res != nil && res.Structured != nil {
				json.Compact(&raw, res.Structured)
			}
			if want, ok := structured[i]; ok && raw.String() != want {
				r.failf("the structured content of step %d is %s, want %s", i, &raw, want)
			}
			if want, ok := d.IsError[i]; ok && (s.result() == nil || s.result().IsError != want) {
				r.failf("step %d: IsError is not %v: %+v, %v", i, want, s.result(), s.err)
			}
		}
	}
}

// lastText is the last step with a text, -1 if none has one.
func (r *caseRun) lastText() int {
	for i := range slices.Backward(r.results) {
		if _, ok := r.results[i].each()[0].text(); ok {
			return i
		}
	}
	return -1
}

func (r *caseRun) checkText(i int, want string) {
	for _, s := range r.results[i].each() {
		if got, ok := s.text(); !ok || got != want {
			r.failf("the text of step %d is %q, want %q", i, got, want)
		}
	}
}

// structured is the expected structured content by step.
func (c *faultCase) structured() (map[int]string, error) {
	raw := c.Expect.Detail.StructuredRaw
	if raw == nil {
		return nil, nil
	}
	var one string
	if strictly(raw, &one) == nil {
		return map[int]string{c.judged(): one}, nil
	}
	steps := map[int]string{}
	return steps, strictly(raw, &steps)
}

func (r *caseRun) checkErrors() {
	d := &r.c.Expect.Detail
	for i, want := range d.RPCCodes {
		for _, s := range r.results[i].each() {
			var re *RPCError
			if !errors.As(s.err, &re) || re.Code != want {
				r.failf("step %d: %v, want JSON-RPC code %d", i, s.err, want)
			}
		}
	}
	errs := r.errs(r.c.judged()) // the judged ones, or else all
	for i := range r.results {
		if len(r.errs(r.c.judged())) == 0 {
			errs = append(errs, r.errs(i)...)
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
		errs := r.errs(i)
		if len(errs) == 0 || slices.ContainsFunc(errs, func(err error) bool { return mayHaveRun(err) != want }) {
			r.failf("step %d: may have run is not %v: %v", i, want, errs)
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

// errs lists the errors of a step.
func (r *caseRun) errs(i int) (errs []error) {
	for _, s := range r.results[i].each() {
		if s.err != nil {
			errs = append(errs, s.err)
		}
	}
	return errs
}

// checkTools checks each list of the last step that made one.
func (r *caseRun) checkTools() {
	for i := range slices.Backward(r.results) {
		lists := r.results[i].each()
		if op := lists[0].step.Op; op != "list_tools" && op != "start_fleet" {
			continue
		}
		for _, list := range lists {
			r.checkList(&list)
		}
		return
	}
}

func (r *caseRun) checkList(list *stepResult) {
	d := &r.c.Expect.Detail
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
	if d.SkipsReported && d.ToolsMaySkip == nil && list.err == nil && len(list.rejected) == 0 {
		r.failf("no tool is reported as left out")
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
	if bool(d.InitializeWithoutSession) && (seen.initializeWithSession || seen.saw["initialize"] == 0) {
		r.failf("initialize was sent with a session id, or never")
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
		each, sum := s.each(), 0
		for _, e := range each {
			n := len(e.reaches.starts)
			sum += n
			if d.AttemptsEach != nil && (s.parallel != nil || !r.parallel() && s.step.Op == "call") && !d.AttemptsEach.has(float64(n)) {
				r.failf("step %d, or one of its own, made %d attempts, want %v", i, n, d.AttemptsEach)
			}
			if waits := e.reaches.waits(); len(waits) > 0 {
				first[waits[0]] = true
			}
		}
		total += sum
		if want, ok := d.Attempts[i]; ok && !want.has(float64(sum)) {
			r.failf("step %d made %d attempts, want %v", i, sum, want)
		}
		if want, ok := d.WaitBeforeAttempt2MS[i]; ok && !want.any {
			for _, e := range each {
				if waits := e.reaches.waits(); len(waits) == 0 || !want.has(float64(waits[0])/1e6) {
					r.failf("step %d waited %v between attempts, want first %v ms", i, waits, want)
				}
			}
		}
	}
	if d.AttemptsTotal != nil && !d.AttemptsTotal.has(float64(total)) {
		r.failf("%d attempts in all, want %v", total, d.AttemptsTotal)
	}
	if d.DistinctFirstWaitsMin != nil && len(first) < int(*d.DistinctFirstWaitsMin) {
		r.failf("%d different first waits, want at least %d", len(first), *d.DistinctFirstWaitsMin)
	}
	waits, _ := r.c.waits()
	for i, want := range waits {
		for _, s := range r.results[i].each() {
			got := s.reaches.waits()
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
}

// parallel reports whether the case has a parallel step.
func (r *caseRun) parallel() bool {
	return slices.ContainsFunc(r.results, func(s stepResult) bool { return s.parallel != nil })
}

// waits reads waits_ms: a list of waits for the judged step, a list of such
// lists, or an object of them by step.
func (c *faultCase) waits() (map[int][]caseSpan, error) {
	raw := c.Expect.Detail.WaitsMS
	if raw == nil {
		return nil, nil
	}
	var judged []caseSpan
	if json.Unmarshal(raw, &judged) == nil && judged != nil {
		return map[int][]caseSpan{c.judged(): judged}, nil
	}
	steps := map[int][]caseSpan{}
	if strictly(raw, &steps) == nil {
		return steps, nil
	}
	var all [][]caseSpan
	if err := json.Unmarshal(raw, &all); err != nil || all == nil {
		return nil, fmt.Errorf("want waits, not %s (%v)", raw, err)
	}
	steps = map[int][]caseSpan{}
	for i, waits := range all {
		if waits != nil {
			steps[i] = waits
		}
	}
	return steps, nil
}

func (r *caseRun) checkFleet() {
	d := &r.c.Expect.Detail
	var ready, down []string
	if r.fleet == nil { // it did not start, and what was up is closed again
		for _, s := range r.results {
			down = append(down, blamed(s.err)...)
		}
	} else {
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

// blamed lists the servers that an error names.
func blamed(err error) (servers []string) {
	switch e := err.(type) {
	case interface{ origin() *Origin }:
		return []string{e.origin().Server}
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			servers = append(servers, blamed(err)...)
		}
	case interface{ Unwrap() error }:
		return blamed(e.Unwrap())
	}
	return servers
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
	op           string
	mu           sync.Mutex // guards the fields below
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
