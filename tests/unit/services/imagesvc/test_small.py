"""Which sources need not wait behind long imports."""

from __future__ import annotations

from pathlib import Path

from services.imagesvc.sources import DockerSource, PathSource, is_small


def test_only_what_is_seen_to_be_small_is_small(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 10)
    assert is_small(PathSource(tmp_path), 10)
    assert is_small(PathSource(tmp_path / "f"), 10)
    assert not is_small(PathSource(tmp_path), 9)
    assert not is_small(PathSource(tmp_path / "f"), 9)
    assert not is_small(PathSource(tmp_path / "none"), 10)
    assert not is_small(DockerSource("img"), 10)
