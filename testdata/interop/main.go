// Command interop is a server on the official Go SDK, for the tests beside it:
// nothing of the client is in it, so that the two can disagree. Without flags
// it serves stdio; with -http it serves Streamable HTTP at /mcp and the older
// HTTP+SSE at /sse, and says where on standard error:
//
//	listening http://127.0.0.1:PORT
//
// A POST to /forget loses all sessions, as a restarted server does.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/jsonschema-go/jsonschema"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
)

var (
	addr     = flag.String("http", "", "serve HTTP at this `address` instead of stdio")
	mode     = flag.String("mode", "sessions", "sessions, stateless, or dual: stateless for 2026-07-28 alone")
	jsonOnly = flag.Bool("json", false, "answer in JSON instead of an event stream")
	resume   = flag.Bool("resume", false, "keep events, so that a stream can be resumed")
	versions = flag.String("versions", "", "the revisions to offer, with commas between them")
)

func main() {
	log.SetFlags(0)
	flag.Parse()
	s := newServer()
	if *addr == "" {
		if err := s.Run(context.Background(), &sdk.StdioTransport{}); err != nil {
			log.Fatal(err)
		}
		return
	}
	l, err := net.Listen("tcp", *addr)
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("listening http://%s", l.Addr())
	log.Fatal(http.Serve(l, handler(s)))
}

// handler serves s over HTTP in the mode that the flags name.
func handler(s *sdk.Server) http.Handler {
	server := func(*http.Request) *sdk.Server { return s }
	streamable := func(stateless bool) http.Handler {
		o := &sdk.StreamableHTTPOptions{Stateless: stateless, JSONResponse: *jsonOnly, PropagateRequestCancellation: true}
		if *resume && !stateless {
			o.EventStore = sdk.NewMemoryEventStore(nil)
		}
		return sdk.NewStreamableHTTPHandler(server, o)
	}
	var sessions atomic.Value
	sessions.Store(streamable(false))
	stateless := streamable(true)

	mux := http.NewServeMux()
	mux.Handle("/sse", sdk.NewSSEHandler(server, nil))
	mux.HandleFunc("/forget", func(http.ResponseWriter, *http.Request) { sessions.Store(streamable(false)) })
	mux.HandleFunc("/mcp", func(w http.ResponseWriter, r *http.Request) {
		h := sessions.Load().(http.Handler)
		if *mode == "stateless" || *mode == "dual" && r.Header.Get("MCP-Protocol-Version") == "2026-07-28" {
			h = stateless
		}
		h.ServeHTTP(w, r)
	})
	return mux
}

// What the tool "counters" reports, for the whole process.
var started, finished, cancelled atomic.Int64

