#!/bin/sh
# Measures this library beside the two widely used Go clients of MCP, and the
# floor under them, and prints markdown.
#
#   ./run.sh               everything, a few minutes
#   ./run.sh -scale 0.1    a quick look; flags go to cmd/bench
#   ./run.sh --size        only the size of a minimal program
#   ./run.sh --probe       servers that misbehave, and what each client makes of them
set -eu
cd "$(dirname "$0")"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
go build -o "$out/" ./server ./cmd/bench ./cmd/probe

size() {
	echo "### A minimal client program, CGO_ENABLED=0, -trimpath, -s -w"
	echo
	echo "| program | bytes | over the stdlib program | modules linked | packages linked | of them not stdlib |"
	echo "|---|--:|--:|--:|--:|--:|"
	base=0
	for m in stdlib ours gosdk mcpgo; do
		CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o "$out/$m" "./minimal/$m"
		bytes=$(wc -c <"$out/$m")
		[ "$base" != 0 ] || base=$bytes
		modules=$(go version -m "$out/$m" | grep -c '	dep	' || true)
		packages=$(CGO_ENABLED=0 go list -deps "./minimal/$m" | wc -l)
		foreign=$(CGO_ENABLED=0 go list -deps -f '{{if not .Standard}}{{.ImportPath}}{{end}}' "./minimal/$m" | grep -vc '^peers/' || true)
		printf '| %s | %d | %+d kB | %d | %d | %d |\n' "$m" "$bytes" $(((bytes - base) / 1000)) "$modules" "$packages" "$foreign"
	done
}

case "${1:-}" in
--size) size; exit ;;
--probe) "$out/probe" -server "$out/server"; exit ;;
esac
# With one caller, what is timed on two cores is where the kernel wakes a
# thread. On one core the figures repeat.
pin=
if command -v taskset >/dev/null; then pin='taskset -c 0'; fi
echo "## One caller, client and server on one core"
echo
$pin "$out/bench" -server "$out/server" -row '(100 B|structured|500)$' "$@"
echo
echo "## 64 callers, large messages, sessions; no pinning"
echo
"$out/bench" -server "$out/server" -row '×64$|1 MiB$|^connect' "$@"
echo
size
