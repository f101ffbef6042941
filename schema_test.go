package mcp

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"math"
	"math/big"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"
)

const schemaData = "testdata/schema/"

// mustDecode decodes one value as the transports do.
func mustDecode(tb testing.TB, text string) any {
	tb.Helper()
	v, ok := decodeJSON([]byte(text))
	if !ok {
		tb.Fatalf("not JSON: %.80s", text)
	}
	return v
}

func mustCompile(tb testing.TB, text string, o schemaOptions) *schema {
	tb.Helper()
	s, err := compileSchema([]byte(text), o)
	if err != nil {
		tb.Fatalf("compileSchema(%.200s): %v: %s", text, err, err.(*SchemaError).Detail)
	}
	return s
}

// refusal returns the reason why a schema is refused, empty if it is not.
func refusal(err error) string {
	if err == nil {
		return ""
	}
	return err.(*SchemaError).Reason
}

func loadGzip(tb testing.TB, name string, v any) {
	tb.Helper()
	f, err := os.Open(schemaData + name)
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		tb.Fatal(err)
	}
	if err := json.NewDecoder(z).Decode(v); err != nil {
		tb.Fatal(name, err)
	}
}

type suiteGroup struct {
	Description string
	Schema      json.RawMessage
	Tests       []struct {
		Description string
		Data        json.RawMessage
		Valid       bool
	}
}

func loadSuite(tb testing.TB, file string) (groups []suiteGroup) {
	tb.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		tb.Fatal(err)
	}
	if err := json.Unmarshal(b, &groups); err != nil {
		tb.Fatal(file, err)
	}
	return groups
}

// suiteRefused are the groups of the suite that are refused, by name.
var suiteRefused = map[string]string{
	"draft2020-12/defs.json: validate definition against metaschema":                  "remote-ref",
	"draft2020-12/ref.json: remote ref, containing refs itself":                       "remote-ref",
	"draft2020-12/unevaluatedItems.json: unevaluatedItems with $dynamicRef":           "dynamic-ref",
	"draft2020-12/unevaluatedProperties.json: unevaluatedProperties with $dynamicRef": "dynamic-ref",
	"draft7/definitions.json: validate definition against metaschema":                 "remote-ref",
	"draft7/ref.json: remote ref, containing refs itself":                             "remote-ref",
}

func TestSchemaSuite(t *testing.T) {
	t.Parallel()
	for _, set := range []struct {
		dir             string
		passed, refused int // tests
		skipped         int // in groups that need tables of Unicode we do not have
	}{
		{"draft2020-12", 1211, 8, 0},
		{"draft2020-12/optional", 155, 0, 0},
		{"draft2020-12/optional/format", 506, 0, 38},
		{"draft7", 900, 4, 0},
		{"draft7/optional", 106, 0, 0},
		{"draft7/optional/format", 419, 0, 38},
	} {
		t.Run(set.dir, func(t *testing.T) {
			t.Parallel()
			files, err := filepath.Glob(schemaData + "suite/" + set.dir + "/*.json")
			if err != nil || len(files) == 0 {
				t.Fatal("no suite files", err)
			}
			passed, refused, skipped := 0, 0, 0
			for _, file := range files {
				for _, g := range loadSuite(t, file) {
					name := strings.TrimPrefix(filepath.ToSlash(file), schemaData+"suite/") + ": " + g.Description
					if strings.HasSuffix(name, "hostname.json: validation of A-label (punycode) host names") {
						skipped += len(g.Tests)
						continue
					}
					o := schemaOptions{anyRoot: true, assertFormat: strings.HasSuffix(set.dir, "format")}
					s, err := compileSchema(inDialect(g.Schema, set.dir), o)
					if got, want := refusal(err), suiteRefused[name]; got != want {
						t.Errorf("%s: refused for %q, want %q: %+v", name, got, want, err)
						continue
					} else if got != "" {
						refused += len(g.Tests)
						continue
					}
					for _, tt := range g.Tests {
						if got := s.validate(mustDecode(t, string(tt.Data))); (got == verdictValid) != tt.Valid || got == verdictBudget {
							t.Errorf("%s: %s: validity %d, want valid=%t\n%s\n%s", name, tt.Description, got, tt.Valid, g.Schema, tt.Data)
							continue
						}
						issues, _ := s.explain(mustDecode(t, string(tt.Data)), true)
						if (len(issues) == 0) != tt.Valid {
							t.Errorf("%s: %s: %d issues, want valid=%t\n%s\n%s", name, tt.Description, len(issues), tt.Valid, g.Schema, tt.Data)
							continue
						}
						passed++
					}
				}
			}
			if passed != set.passed || refused != set.refused || skipped != set.skipped {
				t.Errorf("%d tests passed, %d refused, %d skipped; want %d, %d, %d",
					passed, refused, skipped, set.passed, set.refused, set.skipped)
			}
		})
	}
}

// inDialect says the dialect of a draft-07 group, which the suite leaves to
// the directory's name.
func inDialect(schema []byte, dir string) []byte {
	body, isObject := strings.CutPrefix(string(schema), "{")
	if !isObject || strings.HasPrefix(dir, "draft2020") || strings.Contains(body, `"$schema"`) {
		return schema
	}
	if strings.TrimSpace(body) != "}" {
		body = "," + body
	}
	return []byte(`{"$schema":"http://json-schema.org/draft-07/schema#"` + body)
}

type corpusTool struct {
	Name                      string
	InputSchema, OutputSchema json.RawMessage
}

// loadCorpus returns the tools of real servers, by server.
func loadCorpus(tb testing.TB) map[string]struct{ Tools []corpusTool } {
	var servers map[string]struct{ Tools []corpusTool }
	loadGzip(tb, "tools.json.gz", &servers)
	return servers
}

func TestSchemaCorpus(t *testing.T) {
	t.Parallel()
	schemas := map[[3]string]*schema{} // server, tool, which
	compiled, inPart := 0, 0
	for server, doc := range loadCorpus(t) {
		for _, tool := range doc.Tools {
			for which, raw := range map[string]json.RawMessage{"inputSchema": tool.InputSchema, "outputSchema": tool.OutputSchema} {
				if raw == nil {
					continue
				}
				s, err := compileSchema(raw, schemaOptions{input: which == "inputSchema"})
				if err != nil {
					t.Errorf("%s: %s %s: %+v", server, tool.Name, which, err)
					continue
				}
				compiled++
				schemas[[3]string{server, tool.Name, which}] = s
				if slices.ContainsFunc(s.unchecked(), func(u unchecked) bool { return u.Keyword != "format" }) {
					inPart++
				}
			}
		}
	}
	if compiled != 2083 || inPart != 1 {
		t.Errorf("%d schemas compiled, %d held in part; want 2083, 1", compiled, inPart)
	}
	var instances map[string][]struct {
		Tool, Schema, Case string
		Valid              bool
		Data               json.RawMessage
	}
	loadGzip(t, "instances.json.gz", &instances)
	judged := 0
	for server, list := range instances {
		for _, in := range list {
			s := schemas[[3]string{server, in.Tool, in.Schema}]
			if s == nil {
				t.Errorf("%s: no schema for %s %s", server, in.Tool, in.Schema)
				continue
			}
			v := mustDecode(t, string(in.Data))
			if got := s.validate(v); (got == verdictValid) != in.Valid || got == verdictBudget {
				t.Errorf("%s: %s %s %q: validity %d, want valid=%t: %.200s", server, in.Tool, in.Schema, in.Case, got, in.Valid, in.Data)
			}
			issues, more := s.explain(v, true)
			if text := feedback(in.Tool, issues, more); (len(issues) == 0) != in.Valid || len(text) > maxFeedback {
				t.Errorf("%s: %s %q: %d issues in %d bytes, want valid=%t", server, in.Tool, in.Case, len(issues), len(text), in.Valid)
			}
			judged++
		}
	}
	if judged != 10697 {
		t.Errorf("%d instances judged, want 10697", judged)
	}
}

func TestSchemaRefusals(t *testing.T) {
	t.Parallel()
	deep := func(n int) string { return strings.Repeat(`{"items":`, n) + `{}` + strings.Repeat(`}`, n) }
	many := func(n int, item string) string { return strings.TrimSuffix(strings.Repeat(item+",", n), ",") }
	defs := func(n int, format string) string { // n definitions, each of which leads to the next
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, `"d%d":`+format+`,`, i, i+1)
		}
		return fmt.Sprintf(`{"$ref":"#/$defs/d0","$defs":{%s"d%d":true}}`, b.String(), n)
	}
	patterns := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, `{"pattern":"a%d"},`, i)
		}
		return `{"allOf":[{"anyOf":[` + strings.TrimSuffix(b.String(), ",") + `]},{"pattern":"b"}]}`
	}
	any, in := schemaOptions{anyRoot: true}, schemaOptions{input: true}
	for _, tt := range []struct {
		name   string
		schema string
		o      schemaOptions
		reason string // empty: compiles
	}{
		{"not JSON", `{"type":`, any, "not-json"},
		{"two values", `{} {}`, any, "not-json"},
		{"number", `1`, any, "not-json"},
		{"null", `null`, any, "not-json"},
		{"empty", ``, any, "not-json"},
		{"input true", `true`, in, ""},
		{"input without type", `{"$schema":"http://json-schema.org/draft-07/schema#"}`, in, ""},
		{"input object or null", `{"type":["object","null"]}`, in, ""},
		{"input false", `false`, in, "root-type"},
		{"input string", `{"type":"string"}`, in, "root-type"},
		{"input string or null", `{"type":["string","null"]}`, in, "root-type"},
		{"output array", `{"type":"array"}`, schemaOptions{}, "root-type"},
		{"output array, later", `{"type":"array"}`, any, ""},
		{"output through a reference", `{"$ref":"#/$defs/a","$defs":{"a":{"type":"object"}}}`, schemaOptions{}, ""},
		{"draft-07", `{"$schema":"http://json-schema.org/draft-07/schema"}`, any, ""},
		{"draft-07 over https", `{"$schema":"https://json-schema.org/draft-07/schema#"}`, any, ""},
		{"2020-12", `{"$schema":"https://json-schema.org/draft/2020-12/schema#"}`, any, ""},
		{"draft-04", `{"$schema":"http://json-schema.org/draft-04/schema#"}`, any, "dialect"},
		{"dialect of nobody", `{"$schema":"https://example.com/my"}`, any, "dialect"},
		{"dialect no string", `{"$schema":7}`, any, "dialect"},
		{"dialect below", `{"properties":{"a":{"$schema":"http://json-schema.org/draft-04/schema#"}}}`, any, ""},
		{"dialect of a resource", `{"properties":{"a":{"$id":"http://a/b","$schema":"http://json-schema.org/draft-07/schema#"}}}`, any, "dialect"},
		{"remote", `{"$ref":"https://example.com/s.json"}`, any, "remote-ref"},
		{"file", `{"$ref":"file:///etc/passwd"}`, any, "remote-ref"},
		{"no URI", `{"$ref":"%zz"}`, any, "remote-ref"},
		{"metaschema", `{"$ref":"https://json-schema.org/draft/2020-12/schema"}`, any, "remote-ref"},
		{"nothing there", `{"$ref":"#/$defs/a"}`, any, "unresolved-ref"},
		{"no anchor", `{"$ref":"#a"}`, any, "unresolved-ref"},
		{"no schema there", `{"$ref":"#/required","required":["a"]}`, any, "keyword-shape"},
		{"itself", `{"$ref":"#"}`, any, "ref-cycle"},
		{"itself in allOf", `{"allOf":[{"$ref":"#"}]}`, any, "ref-cycle"},
		{"itself in not", `{"not":{"$ref":"#"}}`, any, "ref-cycle"},
		{"itself in then", `{"if":true,"then":{"$ref":"#"}}`, any, "ref-cycle"},
		{"itself in dependentSchemas", `{"dependentSchemas":{"a":{"$ref":"#"}}}`, any, "ref-cycle"},
		{"each other", `{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}`, any, "ref-cycle"},
		{"itself in then, without if", `{"allOf":[true],"then":{"$ref":"#"},"else":{"$ref":"#"}}`, any, ""},
		{"two anchors of one name", `{"$ref":"#x","$defs":{"a":{"$anchor":"x"},"b":{"$anchor":"x"}}}`, any, "unresolved-ref"},
		{"two resources of one name", `{"$ref":"http://a/b#/x","$defs":{"a":{"$id":"http://a/b","x":{}},"b":{"$id":"http://a/b","x":{}}}}`, any, "unresolved-ref"},
		{"two anchors of one name and place", `{"$ref":"#x","$defs":{"a":{"$anchor":"x","$dynamicAnchor":"x"}}}`, any, ""},
		{"a tree", `{"properties":{"a":{"$ref":"#"}},"items":{"anyOf":[{"$ref":"#"},true]}}`, any, ""},
		{"references in a row", defs(64, `{"$ref":"#/$defs/d%d"}`), any, ""},
		{"too many in a row", defs(66, `{"$ref":"#/$defs/d%d"}`), any, "ref-depth"},
		{"too many in place", defs(257, `{"not":{"$ref":"#/$defs/d%d"}}`), any, "ref-depth"},
		{"dynamic", `{"$dynamicRef":"#a"}`, any, "dynamic-ref"},
		{"recursive", `{"$recursiveRef":"#"}`, any, "dynamic-ref"},
		{"vocabulary", `{"$vocabulary":{}}`, any, "vocabulary"},
		{"required no list", `{"required":true}`, any, "keyword-shape"},
		{"required numbers", `{"required":[1]}`, any, "keyword-shape"},
		{"minimum text", `{"minimum":"1"}`, any, "keyword-shape"},
		{"properties list", `{"properties":[]}`, any, "keyword-shape"},
		{"type any", `{"type":"any"}`, any, "keyword-shape"},
		{"type none", `{"type":[]}`, any, "keyword-shape"},
		{"exclusiveMinimum of draft-04", `{"minimum":1,"exclusiveMinimum":true}`, any, "keyword-shape"},
		{"multipleOf 0", `{"multipleOf":0}`, any, "keyword-shape"},
		{"minLength -1", `{"minLength":-1}`, any, "keyword-shape"},
		{"minLength 1.5", `{"minLength":1.5}`, any, "keyword-shape"},
		{"maxLength huge", `{"maxLength":1e300}`, any, ""},
		{"anyOf none", `{"anyOf":[]}`, any, "keyword-shape"},
		{"items list, 2020-12", `{"$schema":"https://json-schema.org/draft/2020-12/schema","items":[true]}`, any, "keyword-shape"},
		{"items list, who knows", `{"items":[true],"additionalItems":false}`, any, ""},
		{"additionalItems without a tuple", `{"additionalItems":7}`, any, ""},
		{"enum none", `{"enum":[]}`, any, ""},
		{"enum no list", `{"enum":{"a":1}}`, any, "keyword-shape"},
		{"subschema no schema", `{"properties":{"a":[]}}`, any, "keyword-shape"},
		{"unknown keyword", `{"nullable":7}`, any, ""},
		{"pattern no string", `{"pattern":[]}`, any, "keyword-shape"},
		{"number out of range", `{"maximum":1e1000000}`, any, "number-range"},
		{"constant out of range", `{"const":[1e1000000]}`, any, "number-range"},
		{"text", `{"description":"` + strings.Repeat("x", 256<<10) + `"}`, any, "schema-size"},
		{"nesting of JSON", `{"default":` + strings.Repeat("[", 64) + strings.Repeat("]", 64) + `}`, any, "schema-depth"},
		{"nesting of schemas", deep(31), any, ""},
		{"too deep", deep(32), any, "schema-depth"},
		{"far too deep", deep(4000), any, "schema-depth"},
		{"branches", `{"anyOf":[` + many(256, "true") + `]}`, any, ""},
		{"too many branches", `{"anyOf":[` + many(257, "true") + `]}`, any, "schema-branches"},
		{"values", `{"enum":[` + many(4096, "1") + `]}`, any, ""},
		{"too many values", `{"enum":[` + many(4097, "1") + `]}`, any, "schema-enum"},
		{"patterns", patterns(255), any, ""},
		{"too many patterns", patterns(256), any, "schema-patterns"},
		{"nodes", `{"allOf":[` + many(100, `{"allOf":[`+many(99, `{}`)+`]}`) + `]}`, any, "schema-nodes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, err := compileSchema([]byte(tt.schema), tt.o)
			if got := refusal(err); got != tt.reason {
				t.Errorf("compileSchema(%.100s) refused for %q, want %q: %+v", tt.schema, got, tt.reason, err)
			}
			if e, ok := err.(*SchemaError); ok && len(e.Pointer)+len(e.Detail)+len(e.Error()) > 1<<10 {
				t.Errorf("an error of %d bytes", len(e.Pointer)+len(e.Detail)+len(e.Error()))
			}
		})
	}
}

