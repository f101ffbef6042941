package mcp

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf16"
	"unicode/utf8"
)

// The JSON of the wire, read and written by hand. encoding/json matches keys
// without regard to case and takes duplicates in silence, so it must not decide
// which member is the result; and it looks at every byte several times.
//
// What is read is strict (RFC 8259) and may be hostile: every function here
// takes any bytes, and bounds what it makes of them, so that the result of a
// foreign transport needs no check before. The file is a leaf: it knows no
// policy and no transport, only the plain data that it decodes, and buffers.

var (
	errSyntax = errors.New("not a JSON-RPC message")
	errDepth  = errors.New("nested too deep")
	errLimit  = errors.New("too many values")
)

const (
	wireDepth     = 512      // nesting of a message, read or written
	valueDepth    = 128      // nesting of a value decoded for validation
	maxEntries    = 1 << 14  // messages of a batch, blocks of a result, tools of a list
	valueBudget   = 32 << 20 // bytes, about, that one decoded value may take
	dataLimit     = 64 << 10 // bytes of an error's data that are kept
	idLength      = 20       // bytes of an id of ours, in quotes
	maxRepair     = 1 << 20  // bytes that a message may grow by where it is no UTF-8
	byteOrderMark = "\uFEFF" // some servers write one first, which RFC 8259 lets a reader ignore
)

// An envelope is one JSON-RPC message, cut into its members. The members lie in
// the bytes that were scanned.
type envelope struct {
	id     json.RawMessage // nil if absent; "null" if null
	method string          // "" if absent
	params json.RawMessage
	result json.RawMessage // nil if absent; "null" if null
	err    json.RawMessage // the error member; nil if absent
}

// size is what a request takes while it waits: all of it is the peer's to choose.
func (e *envelope) size() int { return len(e.id) + len(e.method) + len(e.params) }

// scanEnvelope cuts one message into its members: case-sensitive keys,
// duplicates of the members above refused, depth bounded, nothing but white
// space after it, jsonrpc must be "2.0". Null is as absent in method, params
// and error, where some servers always write it.
func scanEnvelope(b []byte) (envelope, error) {
	var e envelope
	var version string
	err := decode(b, field{"jsonrpc", &version}, field{"id", &e.id}, field{"method", &e.method},
		field{"params", &e.params}, field{"result", &e.result}, field{"error", &e.err})
	if err != nil {
		return envelope{}, err
	}
	e.params, e.err = unlessNull(e.params), unlessNull(e.err)
	both := e.result != nil && e.err != nil || e.method != "" && (e.result != nil || e.err != nil)
	if version != "2.0" || both || !validID(e.id) {
		return envelope{}, errSyntax
	}
	return e, nil
}

// validID reports whether id, a JSON value or absent, is a string, an integer or
// null.
func validID(id []byte) bool {
	if len(id) == 0 || id[0] == '"' || id[0] == 'n' {
		return true
	}
	return digits(id, len(id)-len(bytes.TrimPrefix(id, []byte("-")))) == len(id)
}

// scanBatch cuts a JSON array into its elements, which lie in b. ok is false if
// b is no array.
func scanBatch(b []byte) (elems []json.RawMessage, ok bool) {
	s := scanner{b: b, depth: wireDepth}
	for s.open('['); s.more(']'); {
		elems = append(elems, s.raw())
		s.limit(len(elems))
	}
	return elems, s.end() == nil
}

// intID returns the id as a number of ours: 7, or the text "7".
func intID(id []byte) (n int64, ok bool) {
	if len(id) > 1 && id[0] == '"' && id[len(id)-1] == '"' {
		id = id[1 : len(id)-1]
	}
	if len(id) == 0 || len(id) > idLength-2 || id[0] == '0' && len(id) > 1 {
		return 0, false
	}
	for _, c := range id {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = 10*n + int64(c-'0')
	}
	return n, true
}

