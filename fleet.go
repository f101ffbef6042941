package mcp

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

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

// set stores a decoded JSON value in the field of s and returns what is wrong
// with it, "" if nothing is.
func (s setting) set(c *Config, v any) string {
	switch p := s.field(c).(type) {
	case *string:
		t, ok := v.(string)
		if !ok {
			return "want text"
		}
		*p = t
	case *bool:
		t, ok := v.(bool)
		if !ok {
			return "want true or false"
		}
		*p = t != (s.key == "required")
	case *int:
		n, ok := v.(json.Number)
		i, err := strconv.Atoi(n.String())
		if !ok || err != nil {
			return "want a whole number"
		}
		*p = i
	case *time.Duration:
		n, ok := v.(json.Number)
		f, err := n.Float64()
		// Beyond a century a duration overflows or is a slip of the hand.
		if !ok || err != nil || f < 0 || f > 100*365*24*3600 {
			return "want a number of seconds"
		}
		*p = time.Duration(f * float64(time.Second))
	case *[]string:
		list, ok := v.([]any)
		out := make([]string, 0, len(list))
		for _, e := range list {
			t, isText := e.(string)
			ok = ok && isText
			out = append(out, t)
		}
		if !ok {
			return "want a list of texts"
		}
		*p = out
	case *map[string]string:
		m, ok := v.(map[string]any)
		out := make(map[string]string, len(m))
		for k, e := range m {
			t, isText := e.(string)
			ok = ok && isText
			out[k] = t
		}
		if !ok {
			return "want an object of texts"
		}
		*p = out
	}
	return ""
}

// hostEnv is what other hosts let every child inherit. A server of an
// `mcpServers` file without env_allow gets it, so that the file works as it is.
var hostEnv = []string{"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}

// hostKeys are the keys of other hosts' files: the setting that each stands
// for, or "" where it does not concern a client library.
var hostKeys = map[string]string{
	"args": "command", "url": "endpoint", "type": "transport", "cwd": "dir",
	"disabled": "", "alwaysAllow": "", "autoApprove": "", "description": "",
}

// LoadConfigs reads a file as [ParseConfigs] does, with the environment of this
// process as the layer above it.
func LoadConfigs(path string) ([]Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, &ConfigError{Layer: "file", Detail: "the file cannot be read: " + err.Error()}
	}
	return ParseConfigs(data, os.LookupEnv)
}

// ParseConfigs reads a list of configuration objects, or the `mcpServers`
// object of other hosts. Texts may name variables, ${VAR} or ${VAR:-default},
// which lookup resolves; a variable MCP_<NAME>_<KEY> overrides a key of the
// file, and a transport chosen there discards what the file says about the
// other one. A nil lookup means that there are no variables. The error joins a
// *[ConfigError] for every problem; the configs are those that have none.
func ParseConfigs(data []byte, lookup func(string) (string, bool)) ([]Config, error) {
	if lookup == nil {
		lookup = func(string) (string, bool) { return "", false }
	}
	p := configParser{lookup: lookup}
	p.file(bytes.TrimPrefix(data, []byte("\ufeff")))
	seen := map[string]bool{}
	for _, c := range p.configs {
		if seen[envName(c.Name)] {
			p.errs = append(p.errs, &ConfigError{Server: c.Name, Key: "name", Value: quoted(c.Name), Layer: "file", Detail: "two servers answer to this name; rename one"})
		}
		seen[envName(c.Name)] = true
	}
	return p.configs, errors.Join(p.errs...)
}

// A configParser collects the servers of one file, and its problems.
type configParser struct {
	lookup  func(string) (string, bool)
	configs []Config
	errs    []error
}

// file reads the whole document in either form.
func (p *configParser) file(data []byte) {
	v, err := decodeValue(data)
	if err != nil {
		p.errs = append(p.errs, &ConfigError{Layer: "file", Detail: "this is not valid JSON" + position(data)})
		return
	}
	switch v := v.(type) {
	case []any:
		for i, e := range v {
			m, ok := e.(map[string]any)
			if !ok {
				p.errs = append(p.errs, &ConfigError{Server: "#" + strconv.Itoa(i+1), Layer: "file", Detail: "want an object"})
				continue
			}
			p.server("#"+strconv.Itoa(i+1), m, false)
		}
	case map[string]any:
		for _, k := range slices.Sorted(maps.Keys(v)) {
			if k != "mcpServers" {
				p.errs = append(p.errs, &ConfigError{Key: k, Layer: "file", Detail: "unknown key" + suggest(k, []string{"mcpServers"})})
			}
		}
		servers, ok := v["mcpServers"].(map[string]any)
		if !ok {
			p.errs = append(p.errs, &ConfigError{Key: "mcpServers", Layer: "file", Detail: "want a list of servers, or an object mcpServers"})
			return
		}
		for _, name := range keyOrder(data, servers) {
			m, ok := servers[name].(map[string]any)
			if !ok {
				p.errs = append(p.errs, &ConfigError{Server: name, Layer: "file", Detail: "want an object"})
				continue
			}
			p.server(name, m, true)
		}
	default:
		p.errs = append(p.errs, &ConfigError{Layer: "file", Detail: "want a list of servers, or an object mcpServers"})
	}
}

// server reads one server: the file's keys, the environment over them, and the
// check of the whole. Host says that it is of the `mcpServers` form.
func (p *configParser) server(label string, m map[string]any, host bool) {
	var c Config
	if host {
		if on, _ := m["disabled"].(bool); on {
			return
		}
		m, c.Name = hostForm(label, m)
	} else if name, ok := m["name"].(string); ok {
		label = name
	}
	before, layers := len(p.errs), map[string]string{}
	problem := func(layer, key string, v any, detail string) {
		p.errs = append(p.errs, &ConfigError{Server: label, Key: key, Layer: layer, Value: shown(key, v), Detail: detail})
	}
	if r, ok := m["retry"]; ok {
		if rm, ok := r.(map[string]any); ok {
			for k, v := range rm {
				m["retry."+k] = v
			}
		} else {
			problem("file", "retry", r, "want an object")
		}
		delete(m, "retry")
	}
	for _, k := range slices.Sorted(maps.Keys(m)) {
		i := slices.IndexFunc(settings, func(s setting) bool { return s.key == k })
		if i < 0 {
			problem("file", k, nil, "unknown key"+suggest(k, settingKeys()))
			continue
		}
		v, missing := p.expand(m[k])
		if missing != "" {
			problem("file", k, m[k], "variable "+missing+" is not set; set it, or write ${"+missing+":-default}")
		} else if detail := settings[i].set(&c, v); detail != "" {
			problem("file", k, m[k], detail)
		}
		layers[k] = "file"
	}
	p.environment(&c, layers, problem)
	if host && len(c.Command) > 0 && c.EnvAllow == nil {
		c.EnvAllow = slices.Clone(hostEnv)
	}
	if len(p.errs) == before { // else it would report consequences as causes
		for _, e := range c.problems() {
			e.Server, e.Layer = label, cmp.Or(layers[e.Key], "file")
			p.errs = append(p.errs, e)
		}
	}
	if len(p.errs) == before {
		p.configs = append(p.configs, c)
	}
}

