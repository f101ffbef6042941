package mcp

// The texts of schemas: values in a form that equal ones share; numbers, patterns and formats as they are
// read; what is said of a value that does not fit, to a model and to the host, and the repairs that may be
// made; names, cut and quoted, as whatever comes from a schema is. And, as they are long and few schemas
// have them, the unevaluated keywords. The two files refer to no other of the package.

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/big"
	"net/netip"
	"net/url"
	"reflect"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// among reports whether x, which is of a kind, is one of the choices.
func (c *checker) among(e *choice, kind kinds, x any) bool {
	if e.kinds&kind == 0 {
		return false
	} else if s, ok := x.(string); ok {
		return e.texts[s]
	}
	var buf [64]byte
	return e.forms[string(c.canon(buf[:0], x, 0))]
}

// canon appends a form of x that equal values share, and no others.
func (c *checker) canon(b []byte, x any, depth int) []byte {
	if c.left--; depth > c.deepest {
		c.stop("nesting")
	}
	if c.left < 0 {
		return b
	}
	x, ok := plainValue(x)
	if !ok {
		c.stop("value")
	}
	switch v := x.(type) {
	case bool:
		return strconv.AppendBool(b, v)
	case string:
		c.left -= len(v) >> 6
		return append(append(strconv.AppendInt(append(b, 's'), int64(len(v)), 10), ':'), v...)
	case json.Number:
		c.left -= len(v) >> 4
		d, ok := parseDecimal(string(v))
		if !ok {
			c.stop("number-range")
		}
		b = d.appendDigits(append(b, 'd', byte('1'+d.sign)))
		return append(strconv.AppendInt(append(b, 'e'), int64(d.top), 10), ';')
	case []any:
		b = append(b, '[')
		for _, x := range v {
			b = c.canon(b, x, depth+1)
		}
		return append(b, ']')
	case map[string]any:
		b = append(b, '{')
		for _, name := range keysOf(v) {
			b = c.canon(c.canon(b, name, depth), v[name], depth+1)
		}
		return append(b, '}')
	}
	return append(b, '0')
}

// twins returns the first two equal items, zeroes if there are none: pair by pair while that is cheap,
// else through a table.
func (c *checker) twins(v []any) (int, int) {
	var few [16][]byte
	var buf [256]byte
	var seen map[string]int
	if len(v) > len(few) {
		c.left -= len(v) // a table has its price before its first item
		seen = make(map[string]int, min(len(v), max(c.left, 0)))
	}
	for b, j := buf[:0], 0; j < len(v) && c.left >= 0; j++ {
		start := len(b)
		b = c.canon(b, v[j], 0)
		form := b[start:]
		if seen == nil {
			if i := slices.IndexFunc(few[:j], func(f []byte) bool { return bytes.Equal(f, form) }); i >= 0 {
				return i, j
			}
			few[j] = form
		} else if i, ok := seen[string(form)]; ok {
			return i, j
		} else {
			seen[string(form)] = j
			b = b[:start]
		}
	}
	return 0, 0
}

// marks are the items and members that the schemas in place have evaluated. They are made only for a
// node that asks: nobody else pays.
type marks struct {
	all   bool
	items []bool
	names map[string]bool
}

// unevaluated checks what no schema in place has evaluated.
func (c *checker) unevaluated(n *node, x any) bool {
	list, _ := x.([]any)
	members, _ := x.(map[string]any)
	c.left -= len(list) >> 6
	m := marks{items: make([]bool, len(list)), names: map[string]bool{}}
	if c.mark(n, x, &m, true); m.all {
		return c.left >= 0
	}
	for i, x := range list {
		if !m.items[i] && n.restItems != nil && !inside(c, n.restItems, x, i) {
			return false
		}
	}
	for _, name := range keysOf(members) {
		if !m.names[name] && n.restProps != nil && !c.extra(n, "unevaluatedProperties", n.restProps, name, members[name]) {
			return false
		}
	}
	return c.left >= 0
}

// mark collects what n evaluates of x, which fits n. The unevaluated keywords of the node that asks do
// not count for itself.
func (c *checker) mark(n *node, x any, m *marks, asks bool) {
	if c.left--; c.left < 0 || m.all {
		return
	}
	inPlace := slices.Clone(n.all)
	switch v := x.(type) {
	case []any:
		c.left -= len(v) >> 6
		m.all = n.items != nil || n.restItems != nil && !asks
		for i := range v {
			m.items[i] = m.items[i] || i < len(n.prefix) || n.contains != nil && c.try(n.contains, v[i])
		}
	case map[string]any:
		m.all = n.additional != nil || n.open || n.restProps != nil && !asks
		for name := range v {
			if c.left--; c.meant(n, name) {
				m.names[name] = true
			}
		}
		for _, d := range n.needs {
			if _, has := v[d.name]; has {
				inPlace = append(inPlace, d.node)
			}
		}
	}
	for _, s := range slices.Concat(n.any, n.one) {
		if c.try(s, x) {
			inPlace = append(inPlace, s)
		}
	}
	if n.cond != nil && c.try(n.cond, x) {
		inPlace = append(inPlace, n.cond, n.then)
	} else {
		inPlace = append(inPlace, n.els)
	}
	for _, s := range inPlace {
		if s != nil {
			c.mark(s, x, m, false)
		}
	}
}

