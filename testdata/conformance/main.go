// Command conformance is the client that the official MCP conformance suite
// drives (see run.sh). The suite starts a server of its own, names the scenario
// in the environment and gives the server's URL as the last argument; what it
// checks is what it sees on the wire, and that this program exits with 0.
//
//	MCP_CONFORMANCE_SCENARIO=tools_call conformance http://127.0.0.1:3000/mcp
//
// With CONFORMANCE_PIN set, the revision that the suite runs is declared
// instead of being found out.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"resilient/mcp"
)

// scenarios is what each scenario demands of a client, beyond connecting and
// reading the tool list. A scenario that is not here needs OAuth, or an
// extension, and fails before anything is sent.
var scenarios = map[string]func(context.Context, *mcp.Client) error{
	"initialize":                          listOnly,
	"json-schema-ref-no-deref":            listOnly, // adopting compiles the schemas: here a $ref would be fetched
	"request-metadata":                    listOnly,
	"tools_call":                          toolsCall,
	"elicitation-sep1034-client-defaults": elicitationDefaults,
	"sse-retry":                           sseRetry,
	"sep-2322-client-request-state":       requestState,
	"http-standard-headers":               standardHeaders,
	"http-custom-headers":                 customHeaders,
	"http-invalid-tool-headers":           invalidToolHeaders,
	"json-schema-2020-12-preservation":    schemaPreservation,
}

func main() {
	name := os.Getenv("MCP_CONFORMANCE_SCENARIO")
	if len(os.Args) < 2 || name == "" {
		fmt.Fprintln(os.Stderr, "usage: MCP_CONFORMANCE_SCENARIO=name conformance url")
		os.Exit(2)
	}
	if err := run(name, os.Args[len(os.Args)-1]); err != nil {
		fmt.Fprintf(os.Stderr, "conformance: %s: %v\n", name, err)
		os.Exit(1)
	}
}

