"""A process's streams and this process's, connected.

Owns: bytes out as they come, input in while there is some. The end is the command's
exit, whatever our input does.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

from libdsec import ExecResult, Output, Process, StdinClosed

READ_BYTES = 64 * 1024
PENDING_READS = 4
"""Chunks of input read ahead."""


async def pump(process: Process, *, stdin: bool) -> ExecResult:
    """Connects the streams until the command has ended."""
    feeding = asyncio.create_task(_feed(process)) if stdin else None
    try:
        await asyncio.gather(_drain(process.stdout, 1), _drain(process.stderr, 2))
        return await process.wait()
    except BaseException:
        await asyncio.shield(process.kill())
        raise
    finally:
        if feeding is not None:
            feeding.cancel()


async def _drain(source: Output, fd: int) -> None:
    async for data in source:
        await asyncio.to_thread(write_all, fd, data)


def write_all(fd: int, data: bytes) -> None:
    """Writes all of ``data``."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def _feed(process: Process) -> None:
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes] = asyncio.Queue(PENDING_READS)

    def put(data: bytes) -> None:
        asyncio.run_coroutine_threadsafe(chunks.put(data), loop).result()

    # a daemon: a read that never returns must not keep the process alive
    threading.Thread(target=_read, args=(put,), daemon=True).start()
    try:
        while data := await chunks.get():
            await process.write(data)
        await process.close_stdin()
    except StdinClosed:
        pass  # the command ended first


def _read(put: Callable[[bytes], None]) -> None:
    try:
        while data := os.read(0, READ_BYTES):
            put(data)
        put(b"")
    except (OSError, RuntimeError):
        pass  # no input, or nobody waits for it any more
