"""Recipes, differences and unpacking."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.baseimage import apt_sources
from demo.cache import make_once
from demo.sources import Sdist, find_archive, unpack
from demo.tasks import RECIPES, check_counts, diff_trees

pytestmark = pytest.mark.unit

TREES = st.dictionaries(st.text("abc/", min_size=1), st.binary(max_size=3))


@given(old=TREES, new=TREES)
def test_a_difference_turns_old_into_new(old: dict[str, bytes], new: dict[str, bytes]) -> None:
    tree = dict(old)
    for path, data in diff_trees(old, new).items():
        if data is None:
            del tree[path]
        else:
            tree[path] = data
    assert tree == new


def test_no_difference_is_empty() -> None:
    assert diff_trees({"a": b"1"}, {"a": b"1"}) == {}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_counts_may_differ_a_little_but_not_in_kind(recipe) -> None:  # type: ignore[no-untyped-def]
    f2p, p2p = recipe.expected
    check_counts(recipe, f2p, p2p)
    check_counts(recipe, f2p, p2p - 1)
    with pytest.raises(RuntimeError, match=recipe.name):
        check_counts(recipe, 0, p2p)
    with pytest.raises(RuntimeError, match=recipe.name):
        check_counts(recipe, f2p, p2p // 2)
    with pytest.raises(RuntimeError, match=recipe.name):
        check_counts(replace(recipe, expected=(1, 1)), f2p, p2p)


def archive(path: Path, members: dict[str, bytes | str]) -> Path:
    """A tar of files (bytes) and symbolic links (their target)."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def test_unpacking_strips_the_top_directory(tmp_path: Path) -> None:
    unpack(archive(tmp_path / "a.tar.gz", {"p-1/x/y.py": b"1"}), tmp_path / "out")
    assert (tmp_path / "out" / "x" / "y.py").read_bytes() == b"1"


@pytest.mark.parametrize(
    "members",
    [{"../evil": b"1"}, {"/etc/evil": b"1", "p/../../evil": b"2"}, {"p/link": "/etc/passwd"}],
    ids=["parent", "absolute", "link"],
)
def test_unpacking_refuses_what_would_land_outside(
    tmp_path: Path, members: dict[str, bytes | str]
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(tarfile.TarError):
        unpack(archive(inside / "a.tar.gz", members), inside / "out")
    assert not (tmp_path / "evil").exists()


def test_archives_are_found_however_the_project_spells_itself(tmp_path: Path) -> None:
    (tmp_path / "More_Itertools-1.0.tar.gz").touch()
    found = find_archive(tmp_path, Sdist("more-itertools", "1.0", "0"))
    assert found.name == "More_Itertools-1.0.tar.gz"
    with pytest.raises(FileNotFoundError):
        find_archive(tmp_path, Sdist("more-itertools", "1.1", "0"))


def test_a_cache_entry_is_whole_or_absent_and_made_once(tmp_path: Path) -> None:
    entry = tmp_path / "kind" / "entry"

    def fails(part: Path) -> None:
        (part / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_once(entry, fails)
    assert not entry.exists()
    made: list[Path] = []
    for _ in range(2):
        make_once(entry, lambda part: made.append(part))
    assert entry.is_dir()
    assert len(made) == 1
    assert [path.name for path in entry.parent.iterdir() if "part" in path.name] == []


def test_the_distributions_own_source_list_is_taken(tmp_path: Path) -> None:
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    with pytest.raises(RuntimeError, match="no package source"):
        apt_sources(tmp_path)
    (tmp_path / "sources.list").write_text("# moved\n")
    (parts / "other.list").write_text("deb somewhere else main\n")
    with pytest.raises(RuntimeError, match="no package source"):
        apt_sources(tmp_path)
    (parts / "debian.sources").write_text("Types: deb\n")
    assert apt_sources(tmp_path).name == "debian.sources"
