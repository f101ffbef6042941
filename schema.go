package mcp

// An Issue is one place where a value does not fit its schema.
type Issue struct {
	Path       string // JSON Pointer into the value
	Keyword    string // the schema keyword that was violated
	Want       string // what was expected
	Got        string // what was given, as bounded JSON; empty for results
	SchemaPath string // JSON Pointer into the schema
}

// A SchemaError is a schema that cannot be held, and why.
type SchemaError struct {
	Reason  string // a word of a closed list, such as "remote-ref"
	Pointer string // JSON Pointer into the schema
	Detail  string // bounded, in our words
}

func (e *SchemaError) Error() string {
	return "mcp: schema: " + e.Reason + " at " + e.Pointer + ": " + e.Detail
}
