package mcp

import (
	"context"
	"encoding/json"
)

// StdioTransport carries requests to a child process over its stdin and stdout.
type StdioTransport struct{}

func newStdioTransport(cfg Config, o *Options) *StdioTransport { return &StdioTransport{} }

func (t *StdioTransport) Open(ctx context.Context, in Inbound) (bool, error) { panic("todo") }
func (t *StdioTransport) Call(ctx context.Context, req *Request) (json.RawMessage, error) {
	panic("todo")
}
func (t *StdioTransport) Notify(ctx context.Context, req *Request) error { panic("todo") }
func (t *StdioTransport) Close() error                                   { panic("todo") }