// TestSchemaLimits holds that every limit can be set, and only tightened from
// what a test needs: zero is the default, and nothing is unlimited.
func TestSchemaLimits(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		l      schemaLimits
		schema string
		reason string
	}{
		{schemaLimits{text: 10}, `{"type":"object"}`, "schema-size"},
		{schemaLimits{nesting: 2}, `{"properties":{"a":{}}}`, "schema-depth"},
		{schemaLimits{depth: 1}, `{"not":{"items":true}}`, "schema-depth"},
		{schemaLimits{nodes: 2}, `{"properties":{"a":{},"b":{}}}`, "schema-nodes"},
		{schemaLimits{branches: 1}, `{"anyOf":[true,false]}`, "schema-branches"},
		{schemaLimits{values: 1}, `{"enum":[1,2]}`, "schema-enum"},
		{schemaLimits{patterns: 1}, `{"patternProperties":{"a":true,"b":true}}`, "schema-patterns"},
		{schemaLimits{patternText: 2}, `{"pattern":"abc"}`, "unchecked"},
		{schemaLimits{patternSize: 4}, `{"pattern":"abcdef"}`, "unchecked"},
		{schemaLimits{hops: 1}, `{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/c"},"c":true}}`, "ref-depth"},
	} {
		o := schemaOptions{anyRoot: true, strict: true}
		if _, err := compileSchema([]byte(tt.schema), o); err != nil {
			t.Errorf("%s: refused under the defaults: %+v", tt.schema, err)
		}
		o.schemaLimits = tt.l
		_, err := compileSchema([]byte(tt.schema), o)
		if got := refusal(err); got != tt.reason {
			t.Errorf("%s under %+v: refused for %q, want %q", tt.schema, tt.l, got, tt.reason)
		}
	}
	if got, want := (schemaLimits{work: -1}).withDefaults(), (schemaLimits{}).withDefaults(); got != want {
		t.Errorf("defaults for a negative limit = %+v want %+v", got, want)
	}
}

// doublingSchema applies leaf 2ⁿ times.
func doublingSchema(n int, kw, leaf string) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `"d%d":{"%s":[{"$ref":"#/$defs/d%d"},{"$ref":"#/$defs/d%d"}]},`, i, kw, i+1, i+1)
	}
	return fmt.Sprintf(`{"$ref":"#/$defs/d0","$defs":{%s"d%d":%s}}`, b.String(), n, leaf)
}

// TestSchemaHostile holds what a schema or a value made to hurt may cost: a
// refusal or a validity within the budget, and a short text.
func TestSchemaHostile(t *testing.T) {
	t.Parallel()
	doubling := func(n int) string { return doublingSchema(n, "anyOf", `{"type":"string"}`) }
	unique := func(format string, n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, format+",", i)
		}
		return "[" + strings.TrimSuffix(b.String(), ",") + "]"
	}
	nest := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	long := strings.Repeat("a", 20000)
	for _, tt := range []struct {
		name, schema, value string
		want                validity
	}{
		{"doubling 12", doubling(12), `1`, verdictInvalid},
		{"doubling 16", doubling(16), `1`, verdictInvalid},
		{"doubling 20", doubling(20), `1`, verdictBudget},
		{"doubling 60", doubling(60), `1`, verdictBudget},
		{"deep value", `{"items":{"$ref":"#"}}`, nest(5000), verdictInvalid},
		{"deep value under not", `{"not":{"items":{"$ref":"#/not"}}}`, nest(5000), verdictInvalid},
		{"deep value that nobody looks at", `true`, nest(5000), verdictValid},
		{"deep constant", `{"const":[]}`, nest(5000), verdictInvalid},
		{"unique objects", `{"uniqueItems":true}`, unique(`{"a":%[1]d,"b":[%[1]d]}`, 20000), verdictValid},
		{"unique texts", `{"uniqueItems":true}`, unique(`"%d"`, 20000), verdictValid},
		{"unique deep", `{"uniqueItems":true}`, `[1,` + nest(1000) + `]`, verdictInvalid},
		{"unique long", `{"uniqueItems":true}`, unique(`"%d`+long[:5000]+`"`, 1000), verdictValid},
		{"repeats", `{"pattern":"^(a{0,30}){30}$"}`, `"` + long + `b"`, verdictInvalid},
		{"repeats, longer", `{"pattern":"^(a{0,30}){30}$"}`, `"` + strings.Repeat(long, 10) + `b"`, verdictBudget},
		{"repeats within repeats", `{"pattern":"((a{1,100}){1,10}){1,10}"}`, `"aaaa"`, verdictValid},
		{"exponent", `{"type":"integer"}`, `1e1000000`, verdictInvalid},
		{"exponent for multipleOf", `{"multipleOf":3}`, `1e100000`, verdictInvalid},
		{"exponent that nobody looks at", `true`, `1e1000000`, verdictValid},
		{"digits", `{"minimum":0}`, strings.Repeat("9", 100000), verdictInvalid},
		{"exponent in a constant", `{"enum":[1,2]}`, `1e1000000`, verdictInvalid},
		{"19.99 of 0.01", `{"multipleOf":0.01}`, `19.99`, verdictValid},
		{"beyond float64", `{"maximum":9007199254740992}`, `9007199254740993`, verdictInvalid},
		{"last of two", `{"properties":{"a":{"type":"string"}}}`, `{"a":1,"a":"x"}`, verdictValid},
		{"long names", `{"additionalProperties":false,"properties":{"` + long + `":{}}}`, `{"` + long + `1":1,"` + long + `2":2}`, verdictInvalid},
		{"long choices", `{"enum":["` + long + `","` + long + `2"]}`, `"` + long + `3"`, verdictInvalid},
		{"long pattern", `{"pattern":"^` + strings.Repeat("b", 1000) + `"}`, `"` + long + `"`, verdictInvalid},
		{"long path", `{"items":{"$ref":"#"},"additionalProperties":{"$ref":"#"},"type":["array","object"]}`,
			strings.Repeat(`{"`+strings.Repeat("n", 60)+`":`, 100) + `1` + strings.Repeat(`}`, 100), verdictInvalid},
		{"many misfits", `{"items":{"type":"string"}}`, unique(`%d`, 100000), verdictInvalid},
		{"many names", `{"additionalProperties":false}`, `{` + strings.Trim(unique(`"n%[1]d":%[1]d`, 20000), "[]") + `}`, verdictInvalid},
		{"many digits", `{"items":{"multipleOf":1e-400}}`, `[` + strings.TrimSuffix(strings.Repeat(strings.Repeat("9", 399)+"e400,", 2000), ",") + `]`, verdictValid},
		{"more digits", `{"items":{"multipleOf":1e-400}}`, `[` + strings.TrimSuffix(strings.Repeat(strings.Repeat("9", 399)+"e400,", 20000), ",") + `]`, verdictBudget},
		{"many branches that fail below", `{"items":{"anyOf":[{"items":{"items":false}},{"items":{"items":true}}]}}`, `[` + strings.Repeat(`[[1]],`, 500) + `[]]`, verdictValid},
		{"many contained", `{"contains":{"const":1}}`, unique(`{"a":%d}`, 100000), verdictInvalid},
		{"items that nothing asks about", doublingSchema(12, "allOf", `{"items":{}}`), unique("%d", 64000), verdictBudget},
		{"items that are equal", doublingSchema(12, "anyOf", `{"uniqueItems":true}`), `[1,1` + strings.Repeat(",1", 64000) + `]`, verdictBudget},
		{"items that are evaluated", doublingSchema(12, "allOf", `{"items":true,"unevaluatedItems":false}`), unique("%d", 64000), verdictBudget},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := mustCompile(t, tt.schema, schemaOptions{anyRoot: true})
			v := mustDecode(t, tt.value)
			start := time.Now()
			got := s.validate(v)
			checked := time.Since(start)
			issues, more := s.explain(v, true)
			text := feedback("tool", issues, more)
			t.Logf("checked in %v, explained in %v, %d bytes", checked, time.Since(start)-checked, len(text))
			if got != tt.want {
				t.Errorf("validity %d, want %d: %v", got, tt.want, issues)
			}
			if (len(issues) == 0) != (tt.want == verdictValid) || len(issues) > 8 || len(text) > maxFeedback {
				t.Errorf("%d issues in %d bytes", len(issues), len(text))
			}
			for _, is := range issues {
				if len(is.Path) > maxPath+8 || len(is.Want) > 1<<10 || len(is.Got) > 128 {
					t.Errorf("an issue without bounds: %.2000v", is)
				}
			}
		})
	}
}

