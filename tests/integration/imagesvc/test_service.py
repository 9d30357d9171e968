"""imagesvc on a real bus and database: requests, answers, questions, repetition, loss."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from schemas.base import HEADER_REPLY, decode, encode
from schemas.hotset import LayerAccess, LayerAccesses
from schemas.image import (
    ImageCommand,
    ImageCreate,
    ImageQuery,
    ImageReply,
)
from schemas.sandbox import ImageConfig
from schemas.subjects import cmd, evt
from services.imagesvc.app import App
from services.imagesvc.importer import ImportResult
from services.imagesvc.sources import ImportRequest, PathSource
from shared import ids
from shared.db import Database
from shared.errors import NotFound, Unavailable
from tests.integration.imagesvc.service import ANSWER_S, PROJECT, Stack

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

async def test_an_image_is_registered_resolved_listed_and_deleted(stack: Stack, app: App) -> None:
    config = ImageConfig(env={"A": "b"}, workdir="/w")
    made = await stack.create("py:3.11", path=stack.tree("py"), config=config)
    assert made.error is None
    assert made.image is not None
    assert (made.image.name, made.image.project, made.image.kind) == ("py:3.11", PROJECT, "base")
    await stack.create("task", path=stack.tree("task"), kind="workspace")

    both = await stack.resolve("py:3.11", "task:latest", projects=("child", PROJECT))
    assert both.layers[0] == made.image.layers[0]
    assert len(both.layers) == 2
    assert both.config.env == {"A": "b"}
    assert all(app.blobs.has(layer.digest) for layer in both.layers)

    listed = await stack.question("images", ImageQuery(projects=[PROJECT]), ImageReply)
    assert [image.name for image in listed.images] == ["py:3.11", "task:latest"]
    bases = await stack.question("images", ImageQuery(projects=[PROJECT], kind="base"), ImageReply)
    assert [image.name for image in bases.images] == ["py:3.11"]
    foreign = await stack.question("images", ImageQuery(projects=["other"]), ImageReply)
    assert not foreign.images

    assert (await stack.delete("task")).error is None
    gone = await stack.resolve("py:3.11", "task")
    assert (gone.error.code, gone.error.field) == ("not_found", "layers[1]")
    again = await stack.delete("task")
    assert again.error is not None
    assert (again.error.code, again.error.field) == ("not_found", "name")


async def test_an_image_is_got_by_name_from_the_nearest_project(stack: Stack, app: App) -> None:
    await stack.create("py", "root", path=stack.tree("theirs", b"1"))
    await stack.create("py", path=stack.tree("ours", b"2"))
    query = ImageQuery(name="py", projects=[PROJECT, "root"])
    assert (await stack.question("images", query, ImageReply)).image.project == PROJECT
    with pytest.raises(NotFound) as caught:
        await stack.question("images", ImageQuery(name="no", projects=[PROJECT]), ImageReply)
    assert caught.value.field == "name"


@pytest.mark.parametrize(
    ("name", "fields", "code", "field"),
    [
        ("Bad Name", {}, "invalid_request", "name"),
        ("x", {"path": "/etc"}, "forbidden", "path"),
        ("x", {"path": "missing"}, "invalid_request", "path"),
        ("x", {"path": None, "docker": "no-such-image-here:1"}, "not_found", "docker"),
        ("x", {"prefix": "/p"}, "invalid_request", "prefix"),
    ],
)
async def test_bad_requests_are_answered_and_register_nothing(
    stack: Stack, app: App, name: str, fields: dict[str, Any], code: str, field: str
) -> None:
    good = stack.tree("good")
    if fields.get("path") == "missing":
        fields = {"path": f"{stack.folder}/missing"}
    reply = await stack.create(name, **({"path": good} | fields))
    assert reply.error is not None
    assert (reply.error.code, reply.error.field) == (code, field)
    listed = await stack.question("images", ImageQuery(projects=[PROJECT]), ImageReply)
    assert not listed.images
    assert list(app.blobs.list()) == []


async def test_a_repeated_request_has_the_first_answer_and_another_use_is_a_conflict(
    stack: Stack, app: App
) -> None:
    path, request_id = stack.tree("a"), ids.new()
    first = await stack.create("a", path=path, request_id=request_id)
    (Path(path) / "f").write_bytes(b"changed since")
    assert await stack.create("a", path=path, request_id=request_id) == first
    other = await stack.create("b", path=path, request_id=request_id)
    assert other.error is not None
    assert (other.error.code, other.error.field) == ("conflict", "request_id")


async def test_a_name_can_be_moved_but_not_change_its_kind(stack: Stack, app: App) -> None:
    first = await stack.create("a", path=stack.tree("one", b"1"))
    second = await stack.create("a", path=stack.tree("two", b"2"))
    assert first.image is not None
    assert second.image is not None
    assert first.image.layers != second.image.layers
    assert (await stack.resolve("a")).layers == second.image.layers
    third = await stack.create("a", path=stack.tree("three"), kind="workspace")
    assert third.error is not None
    assert (third.error.code, third.error.field) == ("conflict", "kind")


async def test_progress_is_told_before_the_answer(stack: Stack, app: App) -> None:
    folder = Path(stack.tree("big", os.urandom(1 << 20), 64))
    (folder / "g").write_bytes(os.urandom(64 << 20))
    create = ImageCreate(request_id=ids.new(), name="big", path=str(folder))
    reply, told = await stack.ask(ImageCommand(project=PROJECT, principal="p", create=create))
    assert reply.error is None
    shares = [state.progress for state in told if state.progress is not None]
    assert shares
    assert shares == sorted(shares)
    assert all(0 <= share <= 1 for share in shares)
    assert {state.request_id for state in told} == {create.request_id}


async def test_an_import_broken_off_by_a_restart_is_begun_anew(stack: Stack) -> None:
    folder = stack.tree("big", os.urandom(1 << 20), 256)
    create = ImageCreate(request_id=ids.new(), name="big", path=folder)
    first = App(stack.settings())
    await first.start()
    inbox = stack.client.new_inbox()
    answers = await stack.client.subscribe(inbox)
    await stack.client.flush()
    command = ImageCommand(project=PROJECT, principal="p", create=create)
    await stack.client.jetstream(timeout=60).publish(
        cmd("image", "create", PROJECT), encode(command), headers={HEADER_REPLY: inbox}
    )
    assert decode((await answers.next_msg(ANSWER_S)).data, ImageReply).progress is not None
    await asyncio.gather(*(c.close(timeout_s=0) for c in first.imports), first.close())
    assert list((stack.folder / "store" / "tmp").iterdir()) == []
    second = App(stack.settings())
    await second.start()
    try:
        while True:
            reply = decode((await answers.next_msg(60)).data, ImageReply)
            if reply.progress is None:
                break
        assert reply.error is None
        assert reply.image is not None
        assert second.blobs.has(reply.image.layers[0].digest)
    finally:
        await second.close()


async def test_a_message_that_is_none_does_not_stop_the_service(stack: Stack, app: App) -> None:
    js = stack.client.jetstream(timeout=60)
    for body in (b"not json", b"{}", b'{"v": 9}', encode(ImageCommand(project="p", principal="p"))):
        await js.publish(cmd("image", "create", PROJECT), body)
    reply = await stack.create("a", path=stack.tree("a"))
    assert reply.error is None
    async with asyncio.timeout(60):
        while (await js.stream_info("DSEC_DLQ")).state.messages < 4:
            await asyncio.sleep(0.05)
    assert (await js.stream_info("DSEC_DLQ")).state.messages == 4


async def test_many_at_once_are_all_answered(stack: Stack, app: App) -> None:
    """Twenty in one go, two names of the same content, one at fault."""
    paths = [stack.tree(f"t{n}", b"%d" % (n // 2)) for n in range(20)]
    replies = await asyncio.gather(
        *(stack.create(f"t{n}", path=path) for n, path in enumerate(paths)),
        stack.create("bad", path=f"{stack.folder}/missing"),
    )
    assert [reply.error is None for reply in replies] == [True] * 20 + [False]
    listed = await stack.question("images", ImageQuery(projects=[PROJECT]), ImageReply)
    assert len(listed.images) == 20


async def test_long_imports_hold_up_neither_small_ones_nor_deletions(
    stack: Stack, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many long ones as may be at work, and others that wait behind them."""
    may_end, working = threading.Event(), threading.Semaphore(0)
    whole = app.importer.run_blocking

    def slow(request: ImportRequest, **kw: Any) -> ImportResult:
        assert isinstance(request.source, PathSource)
        if request.source.path.name.startswith("long"):
            working.release()
            assert may_end.wait(180)
        return whole(request, **kw)

    monkeypatch.setattr(app.importer, "run_blocking", slow)
    limit = app.settings.image_small_bytes
    names = [f"long{i}" for i in range(app.settings.image_parallel + 2)]
    for name in names:
        stack.tree(name)
        os.truncate(stack.folder / name / "f", limit + 1)  # sparse
    long = [asyncio.create_task(stack.create(n, path=str(stack.folder / n))) for n in names]
    try:
        for _ in range(app.settings.image_parallel):
            assert await asyncio.to_thread(working.acquire, timeout=60)
        async with asyncio.timeout(60):
            small = await stack.create("small", path=stack.tree("small"))
            assert small.error is None
            assert (await stack.delete("small")).error is None
        assert not any(task.done() for task in long)
    finally:
        may_end.set()
        replies = await asyncio.gather(*long)
    assert [r.error for r in replies] == [None] * len(names)