// cutAnswer cuts an answer that is laid out as servers write it, without a look
// at its result: with the members in the order of the Go and the Python SDK, or
// of the TypeScript SDK. If the result is one JSON value, then b is an answer with
// this id and this result, and nothing else; if it is not, b may be anything.
func cutAnswer(b []byte) (id int64, result []byte, ok bool) {
	const head, then = `{"jsonrpc":"2.0","id":`, `,"result":`
	const first, tail = `{"result":`, `,"jsonrpc":"2.0","id":`
	if b, ok = bytes.CutSuffix(b, []byte("}")); !ok {
		return 0, nil, false
	}
	var number []byte
	if rest, found := bytes.CutPrefix(b, []byte(head)); found {
		near := rest[:min(len(rest), idLength+len(then))] // the result may be long
		if number, _, ok = bytes.Cut(near, []byte(then)); ok {
			result = rest[len(number)+len(then):]
		}
	} else if rest, ok = bytes.CutPrefix(b, []byte(first)); ok {
		at := max(len(rest)-idLength-len(tail), 0)
		if result, number, ok = bytes.Cut(rest[at:], []byte(tail)); ok {
			result = rest[:at+len(result)]
		}
	}
	if !ok {
		return 0, nil, false
	}
	id, ok = intID(number)
	return id, result, ok
}

// peekID finds the id of a message that carries a result or an error, looking
// at as little of it as possible; b may be just the head of the message. ok is
// false for requests, notifications and anything it is not sure about. Where
// the message breaks further on, the id says whose answer it was.
func peekID(b []byte) (n int64, ok bool) {
	s := scanner{b: b, depth: wireDepth}
	var id []byte
	answer := false
	for s.open('{'); s.more('}'); {
		switch key := s.key(); {
		case string(key) == "id" && id == nil:
			id = s.raw()
		case string(key) == "id", string(key) == "method" && s.peek() != 'n':
			return 0, false
		case string(key) == "result", string(key) == "error" && s.peek() != 'n':
			answer = true
			if id == nil {
				s.skip()
			}
		default:
			s.skip()
		}
		if answer && id != nil && s.i < len(b) { // at the end a number might go on
			return intID(id)
		}
	}
	return 0, false
}

// decodeError decodes the error member.
func decodeError(b []byte) (*RPCError, error) {
	var code, data json.RawMessage
	var message string
	if err := decode(b, field{"code", &code}, field{"message", &message}, field{"data", &data}); err != nil {
		return nil, err
	}
	n, err := strconv.Atoi(string(code))
	if err != nil {
		return nil, errSyntax
	}
	message = strings.ToValidUTF8(message[:min(len(message), rawLimit)], "") // the cut may halve a character
	e := &RPCError{Code: n, Message: strings.Clone(message)}
	if len(data) <= dataLimit {
		e.Data = bytes.Clone(unlessNull(data))
	}
	return e, nil
}

// toolResult is a decoded result of tools/call.
type toolResult struct {
	Result
	round
	noContent bool // neither content nor structuredContent
}

// A round is what a result of 2026-07-28 says about further ones.
type round struct {
	resultType    string          // "" if absent
	inputRequests json.RawMessage // of an input_required result; nil if absent
	requestState  *string         // the same
}

// decodeRound decodes that much of any result.
func decodeRound(b []byte) (*round, error) {
	r := new(round)
	err := decode(b, field{"resultType", &r.resultType}, field{"inputRequests", &r.inputRequests}, field{"requestState", &r.requestState})
	r.inputRequests = bytes.Clone(unlessNull(r.inputRequests))
	return r, err
}

// decodeToolResult decodes a result of tools/call. Strings and raw members are
// copies. Null is as absent, save in structuredContent.
func decodeToolResult(b []byte) (*toolResult, error) {
	r := new(toolResult)
	err := decode(b, field{"content", &r.Content}, field{"structuredContent", &r.Structured},
		field{"isError", &r.IsError}, field{"_meta", &r.Meta}, field{"resultType", &r.resultType},
		field{"inputRequests", &r.inputRequests}, field{"requestState", &r.requestState})
	if err != nil {
		return nil, err
	}
	r.noContent = r.Content == nil && r.Structured == nil
	r.Structured = bytes.Clone(r.Structured)
	r.Meta = bytes.Clone(unlessNull(r.Meta))
	r.inputRequests = bytes.Clone(unlessNull(r.inputRequests))
	return r, nil
}

