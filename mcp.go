// Package mcp is a client for Model Context Protocol servers that cannot be
// trusted to behave.
//
// An MCP server is a third party in the hot path of an agent's run. This
// package answers with a declared policy per server: every reach for a server
// is bounded, faults are retried only where retrying is safe, a server that
// keeps failing stops being called, and an optional server degrades one
// capability instead of the whole agent. It is not a server framework, an
// agent, an OAuth implementation or a logger.
//
//	cfgs, err := mcp.LoadConfigs("servers.json")
//	…
//	fleet, err := mcp.Open(ctx, cfgs, nil)
//	…
//	defer fleet.Close()
//	for _, t := range fleet.Tools() {
//		… // offer t.Name, t.Description and t.InputSchema to the model
//	}
//	result := fleet.Answer(ctx, &mcp.Call{Tool: name, Arguments: args})
//
// # The chain
//
//	Config ─► Transport ─► Session ─► ResilientSession ─► Client ─► Fleet
//	          carries one   speaks     bounds, retries,    adopts    assembles many,
//	          request       MCP        breaks, observes    tools     degrades
//
// Each link wraps the one before behind a small interface, so each can be replaced, faked
// and tested alone. [New] composes a [Client] from one [Config], [Open] a [Fleet] from many.
// A type that has a constructor has no use for its zero value, unless its comment says so.
//
// # Time
//
// Each attempt at a call is bounded by [Config.CallTimeout] and by what is left of the
// run: the earlier of the context's deadline and [Options.Deadline]. Connecting, where a
// call has to, and the tool list have ceilings of their own. When a ceiling ends a wait,
// the error is [ReasonTimeout] and counts against the server; when the run does, it is a
// [BudgetError] and does not; when the caller cancels, it is [ReasonCancelled], around the
// caller's own. Ties go to the run. A run that usually has less time left than the ceiling
// never blames a server that hangs: keep CallTimeout well under the time that a run has.
//
// # Retrying
//
// Retries are off until [RetryConfig] asks for them, but for what was certainly not run:
// an HTTP endpoint is dialled up to three times, and a request whose connection or session
// was gone is sent once more, on a new one. What was not run may be repeated always; what may
// have run only if repeating is safe: reading, and calls with a [Call.IdempotencyKey] (or,
// if the operator says so, an annotation). The key travels in the request's `_meta` as
// idempotency-key. A [TransportError] says which it was: Sent. Waits are drawn evenly from
// zero to a doubling ceiling, after any Retry-After, and never outlast the run.
//
// # Errors
//
// Test for a kind with errors.Is(err, [ReasonTimeout]) and look inside with
// errors.As. An error of an operation names it, and the server as configured. No
// error has a word in its text that the server wrote, but a [ConfigError] about a
// tool may name it; what the server wrote is in fields: [TransportError.Raw],
// [RPCError.Message], [ProtocolError.Raw].
//
//	TransportError    no answer: disconnected, timeout, protocol, limit, unavailable, cancelled
//	RPCError          the answer is no: a JSON-RPC error
//	ProtocolError     the answer breaks the tool's own output schema
//	UnavailableError  the breaker refused, or a required server could not be adopted
//	BudgetError       the run is out of time
//	ArgumentError     the arguments do not fit; nothing was sent
//	SchemaError       a schema that cannot be held, or not checked within bounds
//	ConfigError       one problem of a configuration
//
// [ErrorResult] states any of them for a model, with a code of a closed list:
// INVALID_ARGUMENTS, UNKNOWN_TOOL, SERVER_UNAVAILABLE, RATE_LIMITED, TIMEOUT,
// BUDGET_EXCEEDED, DISCONNECTED, PROTOCOL, INVALID_RESULT, LIMIT, REFUSED,
// AUTH_REQUIRED, CANCELLED, SCHEMA, CONFIGURATION, UNEXPECTED.
//
// # Concurrency
//
// Everything is safe for concurrent use unless its comment says otherwise. A stdio
// server costs two goroutines while its child lives, one more after a slow call, and
// one for [Options.Stderr]; an HTTP server none while it is idle, unless [Config.Watch]
// or a handler keeps a stream open; the policy none ever; [Assemble] one a server until
// it returns. Close may be called at any time, more than once, and returns when what it
// ends has ended.
//
// # Security
//
// A child is started from an argv, never a shell, and inherits only the
// variables that [Config.EnvAllow] names. Redirects are never followed. Bytes,
// lines, pages, depth, schemas, patterns, work and time that a server can cause
// are bounded. No schema reference is ever fetched. In what [Fleet.Answer] gives a
// model, the server's text is marked as data, in an envelope that it cannot close;
// descriptions and schemas of tools are the server's own words as they came.
//
// # Degradation
//
// Nothing is substituted for a server that fails, unless [FallbackSession] is
// asked to, and then the result says so. An optional server that is down is
// stated once, in [Fleet.Notice]; one that fails later fails its calls, not the
// tool list. [Fleet.Readopt] brings back what has recovered.
//
// # Compatibility
//
// All revisions of the protocol from 2024-11-05 to 2026-07-28 are spoken.
// [Transport] and [Session] do not grow: new abilities arrive as optional
// interfaces, new data as fields.
package mcp

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Protocol revisions, newest first. A revision is compared against this list
// and never by its order as text (MCP 2026-07-28, versioning).
const (
	version2026 = "2026-07-28" // stateless: metadata on every request
	version2511 = "2025-11-25" // the newest that has a handshake
	version2506 = "2025-06-18"
	version2503 = "2025-03-26"
	version2411 = "2024-11-05"
)

// Config declares one server: how it is reached and what is demanded of it. It is a plain value: copy
// it, print it ([Config.String] shows no secret). A zero field means the default that its comment states.
type Config struct {
	// Name is the operator's word for the server: letters, digits, '_' and
	// '-'. Every error and span carries it.
	Name string

	// Transport is "stdio" or "http". Empty means by Command or Endpoint.
	Transport string

	// Command is the argv of a stdio server; never a shell string.
	Command []string
	// Dir is the child's working directory; empty means ours.
	Dir string
	// Env holds variables that are set for the child.
	Env map[string]string
	// EnvAllow names variables that the child inherits. It gets these and
	// Env, nothing else; on Windows SYSTEMROOT too, without which little starts.
	EnvAllow []string

	// Endpoint is the URL of an HTTP server.
	Endpoint string
	// Headers are sent with every HTTP request.
	Headers map[string]string

	// Protocol is a protocol revision, or "auto" (the default) to find out.
	Protocol string

	// Allow names the server's tools to adopt, nil for all. A name that the
	// server lacks is an error.
	Allow []string
	// Deny names the server's tools that are left out.
	Deny []string
	// Prefix, if set, makes model-facing names "prefix-name".
	Prefix string
	// Optional servers degrade one capability; the others are required.
	Optional bool

	ConnectTimeout   time.Duration // spawn or dial, and the handshake; 30 s
	DiscoveryTimeout time.Duration // the whole tool list; 15 s
	CallTimeout      time.Duration // one attempt at one call; 30 s
	ReadTimeout      time.Duration // how long a read may stall, over SSE a tool be silent; 30 s

	MaxMessageBytes int // one message, either way; 8 MiB
	MaxInFlight     int // requests outstanding at once; 32
	MaxTools        int // tools adopted; 128
	MaxSchemaBytes  int // schemas of all adopted tools together; 1 MiB
	MaxResultBytes  int // of a result that Answer hands to a model; 64 KiB

	// Retry says how often and how patiently a safe operation is repeated.
	Retry RetryConfig
	// BreakerFailures is how many consecutive faults stop the server being
	// called; 5. Negative means no breaker.
	BreakerFailures int
	// BreakerReset is the time, drawn up to a tenth longer, until one probe goes; 30 s.
	BreakerReset time.Duration

	// Arguments and Results say what a schema violation costs: "enforce"
	// (the default), "advise" or "off".
	Arguments string
	Results   string
	// Normalize repairs near-miss arguments before they are refused.
	Normalize bool
	// TrustAnnotations lets a tool that is annotated read-only or idempotent
	// be repeated without a key.
	TrustAnnotations bool
	// Pins maps tool names to the fingerprint that their schemas must have. The
	// error about one that does not fit says which it would have to be.
	Pins map[string]string
	// Watch keeps a stream open on which the server announces changes.
	Watch bool
}

// RetryConfig says how a safe operation is repeated. The zero value is one
// attempt, that is, no retry at all.
type RetryConfig struct {
	MaxAttempts   int           // attempts in all; the transport's tries at connecting use them up, too; 1
	BaseDelay     time.Duration // ceiling of the first wait; 200 ms
	MaxDelay      time.Duration // ceiling of any wait; 5 s
	MaxRetryAfter time.Duration // longest Retry-After that is obeyed; 60 s
}

// withDefaults returns a copy of c in which every zero field has its default.
// It is the one place where defaults are written down.
func (c Config) withDefaults() Config {
	if c.Transport == "" {
		if len(c.Command) > 0 {
			c.Transport = "stdio"
		} else if c.Endpoint != "" {
			c.Transport = "http"
		}
	}
	c.Protocol = cmp.Or(c.Protocol, "auto")
	c.Arguments = cmp.Or(c.Arguments, "enforce")
	c.Results = cmp.Or(c.Results, "enforce")
	c.ConnectTimeout = cmp.Or(c.ConnectTimeout, 30*time.Second)
	c.DiscoveryTimeout = cmp.Or(c.DiscoveryTimeout, 15*time.Second)
	c.CallTimeout = cmp.Or(c.CallTimeout, 30*time.Second)
	c.ReadTimeout = cmp.Or(c.ReadTimeout, 30*time.Second)
	c.MaxMessageBytes = cmp.Or(c.MaxMessageBytes, 8<<20)
	c.MaxInFlight = cmp.Or(c.MaxInFlight, 32)
	c.MaxTools = cmp.Or(c.MaxTools, 128)
	c.MaxSchemaBytes = cmp.Or(c.MaxSchemaBytes, 1<<20)
	c.MaxResultBytes = cmp.Or(c.MaxResultBytes, 64<<10)
	c.Retry.MaxAttempts = cmp.Or(c.Retry.MaxAttempts, 1)
	c.Retry.BaseDelay = cmp.Or(c.Retry.BaseDelay, 200*time.Millisecond)
	c.Retry.MaxDelay = cmp.Or(c.Retry.MaxDelay, 5*time.Second)
	c.Retry.MaxRetryAfter = cmp.Or(c.Retry.MaxRetryAfter, 60*time.Second)
	c.BreakerFailures = cmp.Or(c.BreakerFailures, 5)
	c.BreakerReset = cmp.Or(c.BreakerReset, 30*time.Second)
	return c
}

