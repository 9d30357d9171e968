"""What a branch and a restored sandbox are made of, asked of nobody who knows it already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from libdsec import DSecContainerRunArgs, Sandbox, _ids, snapshots
from libdsec._core import Core
from libdsec._wire import SandboxInfo, SandboxSpec
from libdsec.errors import NotFound

ARGS = DSecContainerRunArgs(
    container_image="py:3.11", memory_limit_mb=(64, 128), labels={"a": "b"}, env={"X": "1"}
)


class Services:
    """Knows one sandbox and counts who asks for it."""

    def __init__(self, found: SandboxInfo | None) -> None:
        self.found = found
        self.asked = 0
        self.owned: dict[str, str] = {}

    async def lookup(self, uid: str, project: str) -> SandboxInfo | None:
        self.asked += 1
        return self.found


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The specs that branches were asked for with."""
    asked: list[dict[str, Any]] = []

    async def branches(core: Core, spec: dict[str, Any], n: int, **_: Any) -> list[Sandbox]:
        asked.append(spec)
        return []

    monkeypatch.setattr(snapshots, "branches", branches)
    return asked


def held(services: Services, uid: str, spec: dict[str, Any] | None) -> Sandbox:
    return Sandbox(cast(Core, services), uid, project="p", state="running", spec=spec)


async def test_whoever_made_a_sandbox_asks_nobody_what_its_branches_are(
    specs: list[dict[str, Any]],
) -> None:
    uid = _ids.new()
    services = Services(None)
    sandbox = held(services, uid, ARGS.to_spec())
    await sandbox.fork(2)
    assert services.asked == 0
    assert specs[0]["source"] == uid
    assert msgspec.convert(specs[0], SandboxSpec).labels == {"a": "b"}


async def test_who_made_and_who_found_a_sandbox_ask_for_the_same_branches(
    specs: list[dict[str, Any]],
) -> None:
    """A request that is repeated by another client is the same request."""
    uid = _ids.new()
    # as the scheduler has it: of a branch with the node that it filled in
    spec = msgspec.convert(ARGS.to_spec() | {"node": "n1", "source": _ids.new()}, SandboxSpec)
    info = SandboxInfo(
        uid=uid, project="p", state="running", generation=1, backend="container", created_at=0,
        changed_at=0, spec=spec,
    )  # fmt: skip
    services = Services(info)
    found = held(services, uid, None)
    await found.fork(1)
    await found.fork(1)
    await held(services, uid, ARGS.to_spec()).fork(1)
    assert services.asked == 1
    assert len({msgspec.json.encode(one) for one in specs}) == 1


async def test_what_is_not_there_has_no_branches(specs: list[dict[str, Any]]) -> None:
    with pytest.raises(NotFound):
        await held(Services(None), _ids.new(), None).fork(1)
    assert specs == []


@pytest.mark.parametrize("n", [1, 3])
async def test_one_is_restored_as_itself_and_several_as_a_list(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from libdsec import DSecClient, client
    from libdsec._wire import ImageConfig, ImageInfo, LayerProvenance, LayerRef

    asked: list[tuple[dict[str, Any], int]] = []

    async def branches(core: Core, spec: dict[str, Any], n: int, **_: Any) -> list[str]:
        asked.append((spec, n))
        return [f"sandbox {i}" for i in range(n)]

    monkeypatch.setattr(client, "branches", branches)
    made = LayerProvenance(
        sandbox=_ids.new(), principal="p", node="n", at=0.0, layer="d", parents=[],
        spec=msgspec.convert(ARGS.to_spec(), SandboxSpec),
    )  # fmt: skip
    image = ImageInfo(
        name="snapshot/x", project="p", kind="snapshot", created_at=0.0, size_bytes=1,
        config=ImageConfig(), layers=[LayerRef(digest="d", size_bytes=1)], provenance=made,
    )  # fmt: skip
    snapshot = snapshots.Snapshot(image.name, "d", 1, made.sandbox, 0.0, image)
    # a client without a connection: nothing but the create is asked for
    nobody = cast(DSecClient, SimpleNamespace(_core=None, _keep=False))
    found = await DSecClient.restore(nobody, snapshot, n)
    assert found == ("sandbox 0" if n == 1 else ["sandbox 0", "sandbox 1", "sandbox 2"])
    assert asked[0][0]["container_image"] == "snapshot/x"
    assert asked[0][1] == n
