package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"resilient/mcp"
)

// script returns the program of a package.
func script(t *testing.T, pkg string) string {
	return filepath.Join(npm(t), "node_modules", "@modelcontextprotocol", pkg, "dist", "index.js")
}

// everything starts server-everything over HTTP in one of its modes. It takes a
// port, but does not say when it listens.
func everything(t *testing.T, mode, addr string) *process {
	t.Helper()
	p := start(t, []string{"PORT=" + addr[strings.LastIndexByte(addr, ':')+1:]}, "node", script(t, "server-everything"), mode)
	eventually(t, "the server listens", func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	return p
}

// TestEverything drives server-everything, on the TypeScript SDK v1, over its
// three transports. It knows the handshake alone, and registers the tools that
// need something of the client when it has learnt what the client has.
func TestEverything(t *testing.T) {
	for _, mode := range []string{"stdio", "streamableHttp", "sse"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			var cfg mcp.Config
			switch mode {
			case "stdio":
				cfg = mcp.Config{
					Command: []string{"node", script(t, "server-everything"), "stdio"},
					Env:     map[string]string{"INTEROP_WORD": "hello"}, EnvAllow: []string{"PATH"},
				}
			default:
				addr := freeAddr(t)
				everything(t, mode, addr)
				cfg.Endpoint = "http://" + addr + map[string]string{"streamableHttp": "/mcp", "sse": "/sse"}[mode]
			}
			for _, version := range handshake {
				t.Run(version, func(t *testing.T) { driveEverything(t, cfg, version) })
			}
		})
	}
}

func driveEverything(t *testing.T, cfg mcp.Config, version string) {
	u := connect(t, cfg, version)
	if want := strings.Replace(version, auto, v2511, 1); u.version != want {
		t.Fatalf("agreed on %s, want %s", u.version, want)
	}

	// The list changes after the handshake, and the client follows.
	has := func(name string) bool {
		return slices.ContainsFunc(u.Tools(), func(tool mcp.Tool) bool { return tool.Name == name })
	}
	late := []string{"get-roots-list", "trigger-sampling-request", "trigger-elicitation-request"}
	eventually(t, "the tools that need something of the client", func() bool {
		if !u.Stale() && !slices.ContainsFunc(late, has) {
			return false
		}
		a, err := u.Adopt(t.Context())
		if err != nil {
			t.Fatalf("Adopt: %v", err)
		}
		u.adoption = a
		return !slices.ContainsFunc(late, func(name string) bool { return !has(name) })
	})
	if n := len(u.Tools()); n < 15 {
		t.Errorf("%d tools", n)
	}
	if r := u.adoption.Rejected; len(r) != 1 || r[0].Tool != "simulate-research-query" || !strings.Contains(r[0].Reason, "task") {
		t.Errorf("rejected: %+v, want the tool that is a task", r)
	}

	u.says(t, "echo", args{"message": "Zürich \U0001f600"}, "Echo: Zürich \U0001f600")
	u.says(t, "get-sum", args{"a": 2, "b": 3}, "The sum of 2 and 3 is 5.")
	var weather struct{ Temperature *float64 }
	if r := u.call(t, "get-structured-content", args{"location": "Chicago"}); json.Unmarshal(r.Structured, &weather) != nil || weather.Temperature == nil {
		t.Errorf("structured content: %s", r.Structured)
	}
	var env map[string]string
	if err := json.Unmarshal([]byte(u.call(t, "get-env", nil).Text()), &env); err != nil {
		t.Errorf("get-env: %v", err)
	} else if cfg.Command != nil && (env["INTEROP_WORD"] != "hello" || env["HOME"] != "" || env["PATH"] == "") {
		t.Errorf("the child's environment: %q", env)
	}
	kinds := func(tool string, a args) (kinds []string) {
		for _, c := range u.call(t, tool, a).Content {
			kinds = append(kinds, c.Type)
		}
		return kinds
	}
	for _, c := range []struct {
		tool string
		args args
		want []string
	}{
		{"get-tiny-image", nil, []string{"text", "image", "text"}},
		{"get-resource-links", args{"count": 2}, []string{"text", "resource_link", "resource_link"}},
		{"get-resource-reference", nil, []string{"text", "resource", "text"}},
		{"get-annotated-message", args{"messageType": "success", "includeImage": true}, []string{"text", "image"}},
	} {
		if got := kinds(c.tool, c.args); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.tool, got, c.want)
		}
	}

	var steps []string
	r, err := u.Call(t.Context(), &mcp.Call{
		Tool: "trigger-long-running-operation", Arguments: args{"duration": 0.4, "steps": 4},
		OnProgress: func(p mcp.Progress) { steps = append(steps, fmt.Sprintf("%g/%g", p.Progress, p.Total)) },
	})
	if err != nil || r.IsError || !slices.Equal(steps, []string{"1/4", "2/4", "3/4", "4/4"}) {
		t.Errorf("long running: %v, progress %q", err, steps)
	}
	// It works on when it is cancelled; what it then sends is nobody's.
	ctx, stop := withPatience(t, 100*time.Millisecond)
	defer stop()
	if _, err := u.Call(ctx, &mcp.Call{Tool: "trigger-long-running-operation", Arguments: args{"duration": 0.4, "steps": 4}}); !errors.Is(err, mcp.ReasonCancelled) {
		t.Errorf("cancelled: %v", err)
	}

	if got := u.call(t, "trigger-sampling-request", args{"prompt": "why?", "maxTokens": 10}).Text(); !strings.Contains(got, "a thought") {
		t.Errorf("sampling: %.300q", got)
	}
	if got := u.call(t, "get-roots-list", nil).Text(); !strings.Contains(got, "file:///srv/a") {
		t.Errorf("roots: %.300q", got)
	}
	if got := u.call(t, "trigger-elicitation-request", nil).Text(); !strings.Contains(got, "ada") {
		t.Errorf("elicitation: %.300q", got)
	}
	u.call(t, "toggle-simulated-logging", nil)
	eventually(t, "a line of log", func() bool { return u.count("notifications/message") > 0 })

	resources, err := u.Resources(t.Context())
	if err != nil || len(resources) == 0 {
		t.Fatalf("resources: %+v, %v", resources, err)
	}
	if blocks, err := u.ReadResource(t.Context(), resources[0].URI); err != nil || len(blocks) == 0 || blocks[0].Text == "" {
		t.Errorf("resource: %+v, %v", blocks, err)
	}
	prompts, err := u.Prompts(t.Context())
	if err != nil || len(prompts) < 4 {
		t.Errorf("prompts: %+v, %v", prompts, err)
	}
	if m, err := u.Prompt(t.Context(), "args-prompt", map[string]string{"city": "Bern", "state": "BE"}); err != nil || len(m) == 0 || !strings.Contains(m[0].Content.Text, "Bern") {
		t.Errorf("prompt: %+v, %v", m, err)
	}
	if v, err := u.Complete(t.Context(), args{"type": "ref/prompt", "name": "completable-prompt"}, "department", "E"); err != nil || !slices.Contains(v, "Engineering") {
		t.Errorf("completion: %q, %v", v, err)
	}
}