// Validate reports every problem of c at once: an [errors.Join] of *[ConfigError], or nil.
func (c Config) Validate() error {
	var errs []error
	for _, p := range c.problems() {
		p.Layer = "code"
		errs = append(errs, p)
	}
	return errors.Join(errs...)
}

// problems checks a whole Config. The layer of each problem is left open.
func (c Config) problems() (found []*ConfigError) {
	bad := func(key, value, detail string) {
		found = append(found, &ConfigError{Server: c.Name, Key: key, Value: value, Detail: detail})
	}
	if c.Name == "" || strings.Trim(c.Name, nameChars) != "" {
		bad("name", quoted(c.Name), "use letters, digits, '_' and '-'")
	}
	stdio := c.Transport == "stdio" || c.Transport == "" && len(c.Command) > 0
	switch {
	case c.Transport != "" && c.Transport != "stdio" && c.Transport != "http":
		bad("transport", quoted(c.Transport), `want "stdio" or "http"`)
	case len(c.Command) > 0 && c.Endpoint != "":
		bad("command", quoted(c.Command[0]), "a server has a command or an endpoint, not both")
	case stdio && (len(c.Command) == 0 || c.Command[0] == ""):
		bad("command", "", "a stdio server needs an argv")
	case !stdio && len(c.Command) > 0:
		bad("command", quoted(c.Command[0]), "an HTTP server takes no argv")
	case !stdio && c.Endpoint == "":
		bad("endpoint", "", "give a command or an endpoint")
	}
	if !stdio && c.Endpoint != "" {
		u, err := url.Parse(c.Endpoint)
		if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			bad("endpoint", quoted(cleanURL(c.Endpoint)), "want an absolute http or https URL")
		}
	}
	for _, k := range slices.Sorted(maps.Keys(c.Headers)) {
		switch {
		case !headerToken(k):
			bad("headers", quoted(nameOf(k)), "this is no header name")
		case reservedHeader(k):
			bad("headers", quoted(k), "the protocol sets this header itself")
		case strings.ContainsFunc(c.Headers[k], func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }):
			bad("headers", quoted(k), "the value has a control character in it")
		}
	}
	for _, k := range slices.Sorted(maps.Keys(c.Env)) {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.Contains(c.Env[k], "\x00") {
			bad("env", quoted(nameOf(k)), "no variable can be set like this")
		}
	}
	if c.Protocol != "" && c.Protocol != "auto" && !slices.Contains(revisions, c.Protocol) {
		bad("protocol", quoted(c.Protocol), `want "auto" or one of `+strings.Join(revisions, ", "))
	}
	for _, s := range settings {
		switch p := s.field(&c).(type) {
		case *time.Duration:
			if *p < 0 {
				bad(s.key, p.String(), "must not be negative")
			}
		case *int:
			if *p < 0 && s.key != "breaker_failures" {
				bad(s.key, strconv.Itoa(*p), "must not be negative")
			}
		}
	}
	for _, m := range [][2]string{{"arguments", c.Arguments}, {"results", c.Results}} {
		if v := m[1]; v != "" && v != "enforce" && v != "advise" && v != "off" {
			bad(m[0], quoted(v), `want "enforce", "advise" or "off"`)
		}
	}
	if c.Retry.MaxDelay > 0 && c.Retry.BaseDelay > c.Retry.MaxDelay {
		bad("retry.base_delay_seconds", c.Retry.BaseDelay.String(), "is longer than max_delay_seconds")
	}
	return found
}

// String shows c without the values of headers and variables, without the
// arguments of the command, and without user info and query of the URL.
func (c Config) String() string {
	b := append([]byte("mcp.Config{"), quoted(c.Name)...)
	if len(c.Command) > 0 {
		b = append(b, " command="+quoted(c.Command[0])+" +"+strconv.Itoa(len(c.Command)-1)...)
	}
	if c.Endpoint != "" {
		b = append(b, " endpoint="+quoted(cleanURL(c.Endpoint))...)
	}
	for _, m := range []struct {
		key  string
		vars map[string]string
	}{{"env", c.Env}, {"headers", c.Headers}} {
		if len(m.vars) > 0 {
			b = append(b, " "+m.key+"="...)
			for _, k := range slices.Sorted(maps.Keys(m.vars)) {
				b = append(b, nameOf(k)+","...)
			}
			b = b[:len(b)-1]
		}
	}
	if c.Optional {
		b = append(b, " optional"...)
	}
	return string(append(b, '}'))
}

// nameOf returns the name that a key of Headers or Env begins with: the rest of one
// that is no name may well be the value.
func nameOf(key string) string {
	if i := strings.IndexAny(key, ":= \t\r\n\x00"); i >= 0 {
		return key[:i] + "…"
	}
	return key
}

// GoString keeps secrets out of %#v too.
func (c Config) GoString() string { return c.String() }

// LogValue is what a [slog.Logger] shows of c: the same as String.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }

// MarshalText is what a log in JSON shows of c, also where it is one of many:
// the same as String, and nothing that could be read back.
func (c Config) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// Options is what is not declaration: hooks and shared clients. A nil *Options, like a zero one,
// means the default of every field. One Options may serve any number of servers and is not changed
// once it does; its hooks may be called concurrently unless their comment says otherwise.
type Options struct {
	// HTTPClient carries the requests of HTTP servers. It is copied, never
	// changed; the copy follows no redirect. Nil means a client of our own.
	HTTPClient *http.Client
	// Authorize returns the value of the Authorization header for a request; ""
	// leaves what is configured. It is asked again once, with the WWW-Authenticate
	// challenge, after a 401. Its error ends the request as ReasonUnavailable.
	Authorize func(ctx context.Context, challenge string) (string, error)
	// Handlers answer requests of the server by method:
	// "elicitation/create", "sampling/createMessage", "roots/list". The
	// capabilities that we declare follow from which of them exist.
	Handlers map[string]HandlerFunc
	// OnNotification sees the server's notifications, one after another and
	// in order. A queue that overflows drops the newest.
	OnNotification func(server, method string, params json.RawMessage)
	// Trace is called when a reach begins. The context it returns is used
	// for the reach; the function, if not nil, is called when it has ended.
	Trace func(ctx context.Context, r Reach) (context.Context, func(Health, error))
	// OnState sees each transition of a breaker, in order, outside any lock.
	OnState func(Health)
	// Meta returns members for the `_meta` of a request, such as traceparent.
	// Those of [Call.Meta] win.
	Meta func(ctx context.Context) map[string]any
	// Logger is silent when nil.
	Logger *slog.Logger
	// Stderr gets a copy of the children's stderr, each child's from a goroutine
	// of its own. A slow writer loses lines; it never blocks a child.
	Stderr io.Writer
	// Rand returns a number in [0, n); it is the source of jitter, and is called
	// by one goroutine at a time for each Client that [New] or [Open] composes.
	// Nil means a source of the session's own.
	Rand func(n int64) int64
	// ClientInfo names the program to servers. No Name means this library.
	ClientInfo ServerInfo
	// LocalNames are names of the agent's own tools, which no server's tool
	// may take.
	LocalNames []string
	// Deadline is the end of the run, beside that of the context: the earlier
	// wins. It is the policy that keeps it. Zero means none.
	Deadline time.Time
}

// A HandlerFunc answers a request of a server. Params and result are the JSON of the
// request's params and result. An [*RPCError] is sent as it is, any other error as a
// refusal without its text; in 2026-07-28, where a result asks, it ends the call.
type HandlerFunc func(ctx context.Context, server string, params json.RawMessage) (any, error)

// A Reason says why a transport failed. It is an error, so that
//
//	errors.Is(err, mcp.ReasonTimeout)
//
// is the common test.
type Reason string

const (
	// ReasonDisconnected: the child exited or the stream closed before the
	// answer had come.
	ReasonDisconnected Reason = "disconnected"
	// ReasonTimeout: a ceiling ended the wait, or a read stalled.
	ReasonTimeout Reason = "timeout"
	// ReasonProtocol: what came back was not protocol, or not an answer.
	ReasonProtocol Reason = "protocol"
	// ReasonLimit: a message ran past a bound, or no slot came free.
	ReasonLimit Reason = "limit"
	// ReasonUnavailable: the endpoint could not be reached, the process
	// would not start, or the server answered that it cannot serve now.
	ReasonUnavailable Reason = "unavailable"
	// ReasonCancelled: the caller gave up, and the error unwraps to
	// [context.Canceled] or [context.DeadlineExceeded]; or one of its handlers failed.
	ReasonCancelled Reason = "cancelled"
)

func (r Reason) Error() string { return string(r) }

// Origin says which operation an error belongs to. It is embedded in the error
// types of this package, but for those about a schema, a setting or a saga.
type Origin struct {
	Server   string // the name in the server's Config; empty if no server is concerned
	Op       string // "connect", "tools/list", "tools/call", …
	Call     string // the id of the operation, as in its span and log lines; empty if it has none
	Attempts int    // attempts made, the transport's own tries included
	GaveUp   string // why no further attempt was made: see [Guard.Do]
}

// origin lets the policy find the Origin inside any error of this package.
func (o *Origin) origin() *Origin { return o }

// An originator is an error of this package.
type originator interface {
	error
	origin() *Origin
}

// prefix is the head of every error text.
func (o *Origin) prefix() string {
	s := "mcp: "
	if o.Server != "" {
		s += "server " + strconv.Quote(o.Server) + ": "
	}
	if o.Op != "" {
		s += o.Op + ": "
	}
	return s
}

// rawLimit bounds the bytes of a server that an error keeps.
const rawLimit = 4 << 10

// clip copies at most rawLimit bytes of what a server wrote.
func clip(b []byte) []byte {
	return append([]byte(nil), b[:min(len(b), rawLimit)]...)
}

