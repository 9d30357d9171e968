"""Memory of a resumed sandbox, brought back before it is asked for.

Owns: which ranges of its processes are read ahead, in which order, how much of them.
Does not own: when (:mod:`services.edge.drivers.container.pausing`). :func:`plan` is
pure; :func:`bring_back` blocks and is called in threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from services.edge.machine import kernel

CHUNK_BYTES = 4 << 20
"""Of one call: a prefetch that is to end does so within it."""
FILE_BYTES_MAX = 16 << 20
"""Of one mapped file: whoever maps a large one reads little of it."""


class Range(NamedTuple):
    """Of a process's memory, in bytes."""

    start: int
    length: int


def plan(maps: str, *, budget: int) -> list[Range]:
    """The ranges of a process to be read ahead, from the content of its ``maps``:
    the smallest mappings first (stacks and libraries of what runs), then heaps, of
    ``budget`` bytes together."""
    found = sorted(_ranges(maps), key=lambda r: r.length)
    chosen: list[Range] = []
    for piece in found:
        if budget <= 0:
            break
        chosen.append(Range(piece.start, min(piece.length, budget)))
        budget -= piece.length
    return chosen


def _ranges(maps: str) -> Iterator[Range]:
    for line in maps.splitlines():
        span, rights, _, device, _, *name = line.split(None, 5)
        if "r" not in rights or (name and name[0].startswith(("[vvar", "[vdso", "[vsyscall"))):
            continue
        start, end = (int(part, 16) for part in span.split("-"))
        length = end - start
        if device != "00:00":
            length = min(length, FILE_BYTES_MAX)
        yield Range(start, length)


def bring_back(pids: list[int], *, budget: int, stopped: Callable[[], bool]) -> int:
    """Reads ahead for each process until ``stopped``; the bytes that were advised. A
    process that ends meanwhile is left out."""
    done = 0
    for pid in pids:
        if stopped() or done >= budget:
            break
        try:
            done += _bring_back(pid, budget - done, stopped)
        except OSError:  # it ended, or its memory changed under the advice
            continue
    return done


def _bring_back(pid: int, budget: int, stopped: Callable[[], bool]) -> int:
    done = 0
    pidfd = os.pidfd_open(pid)
    try:
        for piece in plan(Path(f"/proc/{pid}/maps").read_text(), budget=budget):
            for at in range(0, piece.length, CHUNK_BYTES):
                if stopped():
                    return done
                length = min(CHUNK_BYTES, piece.length - at)
                try:
                    done += kernel.process_madvise(
                        pidfd, piece.start + at, length, kernel.MADV_WILLNEED
                    )
                except OSError:  # a mapping without pages to read, or one that is gone
                    break
    finally:
        os.close(pidfd)
    return done