// TestEverythingReplaced ends server-everything, and starts another at the same
// address. It says 400 and not 404 to a session that it does not know.
func TestEverythingReplaced(t *testing.T) {
	for _, mode := range []string{"streamableHttp", "sse"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			addr := freeAddr(t)
			first := everything(t, mode, addr)
			u := connect(t, mcp.Config{Endpoint: "http://" + addr + map[string]string{"streamableHttp": "/mcp", "sse": "/sse"}[mode]}, auto)
			u.says(t, "echo", args{"message": "before"}, "Echo: before")
			first.stop()
			if _, err := u.Call(t.Context(), &mcp.Call{Tool: "echo", Arguments: args{"message": "between"}}); err == nil {
				t.Error("a call without a server succeeded")
			}
			everything(t, mode, addr)
			u.says(t, "echo", args{"message": "after"}, "Echo: after")
		})
	}
}

// TestFilesystem drives server-filesystem, all of whose tools have an output
// schema.
func TestFilesystem(t *testing.T) {
	t.Parallel()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "note.txt")
	u := connect(t, mcp.Config{
		Command: []string{"node", script(t, "server-filesystem"), dir}, EnvAllow: []string{"PATH"},
		Deny: []string{"move_file"},
	}, auto)
	if len(u.Tools()) < 12 || u.adoption.Rejected != nil || slices.ContainsFunc(u.Tools(), func(tool mcp.Tool) bool { return tool.Name == "move_file" || tool.OutputSchema == nil }) {
		t.Errorf("%d tools, rejected %+v", len(u.Tools()), u.adoption.Rejected)
	}
	// It asks for the client's roots, and takes them for the folders that it may
	// use; ours does not exist, so that it keeps to its argument.
	if got := u.call(t, "list_allowed_directories", nil).Text(); !strings.Contains(got, dir) {
		t.Fatalf("directories: %q", got)
	}
	u.call(t, "write_file", args{"path": file, "content": "one\ntwo\n"})
	if data, err := os.ReadFile(file); err != nil || string(data) != "one\ntwo\n" {
		t.Errorf("the file holds %q, %v", data, err)
	}
	u.says(t, "read_text_file", args{"path": file, "head": 1}, "one")
	if got := u.call(t, "list_directory", args{"path": dir}).Text(); !strings.Contains(got, "note.txt") {
		t.Errorf("directory: %q", got)
	}
	if r, err := u.Call(t.Context(), &mcp.Call{Tool: "read_text_file", Arguments: args{"path": "/etc/passwd"}}); err != nil || !r.IsError {
		t.Errorf("a file outside: %+v, %v", r, err)
	}
}

// TestMemory drives server-memory, whose results are structured throughout.
func TestMemory(t *testing.T) {
	t.Parallel()
	u := connect(t, mcp.Config{
		Command: []string{"node", script(t, "server-memory")}, EnvAllow: []string{"PATH"},
		Env: map[string]string{"MEMORY_FILE_PATH": filepath.Join(t.TempDir(), "memory.jsonl")},
	}, auto)
	u.call(t, "create_entities", args{"entities": []any{args{"name": "ada", "entityType": "person", "observations": []any{"wrote a program"}}}})
	var graph struct{ Entities []struct{ Name string } }
	if r := u.call(t, "read_graph", nil); json.Unmarshal(r.Structured, &graph) != nil || len(graph.Entities) != 1 || graph.Entities[0].Name != "ada" {
		t.Errorf("graph: %s", r.Structured)
	}
	var ae *mcp.ArgumentError
	if _, err := u.Call(t.Context(), &mcp.Call{Tool: "create_entities", Arguments: args{"entities": "ada"}}); !errors.As(err, &ae) {
		t.Errorf("a text instead of a list: %v", err)
	}
}
