"""Images of a real container engine."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from services.imagesvc.engine import DockerEngine
from services.imagesvc.importer import Importer, ImportResult
from services.imagesvc.layerroot import opened_layer
from services.imagesvc.names import ImageName
from services.imagesvc.ociarchive import write_archive
from services.imagesvc.reading import ImportLimits
from services.imagesvc.sources import BuildSource, DockerSource, ImportRequest, PathSource
from shared.blobs.folder import FolderStore
from shared.errors import InvalidRequest, NotFound, Unavailable
from tests.integration.imagesvc.seen import manifest, mounted
from tests.integration.imagesvc.test_layers import LAYERED
from tests.unit.services.imagesvc.tars import (
    folder,
    hardlink,
    member,
    saved_image,
    symlink,
    tar_bytes,
)

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")


@pytest.fixture
def client() -> Iterator[docker.DockerClient]:
    made = docker.from_env(timeout=120)
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


@pytest.fixture
def base(client: docker.DockerClient) -> Iterator[str]:
    """A local image to build from."""
    name = f"dsec-test-{uuid.uuid4().hex}"
    client.api.import_image_from_data(
        tar_bytes([member("base", b"b")]), repository=name, tag="1"
    )
    yield f"{name}:1"
    client.images.remove(f"{name}:1", force=True)


@pytest.fixture
def context(base: str, tmp_path: Path) -> Path:
    """A build of three stages, of which one lies beside the others; what its ignore file names
    must not get in."""
    made = tmp_path / "context"
    (made / "sub").mkdir(parents=True)
    dockerfile = (
        f"FROM {base} AS beside\nCOPY a /made\nFROM {base} AS first\nCOPY . /all\n"
        "FROM first\nENV A=b\nCOPY a /last\nCOPY --from=beside /made /made\n"
    )
    (made / "sub" / "Build").write_text(dockerfile)
    for name in ("a", "secret", "sub/kept"):
        (made / name).write_text(name)
    (made / ".dockerignore").write_text("# not these\nsecret\nsub\n!sub/kept\n")
    return made


def built(store: FolderStore, path: Path, **fields: str) -> ImportResult:
    importer = Importer(store, engine=DockerEngine())
    try:
        return importer.run_blocking(ImportRequest(BuildSource(path, **fields)))
    finally:
        importer.close()


def above(client: docker.DockerClient, base: str) -> set[str]:
    """What the engine has that was made of ``base``; others make images beside us."""
    parents = {one["Id"]: one["ParentId"] for one in client.api.images(all=True)}
    found = {client.api.inspect_image(base)["Id"]}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def test_a_dockerfile_is_built_and_imported(
    context: Path, base: str, store: FolderStore, client: docker.DockerClient, tmp_path: Path
) -> None:
    before = above(client, base)
    result = built(store, context, dockerfile="sub/Build")
    assert result.config.env["A"] == "b"
    with mounted(store, result.layers) as root:
        seen = manifest(root)
    assert {b"base", b"last", b"all/a", b"all/sub/kept"} <= set(seen)
    assert b"all/secret" not in seen
    packed = tmp_path / "context.tar"
    subprocess.run(["tar", "-C", context, "-cf", packed, "."], check=True)
    first = built(store, packed, dockerfile="sub/Build", target="first")
    with mounted(store, first.layers) as root:
        assert b"last" not in (seen := manifest(root))
    assert b"all/a" in seen and b"all/secret" not in seen
    assert above(client, base) == before, "builds leave no image with the engine"


def test_a_build_takes_nothing_from_an_earlier_one(
    context: Path, base: str, client: docker.DockerClient
) -> None:
    """(S09) The engine's cache is shared by all who build; nothing is taken from it."""
    engine = DockerEngine()
    ids = [
        engine.build(context, dockerfile="sub/Build", target=None, tick=lambda done: None)
        for _ in range(2)
    ]
    layers = [client.images.get(one).history() for one in ids]
    for one in ids:
        engine.remove(one)
    made = [{step["Id"] for step in steps if step["Id"] != "<missing>"} for steps in layers]
    parent = {step["Id"] for step in client.images.get(base).history()}
    assert not (made[0] & made[1]) - parent


def test_a_build_that_fails_says_why_and_leaves_nothing(
    context: Path, base: str, store: FolderStore, client: docker.DockerClient
) -> None:
    before = above(client, base)
    (context / "sub" / "Build").write_text(f"FROM {base}\nLABEL a=b\nCOPY nowhere /x\n")
    with pytest.raises(InvalidRequest) as caught:
        built(store, context, dockerfile="sub/Build")
    assert caught.value.field == "dockerfile"
    assert "nowhere" in caught.value.message
    with pytest.raises(InvalidRequest):
        built(store, context, dockerfile="none")
    assert list(store.list()) == []
    assert above(client, base) == before


def test_the_engine_loads_an_export(
    store: FolderStore, client: docker.DockerClient, tmp_path: Path
) -> None:
    """Deletions, opaque directories and hard links included, as its own export shows."""
    source = tmp_path / "image.tar"
    source.write_bytes(saved_image([tar_bytes(layer) for layer in LAYERED], Cmd=["/x"]))
    importer = Importer(store, limits=ImportLimits(collapse_bytes_max=0))
    made = importer.run_blocking(ImportRequest(PathSource(source)))
    importer.close()
    name = ImageName(f"dsec-test-{uuid.uuid4().hex}", "1")
    archive = tmp_path / "out.tar"
    with archive.open("w+b") as out:
        write_archive(
            out, made.layers, made.config, name=name, tick=lambda done: None,
            opened=lambda digest: opened_layer(store, digest, tmp_path, tick=lambda done: None),
        )  # fmt: skip
    with archive.open("rb") as file:
        client.images.load(file)
    try:
        container = client.containers.create(str(name), labels={"dsec-test": "imagesvc"})
        try:
            exported = b"".join(container.export())
        finally:
            container.remove(force=True)
    finally:
        client.images.remove(str(name), force=True)
    with tarfile.open(fileobj=io.BytesIO(exported)) as tar:
        theirs = {one.name.rstrip("/"): one for one in tar.getmembers()}
    with mounted(store, made.layers) as root:
        ours = manifest(root)
    assert {path.decode() for path in ours} <= set(theirs)
    assert "d/old" not in theirs and "e/x" not in theirs
    assert all(theirs[path.decode()].size in (one.size, 0) for path, one in ours.items())
