// Package mcp is a client for Model Context Protocol servers that cannot be
// trusted to behave.
package mcp

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
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

// Config declares one server: how it is reached and what is demanded of it.
// It is a plain value: copy it, compare it, print it ([Config.String] shows no
// secret). A zero field means the default that its comment states.
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
	// Env, nothing else.
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
	// Deny names tools that are left out.
	Deny []string
	// Prefix, if set, makes model-facing names "prefix-name".
	Prefix string
	// Optional servers degrade one capability; the others are required.
	Optional bool

	ConnectTimeout   time.Duration // spawn or dial, and the handshake; 30 s
	DiscoveryTimeout time.Duration // the whole tool list; 15 s
	CallTimeout      time.Duration // one attempt at one call; 30 s
	ReadTimeout      time.Duration // how long a read may stall; 30 s

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
	// BreakerReset is the time until one probe is let through; 30 s.
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
	// Pins maps tool names to the fingerprint their schemas must have.
	Pins map[string]string
	// Watch keeps a stream open on which the server announces changes.
	Watch bool
}

// RetryConfig says how a safe operation is repeated. The zero value is one
// attempt, that is, no retry at all.
type RetryConfig struct {
	MaxAttempts   int           // attempts in all, the transport's own included; 1
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
	orText := func(p *string, d string) {
		if *p == "" {
			*p = d
		}
	}
	orTime := func(p *time.Duration, d time.Duration) {
		if *p == 0 {
			*p = d
		}
	}
	orInt := func(p *int, d int) {
		if *p == 0 {
			*p = d
		}
	}
	orText(&c.Protocol, "auto")
	orText(&c.Arguments, "enforce")
	orText(&c.Results, "enforce")
	orTime(&c.ConnectTimeout, 30*time.Second)
	orTime(&c.DiscoveryTimeout, 15*time.Second)
	orTime(&c.CallTimeout, 30*time.Second)
	orTime(&c.ReadTimeout, 30*time.Second)
	orInt(&c.MaxMessageBytes, 8<<20)
	orInt(&c.MaxInFlight, 32)
	orInt(&c.MaxTools, 128)
	orInt(&c.MaxSchemaBytes, 1<<20)
	orInt(&c.MaxResultBytes, 64<<10)
	orInt(&c.Retry.MaxAttempts, 1)
	orTime(&c.Retry.BaseDelay, 200*time.Millisecond)
	orTime(&c.Retry.MaxDelay, 5*time.Second)
	orTime(&c.Retry.MaxRetryAfter, 60*time.Second)
	orInt(&c.BreakerFailures, 5)
	orTime(&c.BreakerReset, 30*time.Second)
	return c
}

// Options is what is not declaration: hooks and shared clients. A nil
// *Options, like a zero one, means the default of every field. One Options may
// serve any number of servers; its hooks may be called concurrently unless
// their comment says otherwise.
type Options struct {
	// HTTPClient carries the requests of HTTP servers. It is copied, never
	// changed; the copy follows no redirect. Nil means a client of our own.
	HTTPClient *http.Client
	// Authorize returns the value of the Authorization header. It is asked
	// again once, with the WWW-Authenticate challenge, after a 401.
	Authorize func(ctx context.Context, challenge string) (string, error)
	// Handlers answer requests of the server by method:
	// "elicitation/create", "sampling/createMessage", "roots/list". The
	// capabilities that we declare follow from which of them exist.
	Handlers map[string]HandlerFunc
	// OnNotification sees the server's notifications, one after another and
	// in order. A queue that overflows drops the newest, and counts them.
	OnNotification func(server, method string, params json.RawMessage)
	// Trace is called when a reach begins. The context it returns is used
	// for the reach; the function, if not nil, is called when it has ended.
	Trace func(ctx context.Context, r Reach) (context.Context, func(Health, error))
	// OnState sees each transition of a breaker, in order, outside any lock.
	OnState func(Health)
	// Meta returns members for the `_meta` of a request, such as
	// traceparent.
	Meta func(ctx context.Context) map[string]any
	// Logger is silent when nil.
	Logger *slog.Logger
	// Stderr gets a copy of the children's stderr. A slow writer loses
	// lines; it never blocks a child.
	Stderr io.Writer
	// Rand returns a number in [0, n); it is the source of jitter, and is
	// called by one goroutine at a time for each server. Nil means a source
	// of the session's own.
	Rand func(n int64) int64
	// ClientInfo names the program to servers. Zero means this library.
	ClientInfo ServerInfo
	// Deadline is the end of the run, beside that of the context: the
	// earlier wins. Zero means none.
	Deadline time.Time
}

// A HandlerFunc answers a request of a server. Params and result are the
// JSON of the request's params and result. An error is answered as a refusal,
// without its text.
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
	// ReasonLimit: a message ran past a bound.
	ReasonLimit Reason = "limit"
	// ReasonUnavailable: the endpoint could not be reached, the process
	// would not start, or the server answered that it cannot serve now.
	ReasonUnavailable Reason = "unavailable"
	// ReasonCancelled: the caller gave up. The error unwraps to the caller's
	// own [context.Canceled] or [context.DeadlineExceeded].
	ReasonCancelled Reason = "cancelled"
)

func (r Reason) Error() string { return string(r) }

