package mcp

// What an agent holds: a Client is the tools of one server, a Fleet those of
// many. First the Client: how tools are adopted, called and held to their
// schemas; then the Fleet, which is Clients under one list of names; then
// ErrorResult, which states what went wrong for a model; and last how both are
// read from a file and the environment. Servers are reached through a Session
// alone, whose policy bounds and repeats; nothing here keeps a goroutine.

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"
)

// A Client is one server as an agent holds it: the tools that were adopted, by model-facing names,
// with arguments and results held to their schemas. It is safe for concurrent use.
type Client struct {
	s     Session
	cfg   *Config // not changed; a pointer, behind which fmt does not look for secrets
	o     *Options
	large chan struct{}         // holds an element while a large result is checked
	fleet atomic.Pointer[Fleet] // gives out the names; a Client by itself has one of its own

	mu    sync.RWMutex // guards the fields below
	list  *Adoption    // in force; nil before the first
	drift []Drift      // seen since then, not adopted
	owing bool         // since then a list was read that may be another, or could not be read
}

// An Adoption is what came of reading a server's tool list.
type Adoption struct {
	Server   *ServerInfo
	Tools    []Tool      // in the server's order, by model-facing names
	Rejected []Rejection // what was left out, and why
	Partial  []Rejection // adopted, though a part of the schema is not checked
	Drift    []Drift     // against the adoption before

	held map[string]*adopted // the Tools, by name
}

// A Rejection is a tool that was left out, or held in part only.
type Rejection struct {
	Tool   string // the server's name for it
	Reason string // in our words, which may quote names of the server's
}

// Drift is a change in a server's tools since they were adopted.
type Drift struct {
	Server string
	Tool   string // the server's name for it
	Change string // "added", "removed" or "changed"
	Detail string // what changed, in our words, which may quote names of the server's
}

// New composes a Client from one Config: transport, session, policy, tools. Nothing is started before
// the first operation. A nil o means defaults. The error joins a *[ConfigError] for every problem of cfg.
func New(cfg Config, o *Options) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if o != nil && o.Rand != nil { // transport and policy draw from it, each under a lock of its own
		var mu sync.Mutex
		draw := o.Rand
		o = copied(o)
		o.Rand = func(n int64) int64 { mu.Lock(); defer mu.Unlock(); return draw(n) }
	}
	t, err := NewTransport(cfg, o)
	if err != nil {
		return nil, err
	}
	return NewClient(NewResilientSession(NewSession(t, cfg, o), cfg, o), cfg, o), nil
}

// NewClient returns a Client over any Session: usually a [ResilientSession].
func NewClient(s Session, cfg Config, o *Options) *Client {
	cfg = cfg.withDefaults()
	c := &Client{s: s, cfg: &cfg, o: cmp.Or(o, &Options{}), large: make(chan struct{}, 1)}
	newFleet(c)
	if speaker, ok := innermost(s).(reconnecter); ok {
		speaker.onReconnect(func(ctx context.Context) { c.compare(ctx, speaker) })
	}
	return c
}

// A reconnecter is a session that may find another server than the one before.
type reconnecter interface {
	Session
	onReconnect(func(context.Context))
	serverInfo() *ServerInfo
}

// Adopt connects, reads the tool list and adopts what [Config] allows. A tool that cannot be
// held safely is rejected, by name, and costs no other. It may be called again, beside running
// calls: the new list then replaces the old. A name in Allow that the server lacks, a pin that
// does not fit, or a name that another tool has, in the [Fleet] or of [Options.LocalNames], is
// a *[ConfigError]; whatever the error, nothing changes.
func (c *Client) Adopt(ctx context.Context) (*Adoption, error) {
	a, err := c.look(ctx)
	if err == nil {
		err = c.fleet.Load().admit(c, a)
	}
	if err != nil {
		return nil, err
	}
	return a, nil
}

// Adoption returns what came of the tool list that is in force, what was left
// out of it included; nil before the first adoption. It is not changed.
func (c *Client) Adoption() *Adoption {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.list
}

// Tools returns the adopted tools, in the server's order.
func (c *Client) Tools() []Tool {
	if a := c.Adoption(); a != nil {
		return slices.Clone(a.Tools)
	}
	return nil
}

// Drift returns what was seen to change since the adoption and was not adopted; Adopt adopts it.
func (c *Client) Drift() []Drift {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return slices.Clone(c.drift)
}

// Stale reports whether the tool list may have changed since it was adopted: the server has announced
// it, has vouched for it only for a time that has passed, or has come back different; or the list was
// to be read again, and could not be.
func (c *Client) Stale() bool {
	s, ok := innermost(c.s).(interface{ stale() bool })
	changed := ok && s.stale()
	c.mu.RLock()
	defer c.mu.RUnlock()
	return changed || c.owing || len(c.drift) > 0
}

// Call calls an adopted tool, by its model-facing name or the server's own; the first
// call of a Client that has adopted nothing adopts. Arguments that do not fit the tool's
// input schema are an *[ArgumentError], and nothing is sent; a result outside the output
// schema is a *[ProtocolError]; whatever else can go wrong is one of the other error types
// of this package. A tool's own failure is a Result with IsError.
func (c *Client) Call(ctx context.Context, call *Call) (*Result, error) {
	t, err := c.find(ctx, call.Tool)
	if err != nil {
		return nil, err
	}
	r, err := c.callTool(ctx, call, t)
	if re, ok := origins(err).(*RPCError); ok && re.Code == -32020 {
		// The server has other header annotations than those we know
		// (MCP 2026-07-28, tools): read them again, once.
		if t = c.reannotate(ctx, t); t != nil {
			return c.callTool(ctx, call, t)
		}
	}
	return r, err
}

// Health returns what on-call sees of the server: without a policy, no more than its name.
func (c *Client) Health() Health {
	if h, ok := c.s.(interface{ Health() Health }); ok {
		return h.Health()
	}
	return Health{Server: c.cfg.Name}
}

// String renders the health as JSON, which makes c an [expvar.Var].
func (c *Client) String() string { return c.Health().String() }

// Close ends the session. It may be called more than once, and beside calls.
func (c *Client) Close() error { return c.s.Close() }

// listTools reads the server's tools through s, to which they are known then; to the Client they are
// when they have been adopted.
func (c *Client) listTools(ctx context.Context, s Session) ([]Tool, error) {
	stale := c.Stale()
	listed, err := s.ListTools(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.owing = c.owing || c.list != nil && (stale || err != nil)
	return listed, err
}

// look reads the server's tools and decides about them; nothing is in force before commit.
func (c *Client) look(ctx context.Context) (*Adoption, error) {
	info, err := c.s.Initialize(ctx)
	if err != nil {
		return nil, err
	}
	listed, err := c.listTools(ctx, c.s)
	if err != nil {
		return nil, err
	}
	return c.choose(listed, info)
}

// commit puts a in force.
func (c *Client) commit(a *Adoption) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.list != nil {
		a.Drift = c.list.driftTo(a, c.cfg.Name)
	}
	c.list, c.drift, c.owing = a, nil, false
}

// compare reads the tool list after a reconnection, past the policy: it is a part of that reach.
func (c *Client) compare(ctx context.Context, s reconnecter) {
	if c.Adoption() == nil {
		return
	}
	if listed, err := c.listTools(ctx, s); err == nil { // else the operation that reconnected meets the fault itself
		c.differ(ctx, listed, s.serverInfo())
	}
}

// differ reports what a list has that was not adopted, as drift.
func (c *Client) differ(ctx context.Context, listed []Tool, info *ServerInfo) {
	now, _ := c.choose(listed, info) // what the Config misses now is drift, too
	c.mu.Lock()
	drift := c.list.driftTo(now, c.cfg.Name) // a later list may have been adopted meanwhile
	c.drift = drift
	c.mu.Unlock()
	if c.o.Logger != nil && len(drift) > 0 {
		c.o.Logger.WarnContext(ctx, "mcp: tools have changed", "server", c.cfg.Name, "changes", len(drift))
	}
}