// block takes one content block. A type that we do not know may give the
// members that we know another shape: then Raw is what counts.
func (s *scanner) block(c *Content) {
	s.peek()
	start := s.i
	ok, rest := s.members(field{"type", &c.Type}, field{"text", &c.Text}, field{"data", &c.Data},
		field{"mimeType", &c.MIMEType}, field{"uri", &c.URI}, field{"name", &c.Name}, field{"resource", c})
	switch c.Type {
	case "":
		s.fail(errSyntax)
	case "text", "image", "audio", "resource_link", "resource":
		if !ok {
			s.fail(errSyntax)
		}
	}
	if s.err == nil && (rest || c.Type != "text" || c.Data != "" || c.MIMEType != "" || c.URI != "" || c.Name != "") {
		c.Raw = bytes.Clone(s.b[start:s.i])
	}
}

// toolPage is a decoded result of tools/list.
type toolPage struct {
	tools  []Tool
	bad    int     // entries that are no tools at all (no object, no name)
	cursor *string // nextCursor; nil at the end
	ttlMs  int64   // -1 if absent
}

// decodeToolPage decodes a result of tools/list. Strings are copies; the raw
// members of all tools lie in one copy of the page.
func decodeToolPage(b []byte) (toolPage, error) {
	p := toolPage{ttlMs: -1}
	var ttl json.RawMessage
	err := decode(bytes.Clone(b), field{"tools", &p}, field{"nextCursor", &p.cursor}, field{"ttlMs", &ttl})
	if err != nil {
		return toolPage{}, err
	}
	if p.tools == nil {
		return toolPage{}, errSyntax
	}
	if f, err := strconv.ParseFloat(string(ttl), 64); err == nil && f >= 0 {
		p.ttlMs = int64(min(f, 1<<53))
	}
	return p, nil
}

// tools takes the tools of a page. Where there is no more room, the average length
// of those before is a guess at how many are to come.
func (s *scanner) tools(p *toolPage) {
	p.tools = make([]Tool, 0, 16)
	start := s.i
	for s.open('['); s.more(']'); {
		n := len(p.tools)
		if n == cap(p.tools) {
			length := (s.i - start) / n
			p.tools = slices.Grow(p.tools, min((len(s.b)-s.i)/length+8, maxEntries))
		}
		p.tools = append(p.tools, Tool{})
		if !s.tool(&p.tools[n]) {
			p.tools = p.tools[:n]
			p.bad++
		}
		s.limit(len(p.tools))
	}
}

// tool takes one tool. ok is false if it has no name, or two members of one
// name, or text that is none.
func (s *scanner) tool(t *Tool) (ok bool) {
	var annotations, execution json.RawMessage
	s.peek()
	start := s.i
	ok, rest := s.members(field{"name", &t.Name}, field{"title", &t.Title}, field{"description", &t.Description},
		field{"inputSchema", &t.InputSchema}, field{"outputSchema", &t.OutputSchema},
		field{"annotations", &annotations}, field{"execution", &execution})
	t.InputSchema, t.OutputSchema = unlessNull(t.InputSchema), unlessNull(t.OutputSchema)
	if s.err == nil && (rest || annotations != nil || execution != nil) {
		t.Raw = s.b[start:s.i:s.i]
	}
	title := ""
	t.Destructive = true
	if annotations != nil && decode(annotations, field{"title", &title}, field{"readOnlyHint", &t.ReadOnly},
		field{"destructiveHint", &t.Destructive}, field{"idempotentHint", &t.Idempotent}) != nil {
		t.ReadOnly, t.Destructive, t.Idempotent = false, true, false // no hints, then
	}
	if t.Title == "" {
		t.Title = title
	}
	if execution != nil {
		_ = decode(execution, field{"taskSupport", &t.TaskSupport})
	}
	return ok && t.Name != ""
}

// member returns a copy of the raw value of one member of a JSON object, nil if
// it is absent or there are two.
func member(b []byte, key string) json.RawMessage {
	var v json.RawMessage
	if decode(b, field{key, &v}) != nil {
		return nil
	}
	return bytes.Clone(v)
}

// decodeValue decodes one JSON value as validation wants it: map[string]any,
// []any, string, json.Number, bool, nil; duplicates refused, depth and memory
// bounded.
func decodeValue(b []byte) (any, error) {
	s := scanner{b: b, text: string(b), depth: valueDepth}
	budget := valueBudget
	v := s.value(&budget)
	if err := s.end(); err != nil {
		return nil, err
	}
	return v, nil
}

