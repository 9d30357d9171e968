"""Workspaces from git: the commit and what led to it, nothing later."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from services.imagesvc.importer import Importer
from services.imagesvc.sources import GitSource, ImportRequest
from shared.blobs.folder import FolderStore
from shared.errors import InvalidRequest, NotFound
from tests.integration.imagesvc.seen import mounted


def git(cwd: Path | str, *arguments: str) -> str:
    environment = {
        **os.environ, "HOME": str(cwd), "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_AUTHOR_DATE": "1600000000 +0000", "GIT_COMMITTER_DATE": "1600000000 +0000",
    }  # fmt: skip
    base = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org",
            "-c", "safe.directory=*"]  # fmt: skip
    done = subprocess.run(
        [*base, *arguments], cwd=cwd, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def history(tmp_path: Path) -> tuple[Path, str, str]:
    """A repository with a base commit, a later fix, a tag, a remote, reflogs and a hook."""
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init", "-q", "-b", "trunk")
    for version in ("first", "broken"):
        (repo / "code.py").write_text(version)
        git(repo, "add", "-A")
        git(repo, "commit", "-qm", version)
    base = git(repo, "rev-parse", "HEAD")
    (repo / "code.py").write_text("the reference answer")
    git(repo, "commit", "-qam", "fix")
    fix = git(repo, "rev-parse", "HEAD")
    git(repo, "tag", "-am", "released", "v2")
    git(repo, "remote", "add", "origin", "https://example.org/repo.git")
    git(repo, "reset", "-q", "--hard", base)
    (repo / ".git/hooks/post-checkout").write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\n")
    (repo / ".git/hooks/post-checkout").chmod(0o755)
    return repo, base, fix


def test_a_checkout_has_its_history_and_no_later_object(
    importer: Importer, store: FolderStore, history: tuple[Path, str, str], tmp_path: Path
) -> None:
    """(S02)"""
    repo, base, fix = history
    layers = importer.run_blocking(
        ImportRequest(GitSource(repo, base), kind="workspace", prefix="/workspace")
    ).layers
    work = copied_out(store, layers, tmp_path) / "workspace"
    assert (work / "code.py").read_text() == "broken"
    assert git(work, "rev-parse", "HEAD") == base
    assert git(work, "log", "--all", "--format=%s").split() == ["broken", "first"]
    assert git(work, "status", "--porcelain") == ""
    objects = git(work, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)")
    assert fix not in objects
    assert len(objects.split()) == 6  # two commits, two trees, two files
    assert git(work, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert git(work, "remote") == ""
    assert git(work, "fsck", "--lost-found") == ""
    present = {path.name for path in (work / ".git").iterdir()}
    assert not present & {"logs", "hooks", "FETCH_HEAD", "ORIG_HEAD", "packed-refs"}
    for path in (work / ".git").rglob("*"):
        assert not path.is_file() or b"reference answer" not in path.read_bytes()
    assert not (tmp_path / "hook-ran").exists()


def copied_out(store: FolderStore, layers: list[str], scratch: Path) -> Path:
    """git refuses to work below a detached mount, which has no path."""
    with mounted(store, layers) as root:
        source = f"/proc/{os.getpid()}/fd/{root}/."
        subprocess.run(["cp", "-a", source, scratch / "copy"], check=True)
    return scratch / "copy"


def test_a_commit_that_no_branch_names_is_found(
    importer: Importer, store: FolderStore, history: tuple[Path, str, str]
) -> None:
    repo, _, fix = history
    git(repo, "tag", "-d", "v2")
    layers = importer.run_blocking(ImportRequest(GitSource(repo, fix))).layers
    with mounted(store, layers) as root:
        assert Path(f"/proc/self/fd/{root}/code.py").read_text() == "the reference answer"


def test_the_same_commit_is_the_same_layer(
    importer: Importer, history: tuple[Path, str, str]
) -> None:
    repo, base, _ = history
    digests = {
        importer.run_blocking(ImportRequest(GitSource(repo, commit))).layers[0]
        for commit in (base, base[:10], "trunk", "HEAD")
    }
    assert len(digests) == 1


def test_an_unknown_commit_is_not_found(
    importer: Importer, store: FolderStore, history: tuple[Path, str, str]
) -> None:
    with pytest.raises(NotFound) as caught:
        importer.run_blocking(ImportRequest(GitSource(history[0], "0" * 40)))
    assert caught.value.field == "commit"
    assert list(store.list()) == []


@pytest.mark.parametrize("bad", ["--upload-pack=touch /tmp/x", "", "-x", "a b", "$(id)"])
def test_what_is_no_revision_is_refused(
    importer: Importer, history: tuple[Path, str, str], bad: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        importer.run_blocking(ImportRequest(GitSource(history[0], bad)))
    assert caught.value.field == "commit"


def test_a_directory_that_is_no_repository_is_refused(importer: Importer, tmp_path: Path) -> None:
    with pytest.raises((InvalidRequest, NotFound)):
        importer.run_blocking(ImportRequest(GitSource(tmp_path, "HEAD")))
