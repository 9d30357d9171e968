"""What may be imported, checked before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schemas.image import ImageCreate
from services.imagesvc.intake import Allowed, import_request
from services.imagesvc.sources import DockerSource, PathSource
from shared.errors import DsecError, Forbidden


def create(**fields: Any) -> ImageCreate:
    return ImageCreate(request_id="r", name="x", **fields)


def test_paths_below_an_allowed_folder_are_taken_without_links(tmp_path: Path) -> None:
    (tmp_path / "images" / "deb").mkdir(parents=True)
    (tmp_path / "alias").symlink_to(tmp_path / "images")
    roots = f"/nowhere:{tmp_path}/alias"
    got = import_request(create(path=f"{tmp_path}/images/./deb"), Allowed(roots))
    assert got.source == PathSource(tmp_path / "images" / "deb")


def test_paths_elsewhere_are_forbidden(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "out").symlink_to("/etc")
    (tmp_path / "images-private").mkdir()
    roots = f"{tmp_path}/images"
    for path in ("/etc", f"{roots}/../images-private", f"{roots}/out", f"{roots}-private"):
        with pytest.raises(Forbidden) as caught:
            import_request(create(path=path), Allowed(roots))
        assert caught.value.field == "path"
    with pytest.raises(Forbidden):
        import_request(create(path=roots), Allowed(""))


def test_each_kind_has_its_place() -> None:
    assert import_request(create(docker="d"), Allowed("")).prefix == "/"
    workspace = import_request(create(docker="d", kind="workspace"), Allowed(""))
    assert (workspace.prefix, workspace.source) == ("/workspace", DockerSource("d"))
    placed = import_request(create(docker="d", kind="toolkit", prefix="/opt//tool/"), Allowed(""))
    assert placed.prefix == "/opt/tool"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "path"),
        ({"path": "/a", "docker": "b"}, "path"),
        ({"path": "relative"}, "path"),
        ({"path": "/a\0b"}, "path"),
        ({"docker": ""}, "docker"),
        ({"docker": "-v"}, "docker"),
        ({"docker": "d", "prefix": "/x"}, "prefix"),
        ({"docker": "d", "kind": "workspace", "prefix": "/a/../b"}, "prefix"),
    ],
)
def test_bad_requests_name_their_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(DsecError) as caught:
        import_request(create(**fields), Allowed("/"))
    assert (caught.value.code, caught.value.field) == ("invalid_request", field)