// choose says which of the listed tools are adopted and why the others are not.
// The error joins what the Config demands and the list does not have.
func (c *Client) choose(listed []Tool, info *ServerInfo) (*Adoption, error) {
	a := &Adoption{Server: info, held: map[string]*adopted{}}
	reject := func(name, reason string) { a.Rejected = append(a.Rejected, Rejection{name, reason}) }
	var unmet []error
	demand := func(key, name, detail string) {
		unmet = append(unmet, &ConfigError{Server: c.cfg.Name, Key: key, Value: quoted(name), Detail: detail})
	}
	if m, ok := innermost(c.s).(interface{ malformed() int }); ok && m.malformed() > 0 {
		reject("", strconv.Itoa(m.malformed())+" entries of the list are no tools")
	}
	schemaBytes, seen := 0, map[string]bool{}
	for _, t := range listed {
		size, twice := len(t.InputSchema)+len(t.OutputSchema), seen[t.Name]
		seen[t.Name] = true
		switch {
		case t.Name == "":
			reject("", "the entry has no name")
		case twice:
			reject(t.Name, "the server lists this name twice; the first is kept")
		case c.cfg.Allow != nil && !slices.Contains(c.cfg.Allow, t.Name), slices.Contains(c.cfg.Deny, t.Name):
			// the operator's choice needs no report
		case len(a.Tools) >= c.cfg.MaxTools:
			reject(t.Name, "over max_tools ("+strconv.Itoa(c.cfg.MaxTools)+")")
		case schemaBytes+size > c.cfg.MaxSchemaBytes:
			reject(t.Name, "over max_schema_bytes ("+strconv.Itoa(c.cfg.MaxSchemaBytes)+")")
		default:
			held, partial, err := c.compile(t, info)
			if err == nil && a.held[held.Name] != nil {
				err = errors.New("its model-facing name " + quoted(held.Name) + " is taken by " + quoted(a.held[held.Name].Remote))
			}
			if err != nil {
				reject(t.Name, err.Error())
				continue
			}
			if pin, ok := c.cfg.Pins[t.Name]; ok && pin != held.digest {
				demand("pins", t.Name, "the schema has changed: its fingerprint is now "+held.digest)
			}
			schemaBytes += size
			a.held[held.Name] = held
			a.Tools = append(a.Tools, held.Tool)
			a.Partial = append(a.Partial, partial...)
		}
	}
	for _, name := range c.cfg.Allow {
		if !seen[name] {
			demand("allow", name, "the server has no such tool"+suggest(name, names(listed)))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.cfg.Pins)) {
		if !seen[name] {
			demand("pins", name, "the server no longer has this tool")
		}
	}
	return a, errors.Join(unmet...)
}

// An adopted tool, with what was compiled for it. It does not change.
type adopted struct {
	Tool
	client  *Client
	input   *schema
	output  *schema // nil if results are not checked
	headers []headerParam
	digest  string // of the schemas
}

// compile prepares a tool, and lists what of its schemas will not be checked, or says why it cannot be held.
func (c *Client) compile(t Tool, info *ServerInfo) (*adopted, []Rejection, error) {
	switch {
	case t.TaskSupport == "required":
		return nil, nil, errors.New("it can only be called as a task, which is not supported")
	case t.InputSchema == nil:
		return nil, nil, errors.New("it has no input schema")
	}
	modern := info != nil && info.Protocol == version2026
	input, err := compileSchema(t.InputSchema, schemaOptions{input: true, headers: modern && c.cfg.Transport == "http"})
	if err != nil {
		return nil, nil, err
	}
	a := &adopted{Tool: t, client: c, input: input, headers: input.headers(), digest: fingerprint(t.InputSchema, t.OutputSchema)}
	a.Remote, a.Server, a.Name = t.Name, c.cfg.Name, localName(c.cfg.Prefix, t.Name)
	partial := unheld("input", t.Name, input)
	if t.OutputSchema != nil && c.cfg.Results != "off" {
		if a.output, err = compileSchema(t.OutputSchema, schemaOptions{anyRoot: modern}); err != nil {
			partial = append(partial, Rejection{t.Name, "output schema is not checked: " + err.Error()})
		} else {
			partial = append(partial, unheld("output", t.Name, a.output)...)
		}
	}
	return a, partial, nil
}

// unheld lists the parts of a schema that will not be checked. A format that we
// do not know is none: it says what a text means, and demands nothing.
func unheld(which, tool string, s *schema) (parts []Rejection) {
	for _, u := range s.unchecked() {
		if u.Why != "annotation" {
			parts = append(parts, Rejection{tool, which + " schema: " + quoted(u.Keyword) + " at " + quoted(u.Pointer) + " is not checked: " + u.Why})
		}
	}
	return parts
}

// driftTo names the differences between two adoptions, by tool.
func (a *Adoption) driftTo(now *Adoption, server string) (out []Drift) {
	all := maps.Clone(a.held)
	maps.Copy(all, now.held)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		switch had, has := a.held[name], now.held[name]; {
		case had == nil:
			out = append(out, Drift{server, has.Remote, "added", ""})
		case has == nil:
			out = append(out, Drift{server, had.Remote, "removed", ""})
		case has.digest != had.digest:
			out = append(out, Drift{server, has.Remote, "changed", difference(had.Tool, has.Tool)})
		}
	}
	return out
}

// difference says in a few words how the schemas of two tools differ.
func difference(had, has Tool) string {
	if d := schemaDiff(had.InputSchema, has.InputSchema); d != "" {
		return "input schema: " + d
	}
	return "output schema: " + schemaDiff(had.OutputSchema, has.OutputSchema)
}

// find returns the adopted tool of that name.
func (c *Client) find(ctx context.Context, name string) (*adopted, error) {
	a := c.Adoption()
	if a == nil {
		var err error
		if a, err = c.Adopt(ctx); err != nil {
			return nil, err
		}
	}
	if t := a.held[name]; t != nil {
		return t, nil
	}
	for _, t := range a.held {
		if t.Remote == name {
			return t, nil
		}
	}
	return nil, unknownTool(c.cfg.Name, name, a.Tools)
}

// callTool calls t: arguments are checked before, the result after.
func (c *Client) callTool(ctx context.Context, call *Call, t *adopted) (*Result, error) {
	args, issues, err := t.arguments(call.Arguments)
	if err != nil {
		return nil, err
	}
	out := *call
	out.Tool, out.Arguments, out.tool = t.Remote, args, t
	out.repeatable = c.cfg.TrustAnnotations && (t.ReadOnly || t.Idempotent)
	if len(t.headers) > 0 {
		out.header = mirror(t.headers, args)
	}
	r, err := c.s.CallTool(ctx, &out)
	if err == nil && !out.checked && (r == nil || r.Degraded == "") { // a substitute keeps no promise, and says so
		err = t.check(ctx, r)
	}
	if err != nil {
		if ae, ok := origins(err).(*ArgumentError); ok { // the server's name for the tool is a word of the server
			ae = copied(ae)
			ae.Tool, err = t.Name, ae
		}
		return nil, err
	}
	if issues != nil { // on a copy: the session may have given its result to others, too
		r = copied(r)
		r.Issues = append(issues, r.Issues...)
	}
	return r, nil
}

// reannotate reads the header annotations of t again and returns it with them,
// nil if they cannot be had. Nothing else of the new list is adopted.
func (c *Client) reannotate(ctx context.Context, t *adopted) *adopted {
	listed, err := c.listTools(ctx, c.s)
	i := slices.IndexFunc(listed, func(l Tool) bool { return l.Name == t.Remote })
	if err != nil {
		return nil
	}
	if c.differ(ctx, listed, c.Adoption().Server); i < 0 {
		return nil
	}
	s, err := compileSchema(listed[i].InputSchema, schemaOptions{input: true, headers: true})
	if err != nil {
		return nil
	}
	fresh := *t
	fresh.headers = s.headers()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.list.held[t.Name] == t { // else somebody has adopted a later list
		next := *c.list
		next.held = maps.Clone(next.held)
		next.held[t.Name] = &fresh
		c.list = &next
	}
	return &fresh
}

