package mcp

import "context"

// Health is what on-call sees of a server.
type Health struct{ Server string }

// Reach is one attempt against a server.
type Reach struct{ Server string }

// Operation is what a Guard is asked to do.
type Operation struct{ Name string }

// Guard is the policy around any function.
type Guard struct{}

func (g *Guard) Do(ctx context.Context, op Operation, fn func(context.Context) error) error {
	return fn(ctx)
}
