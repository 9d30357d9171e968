"""Ways into git's history are seen in commands; ordinary use and secrets are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.edge.reports.noted import FORMS, form_of, noted


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
        ("git rev-list --not HEAD --not --all", "git rev-list --all"),
        ("python3 -m pip download --no-deps task==2.0", "pip download"),
        ("pip3 index versions task", "pip index versions"),
        ("npm view task versions", "npm view"), ("npm --json pack task@next", "npm pack"),
        ("GOPROXY=https://user:secret@p go mod download -x a.test/task@latest",
         "go mod download …@…"),
        ("go list -m -versions a.test/task", "go list -m -versions"),
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
        "git reflog expire --all", "git rev-list --objects --stdin --not --all --quiet",
        "git pack-refs --all --prune", "pip install -r requirements.txt", "pip index", "npm pack",
        "npm install left-pad", "npm pack ./here", "go mod download", "go mod tidy",
        "go list -m all", "go get a.test/x@v1", "pip list",
    ],
)  # fmt: skip
def test_ordinary_use_is_not(command: str) -> None:
    assert noted(None, command) == []


def test_arguments_are_taken_as_they_are() -> None:
    assert noted(["/usr/bin/git", "log", "--all"], None) == ["git log --all"]
    assert noted(["echo", "log", "--all"], None) == []
    both = ["git log --all", "git reflog"]
    assert noted(None, "git log --all; git reflog; git log --all") == both


def test_what_a_program_was_executed_with_is_taken_word_by_word() -> None:
    assert form_of(["git", "log", "--all"]) == "git log --all"
    assert form_of(["git", "commit", "-m", "; git log --all"]) is None
    assert form_of(["cat", "log", "--all"]) is None
    assert form_of([]) is None and form_of(["git"]) is None


@given(st.text(max_size=300))
def test_any_text_is_read(text: str) -> None:
    for form in noted(None, text) + noted(["sh", "-c", "git " + text], None):
        assert form.partition(" ")[0] in FORMS
        assert len(form) < 60
