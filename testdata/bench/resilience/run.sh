#!/bin/sh
# Measures the policy beside others, in one run. Arguments go to go test; the
# default is many short runs, of which the smallest figure is the one to compare.
set -eu
cd "$(dirname "$0")"
sed 's/^package mcp$/package resiliencebench/' ../../../breaker.go >breaker_copy_test.go
trap 'rm -f breaker_copy_test.go' EXIT
[ $# -gt 0 ] || set -- -benchtime=15ms -count=30
go test -tags leaf -run '^$' -bench . -cpu 2 "$@" . | tee /dev/stderr | awk '
	/^Benchmark/ {
		name = $1; sub(/^Benchmark/, "", name); sub(/-[0-9]+$/, "", name)
		if (!(name in ns)) { order[++n] = name; ns[name] = $3 + 0 }
		if ($3 + 0 < ns[name]) ns[name] = $3 + 0
		bytes[name] = $5; allocs[name] = $7
	}
	END {
		print "\n| benchmark | min ns/op | B/op | allocs/op |\n|---|--:|--:|--:|"
		for (i = 1; i <= n; i++) printf "| %s | %.1f | %s | %s |\n", order[i], ns[order[i]], bytes[order[i]], allocs[order[i]]
	}'
