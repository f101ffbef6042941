package mcp

// JSON Schema, 2020-12 and draft-07, for schemas that nobody vouches for. A
// schema is compiled once, under bounds, into a tree whose references are
// pointers; what cannot be held is refused by name, never ignored. A value is
// checked under a budget of work and without allocating; only one that fails
// is walked again, to say why. No reference leaves the document: there is no
// loader to turn on. This file refers to no other file of the package.

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/big"
	"net/netip"
	"net/url"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// An Issue is one place where a value does not fit its schema.
type Issue struct {
	Path       string // JSON Pointer into the value; long names are cut
	Keyword    string // the schema keyword that was violated
	Want       string // what was expected
	Got        string // what was given, as bounded JSON; for results its JSON type
	SchemaPath string // JSON Pointer into the schema
}

// A SchemaError is a schema that cannot be held, and why.
type SchemaError struct {
	Reason  string // a word of a closed list, such as "remote-ref"
	Pointer string // JSON Pointer into the schema
	Detail  string // bounded; may quote the schema, and so is not in the text
}

func (e *SchemaError) Error() string {
	return "mcp: schema: " + e.Reason + " at " + cmp.Or(plainText(e.Pointer, maxPath), "the root")
}

// schemaOptions say what a schema is for. The zero value is an output schema
// up to 2025-11-25: its value must be an object.
type schemaOptions struct {
	input        bool // arguments: as the zero value, and headers may be asked for
	anyRoot      bool // results from 2026-07-28 on: any value at the root
	headers      bool // with input: collect x-mcp-header, and hold its rules
	assertFormat bool // hold the formats we know instead of noting them
	strict       bool // refuse what can be held only in part
	schemaLimits
}

// schemaLimits are what a schema and its values may cost. A field that is not
// positive has the stated default; there is no "unlimited".
type schemaLimits struct {
	text         int // bytes of the schema; 256 KiB
	nesting      int // JSON nesting of the schema; 64
	depth        int // schemas within schemas; 32
	nodes        int // subschemas compiled; 10,000
	branches     int // of one allOf, anyOf or oneOf; 256
	values       int // of one enum; 4,096
	patterns     int // in one schema; 256
	patternText  int // bytes of one pattern; 1,024
	patternSize  int // instructions of one pattern; 10,000
	hops         int // references that lead to references; 64
	valueNesting int // nesting of a value; 128
	work         int // units of work in one validation; 1,000,000
	issues       int // kept of one value; 8
}

func (l schemaLimits) withDefaults() schemaLimits {
	d := schemaLimits{256 << 10, 64, 32, 10_000, 256, 4096, 256, 1024, 10_000, 64, 128, 1_000_000, 8}
	or := func(n, d int) int { return cmp.Or(max(n, 0), d) }
	return schemaLimits{or(l.text, d.text), or(l.nesting, d.nesting), or(l.depth, d.depth), or(l.nodes, d.nodes),
		or(l.branches, d.branches), or(l.values, d.values), or(l.patterns, d.patterns), or(l.patternText, d.patternText),
		or(l.patternSize, d.patternSize), or(l.hops, d.hops), or(l.valueNesting, d.valueNesting), or(l.work, d.work), or(l.issues, d.issues)}
}

// Bounds that are not for tuning.
const (
	maxDigits   = 400 // digits of a number, and its exponent either way
	maxInPlace  = 256 // schemas that apply to one value through one another
	maxQuote    = 64  // bytes of one quoted name or value
	maxPath     = 256 // bytes of one path
	maxFeedback = 2 << 10
)

// kinds is a set of JSON types. An integer is kindInteger, any other number is
// kindNumber; the type "number" is both.
type kinds uint8

const (
	kindNull kinds = 1 << iota
	kindBoolean
	kindInteger
	kindNumber
	kindString
	kindArray
	kindObject
	kindAny kinds = 1<<iota - 1
)

var kindNames = [...]struct {
	name string
	kinds
}{
	{"string", kindString}, {"number", kindInteger | kindNumber}, {"integer", kindInteger}, {"boolean", kindBoolean},
	{"array", kindArray}, {"object", kindObject}, {"null", kindNull},
}

// A schema is compiled. It does not change and may be shared.
type schema struct {
	root    *node
	object  bool // whether the value must be an object, whatever root says
	limits  schemaLimits
	partial []unchecked
	params  []headerParam
}

// unchecked is a keyword that the schema has and that is not held.
type unchecked struct{ Pointer, Keyword, Why string }

// unchecked returns what is held in part. A format that is not asserted is an
// annotation, as 2020-12 has it, and is listed all the same.
func (s *schema) unchecked() []unchecked { return s.partial }

// headerParam is an argument that 2026-07-28 mirrors into an Mcp-Param header.
type headerParam struct {
	Name string
	Path []string // property names from the root
}

// headers returns the arguments annotated with x-mcp-header.
func (s *schema) headers() []headerParam { return s.params }

// A node is one subschema.
type node struct {
	path   string // JSON Pointer into the schema
	types  kinds  // 0 for the schema false
	admits kinds  // types, narrowed by what applies in place; for messages
	rules  int    // keywords that assert something; 0 holds for every value
	height int    // longest chain in place below; 0 unknown, -1 being computed

	enum, con            *choice
	minLength, maxLength int
	pattern              *pattern
	formatName           string // one we know, asserted or not
	format               func(string) bool

	bounded                            bool // whether any of these is set
	min, max, above, below, multipleOf *decimal

	minItems, maxItems       int
	unique                   bool
	prefix                   []*node
	items, contains          *node
	minContains, maxContains int
	restItems                *node // unevaluatedItems

	minProps, maxProps int
	props              []property // by name
	patterns           []patternProperty
	additional, names  *node
	open               bool // a pattern is not held, so no name is certainly additional
	each               bool // whether members beyond props must be looked at
	needs              []dependency
	restProps          *node // unevaluatedProperties

	inPlace              bool // whether any of these is set
	all, any, one        []*node
	not, cond, then, els *node
}

type property struct {
	name     string
	node     *node // nil if only required
	required bool
}

type patternProperty struct {
	*pattern
	node *node
}

type dependency struct {
	name  string
	names []string
	node  *node
}

// A choice is an enum or a const.
type choice struct {
	values []any
	set    map[string]bool // the values, if they are many and all strings
}

type pattern struct {
	*regexp.Regexp
	text string
	size int // instructions
}

// compileSchema compiles a schema. The error is a [*SchemaError].
func compileSchema(raw []byte, o schemaOptions) (s *schema, err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case *SchemaError:
			s, err = nil, r
		default:
			panic(r)
		}
	}()
	o.schemaLimits = o.withDefaults()
	c := &compiler{schemaOptions: o, keywords: keywords, memo: map[string]*node{}, regexps: map[string]*pattern{}}
	return c.compile(raw), nil
}

// A compiler is the state of one compilation. Its methods panic with a
// [*SchemaError], which compileSchema recovers.
type compiler struct {
	schemaOptions
	keywords map[string]keyword
	doc      any
	draft7   bool
	declared bool             // whether $schema names the dialect
	memo     map[string]*node // targets of references by pointer
	index    map[string]place // resources and anchors by URI; nil until needed
	queue    []job            // targets to fill
	nodes    []*node
	regexps  map[string]*pattern // nil if not held
	partial  []unchecked
}

type job struct {
	*node
	place
}

// A place is a value in the document.
type place struct {
	raw   any
	ptr   string
	base  string // URI that references resolve against
	depth int    // schemas around it
}

func (p place) to(raw any, token string) place {
	return place{raw, p.ptr + "/" + escapeToken(token), p.base, p.depth}
}

func (c *compiler) fail(reason, ptr, detail string) {
	panic(&SchemaError{Reason: reason, Pointer: cut(ptr, maxPath), Detail: detail})
}

func (c *compiler) bound(n, most int, reason, ptr string) {
	if n > most {
		c.fail(reason, ptr, fmt.Sprintf("%d, at most %d", n, most))
	}
}

// part notes a keyword that is not held.
func (c *compiler) part(at place, kw, why string, annotation bool) {
	if c.strict && !annotation {
		c.fail("unchecked", at.ptr, kw+": "+why)
	}
	c.partial = append(c.partial, unchecked{cut(at.ptr, maxPath), kw, why})
}

func (c *compiler) compile(raw []byte) *schema {
	c.bound(len(raw), c.text, "schema-size", "")
	c.bound(jsonNesting(raw), c.nesting, "schema-depth", "")
	var ok bool
	if c.doc, ok = decodeJSON(raw); !ok {
		c.fail("not-json", "", "the schema is not JSON")
	}
	m, isMap := c.doc.(map[string]any)
	if _, isBool := c.doc.(bool); !isMap && !isBool {
		c.fail("not-json", "", "the schema is neither an object nor a boolean")
	}
	if d, ok := m["$schema"]; ok {
		c.draft7, c.declared = c.dialect(d, ""), true
	}
	// A root that does not say its type is odd and harmless; one that leaves
	// out object can admit nothing that is sent.
	types, isList := m["type"].([]any)
	if t, ok := m["type"].(string); !c.anyRoot && (ok && t != "object" || isList && !slices.Contains(types, any("object")) || c.doc == false) {
		c.fail("root-type", "", "the root does not admit an object")
	}
	s := &schema{object: !c.anyRoot, limits: c.schemaLimits, root: c.target(place{raw: c.doc})}
	for ; len(c.queue) > 0; c.queue = c.queue[1:] {
		c.fill(c.queue[0].node, c.queue[0].place)
	}
	for _, n := range c.nodes {
		c.measure(n)
	}
	if c.input && c.headers {
		c.collect(place{raw: c.doc}, nil, true, &s.params)
	}
	s.partial = c.partial
	return s
}

// dialect reports whether v names draft-07 and not 2020-12.
func (c *compiler) dialect(v any, ptr string) bool {
	s, _ := v.(string)
	s = strings.TrimSuffix(s, "#")
	old := s == "http://json-schema.org/draft-07/schema" || s == "https://json-schema.org/draft-07/schema"
	if !old && s != "https://json-schema.org/draft/2020-12/schema" {
		c.fail("dialect", ptr+"/$schema", "neither 2020-12 nor draft-07: "+quoteValue(v))
	}
	return old
}