// arguments returns what is sent for the caller's, as plain JSON values, and the issues that are let pass.
func (t *adopted) arguments(v any) (map[string]any, []Issue, error) {
	fail := func(issues []Issue, more bool) error {
		return &ArgumentError{Origin: Origin{Server: t.Server, Op: "tools/call"}, Tool: t.Name, Issues: issues, More: more}
	}
	args, ok := v.(map[string]any)
	if v != nil && (!ok || !isPlain(args, 0)) {
		b, err := appendValue(nil, v)
		if err == nil {
			v, err = decodeValue(b)
		}
		if args, ok = v.(map[string]any); err != nil || !ok && v != nil {
			return nil, nil, fail([]Issue{{Keyword: "type", Want: "an object", Got: "something else"}}, false)
		}
	}
	if args == nil {
		args = map[string]any{}
	}
	if t.client.cfg.Arguments == "off" {
		return args, nil, nil
	}
	verdict := t.input.validate(args)
	if verdict == verdictInvalid && t.client.cfg.Normalize {
		if repaired, changes, ok := t.input.normalize(args, t.Destructive && !t.ReadOnly); ok {
			return repaired, changes, nil
		}
	}
	switch verdict {
	case verdictValid:
		return args, nil, nil
	case verdictBudget:
		why := &SchemaError{Reason: "budget", Detail: "the arguments cannot be checked within bounds; nothing was sent"}
		return nil, nil, fmt.Errorf("mcp: server %q: tools/call: arguments for tool %s: %w", t.Server, quoted(t.Name), why)
	}
	issues, more := t.input.explain(args, true)
	if t.client.cfg.Arguments == "advise" {
		return args, issues, nil
	}
	return nil, nil, fail(issues, more)
}

// maxPlainDepth bounds the walk over a caller's value, which may be a cycle.
const maxPlainDepth = 128

// isPlain reports whether v holds only what a JSON decoder yields, or numbers that callers write by hand.
func isPlain(v any, depth int) bool {
	switch v := v.(type) {
	case nil, string, bool, json.Number, float64, int, int64:
		return true
	case []any:
		return depth < maxPlainDepth && !slices.ContainsFunc(v, func(e any) bool { return !isPlain(e, depth+1) })
	case map[string]any:
		for _, e := range v {
			if depth >= maxPlainDepth || !isPlain(e, depth+1) {
				return false
			}
		}
		return true
	}
	return false
}

// largeResult is structured content that is checked one at a time: decoded, it may take forty times as much.
const largeResult = 64 << 10

// check holds a result to the tool's output schema (MCP 2025-06-18, tools). A tool's own failure is exempt.
func (t *adopted) check(ctx context.Context, r *Result) error {
	origin := Origin{Server: t.Server, Op: "tools/call"}
	if r == nil {
		return &ProtocolError{Origin: origin, Detail: "the session gave no result"}
	}
	if t.OutputSchema == nil || r.IsError || t.client.cfg.Results == "off" {
		return nil
	}
	fail := func(detail string, issues []Issue) error {
		if t.client.cfg.Results == "advise" {
			r.Issues = append(r.Issues, issues...)
			return nil
		}
		return &ProtocolError{Origin: origin, Detail: detail, Issues: issues, Raw: clip(r.Structured), Result: r}
	}
	if r.Structured == nil {
		return fail("the tool promises structured content and gave none", []Issue{{Keyword: "required", Want: "structured content"}})
	}
	if t.output == nil {
		return nil
	}
	if len(r.Structured) > largeResult {
		select {
		case t.client.large <- struct{}{}:
			defer func() { <-t.client.large }()
		case <-ctx.Done():
			return &TransportError{Origin: origin, Reason: ReasonCancelled, Sent: true, Detail: "waiting to be checked", Err: ctx.Err()}
		}
	}
	v, err := decodeValue(r.Structured)
	if err != nil {
		return fail("the structured content cannot be read", nil)
	}
	switch t.output.validate(v) {
	case verdictValid:
		return nil
	case verdictBudget:
		return fail("the structured content cannot be checked within bounds", nil)
	}
	issues, _ := t.output.explain(v, false)
	return fail("the structured content does not fit the tool's output schema", issues)
}

// mirror picks the arguments that travel as headers too (MCP 2026-07-28, transports): not absent or null ones.
func mirror(params []headerParam, args map[string]any) map[string]string {
	out := map[string]string{}
	for _, p := range params {
		var v any = args
		for _, k := range p.Path {
			m, _ := v.(map[string]any)
			v = m[k]
		}
		switch v := v.(type) {
		case nil, map[string]any, []any:
		case string:
			out[p.Name] = v
		default:
			b, _ := appendValue(nil, v) // of what cannot be written nothing is sent at all
			out[p.Name] = string(b)
		}
	}
	return out
}

// unknownTool is the refusal of a call to a tool that was not adopted.
func unknownTool(server, tool string, known []Tool) error {
	hint := strings.TrimPrefix(suggest(tool, names(known)), "; ")
	return &ArgumentError{Origin: Origin{Server: server, Op: "tools/call"}, Tool: tool, Unknown: true,
		Issues: []Issue{{Keyword: "tool", Want: hint}}}
}

// names lists the names of tools.
func names(tools []Tool) []string {
	out := make([]string, len(tools))
	for i, t := range tools {
		out[i] = t.Name
	}
	return out
}

// localName returns the model-facing name of a tool: at most 64 letters, digits,
// '_' and '-', which every model API takes. The same tool under the same prefix
// always has the same name.
func localName(prefix, tool string) string {
	name := tool
	if prefix != "" {
		name = prefix + "-" + tool
	}
	folded := foldName(name, '_')
	if len(folded) <= 64 {
		return folded
	}
	sum := sha256.Sum256([]byte(name))
	return folded[:55] + "-" + hex.EncodeToString(sum[:4])
}

// nameChars are what the names of servers, and model-facing names, are made of.
const nameChars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"

// foldName puts one character in the place of each that a name may not have.
func foldName(name string, in rune) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune(nameChars, r) {
			return r
		}
		return in
	}, name)
}

// A Resource is a resource as the server lists it.
type Resource struct {
	URI         string `json:"uri"`
	Name        string `json:"name"`
	Title       string `json:"title"`
	Description string `json:"description"`
	MIMEType    string `json:"mimeType"`
}

// A Prompt is a prompt template as the server lists it.
type Prompt struct {
	Name        string `json:"name"`
	Title       string `json:"title"`
	Description string `json:"description"`
	Arguments   []struct {
		Name        string `json:"name"`
		Description string `json:"description"`
		Required    bool   `json:"required"`
	} `json:"arguments"`
}

// A PromptMessage is one message of an expanded prompt.
type PromptMessage struct {
	Role    string // "user" or "assistant"
	Content Content
}

// Request sends any request under the policy; see [TransportSession.Request]. If the
// Client's Session carries tools only, the error wraps [errors.ErrUnsupported].
func (c *Client) Request(ctx context.Context, method string, params, out any) error {
	if r, ok := c.s.(requester); ok {
		return r.Request(ctx, method, params, out)
	}
	return toolsOnly(c.cfg.Name, method)
}

// Resources lists the server's resources, all pages of them. Its errors, like those of
// ReadResource, Prompts, Prompt and Complete, are those of Request.
func (c *Client) Resources(ctx context.Context) ([]Resource, error) {
	return readList[Resource](ctx, c, "resources")
}

// ReadResource reads a resource. Text and Data of each block hold its text or its base64 blob.
func (c *Client) ReadResource(ctx context.Context, uri string) ([]Content, error) {
	var out struct {
		Contents []struct{ URI, MIMEType, Text, Blob string }
	}
	if _, err := c.read(ctx, "resources/read", map[string]any{"uri": uri}, &out); err != nil {
		return nil, err
	}
	blocks := make([]Content, len(out.Contents))
	for i, b := range out.Contents {
		blocks[i] = Content{Type: "resource", URI: b.URI, MIMEType: b.MIMEType, Text: b.Text, Data: b.Blob}
	}
	return blocks, nil
}

// Prompts lists the server's prompts, all pages of them.
func (c *Client) Prompts(ctx context.Context) ([]Prompt, error) {
	return readList[Prompt](ctx, c, "prompts")
}

// Prompt expands a prompt with these arguments, which may be nil.
func (c *Client) Prompt(ctx context.Context, name string, args map[string]string) ([]PromptMessage, error) {
	const method = "prompts/get"
	params := map[string]any{"name": name}
	if len(args) > 0 {
		params["arguments"] = args
	}
	var out struct {
		Messages []struct {
			Role    string
			Content json.RawMessage
		}
	}
	if _, err := c.read(ctx, method, params, &out); err != nil {
		return nil, err
	}
	messages := make([]PromptMessage, len(out.Messages))
	for i, m := range out.Messages {
		r, err := decodeToolResult([]byte(`{"content":[` + string(m.Content) + `]}`)) // a block like those of a tool
		if err != nil || len(r.Content) != 1 {
			return nil, c.unreadable(method, ReasonProtocol, "a message has no readable content", m.Content)
		}
		messages[i] = PromptMessage{m.Role, r.Content[0]}
	}
	return messages, nil
}

