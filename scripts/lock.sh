#!/usr/bin/env bash
# Makes requirements.lock from pyproject.toml: every version pinned with the hashes of all
# its files, no index URL and no host, so it installs from whatever index pip is set to.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools/venv"
"$tools/venv/bin/pip" install -qq pip-tools

CUSTOM_COMPILE_COMMAND="make lock" "$tools/venv/bin/pip-compile" -qq --generate-hashes \
  --allow-unsafe --strip-extras --no-emit-index-url --no-emit-find-links \
  --no-emit-trusted-host --no-emit-options \
  --extra edge --extra local --extra dev "$@" \
  --output-file requirements.lock pyproject.toml

if grep -nE '://|^--|^-[a-z]' requirements.lock; then
  echo "requirements.lock names an index or a path (above)" >&2
  exit 1
fi
