package mcp

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// In the tables below, "-" as a wanted value means that the input is refused.

func TestScanEnvelope(t *testing.T) {
	for _, test := range []struct {
		name, in string
		want     string // id|method|params|result|error
	}{
		{"response", `{"jsonrpc":"2.0","id":7,"result":{"a":[1,"}"]}}`, `7|||{"a":[1,"}"]}|`},
		{"id last", `{"jsonrpc":"2.0","result":{},"id":7}`, `7|||{}|`},
		{"white space", " {\t\"jsonrpc\" : \"2.0\" ,\r\n\"id\" : 7 , \"result\" : { } } \n", `7|||{ }|`},
		{"error", `{"jsonrpc":"2.0","id":7,"error":{"code":1}}`, `7||||{"code":1}`},
		{"error without an id", `{"jsonrpc":"2.0","error":{"code":1}}`, `||||{"code":1}`},
		{"error with a null id", `{"jsonrpc":"2.0","id":null,"error":{"code":1}}`, `null||||{"code":1}`},
		{"error that is no object", `{"jsonrpc":"2.0","id":7,"error":"no"}`, `7||||"no"`},
		{"request", `{"jsonrpc":"2.0","id":"a","method":"ping"}`, `"a"|ping|||`},
		{"notification", `{"jsonrpc":"2.0","method":"m","params":{}}`, `|m|{}||`},
		{"neither", `{"jsonrpc":"2.0","id":7}`, `7||||`},

		{"null error", `{"jsonrpc":"2.0","id":7,"result":{},"error":null}`, `7|||{}|`},
		{"null result", `{"jsonrpc":"2.0","id":7,"result":null}`, `7|||null|`},
		{"null all over", `{"jsonrpc":"2.0","id":7,"method":null,"params":null,"result":{},"error":null}`, `7|||{}|`},
		{"both", `{"jsonrpc":"2.0","id":7,"result":{},"error":{"code":1}}`, `-`},
		{"null result and error", `{"jsonrpc":"2.0","id":7,"result":null,"error":{"code":1}}`, `-`},
		{"method and result", `{"jsonrpc":"2.0","id":7,"method":"m","result":{}}`, `-`},
		{"method that is no text", `{"jsonrpc":"2.0","id":7,"method":5}`, `-`},

		{"text as id", `{"jsonrpc":"2.0","id":"7","result":{}}`, `"7"|||{}|`},
		{"negative id", `{"jsonrpc":"2.0","id":-7,"result":{}}`, `-7|||{}|`},
		{"huge id", `{"jsonrpc":"2.0","id":123456789012345678901234567890,"result":{}}`, `123456789012345678901234567890|||{}|`},
		{"float id", `{"jsonrpc":"2.0","id":7.0,"result":{}}`, `-`},
		{"exponent id", `{"jsonrpc":"2.0","id":7e0,"result":{}}`, `-`},
		{"true id", `{"jsonrpc":"2.0","id":true,"result":{}}`, `-`},
		{"object id", `{"jsonrpc":"2.0","id":{},"result":{}}`, `-`},
		{"array id", `{"jsonrpc":"2.0","id":[7],"result":{}}`, `-`},

		{"no version", `{"id":7,"result":{}}`, `-`},
		{"other version", `{"jsonrpc":"1.0","id":7,"result":{}}`, `-`},
		{"version as a number", `{"jsonrpc":2.0,"id":7,"result":{}}`, `-`},
		{"null version", `{"jsonrpc":null,"id":7,"result":{}}`, `-`},

		{"wrong case is unknown", `{"jsonrpc":"2.0","id":7,"Result":1,"RESULT":2,"result":3,"ID":8}`, `7|||3|`},
		{"only wrong case", `{"jsonrpc":"2.0","Id":7,"Result":1}`, `||||`},
		{"Kelvin sign", `{"jsonrpc":"2.0","id":7,"result":1,"K":2}`, `7|||1|`},
		{"escaped key", `{"jsonrpc":"2.0","\u0069d":7,"re\u0073ult":3}`, `7|||3|`},
		{"escaped version", `{"jsonrpc":"2\u002e0","id":7,"result":3}`, `7|||3|`},
		{"duplicate id", `{"jsonrpc":"2.0","id":7,"id":8,"result":3}`, `-`},
		{"duplicate by escape", `{"jsonrpc":"2.0","id":7,"\u0069d":8,"result":3}`, `-`},
		{"duplicate result", `{"jsonrpc":"2.0","id":7,"result":3,"result":4}`, `-`},
		{"duplicate null error", `{"jsonrpc":"2.0","id":7,"result":3,"error":null,"error":null}`, `-`},
		{"duplicate version", `{"jsonrpc":"2.0","jsonrpc":"2.0","id":7,"result":3}`, `-`},
		{"duplicate unknown", `{"jsonrpc":"2.0","id":7,"result":3,"x":1,"x":2}`, `7|||3|`},

		{"nothing", ``, `-`},
		{"white space only", ` `, `-`},
		{"array", `[{"jsonrpc":"2.0","id":7,"result":3}]`, `-`},
		{"string", `"jsonrpc"`, `-`},
		{"more after it", `{"jsonrpc":"2.0","id":7,"result":3} x`, `-`},
		{"two messages", `{"jsonrpc":"2.0","id":7,"result":3}{"jsonrpc":"2.0","id":7,"result":3}`, `-`},
		{"byte order mark", "\uFEFF" + `{"jsonrpc":"2.0","id":7,"result":3}`, `-`},
		{"comma at the end", `{"jsonrpc":"2.0","id":7,"result":3,}`, `-`},
		{"comma at the start", `{,"jsonrpc":"2.0","id":7,"result":3}`, `-`},
		{"no comma", `{"jsonrpc":"2.0" "id":7,"result":3}`, `-`},
		{"single quotes", `{'jsonrpc':"2.0","id":7,"result":3}`, `-`},
		{"vertical tab", "{\v\"jsonrpc\":\"2.0\"}", `-`},
		{"zero byte", "{\x00\"jsonrpc\":\"2.0\"}", `-`},
	} {
		e, err := scanEnvelope([]byte(test.in))
		got := "-"
		if err == nil {
			got = strings.Join([]string{string(e.id), e.method, string(e.params), string(e.result), string(e.err)}, "|")
		}
		if got != test.want {
			t.Errorf("%s: scanEnvelope(%s) = %s, want %s", test.name, test.in, got, test.want)
		}
	}
}