// TestSchemaHostileCompile compiles, or refuses, what is made to be slow to
// compile. It prints the times; what bounds them is in the table of refusals.
func TestSchemaHostileCompile(t *testing.T) {
	t.Parallel()
	list := func(n int, format string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, format+",", i)
		}
		return strings.TrimSuffix(b.String(), ",")
	}
	name := strings.Repeat("n", 100_000)
	var row strings.Builder
	for i := range 60 {
		fmt.Fprintf(&row, `"d%d":{"$ref":"#/$defs/d%d"},`, i, i+1)
	}
	resources := `{"x":true}`
	for i := range 20 {
		resources = fmt.Sprintf(`{"$id":"http://a/%s%d","$defs":{"a":%s}}`, name[:1500], i, resources)
	}
	for _, tt := range []struct{ name, schema, reason string }{
		{"a long row from everywhere", `{"$defs":{` + row.String() + `"d60":true},"properties":{` + list(5000, `"%d":{"$ref":"#/$defs/d0"}`) + `}}`, ""},
		{"a long name around many", `{"properties":{"` + name + `":{"properties":{` + list(5000, `"%d":{}`) + `}}}}`, "schema-size"},
		{"a long name around many definitions", `{"$ref":"#/x","x":true,"$defs":{"` + name + `":{"$defs":{` + list(10000, `"%d":{}`) + `}}}}`, "schema-size"},
		{"many required", `{"required":[` + list(20000, `"%d"`) + `]}`, ""},
		{"many dependencies", `{"dependentRequired":{` + list(10000, `"%d":["a"]`) + `}}`, ""},
		{"many classes", `{"anyOf":[` + list(200, `{"pattern":"%d`+strings.Repeat(`\\p{L}`, 160)+`"}`) + `]}`, "schema-patterns"},
		{"many counts", `{"anyOf":[` + list(200, `{"pattern":"%da{1000}"}`) + `]}`, "schema-patterns"},
		{"long base", `{"$id":"http://a/` + name + `","properties":{` + list(5000, `"%d":{"$ref":"x"}`) + `}}`, "keyword-shape"},
		{"many resources", `{"$ref":"#/$defs/0","$defs":{` + list(5000, `"%[1]d":{"$id":"http://a/%[1]d"}`) + `}}`, ""},
		{"many properties", `{"properties":{` + list(9000, `"%d":{"type":"string"}`) + `}}`, ""},
		{"many unions", `{"anyOf":[` + list(90, `{"minLength":%d,"oneOf":[`+list(90, `{"minimum":%d}`)+`]}`) + `]}`, ""},
		{"a row of resources", `{"anyOf":[` + strings.TrimSuffix(strings.Repeat(`{"$ref":"#`+strings.Repeat("/$defs/a", 20)+`/x"},`, 250), ",") + `],` + resources[1:], ""},
		{"many headers", `{"properties":{` + list(3000, `"%[1]d":{"type":"string","x-mcp-header":"`+name[:30]+`%[1]d"}`) + `}}`, ""},
		{"many formats", `{"properties":{` + list(6000, `"%d":{"format":"uri"}`) + `}}`, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			start := time.Now()
			_, err := compileSchema([]byte(tt.schema), schemaOptions{anyRoot: true, assertFormat: true, input: true, headers: true})
			t.Logf("%d bytes in %v", len(tt.schema), time.Since(start))
			if got := refusal(err); got != tt.reason {
				t.Errorf("refused for %q, want %q: %+v", got, tt.reason, err)
			}
		})
	}
}

// TestSchemaFeedback is what a model reads, one issue a line.
func TestSchemaFeedback(t *testing.T) {
	t.Parallel()
	const edit = `{"type":"object","properties":{"newText":{"type":"string"},"oldText":{"type":"string"}},"required":["newText","oldText"]}`
	for _, tt := range []struct{ schema, value, want string }{
		{`{"properties":{"limit":{"type":"integer","maximum":100}}}`, `{"limit":"ten"}`, `/limit: want integer ≤ 100, got "ten" (string)`},
		{`{"properties":{"limit":{"type":"integer","minimum":1,"maximum":100}}}`, `{"limit":"10"}`, `/limit: want integer ≥ 1 and ≤ 100, got "10" (string)`},
		{`{"properties":{"limit":{"type":"integer","minimum":1,"maximum":100}}}`, `{"limit":200}`, `/limit: want integer ≥ 1 and ≤ 100, got 200`},
		{`{"properties":{"limit":{"type":"integer"}}}`, `{"limit":1.5}`, `/limit: want integer, got 1.5 (number)`},
		{`{"properties":{"x":{"type":"number","exclusiveMinimum":0}}}`, `{"x":-3}`, `/x: want number > 0, got -3`},
		{`{"properties":{"x":{"multipleOf":5,"exclusiveMaximum":50}}}`, `{"x":3}`, `/x: want number < 50 and a multiple of 5, got 3`},
		{`{"required":["query"]}`, `{}`, `/query: required, missing`},
		{`{"properties":{"edits":{"items":` + edit + `}}}`, `{"edits":[{"newText":"","oldText":""},{"oldText":""}]}`, `/edits/1/newText: required string, missing`},
		{`{"properties":{"query":true},"additionalProperties":false}`, `{"qurey":1}`, `/qurey: unknown argument (did you mean "query"?)`},
		{`{"properties":{"max_results":true},"additionalProperties":false}`, `{"maxResults":1}`, `/maxResults: unknown argument (did you mean "max_results"?)`},
		{`{"properties":{"a":true,"b":true},"additionalProperties":false}`, `{"x":1}`, `/x: unknown argument; known: "a", "b"`},
		{`{"additionalProperties":false}`, `{"x":1}`, `/x: unknown argument`},
		{`{"properties":{"a":true},"unevaluatedProperties":false}`, `{"x":1}`, `/x: unknown argument; known: "a"`},
		{`{"properties":{"sort":{"type":"string","enum":["relevance","date","popularity"]}}}`, `{"sort":"newest"}`, `/sort: want one of "relevance", "date", "popularity", got "newest"`},
		{`{"properties":{"v":{"const":2}}}`, `{"v":"2"}`, `/v: want 2, got "2"`},
		{`{"properties":{"v":{"enum":[]}}}`, `{"v":"2"}`, `/v: want one of nothing at all, got "2"`},
		{`{"properties":{"v":{"minLength":1}}}`, `{"v":""}`, `/v: want at least 1 character, got 0`},
		{`{"properties":{"v":{"maxLength":4}}}`, `{"v":"abcäö"}`, `/v: want at most 4 characters, got 5`},
		{`{"properties":{"v":{"minItems":1}}}`, `{"v":[]}`, `/v: want at least 1 item, got 0`},
		{`{"properties":{"v":{"minItems":2,"maxItems":3}}}`, `{"v":[]}`, `/v: want 2 to 3 items, got 0`},
		{`{"minProperties":1}`, `{}`, `(all of it): want at least 1 member, got 0`},
		{`{"properties":{"v":{"uniqueItems":true}}}`, `{"v":[0,1,2,3,4,{"a":2.0,"b":1},{"b":1,"a":2}]}`, `/v: items 5 and 6 are equal`},
		{`{"properties":{"v":{"contains":{"const":1}}}}`, `{"v":[2]}`, `/v: want at least 1 item of the kind that must be there, got 0`},
		{`{"properties":{"v":{"pattern":"^[a-z0-9-]+$"}}}`, `{"v":"My Site"}`, `/v: want text matching "^[a-z0-9-]+$", got "My Site"`},
		{`{"properties":{"v":{"type":"string","format":"date-time"}}}`, `{"v":"tomorrow"}`, `/v: want date-time such as 2025-11-25T10:20:30Z, got "tomorrow"`},
		{`{"properties":{"v":{"type":"string","format":"date-time"}}}`, `{"v":5}`, `/v: want string in date-time form, such as 2025-11-25T10:20:30Z, got 5 (number)`},
		{`{"properties":{"v":{"anyOf":[{"type":"string"},{"type":"null"}]}}}`, `{"v":{}}`, `/v: want string or null, got object`},
		{`{"properties":{"v":{"type":["string","null"]}}}`, `{"v":false}`, `/v: want string or null, got false (boolean)`},
		{`{"properties":{"v":{"anyOf":[{"type":"object","required":["a","b"]},{"type":"object","required":["c"]},{"type":"null"}]}}}`, `{"v":{}}`, `/v/c: required, missing`},
		{`{"oneOf":[{"properties":{"op":{"const":"find"},"n":{"type":"integer"}}},{"properties":{"op":{"const":"drop"}},"required":["x"]}]}`, `{"op":"find","n":"1"}`,
			`/n: (as "find") want integer, got "1" (string)`},
		{`{"oneOf":[{"properties":{"op":{"const":"find"}},"required":["q"]},{"properties":{"op":{"const":"drop"}}}]}`, `{"op":"find"}`, `/q: (as "find") required, missing`},
		{`{"oneOf":[{"properties":{"op":{"const":"find"},"n":{"enum":["a\") b","c"]}}},{"properties":{"op":{"const":"drop"}},"required":["x"]}]}`, `{"op":"find","n":1}`,
			`/n: (as "find") want one of "a\") b", "c", got 1`},
		{`{"properties":{"l":{"oneOf":[{"properties":{"op":{"const":"list"},"of":{"$ref":"#/properties/l"}}},{"properties":{"op":{"const":"leaf"},"n":{"type":"integer"}}}]}}}`,
			`{"l":` + strings.Repeat(`{"op":"list","of":`, 40) + `{"op":"leaf","n":"1"}` + strings.Repeat(`}`, 40) + `}`,
			`/l` + strings.Repeat("/of", 40) + `/n: (as "leaf") want integer, got "1" (string)`},
		{`{"oneOf":[{"properties":{"op":{"const":"find"}}},{"properties":{"op":{"const":"drop"}}}]}`, `{"op":"fnd"}`, `/op: want one of "find", "drop", got "fnd"`},
		{`{"oneOf":[{"required":["a"]},{"required":["b"]},true]}`, `{"a":1}`,
			`(all of it): fits more than one of the allowed shapes (1 and 3); remove what does not belong`},
		{`{"not":{"required":["a"]}}`, `{"a":1}`, `(all of it): not allowed here`},
		{`{"properties":{"a":false}}`, `{"a":1}`, `/a: not allowed here`},
		{`{"dependentRequired":{"a":["b"]}}`, `{"a":1}`, `/b: needed because "a" is given`},
		{`{"propertyNames":{"pattern":"^x"}}`, `{"a":1}`, `/a: want as its name text matching "^x", got "a"`},
		{`{"propertyNames":{"maxLength":3}}`, `{"abcd":1}`, `/abcd: want as its name at most 3 characters, got "abcd"`},
		{`{"propertyNames":{"anyOf":[{"const":"x"},{"const":"y"}]}}`, `{"a":1}`, `/a: want as its name one of "x", "y", got "a"`},
		{`{"properties":{"units":{"anyOf":[{"type":"string","const":"metric"},{"type":"string","const":"imperial"}]}}}`, `{"units":"celsius"}`, `/units: want one of "metric", "imperial", got "celsius"`},
		{`{"properties":{"v":{"oneOf":[{"enum":["a","b"]},{"const":"c"},{"type":"null"}]}}}`, `{"v":"d"}`, `/v: want one of "a", "b", "c", got "d"`},
		{`{"properties":{"v":{"anyOf":[{"const":"a"},{"type":"string","pattern":"^b"}]}}}`, `{"v":"d"}`, `/v: want "a", got "d"`},
		{`{"properties":{"v":{"enum":[]}},"required":["v"]}`, `{}`, `/v: required, missing`},
		{`{"properties":{"v":{"anyOf":[{"enum":[]},false]}}}`, `{"v":1}`, `/v: want nothing at all, got 1 (number)`},
		{`{"properties":{"\u202e{x} y":{"type":"string"}},"required":["\u202e{x} y"]}`, `{}`, `"/\u202e{x} y": required string, missing`},
		{`{"properties":{"v":{"enum":["\u200bignore\n\"this\"\ud83d\ude0e\udb40\udc41"]}}}`, `{"v":1}`, `/v: want "\u200bignore\u000a\"this\"😎\udb40\udc41", got 1`},
		{`{"properties":{"v":{"const":"\u2764\ufe0f\udb40\udd10\u3164\u034f\u0915\u093f"}}}`, `{"v":1}`, `/v: want "❤\ufe0f\udb40\udd10\u3164\u034fकि", got 1`},
		{`{"type":"string"}`, `{}`, `(all of it): want string, got object`},
	} {
		s := mustCompile(t, tt.schema, schemaOptions{anyRoot: true, assertFormat: true})
		v := mustDecode(t, tt.value)
		if got := s.validate(v); got != verdictInvalid {
			t.Errorf("validate(%s, %s) = %d", tt.schema, tt.value, got)
		}
		want := "Arguments for tool \"go\" do not fit its input schema; nothing was sent.\n- " + tt.want + "\nCorrect these and call go again.\n"
		issues, more := s.explain(v, true)
		if got := feedback("go", issues, more); got != want {
			t.Errorf("feedback for %s, %s:\n%swant\n%s", tt.schema, tt.value, got, want)
		}
	}
}

