"""Ways into git's history are seen in commands; ordinary use and secrets are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.edge.noted import noted


@pytest.mark.parametrize(
    ("command", "form"),
    [
        ("cd /repo && git log --all --oneline | head", "git log --all"),
        ("git -C /repo -c core.pager=cat reflog", "git reflog"),
        ("x=$(git rev-list --all)", "git rev-list --all"),
        ("git fsck --lost-found", "git fsck --lost-found"),
        ("git show origin/main:src/fix.py", "git show origin/…"),
        ("git diff ORIG_HEAD", "git diff ORIG_HEAD"),
        ("git show HEAD@{1}", "git show @{…}"),
        ("git fetch https://user:secret@host/x 'main", "git fetch"),
        ("git cat-file --batch-all-objects --batch-check", "git cat-file --batch-all-objects"),
    ],
)
def test_ways_into_history_are_seen(command: str, form: str) -> None:
    assert noted(None, command) == [form]
    assert noted(["bash", "-lc", command], None) == [form]


@pytest.mark.parametrize(
    "command",
    [
        "git log --oneline -5", "git status", "git show HEAD~1", "git diff main", "git add --all",
        "git commit -am 'log --all'", "digit log --all", "grep -r 'git' --all", "git branch",
        "git checkout -b fix", "echo github/log --all", "git stash",
    ],
)  # fmt: skip
def test_ordinary_use_is_not(command: str) -> None:
    assert noted(None, command) == []


def test_arguments_are_taken_as_they_are() -> None:
    assert noted(["/usr/bin/git", "log", "--all"], None) == ["git log --all"]
    assert noted(["echo", "log", "--all"], None) == []
    both = ["git log --all", "git reflog"]
    assert noted(None, "git log --all; git reflog; git log --all") == both


@given(st.text(max_size=300))
def test_any_text_is_read(text: str) -> None:
    for form in noted(None, text) + noted(["sh", "-c", "git " + text], None):
        assert form.startswith("git ")
        assert len(form) < 60