async def test_what_of_a_layer_is_read_is_told_to_the_store(
    stack: Stack, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of the store; not of layers that are gone, and a store that is away is no
    reason to hear of it again and again."""
    reply = await stack.create("a", path=stack.tree("a", os.urandom(3 << 20)))
    assert reply.image is not None
    digest = reply.image.layers[0].digest
    told: list[tuple[str, list[int]]] = []

    def hint(digest: str, first: Sequence[int]) -> None:
        told.append((digest, list(first)))
        raise Unavailable("the store is away")

    monkeypatch.setattr(app.blobs, "hint", hint)
    layers = [
        LayerAccess(digest=one, unit_bytes=1 << 19, units=[4, 0]) for one in ("ab" * 32, digest)
    ]
    await stack.client.jetstream(timeout=60).publish(
        evt("edge", "access_profile", "n"), encode(LayerAccesses(node="n", layers=layers))
    )
    async with asyncio.timeout(ANSWER_S):
        while not told:
            await asyncio.sleep(0.02)
    assert told == [(digest, [8, 9, 0, 1])]


async def test_health_tells_what_is_wrong(stack: Stack, app: App) -> None:
    async with asyncio.timeout(60):  # the first fetch takes a second
        while set((await app.health.report()).values()) != {"ok"}:
            await asyncio.sleep(0.1)
    os.rename(stack.folder / "store", stack.folder / "away")
    report = await app.health.report()
    assert report["store"] != "ok"
    assert report["database"] == "ok"


async def test_tables_and_migrations_agree(stack: Stack) -> None:
    from sqlalchemy import Connection, inspect

    from services.imagesvc.tables import metadata

    def differences(connection: Connection) -> dict[str, set[str]]:
        found = inspect(connection)
        return {
            table.name: {c["name"] for c in found.get_columns(table.name)}
            ^ {c.name for c in table.columns}
            for table in metadata.sorted_tables
        }

    db = Database(stack.dsn, "imagesvc")
    async with db.transaction() as connection:
        assert not any((await connection.run_sync(differences)).values())
    await db.close()
