"""Lint, types and import contracts, as tests: what `make lint` and `make test` run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

REPOSITORY = Path(__file__).parents[2]
CHECKED = ("shared", "schemas", "libdsec", "services", "devstack", "demo", "sim")


def run(*argv: str) -> None:
    """Run a tool of this environment; its output is the failure's message."""
    tool = str(Path(sys.executable).parent / argv[0])
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [tool, *argv[1:]], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout[-8000:]}{done.stderr[-4000:]}"


def test_ruff() -> None:
    run("ruff", "check", ".")


def test_mypy() -> None:
    run("mypy", *CHECKED)


def test_import_contracts() -> None:
    run("lint-imports", "--no-logo")