// value takes any value. What it takes off the budget is a guess at the memory
// it needs, which for [{"a":0}] is forty times its length.
func (s *scanner) value(budget *int) any {
	if *budget -= 48; *budget < 0 {
		s.fail(errLimit)
	}
	switch c := s.peek(); c {
	case '{':
		*budget -= 300
		m := make(map[string]any)
		for s.open('{'); s.more('}'); {
			n := len(m)
			*budget -= 48 // the entry of a map, which is larger than that of a slice
			key := s.string()
			s.colon()
			if m[key] = s.value(budget); len(m) == n {
				s.fail(errSyntax) // two members of one name
			}
		}
		return m
	case '[':
		a := []any{}
		for s.open('['); s.more(']'); {
			a = append(a, s.value(budget))
		}
		return a
	case '"':
		return s.string()
	case 't', 'f', 'n':
		if s.skip(); c == 'n' {
			return nil
		}
		return c == 't'
	}
	n := len(s.raw())
	return json.Number(s.text[s.i-n : s.i])
}

// A field says where the value of a member goes, and by the type of that, what
// it must be.
type field struct {
	key string
	to  any
}

// decode takes an object that is all of b, with these fields among others.
func decode(b []byte, fields ...field) error {
	s := scanner{b: b, depth: wireDepth}
	ok, _ := s.members(fields...)
	if err := s.end(); err != nil || ok {
		return err
	}
	return errSyntax
}

// members takes an object. ok is false if it is none, or if a field has the
// wrong type or comes twice: parsers differ on which of two counts. rest
// reports whether there are other members.
func (s *scanner) members(fields ...field) (ok, rest bool) {
	if s.peek() != '{' {
		s.skip()
		return false, false
	}
	ok = true
	seen := 0
	for s.open('{'); s.more('}'); {
		key := s.key()
		n := 0
		for n < len(fields) && fields[n].key != string(key) {
			n++
		}
		if n == len(fields) {
			rest = true
			s.skip()
			continue
		}
		ok = s.into(fields[n].to) && seen&(1<<n) == 0 && ok
		seen |= 1 << n
	}
	return ok, rest
}

// into takes a value to where it belongs. Null leaves that alone; so does a
// value of the wrong type, and is not ok.
func (s *scanner) into(to any) (ok bool) {
	c := s.peek()
	ok = c == 'n'
	switch to := to.(type) {
	case *json.RawMessage: // lies in b, and may be null
		*to = s.raw()
		return true
	case *string:
		if c == '"' {
			*to = s.string()
			return true
		}
	case **string:
		if c == '"' {
			text := s.string()
			*to = &text
			return true
		}
	case *bool:
		if c == 't' || c == 'f' {
			*to = c == 't'
			ok = true
		}
	case *Content: // the resource within a block
		if c == '{' {
			ok, _ = s.members(field{"uri", &to.URI}, field{"mimeType", &to.MIMEType},
				field{"text", &to.Text}, field{"blob", &to.Data})
			return ok
		}
	case *[]Content:
		if c == '[' {
			*to = make([]Content, 0, 1) // most results have one block
			for s.open('['); s.more(']'); {
				*to = append(*to, Content{})
				s.block(&(*to)[len(*to)-1])
				s.limit(len(*to))
			}
			return true
		}
	case *toolPage:
		to.tools = []Tool{} // Go servers write null for no tools
		if c == '[' {
			s.tools(to)
			return true
		}
	}
	s.skip()
	return ok
}

// isValue reports whether b is one JSON value.
func isValue(b []byte) bool {
	i := skip(b, 0, wireDepth)
	return i >= 0 && space(b, i) == len(b)
}

func unlessNull(raw []byte) []byte {
	if string(raw) == "null" {
		return nil
	}
	return raw
}

// A scanner pulls one JSON text apart. Each method takes what stands at the
// cursor. A failure puts the cursor at the end, where everything else fails as
// well, so that only end need be asked:
//
//	for s.open('{'); s.more('}'); {
//		switch string(s.key()) {
//		case "id":
//			id = s.raw()
//		default:
//			s.skip()
//		}
//	}
//	err := s.end()
type scanner struct {
	b     []byte
	text  string // b, if strings are to be cut out of it rather than copied
	i     int    // the cursor
	depth int    // how many levels may still be opened
	grown int    // bytes that U+FFFD took more than what it stands for
	err   error
}

func (s *scanner) fail(err error) {
	if s.err == nil {
		s.err = err
	}
	s.i = len(s.b)
}

