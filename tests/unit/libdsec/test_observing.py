"""Which files a patch changes, whatever it holds."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from libdsec.observing import edited_files
from libdsec.verify import PROTECTED

TESTS = ["checks/test_a.py", "ümlaut test.py"]


def seen(patch: bytes) -> list[tuple[str, str]]:
    found = edited_files(patch, tests=TESTS, protected=PROTECTED)
    return [(one.what, one.subject) for one in found]


def git(folder: Path, *arguments: str) -> bytes:
    done = subprocess.run(
        ["git", "-c", "user.email=a@b", "-c", "user.name=a", "-c", "core.quotePath=false",
         *arguments], cwd=folder, capture_output=True, check=True,
    )  # fmt: skip
    return done.stdout


def test_files_of_the_tests_and_protected_ones_are_found_in_gits_own_patch(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", ".")
    for name in ("checks/test_a.py", "ümlaut test.py", "sub/conftest.py", "calc.py", "old.pth"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("one\ntwo\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "base")
    (tmp_path / "checks/test_a.py").write_text("pass\n")
    (tmp_path / "ümlaut test.py").unlink()
    (tmp_path / "sub/conftest.py").write_bytes(b"\0binary")
    (tmp_path / "old.pth").rename(tmp_path / "calc.txt")
    (tmp_path / "calc.py").write_text("--- a/conftest.py\n+++ b/pytest.ini\n@@ -1 +1 @@\n")
    git(tmp_path, "add", "-A")
    patch = git(tmp_path, "diff", "--cached", "--binary", "-M")
    assert sorted(seen(patch)) == [
        ("protected_file_edited", "old.pth"), ("protected_file_edited", "sub/conftest.py"),
        ("test_file_edited", "checks/test_a.py"), ("test_file_edited", "ümlaut test.py"),
    ]  # fmt: skip


@given(st.binary(max_size=400))
def test_any_bytes_are_read(patch: bytes) -> None:
    seen(patch)
    assert seen(b"--- a/calc.py\n+++ b/calc.py\n@@ -1,3 +1,3 @@\n " + patch[:0]) == []