// meant reports whether properties or patternProperties have a word on a name.
func (c *checker) meant(n *node, name string) bool {
	return n.declared(name) != nil || slices.ContainsFunc(n.patterns, func(p patternProperty) bool { return c.match(p.pattern, name) })
}

// explain says where and why a value does not fit. With quote it is for the model that made the value;
// without, neither values nor the schema's own words enter what is wanted and got.
func (s *schema) explain(v any, quote bool) (issues []Issue, more bool) {
	ex := &explainer{quote: quote, most: s.limits.issues}
	c := checker{left: s.limits.work, deepest: s.limits.valueNesting, ex: ex}
	c.check(s.root, v)
	switch {
	case c.fault == "nesting":
		ex.add(Issue{ex.path, c.fault, fmt.Sprintf("at most %d levels of nesting", c.deepest), "more", ""})
	case c.fault == "number-range":
		ex.add(Issue{ex.path, c.fault, fmt.Sprintf("a number with at most %d digits", maxDigits), "a longer one", ""})
	case c.fault == "value":
		ex.add(Issue{ex.path, c.fault, "a JSON value", "something else", ""})
	case c.left < 0 && len(ex.issues) == 0: // the work is spent
		ex.add(Issue{ex.path, "schema", "a value that fits the schema", kindOf(v).String(), ""})
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
	if e.more = e.more || len(e.issues) == e.most; !e.more {
		e.issues = append(e.issues, is)
	}
}

// note adds an issue, about what is at a path. Work is charged for it, so that no schema can have an
// endless tale told.
func (c *checker) note(n *node, kw, path, want, got string) bool {
	c.misfits++
	if c.left -= 16; c.left >= 0 {
		place := n.path + "/" + kw
		if n.types == 0 { // the schema false, which has no keywords
			kw, place = "false", n.path
		}
		c.ex.add(Issue{path, kw, c.ex.as + want, got, place})
	}
	return c.left >= 0 && !c.ex.more
}

// miss notes that x does not fit a keyword of n, or that there is something about a member: the first of
// the names.
func (c *checker) miss(n *node, kw string, x any, names ...string) bool {
	if c.ex == nil {
		return false
	}
	path := c.ex.path
	if names != nil && (c.ex.quote || kw == "required" || len(names) > 1) { // other names are the result's own
		path = joinPath(path, names[0])
	}
	want, got := c.phrase(n, kw, x, names)
	return c.note(n, kw, path, want, got)
}

// extra checks a member that nothing declares.
func (c *checker) extra(n *node, kw string, sub *node, name string, x any) bool {
	if sub.types == 0 {
		return c.miss(n, kw, x, name)
	}
	return inside(c, sub, x, name)
}

// unknown words what is said of a member that may not be.
func (c *checker) unknown(n *node, name string) string {
	if !c.ex.quote {
		return "no member of this name"
	}
	var known []string
	for i := 0; i < len(n.props) && c.left >= 0; i++ {
		p := &n.props[i]
		if p.node == nil {
			continue
		} else if c.left -= 1 + len(name)*len(p.name)>>5; similarNames(name, p.name) {
			return "unknown argument (did you mean " + quoteText(p.name) + "?)"
		}
		known = append(known, p.name)
	}
	if known == nil {
		return "unknown argument"
	}
	return "unknown argument; known: " + listText(known, 12, quoteText)
}

// unfit explains a union that nothing fits by its nearest branch alone: the one whose tag matches, else
// whose type does, else the one with the fewest issues.
func (c *checker) unfit(n *node, kw string, group []*node, x any) bool {
	ex, depth := c.ex, c.depth
	if ex == nil || c.left < 0 {
		return false
	}
	kind := kindOf(x)
	near := slices.DeleteFunc(slices.Clone(group), func(s *node) bool { return s.admits&kind == 0 })
	if len(near) == 0 {
		return c.note(n, kw, ex.path, admitted(group).String(), ex.value(x, true))
	}
	if !slices.ContainsFunc(near, func(s *node) bool { return s.con == nil && s.enum == nil }) { // the nearest alone would mislead
		all := new(choice)
		for _, s := range near {
			all.values = append(all.values, cmp.Or(s.con, s.enum).values...)
		}
		c.left -= len(all.values) >> 4
		return c.note(n, kw, ex.path, ex.wants(&node{enum: all}), ex.value(x, false))
	}
	as := ex.as
	if hit, tag, values := c.nearTag(near, x); hit != nil {
		if near = []*node{hit}; ex.quote {
			as = "(as " + quoteText(tag) + ") " // instead of that around it: unions may lie in unions without end
		}
	} else if len(values) > 0 && ex.quote {
		return c.note(n, kw, joinPath(ex.path, tag), "one of "+listText(values, maxChoices, quoteValue), ex.value(x.(map[string]any)[tag], false))
	}
	var best *explainer
	for _, s := range near {
		c.ex = &explainer{path: ex.path, as: as, quote: ex.quote, most: ex.most}
		if c.check(s, x); best == nil || len(c.ex.issues) < len(best.issues) && c.left >= 0 {
			best = c.ex
		}
		c.depth = depth // a walk that has no more room may end anywhere
	}
	c.ex = ex
	for _, is := range best.issues {
		ex.add(is)
	}
	ex.more = ex.more || best.more
	return c.left >= 0 && !ex.more
}

// admitted returns the types that one of the schemas admits, if there are any.
func admitted(group []*node) (k kinds) {
	if group == nil {
		return kindAny
	}
	for _, s := range group {
		k |= s.admits
	}
	return k
}

// nearTag finds the branch whose tag, a property with a const or an enum, has the value that x has. If
// no branch has it, tag is the name of the first tag that x has, and values are those it may have.
func (c *checker) nearTag(group []*node, x any) (hit *node, tag string, values []any) {
	m, _ := x.(map[string]any)
	for _, s := range group {
		for len(s.all) == 1 && s.props == nil {
			s = s.all[0]
		}
		for _, p := range s.props {
			got, given := m[p.name].(string)
			if c.left--; !given || p.node == nil {
				continue
			}
			switch may := cmp.Or(p.node.con, p.node.enum); {
			case may == nil:
			case may.texts[got]:
				return s, got, nil
			case values == nil || tag == p.name:
				c.left -= len(may.values) >> 4
				tag, values = p.name, append(values, may.values...)
			}
		}
	}
	return nil, tag, values
}

// phrase words what a keyword wants and what it got.
func (c *checker) phrase(n *node, kw string, x any, names []string) (want, got string) {
	two, _ := x.([2]int)
	switch kw {
	case "required":
		if sub := n.declared(names[0]); sub != nil && sub.admits != kindAny && sub.admits != 0 {
			return "required " + sub.admits.String() + ", missing", ""
		}
		return "required, missing", ""
	case "dependentRequired", "dependencies":
		if c.ex.quote {
			return "needed because " + quoteText(names[1]) + " is given", ""
		}
		return "needed because of another member", ""
	case "additionalProperties", "unevaluatedProperties":
		return c.unknown(n, names[0]), ""
	case "propertyNames":
		ex := c.ex
		c.ex = &explainer{quote: true, most: 1}
		c.check(n.names, names[0])
		issues := c.ex.issues
		if c.ex = ex; !ex.quote || len(issues) == 0 {
			return "an allowed name", ""
		}
		return "as its name " + issues[0].Want, quoteText(names[0])
	case "minLength", "maxLength":
		return spanText(n.minLength, n.maxLength, "character"), strconv.Itoa(utf8.RuneCountInString(x.(string)))
	case "minItems", "maxItems":
		return spanText(n.minItems, n.maxItems, "item"), strconv.Itoa(len(x.([]any)))
	case "minProperties", "maxProperties":
		return spanText(n.minMembers, n.maxMembers, "member"), strconv.Itoa(len(x.(map[string]any)))
	case "uniqueItems":
		return fmt.Sprintf("items %d and %d are equal", two[0], two[1]), ""
	case "oneOf": // people count shapes from one
		return fmt.Sprintf("fits more than one of the allowed shapes (%d and %d); remove what does not belong", two[0]+1, two[1]+1), ""
	case "contains":
		return spanText(n.minContains, n.maxContains, "item") + " of the kind that must be there", strconv.Itoa(x.(int))
	case "format":
		return n.formatName + " such as " + schemaFormats[n.formatName].sample, c.ex.value(x, false)
	case "pattern":
		if c.ex.quote {
			return "text matching " + quoteText(n.pattern.text), c.ex.value(x, false)
		}
		return "text matching the pattern", c.ex.value(x, false)
	}
	if kw == "not" || n.types == 0 {
		return "not allowed here", ""
	}
	return c.ex.wants(n), c.ex.value(x, kw == "type")
}

// wants describes what a node takes: its choices, or its types with their bounds.
func (e *explainer) wants(n *node) string {
	switch may := cmp.Or(n.con, n.enum); {
	case may == nil:
	case !e.quote:
		return "one of the allowed values"
	case len(may.values) == 1:
		return quoteValue(may.values[0])
	default:
		return "one of " + listText(may.values, maxChoices, quoteValue)
	}
	s, and := n.types.String(), " "
	if n.types == kindAny {
		s = "number" // where only numbers are bounded
	}
	for i, d := range []*decimal{n.min, n.above, n.max, n.below, n.step} {
		if d != nil {
			s, and = s+and+[]string{"≥ ", "> ", "≤ ", "< ", "a multiple of "}[i]+cutAt(d.text, maxQuote), " and "
		}
	}
	if n.types == kindString && n.formatName != "" {
		s += " in " + n.formatName + " form, such as " + schemaFormats[n.formatName].sample
	}
	return s
}

// spanText words a range of sizes.
func spanText(low, high int, unit string) string {
	if high != 1 && (high < math.MaxInt || low != 1) {
		unit += "s"
	}
	switch {
	case high == math.MaxInt:
		return fmt.Sprintf("at least %d %s", low, unit)
	case low == 0:
		return fmt.Sprintf("at most %d %s", high, unit)
	}
	return fmt.Sprintf("%d to %d %s", low, high, unit)
}

// value shows what was given: its type alone if it is large or must not be shown.
func (e *explainer) value(x any, typed bool) string {
	kind := kindOf(x)
	if kind == kindInteger {
		kind = kindNumber
	}
	s := kind.String()
	if !e.quote || kind == kindNull || kind > kindString {
		return s
	} else if typed {
		return quoteValue(x) + " (" + s + ")"
	}
	return quoteValue(x)
}

// feedback is what a model reads about arguments that do not fit. All of it is in our words; names and
// values are quoted and cut.
func feedback(tool string, issues []Issue, more bool) string {
	text := "Arguments for tool " + quoteText(tool) + " do not fit its input schema; nothing was sent.\n"
	tail := "Correct these and call " + plainText(tool, maxQuote) + " again.\n"
	for _, is := range issues {
		line := "- " + cmp.Or(plainText(is.Path, maxPath), "(all of it)") + ": " + is.words() + "\n"
		if len(text)+len(line)+len("- and more\n")+len(tail) > maxFeedback {
			more = true
			break
		}
		text += line
	}
	if more {
		text += "- and more\n"
	}
	return text + tail
}

// words is an issue without its place. Which shape of a union it is about stands first.
func (is Issue) words() string {
	if is.Got == "" {
		return is.Want
	}
	as := regexp.MustCompile(`^\(as "(\\.|[^"\\])*"\) `).FindString(is.Want)
	return as + "want " + is.Want[len(as):] + ", got " + is.Got
}

// normalize repairs arguments that almost fit, where they can be read in one way only. The result is v
// itself unless the repaired whole fits; v is never changed. For a destructive tool only nulls are
// dropped and scalars reread, which cannot change a meaning.
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
	careful bool
	changes []Issue
}

