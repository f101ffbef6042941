package mcp_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"resilient/mcp"
)

// forecast is the tool of the examples.
var forecast = mcp.Tool{
	Name:        "forecast",
	Description: "the weather in a city",
	InputSchema: json.RawMessage(`{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer","minimum":1}},"required":["city"]}`),
}

// weather composes the whole chain around a server that misbehaves on purpose.
func weather(server *mcp.FaultyServer, cfg mcp.Config) *mcp.Client {
	return mcp.NewClient(mcp.NewResilientSession(server, cfg, nil), cfg, nil)
}

// A fleet with a server that is down: the agent keeps the tools of the others,
// and the model is told once, as data, what is missing.
func Example() {
	ctx := context.Background()
	up := &mcp.FaultyServer{Tools: []mcp.Tool{forecast}, Handler: func(context.Context, *mcp.Call) (*mcp.Result, error) {
		return &mcp.Result{Content: []mcp.Content{{Type: "text", Text: "sunny"}}}, nil
	}}
	down := &mcp.FaultyServer{Fault: mcp.FaultUnreachable}
	fleet, err := mcp.Assemble(ctx,
		weather(up, mcp.Config{Name: "weather"}),
		weather(down, mcp.Config{Name: "calendar", Optional: true}),
	)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer fleet.Close()
	for _, tool := range fleet.Tools() {
		fmt.Println(tool.Name, "of", tool.Server)
	}
	fmt.Println(fleet.Notice())
	fmt.Println(fleet.Answer(ctx, &mcp.Call{Tool: "forecast", Arguments: map[string]any{"city": "Oslo"}}).Text())
	// Output:
	// forecast of weather
	// <untrusted-data source="mcp/unavailable">
	// The tools of server "calendar" are not available in this run: it could not be reached.
	// </untrusted-data>
	// <untrusted-data source="weather/forecast">
	// sunny
	// </untrusted-data>
}

// Arguments that do not fit never leave; the model reads what to correct.
func ExampleArgumentError() {
	ctx := context.Background()
	client := weather(&mcp.FaultyServer{Tools: []mcp.Tool{forecast}}, mcp.Config{Name: "weather"})
	defer client.Close()
	_, err := client.Call(ctx, &mcp.Call{Tool: "forecast", Arguments: map[string]any{"citty": "Oslo", "days": "3"}})
	var bad *mcp.ArgumentError
	if errors.As(err, &bad) {
		fmt.Println(bad.Feedback())
	}
	// Output:
	// Arguments for tool "forecast" do not fit its input schema; nothing was sent.
	// - /city: required string, missing
	// - /days: want integer ≥ 1, got "3" (string)
	// Correct these and call forecast again.
}

// The kind of a failure is one errors.Is away; what is known of it is in the
// error.
func ExampleTransportError() {
	server := &mcp.FaultyServer{Fault: mcp.FaultTruncated}
	_, err := weather(server, mcp.Config{Name: "weather"}).Adopt(context.Background())
	fmt.Println(errors.Is(err, mcp.ReasonDisconnected))
	var te *mcp.TransportError
	if errors.As(err, &te) {
		fmt.Println(te.Server, te.Op, te.Attempts, te.GaveUp)
	}
	// Output:
	// true
	// weather connect 1 exhausted
}

// A transport that answers from a script and records what it was asked.
func ExampleRecordingTransport() {
	transport := mcp.NewRecordingTransport(map[string]any{
		"tools/list": map[string]any{"tools": []any{map[string]any{"name": "forecast", "inputSchema": map[string]any{"type": "object"}}}},
	})
	cfg := mcp.Config{Name: "weather"}
	client := mcp.NewClient(mcp.NewSession(transport, cfg, nil), cfg, nil)
	defer client.Close()
	adoption, err := client.Adopt(context.Background())
	fmt.Println(len(adoption.Tools), err)
	_, err = client.Call(context.Background(), &mcp.Call{Tool: "forecast"})
	fmt.Println(err) // nobody scripted the call, so no test passes by accident
	// Output:
	// 1 <nil>
	// mcp: server "weather": tools/call: protocol: the script has no answer to "tools/call"
}

// A configuration file, with a default for a variable that is not set.
func ExampleParseConfigs() {
	file := `{"mcpServers": {
	  "files":  {"command": "mcp-server-filesystem", "args": ["${ROOT:-/tmp}"], "timeout_seconds": 5},
	  "search": {"url": "http://127.0.0.1:8080/mcp", "required": false, "retry": {"max_attempts": 3}}
	}}`
	cfgs, err := mcp.ParseConfigs([]byte(file), nil)
	for _, c := range cfgs {
		fmt.Println(c, c.CallTimeout, c.Retry.MaxAttempts)
	}
	fmt.Println(err)
	_, err = mcp.ParseConfigs([]byte(`[{"name": "files", "command": ["x"], "timeout_secs": 5}]`), nil)
	fmt.Println(err)
	// Output:
	// mcp.Config{"files" command="mcp-server-filesystem" +1} 5s 0
	// mcp.Config{"search" endpoint="http://127.0.0.1:8080/mcp" optional} 0s 3
	// <nil>
	// mcp: config: server "files": timeout_secs (file): unknown key; did you mean "timeout_seconds"?
}

