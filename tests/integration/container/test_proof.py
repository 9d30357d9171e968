"""A node whose kernel or file system gets overlay wrong takes no sandboxes, and says why."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.edge.drivers.container import ContainerDriver
from services.edge.layers import proof
from tests.integration.container.harness import ContainerHarness

pytestmark = pytest.mark.docker


@pytest.fixture
def without_attributes(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that keeps no extended attributes."""
    folder = tmp_path / "ram"
    folder.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_overlay_is_right_here_and_the_proof_leaves_nothing(tmp_path: Path) -> None:
    assert proof.prove(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.asyncio(loop_scope="module")
async def test_a_node_whose_file_system_cannot_keep_deletions_says_so(
    harness: ContainerHarness, without_attributes: Path
) -> None:
    """(I01) It reports the reason, and no backend."""
    driver = ContainerDriver(replace(harness.settings, state_dir=without_attributes))
    report = await driver.probe()
    await driver.close()
    assert not report.supported and not report.features
    assert "overlay on this node cannot be trusted" in report.reason
    assert "a name deleted now" in report.reason


def faulty(root: Path, fault: str) -> None:
    """What a kernel with that fault shows of the proof's two layers."""
    proof._base(root)
    os.unlink(root / "gone")
    for name in ("gone.d", "new.d"):
        os.unlink(root / name / "old")
    os.rmdir(root / "gone.d")
    (root / "new.d" / "new").write_text("change")
    if fault == "whiteout":
        os.mknod(root / "gone", stat.S_IFCHR, os.makedev(0, 0))
    elif fault == "opaque":
        (root / "new.d" / "old").write_text("base")
    elif fault == "mark":
        os.setxattr(root / "new.d", proof.OPAQUE, b"y")
    elif fault == "link":
        os.unlink(root / "link")
        (root / "link").write_text("kept")
    elif fault == "content":
        (root / "two").unlink()
        (root / "two").write_text("")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("whiteout", "a deleted name: it is listed"),
        ("opaque", "a replaced directory: it shows what was there before"),
        ("mark", "a replaced directory: its mark shows"),
        ("link", "kinds of entries: a link is listed as something else"),
        ("content", "hard links: one has not its content"),
    ],
)
def test_each_fault_is_told_by_what_it_shows(tmp_path: Path, fault: str, told: str) -> None:
    """(I01)"""
    root, upper = tmp_path / "root", tmp_path / "upper"
    root.mkdir()
    upper.mkdir()
    faulty(root, fault)
    assert told in list(proof.examine(root, upper))