func (c *compiler) newNode(at place) *node {
	c.bound(len(c.nodes)+1, c.schemaLimits.nodes, "schema-nodes", at.ptr)
	c.bound(at.depth, c.depth, "schema-depth", at.ptr)
	const most = math.MaxInt
	n := &node{path: at.ptr, types: kindAny, maxLength: most, maxItems: most, minContains: 1, maxContains: most, maxProps: most}
	c.nodes = append(c.nodes, n)
	return n
}

// target returns the node that references to a place share. It is filled
// later, so that a schema may contain itself.
func (c *compiler) target(at place) *node {
	n, ok := c.memo[at.ptr]
	if !ok {
		at.depth = 1
		n = c.newNode(at)
		c.memo[at.ptr] = n
		c.queue = append(c.queue, job{n, at})
	}
	return n
}

// sub compiles a subschema where it stands. One that only leads elsewhere
// collapses into what it leads to.
func (c *compiler) sub(at place) *node {
	at.depth++
	n := c.newNode(at)
	c.fill(n, at)
	if n.rules == 1 && len(n.all) == 1 {
		return n.all[0]
	}
	return n
}

func (c *compiler) fill(n *node, at place) {
	m, ok := at.raw.(map[string]any)
	if b, isBool := at.raw.(bool); isBool && !b {
		n.types, n.rules = 0, 1
	} else if !ok && !isBool {
		c.fail("keyword-shape", at.ptr, "want a schema: an object or a boolean")
	}
	at.base = c.enter(m, at)
	if ref, ok := m["$ref"]; ok && c.draft7 { // its siblings have no meaning there
		n.all, n.rules, n.inPlace = []*node{c.ref(at.to(ref, "$ref"))}, 1, true
		return
	}
	for _, name := range keysOf(m) {
		kw := c.keywords[name]
		if kw.only == in2020 && c.draft7 || kw.only == tuples && c.declared && !c.draft7 {
			continue
		}
		t := term{c, n, at.to(m[name], name), name, m}
		if kw.set != nil {
			n.rules++
			kw.set(t)
		} else if kw.note != nil {
			kw.note(t)
		}
	}
	n.bounded = n.min != nil || n.max != nil || n.above != nil || n.below != nil || n.multipleOf != nil
	n.each = n.patterns != nil || n.names != nil || n.additional != nil && n.additional.rules > 0 && !n.open
	n.inPlace = n.all != nil || n.any != nil || n.one != nil || n.not != nil || n.cond != nil
}

// enter returns the base URI inside m, which may begin a resource of its own.
func (c *compiler) enter(m map[string]any, at place) string {
	id, _ := m["$id"].(string)
	if id == "" || id[0] == '#' || c.draft7 && m["$ref"] != nil {
		return at.base
	}
	if d, ok := m["$schema"]; ok && at.ptr != "" && c.dialect(d, at.ptr) != c.draft7 {
		c.fail("dialect", at.ptr+"/$schema", "another dialect inside the document")
	}
	uri, _, ok := resolveURI(at.base, id)
	if !ok {
		c.fail("keyword-shape", at.ptr+"/$id", "not a URI: "+quoteText(id))
	}
	return uri
}

// ref compiles the reference at from, through those that it leads to.
func (c *compiler) ref(from place) *node {
	var seen []string
	for at := from; ; {
		to := c.lookup(at)
		m, _ := to.raw.(map[string]any)
		next, more := m["$ref"]
		if !more || !c.draft7 && len(m) > 1 {
			return c.target(to)
		}
		if slices.Contains(seen, to.ptr) {
			c.fail("ref-cycle", from.ptr, "the reference leads back to itself")
		}
		seen = append(seen, to.ptr)
		c.bound(len(seen), c.hops, "ref-depth", from.ptr)
		at = to.to(next, "$ref")
	}
}

// lookup finds the place that a reference names.
func (c *compiler) lookup(at place) place {
	text, ok := at.raw.(string)
	if !ok {
		c.fail("keyword-shape", at.ptr, "want a string")
	}
	if c.index == nil {
		c.index = map[string]place{"": {raw: c.doc}}
		c.scan(place{raw: c.doc})
	}
	uri, frag, _ := resolveURI(at.base, text)
	to, found := c.index[uri]
	if !found {
		c.fail("remote-ref", at.ptr, "not in this document: "+quoteText(text))
	}
	if strings.HasPrefix(frag, "/") {
		for token := range strings.SplitSeq(frag[1:], "/") {
			to, found = c.step(to, strings.NewReplacer("~1", "/", "~0", "~").Replace(token))
			if !found {
				break
			}
		}
	} else if frag != "" {
		to, found = c.index[uri+"#"+frag]
	}
	if !found {
		c.fail("unresolved-ref", at.ptr, "nothing is there: "+quoteText(text))
	}
	return to
}

// step follows one token of a JSON Pointer.
func (c *compiler) step(at place, token string) (place, bool) {
	m, _ := at.raw.(map[string]any)
	at.base = c.enter(m, at)
	next, ok := m[token]
	if list, isList := at.raw.([]any); isList {
		if i, err := strconv.Atoi(token); err == nil && i >= 0 && i < len(list) {
			next, ok = list[i], true
		}
	}
	return at.to(next, token), ok
}

// scan indexes the resources and anchors of a subschema.
func (c *compiler) scan(at place) {
	m, _ := at.raw.(map[string]any)
	outer := at // entering a resource again from its own place changes nothing
	at.base = c.enter(m, at)
	id, _ := m["$id"].(string)
	if at.base != outer.base || at.ptr == "" {
		c.index[at.base] = outer
	}
	anchors := []any{m["$anchor"], m["$dynamicAnchor"]}
	if c.draft7 {
		anchors = nil
		if strings.HasPrefix(id, "#") && m["$ref"] == nil {
			anchors = []any{id[1:]}
		}
	}
	for _, a := range anchors {
		if name, _ := a.(string); name != "" {
			c.index[at.base+"#"+name] = outer
		}
	}
	for kw, v := range m {
		c.keywords[kw].holds.each(at.to(v, kw), func(at place, _ string) { c.scan(at) })
	}
}

func resolveURI(base, ref string) (uri, fragment string, ok bool) {
	b, err := url.Parse(base)
	if err != nil {
		return "", "", false
	}
	u, err := b.Parse(ref)
	if err != nil {
		return "\x00", "", false // in no index
	}
	fragment, u.Fragment, u.RawFragment = u.Fragment, "", ""
	return u.String(), fragment, true
}

// measure computes how high a node is in place, and refuses a cycle: a schema
// that asks about the same value again can never answer. A cycle that goes
// down a level of the value is how trees are described.
func (c *compiler) measure(n *node) int {
	if n.height < 0 {
		c.fail("ref-cycle", n.path, "the schema applies to a value through itself")
	}
	if n.height > 0 {
		return n.height
	}
	n.height, n.admits = -1, n.types
	high := 0
	for _, s := range slices.Concat(n.all, n.any, n.one, []*node{n.not, n.cond, n.then, n.els}) {
		if s != nil {
			high = max(high, c.measure(s))
		}
	}
	for _, d := range n.needs {
		if d.node != nil {
			high = max(high, c.measure(d.node))
		}
	}
	n.height = high + 1
	c.bound(n.height, maxInPlace, "ref-depth", n.path)
	for _, e := range []*choice{n.enum, n.con} {
		if e != nil {
			n.admits &= e.kinds()
		}
	}
	for _, s := range n.all {
		n.admits &= s.admits
	}
	for _, group := range [][]*node{n.any, n.one} {
		if group != nil {
			n.admits &= admitted(group)
		}
	}
	return n.height
}

func admitted(group []*node) (k kinds) {
	for _, s := range group {
		k |= s.admits
	}
	return k
}

func (e *choice) kinds() (k kinds) {
	for _, v := range e.values {
		k |= kindOf(v)
	}
	return k
}

// A term is one keyword of a schema object, to be compiled into n.
type term struct {
	*compiler
	n    *node
	at   place
	name string
	m    map[string]any // the object
}

// holder says which subschemas a keyword holds.
type holder uint8

const (
	holdsNone  holder = iota
	holdsOne          // a schema, or an array of them
	holdsNamed        // an object of schemas
)

// each calls f for the subschemas of a keyword at a place, with their names.
func (h holder) each(at place, f func(at place, name string)) {
	switch v := at.raw.(type) {
	case map[string]any:
		if h == holdsOne {
			f(at, "")
		}
		for name, raw := range v {
			if h == holdsNamed {
				f(at.to(raw, name), name)
			}
		}
	case []any:
		for i, raw := range v {
			if h == holdsOne {
				f(at.to(raw, strconv.Itoa(i)), "")
			}
		}
	}
}

// Which dialects know a keyword.
const (
	in2020 = 1 // only 2020-12
	tuples = 2 // draft-07, and a schema that does not say, as older servers do not
)

// A keyword either asserts something (set) or is noted. Others are annotations.
type keyword struct {
	only  int
	holds holder
	set   func(term)
	note  func(term)
}

