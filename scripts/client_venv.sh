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
"$venv/bin/pip" install -qq --no-deps --no-index --force-reinstall dist/libdsec-*.whl
