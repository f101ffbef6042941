package otelbridge

import (
	"context"
	"encoding/json"
	"testing"

	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"resilient/mcp"
)

// TestBridge makes a call that succeeds and one that fails, and reads the spans
// and what the server was sent.
func TestBridge(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder)).Tracer("test")
	transport := mcp.NewRecordingTransport(map[string]any{"tools/call": mcp.Answers{
		json.RawMessage(`{"content":[{"type":"text","text":"ok"}]}`),
		&mcp.RPCError{Code: -32602, Message: "secret"},
	}})
	var o mcp.Options
	Bridge(&o, tracer)
	cfg := mcp.Config{Name: "weather"}
	s := mcp.NewResilientSession(mcp.NewSession(transport, cfg, &o), cfg, &o)
	defer s.Close()
	ctx, parent := tracer.Start(context.Background(), "run")
	for range 2 {
		s.CallTool(ctx, &mcp.Call{Tool: "forecast"})
	}
	parent.End()

	spans := recorder.Ended()
	if len(spans) != 3 {
		t.Fatalf("%d spans, want a parent and two reaches", len(spans))
	}
	for i, want := range []codes.Code{codes.Unset, codes.Error} {
		span := spans[i]
		attrs := map[string]string{}
		for _, a := range span.Attributes() {
			attrs[string(a.Key)] = a.Value.Emit()
		}
		if span.Name() != "mcp.weather.tools/call" || span.SpanKind() != trace.SpanKindClient || span.Parent().SpanID() != parent.SpanContext().SpanID() {
			t.Errorf("span %d is %q, kind %v, under %v", i, span.Name(), span.SpanKind(), span.Parent().SpanID())
		}
		if attrs["adk.mcp.server"] != "weather" || attrs["mcp.method.name"] != "tools/call" || attrs["gen_ai.tool.name"] != "forecast" || attrs["adk.mcp.breaker"] != "closed" {
			t.Errorf("span %d has attributes %v", i, attrs)
		}
		if span.Status().Code != want || want == codes.Error && attrs["error.type"] != "-32602" {
			t.Errorf("span %d ended with %v, %v", i, span.Status(), attrs["error.type"])
		}
	}
	for _, c := range transport.Calls() {
		if meta, _ := c.Params["_meta"].(map[string]any); c.Method == "tools/call" && meta["traceparent"] == nil {
			t.Errorf("no traceparent in %v", c.Params)
		}
	}
}
