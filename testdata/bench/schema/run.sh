#!/bin/sh
# Benchmarks the schema compiler beside two published ones. The compiler is not
# exported, so its files, which refer to no others, are copied here first.
# Usage: ./run.sh [arguments of go test]
set -eu
cd "$(dirname "$0")"
for f in schema.go schema_text.go; do
	sed 's/^package mcp$/package schema/' "../../../$f" >"$f"
done
go vet ./...
if [ $# -eq 0 ]; then
	set -- -run 'Ratio' -v
fi
exec go test -count=1 "$@" .
