package mcp

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"maps"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
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
		if d := distance(word, k); d < least || strings.HasSuffix(k, "_seconds") && strings.TrimSuffix(k, "_seconds") == word {
			best, least = k, min(d, least)
		}
	}
	if best == "" {
		return ""
	}
	return "; did you mean " + strconv.Quote(best) + "?"
}

// distance counts the edits between two words, as Levenshtein does. Long words
// are cut: the callers' words may be anybody's.
func distance(a, b string) int {
	a, b = a[:min(len(a), 64)], b[:min(len(b), 64)]
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diag := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diag
			if a[i] != b[j] {
				cost++
			}
			diag = row[j+1]
			row[j+1] = min(cost, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
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
	if err != nil {
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