// limit bounds what takes far more memory than it took on the wire.
func (s *scanner) limit(n int) {
	if n > maxEntries {
		s.fail(errLimit)
	}
}

// end returns the first failure. Anything left but white space is one.
func (s *scanner) end() error {
	if s.peek(); s.i < len(s.b) {
		s.fail(errSyntax)
	}
	return s.err
}

// peek skips white space and returns the next byte, 0 at the end.
func (s *scanner) peek() byte {
	if s.i = space(s.b, s.i); s.i == len(s.b) {
		return 0
	}
	return s.b[s.i]
}

// open enters an object or an array.
func (s *scanner) open(c byte) {
	switch {
	case s.peek() != c:
		s.fail(errSyntax)
	case s.depth == 0:
		s.fail(errDepth)
	default:
		s.i++
		s.depth--
	}
}

// more reports whether what was opened goes on, and leaves it if not. It follows
// open or the end of a value directly, so that nothing has been taken yet if
// there is a bracket before the cursor: no value ends with an opening one.
func (s *scanner) more(end byte) bool {
	if s.err != nil {
		return false
	}
	first := s.b[s.i-1] == end-2 // '{' and '}', '[' and ']' are two apart
	switch c := s.peek(); {
	case c == end:
		s.i++
		s.depth++
		return false
	case c == ',' && !first:
		s.i++
	case !first:
		s.fail(errSyntax)
		return false
	}
	return true
}

// key takes the name of a member, escapes resolved. It may lie in b.
func (s *scanner) key() []byte {
	key := s.quoted()
	if bytes.IndexByte(key, '\\') >= 0 {
		key = []byte(unquote(key))
	}
	s.colon()
	return key
}

func (s *scanner) colon() {
	if s.peek() != ':' {
		s.fail(errSyntax)
		return
	}
	s.i++
}

// quoted takes a string and returns what stands between its quotes.
func (s *scanner) quoted() []byte {
	if s.peek() != '"' {
		s.fail(errSyntax)
		return nil
	}
	start := s.i + 1
	if s.to(skipString(s.b, start)); s.err != nil {
		return nil
	}
	return s.b[start : s.i-1]
}

// string takes a string. What is not UTF-8, or half a surrogate pair, becomes
// U+FFFD, which is three bytes for one: a message of nothing else fails.
func (s *scanner) string() string {
	raw := s.quoted()
	end := s.i - 1
	valid := utf8.Valid(raw)
	if !valid {
		for rest := raw; len(rest) > 0; {
			r, n := utf8.DecodeRune(rest)
			if rest = rest[n:]; r == utf8.RuneError && n == 1 {
				s.grown += len("\uFFFD") - 1
			}
		}
		if s.grown > maxRepair {
			s.fail(errLimit)
			return ""
		}
		raw = bytes.Map(func(r rune) rune { return r }, raw)
	}
	switch {
	case bytes.IndexByte(raw, '\\') >= 0:
		return unquote(raw)
	case s.text != "" && raw != nil && valid:
		return s.text[end-len(raw) : end]
	}
	for _, word := range [...]string{"2.0", "text", "complete"} { // need no memory
		if string(raw) == word {
			return word
		}
	}
	return string(raw)
}

// raw takes any value and returns its bytes, nil after a failure.
func (s *scanner) raw() []byte {
	s.peek()
	start := s.i
	if s.skip(); s.err != nil {
		return nil
	}
	return s.b[start:s.i:s.i]
}

// skip takes any value.
func (s *scanner) skip() { s.to(skip(s.b, s.i, s.depth)) }

// to moves the cursor to what a skip function returned.
func (s *scanner) to(i int) {
	switch i {
	case broken:
		s.fail(errSyntax)
	case tooDeep:
		s.fail(errDepth)
	default:
		s.i = i
	}
}

// What the skip functions return if it is not the index after what they skip.
const (
	broken  = -1
	tooDeep = -2
)

// skip skips a value that may open depth levels.
func skip(b []byte, i, depth int) int {
	if i = space(b, i); i == len(b) {
		return broken
	}
	switch c := b[i]; c {
	case '"':
		return skipString(b, i+1)
	case '{', '[':
		if depth == 0 {
			return tooDeep
		}
		return skipNested(b, i+1, depth-1, c+2)
	case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
		return skipNumber(b, i)
	}
	for _, word := range [...]string{"true", "false", "null"} {
		if bytes.HasPrefix(b[i:], []byte(word)) {
			return i + len(word)
		}
	}
	return broken
}