// Complete asks for completions of an argument of a prompt or of a resource template: ref is
// {"type":"ref/prompt","name":…} or {"type":"ref/resource","uri":…}.
func (c *Client) Complete(ctx context.Context, ref map[string]any, argument, value string) ([]string, error) {
	var out struct{ Completion struct{ Values []string } }
	params := map[string]any{"ref": ref, "argument": map[string]any{"name": argument, "value": value}}
	_, err := c.read(ctx, "completion/complete", params, &out)
	return out.Completion.Values, err
}

// readList reads a list to its last page, each page under the policy.
func readList[T any](ctx context.Context, c *Client, what string) (all []T, err error) {
	method := what + "/list"
	var params any
	for p := (pager{limit: c.cfg.MaxMessageBytes}); ; {
		var page struct {
			NextCursor *string `json:"nextCursor"`
		}
		raw, err := c.read(ctx, method, params, &page)
		if err != nil {
			return nil, err
		}
		var entries []T
		if json.Unmarshal(member(raw, what), &entries) != nil {
			return nil, c.unreadable(method, ReasonProtocol, "the result is not a list", raw)
		}
		if reason, detail := p.next(page.NextCursor, len(raw)); detail != "" {
			return nil, c.unreadable(method, reason, detail, raw)
		}
		all = append(all, entries...)
		if page.NextCursor == nil {
			return all, nil
		}
		params = map[string]any{"cursor": *page.NextCursor}
	}
}

// read makes a request whose result has the shape of out. Its values are counted
// first: as Go values, [{},{}] takes thirty times what it took on the wire.
func (c *Client) read(ctx context.Context, method string, params, out any) (raw json.RawMessage, err error) {
	if err = c.Request(ctx, method, params, &raw); err != nil {
		return nil, err
	}
	switch _, err = decodeValue(raw); {
	case err == errLimit:
		return nil, c.unreadable(method, ReasonLimit, "the result has too many values", raw)
	case err != nil || json.Unmarshal(raw, out) != nil:
		return nil, c.unreadable(method, ReasonProtocol, "the result is not of the expected shape", raw)
	}
	return raw, nil
}

// unreadable is the failure of a request whose result cannot be used.
func (c *Client) unreadable(method string, reason Reason, detail string, raw []byte) error {
	return &TransportError{Origin: Origin{Server: c.cfg.Name, Op: method}, Reason: reason, Sent: true, Detail: detail, Raw: clip(raw)}
}

// A Fleet is many servers under one list of tools. It is safe for concurrent use.
type Fleet struct {
	clients []*Client
	sweep   chan struct{} // holds an element while servers are adopted anew

	mu       sync.RWMutex // guards the fields below; taken before that of a Client
	routes   map[string]*Client
	degraded map[*Client]Degraded
}

// Degraded is an optional server that is missing, as data.
type Degraded struct {
	Server string  `json:"server"`
	Class  Outcome `json:"class"`  // OutcomeFault for a problem of the Config, too
	Reason string  `json:"reason"` // in our words
	Err    error   `json:"-"`
}