// keywords is reached through the compiler alone: it refers to itself.
var keywords = map[string]keyword{
	"$ref":             {set: func(t term) { t.n.all = append(t.n.all, t.ref(t.at)) }},
	"$id":              {note: func(t term) { t.str() }},
	"$anchor":          {note: func(t term) { t.str() }},
	"$dynamicRef":      {only: in2020, set: func(t term) { t.fail("dynamic-ref", t.at.ptr, "not supported") }},
	"$recursiveRef":    {only: in2020, set: func(t term) { t.fail("dynamic-ref", t.at.ptr, "not supported") }},
	"$vocabulary":      {only: in2020, set: func(t term) { t.fail("vocabulary", t.at.ptr, "not supported") }},
	"$defs":            {holds: holdsNamed},
	"definitions":      {holds: holdsNamed},
	"contentEncoding":  {note: func(t term) { t.part(t.at, t.name, "annotation", true) }},
	"contentMediaType": {note: func(t term) { t.part(t.at, t.name, "annotation", true) }},
	"contentSchema":    {only: in2020, note: func(t term) { t.part(t.at, t.name, "annotation", true) }},
	"format":           {note: term.format},

	"type":  {set: term.types},
	"enum":  {set: func(t term) { t.n.enum = t.choice(t.list()) }},
	"const": {set: func(t term) { t.n.con = t.choice([]any{t.at.raw}) }},

	"minLength":        {set: func(t term) { t.n.minLength = t.count() }},
	"maxLength":        {set: func(t term) { t.n.maxLength = t.count() }},
	"pattern":          {set: func(t term) { t.n.pattern = t.regexp(t.at, t.str()) }},
	"minimum":          {set: func(t term) { t.n.min = t.number() }},
	"maximum":          {set: func(t term) { t.n.max = t.number() }},
	"exclusiveMinimum": {set: func(t term) { t.n.above = t.number() }},
	"exclusiveMaximum": {set: func(t term) { t.n.below = t.number() }},
	"multipleOf":       {set: func(t term) { t.n.multipleOf = t.positive() }},

	"items":            {holds: holdsOne, set: term.items},
	"additionalItems":  {only: tuples, holds: holdsOne, set: term.items},
	"prefixItems":      {only: in2020, holds: holdsOne, set: func(t term) { t.n.prefix = t.schemas() }},
	"contains":         {holds: holdsOne, set: func(t term) { t.n.contains = t.schema() }},
	"minContains":      {only: in2020, set: func(t term) { t.n.minContains = t.count() }},
	"maxContains":      {only: in2020, set: func(t term) { t.n.maxContains = t.count() }},
	"minItems":         {set: func(t term) { t.n.minItems = t.count() }},
	"maxItems":         {set: func(t term) { t.n.maxItems = t.count() }},
	"uniqueItems":      {set: func(t term) { t.n.unique = t.flag() }},
	"unevaluatedItems": {only: in2020, holds: holdsOne, set: func(t term) { t.n.restItems = t.schema() }},

	"properties":            {holds: holdsNamed, set: term.properties},
	"required":              {set: term.required},
	"patternProperties":     {holds: holdsNamed, set: term.patternProperties},
	"additionalProperties":  {holds: holdsOne, set: func(t term) { t.n.additional = t.schema() }},
	"propertyNames":         {holds: holdsOne, set: func(t term) { t.n.names = t.schema() }},
	"minProperties":         {set: func(t term) { t.n.minProps = t.count() }},
	"maxProperties":         {set: func(t term) { t.n.maxProps = t.count() }},
	"dependentRequired":     {only: in2020, set: term.dependencies},
	"dependentSchemas":      {only: in2020, holds: holdsNamed, set: term.dependencies},
	"dependencies":          {holds: holdsNamed, set: term.dependencies},
	"unevaluatedProperties": {only: in2020, holds: holdsOne, set: func(t term) { t.n.restProps = t.schema() }},

	"allOf": {holds: holdsOne, set: func(t term) { t.n.all = append(t.n.all, t.schemas()...) }},
	"anyOf": {holds: holdsOne, set: func(t term) { t.n.any = t.schemas() }},
	"oneOf": {holds: holdsOne, set: func(t term) { t.n.one = t.schemas() }},
	"not":   {holds: holdsOne, set: func(t term) { t.n.not = t.schema() }},
	"if":    {holds: holdsOne, set: func(t term) { t.n.cond = t.schema() }},
	"then":  {holds: holdsOne, set: func(t term) { t.n.then = t.schema() }},
	"else":  {holds: holdsOne, set: func(t term) { t.n.els = t.schema() }},
}

// want fails unless a keyword has the shape it must have: otherwise what its
// author meant cannot be told, and no meaning is invented.
func (t term) want(ok bool, shape string) {
	if !ok {
		t.fail("keyword-shape", t.at.ptr, "want "+shape)
	}
}

func (t term) str() string {
	s, ok := t.at.raw.(string)
	t.want(ok, "a string")
	return s
}

func (t term) flag() bool {
	b, ok := t.at.raw.(bool)
	t.want(ok, "a boolean")
	return b
}

func (t term) list() []any {
	list, ok := t.at.raw.([]any)
	t.want(ok, "an array")
	return list
}

func (t term) number() *decimal {
	text, ok := t.at.raw.(json.Number)
	t.want(ok, "a number")
	d, ok := parseDecimal(string(text))
	if !ok {
		t.fail("number-range", t.at.ptr, "too many digits")
	}
	return &d
}

func (t term) positive() *decimal {
	d := t.number()
	t.want(d.sign() > 0, "a number greater than 0")
	return d
}

// count returns a size. One beyond an int is as good as the largest int.
func (t term) count() int {
	d := t.number()
	t.want(d.sign() >= 0 && d.low >= 0, "an integer of at least 0")
	if d.top > 17 {
		return math.MaxInt
	}
	return int(min(d.uint(), math.MaxInt))
}

func (t term) types() {
	list, ok := t.at.raw.([]any)
	if !ok {
		list = []any{t.at.raw}
	}
	t.want(len(list) > 0, "at least one type")
	t.n.types = 0
	for _, v := range list {
		i := slices.IndexFunc(kindNames[:], func(k struct {
			name string
			kinds
		}) bool {
			return v == k.name
		})
		t.want(i >= 0, "the name of a JSON type")
		t.n.types |= kindNames[i].kinds
	}
}

func (t term) choice(values []any) *choice {
	t.bound(len(values), t.values, "schema-enum", t.at.ptr)
	e := &choice{values: values, set: map[string]bool{}}
	for _, v := range values {
		if s, ok := v.(string); ok {
			e.set[s] = true
		}
		var c checker
		if c.left = math.MaxInt; c.canon(nil, v, maxDigits) == nil {
			t.fail("number-range", t.at.ptr, "a number with too many digits")
		}
	}
	if len(e.set) <= 8 || len(e.set) < len(values) {
		e.set = nil
	}
	return e
}

// format holds a format, or notes that it does not.
func (t term) format() {
	name := t.str()
	f, known := formats[name]
	if !known {
		t.part(t.at, "format", "not known", !t.assertFormat)
		return
	}
	if t.n.formatName = name; !t.assertFormat {
		t.part(t.at, "format", "annotation", true)
		return
	}
	t.n.rules++
	if t.n.format = f.check; f.grammar != "" {
		re := regexp.MustCompile("^(?:" + f.grammar + ")$")
		t.n.format = func(s string) bool { return re.MatchString(s) && (f.check == nil || f.check(s)) }
	}
}

func (t term) schema() *node { return t.sub(t.at) }

func (t term) schemas() []*node {
	list := t.list()
	t.want(len(list) > 0 || t.name == "items", "at least one schema")
	t.bound(len(list), t.branches, "schema-branches", t.at.ptr)
	nodes := make([]*node, len(list))
	for i, raw := range list {
		nodes[i] = t.sub(t.at.to(raw, strconv.Itoa(i)))
	}
	return nodes
}

// items compiles items and additionalItems, in the meaning of either dialect.
func (t term) items() {
	_, tuple := t.m["items"].([]any)
	switch tuple = tuple && (t.draft7 || !t.declared); {
	case tuple && t.name == "items":
		t.n.prefix = t.schemas()
	case tuple || t.name == "items":
		t.n.items = t.schema()
	default:
		t.schema() // additionalItems without a tuple has no meaning, yet must be a schema
	}
}

// members calls f for the members of an object, by name.
func (t term) members(f func(name string, at place)) {
	m, ok := t.at.raw.(map[string]any)
	t.want(ok, "an object")
	for _, name := range keysOf(m) {
		f(name, t.at.to(m[name], name))
	}
}

func (t term) names(raw any) []string {
	list, ok := raw.([]any)
	names := make([]string, len(list))
	for i := range list {
		var isString bool
		names[i], isString = list[i].(string)
		ok = ok && isString
	}
	t.want(ok, "an array of strings")
	return names
}

func (t term) properties() {
	t.members(func(name string, at place) {
		t.n.props = append(t.n.props, property{name: name, node: t.sub(at)})
	})
}

// required comes after properties, by name.
func (t term) required() {
	for _, name := range t.names(t.at.raw) {
		i, found := t.n.find(name)
		if !found {
			t.n.props = slices.Insert(t.n.props, i, property{name: name})
		}
		t.n.props[i].required = true
	}
}

func (n *node) find(name string) (int, bool) {
	return slices.BinarySearchFunc(n.props, name, func(p property, s string) int { return cmp.Compare(p.name, s) })
}

func (t term) patternProperties() {
	t.members(func(name string, at place) {
		p, sub := t.regexp(at, name), t.sub(at)
		if p == nil {
			t.n.open = true
			return
		}
		t.n.patterns = append(t.n.patterns, patternProperty{p, sub})
	})
}

func (t term) dependencies() {
	t.members(func(name string, at place) {
		d := dependency{name: name}
		if _, isList := at.raw.([]any); isList && t.name != "dependentSchemas" || t.name == "dependentRequired" {
			d.names = t.names(at.raw)
		} else {
			d.node = t.sub(at)
		}
		t.n.needs = append(t.n.needs, d)
	})
}

// regexp compiles a pattern. It is nil if the pattern cannot be held.
func (t term) regexp(at place, text string) *pattern {
	p, ok := t.regexps[text]
	if ok && p != nil {
		return p
	}
	if !ok {
		t.bound(len(t.regexps)+1, t.compiler.patterns, "schema-patterns", at.ptr)
	}
	p, err := compilePattern(text, t.patternText, t.patternSize)
	if t.regexps[text] = p; err != nil {
		t.part(at, t.name, err.Error(), false)
	}
	return p
}

// collect gathers x-mcp-header annotations. They may stand only on primitive
// properties that are reached from the root through properties alone.
func (c *compiler) collect(at place, path []string, reached bool, out *[]headerParam) {
	m, _ := at.raw.(map[string]any)
	if v, ok := m["x-mcp-header"]; ok {
		name, _ := v.(string)
		fault := ""
		switch m["type"] {
		case "string", "integer", "boolean":
		default:
			fault = "the type must be string, integer or boolean"
		}
		if !reached || len(path) == 0 {
			fault = "not on a property that is reached through properties alone"
		} else if name == "" || strings.Trim(name, tokenChars) != "" {
			fault = "not a header name"
		} else if slices.ContainsFunc(*out, func(p headerParam) bool { return strings.EqualFold(p.Name, name) }) {
			fault = "two arguments for one header"
		}
		if fault != "" {
			c.fail("x-mcp-header", at.ptr, fault)
		}
		*out = append(*out, headerParam{name, slices.Clone(path)})
	}
	for _, kw := range keysOf(m) {
		holds := c.keywords[kw].holds
		if _, known := c.keywords[kw]; !known && kw != "default" && kw != "examples" {
			holds = holdsOne // it has no business under a keyword that we do not know
		}
		holds.each(at.to(m[kw], kw), func(at place, name string) {
			c.collect(at, append(path, name), reached && kw == "properties", out)
		})
	}
}