// A tool handler of one's own, with its database behind the same policy:
// breaker, ceiling, retry, and an error that a model can act on.
func ExampleGuard() {
	guard := mcp.NewGuard(mcp.Config{
		Name: "users-db", CallTimeout: 4 * time.Second, Retry: mcp.RetryConfig{MaxAttempts: 3, BaseDelay: time.Millisecond}, BreakerFailures: 4,
	}, nil)
	fetchUser := func(ctx context.Context, id string) (string, error) { return "", errors.New("db-7.internal: deadlock") }

	lookupUser := func(ctx context.Context, id string) *mcp.Result {
		if id == "" {
			return mcp.ErrorResult(&mcp.ArgumentError{Tool: "lookup_user", Issues: []mcp.Issue{{Path: "/id", Keyword: "required", Want: "required string, missing"}}})
		}
		var user string
		err := guard.Do(ctx, mcp.Operation{Name: "fetch", Repeatable: true}, func(ctx context.Context) (err error) {
			user, err = fetchUser(ctx, id)
			return err
		})
		if err != nil {
			return mcp.ErrorResult(err)
		}
		return &mcp.Result{Content: []mcp.Content{{Type: "text", Text: user}}}
	}
	ctx := context.Background()
	for _, id := range []string{"", "7", "7", "7"} {
		r := lookupUser(ctx, id)
		var e struct{ Error string }
		json.Unmarshal([]byte(r.Text()), &e)
		fmt.Println(r.IsError, e.Error, guard.Health().State)
	}
	// Output:
	// true INVALID_ARGUMENTS closed
	// true UNEXPECTED closed
	// true UNEXPECTED open
	// true SERVER_UNAVAILABLE open
}

// Steps that are undone in reverse order when one of them fails.
func ExampleSaga() {
	say := func(what string, err error) func(context.Context) error {
		return func(context.Context) error { fmt.Println(what); return err }
	}
	var transfer mcp.Saga
	transfer.Step("debit", say("debit", nil), say("refund", nil))
	transfer.Step("credit", say("credit", nil), say("claw back", errors.New("account closed")))
	transfer.Step("log", say("log", errors.New("disk full")), nil)
	err := transfer.Run(context.Background())
	fmt.Println(err)
	var failed *mcp.SagaError
	if errors.As(err, &failed) {
		fmt.Println("undone:", failed.Undone, "for a human:", len(failed.Stuck))
	}
	// Output:
	// debit
	// credit
	// log
	// claw back
	// refund
	// mcp: saga: step "log": disk full; NOT UNDONE: step "credit": account closed
	// undone: [debit] for a human: 1
}

// The last good answer stands in for a server that is down, and says so.
func ExampleFallbackSession() {
	ctx := context.Background()
	server := &mcp.FaultyServer{Tools: []mcp.Tool{forecast}, Handler: func(context.Context, *mcp.Call) (*mcp.Result, error) {
		return &mcp.Result{Content: []mcp.Content{{Type: "text", Text: "sunny"}}}, nil
	}}
	cfg := mcp.Config{Name: "weather"}
	session := &mcp.FallbackSession{Session: mcp.NewResilientSession(server, cfg, nil), MaxAge: time.Hour}
	client := mcp.NewClient(session, cfg, nil)
	defer client.Close()
	call := &mcp.Call{Tool: "forecast", Arguments: map[string]any{"city": "Oslo"}}
	client.Call(ctx, call)
	server.SetFault(mcp.FaultUnreachable)
	r, err := client.Call(ctx, call)
	fmt.Println(err, r.Degraded)
	fmt.Println(r.Text())
	// Output:
	// <nil> cached 0s ago
	// The server "weather" did not answer this call. What follows is not its answer to it, but a substitute (cached 0s ago).
	// sunny
}

// TestPolicy tests a policy of one's own, in ten lines and in no time: in the
// bubble the thirty seconds until the probe pass at once.
func TestPolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &mcp.FaultyServer{Tools: []mcp.Tool{forecast}}
		client := weather(server, mcp.Config{Name: "weather", BreakerFailures: 2, BreakerReset: 30 * time.Second})
		call := func() error {
			_, err := client.Call(t.Context(), &mcp.Call{Tool: "forecast", Arguments: map[string]any{"city": "Oslo"}})
			return err
		}
		call()
		server.SetFault(mcp.FaultUnreachable)
		call()
		call()
		if err := call(); !errors.Is(err, mcp.ReasonUnavailable) || client.Health().State != mcp.BreakerOpen {
			t.Errorf("after two faults: %v, breaker %v", err, client.Health().State)
		}
		server.SetFault(mcp.FaultNone)
		time.Sleep(33 * time.Second)
		if err := call(); err != nil || client.Health().State != mcp.BreakerClosed {
			t.Errorf("the probe: %v, breaker %v", err, client.Health().State)
		}
	})
}