// A TransportError is a request that was not answered.
type TransportError struct {
	Origin
	Reason Reason
	// Sent reports whether the server may have run the request. It is false
	// only where that is certain: nothing was written, or the answer was
	// "not run" (429, an unknown session, 401 where there is [Options.Authorize]).
	Sent bool
	// Status is the HTTP status, 0 if there was none.
	Status int
	// RetryAfter is how long the server asked to be left alone, 0 if it did
	// not say.
	RetryAfter time.Duration
	// Tries is how often the transport itself tried to connect, 0 if it
	// does not say.
	Tries int
	// Detail is a few words of our own: "exit status 3", "text/html".
	Detail string
	// Raw is what the server wrote, cut to 4 KiB: the head of a body, the
	// target of a redirect, a challenge, the last lines of a dead child's
	// stderr. It is not part of the text.
	Raw []byte
	// Err is the cause, if one is known; never made of the server's words.
	Err error
}

func (e *TransportError) Error() string {
	s := e.prefix() + string(e.Reason)
	if e.Status != 0 {
		s += ": HTTP status " + strconv.Itoa(e.Status)
	}
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	if e.Tries > 1 {
		s += " (" + strconv.Itoa(e.Tries) + " tries)"
	}
	return s
}

// Unwrap returns the cause.
func (e *TransportError) Unwrap() error { return e.Err }

// Is reports whether target is the error's [Reason].
func (e *TransportError) Is(target error) bool { return target == error(e.Reason) }

// Retryable is the transport's word about itself: true for unavailable and
// timeout only. Whether an operation is repeated is the policy's decision,
// which knows more.
func (e *TransportError) Retryable() bool {
	return e.Reason == ReasonUnavailable || e.Reason == ReasonTimeout
}

// Timeout reports whether a ceiling ended the wait.
func (e *TransportError) Timeout() bool { return e.Reason == ReasonTimeout }

// An RPCError is a JSON-RPC error: the server's answer is no. What the server
// wrote is in Message and Data, not in the text.
type RPCError struct {
	Origin
	Code    int             // the JSON-RPC code
	Message string          // the server's words, cut to 4 KiB
	Data    json.RawMessage // the server's data, nil if it is over 64 KiB
	Status  int             // the HTTP status that it came with, 0 if none
}

func (e *RPCError) Error() string {
	return e.prefix() + "refused: JSON-RPC error " + strconv.Itoa(e.Code) + rpcCodes[e.Code]
}

// rpcCodes names the codes that the protocol assigns.
var rpcCodes = map[int]string{
	-32700: " (parse error)", -32600: " (invalid request)", -32601: " (method not found)",
	-32602: " (invalid params)", -32603: " (internal error)", -32002: " (resource not found)",
	-32020: " (header mismatch)", -32021: " (missing client capability)",
	-32022: " (unsupported protocol version)", -32042: " (URL elicitation required)",
}

// A ProtocolError is an answer that is none: a result outside its tool's schema, or a
// promise of structured content that was not kept. What breaks the protocol in any other
// way is a [TransportError]; errors.Is with [ReasonProtocol] holds for both.
type ProtocolError struct {
	Origin
	Detail string  // what is wrong, in our words
	Issues []Issue // where a schema was violated; no values
	Raw    []byte  // the offending payload, cut to 4 KiB
	Result *Result // the result as the server gave it, if there was one
}

func (e *ProtocolError) Error() string { return e.prefix() + "protocol: " + e.Detail }

// Is reports whether target is [ReasonProtocol].
func (e *ProtocolError) Is(target error) bool { return target == error(ReasonProtocol) }

// An UnavailableError is a refusal of ours: the breaker is not closed, and nothing was
// sent; or it is, and a required server could not be adopted, for the reason in Err.
type UnavailableError struct {
	Origin
	State      BreakerState
	RetryAfter time.Duration // a lower bound, 0 if unknown
	Err        error         // the fault that led here, if known
}

