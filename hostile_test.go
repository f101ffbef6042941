package mcp

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A peer that wants to do harm: what it sends costs us neither memory nor time
// beyond what Config allows, and the session can be used afterwards.
//
// Memory is what [runtime/metrics] calls objects, the dead ones that the
// collector has not found yet included, and goroutine stacks, sampled every
// millisecond, less what there was before. It is measured as a container would
// run us: with GOMEMLIMIT at what there was before and the promised bound. The
// server of an HTTP test is in there as well.

// heldTo runs f and checks the promise about memory: four messages for each call
// in flight and one more, and 32 MiB.
func heldTo(t *testing.T, message, calls int, f func()) {
	t.Helper()
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/stacks:bytes"}}
	read := func() int64 {
		metrics.Read(sample)
		return int64(sample[0].Value.Uint64() + sample[1].Value.Uint64())
	}
	runtime.GC()
	before, peak := read(), int64(0)
	limit := int64(4*message*(calls+1) + 32<<20)
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(before + limit))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			peak = max(peak, read())
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	start := time.Now()
	f()
	took := time.Since(start)
	close(stop)
	<-stopped
	t.Logf("peak %.1f MiB of %.1f MiB, %v", float64(peak-before)/(1<<20), float64(limit)/(1<<20), took.Round(time.Millisecond))
	if peak-before > limit && !raced {
		t.Errorf("peak %.1f MiB, over %.1f MiB", float64(peak-before)/(1<<20), float64(limit)/(1<<20))
	}
}

// How much harm is done. The race detector makes it slow and large, so under it
// there is less to do, and memory is not checked.
var (
	raced          = underRace()
	hostileMessage = 2 << 20 // what a message may have
	nearly         = 2044 << 10
	flood          = 64 << 20 // far more than anything is allowed
	million        = 1_000_000
	bomb           = 1 << 30 // of zip, in 1 MiB
)

func underRace() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

func init() {
	if raced {
		hostileMessage, nearly, flood, million, bomb = 128<<10, 124<<10, 4<<20, 20_000, 16<<20
	}
}

// answerWith writes an answer whose result is made by body.
func answerWith(w io.Writer, id string, body func(w io.Writer)) {
	io.WriteString(w, `{"jsonrpc":"2.0","id":`+id+`,"result":`)
	body(w)
	io.WriteString(w, "}")
}

// nearlyFull writes a result of nearly the size of a message.
func nearlyFull(head, unit, tail string) strand {
	return func(w io.Writer, id string) {
		answerWith(w, id, func(w io.Writer) {
			io.WriteString(w, head)
			fillWith(w, unit, nearly-len(head)-len(tail))
			io.WriteString(w, tail)
		})
	}
}

// numbered writes a result of nearly the size of a message with a unit that has
// a number of its own each time.
func numbered(head, unit, tail string) strand {
	return func(w io.Writer, id string) {
		answerWith(w, id, func(w io.Writer) {
			var b bytes.Buffer
			b.WriteString(head)
			for i := 0; b.Len() < nearly-len(tail)-64; i++ {
				b.WriteString(strings.ReplaceAll(unit, "#", strconv.Itoa(i)))
			}
			b.WriteString(tail)
			w.Write(b.Bytes())
		})
	}
}

