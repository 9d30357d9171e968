"""What counts as a change between two looks at a directory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libdsec._workspace import changes
from libdsec.results import FileInfo

FILE = FileInfo(path="/w/f", type="file", size=1, mode=0o644, uid=0, gid=0, mtime=1.0)
FOLDER = replace(FILE, path="/w/d", type="directory", mode=0o755)


def kinds(before: list[FileInfo], after: list[FileInfo]) -> list[tuple[str, str]]:
    found = changes({i.path: i for i in before}, {i.path: i for i in after})
    return [(change.kind, change.path) for change in found]


def test_nothing_happened() -> None:
    assert kinds([FILE, FOLDER], [FILE, FOLDER]) == []


@pytest.mark.parametrize(
    "change", [{"size": 2}, {"mode": 0o600}, {"uid": 1}, {"gid": 1}, {"mtime": 2.0}]
)
def test_any_fact_of_a_file_counts(change: dict[str, float]) -> None:
    assert kinds([FILE], [replace(FILE, **change)]) == [("modified", "/w/f")]  # type: ignore[arg-type]


def test_a_directory_is_not_modified_by_what_happens_in_it() -> None:
    assert kinds([FOLDER], [replace(FOLDER, size=9, mtime=9.0)]) == []
    assert kinds([FOLDER], [replace(FOLDER, mode=0o700)]) == [("modified", "/w/d")]


def test_another_type_under_the_same_name_is_new() -> None:
    assert kinds([FILE], [replace(FILE, type="directory")]) == [("created", "/w/f")]


def test_what_is_gone_comes_first() -> None:
    assert kinds([replace(FILE, path="/w/z")], [FILE]) == [("deleted", "/w/z"), ("created", "/w/f")]