func (e *UnavailableError) Error() string {
	s := e.prefix() + "unavailable"
	if e.State != BreakerClosed {
		s += ": breaker " + e.State.String()
	}
	if e.RetryAfter > 0 {
		s += ": try again in " + e.RetryAfter.Round(time.Millisecond).String()
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap returns the fault that led here.
func (e *UnavailableError) Unwrap() error { return e.Err }

// Is reports whether target is [ReasonUnavailable].
func (e *UnavailableError) Is(target error) bool { return target == error(ReasonUnavailable) }

// A BudgetError is a run that is out of time. It is not the server's fault.
type BudgetError struct {
	Origin
	Breached string // "run_seconds"
	Sent     bool   // whether the server may have run the request
	Err      error  // [context.DeadlineExceeded], and the last fault if there was one
}

func (e *BudgetError) Error() string {
	return e.prefix() + "the run is out of time (" + e.Breached + ")"
}

// Unwrap returns the cause.
func (e *BudgetError) Unwrap() error { return e.Err }

// Timeout reports true: a deadline passed, though not the server's.
func (e *BudgetError) Timeout() bool { return true }

// An ArgumentError is a call that did not fit its tool's input schema. Nothing
// was sent. Its text names the keywords that were broken, and neither places nor
// values; [ArgumentError.Feedback] is for the model and has them.
type ArgumentError struct {
	Origin
	Tool    string
	Unknown bool    // there is no such tool
	Issues  []Issue // at most eight
	More    bool    // whether there were more
}

func (e *ArgumentError) Error() string {
	if e.Unknown {
		return e.prefix() + "there is no tool " + quoted(e.Tool)
	}
	s := e.prefix() + "arguments for tool " + quoted(e.Tool) + " do not fit its input schema"
	var broken []string // paths are the server's words
	for _, is := range e.Issues {
		if !slices.Contains(broken, is.Keyword) {
			broken = append(broken, is.Keyword)
		}
	}
	if broken != nil {
		s += " (" + strings.Join(broken, ", ") + ")"
	}
	return s
}

// Feedback says to a model what to correct, field by field, in at most 2 KiB.
// It quotes values of the call and names from the schema, which is the server's.
func (e *ArgumentError) Feedback() string {
	if e.Unknown {
		s := "There is no tool " + quoted(e.Tool) + "; nothing was sent."
		if len(e.Issues) > 0 && e.Issues[0].Want != "" {
			s += " D" + strings.TrimPrefix(e.Issues[0].Want, "d")
		}
		return s
	}
	return feedback(e.Tool, e.Issues, e.More)
}

// A ConfigError is one problem of a configuration.
type ConfigError struct {
	Server string // the name, or the position in the list if it has none
	Key    string // the key as the file spells it
	Layer  string // "file", "environment", "code"; empty for what a server does not meet
	Value  string // what was given; secrets are masked
	Detail string // what is wrong, and what to do
}

func (e *ConfigError) Error() string {
	s := "mcp: config"
	if e.Server != "" {
		s += ": server " + strconv.Quote(e.Server)
	}
	if e.Key != "" {
		s += ": " + e.Key
	}
	if e.Value != "" {
		s += " = " + e.Value
	}
	if e.Layer != "" {
		s += " (" + e.Layer + ")"
	}
	return s + ": " + e.Detail
}

// A Transport carries one request at a time to a server, or many at once. Most
// users never call it: [New] composes one. It is the seam for carriers written
// elsewhere, and changes only under the promise of the package comment; new
// abilities arrive as optional interfaces.
//
// All methods are safe for concurrent use. None outlives its context. An error is a
// *[TransportError], of Call also an *[RPCError].
type Transport interface {
	// Open makes sure that there is a connection, and reports whether it is
	// a new one, on which a handshake is due. It returns at once when the
	// connection stands. The Inbound of the first call stays in force.
	Open(ctx context.Context, in Inbound) (fresh bool, err error)
	// Call sends a request and returns the `result` member of its answer,
	// which the caller owns, or an *RPCError if the server refused.
	Call(ctx context.Context, req *Request) (json.RawMessage, error)
	// Notify sends a notification.
	Notify(ctx context.Context, req *Request) error
	// Close ends the connection and everything that serves it. It may be
	// called more than once, and beside the others.
	Close() error
}

// Inbound is what a transport does with messages that answer no request.
type Inbound struct {
	// Notify takes a notification. It does not block, and is called in the
	// order of arrival. Params are the receiver's own.
	Notify func(method string, params json.RawMessage)
	// Request answers a request of the server. The transport calls it on a
	// goroutine that its Close ends, at most eight at a time, and sends what
	// it returns. An *RPCError is sent as it is.
	Request func(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error)
}

// A Request is what a session asks a transport to carry. Fields may be added.
type Request struct {
	// Method is the JSON-RPC method.
	Method string
	// Params is a whole JSON object, or nil. It is not changed, and not kept
	// after Call returns.
	Params json.RawMessage
	// Version is the protocol revision that the request is made under; empty
	// for `initialize` and for what follows it before a revision is agreed.
	Version string
	// Name is the tool, prompt, resource or task that the request is about,
	// for the Mcp-Name header of 2026-07-28.
	Name string
	// Header holds the arguments that 2026-07-28 mirrors into Mcp-Param-*
	// headers, by the name after that prefix; not yet encoded.
	Header map[string]string
	// Deadline is the ceiling of the request, beside the context's: the
	// earlier wins. When it passes, the error is ReasonTimeout. Zero means
	// none.
	Deadline time.Time
	// Stream marks a request whose answer comes when a stream ends
	// (subscriptions/listen): no read stall applies.
	Stream bool

	// conn, if not 0, is the number of the connection on which the Version was
	// agreed, as [numbersConnections] has it: nobody has been asked on another one.
	conn int

	// to, if not nil, is handed the result where it lies, in a buffer of a
	// transport of ours, whose Call then returns none.
	to receiver
}

// A receiver decodes a result, of which it keeps nothing. It may be given bytes
// that are no result, which is an error, and the result itself after that.
type receiver interface{ receive(result []byte) error }

// settle hands over the result in msg, whose envelope nobody has read yet, and
// reports whether that was all there is to it: it is the answer to id, and sound.
// Anything else has to be read again, with more care.
func (r *Request) settle(msg []byte, id int64) bool {
	n, result, ok := cutAnswer(msg)
	return ok && n == id && r.to != nil && r.to.receive(result) == nil
}

// NewTransport returns the transport that cfg declares, not yet connected. An endpoint
// that is none is a *[ConfigError]; for the rest, see [Config.Validate].
func NewTransport(cfg Config, o *Options) (Transport, error) {
	cfg = cfg.withDefaults()
	if o == nil {
		o = &Options{}
	}
	if cfg.Transport == "stdio" {
		return newStdioTransport(cfg, o), nil
	}
	return newHTTPTransport(cfg, o)
}

// A Session speaks MCP with one server. It is the seam under the policy:
// [ResilientSession] wraps any of them.
type Session interface {
	// Initialize connects, if need be, and says what the server is.
	Initialize(ctx context.Context) (*ServerInfo, error)
	// ListTools reads the whole tool list.
	ListTools(ctx context.Context) ([]Tool, error)
	// CallTool calls a tool. A tool's own failure is a Result with IsError.
	CallTool(ctx context.Context, call *Call) (*Result, error)
	// Close ends the session; it may be called more than once.
	Close() error
}

// A Call is one call of a tool.
type Call struct {
	// Tool is the tool's name: at a [Session] the server's own, at a
	// [Client] and a [Fleet] the one that its Tools list.
	Tool string
	// Arguments encode to a JSON object; nil means {}.
	Arguments any
	// IdempotencyKey promises that the server runs the call at most once
	// under this key, which makes it safe to repeat. It travels in `_meta`
	// as idempotency-key.
	IdempotencyKey string
	// Meta holds further members of the request's `_meta`.
	Meta map[string]any
	// OnProgress, if set, sees the server's progress, in order, while the call runs.
	OnProgress func(Progress)

	repeatable bool              // a trusted annotation allows repeating
	header     map[string]string // see Request.Header
	tool       resultChecker     // what the result is held to; nil if nothing
	checked    bool              // the policy has held the result to it
}

// A resultChecker holds a result to what its tool promised. The policy asks it
// within the reach, so that a broken promise is seen where it happened.
type resultChecker interface {
	check(context.Context, *Result) error
}

// Progress is a report of a server on a running call. Total is 0 if unknown.
type Progress struct {
	Progress, Total float64
	Message         string // the server's words
}

// A Result is what a tool answered, whole and as the server gave it.
type Result struct {
	Content    []Content
	Structured json.RawMessage // structuredContent; nil if absent
	IsError    bool            // the tool itself failed
	// Degraded says why the result is not the server's own answer to this
	// call ("cached …", "stub …"); empty for every genuine result.
	Degraded string
	Meta     json.RawMessage // `_meta`; nil if absent
	// Issues are violations of a schema that "advise" let pass, and what
	// [Config.Normalize] has repaired.
	Issues []Issue
}

// Text returns the text blocks of the result, joined by newlines.
func (r *Result) Text() string {
	if len(r.Content) == 1 && r.Content[0].Type == "text" {
		return r.Content[0].Text
	}
	var b strings.Builder
	for _, c := range r.Content {
		if c.Type == "text" {
			if b.Len() > 0 {
				b.WriteByte('\n')
			}
			b.WriteString(c.Text)
		}
	}
	return b.String()
}

// Content is one block of a result. Type is "text", "image", "audio",
// "resource_link", "resource", or one that we do not know.
type Content struct {
	Type     string
	Text     string // of a text block or an embedded text resource
	Data     string // base64, of an image, audio or an embedded blob
	MIMEType string
	URI      string // of a link or an embedded resource
	Name     string // of a link
	// Raw is the block as it came, unless it holds no more than its text.
	Raw json.RawMessage
}

// A Tool is a tool as the server described it.
type Tool struct {
	Name         string // at a Client and a Fleet: the model-facing name
	Title        string
	Description  string
	InputSchema  json.RawMessage // as it came; nil if absent
	OutputSchema json.RawMessage // as it came; nil if absent
	ReadOnly     bool            // hints; nobody vouches for them
	Idempotent   bool
	Destructive  bool            // true unless the server says otherwise
	TaskSupport  string          // execution.taskSupport of 2025-11-25
	Raw          json.RawMessage // annotations, icons, _meta …: the rest, nil if there is none

	Server string // set at adoption: the Config's name
	Remote string // set at adoption: the server's own name for the tool
}

// ServerInfo says what a program calls itself. Nothing vouches for it.
type ServerInfo struct {
	Name, Title, Version string
	// Protocol is the revision agreed upon. The fields from here on are
	// ignored in [Options.ClientInfo].
	Protocol     string
	Capabilities json.RawMessage
	Instructions string
}

// errNoAnswer is what Inbound.Request returns for a request that must not be
// answered at all (MCP 2026-07-28: a client sends no responses).
var errNoAnswer = &RPCError{Code: 0}

// honoursDeadline marks transports that obey Request.Deadline. The others get
// a derived context.
type honoursDeadline interface{ honoursDeadline() }

// boundsItself marks sessions that keep the ceilings of their Config on their
// own and report ReasonTimeout when one has passed; the policy then derives no
// context. The others get one.
type boundsItself interface{ boundsItself() }

// requester is the optional interface of sessions that carry any method.
type requester interface {
	Request(ctx context.Context, method string, params, out any) error
}

// numbersConnections marks transports that number their connections from 1, and carry no
// request on another connection than it was made for. A transport that others
// have wrapped is not asked, so that its requests have no number.
type numbersConnections interface{ connection() int }

// listener is the optional interface of transports that can hold the server's
// own stream open (the GET stream of the older revisions). It waits a moment
// for the server to open it; Close ends it.
type listener interface {
	listen(ctx context.Context, version string)
}

// A TransportSession speaks MCP over a [Transport]: it finds the protocol
// revision, connects when an operation needs it and again when the connection
// was lost, once for all who noticed, and keeps the ceilings of its Config.
// It is safe for concurrent use, has no goroutine while it is idle, and
// retries nothing but what certainly was not run because the connection was
// gone: that is policy, and [ResilientSession]'s.
type TransportSession struct {
	t      Transport
	cfg    *Config // not changed; a pointer, behind which fmt does not look for secrets
	o      *Options
	direct bool // the transport obeys Request.Deadline
	ours   bool // the transport is one of ours, with nobody's around it, and takes a receiver
	link   atomic.Pointer[link]
	token  atomic.Int64   // of the latest progress token
	wg     sync.WaitGroup // the listening stream, which Close ends

	kept buffers // for params

	mu       sync.Mutex  // guards the fields below
	attempt  *attempt    // the connecting that is under way; nil if none
	agreed   *link       // the latest agreement, if it may hold; outlives a doubt about the connection
	info     *ServerInfo // of the latest agreement, whether it holds or not
	version  string      // the revision to offer to a server that is known; "" if it is not
	renewed  func(context.Context)
	progress map[string]func(Progress) // by progress token
	queue    []delivery                // notifications on their way to the user
	queued   int                       // bytes in queue
	dropped  int                       // notifications that found the queue full
	badTools int                       // entries of the latest list that were no tools
	changed  bool                      // the server has announced a change of its tools
	deaf     bool                      // a stream of its announcements has ended, and none has begun since
	fresh    time.Time                 // until when the tool list is fresh; zero = not said
	idle     chan struct{}             // closed by the goroutine that delivers the queue when it ends; nil if there is none
	unwatch  context.CancelFunc        // ends the subscriptions/listen stream, if any
	closed   bool
}

// A link is what was agreed on one connection. It does not change.
type link struct {
	version string
	meta    []byte // the `_meta` members of every request, each with a comma behind it
	info    *ServerInfo
	conn    int // see Request.conn
}

// An attempt is one connecting, shared by all who wait for it.
type attempt struct {
	done chan struct{} // closed when link or err is set
	link *link
	err  error
}

const (
	maxPages  = 256                    // of one list
	maxRounds = 8                      // of one multi-round-trip request
	maxQueue  = 1024                   // notifications that wait for the user
	handover  = 100 * time.Millisecond // for the last progress of a call
)

// farewell is how either side gives a request up (MCP 2025-11-25, cancellation).
const farewell = "notifications/cancelled"

// tooMany is the detail of an error about more than maxEntries of anything.
const tooMany = "the result has more than 16,384 entries"

// errCeiling marks contexts that a ceiling of ours has ended.
var errCeiling = errors.New("ceiling")

// NewSession returns a session over t. Nothing is sent before the first
// operation. A nil o means the defaults.
func NewSession(t Transport, cfg Config, o *Options) *TransportSession {
	if o == nil {
		o = &Options{}
	}
	cfg = cfg.withDefaults()
	s := &TransportSession{t: t, cfg: &cfg, o: o, kept: buffers{spares: newSpares()}, progress: map[string]func(Progress){}, unwatch: func() {}}
	_, s.direct = t.(honoursDeadline)
	switch t.(type) {
	case *StdioTransport, *HTTPTransport:
		s.ours = true
	}
	return s
}

func (s *TransportSession) boundsItself() {}

// Initialize connects if there is no connection and returns what the server
// says of itself. It is bounded by [Config.ConnectTimeout].
func (s *TransportSession) Initialize(ctx context.Context) (*ServerInfo, error) {
	l, err := s.connect(ctx)
	if err != nil {
		return nil, err
	}
	return l.info, nil
}

// ListTools reads all pages of the tool list, bounded by
// [Config.DiscoveryTimeout]. A cursor that comes back, or a list without end,
// is an error; an entry that is no tool is left out.
func (s *TransportSession) ListTools(ctx context.Context) ([]Tool, error) {
	l, err := s.connect(ctx)
	if err != nil {
		return nil, err
	}
	if caps := l.info.Capabilities; caps != nil && member(caps, "tools") == nil {
		return nil, nil
	}
	s.mu.Lock()
	s.changed = false
	s.mu.Unlock()
	var (
		page  toolPage
		tools []Tool
		bad   int
		ttl   int64 = -1
		begun       = time.Now()
		list        = pager{limit: s.cfg.MaxMessageBytes}
	)
	for more := true; more; more = page.cursor != nil {
		page, err = s.toolPage(ctx, page.cursor, &list, s.cfg.DiscoveryTimeout-time.Since(begun))
		if err == nil && len(tools)+len(page.tools) > maxEntries { // a tool takes ten times the memory that it took on the wire
			err = s.failure("tools/list", ReasonLimit, tooMany, nil)
		}
		if err != nil {
			return nil, err
		}
		if bad += page.bad; tools == nil {
			tools = page.tools // most lists have one page
		} else {
			tools = append(tools, page.tools...)
		}
		if ttl < 0 || page.ttlMs < ttl {
			ttl = page.ttlMs
		}
	}
	s.mu.Lock()
	s.badTools, s.fresh = bad, time.Time{}
	if ttl >= 0 {
		s.fresh = begun.Add(time.Duration(min(ttl, 1<<40)) * time.Millisecond)
	}
	s.mu.Unlock()
	return tools, nil
}

// toolPage reads the page of the tool list to which cursor leads (MCP 2026-07-28,
// pagination): the end is a missing cursor, and an empty one is as good as any.
func (s *TransportSession) toolPage(ctx context.Context, cursor *string, list *pager, ceiling time.Duration) (page toolPage, err error) {
	d := dialog{s: s, req: Request{Method: "tools/list"}, ceiling: ceiling}
	if ceiling <= 0 {
		return page, s.failure("tools/list", ReasonTimeout, "the whole list takes too long", nil)
	}
	if cursor != nil {
		d.params = func(b []byte) ([]byte, error) {
			return append(appendString(append(b, `"cursor":`...), *cursor), ','), nil
		}
	}
	size := 0
	d.read = func(result []byte) (err error) {
		page, err = decodeToolPage(result)
		size = len(result)
		return err
	}
	if err = s.converse(ctx, &d); err != nil {
		return page, err
	}
	if reason, detail := list.next(page.cursor, size); detail != "" {
		return page, s.failure("tools/list", reason, detail, nil)
	}
	return page, nil
}

// A pager keeps a list from going on for ever.
type pager struct {
	limit int // half the bytes of all pages together
	seen  []string
	total int
}

// next takes note of a page, and says what is wrong with following its cursor.
func (p *pager) next(cursor *string, size int) (Reason, string) {
	p.total += size
	switch {
	case p.total/2 > p.limit:
		return ReasonLimit, "the list is longer than twice max_message_bytes"
	case cursor == nil:
		return "", ""
	case slices.Contains(p.seen, *cursor):
		return ReasonProtocol, "a cursor came back that had been followed already"
	case len(p.seen) == maxPages-1:
		return ReasonLimit, "the list has more than " + strconv.Itoa(maxPages) + " pages"
	}
	p.seen = append(p.seen, *cursor)
	return "", ""
}

// CallTool calls a tool by the server's own name for it. Requests for input that come
// back instead of a result are answered by [Options.Handlers], at most eight times.
// [Config.CallTimeout] bounds each of these rounds; the handlers' time does not count.
func (s *TransportSession) CallTool(ctx context.Context, call *Call) (*Result, error) {
	d := dialog{s: s, req: Request{Method: "tools/call", Name: call.Tool, Header: call.header}, call: call, ceiling: s.cfg.CallTimeout}
	if err := s.converse(ctx, &d); err != nil {
		return nil, err
	}
	return &d.result.Result, nil
}

// Request sends any request and decodes its result into out, which may be nil or a
// *[json.RawMessage]. Params encode to a JSON object, or are nil. It is bounded as
// CallTool is.
func (s *TransportSession) Request(ctx context.Context, method string, params, out any) error {
	d := dialog{s: s, req: Request{Method: method}, ceiling: s.cfg.CallTimeout}
	if params != nil {
		b, err := appendValue(nil, params)
		if err != nil || len(b) < 2 || b[0] != '{' {
			return d.unfit()
		}
		for _, key := range []string{"name", "uri", "taskId"} { // MCP 2026-07-28: what Mcp-Name mirrors
			if name, _ := decodeValue(member(b, key)); d.req.Name == "" {
				d.req.Name, _ = name.(string)
			}
		}
		d.params = func(dst []byte) ([]byte, error) {
			if inner := bytes.TrimSpace(b[1 : len(b)-1]); len(inner) > 0 {
				dst = append(append(dst, inner...), ',')
			}
			return dst, nil
		}
	}
	d.read = func(result []byte) error {
		if !isValue(result) { // encoding/json is less strict
			return errSyntax
		}
		switch out := out.(type) {
		case nil:
			return nil
		case *json.RawMessage:
			*out = bytes.Clone(result)
			return nil
		}
		return json.Unmarshal(result, out)
	}
	return s.converse(ctx, &d)
}

// Close ends the session and its transport. Operations in flight end with an
// error. It may be called more than once.
func (s *TransportSession) Close() error {
	s.mu.Lock()
	s.closed = true
	idle, unwatch := s.idle, s.unwatch
	s.mu.Unlock()
	unwatch()
	err := s.t.Close()
	s.wg.Wait()
	s.await(context.Background(), idle)
	return err
}

// onReconnect sets what is called, before the operation goes on, whenever a
// connection has replaced a lost one.
func (s *TransportSession) onReconnect(f func(context.Context)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.renewed = f
}

// stale reports whether the tool list may have changed since it was read: the
// server said so, or the time for which it vouched has passed.
func (s *TransportSession) stale() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed || !s.fresh.IsZero() && time.Now().After(s.fresh)
}

// serverInfo returns the agreement in force, or the latest; nil before any.
func (s *TransportSession) serverInfo() *ServerInfo {
	if l := s.link.Load(); l != nil {
		return l.info
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.info
}

// malformed returns how many entries of the latest list were no tools.
func (s *TransportSession) malformed() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.badTools
}

// A dialog is one request, with all the rounds that it takes.
type dialog struct {
	s       *TransportSession
	req     Request // of the latest round
	call    *Call   // of tools/call; nil otherwise
	ceiling time.Duration
	params  func([]byte) ([]byte, error) // appends members, each with a comma behind it; may be nil
	read    func(result []byte) error    // decodes the result of anything but tools/call; see receiver
	token   string                       // of its progress; "" if nobody wants to see it
	answers []byte                       // inputResponses of the latest round; nil before it

	received bool        // the latest round has its result
	result   *toolResult // of tools/call
	round    *round      // of 2026-07-28; nil before
}

// receive decodes the result of a round.
func (d *dialog) receive(result []byte) (err error) {
	want := "the result is not of the expected shape"
	modern := d.req.Version == version2026
	d.round = nil // the server may have gone back to an older revision
	switch {
	case d.call != nil:
		want = "the result is not one of a tool"
		if d.result, err = decodeToolResult(result); err == nil && modern {
			d.round = &d.result.round
		}
	case modern:
		d.round, err = decodeRound(result)
	}
	if err == nil && d.complete() {
		if d.call == nil {
			err = d.read(result)
		} else if d.result.noContent {
			err = errSyntax
		}
	}
	switch {
	case err == errLimit:
		return d.s.failure(d.req.Method, ReasonLimit, tooMany, result)
	case err != nil:
		return d.s.failure(d.req.Method, ReasonProtocol, want, result)
	}
	d.received = true
	return nil
}

// complete reports whether there is no further round.
func (d *dialog) complete() bool {
	return d.round == nil || d.round.resultType == "complete" || d.round.resultType == ""
}

// unfit is the refusal of a request that cannot be written as JSON.
func (d *dialog) unfit() error {
	e := &ArgumentError{Origin: Origin{Server: d.s.cfg.Name, Op: d.req.Method}, Tool: d.req.Method, Issues: []Issue{{Keyword: "type", Want: "an object that can be written as JSON"}}}
	if d.call != nil {
		e.Tool = d.call.Tool
	}
	return e
}

// converse connects if need be, sends the request and has its result received.
// What certainly was not run because the connection was gone is sent once more
// on a new one.
func (s *TransportSession) converse(ctx context.Context, d *dialog) error {
	if d.call != nil && d.call.OnProgress != nil {
		d.token = s.beginProgress(d.call.OnProgress)
		defer s.endProgress(ctx, d.token)
	}
	room := 0
	if d.call != nil {
		room = roughSize(d.call.Arguments)
	}
	buf := s.kept.take(room)
	defer s.kept.give(buf)
	if s.ours {
		d.req.to = d
	}
	again := false
	for round := 1; ; {
		l, err := s.connect(ctx)
		if err != nil {
			return err
		}
		if *buf, err = s.appendParams(ctx, (*buf)[:0], l, d); err != nil {
			return d.unfit()
		}
		d.req.Params, d.req.Version, d.req.conn = *buf, l.version, l.conn
		if len(*buf) == len("{}") {
			d.req.Params = nil
		}
		if err = s.send(ctx, d); err != nil {
			if s.lost(l, err) && !again {
				again = true
				continue
			}
			return err
		}
		switch {
		case d.complete():
			return nil
		case d.round.resultType != "input_required":
			return s.failure(d.req.Method, ReasonProtocol, "the result is of a type that was not asked for", nil)
		case round > maxRounds:
			return s.failure(d.req.Method, ReasonLimit, "the server asks for input again and again", nil)
		}
		if err = s.answerInput(ctx, d, round); err != nil {
			return err
		}
		round++
	}
}

// send carries one round under a ceiling that begins now. A run that ends first
// is the caller's business, so no ceiling is set beside it.
func (s *TransportSession) send(ctx context.Context, d *dialog) error {
	end := time.Now().Add(d.ceiling)
	d.req.Deadline = time.Time{}
	if run, ok := ctx.Deadline(); !ok || end.Before(run) {
		d.req.Deadline = end
	}
	inner := ctx
	if !s.direct && !d.req.Deadline.IsZero() {
		var cancel context.CancelFunc
		inner, cancel = context.WithDeadlineCause(ctx, d.req.Deadline, errCeiling)
		defer cancel()
	}
	d.received = false
	result, err := s.t.Call(inner, &d.req)
	if err != nil {
		return s.named(ceilingError(inner, err), d.req.Method)
	}
	if d.received {
		return nil
	}
	return d.receive(result)
}

// named says whose error it is, where a transport does not know.
func (s *TransportSession) named(err error, op string) error {
	o, ok := err.(originator)
	if !ok || o.origin().Server != "" {
		return err
	}
	o = ownCopy(o).(originator) // it may have been given to others too
	o.origin().Server, o.origin().Op = s.cfg.Name, cmp.Or(o.origin().Op, op)
	return o
}

// ceilingError turns the end of a context that a ceiling of ours has ended into
// a timeout; the caller did not give up.
func ceilingError(ctx context.Context, err error) error {
	var te *TransportError
	if err == nil || context.Cause(ctx) != errCeiling || !errors.As(err, &te) || te.Reason != ReasonCancelled {
		return err
	}
	te = copied(te) // it may have been given to others too
	te.Reason, te.Err = ReasonTimeout, nil
	return te
}

// lost notes what a failed request says about the connection, and reports
// whether the request certainly was not run and should be sent once more.
func (s *TransportSession) lost(l *link, err error) bool {
	var te *TransportError
	if errors.As(err, &te) && te.Reason == ReasonDisconnected {
		s.link.CompareAndSwap(l, nil)
		return !te.Sent
	}
	// The server may have changed under us (MCP 2026-07-28, versioning).
	var re *RPCError
	version := ""
	switch {
	case l.version != version2026:
		return false
	case errors.As(err, &re) && re.Code == -32022:
		if version = mutual(re.Data, "supported"); version == version2026 {
			return false
		}
	case re != nil && (re.Status == 400 || re.Status == 404) && re.Code <= -32000 && re.Code >= -32019,
		te != nil && te.Reason == ReasonProtocol && (te.Status == 400 || te.Status == 404):
		// As one of an older revision refuses what belongs to no session.
	default:
		return false
	}
	s.mu.Lock()
	if s.agreed == l {
		s.version, s.agreed = version, nil
	}
	s.mu.Unlock()
	s.link.CompareAndSwap(l, nil)
	return version != ""
}

// appendParams appends the params of one round of d.
func (s *TransportSession) appendParams(ctx context.Context, b []byte, l *link, d *dialog) ([]byte, error) {
	var err error
	b = append(b, '{')
	if d.params != nil {
		if b, err = d.params(b); err != nil {
			return nil, err
		}
	}
	var key string
	var meta map[string]any
	if d.call != nil {
		b = append(appendString(append(b, `"name":`...), d.call.Tool), `,"arguments":`...)
		start := len(b)
		if b, err = appendValue(b, d.call.Arguments); err != nil {
			return nil, err
		}
		if string(b[start:]) == "null" { // of nil, whatever its type; servers refuse it
			b = append(b[:start], "{}"...)
		}
		b = append(b, ',')
		key, meta = d.call.IdempotencyKey, d.call.Meta
	}
	if d.answers != nil {
		b = append(append(append(b, `"inputResponses":`...), d.answers...), ',')
	}
	if d.round != nil && d.round.requestState != nil {
		b = append(appendString(append(b, `"requestState":`...), *d.round.requestState), ',')
	}
	start := len(b)
	b = append(b, `"_meta":{`...)
	empty := len(b)
	b = append(b, l.meta...)
	if d.token != "" {
		b = append(appendString(append(b, `"progressToken":`...), d.token), ',')
	}
	if key != "" {
		b = append(appendString(append(b, `"idempotency-key":`...), key), ',')
	}
	members := [2]map[string]any{meta}
	if s.o.Meta != nil {
		members[1] = s.o.Meta(ctx)
	}
	for i, m := range members {
		if len(m) == 0 {
			continue
		}
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if _, twice := meta[k]; twice && i > 0 || k == "idempotency-key" && key != "" || k == "progressToken" || strings.HasPrefix(k, metaPrefix) {
				continue // the protocol's own keys are ours to set
			}
			if b, err = appendValue(append(appendString(b, k), ':'), m[k]); err != nil {
				return nil, err
			}
			b = append(b, ',')
		}
	}
	if len(b) == empty {
		b = b[:start]
		if b[len(b)-1] == ',' {
			b = b[:len(b)-1]
		}
		return append(b, '}'), nil
	}
	b[len(b)-1] = '}'
	return append(b, '}'), nil
}