// hostileCalls are answers to a call. Of a flood one is enough. Whose answer a
// stray one is nobody can tell on a pipe, so that its call ends by its ceiling.
var hostileCalls = []struct {
	name         string
	flood, stray bool
	act          strand
}{
	{"an endless line", true, false, func(w io.Writer, id string) {
		answerWith(w, id, func(w io.Writer) { fillWith(w, `x`, flood) })
	}},
	{"an endless line that is nobody's, then the answer", true, false, func(w io.Writer, id string) {
		fillWith(w, `x`, flood)
		io.WriteString(w, "\n"+puppetOK(id))
	}},
	{"a million notifications", true, false, func(w io.Writer, id string) {
		fillWith(w, `{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"x"}}`+"\n", 87*million)
		io.WriteString(w, puppetOK(id))
	}},
	{"large notifications", true, false, func(w io.Writer, id string) {
		for range 64 {
			io.WriteString(w, `{"jsonrpc":"2.0","method":"notifications/message","params":{"data":"`)
			fillWith(w, "x", nearly)
			io.WriteString(w, "\"}}\n")
		}
		io.WriteString(w, puppetOK(id))
	}},
	{"a million requests", true, false, func(w io.Writer, id string) {
		for i := range million {
			if _, err := io.WriteString(w, `{"jsonrpc":"2.0","id":"s`+strconv.Itoa(i)+`","method":"ping"}`+"\n"); err != nil {
				return
			}
		}
		io.WriteString(w, puppetOK(id))
	}},
	{"large requests", true, false, func(w io.Writer, id string) {
		for i := range 64 {
			io.WriteString(w, `{"jsonrpc":"2.0","id":"s`+strconv.Itoa(i)+`","method":"roots/list","params":{"data":"`)
			fillWith(w, "x", nearly)
			io.WriteString(w, "\"}}\n")
		}
		io.WriteString(w, puppetOK(id))
	}},
	{"requests with large ids", true, false, func(w io.Writer, id string) {
		for i := range 64 {
			io.WriteString(w, `{"jsonrpc":"2.0","method":"roots/list","id":"`+strconv.Itoa(i))
			fillWith(w, "x", nearly)
			io.WriteString(w, "\"}\n")
		}
		io.WriteString(w, puppetOK(id))
	}},
	{"requests of large methods", true, false, func(w io.Writer, id string) {
		for i := range 64 {
			io.WriteString(w, `{"jsonrpc":"2.0","id":"s`+strconv.Itoa(i)+`","method":"roots/list`)
			fillWith(w, "x", nearly)
			io.WriteString(w, "\"}\n")
		}
		io.WriteString(w, puppetOK(id))
	}},
	{"notifications of large methods", true, false, func(w io.Writer, id string) {
		for range 64 {
			io.WriteString(w, `{"jsonrpc":"2.0","method":"`)
			fillWith(w, "x", nearly)
			io.WriteString(w, "\"}\n")
		}
		io.WriteString(w, puppetOK(id))
	}},
	{"a million answers to nobody", true, false, func(w io.Writer, id string) {
		fillWith(w, `{"jsonrpc":"2.0","id":987654321,"result":{}}`+"\n", 44*million)
		io.WriteString(w, puppetOK(id))
	}},
	{"a batch of a million", false, true, func(w io.Writer, id string) {
		io.WriteString(w, "[")
		fillWith(w, "0,", nearly)
		io.WriteString(w, puppetOK(id)+"]")
	}},
	{"a deep message", false, true, func(w io.Writer, id string) { fillWith(w, "[", nearly) }},
	{"a deep result", false, false, nearlyFull("", "[", "")},
	{"deep structured content", false, false, nearlyFull(`{"content":[],"structuredContent":`, `{"a":`, "")},
	{"wide structured content", false, false, nearlyFull(`{"content":[],"structuredContent":{"n":[0`, ",0", "]}}")},
	{"an object of many members", false, false, numbered(`{"content":[],"structuredContent":{"n":1`, `,"#":0`, "}}")},
	{"objects in structured content", false, false, nearlyFull(`{"content":[],"structuredContent":{"n":[{}`, `,{"a":0}`, "]}}")},
	{"a number of a million digits", false, false, nearlyFull(`{"content":[],"structuredContent":{"n":1`, "7", "}}")},
	{"a large exponent", false, false, func(w io.Writer, id string) {
		answerWith(w, id, func(w io.Writer) { io.WriteString(w, `{"content":[],"structuredContent":{"n":1e999999999}}`) })
	}},
	{"a large text", false, false, nearlyFull(`{"content":[{"type":"text","text":"`, "x", `"}]}`)},
	{"a text of escapes", false, false, nearlyFull(`{"content":[{"type":"text","text":"`, `\n`, `"}]}`)},
	{"a text that is no UTF-8", false, false, nearlyFull(`{"content":[{"type":"text","text":"`, "\xff", `"}]}`)},
	{"many blocks", false, false, nearlyFull(`{"content":[{"type":"x"}`, `,{"type":"x"}`, `]}`)},
	{"many blocks of text", false, false, nearlyFull(`{"content":[{"type":"text"}`, `,{"type":"text","text":""}`, `]}`)},
	{"duplicate members", false, false, nearlyFull(`{"content":[]`, `,"content":[]`, `}`)},
	{"unknown members", false, false, numbered(`{"content":[]`, `,"#":[]`, `}`)},
	{"white space", false, false, nearlyFull("", " ", `{"content":[]}`)},
}

