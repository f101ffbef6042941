package mcp

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// These tests guard the shape of the package: what a reader may rely on when he
// looks for something, copies it, or takes it to where nobody can be asked.

// sources parses the files of the package, without its tests.
func sources(t *testing.T) map[string]*ast.File {
	t.Helper()
	files := map[string]*ast.File{}
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = f
	}
	return files
}

// declared lists the package-level names of a file, methods left out.
func declared(f *ast.File) (names []*ast.Ident, docs []string) {
	add := func(id *ast.Ident, doc ...*ast.CommentGroup) {
		text := ""
		for _, d := range doc {
			text += d.Text()
		}
		names, docs = append(names, id), append(docs, text)
	}
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil {
				add(d.Name, d.Doc)
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					add(s.Name, d.Doc, s.Doc)
				case *ast.ValueSpec:
					for _, id := range s.Names {
						add(id, d.Doc, s.Doc, s.Comment)
					}
				}
			}
		}
	}
	return names, docs
}

// TestArrows checks that references between files run one way. Each file lists
// the files whose names it may use; of mcp.go, which everybody may read, the
// names that a file must not touch.
func TestArrows(t *testing.T) {
	t.Parallel()
	const sessions = "Session TransportSession NewSession New link dialog"
	tests := map[string]struct{ may, mustNot string }{
		"breaker.go":         {"", ""},
		"schema.go":          {"schema_text.go", ""},
		"schema_text.go":     {"schema.go", ""},
		"jsonrpc.go":         {"mcp.go", sessions + " Config Options Transport Request TransportError"},
		"transport_stdio.go": {"mcp.go jsonrpc.go transport_stdio_*.go", sessions},
		"transport_http.go":  {"mcp.go jsonrpc.go", sessions},
		"resilient.go":       {"mcp.go breaker.go", "Transport NewTransport Request"},
		"fleet.go":           {"mcp.go jsonrpc.go schema.go schema_text.go breaker.go resilient.go", "Transport Request"},
		"fake.go":            {"mcp.go jsonrpc.go", ""},
		"mcp.go":             {"jsonrpc.go schema.go schema_text.go breaker.go resilient.go fleet.go transport_stdio.go transport_http.go", ""},
	}
	files := sources(t)
	home := map[string]string{}
	for name, f := range files {
		ids, _ := declared(f)
		for _, id := range ids {
			home[id.Name] = name
		}
	}
	for name, f := range files {
		rule, ok := tests[name]
		if strings.HasPrefix(name, "transport_stdio") {
			rule, ok = tests["transport_stdio.go"], true
		}
		if !ok {
			t.Errorf("%s is not a file that the package should have", name)
			continue
		}
		for _, id := range f.Unresolved {
			from := home[id.Name]
			if from == "" || from == name || strings.HasPrefix(from, "transport_stdio") && strings.HasPrefix(name, "transport_stdio") {
				continue
			}
			if !slices.Contains(strings.Fields(rule.may), from) {
				t.Errorf("%s uses %s of %s", name, id.Name, from)
			}
			if from == "mcp.go" && slices.Contains(strings.Fields(rule.mustNot), id.Name) {
				t.Errorf("%s uses %s, which is above it", name, id.Name)
			}
		}
	}
}

// TestDocumented checks that every exported name says what it is.
func TestDocumented(t *testing.T) {
	t.Parallel()
	exported := 0
	for name, f := range sources(t) {
		ids, docs := declared(f)
		for i, id := range ids {
			if !id.IsExported() {
				continue
			}
			exported++
			if docs[i] == "" {
				t.Errorf("%s: %s has no comment", name, id.Name)
			}
		}
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Recv == nil || !fn.Name.IsExported() || fn.Doc != nil {
				continue
			}
			switch fn.Name.Name { // what these do is known
			case "Error", "Unwrap", "Is", "String", "MarshalJSON", "MarshalText", "LogValue":
			default:
				t.Errorf("%s: method %s has no comment", name, fn.Name.Name)
			}
		}
	}
	t.Logf("%d exported names", exported)
}

// TestBudgets checks that no file grows out of what a reader takes in. A budget
// may fall; raising one is a decision, and needs its reason here.
func TestBudgets(t *testing.T) {
	t.Parallel()
	budgets := map[string]int{
		"mcp.go": 2325, "jsonrpc.go": 1125, "transport_stdio.go": 1225, "transport_http.go": 1665, "resilient.go": 1185,
		"breaker.go": 160, "schema.go": 1176, "schema_text.go": 1239, "fleet.go": 1790, "fake.go": 980,
	}
	for name := range sources(t) {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		budget := budgets[name]
		if strings.HasPrefix(name, "transport_stdio_") {
			budget = 100
		}
		if lines := strings.Count(string(b), "\n"); lines > budget {
			t.Errorf("%s has %d lines, its budget is %d", name, lines, budget)
		}
	}
}