func TestSchemaFeedbackWhole(t *testing.T) {
	t.Parallel()
	s := mustCompile(t, `{"type":"object","properties":{"limit":{"type":"integer","maximum":100},"sort":{"enum":["relevance","date"]},"query":{"type":"string"}},
		"required":["query"],"additionalProperties":false}`, schemaOptions{input: true})
	issues, more := s.explain(mustDecode(t, `{"limit":"ten","sort":"newest","qurey":"x"}`), true)
	const want = `Arguments for tool "search" do not fit its input schema; nothing was sent.
- /limit: want integer ≤ 100, got "ten" (string)
- /query: required string, missing
- /qurey: unknown argument (did you mean "query"?)
- /sort: want one of "relevance", "date", got "newest"
Correct these and call search again.
`
	if got := feedback("search", issues, more); got != want {
		t.Errorf("feedback:\n%s\nwant:\n%s", got, want)
	}
	many, more := s.explain(mustDecode(t, `{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1,"g":1,"h":1,"i":1}`), true)
	if text := feedback("search", many, more); len(many) != 8 || !more || !strings.Contains(text, "\n- and more\n") {
		t.Errorf("%d issues, more=%t: %s", len(many), more, text)
	}
	for i := range many {
		many[i].Want = strings.Repeat("x", 1000)
	}
	if text := feedback(strings.Repeat("\u202e", 100), many, false); len(text) > maxFeedback || !strings.Contains(text, "- and more\n") {
		t.Errorf("%d bytes: %s", len(text), text)
	}
}

// TestSchemaExplainResult holds that no word of a server enters what is said
// about its results, save the names that lead to the place.
func TestSchemaExplainResult(t *testing.T) {
	t.Parallel()
	const canary = "CANARY"
	for _, tt := range []struct{ schema, value string }{
		{`{"properties":{"a":{"enum":["CANARY","x"]}}}`, `{"a":"CANARY2"}`},
		{`{"properties":{"a":{"const":"CANARY"}}}`, `{"a":"CANARY2"}`},
		{`{"properties":{"a":{"pattern":"^CANARY$"}}}`, `{"a":"CANARY2"}`},
		{`{"properties":{"a":{"type":"integer"}}}`, `{"a":"CANARY"}`},
		{`{"properties":{"CANARY":true},"additionalProperties":false}`, `{"CANARY2":1}`},
		{`{"properties":{"CANARY":true},"unevaluatedProperties":false}`, `{"CANARY2":1}`},
		{`{"propertyNames":{"pattern":"^CANARY$"}}`, `{"CANARY2":1}`},
		{`{"dependentRequired":{"CANARY":["b"]}}`, `{"CANARY":1}`},
		{`{"oneOf":[{"properties":{"op":{"const":"CANARY"},"n":{"type":"integer"}}},{"properties":{"op":{"const":"b"}}}]}`, `{"op":"CANARY","n":""}`},
		{`{"oneOf":[{"properties":{"op":{"const":"CANARY"}}},{"properties":{"op":{"const":"b"}}}]}`, `{"op":"CANARY2"}`},
		{`{"properties":{"a":{"anyOf":[{"const":"CANARY"},{"const":"b"}]}}}`, `{"a":"CANARY2"}`},
		{`{"propertyNames":{"anyOf":[{"const":"CANARY"},{"minLength":99}]}}`, `{"CANARY2":1}`},
	} {
		issues, _ := mustCompile(t, tt.schema, schemaOptions{}).explain(mustDecode(t, tt.value), false)
		if len(issues) == 0 {
			t.Errorf("%s, %s: no issues", tt.schema, tt.value)
		}
		for _, is := range issues {
			if strings.Contains(is.Path+is.Keyword+is.Want+is.Got, canary) {
				t.Errorf("%s, %s: %+v", tt.schema, tt.value, is)
			}
		}
	}
}

func TestSchemaExplainPlace(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		schema, value string
		want          Issue
	}{
		{`{"properties":{"a/b":{"items":{"$ref":"#/$defs/~1"}}},"$defs":{"/":{"type":"object","properties":{"c":{"minimum":3}}}}}`, `{"a/b":[{},{"c":2}]}`,
			Issue{"/a~1b/1/c", "minimum", "number ≥ 3", "2", "/$defs/~1/properties/c/minimum"}},
		{`{"dependentRequired":{"a":["b"]}}`, `{"a":1}`, Issue{"/b", "dependentRequired", `needed because "a" is given`, "", "/dependentRequired"}},
		{`{"dependencies":{"a":["b"]}}`, `{"a":1}`, Issue{"/b", "dependencies", `needed because "a" is given`, "", "/dependencies"}},
		{`{"required":[""]}`, `{}`, Issue{"/", "required", "required, missing", "", "/required"}},
		{`{"additionalProperties":false}`, `{"":1}`, Issue{"/", "additionalProperties", "unknown argument", "", "/additionalProperties"}},
		{`{"properties":{"a":false}}`, `{"a":1}`, Issue{"/a", "false", "not allowed here", "", "/properties/a"}},
		{`{"oneOf":[{"properties":{"":{"const":"a"}}},{"properties":{"":{"const":"b"},"x":{"const":"c"}}}]}`, `{"":"d","x":"d"}`,
			Issue{"/", "oneOf", `one of "a", "b"`, `"d"`, "/oneOf"}},
	} {
		issues, more := mustCompile(t, tt.schema, schemaOptions{}).explain(mustDecode(t, tt.value), true)
		if !slices.Equal(issues, []Issue{tt.want}) || more {
			t.Errorf("%s: explain(%s) = %+v, %t want %+v", tt.schema, tt.value, issues, more, tt.want)
		}
	}
	s := mustCompile(t, `{"properties":{"a/b":{"items":false}}}`, schemaOptions{})
	if issues, _ := s.explain(map[string]any{"a/b": []any{}}, true); issues != nil {
		t.Errorf("explain of a value that fits = %+v", issues)
	}
	if issues, _ := s.explain([]any{}, true); len(issues) != 1 || issues[0].Want != "object" {
		t.Errorf("explain of an array = %+v", issues)
	}
}

// TestSchemaExplainUnion holds that a branch which is given up on deep down, as it has too many misfits,
// leaves no trace: not in the depth of what is walked after it.
func TestSchemaExplainUnion(t *testing.T) {
	t.Parallel()
	s := mustCompile(t, `{"items":{"anyOf":[{"$ref":"#/$defs/a"},{"maxItems":0}]},"$defs":{"a":{"type":["array","string"],"items":{"$ref":"#/$defs/a"}}}}`,
		schemaOptions{anyRoot: true})
	deep := strings.Repeat("[", 60) + "1,2,3,4,5,6,7,8,9" + strings.Repeat("]", 60)
	issues, more := s.explain(mustDecode(t, "["+deep+","+deep+","+deep+"]"), true)
	if len(issues) != 3 || more {
		t.Errorf("%d issues, more=%t: %v", len(issues), more, issues)
	}
	for i, is := range issues {
		if want := (Issue{fmt.Sprintf("/%d", i), "maxItems", "at most 0 items", "1", "/items/anyOf/1/maxItems"}); is != want {
			t.Errorf("issue %d = %+v want %+v", i, is, want)
		}
	}
}

// TestIssueWords holds that an issue made by hand reads as one of ours.
func TestIssueWords(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		is   Issue
		want string
	}{
		{Issue{Keyword: "required", Want: "required string, missing"}, "required string, missing"},
		{Issue{Keyword: "type", Want: "integer", Got: `"1" (string)`}, `want integer, got "1" (string)`},
		{Issue{Keyword: "type", Want: `(as "find") integer`, Got: `"1" (string)`}, `(as "find") want integer, got "1" (string)`},
	} {
		if got := tt.is.words(); got != tt.want {
			t.Errorf("%+v reads %q want %q", tt.is, got, tt.want)
		}
	}
}

func TestSchemaNormalize(t *testing.T) {
	t.Parallel()
	const schema = `{"type":"object","properties":{
		"n":{"type":"integer","maximum":100},"f":{"type":"number"},"b":{"type":"boolean"},"s":{"type":"string"},
		"e":{"type":"string","enum":["Open","Closed","open "]},"c":{"enum":["red","green"]},
		"o":{"type":"object","properties":{"x":{"type":"integer"}},"required":["x"]},
		"a":{"type":"array","items":{"type":"integer"}},
		"u":{"anyOf":[{"type":"integer"},{"type":"null"}]},
		"w":{"anyOf":[{"type":"integer"},{"type":"boolean"}]},
		"v":{"anyOf":[{"type":"string"},{"type":"integer"}]},
		"m":{"anyOf":[{"type":"array","items":{"type":"integer"}},{"type":"array","items":{"type":"number"}}]},
		"r":{"$ref":"#/$defs/r"},
		"p":{"patternProperties":{"^x":true},"additionalProperties":{"type":"integer"}}},
		"required":["s"],"$defs":{"r":{"type":"object","properties":{"k":{"type":"boolean"}}}}}`
	s := mustCompile(t, schema, schemaOptions{input: true})
	for _, tt := range []struct {
		in, out     string // without s; out is empty if nothing may be done
		destructive bool
		changes     int
	}{
		{`{}`, `{}`, false, 0},
		{`{"n":null,"b":null}`, `{}`, true, 2},
		{`{"u":null}`, `{"u":null}`, true, 0},
		{`{"n":"5"}`, `{"n":5}`, true, 1},
		{`{"n":"5.0"}`, `{"n":5.0}`, true, 1},
		{`{"n":"500"}`, ``, true, 0},
		{`{"n":" 5"}`, ``, false, 0},
		{`{"n":"five"}`, ``, false, 0},
		{`{"n":"1.5"}`, ``, false, 0},
		{`{"f":"12345678901234567"}`, ``, false, 0},
		{`{"n":"-999999999999999"}`, `{"n":-999999999999999}`, true, 1},
		{`{"f":"9007199254740993"}`, ``, true, 0}, // another one in a float64
		{`{"f":"3.14159265358979"}`, `{"f":3.14159265358979}`, true, 1},
		{`{"n":"5","p":{"x":"5","y":"5"}}`, `{"n":5,"p":{"x":"5","y":5}}`, false, 2}, // the pattern takes the text
		{`{"f":"-1.5e3"}`, `{"f":-1.5e3}`, true, 1},
		{`{"b":"true"}`, `{"b":true}`, true, 1},
		{`{"b":"yes"}`, ``, false, 0},
		{`{"b":1}`, ``, false, 0},
		{`{"n":"null"}`, ``, false, 0},
		{`{"c":"RED "}`, `{"c":"red"}`, false, 1},
		{`{"c":"RED"}`, ``, true, 0},
		{`{"e":"OPEN"}`, ``, false, 0}, // two readings
		{`{"e":"CLOSED"}`, `{"e":"Closed"}`, false, 1},
		{`{"o":"{\"x\":1}"}`, `{"o":{"x":1}}`, false, 1},
		{`{"o":"{\"x\":1}"}`, ``, true, 0},
		{`{"o":"{\"y\":1}"}`, ``, false, 0},
		{`{"o":{"x":"1"}}`, `{"o":{"x":1}}`, false, 1},
		{`{"a":"[1,2]"}`, `{"a":[1,2]}`, false, 1},
		{`{"a":["1",2,"3"]}`, `{"a":[1,2,3]}`, false, 2},
		{`{"a":1}`, ``, false, 0},
		{`{"u":"7"}`, `{"u":7}`, false, 1},
		{`{"w":"7"}`, `{"w":7}`, false, 1},
		{`{"v":"7"}`, `{"v":"7"}`, false, 0},
		{`{"m":["1"]}`, ``, false, 0}, // two branches
		{`{"r":{"k":"false"}}`, `{"r":{"k":false}}`, false, 1},
		{`{"r":{"k":null}}`, `{"r":{}}`, false, 1},
		{`{"n":"5","b":7}`, ``, false, 0}, // the whole must fit
		{`{"s":null}`, ``, false, 0},
		{`{"s":5}`, ``, false, 0},
	} {
		in := mustDecode(t, tt.in).(map[string]any)
		if _, ok := in["s"]; !ok {
			in["s"] = "text"
		}
		before := fmt.Sprint(in)
		out, changes, ok := s.normalize(in, tt.destructive)
		if fmt.Sprint(in) != before {
			t.Errorf("normalize(%s) changed its argument to %v", tt.in, in)
		}
		want := in
		if tt.out != "" {
			want = mustDecode(t, tt.out).(map[string]any)
			want["s"] = "text"
		}
		if ok != (tt.out != "") || fmt.Sprint(out) != fmt.Sprint(want) || len(changes) != tt.changes {
			t.Errorf("normalize(%s, %t) = %v, %v, %t want %v, %d changes", tt.in, tt.destructive, out, changes, ok, want, tt.changes)
		}
	}
}

