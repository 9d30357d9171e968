"""What may be imported, checked before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.image import Blob, ImageCreate
from schemas.sandbox import ImageConfig
from services.imagesvc.imageconfig import parse_config
from services.imagesvc.intake import Allowed, import_request
from services.imagesvc.names import RegistryName
from services.imagesvc.sources import (
    BuildSource,
    DockerSource,
    GitSource,
    PathSource,
    RegistrySource,
)
from shared.errors import DsecError, Forbidden, InvalidRequest


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


def test_files_are_what_their_form_says(tmp_path: Path) -> None:
    allowed = Allowed(str(tmp_path), builds=True)

    def source(**fields: Any) -> Any:
        return import_request(create(path=str(tmp_path), **fields), allowed).source

    assert source(form="image", reference="a:1") == PathSource(tmp_path, "a:1", "image")
    assert source(form="git", commit="abc") == GitSource(tmp_path, "abc")
    assert source(form="git") == GitSource(tmp_path)
    built = source(form="dockerfile", dockerfile="sub/File", target="t")
    assert built == BuildSource(tmp_path, "sub/File", "t")
    uploaded = import_request(
        create(upload=Blob(id="0123456789abcdef", size_bytes=1, sha256="0" * 64)), Allowed(),
        uploaded=tmp_path / "up",
    )  # fmt: skip
    assert uploaded.source == PathSource(tmp_path / "up")


def test_options_that_a_source_does_not_have_are_refused(tmp_path: Path) -> None:
    allowed = Allowed(str(tmp_path), builds=True)
    for fields, field in (
        ({"commit": "a"}, "commit"),
        ({"target": "a", "form": "git"}, "target"),
        ({"reference": "a", "form": "tree"}, "reference"),
        ({"form": "dockerfile", "dockerfile": "../x"}, "dockerfile"),
        ({"form": "dockerfile", "dockerfile": "/x"}, "dockerfile"),
    ):
        with pytest.raises(DsecError) as caught:
            import_request(create(path=str(tmp_path), **fields), allowed)
        assert (caught.value.code, caught.value.field) == ("invalid_request", field)
    with pytest.raises(DsecError) as caught:
        import_request(create(docker="a", form="image"), allowed)
    assert caught.value.field == "form"


def test_registries_and_builds_are_the_operators_choice(tmp_path: Path) -> None:
    def registry(registries: str) -> Any:
        asked = create(registry="registry.example:5000/a/b:1")
        return import_request(asked, Allowed(registries=registries)).source

    name = RegistryName("registry.example:5000", "a/b", "1")
    assert registry("other.example, registry.example:5000") == RegistrySource(name)
    assert registry("*") == RegistrySource(name)
    assert registry("http://registry.example:5000") == RegistrySource(name, plain_http=True)
    for closed in ("", "registry.example", "example:5000", "http://registry.example"):
        with pytest.raises(Forbidden) as caught:
            registry(closed)
        assert caught.value.field == "registry"
    for host, plain in (("localhost:5000", True), ("127.0.0.1", True), ("127.example", False)):
        source = import_request(create(registry=f"{host}/a"), Allowed(registries="*")).source
        assert isinstance(source, RegistrySource)
        assert source.plain_http is plain
    with pytest.raises(Forbidden):
        import_request(create(path=str(tmp_path), form="dockerfile"), Allowed(str(tmp_path)))


ZERO: list[dict[str, Any]] = [
    {"env": {"A": "\0"}}, {"env": {"\0": "a"}}, {"workdir": "/\0"}, {"user": "\0"},
    {"entrypoint": ["\0"]}, {"cmd": ["a", "b\0"]}, {"volumes": ["/\0"]}, {"labels": {"a": "\0"}},
]  # fmt: skip


@pytest.mark.parametrize("fields", ZERO)
def test_a_configuration_with_a_zero_byte_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        import_request(create(docker="d", config=ImageConfig(**fields)), Allowed(""))
    assert caught.value.field == "config"


def test_so_is_that_of_an_image() -> None:
    document = {"config": {"Env": ["A=a\0"]}, "rootfs": {"diff_ids": []}}
    with pytest.raises(InvalidRequest) as caught:
        parse_config(msgspec.json.encode(document))
    assert caught.value.field == "archive"
    backslash = {"config": {"Env": ["A=\\u0000"]}}
    assert parse_config(msgspec.json.encode(backslash))[0].env == {"A": "\\u0000"}
