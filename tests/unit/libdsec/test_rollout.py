"""Runs of agent loops: what a diary says, where a loop's text comes from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from demo.loops import solve as demo_loop
from libdsec.errors import InternalError, InvalidRequest
from libdsec.rollout import Event, Result, _run
from libdsec.rollout._messages import result_of
from libdsec.rollout._run import Run, _source
from libdsec.rollout.worker import Diary


def events(path: Path) -> list[Event]:
    return [msgspec.json.decode(line, type=Event) for line in path.read_bytes().splitlines()]


def test_a_diary_goes_on_where_whole_lines_end(tmp_path: Path) -> None:
    path = tmp_path / "diary"
    first = Diary(path)
    first.tell("begun", 0, None, False)
    first.tell("result", 0, {"reward": 1.0}, False)
    first.tell("begun", 1, None, False)
    with path.open("ab") as file:
        file.write(b'{"seq":3,"at":1.0,"ki')  # it was killed while it wrote
    again = Diary(path)
    assert again.finished == {0} and not again.over
    again.tell("failed", 1, "SandboxDied: gone", True)
    again.tell("over", -1, None, False)
    assert [(e.seq, e.kind) for e in events(path)] == list(
        enumerate(["begun", "result", "begun", "failed", "over"])
    )
    last = Diary(path)
    assert last.finished == {0, 1} and last.over


def test_results_say_whose_they_are_and_whose_fault() -> None:
    good = Event(4, 0.0, "result", 5, {"reward": 0.5})
    bad = Event(5, 0.0, "failed", 2, "Unavailable: away", True)
    assert result_of(good, 4) == Result(5, 1, 1, {"reward": 0.5})
    assert result_of(bad, 4) == Result(2, 0, 2, None, "Unavailable: away", True)
    assert result_of(Event(6, 0.0, "told", 2, "x"), 4) is None


def test_a_loops_module_is_named_or_its_function_given() -> None:
    path = str(Path(demo_loop.__file__))
    assert _source(f"{path}:solve") == _source(demo_loop.solve)
    assert _source(demo_loop.solve)[1] == "solve"
    for nothing in ("solve", f"{path}:", lambda r: r, 7):
        with pytest.raises(InvalidRequest) as caught:
            _source(nothing)  # type: ignore[arg-type]
        assert caught.value.field == "loop"


class Worker:
    """A worker whose diary is another one at every look; ``ended`` once it is read up."""

    def __init__(self, diaries: list[bytes]) -> None:
        self.files = self
        self.ended = False
        self._diaries: Iterator[bytes] = iter(diaries)
        self._last = b""

    async def read(self, path: str, *, offset: int, length: int, user: str) -> bytes:
        try:
            self._last = next(self._diaries)
        except StopIteration:
            self.ended = True
        return self._last[offset : offset + length]

    async def exec(self, command: str, **_how: Any) -> Any:
        return SimpleNamespace(ok=not self.ended, text="killed")


def followed(diaries: list[bytes]) -> Run:
    async def get(uid: str) -> Any:
        return SimpleNamespace(state="running")

    worker: Any = Worker(diaries)
    worker.uid = "u"
    client: Any = SimpleNamespace(get=get)
    return Run(client, "r", worker, parent="p")


def line(seq: int, kind: Any, data: Any = None) -> bytes:
    return msgspec.json.encode(Event(seq, 0.0, kind, 0, data)) + b"\n"


async def test_half_a_line_that_is_taken_back_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker was killed in the middle of it, and its successor writes another one."""
    monkeypatch.setattr(_run, "LOOK_MIN_S", 0.001)
    monkeypatch.setattr(_run, "READ_BYTES", 64)
    begun, over = line(0, "begun"), line(2, "over")
    told = line(1, "told", "x" * 1000)  # longer than a read
    half, other = begun + line(1, "result", 1)[:30], begun + told
    seen = [event async for event in followed([half, half, other, other + over]).events()]
    assert [(e.seq, e.kind) for e in seen] == [(0, "begun"), (1, "told"), (2, "over")]


async def test_a_worker_that_ended_within_a_line_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_run, "LOOK_MIN_S", 0.001)
    monkeypatch.setattr(_run, "ALIVE_S", 0.002)
    with pytest.raises(InternalError, match="killed"):
        async for _ in followed([line(0, "begun") + b'{"seq":1']).events():
            pass