// run plays one scenario against the server at url. The deadline lies below
// the suite's own, so that a hang is reported by this program.
func run(name, url string) (err error) {
	scenario, ok := scenarios[name]
	if !ok {
		return errors.New("this client does not know the scenario")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()

	cfg := mcp.Config{Name: "suite", Endpoint: url}
	if name == "http-custom-headers" {
		cfg.Arguments = "advise" // one of its calls has null where the schema wants a text
	}
	if os.Getenv("CONFORMANCE_PIN") != "" {
		cfg.Protocol = os.Getenv("MCP_CONFORMANCE_PROTOCOL_VERSION")
	}
	c, err := mcp.New(cfg, &mcp.Options{
		ClientInfo: mcp.ServerInfo{Name: "resilient-mcp-conformance", Version: "1"},
		Handlers:   handlers(name),
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()

	adoption, err := c.Adopt(ctx)
	if err != nil {
		return err
	}
	for _, r := range adoption.Rejected {
		fmt.Fprintf(os.Stderr, "rejected %q: %s\n", r.Tool, r.Reason)
	}
	return scenario(ctx, c)
}

// handlers are those that the scenario needs, and no more: the capabilities
// that are declared follow from them.
func handlers(scenario string) map[string]mcp.HandlerFunc {
	answer := func(v any) mcp.HandlerFunc {
		return func(context.Context, string, json.RawMessage) (any, error) { return v, nil }
	}
	switch scenario {
	case "elicitation-sep1034-client-defaults":
		return map[string]mcp.HandlerFunc{
			"elicitation/create": answer(map[string]any{"action": "accept", "content": map[string]any{}}),
		}
	case "sep-2322-client-request-state":
		return map[string]mcp.HandlerFunc{
			"elicitation/create": answer(map[string]any{"action": "accept", "content": map[string]any{"confirmed": true}}),
		}
	case "request-metadata":
		return map[string]mcp.HandlerFunc{
			"elicitation/create":     answer(map[string]any{"action": "decline"}),
			"roots/list":             answer(map[string]any{"roots": []any{}}),
			"sampling/createMessage": answer(map[string]any{"role": "assistant", "model": "none", "content": map[string]any{"type": "text", "text": ""}}),
		}
	}
	return nil
}

func listOnly(context.Context, *mcp.Client) error { return nil }

// call calls a tool and demands an answer with that text in it.
func call(ctx context.Context, c *mcp.Client, tool string, args any, want string) error {
	r, err := c.Call(ctx, &mcp.Call{Tool: tool, Arguments: args})
	if err != nil {
		return err
	}
	if r.IsError || !strings.Contains(r.Text(), want) {
		return fmt.Errorf("%s: isError=%t, text %.200q, want %q in it", tool, r.IsError, r.Text(), want)
	}
	return nil
}

func toolsCall(ctx context.Context, c *mcp.Client) error {
	return call(ctx, c, "add_numbers", map[string]any{"a": 5, "b": 3}, "8")
}

func elicitationDefaults(ctx context.Context, c *mcp.Client) error {
	return call(ctx, c, "test_client_elicitation_defaults", nil, "")
}

// sseRetry has the server end the stream of the call before the answer.
func sseRetry(ctx context.Context, c *mcp.Client) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return call(ctx, c, "test_reconnection", nil, "completed")
}

func requestState(ctx context.Context, c *mcp.Client) error {
	for _, t := range []struct{ tool, want string }{
		{"test_mrtr_echo_state", "echo-state-ok"},
		{"test_mrtr_unrelated", "unrelated-ok"},
		{"test_mrtr_no_state", "no-state-ok"},
		{"test_mrtr_no_result_type", "no-result-type-test-ok"},
	} {
		if err := call(ctx, c, t.tool, nil, t.want); err != nil {
			return err
		}
	}
	return nil
}

// standardHeaders makes a request of every kind whose headers the revision
// fixes.
func standardHeaders(ctx context.Context, c *mcp.Client) error {
	for _, t := range c.Tools() {
		if err := call(ctx, c, t.Name, nil, ""); err != nil {
			return err
		}
	}
	resources, err := c.Resources(ctx)
	if err != nil {
		return err
	}
	for _, r := range resources {
		if _, err := c.ReadResource(ctx, r.URI); err != nil {
			return err
		}
	}
	prompts, err := c.Prompts(ctx)
	if err != nil {
		return err
	}
	for _, p := range prompts {
		if _, err := c.Prompt(ctx, p.Name, nil); err != nil {
			return err
		}
	}
	return nil
}

// customHeaders makes the calls that the suite lists. Their arguments are
// passed on as they came.
func customHeaders(ctx context.Context, c *mcp.Client) error {
	var data struct {
		ToolCalls []struct {
			Name      string
			Arguments json.RawMessage
		}
	}
	if err := json.Unmarshal([]byte(os.Getenv("MCP_CONFORMANCE_CONTEXT")), &data); err != nil {
		return fmt.Errorf("MCP_CONFORMANCE_CONTEXT: %w", err)
	}
	if len(data.ToolCalls) == 0 {
		return errors.New("MCP_CONFORMANCE_CONTEXT lists no calls")
	}
	for _, t := range data.ToolCalls {
		if err := call(ctx, c, t.Name, t.Arguments, ""); err != nil {
			return err
		}
	}
	return nil
}

// invalidToolHeaders expects that of all tools the one with good annotations
// has been adopted.
func invalidToolHeaders(ctx context.Context, c *mcp.Client) error {
	tools := c.Tools()
	if len(tools) != 1 || tools[0].Name != "valid_tool" {
		return fmt.Errorf("adopted %d tools, want valid_tool alone", len(tools))
	}
	return call(ctx, c, "valid_tool", map[string]any{"region": "us-west1"}, "")
}

// schemaPreservation sends a schema back as it came.
func schemaPreservation(ctx context.Context, c *mcp.Client) error {
	for _, t := range c.Tools() {
		if t.Name == "json_schema_2020_12_tool" {
			return call(ctx, c, "json_schema_echo", map[string]any{"schema": t.InputSchema}, "")
		}
	}
	return errors.New("json_schema_2020_12_tool was not adopted")
}
