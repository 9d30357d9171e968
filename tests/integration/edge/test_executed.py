"""What the kernel tells of programs that are executed: all of some names, of one control group,
however short they live; what there was no room for is counted."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.edge.drivers.container.settings import GUEST_BUILD
from services.edge.sensors.execs import Exec, Execs
from shared.errors import DsecError
from shared.ids import new
from tests.conformance.harness import until

UNIFIED = Path("/sys/fs/cgroup/unified")
NAME = "dsec-told"
MANY = 600


@pytest_asyncio.fixture
async def execs(tmp_path: Path) -> AsyncIterator[Execs]:
    made = Execs(GUEST_BUILD / "bpf" / "execs.o", [NAME])
    try:
        made.probe()
    except DsecError as err:
        pytest.skip(err.message)
    (tmp_path / NAME).write_text("#!/bin/sh\n")
    (tmp_path / NAME).chmod(0o755)
    yield made
    made.close()


@pytest.fixture
def group() -> Iterator[Path]:
    root = UNIFIED if UNIFIED.is_dir() else UNIFIED.parent
    made = root / f"dsec-test-{new().lower()}"
    (made / "below").mkdir(parents=True)
    yield made
    (made / "below").rmdir()
    made.rmdir()


def run(folder: Path, text: str, group: Path | None = None) -> None:
    joined = f"echo 0 >{group}/below/cgroup.procs && " if group else ""
    subprocess.run(["sh", "-c", joined + text], cwd=folder, check=True)


async def test_what_is_executed_in_a_group_is_told_with_its_arguments(
    execs: Execs, group: Path, tmp_path: Path
) -> None:
    told: list[Exec] = []
    execs.begin("u1", group, told.append)
    await asyncio.to_thread(run, tmp_path, f"./{NAME} a 'b c' ''; true; ./{NAME} d", group)
    await asyncio.to_thread(run, tmp_path, f"./{NAME} elsewhere")
    await until(lambda: len(told) >= 2)
    assert [one.argv for one in told] == [[NAME, "a", "b c", ""], [NAME, "d"]]
    assert all(one.pid > 1 and one.uid == 0 and not one.lost for one in told)
    execs.end("u1")
    await asyncio.to_thread(run, tmp_path, f"./{NAME} after", group)
    execs.begin("u2", group, told.append)
    await asyncio.to_thread(run, tmp_path, f"./{NAME} again", group)
    await until(lambda: len(told) >= 3)
    assert [one.argv[1] for one in told[2:]] == ["again"]


async def test_what_there_was_no_room_for_is_counted(
    execs: Execs, group: Path, tmp_path: Path
) -> None:
    told: list[Exec] = []
    execs.begin("u1", group, told.append)
    run(tmp_path, f"for i in $(seq {MANY}); do ./{NAME}; done", group)  # nobody reads meanwhile
    execs.end("u1")
    lost = sum(one.lost for one in told)
    assert lost and sum(not one.lost for one in told) + lost == MANY


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_closing_leaves_nothing_open(tmp_path: Path, group: Path) -> None:
    made = Execs(GUEST_BUILD / "bpf" / "execs.o", [NAME])
    (tmp_path / NAME).write_text("#!/bin/sh\n")
    (tmp_path / NAME).chmod(0o755)
    counted = []
    for _ in range(3):
        told: list[Exec] = []
        try:
            made.begin("u1", group, told.append)
        except DsecError as err:
            pytest.skip(err.message)
        await asyncio.to_thread(run, tmp_path, f"./{NAME} a", group)
        await until(lambda told=told: told != [])  # type: ignore[misc]
        made.close()
        counted.append(open_files())
    assert counted == [counted[0]] * 3
