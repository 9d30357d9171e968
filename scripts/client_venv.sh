#!/usr/bin/env bash
# Makes .venv-<client> for a harness: what requirements-<client>.lock pins, and the SDK's
# wheel from dist/ as users get it. Done in a second when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."

client=$1
lock=requirements-$client.lock
venv=.venv-$client
stamp=$venv/.installed

if [[ ! -e $stamp ]] || ! cmp -s "$lock" "$stamp"; then
  rm -rf "$venv"
  .venv/bin/python -m venv "$venv"
  echo "test-$client: installing $(grep -c '==' "$lock") packages into $venv"
  "$venv/bin/pip" install -qq --require-hashes -r "$lock"
  cp "$lock" "$stamp"
fi
# dist/ may hold earlier versions; the one just built is the newest
wheel=$(find dist -name 'libdsec-*.whl' -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d' ' -f2)
"$venv/bin/pip" install -qq --no-deps --no-index --force-reinstall "$wheel"