func TestSchemaHeaders(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		schema string
		want   []headerParam
		bad    bool
	}{
		{`{"properties":{"q":{"type":"string"}}}`, nil, false},
		{`{"properties":{"r":{"type":"string","x-mcp-header":"Region"},"a":{"properties":{"b":{"type":"integer","x-mcp-header":"B"}}}}}`,
			[]headerParam{{"B", []string{"a", "b"}}, {"Region", []string{"r"}}}, false},
		{`{"properties":{"x-mcp-header":{"type":"string"}}}`, nil, false},
		{`{"properties":{"a":{"type":"boolean","x-mcp-header":"a"},"b":{"type":"string","x-mcp-header":"A"}}}`, nil, true},
		{`{"properties":{"a":{"type":"number","x-mcp-header":"A"}}}`, nil, true},
		{`{"properties":{"a":{"type":["string","null"],"x-mcp-header":"A"}}}`, nil, true},
		{`{"properties":{"a":{"x-mcp-header":"A"}}}`, nil, true},
		{`{"properties":{"a":{"type":"string","x-mcp-header":""}}}`, nil, true},
		{`{"properties":{"a":{"type":"string","x-mcp-header":"A B"}}}`, nil, true},
		{`{"properties":{"a":{"type":"string","x-mcp-header":"Ä"}}}`, nil, true},
		{`{"properties":{"a":{"type":"string","x-mcp-header":7}}}`, nil, true},
		{`{"type":"object","x-mcp-header":"A"}`, nil, true},
		{`{"properties":{"a":{"type":"array","items":{"type":"string","x-mcp-header":"A"}}}}`, nil, true},
		{`{"anyOf":[{"properties":{"a":{"type":"string","x-mcp-header":"A"}}}]}`, nil, true},
		{`{"$defs":{"a":{"type":"string","x-mcp-header":"A"}}}`, nil, true},
		{`{"if":{"properties":{"a":{"type":"string","x-mcp-header":"A"}}}}`, nil, true},
		{`{"whatever":{"type":"string","x-mcp-header":"A"}}`, nil, true},
		{`{"default":{"x-mcp-header":"A"},"const":{"x-mcp-header":"A"},"enum":[{"x-mcp-header":"A"}]}`, nil, false},
	} {
		s, err := compileSchema([]byte(tt.schema), schemaOptions{input: true, headers: true})
		if tt.bad != (refusal(err) == "x-mcp-header") {
			t.Errorf("%s: %v, want refused=%t", tt.schema, err, tt.bad)
		} else if !tt.bad && !reflect.DeepEqual(s.headers(), tt.want) {
			t.Errorf("%s: headers %v want %v", tt.schema, s.headers(), tt.want)
		}
		if _, err := compileSchema([]byte(tt.schema), schemaOptions{input: true}); err != nil {
			t.Errorf("%s: refused where nobody asks: %v", tt.schema, err)
		}
	}
}

func TestSchemaUnchecked(t *testing.T) {
	t.Parallel()
	const schema = `{"properties":{"a":{"pattern":"(?=a)"},"b":{"format":"date"},"c":{"format":"colour"},"d":{"contentEncoding":"base64"}},
		"patternProperties":{"\\1":false},"additionalProperties":false}`
	want := []unchecked{
		{"/patternProperties/\\1", "patternProperties", errPattern.Error()},
		{"/properties/a/pattern", "pattern", errPattern.Error()},
		{"/properties/b/format", "format", "annotation"},
		{"/properties/c/format", "format", "not known"},
		{"/properties/d/contentEncoding", "contentEncoding", "annotation"},
	}
	s := mustCompile(t, schema, schemaOptions{})
	if got := s.unchecked(); !slices.Equal(got, want) {
		t.Errorf("unchecked() = %v want %v", got, want)
	}
	// A name that a pattern may or may not match is not certainly additional.
	if got := s.validate(map[string]any{"x": nil}); got != verdictValid {
		t.Errorf("validate = %d", got)
	}
	if got := len(mustCompile(t, schema, schemaOptions{assertFormat: true}).unchecked()); got != 4 {
		t.Errorf("%d unchecked with formats asserted, want 4", got)
	}
	for schema, want := range map[string]string{
		`{"pattern":"(?=a)"}`:          "unchecked",
		`{"format":"date"}`:            "",
		`{"contentEncoding":"base64"}`: "",
	} {
		if _, err := compileSchema([]byte(schema), schemaOptions{strict: true}); refusal(err) != want {
			t.Errorf("strict %s: %v, want %q", schema, err, want)
		}
	}
	if _, err := compileSchema([]byte(`{"format":"colour"}`), schemaOptions{strict: true, assertFormat: true}); refusal(err) != "unchecked" {
		t.Errorf("strict format: %v", err)
	}
}

// TestSchemaGoValues holds that maps built by hand are judged as what they
// encode to.
func TestSchemaGoValues(t *testing.T) {
	t.Parallel()
	type args struct {
		N int `json:"n"`
	}
	s := mustCompile(t, `{"type":"object","properties":{"n":{"type":"integer","maximum":3},"l":{"type":"array","items":{"type":"string"},"uniqueItems":true},"o":{"type":"object"},
		"e":{"enum":[1,"a",null]}}}`, schemaOptions{input: true})
	cycle := map[string]any{}
	cycle["n"] = cycle
	for _, tt := range []struct {
		v    any
		want validity
	}{
		{map[string]any{"n": 3}, verdictValid},
		{map[string]any{"n": 3.0}, verdictValid},
		{map[string]any{"n": int8(3)}, verdictValid},
		{map[string]any{"n": 3.5}, verdictInvalid},
		{map[string]any{"n": 4}, verdictInvalid},
		{map[string]any{"n": math.NaN()}, verdictInvalid},
		{map[string]any{"n": json.Number("three")}, verdictInvalid},
		{map[string]any{"n": json.Number("")}, verdictInvalid},
		{map[string]any{"n": func() {}}, verdictInvalid},
		{map[string]any{"l": []string{"a", "b"}}, verdictValid},
		{map[string]any{"l": []string{"a", "a"}}, verdictInvalid},
		{map[string]any{"e": 1.0}, verdictValid},
		{map[string]any{"e": 2}, verdictInvalid},
		{map[string]any{"o": map[string]any(nil), "l": []any{}}, verdictInvalid}, // written as null
		{map[string]any{"o": map[string]any{}, "l": []any(nil)}, verdictInvalid},
		{map[string]any{"e": []any(nil)}, verdictValid},
		{map[string]int{"n": 3}, verdictValid},
		{args{3}, verdictValid},
		{&args{4}, verdictInvalid},
		{[]int{}, verdictInvalid},
		{cycle, verdictInvalid},
		{nil, verdictInvalid},
	} {
		if got := s.validate(tt.v); got != tt.want {
			t.Errorf("validate(%T %.40v) = %d want %d", tt.v, tt.v, got, tt.want)
		}
		if issues, more := s.explain(tt.v, true); (len(issues) == 0) != (tt.want == verdictValid) || len(feedback("t", issues, more)) > maxFeedback {
			t.Errorf("explain(%T) = %v", tt.v, issues)
		}
	}
}

func TestSchemaAllocations(t *testing.T) {
	corpus := loadCorpus(t)
	tool := func(server, name string, output bool) string {
		for _, tool := range corpus[server].Tools {
			if tool.Name == name && output {
				return string(tool.OutputSchema)
			} else if tool.Name == name {
				return string(tool.InputSchema)
			}
		}
		t.Fatalf("no %s of %s", name, server)
		return ""
	}
	entity := `{"name":"entity","entityType":"type","observations":["one","two","obs"]}`
	for _, tt := range []struct{ name, schema, value string }{
		{"small", tool("modelcontextprotocol__server-filesystem", "read_text_file", false), `{"path":"a/b.txt","head":10}`},
		{"array", tool("modelcontextprotocol__server-filesystem", "edit_file", false),
			`{"path":"a","edits":[{"oldText":"a","newText":"b"},{"oldText":"c","newText":"d"}],"dryRun":true}`},
		{"enums", tool("modelcontextprotocol__server-github", "list_issues", false),
			`{"owner":"a","repo":"b","direction":"asc","labels":["x","y"],"page":1,"per_page":50,"sort":"created","state":"open"}`},
		{"graph", tool("modelcontextprotocol__server-memory", "create_entities", false), `{"entities":[` + entity + `]}`},
		{"refs", tool("notionhq__notion-mcp-server", "API-post-search", false),
			`{"query":"a","sort":{"direction":"ascending","timestamp":"last_edited_time"},"filter":{"value":"page","property":"object"},"page_size":10}`},
		{"output", tool("modelcontextprotocol__server-memory", "read_graph", true),
			`{"entities":[` + strings.Repeat(entity+",", 49) + entity + `],"relations":[{"from":"a","to":"b","relationType":"r"}]}`},
		{"unions", `{"items":{"oneOf":[{"type":"string","minLength":9},{"type":"integer","minimum":7},{"type":"null"},{"type":"object","required":["a"]},{"type":"array","minItems":3}]}}`,
			`["abcdefghij",8,null,{"a":1},[1,2,3]]`},
		{"numbers", `{"items":{"minimum":0.5,"maximum":1e3,"multipleOf":0.25}}`, `[0.5,1.25,1e2,999.75,1000]`},
		{"strings", `{"items":{"minLength":2,"maxLength":9,"pattern":"^[a-zäöü]+$"}}`, `["ab","äöüäöü","abcdefghi"]`},
		{"members", `{"additionalProperties":{"type":"integer"},"patternProperties":{"^x":{"type":"string"}},"propertyNames":{"maxLength":4}}`, `{"a":1,"b":2,"xy":"z"}`},
		{"conditions", `{"if":{"required":["a"]},"then":{"required":["b"]},"not":{"required":["c"]},"dependentRequired":{"a":["b"]}}`, `{"a":1,"b":2}`},
		{"values", `{"items":{"enum":[1,2.5,null,true,"a"]},"uniqueItems":true,"contains":{"const":1}}`, `[1.0,2.5,null,true,"a"]`},
	} {
		s := mustCompile(t, tt.schema, schemaOptions{anyRoot: true})
		v := mustDecode(t, tt.value)
		if got := s.validate(v); got != verdictValid {
			issues, _ := s.explain(v, true)
			t.Errorf("%s: validity %d: %v", tt.name, got, issues)
		}
		if n := testing.AllocsPerRun(100, func() { s.validate(v) }); n != 0 {
			t.Errorf("%s: %v allocations for a value that fits, want 0", tt.name, n)
		}
	}
}

// checkDecode holds that decodeJSON does what encoding/json does.
func checkDecode(t *testing.T, text []byte) {
	t.Helper()
	var want any
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	err := d.Decode(&want)
	if err == nil && len(bytes.Trim(text[d.InputOffset():], " \t\r\n")) > 0 {
		err = errors.New("more than one value")
	}
	if got, ok := decodeJSON(text); ok != (err == nil) || ok && !reflect.DeepEqual(got, want) {
		t.Errorf("decodeJSON(%q) = %#v, %t want %#v, %v", text, got, ok, want, err)
	}
}

func TestDecodeJSON(t *testing.T) {
	t.Parallel()
	for _, text := range []string{``, ` `, `1`, ` -1.5E+3 `, `01`, `1.`, `"`, `"a"`, `"\u00e9\ud83d\ude0e\ud83d\n\\\""`, "\"\xff\xc3\xa9\"", "\"\x01\"", `true`, `tru`, `null`,
		`[]`, `[ ]`, `[1,[2 , "x"],{}]`, `[1,]`, `[,1]`, `{}`, `{ }`, `{"a":1,"a":2}`, "{\n\t\"a\" : [ false , null ] , \"b\":{\"c\":-0}\r}", `{"a"}`, `{"a":}`, `{a:1}`,
		`1 2`, `[1] x`, strings.Repeat("[", 10_001) + strings.Repeat("]", 10_001)} {
		checkDecode(t, []byte(text))
	}
}

