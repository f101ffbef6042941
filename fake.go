package mcp

// Test doubles that users compile in: they test their own degradation with
// them, with no subprocess and no socket. Nothing in here sleeps on anything
// but a timer, a channel or a context, so all of it runs in a synctest bubble.
// This file may use every other one, and none uses it; it imports neither
// testing nor net.

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// A RecordingTransport is a [Transport] that answers from a script and records
// what it was asked. The zero value has an empty script and is ready for use.
//
// The script holds an answer for each method:
//
//   - a value that encodes to the JSON of a result; a [*Result] and a []Tool
//     are written as `tools/call` and `tools/list` have them;
//   - an error, which the call returns; a bare [Reason] becomes a
//     [TransportError];
//   - a func(json.RawMessage) (any, error), or one with a [context.Context]
//     before the params, whose results are an answer of the kinds above. One
//     that outlasts its call is left behind;
//   - [Answers], one for each call in turn.
//
// A method that nobody scripted is a failure with [ReasonProtocol], so that no
// test passes by accident on a call that it never arranged. Only what every
// session needs answers itself: `initialize` agrees to the revision asked for,
// `ping` is answered, notifications are taken, and `server/discover` is refused
// as a server of the older revisions would.
//
// It keeps the contract of a Transport, lost connections ([RecordingTransport.Disconnect])
// and deadlines included, and is safe for concurrent use.
type RecordingTransport struct {
	// MaxMessageBytes bounds the params of a request and a result, and
	// MaxInFlight the calls at once, as they would on a wire. Zero means no
	// bound. They are not changed once calls have begun.
	MaxMessageBytes int
	MaxInFlight     int

	mu      sync.Mutex // guards the fields below
	script  map[string]any
	turn    map[string]int // the next of the Answers
	calls   []Recorded
	inbound *Inbound // of the first Open
	conn    *connection
	closed  bool
}

// A connection lasts from an Open to a Disconnect.
type connection struct {
	in    *Inbound
	lost  chan struct{} // closed when it goes
	slots chan struct{} // holds an element for each call; nil means no bound
}

// Answers are answers to successive calls of one method. A call after the last
// is a failure with [ReasonProtocol].
type Answers []any

// Recorded is one request or notification that a [RecordingTransport] was
// given.
type Recorded struct {
	Method  string
	Params  map[string]any    // as [json.Unmarshal] decodes them
	Raw     json.RawMessage   // as they were given
	Version string            // the revision it was sent under
	Name    string            // the tool, for the Mcp-Name header
	Header  map[string]string // the mirrored arguments
}

var _ Transport = (*RecordingTransport)(nil)

// NewRecordingTransport returns a transport with the given script, which is
// copied.
func NewRecordingTransport(script map[string]any) *RecordingTransport {
	t := new(RecordingTransport)
	for method, answer := range script {
		t.Script(method, answer)
	}
	return t
}

// Script sets the answer to a method, in place of the one it had.
func (t *RecordingTransport) Script(method string, answer any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.script == nil {
		t.script, t.turn = map[string]any{}, map[string]int{}
	}
	t.script[method] = answer
	t.turn[method] = 0
}

// Calls returns what the transport was asked so far, in order.
func (t *RecordingTransport) Calls() []Recorded {
	t.mu.Lock()
	defer t.mu.Unlock()
	calls := slices.Clone(t.calls)
	for i := range calls {
		json.Unmarshal(calls[i].Raw, &calls[i].Params) // stays nil if there are none
	}
	return calls
}

// Open connects: fresh is true the first time, and the first time after a
// Disconnect.
func (t *RecordingTransport) Open(ctx context.Context, in Inbound) (fresh bool, err error) {
	if ctx.Err() != nil {
		return false, endOf(ctx, false)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false, errNotConnected()
	}
	if t.inbound == nil {
		t.inbound = &in
	}
	if t.conn != nil {
		return false, nil
	}
	t.conn = &connection{in: t.inbound, lost: make(chan struct{})}
	if t.MaxInFlight > 0 {
		t.conn.slots = make(chan struct{}, t.MaxInFlight)
	}
	return true, nil
}

