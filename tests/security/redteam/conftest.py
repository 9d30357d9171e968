"""A node whose sandboxes reach out into a world of the tests' own."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from schemas.audit import Violation
from services.edge.drivers.base import Handle, StartSpec
from shared import policies
from tests.conformance.harness import new_uid, run
from tests.integration.container.harness import ContainerHarness, container_harness
from tests.integration.container.images import pack
from tests.security.redteam.world import SERVICES, World, made_world

TOLD_S = 60.0


class Field:
    """Sandboxes of one driver, and what was told of them."""

    def __init__(self, harness: ContainerHarness, world: World) -> None:
        self.harness, self.world = harness, world
        self.driver = harness.driver
        self.told: list[Violation] = []
        self.made: list[Handle] = []
        self.driver.report_to(self.told.append)

    def spec(
        self, policy: dict[str, object] | None = None, rules: dict[str, bool] | None = None,
        **changes: object,
    ) -> StartSpec:  # fmt: skip
        read = policies.read(policy, rules or {})
        return self.harness.spec(**{"uid": new_uid(), "policy": read, **changes})

    async def start(
        self, policy: dict[str, object] | None = None, rules: dict[str, bool] | None = None
    ) -> Handle:
        return await self.begin(self.spec(policy, rules))

    async def begin(self, spec: StartSpec) -> Handle:
        """A sandbox that is stopped at the end of the test."""
        self.made.append(await self.driver.start(spec))
        return self.made[-1]

    def edge_dies(self, handle: Handle) -> None:
        """What the kernel does to one sandbox then."""
        self.driver._enforcing.end(handle.uid)

    async def edge_returns(self, handle: Handle, spec: StartSpec) -> Handle:
        """The sandbox as the next edge finds it."""
        self.driver._live.pop(handle.uid).agent.close()
        found = await self.driver.recover(handle, spec)
        assert found is not None
        return found

    async def sh(self, handle: Handle, text: str, stdin: bytes = b"") -> str:
        """What a command says, without its last line end."""
        ran = await run(self.driver, handle, text, timeout_s=120)
        return (ran.stdout + ran.stderr).decode(errors="replace").strip()

    async def attempt(self, handle: Handle, *argv: str) -> str:
        """The error of an attempt, or "ok"."""
        ran = await run(self.driver, handle, ["/attempt", *argv], timeout_s=120)
        return ran.stdout.decode().strip() or ran.stderr.decode()

    def of(self, handle: Handle, source: str | None = None) -> list[Violation]:
        """What was told of a sandbox."""
        return [v for v in self.told if v.uid == handle.uid and source in (None, v.source)]

    async def when_told(self, handle: Handle, source: str, count: int = 1) -> list[Violation]:
        """The violations, once they stand for ``count`` denials."""
        async with asyncio.timeout(TOLD_S):
            while sum(v.count + v.lost for v in self.of(handle, source)) < count:
                await asyncio.sleep(0.02)
        return self.of(handle, source)


def compile_attempt(tree: Path) -> None:
    source = Path(__file__).with_name("attempt.c")
    subprocess.run(["cc", "-O1", "-Wall", "-static", "-o", tree / "attempt", source], check=True)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def field(tmp_path_factory: object) -> AsyncIterator[Field]:
    folder: Path = tmp_path_factory.mktemp("redteam")  # type: ignore[attr-defined]
    tree = folder / "tools"
    tree.mkdir()
    compile_attempt(tree)
    for name in ("opt/tests", "opt/answers", "usr/local/bin"):
        (tree / name).mkdir(parents=True)
    (tree / "opt/tests/test_it.py").write_text("the test\n")
    (tree / "opt/answers/answer.txt").write_text("42\n")
    (tree / "opt/grader").write_text("#!/bin/sh\necho graded\n")
    (tree / "usr/local/bin/pytest").write_text("#!/bin/sh\necho tested\n")
    for program in ("opt/grader", "usr/local/bin/pytest"):
        (tree / program).chmod(0o755)
    async with made_world(folder) as world:
        options = {
            "uplink": str(world.uplink), "resolvers": f"{world.resolver}@53", "services": SERVICES,
        }  # fmt: skip
        async with container_harness(folder, **options) as harness:
            tools = pack(tree, "tools")
            base = harness.layer
            plain = harness.spec
            harness.spec = lambda **c: plain(**{"layers": [base, tools], **c})  # type: ignore[method-assign]
            await harness.driver.probe()
            yield Field(harness, world)


@pytest_asyncio.fixture(autouse=True, loop_scope="package")
async def _stopped(field: Field) -> AsyncIterator[None]:
    yield
    while field.made:
        await field.driver.stop(field.made.pop())