// environment puts the variables MCP_<NAME>_<KEY> over c.
func (p *configParser) environment(c *Config, layers map[string]string, problem func(layer, key string, v any, detail string)) {
	over := map[string]any{}
	for _, s := range settings {
		text, ok := p.lookup("MCP_" + envName(c.Name) + "_" + envName(s.key))
		if !ok || s.key == "name" || c.Name == "" {
			continue
		}
		over[s.key], layers[s.key] = envValue(s.field(c), text), "environment"
	}
	kind, _ := over["transport"].(string)
	if kind == "http" || kind == "" && over["endpoint"] != nil {
		c.Transport, c.Command, c.Dir, c.Env, c.EnvAllow = "", nil, "", nil, nil
	} else if kind == "stdio" || kind == "" && over["command"] != nil {
		c.Transport, c.Endpoint, c.Headers = "", "", nil
	}
	for _, s := range settings {
		if v, ok := over[s.key]; ok {
			if detail := s.set(c, v); detail != "" {
				problem("environment", s.key, v, detail)
			}
		}
	}
}

// expand resolves the variables in every text of v. Missing names the first
// one that is not set and has no default.
func (p *configParser) expand(v any) (out any, missing string) {
	switch v := v.(type) {
	case string:
		var b strings.Builder
		for {
			head, rest, found := strings.Cut(v, "${")
			b.WriteString(head)
			ref, tail, closed := strings.Cut(rest, "}")
			if !found || !closed {
				b.WriteString(v[len(head):])
				return b.String(), missing
			}
			name, def, hasDef := strings.Cut(ref, ":-")
			val, ok := p.lookup(name)
			switch {
			case hasDef && val == "":
				val = def
			case !ok && missing == "":
				missing = name
			}
			b.WriteString(val)
			v = tail
		}
	case []any:
		list := make([]any, len(v))
		for i, e := range v {
			var m string
			list[i], m = p.expand(e)
			missing = cmp.Or(missing, m)
		}
		return list, missing
	case map[string]any:
		obj := make(map[string]any, len(v))
		for _, k := range slices.Sorted(maps.Keys(v)) {
			var m string
			obj[k], m = p.expand(v[k])
			missing = cmp.Or(missing, m)
		}
		return obj, missing
	}
	return v, ""
}

// hostForm translates a server of an `mcpServers` object into our keys. Names
// there are free text; characters that ours lack fold to '-'.
func hostForm(name string, m map[string]any) (map[string]any, string) {
	out := map[string]any{}
	for k, v := range m {
		to, theirs := hostKeys[k]
		switch {
		case theirs && to == "":
		case k == "type":
			if t, ok := v.(string); ok && (strings.Contains(t, "http") || t == "sse") {
				v = "http"
			}
			out["transport"] = v
		case k == "command", k == "args":
			argv, isList := m["command"].([]any)
			if !isList {
				argv = []any{m["command"]}
			}
			args, _ := m["args"].([]any)
			if a, given := m["args"]; given && args == nil {
				args = []any{a} // of the wrong type: left for set to refuse
			}
			out["command"] = slices.Concat(argv, args)
		case theirs:
			out[to] = v
		default:
			out[k] = v
		}
	}
	folded := strings.Map(func(r rune) rune {
		if strings.ContainsRune(nameChars, r) {
			return r
		}
		return '-'
	}, name)
	return out, folded
}

// envValue reads the text of a variable as the kind of value that the field
// takes. Lists are JSON, or words with commas between them.
func envValue(field any, text string) any {
	if _, isText := field.(*string); isText {
		return text
	}
	if v, err := decodeValue([]byte(text)); err == nil {
		return v
	}
	if _, isList := field.(*[]string); isList {
		var list []any
		for _, e := range strings.Split(text, ",") {
			list = append(list, strings.TrimSpace(e))
		}
		return list
	}
	return text // of the wrong type: left for set to refuse
}

const nameChars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"

// envName spells a name or a key as a part of a variable's name.
func envName(s string) string {
	return strings.ToUpper(strings.NewReplacer("-", "_", ".", "_").Replace(s))
}

// settingKeys lists the keys that a file may use.
func settingKeys() []string {
	keys := slices.Sorted(maps.Keys(hostKeys))
	for _, s := range settings {
		keys = append(keys, s.key)
	}
	return keys
}

// suggest returns "; did you mean …" if a known word is near.
func suggest(word string, known []string) string {
	best, least := "", 1+len(word)/3
	for _, k := range known {
		if len(k) > 64 {
			continue // a tool's name is the server's, and may be anything
		}
		if d := distance(word[:min(len(word), 64)], k); d < least || strings.HasSuffix(k, "_seconds") && strings.TrimSuffix(k, "_seconds") == word {
			best, least = k, min(d, least)
		}
	}
	if best == "" {
		return ""
	}
	return "; did you mean " + strconv.Quote(best) + "?"
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

// keyOrder returns the keys of the mcpServers object in the order of the file.
func keyOrder(data []byte, servers map[string]any) (order []string) {
	d := json.NewDecoder(bytes.NewReader(member(data, "mcpServers")))
	d.Token() // the brace
	for d.More() {
		k, err := d.Token()
		name, _ := k.(string)
		if _, known := servers[name]; err != nil || !known {
			break
		}
		order = append(order, name)
		var skip json.RawMessage
		if d.Decode(&skip) != nil {
			break
		}
	}
	return order
}

// shown renders a value for an error. Headers and variables are secrets, a URL
// loses its user info and query; what remains is cut short.
func shown(key string, v any) string {
	switch {
	case v == nil:
		return ""
	case key == "headers" || key == "env":
		return "***"
	case key == "endpoint":
		if s, ok := v.(string); ok {
			v = cleanURL(s)
		}
	}
	b, err := appendValue(nil, v)
	if err != nil || len(b) > 64 {
		b = append(b[:min(len(b), 61)], "…"...)
	}
	return string(b)
}

// quoted renders a text for an error, cut short.
func quoted(s string) string {
	if len(s) > 64 {
		s = strings.ToValidUTF8(s[:61], "") + "…"
	}
	return strconv.Quote(s)
}

// cleanURL strips what a URL may hold of secrets.
func cleanURL(s string) string {
	u, err := url.Parse(s)
	if err != nil || u.Host == "" && strings.Contains(s, "@") { // user:password@host, without a scheme
		return "unreadable"
	}
	u.User, u.RawQuery, u.Fragment = nil, "", ""
	return u.String()
}

// reservedHeader reports whether the protocol or HTTP itself sets a header, or
// whether it would make net/http repeat requests behind our back.
func reservedHeader(name string) bool {
	name = strings.ToLower(name)
	switch name {
	case "accept", "content-type", "content-length", "transfer-encoding", "connection", "host", "trailer", "upgrade",
		"last-event-id", "idempotency-key", "x-idempotency-key", "accept-encoding":
		return true
	}
	return strings.HasPrefix(name, "mcp-")
}

// headerToken reports whether s is a field name (RFC 9110, section 5.6.2).
func headerToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`"(),/:;<=>?@[\]{}`, c) >= 0 {
			return false
		}
	}
	return s != ""
}

