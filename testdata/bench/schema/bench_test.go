package schema

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strings"
	"syscall"
	"testing"

	google "github.com/google/jsonschema-go/jsonschema"
	santhosh "github.com/santhosh-tekuri/jsonschema/v6"
)

// cases are schemas that real servers serve, each with a value that fits and
// one that does not.
var cases = []struct{ name, server, tool, kind, good, bad string }{
	{"small", "modelcontextprotocol__server-filesystem", "read_text_file", "inputSchema",
		`{"path":"a/b.txt","head":10}`, `{"path":"a/b.txt","head":"ten"}`},
	{"array", "modelcontextprotocol__server-filesystem", "edit_file", "inputSchema",
		`{"path":"a","edits":[{"oldText":"a","newText":"b"},{"oldText":"c","newText":"d"}],"dryRun":true}`,
		`{"path":"a","edits":[{"oldText":"a","newText":"b"},{"oldText":"c"}],"dryRun":true}`},
	{"enums", "modelcontextprotocol__server-github", "list_issues", "inputSchema",
		`{"owner":"a","repo":"b","direction":"asc","labels":["x","y"],"page":1,"per_page":50,"sort":"created","state":"open"}`,
		`{"owner":"a","repo":"b","direction":"asc","labels":["x","y"],"page":1,"per_page":50,"sort":"newest","state":"open"}`},
	{"graph", "modelcontextprotocol__server-memory", "create_entities", "inputSchema",
		`{"entities":[{"name":"a","entityType":"t","observations":["1","2","3"]},{"name":"b","entityType":"t","observations":[]}]}`,
		`{"entities":[{"name":"a","entityType":"t","observations":["1","2","3"]},{"name":"b","entityType":"t","observations":"x"}]}`},
	{"refs", "notionhq__notion-mcp-server", "API-post-search", "inputSchema",
		`{"query":"a","sort":{"direction":"ascending","timestamp":"last_edited_time"},"filter":{"value":"page","property":"object"},"page_size":10}`,
		`{"query":"a","sort":{"direction":"ascending","timestamp":"last_edited_time"},"filter":{"value":"page","property":"object"},"page_size":"10"}`},
	{"output", "modelcontextprotocol__server-memory", "read_graph", "outputSchema", graph(`"obs"`), graph(`7`)},
}

// graph is a result with 50 entities, the last of which has the observation last.
func graph(last string) string {
	entity := `{"name":"entity","entityType":"type","observations":["one","two",%s]}`
	return `{"entities":[` + strings.Repeat(fmt.Sprintf(entity, `"obs"`)+",", 49) + fmt.Sprintf(entity, last) +
		`],"relations":[{"from":"a","to":"b","relationType":"r"}]}`
}

// corpus returns the schemas of real tools, by server, tool and kind.
func corpus(tb testing.TB) map[[3]string][]byte {
	f, err := os.Open("../../schema/tools.json.gz")
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		tb.Fatal(err)
	}
	var servers map[string]struct{ Tools []map[string]json.RawMessage }
	if err := json.NewDecoder(z).Decode(&servers); err != nil {
		tb.Fatal(err)
	}
	schemas := map[[3]string][]byte{}
	for server, doc := range servers {
		for _, tool := range doc.Tools {
			var name string
			if err := json.Unmarshal(tool["name"], &name); err != nil {
				tb.Fatal(err)
			}
			for _, kind := range []string{"inputSchema", "outputSchema"} {
				if raw := tool[kind]; raw != nil {
					schemas[[3]string{server, name, kind}] = raw
				}
			}
		}
	}
	return schemas
}

// A peer compiles a schema into a check, and words what the check says.
type peer struct {
	name    string
	decode  func([]byte) (any, error)
	compile func([]byte) (func(any) error, error)
}

type noLoader struct{}

func (noLoader) Load(string) (any, error) { return nil, os.ErrNotExist }

type misfit string

func (m misfit) Error() string { return string(m) }

