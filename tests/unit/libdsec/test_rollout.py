"""Runs of agent loops: what a diary says, where a loop's text comes from."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from demo.loops import solve as demo_loop
from libdsec.errors import InvalidRequest
from libdsec.rollout import Event, Result
from libdsec.rollout._messages import result_of
from libdsec.rollout._run import _source
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