// A Client is one server as an agent holds it: the tools that were adopted, by
// model-facing names, with arguments and results held to their schemas. It is
// safe for concurrent use.
type Client struct {
	s   Session
	cfg Config
	o   *Options

	large chan struct{} // holds a token while a large result is checked

	mu    sync.RWMutex // guards the fields below
	tools map[string]*adopted
	list  *Adoption // the latest adoption; nil before it
	drift []Drift   // seen since then, not adopted
}

// An adopted tool, with what was compiled for it. It does not change.
type adopted struct {
	Tool
	cfg     *Config
	large   chan struct{} // the Client's
	input   *schema       // nil if arguments are not checked
	output  *schema       // nil if results are not checked
	headers []headerParam
	digest  string
}

// An Adoption is what came of reading a server's tool list.
type Adoption struct {
	Server   *ServerInfo
	Tools    []Tool      // in the server's order, by model-facing names
	Rejected []Rejection // what was left out, and why
	Partial  []Rejection // adopted, though a part of the schema is not checked
	Drift    []Drift     // against the adoption before
}

// A Rejection is a tool that was left out, or held in part only.
type Rejection struct {
	Tool   string // the server's name for it
	Reason string // in our words
}

// Drift is a change in a server's tools since they were adopted.
type Drift struct {
	Server string
	Tool   string // the server's name for it
	Change string // "added", "removed" or "changed"
	Detail string // what changed, in our words
}

// New composes a Client from one Config: transport, session, policy, tools.
// Nothing is started before the first operation. The error joins a
// *[ConfigError] for every problem of cfg.
func New(cfg Config, o *Options) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	t, err := NewTransport(cfg, o)
	if err != nil {
		return nil, err
	}
	return NewClient(NewResilientSession(NewSession(t, cfg, o), cfg, o), cfg, o), nil
}

// NewClient returns a Client over any Session: usually a [ResilientSession].
func NewClient(s Session, cfg Config, o *Options) *Client {
	if o == nil {
		o = &Options{}
	}
	c := &Client{s: s, cfg: cfg.withDefaults(), o: o, large: make(chan struct{}, 1)}
	if r, ok := innermost(s).(interface {
		onReconnect(func(context.Context))
	}); ok {
		r.onReconnect(c.compare)
	}
	return c
}

// innermost follows the wrappers of this package down to the session that
// speaks with the server.
func innermost(s Session) Session {
	for {
		w, ok := s.(interface{ unwrap() Session })
		if !ok {
			return s
		}
		s = w.unwrap()
	}
}

// Adopt connects, reads the tool list and adopts what [Config] allows. A tool
// that cannot be held safely is rejected, by name, and costs no other. It may
// be called again, beside running calls: the new list then replaces the old.
// A name in Allow that the server lacks, or a pin that does not fit, is an
// error, and nothing changes.
func (c *Client) Adopt(ctx context.Context) (*Adoption, error) {
	p, err := c.prepare(ctx)
	if err != nil {
		return nil, err
	}
	c.commit(p)
	return p.list, nil
}

// A prospect is an adoption that is not yet in force.
type prospect struct {
	tools map[string]*adopted
	list  *Adoption
}

// prepare reads the server's tools and decides about them.
func (c *Client) prepare(ctx context.Context) (*prospect, error) {
	info, err := c.s.Initialize(ctx)
	if err != nil {
		return nil, err
	}
	listed, err := c.s.ListTools(ctx)
	if err != nil {
		return nil, err
	}
	p := &prospect{list: &Adoption{Server: info}}
	if p.tools, err = c.adopt(listed, info, p.list); err != nil {
		return nil, err
	}
	return p, nil
}

// commit puts p in force.
func (c *Client) commit(p *prospect) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.list != nil {
		p.list.Drift = compareTools(c.cfg.Name, c.tools, p.tools)
	}
	c.tools, c.list, c.drift = p.tools, p.list, nil
}

// adopt decides tool by tool, in the order of the list.
func (c *Client) adopt(listed []Tool, info *ServerInfo, a *Adoption) (map[string]*adopted, error) {
	tools := map[string]*adopted{}
	reject := func(name, reason string) { a.Rejected = append(a.Rejected, Rejection{name, reason}) }
	if m, ok := innermost(c.s).(interface{ malformed() int }); ok && m.malformed() > 0 {
		reject("", strconv.Itoa(m.malformed())+" entries of the list are no tools")
	}
	var missing []error
	for _, name := range c.cfg.Allow {
		if !slices.ContainsFunc(listed, func(t Tool) bool { return t.Name == name }) {
			missing = append(missing, &ConfigError{Server: c.cfg.Name, Key: "allow", Value: quoted(name), Detail: "the server has no such tool" + suggest(name, names(listed))})
		}
	}
	if len(missing) > 0 {
		return nil, errors.Join(missing...)
	}
	schemaBytes := 0
	remote := map[string]bool{}
	for _, t := range listed {
		switch {
		case t.Name == "":
			reject("", "the entry has no name")
			continue
		case remote[t.Name]:
			reject(t.Name, "the server lists this name twice; the first is kept")
			continue
		case c.cfg.Allow != nil && !slices.Contains(c.cfg.Allow, t.Name), slices.Contains(c.cfg.Deny, t.Name):
			remote[t.Name] = true
			continue // the operator's choice needs no report
		}
		remote[t.Name] = true
		if len(tools) >= c.cfg.MaxTools {
			reject(t.Name, "over max_tools ("+strconv.Itoa(c.cfg.MaxTools)+")")
			continue
		}
		size := len(t.InputSchema) + len(t.OutputSchema)
		if schemaBytes+size > c.cfg.MaxSchemaBytes {
			reject(t.Name, "over max_schema_bytes ("+strconv.Itoa(c.cfg.MaxSchemaBytes)+")")
			continue
		}
		ad, partial, err := c.compile(t, info)
		if err != nil {
			reject(t.Name, err.Error())
			continue
		}
		if pin, ok := c.cfg.Pins[t.Name]; ok && pin != ad.digest {
			return nil, &ConfigError{Server: c.cfg.Name, Key: "pins", Value: quoted(t.Name), Detail: "the schema has changed: its fingerprint is now " + ad.digest}
		}
		if other, ok := tools[ad.Name]; ok {
			reject(t.Name, "its model-facing name "+quoted(ad.Name)+" is taken by "+quoted(other.Remote))
			continue
		}
		a.Partial = append(a.Partial, partial...)
		schemaBytes += size
		tools[ad.Name] = ad
		a.Tools = append(a.Tools, ad.Tool)
	}
	for _, name := range slices.Sorted(maps.Keys(c.cfg.Pins)) {
		if !remote[name] {
			return nil, &ConfigError{Server: c.cfg.Name, Key: "pins", Value: quoted(name), Detail: "the server no longer has this tool"}
		}
	}
	return tools, nil
}

