package mcp

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
)

// echoTransport answers every call at once, so that what is measured is the
// chain above it.
type echoTransport struct{ result json.RawMessage }

func (e *echoTransport) Open(context.Context, Inbound) (bool, error) { return true, nil }
func (e *echoTransport) Notify(context.Context, *Request) error      { return nil }
func (e *echoTransport) Close() error                                { return nil }
func (e *echoTransport) honoursDeadline()                            {}
func (e *echoTransport) Call(_ context.Context, req *Request) (json.RawMessage, error) {
	switch req.Method {
	case "initialize":
		return json.RawMessage(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}}}`), nil
	case "tools/list":
		return json.RawMessage(`{"tools":[{"name":"echo","inputSchema":{"type":"object","properties":{"text":{"type":"string"}},"required":["text"]}}]}`), nil
	}
	return e.result, nil
}

// chain returns the whole chain over an echoTransport, its tools adopted.
func chain(tb testing.TB, text string) *Client {
	r, err := json.Marshal(map[string]any{"content": []any{map[string]any{"type": "text", "text": text}}})
	if err != nil {
		tb.Fatal(err)
	}
	cfg := Config{Name: "s", Protocol: "2025-11-25", MaxInFlight: 64}
	c := NewClient(NewResilientSession(NewSession(&echoTransport{r}, cfg, nil), cfg, nil), cfg, nil)
	if _, err := c.Adopt(context.Background()); err != nil {
		tb.Fatal(err)
	}
	return c
}

func BenchmarkChain(b *testing.B) {
	for _, size := range []struct {
		name  string
		bytes int
	}{{"100B", 100}, {"1KiB", 1 << 10}, {"64KiB", 64 << 10}, {"1MiB", 1 << 20}, {"8MiB", 8 << 20}} {
		b.Run(size.name, func(b *testing.B) {
			text := strings.Repeat("x", size.bytes)
			c := chain(b, text)
			call := &Call{Tool: "echo", Arguments: map[string]any{"text": text}}
			b.SetBytes(int64(2 * size.bytes))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := c.Call(b.Context(), call); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestChainAllocations holds the chain above the transport to what it costs.
func TestChainAllocations(t *testing.T) {
	c := chain(t, "hello")
	call := &Call{Tool: "echo", Arguments: map[string]any{"text": "hello"}}
	ctx := context.Background()
	if n := testing.AllocsPerRun(200, func() {
		if _, err := c.Call(ctx, call); err != nil {
			t.Fatal(err)
		}
	}); n > 8 {
		t.Errorf("%v allocations a call above the transport, want at most 8", n)
	}
}
