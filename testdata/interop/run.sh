#!/usr/bin/env bash
# Drives servers that others have written with the client:
#
#   testdata/interop/run.sh [GO-TEST-FLAG...]
#
# The server on the Go SDK is built from this module; those on the TypeScript
# SDKs are installed from npm, at the versions of npm/package-lock.json.
# INTEROP_DIR names the folder that holds, or gets, them. What cannot be had is
# named, and the tests that need it are skipped: the npm packages without node or
# the npm registry, everything without the Go module proxy. The status is that of
# go test, and 0 where nothing could be run.
set -u -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
dir=${INTEROP_DIR:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/mcp-interop-npm}

if ! out=$(go mod download 2>&1); then
  echo "interop: skipped: the Go module proxy cannot be reached: ${out##*$'\n'}"
  exit 0
fi

unset MCP_INTEROP_NPM
install() {
  command -v node >/dev/null && command -v npm >/dev/null || { echo "interop: the servers from npm are skipped: node and npm are not installed"; return 0; }
  mkdir -p "$dir" && cp npm/peer.mjs "$dir/" || return 1
  if ! cmp -s npm/package-lock.json "$dir/installed"; then
    cp npm/package.json npm/package-lock.json "$dir/" || return 1
    if ! (cd "$dir" && npm ci --ignore-scripts --no-audit --no-fund) >"$dir/npm.log" 2>&1; then
      npm view @modelcontextprotocol/server version >/dev/null 2>&1 || { echo "interop: the servers from npm are skipped: the npm registry cannot be reached"; return 0; }
      tail -5 "$dir/npm.log" >&2
      return 1
    fi
    cp npm/package-lock.json "$dir/installed" || return 1
  fi
  export MCP_INTEROP_NPM=$dir
}
install || { echo "interop: the servers from npm could not be installed" >&2; exit 1; }

go vet . && go test -count=1 "$@" .