// Call answers from the script.
func (t *RecordingTransport) Call(ctx context.Context, req *Request) (json.RawMessage, error) {
	return t.carry(ctx, req, !req.Stream) // what lasts takes no slot
}

// Notify records a notification, which needs no answer in the script.
func (t *RecordingTransport) Notify(ctx context.Context, req *Request) error {
	_, err := t.carry(ctx, req, false)
	return err
}

// Close ends the connection for good.
func (t *RecordingTransport) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	t.disconnectLocked()
	return nil
}

// Disconnect loses the connection: calls under way end with
// [ReasonDisconnected], and the next Open makes a fresh one.
func (t *RecordingTransport) Disconnect() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.disconnectLocked()
}

func (t *RecordingTransport) disconnectLocked() {
	if t.conn != nil {
		close(t.conn.lost)
		t.conn = nil
	}
}

// SendNotification delivers a notification, as a server would. It fails with
// [ReasonDisconnected] where there is no connection.
func (t *RecordingTransport) SendNotification(method string, params any) error {
	b, err := encodeParams(params)
	if err != nil {
		return err
	}
	c, err := t.connection()
	if err == nil && c.in.Notify != nil {
		c.in.Notify(method, b)
	}
	return err
}

// SendRequest asks the client, as a server would, and returns its answer. An
// [*RPCError] is the client's refusal; it fails as SendNotification does, too.
func (t *RecordingTransport) SendRequest(ctx context.Context, method string, params any) (json.RawMessage, error) {
	b, err := encodeParams(params)
	if err != nil {
		return nil, err
	}
	c, err := t.connection()
	if err != nil {
		return nil, err
	}
	if c.in.Request == nil {
		return nil, &RPCError{Code: -32601}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Ends with the request: it only carries the loss of the connection over.
	go func() {
		select {
		case <-c.lost:
			cancel()
		case <-ctx.Done():
		}
	}()
	return c.in.Request(ctx, method, b)
}

func (t *RecordingTransport) honoursDeadline() {}

// connection returns the one that stands.
func (t *RecordingTransport) connection() (*connection, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conn == nil {
		return nil, errNotConnected()
	}
	return t.conn, nil
}

// carry records a request and answers it from the script, within its deadline.
func (t *RecordingTransport) carry(ctx context.Context, req *Request, slotted bool) (json.RawMessage, error) {
	cancel := func() {}
	if !req.Deadline.IsZero() {
		ctx, cancel = context.WithDeadlineCause(ctx, req.Deadline, ReasonTimeout)
	}
	defer cancel()
	if ctx.Err() != nil {
		return nil, endOf(ctx, false)
	}
	if t.MaxMessageBytes > 0 && len(req.Params) > t.MaxMessageBytes {
		return nil, &TransportError{Reason: ReasonLimit, Detail: "request over " + strconv.Itoa(t.MaxMessageBytes) + " bytes"}
	}
	c, err := t.connection()
	if err != nil {
		return nil, err
	}
	if slotted && c.slots != nil {
		select {
		case c.slots <- struct{}{}:
			defer func() { <-c.slots }()
		case <-ctx.Done():
			return nil, endOf(ctx, false)
		case <-c.lost:
			return nil, &TransportError{Reason: ReasonDisconnected}
		}
	}
	answer := t.record(req)
	if f := asFunc(answer); f != nil {
		answer = perform(ctx, f, slices.Clone(req.Params), c.lost)
	}
	return t.encode(answer)
}

// endOf is the error of a request that its context ended: its deadline, as the
// cause says, or the caller.
func endOf(ctx context.Context, sent bool) error {
	if context.Cause(ctx) == ReasonTimeout {
		return &TransportError{Reason: ReasonTimeout, Sent: sent}
	}
	return &TransportError{Reason: ReasonCancelled, Sent: sent, Err: ctx.Err()}
}

// record writes a request down and takes its answer off the script.
func (t *RecordingTransport) record(req *Request) any {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.calls = append(t.calls, Recorded{
		Method:  req.Method,
		Raw:     slices.Clone(req.Params),
		Version: req.Version,
		Name:    req.Name,
		Header:  maps.Clone(req.Header),
	})
	answer, ok := t.script[req.Method]
	if !ok {
		return unscripted(req)
	}
	list, ok := answer.(Answers)
	if !ok {
		return answer
	}
	n := t.turn[req.Method]
	if n >= len(list) {
		return &TransportError{Reason: ReasonProtocol, Sent: true, Detail: "the script has no further answer to " + strconv.Quote(req.Method)}
	}
	t.turn[req.Method] = n + 1
	return list[n]
}

// unscripted is the answer to a method that the script does not name.
func unscripted(req *Request) any {
	switch {
	case req.Method == "initialize":
		return initializeResult(req.Params, "recording")
	case req.Method == "server/discover":
		return &RPCError{Code: -32601, Message: "method not found"}
	case req.Method == "ping", strings.HasPrefix(req.Method, "notifications/"):
		return json.RawMessage("{}")
	}
	return &TransportError{Reason: ReasonProtocol, Sent: true, Detail: "the script has no answer to " + strconv.Quote(req.Method)}
}

// A scriptFunc is a function in a script.
type scriptFunc = func(context.Context, json.RawMessage) (any, error)

// asFunc returns the function that answer is, in one shape for both; nil if it is
// none.
func asFunc(answer any) scriptFunc {
	switch f := answer.(type) {
	case func(json.RawMessage) (any, error):
		return func(_ context.Context, params json.RawMessage) (any, error) { return f(params) }
	case scriptFunc:
		return f
	}
	return nil
}

// perform has a function of the script answer. The goroutine ends with the function.
// Nobody waits for one that ignores its context: no Transport outlives it.
func perform(ctx context.Context, f scriptFunc, params json.RawMessage, lost <-chan struct{}) any {
	done := make(chan any, 1)
	go func() {
		answer := any(&TransportError{Reason: ReasonDisconnected, Sent: true, Detail: "the scripted function did not return"})
		defer func() { done <- answer }() // also on runtime.Goexit, as of t.FailNow
		v, err := f(ctx, params)
		if answer = v; err != nil {
			answer = err
		}
	}()
	select {
	case answer := <-done:
		if _, failed := answer.(error); failed && ctx.Err() != nil {
			return endOf(ctx, true)
		}
		return answer
	case <-ctx.Done():
		return endOf(ctx, true)
	case <-lost:
		return &TransportError{Reason: ReasonDisconnected, Sent: true}
	}
}

// encode turns an answer into what Call returns.
func (t *RecordingTransport) encode(answer any) (json.RawMessage, error) {
	var b []byte
	var err error
	switch v := answer.(type) {
	case error:
		return nil, asTransportError(v)
	case nil:
		b = []byte("{}")
	case *Result:
		b, err = encodeResult(v, false)
	case []Tool:
		b, err = encodeTools(v, false)
	default:
		b, err = appendValue(nil, v)
	}
	if err != nil {
		return nil, &TransportError{Reason: ReasonProtocol, Sent: true, Detail: "the scripted answer does not encode", Err: err}
	}
	if t.MaxMessageBytes > 0 && len(b) > t.MaxMessageBytes {
		return nil, &TransportError{Reason: ReasonLimit, Sent: true, Detail: "result over " + strconv.Itoa(t.MaxMessageBytes) + " bytes"}
	}
	return b, nil
}

func encodeParams(params any) (json.RawMessage, error) {
	if params == nil {
		return nil, nil
	}
	return appendValue(nil, params)
}

// asTransportError copies a scripted error: those who receive one write their
// Origin into it, and a script may give it to many.
func asTransportError(err error) error {
	if r, ok := err.(Reason); ok {
		return &TransportError{Reason: r, Sent: r != ReasonUnavailable}
	}
	return ownCopy(err)
}

func errNotConnected() error {
	return &TransportError{Reason: ReasonDisconnected, Detail: "not connected"}
}

// A Fault is what a [FaultyServer] does wrong.
type Fault int

const (
	// FaultNone: it is well.
	FaultNone Fault = iota
	// FaultUnreachable: it answers nothing. Over HTTP it says 503, over stdio
	// its end of the pipe closes.
	FaultUnreachable
	// FaultSlow: it answers after Delay.
	FaultSlow
	// FaultFlapping: every other reach finds it unreachable, the first one
	// included.
	FaultFlapping
	// FaultMalformed: it answers what is no protocol. Over HTTP that is a web
	// page with status 200, in a stream and over stdio broken JSON.
	FaultMalformed
	// FaultTruncated: its answer breaks off in the middle.
	FaultTruncated
)

func (f Fault) String() string {
	if f < 0 || int(f) >= len(faultNames) {
		return "Fault(" + strconv.Itoa(int(f)) + ")"
	}
	return faultNames[f]
}

var faultNames = [...]string{"none", "unreachable", "slow", "flapping", "malformed", "truncated"}

// A FaultyServer is an MCP server in this process that misbehaves on purpose.
// The zero value is a server without tools that is well. This is a policy under
// test, in no time at all if it runs in a synctest bubble:
//
//	server := &mcp.FaultyServer{
//		Tools:        []mcp.Tool{{Name: "forecast", InputSchema: json.RawMessage(`{"type":"object"}`)}},
//		Fault:        mcp.FaultUnreachable,
//		RecoverAfter: 2,
//	}
//	cfg := mcp.Config{Name: "weather", Retry: mcp.RetryConfig{MaxAttempts: 3}}
//	client := mcp.NewClient(mcp.NewResilientSession(server, cfg, nil), cfg, nil)
//	_, err := client.Adopt(ctx) // nil: the third attempt reaches it
//
// It serves in three ways, which count and misbehave alike: it is a [Session],
// to be put under the policy with no transport at all; an [http.Handler] that
// speaks Streamable HTTP; and, through [FaultyServer.Serve], a stdio server. As
// a Session its errors are the ones of a [TransportSession] whose server has
// that fault.
//
// A reach is one operation: Initialize, ListTools or CallTool; on a wire, one
// request. Notifications, `ping`, and a `server/discover` that is refused
// anyhow are none, and are answered whatever the fault.
//
// The fields are not changed once the server is in use, but see
// [FaultyServer.SetFault].
type FaultyServer struct {
	// Tools is what it offers. One without an input schema takes any object on
	// a wire; as a Session it stays without, which no client adopts.
	Tools []Tool
	// Handler runs a call; its Arguments are a [json.RawMessage], and its
	// OnProgress is nil unless the caller asked for progress and there is a
	// way to report it. An [*RPCError] is a refusal, any other error a result
	// with IsError, and no result an empty one. Nil answers with the arguments as text.
	Handler func(ctx context.Context, call *Call) (*Result, error)

	// Fault is what is wrong with it at first.
	Fault Fault
	// RecoverAfter is for how many reaches the fault lasts until the server is
	// well; zero means that it stays.
	RecoverAfter int
	// Delay is how long FaultSlow takes; zero means until the caller gives up.
	Delay time.Duration

	// SSE makes HTTP answers event streams.
	SSE bool
	// Sessions makes HTTP clients carry the session id that they are given.
	Sessions bool
	// Modern makes the server speak 2026-07-28 too.
	Modern bool

	mu       sync.Mutex // guards Fault and the fields below
	reaches  int        // since the fault was set
	seen     map[string]int
	sessions map[string]bool
	named    int // sessions named so far
	closed   bool
}

var (
	_ Session      = (*FaultyServer)(nil)
	_ http.Handler = (*FaultyServer)(nil)
)

// SetFault changes what is wrong from the next reach on. RecoverAfter and
// FaultFlapping count from here again.
func (s *FaultyServer) SetFault(f Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Fault = f
	s.reaches = 0
}

// Seen returns how often a method was asked for, faults included:
// "initialize", "tools/list", "tools/call", "notifications/initialized" …, and
// "close" for the Close of a Session.
func (s *FaultyServer) Seen(method string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seen[method]
}

// reach counts a request, and returns the fault that it meets.
func (s *FaultyServer) reach(method string) Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.seen == nil {
		s.seen = map[string]int{}
	}
	s.seen[method]++
	if method == "ping" || method == "close" || method == "server/discover" && !s.Modern || strings.HasPrefix(method, "notifications/") {
		return FaultNone
	}
	s.reaches++
	switch {
	case s.RecoverAfter > 0 && s.reaches > s.RecoverAfter:
		return FaultNone
	case s.Fault != FaultFlapping:
		return s.Fault
	case s.reaches%2 == 1:
		return FaultUnreachable
	}
	return FaultNone
}