func init() {
	for _, h := range hostileCalls {
		strands[h.name] = h.act
	}
	for _, h := range hostileLists {
		strands[h.name] = h.act
	}
	for _, h := range hostileSchemas {
		strands["schema: "+h.name] = func(w io.Writer, id string) {
			answerWith(w, id, func(w io.Writer) {
				fmt.Fprintf(w, `{"tools":[{"name":"bad","inputSchema":%s},{"name":"out","inputSchema":{"type":"object"},"outputSchema":%[1]s},{"name":"t","inputSchema":{"type":"object"}}]}`, h.schema())
			})
		}
	}
}

// TestHostileAnswers has every call in flight answered in bad faith at once.
func TestHostileAnswers(t *testing.T) {
	for _, h := range hostileCalls {
		other := "JSON"
		if h.flood {
			other = "events"
		}
		for _, carrier := range []string{"stdio", other} {
			t.Run(h.name+"/"+carrier, func(t *testing.T) {
				calls := 4
				if h.flood {
					calls = 1
				}
				cfg := hostileConfig(t, carrier, "")
				cfg.CallTimeout = time.Minute
				if h.stray && carrier == "stdio" {
					cfg.CallTimeout = 2 * time.Second
				}
				release := make(chan struct{})
				defer close(release)
				var once sync.Once
				c := openPuppetClient(t, cfg, &Options{
					OnNotification: func(string, string, json.RawMessage) { once.Do(func() { <-release }) }, // so the queue fills up
					Handlers:       map[string]HandlerFunc{"roots/list": func(context.Context, string, json.RawMessage) (any, error) { time.Sleep(time.Second); return nil, nil }},
				})
				if _, err := c.Adopt(t.Context()); err != nil {
					t.Fatal(err)
				}
				heldTo(t, hostileMessage, calls, func() {
					var wg sync.WaitGroup
					results := make([]*Result, calls)
					for i := range calls {
						wg.Go(func() {
							call := doCall(h.name)
							call.Tool = "s" // whose results are held to a schema
							r, err := c.Call(t.Context(), call)
							checkOurs(t, err)
							if errors.Is(err, ReasonTimeout) && !(h.stray && carrier == "stdio") {
								t.Errorf("%v", err)
							}
							results[i] = r // held, as a caller may
						})
					}
					wg.Wait()
					runtime.KeepAlive(results)
				})
				usable(t, c)
			})
		}
	}
}

// usable checks that the next call goes well, and soon.
func usable(t *testing.T, c *Client) {
	t.Helper()
	start := time.Now()
	if _, err := c.Call(t.Context(), doCall("")); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	soon(t, start)
}

// hostileConfig declares a puppet behind a carrier. Spoil, if it is not empty,
// is "method:act" for the first answer to a method.
func hostileConfig(t *testing.T, carrier, spoil string) Config {
	var cfg Config
	if carrier == "stdio" {
		cfg, _ = puppetConfig(t, "spoil="+spoil, "once="+filepath.Join(t.TempDir(), "once"))
	} else {
		p := newPuppetServer(t, 0)
		p.stream = carrier == "events"
		if method, act, ok := strings.Cut(spoil, ":"); ok {
			p.method = method
			p.spoil = func(w http.ResponseWriter, r *http.Request, id string) { p.play(w, id, strands[act]) }
		}
		cfg.Endpoint = p.URL
	}
	cfg.MaxMessageBytes, cfg.BreakerFailures = hostileMessage, -1
	return cfg
}

