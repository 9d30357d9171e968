"""The command line of the local system: starts it, says what runs where, waits."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

from devstack.process import StartError
from services.local import DRIVERS, LocalOptions, LocalSystem, default_state_dir


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m services.local",
        description="The whole system on loopback: NATS, PostgreSQL, Valkey, all services and "
        "one edge. Ctrl-C ends it; the state directory keeps what it knows.",
    )
    parser.add_argument(
        "--driver", action="append", choices=DRIVERS,
        help="backend of the nodes, may be repeated (default: container)",
    )  # fmt: skip
    parser.add_argument("--nodes", type=int, default=1, help="edges, for driver fake (default: 1)")
    parser.add_argument(
        "--state-dir", type=Path, help=f"where everything is kept (default: {default_state_dir()})"
    )
    parser.add_argument(
        "--image-root", action="append", type=Path, metavar="DIR",
        help="folder that images may be imported from, may be repeated (default: this one)",
    )  # fmt: skip
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument(
        "--keep-sandboxes", action="store_true", help="leave sandboxes running at the end"
    )
    parser.add_argument("--trace", action="store_true", help="collect spans in the state directory")
    parser.add_argument("--json", action="store_true", help="one line of JSON when ready, no table")
    return parser.parse_args(argv)


def options(args: argparse.Namespace) -> LocalOptions:
    """The options that the arguments name."""
    return LocalOptions(
        driver=tuple(args.driver or ("container",)), nodes=args.nodes, state_dir=args.state_dir,
        image_roots=[root.resolve() for root in args.image_root or [Path.cwd()]],
        log_level=args.log_level, trace=args.trace,
        keep_sandboxes=args.keep_sandboxes,
    )  # fmt: skip


def describe(system: LocalSystem, took_s: float) -> str:
    """What runs where and how to use it, for a person."""
    rows = [("process", "pid", "health", "log")]
    for row in system.table():
        port = f"127.0.0.1:{row['health_port']}" if row["health_port"] else ""
        rows.append((row["name"], str(row["pid"]), port, row["log"]))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    return "\n".join(
        [
            *lines, "",
            f"ready after {took_s:.1f} s: {system.url}, project {system.project}", "",
            f"  source {system.state_dir}/client.env",
            "  dsec ps", "",
            "Ctrl-C ends it.",
        ]
    )  # fmt: skip


def as_json(system: LocalSystem, took_s: float) -> str:
    """The same for a machine; secrets stay in the files it names."""
    report: dict[str, Any] = {
        "url": system.url,
        "project": system.project,
        "client_env": str(system.state_dir / "client.env"),
        "config": str(system.state_dir / "config.toml"),
        "took_s": round(took_s, 2),
        "processes": system.table(),
    }
    return json.dumps(report)


async def _main(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    began = time.monotonic()
    system = LocalSystem(options(args))
    starting = asyncio.create_task(system.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
    try:
        await starting
        took_s = time.monotonic() - began
        print((as_json if args.json else describe)(system, took_s), flush=True)
        await stopping
        print("ending …", file=sys.stderr, flush=True)
    except asyncio.CancelledError:
        print("ended before it was ready", file=sys.stderr)
    finally:
        stopping.cancel()
        await system.stop()


def main() -> None:
    """Runs until Ctrl-C; exits with 1 and the reason where it cannot start."""
    args = parse()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        asyncio.run(_main(args))
    except* (StartError, ValueError, FileNotFoundError) as group:
        sys.exit("\n".join(f"local: {exc}" for exc in group.exceptions))


if __name__ == "__main__":
    main()