// metaPrefix begins the `_meta` keys of the protocol (MCP 2026-07-28, basic).
const metaPrefix = "io.modelcontextprotocol/"

// answerInput has the handlers answer a result that asks for input, so that the
// next round carries the answers (MCP 2026-07-28, multi round-trip requests).
func (s *TransportSession) answerInput(ctx context.Context, d *dialog, round int) error {
	d.answers = nil
	if d.round.inputRequests == nil {
		if d.round.requestState == nil {
			return s.failure(d.req.Method, ReasonProtocol, "input is required, and none is named", nil)
		}
		return s.pause(ctx, d.req.Method, time.Duration(round)*50*time.Millisecond)
	}
	v, err := decodeValue(d.round.inputRequests)
	requests, ok := v.(map[string]any)
	if err != nil || !ok {
		return s.failure(d.req.Method, ReasonProtocol, "inputRequests is not an object", d.round.inputRequests)
	}
	d.answers = []byte{'{'}
	for _, k := range slices.Sorted(maps.Keys(requests)) {
		r, _ := requests[k].(map[string]any)
		method, _ := r["method"].(string)
		params, err := appendValue(nil, r["params"])
		if err != nil || s.o.Handlers[method] == nil {
			return s.failure(d.req.Method, ReasonProtocol, "the server asks for input that we did not declare", d.round.inputRequests)
		}
		answer, err := s.handle(ctx, method, params)
		if err != nil {
			return &TransportError{Origin: Origin{Server: s.cfg.Name, Op: d.req.Method}, Reason: ReasonCancelled, Sent: true, Detail: "the handler for " + method + " failed", Err: err}
		}
		if len(d.answers) > 1 {
			d.answers = append(d.answers, ',')
		}
		d.answers = append(append(appendString(d.answers, k), ':'), answer...)
	}
	d.answers = append(d.answers, '}')
	return nil
}

