package mcp

import (
	"compress/gzip"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
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
					name := strings.TrimPrefix(file, schemaData+"suite/") + ": " + g.Description
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

var _ = fmt.Sprint