// TestSchemaShared checks one schema from many goroutines, for the race
// detector.
func TestSchemaShared(t *testing.T) {
	t.Parallel()
	s := mustCompile(t, `{"properties":{"a":{"anyOf":[{"type":"string","pattern":"^a"},{"enum":[1,2]}]}},"unevaluatedProperties":false}`, schemaOptions{})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for _, text := range []string{`{"a":"ab"}`, `{"a":3}`, `{"b":1}`} {
				v, _ := decodeJSON([]byte(text))
				issues, _ := s.explain(v, i%2 == 0)
				if valid := text == `{"a":"ab"}`; (s.validate(v) == verdictValid) != valid || (len(issues) == 0) != valid {
					t.Errorf("%s: %v", text, issues)
				}
			}
		})
	}
	wg.Wait()
}

func TestDecimal(t *testing.T) {
	t.Parallel()
	sorted := []string{"-1e400", "-10.5", "-10.25", "-1", "-0.5", "-1e-400", "0", "1e-400", "0.001", "0.01", "0.5", "1", "1.5", "9.75", "10",
		"9007199254740992", "9007199254740993", "1e17", "100000000000000001", "123456789012345678901234567890.5", "1e400"}
	for i, a := range sorted {
		for j, b := range sorted {
			x, ok1 := parseDecimal(a)
			y, ok2 := parseDecimal(b)
			if got, want := x.cmp(&y), cmp.Compare(i, j); !ok1 || !ok2 || got != want {
				t.Errorf("cmp(%s, %s) = %d want %d", a, b, got, want)
			}
		}
	}
	for _, same := range [][]string{{"1", "1.0", "1e0", "10e-1", "0.1e1", "1.000", "0.0010E+3"}, {"0", "-0", "0.0", "0e9", "-0.00E-5"}, {"150", "1.5e2", "150.0"}} {
		for _, b := range same {
			x, _ := parseDecimal(same[0])
			y, ok := parseDecimal(b)
			if !ok || x.cmp(&y) != 0 || y.kind() != kindInteger {
				t.Errorf("%s is not %s", b, same[0])
			}
		}
	}
	for _, bad := range []string{"", "-", ".", "-.5", ".5", "1e", "1e+", "e1", "1x", "x", "1.2.3", "1e1.5", "--1", "1e401", "1e-401", strings.Repeat("1", 401), "1e99999999999999999999", "NaN", "Infinity", "0x10"} {
		if _, ok := parseDecimal(bad); ok {
			t.Errorf("parseDecimal(%.20q) is a number", bad)
		}
	}
	for _, tt := range []struct {
		a, b string
		want bool
	}{
		{"19.99", "0.01", true}, {"0", "7", true}, {"0.0075", "0.0001", true}, {"0.00751", "0.0001", false}, {"1e308", "0.123456789", false},
		{"1e308", "0.5", true}, {"9", "3", true}, {"9", "2", false}, {"-9", "3", true}, {"4.5", "1.5", true}, {"1e400", "1e-400", true},
		{"36893488147419103232", "18446744073709551616", true}, {"36893488147419103233", "18446744073709551616", false}, {"5", "10", false}, {"100", "1e2", true},
	} {
		x, _ := parseDecimal(tt.a)
		y, _ := parseDecimal(tt.b)
		if got := x.multiple(&y); got != tt.want {
			t.Errorf("%s multiple of %s = %t want %t", tt.a, tt.b, got, tt.want)
		}
	}
}

func TestTranslatePattern(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		pattern   string
		yes, no   []string
		untouched bool // cannot be held
	}{
		{`^[^\s@]+$`, []string{"a"}, []string{"a b", "a\u00a0b", "a\ufeffb", "a@b"}, false},
		{`^\S$`, []string{"a", "\u200b"}, []string{" ", "\u2003", "\u2028"}, false},
		{`^[\S]$`, []string{"a", "é"}, []string{" ", "\u3000"}, false},
		{`^[\s-x]$`, []string{"-", "x", " "}, []string{"y"}, false},
		{`^.$`, []string{"a", "\u0085"}, []string{"\n", "\u2028"}, false},
		{`^\cA$`, []string{"\x01"}, []string{"A"}, false},
		{`^\u0041\u{42}$`, []string{"AB"}, []string{"ab"}, false},
		{`^\ud83d\ude0e$`, []string{"😎"}, []string{"a"}, false},
		{`^\ud83d$`, nil, []string{"😎"}, false},
		{`^\/\-\@\_$`, []string{"/-@_"}, nil, false},
		{`^[\w\-.]+$`, []string{"a-b.c"}, []string{"a b"}, false},
		{`^[^]$`, []string{"a", "\n"}, []string{""}, false},
		{`[]`, nil, []string{"", "a"}, false},
		{`^[[a]$`, []string{"[", "a"}, []string{"b"}, false},
		{`^a]$`, []string{"a]"}, nil, false},
		{`^(?<year>\d{4})$`, []string{"2025"}, []string{"٢٠٢٥"}, false},
		{`^(?:a|b)$`, []string{"a"}, nil, false},
		{`a$`, []string{"ba"}, []string{"a\n"}, false},
		{`^\0$`, []string{"\x00"}, nil, false},
		{`^[\b]$`, []string{"\b"}, nil, false},
		{`^\p{Letter}$`, []string{"é"}, []string{"1"}, false},
		{`(?=a)`, nil, nil, true},
		{`(?!a)`, nil, nil, true},
		{`(?<=a)`, nil, nil, true},
		{`(?<!a)`, nil, nil, true},
		{`(?i)a`, nil, nil, true},
		{`(?P<n>a)`, nil, nil, true},
		{`(a)\1`, nil, nil, true},
		{`\A`, nil, nil, true},
		{`\z`, nil, nil, true},
		{`\Z`, nil, nil, true},
		{`\Qa\E`, nil, nil, true},
		{`\C`, nil, nil, true},
		{`\a`, nil, nil, true},
		{`\01`, nil, nil, true},
		{`\pL`, nil, nil, true},
		{`\x{41}`, nil, nil, true},
		{`\u12`, nil, nil, true},
		{`\`, nil, nil, true},
		{`a{1001}`, nil, nil, true},
		{`((a{1,100}){1,100}){1,100}`, nil, nil, true},
		{`(`, nil, nil, true},
	} {
		p, err := compilePattern(tt.pattern, 1024, 10_000)
		if (err != nil) != tt.untouched {
			t.Errorf("compilePattern(%s): %v, want held=%t", tt.pattern, err, !tt.untouched)
			continue
		}
		for _, s := range tt.yes {
			if !p.MatchString(s) {
				t.Errorf("%s (%s) does not match %q", tt.pattern, p.Regexp, s)
			}
		}
		for _, s := range tt.no {
			if p.MatchString(s) {
				t.Errorf("%s (%s) matches %q", tt.pattern, p.Regexp, s)
			}
		}
	}
}

func TestFingerprint(t *testing.T) {
	t.Parallel()
	in, out := `{"type":"object","properties":{"a":{"type":"string"},"b":{}}}`, `{"type":"object"}`
	want := fingerprint([]byte(in), []byte(out))
	if !strings.HasPrefix(want, "sha256:") || len(want) != len("sha256:")+64 {
		t.Errorf("fingerprint = %s", want)
	}
	if got := fingerprint([]byte(` { "properties" : {"b":{}, "a":{"type":"string"}}, "type":"object"}`), []byte(out)); got != want {
		t.Errorf("order and space matter: %s want %s", got, want)
	}
	for _, other := range [][2]string{{out, in}, {in, ""}, {in, "{}"}, {`{"type":"object","properties":{"a":{"type":"String"},"b":{}}}`, out}, {"", ""}} {
		if fingerprint([]byte(other[0]), []byte(other[1])) == want {
			t.Errorf("%v has the same fingerprint", other)
		}
	}
	for _, tt := range []struct{ old, new, want string }{
		{in, in, ""},
		{in, `{"type":"object","properties":{"a":{"type":"string"},"b":{},"x":{}}}`, `property added "x"`},
		{in, `{"type":"object","properties":{"a":{"type":"string"}}}`, `property removed "b"`},
		{in, `{"type":"object","properties":{"a":{"type":"number"},"b":{}}}`, `property changed "a"`},
		{in, `{"type":"object","properties":{"a":{"type":"string"},"b":{}},"required":["a"]}`, `keyword added "required"`},
		{in, `{"properties":{"a":{"type":"string"},"b":{}}}`, `keyword removed "type"`},
		{`true`, `false`, "changed"},
		{``, `{"type":"object"}`, `keyword added "type"`},
	} {
		if got := schemaDiff([]byte(tt.old), []byte(tt.new)); got != tt.want {
			t.Errorf("schemaDiff(%s, %s) = %s want %s", tt.old, tt.new, got, tt.want)
		}
	}
}

// TestSchemaLeaf holds that the compiler can be copied alone: its files refer
// to no other of the package.
func TestSchemaLeaf(t *testing.T) {
	t.Parallel()
	known := map[string]bool{}
	unresolved := map[string]token.Position{}
	fset := token.NewFileSet()
	for _, name := range []string{"schema.go", "schema_text.go"} {
		f, err := parser.ParseFile(fset, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Imports {
			known[path.Base(strings.Trim(d.Path.Value, `"`))] = true
		}
		for name := range f.Scope.Objects {
			known[name] = true
		}
		for _, id := range f.Unresolved {
			unresolved[id.Name] = fset.Position(id.Pos())
		}
	}
	for name, pos := range unresolved {
		if !known[name] && types.Universe.Lookup(name) == nil {
			t.Errorf("%s: %s is declared elsewhere", pos, name)
		}
	}
}

// reasons are all that a [SchemaError] may say.
var reasons = []string{"dialect", "dynamic-ref", "keyword-shape", "not-json", "number-range", "ref-cycle", "ref-depth", "remote-ref", "root-type",
	"schema-branches", "schema-depth", "schema-enum", "schema-nodes", "schema-patterns", "schema-size", "unchecked", "unresolved-ref", "vocabulary", "x-mcp-header"}

// checkSchemaError holds what every refusal must be.
func checkSchemaError(t *testing.T, err error) {
	t.Helper()
	e, ok := err.(*SchemaError)
	if !ok || !slices.Contains(reasons, e.Reason) {
		t.Fatalf("refused with %T %v", err, err)
	}
	if len(e.Pointer) > maxPath+8 || len(e.Detail) > 256 || len(e.Error()) > 1<<10 || strings.ContainsAny(e.Error(), "\n\r\x00") {
		t.Fatalf("an error without bounds: %q %q", e.Pointer, e.Detail)
	}
}

// eachSuiteTest calls f for one test of every group of the suite.
func eachSuiteTest(tb testing.TB, f func(schema, value []byte)) {
	for _, dir := range []string{"draft2020-12", "draft7", "draft2020-12/optional"} {
		files, err := filepath.Glob(schemaData + "suite/" + dir + "/*.json")
		if err != nil {
			tb.Fatal(err)
		}
		for _, file := range files {
			for _, g := range loadSuite(tb, file) {
				f(inDialect(g.Schema, dir), g.Tests[len(g.Tests)-1].Data)
			}
		}
	}
}

// An oracle judges a value by a schema as the specification reads, without bounds, haste or an eye on
// memory. It knows the keywords that a generator writes.
type oracle struct {
	doc    map[string]any
	draft7 bool
}