// pause waits, unless the caller gives up.
func (s *TransportSession) pause(ctx context.Context, op string, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return &TransportError{Origin: Origin{Server: s.cfg.Name, Op: op}, Reason: ReasonCancelled, Sent: true, Err: ctx.Err()}
	}
}

// failure is a fault that the session itself found in an answer.
func (s *TransportSession) failure(op string, reason Reason, detail string, raw []byte) error {
	return &TransportError{Origin: Origin{Server: s.cfg.Name, Op: op}, Reason: reason, Sent: true, Detail: detail, Raw: clip(raw)}
}

// connect returns the agreement in force, or makes one. All who find that there
// is none share one attempt and its outcome; if its leader gives up, the next
// of them leads another. The hook of an attempt has that attempt's agreement,
// come what may: it would wait for itself.
func (s *TransportSession) connect(ctx context.Context) (*link, error) {
	if l := s.link.Load(); l != nil {
		return l, nil
	}
	if l, ok := ctx.Value(renewing{s}).(*link); ok {
		return l, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.ConnectTimeout, errCeiling)
	defer cancel()
	for {
		s.mu.Lock()
		if l := s.link.Load(); l != nil {
			s.mu.Unlock()
			return l, nil
		}
		if s.closed {
			s.mu.Unlock()
			return nil, &TransportError{Origin: Origin{Server: s.cfg.Name, Op: "connect"}, Reason: ReasonDisconnected, Detail: "the session is closed"}
		}
		a := s.attempt
		lead := a == nil
		if lead {
			a = &attempt{done: make(chan struct{})}
			s.attempt = a
		}
		s.mu.Unlock()
		if lead {
			return s.lead(ctx, a)
		}
		select {
		case <-a.done:
			if a.err == nil {
				return a.link, nil
			}
			if !errors.Is(a.err, ReasonCancelled) {
				return nil, ownCopy(a.err)
			}
		case <-ctx.Done():
			return nil, ceilingError(ctx, &TransportError{Origin: Origin{Server: s.cfg.Name, Op: "connect"}, Reason: ReasonCancelled, Err: ctx.Err()})
		}
	}
}

// renewing is the key of a hook's context to the agreement that it is about.
type renewing struct{ s *TransportSession }

// lead makes the attempt a and publishes its outcome, whatever happens.
func (s *TransportSession) lead(ctx context.Context, a *attempt) (l *link, err error) {
	err = &TransportError{Origin: Origin{Server: s.cfg.Name, Op: "connect"}, Reason: ReasonCancelled} // should the leader not return
	defer func() {
		s.mu.Lock()
		a.link, a.err = l, err
		s.attempt = nil
		if err == nil {
			s.agreed, s.info = l, l.info
			s.link.Store(l) // if the hook has lost it, the next operation finds that out
		}
		s.mu.Unlock()
		close(a.done)
		if err != nil {
			err = ownCopy(err) // the others have a.err
		}
	}()
	var again bool
	l, again, err = s.agree(ctx)
	err = s.named(ceilingError(ctx, err), "connect")
	if err == nil && again {
		s.mu.Lock()
		renewed := s.renewed
		s.mu.Unlock()
		if renewed != nil {
			s.link.Store(l) // for the requests of the hook itself
			renewed(context.WithValue(ctx, renewing{s}, l))
		}
	}
	return l, err
}

// ownCopy gives a caller an error of its own, since the policy writes into it.
func ownCopy(err error) error {
	switch e := err.(type) {
	case *TransportError:
		return copied(e)
	case *RPCError:
		return copied(e)
	case *ProtocolError:
		return copied(e)
	case *UnavailableError:
		return copied(e)
	case *BudgetError:
		return copied(e)
	case *ArgumentError:
		return copied(e)
	}
	return err
}

func copied[T any](v *T) *T {
	c := *v
	return &c
}

// agree opens the transport and finds a revision that both sides speak. Again
// says that the connection replaces an earlier one.
func (s *TransportSession) agree(ctx context.Context) (l *link, again bool, err error) {
	fresh, err := s.t.Open(ctx, Inbound{Notify: s.notified, Request: s.requested})
	if err != nil {
		return nil, false, err
	}
	s.mu.Lock()
	if fresh {
		s.agreed = nil // and if the handshake fails, it stays due
	}
	l, version, again := s.agreed, s.version, s.info != nil
	s.mu.Unlock()
	if l != nil && l.conn == s.connection() {
		return l, false, nil
	}
	if s.cfg.Protocol != "auto" {
		version = s.cfg.Protocol
	}
	var info *ServerInfo
	switch version {
	case "":
		info, err = s.probe(ctx)
	case version2026:
		info, err = s.discover(ctx)
	default:
		info, err = s.initialize(ctx, version)
	}
	if err != nil {
		s.known("") // what was known of the server may no longer hold
		if a, ok := s.t.(interface{ abandon() }); ok {
			a.abandon()
		}
		return nil, false, err
	}
	l = &link{version: info.Protocol, info: info, conn: s.connection()} // the probe may have opened another
	if l.version == version2026 {
		l.meta = s.modernMeta()
	}
	s.watch(ctx, l)
	return l, again, nil
}

// connection returns the number of the connection, 0 if it has none.
func (s *TransportSession) connection() int {
	if t, ok := s.t.(numbersConnections); ok {
		return t.connection()
	}
	return 0
}

// A heard is what a request made on another goroutine came to.
type heard struct {
	raw json.RawMessage
	err error
}

// ask makes a request of the handshake on a goroutine, which ends with ctx at
// the latest and leaves its reply in the channel.
func (s *TransportSession) ask(ctx context.Context, wg *sync.WaitGroup, req *Request) <-chan heard {
	c := make(chan heard, 1)
	wg.Go(func() {
		a := heard{err: s.failure("connect", ReasonCancelled, "the call did not return", nil)} // a hook of the user's may end it
		defer func() { c <- a }()
		a.raw, a.err = s.t.Call(ctx, req)
	})
	return c
}

