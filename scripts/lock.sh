#!/usr/bin/env bash
# Makes requirements.lock from pyproject.toml, and requirements-<client>.lock for each harness
# with a requirements-<client>.in: every version pinned with the hashes of all its files, no
# index URL and no host, so it installs from whatever index pip is set to.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools/venv"
"$tools/venv/bin/pip" install -qq pip-tools

# pin OUTPUT INPUT…: one lock file
pin() {
  local output=$1
  shift
  CUSTOM_COMPILE_COMMAND="make lock" "$tools/venv/bin/pip-compile" -qq --generate-hashes \
    --allow-unsafe --strip-extras --no-emit-index-url --no-emit-find-links \
    --no-emit-trusted-host --no-emit-options --output-file "$output" "$@"
  if grep -nE '://|^--|^-[a-z]' "$output"; then
    echo "$output names an index or a path (above)" >&2
    exit 1
  fi
}

pin requirements.lock --extra edge --extra local --extra dev "$@" pyproject.toml
for input in requirements-*.in; do
  client=${input#requirements-}
  client=${client%.in}
  pin "requirements-$client.lock" --extra cli --extra "$client" "$@" libdsec/pyproject.toml "$input"
done
