#!/usr/bin/env bash
# Runs the client half of the official MCP conformance suite against the driver
# in main.go, once with the revision found out and once with it declared:
#
#   testdata/conformance/run.sh [-v] [SCENARIO...]
#
# Without arguments, every scenario that needs neither OAuth nor an extension,
# at every revision that it applies to. -v shows the failed checks of the suite
# and what the driver wrote.
#
# The suite's own way of running many scenarios counts a client that failed,
# hung or did nothing as passed. So each one is run alone here: it has passed
# when the suite and the client both exited with 0 and a check has succeeded.
#
# CONFORMANCE_DIR names the folder that holds, or gets, the pinned package;
# CONFORMANCE_JOBS is how many scenarios run at a time (2). Without node, or
# where the registry cannot be reached, the reason is printed and the status is
# 0. It is 1 when a run has failed.
set -u -o pipefail

package=@modelcontextprotocol/conformance
version=0.2.0-alpha.12
timeout=30000 # ms, for one run of the client
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${CONFORMANCE_DIR:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/mcp-conformance-$version}
suite=(node --import "$dir/node20.mjs" "$dir/node_modules/$package/dist/index.js")

skip() { echo "conformance: skipped: $1"; exit 0; }
die() { echo "conformance: $1" >&2; exit 1; }

# one NAME@VERSION runs one scenario, and leaves its verdict in $OUT.
one() {
  local name=${1%@*} revision=${1#*@} out=$OUT/$1 rc
  mkdir -p "$out"
  timeout -k 5 $((timeout / 1000 + 30)) "${suite[@]}" client --command "$OUT/driver" \
    --scenario "$name" --spec-version "$revision" --timeout "$timeout" -o "$out/r" >"$out/log" 2>&1
  rc=$?
  RC=$rc node -e '
    const fs = require("fs"), out = process.argv[1], rc = +process.env.RC;
    const read = name => { // the suite adds a time to the name of its folder
      try { return fs.readFileSync(out + "/r/" + fs.readdirSync(out + "/r")[0] + "/" + name, "utf8"); } catch { return ""; }
    };
    const log = fs.readFileSync(out + "/log", "utf8");
    let checks = [];
    try { checks = JSON.parse(read("checks.json")); } catch {}
    const n = s => checks.filter(c => c.status === s).length;
    const exit = /CLIENT EXITED WITH ERROR \(code (-?\d+)\)/.exec(log);
    let why = "";
    if (/CLIENT TIMED OUT/.test(log)) why = "the client timed out";
    else if (exit) why = "the client exited with " + exit[1];
    else if (rc !== 0) why = "the suite exited with " + rc;
    else if (n("SUCCESS") === 0) why = "no check was exercised";
    const counts = n("SUCCESS") + " ok, " + (n("FAILURE") + n("WARNING")) + " bad, " + n("SKIPPED") + " skipped";
    fs.writeFileSync(out + "/verdict", (why ? "FAIL" : "pass") + "|" + counts + (why ? ": " + why : "") + "\n");
    fs.writeFileSync(out + "/detail", checks.filter(c => c.status === "FAILURE" || c.status === "WARNING")
      .map(c => "     " + c.id + ": " + String(c.errorMessage || c.description) + "\n").join("") + read("stderr.txt").replace(/^/gm, "     | ") + "\n");
  ' "$out" || echo "FAIL|no verdict" >"$out/verdict"
}
if [ "${1:-}" = --one ]; then one "$2"; exit; fi

verbose=
if [ "${1:-}" = -v ]; then verbose=1; shift; fi

# ---- the package -----------------------------------------------------------

command -v node >/dev/null && command -v npm >/dev/null || skip "node and npm are not installed"
installed() {
  [ -f "$dir/node20.mjs" ] && [ "$(node -p 'require(process.argv[1]).version' "$dir/node_modules/$package/package.json" 2>/dev/null)" = "$version" ]
}
if ! installed; then
  mkdir -p "$dir" && cp "$here/package/package.json" "$here/package/package-lock.json" "$dir/" || die "cannot fill $dir"
  if ! (cd "$dir" && npm ci --ignore-scripts --no-audit --no-fund) >"$dir/npm.log" 2>&1; then
    npm view "$package@$version" version >/dev/null 2>&1 || skip "the npm registry cannot be reached"
    tail -5 "$dir/npm.log" >&2
    die "npm could not install $package@$version"
  fi
  # The package imports globSync, which node 20 does not have, for a command
  # that is not used here. A stand-in lets it load.
  cat >"$dir/node20.mjs" <<'JS'
import { register } from 'node:module';
import fs from 'node:fs';
if (typeof fs.globSync !== 'function') {
  const wrapped = 'data:text/javascript,' + encodeURIComponent(
    "export * from 'node:fs'; export { default } from 'node:fs';" +
    "export function globSync() { throw new Error('globSync needs node 22'); }");
  register('data:text/javascript,' + encodeURIComponent(
    'export async function resolve(s, c, next) {' +
    "if ((s === 'fs' || s === 'node:fs') && c.parentURL && c.parentURL.includes('/conformance/dist/'))" +
    ` return { url: ${JSON.stringify(wrapped)}, shortCircuit: true };` +
    'return next(s, c); }'));
}
JS
  installed || die "the installed package is not $version"
fi

# ---- the runs --------------------------------------------------------------

work=$(mktemp -d) || die "cannot make a folder"
trap 'rm -rf "$work"' EXIT
(cd "$here" && go build -o "$work/driver" .) || die "the driver does not build"

# The list has lines "  - NAME [VERSION,VERSION]", or [extension].
runs=$("${suite[@]}" list --client 2>&1 | sed -n 's/^  - \([^ ]*\) \[\(.*\)\]$/\1 \2/p' | awk -v want=" $* " '
  $2 != "extension" && (want == "  " ? $1 !~ /^auth\// : index(want, " " $1 " ")) {
    n = split($2, v, /, */); for (i = 1; i <= n; i++) print $1 "@" v[i]
  }')
[ -n "$runs" ] || die "the suite lists no such scenario"

status=0
for pin in '' 1; do
  export CONFORMANCE_PIN=$pin OUT=$work/${pin:+declared}
  [ -n "$pin" ] || OUT=$work/negotiated
  mkdir "$OUT" && cp "$work/driver" "$OUT/driver"
  echo "$package $version, node $(node --version), revision $(basename "$OUT")"
  xargs -P "${CONFORMANCE_JOBS:-2}" -I{} bash "$here/run.sh" --one {} <<<"$runs"
  passed=0 failed=0
  while read -r run; do
    IFS='|' read -r word note <"$OUT/$run/verdict" || word=FAIL note="no verdict"
    if [ "$word" = pass ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    printf '%s  %-50s %s\n' "$word" "$run" "$note"
    if [ -n "$verbose" ] && [ "$word" != pass ]; then cat "$OUT/$run/detail" 2>/dev/null; fi
  done <<<"$runs"
  echo "conformance: $passed passed, $failed failed"
  [ "$failed" -eq 0 ] || status=1
done
exit $status