// sameAsJSON checks that a message is taken exactly if its result is JSON.
func sameAsJSON(t *testing.T, value string) {
	t.Helper()
	e, err := scanEnvelope([]byte(`{"jsonrpc":"2.0","result":` + value + `}`))
	if valid := json.Valid([]byte(value)); (err == nil) != valid {
		t.Errorf("scanEnvelope with result %q: %v, json.Valid says %v", value, err, valid)
	} else if valid && string(e.result) != strings.TrimSpace(value) {
		t.Errorf("scanEnvelope with result %q gives %q", value, e.result)
	}
}

func TestSyntax(t *testing.T) {
	for _, text := range []string{
		`0`, `-0`, `7`, `-7`, `00`, `-`, `+1`, `01`, `.5`, `5.`, `5.5`, `5e`, `5e+`, `5e-7`, `5E07`, `5.5.5`, `0x10`,
		`1e999`, `NaN`, `Infinity`, `--1`, `1_000`, strings.Repeat("9", 1000),
		`true`, `tru`, `truee`, `false`, `null`, `nul`, `True`, `nullnull`,
		`""`, `"`, `"a`, `"\"`, `"\\"`, `"\x"`, `"\u12"`, `"\u123g"`, `"\uABCD\uabcd"`, `"\`, `"\u`, `"\u1`,
		"\"a\nb\"", "\"a\x00b\"", "\"1234567\x1f\"", "\"12345678\x1f\"", "\"\x7f\"", "\"\xff\"", "\"é\"", "\"\u2028\"",
		`{}`, `{ }`, `{"a"}`, `{"a":}`, `{"a":1,}`, `{"a" 1}`, `{a:1}`, `{"a":1 "b":2}`, `{"a":1}}`, `{1:2}`, `{`, `{"a":1`,
		`[]`, `[ ]`, `[1,]`, `[,1]`, `[1 2]`, `[1`, `[`, `]`, `[[]`, `[}`, `{]`, ``, ` `, `1 2`, "\v1", "\u00a01", `/**/1`,
	} {
		sameAsJSON(t, text)
		for _, in := range []string{"[" + text + "]", ` [ 1 , ` + text + ` ] `, `{"k":` + text + `}`, "\n\t\r " + text} {
			sameAsJSON(t, in)
		}
	}
	// Every byte at every place relative to the eight that are looked at once.
	for c := range 256 {
		for n := range 20 {
			sameAsJSON(t, `"`+strings.Repeat("x", n)+string([]byte{byte(c)})+strings.Repeat("y", 19-n)+`"`)
		}
		for n := 20; n < 100; n += 3 { // where 32 are
			sameAsJSON(t, `"`+strings.Repeat("x", n)+string([]byte{byte(c)})+strings.Repeat("y", 99-n)+`"`)
		}
	}
}

func TestSpecial(t *testing.T) {
	want := func(b []byte) int {
		for i, c := range b {
			if c < ' ' || c == '"' || c == '\\' {
				return i
			}
		}
		return len(b)
	}
	for c := range 256 {
		for d := range 256 { // neighbours, where a borrow could lie
			b := []byte{'a', 'b', byte(c), byte(d), 'e', 'f', 'g', 'h', 'i'}
			if got, want := special(b, 0), want(b); got != want {
				t.Fatalf("special(%q) = %d, want %d", b, got, want)
			}
			if got, want := special(string(b), 0), want(b); got != want {
				t.Fatalf("special(%q) = %d, want %d", string(b), got, want)
			}
		}
	}
}

func TestDepth(t *testing.T) {
	nest := func(open, inner, end string, n int) string {
		return strings.Repeat(open, n) + inner + strings.Repeat(end, n)
	}
	for _, test := range []struct {
		open, inner, end string
	}{{"[", "", "]"}, {`{"a":`, "1", "}"}} {
		for n, want := range map[int]error{wireDepth - 1: nil, wireDepth: errDepth, 1 << 20: errDepth} {
			_, err := scanEnvelope([]byte(`{"jsonrpc":"2.0","x":` + nest(test.open, test.inner, test.end, n) + `}`))
			if err != want {
				t.Errorf("scanEnvelope of %d × %s = %v, want %v", n, test.open, err, want)
			}
		}
		for n, want := range map[int]error{valueDepth: nil, valueDepth + 1: errDepth, 1 << 20: errDepth} {
			if _, err := decodeValue([]byte(nest(test.open, test.inner, test.end, n))); err != want {
				t.Errorf("decodeValue of %d × %s = %v, want %v", n, test.open, err, want)
			}
		}
	}
	if _, err := scanEnvelope([]byte(strings.Repeat("[", 1<<20))); err != errDepth {
		t.Errorf("scanEnvelope of brackets without end = %v, want %v", err, errDepth)
	}
}

func TestPeekID(t *testing.T) {
	for _, test := range []struct {
		in   string
		want string
	}{
		{`{"jsonrpc":"2.0","id":7,"result":{}}`, "7"},
		{`{"jsonrpc":"2.0","id":7,"result":{"con`, "7"}, // a head is enough
		{`{"id":7,"result": `, "7"},
		{`{"result":{},"id":7}`, "7"},
		{`{"jsonrpc":"2.0","id":"7","error":{`, "7"},
		{`{"jsonrpc":"2.0","id":7,"error":"no"`, "7"},
		{`{"error":{"code":1},"id":7}`, "7"},
		{`{"id":7,"error":null,"result":{}}`, "7"},
		{`{"result":{},"error":null,"id":7}`, "7"},
		{`{"\u0069d":7,"result":{}}`, "7"},
		{`{"id":7,"result":{} broken`, "7"}, // whose answer it was is known
		{`{"result":{"id":3,"s":"}{\"id\":4,"},"id":7}`, "7"},
		{`{"result":[{"id":3},"\\"],"x":{"id":4},"id":7 }`, "7"},

		{`{"result":{},"id":7`, "-"}, // it might be 71
		{`{"id":7`, "-"},
		{`{"id":7}`, "-"},
		{`{"id":7,"error":`, "-"},
		{`{"id":7,"error":null}`, "-"},
		{`{"id":7,"method":"m","params":{}}`, "-"},
		{`{"method":"m","params":{"id":7,"result":1}}`, "-"},
		{`{"id":7,"id":8,"result":{}}`, "-"},
		{`{"id":7,"Result":{}}`, "-"},
		{`{"ID":7,"result":{}}`, "-"},
		{`{"id":null,"result":{}}`, "-"},
		{`{"id":7.0,"result":{}}`, "-"},
		{`{"id":{"id":7},"result":{}}`, "-"},
		{`{"result":{"id":7},"x":"\"id\":7,"}`, "-"},
		{`{"result":{broken},"id":7}`, "-"},
		{`[{"id":7,"result":{}}]`, "-"},
		{`"id"`, "-"},
		{``, "-"},
	} {
		got := "-"
		if n, ok := peekID([]byte(test.in)); ok {
			got = strconv.FormatInt(n, 10)
		}
		if got != test.want {
			t.Errorf("peekID(%s) = %s, want %s", test.in, got, test.want)
		}
	}
}

func TestCutAnswer(t *testing.T) {
	for _, test := range []struct{ in, id, result string }{
		{`{"jsonrpc":"2.0","id":7,"result":{"a":1}}`, "7", `{"a":1}`},
		{`{"jsonrpc":"2.0","id":"7","result": [1] }`, "7", ` [1] `},
		{`{"result":{"a":1},"jsonrpc":"2.0","id":7}`, "7", `{"a":1}`},
		{`{"result":{"jsonrpc":"2.0","id":5},"jsonrpc":"2.0","id":7}`, "7", `{"jsonrpc":"2.0","id":5}`},
		{`{"jsonrpc":"2.0","id":922337203685477580,"result":0}`, "922337203685477580", `0`},

		// What is cut out here is no value, so that its reader finds out.
		{`{"jsonrpc":"2.0","id":7,"result":1,"result":2}`, "7", `1,"result":2`},
		{`{"jsonrpc":"2.0","id":7,"result":{},"_meta":{}}`, "7", `{},"_meta":{}`},
		{`{"result":1,"id":5,"jsonrpc":"2.0","id":7}`, "7", `1,"id":5`},
		{`{"jsonrpc":"2.0","id":7,"result":}`, "7", ``},

		{`{"jsonrpc":"2.0","result":{},"id":7}`, "-", ""}, // as it comes, then
		{`{"jsonrpc": "2.0","id":7,"result":{}}`, "-", ""},
		{`{"jsonrpc":"2.0","id":7,"error":{}}`, "-", ""},
		{`{"jsonrpc":"2.0","id":7,"method":"m"}`, "-", ""},
		{`{"jsonrpc":"2.0","id":07,"result":{}}`, "-", ""},
		{`{"jsonrpc":"2.0","id":-7,"result":{}}`, "-", ""},
		{`{"jsonrpc":"2.0","id":null,"result":{}}`, "-", ""},
		{`{"jsonrpc":"2.0","id":92233720368547758071,"result":0}`, "-", ""},
		{`{"result":{},"jsonrpc":"2.0","id":}`, "-", ""},
		{`{"jsonrpc":"2.0","id":10","result":0}`, "-", ""},
		{`{"result":{},"jsonrpc":"2.0","id":7,"x":"}`, "-", ""},
		{`{"jsonrpc":"2.0","id":7,"result":{}`, "7", `{`},
		{`{"result":,"jsonrpc":"2.0","id":7`, "-", ""},
		{`{}`, "-", ""},
		{`}`, "-", ""},
		{``, "-", ""},
	} {
		n, result, ok := cutAnswer([]byte(test.in))
		id := "-"
		if ok {
			id = strconv.FormatInt(n, 10)
		}
		if id != test.id || ok && string(result) != test.result {
			t.Errorf("cutAnswer(%s) = %s, %s, want %s, %s", test.in, id, result, test.id, test.result)
		}
	}
}

// A message cut anywhere is refused, and its head never names another id.
func TestTruncated(t *testing.T) {
	for _, in := range []string{
		`{"jsonrpc":"2.0","id":712,"result":{"content":[{"type":"text","text":"a\u00e9\n}"}],"isError":false}}`,
		`{"result":{"content":[{"type":"text","text":"\"id\":3,"}],"n":-1.5e+7,"t":true},"id":"712","jsonrpc":"2.0"}`,
		`{"jsonrpc":"2.0","error":{"code":-32601,"message":"no","data":[null]},"id":712}`,
	} {
		for n := range len(in) {
			head := []byte(in[:n])
			if _, err := scanEnvelope(head); err == nil {
				t.Errorf("scanEnvelope(%s) = nil", head)
			}
			if id, ok := peekID(head); ok && id != 712 {
				t.Errorf("peekID(%s) = %d", head, id)
			}
		}
		if id, ok := peekID([]byte(in)); !ok || id != 712 {
			t.Errorf("peekID(%s) = %d, %v", in, id, ok)
		}
		if _, err := scanEnvelope([]byte(in)); err != nil {
			t.Errorf("scanEnvelope(%s) = %v", in, err)
		}
	}
}

func TestIntID(t *testing.T) {
	for _, test := range []struct {
		in   string
		want int64 // -1 = none
	}{
		{`0`, 0}, {`7`, 7}, {`"7"`, 7}, {`999999999999999999`, 1e18 - 1}, {`"0"`, 0},
		{`1000000000000000000`, -1}, {`"7`, -1}, {`7"`, -1}, {`99999999999999999999999`, -1}, {`"07"`, -1}, {`07`, -1}, {`"00"`, -1},
		{`-7`, -1}, {`"-7"`, -1}, {`"+7"`, -1}, {`7.0`, -1}, {`7e0`, -1}, {`" 7"`, -1}, {`""`, -1}, {`"`, -1}, {``, -1},
		{`null`, -1}, {`"\u0037"`, -1}, {`"seven"`, -1}, {`{}`, -1},
	} {
		n, ok := intID(json.RawMessage(test.in))
		if !ok {
			n = -1
		}
		if n != test.want {
			t.Errorf("intID(%s) = %d, want %d", test.in, n, test.want)
		}
	}
}

func TestScanBatch(t *testing.T) {
	for _, test := range []struct {
		in   string
		want string
	}{
		{`[]`, ""}, {` [ ] `, ""}, {`[{"a":1}, 2 ,"x"]`, `{"a":1};2;"x"`},
		{`{}`, "-"}, {`[1`, "-"}, {`[1,]`, "-"}, {`[1]]`, "-"}, {``, "-"}, {`[{]`, "-"},
		{"[" + strings.Repeat("0,", maxEntries) + "0]", "-"},
	} {
		elems, ok := scanBatch([]byte(test.in))
		got := "-"
		if ok {
			var parts []string
			for _, e := range elems {
				parts = append(parts, string(e))
			}
			got = strings.Join(parts, ";")
		}
		if got != test.want {
			t.Errorf("scanBatch(%.40s) = %s, want %s", test.in, got, test.want)
		}
	}
}

func TestDecodeError(t *testing.T) {
	for _, test := range []struct {
		in      string
		code    int
		message string
		data    string
	}{
		{`{"code":-32601,"message":"no","data":{"a":1}}`, -32601, "no", `{"a":1}`},
		{`{"code":1}`, 1, "", ""},
		{`{"code":1,"message":null,"data":null}`, 1, "", ""},
		{`{"code":1,"message":"\u00e9\ud83d\ude00"}`, 1, "é😀", ""},
		{`{"code":1,"message":"` + strings.Repeat("é", rawLimit) + `"}`, 1, strings.Repeat("é", rawLimit/2), ""},
		{`{"code":1,"message":"x` + strings.Repeat("é", rawLimit) + `"}`, 1, "x" + strings.Repeat("é", rawLimit/2-1), ""},
		{`{"code":1,"data":"` + strings.Repeat("x", dataLimit) + `"}`, 1, "", ""},
	} {
		e, err := decodeError([]byte(test.in))
		if err != nil || e.Code != test.code || e.Message != test.message || string(e.Data) != test.data {
			t.Errorf("decodeError(%.80s) = %.80v, %v", test.in, e, err)
		}
	}
	for _, in := range []string{
		``, `null`, `"no"`, `[]`, `{}`, `{"message":"no"}`, `{"code":"1"}`, `{"code":1.0}`, `{"code":null}`, `{"Code":1}`,
		`{"code":1,"code":2}`, `{"code":1,"message":5}`, `{"code":99999999999999999999}`, `{"code":1`,
	} {
		if e, err := decodeError([]byte(in)); err == nil {
			t.Errorf("decodeError(%s) = %v", in, e)
		}
	}
}

func TestDecodeToolResult(t *testing.T) {
	state := "s"
	text := func(s string) []Content { return []Content{{Type: "text", Text: s}} }
	for _, test := range []struct {
		name, in string
		want     toolResult
	}{
		{"text", `{"content":[{"type":"text","text":"hi"}]}`, toolResult{Result: Result{Content: text("hi")}}},
		{"any order", `{"isError":true,"content":[{"text":"hi","type":"text"}]}`, toolResult{Result: Result{Content: text("hi"), IsError: true}}},
		{"escapes", `{"content":[{"type":"text","text":"\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00é"}]}`,
			toolResult{Result: Result{Content: text("\"\\/\b\f\n\r\té😀é")}}},
		{"no blocks", `{"content":[]}`, toolResult{Result: Result{Content: []Content{}}}},
		{"structured", `{"content":[],"structuredContent":{"n":12345678901234567890.10}}`,
			toolResult{Result: Result{Content: []Content{}, Structured: json.RawMessage(`{"n":12345678901234567890.10}`)}}},
		{"structured null is not absent", `{"structuredContent":null}`, toolResult{Result: Result{Structured: json.RawMessage(`null`)}}},
		{"structured alone", `{"structuredContent":[1]}`, toolResult{Result: Result{Structured: json.RawMessage(`[1]`)}}},
		{"nothing", `{}`, toolResult{noContent: true}},
		{"null content", `{"content":null}`, toolResult{noContent: true}},
		{"misspelt content", `{"Content":[]}`, toolResult{noContent: true}},
		{"nulls", `{"content":[],"isError":null,"_meta":null,"resultType":null,"inputRequests":null,"requestState":null}`,
			toolResult{Result: Result{Content: []Content{}}}},
		{"meta", `{"content":[],"_meta":{"a":1},"other":1}`, toolResult{Result: Result{Content: []Content{}, Meta: json.RawMessage(`{"a":1}`)}}},
		{"complete", `{"resultType":"complete","content":[]}`, toolResult{Result: Result{Content: []Content{}}, round: round{resultType: "complete"}}},
		{"input required", `{"resultType":"input_required","inputRequests":{"k":{}},"requestState":"s"}`,
			toolResult{noContent: true, round: round{resultType: "input_required", inputRequests: json.RawMessage(`{"k":{}}`), requestState: &state}}},
		{"image", `{"content":[{"type":"image","data":"AA==","mimeType":"image/png"}]}`, toolResult{Result: Result{Content: []Content{
			{Type: "image", Data: "AA==", MIMEType: "image/png", Raw: json.RawMessage(`{"type":"image","data":"AA==","mimeType":"image/png"}`)}}}}},
		{"link", `{"content":[{"type":"resource_link","uri":"f:a","name":"a","size":12}]}`, toolResult{Result: Result{Content: []Content{
			{Type: "resource_link", URI: "f:a", Name: "a", Raw: json.RawMessage(`{"type":"resource_link","uri":"f:a","name":"a","size":12}`)}}}}},
		{"text resource", `{"content":[{"type":"resource","resource":{"uri":"f:a","mimeType":"t","text":"x","_meta":{}}}]}`,
			toolResult{Result: Result{Content: []Content{{Type: "resource", URI: "f:a", MIMEType: "t", Text: "x",
				Raw: json.RawMessage(`{"type":"resource","resource":{"uri":"f:a","mimeType":"t","text":"x","_meta":{}}}`)}}}}},
		{"blob resource", `{"content":[{"type":"resource","resource":{"uri":"f:a","blob":"AA=="}}]}`,
			toolResult{Result: Result{Content: []Content{{Type: "resource", URI: "f:a", Data: "AA==",
				Raw: json.RawMessage(`{"type":"resource","resource":{"uri":"f:a","blob":"AA=="}}`)}}}}},
		{"annotated text", `{"content":[ {"type":"text","text":"x","annotations":{}} ]}`, toolResult{Result: Result{Content: []Content{
			{Type: "text", Text: "x", Raw: json.RawMessage(`{"type":"text","text":"x","annotations":{}}`)}}}}},
		{"unknown block", `{"content":[{"type":"new","text":{"a":1}},{"type":"text","text":"x"}]}`, toolResult{Result: Result{Content: []Content{
			{Type: "new", Raw: json.RawMessage(`{"type":"new","text":{"a":1}}`)}, {Type: "text", Text: "x"}}}}},
	} {
		in := []byte(test.in)
		got, err := decodeToolResult(in)
		clear(in) // nothing may lie in it
		if err != nil || !reflect.DeepEqual(*got, test.want) {
			t.Errorf("%s: decodeToolResult(%s) = %+v, %v, want %+v", test.name, test.in, got, err, test.want)
		}
	}
	for _, in := range []string{
		``, `null`, `[]`, `"x"`, `{`, `{"content":{}}`, `{"content":"x"}`, `{"content":[1]}`, `{"content":[null]}`, `{"content":["x"]}`,
		`{"content":[{}]}`, `{"content":[{"text":"x"}]}`, `{"content":[{"type":null}]}`, `{"content":[{"type":5}]}`,
		`{"content":[{"type":"text","text":5}]}`, `{"content":[{"type":"image","data":{}}]}`, `{"content":[{"type":"resource","resource":"x"}]}`,
		`{"content":[{"type":"resource","resource":{"uri":5}}]}`, `{"content":[{"type":"text","text":"a","text":"b"}]}`,
		`{"content":[],"content":[]}`, `{"content":[],"isError":"true"}`, `{"content":[],"isError":1}`, `{"content":[],"isError":false,"isError":true}`,
		`{"content":[],"structuredContent":1,"structuredContent":2}`, `{"content":[],"resultType":5}`, `{"content":[],"requestState":5}`,
		`{"content":[{"type":"text","text":"x"}]`, `{"content":[{"type":"text","text":"x"},]}`, "{\"content\":[{\"type\":\"text\",\"text\":\"\x01\"}]}",
		`{"content":[` + strings.Repeat(`{"type":"x"},`, maxEntries) + `{"type":"x"}]}`,
	} {
		if got, err := decodeToolResult([]byte(in)); err == nil {
			t.Errorf("decodeToolResult(%.80s) = %.80v", in, got)
		}
	}
}

func TestResultText(t *testing.T) {
	const text, resource = `{"type":"text","text":"a"}`, `{"type":"resource","resource":{"uri":"u","text":"b"}}`
	for content, want := range map[string]string{
		"": "", text: "a", text + "," + text: "a\na", resource: "", resource + "," + text: "a",
	} {
		if r, err := decodeToolResult([]byte(`{"content":[` + content + `]}`)); err != nil || r.Text() != want {
			t.Errorf("Text of [%s] = %q, %v want %q", content, r.Text(), err, want)
		}
	}
}

func TestDecodeToolPage(t *testing.T) {
	page := []byte(`{"tools":[
		{"name":"a","title":"A","description":"d\n","inputSchema":{"type":"object"},"outputSchema":{"x":1.50}},
		{"name":"b","inputSchema":{},"annotations":{"title":"B","readOnlyHint":true,"destructiveHint":false,"idempotentHint":true,"openWorldHint":true}},
		{"name":"c","title":"C","annotations":{"title":"no","readOnlyHint":"yes"},"execution":{"taskSupport":"optional"},"icons":[]},
		{"name":"d","title":null,"description":null,"inputSchema":null,"annotations":null},
		{"name":"e","annotations":{"readOnlyHint":false,"readOnlyHint":true}},
		{"name":"f","annotations":5,"execution":[],"Name":"g"},
		{"title":"no name"}, {"name":5}, {"name":null}, {"name":""}, {}, 5, null, "x", [], {"name":"x","name":"y"}, {"Name":"x"}
	],"nextCursor":"","ttlMs":60000,"cacheScope":"public"}`)
	p, err := decodeToolPage(page)
	clear(page) // nothing may lie in it
	if err != nil {
		t.Fatal(err)
	}
	if p.bad != 11 || p.cursor == nil || *p.cursor != "" || p.ttlMs != 60000 {
		t.Errorf("bad %d, cursor %v, ttl %d, want 11, \"\", 60000", p.bad, p.cursor, p.ttlMs)
	}
	raw := func(s string) json.RawMessage { return json.RawMessage(s) }
	want := []Tool{
		{Name: "a", Title: "A", Description: "d\n", InputSchema: raw(`{"type":"object"}`), OutputSchema: raw(`{"x":1.50}`), Destructive: true},
		{Name: "b", Title: "B", InputSchema: raw(`{}`), ReadOnly: true, Idempotent: true,
			Raw: raw(`{"name":"b","inputSchema":{},"annotations":{"title":"B","readOnlyHint":true,"destructiveHint":false,"idempotentHint":true,"openWorldHint":true}}`)},
		{Name: "c", Title: "C", Destructive: true, TaskSupport: "optional",
			Raw: raw(`{"name":"c","title":"C","annotations":{"title":"no","readOnlyHint":"yes"},"execution":{"taskSupport":"optional"},"icons":[]}`)},
		{Name: "d", Destructive: true, Raw: raw(`{"name":"d","title":null,"description":null,"inputSchema":null,"annotations":null}`)},
		{Name: "e", Destructive: true, Raw: raw(`{"name":"e","annotations":{"readOnlyHint":false,"readOnlyHint":true}}`)},
		{Name: "f", Destructive: true, Raw: raw(`{"name":"f","annotations":5,"execution":[],"Name":"g"}`)},
	}
	for i, tool := range p.tools {
		if i >= len(want) || !reflect.DeepEqual(tool, want[i]) {
			t.Errorf("tool %d = %+v, want %+v", i, tool, want[min(i, len(want)-1)])
		}
	}
	if len(p.tools) != len(want) {
		t.Errorf("%d tools, want %d", len(p.tools), len(want))
	}

	for _, test := range []struct {
		in     string
		tools  int // -1 = refused
		cursor string
		ttl    int64
	}{
		{`{"tools":[]}`, 0, "-", -1},
		{`{"tools":null,"nextCursor":null,"ttlMs":null}`, 0, "-", -1},
		{`{"tools":[],"nextCursor":"x","ttlMs":1.5e3}`, 0, "x", 1500},
		{`{"tools":[],"ttlMs":-5}`, 0, "-", -1},
		{`{"tools":[],"ttlMs":1e300}`, 0, "-", 1 << 53},
		{`{"tools":[],"ttlMs":"soon"}`, 0, "-", -1},
		{`{}`, -1, "", 0}, {`{"Tools":[]}`, -1, "", 0}, {`{"tools":{}}`, -1, "", 0}, {`{"tools":[],"nextCursor":5}`, -1, "", 0},
		{`{"tools":[],"tools":[]}`, -1, "", 0}, {`{"tools":[{"name":"x"}`, -1, "", 0}, {`null`, -1, "", 0}, {``, -1, "", 0},
	} {
		p, err := decodeToolPage([]byte(test.in))
		if err != nil {
			if test.tools >= 0 {
				t.Errorf("decodeToolPage(%s) = %v", test.in, err)
			}
			continue
		}
		cursor := "-"
		if p.cursor != nil {
			cursor = *p.cursor
		}
		if len(p.tools) != test.tools || cursor != test.cursor || p.ttlMs != test.ttl {
			t.Errorf("decodeToolPage(%s) = %d tools, cursor %q, ttl %d", test.in, len(p.tools), cursor, p.ttlMs)
		}
	}
}

func TestMember(t *testing.T) {
	for _, test := range []struct{ in, key, want string }{
		{`{"a":1,"b":{"a":2}}`, "a", `1`},
		{`{"b":{"a":2}, "c" : [ 1 ] }`, "c", `[ 1 ]`},
		{`{"a":null}`, "a", `null`},
		{`{"\u0061":1}`, "a", `1`},
		{`{"A":1}`, "a", ``},
		{`{"a":1,"a":2}`, "a", ``},
		{`{"a":1`, "a", ``},
		{`["a",1]`, "a", ``},
		{``, "a", ``},
	} {
		if got := member([]byte(test.in), test.key); string(got) != test.want || (got == nil) != (test.want == "") {
			t.Errorf("member(%s, %s) = %s, want %s", test.in, test.key, got, test.want)
		}
	}
}

func TestDecodeValue(t *testing.T) {
	in := []byte(` {"a":[1,-2.50,1e400,"x\n",""],"":{},"b":true,"c":null,"d\u00e9":false,"e":[],"f":"\ud800","g":"` + "\xff" + `"} `)
	want := map[string]any{
		"a": []any{json.Number("1"), json.Number("-2.50"), json.Number("1e400"), "x\n", ""},
		"":  map[string]any{}, "b": true, "c": nil, "dé": false, "e": []any{}, "f": "\uFFFD", "g": "\uFFFD",
	}
	got, err := decodeValue(in)
	clear(in)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("decodeValue = %#v, %v, want %#v", got, err, want)
	}
	for _, in := range []string{``, ` `, `{"a":1,"a":2}`, `{"a":1,"\u0061":2}`, `{"x":{"a":1,"a":1}}`, `1 2`, `[1,]`, `{"a"}`, `nul`, `"`, `-`, `[`, `{`} {
		if v, err := decodeValue([]byte(in)); err != errSyntax || v != nil {
			t.Errorf("decodeValue(%s) = %v, %v", in, v, err)
		}
	}
	for _, unit := range []string{`0,`, `{},`, `{"a":0},`, `[],`, `"",`} {
		in := "[" + strings.Repeat(unit, 8<<20/len(unit)) + "0]"
		if _, err := decodeValue([]byte(in)); err != errLimit {
			t.Errorf("decodeValue of 8 MiB of %s = %v, want %v", unit, err, errLimit)
		}
	}
}

// Strings read as encoding/json reads them.
func TestStrings(t *testing.T) {
	for _, in := range []string{
		`""`, `"plain"`, `"\ud83d\ude00"`, `"\ud83d"`, `"\ude00"`, `"\ud83dx"`, `"\ud83d\n"`, `"\ud83d\u0041"`, `"\ud83d\ud83d\ude00"`,
		`"\ude00\ud83d"`, `"\u0000\u001f\u007f\uffff\uFFFD"`, `"\"\\\/\b\f\n\r\t"`, "\"\xff\"", "\"\xc3\"", "\"\xe2\x82\"", "\"a\xffb\xfe\\n\xed\xa0\x80\"",
		"\"\xf0\x9f\x98\x80\"", "\"\xf5\x80\x80\x80\"", "\"\xc3\\n\xa9\"", `"` + strings.Repeat(`ab\n`, 1000) + `"`,
	} {
		var want string
		if err := json.Unmarshal([]byte(in), &want); err != nil {
			t.Fatal(err)
		}
		if got, err := decodeValue([]byte(in)); err != nil || got != want {
			t.Errorf("decodeValue(%s) = %q, %v, want %q", in, got, err, want)
		}
		var copied string
		if err := decode([]byte(`{"s":`+in+`}`), field{"s", &copied}); err != nil || copied != want {
			t.Errorf("decode(%s) = %q, %v, want %q", in, copied, err, want)
		}
	}
}

func TestAppendString(t *testing.T) {
	for _, s := range []string{
		"", "plain", "\"\\/", "\x00\x01\b\f\n\r\t\x1f\x7f", "<&>", "é😀\u2028\u2029", "\xff", "a\xc3", "\xff\xfe é \n", "1234567\"", "12345678\\9",
		strings.Repeat("x", 100) + "\n" + strings.Repeat("é", 100),
	} {
		got := appendString([]byte("> "), s)
		var want, back string
		b, _ := json.Marshal(s)
		if err := json.Unmarshal(b, &want); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(got[2:], &back); err != nil || back != want || !utf8.Valid(got) {
			t.Errorf("appendString(%q) = %s, %v", s, got, err)
		}
		if strings.ContainsAny(s, "<&>") && !strings.Contains(string(got), "<&>") {
			t.Errorf("appendString(%q) = %s: escaped for HTML", s, got)
		}
	}
}

type marshaler struct{ text string }

func (m marshaler) MarshalJSON() ([]byte, error) { return []byte(m.text), nil }

func TestAppendValue(t *testing.T) {
	type named string
	for _, v := range []any{
		nil, true, false, "x", 1, int8(-1), int16(1), int32(1), int64(math.MinInt64), uint(1), uint8(1), uint16(1), uint32(1), uint64(math.MaxUint64),
		0.0, math.Copysign(0, -1), 1.5, -1e-7, 1e-6, 1e20, 1e21, 123456789.0, math.MaxFloat64, math.SmallestNonzeroFloat64, float32(0.1), float32(1e-7), float32(3e38),
		json.Number("1.50"), json.Number(""), json.Number("1e5"), json.RawMessage(`{"b": 1,"a":2}`), json.RawMessage(nil), json.RawMessage("[1,\n2]"), json.RawMessage(" 1 "),
		map[string]any{"b": 1, "a": []any{nil, "x", map[string]any{}}, "": 2.5}, map[string]any(nil), []any(nil), []any{}, []string{"a", "b"}, []string(nil),
		map[string]string{"b": "x", "a": "y"}, map[string]string(nil), named("n"), []int{1, 2}, map[string]int{"a": 1}, struct{ A, b int }{1, 2}, &struct{}{},
		time.Unix(0, 0).UTC(), []byte("abc"), marshaler{"[1,\n 2]"}, map[string]any{"m": marshaler{"{\n}"}}, map[int]string{1: "a"},
	} {
		got, err := appendValue([]byte("> "), v)
		if err != nil {
			t.Errorf("appendValue(%#v): %v", v, err)
			continue
		}
		want, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		var compact bytes.Buffer
		if err := json.Compact(&compact, got[2:]); err != nil || compact.String() != string(want) {
			t.Errorf("appendValue(%#v) = %s, want %s", v, got[2:], want)
		}
		if bytes.ContainsAny(got, "\r\n") {
			t.Errorf("appendValue(%#v) = %q: newline", v, got)
		}
	}

	loop := map[string]any{}
	loop["self"] = []any{loop}
	for _, v := range []any{
		math.NaN(), math.Inf(1), float32(math.Inf(-1)), json.Number("1x"), json.Number("01"), json.Number("-"), json.Number("1 "),
		json.RawMessage(""), json.RawMessage("{"), json.RawMessage("1 2"), json.RawMessage("{\n"), func() {}, make(chan int), marshaler{"{"},
		map[string]any{"a": []any{math.NaN()}}, loop,
	} {
		got, err := appendValue([]byte("> "), v)
		if err == nil || string(got) != "> " {
			t.Errorf("appendValue(%T) = %.40s, %v", v, got, err)
		}
	}
	if _, err := appendValue(nil, loop); !errors.Is(err, errDepth) {
		t.Errorf("appendValue of what holds itself: %v", err)
	}
	if got, err := appendValue(nil, json.RawMessage("\"\xff\"")); err != nil || !utf8.Valid(got) {
		t.Errorf("appendValue of raw JSON that is not UTF-8: %q, %v", got, err)
	}
}

func TestAppendMessages(t *testing.T) {
	for _, test := range []struct{ got, want string }{
		{string(appendRequest(nil, 7, "m", nil)), `{"jsonrpc":"2.0","id":7,"method":"m"}`},
		{string(appendRequest([]byte("x"), -7, "a\"b", []byte(`{"a":1}`))), `x{"jsonrpc":"2.0","id":-7,"method":"a\"b","params":{"a":1}}`},
		{string(appendNotification(nil, "m", nil)), `{"jsonrpc":"2.0","method":"m"}`},
		{string(appendNotification(nil, "m", []byte(`{}`))), `{"jsonrpc":"2.0","method":"m","params":{}}`},
		{string(appendResponse(nil, json.RawMessage(`"a"`), json.RawMessage(`{}`), nil)), `{"jsonrpc":"2.0","id":"a","result":{}}`},
		{string(appendResponse(nil, json.RawMessage(`1`), nil, nil)), `{"jsonrpc":"2.0","id":1,"result":null}`},
		{string(appendResponse(nil, json.RawMessage(`1`), nil, &RPCError{Code: -32601, Message: "no \"x\""})),
			`{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"no \"x\""}}`},
	} {
		if test.got != test.want {
			t.Errorf("got %s, want %s", test.got, test.want)
		}
	}
}

func TestWireAllocs(t *testing.T) {
	message := []byte(`{"jsonrpc":"2.0","id":7,"result":{"content":[{"type":"text","text":"hello, world"}],"isError":false}}`)
	result := []byte(`{"resultType":"complete","content":[{"type":"text","text":"hello, world"}],"isError":false}`)
	page := toolList(500)
	args := map[string]any{"city": "Paris", "days": 3, "tags": []any{"a", true, nil}, "deep": map[string]any{"x": 1.5}}
	value := []byte(`{"name":"x","n":1}`)
	buf := make([]byte, 0, 1024)
	for _, test := range []struct {
		name string
		max  float64
		f    func()
	}{
		{"scanEnvelope", 0, func() { _, _ = scanEnvelope(message) }},
		{"peekID", 0, func() { _, _ = peekID(message) }},
		{"cutAnswer", 0, func() { _, _, _ = cutAnswer(message) }},
		{"decodeToolResult", 3, func() { _, _ = decodeToolResult(result) }},
		{"decodeToolPage of 500", 1100, func() { _, _ = decodeToolPage(page) }},
		{"decodeValue", 5, func() { _, _ = decodeValue(value) }},
		{"appendRequest", 0, func() { appendRequest(buf, 7, "tools/call", value) }},
		{"appendValue", 0, func() { _, _ = appendValue(buf, args) }},
	} {
		if n := testing.AllocsPerRun(100, test.f); n > test.max {
			t.Errorf("%s: %v allocations, want at most %v", test.name, n, test.max)
		}
	}
}

// A buffer that is given back is used again, and none is handed out twice.
func TestBuffers(t *testing.T) {
	for _, size := range []int{100, smallestSpare, 1 << 20, largestSpare, largestSpare + 1, 9 << 20} {
		kept := buffers{spares: newSpares()}
		p, q := kept.take(size), kept.take(size)
		if cap(*p) < size || cap(*q) < size || len(*p)+len(*q) > 0 {
			t.Fatalf("buffers of %d and %d bytes want %d", cap(*p), cap(*q), size)
		}
		if &append(*p, 1)[0] == &append(*q, 2)[0] {
			t.Fatal("one buffer for two")
		}
		was := &append(*p, 1)[0]
		kept.give(p)
		again := kept.take(size)
		if stays := smallestSpare <= size && size <= largestSpare; stays && &append(*again, 3)[0] != was { // the others may be collected
			t.Errorf("a buffer of %d bytes is not used again", size)
		}
		if &append(*again, 3)[0] == &append(*q, 2)[0] {
			t.Fatal("one buffer for two")
		}
	}
	kept := newSpares()
	long := kept.grow(append(kept.take(20<<10), "begun"...), 40<<10)
	if string(long) != "begun" || cap(long) < 40<<10 || len(kept.large) != 1 {
		t.Errorf("grow = %q of %d bytes, %d kept", long, cap(long), len(kept.large))
	}
}

func TestRoughSize(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	for _, v := range []any{json.RawMessage(long), map[string]any{"a": long, "n": 1}, map[string]any{"a": json.RawMessage(long)}} {
		if n := roughSize(v); n < 1<<20 || n > 1<<20+64 {
			t.Errorf("roughSize = %d want a little over %d", n, 1<<20)
		}
	}
	if n := roughSize(nil); n != 0 {
		t.Errorf("roughSize(nil) = %d", n)
	}
}

// wantEnvelope is what encoding/json makes of a message. ok is false if it must
// be refused; unclear where a name comes twice or nesting is deep.
func wantEnvelope(b []byte) (e envelope, ok, unclear bool) {
	var m map[string]json.RawMessage
	if json.Unmarshal(b, &m) != nil || m == nil {
		return e, false, false
	}
	e = envelope{id: m["id"], params: unlessNull(m["params"]), result: m["result"], err: unlessNull(m["error"])}
	var version string
	var id any
	ok = json.Unmarshal(m["jsonrpc"], &version) == nil && version == "2.0"
	if method := m["method"]; method != nil {
		ok = json.Unmarshal(method, &e.method) == nil && ok
	}
	d := json.NewDecoder(bytes.NewReader(e.id))
	d.UseNumber()
	_ = d.Decode(&id)
	switch id := id.(type) {
	case nil, string:
	case json.Number:
		ok = ok && !strings.ContainsAny(string(id), ".eE")
	default:
		ok = false
	}
	kinds := 0
	for _, is := range []bool{e.method != "", e.result != nil, e.err != nil} {
		if is {
			kinds++
		}
	}
	return e, ok && kinds <= 1, hasDuplicate(b)
}

func FuzzEnvelope(f *testing.F) {
	for _, seed := range []string{
		`{"jsonrpc":"2.0","id":7,"result":{"content":[{"type":"text","text":"a\n"}]}}`,
		`{"jsonrpc":"2.0","error":{"code":-32601,"message":"no"},"id":"7"}`,
		`{"jsonrpc":"2.0","method":"notifications/progress","params":{"progress":1.5e3}}`,
		`{"jsonrpc":"2.0","id":7,"id":8,"result":[],"error":null}`,
		`{"jsonrpc":"2.0","\u0069d":7,"Result":1,"result":"\ud83d"}`,
		`[{"jsonrpc":"2.0","id":1,"method":"ping"},{}]`,
		`{"result":{"jsonrpc":"2.0","id":5},"jsonrpc":"2.0","id":7}`,
		`{"jsonrpc":"2.0","id":"7","result":[1],"result":2}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := scanEnvelope(b)
		n, peeked := peekID(b)
		_, batch := scanBatch(b)
		valid := json.Valid(b)

		// Any value is skipped exactly if it is JSON.
		if i := skip(b, 0, wireDepth); i != tooDeep && (i >= 0 && space(b, i) == len(b)) != valid {
			t.Fatalf("skip = %d of %d, json.Valid says %v", i, len(b), valid)
		}
		if batch && !valid {
			t.Fatal("scanBatch takes what is no JSON")
		}
		want, ok, unclear := wantEnvelope(b)
		if !unclear && err != errDepth && (err == nil) != ok || err == nil && !valid {
			t.Fatalf("scanEnvelope = %v, want ok: %v", err, ok)
		}
		if err == nil {
			if !reflect.DeepEqual(e, want) {
				t.Fatalf("scanEnvelope = %s, want %s", e, want)
			}
			id, ours := intID(e.id)
			if answer := e.result != nil || e.err != nil; peeked != (answer && ours) || peeked && n != id {
				t.Fatalf("peekID = %d, %v; the envelope has %s", n, peeked, e.id)
			}
		}
		// What is cut short is cut right, if its result is one.
		if id, result, ok := cutAnswer(b); ok && isValue(result) && err != errDepth {
			if n, ours := intID(e.id); err != nil || !ours || n != id || !bytes.Equal(bytes.Trim(result, " \t\r\n"), e.result) {
				t.Fatalf("cutAnswer = %d, %s; the envelope is %s, %v", id, result, e, err)
			}
		}
		// What a head is sure about, the whole confirms.
		for _, cut := range []int{len(b) / 3, len(b) / 2, len(b) - 1} {
			if cut < 0 {
				continue
			}
			if head, ok := peekID(b[:cut]); ok && (!peeked || head != n) {
				t.Fatalf("peekID of %d bytes = %d, of all %d, %v", cut, head, n, peeked)
			}
		}
		_, _ = decodeError(b)
		_, _ = decodeToolResult(b)
		_ = member(b, "id")
	})
}

func FuzzValue(f *testing.F) {
	for _, seed := range []string{
		`{"a":[1,-2.5e-7,"x\u00e9\ud83d\ude00\n",true,null,{}],"b":""}`, `"\ud800"`, "\"\xff\"", `[[[]]]`, `{"a":1,"a":2}`, `1e999`, ` 1 `,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := decodeValue(b)
		if valid := json.Valid(b); err == nil && !valid || err != nil && valid && err == errSyntax && !hasDuplicate(b) {
			t.Fatalf("decodeValue: %v, json.Valid says %v", err, valid)
		}
		if err != nil {
			return
		}
		out, err := appendValue(nil, v)
		if err != nil || bytes.ContainsAny(out, "\r\n") || !utf8.Valid(out) {
			t.Fatalf("appendValue = %q, %v", out, err)
		}
		if got, want := unmarshal(t, out), unmarshal(t, b); !reflect.DeepEqual(got, want) {
			t.Fatalf("%s reads as %#v, want %#v", out, got, want)
		}
		if !reflect.DeepEqual(v, unmarshal(t, b)) {
			t.Fatalf("decodeValue = %#v, want %#v", v, unmarshal(t, b))
		}
	})
}

func unmarshal(t *testing.T, b []byte) (v any) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// hasDuplicate reports whether an object in b has two members of one name.
func hasDuplicate(b []byte) bool {
	d := json.NewDecoder(bytes.NewReader(b))
	var value func() bool
	value = func() bool {
		tok, err := d.Token()
		if err != nil {
			return false
		}
		switch tok {
		case json.Delim('['):
			for d.More() {
				if value() {
					return true
				}
			}
			_, _ = d.Token()
		case json.Delim('{'):
			seen := map[string]bool{}
			for d.More() {
				key, err := d.Token()
				name, ok := key.(string)
				if err != nil || !ok {
					return false
				}
				if seen[name] {
					return true
				}
				seen[name] = true
				if value() {
					return true
				}
			}
			_, _ = d.Token()
		}
		return false
	}
	d.UseNumber()
	return value()
}

func FuzzToolPage(f *testing.F) {
	f.Add([]byte(`{"tools":[{"name":"a","title":"A","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":true}},{"name":5}],"nextCursor":"x"}`))
	f.Add([]byte(`{"tools":[{"name":"a\u0062","description":"é","execution":{"taskSupport":"required"}}],"ttlMs":1e3}`))
	f.Add([]byte(`{"tools":null,"nextCursor":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := decodeToolPage(b)
		if err != nil {
			return
		}
		var want struct{ Tools []json.RawMessage }
		if json.Unmarshal(b, &want) != nil {
			t.Fatal("decodeToolPage takes what is no JSON")
		}
		for _, tool := range p.tools {
			if tool.Name == "" || !utf8.ValidString(tool.Name+tool.Title+tool.Description) {
				t.Fatalf("tool %+v", tool)
			}
			for _, raw := range []json.RawMessage{tool.InputSchema, tool.OutputSchema, tool.Raw} {
				if raw != nil && (!json.Valid(raw) || !bytes.Contains(b, raw)) {
					t.Fatalf("%q is no part of the page", raw)
				}
			}
		}
	})
}
