"""The whole system, started once a session per driver, and helpers to judge it."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from devstack.process import free_port
from libdsec import DSecClient
from services.local import LocalOptions, LocalSystem
from tests.security.redteam.world import World, made_world

SETTLE_S = 60.0
"""What follows from what was answered may take so long on a busy machine."""
UNMOVED = {f"DSEC_PRESSURE_{name}": "2" for name in ("CPU", "MEMORY", "IO")}
"""What else the machine does makes no node of a test full."""
RESPONSES = """
[[response]]
project = "strict*"
rule = "test_file_edit"
do = "kill"

[[response]]
project = "strict*"
rule = "processes_at_grading"
do = "freeze"

[[response]]
project = "strict*"
rule = "protected_file_edit"
do = "quarantine"

[[response]]
project = "tight*"
do = "tighten"
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)
            # before the marker that the automatic mode sets: the closest one decides
            if inspect.iscoroutinefunction(getattr(item, "function", None)):
                item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


def _strict(factory: pytest.TempPathFactory) -> dict[str, str]:
    """Findings of projects whose name begins with ``strict`` or ``tight`` are answered."""
    responses = factory.mktemp("audit") / "responses.toml"
    responses.write_text(RESPONSES)
    return {"DSEC_AUDIT_RESPONSES": str(responses)}


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def fake_system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalSystem]:
    """Two nodes with the fake backend: everything but a kernel."""
    options = LocalOptions(
        driver="fake",
        nodes=2,
        state_dir=tmp_path_factory.mktemp("fake"),
        image_roots=[tmp_path_factory.mktemp("images")],
        env={**UNMOVED, **_strict(tmp_path_factory)},
    )
    async with LocalSystem(options) as system:
        yield system


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def outside(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """What containers may reach, with name servers and hosts of its own."""
    async with made_world(tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def container_system(
    tmp_path_factory: pytest.TempPathFactory, base_image: Any, outside: World
) -> AsyncIterator[LocalSystem]:
    """One node with real containers and an image ``py:3.11`` registered; sandboxes may be
    given a route ``model``, and reach out into ``outside``."""
    options = LocalOptions(
        driver="container",
        state_dir=tmp_path_factory.mktemp("containers"),
        image_roots=[base_image, tmp_path_factory.mktemp("images")],
        env={
            **UNMOVED, **_strict(tmp_path_factory), "DSEC_ROUTES": f"model=127.0.0.1:{free_port()}",
            "DSEC_CONTAINER_UPLINK": str(outside.uplink),
            "DSEC_CONTAINER_RESOLVERS": f"{outside.resolver}@53",
            "DSEC_CONTAINER_ROOTS": str(outside.roots),
        },
    )  # fmt: skip
    async with LocalSystem(options) as system:
        async with open_client(system) as client:
            await client.images.create("py:3.11", path=str(base_image))
        yield system


@pytest.fixture(scope="session")
def base_image() -> Any:
    """The base root file system built from the machine's packages."""
    from bench.images import rootfs

    return rootfs()


def open_client(system: LocalSystem, **options: Any) -> DSecClient:
    """A client of the system's administrator."""
    return DSecClient(
        **{"url": system.url, "api_key": system.admin_key, "project": system.project, **options}
    )


@pytest_asyncio.fixture(loop_scope="session")
async def client(fake_system: LocalSystem) -> AsyncIterator[DSecClient]:
    """A client of the system with fake nodes."""
    async with open_client(fake_system) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def containers(container_system: LocalSystem) -> AsyncIterator[DSecClient]:
    """A client of the system with real containers."""
    async with open_client(container_system) as client:
        yield client


async def until(
    condition: Callable[[], Awaitable[Any]], *, within_s: float = SETTLE_S, what: str = ""
) -> Any:
    """The condition's first true result; fails with its last one."""
    end = time.monotonic() + within_s
    while True:
        result = await condition()
        if result:
            return result
        if time.monotonic() > end:
            pytest.fail(f"not within {within_s:g} s: {what or condition} (last: {result!r})")
        await asyncio.sleep(0.2)


async def alive(client: DSecClient, **filters: Any) -> list[Any]:
    """Sandboxes that are not over."""
    over = {"stopped", "failed", "rejected", "lost"}
    return [s async for s in client.list(**filters) if s.state not in over]


async def used(client: DSecClient, project: str) -> int:
    """Sandboxes charged to a project."""
    quota = await client.quotas.get(project)
    return int(quota.used.sandboxes)


async def charged(client: DSecClient, project: str, count: int) -> None:
    """Returns once so many sandboxes are charged to a project: auth hears of an end a moment
    after who asked for it."""

    async def same() -> bool:
        return await used(client, project) == count

    await until(same, what=f"{count} sandboxes are charged to {project}")
