"""Image archives: which file is which layer, and whether it is what it says."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from schemas.sandbox import ImageConfig
from services.imagesvc.archive import DirectoryMembers, TarMembers, find_image
from services.imagesvc.imageconfig import parse_config
from services.imagesvc.ociimage import LAYERS_MAX, ArchiveImage
from services.imagesvc.spool import Spool
from services.imagesvc.tarlayer import FileRange
from shared.errors import DsecError, InvalidRequest, NotFound, Unsupported
from tests.unit.services.imagesvc.tars import (
    as_range,
    image_config,
    member,
    oci_files,
    saved_image,
    sha256,
    tar_bytes,
)

OCI_TAR = "application/vnd.oci.image.layer.v1.tar"
LAYERS = [tar_bytes([member("a", b"1")]), tar_bytes([member("b", b"2")])]


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with Spool(tmp_path, bytes_max=1 << 20, progress=lambda done: None) as made:
        yield made


def found(data: bytes, spool: Spool, reference: str | None = None) -> ArchiveImage | None:
    source = as_range(data, spool.directory)
    spool.keep_open(source.fd)
    image = find_image(TarMembers.read(source), spool, reference=reference)
    spool.confirm()
    return image


def contents(image: ArchiveImage | None) -> list[bytes]:
    assert image is not None
    return [layer.pread(layer.length, 0) for layer in image.layers]


def oci_tar(files: dict[str, bytes]) -> bytes:
    return tar_bytes([member(name, data) for name, data in files.items()])


def test_docker_save_gives_its_layers_bottom_first_and_its_configuration(spool: Spool) -> None:
    data = saved_image(
        [*LAYERS, LAYERS[0]],
        Env=["PATH=/bin", "EMPTY="], WorkingDir="/w", User="1000:5", Entrypoint=["/e"],
        Cmd=["a", "b"], Volumes={"/data": {}}, Labels={"k": "v"},
    )  # fmt: skip
    image = found(data, spool)
    assert contents(image) == [*LAYERS, LAYERS[0]]
    assert image is not None
    assert image.config == ImageConfig(
        env={"PATH": "/bin", "EMPTY": ""}, workdir="/w", user="1000:5", entrypoint=["/e"],
        cmd=["a", "b"], volumes=["/data"], labels={"k": "v"},
    )  # fmt: skip


def test_a_tar_of_other_files_is_no_image_archive(spool: Spool) -> None:
    assert found(tar_bytes([member("manifest.json", b'{"name": "web app"}')]), spool) is None
    assert found(tar_bytes([member(f"src/{n}", b"") for n in range(400)]), spool) is None


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_oci_layouts_with_compressed_layers_are_read(spool: Spool, pack: object) -> None:
    suffix = "+gzip" if pack is gzip.compress else "+zstd"
    packed = [pack(layer) for layer in LAYERS]  # type: ignore[operator]
    image = found(oci_tar(oci_files(packed, [OCI_TAR + suffix] * 2, plain=LAYERS)), spool)
    assert contents(image) == LAYERS
    assert image is not None
    assert image.config.env == {"A": "b"}


def test_an_oci_layout_in_a_directory_is_read_without_following_links(
    spool: Spool, tmp_path: Path
) -> None:
    layout = tmp_path / "layout"
    for name, data in oci_files(LAYERS, [OCI_TAR] * 2).items():
        (layout / name).parent.mkdir(parents=True, exist_ok=True)
        (layout / name).write_bytes(data)
    members = DirectoryMembers(spool.keep_open(os.open(layout, os.O_RDONLY)), spool)
    assert contents(find_image(members, spool)) == LAYERS
    blob = layout / "blobs/sha256" / sha256(LAYERS[0])
    blob.rename(tmp_path / "elsewhere")
    blob.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidRequest, match="lacks"):
        find_image(members, spool)


def test_a_digest_mismatch_is_refused(spool: Spool) -> None:
    files = oci_files(LAYERS, [OCI_TAR] * 2)
    files[f"blobs/sha256/{sha256(LAYERS[1])}"] = LAYERS[0]
    with pytest.raises(InvalidRequest, match="digest mismatch"):
        found(oci_tar(files), spool)


def test_a_layer_that_its_configuration_does_not_name_is_refused(spool: Spool) -> None:
    config = image_config([LAYERS[1]])
    manifest = [{"Config": "c.json", "Layers": ["l.tar"], "RepoTags": None}]
    data = tar_bytes(
        [member("c.json", config), member("l.tar", LAYERS[0]),
         member("manifest.json", json.dumps(manifest).encode())]
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="digest mismatch"):
        found(data, spool)


def test_nothing_is_unpacked_before_its_digest_was_compared(spool: Spool) -> None:
    files = oci_files(LAYERS, [OCI_TAR] * 2)
    files[f"blobs/sha256/{sha256(LAYERS[1])}"] = gzip.compress(LAYERS[1])[:-9]
    source = as_range(oci_tar(files), spool.directory)
    spool.keep_open(source.fd)
    with pytest.raises(InvalidRequest, match="digest mismatch"):
        find_image(TarMembers.read(source), spool)


def test_an_unknown_media_type_is_refused(spool: Spool) -> None:
    with pytest.raises(Unsupported, match="media type"):
        found(oci_tar(oci_files(LAYERS, [OCI_TAR, "application/x-squashfs"])), spool)


def test_a_missing_layer_is_refused(spool: Spool) -> None:
    manifest = [{"Config": "c.json", "Layers": ["../../etc/passwd"], "RepoTags": None}]
    data = tar_bytes(
        [member("c.json", image_config([])),
         member("manifest.json", json.dumps(manifest).encode())]
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="lacks"):
        found(data, spool)


def test_one_of_several_images_is_chosen_by_its_tag(spool: Spool) -> None:
    config = image_config(LAYERS[:1])
    manifest = [
        {"Config": "c.json", "Layers": ["l.tar"], "RepoTags": [tag]} for tag in ("one:1", "two:2")
    ]
    data = tar_bytes(
        [member("c.json", config), member("l.tar", LAYERS[0]),
         member("manifest.json", json.dumps(manifest).encode())]
    )  # fmt: skip
    assert contents(found(data, spool, "two:2")) == LAYERS[:1]
    with pytest.raises(NotFound):
        found(data, spool, "three:3")
    with pytest.raises(InvalidRequest, match="2 images"):
        found(data, spool)


def test_a_cut_compressed_layer_is_refused(spool: Spool) -> None:
    for pack in (gzip.compress, zstandard.compress):
        whole = pack(os.urandom(10_000))
        for length in (8, len(whole) // 2, len(whole) - 1):
            with pytest.raises(InvalidRequest, match="damaged"):
                spool.plain(as_range(whole[:length], spool.directory))


def test_an_archive_that_unpacks_without_end_is_stopped(spool: Spool) -> None:
    bomb = gzip.compress(bytes(2 << 20))
    with pytest.raises(InvalidRequest, match="more than"):
        spool.plain(as_range(bomb, spool.directory))


@pytest.mark.parametrize(
    "bad", [b"", b"[]", b"{", b'{"config": 5}', b'{"config": {"Env": [1]}}', b'{"os": "windows"}']
)
def test_a_bad_configuration_is_refused(bad: bytes) -> None:
    with pytest.raises(DsecError) as caught:
        parse_config(bad)
    assert caught.value.code == "invalid_request"


def test_plain_files_are_not_copied(spool: Spool) -> None:
    source = FileRange(as_range(b"plain tar", spool.directory).fd, 0, 9)
    assert spool.plain(source) is source


def test_layers_are_counted_before_they_are_hashed(spool: Spool) -> None:
    name = f"blobs/sha256/{sha256(b'another')}"
    entry = {"Config": "c.json", "Layers": [name] * (LAYERS_MAX + 1)}
    data = tar_bytes(
        [member("c.json", image_config([])), member(name, LAYERS[0]),
         member("manifest.json", json.dumps([entry]).encode())]
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="the limit is"):
        found(data, spool)
