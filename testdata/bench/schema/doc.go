// Package schema measures the schema compiler of resilient/mcp beside
// google/jsonschema-go and santhosh-tekuri/jsonschema, in one run.
package schema