// hostileLists are answers to the handshake and to the tool list.
var hostileLists = []struct {
	name, method string
	act          strand
}{
	{"endless instructions", "initialize", func(w io.Writer, id string) {
		answerWith(w, id, func(w io.Writer) {
			io.WriteString(w, `{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"x","version":"1"},"instructions":"`)
			fillWith(w, "x", flood)
		})
	}},
	{"large instructions", "initialize", nearlyFull(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"x","version":"1"},"instructions":"`, "x", `"}`)},
	{"a large name", "initialize", nearlyFull(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"version":"1","name":"`, "x", `"}}`)},
	{"a deep name", "initialize", nearlyFull(`{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"version":"1","name":`, "[", ``)},
	{"large capabilities", "initialize", numbered(`{"protocolVersion":"2025-11-25","serverInfo":{"name":"x","version":"1"},"capabilities":{"tools":{}`, `,"#":{}`, `}}`)},
	{"many versions", "server/discover", nearlyFull(`{"supportedVersions":["x"`, `,"x"`, `]}`)},
	{"an endless list", "tools/list", func(w io.Writer, id string) {
		answerWith(w, id, func(w io.Writer) {
			io.WriteString(w, `{"tools":[`)
			fillWith(w, `{"name":"x","inputSchema":{"type":"object"}},`, flood)
		})
	}},
	{"many tools", "tools/list", numbered(`{"tools":[{"name":"t","inputSchema":{"type":"object"}}`, `,{"name":"t#","inputSchema":{}}`, `]}`)},
	{"many tools with annotations", "tools/list", numbered(`{"tools":[{"name":"t","inputSchema":{"type":"object"}}`, `,{"name":"#","inputSchema":{},"annotations":{}}`, `]}`)},
	{"many that are no tools", "tools/list", nearlyFull(`{"tools":[{"name":"t","inputSchema":{"type":"object"}}`, `,0`, `]}`)},
	{"the same tool again and again", "tools/list", nearlyFull(`{"tools":[{"name":"t","inputSchema":{"type":"object"}}`, `,{"name":"t","inputSchema":{}}`, `]}`)},
	{"a tool with a large name", "tools/list", nearlyFull(`{"tools":[{"name":"t","inputSchema":{"type":"object"}},{"inputSchema":{"type":"object"},"name":"`, "x", `"}]}`)},
	{"a tool with a large description", "tools/list", nearlyFull(`{"tools":[{"name":"t","inputSchema":{"type":"object"}},{"name":"u","inputSchema":{"type":"object"},"description":"`, "x", `"}]}`)},
	{"a large cursor", "tools/list", nearlyFull(`{"tools":[{"name":"t","inputSchema":{"type":"object"}}],"nextCursor":"`, "x", `"}`)},
}

// TestHostileLists connects to a server in bad faith, and again after that,
// when it behaves.
func TestHostileLists(t *testing.T) {
	for _, h := range hostileLists {
		for _, carrier := range []string{"stdio", "JSON"} {
			t.Run(h.name+"/"+carrier, func(t *testing.T) {
				hostileAdopt(t, hostileConfig(t, carrier, h.method+":"+h.name))
			})
		}
	}
}

