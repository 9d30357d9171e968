"""Memory of frozen processes, pushed out to swap beside the lowering of their limit.

Owns: which ranges, in which order, by how many threads. Does not own: when, and what
cannot be had in this way (:mod:`services.edge.machine.reclaim`).

A limit is lowered by one thread, which compresses page by page; a swap device of memory
compresses on every core that asks. So a few threads push pages out by address, from the
other end than the kernel's list of old ones. Blocking; called in threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from services.edge.machine import kernel

THREADS = min(2, os.cpu_count() or 1)
CHUNK_BYTES = 1 << 20
"""Of one call: a thread that is to end does so within it."""
NO_DEVICE = "00:00"


def chunks(maps: str) -> list[tuple[int, int]]:
    """Addresses and lengths of a process's anonymous memory, from the content of its
    ``maps``, the highest first."""
    return sorted(_chunks(maps), reverse=True)


def _chunks(maps: str) -> Iterator[tuple[int, int]]:
    for line in maps.splitlines():
        span, rights, _, device, _, *name = line.split(None, 5)
        if "w" not in rights or device != NO_DEVICE or (name and name[0].startswith("[v")):
            continue
        start, end = (int(part, 16) for part in span.split("-"))
        for at in range(start, end, CHUNK_BYTES):
            yield at, min(CHUNK_BYTES, end - at)


def push_out(pids: list[int], *, part: int, of: int, stopped: Callable[[], bool]) -> None:
    """Pushes out every ``of``-th chunk of each process, from number ``part`` on. What is
    shared with other processes stays, and so does a process that has ended."""
    for pid in pids:
        if stopped():
            return
        try:
            _push_out(pid, part, of, stopped)
        except OSError:
            continue


def _push_out(pid: int, part: int, of: int, stopped: Callable[[], bool]) -> None:
    with ExitStack() as stack:
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        for start, length in chunks(Path(f"/proc/{pid}/maps").read_text())[part::of]:
            if stopped():
                return
            try:
                kernel.process_madvise(pidfd, start, length, kernel.MADV_PAGEOUT)
            except OSError:  # a mapping that the kernel does not take
                continue


def pushing(pids: list[int], stop: threading.Event) -> AbstractContextManager[object]:
    """Threads that push out until ``stop``, or the context, ends: then they have ended."""
    stack = ExitStack()
    done = threading.Event()

    def stopped() -> bool:
        return done.is_set() or stop.is_set()

    for part in range(THREADS):
        thread = threading.Thread(
            target=push_out, args=(pids,), kwargs={"part": part, "of": THREADS, "stopped": stopped},
            name="pageout", daemon=True,
        )  # fmt: skip
        thread.start()
        stack.callback(thread.join)
    stack.callback(done.set)  # the last one in is the first one out
    return stack