// pause waits as FaultSlow does.
func (s *FaultyServer) pause(ctx context.Context) error {
	var over <-chan time.Time // never, if there is no Delay
	if s.Delay > 0 {
		t := time.NewTimer(s.Delay)
		defer t.Stop()
		over = t.C
	}
	select {
	case <-over:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// session runs the fault that an operation of the Session meets.
func (s *FaultyServer) session(ctx context.Context, method string) error {
	if ctx.Err() != nil {
		return endOf(ctx, false)
	}
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return errNotConnected()
	}
	switch s.reach(method) {
	case FaultUnreachable:
		return &TransportError{Reason: ReasonUnavailable, Detail: "unreachable"}
	case FaultSlow:
		if s.pause(ctx) != nil {
			return endOf(ctx, true)
		}
	case FaultMalformed:
		return &TransportError{Reason: ReasonProtocol, Sent: true, Detail: "text/html", Raw: []byte(fakePage)}
	case FaultTruncated:
		return &TransportError{Reason: ReasonDisconnected, Sent: true, Err: io.ErrUnexpectedEOF}
	}
	return nil
}

// Initialize is the handshake of the [Session].
func (s *FaultyServer) Initialize(ctx context.Context) (*ServerInfo, error) {
	if err := s.session(ctx, "initialize"); err != nil {
		return nil, err
	}
	return &ServerInfo{Name: "faulty", Version: "1", Protocol: version2511, Capabilities: json.RawMessage(`{"tools":{}}`)}, nil
}

// ListTools returns a copy of Tools.
func (s *FaultyServer) ListTools(ctx context.Context) ([]Tool, error) {
	if err := s.session(ctx, "tools/list"); err != nil {
		return nil, err
	}
	return slices.Clone(s.Tools), nil
}

// CallTool runs the Handler.
func (s *FaultyServer) CallTool(ctx context.Context, call *Call) (*Result, error) {
	args := []byte("{}")
	if call.Arguments != nil {
		var err error
		if args, err = appendValue(nil, call.Arguments); err != nil {
			return nil, &ArgumentError{Tool: call.Tool}
		}
	}
	if err := s.session(ctx, "tools/call"); err != nil {
		return nil, err
	}
	c := *call
	c.Arguments = json.RawMessage(args)
	res, err := s.handle(ctx, &c)
	if err != nil && ctx.Err() != nil {
		return nil, endOf(ctx, true)
	}
	return res, err
}

// Close ends the [Session]; the other ways of serving go on.
func (s *FaultyServer) Close() error {
	s.reach("close")
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return nil
}

// handle runs a call. Its error is an *RPCError, or one of the Handler's that
// came with the end of ctx.
func (s *FaultyServer) handle(ctx context.Context, call *Call) (*Result, error) {
	if !slices.ContainsFunc(s.Tools, func(t Tool) bool { return t.Name == call.Tool }) {
		return nil, &RPCError{Code: -32602, Message: "unknown tool"}
	}
	if s.Handler == nil {
		text := string(call.Arguments.(json.RawMessage))
		return &Result{Content: []Content{{Type: "text", Text: text}}}, nil
	}
	res, err := s.Handler(ctx, call)
	var refusal *RPCError
	switch {
	case errors.As(err, &refusal):
		return nil, asTransportError(refusal)
	case err != nil && ctx.Err() != nil:
		return nil, err
	case err != nil:
		return &Result{Content: []Content{{Type: "text", Text: err.Error()}}, IsError: true}, nil
	case res == nil:
		return &Result{}, nil
	}
	return res.clone(), nil // a Handler may give one result to many
}

// answer answers a request on a wire. Emit, if not nil, sends a notification
// ahead of the answer.
func (s *FaultyServer) answer(ctx context.Context, e envelope, emit func(method string, params []byte)) []byte {
	result, err := s.result(ctx, e, emit)
	if err != nil {
		refusal := &RPCError{Code: -32603, Message: "internal error"}
		errors.As(err, &refusal)
		return appendResponse(nil, e.id, nil, refusal)
	}
	return appendResponse(nil, e.id, result, nil)
}

// result runs a request. Its error is an *RPCError, or one of the Handler's that
// came with the end of ctx.
func (s *FaultyServer) result(ctx context.Context, e envelope, emit func(string, []byte)) (json.RawMessage, error) {
	meta := member(e.params, "_meta")
	modern := s.Modern && member(meta, "io.modelcontextprotocol/protocolVersion") != nil
	switch e.method {
	case "initialize":
		return initializeResult(e.params, "faulty"), nil
	case "server/discover":
		if s.Modern {
			return json.RawMessage(`{"resultType":"complete","supportedVersions":["` + version2026 + `"],"capabilities":{"tools":{}},` +
				`"ttlMs":0,"cacheScope":"private","_meta":{"io.modelcontextprotocol/serverInfo":{"name":"faulty","version":"1"}}}`), nil
		}
	case "ping":
		return json.RawMessage("{}"), nil
	case "tools/list":
		return encodeTools(s.Tools, modern)
	case "tools/call":
		call := &Call{Arguments: member(e.params, "arguments")}
		if call.Arguments.(json.RawMessage) == nil {
			call.Arguments = json.RawMessage("{}")
		}
		json.Unmarshal(member(e.params, "name"), &call.Tool) // a name that is no string is unknown
		json.Unmarshal(meta, &call.Meta)
		call.IdempotencyKey, _ = call.Meta["idempotency-key"].(string)
		if token := member(meta, "progressToken"); token != nil && emit != nil {
			call.OnProgress = func(p Progress) { emit("notifications/progress", encodeProgress(token, p)) }
		}
		res, err := s.handle(ctx, call)
		if err != nil {
			return nil, err
		}
		return encodeResult(res, modern)
	}
	return nil, &RPCError{Code: -32601, Message: "method not found"}
}

// Serve answers a client that writes to r and reads from w, one message a
// line, until r ends. The error is nil at that end, and says what happened if
// a fault or a broken pipe ended the server instead: as the main function of a
// child process, exit with a status that is not zero.
func (s *FaultyServer) Serve(r io.Reader, w io.Writer) error {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	var calls sync.Map // what cancels a call, by its id
	var mu sync.Mutex  // guards writes to w
	write := func(b []byte) error {
		mu.Lock()
		defer mu.Unlock()
		_, err := w.Write(b)
		return err
	}
	for in := bufio.NewReader(r); ; {
		line, err := in.ReadBytes('\n')
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		e, err := scanEnvelope(bytes.TrimSpace(line))
		if err != nil || e.method == "" {
			continue // an answer to us, or noise
		}
		fault := s.reach(e.method)
		if e.method == "notifications/cancelled" {
			if stop, ok := calls.Load(string(member(e.params, "requestId"))); ok {
				stop.(context.CancelFunc)()
			}
		}
		if e.id == nil {
			continue
		}
		switch fault {
		case FaultUnreachable:
			return errors.New("mcp: fake: unreachable")
		case FaultTruncated:
			write(brokenAnswer(e.id))
			return errors.New("mcp: fake: truncated")
		case FaultMalformed:
			if err := write(append(brokenAnswer(e.id), "}\n"...)); err != nil {
				return err
			}
			continue
		}
		ctx, stop := context.WithCancel(ctx)
		calls.Store(string(e.id), stop)
		running.Go(func() { // ended by its answer, by the client's cancel or with Serve, which waits for it
			defer stop()
			defer calls.Delete(string(e.id))
			if fault == FaultSlow && s.pause(ctx) != nil {
				return
			}
			b := s.answer(ctx, e, func(method string, params []byte) {
				write(append(appendNotification(nil, method, params), '\n'))
			})
			if ctx.Err() == nil {
				write(append(b, '\n'))
			}
		})
	}
}

// ServeHTTP speaks Streamable HTTP: POST, and DELETE for sessions.
func (s *FaultyServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id := r.Header.Get("Mcp-Session-Id")
	switch r.Method {
	case http.MethodPost:
	case http.MethodDelete:
		s.mu.Lock()
		delete(s.sessions, id)
		s.mu.Unlock()
		w.WriteHeader(http.StatusNoContent)
		return
	default:
		w.Header().Set("Allow", "POST, DELETE")
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 64<<20))
	if err != nil {
		w.WriteHeader(http.StatusRequestEntityTooLarge)
		return
	}
	e, err := scanEnvelope(body)
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	fault := FaultNone
	if e.method != "" {
		fault = s.reach(e.method)
	}
	sessions := s.Sessions && r.Header.Get("MCP-Protocol-Version") != version2026
	switch {
	case fault == FaultUnreachable:
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	case sessions && e.method == "initialize":
		w.Header().Set("Mcp-Session-Id", s.newSession())
	case sessions && !s.knows(id):
		w.WriteHeader(http.StatusNotFound)
		return
	}
	if e.method == "" || e.id == nil {
		w.WriteHeader(http.StatusAccepted)
		return
	}
	s.reply(w, r, e, fault)
}

