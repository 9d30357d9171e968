"""What the agent takes of a node's memory, for every sandbox that idles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.edge.drivers.base import Handle
from tests.conformance.harness import run, until
from tests.integration.container.harness import ContainerHarness

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]

RESIDENT_KB = 2048  # the agent with its helpers and an idle session's, without the shell itself


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(p for child in children for p in tree(int(child)))]


def resident_kb(pid: int) -> dict[str, int]:
    """Of the agent's processes: their shares (``pss``), and what they have of their own
    and in common, counted once (``rss``)."""
    own, shared, pss = 0, 0, 0
    for process in tree(pid):
        if Path(f"/proc/{process}/comm").read_text() != "aether\n":
            continue
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        kb = {name: int(n) for name, n in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
        private = kb["Private_Clean"] + kb["Private_Dirty"]
        own, shared, pss = own + private, max(shared, kb["Rss"] - private), pss + kb["Pss"]
    return {"pss": pss, "rss": own + shared}


async def test_an_agent_with_an_idle_session_is_small(
    harness: ContainerHarness, sandbox: Handle
) -> None:
    """Also after large output, large requests and large files: what they took is given
    back."""
    pid = int(sandbox.data["pid"])
    assert (await run(harness.driver, sandbox, "cd /tmp", session="idle")).code == 0
    assert max(resident_kb(pid).values()) < RESIDENT_KB
    much = "dd if=/dev/zero bs=1M count=40"
    await run(harness.driver, sandbox, much, output_limit_bytes=32 << 20)
    await run(harness.driver, sandbox, "true " + "#" * (6 << 20))
    await run(harness.driver, sandbox, "head -c 30000000 /dev/zero >/tmp/f")
    assert len([c async for c in harness.driver.read(sandbox, "/tmp/f", user="root")]) > 100
    await until(lambda: max(resident_kb(pid).values()) < RESIDENT_KB)