// A validity is what became of a check.
type validity uint8

const (
	verdictValid validity = iota
	verdictInvalid
	verdictBudget // neither: the work that the schema asks for is too much
)

// validate checks what a decoder with UseNumber yields. Numbers of Go are
// taken too, and any other value is put into JSON first.
func (s *schema) validate(v any) validity {
	c := checker{left: s.limits.work, deepest: s.limits.valueNesting}
	return c.validity(c.check(s.root, v))
}

// A checker walks one value. It explains if it has an explainer, and stops at
// the first misfit if not.
type checker struct {
	left           int // units of work; negative ends the walk
	depth, deepest int
	fault          string // why left is negative, if it is not the budget
	ex             *explainer
}

func (c *checker) validity(ok bool) validity {
	if ok && c.left >= 0 {
		return verdictValid
	} else if c.left < 0 && c.fault == "" {
		return verdictBudget
	}
	return verdictInvalid
}

// stop ends the walk for a value that no branch of the schema could judge.
func (c *checker) stop(fault string) bool {
	if c.left >= 0 {
		c.fault, c.left = fault, -1
	}
	return false
}

// miss notes that x does not fit a keyword of n.
func (c *checker) miss(n *node, kw string, x any) bool {
	if c.ex != nil {
		want, got := c.ex.phrase(n, kw, x)
		c.note(n, kw, want, got)
	}
	return false
}

func (c *checker) note(n *node, kw, want, got string) bool {
	if c.left -= 16; c.ex != nil && c.left >= 0 {
		c.ex.add(Issue{c.ex.path, kw, c.ex.as + want, got, cut(n.path, maxPath) + "/" + kw})
	}
	return false
}

// ended reports whether a misfit settles the matter.
func (c *checker) ended() bool { return c.ex == nil || c.ex.more || c.left < 0 }

// try checks without explaining.
func (c *checker) try(n *node, x any) bool {
	ex := c.ex
	c.ex = nil
	ok := c.check(n, x)
	c.ex = ex
	return ok && c.left >= 0
}

func (c *checker) check(n *node, x any) (ok bool) {
	if c.left--; c.left < 0 {
		return false
	}
	kind := kindNull
	switch v := x.(type) {
	case nil:
		ok = true
	case string:
		kind = kindString
		ok = n.types&kind != 0 && c.text(n, v)
	case json.Number:
		if kind = n.types; n.types != kindAny || n.bounded {
			kind, ok = c.number(n, string(v))
		} else {
			ok = true
		}
	case map[string]any:
		kind = kindObject
		ok = n.types&kind != 0 && c.object(n, v)
	case []any:
		kind = kindArray
		ok = n.types&kind != 0 && c.array(n, v)
	case bool:
		kind, ok = kindBoolean, true
	default:
		y, isJSON := plain(x)
		if !isJSON {
			return c.stop("value")
		}
		return c.check(n, y)
	}
	if n.types&kind == 0 {
		return c.miss(n, "type", x)
	}
	if !ok && c.ended() {
		return false
	}
	if n.enum != nil && !c.among(n.enum, x) {
		return c.miss(n, "enum", x)
	}
	if n.con != nil && !c.among(n.con, x) {
		return c.miss(n, "const", x)
	}
	if n.inPlace && !c.applied(n, x) {
		return false
	}
	if ok && (n.restItems != nil || n.restProps != nil) {
		return c.unevaluated(n, x)
	}
	return ok
}

func (c *checker) text(n *node, v string) bool {
	c.left -= len(v) >> 6
	switch { // bytes settle most of it: a character has one to four
	case len(v) < n.minLength, len(v)/4 < n.minLength && utf8.RuneCountInString(v) < n.minLength:
		return c.miss(n, "minLength", v)
	case len(v) > n.maxLength && utf8.RuneCountInString(v) > n.maxLength:
		return c.miss(n, "maxLength", v)
	case n.pattern != nil && !c.match(n.pattern, v):
		return c.miss(n, "pattern", v)
	case n.format != nil && !n.format(v):
		return c.miss(n, "format", v)
	}
	return true
}

// match charges before it matches: RE2 is linear in text times program.
func (c *checker) match(p *pattern, v string) bool {
	c.left -= 1 + len(v)*p.size/64
	return c.left >= 0 && p.MatchString(v)
}

// number returns the kind of a number too.
func (c *checker) number(n *node, text string) (kinds, bool) {
	d, ok := parseDecimal(text)
	if !ok {
		return kindAny, c.stop("number-range")
	}
	c.left -= len(text) >> 6
	kind, kw := d.kind(), ""
	switch {
	case n.types&kind == 0 || !n.bounded:
		return kind, true
	case n.min != nil && d.cmp(n.min) < 0:
		kw = "minimum"
	case n.max != nil && d.cmp(n.max) > 0:
		kw = "maximum"
	case n.above != nil && d.cmp(n.above) <= 0:
		kw = "exclusiveMinimum"
	case n.below != nil && d.cmp(n.below) >= 0:
		kw = "exclusiveMaximum"
	case n.multipleOf != nil && !d.multiple(n.multipleOf):
		kw = "multipleOf"
	}
	return kind, kw == "" || c.miss(n, kw, json.Number(text))
}

func (c *checker) array(n *node, v []any) bool {
	if len(v) < n.minItems {
		return c.miss(n, "minItems", v)
	}
	if len(v) > n.maxItems {
		return c.miss(n, "maxItems", v)
	}
	if c.depth++; c.depth > c.deepest {
		return c.stop("nesting")
	}
	ok := c.elements(n, v)
	c.depth--
	return ok
}

func (c *checker) elements(n *node, v []any) (ok bool) {
	ok = true
	for i, x := range v {
		sub := n.items
		if i < len(n.prefix) {
			sub = n.prefix[i]
		} else if sub == nil {
			break
		}
		if sub.rules > 0 && !c.item(sub, x, i) {
			if ok = false; c.ended() {
				return false
			}
		}
	}
	if n.unique {
		if i, j := c.twins(v); j > 0 {
			ok = c.note(n, "uniqueItems", fmt.Sprintf("items %d and %d are equal", i, j), "")
		}
	}
	if n.contains != nil {
		has := 0
		for i := 0; i < len(v) && c.left >= 0 && (has < n.minContains || n.maxContains < math.MaxInt); i++ {
			if c.try(n.contains, v[i]) {
				has++
			}
		}
		if has < n.minContains || has > n.maxContains {
			ok = c.note(n, "contains", c.ex.number(n), strconv.Itoa(has))
		}
	}
	return ok
}

// item checks an element, and child a member, one step down the path.
func (c *checker) item(n *node, x any, i int) bool {
	if c.ex == nil {
		return c.check(n, x)
	}
	return c.child(n, x, strconv.Itoa(i))
}

func (c *checker) child(n *node, x any, token string) bool {
	if c.ex == nil {
		return c.check(n, x)
	}
	path := c.ex.path
	c.ex.path = joinPath(path, token)
	ok := c.check(n, x)
	if c.left >= 0 { // where a walk ended is worth knowing
		c.ex.path = path
	}
	return ok
}

func (c *checker) object(n *node, v map[string]any) bool {
	if len(v) > n.maxProps {
		return c.miss(n, "maxProperties", v)
	}
	if len(v) < n.minProps {
		return c.miss(n, "minProperties", v)
	}
	if c.depth++; c.depth > c.deepest {
		return c.stop("nesting")
	}
	ok, known := c.properties(n, v)
	if n.each && known < len(v) || len(n.patterns) > 0 || n.names != nil {
		ok = (ok || !c.ended()) && c.members(n, v) && ok
	}
	for i := range n.needs {
		if _, has := v[n.needs[i].name]; has && (ok || !c.ended()) {
			ok = c.needed(n, &n.needs[i], v) && ok
		}
	}
	c.depth--
	return ok
}

// properties checks the declared members and counts them.
func (c *checker) properties(n *node, v map[string]any) (ok bool, known int) {
	ok = true
	c.left -= len(n.props) >> 2
	for i := range n.props {
		p := &n.props[i]
		x, has := v[p.name]
		switch {
		case !has && p.required:
			ok = c.absent(n, "required", p.name, "")
		case has && p.node != nil:
			known++
			ok = (p.node.rules == 0 || c.child(p.node, x, p.name)) && ok
		}
		if !ok && c.ended() {
			return false, known
		}
	}
	return ok, known
}

// members checks what reaches beyond the declared members.
func (c *checker) members(n *node, v map[string]any) (ok bool) {
	ok = true
	if c.ex != nil { // in order, and only then: it costs
		for _, name := range keysOf(v) {
			ok = c.member(n, name, v[name]) && ok
		}
		return ok
	}
	for name, x := range v {
		if !c.member(n, name, x) {
			return false
		}
	}
	return true
}

func (c *checker) member(n *node, name string, x any) bool {
	if c.left--; c.left < 0 {
		return false
	}
	ok, known := true, n.declared(name) != nil
	for i := range n.patterns {
		if p := &n.patterns[i]; c.match(p.pattern, name) {
			known = true
			ok = c.child(p.node, x, name) && ok
		}
	}
	if n.names != nil && !c.try(n.names, name) {
		ok = c.misnamed(n, name)
	}
	if !known && n.additional != nil && !n.open {
		ok = c.extra(n, "additionalProperties", n.additional, name, x) && ok
	}
	return ok
}

// declared returns the node of a property, nil if it is not declared.
func (n *node) declared(name string) *node {
	if i, ok := n.find(name); ok {
		return n.props[i].node
	}
	return nil
}