// compile prepares one tool, or says why it cannot be held.
func (c *Client) compile(t Tool, info *ServerInfo) (*adopted, []Rejection, error) {
	if t.TaskSupport == "required" {
		return nil, nil, errors.New("it can only be called as a task, which is not supported")
	}
	ad := &adopted{Tool: t, cfg: &c.cfg, large: c.large, digest: fingerprint(t.InputSchema, t.OutputSchema)}
	ad.Remote, ad.Server, ad.Name = t.Name, c.cfg.Name, localName(c.cfg.Prefix, t.Name)
	if t.InputSchema == nil {
		return nil, nil, errors.New("it has no input schema")
	}
	var partial []Rejection
	hold := func(where string, s *schema) {
		for _, u := range s.unchecked() {
			if u.Why == "annotation" {
				continue // a format says what a text means, and demands nothing
			}
			partial = append(partial, Rejection{t.Name, where + " schema: " + quoted(u.Keyword) + " at " + quoted(u.Pointer) + " is not checked: " + u.Why})
		}
	}
	modern := info != nil && info.Protocol == version2026
	s, err := compileSchema(t.InputSchema, schemaOptions{input: true, headers: modern && c.cfg.Transport == "http"})
	if err != nil {
		return nil, nil, err
	}
	ad.input, ad.headers = s, s.headers()
	hold("input", s)
	if t.OutputSchema != nil && c.cfg.Results != "off" {
		if s, err := compileSchema(t.OutputSchema, schemaOptions{anyRoot: modern}); err != nil {
			partial = append(partial, Rejection{t.Name, "output schema is not checked: " + err.Error()})
		} else {
			ad.output = s
			hold("output", s)
		}
	}
	return ad, partial, nil
}

// compare reads the tool list again after a reconnection. What has changed is
// reported as drift and not adopted.
func (c *Client) compare(ctx context.Context) {
	c.mu.RLock()
	had := c.tools
	c.mu.RUnlock()
	if had == nil {
		return
	}
	listed, err := innermost(c.s).ListTools(ctx)
	if err != nil {
		return // the operation that reconnected will meet the fault itself
	}
	drift := compareListed(had, listed, c.cfg)
	c.mu.Lock()
	c.drift = drift
	c.mu.Unlock()
	if c.o.Logger != nil && len(drift) > 0 {
		c.o.Logger.LogAttrs(ctx, slog.LevelWarn, "tools changed while the server was away", slog.String("server", c.cfg.Name), slog.Int("changes", len(drift)))
	}
}

// Drift returns what was seen to change since the adoption and was not
// adopted. [Client.Adopt] adopts it.
func (c *Client) Drift() []Drift {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return slices.Clone(c.drift)
}

// Tools returns the adopted tools, in the server's order.
func (c *Client) Tools() []Tool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.list == nil {
		return nil
	}
	return slices.Clone(c.list.Tools)
}

// Adoption returns what came of the tool list that is in force, what was left
// out of it included; nil before the first adoption. It is not changed.
func (c *Client) Adoption() *Adoption {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.list
}

// Stale reports whether the tool list may have changed since it was adopted:
// the server has announced it, has vouched for it only for a time that has
// passed, or has come back different.
func (c *Client) Stale() bool {
	if s, ok := innermost(c.s).(interface{ stale() bool }); ok && s.stale() {
		return true
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	return len(c.drift) > 0
}

// Health returns what on-call sees of the server; it is zero but for the name
// if the Client's Session has no policy.
func (c *Client) Health() Health {
	if h, ok := c.s.(interface{ Health() Health }); ok {
		return h.Health()
	}
	return Health{Server: c.cfg.Name}
}

// Close ends the session.
func (c *Client) Close() error { return c.s.Close() }

// Call calls an adopted tool. Arguments that do not fit the tool's input schema
// are an *[ArgumentError], and nothing is sent; a result outside the output
// schema is a *[ProtocolError]; whatever else can go wrong is one of the other
// error types of this package. A tool's own failure is a Result with IsError.
func (c *Client) Call(ctx context.Context, call *Call) (*Result, error) {
	r, err := c.call(ctx, call)
	if err == nil {
		return r, nil
	}
	var re *RPCError
	if errors.As(err, &re) && re.Code == -32020 {
		// The server has other header annotations than those we know
		// (MCP 2026-07-28, tools): read them again, once.
		if listed, lerr := c.s.ListTools(ctx); lerr == nil && c.reannotate(listed, call.Tool) {
			return c.call(ctx, call)
		}
	}
	return r, err
}

func (c *Client) call(ctx context.Context, call *Call) (*Result, error) {
	c.mu.RLock()
	t, known := c.tools[call.Tool]
	if !known && c.list != nil {
		for _, a := range c.tools { // the server's own name will do too
			if a.Remote == call.Tool {
				t, known = a, true
				break
			}
		}
	}
	never := c.list == nil
	c.mu.RUnlock()
	if never {
		if _, err := c.Adopt(ctx); err != nil {
			return nil, err
		}
		return c.call(ctx, call)
	}
	if !known {
		return nil, unknownTool(c.cfg.Name, call.Tool, c.Tools())
	}
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
	if err == nil && !out.checked && r.Degraded == "" { // a substitute keeps no promise, and says so
		err = t.check(ctx, r)
	}
	if err != nil {
		return nil, err
	}
	r.Issues = append(issues, r.Issues...)
	return r, nil
}

// arguments returns what is sent for the caller's arguments, as plain JSON
// values, and the issues that "advise" lets pass.
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
	if t.cfg.Arguments == "off" {
		return args, nil, nil
	}
	verdict := t.input.validate(args)
	if verdict == verdictInvalid && t.cfg.Normalize {
		if repaired, changes, ok := t.input.normalize(args, t.Destructive && !t.ReadOnly); ok {
			return repaired, changes, nil
		}
	}
	switch {
	case verdict == verdictValid:
		return args, nil, nil
	case verdict == verdictBudget:
		return nil, nil, &SchemaError{Reason: "budget", Detail: "the arguments cannot be checked within bounds; nothing was sent"}
	}
	issues, more := t.input.explain(args, true)
	if t.cfg.Arguments == "advise" {
		return args, issues, nil
	}
	return nil, nil, fail(issues, more)
}

