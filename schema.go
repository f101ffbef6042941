package mcp

// JSON Schema, 2020-12 and draft-07, for schemas that nobody vouches for. A schema is compiled once,
// under bounds, into a tree whose references are pointers; what cannot be held is refused by name,
// never ignored. A value is checked under a budget of work and without allocating; only one that fails
// is walked again, to say why, in the words of schema_text.go. No reference leaves the document: there
// is no loader to turn on.

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// An Issue is one place where a value does not fit its schema.
type Issue struct {
	Path       string // JSON Pointer into the value; long names are cut
	Keyword    string // the schema keyword that was violated; false for the schema false, which has none
	Want       string // what was expected; all there is to say where Got is empty
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

// schemaOptions say what a schema is for. The zero value is an output schema up to 2025-11-25: its
// value must be an object.
type schemaOptions struct {
	input        bool // arguments, which must be an object too
	anyRoot      bool // results from 2026-07-28 on: any value at the root
	headers      bool // with input: collect x-mcp-header, and hold its rules
	assertFormat bool // hold the formats we know instead of noting them
	strict       bool // refuse what can be held only in part
	schemaLimits
}

// schemaLimits are what a schema and its values may cost. A field that is not positive has the stated
// default; there is no "unlimited".
type schemaLimits struct {
	text, nesting, depth, nodes        int // of a schema: bytes, 256 KiB; JSON levels, 64; schemas within schemas, 32; subschemas, 10,000
	branches, values, hops             int // of one allOf, anyOf or oneOf, 256; of one enum, 4,096; references in a row, 64
	patterns, patternText, patternSize int // in a schema, 256; bytes of one, 1,024; instructions of one, 10,000
	valueNesting, work, issues         int // of a value, 128; units in one validation, 1,000,000; issues kept, 8
}

func (l schemaLimits) withDefaults() schemaLimits {
	fields := [...]*int{&l.text, &l.nesting, &l.depth, &l.nodes, &l.branches, &l.values, &l.hops,
		&l.patterns, &l.patternText, &l.patternSize, &l.valueNesting, &l.work, &l.issues}
	for i, n := range [len(fields)]int{256 << 10, 64, 32, 10_000, 256, 4096, 64, 256, 1024, 10_000, 128, 1_000_000, 8} {
		if *fields[i] <= 0 {
			*fields[i] = n
		}
	}
	return l
}

// Bounds that are not for tuning.
const (
	maxDigits   = 400     // digits of a number, and its exponent either way
	maxInPlace  = 256     // schemas that apply to one value through one another
	maxQuote    = 64      // bytes of one quoted name or value
	maxChoices  = 16      // values of an enum that are listed
	maxPath     = 256     // bytes of one path
	maxPointer  = 4 << 10 // bytes of a place in a schema, and of a URI
	maxFeedback = 2 << 10
)

// kinds is a set of JSON types. An integer is kindInteger, any other number is kindNumber; the type
// "number" is both.
type kinds uint8

const (
	kindNull kinds = 1 << iota
	kindBoolean
	kindInteger
	kindNumber
	kindString
	kindArray
	kindObject
	kindAny     kinds = 1<<iota - 1
	kindNumeric       = kindInteger | kindNumber
)

// A schema is compiled. It does not change and may be shared.
type schema struct {
	root    *node
	limits  schemaLimits
	partial []unchecked
	params  []headerParam
}

// unchecked is a keyword that the schema has and that is not held. A format that is not asserted is an
// annotation, as 2020-12 has it, and is listed all the same.
type unchecked struct{ Pointer, Keyword, Why string }

// headerParam is an argument that 2026-07-28 mirrors into an Mcp-Param header.
type headerParam struct {
	Name string
	Path []string // property names from the root
}

func (s *schema) unchecked() []unchecked { return s.partial }
func (s *schema) headers() []headerParam { return s.params }

// A node is one subschema.
type node struct {
	path   string // JSON Pointer into the schema
	types  kinds  // 0 for the schema false
	admits kinds  // types, narrowed by what applies in place; for messages
	rules  int    // keywords that assert something; 0 holds for every value
	height int    // longest chain in place below; 0 unknown, -1 being computed

	enum, con *choice

	minLength, maxLength int
	pattern              *pattern
	formatName           string   // one we know, asserted or not
	format               *pattern // its grammar, if asserted
	check                func(string) bool

	bounded                      bool // whether any of these is set
	min, max, above, below, step *decimal

	minItems, maxItems         int
	unique                     bool
	prefix                     []*node
	items, contains, restItems *node
	minContains, maxContains   int

	minMembers, maxMembers       int
	props                        []property // by name
	patterns                     []patternProperty
	additional, names, restProps *node
	open                         bool // a pattern is not held, so no name is certainly additional
	others                       bool // whether members that are not declared matter
	needs                        []dependency

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
	name, kw string // kw is which keyword says so
	names    []string
	node     *node
}

// find returns where a property is, or would be.
func (n *node) find(name string) (int, bool) {
	return slices.BinarySearchFunc(n.props, name, func(p property, s string) int { return cmp.Compare(p.name, s) })
}

// declared returns the node of a property, nil if it is not declared.
func (n *node) declared(name string) *node {
	if i, ok := n.find(name); ok {
		return n.props[i].node
	}
	return nil
}

// ofItem returns the node of an item, nil if it may be anything.
func (n *node) ofItem(i int) *node {
	if i < len(n.prefix) {
		return n.prefix[i]
	}
	return n.items
}

// A choice is an enum or a const: its values, the texts among them, and canonical forms of the others.
type choice struct {
	values       []any
	kinds        kinds // of the values; a number is of both kinds
	texts, forms map[string]bool
}

// compileSchema compiles a schema. The error is a [*SchemaError].
func compileSchema(raw []byte, o schemaOptions) (s *schema, err error) {
	defer func() {
		r := recover()
		if refusal, ok := r.(*SchemaError); ok {
			err = refusal
		} else if r != nil {
			panic(r)
		}
	}()
	o.schemaLimits = o.withDefaults()
	c := &compiler{schemaOptions: o, out: &schema{limits: o.schemaLimits}, keywords: schemaKeywords, memo: map[string]*node{},
		regexps: map[string]*pattern{}, grammars: map[string]*pattern{}, mirrored: map[string]bool{}, bases: map[string]string{}}
	return c.compile(raw), nil
}

// A compiler is the state of one compilation. What it refuses, it panics with, as a [*SchemaError];
// compileSchema recovers.
type compiler struct {
	schemaOptions
	keywords map[string]keyword
	doc      any
	draft7   bool
	declared bool              // whether $schema names the dialect
	memo     map[string]*node  // targets of references by pointer
	bases    map[string]string // URIs of resources by pointer
	index    map[string]place  // resources and anchors by URI; nil until needed
	queue    []place           // targets to fill
	nodes    []*node
	regexps  map[string]*pattern // nil if not held
	programs int                 // their weights together
	grammars map[string]*pattern // of formats
	mirrored map[string]bool     // names of header parameters, in lower case
	out      *schema
	term
}

// A place is a value in the document.
type place struct {
	raw       any
	ptr, base string // JSON Pointer; URI that references resolve against
	depth     int    // schemas around it
}

// to steps down the document, while the way there is of a length that can be told.
func (p place) to(raw any, token string) place {
	bound(len(p.ptr), maxPointer, "schema-size", p.ptr)
	return place{raw, p.ptr + "/" + escapeToken(token), p.base, p.depth}
}

// refuse ends a compilation.
func refuse(reason, ptr, detail string) {
	panic(&SchemaError{reason, cutAt(ptr, maxPath), detail})
}

// bound refuses more than there may be.
func bound(n, most int, reason, ptr string) {
	if n > most {
		refuse(reason, ptr, fmt.Sprintf("%d, at most %d", n, most))
	}
}

// part notes a keyword that is not held.
func (c *compiler) part(at place, kw, why string, annotation bool) {
	if c.strict && !annotation {
		refuse("unchecked", at.ptr, kw+": "+why)
	}
	c.out.partial = append(c.out.partial, unchecked{cutAt(at.ptr, maxPath), kw, why})
}

func (c *compiler) compile(raw []byte) *schema {
	bound(len(raw), c.text, "schema-size", "")
	r := valueReader{b: raw}
	if json.Valid(raw) {
		c.doc = r.value(1)
	}
	bound(r.deepest, c.nesting, "schema-depth", "")
	m, isMap := c.doc.(map[string]any)
	if _, isBool := c.doc.(bool); !isMap && !isBool {
		refuse("not-json", "", "the schema is no JSON object or boolean")
	}
	if d, ok := m["$schema"]; ok {
		c.draft7, c.declared = c.dialect(d, ""), true
	}
	root := c.target(place{raw: c.doc})
	for ; len(c.queue) > 0; c.queue = c.queue[1:] {
		c.fill(c.memo[c.queue[0].ptr], c.queue[0])
	}
	for _, n := range c.nodes {
		c.measure(n)
	}
	c.out.root = root
	if !c.anyRoot && root.types != kindObject { // a root that does not say so is odd, and harmless
		if root.types&kindObject == 0 {
			refuse("root-type", "", "the root does not admit an object")
		}
		c.out.root = &node{types: kindObject, admits: kindObject, maxMembers: math.MaxInt, inPlace: true, all: []*node{root}}
	}
	if c.input && c.headers {
		c.collect(place{raw: c.doc}, nil, true)
	}
	return c.out
}

// dialect reports whether v names draft-07 and not 2020-12.
func (c *compiler) dialect(v any, ptr string) bool {
	switch name, _ := v.(string); strings.TrimSuffix(name, "#") {
	case "http://json-schema.org/draft-07/schema", "https://json-schema.org/draft-07/schema":
		return true
	case "https://json-schema.org/draft/2020-12/schema":
	default:
		refuse("dialect", ptr+"/$schema", "neither 2020-12 nor draft-07: "+quoteValue(v))
	}
	return false
}

func (c *compiler) newNode(at place) *node {
	bound(len(c.nodes)+1, c.schemaLimits.nodes, "schema-nodes", at.ptr)
	bound(at.depth, c.depth, "schema-depth", at.ptr)
	n := &node{path: cutAt(at.ptr, maxPath), types: kindAny, admits: kindAny, minContains: 1,
		maxLength: math.MaxInt, maxItems: math.MaxInt, maxContains: math.MaxInt, maxMembers: math.MaxInt}
	c.nodes = append(c.nodes, n)
	return n
}

// target returns the node that references to a place share. It is filled later, so that a schema may
// contain itself.
func (c *compiler) target(at place) *node {
	if at.depth = 1; c.memo[at.ptr] == nil {
		c.memo[at.ptr] = c.newNode(at)
		c.queue = append(c.queue, at)
	}
	return c.memo[at.ptr]
}

// sub compiles a subschema where it stands. One that only leads elsewhere collapses into what it leads to.
func (c *compiler) sub(at place) *node {
	at.depth++
	n := c.newNode(at)
	if c.fill(n, at); n.rules == 1 && len(n.all) == 1 {
		return n.all[0]
	}
	return n
}

// fill compiles the schema at a place into n, keyword by keyword, in order of their names.
func (c *compiler) fill(n *node, at place) {
	m, isMap := at.raw.(map[string]any)
	if at.raw == false {
		n.types, n.admits, n.rules = 0, 0, 1
	} else if at.raw != true && !isMap {
		refuse("keyword-shape", at.ptr, "want a schema: an object or a boolean")
	}
	at.base = c.enter(m, at)
	names := keysOf(m)
	if c.draft7 && slices.Contains(names, "$ref") { // its siblings have no meaning there
		names = []string{"$ref"}
	}
	outer := c.term
	c.term = term{n: n, m: m, in: at}
	for _, name := range names {
		kw := c.keywords[name]
		switch c.name, c.raw = name, m[name]; {
		case kw.in2020 && c.draft7:
		case kw.set != nil:
			n.rules++
			kw.set(c)
		case kw.note != nil:
			kw.note(c)
		}
	}
	c.term = outer
}

// enter returns the base URI inside m, which may begin a resource of its own.
func (c *compiler) enter(m map[string]any, at place) string {
	id, _ := m["$id"].(string)
	if id == "" || id[0] == '#' || c.draft7 && m["$ref"] != nil {
		return at.base
	} else if uri, ok := c.bases[at.ptr]; ok {
		return uri
	}
	if d, ok := m["$schema"]; ok && at.ptr != "" && c.dialect(d, at.ptr) != c.draft7 {
		refuse("dialect", at.ptr+"/$schema", "another dialect inside the document")
	}
	uri, _, ok := resolveURI(at.base, id)
	if !ok {
		refuse("keyword-shape", at.ptr+"/$id", "want a URI")
	}
	c.bases[at.ptr] = uri
	return uri
}

// ref compiles the reference at a place, through those that it leads to.
func (c *compiler) ref(at place, seen ...string) *node {
	to := c.lookup(at)
	m, _ := to.raw.(map[string]any)
	if next, more := m["$ref"]; c.memo[to.ptr] == nil && more && (c.draft7 || len(m) == 1) {
		if slices.Contains(seen, to.ptr) {
			refuse("ref-cycle", at.ptr, "the reference leads back to itself")
		}
		bound(len(seen)+1, c.hops, "ref-depth", at.ptr)
		c.memo[to.ptr] = c.ref(to.to(next, "$ref"), append(seen, to.ptr)...) // nobody need go this way again
	}
	return c.target(to)
}

// lookup finds the place that a reference names.
func (c *compiler) lookup(at place) place {
	text, ok := at.raw.(string)
	if !ok {
		refuse("keyword-shape", at.ptr, "want a string")
	}
	if c.index == nil {
		c.index = map[string]place{"": {raw: c.doc}}
		c.scan(place{raw: c.doc})
	}
	uri, frag, ok := resolveURI(at.base, text)
	to, found := c.index[uri]
	if !found || !ok {
		refuse("remote-ref", at.ptr, "not in this document: "+quoteText(text))
	}
	if path, isPath := strings.CutPrefix(frag, "/"); isPath {
		for token := range strings.SplitSeq(path, "/") {
			to = c.step(to, strings.ReplaceAll(strings.ReplaceAll(token, "~1", "/"), "~0", "~"))
		}
	} else if frag != "" {
		to = c.index[uri+"#"+frag]
	}
	if to.raw == nil {
		refuse("unresolved-ref", at.ptr, "nothing is there: "+quoteText(text))
	}
	return to
}

// step follows one token of a JSON Pointer, to nil if nothing is there.
func (c *compiler) step(at place, token string) place {
	m, _ := at.raw.(map[string]any)
	at.base = c.enter(m, at)
	next := m[token]
	list, _ := at.raw.([]any)
	if i, err := strconv.Atoi(token); err == nil && i >= 0 && i < len(list) {
		next = list[i]
	}
	return at.to(next, token)
}

// scan indexes the resources and anchors of a subschema.
func (c *compiler) scan(at place) {
	m, _ := at.raw.(map[string]any)
	outer := at // entering a resource again from its own place changes nothing
	add := func(uri string) {
		had, twice := c.index[uri]
		if c.index[uri] = outer; twice && had.ptr != at.ptr {
			c.index[uri] = place{} // of two places of one name, neither is surely meant
		}
	}
	if at.base = c.enter(m, at); at.base != outer.base {
		add(at.base)
	}
	for _, kw := range []string{"$anchor", "$dynamicAnchor", "$id"} { // draft-07 writes an anchor as an $id
		name, ok := m[kw].(string)
		if kw == "$id" {
			name, ok = strings.CutPrefix(name, "#")
		}
		if ok && c.draft7 == (kw == "$id") && !(c.draft7 && m["$ref"] != nil) {
			add(at.base + "#" + name)
		}
	}
	for kw, v := range m {
		c.keywords[kw].each(at.to(v, kw), func(at place, _ string) { c.scan(at) })
	}
}

// measure works out what depends on other nodes, which all are filled by then. It computes how high a
// node is in place, and refuses a cycle: a schema that asks about the same value again can never answer.
// A cycle that goes down a level of the value is how trees are described.
func (c *compiler) measure(n *node) int {
	if n.height < 0 {
		refuse("ref-cycle", n.path, "the schema applies to a value through itself")
	} else if n.height > 0 {
		return n.height
	}
	n.settle()
	n.height = -1
	high, others := 0, []*node{n.not, n.cond, n.then, n.els}
	for _, d := range n.needs {
		others = append(others, d.node)
	}
	for _, group := range [][]*node{n.all, n.any, n.one, others} {
		for _, s := range group {
			if s != nil {
				high = max(high, c.measure(s))
			}
		}
	}
	n.height = 1 + high
	bound(n.height, maxInPlace, "ref-depth", n.path)
	for _, s := range n.all {
		n.admits &= s.admits
	}
	n.admits &= admitted(n.any) & admitted(n.one)
	return n.height
}

// settle derives what a check would have to find out each time.
func (n *node) settle() {
	if n.cond == nil {
		n.then, n.els = nil, nil
	}
	n.bounded = n.min != nil || n.max != nil || n.above != nil || n.below != nil || n.step != nil
	n.others = n.patterns != nil || n.names != nil || n.additional != nil && n.additional.rules > 0 && !n.open
	n.inPlace = n.all != nil || n.any != nil || n.one != nil || n.not != nil || n.cond != nil
}

// A term is the keyword that is being compiled.
type term struct {
	n    *node          // into which
	m    map[string]any // of which
	in   place          // of m
	name string
	raw  any
}

func (c *compiler) at() place { return c.in.to(c.raw, c.name) }

// A keyword either asserts something (set) or is noted. Others are annotations.
type keyword struct {
	in2020           bool // whether draft-07 does not know it
	holds, holdsMany bool // subschemas: a schema or an array of them; an object of schemas
	set, note        func(*compiler)
}

// each calls f for the subschemas of a keyword at a place, with their names.
func (kw keyword) each(at place, f func(at place, name string)) {
	switch v := at.raw.(type) {
	case map[string]any:
		if kw.holds {
			f(at, "")
		} else if kw.holdsMany {
			for _, name := range keysOf(v) {
				f(at.to(v[name], name), name)
			}
		}
	case []any:
		for i := 0; i < len(v) && kw.holds; i++ {
			f(at.to(v[i], strconv.Itoa(i)), "")
		}
	}
}

// schemaKeywords is reached through the compiler alone, since it refers to itself.
var schemaKeywords = map[string]keyword{
	"$ref":             {set: func(c *compiler) { c.n.all = append(c.n.all, c.ref(c.at())) }},
	"$id":              {note: func(c *compiler) { as[string](c, "a string") }},
	"$anchor":          {note: func(c *compiler) { as[string](c, "a string") }},
	"$dynamicRef":      {in2020: true, note: func(c *compiler) { refuse("dynamic-ref", c.at().ptr, "not supported") }},
	"$recursiveRef":    {in2020: true, note: func(c *compiler) { refuse("dynamic-ref", c.at().ptr, "not supported") }},
	"$vocabulary":      {in2020: true, note: func(c *compiler) { refuse("vocabulary", c.at().ptr, "not supported") }},
	"$defs":            {holdsMany: true},
	"definitions":      {holdsMany: true},
	"contentEncoding":  {note: func(c *compiler) { c.part(c.at(), c.name, "annotation", true) }},
	"contentMediaType": {note: func(c *compiler) { c.part(c.at(), c.name, "annotation", true) }},
	"contentSchema":    {in2020: true, note: func(c *compiler) { c.part(c.at(), c.name, "annotation", true) }},
	"format":           {note: (*compiler).format},

	"type":  {set: (*compiler).types},
	"enum":  {set: func(c *compiler) { c.n.enum = c.choice(as[[]any](c, "an array")) }},
	"const": {set: func(c *compiler) { c.n.con = c.choice([]any{c.raw}) }},

	"minLength":        {set: func(c *compiler) { c.n.minLength = c.count() }},
	"maxLength":        {set: func(c *compiler) { c.n.maxLength = c.count() }},
	"pattern":          {set: func(c *compiler) { c.n.pattern = c.regexp(c.at(), as[string](c, "a string")) }},
	"minimum":          {set: func(c *compiler) { c.n.min = c.number() }},
	"maximum":          {set: func(c *compiler) { c.n.max = c.number() }},
	"exclusiveMinimum": {set: func(c *compiler) { c.n.above = c.number() }},
	"exclusiveMaximum": {set: func(c *compiler) { c.n.below = c.number() }},
	"multipleOf":       {set: func(c *compiler) { c.n.step = c.number(); c.want(c.n.step.sign > 0, "a number above 0") }},

	"items":            {holds: true, set: (*compiler).items},
	"additionalItems":  {holds: true, set: (*compiler).items},
	"prefixItems":      {in2020: true, holds: true, set: func(c *compiler) { c.n.prefix = c.schemas() }},
	"contains":         {holds: true, set: func(c *compiler) { c.n.contains = c.sub(c.at()) }},
	"minContains":      {in2020: true, set: func(c *compiler) { c.n.minContains = c.count() }},
	"maxContains":      {in2020: true, set: func(c *compiler) { c.n.maxContains = c.count() }},
	"minItems":         {set: func(c *compiler) { c.n.minItems = c.count() }},
	"maxItems":         {set: func(c *compiler) { c.n.maxItems = c.count() }},
	"uniqueItems":      {set: func(c *compiler) { c.n.unique = as[bool](c, "a boolean") }},
	"unevaluatedItems": {in2020: true, holds: true, set: func(c *compiler) { c.n.restItems = c.sub(c.at()) }},

	"properties":            {holdsMany: true, set: (*compiler).properties},
	"required":              {set: (*compiler).required},
	"patternProperties":     {holdsMany: true, set: (*compiler).patternProperties},
	"additionalProperties":  {holds: true, set: func(c *compiler) { c.n.additional = c.sub(c.at()) }},
	"propertyNames":         {holds: true, set: func(c *compiler) { c.n.names = c.sub(c.at()) }},
	"minProperties":         {set: func(c *compiler) { c.n.minMembers = c.count() }},
	"maxProperties":         {set: func(c *compiler) { c.n.maxMembers = c.count() }},
	"dependentRequired":     {in2020: true, set: (*compiler).dependencies},
	"dependentSchemas":      {in2020: true, holdsMany: true, set: (*compiler).dependencies},
	"dependencies":          {holdsMany: true, set: (*compiler).dependencies},
	"unevaluatedProperties": {in2020: true, holds: true, set: func(c *compiler) { c.n.restProps = c.sub(c.at()) }},

	"allOf": {holds: true, set: func(c *compiler) { c.n.all = append(c.n.all, c.schemas()...) }},
	"anyOf": {holds: true, set: func(c *compiler) { c.n.any = c.schemas() }},
	"oneOf": {holds: true, set: func(c *compiler) { c.n.one = c.schemas() }},
	"not":   {holds: true, set: func(c *compiler) { c.n.not = c.sub(c.at()) }},
	"if":    {holds: true, set: func(c *compiler) { c.n.cond = c.sub(c.at()) }},
	"then":  {holds: true, set: func(c *compiler) { c.n.then = c.sub(c.at()) }},
	"else":  {holds: true, set: func(c *compiler) { c.n.els = c.sub(c.at()) }},
}

// want fails unless a keyword has the shape it must have: otherwise what its author meant cannot be
// told, and no meaning is invented.
func (c *compiler) want(ok bool, shape string) {
	if !ok {
		refuse("keyword-shape", c.at().ptr, "want "+shape)
	}
}

func as[T any](c *compiler, shape string) T {
	v, ok := c.raw.(T)
	c.want(ok, shape)
	return v
}

func (c *compiler) number() *decimal {
	d, ok := parseDecimal(string(as[json.Number](c, "a number")))
	if !ok {
		refuse("number-range", c.at().ptr, "too many digits")
	}
	return &d
}

// count returns a size. One beyond an int is as good as the largest int.
func (c *compiler) count() int {
	d := c.number()
	if c.want(d.sign >= 0 && d.low >= 0, "an integer of at least 0"); d.top > 17 {
		return math.MaxInt
	}
	return int(min(d.mod(d.low, math.MaxInt64), math.MaxInt))
}

func (c *compiler) types() {
	list, ok := c.raw.([]any)
	if !ok {
		list = []any{c.raw}
	}
	c.n.types = 0
	for _, v := range list {
		name, _ := v.(string)
		i := slices.Index(kindNames[:], name)
		c.want(i >= 0, "the name of a JSON type")
		if c.n.types |= 1 << i; name == "number" {
			c.n.types |= kindNumeric
		}
	}
	c.want(c.n.types != 0, "at least one type")
	c.n.admits &= c.n.types
}

// choice compiles an enum, or the one value of a const.
func (c *compiler) choice(values []any) *choice {
	bound(len(values), c.values, "schema-enum", c.at().ptr)
	e := &choice{values: values, texts: map[string]bool{}, forms: map[string]bool{}}
	k := checker{left: math.MaxInt, deepest: c.nesting}
	for _, v := range values {
		if e.kinds |= kindOf(v); e.kinds&kindNumeric != 0 {
			e.kinds |= kindNumeric
		}
		if s, ok := v.(string); ok {
			e.texts[s] = true
		} else if e.forms[string(k.canon(nil, v, 0))] = true; k.left < 0 {
			refuse("number-range", c.at().ptr, "too many digits")
		}
	}
	c.n.admits &= e.kinds
	return e
}

// format holds a format, or notes that it does not.
func (c *compiler) format() {
	name := as[string](c, "a string")
	f, known := schemaFormats[name]
	if !known {
		c.part(c.at(), "format", "not known", !c.assertFormat)
		return
	}
	c.n.formatName = name
	if !c.assertFormat {
		c.part(c.at(), "format", "annotation", true)
		return
	}
	c.n.rules++
	c.n.check = f.check
	if c.grammars[name] == nil {
		c.grammars[name], _ = compilePattern("^(?:"+f.grammar+")$", 4<<10, c.patternSize)
	}
	c.n.format = c.grammars[name]
}

// schemas compiles an array of schemas.
func (c *compiler) schemas() []*node {
	list := as[[]any](c, "an array of schemas")
	c.want(len(list) > 0 || c.name == "items", "at least one schema")
	bound(len(list), c.branches, "schema-branches", c.at().ptr)
	nodes, at := make([]*node, len(list)), c.at()
	for i, raw := range list {
		nodes[i] = c.sub(at.to(raw, strconv.Itoa(i)))
	}
	return nodes
}

// items compiles items and additionalItems, which has a meaning beside a tuple alone. Older servers,
// which name no dialect, write tuples as draft-07 does.
func (c *compiler) items() {
	_, tuple := c.m["items"].([]any)
	if tuple = tuple && (c.draft7 || !c.declared); tuple && c.name == "items" {
		c.n.prefix = c.schemas()
	} else if tuple || c.name == "items" {
		c.n.items = c.sub(c.at())
	}
}

// members calls f for the members of an object, by name.
func (c *compiler) members(f func(name string, at place)) {
	m, at := as[map[string]any](c, "an object"), c.at()
	for _, name := range keysOf(m) {
		f(name, at.to(m[name], name))
	}
}

// names returns what must be an array of strings.
func (c *compiler) names(raw any) (names []string) {
	list, ok := raw.([]any)
	c.want(ok, "an array of strings")
	for _, v := range list {
		name, ok := v.(string)
		c.want(ok, "an array of strings")
		names = append(names, name)
	}
	return names
}

func (c *compiler) properties() {
	m := as[map[string]any](c, "an object")
	c.n.props = make([]property, 0, len(m))
	c.members(func(name string, at place) { c.n.props = append(c.n.props, property{name: name, node: c.sub(at)}) })
}

func (c *compiler) required() { // after properties, by name
	names := c.names(c.raw)
	slices.Sort(names)
	var undeclared []property
	for _, name := range slices.Compact(names) {
		if i, found := c.n.find(name); found {
			c.n.props[i].required = true
		} else {
			undeclared = append(undeclared, property{name: name, required: true})
		}
	}
	c.n.props = append(c.n.props, undeclared...)
	slices.SortFunc(c.n.props, func(p, q property) int { return cmp.Compare(p.name, q.name) })
}

func (c *compiler) patternProperties() {
	c.members(func(name string, at place) {
		if p, sub := c.regexp(at, name), c.sub(at); p != nil {
			c.n.patterns = append(c.n.patterns, patternProperty{p, sub})
		} else {
			c.n.open = true
		}
	})
}

func (c *compiler) dependencies() {
	c.members(func(name string, at place) {
		d := dependency{name: name, kw: c.name}
		if _, isList := at.raw.([]any); isList && c.name != "dependentSchemas" || c.name == "dependentRequired" {
			d.names = c.names(at.raw)
		} else {
			d.node = c.sub(at)
		}
		c.n.needs = append(c.n.needs, d)
	})
}

// regexp compiles a pattern. It is nil if the pattern cannot be held.
func (c *compiler) regexp(at place, text string) *pattern {
	p, ok := c.regexps[text]
	if ok && p != nil {
		return p
	}
	p, err := compilePattern(text, c.patternText, c.patternSize)
	if err != nil {
		c.part(at, c.name, err.Error(), false)
	}
	if c.regexps[text] = p; p != nil {
		c.programs += p.weight
	}
	bound(len(c.regexps), c.patterns, "schema-patterns", at.ptr)
	bound(c.programs, 4*c.patternSize, "schema-patterns", at.ptr) // all of them together
	return p
}

// collect gathers x-mcp-header annotations. They may stand only on primitive properties that are
// reached from the root through properties alone.
func (c *compiler) collect(at place, path []string, reached bool) {
	m, _ := at.raw.(map[string]any)
	if v, ok := m["x-mcp-header"]; ok {
		name, _ := v.(string)
		switch t := m["type"]; {
		case !reached || len(path) == 0:
			refuse("x-mcp-header", at.ptr, "not on a property that is reached through properties alone")
		case name == "" || strings.Trim(name, tokenChars) != "":
			refuse("x-mcp-header", at.ptr, "not a header name")
		case t != "string" && t != "integer" && t != "boolean":
			refuse("x-mcp-header", at.ptr, "the type must be string, integer or boolean")
		case c.mirrored[strings.ToLower(name)]:
			refuse("x-mcp-header", at.ptr, "two arguments for one header")
		}
		c.mirrored[strings.ToLower(name)] = true
		c.out.params = append(c.out.params, headerParam{name, slices.Clone(path)})
	}
	for _, kw := range keysOf(m) {
		word, known := c.keywords[kw]
		word.holds = word.holds || !known && kw != "default" && kw != "examples" // no place for it under what we do not know
		word.each(at.to(m[kw], kw), func(at place, name string) {
			c.collect(at, append(path, name), reached && kw == "properties")
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

// validate checks what a decoder with UseNumber yields. Numbers of Go are taken too, and any other
// value is put into JSON first.
func (s *schema) validate(v any) validity {
	c := checker{left: s.limits.work, deepest: s.limits.valueNesting}
	switch ok := c.check(s.root, v); {
	case ok && c.left >= 0:
		return verdictValid
	case c.left < 0 && c.fault == "":
		return verdictBudget
	}
	return verdictInvalid
}

// A checker walks one value. Its methods report whether to go on: the first misfit ends a walk, unless
// there is an explainer, which notes it and has room for more. A unit of work is a node and a value that
// meet, or about 64 bytes looked at.
type checker struct {
	left           int // units of work; negative ends the walk
	depth, deepest int
	fault          string // why left is negative, if it is not the budget
	misfits        int    // noted so far
	ex             *explainer
}

// stop ends the walk at a value that no branch of a schema can judge.
func (c *checker) stop(fault string) bool {
	if c.left >= 0 {
		c.fault, c.left = fault, -1
	}
	return false
}

// try checks without explaining. A check that fails may end anywhere, so the depth is put back.
func (c *checker) try(n *node, x any) bool {
	ex, depth := c.ex, c.depth
	c.ex = nil
	ok := c.check(n, x)
	c.ex, c.depth = ex, depth
	return ok && c.left >= 0
}

// check holds x to n.
func (c *checker) check(n *node, x any) bool {
	if c.left--; c.left < 0 {
		return false
	}
	kind, ok, misfits := kindNull, true, c.misfits
	switch v := x.(type) {
	case nil:
	case bool:
		kind = kindBoolean
	case string:
		kind = kindString
		ok = n.types&kind == 0 || c.text(n, v, x)
	case json.Number:
		kind, ok = c.number(n, string(v), x)
	case map[string]any:
		if v != nil { // which is written as null
			kind = kindObject
			ok = n.types&kind == 0 || c.object(n, v, x)
		}
	case []any:
		if v != nil {
			kind = kindArray
			ok = n.types&kind == 0 || c.array(n, v, x)
		}
	default:
		if x, ok = plainValue(x); !ok {
			return c.stop("value")
		}
		return c.check(n, x)
	}
	switch {
	case n.types&kind == 0:
		return c.miss(n, "type", x)
	case !ok:
		return false
	case n.enum != nil && !c.among(n.enum, kind, x):
		return c.miss(n, "enum", x)
	case n.con != nil && !c.among(n.con, kind, x):
		return c.miss(n, "const", x)
	case n.inPlace && !c.applied(n, x):
		return false
	case (n.restItems != nil || n.restProps != nil) && c.misfits == misfits:
		return c.unevaluated(n, x)
	}
	return true
}

func (c *checker) text(n *node, v string, x any) bool {
	c.left -= len(v) >> 6
	switch { // bytes settle most of it: a character has one to four
	case len(v) < n.minLength, len(v)/4 < n.minLength && utf8.RuneCountInString(v) < n.minLength:
		return c.miss(n, "minLength", x)
	case len(v) > n.maxLength && utf8.RuneCountInString(v) > n.maxLength:
		return c.miss(n, "maxLength", x)
	case n.pattern != nil && !c.match(n.pattern, v):
		return c.miss(n, "pattern", x)
	case n.format != nil && !(c.match(n.format, v) && (n.check == nil || n.check(v))):
		return c.miss(n, "format", x)
	}
	return true
}

// match charges before it matches: RE2 takes time linear in text times program.
func (c *checker) match(p *pattern, v string) bool {
	c.left -= 1 + len(v)*p.size/64
	return c.left >= 0 && p.MatchString(v)
}

// number returns what kind of number text is, too. A number that nothing asks about is not read.
func (c *checker) number(n *node, text string, x any) (kinds, bool) {
	if n.types == kindAny && !n.bounded {
		return kindNumber, true
	}
	c.left -= len(text) >> 4
	d, ok := parseDecimal(text)
	if !ok {
		return kindAny, c.stop("number-range")
	}
	kind, kw := d.kind(), ""
	if n.types&kind == 0 || !n.bounded {
		return kind, true
	}
	if n.step != nil {
		c.left -= (len(text) + max(0, d.low-n.step.low)) >> 3 // digits to divide
	}
	switch {
	case n.min != nil && d.cmp(n.min) < 0:
		kw = "minimum"
	case n.max != nil && d.cmp(n.max) > 0:
		kw = "maximum"
	case n.above != nil && d.cmp(n.above) <= 0:
		kw = "exclusiveMinimum"
	case n.below != nil && d.cmp(n.below) >= 0:
		kw = "exclusiveMaximum"
	case n.step != nil && !d.multiple(n.step):
		kw = "multipleOf"
	}
	return kind, kw == "" || c.miss(n, kw, x)
}

func (c *checker) array(n *node, v []any, x any) bool {
	if len(v) < n.minItems {
		return c.miss(n, "minItems", x)
	} else if len(v) > n.maxItems {
		return c.miss(n, "maxItems", x)
	}
	if c.depth++; c.depth > c.deepest {
		return c.stop("nesting")
	}
	c.left -= len(v) >> 6
	for i, x := range v {
		sub := n.ofItem(i)
		if sub == nil {
			break
		} else if sub.rules > 0 && !inside(c, sub, x, i) {
			return false
		}
	}
	if n.unique {
		if i, j := c.twins(v); j > 0 && !c.miss(n, "uniqueItems", [2]int{i, j}) {
			return false
		}
	}
	if n.contains != nil && !c.contained(n, v) {
		return false
	}
	c.depth--
	return true
}

// contained counts the items that must be there, no further than matters.
func (c *checker) contained(n *node, v []any) bool {
	has := 0
	for _, x := range v {
		if has >= n.minContains && n.maxContains == math.MaxInt || c.left < 0 {
			break
		} else if c.try(n.contains, x) {
			has++
		}
	}
	return n.minContains <= has && has <= n.maxContains || c.miss(n, "contains", has)
}

// inside checks an item or a member, one step down the path.
func inside[T int | string](c *checker, n *node, x any, at T) bool {
	if c.ex == nil {
		return c.check(n, x)
	}
	path := c.ex.path
	name, isName := any(at).(string)
	if !isName {
		name = fmt.Sprint(at)
	}
	c.ex.path = joinPath(path, name)
	ok := c.check(n, x)
	if c.left >= 0 { // where a walk ended is worth knowing
		c.ex.path = path
	}
	return ok
}

func (c *checker) object(n *node, v map[string]any, x any) bool {
	if len(v) < n.minMembers {
		return c.miss(n, "minProperties", x)
	} else if len(v) > n.maxMembers {
		return c.miss(n, "maxProperties", x)
	}
	if c.depth++; c.depth > c.deepest {
		return c.stop("nesting")
	}
	known := 0
	c.left -= len(n.props) >> 2
	for i := range n.props {
		p := &n.props[i]
		if x, has := v[p.name]; has && p.node != nil {
			if known++; p.node.rules > 0 && !inside(c, p.node, x, p.name) {
				return false
			}
		} else if !has && p.required && !c.miss(n, "required", nil, p.name) {
			return false
		}
	}
	if n.others && (known < len(v) || n.patterns != nil || n.names != nil) && !c.members(n, v) {
		return false
	}
	c.depth--
	c.left -= len(n.needs) >> 2
	for i := range n.needs {
		d := &n.needs[i]
		if _, has := v[d.name]; !has {
			continue
		} else if d.node != nil && !c.check(d.node, x) {
			return false
		}
		c.left -= len(d.names) >> 2
		for _, name := range d.names {
			if _, has := v[name]; !has && !c.miss(n, d.kw, nil, name, d.name) {
				return false
			}
		}
	}
	return true
}

// members checks each member beyond what properties says of it; in order only to explain, as it costs.
func (c *checker) members(n *node, v map[string]any) bool {
	if c.ex == nil {
		for name, x := range v {
			if !c.member(n, name, x) {
				return false
			}
		}
		return true
	}
	c.left -= len(v)
	for _, name := range keysOf(v) {
		if !c.member(n, name, v[name]) {
			return false
		}
	}
	return true
}

func (c *checker) member(n *node, name string, x any) bool {
	if c.left--; c.left < 0 {
		return false
	}
	known := n.declared(name) != nil
	for i := range n.patterns {
		if p := &n.patterns[i]; c.match(p.pattern, name) {
			if known = true; !inside(c, p.node, x, name) {
				return false
			}
		}
	}
	if n.names != nil && !c.named(n.names, name) && !c.miss(n, "propertyNames", nil, name) {
		return false
	}
	return known || n.additional == nil || n.open || c.extra(n, "additionalProperties", n.additional, name, x)
}

// named is try for a name, which it boxes only if it must.
func (c *checker) named(n *node, name string) bool {
	ex, depth := c.ex, c.depth
	c.ex = nil
	ok := n.types&kindString != 0 && c.text(n, name, nil) && (n.enum == nil || n.enum.texts[name]) &&
		(n.con == nil || n.con.texts[name]) && (!n.inPlace || c.applied(n, name))
	c.ex, c.depth = ex, depth
	return ok && c.left >= 0
}

// applied checks what applies to x itself.
func (c *checker) applied(n *node, x any) bool {
	for _, s := range n.all {
		if !c.check(s, x) {
			return false
		}
	}
	if n.any != nil {
		if i, _ := c.fits(n.any, x, false); i < 0 && !c.unfit(n, "anyOf", n.any, x) {
			return false
		}
	}
	if n.one != nil {
		if i, j := c.fits(n.one, x, true); i < 0 && !c.unfit(n, "oneOf", n.one, x) || j > 0 && !c.miss(n, "oneOf", [2]int{i, j}) {
			return false
		}
	}
	if n.not != nil && c.try(n.not, x) && !c.miss(n, "not", x) {
		return false
	}
	sub := n.els
	if n.cond != nil && c.try(n.cond, x) {
		sub = n.then
	}
	return c.left >= 0 && (sub == nil || c.check(sub, x))
}

// fits returns the first schema that x fits and, if asked, the second; -1 for none.
func (c *checker) fits(group []*node, x any, both bool) (first, second int) {
	first = -1
	for i, s := range group {
		if !c.try(s, x) {
			continue
		} else if first >= 0 {
			return first, i
		} else if first = i; !both {
			break
		}
	}
	return first, -1
}
