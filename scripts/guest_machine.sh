#!/bin/sh
# Installs what `make test-guest` needs and is not there: an emulator, and what makes a disk.
set -eu
missing=
for pair in qemu-system-x86_64:qemu-system-x86 mmdebstrap:mmdebstrap mke2fs:e2fsprogs; do
    command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair#*:}"
done
[ -z "$missing" ] && exit 0
echo "installing$missing"
apt-get -o DPkg::Lock::Timeout=600 -qq update
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 -qqy \
    --no-install-recommends install $missing >/dev/null