// Open composes a Client for each Config and assembles them. Nothing is
// started if a Config has a problem; the error then joins a *[ConfigError] for
// every problem of all. A nil o means defaults.
func Open(ctx context.Context, cfgs []Config, o *Options) (*Fleet, error) {
	var clients []*Client
	var errs []error
	for _, cfg := range cfgs {
		c, err := New(cfg, o)
		clients, errs = append(clients, c), append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return Assemble(ctx, clients...)
}

// newFleet puts clients under one list of names, none of which is given out yet.
func newFleet(clients ...*Client) *Fleet {
	f := &Fleet{clients: clients, sweep: make(chan struct{}, 1), routes: map[string]*Client{}, degraded: map[*Client]Degraded{}}
	for _, c := range clients {
		c.fleet.Store(f)
	}
	return f
}

// errFailFast ends the adoption of the others when a required server failed.
var errFailFast = fmt.Errorf("a required server failed: %w", context.Canceled)

// Assemble adopts all servers at once; tools, what is degraded and errors are in the order of the
// arguments, whatever the order of arrival. The clients are the Fleet's from then on, which closes
// them. A required server that cannot be adopted is an *[UnavailableError] or a *[ConfigError], two
// tools that would answer to one name are a *[ConfigError]: the error joins them, the others are
// cancelled and everything is closed. An optional server that cannot be is [Fleet.Degraded].
func Assemble(ctx context.Context, clients ...*Client) (*Fleet, error) {
	f := newFleet(clients...)
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	found := survey(inner, clients, func(c *Client) {
		if !c.cfg.Optional {
			cancel(errFailFast)
		}
	})
	if err := ctx.Err(); err != nil {
		return nil, errors.Join(abandoned("assemble", err), f.Close())
	}
	var failed []error
	for _, s := range found {
		switch {
		case s.err == nil:
			failed = append(failed, f.admit(s.client, s.list))
		case s.client.cfg.Optional:
			f.note(s.client, s.err)
		case !s.cut: // else the failure is another's
			if !errors.As(s.err, new(*UnavailableError)) && !errors.As(s.err, new(*ConfigError)) {
				s.err = &UnavailableError{Origin: Origin{Server: s.client.cfg.Name, Op: "adopt"}, Err: s.err}
			}
			failed = append(failed, s.err)
		}
	}
	if err := errors.Join(failed...); err != nil {
		f.Close() // its errors must not hide the failure
		return nil, err
	}
	return f, nil
}

// Tools returns the tools of all servers, in the order of declaration, by
// model-facing names.
func (f *Fleet) Tools() []Tool {
	f.mu.RLock() // so that no list is put in force meanwhile, and a tool that moves is not listed twice
	defer f.mu.RUnlock()
	var all []Tool
	for _, c := range f.clients {
		all = append(all, c.Tools()...)
	}
	return all
}

// Client returns the client of a server, the first of that name, or nil.
func (f *Fleet) Client(server string) *Client {
	for _, c := range f.clients {
		if c.cfg.Name == server {
			return c
		}
	}
	return nil
}

// Call calls a tool by its model-facing name; see [Client.Call]. An unknown name is an *[ArgumentError].
func (f *Fleet) Call(ctx context.Context, call *Call) (*Result, error) {
	if c := f.route(call.Tool); c != nil {
		return c.Call(ctx, call)
	}
	return nil, unknownTool("", call.Tool, f.Tools())
}

// Answer calls a tool for a model. It always returns a result: an error is one as [ErrorResult]
// makes it. Text of the server is put into an envelope that marks it as data and that it cannot
// close. Where the content runs past [Config.MaxResultBytes] it is cut, which is said. Structured
// is unmarked, and nil if it is longer than that.
func (f *Fleet) Answer(ctx context.Context, call *Call) *Result {
	c := f.route(call.Tool)
	if c == nil {
		return ErrorResult(unknownTool("", call.Tool, f.Tools()))
	}
	r, err := c.Call(ctx, call)
	if err != nil {
		return ErrorResult(err)
	}
	return forModel(r, foldName(c.cfg.Name, '_')+"/"+call.Tool, max(0, c.cfg.MaxResultBytes))
}

// Degraded lists the optional servers that were missing when the fleet was assembled, in the
// order of declaration, until [Fleet.Readopt] or [Fleet.Refresh] brings them back.
func (f *Fleet) Degraded() []Degraded {
	f.mu.RLock()
	defer f.mu.RUnlock()
	var out []Degraded
	for _, c := range f.clients {
		if d, ok := f.degraded[c]; ok {
			out = append(out, d)
		}
	}
	return out
}

// Notice says, as data for the model's context, what is missing from this run; put it there
// once. It is empty when nothing is missing.
func (f *Fleet) Notice() string {
	var lines []string
	for _, d := range f.Degraded() {
		lines = append(lines, "The tools of server "+strconv.Quote(d.Server)+" are not available in this run: "+d.Reason+".")
	}
	if lines == nil {
		return ""
	}
	return envelop("mcp/unavailable", strings.Join(lines, "\n"))
}

// Health returns the health of each server, in the order of declaration.
func (f *Fleet) Health() []Health {
	out := make([]Health, len(f.clients))
	for i, c := range f.clients {
		out[i] = c.Health()
	}
	return out
}

// String renders Health and Degraded as JSON, which makes a Fleet an [expvar.Var].
func (f *Fleet) String() string {
	b, _ := json.Marshal(map[string]any{"servers": f.Health(), "degraded": f.Degraded()}) // nothing in it can fail
	return string(b)
}

// Readopt tries the degraded servers again and returns the names of those that are back, in the order
// of declaration. It may run beside calls; the caller decides when it is worth it. A server that is
// still missing is no error, but [Fleet.Degraded], with the latest reason; an error is the end of ctx.
func (f *Fleet) Readopt(ctx context.Context) (back []string, err error) {
	err = f.readopt(ctx, f.missing, func(s surveyed) {
		if f.note(s.client, s.err); s.err == nil {
			back = append(back, s.client.cfg.Name)
		}
	})
	return back, err
}

// Refresh adopts the tools of stale servers anew (see [Client.Stale]), and returns what changed.
// A server that cannot be read keeps the tools it had; the error joins why. It may run beside calls.
func (f *Fleet) Refresh(ctx context.Context) (changes []Drift, err error) {
	var errs []error
	err = f.readopt(ctx, (*Client).Stale, func(s surveyed) {
		if errs = append(errs, s.err); s.err == nil {
			f.note(s.client, nil)
			changes = append(changes, s.list.Drift...)
		}
	})
	return changes, errors.Join(append(errs, err)...)
}

// Close closes all servers at once and returns when the last has ended. The error joins theirs.
func (f *Fleet) Close() error {
	errs := make([]error, len(f.clients))
	var wg sync.WaitGroup
	for i, c := range f.clients {
		wg.Go(func() { errs[i] = c.Close() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// route returns the client that holds a tool, nil if none does.
func (f *Fleet) route(tool string) *Client {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.routes[tool]
}

// A surveyed is a client, and what its server has or why that cannot be said.
type surveyed struct {
	client *Client
	list   *Adoption
	err    error
	cut    bool // err says no more than that the survey was ended
}

// survey asks all servers at once, each on a goroutine that it waits for, and
// tells failed of those that cannot be adopted, as soon as that is known. A panic
// or runtime.Goexit in one is that one's failure.
func survey(ctx context.Context, clients []*Client, failed func(*Client)) []surveyed {
	found := make([]surveyed, len(clients))
	var wg sync.WaitGroup
	for i, c := range clients {
		s := &found[i]
		s.client = c
		wg.Go(func() {
			defer func() {
				if v := recover(); s.list == nil && s.err == nil {
					s.err = &TransportError{Origin: Origin{Server: c.cfg.Name, Op: "adopt"}, Reason: ReasonProtocol, Detail: fmt.Sprintf("panic: %T", v)}
				}
				s.cut = ctx.Err() != nil && (errors.Is(s.err, context.Canceled) || errors.Is(s.err, context.DeadlineExceeded))
				if s.err != nil {
					failed(c)
				}
			}()
			s.list, s.err = c.look(ctx)
		})
	}
	wg.Wait()
	return found
}

// readopt adopts those clients anew that are meant, and tells done of each, in
// the order of declaration. One sweep runs at a time.
func (f *Fleet) readopt(ctx context.Context, meant func(*Client) bool, done func(surveyed)) error {
	select {
	case f.sweep <- struct{}{}:
		defer func() { <-f.sweep }()
	case <-ctx.Done():
		return abandoned("adopt", ctx.Err())
	}
	some := slices.DeleteFunc(slices.Clone(f.clients), func(c *Client) bool { return !meant(c) })
	for _, s := range survey(ctx, some, func(*Client) {}) {
		if s.err == nil {
			s.err = f.admit(s.client, s.list)
		}
		if !s.cut {
			done(s)
		}
	}
	if err := ctx.Err(); err != nil {
		return abandoned("adopt", err)
	}
	return nil
}

// admit puts a list in force, and gives its tools their names in the fleet; if one is taken, it changes nothing.
func (f *Fleet) admit(c *Client, a *Adoption) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range a.Tools {
		rival, cure := "", ""
		if holder := f.routes[t.Name]; holder != nil && holder != c {
			rival, cure = "one of server "+quoted(holder.cfg.Name), "give one of them a prefix"
		} else if slices.Contains(c.o.LocalNames, t.Name) {
			rival, cure = "a local one", "give the server a prefix"
		}
		if rival != "" {
			return &ConfigError{Server: c.cfg.Name, Key: "prefix", Value: quoted(c.cfg.Prefix), Layer: "code",
				Detail: "a tool of it and " + rival + " would both be called " + quoted(t.Name) + "; " + cure}
		}
	}
	maps.DeleteFunc(f.routes, func(_ string, holder *Client) bool { return holder == c })
	for _, t := range a.Tools {
		f.routes[t.Name] = c
	}
	c.commit(a)
	return nil
}

// missing reports whether c is an optional server that is missing.
func (f *Fleet) missing(c *Client) bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	_, ok := f.degraded[c]
	return ok
}

// note takes an optional server among those that are missing, or off their list if err is nil.
func (f *Fleet) note(c *Client, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.degraded, c)
	if err != nil {
		reason := cmp.Or(absences[errorCode(err)], "it could not be used")
		f.degraded[c] = Degraded{Server: c.cfg.Name, Class: classify(err, "").class, Reason: reason, Err: err}
	}
}

// abandoned is the error of an operation on the fleet that its caller, or its run, ended.
func abandoned(op string, err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return &BudgetError{Origin: Origin{Op: op}, Breached: "run_seconds", Err: err}
	}
	return &TransportError{Origin: Origin{Op: op}, Reason: ReasonCancelled, Err: err}
}

// absences says why a server is missing, by the code of its error.
var absences = map[string]string{
	"TIMEOUT":            "it did not answer in time",
	"SERVER_UNAVAILABLE": "it could not be reached",
	"DISCONNECTED":       "it could not be reached",
	"AUTH_REQUIRED":      "it refused our credentials",
	"PROTOCOL":           "it did not speak the protocol",
	"INVALID_RESULT":     "it did not speak the protocol",
	"LIMIT":              "it sent more than is allowed",
	"REFUSED":            "it refused to serve",
	"BUDGET_EXCEEDED":    "the run was out of time",
	"CONFIGURATION":      "it cannot be used as configured",
}

// forModel returns r as a model may read it: at most limit bytes of it, and each text in
// an envelope. Those after the first count, or many short texts would be a long one.
func forModel(r *Result, source string, limit int) *Result {
	out := *r
	out.Content = nil
	blocks := r.Content
	if len(blocks) == 0 && r.Structured != nil {
		blocks = []Content{{Type: "text", Text: string(r.Structured)}}
	}
	left, cut, envelope, further := limit, false, 0, len(envelop(source, ""))
	for _, b := range blocks {
		isText := b.Text != "" || b.Data == ""
		size := len(b.Data) + len(b.MIMEType) + len(b.URI) + len(b.Name) + max(0, len(b.Type)-len("resource_link"))
		if isText {
			size += envelope
		}
		if size > left {
			cut = true
			continue // half an image is none
		}
		left -= size
		if isText {
			text := cmp.Or(b.Text, string(b.Raw), b.URI)
			if len(text) > left {
				text, cut = strings.ToValidUTF8(text[:left], ""), true
			}
			left -= len(text)
			b.Text = envelop(source, text)
			envelope = further
		}
		b.Raw = nil
		out.Content = append(out.Content, b)
	}
	if len(r.Structured) > limit {
		out.Structured = nil
	}
	if cut {
		out.Content = append(out.Content, Content{Type: "text",
			Text: "The result was longer than " + strconv.Itoa(limit) + " bytes and has been cut. Ask for less at a time."})
	}
	return &out
}

// envelop marks text as data of a source, which is a name of ours. Where the text
// contains the closing tag, the tag is broken up, however it is spelt.
func envelop(source, text string) string {
	const tag, dash = "untrusted-data", len("untrusted")
	var b strings.Builder
	b.WriteString("<" + tag + ` source="` + source + "\">\n")
	written := 0
	for i := range len(text) - (len(tag) - 1) {
		if text[i+dash] == '-' && strings.EqualFold(text[i:i+len(tag)], tag) {
			b.WriteString(text[written:i+dash] + "\u200b")
			written = i + dash
		}
	}
	b.WriteString(text[written:] + "\n</" + tag + ">")
	return b.String()
}

// ErrorResult states any error as a result that a model can act on: IsError, and one JSON object
// {error, message, details}. The codes are a closed list; the package comment has them. The details
// are those of server, call, may_have_run, retry_after_seconds and fields that are known. Nothing
// internal is in it, and of the server's only what says how to correct a call: the name of a tool,
// and names and values from an input schema.
func ErrorResult(err error) *Result {
	code := errorCode(err)
	message, details := errorAdvice[code], map[string]any{}
	ours := origins(err)
	if ours != nil {
		details["server"], details["call"] = ours.origin().Server, ours.origin().Call
	}
	maps.DeleteFunc(details, func(_ string, v any) bool { return v == "" })
	var wait time.Duration
	switch e := rootOf(ours).(type) {
	case *TransportError:
		details["may_have_run"], wait = e.Sent, e.RetryAfter
	case *BudgetError:
		details["may_have_run"] = e.Sent
	case *UnavailableError:
		details["may_have_run"], wait = false, e.RetryAfter
	case *ArgumentError:
		message = e.Feedback()
		if !e.Unknown && len(e.Issues) > 0 {
			fields := make([]any, len(e.Issues))
			for i, is := range e.Issues {
				fields[i] = map[string]any{"path": is.Path, "keyword": is.Keyword, "want": is.Want, "got": is.Got}
			}
			details["fields"] = fields
		}
	}
	if wait > 0 {
		details["retry_after_seconds"] = int64(math.Ceil(wait.Seconds()))
	}
	b, _ := appendValue(nil, map[string]any{"error": code, "message": message, "details": details}) // nothing in it can fail
	return &Result{IsError: true, Content: []Content{{Type: "text", Text: string(b)}}}
}

// rootOf returns the error that says what happened: e, or, if that reports a
// required server that could not be adopted, the reason why.
func rootOf(e originator) originator {
	if ue, ok := e.(*UnavailableError); ok && ue.State == BreakerClosed {
		if why := origins(ue.Err); why != nil {
			return rootOf(why)
		}
	}
	return e
}

// errorAdvice is the closed list of codes, and what each tells a model to do.
var errorAdvice = map[string]string{
	"INVALID_ARGUMENTS":  "The arguments do not fit the tool's schema; nothing was sent. Correct the fields and call again.",
	"UNKNOWN_TOOL":       "There is no tool of this name. Use one from the list of tools.",
	"SERVER_UNAVAILABLE": "The server cannot be used at the moment. Go on without it, or try again after the time in details.",
	"RATE_LIMITED":       "The server asks for fewer calls; this one was not run. Wait for the time in details before calling again.",
	"TIMEOUT":            "The server did not answer in time. If details say that the call may have run, check its effect before calling again.",
	"BUDGET_EXCEEDED":    "This run is out of time. Finish with what there is; do not call again.",
	"DISCONNECTED":       "The connection was lost during the call. If details say that the call may have run, check its effect before calling again.",
	"PROTOCOL":           "The server gave no usable answer. The same call will likely fail again; use another way.",
	"INVALID_RESULT":     "The server's result broke its own schema and was withheld. Use another way.",
	"LIMIT":              "A message was too large, or there were too many calls at once. Ask for less at a time.",
	"REFUSED":            "The server refused the request. Do not repeat it unchanged.",
	"AUTH_REQUIRED":      "The server wants other credentials. Ask the user to authenticate again.",
	"CANCELLED":          "The call was cancelled. Do not repeat it unless asked to.",
	"SCHEMA":             "The tool's schema cannot be checked within bounds; nothing was sent. Use another tool.",
	"CONFIGURATION":      "The server is configured wrongly. Tell the user.",
	"UNEXPECTED":         "The call failed for a reason that is not known. Use another way.",
}

// errorCode puts an error into the list.
func errorCode(err error) string {
	code := "UNEXPECTED"
	switch e := rootOf(origins(err)).(type) {
	case *ArgumentError:
		if e.Unknown {
			return "UNKNOWN_TOOL"
		}
		return "INVALID_ARGUMENTS"
	case *BudgetError:
		return "BUDGET_EXCEEDED"
	case *TransportError:
		return transportCode(e)
	case *RPCError:
		return "REFUSED"
	case *ProtocolError:
		return "INVALID_RESULT"
	case *UnavailableError:
		if code = "SERVER_UNAVAILABLE"; e.State != BreakerClosed || e.Err == nil {
			return code
		}
	}
	switch {
	case errors.As(err, new(*SchemaError)):
		return "SCHEMA"
	case errors.As(err, new(*ConfigError)):
		return "CONFIGURATION"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return "CANCELLED"
	}
	return code
}

func transportCode(e *TransportError) string {
	switch {
	case e.Reason == ReasonCancelled && errors.Is(e.Err, context.DeadlineExceeded):
		return "BUDGET_EXCEEDED"
	case e.Status == 401, e.Status == 403:
		return "AUTH_REQUIRED"
	case e.Status == 429:
		return "RATE_LIMITED"
	case e.Reason == ReasonUnavailable:
		return "SERVER_UNAVAILABLE"
	case e.Status >= 300:
		return "REFUSED"
	}
	rest := map[Reason]string{ReasonCancelled: "CANCELLED", ReasonTimeout: "TIMEOUT", ReasonDisconnected: "DISCONNECTED", ReasonLimit: "LIMIT"}
	return cmp.Or(rest[e.Reason], "PROTOCOL")
}

// LoadConfigs reads a file as [ParseConfigs] does, with the environment of this
// process as the layer above it. A file that cannot be read is a *[ConfigError].
func LoadConfigs(path string) ([]Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, &ConfigError{Layer: "file", Detail: "the file cannot be read: " + err.Error()}
	}
	return ParseConfigs(data, os.LookupEnv)
}

