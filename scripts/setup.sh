#!/usr/bin/env bash
# Makes a fresh Debian 12 (or like) machine ready for `make demo` and `make test`:
# packages, .venv from requirements.lock, guest binaries, a running Docker Engine.
# Idempotent: it says what it does and is done in a second when nothing is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly APT_TRIES=3
readonly DPKG_LOCK_TIMEOUT_S=600
readonly VENV=.venv

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

installed() { dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed; }

# Package names that are missing, judged by the tool where one may come from elsewhere.
missing_packages() {
  local entry
  if ! command -v dockerd >/dev/null && ! scripts/docker-engine.sh --check >/dev/null 2>&1; then
    echo docker.io
  fi
  for entry in iptables:iptables ip:iproute2 ps:procps mkfs.erofs:erofs-utils \
    mkfs.ext4:e2fsprogs gcc:gcc make:make mmdebstrap:mmdebstrap patch:patch xz:xz-utils \
    musl-gcc:musl-tools \
    aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu clang:clang apparmor_parser:apparmor; do
    command -v "${entry%%:*}" >/dev/null || echo "${entry#*:}"
  done
  [[ -e /usr/include/stdio.h ]] || echo libc6-dev
  [[ -e /usr/aarch64-linux-gnu/include/stdio.h ]] || echo libc6-dev-arm64-cross
  ldconfig -p | grep -q 'libbpf\.so\.1' || echo libbpf1
  [[ -e /usr/include/linux/bpf.h ]] || echo linux-libc-dev
  docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || echo docker-compose
  busybox_is_static || echo busybox-static
  [[ -n $(find_python) ]] || echo python3 python3-venv
}

busybox_is_static() { installed busybox-static || [[ -n ${BUSYBOX_STATIC:-} ]]; }

retry() {
  local try
  for ((try = 1; ; try++)); do
    "$@" && return
    ((try < APT_TRIES)) || return 1
    say "try $try of $APT_TRIES failed: $*"
    sleep $((try * 3))
  done
}

apt() {
  # RUNLEVEL=1: a package's start script must not start an engine before
  # docker-engine.sh decides how. Under systemd it has no effect.
  DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
    apt-get -qq -o "DPkg::Lock::Timeout=$DPKG_LOCK_TIMEOUT_S" "$@" </dev/null
}

install_packages() {
  local packages
  mapfile -t packages < <(missing_packages | tr ' ' '\n')
  if ((${#packages[@]} == 0)); then
    say "packages: all there"
    return
  fi
  command -v apt-get >/dev/null ||
    die "these are missing and there is no apt-get to install them: ${packages[*]}"
  say "packages: installing ${packages[*]}"
  retry apt update >/dev/null
  retry apt install -y --no-install-recommends "${packages[@]}" >/dev/null
}

# The first interpreter from 3.11 on that can make a virtual environment.
find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 /usr/bin/python3 python3.13 python3.12 python3.11; do
    if [[ -n $candidate ]] && "$candidate" -c \
      'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

make_venv() {
  local python stamp
  stamp=$(cat requirements.lock pyproject.toml | sha256sum | cut -d' ' -f1)
  if [[ -x $VENV/bin/python && $(cat "$VENV/.stamp" 2>/dev/null) == "$stamp" ]]; then
    say "$VENV: up to date"
    return
  fi
  python=$(find_python)
  [[ -n $python ]] || die "no Python from 3.11 on with the venv module was found"
  say "$VENV: making it with $("$python" --version)"
  rm -rf "$VENV"
  "$python" -m venv "$VENV"
  retry "$VENV/bin/pip" install -qq --disable-pip-version-check \
    --require-hashes -r requirements.lock
  "$VENV/bin/pip" install -qq --disable-pip-version-check \
    --no-deps --no-build-isolation --no-index -e .
  echo "$stamp" >"$VENV/.stamp"
}

build_guest() {
  [[ -e guest/Makefile ]] || return 0
  say "guest binaries: make -C guest"
  make --no-print-directory -s -C guest
}

main() {
  [[ $EUID -eq 0 ]] || die "needs root: it installs packages, starts Docker Engine, and an edge \
mounts file systems and makes cgroups. Run it as root (sudo make setup)."
  install_packages
  make_venv
  build_guest
  say "$(scripts/docker-engine.sh)"
}

main "$@"
