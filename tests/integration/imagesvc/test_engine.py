"""Images of a real container engine."""

from __future__ import annotations

import io
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from services.imagesvc.engine import DockerEngine
from services.imagesvc.importer import Importer
from services.imagesvc.sources import DockerSource, ImportRequest, PathSource
from shared.blobs.folder import FolderStore
from shared.errors import NotFound, Unavailable
from tests.integration.imagesvc.seen import manifest, mounted
from tests.unit.services.imagesvc.tars import folder, hardlink, member, symlink, tar_bytes

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")


@pytest.fixture
def client() -> Iterator[docker.DockerClient]:
    made = docker.from_env(timeout=30)
    yield made
    made.close()


@pytest.fixture
def image(client: docker.DockerClient) -> Iterator[str]:
    """Two layers made by the engine itself: the second deletes, replaces and links."""
    name = f"dsec-test-{uuid.uuid4().hex}:1"
    base = tar_bytes(
        [folder("d"), member("d/old", b"1"), member("gone", b"2" * 9000), symlink("l", "gone"),
         member("ping", b"ELF", mode=0o4755, uid=1516583083,
                pax_headers={"SCHILY.xattr.security.capability":
                             CAPABILITY.decode("utf-8", "surrogateescape")})]
    )  # fmt: skip
    client.api.import_image_from_data(base, repository=name.split(":")[0], tag="base")
    parent = name.replace(":1", ":base")
    change = tar_bytes([member("d/new", b"3" * 5000), hardlink("d/linked", "d/new")])
    dockerfile = (
        f"FROM {parent}\nADD change.tar /\nENV A=b PATH=/bin\nWORKDIR /d\nUSER 7:8\n"
        'VOLUME /data\nLABEL k=v\nENTRYPOINT ["/e"]\nCMD ["c", "d"]\n'
    )
    context = tar_bytes([member("Dockerfile", dockerfile.encode()), member("change.tar", change)])
    client.images.build(fileobj=io.BytesIO(context), custom_context=True, tag=name, rm=True)
    yield name
    for tag in (name, parent):
        client.images.remove(tag, force=True)


def test_a_local_image_is_imported_with_its_configuration(image: str, store: FolderStore) -> None:
    importer = Importer(store, engine=DockerEngine())
    result = importer.run_blocking(ImportRequest(DockerSource(image)))
    importer.close()
    assert result.config.env == {"A": "b", "PATH": "/bin"}
    assert (result.config.workdir, result.config.user) == ("/d", "7:8")
    assert (result.config.entrypoint, result.config.cmd) == (["/e"], ["c", "d"])
    assert result.config.volumes == ["/data"]
    assert result.config.labels["k"] == "v"
    with mounted(store, result.layers) as root:
        seen = manifest(root)
    assert {b"d/old", b"d/new", b"gone", b"l", b"ping"} <= set(seen)
    assert seen[b"d/new"].links == (b"d/linked", b"d/new")
    assert seen[b"ping"].mode & 0o7777 == 0o4755
    assert seen[b"ping"].uid == 1516583083
    assert dict(seen[b"ping"].xattrs) == {"security.capability": CAPABILITY}


def test_its_saved_archive_is_the_same_image(
    image: str, store: FolderStore, tmp_path: Path, client: docker.DockerClient
) -> None:
    importer = Importer(store, engine=DockerEngine())
    archive = tmp_path / "saved.tar"
    with open(archive, "wb") as file:
        for piece in client.images.get(image).save(named=True):
            file.write(piece)
    from_engine = importer.run_blocking(ImportRequest(DockerSource(image)))
    from_file = importer.run_blocking(ImportRequest(PathSource(archive, reference=image)))
    importer.close()
    assert from_file == from_engine


def test_an_unknown_image_is_not_found(client: docker.DockerClient, store: FolderStore) -> None:
    importer = Importer(store, engine=DockerEngine())
    with pytest.raises(NotFound) as caught:
        importer.run_blocking(ImportRequest(DockerSource(f"missing-{uuid.uuid4().hex}:1")))
    importer.close()
    assert caught.value.field == "docker"
    assert list(store.list()) == []


def test_an_engine_that_is_not_there_is_unavailable(store: FolderStore, tmp_path: Path) -> None:
    engine = DockerEngine(base_url=f"unix://{tmp_path}/none.sock")
    importer = Importer(store, engine=engine)
    with pytest.raises(Unavailable):
        importer.run_blocking(ImportRequest(DockerSource("x:1")))
    importer.close()


def test_an_engine_image_shows_the_same_files_as_its_container(
    image: str, store: FolderStore, client: docker.DockerClient, tmp_path: Path
) -> None:
    """Compared with the engine's own export of a container made from the image."""
    container = client.containers.create(image, labels={"dsec-test": "imagesvc"})
    exported = tmp_path / "exported"
    exported.mkdir()
    try:
        archive = b"".join(container.export())
    finally:
        container.remove(force=True)
    subprocess.run(
        ["tar", "-C", exported, "--numeric-owner", "-xpf", "-"], input=archive, check=True
    )
    importer = Importer(store, engine=DockerEngine())
    layers = importer.run_blocking(ImportRequest(DockerSource(image))).layers
    importer.close()
    with mounted(store, layers) as root:
        ours = manifest(root)
    theirs = manifest(exported)
    for path, entry in ours.items():
        assert theirs[path].sha256 == entry.sha256, path
        assert theirs[path].mode == entry.mode, path
        assert theirs[path].uid == entry.uid, path
    made_by_engine = {b".dockerenv", b"data", b"dev", b"etc", b"proc", b"sys"}
    extra = {path.split(b"/")[0] for path in set(theirs) - set(ours)}
    assert extra <= made_by_engine
    assert os.path.exists(exported / "d" / "new")
