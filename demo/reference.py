"""Runs a task's tests in the base image without any sandbox, to learn what to expect.

Owns: a chroot of the base image in private mount, process and network namespaces, the
image itself read-only. Why not on the host: interpreter and pytest must be the ones
the sandboxes have, or the lists differ.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

TEST_TIMEOUT_S = 300

# $1 root file system, $2 workspace, $3 command
_SCRIPT = """
set -e
ip link set lo up
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
mount --bind "$2" "$1/workspace"
mount -t proc proc "$1/proc"
mount -t tmpfs tmpfs "$1/tmp"
chroot "$1" env -i PATH=/usr/bin:/bin HOME=/tmp LANG=C.UTF-8 sh -c "cd /workspace && $3" || true
"""


def run_tests(rootfs: Path, workspace: Path, *, command: str, report: str) -> bytes:
    """Run ``command`` in ``/workspace`` of the image and return the file ``report``,
    an absolute path inside below ``/workspace``. Failing tests are no error here; a
    missing report is (``RuntimeError`` with the output's end). Needs root."""
    argv = [
        "unshare", "--mount", "--pid", "--fork", "--net", "--ipc", "--uts", "--kill-child",
        "sh", "-c", _SCRIPT, "reference", str(rootfs), str(workspace), command,
    ]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TEST_TIMEOUT_S)
    written = workspace / Path(report).relative_to("/workspace")
    if not written.is_file():
        raise RuntimeError(f"the tests wrote no report:\n{(done.stdout + done.stderr)[-3000:]}")
    content = written.read_bytes()
    written.unlink()
    return content