// skipNested skips the rest of an object or array.
func skipNested(b []byte, i, depth int, end byte) int {
	if i = space(b, i); i < len(b) && b[i] == end {
		return i + 1
	}
	for {
		if end == '}' {
			if i = space(b, i); i == len(b) || b[i] != '"' {
				return broken
			}
			if i = skipString(b, i+1); i < 0 {
				return broken
			}
			if i = space(b, i); i == len(b) || b[i] != ':' {
				return broken
			}
			i++
		}
		if i = skip(b, i, depth); i < 0 {
			return i
		}
		if i = space(b, i); i == len(b) || b[i] != ',' && b[i] != end {
			return broken
		}
		i++
		if b[i-1] == end {
			return i
		}
	}
}

func space(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// skipNumber skips -?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?
func skipNumber(b []byte, i int) int {
	if b[i] == '-' {
		i++
	}
	if i < len(b) && b[i] == '0' {
		i++
	} else if i = digits(b, i); i < 0 {
		return broken
	}
	if i < len(b) && b[i] == '.' {
		if i = digits(b, i+1); i < 0 {
			return broken
		}
	}
	if i < len(b) && b[i]|0x20 == 'e' {
		if i++; i < len(b) && (b[i] == '-' || b[i] == '+') {
			i++
		}
		return digits(b, i)
	}
	return i
}

// digits skips one digit or more.
func digits(b []byte, i int) int {
	start := i
	for i < len(b) && '0' <= b[i] && b[i] <= '9' {
		i++
	}
	if i == start {
		return broken
	}
	return i
}

// escapes holds what a letter after a backslash stands for, and the letter for
// what needs one.
var escapes = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t',
	'\b': 'b', '\f': 'f', '\n': 'n', '\r': 'r', '\t': 't'}

// skipString skips the rest of a string.
func skipString(b []byte, i int) int {
	for {
		i = special(b, i)
		switch {
		case i == len(b) || b[i] < ' ':
			return broken
		case b[i] == '"':
			return i + 1
		case i+1 == len(b):
			return broken
		case b[i+1] == 'u' && hex4(b[i+2:]) >= 0:
			i += 6
		case b[i+1] > ' ' && escapes[b[i+1]] != 0:
			i += 2
		default:
			return broken
		}
	}
}

// special returns the index of the first byte from i on that cannot stand in a
// string as it is: quote, backslash or control character. It takes eight bytes at a
// time, and 32 once a string has turned out to be long.
func special[T []byte | string](b T, i int) int {
	for i <= len(b)-8 {
		for near := min(i+24, len(b)-8); i <= near; i += 8 {
			if m := specials(b[i : i+8]); m != 0 {
				return i + bits.TrailingZeros64(m)/8
			}
		}
		for i <= len(b)-32 && specials(b[i:i+8])|specials(b[i+8:i+16])|specials(b[i+16:i+24])|specials(b[i+24:i+32]) == 0 {
			i += 32
		}
	}
	for i < len(b) && b[i] >= ' ' && b[i] != '"' && b[i] != '\\' {
		i++
	}
	return i
}

// specials sets the top bit of the special ones among eight bytes, the first of which
// is the lowest. To subtract c from each borrows where a byte is below c, which sets
// its top bit. XOR 2 brings the quote, and nothing else, next to the control
// characters; XOR '\\' makes the backslash the only byte below 1. A borrow may mark
// the byte above it as well, but never one before.
func specials[T []byte | string](b T) uint64 {
	const each, top = 0x0101010101010101, 0x8080808080808080
	w := uint64(b[0]) | uint64(b[1])<<8 | uint64(b[2])<<16 | uint64(b[3])<<24 |
		uint64(b[4])<<32 | uint64(b[5])<<40 | uint64(b[6])<<48 | uint64(b[7])<<56
	return (((w ^ each*2) - each*0x21) | ((w ^ each*'\\') - each)) &^ w & top
}

// hex4 returns the value of four hexadecimal digits, -1 if there are not four.
func hex4(b []byte) rune {
	if len(b) < 4 {
		return -1
	}
	n, err := strconv.ParseUint(string(b[:4]), 16, 16)
	if err != nil {
		return -1
	}
	return rune(n)
}

