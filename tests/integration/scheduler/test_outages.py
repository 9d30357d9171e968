"""What is away comes back: Redis, PostgreSQL, an empty NATS, imagesvc; bad messages."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from schemas.base import WireError, decode, encode
from schemas.bus import DeadLetter
from schemas.image import LayerUse, LayerUseQuery, Resolved, ResolveReply, ResolveRequest
from schemas.sandbox import ImageConfig, LayerRef, SandboxPage, SandboxQuery
from schemas.streams import DURABLES, STREAMS, durable
from schemas.subjects import cmd, rpc
from services.scheduler.app import App
from shared import topology
from shared.errors import Internal
from tests.integration.scheduler.conftest import World
from tests.integration.scheduler.world import Trainer, eventually

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


async def page(trainer: Trainer, **query: object) -> SandboxPage:
    body = encode(SandboxQuery(**query))  # type: ignore[arg-type]
    answer = await trainer.nc.request(rpc("scheduler", "sandboxes"), body, timeout=60)
    return decode(answer.data, SandboxPage)


async def test_without_redis_placement_goes_on(world: World) -> None:
    await world.scheduler()
    await world.edge("n1", 20)
    await world.edge("n2", 20)
    trainer = await world.trainer()
    await trainer.settled(await trainer.create(4))
    await world.infra.kill("valkey")
    try:
        results = await trainer.settled(await trainer.create(36))
        assert {r.state for r in results} == {"running"}
        assert await world.committed() == {"n1": 20, "n2": 20}
    finally:
        await world.infra.restart("valkey")


async def test_a_database_that_restarts_loses_no_create(world: World) -> None:
    await world.scheduler()
    await world.edge("n1")
    trainer = await world.trainer()
    first = await trainer.create(5)
    await world.infra.kill("postgres")
    second = await trainer.create(5)
    await asyncio.sleep(0.5)
    await world.infra.restart("postgres")
    results = await trainer.settled(first + second)
    assert {r.state for r in results} == {"running"}


async def test_a_bus_that_lost_its_store_is_set_up_again(world: World) -> None:
    """(B09)"""
    await world.scheduler(start_again_s=1.0)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    kept = await trainer.create(3)
    await trainer.settled(kept)
    edge.on_start = lambda _: []
    under_way = await trainer.create(2)
    await eventually(lambda: len(edge.started) >= 5)
    edge.on_start = lambda _: ["running"]
    await world.infra.kill("nats")
    shutil.rmtree(world.infra.state_dir / "jetstream")
    await world.infra.restart("nats")

    async def declared() -> bool:
        try:
            names = {s.config.name for s in await trainer.nc.jetstream().streams_info()}
        except Exception:  # the client is not back yet
            return False
        return names == {s.name for s in STREAMS}

    await eventually(declared)
    results = await trainer.settled(under_way)  # starts were sent again
    assert {r.state for r in results} == {"running"}
    results = await trainer.settled(await trainer.create(3))
    assert {r.state for r in results} == {"running"}
    assert (await trainer.operate("stop", kept))[kept[0]].state == "stopped"


async def test_durables_are_as_the_map_says_and_drift_is_found(world: World) -> None:
    """(B07)"""
    app = await world.scheduler(topology_s=60)
    js = app.bus.js
    for want in DURABLES:
        config = (await js.consumer_info(want.stream, want.name)).config
        assert config.ack_wait == want.ack_wait_s
    wrong = topology.consumer_config(durable("auth_requests"))
    wrong.ack_wait = 0.5
    await js.delete_consumer("DSEC_REQ", "auth_requests")
    await js.add_consumer("DSEC_REQ", wrong)
    with pytest.raises(Internal, match=r"auth_requests\.ack_wait"):
        await topology.declare(js)


async def test_what_cannot_be_read_is_a_dead_letter(world: World) -> None:
    await world.scheduler()
    await world.edge("n1")
    trainer = await world.trainer()
    letters: dict[int, DeadLetter] = {}

    async def letter(message: object) -> None:
        told = decode(message.data, DeadLetter)  # type: ignore[attr-defined]
        letters[told.stream_seq] = told

    await trainer.nc.subscribe("dsec.dlq.v1.>", cb=letter)
    await trainer.nc.flush()
    js = trainer.nc.jetstream()
    await js.publish(cmd("sandbox", "create", "k"), b"not json")
    await js.publish(cmd("sandbox", "op", "k"), b'{"v": 9, "commands": []}')
    await js.publish(cmd("sandbox", "nonsense", "k"), b"{}")
    uids = await trainer.create(2)
    assert {r.state for r in await trainer.settled(uids)} == {"running"}
    await eventually(lambda: len(letters) == 3)
    assert any("version 9" in x.cause for x in letters.values())


class ImageService:
    """imagesvc as far as the scheduler asks it."""

    def __init__(self) -> None:
        self.asked: list[ResolveRequest] = []

    async def start(self, trainer: Trainer) -> None:
        await trainer.nc.subscribe(rpc("imagesvc", "resolve"), cb=self._answer)
        await trainer.nc.flush()

    async def _answer(self, message: object) -> None:
        request = decode(message.data, ResolveRequest)  # type: ignore[attr-defined]
        self.asked.append(request)
        items = []
        for item in request.items:
            if "bad:1" in item.names:
                error = WireError(code="not_found", message="no image bad:1")
                items.append(Resolved(error=error))
            else:
                layers = [LayerRef(digest=f"sha256:{n}") for n in item.names]
                items.append(Resolved(layers=layers, config=ImageConfig(env={"A": "b"})))
        await message.respond(encode(ResolveReply(items=items)))  # type: ignore[attr-defined]


async def test_images_are_resolved_once_a_burst_and_errors_are_theirs_alone(
    world: World,
) -> None:
    await world.scheduler(resolve_s=30.0)
    await world.edge("n1")
    trainer = await world.trainer()
    images = ImageService()
    await images.start(trainer)
    good = trainer.command(50, container_image="py:3.11")
    bad = trainer.command(2, container_image="bad:1")
    uids = await trainer.send(good, bad)
    results = await trainer.settled(uids)
    assert {r.state for r in results[:50]} == {"running"}
    for result in results[50:]:
        assert result.state == "rejected"
        assert result.error is not None
        assert (result.error.code, result.error.field) == ("not_found", "container_image")
    assert [len(r.items) for r in images.asked] == [2]
    assert images.asked[0].items[0].projects == ["lab"]


async def test_creates_wait_for_an_imagesvc_that_is_away(world: World) -> None:
    await world.scheduler()
    await world.edge("n1")
    trainer = await world.trainer()
    waiting = await trainer.create(3, container_image="py:3.11")
    expired = await trainer.create(1, container_image="py:3.11", expires_s=1.0)
    other = await trainer.create(2)
    assert {r.state for r in await trainer.settled(other)} == {"running"}
    (failed,) = await trainer.settled(expired)
    assert failed.state == "failed"
    assert set(trainer.results) == {*other, *expired}
    await ImageService().start(trainer)
    assert {r.state for r in await trainer.settled(waiting)} == {"running"}


async def test_a_waiting_create_can_be_stopped(world: World) -> None:
    await world.scheduler()
    edge = await world.edge("n1")
    trainer = await world.trainer()
    waiting = await trainer.create(2, container_image="py:3.11")

    async def stored() -> bool:
        return await world.states() == {"requested": 2}

    await eventually(stored)
    results = await trainer.operate("stop", waiting)
    assert {r.state for r in results.values()} == {"stopped"}
    assert edge.started == []


async def test_pages_and_filters(world: World) -> None:
    await world.scheduler()
    await world.edge("n1")
    trainer, other = await world.trainer(), await world.trainer("other")
    uids = await trainer.create(7, job="j", labels={"a": "1", "b": "2"}, memory_limit_mb=64)
    rest = await trainer.create(3, labels={"a": "2"})
    foreign = await other.create(2)
    await trainer.settled(uids + rest)
    await other.settled(foreign)
    await trainer.operate("stop", uids[:2])
    seen: list[str] = []
    after = None
    while True:
        found = await page(trainer, project="lab", after=after, limit=4)
        seen += [s.uid for s in found.sandboxes]
        after = found.next
        if after is None:
            break
    assert seen == sorted(uids + rest)
    for query, expected in (
        ({"project": "other"}, foreign),
        ({"project": "lab", "job": "j"}, uids),
        ({"project": "lab", "labels": {"a": "1"}}, uids),
        ({"project": "lab", "labels": {"a": "1"}, "states": ["stopped"]}, uids[:2]),
        ({"project": "lab", "uids": [uids[0], foreign[0]]}, uids[:1]),
        ({"project": "lab", "node": "n2"}, []),
    ):
        found = await page(trainer, **query)
        assert sorted(s.uid for s in found.sandboxes) == sorted(expected)
    (one,) = (await page(trainer, uids=uids[:1])).sandboxes
    assert one.spec is not None
    assert (one.spec.memory_limit_mb, one.state, one.cause) == (64, "stopped", "completed")
    assert one.labels == {"a": "1", "b": "2"}


async def test_one_request_in_pieces_keeps_each_item_its_spec(world: World) -> None:
    await world.scheduler()
    await world.edge("n1")
    trainer = await world.trainer()
    whole = trainer.command(2)
    pieces = []
    for i, memory in enumerate((111, 222)):
        piece = trainer.command(2, request_id=whole.request_id, memory_limit_mb=memory)
        fields = {f: getattr(piece, f) for f in piece.__struct_fields__}
        pieces.append(type(piece)(**{**fields, "items": piece.items[i : i + 1]}))
    await trainer.send(*pieces)
    uids = [i.uid for i in whole.items]
    await trainer.settled(uids)
    found = {s.uid: s for s in (await page(trainer, uids=uids)).sandboxes}
    specs = [found[u].spec for u in uids]
    assert [s.memory_limit_mb for s in specs if s] == [111, 222]


async def test_health_tells_what_is_away(world: World) -> None:
    app: App = await world.scheduler()

    async def good() -> bool:
        return set((await app.health.report()).values()) == {"ok"}

    await eventually(good)
    await world.infra.kill("postgres")
    try:
        report = await app.health.report()
        assert report["database"] != "ok"
        assert report["bus"] == "ok"
    finally:
        await world.infra.restart("postgres")


LAYERS = ["sha256:py"]


async def used(trainer: Trainer) -> list[str]:
    query = encode(LayerUseQuery(digests=[*LAYERS, "sha256:other"]))
    answer = await trainer.nc.request(rpc("scheduler", "layers"), query, timeout=60)
    return sorted(decode(answer.data, LayerUse).used)


async def test_layers_are_needed_while_a_sandbox_of_theirs_may_live(world: World) -> None:
    """(I10)"""
    await world.scheduler(lost_layers_s=3600, silence_s=2.0, lost_grace_s=0.1)
    edge = await world.edge("n1")
    trainer = await world.trainer()

    await ImageService().start(trainer)
    assert await used(trainer) == []
    first = await trainer.create(1, container_image="py", env={"ODD": "\\u0000"})
    await trainer.settled(first)
    assert await used(trainer) == LAYERS
    await trainer.operate("stop", first)
    assert await used(trainer) == []
    second = await trainer.create(1, container_image="py")
    await trainer.settled(second)
    edge.beating = edge.taking = False
    await eventually(lambda: trainer.states_told(second[0])[-1:] == ["lost"])
    assert await used(trainer) == LAYERS
