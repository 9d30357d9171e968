"""Uploads: in order, once, bounded, and gone when they are old."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from schemas.image import Blob, BlobPut
from services.imagesvc.uploads import Uploads
from shared.errors import CapacityExhausted, InvalidRequest, NotFound

ID, OTHER = "0123456789abcdef", "fedcba9876543210"


def uploads(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path / "up", bytes_max=10_000, total_bytes_max=14_000, keep_s=60)


def piece(offset: int, data: bytes, id: str = ID) -> BlobPut:
    return BlobPut(id=id, offset=offset, data=data)


def test_pieces_are_taken_in_order_and_once(tmp_path: Path) -> None:
    made = uploads(tmp_path)
    assert made.put("a/b", piece(0, b"")) == 0
    assert made.put("a/b", piece(0, b"abc")) == 3
    assert made.put("a/b", piece(0, b"abc")) == 3
    assert made.put("a/b", piece(5, b"x")) == 3
    assert made.put("a/b", piece(1, b"bcde")) == 5
    blob = Blob(id=ID, size_bytes=5, sha256=hashlib.sha256(b"abcde").hexdigest())
    assert made.checked("a/b", blob).read_bytes() == b"abcde"
    with pytest.raises(NotFound):
        made.checked("a/c", blob)


def test_uploads_are_bounded(tmp_path: Path) -> None:
    """(T09) One by itself, and all together however little each of them is."""
    made = uploads(tmp_path)
    with pytest.raises(InvalidRequest):
        made.put("a/b", piece(0, bytes(10_001)))
    assert made.put("a/b", piece(0, b"")) == 0
    assert made.put("a/b", piece(0, bytes(100), OTHER)) == 100
    assert made.put("a/b", piece(0, bytes(9000))) == 9000
    with pytest.raises(CapacityExhausted):
        made.put("a/b", piece(9000, bytes(1000)))
    with pytest.raises(CapacityExhausted):
        made.put("c/d", piece(0, b""))
    assert made.put("a/b", piece(0, bytes(9000))) == 9000
    assert made.put("a/b", piece(9000, bytes(900))) == 9900


def test_what_others_hold_counts_and_what_went_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.imagesvc.uploads.SCAN_S", 0.0)
    made, other = uploads(tmp_path), uploads(tmp_path)
    made.put("a/b", piece(0, bytes(10_000)))
    with pytest.raises(CapacityExhausted):
        other.put("a/b", piece(0, bytes(5000), OTHER))
    made.drop("a/b", ID)
    assert other.put("a/b", piece(0, bytes(5000), OTHER)) == 5000


def test_what_is_not_what_was_sent_goes(tmp_path: Path) -> None:
    made = uploads(tmp_path)
    made.put("a/b", piece(0, b"abc"))
    with pytest.raises(InvalidRequest, match="digest mismatch"):
        made.checked("a/b", Blob(id=ID, size_bytes=3, sha256="0" * 64))
    assert list(made.folder.iterdir()) == []


def test_old_uploads_go(tmp_path: Path) -> None:
    """(T09)"""
    made = uploads(tmp_path)
    assert made.sweep() == 0
    made.put("a/b", piece(0, b"abc"))
    made.put("a/b", piece(0, b"abc", OTHER))
    old = next(made.folder.iterdir())
    os.utime(old, (0, 0))
    assert made.sweep() == 1
    assert [path.exists() for path in (old,)] == [False]
    assert len(list(made.folder.iterdir())) == 1
