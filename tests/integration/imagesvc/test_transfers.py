"""Uploads, tags and exports of a running imagesvc."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from devstack import Infra
from schemas.image import (
    BLOB_CHUNK_BYTES,
    Blob,
    BlobGet,
    BlobPiece,
    BlobPut,
    BlobState,
    ImageExport,
    ImageReply,
)
from schemas.sandbox import ImageConfig
from schemas.subjects import blob
from services.imagesvc.app import App
from shared import ids
from shared.errors import DsecError, NotFound, Unavailable
from tests.integration.imagesvc.conftest import fresh_stack
from tests.integration.imagesvc.service import PROJECT, Stack
from tests.unit.services.imagesvc.tars import member, oci_files, tar_bytes

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
ME = "p"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(
    infra: Infra, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """One for all tests here: each has names of its own."""
    async with fresh_stack(infra, tmp_path_factory.mktemp("stack")) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(stack: Stack) -> AsyncIterator[App]:
    made = App(stack.settings())
    await made.start()
    yield made
    await made.close()


async def put(stack: Stack, id: str, offset: int, data: bytes, who: str = ME) -> int:
    piece = BlobPut(id=id, offset=offset, data=data)
    subject = blob(PROJECT, "put", who)
    return (await stack.ask_subject(subject, piece, BlobState)).size_bytes


async def upload(stack: Stack, data: bytes, who: str = ME) -> Blob:
    id = ids.new()
    for at in range(0, len(data), BLOB_CHUNK_BYTES):
        await put(stack, id, at, data[at : at + BLOB_CHUNK_BYTES], who)
    return Blob(id=id, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def waiting(app: App) -> list[Path]:
    folder = app.uploads.folder
    return list(folder.iterdir()) if folder.exists() else []


async def export(stack: Stack, *names: str) -> Blob:
    while True:
        query = ImageExport(names=list(names), projects=[PROJECT])
        reply = await stack.question("export", query, ImageReply)
        if reply.export is not None:
            return reply.export
        await asyncio.sleep(0.02)


async def fetched(stack: Stack, wanted: Blob, project: str = PROJECT) -> bytes:
    data = b""
    while len(data) < wanted.size_bytes:
        ask = BlobGet(id=wanted.id, offset=len(data), length=BLOB_CHUNK_BYTES)
        piece = await stack.ask_subject(blob(project, "get", ME), ask, BlobPiece)
        data += piece.data
    return data


async def test_what_is_handed_over_is_imported_and_gone(stack: Stack, app: App) -> None:
    data = tar_bytes([member("big", os.urandom(2 << 20)), member("a", b"1")])
    sent = await upload(stack, data)
    made = await stack.create("t0-up:1", upload=sent)
    assert made.error is None
    path = stack.folder / "same.tar"
    path.write_bytes(data)
    there = await stack.create("t0-here:1", path=str(path))
    assert made.image is not None and there.image is not None
    assert made.image.layers == there.image.layers
    assert waiting(app) == []


async def test_an_upload_goes_on_where_it_was(stack: Stack, app: App) -> None:
    data = tar_bytes([member("a", b"x" * 9000)])
    id = ids.new()
    assert await put(stack, id, 0, data[:4000]) == 4000
    assert await put(stack, id, 0, b"") == 4000, "asked"
    assert await put(stack, id, 0, data[:4000]) == 4000, "repeated"
    assert await put(stack, id, 5000, data[5000:]) == 4000, "a gap"
    assert await put(stack, id, 3000, data[3000:]) == len(data), "overlapping"
    sent = Blob(id=id, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    assert (await stack.create("t1-up:1", upload=sent)).error is None


async def test_wrong_and_foreign_uploads_are_refused(stack: Stack, app: App) -> None:
    """(S09) One principal's upload is not another's input."""
    data = tar_bytes([member("a", b"1")])
    sent = await upload(stack, data, "other")
    foreign_id = sent.id
    foreign = await stack.create("t2-up:1", upload=sent)
    assert foreign.error is not None
    assert (foreign.error.code, foreign.error.field) == ("not_found", "upload")
    sent = await upload(stack, data)
    wrong = Blob(id=sent.id, size_bytes=sent.size_bytes, sha256="0" * 64)
    damaged = await stack.create("t2-up:1", upload=wrong)
    assert damaged.error is not None
    assert (damaged.error.code, damaged.error.field) == ("invalid_request", "upload")
    assert "digest mismatch" in damaged.error.message
    assert len(waiting(app)) == 1, "the foreign one"
    await asyncio.to_thread(app.uploads.drop, f"{PROJECT}/other", foreign_id)
    assert not (await stack.resolve("t2-up:1")).layers


async def test_a_damaged_archive_takes_its_upload_along(stack: Stack, app: App) -> None:
    stored = set(app.blobs.list())
    sent = await upload(stack, tar_bytes([member("../x", b"1")]))
    refused = await stack.create("t3-bad:1", upload=sent)
    assert refused.error is not None
    assert refused.error.field == "archive"
    assert waiting(app) == []
    assert set(app.blobs.list()) == stored


async def test_a_tag_moves_at_once_and_what_was_resolved_stays(stack: Stack, app: App) -> None:
    one = (await stack.create("t4-py:1", path=stack.tree("t4-one"))).image
    two = (await stack.create("t4-py:2", path=stack.tree("t4-two", b"2"))).image
    assert one is not None and two is not None
    assert (await stack.tag("t4-py:1", "t4-py:stable")).image is not None
    before = await stack.resolve("t4-py:stable")
    assert before.layers == one.layers
    moved = await stack.tag("t4-py:2", "t4-py:stable")
    assert moved.image is not None
    assert (moved.image.name, moved.image.layers) == ("t4-py:stable", two.layers)
    assert (await stack.resolve("t4-py:stable")).layers == two.layers
    await stack.delete("t4-py:2")
    assert (await stack.resolve("t4-py:stable")).layers == two.layers, "a tag stands alone"
    assert app.blobs.has(before.layers[0].digest), "sandboxes of the old one may run"
    assert (await stack.tag("t4-py:stable", "t4-py:stable")).error is None


async def test_a_tag_that_cannot_be_is_refused(stack: Stack, app: App) -> None:
    await stack.create("t5-py:1", path=stack.tree("t5-py"))
    await stack.create("t5-ws:1", path=stack.tree("t5-ws"), kind="workspace")
    for name, target, code, field in (
        ("t5-none:1", "t5-py:2", "not_found", "name"),
        ("t5-py:1", "t5-ws:1", "conflict", "target"),
        ("t5-py:1", "Not A Name", "invalid_request", "target"),
    ):
        error = (await stack.tag(name, target)).error
        assert error is not None
        assert (error.code, error.field) == (code, field)
    assert (await stack.resolve("t5-py:1", "t5-ws:1")).error is None


async def test_readers_see_a_tag_whole_while_it_moves(stack: Stack, app: App) -> None:
    """A tag is moved to and fro between two images under readers."""
    made = [
        (await stack.create(f"t6-n{k}:1", path=two_layers(stack, k))).image for k in range(2)
    ]
    assert (await stack.tag("t6-n0:1", "t6-n:live")).error is None
    whole = [image.layers for image in made if image is not None]
    seen = []

    async def read() -> None:
        for _ in range(60):
            seen.append((await stack.resolve("t6-n:live")).layers)

    async def move() -> None:
        for k in range(20):
            await stack.tag(f"t6-n{k % 2}:1", "t6-n:live")

    await asyncio.gather(read(), read(), move())
    assert all(layers in whole for layers in seen)


def two_layers(stack: Stack, k: int) -> str:
    layers = [tar_bytes([member(f"{k}-{n}", os.urandom(3000))]) for n in range(2)]
    folder = stack.folder / f"image{k}"
    kinds = ["application/vnd.oci.image.layer.v1.tar"] * 2
    for name, data in oci_files(layers, kinds).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return str(folder)


async def test_a_new_toolkit_is_one_layer_for_all_environments(stack: Stack, app: App) -> None:
    """Publishing it writes one layer and changes no workspace; every environment that
    names the tag has it from then on."""
    base = (await stack.create("t7-py:3", path=stack.tree("t7-py", b"base"))).image
    assert base is not None
    workspaces = 5
    for k in range(workspaces):
        where = stack.tree(f"t7-task{k}", b"%d" % k)
        await stack.create(f"t7-task{k}:1", path=where, kind="workspace")
    tools = stack.tree("t7-tools1", b"old")
    await stack.create("t7-tools:live", path=tools, kind="toolkit", prefix="/opt/tools")
    stacks = [("t7-py:3", f"t7-task{k}:1", "t7-tools:live") for k in range(workspaces)]
    before = [await stack.resolve(*names) for names in stacks]
    stored = set(app.blobs.list())

    again = stack.tree("t7-tools2", b"new")
    made = (
        await stack.create("t7-tools:live", path=again, kind="toolkit", prefix="/opt/tools")
    ).image
    assert made is not None
    assert set(app.blobs.list()) - stored == {made.layers[0].digest}
    after = [await stack.resolve(*names) for names in stacks]
    for old, new in zip(before, after, strict=True):
        assert new.layers[:-1] == old.layers[:-1]
        assert new.layers[-1] == made.layers[0] != old.layers[-1]


async def test_an_exported_environment_imports_as_itself(stack: Stack, app: App) -> None:
    config = ImageConfig(env={"A": "b=c"}, workdir="/w", entrypoint=["/e"], cmd=["x"],
                         user="1:2", volumes=["/data"], labels={"l": "m"})  # fmt: skip
    base = (await stack.create("t8-py:3", path=stack.tree("t8-py"), config=config)).image
    await stack.create("t8-task:1", path=stack.tree("t8-task", b"task"), kind="workspace")
    both = await export(stack, "t8-py:3", "t8-task:1")
    data = await fetched(stack, both)
    assert hashlib.sha256(data).hexdigest() == both.sha256
    assert await export(stack, "t8-py:3", "t8-task:1") == both, "made once"
    path = stack.folder / "both.tar"
    path.write_bytes(data)
    again = (await stack.create("t8-again:1", path=str(path), reference="t8-task:1")).image
    assert base is not None and again is not None
    assert again.config == config
    with tarfile.open(path) as tar:
        assert {"oci-layout", "index.json", "manifest.json"} <= set(tar.getnames())
        (saved,) = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
        assert len(saved["Layers"]) == 2
    with pytest.raises(NotFound):
        await fetched(stack, both, "other")


async def test_one_image_comes_back_as_the_same_layer(stack: Stack, app: App) -> None:
    made = (await stack.create("t9-py:3", path=stack.tree("t9-py", size=9000))).image
    assert made is not None
    path = stack.folder / "one.tar"
    path.write_bytes(await fetched(stack, await export(stack, "t9-py:3")))
    again = (await stack.create("t9-again:1", path=str(path))).image
    assert again is not None
    assert again.layers == made.layers


async def test_exports_that_cannot_be_are_refused(stack: Stack, app: App) -> None:
    folder = stack.folder / "transfers/exports"
    before = {path.name for path in folder.iterdir()}
    with pytest.raises(NotFound):
        await export(stack, "t10-none:1")
    tree = stack.tree("t10-odd")
    Path(tree, ".wh.file").write_bytes(b"")
    await stack.create("t10-odd:1", path=tree)
    with pytest.raises(DsecError) as caught:
        await export(stack, "t10-odd:1")
    assert caught.value.code == "unsupported"
    assert ".wh.file" in caught.value.message
    assert {path.name for path in folder.iterdir()} == before


async def test_an_import_that_fails_while_it_is_stored_leaves_no_layer(
    stack: Stack, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(T05) The first of two layers is stored when the store fails."""
    right, stored = app.blobs.put_layer, set(app.blobs.list())
    count = 0

    def failing(files: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise Unavailable("the layer store is full")
        return right(files)

    monkeypatch.setattr(app.blobs, "put_layer", failing)
    monkeypatch.setattr(app.importer, "_limits", small_limits())

    async def none_used(_: Any) -> list[str]:
        return list(_)

    monkeypatch.setattr(app.collector, "_unused", none_used)
    refused = await stack.create("t11-two:1", path=two_layers(stack, 7))
    assert count == 2
    assert refused.error is not None
    assert refused.error.code == "unavailable"
    assert set(app.blobs.list()) == stored
    assert not (await stack.resolve("t11-two:1")).layers


def small_limits() -> Any:
    from services.imagesvc.reading import ImportLimits

    return ImportLimits(collapse_bytes_max=0)


async def test_requests_for_other_machines_are_judged(stack: Stack, app: App) -> None:
    for fields, field in (
        ({"registry": "127.0.0.1:1/x:1"}, "registry"),
        ({"path": str(stack.folder), "form": "dockerfile"}, "form"),
    ):
        error = (await stack.create("t12-x:1", **fields)).error
        assert error is not None
        assert (error.code, error.field) == ("forbidden", field)
