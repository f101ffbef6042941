package mcp

import (
	"context"
	"encoding/json"
)

// HTTPTransport carries requests to an endpoint over Streamable HTTP.
type HTTPTransport struct{}

func newHTTPTransport(cfg Config, o *Options) (*HTTPTransport, error) { return &HTTPTransport{}, nil }

func (t *HTTPTransport) Open(ctx context.Context, in Inbound) (bool, error) { panic("todo") }
func (t *HTTPTransport) Call(ctx context.Context, req *Request) (json.RawMessage, error) {
	panic("todo")
}
func (t *HTTPTransport) Notify(ctx context.Context, req *Request) error { panic("todo") }
func (t *HTTPTransport) Close() error                                   { panic("todo") }