func (c *checker) needed(n *node, d *dependency, v map[string]any) (ok bool) {
	ok = d.node == nil || c.check(d.node, v)
	for _, name := range d.names {
		if _, has := v[name]; !has {
			ok = c.absent(n, "dependentRequired", name, d.name)
		}
	}
	return ok
}

// applied checks what applies to x itself.
func (c *checker) applied(n *node, x any) (ok bool) {
	ok = true
	for _, s := range n.all {
		if ok = c.check(s, x) && ok; !ok && c.ended() {
			return false
		}
	}
	if n.any != nil {
		if i, _ := c.fits(n.any, x, false); i < 0 {
			ok = c.unfit(n, "anyOf", n.any, x)
		}
	}
	if n.one != nil && (ok || !c.ended()) {
		if i, j := c.fits(n.one, x, true); i < 0 {
			ok = c.unfit(n, "oneOf", n.one, x)
		} else if j >= 0 {
			ok = c.note(n, "oneOf", fmt.Sprintf("fits more than one of the allowed shapes (%d and %d); remove what does not belong", i+1, j+1), "")
		}
	}
	if n.not != nil && (ok || !c.ended()) && c.try(n.not, x) {
		ok = c.miss(n, "not", x)
	}
	if n.cond != nil && (ok || !c.ended()) {
		s := n.els
		if c.try(n.cond, x) {
			s = n.then
		}
		ok = (s == nil || c.check(s, x)) && ok
	}
	return ok && c.left >= 0
}

// fits returns the first schema that x fits and, if asked, the second.
func (c *checker) fits(group []*node, x any, both bool) (first, second int) {
	first = -1
	for i, s := range group {
		if c.left < 0 {
			break
		} else if !c.try(s, x) {
			continue
		} else if first >= 0 {
			return first, i
		}
		if first = i; !both {
			break
		}
	}
	return first, -1
}

// marks are the items and members that schemas in place have evaluated. They
// are made only for a node that asks: nobody else pays.
type marks struct {
	all   bool
	items []bool
	names map[string]bool
}

func (c *checker) unevaluated(n *node, x any) (ok bool) {
	ok = true
	var m marks
	switch v := x.(type) {
	case []any:
		m.items = make([]bool, len(v))
		c.mark(n, x, &m, true)
		for i, x := range v {
			if ok && n.restItems != nil && !m.all && !m.items[i] {
				ok = c.item(n.restItems, x, i)
			}
		}
	case map[string]any:
		m.names = make(map[string]bool, len(v))
		c.mark(n, x, &m, true)
		for _, name := range keysOf(v) {
			if (ok || !c.ended()) && n.restProps != nil && !m.all && !m.names[name] {
				ok = c.extra(n, "unevaluatedProperties", n.restProps, name, v[name]) && ok
			}
		}
	}
	return ok && c.left >= 0
}

// mark collects what n evaluates of x, which fits n. The unevaluated keywords
// of the node that asks do not count for itself.
func (c *checker) mark(n *node, x any, m *marks, asks bool) {
	if c.left--; c.left < 0 || m.all {
		return
	}
	switch v := x.(type) {
	case []any:
		m.all = n.items != nil || n.restItems != nil && !asks
		for i := range v {
			m.items[i] = m.items[i] || i < len(n.prefix) || n.contains != nil && c.try(n.contains, v[i])
		}
	case map[string]any:
		m.all = n.additional != nil || n.open || n.restProps != nil && !asks
		for name := range v {
			matches := func(p patternProperty) bool { return c.match(p.pattern, name) }
			if c.left--; n.declared(name) != nil || slices.ContainsFunc(n.patterns, matches) {
				m.names[name] = true
			}
		}
		for _, d := range n.needs {
			if _, has := v[d.name]; has && d.node != nil {
				c.mark(d.node, x, m, false)
			}
		}
	}
	for _, s := range n.all {
		c.mark(s, x, m, false)
	}
	for _, s := range slices.Concat(n.any, n.one, []*node{n.cond}) {
		if s != nil && c.try(s, x) {
			c.mark(s, x, m, false)
		}
	}
	if n.cond != nil {
		s := n.els
		if c.try(n.cond, x) {
			s = n.then
		}
		if s != nil {
			c.mark(s, x, m, false)
		}
	}
}

// among reports whether x is one of the values.
func (c *checker) among(e *choice, x any) bool {
	if s, ok := x.(string); ok && e.set != nil {
		return e.set[s]
	}
	return slices.ContainsFunc(e.values, func(v any) bool { return c.equal(v, x) })
}

// equal compares JSON values: numbers by value, objects without order.
func (c *checker) equal(a, b any) bool {
	c.left--
	switch a := a.(type) {
	case nil, bool:
		return a == b
	case string:
		s, ok := b.(string)
		c.left -= min(len(a), len(s)) >> 6
		return ok && a == s
	case json.Number:
		if s, ok := b.(json.Number); ok {
			x, ok1 := parseDecimal(string(a))
			y, ok2 := parseDecimal(string(s))
			return ok1 && ok2 && x.cmp(&y) == 0
		}
	}
	if kindOf(a) != kindOf(b) {
		return false
	}
	x := c.canon(nil, a, c.deepest)
	return x != nil && bytes.Equal(x, c.canon(nil, b, c.deepest))
}

// canon appends a form of x that equal values share; nil on a spent budget.
func (c *checker) canon(b []byte, x any, depth int) []byte {
	if c.left--; depth < 0 {
		c.stop("nesting")
	}
	if c.left < 0 {
		return nil
	}
	switch v := x.(type) {
	case nil:
		return append(b, '0')
	case bool:
		return strconv.AppendBool(b, v)
	case string:
		c.left -= len(v) >> 6
		return append(append(strconv.AppendInt(append(b, 's'), int64(len(v)), 10), ':'), v...)
	case json.Number:
		d, ok := parseDecimal(string(v))
		if !ok {
			c.stop("number-range")
			return nil
		}
		return d.append(append(b, 'd'))
	case []any:
		b = append(b, '[')
		for _, x := range v {
			if b = c.canon(b, x, depth-1); b == nil {
				return nil
			}
		}
		return append(b, ']')
	case map[string]any:
		b = append(b, '{')
		for _, name := range keysOf(v) {
			if b = c.canon(c.canon(b, name, depth-1), v[name], depth-1); b == nil {
				return nil
			}
		}
		return append(b, '}')
	}
	y, ok := plain(x)
	if !ok {
		c.stop("value")
		return nil
	}
	return c.canon(b, y, depth)
}

// twins returns the first two equal items, zeroes if there are none: pair by
// pair while that is cheap, else through a table.
func (c *checker) twins(v []any) (int, int) {
	if len(v) <= 16 {
		for j := range v {
			for i := range j {
				if c.left >= 0 && c.equal(v[i], v[j]) {
					return i, j
				}
			}
		}
		return 0, 0
	}
	seen, buf := make(map[string]int, len(v)), []byte(nil)
	for j, x := range v {
		if buf = c.canon(buf[:0], x, c.deepest-c.depth); buf == nil {
			break
		}
		if i, ok := seen[string(buf)]; ok {
			return i, j
		}
		seen[string(buf)] = j
	}
	return 0, 0
}

// explain says where and why a value does not fit. With quote it is for the
// model that made the value; without, neither values nor the schema's own
// words enter what is wanted and got.
func (s *schema) explain(v any, quote bool) (issues []Issue, more bool) {
	ex := &explainer{quote: quote, most: s.limits.issues}
	c := checker{left: s.limits.work, deepest: s.limits.valueNesting, ex: ex}
	if c.validity(c.check(s.root, v)) == verdictValid {
		return nil, false
	}
	switch c.fault {
	case "nesting":
		ex.add(Issue{ex.path, c.fault, fmt.Sprintf("at most %d levels of nesting", c.deepest), "", ""})
	case "number-range":
		ex.add(Issue{ex.path, c.fault, fmt.Sprintf("a number of at most %d digits, its exponent included", maxDigits), "", ""})
	case "value":
		ex.add(Issue{ex.path, c.fault, "a JSON value", "", ""})
	default:
		if len(ex.issues) == 0 {
			ex.add(Issue{ex.path, "schema", "a value that fits the schema", kindOf(v).String(), ""})
		}
	}
	slices.SortStableFunc(ex.issues, func(a, b Issue) int { return strings.Compare(a.Path, b.Path) })
	return ex.issues, ex.more
}

type explainer struct {
	path   string
	as     string // which shape of a union the issues are about
	quote  bool
	most   int
	issues []Issue
	more   bool
}

func (e *explainer) add(is Issue) {
	same := func(o Issue) bool { return o.Path == is.Path && o.Want == is.Want }
	if slices.ContainsFunc(e.issues, same) {
		return
	}
	if e.more = len(e.issues) == e.most; !e.more {
		e.issues = append(e.issues, is)
	}
}

// absent notes a member that is not there, at the place where it should be.
func (c *checker) absent(n *node, kw, name, because string) bool {
	if c.ex == nil {
		return false
	}
	want, path := "", c.ex.path
	if sub := n.declared(name); sub != nil && sub.admits != kindAny && kw == "required" {
		want = sub.admits.String()
	} else if kw != "required" && c.ex.quote {
		want = "needed because " + quoteText(because) + " is given"
	} else if kw != "required" {
		want = "needed beside another member"
	}
	c.ex.path = joinPath(path, name)
	c.note(n, kw, want, "")
	c.ex.path = path
	return false
}

// extra checks a member that nothing declares.
func (c *checker) extra(n *node, kw string, sub *node, name string, x any) bool {
	if sub.types != 0 || c.ex == nil {
		return c.child(sub, x, name)
	}
	if !c.ex.quote { // the name is the server's
		return c.note(n, kw, "", "")
	}
	path, want := c.ex.path, ""
	var known []string
	for _, p := range n.props {
		c.left -= 4
		if p.node != nil && similar(name, p.name) {
			want = "did you mean " + quoteText(p.name) + "?"
		}
		if p.node != nil {
			known = append(known, p.name)
		}
	}
	if want == "" && len(known) > 0 {
		want = "known: " + quoteList(known, 12)
	}
	c.ex.path = joinPath(path, name)
	c.note(n, kw, want, "")
	c.ex.path = path
	return false
}

