module resilient/mcp

go 1.25