// repair returns x as n would have it, or x.
func (r *repairer) repair(n *node, x any, path string) any {
	if r.try(n, x) || r.left < 0 {
		return x
	}
	switch v := x.(type) {
	case string:
		if y, what := r.reread(n, v); what != "" && r.try(n, y) {
			r.changes = append(r.changes, Issue{path, "type", what, quoteText(v), n.path})
			return y
		}
	case []any:
		r.left -= 2 * len(v)
		list := slices.Clone(v)
		for i := range list {
			if sub := n.ofItem(i); sub != nil {
				list[i] = r.repair(sub, list[i], joinPath(path, strconv.Itoa(i)))
			}
		}
		x = list
	case map[string]any:
		r.left -= 8 * len(v) // to copy and to sort them
		x = r.members(n, maps.Clone(v), path)
	}
	for _, s := range n.all {
		x = r.repair(s, x, path)
	}
	return r.branch(n.one, r.branch(n.any, x, path), path)
}

// members repairs the members of an object, which is ours.
func (r *repairer) members(n *node, v map[string]any, path string) map[string]any {
	for _, name := range keysOf(v) {
		i, found := n.find(name)
		sub, at := n.declared(name), joinPath(path, name)
		if sub == nil && !n.open && !r.meant(n, name) {
			sub = n.additional
		}
		if sub == nil {
			continue
		} else if found && !n.props[i].required && kindOf(v[name]) == kindNull && !r.try(sub, nil) {
			r.changes = append(r.changes, Issue{at, "type", "null dropped", "null", sub.path})
			delete(v, name)
		} else {
			v[name] = r.repair(sub, v[name], at)
		}
	}
	return v
}