// misnamed notes a member whose name does not fit propertyNames.
func (c *checker) misnamed(n *node, name string) bool {
	if c.ex == nil {
		return false
	}
	path, as := c.ex.path, c.ex.as
	if c.ex.quote {
		c.ex.path = joinPath(path, name)
	}
	c.ex.as += "a name that is "
	c.check(n.names, name)
	c.ex.path, c.ex.as = path, as
	return false
}

// unfit explains a union that nothing fits by its nearest branch alone: the one
// whose tag matches, else whose type does, else with the fewest issues.
func (c *checker) unfit(n *node, kw string, group []*node, x any) bool {
	if c.ex == nil || c.left < 0 {
		return false
	}
	kind := kindOf(x)
	near := slices.DeleteFunc(slices.Clone(group), func(s *node) bool { return s.admits&kind == 0 })
	if len(near) == 0 {
		var k kinds
		for _, s := range group {
			k |= s.admits
		}
		return c.note(n, kw, k.String(), c.ex.value(x, true))
	}
	ex, tag := c.ex, ""
	if tagged, name, values := nearTag(near, x); tagged != nil {
		near, tag = []*node{tagged}, name
	} else if len(values) > 0 && ex.quote {
		path := ex.path
		ex.path = joinPath(path, name)
		c.note(n, kw, "one of "+quoteList(values, 16), ex.value(x.(map[string]any)[name], false))
		ex.path = path
		return false
	}
	var best *explainer
	for _, s := range near {
		try := &explainer{path: ex.path, as: ex.as, quote: ex.quote, most: ex.most}
		if tag != "" && ex.quote {
			try.as += "(as " + quoteText(tag) + ") "
		}
		c.ex = try
		if c.check(s, x); c.left < 0 {
			break
		}
		if best == nil || len(try.issues) < len(best.issues) {
			best = try
		}
	}
	c.ex = ex
	if best == nil {
		return c.note(n, kw, "one of the allowed shapes", ex.value(x, true))
	}
	for _, is := range best.issues {
		ex.add(is)
	}
	ex.more = ex.more || best.more
	return false
}

// nearTag finds the branch whose tag, a property with a const or an enum, has
// the value that x has. If no tag has it, values are those of the first tag.
func nearTag(group []*node, x any) (hit *node, name string, values []string) {
	m, _ := x.(map[string]any)
	for _, s := range group {
		for len(s.all) == 1 && len(s.props) == 0 {
			s = s.all[0]
		}
		for _, p := range s.props {
			if p.node == nil || p.node.con == nil && p.node.enum == nil {
				continue
			}
			e := cmp.Or(p.node.con, p.node.enum)
			got, given := m[p.name].(string)
			if given && slices.Contains(e.values, any(got)) {
				return s, got, nil
			}
			if given && (name == "" || name == p.name) {
				name = p.name
				for _, v := range e.values {
					if t, ok := v.(string); ok {
						values = append(values, t)
					}
				}
			}
		}
	}
	return nil, name, values
}

// phrase words what a keyword wants and what it got.
func (e *explainer) phrase(n *node, kw string, x any) (want, got string) {
	switch kw {
	case "minLength", "maxLength":
		return span(n.minLength, n.maxLength, "character"), strconv.Itoa(utf8.RuneCountInString(x.(string)))
	case "minItems", "maxItems":
		return span(n.minItems, n.maxItems, "item"), strconv.Itoa(len(x.([]any)))
	case "minProperties", "maxProperties":
		return span(n.minProps, n.maxProps, "member"), strconv.Itoa(len(x.(map[string]any)))
	case "not":
		return "not allowed here", ""
	case "pattern":
		want = "text matching " + quoteText(n.pattern.text)
		if !e.quote {
			want = "text matching the pattern"
		}
	case "format":
		want = n.formatName + sample(n.formatName)
	default:
		if n.types == 0 {
			return "not allowed here", ""
		}
		want = e.wants(n)
	}
	return want, e.value(x, kw == "type")
}

// wants describes what a node takes: its choices, or its types with bounds.
func (e *explainer) wants(n *node) string {
	if ch := cmp.Or(n.con, n.enum); ch != nil && !e.quote {
		return "one of the allowed values"
	} else if ch != nil {
		values := make([]string, len(ch.values))
		for i, v := range ch.values {
			values[i] = quoteValue(v)
		}
		if len(values) == 1 {
			return values[0]
		}
		return "one of " + cutList(values, 16)
	}
	s := n.types.String()
	if n.types == kindAny {
		s = "number"
	}
	var bounds []string
	for _, b := range []struct {
		d    *decimal
		text string
	}{{n.min, "≥ "}, {n.above, "> "}, {n.max, "≤ "}, {n.below, "< "}, {n.multipleOf, "a multiple of "}} {
		if b.d != nil {
			bounds = append(bounds, b.text+cut(b.d.text, maxQuote))
		}
	}
	if n.types&kindString != 0 && n.formatName != "" && n.types != kindAny {
		s += " in " + n.formatName + " form" + sample(n.formatName)
	}
	return strings.TrimSpace(s + " " + strings.Join(bounds, " and "))
}

func sample(format string) string {
	if s := formats[format].sample; s != "" {
		return ", such as " + s
	}
	return ""
}

// number words how many items contains wants.
func (e *explainer) number(n *node) string {
	return span(n.minContains, n.maxContains, "item") + " of the kind that must be there"
}

// span words a range of sizes.
func span(low, high int, unit string) string {
	plural := func(n int) string {
		if n == 1 {
			return "1 " + unit
		}
		return strconv.Itoa(n) + " " + unit + "s"
	}
	switch {
	case high == math.MaxInt:
		return "at least " + plural(low)
	case low == 0:
		return "at most " + plural(high)
	}
	return strconv.Itoa(low) + " to " + plural(high)
}

// value shows what was given: a type if it is large or must not be shown.
func (e *explainer) value(x any, typed bool) string {
	kind := kindOf(x)
	if !e.quote || kind&(kindObject|kindArray|kindNull) != 0 {
		return kind.String()
	} else if typed {
		return quoteValue(x) + " (" + kind.String() + ")"
	}
	return quoteValue(x)
}

// feedback is what a model reads about arguments that do not fit. All of it is
// in our words; names and values are quoted and cut.
func feedback(tool string, issues []Issue, more bool) string {
	name := plainText(tool, maxQuote)
	var b strings.Builder
	b.WriteString("Arguments for tool " + quoteText(tool) + " do not fit its input schema; nothing was sent.\n")
	tail := "Correct these and call " + name + " again.\n"
	for _, is := range issues {
		line := "- " + cmp.Or(plainText(is.Path, maxPath), "(the whole)") + ": " + is.text() + "\n"
		if b.Len()+len(line)+len("- and more\n")+len(tail) > maxFeedback {
			more = true
			break
		}
		b.WriteString(line)
	}
	if more {
		b.WriteString("- and more\n")
	}
	return b.String() + tail
}

// text is an issue in words, without its place.
func (is Issue) text() string {
	as, want := "", is.Want
	if strings.HasPrefix(want, "(as ") {
		i := strings.Index(want, `") `) + 3
		as, want = want[:i], want[i:]
	}
	switch {
	case is.Keyword == "required":
		return as + strings.TrimSpace("required "+want) + ", missing"
	case is.Keyword != "additionalProperties" && is.Keyword != "unevaluatedProperties":
	case want == "":
		return as + "unknown argument"
	case strings.HasPrefix(want, "did "):
		return as + "unknown argument (" + want + ")"
	default:
		return as + "unknown argument; " + want
	}
	if is.Got == "" {
		return as + want
	}
	return as + "want " + want + ", got " + is.Got
}

// normalize repairs arguments that almost fit, where only one reading is
// possible: see repairer. It returns v itself unless the repaired whole fits;
// v is never changed.
func (s *schema) normalize(v map[string]any, destructive bool) (out map[string]any, changes []Issue, ok bool) {
	r := repairer{checker: checker{left: s.limits.work, deepest: s.limits.valueNesting}, careful: destructive}
	fixed, _ := r.repair(s.root, v, "").(map[string]any)
	if r.left < 0 || s.validate(fixed) != verdictValid {
		return v, nil, false
	}
	return fixed, r.changes, true
}

type repairer struct {
	checker
	careful bool // only what cannot change a meaning
	changes []Issue
}

func (r *repairer) did(n *node, path, kw, what string, x any) {
	r.changes = append(r.changes, Issue{path, kw, what, (&explainer{quote: true}).value(x, true), n.path + "/" + kw})
}

// repair returns x as n would have it, or x.
func (r *repairer) repair(n *node, x any, path string) any {
	if r.try(n, x) || r.left < 0 || len(r.changes) > 64 {
		return x
	}
	switch v := x.(type) {
	case string:
		if y, what := r.reread(n, v); what != "" && r.try(n, y) {
			r.did(n, path, "type", what, x)
			return y
		}
	case []any:
		v = slices.Clone(v)
		for i := range v {
			if i < len(n.prefix) {
				v[i] = r.repair(n.prefix[i], v[i], joinPath(path, strconv.Itoa(i)))
			} else if n.items != nil {
				v[i] = r.repair(n.items, v[i], joinPath(path, strconv.Itoa(i)))
			}
		}
		x = v
	case map[string]any:
		x = r.members(n, maps.Clone(v), path)
	}
	for _, s := range n.all {
		x = r.repair(s, x, path)
	}
	for _, group := range [][]*node{n.any, n.one} {
		if group != nil {
			x = r.branch(group, x, path)
		}
	}
	return x
}

func (r *repairer) members(n *node, v map[string]any, path string) any {
	for _, name := range keysOf(v) {
		i, found := n.find(name)
		sub, at := n.additional, joinPath(path, name)
		if found && n.props[i].node != nil {
			sub = n.props[i].node
		}
		if sub == nil {
			continue
		}
		if found && v[name] == nil && !n.props[i].required && !r.try(sub, nil) {
			delete(v, name)
			r.did(sub, at, "type", "null dropped", nil)
			continue
		}
		v[name] = r.repair(sub, v[name], at)
	}
	return v
}

// branch repairs x by the one branch of a union that then fits.
func (r *repairer) branch(group []*node, x any, path string) any {
	before, hits := r.changes, 0
	out, changes := x, before
	for _, s := range group {
		if r.try(s, x) {
			return x
		}
		r.changes = slices.Clip(before)
		if y := r.repair(s, x, path); r.try(s, y) {
			out, changes, hits = y, r.changes, hits+1
		}
	}
	if r.changes = before; hits == 1 {
		r.changes = changes
		return out
	}
	return x
}

