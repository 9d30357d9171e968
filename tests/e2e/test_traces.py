"""One trace from the client's call to the driver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from libdsec import DSecRunArgs
from services.local import LocalOptions, LocalSystem
from tests.e2e.conftest import UNMOVED, open_client, until


def _spans(path: Path, trace_id: str) -> dict[str, str]:
    """Names of the recorded spans of a trace, and which service recorded each."""
    found: dict[str, str] = {}
    text = path.read_text() if path.exists() else ""
    for line in text.split("\n")[:-1]:  # what is behind the last line end is being written
        span: dict[str, Any] = json.loads(line)
        if span["context"]["trace_id"].endswith(trace_id):
            found[span["name"]] = span["resource"]["attributes"]["service.name"]
    return found


@pytest.fixture
def tracer() -> Any:
    return TracerProvider().get_tracer("trainer")


async def test_one_trace_leads_from_the_client_to_the_driver(tmp_path: Path, tracer: Any) -> None:
    options = LocalOptions(driver="fake", state_dir=tmp_path, trace=True, env=UNMOVED)
    async with LocalSystem(options) as system, open_client(system) as client:
        with tracer.start_as_current_span("rollout") as span:
            trace_id = f"{span.get_span_context().trace_id:032x}"
            sandbox = await client.create(DSecRunArgs(backend="fake"), timeout=60)
            await sandbox.exec("true")
        await sandbox.stop()

        async def all_there() -> dict[str, str] | None:
            found = _spans(tmp_path / "trace.jsonl", trace_id)
            services = {"dsec-auth", "dsec-scheduler", "dsec-edge"}
            return found if services <= set(found.values()) and "edge exec" in found else None

        found = await until(all_there, what="spans of every hop")
        assert found["edge start"] == "dsec-edge"
