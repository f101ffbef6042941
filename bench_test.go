package mcp

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// toolList is a result of tools/list with n tools of about 480 bytes.
func toolList(n int) []byte {
	var b bytes.Buffer
	b.WriteString(`{"tools":[`)
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"name":"tool_%03d","description":"Looks something up by its number, %d, and says what it has found.",`+
			`"inputSchema":{"type":"object","properties":{"id":{"type":"integer","minimum":0,"description":"the number"},`+
			`"name":{"type":"string","maxLength":64},"tags":{"type":"array","items":{"type":"string"}},`+
			`"mode":{"type":"string","enum":["fast","exact"],"default":"fast"}},"required":["id"],"additionalProperties":false}}`, i, i)
	}
	b.WriteString(`]}`)
	return b.Bytes()
}

// wireCases are messages as servers send them.
func wireCases() []struct {
	name string
	msg  []byte
} {
	answer := func(result string) []byte { return []byte(`{"jsonrpc":"2.0","id":7,"result":` + result + `}`) }
	text := func(s string) []byte {
		b, _ := json.Marshal(s)
		return answer(`{"content":[{"type":"text","text":` + string(b) + `}]}`)
	}
	return []struct {
		name string
		msg  []byte
	}{
		{"100B", text(strings.Repeat("x", 100))},
		{"1MiB", text(strings.Repeat("the quick brown fox ", 1<<20/20))},
		{"1MiB-lines", text(strings.Repeat("the quick brown fox jumps over the \"lazy\" dog\n", 1<<20/47))},
		{"tools", answer(string(toolList(500)))},
	}
}

func BenchmarkScanEnvelope(b *testing.B) {
	for _, c := range wireCases() {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(c.msg)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := scanEnvelope(c.msg); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(c.name+"/encoding-json", func(b *testing.B) {
			var m struct {
				JSONRPC           string
				ID, Result, Error json.RawMessage
				Method            string
				Params            json.RawMessage
			}
			benchUnmarshal(b, c.msg, &m)
		})
	}
}

func BenchmarkPeekID(b *testing.B) {
	for _, c := range wireCases() {
		last := []byte(`{"jsonrpc":"2.0",` + string(c.msg[len(`{"jsonrpc":"2.0","id":7,`):len(c.msg)-1]) + `,"id":7}`)
		for name, msg := range map[string][]byte{c.name: c.msg, c.name + "-last": last} {
			b.Run(name, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if _, ok := peekID(msg); !ok {
						b.Fatal("no id")
					}
				}
			})
		}
	}
}

func BenchmarkDecodeToolResult(b *testing.B) {
	for _, c := range wireCases()[:3] {
		e, _ := scanEnvelope(c.msg)
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(e.result)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := decodeToolResult(e.result); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(c.name+"/encoding-json", func(b *testing.B) {
			var r Result
			benchUnmarshal(b, e.result, &r)
		})
	}
}

func BenchmarkDecodeToolPage(b *testing.B) {
	page := toolList(500)
	b.Run("500", func(b *testing.B) {
		b.SetBytes(int64(len(page)))
		b.ReportAllocs()
		for b.Loop() {
			if _, err := decodeToolPage(page); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("500/encoding-json", func(b *testing.B) {
		var p struct {
			Tools      []Tool
			NextCursor *string
		}
		benchUnmarshal(b, page, &p)
	})
}

// benchUnmarshal is what there is to compare with.
func benchUnmarshal[T any](b *testing.B, in []byte, v *T) {
	b.SetBytes(int64(len(in)))
	b.ReportAllocs()
	for b.Loop() {
		*v = *new(T)
		if err := json.Unmarshal(in, v); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecodeValue(b *testing.B) {
	for name, in := range map[string][]byte{"small": []byte(`{"city":"Paris","days":3,"units":"metric","tags":["a","b"]}`), "tools": toolList(500)} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(in)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := decodeValue(in); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(name+"/encoding-json", func(b *testing.B) {
			var v any
			benchUnmarshal(b, in, &v)
		})
	}
}

func BenchmarkAppendValue(b *testing.B) {
	for name, v := range map[string]any{
		"small": map[string]any{"city": "Paris", "days": 3, "units": "metric", "tags": []any{"a", "b"}},
		"1MiB":  map[string]any{"text": strings.Repeat("the quick brown fox ", 1<<20/20)},
		"raw":   json.RawMessage(toolList(500)),
	} {
		b.Run(name, func(b *testing.B) {
			buf, _ := appendValue(nil, v)
			b.SetBytes(int64(len(buf)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := appendValue(buf[:0], v); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(name+"/encoding-json", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := json.Marshal(v); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkAppendRequest(b *testing.B) {
	params := []byte(`{"name":"echo","arguments":{"text":"hello"}}`)
	buf := make([]byte, 0, 1024)
	b.ReportAllocs()
	for b.Loop() {
		appendRequest(buf, 7, "tools/call", params)
	}
}