func hostileAdopt(t *testing.T, cfg Config) {
	cfg.ConnectTimeout, cfg.DiscoveryTimeout, cfg.CallTimeout = 30*time.Second, 30*time.Second, 30*time.Second
	c := openPuppetClient(t, cfg, nil)
	heldTo(t, cfg.MaxMessageBytes, 1, func() {
		a, err := c.Adopt(t.Context())
		checkOurs(t, err)
		if errors.Is(err, ReasonTimeout) {
			t.Errorf("%v", err)
		}
		if err == nil {
			f, err := Assemble(t.Context(), c)
			checkOurs(t, err)
			if f != nil {
				_, _ = f.Notice(), f.String()
			}
		}
		runtime.KeepAlive(a)
	})
	if _, err := c.Adopt(t.Context()); err != nil {
		t.Errorf("Adopt afterwards: %v", err)
	}
	usable(t, c)
}

// hostileSchemas are schemas of tools, input and output alike.
var hostileSchemas = []struct {
	name   string
	schema func() string
}{
	{"deep", func() string { return strings.Repeat(`{"items":`, 100_000) + "{}" + strings.Repeat("}", 100_000) }},
	{"deep, within the bound of a message", func() string { return strings.Repeat(`{"items":`, 250) + "{}" + strings.Repeat("}", 250) }},
	{"wide", func() string {
		var b strings.Builder
		b.WriteString(`{"type":"object","properties":{"a":{}`)
		for i := range 90_000 {
			fmt.Fprintf(&b, `,"%d":{}`, i)
		}
		return b.String() + "}}"
	}},
	{"alternatives of alternatives", func() string {
		s := `{"type":"string"}`
		for range 12 {
			s = `{"anyOf":[` + s + `,` + s + `]}`
		}
		return `{"type":"object","properties":{"do":` + s + `}}`
	}},
	{"references to references", func() string {
		var b strings.Builder
		b.WriteString(`{"type":"object","$defs":{`)
		for i := range 60 {
			fmt.Fprintf(&b, `"d%d":{"allOf":[{"$ref":"#/$defs/d%d"},{"$ref":"#/$defs/d%[2]d"}]},`, i, i+1)
		}
		return b.String() + `"d60":{}},"properties":{"do":{"$ref":"#/$defs/d0"}}}`
	}},
	{"a circle", func() string {
		return `{"type":"object","allOf":[{"$ref":"#"}],"properties":{"do":{"$ref":"#/properties/do"}}}`
	}},
	{"a reference elsewhere", func() string {
		return `{"type":"object","properties":{"do":{"$ref":"http://` + canary + `.example/"}}}`
	}},
	{"a large enumeration", func() string {
		return `{"type":"object","properties":{"do":{"enum":["a"` + strings.Repeat(`,"b"`, 200_000) + `]}}}`
	}},
	{"many required", func() string { return `{"type":"object","required":["do"` + strings.Repeat(`,"do"`, 180_000) + `]}` }},
	{"a pattern that explodes", func() string {
		return `{"type":"object","properties":{"do":{"pattern":"` + strings.Repeat("(a?){1000}", 40) + `"}}}`
	}},
	{"a pattern that backtracks", func() string { return `{"type":"object","properties":{"do":{"pattern":"^(a+)+$"}}}` }},
	{"a large pattern", func() string {
		return `{"type":"object","properties":{"do":{"pattern":"` + strings.Repeat("a", 900_000) + `"}}}`
	}},
	{"many patterns", func() string {
		return `{"type":"object","allOf":[{"pattern":"a"}` + strings.Repeat(`,{"pattern":"[a-z]{1,100}"}`, 30_000) + `]}`
	}},
	{"a number of a million digits", func() string {
		return `{"type":"object","properties":{"do":{"multipleOf":1` + strings.Repeat("0", 900_000) + `}}}`
	}},
	{"a tiny step", func() string { return `{"type":"object","properties":{"do":{"multipleOf":1e-999999999}}}` }},
	{"a large count", func() string { return `{"type":"object","properties":{"do":{"minLength":1e99999,"maxItems":-1}}}` }},
	{"keywords of the wrong kind", func() string {
		return `{"type":7,"properties":[],"required":{},"enum":1,"allOf":{},"items":"x","pattern":null}`
	}},
	{"duplicate members", func() string { return `{"type":"object","type":"array","properties":{"do":{},"do":false}}` }},
	{"no object", func() string { return `[[[]]]` }},
	{"false", func() string { return `false` }},
}

