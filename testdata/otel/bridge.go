// Package otelbridge turns each reach for a server into an OpenTelemetry span.
// It is meant to be copied; the library itself has no dependency.
package otelbridge

import (
	"context"
	"log/slog"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"resilient/mcp"
)

// Bridge sets the hooks of o: one client span a reach, and the trace context in
// the request's _meta.
func Bridge(o *mcp.Options, tracer trace.Tracer) {
	o.Trace = func(ctx context.Context, r mcp.Reach) (context.Context, func(mcp.Health, error)) {
		ctx, span := tracer.Start(ctx, r.Name(), trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(attributes(r.Attrs())...))
		return ctx, func(h mcp.Health, err error) {
			if h.ErrorType != "" {
				span.SetAttributes(attribute.String("error.type", h.ErrorType))
				span.SetStatus(codes.Error, h.ErrorType)
			}
			span.End()
		}
	}
	o.Meta = func(ctx context.Context) map[string]any {
		carrier := propagation.MapCarrier{}
		propagation.TraceContext{}.Inject(ctx, carrier)
		meta := make(map[string]any, len(carrier))
		for k, v := range carrier {
			meta[k] = v
		}
		return meta
	}
}

func attributes(attrs []slog.Attr) (out []attribute.KeyValue) {
	for _, a := range attrs {
		out = append(out, attribute.String(a.Key, a.Value.String()))
	}
	return out
}