// reply answers a POST that holds a request.
func (s *FaultyServer) reply(w http.ResponseWriter, r *http.Request, e envelope, fault Fault) {
	media, open, closing := "application/json", "", ""
	if s.SSE {
		media, open, closing = "text/event-stream", "event: message\ndata: ", "\n\n"
	}
	if fault == FaultMalformed && !s.SSE {
		media = "text/html; charset=utf-8"
	}
	w.Header().Set("Content-Type", media)
	flush := http.NewResponseController(w).Flush
	switch {
	case fault == FaultSlow:
		if s.SSE {
			flush()
		}
		if s.pause(r.Context()) != nil {
			return
		}
	case fault == FaultMalformed && s.SSE:
		io.WriteString(w, open+string(brokenAnswer(e.id))+"}"+closing)
		return
	case fault == FaultMalformed:
		io.WriteString(w, fakePage)
		return
	case fault == FaultTruncated:
		io.WriteString(w, open+string(brokenAnswer(e.id)))
		flush()
		panic(http.ErrAbortHandler) // the connection closes without an end of the body
	}
	var emit func(string, []byte)
	if s.SSE {
		emit = func(method string, params []byte) {
			io.WriteString(w, open+string(appendNotification(nil, method, params))+closing)
			flush()
		}
	}
	b := s.answer(r.Context(), e, emit)
	if e.method == "server/discover" && !s.Modern {
		w.WriteHeader(http.StatusNotFound) // as servers of the older revisions do
	}
	io.WriteString(w, open+string(b)+closing)
}