// probe finds out what an unknown server speaks (MCP 2026-07-28, versioning):
// it asks server/discover, and anything but a modern answer means initialize.
// A server that stays silent may be slow or may ignore what it does not know,
// so both questions are then open at once, and the first good answer counts.
func (s *TransportSession) probe(ctx context.Context) (*ServerInfo, error) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	asked := s.ask(ctx, &wg, s.discoverRequest())
	patience := min(3*time.Second, s.cfg.ConnectTimeout/4)
	select {
	case a := <-asked:
		info, err := s.probed(ctx, a)
		if errors.Is(err, ReasonDisconnected) && !errors.Is(a.err, ReasonDisconnected) {
			return s.probed(ctx, heard{err: err}) // it answered, and died of the question all the same
		}
		return info, err
	case <-time.After(patience):
	}
	second := s.initializeRequest(version2511)
	second.Stream = true // takes no slot: the first question may hold the only one
	old := s.ask(ctx, &wg, second)
	var refusal error // of the second, which a modern server may refuse before it answers the first
	for {
		select {
		case a := <-asked:
			if a.err == nil && mutual(a.raw, "supportedVersions") == version2026 {
				return s.discovered(a.raw)
			}
			if asked = nil; refusal != nil {
				return nil, refusal
			}
		case a := <-old:
			switch {
			case errors.Is(a.err, ReasonDisconnected):
				return s.probed(ctx, a) // it was slow to start, and died of the first question
			case a.err == nil || asked == nil:
				return s.initialized(ctx, version2511, a)
			}
			old, refusal = nil, a.err
			defer time.AfterFunc(patience, cancel).Stop()
		}
	}
}

// probed goes on as the answer to server/discover demands.
func (s *TransportSession) probed(ctx context.Context, a heard) (*ServerInfo, error) {
	version, err := s.spoken(a)
	switch {
	case err != nil:
		return nil, err
	case version == version2026 && a.err == nil:
		return s.discovered(a.raw)
	case version == version2026:
		return s.discover(ctx)
	}
	if errors.Is(a.err, ReasonDisconnected) { // some die of the question: start it again, without
		if _, err := s.t.Open(ctx, Inbound{}); err != nil {
			return nil, err
		}
	}
	return s.initialize(ctx, version)
}

// spoken is the table of what an answer to server/discover says (MCP 2026-07-28,
// versioning): the revision to speak, or an error. A recognised modern error
// proves a modern server, trouble on the way proves nothing, and everything else
// means an older revision.
func (s *TransportSession) spoken(a heard) (version string, err error) {
	var re *RPCError
	var te *TransportError
	credentials := s.o.Authorize != nil || s.cfg.Headers["Authorization"] != ""
	list := a.raw
	switch {
	case a.err == nil && member(list, "supportedVersions") == nil:
		return version2511, nil
	case a.err == nil:
		version = mutual(list, "supportedVersions")
	case errors.As(a.err, &re) && re.Code == -32022:
		list = re.Data
		version = mutual(list, "supported")
	case re != nil && (re.Code == -32020 || re.Code == -32021):
		return "", a.err
	case re != nil:
		return version2511, nil
	case !errors.As(a.err, &te), te.Reason == ReasonCancelled, te.Reason == ReasonLimit,
		te.Status/100 == 3, (te.Status == 401 || te.Status == 403) && !credentials:
		return "", a.err
	case te.Reason == ReasonUnavailable:
		if e, _ := scanEnvelope(te.Raw); te.Status/100 == 5 && e.err != nil {
			return version2511, nil // a JSON-RPC error under a status of 5xx is an answer too
		}
		return "", a.err
	default:
		return version2511, nil
	}
	if version == "" {
		return "", s.failure("connect", ReasonProtocol, "no protocol revision in common", list)
	}
	return version, nil
}

// discover makes the modern handshake, which is one question. A server that
// refuses our revision and lists it all the same is asked once more.
func (s *TransportSession) discover(ctx context.Context) (*ServerInfo, error) {
	raw, err := s.t.Call(ctx, s.discoverRequest())
	var re *RPCError
	if errors.As(err, &re) && re.Code == -32022 && mutual(re.Data, "supported") == version2026 {
		raw, err = s.t.Call(ctx, s.discoverRequest())
	}
	if errors.As(err, &re) && re.Code == -32601 {
		return &ServerInfo{Protocol: version2026}, nil // it must implement it, but need not to be of use
	}
	if err != nil {
		return nil, err
	}
	return s.discovered(raw)
}

func (s *TransportSession) discoverRequest() *Request {
	return &Request{Method: "server/discover", Params: s.modernParams(""), Version: version2026}
}

// modernParams are params of 2026-07-28 with these members, each with a comma
// behind it, and the `_meta`.
func (s *TransportSession) modernParams(members string) json.RawMessage {
	b := append([]byte(`{`+members+`"_meta":{`), s.modernMeta()...)
	return append(b[:len(b)-1], "}}"...)
}

// known remembers what to offer when the connection has to be made again.
func (s *TransportSession) known(version string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version = version
}

// discovered reads a DiscoverResult.
func (s *TransportSession) discovered(raw json.RawMessage) (*ServerInfo, error) {
	who := member(member(raw, "_meta"), metaPrefix+"serverInfo")
	if who == nil {
		who = member(raw, "serverInfo")
	}
	return serverInfo(version2026, raw, who), nil
}

// serverInfo reads what the result of a handshake says of the server.
func serverInfo(version string, raw, who json.RawMessage) *ServerInfo {
	return &ServerInfo{
		Name: textMember(who, "name"), Title: textMember(who, "title"), Version: textMember(who, "version"),
		Protocol: version, Capabilities: member(raw, "capabilities"), Instructions: textMember(raw, "instructions"),
	}
}

// initialize makes the handshake of the older revisions.
func (s *TransportSession) initialize(ctx context.Context, version string) (*ServerInfo, error) {
	raw, err := s.t.Call(ctx, s.initializeRequest(version))
	return s.initialized(ctx, version, heard{raw, err})
}

func (s *TransportSession) initializeRequest(version string) *Request {
	b := appendString([]byte(`{"protocolVersion":`), version)
	b = append(append(b, `,"capabilities":`...), s.capabilities()...)
	b = append(append(b, `,"clientInfo":`...), s.clientInfo()...)
	return &Request{Method: "initialize", Params: append(b, '}')}
}

// initialized reads an InitializeResult and ends the handshake.
func (s *TransportSession) initialized(ctx context.Context, offered string, a heard) (*ServerInfo, error) {
	if a.err != nil {
		return nil, a.err
	}
	version := textMember(a.raw, "protocolVersion")
	if !slices.Contains(revisions[1:], version) {
		return nil, s.failure("initialize", ReasonProtocol, "the server answered with a revision that we do not speak", a.raw)
	}
	if err := s.t.Notify(ctx, &Request{Method: "notifications/initialized", Version: version}); err != nil {
		return nil, err
	}
	s.known(offered)
	return serverInfo(version, a.raw, member(a.raw, "serverInfo")), nil
}

// revisions are those that we speak, newest first. They are compared as names:
// a list may hold drafts, whose order means nothing.
var revisions = []string{version2026, version2511, version2506, version2503, version2411}

// mutual returns the newest revision of ours in the list that is a member of
// raw, or "".
func mutual(raw json.RawMessage, key string) string {
	list, _ := scanBatch(member(raw, key)) // a list without end takes no memory to speak of
	for _, ours := range revisions {
		if slices.ContainsFunc(list, func(e json.RawMessage) bool { return string(e) == `"`+ours+`"` }) {
			return ours
		}
	}
	return ""
}

// textMember returns a text member of an object, "" if there is none, cut short.
func textMember(raw json.RawMessage, key string) string {
	v, _ := decodeValue(member(raw, key))
	t, _ := v.(string)
	if len(t) > 64<<10 {
		t = strings.Clone(strings.ToValidUTF8(t[:64<<10], "")) // lets go of the rest
	}
	return t
}

// modernMeta returns the `_meta` members of every request of 2026-07-28, each
// with a comma behind it.
func (s *TransportSession) modernMeta() []byte {
	b := append([]byte(`"`+metaPrefix+`protocolVersion":"`+version2026+`","`+metaPrefix+`clientInfo":`), s.clientInfo()...)
	b = append(append(b, `,"`+metaPrefix+`clientCapabilities":`...), s.capabilities()...)
	return append(b, ',')
}

func (s *TransportSession) clientInfo() []byte {
	i := s.o.ClientInfo
	if i.Name == "" {
		i = ServerInfo{Name: "resilient-mcp", Version: "1"}
	}
	b := appendString([]byte(`{"name":`), i.Name)
	if i.Title != "" {
		b = appendString(append(b, `,"title":`...), i.Title)
	}
	return append(appendString(append(b, `,"version":`...), i.Version), '}')
}

// capabilities declares what there are handlers for.
func (s *TransportSession) capabilities() []byte {
	b := []byte{'{'}
	for _, c := range []struct{ method, declare string }{
		{"elicitation/create", `"elicitation":{"form":{}},`},
		{"roots/list", `"roots":{},`},
		{"sampling/createMessage", `"sampling":{},`},
	} {
		if s.o.Handlers[c.method] != nil {
			b = append(b, c.declare...)
		}
	}
	return append(bytes.TrimSuffix(b, []byte(",")), '}')
}

// requested answers a request of the server (MCP 2025-11-25, and older).
func (s *TransportSession) requested(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
	if l := s.link.Load(); l != nil && l.version == version2026 {
		return nil, errNoAnswer
	}
	if method == "ping" {
		return json.RawMessage("{}"), nil
	}
	if s.o.Handlers[method] == nil {
		return nil, &RPCError{Code: -32601, Message: "method not found"}
	}
	if mode := textMember(params, "mode"); method == "elicitation/create" && mode != "" && mode != "form" {
		return nil, &RPCError{Code: -32602, Message: "this mode was not declared"}
	}
	return s.handle(ctx, method, params)
}

// handle asks the user's handler and encodes what it returns.
func (s *TransportSession) handle(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
	v, err := s.o.Handlers[method](ctx, s.cfg.Name, params)
	if err != nil {
		return nil, err
	}
	b, err := appendValue(nil, v)
	if err != nil || method != "elicitation/create" {
		return b, err
	}
	return withFormDefaults(b, params)
}

