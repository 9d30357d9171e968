"""Pushing memory out beside the lowering of a limit: which, once, and only until the end."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from services.edge.machine import kernel, pageout
from services.edge.machine.pageout import CHUNK_BYTES

MAPS = """\
00400000-00500000 r-xp 00000000 fe:00 101 /bin/busybox
10000000-10280000 rw-p 00000000 00:00 0 [heap]
20000000-20001000 rw-p 00000000 00:00 0
30000000-50000000 rw-s 00000000 fe:00 102 /data/a large file
7ff000000000-7ff000001000 r--p 00000000 00:00 0 [vvar]
"""
HANG_S = 60.0


def test_anonymous_memory_is_taken_in_chunks_the_highest_first() -> None:
    assert pageout.chunks(MAPS) == [
        (0x20000000, 0x1000),
        (0x10000000 + 2 * CHUNK_BYTES, CHUNK_BYTES // 2),
        (0x10000000 + CHUNK_BYTES, CHUNK_BYTES),
        (0x10000000, CHUNK_BYTES),
    ]


class Advised:
    """What the kernel was told, by address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts: list[int] = []
        self.until: threading.Event | None = None
        monkeypatch.setattr(kernel, "process_madvise", self.take)

    def take(self, _pidfd: int, start: int, length: int, advice: int) -> int:
        assert advice == kernel.MADV_PAGEOUT and 0 < length <= CHUNK_BYTES
        self.starts.append(start)
        if self.until is not None:
            self.until.set()
        if len(self.starts) % 2:
            raise OSError("one that the kernel does not take")
        return length


def test_threads_share_the_chunks_and_each_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    advised = Advised(monkeypatch)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(b"x\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"x\n"  # from here on its memory stays as it is
        for part in range(3):
            pageout.push_out([child.pid], part=part, of=3, stopped=lambda: False)
        wanted = [s for s, _ in pageout.chunks(Path(f"/proc/{child.pid}/maps").read_text())]
        child.kill()
    assert sorted(advised.starts) == sorted(wanted)
    assert len(wanted) > 1


def test_they_end_with_the_context_and_with_who_stops_them(monkeypatch: pytest.MonkeyPatch) -> None:
    advised = Advised(monkeypatch)
    mine, stop = [os.getpid()] * 100_000, threading.Event()
    advised.until = begun = threading.Event()
    with pageout.pushing(mine, stop):
        assert begun.wait(HANG_S)
    count = len(advised.starts)
    assert not _threads()
    stop.set()
    with pageout.pushing(mine, stop):
        pass
    assert len(advised.starts) == count


def _threads() -> list[Any]:
    return [t for t in threading.enumerate() if t.name == "pageout"]


def test_a_process_that_has_ended_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    advised = Advised(monkeypatch)
    child = subprocess.Popen(["true"])
    child.wait(HANG_S)
    pageout.push_out([child.pid], part=0, of=1, stopped=lambda: False)
    assert advised.starts == []
