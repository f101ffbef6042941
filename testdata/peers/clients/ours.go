package clients

import (
	"context"
	"errors"

	"resilient/mcp"
)

func init() { Register(Client{Name: "ours", Connect: connectOurs}) }

// ours is the whole chain: transport, session, policy, and a client that holds
// arguments and results to their schemas. It is composed as mcp.New does it, in
// order that ListTools can be measured without the compiling of schemas, which
// the others do not do.
type ours struct {
	policy *mcp.ResilientSession
	client *mcp.Client
}

func connectOurs(ctx context.Context, t Target) (Session, error) {
	cfg := mcp.Config{
		Name: "bench", Command: t.Command, Endpoint: t.URL,
		MaxInFlight: 64, // as many as there are callers
	}
	tr, err := mcp.NewTransport(cfg, nil)
	if err != nil {
		return nil, err
	}
	o := ours{policy: mcp.NewResilientSession(mcp.NewSession(tr, cfg, nil), cfg, nil)}
	o.client = mcp.NewClient(o.policy, cfg, nil)
	if _, err := o.policy.Initialize(ctx); err != nil {
		return nil, errors.Join(err, o.client.Close())
	}
	return o, nil
}

func (o ours) ListTools(ctx context.Context) (int, error) {
	tools, err := o.policy.ListTools(ctx)
	return len(tools), err
}

func (o ours) CallTool(ctx context.Context, name string, args map[string]any) (int, error) {
	r, err := o.client.Call(ctx, &mcp.Call{Tool: name, Arguments: args})
	if err != nil {
		return 0, err
	}
	if len(r.Content) == 0 || r.Content[0].Type != "text" {
		return 0, errors.New("not text")
	}
	return len(r.Content[0].Text), nil
}

func (o ours) Close() error { return o.client.Close() }
