"""What ends the sandboxes of a local system that was killed.

Owns: waiting for the system's death, and calling the edges' ``clear`` then. Does not
own: what they remove. A process of its own, in a session of its own, because a killed
system cannot tidy up. It holds the read end of a pipe whose write end the system has:
the kernel closes that with its owner, however it dies. A system that ends in order
writes ``DONE`` first.

Imports nothing heavy: it idles for as long as the system runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

DONE = b"done"
CLEARING = "clearing"
"""What the lock's file says while a dead system is tidied up after."""
LOCK_S, LOCK_LOOK_S = 5.0, 0.02
"""The kernel may close a dead system's pipe a moment before it lets go of the lock."""
CLEAR_S = 120.0
"""Longest work on one node."""


def start(plan: dict[str, Any], *, log: Path) -> subprocess.Popen[bytes]:
    """Starts the keeper of this process. ``plan``: ``lock``, the file that the system
    holds, ``cwd``, and ``edges``, the environment of each. It goes through the pipe:
    environments hold keys."""
    with log.open("ab") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "services.localkeeper"], stdin=subprocess.PIPE,
            stdout=output, stderr=output, cwd=plan["cwd"], start_new_session=True,
        )  # fmt: skip
    assert keeper.stdin is not None
    keeper.stdin.write(json.dumps(plan).encode() + b"\n")
    keeper.stdin.flush()
    return keeper


def end(keeper: subprocess.Popen[bytes], timeout_s: float = 5.0) -> None:
    """Ends it where there is nothing to do."""
    assert keeper.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        keeper.stdin.write(DONE)
        keeper.stdin.close()
    try:
        keeper.wait(timeout_s)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()


def main() -> None:
    """Waits, and tidies up where it must."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with its system, not before it
    plan = json.loads(sys.stdin.buffer.readline())
    if sys.stdin.buffer.read() == DONE:
        return
    held = _lock(Path(plan["lock"]))
    if held is None:
        return  # the system was started again: its edges have found what was left
    with held:
        for node, env in plan["edges"].items():
            _clear(node, env, plan["cwd"])
        held.truncate(0)


def _lock(path: Path) -> IO[str] | None:
    file = path.open("r+")
    end = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > end:
                file.close()
                return None
            time.sleep(LOCK_LOOK_S)
    file.write(CLEARING)
    file.flush()
    return file


def _clear(node: str, env: dict[str, str], cwd: str) -> None:
    began = time.monotonic()
    try:
        code = subprocess.run(
            [sys.executable, "-m", "services.edge", "clear"], env=env, cwd=cwd, check=False,
            stdin=subprocess.DEVNULL, timeout=CLEAR_S,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        code = -1
    print(f"{node}: cleared with {code} in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    os.umask(0o077)
    main()