// newServer returns a server with a tool for everything that a test wants to
// see happen. The list is cut into pages of four.
func newServer() *sdk.Server {
	o := &sdk.ServerOptions{
		Instructions: "A peer for tests.",
		PageSize:     4,
		CompletionHandler: func(_ context.Context, r *sdk.CompleteRequest) (*sdk.CompleteResult, error) {
			var values []string
			for _, name := range []string{"ada", "alan", "grace"} {
				if strings.HasPrefix(name, r.Params.Argument.Value) {
					values = append(values, name)
				}
			}
			return &sdk.CompleteResult{Completion: sdk.CompletionResultDetails{Values: values}}, nil
		},
	}
	if *versions != "" {
		o.SupportedProtocolVersions = strings.Split(*versions, ",")
	}
	s := sdk.NewServer(&sdk.Implementation{Name: "interop-go", Version: "1"}, o)

	tool(s, "echo", func(_ context.Context, _ *sdk.CallToolRequest, in struct {
		Text string `json:"text"`
	}) (*sdk.CallToolResult, error) {
		return text(in.Text), nil
	})
	sdk.AddTool(s, &sdk.Tool{Name: "sum", Description: "adds, with structured output"}, sum)
	sdk.AddTool(s, &sdk.Tool{Name: "counters", Description: "what became of the calls of work"}, counters)
	tool(s, "work", work)
	tool(s, "refuse", func(context.Context, *sdk.CallToolRequest, none) (*sdk.CallToolResult, error) {
		return nil, errors.New("refused on purpose")
	})
	tool(s, "ask", ask)
	tool(s, "think", think)
	tool(s, "where", where)
	tool(s, "repeat", func(_ context.Context, _ *sdk.CallToolRequest, in struct {
		Text  string `json:"text"`
		Times int    `json:"times"`
	}) (*sdk.CallToolResult, error) {
		if in.Times < 0 || len(in.Text)*in.Times > 64<<20 {
			return nil, errors.New("too much")
		}
		return text(strings.Repeat(in.Text, in.Times)), nil
	})
	tool(s, "mixed", func(context.Context, *sdk.CallToolRequest, none) (*sdk.CallToolResult, error) {
		return &sdk.CallToolResult{Content: []sdk.Content{
			&sdk.TextContent{Text: "mixed"},
			&sdk.ResourceLink{URI: "test://note", Name: "note", MIMEType: "text/plain"},
			&sdk.EmbeddedResource{Resource: &sdk.ResourceContents{URI: "test://inline", MIMEType: "text/plain", Text: "inline"}},
			&sdk.ImageContent{MIMEType: "image/png", Data: []byte("png")},
		}}, nil
	})
	tool(s, "talk", func(ctx context.Context, r *sdk.CallToolRequest, in struct {
		Lines int `json:"lines"`
	}) (*sdk.CallToolResult, error) {
		for i := range in.Lines {
			if err := r.Session.Log(ctx, &sdk.LoggingMessageParams{Level: "info", Data: i + 1}); err != nil {
				return nil, err
			}
		}
		return text("talked"), nil
	})
	tool(s, "env", func(_ context.Context, _ *sdk.CallToolRequest, in struct {
		Name string `json:"name"`
	}) (*sdk.CallToolResult, error) {
		return text(os.Getenv(in.Name)), nil
	})
	tool(s, "cut", cut)
	tool(s, "quit", func(_ context.Context, _ *sdk.CallToolRequest, in struct {
		Status int `json:"status"`
	}) (*sdk.CallToolResult, error) {
		os.Exit(in.Status)
		return nil, nil
	})
	tool(s, "learn", func(_ context.Context, _ *sdk.CallToolRequest, in struct {
		Name string `json:"name"`
	}) (*sdk.CallToolResult, error) {
		tool(s, in.Name, func(context.Context, *sdk.CallToolRequest, none) (*sdk.CallToolResult, error) {
			return text("learnt"), nil
		})
		return text("knows " + in.Name), nil
	})

	s.AddResource(&sdk.Resource{URI: "test://note", Name: "note", MIMEType: "text/plain"}, func(_ context.Context, r *sdk.ReadResourceRequest) (*sdk.ReadResourceResult, error) {
		return &sdk.ReadResourceResult{Contents: []*sdk.ResourceContents{{URI: r.Params.URI, MIMEType: "text/plain", Text: "a note"}}}, nil
	})
	s.AddPrompt(&sdk.Prompt{Name: "greet", Arguments: []*sdk.PromptArgument{{Name: "name", Required: true}}}, func(_ context.Context, r *sdk.GetPromptRequest) (*sdk.GetPromptResult, error) {
		return &sdk.GetPromptResult{Messages: []*sdk.PromptMessage{{Role: "user", Content: &sdk.TextContent{Text: "Greet " + r.Params.Arguments["name"]}}}}, nil
	})
	return s
}

type none struct{}

// tool registers a tool that has no structured output.
func tool[In any](s *sdk.Server, name string, f func(context.Context, *sdk.CallToolRequest, In) (*sdk.CallToolResult, error)) {
	sdk.AddTool(s, &sdk.Tool{Name: name, Description: "see main.go"}, func(ctx context.Context, r *sdk.CallToolRequest, in In) (*sdk.CallToolResult, any, error) {
		out, err := f(ctx, r, in)
		return out, nil, err
	})
}

func text(s string) *sdk.CallToolResult {
	return &sdk.CallToolResult{Content: []sdk.Content{&sdk.TextContent{Text: s}}}
}

type sumIn struct {
	Numbers []float64 `json:"numbers"`
}

type sumOut struct {
	Sum float64 `json:"sum"`
}

func sum(_ context.Context, _ *sdk.CallToolRequest, in sumIn) (_ *sdk.CallToolResult, out sumOut, _ error) {
	for _, n := range in.Numbers {
		out.Sum += n
	}
	return nil, out, nil
}

