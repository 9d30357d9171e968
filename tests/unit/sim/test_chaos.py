"""Traces from seeds, commands that note themselves, and the verdict on a run under faults."""

from __future__ import annotations

import math
import subprocess
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from sim.chaos import script, trace, verdict, workload
from sim.chaos.run import Account
from sim.chaos.trace import Step

SHAPE = workload.Shape()
MADE = workload.make(7, shape=SHAPE, scale=0.1)
SMALL = workload.make(1, shape=workload.Shape(batches=1, group_size=2, tasks=["small"]), scale=0.1)


def test_a_seed_is_a_trace_and_a_trace_is_a_file(tmp_path: Path) -> None:
    assert workload.make(7, shape=SHAPE, scale=0.1) == MADE
    assert workload.make(8, shape=SHAPE, scale=0.1) != MADE
    trace.save(MADE, tmp_path / "trace.json")
    assert trace.load(tmp_path / "trace.json") == MADE


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"seed": 1}'])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(ValueError, match="no trace"):
        trace.load(tmp_path / "trace.json")


def test_a_trace_of_another_version_is_refused(tmp_path: Path) -> None:
    trace.save(msgspec.structs.replace(MADE, version=2), tmp_path / "trace.json")
    with pytest.raises(ValueError, match="version 2"):
        trace.load(tmp_path / "trace.json")


def test_the_load_is_that_of_coding_agents() -> None:
    shape = workload.Shape(batches=40)
    steps = [s for r in workload.make(3, shape=shape, scale=1.0).rollouts for s in r.steps]
    calls = sorted(len(r.steps) for r in workload.make(3, shape=shape, scale=1.0).rollouts)
    assert calls[0] >= 5 and calls[-1] <= 200 and 30 < calls[len(calls) // 2] < 50
    thinks = sorted(s.think_s for s in steps)
    assert thinks[0] >= 0.9 and thinks[-1] <= 140 and 2.8 < thinks[len(thinks) // 2] < 3.6
    kinds = Counter(s.kind for s in steps)
    for kind, share in workload.KINDS.items():
        assert math.isclose(kinds[kind] / len(steps), share, abs_tol=0.02), kind
    works = Counter(s.work for s in steps if s.kind == "exec")
    for work, share in workload.RARE.items():
        assert math.isclose(works[work] / kinds["exec"], share, abs_tol=0.006), work
    long = [s for s in steps if s.seconds > workload.LONG_S]
    assert 0.05 < sum(s.drop for s in long) / len(long) < 0.15
    assert not any(s.drop for s in steps if s.seconds <= workload.LONG_S)


def test_what_takes_all_there_is_is_alone() -> None:
    shape = workload.Shape(batches=60)
    seen = 0
    for rollout in workload.make(5, shape=shape, scale=0.1).rollouts:
        for before, step in zip(rollout.steps, rollout.steps[1:], strict=False):
            if step.work in workload.ALONE:
                seen += 1
                assert not before.overlap and not step.overlap
        assert not rollout.steps[-1].overlap
    assert seen


def test_every_process_is_killed_once_and_three_tenths_of_the_trainers() -> None:
    faults = MADE.faults
    assert sorted(k.target for k in faults.processes) == sorted(workload.TARGETS)
    assert all(0 < kill.share < 1 for kill in faults.processes)
    assert len(faults.trainers) == 3 and len({k.batch for k in faults.trainers}) == 3
    steps = {batch.name: batch.steps for batch in MADE.batches}
    assert all(0 < kill.step < steps[kill.batch] for kill in faults.trainers)
    assert len(faults.pauses) == 1 and faults.pauses[0].batch not in {
        kill.batch for kill in faults.trainers
    }


def test_a_command_notes_its_number_before_it_works(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(script, "DIARY", str(tmp_path / "steps"))
    monkeypatch.setattr(script, "SESSION_DIARY", str(tmp_path / "session"))
    lines = [
        script.command(Step(3, "exec", work="light", size=7)),
        script.command(Step(4, "session", work="python", seconds=0.01, size=1, memory_mb=1)),
        script.command(Step(5, "exec", work="binary", size=2)),
    ]
    outputs = [subprocess.check_output(["sh", "-c", line]) for line in lines]
    assert outputs == [b"x" * 7, b"x", b"xx\xff\xfe\x80"]
    assert (tmp_path / "steps").read_text().split() == ["3", "4", "5"]
    assert (tmp_path / "session").read_text().split() == ["1"]


def finished(made: trace.Trace, **changes: object) -> Account:
    account = Account()
    for rollout in made.rollouts:
        facts = {"name": rollout.name, "reward": 1.0, "missing": [], "repeated": [],
                 "session_kept": True, "commands": 1}  # fmt: skip
        account.note({"event": "rollout", **facts, **changes})
        account.note({"event": "step", "name": rollout.name, "step": 0, "kind": "exec",
                      "ms": 3.0, "over_ms": 1.0, "digest": "ended/output"})  # fmt: skip
    return account


ALL = [f"killed {target}" for target in workload.TARGETS]
HAPPENED = [*ALL, "job paused", "job resumed", "trainer killed"]


def failing(peace: Account, faulted: Account, **facts: list[str]) -> list[str]:
    given = {"happened": HAPPENED, "left": [], **facts}
    return [c.name for c in verdict.checks(SMALL, peace, faulted, **given) if not c.ok]


def test_a_run_that_is_as_it_must_be_passes() -> None:
    assert failing(finished(SMALL), finished(SMALL)) == []


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"repeated": [2]}, "every command ran once"),
        ({"missing": [2]}, "every command ran once"),
        ({"session_kept": False}, "sessions kept their state"),
        ({"reward": 0.0}, "rewards are those of the run in peace"),
        ({"reward": None}, "no rollout was lost"),
    ],
)
def test_what_does_not_hold_is_said(changes: dict[str, object], check: str) -> None:
    assert check in failing(finished(SMALL), finished(SMALL, **changes))


def test_lost_rollouts_leaks_and_faults_that_never_came_are_said() -> None:
    faulted = finished(SMALL)
    name = SMALL.rollouts[0].name
    del faulted.rollouts[name]
    faulted.note({"event": "lost", "name": name, "error": "Unavailable: away"})
    found = failing(finished(SMALL), faulted, left=["row 1 running"], happened=HAPPENED[1:])
    assert {"no rollout was lost", "nothing is left behind", "every fault happened"} <= set(found)


def test_results_are_compared_with_the_first_answer_and_with_the_run_in_peace() -> None:
    faulted = finished(SMALL)
    again = {"event": "step", "name": SMALL.rollouts[0].name, "step": 0, "kind": "exec",
             "ms": 1.0, "over_ms": 1.0}  # fmt: skip
    faulted.note({**again, "digest": "ended/output"})
    assert failing(finished(SMALL), faulted) == []
    faulted.note({**again, "digest": "ended"})  # its output was not kept, and it says so
    assert failing(finished(SMALL), faulted) == []
    faulted.note({**again, "digest": "ended/other"})
    assert failing(finished(SMALL), faulted) == ["no result changed when it was asked for again"]
    other = finished(SMALL)
    other.digests[SMALL.rollouts[0].name, 0] = "killed/output"
    assert failing(finished(SMALL), other) == ["results are those of the run in peace"]
    assert verdict.figures(SMALL, faulted)["steps_repeated"] == 3