// ForgetSessions loses all sessions of HTTP clients, as a restart would.
func (s *FaultyServer) ForgetSessions() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.sessions)
}

func (s *FaultyServer) newSession() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions == nil {
		s.sessions = map[string]bool{}
	}
	s.named++
	id := "session-" + strconv.Itoa(s.named)
	s.sessions[id] = true
	return id
}

func (s *FaultyServer) knows(session string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions[session]
}

// brokenAnswer is an answer that has begun.
func brokenAnswer(id json.RawMessage) []byte {
	return []byte(`{"jsonrpc":"2.0","id":` + string(id) + `,"result":{"content":[`)
}

// fakePage is what a proxy puts in front of a server that it cannot reach.
const fakePage = "<!doctype html><title>Sign in</title>"

// initializeResult agrees to the revision that the params ask for.
func initializeResult(params json.RawMessage, name string) json.RawMessage {
	version := member(params, "protocolVersion")
	switch string(version) {
	case `"` + version2511 + `"`, `"` + version2506 + `"`, `"` + version2503 + `"`, `"` + version2411 + `"`:
	default:
		version = json.RawMessage(`"` + version2511 + `"`)
	}
	return json.RawMessage(`{"protocolVersion":` + string(version) + `,"capabilities":{"tools":{}},` +
		`"serverInfo":{"name":"` + name + `","version":"1"}}`)
}

