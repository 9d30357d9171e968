"""Garbage collection, on a folder and on S3: what goes, and what must not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from schemas.base import decode, encode
from schemas.image import LayerUse, LayerUseQuery
from schemas.subjects import rpc
from services.imagesvc.app import App
from shared.blobs.layout import LayerFiles
from shared.errors import Unavailable
from tests.integration.imagesvc.service import Stack
from tests.s3server import S3Server

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module")
async def service(
    request: pytest.FixtureRequest, stack: Stack, s3: S3Server
) -> AsyncIterator[App]:
    stack.fields = {"image_gc_age_s": 0.0}
    if getattr(request, "param", "s3") == "s3":
        stack.fields |= s3.settings(stack.folder.parent.name)
    made = App(stack.settings())
    await made.start()
    yield made
    await made.close()


async def scheduler(stack: Stack, used: Sequence[str] = ()) -> Any:
    """Answers for the scheduler that sandboxes need ``used``."""

    async def answer(message: Any) -> None:
        asked = decode(message.data, LayerUseQuery).digests
        await message.respond(encode(LayerUse(used=[d for d in asked if d in used])))

    asked = await stack.client.subscribe(rpc("scheduler", "layers"), cb=answer)
    await stack.client.flush()  # the server knows: the question comes by another connection
    return asked


def digest(reply: Any) -> str:
    return str(reply.image.layers[0].digest)


@pytest.mark.parametrize("service", ["file", "s3"], indirect=True)
async def test_only_what_nothing_needs_goes(stack: Stack, service: App) -> None:
    """(I10, T09)"""
    named = digest(await stack.create("named", path=stack.tree("a", b"1")))
    shared = digest(await stack.create("one", path=stack.tree("b", b"2" * 5000)))
    assert digest(await stack.create("two", path=f"{stack.folder}/b")) == shared
    running = digest(await stack.create("running", path=stack.tree("c", b"3")))
    loose = digest(await stack.create("loose", path=stack.tree("d", b"4" * 300_000)))
    for name in ("one", "running", "loose"):
        assert (await stack.delete(name)).error is None
    with pytest.raises(Unavailable):  # nobody knows what runs: everything stays
        await service.collector.collect()
    assert set(service.blobs.list()) == {named, shared, running, loose}
    asked = await scheduler(stack, used=[running])
    assert await service.collector.collect() == 1
    assert set(service.blobs.list()) == {named, shared, running}
    await asked.unsubscribe()
    await scheduler(stack)
    assert await service.collector.collect() == 1
    again = await stack.create("again", path=f"{stack.folder}/d")
    assert digest(again) == loose
    assert set(service.blobs.list()) == {named, shared, loose}


async def test_collection_between_storing_and_naming_takes_nothing(
    stack: Stack, service: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(I10) The layer is stored, its name is not there yet, and the collector runs."""
    await scheduler(stack)
    first = digest(await stack.create("x", path=stack.tree("x", b"x" * 5000)))
    await stack.delete("x")
    put, between = service.blobs.put_layer, []

    def put_and_collect(files: LayerFiles) -> Any:
        manifest = put(files)
        between.append(asyncio.run_coroutine_threadsafe(service.collector.collect(), loop).result())
        return manifest

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(service.blobs, "put_layer", put_and_collect)
    assert digest(await stack.create("y", path=f"{stack.folder}/x")) == first
    assert between == [0] and service.blobs.has(first)


async def test_a_failed_import_takes_no_layer_that_was_there_before(
    stack: Stack, service: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(I10) Nobody names it now, but a sandbox may be about to start from it."""
    await scheduler(stack)
    first = digest(await stack.create("x", path=stack.tree("x", b"x" * 5000)))
    await stack.delete("x")
    put = service.blobs.put_layer

    def put_and_fail(files: LayerFiles) -> Any:
        put(files)
        raise Unavailable("the disk is away")

    monkeypatch.setattr(service.blobs, "put_layer", put_and_fail)
    for path in (f"{stack.folder}/x", stack.tree("new", b"n" * 5000)):
        made = await stack.create("again", path=path)
        assert made.error is not None and made.error.code == "unavailable"
    assert list(service.blobs.list()) == [first]


async def test_images_come_and_go_under_constant_collection(stack: Stack, service: App) -> None:
    """(I10) Whatever is named is whole in the store, all the time."""
    await scheduler(stack)
    trees = [stack.tree(f"t{n}", b"%d" % n * 3000) for n in range(3)]
    busy = True

    async def collect() -> int:
        rounds = 0
        while busy:
            await service.collector.collect()
            rounds += 1
            await asyncio.sleep(0.01)
        return rounds

    async def churn(number: int) -> None:
        for _ in range(4):
            made = await stack.create(f"n{number}", path=trees[number % 3])
            assert made.error is None
            assert await asyncio.to_thread(service.blobs.has, digest(made))
            assert (await stack.delete(f"n{number}")).error is None

    collecting = asyncio.create_task(collect())
    await asyncio.gather(*(churn(number) for number in range(4)))
    busy = False
    assert await collecting > 3
    await service.collector.collect()
    assert list(service.blobs.list()) == []
