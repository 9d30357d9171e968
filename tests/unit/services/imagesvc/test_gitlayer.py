"""Commits that are far larger than the objects they are made of."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from services.imagesvc.gitlayer import rebuild
from shared.errors import InvalidRequest

WHO = {f"GIT_{who}_{what}": "a@example.org" for who in ("AUTHOR", "COMMITTER")
       for what in ("NAME", "EMAIL")}  # fmt: skip


def git(cwd: Path, *arguments: str, given: str | None = None) -> str:
    environment = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, **WHO}
    done = subprocess.run(
        ["git", *arguments], cwd=cwd, env=environment, input=given, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.strip()


def nested(repo: Path, *, depth: int, width: int) -> None:
    """A bundle's worth of ``depth`` trees that stand for ``width ** depth`` files."""
    git(repo, "init", "-q", "-b", "main")
    one = git(repo, "hash-object", "-w", "--stdin", given="x" * 1000)
    entry = f"100644 blob {one}"
    for _ in range(depth):
        listed = "".join(f"{entry}\t{name}\n" for name in range(width))
        entry = f"040000 tree {git(repo, 'mktree', given=listed)}"
    commit = git(repo, "commit-tree", "-m", "all", entry.rpartition(" ")[2])
    git(repo, "update-ref", "refs/heads/main", commit)


@pytest.mark.parametrize(("entries_max", "bytes_max"), [(1000, 2**40), (2**40, 10**7)])
def test_a_commit_of_trees_repeated_is_refused_before_it_is_written(
    entries_max: int, bytes_max: int, tmp_path: Path
) -> None:
    """10 trees of 10: the list alone would take days."""
    nested(tmp_path, depth=10, width=10)
    with pytest.raises(InvalidRequest) as told:
        rebuild(tmp_path, "main", tmp_path / "out", entries_max=entries_max, bytes_max=bytes_max)
    assert told.value.field == "git"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".git"]


def test_a_commit_within_the_limits_is_written(tmp_path: Path) -> None:
    nested(tmp_path, depth=2, width=3)
    rebuild(tmp_path, "main", tmp_path / "out", entries_max=12, bytes_max=20_000)
    assert (tmp_path / "out/2/2").read_text() == "x" * 1000
    with pytest.raises(InvalidRequest):
        rebuild(tmp_path, "main", tmp_path / "more", entries_max=11, bytes_max=20_000)