// goTool returns the go command, or skips: a copy of the package may run its
// tests where there is none.
func goTool(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("short: this builds the package anew")
	}
	path, err := exec.LookPath("go")
	if err != nil {
		t.Skip("no go command here")
	}
	return path
}

// TestCopy builds a copy of the sources under another import path, with its
// tests, as somebody who vendors by copying would.
func TestCopy(t *testing.T) {
	t.Parallel()
	tool := goTool(t)
	dir := t.TempDir()
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if name == "example_test.go" {
			continue // the one file that names the import path
		}
		b, err := os.ReadFile(name)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), b, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	write(t, dir, "go.mod", "module elsewhere.example/third_party/mcp\n\ngo 1.25\n")
	run(t, dir, tool, "build", ".")
	run(t, dir, tool, "vet", ".")
	run(t, dir, tool, "test", "-short", "-run", "^(TestLocalName|TestEra|TestParseConfigs|TestAssemble)$", ".")
}

// TestReadme compiles the program of the README as it is printed there, against
// this package by a replace line, and checks what the README says of itself.
func TestReadme(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("README.md")
	if os.IsNotExist(err) {
		t.Skip("this copy has no README")
	}
	text := string(b)
	if n := strings.Count(text, "\n"); n > 250 {
		t.Errorf("README.md has %d lines, want at most 250", n)
	}
	for _, s := range settings {
		if key := strings.TrimPrefix(s.key, "retry."); !strings.Contains(text, "`"+key+"`") {
			t.Errorf("README.md does not mention the setting %s", s.key)
		}
	}
	for code := range errorAdvice {
		if !strings.Contains(text, code) {
			t.Errorf("README.md does not mention the code %s", code)
		}
	}
	_, program, ok := strings.Cut(text, "```go\npackage main")
	program, _, closed := strings.Cut("package main"+program, "```")
	if !ok || !closed {
		t.Fatal("README.md has no program")
	}
	if n := strings.Count(program, "\n"); n > 25 {
		t.Errorf("the program has %d lines, want at most 25", n)
	}
	tool, dir := goTool(t), t.TempDir()
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	write(t, dir, "main.go", program)
	write(t, dir, "go.mod", "module example\n\ngo 1.25\n\nrequire resilient/mcp v0.0.0\n\nreplace resilient/mcp => "+here+"\n")
	run(t, dir, tool, "build", "-o", os.DevNull, ".")
}

// TestNoDependency checks that the package imports the standard library only.
func TestNoDependency(t *testing.T) {
	t.Parallel()
	for name, f := range sources(t) {
		for _, i := range f.Imports {
			if first, _, _ := strings.Cut(strings.Trim(i.Path.Value, `"`), "/"); strings.Contains(first, ".") {
				t.Errorf("%s imports %s", name, i.Path.Value)
			}
			if name == "fake.go" && (i.Path.Value == `"testing"` || i.Path.Value == `"net"`) {
				t.Errorf("fake.go, which is compiled into users' programs, imports %s", i.Path.Value)
			}
		}
	}
	if _, err := os.Stat("go.sum"); err == nil {
		t.Errorf("there is a go.sum")
	}
}

// TestDefaultsInOnePlace checks that withDefaults leaves no ceiling open.
func TestDefaultsInOnePlace(t *testing.T) {
	t.Parallel()
	c := Config{}.withDefaults()
	open := map[string]any{}
	for _, s := range settings {
		switch p := s.field(&c).(type) {
		case *int:
			if *p == 0 {
				open[s.key] = p
			}
		default:
			if d, ok := p.(interface{ Seconds() float64 }); ok && d.Seconds() == 0 {
				open[s.key] = p
			}
		}
	}
	if len(open) > 0 {
		t.Errorf("no default for %v", slices.Sorted(maps.Keys(open)))
	}
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func run(t *testing.T, dir, tool string, args ...string) {
	t.Helper()
	cmd := exec.Command(tool, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOPROXY=off", "GOFLAGS=-mod=mod", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%s %s: %v\n%s", tool, strings.Join(args, " "), err, out)
	}
}