// branch repairs x by the one branch of a union that then fits.
func (r *repairer) branch(group []*node, x any, path string) any {
	out, hits, before, changes := x, 0, len(r.changes), []Issue(nil)
	for _, s := range group {
		if y := r.repair(s, x, path); r.try(s, y) {
			out, hits, changes = y, hits+1, slices.Clone(r.changes[before:])
		}
		r.changes = r.changes[:before]
	}
	if hits != 1 {
		return x
	}
	r.changes = append(r.changes, changes...)
	return out
}

// reread reads text as the value that n wants in its place.
func (r *repairer) reread(n *node, text string) (y any, what string) {
	if n.admits&kindString == 0 {
		r.left -= len(text) >> 2 // decoding costs more than looking
		y, ok := decodeJSON([]byte(text))
		kind := kindOf(y)
		exact := len(text)-strings.Count(text, "-")-strings.Count(text, ".") <= 15 && text == strings.TrimSpace(text) // beyond, readers differ
		if ok && kind&n.admits != 0 && (kind <= kindNumber && kind != kindNull && exact || kind > kindString && !r.careful) {
			return y, "text read as " + kind.String()
		}
		return nil, ""
	}
	if n.enum == nil || r.careful {
		return nil, ""
	}
	for value := range n.enum.texts {
		if strings.EqualFold(strings.TrimSpace(value), strings.TrimSpace(text)) {
			if what != "" {
				return nil, "" // two readings
			}
			y, what = value, "case or space mended"
		}
	}
	return y, what
}

// A decimal is a number as JSON writes it: exact, and compared without allocating.
type decimal struct {
	text     string
	sign     int
	digits   string // from the first that is not 0 to the last; may hold the point
	top, low int    // exponents of the first and of the last of digits
}

