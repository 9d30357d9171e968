"""BPF LSM programs on containers of the driver: paths are held as what they are, against
names, links and roots, whatever mounts there are, and every denial is told."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.edge.drivers.container.settings import GUEST_BUILD
from services.edge.machine import lsm

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOLD_S = 60.0
GROUP = Path("/sys/fs/cgroup/unified/dsec-test-paths")


class Place:
    """A control group with its protected paths, and what was told of it."""

    def __init__(self, paths: lsm.Paths, folder: Path) -> None:
        self.paths, self.folder = paths, folder
        self.heard: list[lsm.Denial] = []

    def inside(self, text: str) -> str:
        """Shell text of a process in a group below; what it says."""
        below = GROUP / "work"
        below.mkdir(exist_ok=True)
        done = subprocess.run(
            ["sh", "-c", f"echo 0 >{below}/cgroup.procs; {text}"], capture_output=True, text=True,
            cwd=self.folder,
        )  # fmt: skip
        return (done.stdout + done.stderr).strip()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("paths")
    for name in ("tree/below", "hidden", "free"):
        (folder / name).mkdir(parents=True)
    for name in ("tree/below/file", "hidden/answer", "grader", "free/file"):
        (folder / name).write_text("kept\n")
    GROUP.mkdir()
    paths = lsm.Paths(GUEST_BUILD / "bpf" / "files.o")
    assert paths.probe() == "BPF LSM"
    made = Place(paths, folder)
    rules = [
        lsm.Protected(f"{folder}/tree", "files.read_only", lsm.WRITE),
        lsm.Protected(f"{folder}/grader", "files.protected", lsm.WRITE),
        lsm.Protected(f"{folder}/hidden", "files.hidden", lsm.READ | lsm.WRITE),
        lsm.Protected(f"{folder}/missing", "files.hidden", lsm.READ),
    ]
    paths.begin("u1", GROUP, os.getpid(), rules, heard=made.heard.append)
    yield made
    paths.close()
    for pid in (GROUP / "work/cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    (GROUP / "work").rmdir()
    GROUP.rmdir()


WAYS = {
    "echo x >tree/new": "files.read_only", "echo x >tree/below/file": "files.read_only",
    "truncate -s 0 grader": "files.protected", "rm grader": "files.protected",
    "mv grader g": "files.protected", "chmod 0 grader": "files.protected",
    "chown 1 tree/below": "files.read_only", "mkdir tree/new": "files.read_only",
    "ln grader other": "files.protected", "ln -s x tree/link": "files.read_only",
    "echo x >free/y && mv free/y grader": "files.protected",
    "mv free/file tree/below/file": "files.read_only", "rmdir tree/below": "files.read_only",
    "mkfifo tree/f": "files.read_only", "cat hidden/answer": "files.hidden",
    "ls hidden": "files.hidden", "ln -s $PWD/hidden/answer free/l; cat free/l": "files.hidden",
    "cat /proc/self/root$PWD/hidden/answer": "files.hidden",
    "mkdir -p free/m && mount --bind hidden free/m && cat free/m/answer": "files.hidden",
    "python3 -c 'import os; os.chroot(\".\"); open(\"/grader\", \"a\")'": "files.protected",
    "python3 -c 'import os; os.truncate(\"grader\", 0)'": "files.protected",
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
async def test_what_is_protected_holds_against_every_way_and_is_told(
    place: Place, way: str
) -> None:
    place.heard.clear()
    before = place.paths.denied("u1")
    said = place.inside(f"({way}) 2>&1")
    assert "not permitted" in said or "not permitted" in said.lower(), said
    async with asyncio.timeout(TOLD_S):
        while not place.heard:
            await asyncio.sleep(0.05)
    assert WAYS[way] in {one.rule for one in place.heard}
    assert place.paths.denied("u1") > before
    for file in ("grader", "tree/below/file", "hidden/answer"):
        assert (place.folder / file).read_text() == "kept\n"


async def test_what_is_not_protected_and_who_is_elsewhere_is_not_touched(place: Place) -> None:
    place.heard.clear()
    assert place.inside("cat tree/below/file grader; echo x >free/z && cat free/z").split() == [
        "kept", "kept", "x",
    ]  # fmt: skip
    assert (place.folder / "hidden/answer").read_text() == "kept\n"
    assert place.heard == []