// check holds a result to the tool's output schema (MCP 2025-06-18, tools). A
// tool's own failure is exempt.
func (t *adopted) check(ctx context.Context, r *Result) error {
	if t.OutputSchema == nil || r.IsError || t.cfg.Results == "off" {
		return nil
	}
	fail := func(detail string, issues []Issue) error {
		if t.cfg.Results == "advise" {
			r.Issues = append(r.Issues, issues...)
			return nil
		}
		return &ProtocolError{Origin: Origin{Server: t.Server, Op: "tools/call"}, Detail: detail, Issues: issues, Raw: clip(r.Structured), Result: r}
	}
	if r.Structured == nil {
		return fail("the tool promises structured content and gave none", []Issue{{Keyword: "required", Want: "structured content"}})
	}
	if t.output == nil {
		return nil
	}
	if len(r.Structured) > 64<<10 { // decoded, it may take forty times that: one at a time
		select {
		case t.large <- struct{}{}:
			defer func() { <-t.large }()
		case <-ctx.Done():
			return &TransportError{Origin: Origin{Server: t.Server, Op: "tools/call"}, Reason: ReasonCancelled, Sent: true, Detail: "waiting to be checked", Err: ctx.Err()}
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

// isPlain reports whether v holds nothing but what a JSON decoder yields, or the
// numbers that callers write by hand.
func isPlain(v any, depth int) bool {
	switch v := v.(type) {
	case nil, string, bool, json.Number, float64, int, int64:
		return true
	case []any:
		for _, e := range v {
			if depth > maxPlainDepth || !isPlain(e, depth+1) {
				return false
			}
		}
		return true
	case map[string]any:
		for _, e := range v {
			if depth > maxPlainDepth || !isPlain(e, depth+1) {
				return false
			}
		}
		return true
	}
	return false
}

// maxPlainDepth bounds the walk over a caller's value, which may be a cycle.
const maxPlainDepth = 128

// mirror picks the arguments that travel as headers too (MCP 2026-07-28,
// transports). An absent or null argument has no header.
func mirror(params []headerParam, args map[string]any) map[string]string {
	out := map[string]string{}
	for _, p := range params {
		var v any = args
		for _, k := range p.Path {
			m, _ := v.(map[string]any)
			v = m[k]
		}
		switch v := v.(type) {
		case string:
			out[p.Name] = v
		case bool:
			out[p.Name] = strconv.FormatBool(v)
		case nil, map[string]any, []any:
		default:
			if b, err := appendValue(nil, v); err == nil {
				out[p.Name] = string(b)
			}
		}
	}
	return out
}

// reannotate takes the header annotations of one tool from a new list, and
// reports whether it found the tool there.
func (c *Client) reannotate(listed []Tool, name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.tools[name]
	i := slices.IndexFunc(listed, func(l Tool) bool { return t != nil && l.Name == t.Remote })
	if i < 0 {
		return false
	}
	s, err := compileSchema(listed[i].InputSchema, schemaOptions{input: true, headers: true})
	if err != nil {
		return false
	}
	fresh := *t
	fresh.headers = s.headers()
	c.tools[name] = &fresh
	return true
}

// compareTools names the differences between two adoptions, by tool.
func compareTools(server string, old, now map[string]*adopted) (out []Drift) {
	for _, k := range slices.Sorted(maps.Keys(old)) {
		if n, ok := now[k]; !ok {
			out = append(out, Drift{server, old[k].Remote, "removed", ""})
		} else if n.digest != old[k].digest {
			out = append(out, Drift{server, n.Remote, "changed", difference(old[k].Tool, n.Tool)})
		}
	}
	for _, k := range slices.Sorted(maps.Keys(now)) {
		if _, ok := old[k]; !ok {
			out = append(out, Drift{server, now[k].Remote, "added", ""})
		}
	}
	return out
}

// compareListed does the same against a list that is not adopted.
func compareListed(old map[string]*adopted, listed []Tool, cfg Config) []Drift {
	now := map[string]*adopted{}
	for _, t := range listed {
		if t.Name == "" || cfg.Allow != nil && !slices.Contains(cfg.Allow, t.Name) || slices.Contains(cfg.Deny, t.Name) {
			continue
		}
		name := localName(cfg.Prefix, t.Name)
		had := old[name]
		if had == nil && len(now) >= cfg.MaxTools {
			continue
		}
		now[name] = &adopted{Tool: t, digest: fingerprint(t.InputSchema, t.OutputSchema)}
		now[name].Remote = t.Name
	}
	return compareTools(cfg.Name, old, now)
}

// difference says in a few words how two tools differ.
func difference(old, now Tool) string {
	if d := schemaDiff(old.InputSchema, now.InputSchema); d != "" {
		return "input schema: " + d
	}
	return "output schema: " + schemaDiff(old.OutputSchema, now.OutputSchema)
}

// unknownTool is the refusal of a call to a tool that was not adopted.
func unknownTool(server, tool string, known []Tool) error {
	hint := strings.TrimPrefix(suggest(tool, names(known)), "; ")
	return &ArgumentError{Origin: Origin{Server: server, Op: "tools/call"}, Tool: tool, Unknown: true, Issues: []Issue{{Keyword: "tool", Want: hint}}}
}

// names lists the names of tools.
func names(tools []Tool) []string {
	out := make([]string, len(tools))
	for i, t := range tools {
		out[i] = t.Name
	}
	return out
}

// localName returns the model-facing name of a tool. The same tool under the
// same prefix always has the same name.
func localName(prefix, tool string) string {
	name := tool
	if prefix != "" {
		name = prefix + "-" + tool
	}
	folded := strings.Map(func(r rune) rune {
		if strings.ContainsRune(nameChars, r) {
			return r
		}
		return '_'
	}, name)
	if len(folded) <= 64 {
		return folded
	}
	sum := sha256.Sum256([]byte(name))
	return folded[:55] + "-" + hex.EncodeToString(sum[:4])
}

// Resource is a resource as the server lists it.
type Resource struct {
	URI         string `json:"uri"`
	Name        string `json:"name"`
	Title       string `json:"title"`
	Description string `json:"description"`
	MIMEType    string `json:"mimeType"`
}

// Prompt is a prompt template as the server lists it.
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

// PromptMessage is one message of an expanded prompt.
type PromptMessage struct {
	Role    string
	Content Content
}

// Request sends any request under the policy; see [TransportSession.Request].
func (c *Client) Request(ctx context.Context, method string, params, out any) error {
	r, ok := c.s.(requester)
	if !ok {
		return &TransportError{Origin: Origin{Server: c.cfg.Name, Op: method}, Reason: ReasonProtocol, Detail: "the session carries tools only"}
	}
	return r.Request(ctx, method, params, out)
}

// Resources lists the server's resources.
func (c *Client) Resources(ctx context.Context) ([]Resource, error) {
	var all []Resource
	err := c.readList(ctx, "resources/list", func(raw json.RawMessage) error {
		var page []Resource
		err := json.Unmarshal(member(raw, "resources"), &page)
		all = append(all, page...)
		return err
	})
	return all, err
}

// ReadResource reads a resource. Text and Data of each block hold its text or
// its base64 blob.
func (c *Client) ReadResource(ctx context.Context, uri string) ([]Content, error) {
	var out struct {
		Contents []struct{ URI, MIMEType, Text, Blob string }
	}
	if err := c.Request(ctx, "resources/read", map[string]any{"uri": uri}, &out); err != nil {
		return nil, err
	}
	blocks := make([]Content, len(out.Contents))
	for i, b := range out.Contents {
		blocks[i] = Content{Type: "resource", URI: b.URI, MIMEType: b.MIMEType, Text: b.Text, Data: b.Blob}
	}
	return blocks, nil
}

// Prompts lists the server's prompts.
func (c *Client) Prompts(ctx context.Context) ([]Prompt, error) {
	var all []Prompt
	err := c.readList(ctx, "prompts/list", func(raw json.RawMessage) error {
		var page []Prompt
		err := json.Unmarshal(member(raw, "prompts"), &page)
		all = append(all, page...)
		return err
	})
	return all, err
}

// Prompt expands a prompt.
func (c *Client) Prompt(ctx context.Context, name string, args map[string]string) ([]PromptMessage, error) {
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
	if err := c.Request(ctx, "prompts/get", params, &out); err != nil {
		return nil, err
	}
	var messages []PromptMessage
	for _, m := range out.Messages {
		r, err := decodeToolResult([]byte(`{"content":[` + string(m.Content) + `]}`))
		if err != nil || len(r.Content) != 1 {
			return nil, &TransportError{Origin: Origin{Server: c.cfg.Name, Op: "prompts/get"}, Reason: ReasonProtocol, Sent: true, Detail: "a message has no readable content", Raw: clip(m.Content)}
		}
		messages = append(messages, PromptMessage{m.Role, r.Content[0]})
	}
	return messages, nil
}

// Complete asks for completions of an argument of a prompt or of a resource
// template: ref is {"type":"ref/prompt","name":…} or
// {"type":"ref/resource","uri":…}.
func (c *Client) Complete(ctx context.Context, ref map[string]any, argument, value string) ([]string, error) {
	var out struct{ Completion struct{ Values []string } }
	err := c.Request(ctx, "completion/complete", map[string]any{"ref": ref, "argument": map[string]any{"name": argument, "value": value}}, &out)
	return out.Completion.Values, err
}

// readList reads a list to its last page under the policy.
func (c *Client) readList(ctx context.Context, method string, take func(json.RawMessage) error) error {
	var params any
	p := pager{limit: 2 * c.cfg.MaxMessageBytes}
	for {
		var raw json.RawMessage
		err := c.Request(ctx, method, params, &raw)
		if err != nil {
			return err
		}
		var page struct {
			NextCursor *string `json:"nextCursor"`
		}
		reason, detail := ReasonProtocol, "the result is not a list"
		if json.Unmarshal(raw, &page) == nil && take(raw) == nil {
			reason, detail = p.next(page.NextCursor, len(raw))
		}
		if detail != "" {
			return &TransportError{Origin: Origin{Server: c.cfg.Name, Op: method}, Reason: reason, Sent: true, Detail: detail, Raw: clip(raw)}
		}
		if page.NextCursor == nil {
			return nil
		}
		params = map[string]any{"cursor": *page.NextCursor}
	}
}

// A Fleet is many servers under one list of tools. It is safe for concurrent
// use.
type Fleet struct {
	clients []*Client
	sweep   chan struct{} // holds a token; taken by whoever changes which tools there are

	mu       sync.RWMutex // guards the fields below
	routes   map[string]*Client
	degraded map[*Client]Degraded
}

// Degraded is an optional server that is missing, as data.
type Degraded struct {
	Server string  `json:"server"`
	Class  Outcome `json:"class"`
	Reason string  `json:"reason"` // in our words
	Err    error   `json:"-"`
}

// Open composes a Client for each Config and assembles them. Nothing is
// started if a Config has a problem.
func Open(ctx context.Context, cfgs []Config, o *Options) (*Fleet, error) {
	var clients []*Client
	var errs []error
	for _, cfg := range cfgs {
		c, err := New(cfg, o)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		clients = append(clients, c)
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return Assemble(ctx, clients...)
}

// Assemble adopts all servers at once; tools, what is degraded and errors are
// in the order of the arguments, whatever the order of arrival. A required
// server that cannot be adopted, or two tools that would answer to one name,
// is an error: the others are then cancelled and everything is closed. An
// optional server that cannot be adopted is [Fleet.Degraded].
func Assemble(ctx context.Context, clients ...*Client) (*Fleet, error) {
	f := &Fleet{clients: clients, sweep: make(chan struct{}, 1), routes: map[string]*Client{}, degraded: map[*Client]Degraded{}}
	f.sweep <- struct{}{}
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	found, errs := adoptAll(inner, clients, func(c *Client) {
		if !c.cfg.Optional {
			cancel(errFailFast)
		}
	})
	if err := ctx.Err(); err != nil {
		return nil, errors.Join(&TransportError{Origin: Origin{Op: "assemble"}, Reason: ReasonCancelled, Err: err}, f.Close())
	}
	var failed []error
	for i, c := range clients {
		switch {
		case errs[i] == nil:
		case !c.cfg.Optional && !(context.Cause(inner) == errFailFast && errors.Is(errs[i], context.Canceled)):
			failed = append(failed, unavailable(c.cfg.Name, errs[i]))
		case c.cfg.Optional:
			f.degraded[c] = degraded(c.cfg.Name, errs[i])
		}
	}
	for i, c := range clients {
		if found[i] == nil || len(failed) > 0 {
			continue
		}
		if err := f.admit(c, found[i]); err != nil {
			failed = append(failed, err)
		}
	}
	if len(failed) > 0 {
		f.Close() // its errors must not hide the failure
		return nil, errors.Join(failed...)
	}
	return f, nil
}

// errFailFast ends the adoption of the others when a required server failed.
var errFailFast = errors.New("a required server failed")

// adoptAll prepares the clients at once, each on a goroutine that it waits for.
// A panic in one is that one's failure.
func adoptAll(ctx context.Context, clients []*Client, failed func(*Client)) ([]*prospect, []error) {
	found, errs := make([]*prospect, len(clients)), make([]error, len(clients))
	var wg sync.WaitGroup
	for i, c := range clients {
		wg.Go(func() {
			defer func() {
				if v := recover(); v != nil {
					errs[i] = &TransportError{Origin: Origin{Server: c.cfg.Name, Op: "adopt"}, Reason: ReasonProtocol, Detail: "panic: " + fmt.Sprintf("%T", v)}
				}
				if errs[i] != nil {
					failed(c)
				}
			}()
			found[i], errs[i] = c.prepare(ctx)
		})
	}
	wg.Wait()
	return found, errs
}

// unavailable dresses the failure of a required server.
func unavailable(server string, err error) error {
	var ue *UnavailableError
	var ce *ConfigError
	if errors.As(err, &ue) || errors.As(err, &ce) {
		return err
	}
	return &UnavailableError{Origin: Origin{Server: server, Op: "adopt"}, Err: err}
}

// degraded states the failure of an optional server as data.
func degraded(server string, err error) Degraded {
	reason := "it cannot be used as configured"
	switch code := errorCode(err); code {
	case "TIMEOUT":
		reason = "it did not answer in time"
	case "SERVER_UNAVAILABLE", "DISCONNECTED":
		reason = "it could not be reached"
	case "AUTH_REQUIRED":
		reason = "it refused our credentials"
	case "PROTOCOL", "INVALID_RESULT", "LIMIT":
		reason = "it did not speak the protocol"
	case "REFUSED":
		reason = "it refused to serve"
	case "BUDGET_EXCEEDED":
		reason = "the run was out of time"
	}
	return Degraded{Server: server, Class: classify(err, "").class, Reason: reason, Err: err}
}

// admit gives the tools of p their names in the fleet, unless one is taken.
func (f *Fleet) admit(c *Client, p *prospect) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range p.list.Tools {
		holder := f.routes[t.Name]
		if slices.Contains(c.o.LocalNames, t.Name) {
			return &ConfigError{Server: c.cfg.Name, Key: "prefix", Value: quoted(c.cfg.Prefix), Layer: "code", Detail: "a tool of it and a local one would both be called " + quoted(t.Name) + "; give the server a prefix"}
		}
		if holder != nil && holder != c {
			return &ConfigError{Server: c.cfg.Name, Key: "prefix", Value: quoted(c.cfg.Prefix), Layer: "code", Detail: "a tool of it and one of server " + quoted(holder.cfg.Name) + " would both be called " + quoted(t.Name) + "; give one of them a prefix"}
		}
	}
	maps.DeleteFunc(f.routes, func(_ string, holder *Client) bool { return holder == c })
	for _, t := range p.list.Tools {
		f.routes[t.Name] = c
	}
	c.commit(p)
	delete(f.degraded, c)
	return nil
}

// Tools returns the tools of all servers, in the order of declaration, by
// model-facing names.
func (f *Fleet) Tools() []Tool {
	var all []Tool
	for _, c := range f.clients {
		all = append(all, c.Tools()...)
	}
	return all
}

// Client returns the client of a server, nil if there is none of that name.
func (f *Fleet) Client(server string) *Client {
	for _, c := range f.clients {
		if c.cfg.Name == server {
			return c
		}
	}
	return nil
}

// Call calls a tool by its model-facing name; see [Client.Call].
func (f *Fleet) Call(ctx context.Context, call *Call) (*Result, error) {
	f.mu.RLock()
	c := f.routes[call.Tool]
	f.mu.RUnlock()
	if c == nil {
		return nil, unknownTool("", call.Tool, f.Tools())
	}
	return c.Call(ctx, call)
}

// Answer calls a tool for a model. It always returns a result: an error is one
// as [ErrorResult] makes it. Text of the server is put into an envelope that
// marks it as data and that it cannot close, and is cut, which is said, where it
// runs past [Config.MaxResultBytes].
func (f *Fleet) Answer(ctx context.Context, call *Call) *Result {
	r, err := f.Call(ctx, call)
	if err != nil {
		return ErrorResult(err)
	}
	f.mu.RLock()
	c := f.routes[call.Tool]
	f.mu.RUnlock()
	limit, server := 64<<10, ""
	if c != nil {
		limit, server = c.cfg.MaxResultBytes, c.cfg.Name
	}
	out := *r
	out.Content = nil
	left, cut := limit, false
	blocks := r.Content
	if len(blocks) == 0 && r.Structured != nil {
		blocks = []Content{{Type: "text", Text: string(r.Structured)}}
	}
	for _, b := range blocks {
		if len(b.Data) > left {
			cut = true
			continue // half an image is none
		}
		left -= len(b.Data)
		if text := b.Text; text != "" || b.Data == "" {
			if b.Text == "" {
				text = string(b.Raw)
			}
			if len(text) > left {
				text, cut = cutText(text, left), true
			}
			left -= len(text)
			b.Text = envelop(server+"/"+call.Tool, text)
		}
		b.Raw = nil
		out.Content = append(out.Content, b)
	}
	if len(r.Structured) > limit {
		out.Structured = nil
	}
	if cut {
		out.Content = append(out.Content, Content{Type: "text", Text: "The result was longer than " + strconv.Itoa(limit) + " bytes and has been cut. Ask for less at a time."})
	}
	return &out
}

// envelop marks text as data of a source. Where the text contains the closing
// tag, the tag is broken up, however it is spelt.
func envelop(source, text string) string {
	const tag = "untrusted-data"
	var b strings.Builder
	b.WriteString("<" + tag + ` source="` + attribute(source) + "\">\n")
	rest := text
	for {
		i := strings.Index(strings.ToLower(rest), tag)
		if i < 0 || i+len(tag) > len(rest) {
			break
		}
		b.WriteString(rest[:i] + rest[i:i+9] + "\u200b" + rest[i+9:i+len(tag)])
		rest = rest[i+len(tag):]
	}
	b.WriteString(rest + "\n</" + tag + ">")
	return b.String()
}

// attribute makes a name safe between quotation marks.
func attribute(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == '"' || r == '<' || r == '>' || r == '&' {
			return '_'
		}
		return r
	}, s)
}

// cutText cuts text to at most n bytes, at the boundary of a character.
func cutText(text string, n int) string {
	for n > 0 && n < len(text) && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:min(max(n, 0), len(text))]
}