// encodeTools writes a result of tools/list.
func encodeTools(tools []Tool, modern bool) (json.RawMessage, error) {
	list := make([]any, len(tools))
	for i, t := range tools {
		m := map[string]any{}
		if t.Raw != nil {
			if err := json.Unmarshal(t.Raw, &m); err != nil {
				return nil, err
			}
		} else if t.ReadOnly || t.Idempotent {
			m["annotations"] = map[string]any{"readOnlyHint": t.ReadOnly, "idempotentHint": t.Idempotent, "destructiveHint": t.Destructive}
		}
		m["inputSchema"] = json.RawMessage(`{"type":"object"}`)
		if t.TaskSupport != "" {
			m["execution"] = map[string]any{"taskSupport": t.TaskSupport}
		}
		maps.Copy(m, members{"name": t.Name, "title": t.Title, "description": t.Description,
			"inputSchema": t.InputSchema, "outputSchema": t.OutputSchema}.given())
		list[i] = m
	}
	m := map[string]any{"tools": list}
	if modern {
		m["resultType"], m["ttlMs"], m["cacheScope"] = "complete", 0, "private"
	}
	return appendValue(nil, m)
}

// encodeResult writes a result of tools/call.
func encodeResult(r *Result, modern bool) (json.RawMessage, error) {
	blocks := make([]any, len(r.Content))
	for i, c := range r.Content {
		blocks[i] = encodeContent(c)
	}
	m := members{"content": blocks, "structuredContent": r.Structured, "_meta": r.Meta}.given()
	if r.IsError {
		m["isError"] = true
	}
	if modern {
		m["resultType"] = "complete"
	}
	return appendValue(nil, m)
}

func encodeContent(c Content) any {
	if c.Raw != nil {
		return c.Raw
	}
	if c.Type == "resource" {
		resource := members{"uri": c.URI, "mimeType": c.MIMEType, "text": c.Text, "blob": c.Data}.given()
		return map[string]any{"type": c.Type, "resource": resource}
	}
	m := members{"uri": c.URI, "mimeType": c.MIMEType, "text": c.Text, "data": c.Data, "name": c.Name}.given()
	m["type"] = c.Type
	if c.Type == "text" {
		m["text"] = c.Text // even if it is empty
	}
	return m
}

func encodeProgress(token json.RawMessage, p Progress) []byte {
	m := members{"progressToken": token, "progress": p.Progress, "message": p.Message}.given()
	if p.Total != 0 {
		m["total"] = p.Total
	}
	b, _ := appendValue(nil, m) // fails only on a number that is none
	return b
}

// members are the members of a JSON object.
type members map[string]any

// given returns m without the texts and the raw values that are empty.
func (m members) given() map[string]any {
	maps.DeleteFunc(m, func(_ string, v any) bool {
		raw, isRaw := v.(json.RawMessage)
		return v == "" || isRaw && raw == nil
	})
	return m
}
