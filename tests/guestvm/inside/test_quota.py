"""A project quota of Debian's kernel: what a writable layer may take, whoever writes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT_MB, PROJECT, USER = 10, 42, 1000


def call(*argv: str | Path) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system with project quotas; ``limited`` in it belongs to a project."""
    folder = tmp_path_factory.mktemp("quota")
    for above in (folder, *folder.parents[:2]):
        above.chmod(0o755)
    file, at = folder / "disk", folder / "at"
    file.touch()
    call("truncate", "-s", "200M", file)
    call("mkfs.ext4", "-q", "-O", "project,quota", "-E", "quotatype=prjquota", file)
    at.mkdir()
    call("mount", "-o", "loop,prjquota", file, at)
    (at / "limited").mkdir()
    for folder in (at, at / "limited"):
        folder.chmod(0o777)
    call("chattr", "-p", str(PROJECT), "+P", at / "limited")
    call("setquota", "-P", str(PROJECT), "0", str(LIMIT_MB * 1024), "0", "0", at)
    yield at
    call("umount", at)


def fill(folder: Path, mb: int, *, user: int) -> str:
    argv = ["dd", "if=/dev/zero", f"of={folder}/f", "bs=1M", f"count={mb}"]
    return subprocess.run(argv, capture_output=True, text=True, user=user).stderr


def test_a_project_stops_at_its_limit_and_others_do_not(disk: Path) -> None:
    """On the file system itself, where root may pass its limits."""
    assert "quota exceeded" in fill(disk / "limited", 3 * LIMIT_MB, user=USER)
    assert (disk / "limited/f").stat().st_size <= LIMIT_MB << 20
    assert "exceeded" not in fill(disk, 3 * LIMIT_MB, user=USER)


def test_the_limit_holds_for_an_overlay_on_it(disk: Path) -> None:
    """As which a sandbox has it, root included."""
    (disk / "limited/f").unlink(missing_ok=True)
    for name in ("upper", "work", "merged"):
        (disk / "limited" / name).mkdir()
    lower = disk.parent / "lower"
    lower.mkdir()
    merged = disk / "limited/merged"
    options = f"lowerdir={lower},upperdir={disk}/limited/upper,workdir={disk}/limited/work"
    call("mount", "-t", "overlay", "-o", options, "overlay", merged)
    try:
        assert "quota exceeded" in fill(merged, 3 * LIMIT_MB, user=0)
    finally:
        call("umount", merged)