// ParseConfigs reads a list of configuration objects, or the `mcpServers` object of other hosts.
// Its texts may name variables, ${VAR} or ${VAR:-default}, which lookup resolves. A variable
// MCP_<NAME>_<KEY>, in capitals and with '_' for '-' and '.', overrides a key of the file; a list
// there is JSON or has commas, an object is JSON; and a transport chosen there discards what the
// file says about the other one. A nil lookup means that there are no variables. The error joins
// a *[ConfigError] for every problem; the configs are those that have none.
func ParseConfigs(data []byte, lookup func(string) (string, bool)) ([]Config, error) {
	if lookup == nil {
		lookup = func(string) (string, bool) { return "", false }
	}
	p := configParser{lookup: lookup, taken: map[string]bool{}}
	p.file(bytes.TrimPrefix(data, []byte("\ufeff")))
	return p.configs, errors.Join(p.errs...)
}

// A setting is one key of a configuration file, and where it goes.
type setting struct {
	key   string
	field func(*Config) any // *string, *bool, *int, *time.Duration, *[]string or *map[string]string
}

// settings are the keys, in the order of the documentation.
var settings = []setting{
	{"name", func(c *Config) any { return &c.Name }},
	{"transport", func(c *Config) any { return &c.Transport }},
	{"command", func(c *Config) any { return &c.Command }},
	{"dir", func(c *Config) any { return &c.Dir }},
	{"env", func(c *Config) any { return &c.Env }},
	{"env_allow", func(c *Config) any { return &c.EnvAllow }},
	{"endpoint", func(c *Config) any { return &c.Endpoint }},
	{"headers", func(c *Config) any { return &c.Headers }},
	{"protocol", func(c *Config) any { return &c.Protocol }},
	{"allow", func(c *Config) any { return &c.Allow }},
	{"deny", func(c *Config) any { return &c.Deny }},
	{"prefix", func(c *Config) any { return &c.Prefix }},
	{"required", func(c *Config) any { return &c.Optional }}, // inverted by set
	{"connect_timeout_seconds", func(c *Config) any { return &c.ConnectTimeout }},
	{"discovery_timeout_seconds", func(c *Config) any { return &c.DiscoveryTimeout }},
	{"timeout_seconds", func(c *Config) any { return &c.CallTimeout }},
	{"read_timeout_seconds", func(c *Config) any { return &c.ReadTimeout }},
	{"max_message_bytes", func(c *Config) any { return &c.MaxMessageBytes }},
	{"max_in_flight", func(c *Config) any { return &c.MaxInFlight }},
	{"max_tools", func(c *Config) any { return &c.MaxTools }},
	{"max_schema_bytes", func(c *Config) any { return &c.MaxSchemaBytes }},
	{"max_result_bytes", func(c *Config) any { return &c.MaxResultBytes }},
	{"retry.max_attempts", func(c *Config) any { return &c.Retry.MaxAttempts }},
	{"retry.base_delay_seconds", func(c *Config) any { return &c.Retry.BaseDelay }},
	{"retry.max_delay_seconds", func(c *Config) any { return &c.Retry.MaxDelay }},
	{"retry.max_retry_after_seconds", func(c *Config) any { return &c.Retry.MaxRetryAfter }},
	{"breaker_failures", func(c *Config) any { return &c.BreakerFailures }},
	{"breaker_reset_seconds", func(c *Config) any { return &c.BreakerReset }},
	{"arguments", func(c *Config) any { return &c.Arguments }},
	{"results", func(c *Config) any { return &c.Results }},
	{"normalize", func(c *Config) any { return &c.Normalize }},
	{"trust_annotations", func(c *Config) any { return &c.TrustAnnotations }},
	{"pins", func(c *Config) any { return &c.Pins }},
	{"watch", func(c *Config) any { return &c.Watch }},
}

