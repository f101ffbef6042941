package mcp

import (
	"bytes"
	"encoding/json"
	"errors"
)

// Provisional: encoding/json behind the final signatures.

var errSyntax = errors.New("not a JSON-RPC message")

// An envelope is one JSON-RPC message, cut into its members. The members lie in
// the bytes that were scanned.
type envelope struct {
	id     json.RawMessage // nil if absent; "null" if null
	method string          // "" if absent
	params json.RawMessage
	result json.RawMessage // nil if absent
	err    json.RawMessage // the error member; nil if absent
}

// scanEnvelope cuts one message into its members: case-sensitive keys,
// duplicates of the members above refused, depth bounded, nothing but white
// space after it, jsonrpc must be "2.0".
func scanEnvelope(b []byte) (envelope, error) {
	var w struct {
		JSONRPC string          `json:"jsonrpc"`
		ID      json.RawMessage `json:"id"`
		Method  string          `json:"method"`
		Params  json.RawMessage `json:"params"`
		Result  json.RawMessage `json:"result"`
		Error   json.RawMessage `json:"error"`
	}
	if err := json.Unmarshal(b, &w); err != nil || w.JSONRPC != "2.0" {
		return envelope{}, errSyntax
	}
	if bytes.Equal(w.Error, []byte("null")) {
		w.Error = nil
	}
	return envelope{w.ID, w.Method, w.Params, w.Result, w.Error}, nil
}

// scanBatch cuts a JSON array into its elements. ok is false if b is no array.
func scanBatch(b []byte) (elems []json.RawMessage, ok bool) {
	return elems, json.Unmarshal(b, &elems) == nil && bytes.HasPrefix(bytes.TrimLeft(b, " \t\r\n"), []byte("["))
}

// intID returns the id as a number of ours: 7, or the text "7".
func intID(id json.RawMessage) (n int64, ok bool) {
	var s string
	if json.Unmarshal(id, &s) == nil {
		id = json.RawMessage(s)
	}
	return n, len(id) > 0 && json.Unmarshal(id, &n) == nil
}

// peekID finds the id of a message that carries a result or an error, looking
// at as little of it as possible; b may be just the head of the message. ok is
// false for requests, notifications and anything it is not sure about.
func peekID(b []byte) (n int64, ok bool) {
	e, err := scanEnvelope(b)
	if err != nil || e.method != "" {
		return 0, false
	}
	return intID(e.id)
}

// decodeError decodes the error member.
func decodeError(b []byte) (*RPCError, error) {
	var w struct {
		Code    *int            `json:"code"`
		Message string          `json:"message"`
		Data    json.RawMessage `json:"data"`
	}
	if json.Unmarshal(b, &w) != nil || w.Code == nil {
		return nil, errSyntax
	}
	e := &RPCError{Code: *w.Code, Message: string(clip([]byte(w.Message)))}
	if len(w.Data) <= 64<<10 {
		e.Data = append(json.RawMessage(nil), w.Data...)
	}
	return e, nil
}

// toolResult is a decoded result of tools/call.
type toolResult struct {
	Result
	resultType string // "" if absent
	noContent  bool
}

// decodeToolResult decodes a result of tools/call. Strings and raw members are
// copies.
func decodeToolResult(b []byte) (toolResult, error) {
	var w struct {
		Content []struct {
			Type     string `json:"type"`
			Text     string `json:"text"`
			Data     string `json:"data"`
			MIMEType string `json:"mimeType"`
			URI      string `json:"uri"`
			Name     string `json:"name"`
		} `json:"content"`
		Structured json.RawMessage `json:"structuredContent"`
		IsError    bool            `json:"isError"`
		Meta       json.RawMessage `json:"_meta"`
		ResultType string          `json:"resultType"`
	}
	if json.Unmarshal(b, &w) != nil {
		return toolResult{}, errSyntax
	}
	r := toolResult{resultType: w.ResultType}
	for _, c := range w.Content {
		r.Content = append(r.Content, Content{Type: c.Type, Text: c.Text, Data: c.Data, MIMEType: c.MIMEType, URI: c.URI, Name: c.Name})
	}
	r.Structured, r.IsError, r.Meta = w.Structured, w.IsError, w.Meta
	return r, nil
}

// toolPage is a decoded result of tools/list.
type toolPage struct {
	tools  []Tool
	bad    int     // entries that are no tools at all (no object, no name)
	cursor *string // nextCursor; nil at the end
	ttlMs  int64   // -1 if absent
}

// decodeToolPage decodes a result of tools/list. Strings and raw members are
// copies.
func decodeToolPage(b []byte) (toolPage, error) {
	var w struct {
		Tools []struct {
			Name         string          `json:"name"`
			Title        string          `json:"title"`
			Description  string          `json:"description"`
			InputSchema  json.RawMessage `json:"inputSchema"`
			OutputSchema json.RawMessage `json:"outputSchema"`
		} `json:"tools"`
		Cursor *string `json:"nextCursor"`
	}
	if json.Unmarshal(b, &w) != nil {
		return toolPage{}, errSyntax
	}
	p := toolPage{cursor: w.Cursor, ttlMs: -1}
	for _, t := range w.Tools {
		p.tools = append(p.tools, Tool{Name: t.Name, Title: t.Title, Description: t.Description, InputSchema: t.InputSchema, OutputSchema: t.OutputSchema, Destructive: true})
	}
	return p, nil
}

// member returns the raw value of one member of a JSON object, nil if absent.
func member(b []byte, key string) json.RawMessage {
	var m map[string]json.RawMessage
	if json.Unmarshal(b, &m) != nil {
		return nil
	}
	return m[key]
}

// decodeValue decodes one JSON value as validation wants it: map[string]any,
// []any, string, json.Number, bool, nil; duplicates refused, depth bounded.
func decodeValue(b []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	var v any
	if d.Decode(&v) != nil {
		return nil, errSyntax
	}
	return v, nil
}

// appendString appends s as a JSON string. Invalid UTF-8 becomes U+FFFD.
func appendString(dst []byte, s string) []byte {
	b, _ := json.Marshal(s)
	return append(dst, b...)
}

// appendValue appends v as JSON: maps (keys sorted), slices and scalars by
// hand, json.RawMessage checked, everything else through encoding/json.
func appendValue(dst []byte, v any) ([]byte, error) {
	b, err := json.Marshal(v)
	return append(dst, b...), err
}

// appendRequest appends a request; params is a whole object or nil.
func appendRequest(dst []byte, id int64, method string, params []byte) []byte {
	b, _ := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": id, "method": method})
	if params != nil {
		b, _ = json.Marshal(map[string]any{"jsonrpc": "2.0", "id": id, "method": method, "params": json.RawMessage(params)})
	}
	return append(dst, b...)
}

// appendNotification appends a notification; params is a whole object or nil.
func appendNotification(dst []byte, method string, params []byte) []byte {
	b, _ := json.Marshal(map[string]any{"jsonrpc": "2.0", "method": method})
	if params != nil {
		b, _ = json.Marshal(map[string]any{"jsonrpc": "2.0", "method": method, "params": json.RawMessage(params)})
	}
	return append(dst, b...)
}

// appendResponse appends the answer to a request of the server: the result, or
// the error's code and message if rpc is not nil.
func appendResponse(dst []byte, id json.RawMessage, result json.RawMessage, rpc *RPCError) []byte {
	m := map[string]any{"jsonrpc": "2.0", "id": id}
	if rpc != nil {
		m["error"] = map[string]any{"code": rpc.Code, "message": rpc.Message}
	} else {
		m["result"] = result
	}
	b, _ := json.Marshal(m)
	return append(dst, b...)
}