// TestHostileSchemas has each schema at a tool's input and at another's output:
// the tools beside them are adopted, and both can be called or are not there.
func TestHostileSchemas(t *testing.T) {
	for _, h := range hostileSchemas {
		t.Run(h.name, func(t *testing.T) {
			cfg := hostileConfig(t, "JSON", "tools/list:schema: "+h.name)
			c := openPuppetClient(t, cfg, nil)
			heldTo(t, hostileMessage, 1, func() {
				start := time.Now()
				a, err := c.Adopt(t.Context())
				checkOurs(t, err)
				soon(t, start)
				if err != nil {
					return
				}
				for _, tool := range a.Tools {
					start := time.Now()
					call := doCall(strings.Repeat("a", 60))
					call.Tool = tool.Name
					_, err := c.Call(t.Context(), call)
					checkOurs(t, err)
					soon(t, start)
				}
			})
			if _, err := c.Adopt(t.Context()); err != nil {
				t.Errorf("Adopt afterwards: %v", err)
			}
			usable(t, c)
		})
	}
}

// TestHostilePages has a list of 100,000 pages, each with a cursor of its own:
// empty ones, with large cursors, with many tools.
func TestHostilePages(t *testing.T) {
	for _, tt := range []struct {
		name, tool string
		cursor     int
		tools      int
	}{
		{"empty", "", 0, 0},
		{"large cursors", "", 64 << 10, 0},
		{"many tools", `{"name":"a"}`, 0, 10_000},
		{"many that are none", `0`, 0, 10_000},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var asked atomic.Int32
			page := `{"tools":[` + strings.TrimSuffix(strings.Repeat(tt.tool+",", tt.tools), ",") + `],"nextCursor":"` + strings.Repeat("x", tt.cursor)
			rt := NewRecordingTransport(map[string]any{"tools/list": func(context.Context, json.RawMessage) (any, error) {
				return json.RawMessage(page + strconv.Itoa(int(asked.Add(1))) + `"}`), nil
			}})
			cfg := Config{Name: "s", MaxMessageBytes: hostileMessage}
			c := NewClient(NewResilientSession(NewSession(rt, cfg, nil), cfg, nil), cfg, nil)
			defer c.Close()
			heldTo(t, hostileMessage, 1, func() {
				_, err := c.Adopt(t.Context())
				if !errors.Is(err, ReasonLimit) || asked.Load() > maxPages {
					t.Errorf("%v after %d pages", err, asked.Load())
				}
			})
		})
	}
}

