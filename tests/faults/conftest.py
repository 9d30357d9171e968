"""Faults that users of such systems reported, tried on the whole system: one node that
runs real containers and the fake backend, started once a session.

Owns: the shared system and its image. Does not own: helpers of end-to-end tests, which
are theirs (:mod:`tests.e2e.conftest`).
"""

from __future__ import annotations

import inspect
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from libdsec import DSecClient, DSecContainerRunArgs, DSecRunArgs, Sandbox
from services.local import LocalOptions, LocalSystem
from tests.e2e.conftest import UNMOVED, open_client
from tests.integration.container.images import busybox_tree

HERE = str(Path(__file__).parent)
IMAGE = "small:1"
CREATE_S = 60.0
HANG_S = 60.0
"""What has not come by then does not come: no test waits so long for what is not stuck."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.e2e)
            # before the marker that the automatic mode sets: the closest one decides
            if inspect.iscoroutinefunction(getattr(item, "function", None)):
                item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


def tool(*argv: object) -> str:
    """Runs one of the machine's tools to its end; its output."""
    words = [str(word) for word in argv]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@dataclass
class World:
    """The system, a client of its administrator, and where images are imported from."""

    system: LocalSystem
    client: DSecClient
    images: Path

    @property
    def edge(self) -> str:
        """The name of the only edge."""
        return next(name for name in self.system.services if name.startswith("edge-"))

    @property
    def node(self) -> str:
        """The name of the only node."""
        return self.edge.removeprefix("edge-")

    @property
    def node_dir(self) -> Path:
        """Where the edge keeps its state."""
        return self.system.state_dir / "nodes" / self.node


def container_args(**changes: Any) -> DSecContainerRunArgs:
    """A small container."""
    given = {"container_image": IMAGE, "memory_limit_mb": 64, "pids_limit": 64,
             "init_user": "root"}  # fmt: skip
    return DSecContainerRunArgs(**{**given, **changes})


def fake_args(**options: Any) -> DSecRunArgs:
    """A sandbox of the fake backend, with faults by order."""
    return DSecRunArgs(backend="fake", memory_limit_mb=64, cpu_cores_limit=0.1, options=options)


async def register_image(client: DSecClient, folder: Path) -> None:
    """Imports the small image that :func:`container_args` names."""
    await client.images.create(IMAGE, path=str(busybox_tree(folder)))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """One node, drivers ``container`` and ``fake``."""
    images = tmp_path_factory.mktemp("images")
    options = LocalOptions(
        driver=("container", "fake"),
        state_dir=tmp_path_factory.mktemp("faults"),
        image_roots=[images],
        env={
            "DSEC_IMAGE_COLLAPSE_BYTES": "0",  # layers stay as many as they are
            **UNMOVED,
        },
    )
    async with LocalSystem(options) as system, open_client(system) as client:
        await register_image(client, images)
        yield World(system, client, images)


@pytest.fixture
def client(world: World) -> DSecClient:
    """The administrator's client."""
    return world.client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def box(world: World) -> AsyncIterator[Sandbox]:
    """A container that the tests of a module share."""
    args = container_args(memory_limit_mb=192)
    async with await world.client.run_container(args, timeout=CREATE_S) as sandbox:
        yield sandbox