// unquote resolves the escapes in what stands between the quotes of a string
// that was skipped.
func unquote(raw []byte) string {
	var t strings.Builder
	t.Grow(len(raw))
	for {
		n := bytes.IndexByte(raw, '\\')
		if n < 0 {
			t.Write(raw)
			return t.String()
		}
		t.Write(raw[:n])
		c := raw[n+1]
		raw = raw[n+2:]
		if c != 'u' {
			t.WriteByte(escapes[c])
			continue
		}
		r := hex4(raw)
		raw = raw[4:]
		if utf16.IsSurrogate(r) && len(raw) >= 6 && raw[0] == '\\' && raw[1] == 'u' {
			if r = utf16.DecodeRune(r, hex4(raw[2:])); r != utf8.RuneError {
				raw = raw[6:]
			}
		}
		t.WriteRune(r)
	}
}

// appendString appends s as a JSON string. Invalid UTF-8 becomes U+FFFD.
func appendString(dst []byte, s string) []byte {
	if !utf8.ValidString(s) {
		s = strings.Map(func(r rune) rune { return r }, s)
	}
	dst = append(dst, '"')
	for {
		i := special(s, 0)
		dst = append(dst, s[:i]...)
		if i == len(s) {
			return append(dst, '"')
		}
		if c := escapes[s[i]]; c != 0 {
			dst = append(dst, '\\', c)
		} else {
			const hex = "0123456789abcdef"
			dst = append(dst, '\\', 'u', '0', '0', hex[s[i]>>4], hex[s[i]&15])
		}
		s = s[i+1:]
	}
}

// appendValue appends v as JSON: maps (keys sorted), slices and scalars by
// hand, json.RawMessage checked, everything else through encoding/json. There
// is no newline in it. After an error dst is as it was.
func appendValue(dst []byte, v any) ([]byte, error) {
	b, err := appendAny(dst, v, wireDepth)
	if err != nil {
		return dst, err
	}
	return b, nil
}

func appendAny(dst []byte, v any, depth int) ([]byte, error) {
	if depth < 0 {
		return dst, errDepth // it may well hold itself
	}
	switch v := v.(type) {
	case nil:
		return append(dst, "null"...), nil
	case bool:
		return strconv.AppendBool(dst, v), nil
	case string:
		return appendString(dst, v), nil
	case int:
		return strconv.AppendInt(dst, int64(v), 10), nil
	case int64:
		return strconv.AppendInt(dst, v, 10), nil
	case uint64:
		return strconv.AppendUint(dst, v, 10), nil
	case float64:
		if a := math.Abs(v); a == 0 || 1e-6 <= a && a < 1e21 { // beyond, exponents
			return strconv.AppendFloat(dst, v, 'f', -1, 64), nil
		}
	case json.Number:
		if v != "" && skipNumber([]byte(v), 0) == len(v) {
			return append(dst, v...), nil
		}
	case json.RawMessage:
		if i := skip(v, 0, depth); i == len(v) && utf8.Valid(v) && bytes.IndexByte(v, '\n') < 0 && bytes.IndexByte(v, '\r') < 0 {
			return append(dst, v...), nil
		}
	case map[string]any:
		return appendMap(dst, v, depth)
	case map[string]string:
		return appendMap(dst, v, depth)
	case []any:
		return appendSlice(dst, v, depth)
	case []string:
		return appendSlice(dst, v, depth)
	}
	b, err := json.Marshal(v)
	return append(dst, bytes.ToValidUTF8(b, []byte("\uFFFD"))...), err
}

func appendMap[V any](dst []byte, m map[string]V, depth int) (_ []byte, err error) {
	if m == nil {
		return append(dst, "null"...), nil
	}
	var few [16]string
	keys := few[:0]
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	dst = append(dst, '{')
	for i, k := range keys {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(appendString(dst, k), ':')
		if dst, err = appendAny(dst, m[k], depth-1); err != nil {
			return dst, err
		}
	}
	return append(dst, '}'), nil
}

func appendSlice[V any](dst []byte, vs []V, depth int) (_ []byte, err error) {
	if vs == nil {
		return append(dst, "null"...), nil
	}
	dst = append(dst, '[')
	for i, v := range vs {
		if i > 0 {
			dst = append(dst, ',')
		}
		if dst, err = appendAny(dst, v, depth-1); err != nil {
			return dst, err
		}
	}
	return append(dst, ']'), nil
}

