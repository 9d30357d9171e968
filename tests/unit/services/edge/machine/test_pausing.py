"""Decisions and small parts of pausing: no kernel, no sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.edge.machine import prefetch, reclaim, swapspace
from services.edge.machine.cgroups import Groups, Limits
from services.edge.machine.swapspace import SwapSpace
from services.edge.sandbox.activity import Activity
from services.edge.sandbox.pauses import Asks
from services.edge.sandbox.runclock import RunClock
from shared.clock import FakeClock
from shared.errors import Conflict, Unavailable

MAPS = """\
00400000-00500000 r-xp 00000000 fe:00 101 /bin/busybox
10000000-14000000 rw-p 00000000 00:00 0 [heap]
20000000-20001000 rw-p 00000000 00:00 0
30000000-50000000 r--s 00000000 fe:00 102 /data/a large file
60000000-60001000 ---p 00000000 00:00 0
7ffd0000-7ffd4000 r--p 00000000 00:00 0 [vvar]
7ffd4000-7ffd6000 r-xp 00000000 00:00 0 [vdso]
"""


def test_small_mappings_are_read_ahead_first_and_large_files_in_part() -> None:
    ranges = prefetch.plan(MAPS, budget=1 << 30)
    assert [r.start for r in ranges] == [0x20000000, 0x400000, 0x30000000, 0x10000000]
    assert ranges[2].length == prefetch.FILE_BYTES_MAX


@given(st.integers(0, 1 << 28))
def test_no_more_is_read_ahead_than_its_budget(budget: int) -> None:
    assert sum(r.length for r in prefetch.plan(MAPS, budget=budget)) <= budget


@given(st.integers(0, 1 << 40), st.integers(0, 20))
def test_reclaim_goes_in_bounded_steps_down_to_its_floor(used: int, stalls: int) -> None:
    step = reclaim.next_step(used, stalls=stalls)
    if step is None:
        assert used <= reclaim.FLOOR_BYTES or stalls >= reclaim.STALLS_MAX
    else:
        assert 0 < step <= reclaim.STEP_BYTES and used - step >= reclaim.FLOOR_BYTES


def v2_group(folder: Path, used: int) -> tuple[Groups, Path]:
    work = folder / "work"
    work.mkdir()
    (work / "memory.current").write_text(str(used))
    (work / "memory.reclaim").write_text("")
    (work / "memory.swap.max").write_text("0")
    return Groups({}, str(folder)), work


def test_v2_swaps_only_while_it_reclaims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, work = v2_group(tmp_path, 64 << 20)
    asked = []

    def kernel(work: Path, used: int, step: int, *, v1: bool) -> None:
        asked.append((step, (work / "memory.swap.max").read_text()))
        (work / "memory.current").write_text(str(used - step))

    monkeypatch.setattr(reclaim, "_step", kernel)
    limits = Limits(memory_mb=128)
    done = reclaim.give_back(groups, limits, stop=threading.Event())
    assert (done.before, done.after) == (64 << 20, reclaim.FLOOR_BYTES)
    assert {swap for _, swap in asked} == {"max"}
    assert (work / "memory.swap.max").read_text() == "0"
    reclaim.settle(groups, Limits())
    assert (work / "memory.swap.max").read_text() == "max"  # as the kernel made it


def test_a_group_that_gives_nothing_is_left_after_a_few_steps(tmp_path: Path) -> None:
    groups, work = v2_group(tmp_path, 64 << 20)
    stop = threading.Event()
    stop.set()
    assert reclaim.give_back(groups, Limits(memory_mb=1), stop=stop).before == 64 << 20
    assert (work / "memory.reclaim").read_text() == ""
    reclaim.give_back(groups, Limits(memory_mb=1), stop=threading.Event())
    assert (work / "memory.reclaim").read_text() == f"{reclaim.STEP_BYTES} swappiness=max"


def test_lines_of_swap_are_read() -> None:
    text = (
        "Filename\tType\tSize\tUsed\tPriority\n"
        "/dev/zram1 partition 1024 4 100\n/var/a\\040b/swap file 8 0 -2\n"
    )
    zram, file = swapspace.entries(text)
    assert (zram.path, zram.size, zram.used) == ("/dev/zram1", 1 << 20, 4096)
    assert file.path == "/var/a b/swap"


def test_swap_that_cannot_be_removed_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one in its place would leave it to nobody."""

    def busy(_path: str) -> None:
        raise OSError("out of memory")

    made: list[str] = []
    note = json.dumps({"mode": "file", "path": "/var/swap"})
    (tmp_path / swapspace.NOTE).write_text(note)
    monkeypatch.setattr(swapspace, "_active", lambda _path: True)
    monkeypatch.setattr(swapspace.kernel, "swapoff", busy)
    monkeypatch.setattr(SwapSpace, "_make", lambda _self: made.append("another"))
    SwapSpace(tmp_path, "zram", 16).open()
    assert (made, (tmp_path / swapspace.NOTE).read_text()) == ([], note)