// judge reports whether x fits s, and what s evaluates of it if it does: names, and items by number.
func (o oracle) judge(s, x any) (ok bool, seen map[string]bool) {
	seen = map[string]bool{}
	m, isMap := s.(map[string]any)
	if !isMap {
		return s == true, seen
	}
	if _, ref := m["$ref"]; ref && o.draft7 {
		m = map[string]any{"$ref": m["$ref"]}
	}
	ok = true
	must := func(good bool) { ok = good && ok }
	fits := func(s, x any) bool { ok, _ := o.judge(s, x); return ok }
	here := func(s any) bool { // applies s to x itself
		fit, also := o.judge(s, x)
		for name := range also {
			seen[name] = fit && also[name] || seen[name]
		}
		return fit
	}
	list := func(kw string) []any { l, _ := m[kw].([]any); return l }
	object := func(kw string) map[string]any { l, _ := m[kw].(map[string]any); return l }
	bound := func(kw string, n *big.Rat, good func(int) bool) {
		if b, has := m[kw].(json.Number); has {
			must(good(n.Cmp(rat(b))))
		}
	}
	atLeast, atMost := func(c int) bool { return c >= 0 }, func(c int) bool { return c <= 0 }
	size := func(what string, n int) {
		bound("min"+what, big.NewRat(int64(n), 1), atLeast)
		bound("max"+what, big.NewRat(int64(n), 1), atMost)
	}
	has := func(kw string) bool { _, ok := m[kw]; return ok }
	equal := func(v any) bool { return equalByValue(v, x) }

	if ref, is := m["$ref"].(string); is {
		var to any = o.doc
		for _, token := range strings.Split(ref, "/")[1:] {
			if l, is := to.([]any); is {
				to = l[token[0]-'0']
			} else {
				to = to.(map[string]any)[token]
			}
		}
		must(here(to))
	}
	if t, is := m["type"].(string); is {
		must(hasType(x, t))
	}
	must(list("type") == nil || slices.ContainsFunc(list("type"), func(t any) bool { return hasType(x, t.(string)) }))
	must(!has("enum") || slices.ContainsFunc(list("enum"), equal))
	must(!has("const") || equal(m["const"]))
	switch v := x.(type) {
	case json.Number:
		bound("minimum", rat(v), atLeast)
		bound("maximum", rat(v), atMost)
		bound("exclusiveMinimum", rat(v), func(c int) bool { return c > 0 })
		bound("exclusiveMaximum", rat(v), func(c int) bool { return c < 0 })
		if d, is := m["multipleOf"].(json.Number); is {
			must(new(big.Rat).Quo(rat(v), rat(d)).IsInt())
		}
	case string:
		size("Length", utf8.RuneCountInString(v))
		if p, is := m["pattern"].(string); is {
			must(regexp.MustCompile(p).MatchString(v))
		}
	case []any:
		size("Items", len(v))
		prefix, rest := list("prefixItems"), "items"
		if o.draft7 {
			if prefix = list("items"); prefix != nil {
				rest = "additionalItems"
			}
		}
		contained := 0
		for i, e := range v {
			key := fmt.Sprint(i)
			if i < len(prefix) {
				must(fits(prefix[i], e))
				seen[key] = true
			} else if has(rest) {
				must(fits(m[rest], e))
				seen[key] = true
			}
			if has("contains") && fits(m["contains"], e) {
				contained++
				seen[key] = true
			}
			must(m["uniqueItems"] != true || !slices.ContainsFunc(v[:i], func(f any) bool { return equalByValue(e, f) }))
		}
		if has("contains") && !o.draft7 {
			size("Contains", contained)
		}
		must(!has("contains") || contained > 0 || has("minContains") && !o.draft7)
	case map[string]any:
		size("Properties", len(v))
		must(hasAll(v, list("required")))
		for name, e := range v {
			s, known := object("properties")[name]
			must(!known || fits(s, e))
			for p, s := range object("patternProperties") {
				if regexp.MustCompile(p).MatchString(name) {
					known = true
					must(fits(s, e))
				}
			}
			if !known && has("additionalProperties") {
				known = true
				must(fits(m["additionalProperties"], e))
			}
			seen[name] = known || seen[name]
			must(!has("propertyNames") || fits(m["propertyNames"], name))
		}
		for _, kw := range []string{"dependencies", "dependentRequired", "dependentSchemas"} {
			for name, d := range object(kw) {
				if _, given := v[name]; !given || o.draft7 && kw != "dependencies" {
					continue
				} else if names, is := d.([]any); is {
					must(hasAll(v, names))
				} else {
					must(here(d))
				}
			}
		}
	}
	for _, s := range list("allOf") {
		must(here(s))
	}
	for _, kw := range []string{"anyOf", "oneOf"} {
		n := 0
		for _, s := range list(kw) {
			if here(s) {
				n++
			}
		}
		must(!has(kw) || n == 1 || n > 1 && kw == "anyOf")
	}
	must(!has("not") || !fits(m["not"], x))
	if has("if") {
		kw := "else"
		if here(m["if"]) {
			kw = "then"
		}
		must(!has(kw) || here(m[kw]))
	}
	if v, is := x.([]any); is && has("unevaluatedItems") && !o.draft7 {
		for i, e := range v {
			must(seen[fmt.Sprint(i)] || fits(m["unevaluatedItems"], e))
			seen[fmt.Sprint(i)] = true
		}
	}
	if v, is := x.(map[string]any); is && has("unevaluatedProperties") && !o.draft7 {
		for name, e := range v {
			must(seen[name] || fits(m["unevaluatedProperties"], e))
			seen[name] = true
		}
	}
	return ok, seen
}

func rat(n json.Number) *big.Rat {
	r, _ := new(big.Rat).SetString(string(n))
	return r
}

func hasAll(m map[string]any, names []any) bool {
	return !slices.ContainsFunc(names, func(name any) bool { _, has := m[name.(string)]; return !has })
}

func hasType(x any, kind string) bool {
	switch v := x.(type) {
	case nil:
		return kind == "null"
	case bool:
		return kind == "boolean"
	case string:
		return kind == "string"
	case json.Number:
		return kind == "number" || kind == "integer" && rat(v).IsInt()
	case []any:
		return kind == "array"
	}
	return kind == "object"
}

func equalByValue(a, b any) bool {
	switch x := a.(type) {
	case json.Number:
		y, is := b.(json.Number)
		return is && rat(x).Cmp(rat(y)) == 0
	case []any:
		y, is := b.([]any)
		return is && slices.EqualFunc(x, y, equalByValue)
	case map[string]any:
		y, is := b.(map[string]any)
		return is && maps.EqualFunc(x, y, equalByValue)
	}
	return reflect.DeepEqual(a, b)
}

// A generator makes schemas of every keyword that asserts something, and values that may fit them.
type generator struct {
	*rand.Rand
	draft7 bool
}

func oneOf[T any](g generator, of ...T) T { return of[g.IntN(len(of))] }

func someOf[T any](g generator, most int, make func() T) []any {
	list := []any{}
	for range g.IntN(most + 1) {
		list = append(list, make())
	}
	return list
}

func (g generator) name() string    { return oneOf(g, "a", "b", "ab", "c", "a", "b", "ab", "c", "") }
func (g generator) pattern() string { return oneOf(g, "^a", "b$", "^[^a]*$", "a|b", "ö") }
func (g generator) kind() string {
	return oneOf(g, "null", "boolean", "integer", "number", "string", "array", "object", "array", "object")
}

func (g generator) number() json.Number {
	return oneOf[json.Number](g, "0", "1", "-1", "2", "1.0", "0.5", "1.5", "3", "1e1", "10", "12", "0.1", "0.3", "-0", "2.50",
		"9007199254740993", "9007199254740992", "100000000000000000000", "1e20")
}

func (g generator) value(depth int) any {
	switch n := g.IntN(10); {
	case n < 3 || n >= 6 && depth == 0:
		return g.number()
	case n < 5:
		return oneOf(g, "", "a", "b", "ab", "äö", "😀", "true", "1", "null", "A", "[1]", "0.5", " a", `{"a":1}`)
	case n < 6:
		return oneOf[any](g, true, false, nil)
	case n < 8:
		return someOf(g, 3, func() any { return g.value(depth - 1) })
	}
	m := map[string]any{}
	for range g.IntN(4) {
		m[g.name()] = g.value(depth - 1)
	}
	return m
}

func (g generator) schema(depth int) any {
	if depth == 0 || g.IntN(8) == 0 {
		return oneOf[any](g, true, false, map[string]any{}, map[string]any{"type": g.kind()}, map[string]any{"type": g.kind()}, map[string]any{"$ref": g.ref()})
	}
	m := map[string]any{}
	for range 1 + g.IntN(4) {
		kw := oneOf(g, "$ref", "type", "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
			"minLength", "maxLength", "pattern", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains",
			"prefixItems", "items", "items", "additionalItems", "unevaluatedItems", "unevaluatedProperties", "unevaluatedProperties",
			"properties", "properties", "properties", "required", "patternProperties", "additionalProperties", "additionalProperties",
			"propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
			"allOf", "anyOf", "oneOf", "not", "if", "then", "else")
		m[kw] = g.keyword(kw, depth-1)
	}
	return m
}

func (g generator) keyword(kw string, depth int) any {
	sub := func() any { return g.schema(depth) }
	names := func() any { return someOf(g, 2, g.name) }
	switch kw {
	case "$ref":
		return g.ref()
	case "type":
		return oneOf[any](g, g.kind(), g.kind(), []any{g.kind(), g.kind()})
	case "enum":
		return someOf(g, 4, func() any { return g.value(2) })
	case "const":
		return g.value(2)
	case "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum":
		return g.number()
	case "multipleOf":
		return oneOf[json.Number](g, "1", "2", "0.1", "0.5", "1.5", "1e1", "3", "9007199254740993")
	case "pattern":
		return g.pattern()
	case "uniqueItems":
		return g.IntN(4) > 0
	case "items":
		if g.draft7 && g.IntN(2) == 0 {
			return append(someOf(g, 2, sub), sub())
		}
	case "prefixItems", "allOf", "anyOf", "oneOf":
		return append(someOf(g, 2, sub), sub())
	case "properties", "dependentSchemas":
		m := map[string]any{}
		for range g.IntN(4) {
			m[g.name()] = sub()
		}
		return m
	case "patternProperties":
		return map[string]any{g.pattern(): sub()}
	case "required":
		return names()
	case "dependentRequired":
		return map[string]any{g.name(): names()}
	case "dependencies":
		return map[string]any{g.name(): names(), g.name(): sub()}
	}
	if strings.HasPrefix(kw, "min") || strings.HasPrefix(kw, "max") {
		return oneOf[json.Number](g, "0", "1", "2", "3", "2.0")
	}
	return sub()
}