// withFormDefaults fills the fields of an accepted form that were left out and
// have a default in its schema (MCP 2025-11-25, elicitation).
func withFormDefaults(answer, params json.RawMessage) (json.RawMessage, error) {
	v, err := decodeValue(answer)
	reply, _ := v.(map[string]any)
	if err != nil || reply["action"] != "accept" {
		return answer, err
	}
	content, _ := reply["content"].(map[string]any)
	if content == nil {
		content = map[string]any{}
	}
	form, _ := decodeValue(member(member(params, "requestedSchema"), "properties"))
	fields, _ := form.(map[string]any)
	for name, f := range fields {
		field, _ := f.(map[string]any)
		if d, ok := field["default"]; ok {
			if _, given := content[name]; !given {
				content[name] = d
			}
		}
	}
	reply["content"] = content
	return appendValue(nil, reply)
}

// notified takes a notification from the transport. It never blocks.
func (s *TransportSession) notified(method string, params json.RawMessage) {
	switch method {
	case "notifications/tools/list_changed", "notifications/subscriptions/acknowledged":
		s.mu.Lock()
		s.changed = s.changed || s.deaf || method == "notifications/tools/list_changed"
		s.deaf = false
		s.mu.Unlock()
	case "notifications/progress":
		token := textMember(params, "progressToken")
		var p struct {
			Progress, Total float64
			Message         string
		}
		if s.onProgress(token) != nil && json.Unmarshal(params, &p) == nil {
			s.enqueue(len(p.Message), func() {
				if f := s.onProgress(token); f != nil { // not after the call has returned
					f(Progress{p.Progress, p.Total, p.Message})
				}
			})
		}
	}
	if s.o.OnNotification != nil {
		s.enqueue(len(method)+len(params), func() { s.o.OnNotification(s.cfg.Name, method, params) })
	}
}

// A delivery is a notification that waits for the user.
type delivery struct {
	size int
	f    func()
}

// enqueue has f, which holds so many bytes of the server's, called after
// everything that was enqueued before it. A queue that is full drops f: the
// server, not the user, decides how much comes.
func (s *TransportSession) enqueue(size int, f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) >= maxQueue || s.queued+size > s.cfg.MaxMessageBytes || s.closed {
		s.dropped++
		return
	}
	s.queue = append(s.queue, delivery{size, f})
	s.queued += size
	if s.idle == nil {
		s.idle = make(chan struct{})
		go s.deliver(s.idle) // ends when the queue is empty; Close waits for it, but not for a user who blocks it
	}
}

// deliver calls what is in the queue, in order, until it is empty.
func (s *TransportSession) deliver(idle chan struct{}) {
	left := true
	defer func() {
		if left { // by the user, as t.FailNow does
			go s.deliver(idle) // ends like this one
		}
	}()
	for {
		s.mu.Lock()
		if len(s.queue) == 0 || s.closed {
			s.queue, s.queued, s.idle = nil, 0, nil
			s.mu.Unlock()
			left = false
			close(idle)
			return
		}
		next := s.queue[0]
		s.queue[0] = delivery{} // the array holds it as long as it lives
		s.queue, s.queued = s.queue[1:], s.queued-next.size
		s.mu.Unlock()
		next.f()
	}
}

// onProgress returns who wants to see the progress under a token, if anybody.
func (s *TransportSession) onProgress(token string) func(Progress) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.progress[token]
}

// beginProgress gives a call a token under which its progress is delivered.
func (s *TransportSession) beginProgress(f func(Progress)) string {
	token := "p" + strconv.FormatInt(s.token.Add(1), 10)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress[token] = f
	return token
}

// endProgress lets what has arrived before the answer be seen before the call
// returns, but does not wait long for a slow user.
func (s *TransportSession) endProgress(ctx context.Context, token string) {
	seen := make(chan struct{})
	s.enqueue(0, func() { close(seen) })
	s.await(ctx, seen)
	s.mu.Lock()
	delete(s.progress, token)
	s.mu.Unlock()
}

// await waits for c to be closed, though not for long; a nil c is closed.
func (s *TransportSession) await(ctx context.Context, c <-chan struct{}) {
	if c == nil {
		return
	}
	select {
	case <-c:
	case <-ctx.Done():
	case <-time.After(handover):
	}
}

// watch keeps a stream open on which the server announces changes, if it is to
// be watched. Up to 2025-11-25, a server may also send its requests there, so
// that whoever has handlers listens too.
func (s *TransportSession) watch(ctx context.Context, l *link) {
	modern := l.version == version2026
	s.mu.Lock()
	s.unwatch() // the agreement that it belongs to is over
	if modern && s.cfg.Watch && !s.closed {
		ctx, stop := context.WithCancel(context.Background())
		s.unwatch = stop
		s.wg.Go(func() { // ends with the agreement, or with Close, which waits for it
			defer stop()
			s.subscribe(ctx, l)
		})
	}
	s.mu.Unlock()
	if t, ok := s.t.(listener); ok && !modern && (s.cfg.Watch || len(s.o.Handlers) > 0) {
		t.listen(ctx, l.version)
	}
}

// subscribe keeps a subscriptions/listen request open (MCP 2026-07-28,
// subscriptions), and begins another when it ends, less and less eagerly.
func (s *TransportSession) subscribe(ctx context.Context, l *link) {
	for wait := time.Second; ; wait = min(2*wait, 30*time.Second) {
		begun := time.Now()
		params := s.modernParams(`"notifications":{"toolsListChanged":true},`)
		_, err := s.t.Call(ctx, &Request{Method: "subscriptions/listen", Params: params, Version: version2026, Stream: true, conn: l.conn})
		var re *RPCError
		if errors.As(err, &re) {
			return // not offered
		}
		if time.Since(begun) > time.Minute {
			wait = time.Second
		}
		s.mu.Lock()
		s.changed, s.deaf = true, true // what happens until the next one stands is not announced
		s.mu.Unlock()
		if s.pause(ctx, "subscriptions/listen", wait/2+rand.N(wait/2)) != nil {
			return
		}
	}
}

// An inbox has the requests of a server answered, in the order of arrival. What
// is in it is bounded, in number and in bytes.
type inbox struct {
	answer func(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error)
	limit  int // bytes of all that is in it, and of one answer

	mu       sync.Mutex // guards the fields below
	asked    []*asked   // those that are being answered, too
	size     int        // bytes of them
	handlers int        // goroutines
	closed   bool
	idle     chan struct{} // closed when it is closed, and no handler is left
}

// An asked is a request of the server.
type asked struct {
	envelope
	ctx   context.Context // ends when it is withdrawn
	stop  context.CancelFunc
	send  func(ctx context.Context, answer []byte)
	begun bool // a handler has it
}

const (
	maxHandlers = 8  // requests of the server answered at a time
	maxAsked    = 64 // and those that wait for that included
)

// errInternal answers a request whose answer cannot be sent.
var errInternal = &RPCError{Code: -32603, Message: "internal error"}

func newInbox(in Inbound, limit int) *inbox {
	b := &inbox{answer: in.Request, limit: limit, idle: make(chan struct{})}
	if b.answer == nil {
		b.answer = func(context.Context, string, json.RawMessage) (json.RawMessage, error) {
			return nil, &RPCError{Code: -32601, Message: "method not found"}
		}
	}
	return b
}

// take has a request answered, which it copies, and the answer sent; or it
// reports that there is no room for it.
func (b *inbox) take(e envelope, send func(ctx context.Context, answer []byte)) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || len(b.asked) >= maxAsked || b.size+e.size() > b.limit {
		return false
	}
	a := &asked{envelope: envelope{id: bytes.Clone(e.id), method: e.method, params: bytes.Clone(e.params)}, send: send}
	a.ctx, a.stop = context.WithCancel(context.Background())
	b.asked = append(b.asked, a)
	b.size += e.size()
	if b.handlers < maxHandlers {
		b.handlers++
		go b.handle(nil) // ends when nothing waits; who closes the inbox waits for idle
	}
	return true
}

// withdraw ends the request of that id, which is then not answered; nil ends all.
func (b *inbox) withdraw(id json.RawMessage) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked = slices.DeleteFunc(b.asked, func(a *asked) bool {
		if id != nil && string(a.id) != string(id) {
			return false
		}
		a.stop()
		if !a.begun { // else its handler takes it out
			b.size -= a.size()
		}
		return !a.begun
	})
}

// close ends all requests, and those to come.
func (b *inbox) close() {
	b.mu.Lock()
	if !b.closed && b.handlers == 0 {
		close(b.idle)
	}
	b.closed = true // before the others end, so that none comes in between
	b.mu.Unlock()
	b.withdraw(nil)
}

// handle answers requests until none waits. Lost is one whose answering left its
// goroutine, as t.FailNow does, and took the handler before this with it.
func (b *inbox) handle(lost *asked) {
	a := lost
	defer func() {
		if a != nil {
			go b.handle(a) // ends like the others
		}
	}()
	if lost != nil {
		b.reply(lost, nil, errInternal)
	}
	for a = b.next(lost); a != nil; a = b.next(a) {
		result, err := b.answer(a.ctx, a.method, a.params)
		b.reply(a, result, err)
	}
}

// reply sends the answer to a request, unless it is withdrawn.
func (b *inbox) reply(a *asked, result json.RawMessage, err error) {
	if err == errNoAnswer || a.ctx.Err() != nil {
		return
	}
	var rpc *RPCError
	if err != nil && !errors.As(err, &rpc) {
		rpc = errInternal
	}
	answer := appendResponse(nil, a.id, result, rpc)
	if len(answer) > b.limit {
		answer = appendResponse(nil, a.id, nil, errInternal)
	}
	defer a.stop() // should send not return, there is no second answer
	a.send(a.ctx, answer)
}

// next takes out the request that is done with, if any, and returns the next;
// nil if there is none, and the handler ends.
func (b *inbox) next(done *asked) *asked {
	b.mu.Lock()
	defer b.mu.Unlock()
	if done != nil {
		done.stop()
		b.size -= done.size()
		b.asked = slices.DeleteFunc(b.asked, func(a *asked) bool { return a == done })
	}
	for _, a := range b.asked {
		if !a.begun {
			a.begun = true
			return a
		}
	}
	if b.handlers--; b.closed && b.handlers == 0 {
		close(b.idle)
	}
	return nil
}