// Degraded lists the optional servers that are missing, in the order of
// declaration.
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

// Notice says, once and as data, what is missing from this run, for the model's
// context. It is empty when nothing is.
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

// String renders Health and Degraded as JSON, which makes a Fleet an
// [expvar.Var].
func (f *Fleet) String() string {
	b, err := json.Marshal(map[string]any{"servers": f.Health(), "degraded": f.Degraded()})
	if err != nil {
		return "{}"
	}
	return string(b)
}

// Stale lists the servers whose tools may have changed; see [Client.Stale].
func (f *Fleet) Stale() []string {
	var out []string
	for _, c := range f.clients {
		if c.Stale() {
			out = append(out, c.cfg.Name)
		}
	}
	return out
}

// Readopt tries the degraded servers again and returns the names of those that
// are back. It may run beside calls; the caller decides when it is worth it.
func (f *Fleet) Readopt(ctx context.Context) (back []string, err error) {
	err = f.again(ctx, func(c *Client) bool {
		f.mu.RLock()
		defer f.mu.RUnlock()
		_, down := f.degraded[c]
		return down
	}, func(c *Client, err error) {
		if err == nil {
			back = append(back, c.cfg.Name)
			return
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		f.degraded[c] = degraded(c.cfg.Name, err)
	})
	return back, err
}

// Refresh adopts the tools of stale servers anew, and returns what changed. A
// server that cannot be read keeps the tools it had; the error joins why. It may
// run beside calls.
func (f *Fleet) Refresh(ctx context.Context) (changes []Drift, err error) {
	var errs []error
	err = f.again(ctx, (*Client).Stale, func(c *Client, err error) {
		if err != nil {
			errs = append(errs, err)
			return
		}
		c.mu.RLock()
		defer c.mu.RUnlock()
		changes = append(changes, c.list.Drift...)
	})
	return changes, errors.Join(append(errs, err)...)
}

// again adopts those clients anew that are meant, and reports on each in the
// order of declaration. One sweep runs at a time.
func (f *Fleet) again(ctx context.Context, meant func(*Client) bool, report func(*Client, error)) error {
	select {
	case <-f.sweep:
		defer func() { f.sweep <- struct{}{} }()
	case <-ctx.Done():
		return &TransportError{Origin: Origin{Op: "adopt"}, Reason: ReasonCancelled, Err: ctx.Err()}
	}
	var some []*Client
	for _, c := range f.clients {
		if meant(c) {
			some = append(some, c)
		}
	}
	found, errs := adoptAll(ctx, some, func(*Client) {})
	for i, c := range some {
		if errs[i] == nil {
			errs[i] = f.admit(c, found[i])
		}
		report(c, errs[i])
	}
	if err := ctx.Err(); err != nil {
		return &TransportError{Origin: Origin{Op: "adopt"}, Reason: ReasonCancelled, Err: err}
	}
	return nil
}

// Close closes all servers at once and returns when the last has ended.
func (f *Fleet) Close() error {
	errs := make([]error, len(f.clients))
	var wg sync.WaitGroup
	for i, c := range f.clients {
		wg.Go(func() { errs[i] = c.Close() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// ErrorResult states any error as a result that a model can act on: IsError,
// and one JSON object {error, message, details}. The codes are a closed list;
// the package comment has them. Nothing of the server's, and nothing internal, is in it.
func ErrorResult(err error) *Result {
	code := errorCode(err)
	details := map[string]any{}
	var (
		te     *TransportError
		ue     *UnavailableError
		ae     *ArgumentError
		be     *BudgetError
		origin interface{ origin() *Origin }
	)
	wait := time.Duration(0)
	if errors.As(err, &origin) {
		o := origin.origin()
		for k, v := range map[string]string{"server": o.Server, "call": o.Call} {
			if v != "" {
				details[k] = v
			}
		}
	}
	if errors.As(err, &te) {
		details["may_have_run"], wait = te.Sent, te.RetryAfter
	}
	if errors.As(err, &be) {
		details["may_have_run"] = be.Sent
	}
	if errors.As(err, &ue) && ue.State != BreakerClosed {
		details["may_have_run"], wait = false, ue.RetryAfter
	}
	if wait > 0 {
		details["retry_after_seconds"] = int64((wait + time.Second - 1) / time.Second)
	}
	message := errorAdvice[code]
	if errors.As(err, &ae) {
		message = ae.Feedback()
		var fields []any
		for _, is := range ae.Issues {
			if !ae.Unknown {
				fields = append(fields, map[string]any{"path": is.Path, "keyword": is.Keyword, "want": is.Want, "got": is.Got})
			}
		}
		if fields != nil {
			details["fields"] = fields
		}
	}
	b, _ := appendValue(nil, map[string]any{"error": code, "message": message, "details": details})
	return &Result{IsError: true, Content: []Content{{Type: "text", Text: string(b)}}}
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
	"LIMIT":              "A message was larger than is allowed. Ask for less at a time.",
	"REFUSED":            "The server refused the request. Do not repeat it unchanged.",
	"AUTH_REQUIRED":      "The server wants other credentials. Ask the user to authenticate again.",
	"CANCELLED":          "The call was cancelled. Do not repeat it unless asked to.",
	"SCHEMA":             "The tool's schema cannot be checked within bounds; nothing was sent. Use another tool.",
	"CONFIGURATION":      "The server is configured wrongly. Tell the user.",
	"UNEXPECTED":         "The call failed for a reason that is not known. Use another way.",
}

// errorCode puts an error into the list.
func errorCode(err error) string {
	var (
		te *TransportError
		re *RPCError
		pe *ProtocolError
		ue *UnavailableError
		ae *ArgumentError
		se *SchemaError
		ce *ConfigError
		be *BudgetError
	)
	switch {
	case errors.As(err, &ae) && ae.Unknown:
		return "UNKNOWN_TOOL"
	case errors.As(err, &ae):
		return "INVALID_ARGUMENTS"
	case errors.As(err, &be):
		return "BUDGET_EXCEEDED"
	case errors.As(err, &ue) && (ue.State != BreakerClosed || ue.Err == nil):
		return "SERVER_UNAVAILABLE"
	case errors.As(err, &te):
		switch {
		case te.Reason == ReasonCancelled:
			return "CANCELLED"
		case te.Status == 401 || te.Status == 403:
			return "AUTH_REQUIRED"
		case te.Status == 429:
			return "RATE_LIMITED"
		case te.Reason == ReasonUnavailable:
			return "SERVER_UNAVAILABLE"
		case te.Status >= 300:
			return "REFUSED"
		case te.Reason == ReasonTimeout:
			return "TIMEOUT"
		case te.Reason == ReasonDisconnected:
			return "DISCONNECTED"
		case te.Reason == ReasonLimit:
			return "LIMIT"
		}
		return "PROTOCOL"
	case errors.As(err, &re):
		return "REFUSED"
	case errors.As(err, &pe):
		return "INVALID_RESULT"
	case errors.As(err, &se):
		return "SCHEMA"
	case errors.As(err, &ce):
		return "CONFIGURATION"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return "CANCELLED"
	}
	return "UNEXPECTED"
}