// parseDecimal reports whether text is a JSON number within maxDigits.
func parseDecimal(text string) (d decimal, ok bool) {
	d.text, d.sign = text, 1
	s, negative := strings.CutPrefix(text, "-")
	if negative {
		d.sign = -1
	}
	end, point, first, last := 0, -1, -1, -1 // places in s; first and last are of digits that are not 0
	for ; end < len(s) && s[end]|0x20 != 'e'; end++ {
		switch b := s[end]; {
		case b == '.' && point < 0 && end > 0:
			point = end
		case b < '0' || b > '9':
			return d, false
		case b != '0':
			if last = end; first < 0 {
				first = end
			}
		}
	}
	e, err, n := 0, error(nil), end-1
	if point < 0 {
		point, n = end, end
	}
	if end < len(s) {
		e, err = strconv.Atoi(s[end+1:])
	}
	if err != nil || n < 1 || n > maxDigits || e > maxDigits || e < -maxDigits {
		return d, false
	} else if first < 0 {
		return decimal{text: text}, true
	}
	exponent := func(place int) int {
		if place < point {
			place++
		}
		return point - place + e
	}
	d.digits, d.top, d.low = s[first:last+1], exponent(first), exponent(last)
	return d, true
}

func (d *decimal) kind() kinds {
	if d.low >= 0 {
		return kindInteger
	}
	return kindNumber
}

func (d *decimal) appendDigits(b []byte) []byte {
	whole, part, _ := strings.Cut(d.digits, ".")
	return append(append(b, whole...), part...)
}

func (d *decimal) cmp(o *decimal) int {
	if d.sign != o.sign || d.sign == 0 {
		return cmp.Compare(d.sign, o.sign)
	} else if d.top != o.top {
		return d.sign * cmp.Compare(d.top, o.top)
	}
	var x, y [64]byte
	return d.sign * bytes.Compare(d.appendDigits(x[:0]), o.appendDigits(y[:0]))
}

// multiple reports whether d is a multiple of o, which is positive.
func (d *decimal) multiple(o *decimal) bool {
	if d.sign == 0 || d.low < o.low { // the last digit is not 0, so no multiple of o ends further right
		return d.sign == 0
	}
	zeros := d.low - o.low
	if len(o.digits) <= 18 {
		return d.mod(zeros, o.mod(0, math.MaxInt64)) == 0
	}
	x, _ := new(big.Int).SetString(string(d.appendDigits(nil))+strings.Repeat("0", zeros), 10)
	y, _ := new(big.Int).SetString(string(o.appendDigits(nil)), 10)
	return x.Rem(x, y).Sign() == 0
}

// mod returns what the digits, and zeros after them, leave when divided by m. Neither the rest nor m may
// pass 18 digits.
func (d *decimal) mod(zeros int, m uint64) (rest uint64) {
	for i := range len(d.digits) {
		if b := d.digits[i]; b != '.' {
			rest = (rest*10 + uint64(b-'0')) % m
		}
	}
	for range zeros {
		rest = rest * 10 % m
	}
	return rest
}

// ECMA-262 white space, as the inside of a class, and its complement.
const (
	ecmaSpace    = `\t\n\v\f\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}`
	ecmaNotSpace = `\x{0}-\x{8}\x{e}-\x{1f}!-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027}\x{202a}-\x{202e}` +
		`\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{fefe}\x{ff00}-\x{10ffff}`
)

// A pattern is a regular expression of a schema, in RE2.
type pattern struct {
	*regexp.Regexp
	text         string
	size, weight int // instructions, about; and what it took to compile them
}

var errPattern = errors.New("pattern that RE2 cannot hold")

// compilePattern translates a pattern, and weighs it before it is paid for.
func compilePattern(text string, longest, largest int) (*pattern, error) {
	if len(text) > longest {
		return nil, errors.New("pattern too long")
	}
	re, ok := translatePattern(text)
	tree, err := syntax.Parse(re, syntax.Perl)
	if !ok || err != nil {
		return nil, errPattern
	}
	size, ranges := programSize(tree)
	if size > largest {
		return nil, errors.New("pattern too large")
	}
	compiled, err := regexp.Compile(re)
	if err != nil {
		return nil, errPattern
	}
	return &pattern{compiled, text, size, size + ranges/4}, nil
}

// programSize estimates how many instructions a pattern takes, repeats counted out, before they are
// built: a short pattern may count far. It counts the ranges of characters in classes, too.
func programSize(re *syntax.Regexp) (size, ranges int) {
	size = max(1, len(re.Sub))
	switch re.Op {
	case syntax.OpLiteral:
		size = len(re.Rune)
	case syntax.OpCharClass:
		ranges = len(re.Rune) / 2
	}
	for _, sub := range re.Sub {
		s, r := programSize(sub)
		size, ranges = size+s, ranges+r
	}
	if re.Op == syntax.OpRepeat {
		size *= max(re.Max, re.Min+1)
	}
	return min(size, 1<<20), ranges // and so sums and products of such fit an int
}