// Origin says which operation an error belongs to. It is embedded in the error
// types of this package.
type Origin struct {
	Server   string // the name in the server's Config
	Op       string // "connect", "tools/list", "tools/call", …
	Call     string // the id of the operation, as in its span and log lines
	Attempts int    // attempts made, the transport's own tries included
	GaveUp   string // why no further attempt was made: see [Guard]
}

// origin lets the policy find the Origin inside any error of this package.
func (o *Origin) origin() *Origin { return o }

// prefix is the head of every error text.
func (o *Origin) prefix() string {
	var b strings.Builder
	b.WriteString("mcp: ")
	if o.Server != "" {
		b.WriteString("server " + strconv.Quote(o.Server) + ": ")
	}
	if o.Op != "" {
		b.WriteString(o.Op + ": ")
	}
	return b.String()
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
	// "not run" (429, an unknown session).
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
	var b strings.Builder
	b.WriteString(e.prefix())
	b.WriteString(string(e.Reason))
	if e.Status != 0 {
		b.WriteString(": HTTP status " + strconv.Itoa(e.Status))
	}
	if e.Detail != "" {
		b.WriteString(": " + e.Detail)
	}
	if e.Err != nil {
		b.WriteString(": " + e.Err.Error())
	}
	if e.Tries > 1 {
		b.WriteString(" (" + strconv.Itoa(e.Tries) + " tries)")
	}
	return b.String()
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
	return e.prefix() + "refused: JSON-RPC error " + strconv.Itoa(e.Code) + rpcCodeText(e.Code)
}

// rpcCodeText names the codes that the protocol assigns.
func rpcCodeText(code int) string {
	switch code {
	case -32700:
		return " (parse error)"
	case -32600:
		return " (invalid request)"
	case -32601:
		return " (method not found)"
	case -32602:
		return " (invalid params)"
	case -32603:
		return " (internal error)"
	case -32002:
		return " (resource not found)"
	case -32020:
		return " (header mismatch)"
	case -32021:
		return " (missing client capability)"
	case -32022:
		return " (unsupported protocol version)"
	case -32042:
		return " (URL elicitation required)"
	}
	return ""
}

// A ProtocolError is an answer that is none: a result outside its tool's
// schema, a promise of structured content that was not kept, or a message that
// breaks the protocol above the transport.
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

// An UnavailableError is a refusal of ours: the breaker is not closed, or a
// required server could not be adopted. No request was sent.
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
	Err      error  // the caller's [context.DeadlineExceeded], or the last fault
}

func (e *BudgetError) Error() string {
	return e.prefix() + "the run is out of time (" + e.Breached + ")"
}

// Unwrap returns the cause.
func (e *BudgetError) Unwrap() error { return e.Err }

// Timeout reports true: a deadline passed, though not the server's.
func (e *BudgetError) Timeout() bool { return true }

// An ArgumentError is a call that did not fit its tool's input schema. Nothing
// was sent. Its text names places and no values; [ArgumentError.Feedback] is
// for the model and has them.
type ArgumentError struct {
	Origin
	Tool   string
	Issues []Issue // at most eight
	More   bool    // whether there were more
}

func (e *ArgumentError) Error() string {
	s := e.prefix() + "arguments for tool " + strconv.Quote(e.Tool) + " do not fit its input schema"
	for i, is := range e.Issues {
		if i == 3 {
			return s + ", and more"
		}
		s += ": " + strconv.Quote(is.Path) + " " + is.Keyword
	}
	return s
}

// A ConfigError is one problem of a configuration.
type ConfigError struct {
	Server string // the name, or the position in the list if it has none
	Key    string // the key as the file spells it
	Layer  string // "file", "environment", "code"
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
// All methods are safe for concurrent use. None outlives its context.
type Transport interface {
	// Open makes sure that there is a connection, and reports whether it is
	// a new one, on which a handshake is due. It returns at once when the
	// connection stands. The Inbound of the first call stays in force.
	Open(ctx context.Context, in Inbound) (fresh bool, err error)
	// Call sends a request and returns the `result` member of its answer,
	// which the caller owns. The error is a *TransportError, or an *RPCError
	// if the server refused.
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

	// buf is the buffer that the result of the call lies in, and free gives
	// it back to a transport of ours once the result has been decoded.
	buf  []byte
	free func([]byte)
}

// release gives the buffer of the result back. The result is not used after.
func (r *Request) release() {
	if r.free != nil {
		r.free(r.buf)
		r.buf, r.free = nil, nil
	}
}

// NewTransport returns the transport that cfg declares, not yet connected.
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
	// OnProgress, if set, sees the server's progress, in order.
	OnProgress func(Progress)

	repeatable bool              // a trusted annotation allows repeating
	header     map[string]string // see Request.Header
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
	// Issues are violations of a schema that "advise" let pass.
	Issues []Issue
}

// Text returns the text blocks of the result, joined by newlines.
func (r *Result) Text() string {
	if len(r.Content) == 1 {
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

// listener is the optional interface of transports that can hold the server's
// own stream open (the GET stream of the older revisions). It returns at once;
// Close ends the stream.
type listener interface{ listen(version string) }

// TransportSession speaks MCP over a [Transport].
type TransportSession struct{}