// TestHostileHTTP is what only HTTP can do to a client: its answers to a call.
func TestHostileHTTP(t *testing.T) {
	packed := sync.OnceValue(func() []byte {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		fillWith(z, " ", bomb)
		z.Close()
		return b.Bytes()
	})
	zipped := func(status int, media string) func(w http.ResponseWriter, r *http.Request, id string) {
		return func(w http.ResponseWriter, r *http.Request, id string) {
			w.Header().Set("Content-Type", media)
			w.Header().Set("Content-Encoding", "gzip")
			w.WriteHeader(status)
			w.Write(packed())
		}
	}
	packed()
	byHand := func(head, unit string) func(w http.ResponseWriter, r *http.Request, id string) {
		return func(w http.ResponseWriter, r *http.Request, id string) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return
			}
			defer conn.Close()
			io.WriteString(conn, head)
			fillWith(conn, unit, -1)
		}
	}
	const calls = 4
	for _, tt := range []struct {
		name string
		act  func(w http.ResponseWriter, r *http.Request, id string)
	}{
		{"a bomb", zipped(200, "application/json")},
		{"a bomb in a stream", zipped(200, "text/event-stream")},
		{"a bomb in an error", zipped(500, "text/html")},
		{"a bomb in a refusal", zipped(400, "application/json")},
		{"endless headers", byHand("HTTP/1.1 200 OK\r\n", "A: b\r\n")},
		{"endless headers without values", byHand("HTTP/1.1 200 OK\r\n", "a:\r\n")},
		{"an endless header", byHand("HTTP/1.1 200 OK\r\nA: ", "x")},
		{"an endless status", byHand("HTTP/1.1 200 ", "x")},
		{"endless provisional replies", byHand("", "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")},
		{"an endless trailer", byHand("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", "A: b\r\n")},
		{"endless chunk extensions", byHand("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1;", "x=y;")},
		{"endless empty lines in a chunk", byHand("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n", "1\r\n \r\n")},
		{"a length that is a lie", func(w http.ResponseWriter, r *http.Request, id string) {
			hangUp(w, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "+strconv.Itoa(hostileMessage-1)+"\r\n\r\n{")
		}},
		{"a length beyond all bounds", func(w http.ResponseWriter, r *http.Request, id string) {
			hangUp(w, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9223372036854775807\r\n\r\n{")
		}},
		{"an endless error", func(w http.ResponseWriter, r *http.Request, id string) {
			w.WriteHeader(400)
			fillWith(w, "x", -1)
		}},
		{"an endless page", endless("text/html", "<html>", "x")},
		{"an endless event", endless("text/event-stream", "data: ", "x")},
		{"an event of endless lines", endless("text/event-stream", "", "data: x\n")},
		{"an event of endless empty lines", endless("text/event-stream", "", "data\n")},
		{"an endless comment", endless("text/event-stream", ":", "x")},
		{"an endless field", endless("text/event-stream", "", "x")},
		{"an endless id", endless("text/event-stream", "id:", "x")},
		{"large ids", func(w http.ResponseWriter, r *http.Request, id string) {
			w.Header().Set("Content-Type", "text/event-stream")
			for range 16 {
				io.WriteString(w, "id: ")
				fillWith(w, "x", nearly)
				io.WriteString(w, "\ndata: \n\n")
			}
		}},
		{"a large challenge", func(w http.ResponseWriter, r *http.Request, id string) {
			w.Header().Set("WWW-Authenticate", strings.Repeat("x", 500<<10))
			w.WriteHeader(401)
		}},
		{"a large redirect", func(w http.ResponseWriter, r *http.Request, id string) {
			w.Header().Set("Location", "/"+strings.Repeat("x", 500<<10))
			w.WriteHeader(302)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newPuppetServer(t, 0)
			p.acts["it"] = tt.act
			cfg := Config{Endpoint: p.URL, MaxMessageBytes: hostileMessage, CallTimeout: time.Minute, BreakerFailures: -1}
			c := newPuppetClient(t, cfg, nil)
			heldTo(t, hostileMessage, calls, func() {
				var wg sync.WaitGroup
				for range calls {
					wg.Go(func() {
						_, err := c.Call(t.Context(), doCall("it"))
						checkOurs(t, err)
						if err == nil || errors.Is(err, ReasonTimeout) {
							t.Errorf("%v", err)
						}
					})
				}
				wg.Wait()
			})
			usable(t, c)
		})
	}
}

// TestHostileStderr floods stderr, with lines and without, beside a call.
func TestHostileStderr(t *testing.T) {
	for _, unit := range []string{"x", "a line of log\n", "\r", "50 %\r", "\n"} {
		t.Run(strconv.Quote(unit), func(t *testing.T) {
			cfg, _ := puppetConfig(t, "flood="+unit)
			blocked := make(chan struct{})
			defer close(blocked)
			c := openPuppetClient(t, cfg, &Options{Stderr: writerFunc(func(p []byte) (int, error) { <-blocked; return len(p), nil })})
			heldTo(t, 8<<20, 1, func() {
				if _, err := c.Adopt(t.Context()); err != nil {
					t.Error(err)
				}
			})
			usable(t, c)
			c.Close()
		})
	}
}