type countersOut struct {
	Started   int64 `json:"started"`
	Finished  int64 `json:"finished"`
	Cancelled int64 `json:"cancelled"`
}

func counters(context.Context, *sdk.CallToolRequest, none) (*sdk.CallToolResult, countersOut, error) {
	return nil, countersOut{started.Load(), finished.Load(), cancelled.Load()}, nil
}

type workIn struct {
	Steps  int `json:"steps"`
	Millis int `json:"millis" jsonschema:"how long each step takes"`
}

// work takes its time, reports each step, and stops when it is cancelled.
func work(ctx context.Context, r *sdk.CallToolRequest, in workIn) (*sdk.CallToolResult, error) {
	started.Add(1)
	for i := range in.Steps {
		select {
		case <-time.After(time.Duration(in.Millis) * time.Millisecond):
		case <-ctx.Done():
			cancelled.Add(1)
			return nil, ctx.Err()
		}
		if token := r.Params.GetProgressToken(); token != nil {
			_ = r.Session.NotifyProgress(ctx, &sdk.ProgressNotificationParams{ // where answers are JSON, there is no way
				ProgressToken: token, Progress: float64(i + 1), Total: float64(in.Steps), Message: fmt.Sprintf("step %d", i+1),
			})
		}
	}
	finished.Add(1)
	return text("worked"), nil
}

// ask, think and where want something of the client. The SDK sends it as an
// input_required result where the revision has that, and as a request of the
// server where it has not, and calls the handler again with the answer.

func ask(_ context.Context, r *sdk.CallToolRequest, _ none) (*sdk.CallToolResult, error) {
	if a, ok := r.Params.InputResponses["who"].(*sdk.ElicitResult); ok {
		return text(fmt.Sprintf("%s %v %v %s", a.Action, a.Content["name"], a.Content["color"], r.Params.RequestState)), nil
	}
	return &sdk.CallToolResult{
		RequestState: "asked",
		InputRequests: sdk.InputRequestMap{"who": &sdk.ElicitParams{
			Message: "Who are you?",
			RequestedSchema: &jsonschema.Schema{
				Type: "object",
				Properties: map[string]*jsonschema.Schema{
					"name":  {Type: "string"},
					"color": {Type: "string", Default: []byte(`"green"`)},
				},
				Required: []string{"name"},
			},
		}},
	}, nil
}

func think(_ context.Context, r *sdk.CallToolRequest, in struct {
	Prompt string `json:"prompt"`
}) (*sdk.CallToolResult, error) {
	if a, ok := r.Params.InputResponses["thought"].(*sdk.CreateMessageWithToolsResult); ok {
		for _, c := range a.Content {
			if t, ok := c.(*sdk.TextContent); ok {
				return text(a.Model + " " + t.Text), nil
			}
		}
	}
	return &sdk.CallToolResult{InputRequests: sdk.InputRequestMap{"thought": &sdk.CreateMessageParams{
		MaxTokens: 10,
		Messages:  []*sdk.SamplingMessage{{Role: "user", Content: &sdk.TextContent{Text: in.Prompt}}},
	}}}, nil
}

func where(_ context.Context, r *sdk.CallToolRequest, _ none) (*sdk.CallToolResult, error) {
	if a, ok := r.Params.InputResponses["roots"].(*sdk.ListRootsResult); ok {
		var uris []string
		for _, root := range a.Roots {
			uris = append(uris, root.URI)
		}
		return text(strings.Join(uris, " ")), nil
	}
	return &sdk.CallToolResult{InputRequests: sdk.InputRequestMap{"roots": &sdk.ListRootsParams{}}}, nil
}

// cut ends the event stream of the call before its answer, so that the client
// has to come back for it.
func cut(_ context.Context, r *sdk.CallToolRequest, in struct {
	Millis int `json:"millis" jsonschema:"when to come back"`
}) (*sdk.CallToolResult, error) {
	if r.Extra == nil || r.Extra.CloseSSEStream == nil {
		return nil, errors.New("there is no stream that can be resumed")
	}
	r.Extra.CloseSSEStream(sdk.CloseSSEStreamArgs{RetryAfter: time.Duration(in.Millis) * time.Millisecond})
	time.Sleep(20 * time.Millisecond)
	return text("answered after the cut"), nil
}