// translatePattern spells an ECMA-262 pattern in RE2's syntax. Look-around and back-references have no
// spelling there.
func translatePattern(p string) (re string, ok bool) {
	class := false
	var b strings.Builder
	for i := 0; i < len(p); {
		rest, out, n := p[i:], p[i:i+1], 1
		switch {
		case rest[0] == '\\':
			if out, n = translateEscape(rest, class); n == 0 {
				return "", false
			}
		case class && rest[0] == '[', !class && rest[0] == ']':
			out = `\` + out
		case class:
			class = rest[0] != ']'
		case strings.HasPrefix(rest, "[^]"):
			out, n = `[\x{0}-\x{10ffff}]`, 3
		case strings.HasPrefix(rest, "[]"):
			out, n = `[^\x{0}-\x{10ffff}]`, 2
		case strings.HasPrefix(rest, "[^"):
			out, n, class = "[^", 2, true
		case rest[0] == '[':
			class = true
		case rest[0] == '.':
			out = `[^\n\r\x{2028}\x{2029}]`
		case strings.HasPrefix(rest, "(?<=") || strings.HasPrefix(rest, "(?<!"):
			return "", false
		case strings.HasPrefix(rest, "(?") && !strings.HasPrefix(rest, "(?<") && !strings.HasPrefix(rest, "(?:"):
			return "", false
		}
		b.WriteString(out)
		i += n
	}
	return b.String(), true
}

// translateEscape translates the escape that p begins with, n bytes of it; none if RE2 would give it a
// meaning that it lacks, or has none for it.
func translateEscape(p string, class bool) (out string, n int) {
	p += "\x00\x00" // so that two more bytes can be looked at
	switch e, next := p[1], p[2]; {
	case e == 's' && !class:
		return "[" + ecmaSpace + "]", 2
	case e == 'S' && !class:
		return "[^" + ecmaSpace + "]", 2
	case (e == 's' || e == 'S') && next == '-': // no range can begin with a set
		out, _ = translateEscape(p[:2], true)
		return out + `\-`, 3
	case e == 's':
		return ecmaSpace, 2
	case e == 'S':
		return ecmaNotSpace, 2
	case e == 'c' && (next|0x20 >= 'a' && next|0x20 <= 'z'):
		return fmt.Sprintf(`\x%02x`, next&0x1f), 3
	case e == 'u' && next == '{':
		end := strings.IndexByte(p, '}') + 1
		return `\x` + p[2:max(end, 2)], end
	case e == 'u':
		r, ok := hexRune(p[2:])
		low, _ := strings.CutPrefix(p[min(6, len(p)):], `\u`)
		if half, isHalf := hexRune(low); ok && isHalf && p[6] == '\\' && utf16.DecodeRune(r, half) != utf8.RuneError {
			return fmt.Sprintf(`\x{%x}`, utf16.DecodeRune(r, half)), 12
		} else if ok {
			return fmt.Sprintf(`\x{%x}`, r), 6
		}
	case e == '0' && (next < '0' || next > '9'):
		return `\x00`, 2
	case e == 'b' && class:
		return `\x08`, 2
	case (e == 'p' || e == 'P') && next == '{', e == 'x' && next != '{', strings.IndexByte("dDwWbBfnrtv", e) >= 0:
		return p[:2], 2
	case e > ' ' && e < 0x7f && (e < '0' || e > '9') && (e|0x20 < 'a' || e|0x20 > 'z'):
		return `\` + string(e), 2
	}
	return "", 0
}

func hexRune(s string) (rune, bool) {
	r, err := strconv.ParseUint(s[:min(4, len(s))], 16, 16)
	return rune(r), err == nil && len(s) >= 4
}

// Pieces of the grammars of RFC 3339, 3986 and 5321.
const (
	reTime    = `\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)`
	reLabel   = `[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?`
	reHost    = reLabel + `(\.` + reLabel + `)*`
	reAtom    = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
	reNoColon = `([A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})`
	rePchar   = `(:|` + reNoColon + `)`
	reName    = `([A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*`
	reAuth    = `//((` + reName + `|:)*@)?(\[[0-9A-Fa-f:.]+\]|` + reName + `)(:\d*)?(/` + rePchar + `*)*`
	rePath    = `(` + reAuth + `|/(` + rePchar + `+(/` + rePchar + `*)*)?|` // and a path without a root, or none
	reTail    = `+(/` + rePchar + `*)*)?(\?(/|\?|` + rePchar + `)*)?(#(/|\?|` + rePchar + `)*)?`
	reURI     = `[A-Za-z][A-Za-z0-9+.-]*:` + rePath + rePchar + reTail
)

// schemaFormats are those that can be asserted: by grammar, check, or both.
var schemaFormats = map[string]struct {
	sample, grammar string
	check           func(string) bool
}{
	"date-time": {"2025-11-25T10:20:30Z", `\d{4}-\d\d-\d\d[Tt]` + reTime, func(s string) bool { return isDate(s[:10]) && isTime(s[11:]) }},
	"date":      {"2025-11-25", `\d{4}-\d\d-\d\d`, isDate},
	"time":      {"10:20:30Z", reTime, isTime},
	"duration": {"P1DT12H", `P(\d+W|(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)?(T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S))?)`,
		func(s string) bool { return s != "P" }},
	"email":         {"name@example.com", `(` + reAtom + `(\.` + reAtom + `)*|"([^"\\]|\\.)*")@(` + reHost + `|\[.+\])`, isEmail},
	"uri":           {"https://example.com/a", reURI, isURI},
	"uri-reference": {"/a?b#c", reURI + `|` + rePath + reNoColon + reTail, isURI},
	"uuid":          {"123e4567-e89b-12d3-a456-426614174000", `[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}`, nil},
	"ipv4":          {"192.0.2.1", `[\d.]+`, func(s string) bool { _, err := netip.ParseAddr(s); return err == nil }},
	"ipv6":          {"2001:db8::1", `[0-9A-Fa-f:.]+`, func(s string) bool { a, _ := netip.ParseAddr(s); return a.Is6() }},
	"hostname":      {"example.com", reHost, func(s string) bool { return len(s) <= 253 }},
	"json-pointer":  {"/a/0", `(/([^~/]|~[01])*)*`, nil},
	"regex":         {"^a+$", `[^]{0,1000}`, isRegexp}, // a long program, for what the check costs
}

func isDate(s string) bool {
	_, err := time.Parse(time.DateOnly, s)
	return err == nil
}

// isTime checks what the grammar leaves open: ranges, and that a leap second ends a day of UTC.
func isTime(s string) bool {
	leap := s[6:8] == "60"
	if leap {
		s = s[:6] + "59" + s[8:]
	}
	t, err := time.Parse("15:04:05Z07:00", strings.ToUpper(s))
	return err == nil && (!leap || t.UTC().Hour() == 23 && t.UTC().Minute() == 59)
}

// isEmail checks an address literal for a domain.
func isEmail(s string) bool {
	host := s[strings.LastIndexByte(s, '@')+1:]
	literal, is6 := strings.CutPrefix(strings.Trim(host, "[]"), "IPv6:")
	a, err := netip.ParseAddr(literal)
	return host[0] != '[' && len(host) <= 253 || err == nil && a.Is6() == is6 && a.Zone() == ""
}

// isURI checks an address literal for a host. The grammar has a bracket nowhere else.
func isURI(s string) bool {
	_, literal, found := strings.Cut(s, "[")
	literal, _, _ = strings.Cut(literal, "]")
	a, _ := netip.ParseAddr(literal)
	return !found || a.Is6()
}

// isRegexp lets look-around and back-references pass: they are regular expressions, which we cannot
// judge.
func isRegexp(s string) bool {
	s = regexp.MustCompile(`\(\?(<?[=!])`).ReplaceAllString(s, "(?:")
	s = regexp.MustCompile(`\\[1-9]|\\k<\w+>`).ReplaceAllString(s, "")
	_, err := compilePattern(s, 4<<10, 10_000)
	return err == nil
}

// decodeJSON decodes exactly one value, numbers as they are written. It does what a [json.Decoder] with
// UseNumber does, in less time, and decoding is a good part of the time that a schema takes.
func decodeJSON(b []byte) (v any, ok bool) {
	if !json.Valid(b) {
		return nil, false
	}
	return (&valueReader{b: b}).value(1), true
}

// A valueReader decodes text that is known to be valid. So commas and colons say nothing new: they are
// skipped like white space.
type valueReader struct {
	b       []byte
	i       int
	deepest int // level that was reached
}

// next returns the next byte that says something.
func (r *valueReader) next() byte {
	for r.b[r.i] <= ' ' || r.b[r.i] == ',' || r.b[r.i] == ':' {
		r.i++
	}
	return r.b[r.i]
}

// value returns the next value, which stands at a level.
func (r *valueReader) value(level int) any {
	switch r.next() {
	case '{':
		r.deepest = max(r.deepest, level)
		m := map[string]any{}
		for r.i++; r.next() != '}'; {
			name := r.text()
			m[name] = r.value(level + 1)
		}
		r.i++
		return m
	case '[':
		r.deepest = max(r.deepest, level)
		list := []any{}
		for r.i++; r.next() != ']'; {
			list = append(list, r.value(level+1))
		}
		r.i++
		return list
	case '"':
		return r.text()
	}
	start := r.i
	for ; r.i < len(r.b); r.i++ {
		if ch := r.b[r.i]; ch <= ' ' || ch == ',' || ch == ']' || ch == '}' {
			break
		}
	}
	switch word := r.b[start:r.i]; string(word) {
	case "true", "false":
		return len(word) == len("true")
	case "null":
		return nil
	default:
		return json.Number(word)
	}
}

// text returns a string, which begins here.
func (r *valueReader) text() (s string) {
	start, plain := r.i, true
	for r.i++; r.b[r.i] != '"'; r.i++ {
		if ch := r.b[r.i]; ch == '\\' {
			r.i++
			plain = false
		} else if ch >= utf8.RuneSelf {
			plain = false // may not be UTF-8
		}
	}
	if r.i++; plain {
		return string(r.b[start+1 : r.i-1])
	}
	_ = json.Unmarshal(r.b[start:r.i], &s) // valid, as all of it is
	return s
}

// resolveURI resolves a reference and splits off its fragment.
func resolveURI(base, ref string) (uri, fragment string, ok bool) {
	if fragment, ok = strings.CutPrefix(ref, "#"); ok && !strings.Contains(fragment, "%") {
		return base, fragment, true
	} else if len(base)+len(ref) > maxPointer {
		return "", "", false
	}
	u, err := url.Parse(base)
	if err == nil {
		u, err = u.Parse(ref)
	}
	if err != nil {
		return "", "", false
	}
	fragment, u.Fragment, u.RawFragment = u.Fragment, "", ""
	return u.String(), fragment, true
}

// plainValue turns what a caller may have built by hand into what a decoder yields.
func plainValue(x any) (any, bool) {
	switch v := x.(type) {
	case nil, bool, string, json.Number:
		return x, true
	case []any:
		if v != nil { // else it is written as null
			return x, true
		}
	case map[string]any:
		if v != nil {
			return x, true
		}
	case int:
		return json.Number(strconv.Itoa(v)), true
	}
	b, err := json.Marshal(x)
	if err != nil {
		return nil, false
	}
	return decodeJSON(b)
}

// kindOf returns the type of a value, an integer's if it is one.
func kindOf(x any) kinds {
	x, _ = plainValue(x)
	switch v := x.(type) {
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
	return kindNull
}

var kindNames = [...]string{"null", "boolean", "integer", "number", "string", "array", "object"}

func (k kinds) String() (s string) {
	for i := len(kindNames) - 1; i >= 0; i-- { // null is said last
		if bit := kinds(1) << i; k&bit != 0 && (bit != kindInteger || k&kindNumber == 0) {
			s += " or " + kindNames[i]
		}
	}
	return strings.TrimPrefix(cmp.Or(s, "nothing at all"), " or ")
}

// keysOf returns the names of an object's members, in order.
func keysOf(m map[string]any) []string {
	keys := slices.AppendSeq(make([]string, 0, len(m)), maps.Keys(m))
	slices.Sort(keys)
	return keys
}

// tokenChars are the characters of a header's name.
const tokenChars = "!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

func escapeToken(s string) string {
	return strings.ReplaceAll(strings.ReplaceAll(s, "~", "~0"), "/", "~1")
}

// joinPath adds a token to a path that stays within maxPath.
func joinPath(path, token string) string {
	if path += "/" + escapeToken(cutAt(token, maxQuote)); len(path) > maxPath {
		return strings.TrimSuffix(cutAt(path, maxPath-len("…")), "…") + "…"
	}
	return path
}

// cutAt cuts s to n bytes, and an ellipsis.
func cutAt(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}

// quoteText is s as a JSON string, cut; what cannot be seen is escaped.
func quoteText(s string) string { return quoteUpTo(s, maxQuote) }

func quoteUpTo(s string, most int) string {
	b := []byte{'"'}
	for _, r := range s {
		switch {
		case len(b) > most:
			return string(b) + `…"`
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case strconv.IsPrint(r) && !unicode.In(r, unicode.Variation_Selector, unicode.Other_Default_Ignorable_Code_Point):
			b = utf8.AppendRune(b, r)
		default:
			for _, half := range utf16.AppendRune(nil, r) {
				b = fmt.Appendf(b, `\u%04x`, half)
			}
		}
	}
	return string(b) + `"`
}

// plainText is s as it is if that is harmless, else quoted.
func plainText(s string, most int) string {
	if len(s) <= most+len("…") && strings.Trim(s, tokenChars+"/@…") == "" {
		return s
	}
	return quoteUpTo(s, most)
}

// quoteValue is a scalar as bounded JSON, and the type of anything else.
func quoteValue(x any) string {
	x, _ = plainValue(x)
	switch v := x.(type) {
	case string:
		return quoteText(v)
	case json.Number, bool:
		return cutAt(fmt.Sprint(v), maxQuote)
	}
	return kindOf(x).String()
}

// listText joins those items that there is room for, and counts the others.
func listText[T any](items []T, most int, text func(T) string) (s string) {
	for i, item := range items {
		if i == most || len(s) > 448 {
			return fmt.Sprintf("%s, … (%d more)", s[2:], len(items)-i)
		}
		s += ", " + text(item)
	}
	return strings.TrimPrefix(cmp.Or(s, "nothing at all"), ", ")
}

// similarNames reports whether b is likely what a was meant to be: within two edits, but not half of it,
// case and underscores aside.
func similarNames(a, b string) bool {
	if max(len(a), len(b)) > maxQuote {
		return false
	}
	fold := strings.NewReplacer("_", "", "-", "")
	a, b = fold.Replace(strings.ToLower(a)), fold.Replace(strings.ToLower(b))
	return distance(a, b) <= min(2, len(b)/2)
}

// distance counts the edits between two words, as Levenshtein does. It takes time by the product of their
// lengths: whose words may be anybody's cuts them first.
func distance(a, b string) int {
	row := make([]int, len(b)+1) // edits from what of a has been read to each beginning of b
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			edits := diagonal
			if a[i] != b[j] {
				edits = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], edits
		}
	}
	return row[len(b)]
}

// fingerprint is a digest of what a tool takes and gives: of the schemas as values, so that neither the
// order of members nor white space matters.
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

// schemaDiff names the first change from one schema to another: empty if there is none.
func schemaDiff(old, new []byte) string {
	diff := func(what string, a, b map[string]any) string {
		for _, name := range slices.Sorted(slices.Values(append(keysOf(a), keysOf(b)...))) {
			x, before := a[name]
			y, after := b[name]
			switch {
			case !before:
				return what + " added " + quoteText(name)
			case !after:
				return what + " removed " + quoteText(name)
			case !reflect.DeepEqual(x, y):
				return what + " changed " + quoteText(name)
			}
		}
		return ""
	}
	x, _ := decodeJSON(old)
	y, _ := decodeJSON(new)
	a, _ := x.(map[string]any)
	b, _ := y.(map[string]any)
	p, _ := a["properties"].(map[string]any)
	q, _ := b["properties"].(map[string]any)
	change := cmp.Or(diff("property", p, q), diff("keyword", a, b))
	if change == "" && fingerprint(old, nil) != fingerprint(new, nil) {
		return "changed"
	}
	return change
}
