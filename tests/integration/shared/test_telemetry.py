"""One trace across two services, written to files, through a question and a stream."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.bus import Bus, Outgoing
from shared.migrate import ROOT
from tests.integration.conftest import Stack
from tests.integration.shared.streams import make_durable

pytestmark = pytest.mark.integration

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = f"00-{TRACE}-b7ad6b7169203331-01"
UNSAMPLED = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"

SERVICE = """
import asyncio, os, sys
from functools import partial
from schemas.base import Ok
from schemas.streams import Durable
from shared import process, settings, telemetry
from shared.bus import Bus, Outgoing
from shared.consumer import BatchConsumer

async def front(config, stop):
    bus, (stream, name) = Bus(config, "front"), sys.argv[2:4]
    async def handle(batch):
        with telemetry.span("front.batch", parents=[m.trace for m in batch],
                            attributes={"count": len(batch)}):
            await bus.request("t.back", Ok(), Ok)
    await bus.start()
    BatchConsumer(bus, Durable(name, stream, (), owner="t"), handle).start()
    await stop.wait()
    await bus.close()

async def back(config, stop):
    bus = Bus(config, "back")
    async def answer(message, incoming):
        with telemetry.span("back.work"):
            return Ok()
    bus.answer("t.back", Ok, answer)
    await bus.start()
    await bus.send(Outgoing(sys.argv[2], b"behind its subscription on this connection"))
    await stop.wait()
    await bus.close()


config = process.configured(sys.argv[1], settings.Common)
process.run(sys.argv[1], config, partial({"front": front, "back": back}[sys.argv[1]], config))
"""


def start(stack: Stack, script: Path, *argv: str, trace: Path) -> subprocess.Popen[bytes]:
    common = stack.settings()
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "DSEC_NATS_URL": common.nats_url,
        "DSEC_NATS_USER": str(common.nats_user), "DSEC_NATS_PASSWORD": str(common.nats_password),
        "DSEC_TRACE_FILE": str(trace),
    }  # fmt: skip
    return subprocess.Popen([sys.executable, str(script), *argv], env=env)


async def test_a_trace_runs_from_the_client_through_both_services(
    stack: Stack, bus: Bus, tmp_path: Path
) -> None:
    durable = await make_durable(bus)
    script = tmp_path / "service.py"
    script.write_text(SERVICE)
    subject = durable.filters[0]
    await bus.store(
        [
            Outgoing(subject, b"1", {"traceparent": UNSAMPLED}),
            Outgoing(subject, b"2", {"traceparent": CLIENT}),
            Outgoing(subject, b"3"),
            Outgoing(subject, b"4", {"traceparent": "garbage"}),
        ]
    )
    files = {name: tmp_path / f"{name}.jsonl" for name in ("front", "back")}
    answering = await bus.client.subscribe(bus.client.new_inbox())
    processes = [start(stack, script, "back", answering.subject, trace=files["back"])]
    try:
        # a batch nobody answered would come again in parts
        await answering.next_msg(timeout=60)
        argv = ("front", durable.stream, durable.name)
        processes.append(start(stack, script, *argv, trace=files["front"]))
        end = time.monotonic() + 60
        while True:
            left = await bus.js.consumer_info(durable.stream, durable.name)
            if not left.num_pending and not left.num_ack_pending:
                break
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(60) for process in processes]
    assert codes == [0, 0]
    spans = {
        span["name"]: span
        for file in files.values()
        for span in map(json.loads, file.read_text().splitlines())
    }
    assert {s["context"]["trace_id"] for s in spans.values()} == {f"0x{TRACE}"}
    batch, work = spans["front.batch"], spans["back.work"]
    assert batch["parent_id"] == "0xb7ad6b7169203331", "the sampled one is the parent"
    assert batch["attributes"]["count"] == 4
    door = spans["t.back"]
    assert door["parent_id"] == batch["context"]["span_id"]
    assert work["parent_id"] == door["context"]["span_id"]
    assert work["resource"]["attributes"]["service.name"] == "dsec-back"