MAKES = """
import sys
from pathlib import Path
from services.edge.machine import swapspace
swapspace.CONTROL = Path(sys.argv[1])
swapspace.SwapSpace(Path(sys.argv[2]), "zram", 16).open()
"""


def test_a_device_made_while_the_edge_is_killed_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next edge waits for the note, so that it makes no second one."""
    control, folder = tmp_path / "control", tmp_path / "state"
    control.mkdir()
    folder.mkdir()
    os.mkfifo(control / "hot_add")
    argv = [sys.executable, "-c", MAKES, str(control), str(folder)]
    edge = subprocess.Popen(argv, cwd=Path(__file__).parents[5])
    with (control / "hot_add").open("w") as kernel:  # it is being asked for one
        edge.kill()
        assert edge.wait() == -signal.SIGKILL
        space = SwapSpace(folder, "zram", 16)
        seen: list[dict[str, str]] = []
        monkeypatch.setattr(space, "_remove", lambda made: bool(seen.append(made)))
        following = threading.Thread(target=space.open)
        following.start()
        following.join(0.2)
        assert following.is_alive(), "it waits"
        kernel.write("7071\n")
    following.join(60)
    assert seen == [{"mode": "zram", "path": "/dev/zram7071"}]
    assert json.loads((folder / swapspace.NOTE).read_text()) == seen[0]


def test_a_device_that_cannot_be_noted_is_removed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapspace, "CONTROL", tmp_path)
    (tmp_path / "hot_add").write_text("7071\n")
    folder = tmp_path / "state"
    (folder / f"{swapspace.NOTE}.part").mkdir(parents=True)
    state = SwapSpace(folder, "zram", 16).open()
    assert not state.usable and "zram" in state.reason
    assert (tmp_path / "hot_remove").read_text() == "7071\n"


def test_the_clock_of_a_sandbox_stands_still_with_it() -> None:
    async def scenario() -> None:
        clock = FakeClock()
        run = RunClock(clock.monotonic)
        activity = Activity(run)
        clock.advance(3.0)
        run.stop()
        run.stop()
        clock.advance(100.0)
        assert (activity.idle_s, run.stood_s(), run.runs) == (3.0, 100.0, False)
        run.go()
        run.go()
        clock.advance(2.0)
        assert (activity.idle_s, run.stood_s(), run.runs) == (5.0, 100.0, True)
        activity.enter("op", lambda error: None)
        clock.advance(50.0)
        assert (activity.idle_s, activity.count) == (0.0, 1)
        activity.leave("op")
        clock.advance(1.0)
        assert activity.idle_s == 1.0

    asyncio.run(scenario())


async def test_a_limit_counts_what_the_sandbox_runs() -> None:
    run = RunClock(asyncio.get_running_loop().time)

    async def limited() -> bool:
        try:
            async with run.timeout(2.0):
                await asyncio.sleep(300)
        except TimeoutError:
            return True
        return False

    first = asyncio.ensure_future(limited())
    await asyncio.sleep(0.05)
    run.stop()
    second = asyncio.ensure_future(limited())
    await asyncio.sleep(2.2)
    assert not first.done() and not second.done()
    run.go()
    assert await asyncio.wait_for(first, 60) and await asyncio.wait_for(second, 60)


async def test_all_who_ask_share_one_resume_and_its_failure() -> None:
    orders: list[str] = []
    asks = Asks(orders.append)
    asked = [asks.ask("wake") for _ in range(5)]
    assert orders == ["wake"]
    asks.done("wake", Unavailable("not today"))
    for future in asked:
        with pytest.raises(Unavailable, match="cannot be resumed: not today"):
            await future
    again = asks.ask("wake")
    assert orders == ["wake", "wake"]
    asks.done("wake", None)
    await again
    asks.done("wake", None)  # nobody asked: nothing happens


async def test_a_pause_and_a_resume_are_asked_for_apart() -> None:
    orders: list[str] = []
    asks = Asks(orders.append)
    halt, go = asks.ask("halt"), asks.ask("go")
    asks.done("pause", None)  # somebody else's
    asks.done("go", None)
    assert go.done() and not halt.done()
    asks.done("halt", Conflict("it is the failure itself"))
    with pytest.raises(Conflict, match="the failure itself"):
        await halt
    assert orders == ["halt", "go"]