var peers = []peer{
	{"mcp", func(b []byte) (any, error) {
		var v any
		d := json.NewDecoder(bytes.NewReader(b))
		d.UseNumber()
		err := d.Decode(&v)
		return v, err
	}, func(raw []byte) (func(any) error, error) {
		s, err := compileSchema(raw, schemaOptions{})
		if err != nil {
			return nil, err
		}
		return func(v any) error {
			if s.validate(v) == verdictValid {
				return nil
			}
			issues, more := s.explain(v, true)
			return misfit(feedback("tool", issues, more))
		}, nil
	}},
	{"google", func(b []byte) (any, error) {
		var v any
		err := json.Unmarshal(b, &v)
		return v, err
	}, func(raw []byte) (func(any) error, error) {
		var s google.Schema
		if err := json.Unmarshal(raw, &s); err != nil {
			return nil, err
		}
		r, err := s.Resolve(&google.ResolveOptions{BaseURI: "mem:///s"})
		if err != nil {
			return nil, err
		}
		return r.Validate, nil
	}},
	{"santhosh", func(b []byte) (any, error) { return santhosh.UnmarshalJSON(bytes.NewReader(b)) },
		func(raw []byte) (func(any) error, error) {
			doc, err := santhosh.UnmarshalJSON(bytes.NewReader(raw))
			if err != nil {
				return nil, err
			}
			c := santhosh.NewCompiler()
			c.UseLoader(noLoader{})
			if err := c.AddResource("mem:///s", doc); err != nil {
				return nil, err
			}
			s, err := c.Compile("mem:///s")
			if err != nil {
				return nil, err
			}
			return s.Validate, nil
		}},
}

// check compiles the schema of a case with a peer and decodes a value for it.
func check(b testing.TB, schemas map[[3]string][]byte, i int, p peer, good bool) (func(any) error, any) {
	c := cases[i]
	f, err := p.compile(schemas[[3]string{c.server, c.tool, c.kind}])
	if err != nil {
		b.Fatal(err)
	}
	text := c.bad
	if good {
		text = c.good
	}
	v, err := p.decode([]byte(text))
	if err != nil {
		b.Fatal(err)
	}
	if err := f(v); (err == nil) != good {
		b.Fatalf("%s: %s: valid=%t, want %t: %v", c.name, p.name, err == nil, good, err)
	}
	return f, v
}

func benchmark(b *testing.B, good bool) {
	schemas := corpus(b)
	for i, c := range cases {
		for _, p := range peers {
			b.Run(c.name+"/"+p.name, func(b *testing.B) {
				f, v := check(b, schemas, i, p, good)
				b.ReportAllocs()
				for b.Loop() {
					if err := f(v); err != nil {
						_ = err.Error()
					}
				}
			})
		}
	}
}

func BenchmarkValid(b *testing.B)   { benchmark(b, true) }
func BenchmarkInvalid(b *testing.B) { benchmark(b, false) }

// BenchmarkCompile compiles all schemas of the corpus once per operation, and
// decodes them into any for comparison.
func BenchmarkCompile(b *testing.B) {
	schemas := corpus(b)
	for _, p := range peers {
		b.Run(p.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				for _, raw := range schemas {
					_, _ = p.compile(raw)
				}
			}
		})
	}
	b.Run("decode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			for _, raw := range schemas {
				var v any
				_ = json.Unmarshal(raw, &v)
			}
		}
	})
}

// best returns the nanoseconds of CPU time that f takes in the best of some
// runs: on a machine that does other work too, that figure holds still.
func best(f func()) float64 {
	least, n := 0.0, 1
	for run := 0; run < 5; {
		start := cpuTime()
		for range n {
			f()
		}
		spent := cpuTime() - start
		if spent < 40e6 { // too short to tell
			n *= 2
			continue
		}
		if t := spent / float64(n); least == 0 || t < least {
			least = t
		}
		run++
	}
	return least
}

// cpuTime returns the CPU time that the process has used, in nanoseconds.
func cpuTime() float64 {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return float64(r.Utime.Nano() + r.Stime.Nano())
}

// TestRatio holds the figures that are promised: valid values at least 5 times
// faster than the faster peer, compilation at most 3 times a decode.
func TestRatio(t *testing.T) {
	schemas := corpus(t)
	for i, c := range cases {
		times := map[string]float64{}
		for _, p := range peers {
			f, v := check(t, schemas, i, p, true)
			times[p.name] = best(func() { _ = f(v) })
		}
		ratio := min(times["google"], times["santhosh"]) / times["mcp"]
		t.Logf("%-7s %8.0f ns, google %8.0f ns, santhosh %8.0f ns: %5.1f times faster than the faster", c.name,
			times["mcp"], times["google"], times["santhosh"], ratio)
		if ratio < 5 {
			t.Errorf("%s: %.1f times faster than the faster peer, want 5", c.name, ratio)
		}
	}
	compile, decode := math.Inf(1), math.Inf(1)
	for range 5 { // in turns, for the machine's mood to be the same
		compile = min(compile, best(func() {
			for _, raw := range schemas {
				_, _ = peers[0].compile(raw)
			}
		}))
		decode = min(decode, best(func() {
			for _, raw := range schemas {
				var v any
				_ = json.Unmarshal(raw, &v)
			}
		}))
	}
	t.Logf("compile %.1f ms, decode %.1f ms: %.2f times", compile/1e6, decode/1e6, compile/decode)
	if compile > 3*decode {
		t.Errorf("compile takes %.2f times a decode, want at most 3", compile/decode)
	}
}
