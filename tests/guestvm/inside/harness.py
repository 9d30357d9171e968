"""The container driver in the emulated machine. Debian's kernel is older than the mounts that
the driver makes roots of, so here these are made the old way; all else is the driver's own."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.edge.drivers.base import Handle, Layer
from services.edge.drivers.container import shells
from services.edge.layers import proof
from services.edge.layers.mounts import LayerMounts, Upper
from tests.conformance.harness import run
from tests.integration.container.harness import ContainerHarness, container_harness

READY_S = 300.0
SLOW = {
    "pool_size": 1, "pool_max": 2, "engine_s": 300.0, "start_s": 300.0, "agent_s": 300.0,
    "attach_s": 120.0,
}  # fmt: skip
OPEN_TREE, AT_FDCWD, CLONED = 428, -100, 1 | os.O_CLOEXEC


def composed(
    _mounts: LayerMounts, layers: Sequence[Layer], upper: Upper, *,
    above: Sequence[Path] = (), below: Sequence[Path] = (),
) -> int:  # fmt: skip
    """A detached overlay of folders."""
    folders = [*map(str, below), *(layer.meta for layer in layers), *map(str, above)]
    lower = ":".join(reversed(folders))
    options = f"lowerdir={lower},upperdir={upper.upper},workdir={upper.work}"
    at = tempfile.mkdtemp()
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", at], check=True)
    libc = ctypes.CDLL(None, use_errno=True)
    tree: int = libc.syscall(OPEN_TREE, AT_FDCWD, at.encode(), CLONED)
    assert tree >= 0, os.strerror(ctypes.get_errno())
    subprocess.run(["umount", "-l", at], check=True)
    os.rmdir(at)
    return tree


@asynccontextmanager
async def guest_harness(folder: Path, **changes: Any) -> AsyncIterator[ContainerHarness]:
    """A driver of this machine, probed, whose state is in ``folder``."""
    async with asyncio.timeout(READY_S):
        while not Path("/var/run/docker.sock").exists():
            await asyncio.sleep(0.5)
    async with container_harness(folder, **{**SLOW, **changes}) as made:
        made.layer = Layer(digest="sha256:test-folder", meta=str(folder / "busybox"))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(shells, "compose", composed)
            patched.setattr(proof, "prove", lambda _folder: None)  # it tries the new way
            await made.driver.probe()
            yield made


async def say(harness: ContainerHarness, handle: Handle, text: str) -> str:
    ran = await run(harness.driver, handle, text, timeout_s=120)
    return (ran.stdout + ran.stderr).decode(errors="replace").strip()
