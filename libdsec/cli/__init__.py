"""``dsec``: the command line, a mirror of the SDK.

Exit codes: the command's own for ``run`` and ``exec``; 124 when it ran into its time
limit; 125 for an error of dsec; 2 for wrong usage. ``--json`` everywhere; colours and
progress only on a terminal.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point ``dsec``."""
    try:
        from libdsec.cli.app import app
    except ModuleNotFoundError as exc:
        if exc.name not in ("typer", "rich"):
            raise
        print("dsec: the command line needs the extra `cli` (typer, rich)", file=sys.stderr)
        raise SystemExit(125) from None
    app()
