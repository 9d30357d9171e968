"""Paths that are protected over links, on a kernel that is older than the one on which mounts on
links were tried first."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.edge.drivers.base import Layer
from shared import policies
from tests.conformance.harness import new_uid
from tests.guestvm.inside.harness import guest_harness, say

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_link_on_the_way_is_held_and_followed(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    tree = tmp_path / "linked"
    (tree / "data/tools").mkdir(parents=True)
    (tree / "data/tools/run").write_text("graded\n")
    (tree / "grader").symlink_to("data/tools")
    policy = policies.read({"files": {"protected": ["/grader/run"]}}, {})
    async with guest_harness(tmp_path / "state") as harness:
        layers = [harness.layer, Layer(digest="sha256:linked", meta=str(tree))]
        spec = harness.spec(uid=new_uid(), layers=layers, policy=policy)
        handle = await harness.driver.start(spec)
        try:
            ways = (
                "echo x >/grader/run", "rm /grader", "mv /grader /g2", "mv /data /d2",
                "mv /data/tools /data/t2", "ln -sfn /tmp /grader",
            )  # fmt: skip
            for way in ways:
                said = await say(harness, handle, f"({way}) 2>/dev/null || echo refused")
                assert said in ("refused", ""), way
            said = await say(harness, handle, "readlink /grader; cat /grader/run; touch /new")
            assert said.split() == ["data/tools", "graded"]
        finally:
            await harness.driver.stop(handle)
