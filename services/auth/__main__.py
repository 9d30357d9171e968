"""``python -m services.auth``: the service. With an argument: a tool of its operator.

``bootstrap``: makes the root project, its administrator and keys of nodes.
``mint-nkey``: makes an account key for the auth callout.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from functools import partial
from pathlib import Path

from services.auth import app, bootstrap
from services.auth.settings import Settings
from shared import process, settings
from shared.errors import DsecError


def main(argv: list[str]) -> None:
    """Runs the service, or the tool that ``argv`` names."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.tool == "mint-nkey":
            _mint(arguments.out)
        elif arguments.tool == "bootstrap":
            _bootstrap(arguments)
        else:
            loaded = settings.load(Settings)
            process.run("auth", loaded, partial(app.run, loaded))
    except DsecError as exc:
        sys.exit(f"auth: {exc.message}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.auth")
    tools = parser.add_subparsers(dest="tool")
    first = tools.add_parser("bootstrap", help="root project, administrator, node keys")
    first.add_argument("--project", default="root", help="id of the root project")
    first.add_argument("--node", action="append", default=[], help="a node to make a key for")
    first.add_argument("--out", type=Path, required=True, help="file for the secrets (0600)")
    minted = tools.add_parser("mint-nkey", help="account key for the auth callout")
    minted.add_argument("--out", type=Path, required=True, help="file for the seed (0600)")
    return parser


def _bootstrap(arguments: argparse.Namespace) -> None:
    loaded = settings.load(Settings)
    made = asyncio.run(
        bootstrap.bootstrap(
            loaded.pg_dsn, loaded.auth_account_seed, project=arguments.project,
            nodes=arguments.node,
        )
    )  # fmt: skip
    bootstrap.write(made, arguments.out)
    print(f"{made!r} in {arguments.out}")


def _mint(out: Path) -> None:
    seed, public = bootstrap.mint()
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(seed + "\n")
    print(public)


if __name__ == "__main__":
    main(sys.argv[1:])