// reread reads text as the value that n wants in its place.
func (r *repairer) reread(n *node, text string) (y any, what string) {
	if n.admits&kindString == 0 {
		y, ok := decodeJSON([]byte(text))
		kind := kindOf(y)
		scalar := kind&(kindInteger|kindNumber|kindBoolean) != 0 && len(strings.Trim(text, "-.0123456789eE")) == 0 && len(text) <= 16 || text == "true" || text == "false"
		if ok && kind&n.admits != 0 && (scalar || !r.careful && kind&(kindArray|kindObject) != 0) {
			return y, "text read as " + kind.String()
		}
		return nil, ""
	}
	if n.enum == nil || r.careful {
		return nil, ""
	}
	for _, v := range n.enum.values {
		if s, ok := v.(string); ok && strings.EqualFold(strings.TrimSpace(s), strings.TrimSpace(text)) {
			if what != "" {
				return nil, ""
			}
			y, what = v, "case or space mended"
		}
	}
	return y, what
}

// A decimal is a number as JSON writes it, without a loss.
type decimal struct {
	text     string
	neg      bool
	digits   string // from the first that is not 0 to the last; may hold a point
	top, low int    // exponents of the first and of the last of digits
}

// parseDecimal reports whether text is a JSON number within maxDigits.
func parseDecimal(text string) (d decimal, ok bool) {
	d.text = text
	i, first, last, point, n := 0, -1, -1, -1, 0
	if d.neg = strings.HasPrefix(text, "-"); d.neg {
		i = 1
	}
	for ; i < len(text); i++ {
		if b := text[i]; b == '.' && point < 0 && n > 0 {
			point = i
			continue
		} else if b < '0' || b > '9' {
			break
		} else if n++; b != '0' {
			if last = i; first < 0 {
				first = i
			}
		}
	}
	if point < 0 {
		point = i
	}
	e := 0
	if i < len(text) {
		var err error
		if e, err = strconv.Atoi(text[i+1:]); err != nil || text[i]|0x20 != 'e' {
			return d, false
		}
	}
	if n == 0 || n > maxDigits || e > maxDigits || e < -maxDigits {
		return d, false
	}
	if first < 0 {
		return decimal{text: text}, true
	}
	place := func(i int) int { // the exponent of the digit at i
		if i < point {
			return point - 1 - i + e
		}
		return point - i + e
	}
	d.digits, d.top, d.low = text[first:last+1], place(first), place(last)
	return d, true
}

func (d *decimal) kind() kinds {
	if d.low >= 0 {
		return kindInteger
	}
	return kindNumber
}

func (d *decimal) sign() int {
	switch {
	case d.digits == "":
		return 0
	case d.neg:
		return -1
	}
	return 1
}

func (d *decimal) cmp(o *decimal) int {
	if s := d.sign(); s != o.sign() || s == 0 {
		return cmp.Compare(s, o.sign())
	} else if d.top != o.top {
		return s * cmp.Compare(d.top, o.top)
	} else {
		return s * strings.Compare(strings.Replace(d.digits, ".", "", 1), strings.Replace(o.digits, ".", "", 1))
	}
}

// append appends a form that equal numbers share.
func (d *decimal) append(b []byte) []byte {
	if d.neg && d.digits != "" {
		b = append(b, '-')
	}
	b = append(b, strings.Replace(d.digits, ".", "", 1)...)
	return append(strconv.AppendInt(append(b, 'e'), int64(d.top), 10), ';')
}

// int returns the digits as an integer, and zeros more.
func (d *decimal) int(zeros int) *big.Int {
	n, _ := new(big.Int).SetString(cmp.Or(strings.Replace(d.digits, ".", "", 1), "0")+strings.Repeat("0", zeros), 10)
	return n
}

// multiple reports whether d is a multiple of o, which is positive.
func (d *decimal) multiple(o *decimal) bool {
	if d.digits == "" || d.low < o.low { // the last digit is not 0, so no multiple ends further right
		return d.digits == ""
	}
	zeros := d.low - o.low
	if len(d.digits)+zeros < 18 && len(o.digits) < 18 {
		return d.small(zeros)%o.small(0) == 0
	}
	return new(big.Int).Rem(d.int(zeros), o.int(0)).Sign() == 0
}

// small is int for up to 18 digits.
func (d *decimal) small(zeros int) (n uint64) {
	for i := range len(d.digits) {
		if b := d.digits[i]; b != '.' {
			n = n*10 + uint64(b-'0')
		}
	}
	for range zeros {
		n *= 10
	}
	return n
}

func (d *decimal) uint() int { return int(d.small(d.low)) }

// ECMA-262 white space, as the inside of a class, and its complement.
const (
	ecmaSpace    = `\t\n\v\f\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}`
	ecmaNotSpace = `\x{0}-\x{8}\x{e}-\x{1f}!-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027}\x{202a}-\x{202e}` +
		`\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{fefe}\x{ff00}-\x{10ffff}`
)

var errPattern = errors.New("pattern that RE2 cannot hold")

// compilePattern translates a pattern and weighs it before it is paid for.
func compilePattern(text string, most, size int) (*pattern, error) {
	if len(text) > most {
		return nil, errors.New("pattern too long")
	}
	re, err := translatePattern(text)
	if err != nil {
		return nil, err
	}
	tree, err := syntax.Parse(re, syntax.Perl)
	if err != nil {
		return nil, errPattern
	}
	prog, err := syntax.Compile(tree.Simplify())
	if err != nil || len(prog.Inst) > size {
		return nil, errors.New("pattern too large")
	}
	compiled, err := regexp.Compile(re)
	if err != nil {
		return nil, errPattern
	}
	return &pattern{compiled, text, len(prog.Inst)}, nil
}

// translatePattern spells an ECMA-262 pattern in RE2's syntax. Look-around and
// back-references have no spelling there.
func translatePattern(p string) (string, error) {
	var b strings.Builder
	class := false
	for i := 0; i < len(p); i++ {
		rest := p[i:]
		switch ch := p[i]; {
		case ch == '\\':
			out, n, ok := translateEscape(rest, class)
			if !ok {
				return "", errPattern
			}
			b.WriteString(out)
			i += n - 1
		case class && ch == '[':
			b.WriteString(`\[`)
		case class:
			class = ch != ']'
			b.WriteByte(ch)
		case strings.HasPrefix(rest, "[^]"):
			b.WriteString(`[\x{0}-\x{10ffff}]`)
			i += 2
		case strings.HasPrefix(rest, "[]"):
			b.WriteString(`[^\x{0}-\x{10ffff}]`)
			i++
		case ch == '[':
			class = true
			b.WriteByte(ch)
			if strings.HasPrefix(rest, "[^") {
				b.WriteByte('^')
				i++
			}
		case ch == ']':
			b.WriteString(`\]`)
		case ch == '.':
			b.WriteString(`[^\n\r\x{2028}\x{2029}]`)
		case strings.HasPrefix(rest, "(?") && !strings.HasPrefix(rest, "(?:") &&
			(!strings.HasPrefix(rest, "(?<") || strings.HasPrefix(rest, "(?<=") || strings.HasPrefix(rest, "(?<!")):
			return "", errPattern
		default:
			b.WriteByte(ch)
		}
	}
	return b.String(), nil
}