// longest is the longest duration that a file may ask for, in seconds. Beyond a
// century it overflows or is a slip of the hand.
const longest = 100 * 365 * 24 * 3600

// set stores a JSON value in the field of s and returns what is wrong with it,
// "" if nothing is.
func (s setting) set(c *Config, raw json.RawMessage) string {
	want, to := "", s.field(c)
	var seconds float64
	switch t := to.(type) {
	case *string:
		want = "want text"
	case *bool:
		want = "want true or false"
	case *int:
		want = "want a whole number"
	case *time.Duration:
		want, to = "want a number of seconds", &seconds
	case *[]string:
		want = `want a list of texts, like ["a", "b"]`
	case *map[string]string:
		want, *t = "want an object of texts", nil // else the layers would mix
	}
	if hasNull(raw) || json.Unmarshal(raw, to) != nil || seconds < 0 || seconds > longest {
		return want
	}
	if duration, ok := s.field(c).(*time.Duration); ok {
		*duration = time.Duration(seconds * float64(time.Second))
	}
	if s.key == "required" {
		c.Optional = !c.Optional
	}
	return ""
}

// hasNull reports whether a null is in raw, which encoding/json takes for any value that is left as it was.
func hasNull(raw json.RawMessage) bool {
	for d := json.NewDecoder(bytes.NewReader(raw)); ; {
		if t, err := d.Token(); err != nil || t == nil {
			return err == nil
		}
	}
}

// A configParser collects the servers of one file, and its problems.
type configParser struct {
	lookup  func(string) (string, bool)
	taken   map[string]bool // names, as variables spell them
	configs []Config
	errs    []error
}

// file reads the whole document in either form.
func (p *configParser) file(data []byte) {
	fail := func(key, detail string) {
		p.errs = append(p.errs, &ConfigError{Key: key, Layer: "file", Detail: detail})
	}
	if !utf8.Valid(data) { // encoding/json would put question marks into a password
		fail("", "this is not UTF-8 text")
		return
	}
	if _, err := decodeValue(data); err != nil { // which refuses a key that occurs twice
		fail("", "this is not valid JSON"+position(data))
		return
	}
	const want = "want a list of servers, or an object mcpServers"
	var list []json.RawMessage
	if json.Unmarshal(data, &list) == nil && list != nil {
		for i, raw := range list {
			p.server("#"+strconv.Itoa(i+1), raw, false)
		}
		return
	}
	var top map[string]json.RawMessage
	json.Unmarshal(data, &top) // what is no object has no mcpServers either
	for _, k := range slices.Sorted(maps.Keys(top)) {
		if k != "mcpServers" {
			fail(k, "unknown key"+suggest(k, []string{"mcpServers"}))
		}
	}
	d := json.NewDecoder(bytes.NewReader(top["mcpServers"])) // a map would lose the order of the file
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		fail("mcpServers", want)
		return
	}
	for d.More() {
		var raw json.RawMessage
		name, err := d.Token()
		if err != nil || d.Decode(&raw) != nil {
			return // not after decodeValue
		}
		p.server(name.(string), raw, true)
	}
}

// position says where data stops being JSON, as far as that can be told.
func position(data []byte) string {
	var syntax *json.SyntaxError
	if err := json.Unmarshal(data, new(any)); errors.As(err, &syntax) {
		line := 1 + bytes.Count(data[:min(int(syntax.Offset), len(data))], []byte("\n"))
		return " (line " + strconv.Itoa(line) + ")"
	}
	return " (a key occurs twice, or it is nested too deeply)"
}

// server reads one server: the file's keys, the environment over them, and the
// check of the whole. Host says that it is of the `mcpServers` form.
func (p *configParser) server(label string, raw json.RawMessage, host bool) {
	e := entry{label: label, layer: map[string]string{}}
	if !e.open(raw, host) {
		return
	}
	e.assign("file", e.given)
	p.expand(&e, settings[:1]) // the name, by which variables are found
	e.assign("environment", p.environment(&e.Config))
	p.expand(&e, settings[1:])
	if host && len(e.Command) > 0 && e.EnvAllow == nil {
		e.EnvAllow = slices.Clone(hostEnv)
	}
	if len(e.errs) == 0 { // else it would report consequences as causes
		for _, found := range e.problems() {
			found.Server, found.Layer = e.label, cmp.Or(e.layer[found.Key], "file")
			e.errs = append(e.errs, found)
		}
	}
	name := envName(e.Name)
	if len(e.errs) == 0 && p.taken[name] {
		e.problem("file", "name", e.given["name"], "two servers answer to this name; rename one")
	}
	if p.errs = append(p.errs, e.errs...); len(e.errs) == 0 {
		p.taken[name] = true
		p.configs = append(p.configs, e.Config)
	}
}

// An entry is one server of the file, on its way to a Config.
type entry struct {
	Config
	label string                     // its name, or its place in the list if it has none
	given map[string]json.RawMessage // what the file says, by our keys
	layer map[string]string          // where the value of each key is from
	errs  []error
}

// problem notes what is wrong with a value; a detail of "" is nothing.
func (e *entry) problem(layer, key string, value json.RawMessage, detail string) {
	if detail != "" {
		e.errs = append(e.errs, &ConfigError{Server: e.label, Key: key, Layer: layer, Value: shown(key, value), Detail: detail})
	}
}

// open reads the keys of the file and spells them as settings has them. It
// reports whether there is anything to read; a server may be disabled.
func (e *entry) open(raw json.RawMessage, host bool) bool {
	if json.Unmarshal(raw, &e.given) != nil || e.given == nil {
		e.problem("file", "", nil, "want an object")
		return true
	}
	if host && !e.fromHost() {
		return false
	}
	if name := ""; !host && json.Unmarshal(e.given["name"], &name) == nil && name != "" {
		e.label = name
	}
	if raw, ok := e.given["retry"]; ok {
		var retry map[string]json.RawMessage
		if json.Unmarshal(raw, &retry) != nil || retry == nil {
			e.problem("file", "retry", raw, "want an object")
		}
		delete(e.given, "retry")
		for _, k := range slices.Sorted(maps.Keys(retry)) {
			e.give("retry."+k, "retry", retry[k])
		}
	}
	known := make([]string, len(settings))
	for i, s := range settings {
		known[i] = s.key
	}
	for _, k := range slices.Sorted(maps.Keys(e.given)) {
		if !slices.Contains(known, k) {
			e.problem("file", k, nil, "unknown key"+suggest(cmp.Or(hostKeys[k], k), known))
		}
	}
	return true
}

// give is what the file says of a setting in other words.
func (e *entry) give(key, words string, value json.RawMessage) {
	if _, twice := e.given[key]; twice {
		e.problem("file", words, nil, "this says what "+key+" says, too; leave one of them out")
	}
	e.given[key] = value
}

