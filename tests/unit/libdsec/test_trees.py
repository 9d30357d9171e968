"""Names from a sandbox stay inside their root; local trees are walked once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libdsec import InvalidRequest, _trees

PARTS = st.lists(st.sampled_from(["a", "b", "..", ".", "", "root"]), max_size=6)


@given(PARTS, st.booleans())
def test_no_name_leads_out(parts: list[str], absolute: bool) -> None:
    path = ("/" if absolute else "") + "/".join(parts)
    try:
        name = _trees.inside("/root", path)
    except InvalidRequest:
        return
    resolved = Path("/root", name).resolve()
    assert resolved.is_relative_to("/root")
    assert resolved != Path("/root")


@pytest.mark.parametrize(
    ("root", "path", "name"),
    [("/w", "/w/a/b", "a/b"), ("w", "w/a", "a"), ("/w/", "/w/a", "a"), ("/", "/a", "a")],
)
def test_names_are_relative(root: str, path: str, name: str) -> None:
    assert _trees.inside(root, path) == name


def test_a_tree_with_loops_ends(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    (tmp_path / "d" / "up").symlink_to("..")
    names = [name for name, _ in _trees.walk(tmp_path)]
    assert names == ["d", "d/f", "d/up"]
    with pytest.raises(InvalidRequest):
        list(_trees.walk(tmp_path / "d" / "f"))