func (g generator) ref() string {
	return oneOf(g, "#", "#/$defs/a", "#/$defs/b", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/anyOf/0")
}

// document returns a schema with definitions.
func (g generator) document() (doc map[string]any, raw []byte) {
	doc, ok := g.schema(3).(map[string]any)
	if !ok {
		doc = map[string]any{}
	}
	doc["$defs"] = map[string]any{"a": g.schema(2), "b": g.schema(2)}
	if g.draft7 {
		doc["$schema"] = "http://json-schema.org/draft-07/schema#"
	}
	raw, _ = json.Marshal(doc)
	return doc, raw
}

// at follows a JSON Pointer.
func at(v any, pointer string) (any, bool) {
	for _, token := range strings.Split(pointer, "/")[1:] {
		list, _ := v.([]any)
		m, _ := v.(map[string]any)
		has := false
		if v, has = m[strings.NewReplacer("~1", "/", "~0", "~").Replace(token)]; has {
			continue
		}
		i, err := strconv.Atoi(token)
		if err != nil || i >= len(list) {
			return nil, false
		}
		v = list[i]
	}
	return v, true
}

// placed reports whether an issue is about a place that x has, or a member that it lacks, and about a
// keyword that the schema has in the place which is named.
func placed(doc, x any, is Issue) bool {
	_, given := at(x, is.Path)
	if is.Keyword == "required" || strings.HasPrefix(is.Keyword, "depend") {
		_, around := at(x, is.Path[:max(0, strings.LastIndex(is.Path, "/"))])
		given = around && !given
	}
	rule, stands := at(doc, is.SchemaPath)
	return given && stands && (strings.HasSuffix(is.SchemaPath, "/"+is.Keyword) || is.Keyword == "false" && rule == false)
}

// TestSchemaOracle holds the verdicts of thousands of schemas against the oracle's, what is said of a
// misfit against the verdict and its place, and a walk that runs out of work anywhere to neither panic
// nor lie.
func TestSchemaOracle(t *testing.T) {
	t.Parallel()
	valid, invalid := 0, 0
	for seed := range uint64(2000) {
		g := generator{rand.New(rand.NewPCG(seed, 1)), seed%3 == 0}
		doc, raw := g.document()
		s, err := compileSchema(raw, schemaOptions{anyRoot: true})
		if why := refusal(err); why == "ref-cycle" || why == "unresolved-ref" {
			continue
		} else if why != "" {
			t.Fatalf("seed %d: refused for %q: %s", seed, why, raw)
		}
		for range 12 {
			v := g.value(3)
			text, _ := json.Marshal(v)
			want := verdictInvalid
			if fits, _ := (oracle{doc, g.draft7}).judge(doc, v); fits {
				want = verdictValid
				valid++
			} else {
				invalid++
			}
			if got := s.validate(v); got != want {
				t.Errorf("seed %d: validate = %d want %d\n%s\n%s", seed, got, want, raw, text)
			}
			tight := *s
			for _, work := range []int{s.limits.work, 1 + g.IntN(10), 1 + g.IntN(60)} {
				tight.limits.work = work
				if got := tight.validate(v); got != want && got != verdictBudget {
					t.Errorf("seed %d: with work for %d: validate = %d want %d\n%s\n%s", seed, work, got, want, raw, text)
				}
				for _, quote := range []bool{false, true} {
					issues, _ := tight.explain(v, quote)
					if len(issues) == 0 && want == verdictInvalid || len(issues) > 0 && want == verdictValid && work == s.limits.work {
						t.Errorf("seed %d: with work for %d: %d issues, want verdict %d\n%s\n%s", seed, work, len(issues), want, raw, text)
					}
					for _, is := range issues {
						if work == s.limits.work && !placed(doc, v, is) {
							t.Errorf("seed %d: an issue about no place: %+v\n%s\n%s", seed, is, raw, text)
						}
					}
				}
				if m, ok := v.(map[string]any); ok {
					tight.normalize(m, false)
				}
			}
			if after, _ := json.Marshal(v); !bytes.Equal(after, text) {
				t.Errorf("seed %d: the value changed from %s to %s", seed, text, after)
			}
		}
		if t.Failed() {
			return
		}
	}
	if valid < 5000 || invalid < 5000 {
		t.Errorf("%d values that fit and %d that do not: too few to tell", valid, invalid)
	}
}

// spoil returns a copy of v as a careless writer might have put it.
func (g generator) spoil(v any) any {
	if s, isText := v.(string); isText && g.IntN(3) == 0 {
		return " " + strings.ToUpper(s)
	} else if v != nil && g.IntN(3) == 0 {
		text, _ := json.Marshal(v)
		return string(text)
	}
	switch v := v.(type) {
	case []any:
		list := []any{}
		for _, e := range v {
			list = append(list, g.spoil(e))
		}
		return list
	case map[string]any:
		m := map[string]any{oneOf(g, "a", "b", "ab", "c"): nil}
		for name, e := range v {
			m[name] = g.spoil(e)
		}
		return m
	}
	return v
}

// eachRepair calls f wherever b is not what a is. undo and redo change b there. It reports whether all
// these are such as may be: a null left out, text read, or case and space mended.
func eachRepair(a, b any, f func(undo, redo func())) (sound bool) {
	var walk func(a, b any, put func(any))
	walk = func(a, b any, put func(any)) {
		x, y, isMap := bothOf[map[string]any](a, b)
		p, q, isList := bothOf[[]any](a, b)
		switch {
		case equalByValue(a, b):
		case isMap:
			for name, e := range x {
				if _, has := y[name]; !has {
					sound = sound && e == nil
					f(func() { y[name] = nil }, func() { delete(y, name) })
				} else {
					walk(e, y[name], func(v any) { y[name] = v })
				}
			}
		case isList && len(p) == len(q):
			for i := range p {
				walk(p[i], q[i], func(v any) { q[i] = v })
			}
		default:
			s, r, isText := bothOf[string](a, b)
			text, _ := a.(string)
			read, _ := decodeJSON([]byte(text))
			sound = sound && (isText && strings.EqualFold(strings.TrimSpace(s), strings.TrimSpace(r)) || read != nil && equalByValue(read, b))
			f(func() { put(a) }, func() { put(b) })
		}
	}
	sound = true
	walk(a, b, nil)
	return sound
}

func bothOf[T any](a, b any) (x, y T, ok bool) {
	x, isX := a.(T)
	y, isY := b.(T)
	return x, y, isX && isY
}

// TestSchemaRepairs spoils values that fit and has them repaired. Each repair must be of a kind that is
// allowed, and needed: without any one of them, the whole does not fit.
func TestSchemaRepairs(t *testing.T) {
	t.Parallel()
	repaired := 0
	for seed := range uint64(12000) {
		g := generator{rand.New(rand.NewPCG(seed, 2)), false}
		doc, _ := g.document()
		doc["properties"] = g.keyword("properties", 2)
		raw, _ := json.Marshal(doc)
		s, err := compileSchema(raw, schemaOptions{input: true})
		v, isMap := g.value(3).(map[string]any)
		if err != nil || !isMap || s.validate(v) != verdictValid {
			continue
		}
		in, isMap := g.spoil(v).(map[string]any)
		if !isMap || s.validate(in) == verdictValid {
			continue
		}
		out, changes, ok := s.normalize(in, false)
		if !ok {
			continue
		}
		repaired++
		n := 0
		sound := eachRepair(in, out, func(undo, redo func()) {
			n++
			if undo(); s.validate(out) == verdictValid {
				t.Errorf("seed %d: %v has a needless change", seed, changes)
			}
			redo()
		})
		if !sound || n != len(changes) || s.validate(out) != verdictValid {
			t.Errorf("seed %d: normalize(%v) = %v, %v, sound: %t\n%s", seed, in, out, changes, sound, raw)
		}
	}
	if repaired < 25 {
		t.Errorf("%d values repaired, too few to tell", repaired)
	}
}

// TestSchemaRepairCost holds the memory that a repair takes to a multiple of what it repairs. It is not
// parallel, as others would be counted too.
func TestSchemaRepairCost(t *testing.T) {
	members := map[string]any{}
	for i := range 1000 {
		members[fmt.Sprint(i)] = json.Number("1")
	}
	list := slices.Repeat([]any{map[string]any{"n": "5"}}, 4000)
	const unions = `{"properties":{"l":{"items":{"anyOf":[{"type":"object","properties":{"n":{"type":"integer"}}},{"type":"string"}]}}}}`
	for _, tt := range []struct {
		name, schema string
		v            map[string]any
		changes      int
	}{
		{"a union in every item", unions, map[string]any{"l": list}, 4000},
		{"a large object many times", doublingSchema(12, "allOf", `{"required":["x"]}`), members, 0},
	} {
		s := mustCompile(t, tt.schema, schemaOptions{input: true})
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, changes, ok := s.normalize(tt.v, false)
		runtime.ReadMemStats(&after)
		if len(changes) != tt.changes || ok != (tt.changes > 0) {
			t.Errorf("%s: %d changes, %t, want %d", tt.name, len(changes), ok, tt.changes)
		}
		if took := after.TotalAlloc - before.TotalAlloc; took > 64<<20 {
			t.Errorf("%s: %d MiB allocated", tt.name, took>>20)
		}
	}
}

// TestSchemaKeywords holds what the suite does not ask about.
func TestSchemaKeywords(t *testing.T) {
	t.Parallel()
	deep := `{"a":1}`
	for range 110 {
		deep = `{"c":` + deep + `}`
	}
	chain := `{"minProperties":1}` // applies to one object, and goes down no level of it
	for range 25 {
		chain = `{"dependentSchemas":{"a":` + chain + `}}`
	}
	const def = `"$defs":{"t":{"type":"string"}}}`
	for _, tt := range []struct {
		schema, value string
		want          validity
	}{
		{`{"additionalProperties":{"$ref":"#/$defs/t"},` + def, `{"a":1}`, verdictInvalid},
		{`{"additionalProperties":{"$ref":"#/$defs/t"},` + def, `{"a":""}`, verdictValid},
		{`{"additionalProperties":{"allOf":[{"$ref":"#/$defs/t"}]},` + def, `{"a":1}`, verdictInvalid},
		{`{"patternProperties":{"b":true},"additionalProperties":{"$ref":"#/$defs/t"},` + def, `{"a":1}`, verdictInvalid},
		{`{"properties":{"a":{"additionalProperties":{"$ref":"#"}}},"required":["a"]}`, `{"a":{"b":{}}}`, verdictInvalid},
		{`{"additionalProperties":{"$ref":"#/x"},"x":false}`, `{"a":1}`, verdictInvalid},
		{`{"additionalProperties":{"$ref":"#/x"},"x":true}`, `{"a":1}`, verdictValid},
		{`{"else":{"properties":{"a":true}},"unevaluatedProperties":false}`, `{"a":1}`, verdictInvalid},
		{`{"then":{"properties":{"a":true}},"unevaluatedProperties":false}`, `{"a":1}`, verdictInvalid},
		{`{"if":false,"else":{"properties":{"a":true}},"unevaluatedProperties":false}`, `{"a":1}`, verdictValid},
		{`{"properties":{"c":{"$ref":"#"}},"allOf":[` + chain + `]}`, deep, verdictValid},
	} {
		s := mustCompile(t, tt.schema, schemaOptions{anyRoot: true})
		v := mustDecode(t, tt.value)
		issues, _ := s.explain(v, true)
		if got := s.validate(v); got != tt.want || (len(issues) == 0) != (tt.want == verdictValid) {
			t.Errorf("validate(%.200s, %.200s) = %d want %d: %v", tt.schema, tt.value, got, tt.want, issues)
		}
	}
}

func FuzzSchemaCompile(f *testing.F) {
	eachSuiteTest(f, func(schema, _ []byte) { f.Add(schema, byte(0)) })
	f.Add([]byte(`{"properties":{"a":{"type":"string","x-mcp-header":"A"}}}`), byte(5))
	f.Add([]byte(`{"$id":"http://a/b","$defs":{"c":{"$anchor":"d","format":"date"}},"$ref":"b#d"}`), byte(24))
	f.Fuzz(func(t *testing.T, raw []byte, flags byte) {
		s, err := compileSchema(raw, schemaOptions{input: flags&1 != 0, anyRoot: flags&2 != 0, headers: flags&4 != 0,
			assertFormat: flags&8 != 0, strict: flags&16 != 0})
		if err != nil {
			checkSchemaError(t, err)
			return
		}
		if len(s.unchecked()) > 30_000 || s.validate(map[string]any{}) == verdictBudget && len(raw) < 1000 && !bytes.Contains(raw, []byte("$ref")) {
			t.Error("out of bounds")
		}
	})
}

func FuzzSchemaValidate(f *testing.F) {
	eachSuiteTest(f, func(schema, value []byte) { f.Add(schema, value) })
	f.Fuzz(func(t *testing.T, raw, value []byte) {
		for _, text := range [][]byte{raw, value} {
			checkDecode(t, text)
		}
		s, err := compileSchema(raw, schemaOptions{anyRoot: true, assertFormat: true, schemaLimits: schemaLimits{work: 50_000}})
		v, ok := decodeJSON(value)
		if err != nil || !ok {
			return
		}
		before, _ := json.Marshal(v)
		got := s.validate(v)
		if again := s.validate(v); again != got && got != verdictBudget && again != verdictBudget {
			t.Errorf("validity %d, then %d", got, again)
		}
		for _, quote := range []bool{true, false} {
			issues, more := s.explain(v, quote)
			if (len(issues) == 0) != (got == verdictValid) && got != verdictBudget {
				t.Errorf("validity %d with issues %v", got, issues)
			}
			if text := feedback("tool", issues, more); len(text) > maxFeedback || len(issues) > 8 || !utf8.ValidString(text) {
				t.Errorf("feedback of %d bytes: %q", len(text), text)
			}
		}
		if m, ok := v.(map[string]any); ok {
			out, changes, ok := s.normalize(m, false)
			if ok && s.validate(out) != verdictValid || !ok && len(changes) > 0 {
				t.Errorf("normalize = %v, %v, %t", out, changes, ok)
			}
		}
		if after, _ := json.Marshal(v); !bytes.Equal(before, after) {
			t.Errorf("the value changed from %s to %s", before, after)
		}
	})
}

func FuzzSchemaPattern(f *testing.F) {
	eachSuiteTest(f, func(schema, value []byte) {
		var m struct{ Pattern string }
		var text string
		if json.Unmarshal(schema, &m) == nil && m.Pattern != "" && json.Unmarshal(value, &text) == nil {
			f.Add(m.Pattern, text)
		}
	})
	for _, p := range []string{`[^]`, `[]`, `[\s-x]`, `\u{1F60E}`, `\ud83d\ude0e`, `(?<n>a)\k<n>`, `(a{0,30}){30}`, `[[a]]`, `\cZ\0[\b]`} {
		f.Add(p, "a")
	}
	f.Fuzz(func(t *testing.T, text, s string) {
		p, err := compilePattern(text, 1024, 10_000)
		if err != nil {
			return
		}
		if len(text) > 1024 || p.size > 10_000 {
			t.Fatalf("a pattern of %d bytes and %d instructions", len(text), p.size)
		}
		n := node{types: kindAny, maxLength: math.MaxInt, pattern: p}
		c := checker{left: 1000}
		if c.text(&n, s, s); c.left >= 0 && len(s)*p.size/64 > 1000 {
			t.Errorf("%d bytes against %d instructions for %d units", len(s), p.size, 1000-c.left)
		}
	})
}