// assign takes the values of a layer into the Config.
func (e *entry) assign(layer string, given map[string]json.RawMessage) {
	for _, s := range settings {
		if raw, ok := given[s.key]; ok {
			e.layer[s.key] = layer
			e.problem(layer, s.key, raw, s.set(&e.Config, raw))
		}
	}
}

// expand resolves the variables in those values of the file that are in force: of
// what the environment has replaced or discarded they need not be set.
func (p *configParser) expand(e *entry, some []setting) {
	for _, s := range some {
		if e.layer[s.key] == "file" {
			e.problem("file", s.key, e.given[s.key], p.resolve(s.field(&e.Config)))
		}
	}
}

// hostEnv is what other hosts let every child inherit. A server of an
// `mcpServers` file without env_allow gets it, so that the file works as it is.
var hostEnv = []string{"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}

// hostKeys are the keys of other hosts' files: the setting that each stands
// for, or "" where it does not concern a client library.
var hostKeys = map[string]string{
	"args": "command", "url": "endpoint", "serverUrl": "endpoint", "type": "transport", "cwd": "dir", "disabledTools": "deny",
	"disabled": "", "alwaysAllow": "", "autoApprove": "", "description": "",
}

// fromHost spells a server of an `mcpServers` object in our keys, and reports
// whether it is enabled. Names there are free text; characters that ours lack
// fold to '-'.
func (e *entry) fromHost() bool {
	m := e.given
	disabled := false
	if raw, ok := m["disabled"]; ok && json.Unmarshal(raw, &disabled) != nil {
		e.problem("file", "disabled", raw, "want true or false")
	}
	if command, args := m["command"], m["args"]; command != nil {
		argv := texts(command)
		if args != nil {
			argv = append(argv, texts(args)...)
		}
		m["command"], _ = json.Marshal(argv) // what was JSON in parts is JSON together
		delete(m, "args")
	} else if args != nil {
		e.problem("file", "args", nil, "there is no command that they are for")
	}
	kind := ""
	if json.Unmarshal(m["type"], &kind) == nil && (strings.Contains(strings.ToLower(kind), "http") || strings.EqualFold(kind, "sse")) {
		m["type"] = json.RawMessage(`"http"`)
	}
	for _, theirs := range slices.Sorted(maps.Keys(hostKeys)) {
		raw, ok := m[theirs]
		delete(m, theirs)
		if ours := hostKeys[theirs]; ok && ours != "" {
			e.give(ours, theirs, raw)
		}
	}
	if m["name"] == nil {
		m["name"], _ = appendValue(nil, foldName(e.label, '-'))
	}
	return !disabled
}

// texts returns the elements of a list, or the one text that stands for a list
// of one. Anything else is left for set to refuse.
func texts(raw json.RawMessage) []json.RawMessage {
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil || list == nil {
		return []json.RawMessage{raw}
	}
	return list
}

// environment returns the variables MCP_<NAME>_<KEY> as JSON, by key. If they
// choose a transport, what c says about the other one is discarded.
func (p *configParser) environment(c *Config) map[string]json.RawMessage {
	over := map[string]json.RawMessage{}
	for _, s := range settings[1:] { // all but the name, which is a part of theirs
		if text, ok := p.lookup("MCP_" + envName(c.Name) + "_" + envName(s.key)); ok && c.Name != "" {
			over[s.key] = envValue(s.field(c), text)
		}
	}
	switch kind := string(over["transport"]); {
	case kind == `"http"`, kind == "" && over["endpoint"] != nil:
		c.Transport, c.Command, c.Dir, c.Env, c.EnvAllow = "", nil, "", nil, nil
	case kind == `"stdio"`, kind == "" && over["command"] != nil:
		c.Transport, c.Endpoint, c.Headers = "", "", nil
	}
	return over
}

// envValue reads the text of a variable as the kind of value that the field
// takes. Lists are JSON, or words with commas between them.
func envValue(field any, text string) json.RawMessage {
	_, isText := field.(*string)
	if _, err := decodeValue([]byte(text)); err == nil && !isText {
		return json.RawMessage(text)
	}
	var v any = text // if that is the wrong type, set refuses it
	if _, isList := field.(*[]string); isList {
		words := strings.Split(text, ",")
		for i := range words {
			words[i] = strings.TrimSpace(words[i])
		}
		v = words
	}
	b, _ := json.Marshal(v) // texts can be marshalled
	return b
}

// envName spells a name or a key as a part of a variable's name.
func envName(s string) string {
	return strings.ToUpper(strings.NewReplacer("-", "_", ".", "_").Replace(s))
}

// resolve puts the values of variables in their place in the texts of a field, and
// returns what is wrong with them, "" if nothing is.
func (p *configParser) resolve(field any) (problem string) {
	resolve := func(text string) (out string) {
		for {
			head, rest, found := strings.Cut(text, "${")
			ref, tail, closed := strings.Cut(rest, "}")
			if !found || !closed {
				return out + text
			}
			name, value, hasDefault := strings.Cut(ref, ":-")
			if set, ok := p.lookup(name); set != "" || ok && !hasDefault {
				value = set
			} else if !hasDefault && problem == "" {
				problem = "variable " + name + " is not set; set it, or write ${" + name + ":-default}"
			}
			out, text = out+head+value, tail
		}
	}
	switch f := field.(type) {
	case *string:
		*f = resolve(*f)
	case *[]string:
		for i, text := range *f {
			(*f)[i] = resolve(text)
		}
	case *map[string]string:
		for _, k := range slices.Sorted(maps.Keys(*f)) {
			(*f)[k] = resolve((*f)[k])
		}
	}
	return problem
}

// suggest returns "; did you mean …" if a known word is near.
func suggest(word string, known []string) string {
	const long = 64 // a tool's name is the server's, and may be anything
	word = word[:min(len(word), long)]
	best, least := "", 1+len(word)/3
	for _, k := range known {
		if len(k) > long {
			continue
		}
		if d := distance(word, k); d < least || k == word+"_seconds" {
			best, least = k, min(d, least)
		}
	}
	if best == "" {
		return ""
	}
	return "; did you mean " + strconv.Quote(best) + "?"
}

// shown renders a value for an error. Headers, variables and arguments are
// secrets, a URL loses its user info and query; what remains is cut short.
func shown(key string, raw json.RawMessage) string {
	switch {
	case raw == nil:
		return ""
	case key == "headers", key == "env", key == "command" && bytes.ContainsAny(raw, ", "): // arguments
		return "***"
	case key == "endpoint":
		var s string
		if json.Unmarshal(raw, &s) != nil {
			return "***"
		}
		raw, _ = appendValue(nil, cleanURL(s)) // a text can be written
	}
	var b bytes.Buffer
	if err := json.Compact(&b, raw); err != nil || b.Len() > 64 {
		b.Truncate(min(b.Len(), 61))
		return strings.ToValidUTF8(b.String(), "") + "…"
	}
	return b.String()
}

// quoted renders a text for an error, cut short.
func quoted(s string) string {
	if len(s) > 64 {
		s = strings.ToValidUTF8(s[:61], "") + "…"
	}
	return strconv.Quote(s)
}

// cleanURL strips what a URL may hold of secrets. In what is no URL of an endpoint,
// anything before an '@' may be meant as one.
func cleanURL(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return "unreadable"
	}
	u.User, u.RawQuery, u.Fragment = nil, "", ""
	shown := u.String()
	if (u.Host == "" || u.Scheme != "http" && u.Scheme != "https") && strings.Contains(shown, "@") {
		return "unreadable"
	}
	return shown
}

// reservedHeader reports whether the protocol or HTTP itself sets a header, or
// whether it would make net/http repeat requests behind our back.
func reservedHeader(name string) bool {
	const others = "accept accept-encoding connection content-length content-type host idempotency-key " +
		"last-event-id trailer transfer-encoding upgrade x-idempotency-key"
	name = strings.ToLower(name)
	return strings.HasPrefix(name, "mcp-") || slices.Contains(strings.Fields(others), name)
}

// headerToken reports whether s is a field name (RFC 9110, section 5.6.2).
func headerToken(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return r <= ' ' || r >= 0x7f || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, r)
	})
}
