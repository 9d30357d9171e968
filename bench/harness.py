"""What every benchmark shares: percentiles, the machine's description, the output.

The last line printed with ``--json`` is one JSON object. Peers are measured in the
same run, in turns with ours, because machines drift.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

FILL_S = 4.0
"""Until the pool of warm shells is full and the import's writes are on disk."""
SETTLE_S = 0.03
"""Until what the engine does after an answer (its shim reaps, its events go out) no longer
takes a core from whoever is measured next."""


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample at ``share`` (0…1) of the sorted samples."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(samples_s: Sequence[float], prefix: str = "") -> dict[str, float]:
    """count, p50, p90, p99 and max in milliseconds of samples in seconds."""
    values = {"p50_ms": 0.50, "p90_ms": 0.90, "p99_ms": 0.99}
    figures = {f"{prefix}{k}": round(percentile(samples_s, v) * 1e3, 3) for k, v in values.items()}
    figures[f"{prefix}max_ms"] = round(max(samples_s) * 1e3, 3)
    figures[f"{prefix}count"] = len(samples_s)
    return figures


def machine() -> dict[str, Any]:
    """Where it ran."""
    return {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load1": round(os.getloadavg()[0], 2),
    }


async def timed(call: Callable[[], Awaitable[Any]]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    await call()
    return time.perf_counter() - start


async def in_turns(
    rounds: int, ours: Callable[[], Awaitable[Any]], peer: Callable[[], Any],
    *, peer_every: int = 1, turn: int = 1,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """Samples of both, taken in turns, each on a machine at rest: ``turn`` of the peer's after
    ``peer_every`` times as many of ours. ``peer`` is blocking and runs in a thread."""
    mine: list[float] = []
    theirs: list[float] = []
    while len(mine) < rounds:
        mine += [await timed(ours) for _ in range(min(turn * peer_every, rounds - len(mine)))]
        await asyncio.sleep(SETTLE_S)
        theirs += [await timed(lambda: asyncio.to_thread(peer)) for _ in range(turn)]
        await asyncio.sleep(SETTLE_S)
    return mine, theirs


@asynccontextmanager
async def local_system(**options: Any) -> Any:
    """A system of our own on loopback with the container driver and a base image;
    yields ``(system, client)``."""
    from bench.images import ensure_base
    from demo.cache import cache_dir
    from libdsec import DSecClient
    from services.local import LocalOptions, LocalSystem

    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as folder:
        chosen = LocalOptions(
            driver="container", state_dir=Path(folder), image_roots=[cache_dir()], **options
        )
        async with (
            LocalSystem(chosen) as system,
            DSecClient(url=system.url, api_key=system.admin_key, project=system.project) as client,
        ):
            await ensure_base(client)
            await asyncio.sleep(FILL_S)
            yield system, client


def emit(name: str, figures: dict[str, Any], *, as_json: bool) -> None:
    """Prints figures for a person, and as the last line for a machine."""
    for key, value in figures.items():
        print(f"  {key:<24} {value}")
    if as_json:
        print(json.dumps({"bench": name, **figures, "machine": machine()}))