// roughSize is a guess at the length of v as JSON, which sees no deeper than the
// members of an object: long values are texts there.
func roughSize(v any) (n int) {
	switch v := v.(type) {
	case json.RawMessage:
		n = len(v)
	case map[string]any:
		for k, e := range v {
			n += len(k) + 16
			switch e := e.(type) {
			case string:
				n += len(e)
			case json.RawMessage:
				n += len(e)
			}
		}
	}
	return n
}

// appendRequest appends a request; params is a whole object or nil, as
// appendValue writes it: without newlines.
func appendRequest(dst []byte, id int64, method string, params []byte) []byte {
	dst = strconv.AppendInt(append(dst, `{"jsonrpc":"2.0","id":`...), id, 10)
	return appendMethod(append(dst, `,"method":`...), method, params)
}

// appendNotification appends a notification; params is a whole object or nil.
func appendNotification(dst []byte, method string, params []byte) []byte {
	return appendMethod(append(dst, `{"jsonrpc":"2.0","method":`...), method, params)
}

func appendMethod(dst []byte, method string, params []byte) []byte {
	dst = appendString(dst, method)
	if params != nil {
		dst = append(append(dst, `,"params":`...), params...)
	}
	return append(dst, '}')
}

// appendResponse appends the answer to a request of the server: the result, or
// the error's code and message if rpc is not nil.
func appendResponse(dst []byte, id json.RawMessage, result json.RawMessage, rpc *RPCError) []byte {
	dst = append(append(dst, `{"jsonrpc":"2.0","id":`...), id...)
	if rpc != nil {
		dst = strconv.AppendInt(append(dst, `,"error":{"code":`...), int64(rpc.Code), 10)
		dst = appendString(append(dst, `,"message":`...), rpc.Message)
		return append(dst, "}}"...)
	}
	if result == nil {
		result = json.RawMessage("null")
	}
	dst = append(append(dst, `,"result":`...), result...)
	return append(dst, '}')
}

// spares are what a session or a transport keeps of its longer buffers for its next
// messages: two for good, since a [sync.Pool] would lose them at every collection,
// and long messages bring those about; those over largestSpare as long as they are
// in use again and again.
type spares struct {
	large chan []byte
	huge  sync.Pool // of *[]byte
}

const ( // between which a buffer is worth keeping for good
	smallestSpare = 16 << 10
	largestSpare  = 4 << 20
)

func newSpares() *spares { return &spares{large: make(chan []byte, 2)} }

// take returns an empty buffer with room for n bytes.
func (s *spares) take(n int) (b []byte) {
	if n > largestSpare {
		if p, ok := s.huge.Get().(*[]byte); ok {
			return slices.Grow((*p)[:0], n)
		}
		return make([]byte, 0, n)
	}
	select {
	case b = <-s.large:
	default:
	}
	return slices.Grow(b[:0], n)
}

// give takes a buffer back, which nobody uses any more.
func (s *spares) give(b []byte) {
	switch {
	case cap(b) < smallestSpare:
	case cap(b) > largestSpare:
		s.huge.Put(&b)
	default:
		select {
		case s.large <- b:
		default:
		}
	}
}

// grow returns a buffer with room for n bytes and with what is in b, which it takes
// back. A nil s keeps nothing.
func (s *spares) grow(b []byte, n int) []byte {
	if s == nil {
		return slices.Grow(b, n-len(b))
	}
	bigger := append(s.take(n), b...)
	s.give(b)
	return bigger
}

// buffers are spares, and any number of small ones beside them.
type buffers struct {
	*spares
	small sync.Pool // of *[]byte
}

// take returns an empty buffer with room for n bytes: a large one if there is one,
// since the length of a message is rarely known beforehand.
func (b *buffers) take(n int) *[]byte {
	p, _ := b.small.Get().(*[]byte)
	if p == nil {
		p = new([]byte)
	}
	if n > cap(*p) || len(b.large) > 0 {
		*p = b.spares.take(n)
	}
	*p = (*p)[:0]
	return p
}

// give takes a buffer back, which nobody uses any more.
func (b *buffers) give(p *[]byte) {
	if cap(*p) >= smallestSpare {
		b.spares.give(*p)
		*p = nil
	}
	b.small.Put(p)
}