// translateEscape translates the escape that p begins with, n bytes of it.
func translateEscape(p string, class bool) (out string, n int, ok bool) {
	if len(p) < 2 {
		return "", 0, false
	}
	switch e := p[1]; {
	case e == 's' || e == 'S':
		out = map[byte]string{'s': ecmaSpace, 'S': ecmaNotSpace}[e]
		if !class {
			return "[" + out + "]", 2, true
		} else if len(p) > 2 && p[2] == '-' { // no range can begin with a set
			return out + `\-`, 3, true
		}
		return out, 2, true
	case e == 'c' && len(p) > 2 && (p[2]|0x20) >= 'a' && (p[2]|0x20) <= 'z':
		return fmt.Sprintf(`\x%02x`, p[2]&0x1f), 3, true
	case e == 'u' && strings.HasPrefix(p[2:], "{"):
		end := strings.IndexByte(p, '}')
		return `\x` + p[2:end+1], end + 1, end > 3
	case e == 'u' && len(p) >= 6:
		r, err := strconv.ParseUint(p[2:6], 16, 32)
		if len(p) >= 12 && r>>10 == 0xd800>>10 && p[6:8] == `\u` {
			if low, err := strconv.ParseUint(p[8:12], 16, 32); err == nil && low>>10 == 0xdc00>>10 {
				return fmt.Sprintf(`\x{%x}`, 0x10000+(r&0x3ff)<<10+low&0x3ff), 12, true
			}
		}
		return fmt.Sprintf(`\x{%x}`, r), 6, err == nil
	case e == '0' && (len(p) == 2 || p[2] < '0' || p[2] > '9'):
		return `\x00`, 2, true
	case e == 'b' && class:
		return `\x08`, 2, true
	case e == 'x' && len(p) >= 4 && p[2] != '{':
		return p[:4], 4, true
	case (e == 'p' || e == 'P') && strings.HasPrefix(p[2:], "{"), strings.IndexByte("dDwWbBfnrtv", e) >= 0:
		return p[:2], 2, true
	case e < 0x80 && e > ' ' && (e < '0' || e > '9') && (e|0x20 < 'a' || e|0x20 > 'z'):
		return `\` + string(e), 2, true
	}
	return "", 0, false // RE2 would give it a meaning that it lacks, or none
}

// Pieces of the grammars of RFC 3339, 3986 and 5321.
const (
	reTime    = `\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)`
	reLabel   = `[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?`
	reHost    = reLabel + `(\.` + reLabel + `)*`
	reAtom    = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
	reNoColon = `([A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})`
	rePchar   = `(:|` + reNoColon + `)`
	reName    = `([A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*`
	reAuth    = `//((` + reName + `|:)*@)?(\[[0-9A-Fa-f:.]+\]|` + reName + `)(:\d*)?(/` + rePchar + `*)*`
	reTail    = `(\?(/|\?|` + rePchar + `)*)?(#(/|\?|` + rePchar + `)*)?`
	rePath    = `(` + reAuth + `|/(` + rePchar + `+(/` + rePchar + `*)*)?|`
	reURI     = `[A-Za-z][A-Za-z0-9+.-]*:` + rePath + rePchar + `+(/` + rePchar + `*)*)?` + reTail
)

// formats are those that can be asserted: by grammar, check, or both.
var formats = map[string]struct {
	sample, grammar string
	check           func(string) bool
}{
	"date-time":     {"2025-11-25T10:20:30Z", `\d{4}-\d\d-\d\d[Tt]` + reTime, func(s string) bool { return isDate(s[:10]) && isTime(s[11:]) }},
	"date":          {"2025-11-25", ``, isDate},
	"time":          {"10:20:30Z", reTime, isTime},
	"duration":      {"P1DT12H", `P(\d+W|(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)?(T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S))?)`, func(s string) bool { return s != "P" }},
	"email":         {"name@example.com", `(` + reAtom + `(\.` + reAtom + `)*|"([^"\\]|\\.)*")@(` + reHost + `|\[.+\])`, isEmail},
	"uri":           {"https://example.com/a", reURI, isURI},
	"uri-reference": {"/a?b#c", reURI + `|` + rePath + reNoColon + `+(/` + rePchar + `*)*)?` + reTail, isURI},
	"uuid":          {"123e4567-e89b-12d3-a456-426614174000", `[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}`, nil},
	"ipv4":          {"192.0.2.1", ``, func(s string) bool { a, err := netip.ParseAddr(s); return err == nil && a.Is4() }},
	"ipv6":          {"2001:db8::1", ``, func(s string) bool { a, err := netip.ParseAddr(s); return err == nil && a.Is6() && a.Zone() == "" }},
	"hostname":      {"example.com", reHost, func(s string) bool { return len(s) <= 253 }},
	"json-pointer":  {"/a/0", `(/([^~/]|~[01])*)*`, nil},
	"regex":         {"^a+$", ``, isRegexp},
}

func isDate(s string) bool { _, err := time.Parse(time.DateOnly, s); return err == nil }

// isTime checks what the grammar leaves open: ranges, and that a leap second
// is the last of a day somewhere.
func isTime(s string) bool {
	two := func(i int) int { return int(s[i]-'0')*10 + int(s[i+1]-'0') }
	h, m, sec, utc := two(0), two(3), two(6), two(0)*60+two(3)
	if z := len(s) - 6; s[z] == '+' || s[z] == '-' {
		oh, om := two(z+1), two(z+4)
		if oh > 23 || om > 59 {
			return false
		}
		utc += (oh*60 + om) * (int(s[z]) - ',')
	}
	return h < 24 && m < 60 && (sec < 60 || sec == 60 && (utc+2*1440)%1440 == 1439)
}

// isEmail checks an address literal for a domain.
func isEmail(s string) bool {
	host := s[strings.LastIndexByte(s, '@')+1:]
	if host[0] != '[' {
		return len(host) <= 253
	}
	literal, is6 := strings.CutPrefix(host[1:len(host)-1], "IPv6:")
	a, err := netip.ParseAddr(literal)
	return err == nil && a.Is6() == is6 && a.Zone() == ""
}

// isURI checks an address literal for a host; the grammar allows [ only there.
func isURI(s string) bool {
	_, literal, found := strings.Cut(s, "[")
	literal, _, _ = strings.Cut(literal, "]")
	a, err := netip.ParseAddr(literal)
	return !found || err == nil && a.Is6()
}

// isRegexp lets look-around and back-references pass: they are regular
// expressions that we cannot judge.
func isRegexp(s string) bool {
	s = regexp.MustCompile(`\(\?<?[=!]|\\[1-9]|\\k<\w+>`).ReplaceAllStringFunc(s, func(m string) string {
		if m[0] == '(' {
			return "(?:"
		}
		return ""
	})
	_, err := compilePattern(s, math.MaxInt, math.MaxInt)
	return err == nil
}

// decodeJSON decodes exactly one value, numbers as they are written.
func decodeJSON(b []byte) (v any, ok bool) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if d.Decode(&v) != nil {
		return nil, false
	}
	_, err := d.Token()
	return v, err == io.EOF
}

// plain turns what a caller may have built by hand into what a decoder yields.
func plain(x any) (any, bool) {
	switch v := x.(type) {
	case int:
		return json.Number(strconv.Itoa(v)), true
	case float64:
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			return json.Number(strconv.FormatFloat(v, 'g', -1, 64)), true
		}
	}
	b, err := json.Marshal(x)
	if err != nil {
		return nil, false
	}
	return decodeJSON(b)
}

// jsonNesting returns how deep b nests, before anything is decoded.
func jsonNesting(b []byte) (deepest int) {
	depth, text := 0, false
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '"':
			text = !text
		case '\\':
			i++
		case '{', '[':
			if !text {
				depth++
				deepest = max(deepest, depth)
			}
		case '}', ']':
			if !text {
				depth--
			}
		}
	}
	return deepest
}

func kindOf(x any) kinds {
	switch v := x.(type) {
	case nil:
		return kindNull
	case bool:
		return kindBoolean
	case string:
		return kindString
	case []any:
		return kindArray
	case map[string]any:
		return kindObject
	case json.Number:
		d, _ := parseDecimal(string(v))
		return d.kind()
	}
	if y, ok := plain(x); ok {
		return kindOf(y)
	}
	return 0
}

func (k kinds) String() string {
	var names []string
	for _, t := range kindNames {
		if k&t.kinds == t.kinds && (t.name != "integer" || k&kindNumber == 0) {
			names = append(names, t.name)
		} else if t.name == "number" && k&kindNumber != 0 {
			names = append(names, t.name)
		}
	}
	return strings.Join(names, " or ")
}

func keysOf(m map[string]any) []string {
	keys := slices.AppendSeq(make([]string, 0, len(m)), maps.Keys(m))
	slices.Sort(keys)
	return keys
}

// tokenChars are the characters of a header's name.
const tokenChars = "!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

func escapeToken(s string) string {
	if !strings.ContainsAny(s, "~/") {
		return s
	}
	return strings.NewReplacer("~", "~0", "/", "~1").Replace(s)
}

// joinPath adds a token to a path that stays within maxPath.
func joinPath(path, token string) string {
	if path = path + "/" + escapeToken(cut(token, maxQuote)); len(path) > maxPath {
		return strings.TrimSuffix(cut(path, maxPath-4), "…") + "…"
	}
	return path
}

// cut cuts s to at most n bytes, and an ellipsis.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}

// quoteText is s as a JSON string, cut; what cannot be seen is escaped.
func quoteText(s string) string { return quoteUpTo(s, maxQuote) }

func quoteUpTo(s string, most int) string {
	b := []byte{'"'}
	for _, r := range s {
		if len(b) >= most {
			return string(b) + `…"`
		}
		switch {
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case strconv.IsPrint(r):
			b = utf8.AppendRune(b, r)
		default:
			b = fmt.Appendf(b, `\u%04x`, r)
		}
	}
	return string(b) + `"`
}

// plainText is s as it is if that is harmless, else quoted.
func plainText(s string, most int) string {
	if len(s) <= most && strings.Trim(s, tokenChars+"/$@…") == "" {
		return s
	}
	return quoteUpTo(s, most)
}

// quoteValue is a scalar as bounded JSON, and the type of anything else.
func quoteValue(v any) string {
	switch y, _ := plain(v); v := y.(type) {
	case string:
		return quoteText(v)
	case json.Number:
		return cut(string(v), maxQuote)
	case bool:
		return strconv.FormatBool(v)
	}
	return kindOf(v).String()
}

func quoteList(names []string, most int) string {
	quoted := make([]string, len(names))
	for i, s := range names {
		quoted[i] = quoteText(s)
	}
	return cutList(quoted, most)
}

// cutList joins what there is room for, and counts the rest.
func cutList(items []string, most int) string {
	s := ""
	for i, item := range items {
		if i == most || len(s)+len(item) > 512 {
			return fmt.Sprintf("%s, … (%d more)", s, len(items)-i)
		}
		if i > 0 {
			s += ", "
		}
		s += item
	}
	return cmp.Or(s, "nothing")
}

// similar reports whether b is likely what a was meant to be: within two edits,
// and not by more than half, case and underscores aside.
func similar(a, b string) bool {
	fold := func(s string) string { return strings.NewReplacer("_", "", "-", "").Replace(strings.ToLower(s)) }
	if max(len(a), len(b)) > maxQuote {
		return false
	}
	a, b = fold(a), fold(b)
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)] <= min(2, len(b)/2)
}

// fingerprint is a digest of what a tool takes and gives: of the schemas as
// values, so that order of members and white space do not matter.
func fingerprint(input, output []byte) string {
	h := sha256.New()
	for _, raw := range [][]byte{input, output} {
		if v, ok := decodeJSON(raw); ok {
			raw, _ = json.Marshal(v)
		}
		fmt.Fprintf(h, "%d:%s", len(raw), raw)
	}
	return fmt.Sprintf("sha256:%x", h.Sum(nil))
}

// schemaDiff names the first change from one schema to another, empty if there is none.
func schemaDiff(old, new []byte) string {
	a, _ := decodeJSON(old)
	b, _ := decodeJSON(new)
	x, _ := a.(map[string]any)
	y, _ := b.(map[string]any)
	p, _ := x["properties"].(map[string]any)
	q, _ := y["properties"].(map[string]any)
	for _, m := range []struct {
		what string
		a, b map[string]any
	}{{"property", p, q}, {"keyword", x, y}} {
		for _, name := range keysOf(m.b) {
			if _, ok := m.a[name]; !ok {
				return m.what + " added " + quoteText(name)
			}
		}
		for _, name := range keysOf(m.a) {
			if _, ok := m.b[name]; !ok {
				return m.what + " removed " + quoteText(name)
			}
			if fingerprint(encode(m.a[name]), nil) != fingerprint(encode(m.b[name]), nil) {
				return m.what + " changed " + quoteText(name)
			}
		}
	}
	return ""
}

func encode(v any) []byte { b, _ := json.Marshal(v); return b }
