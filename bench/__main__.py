"""``python -m bench NAME``: runs one benchmark."""

from __future__ import annotations

import argparse
import asyncio
import importlib

from bench.harness import emit

BENCHES = {
    "policy": ("bench.policy", "connects and names under rules, creates with a policy, and audit"),
    "audit": ("bench.audit_figures", "violations into the record, and findings on the bus"),
    "create": ("bench.create", "warm create to first exec, beside Docker's run and exec"),
    "image": ("bench.image", "first exec in a cold image, beside a full fetch and Docker"),
    "pause": ("bench.pause", "pause, reclaim and resume, beside Docker's pause"),
    "exec": ("bench.execs", "`true` in a running sandbox, beside docker exec"),
}


def main() -> None:
    """Parses the command line and runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = "; ".join(f"{name}: {doc}" for name, (_, doc) in BENCHES.items())
    parser.add_argument("name", choices=sorted(BENCHES), help=names)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, at most 50 s")
    args = parser.parse_args()
    module = importlib.import_module(BENCHES[args.name][0])
    figures = asyncio.run(module.run(quick=args.quick))
    emit(args.name, figures, as_json=args.json)


if __name__ == "__main__":
    main()
