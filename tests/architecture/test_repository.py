"""What a clean clone must hold, and what no file may name."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-inspect.lock"])
def test_a_lock_pins_every_package_with_hashes_and_names_no_index(lock: str) -> None:
    text = (REPOSITORY / lock).read_text()
    assert "://" not in text
    assert not re.search(r"^\s*(-i|-f|--index|--extra|--find|--trusted)", text, re.MULTILINE)
    blocks = re.split(r"\n(?=[a-z0-9])", text.split("\n#\n")[-1].strip())
    for block in blocks:
        assert re.match(r"[a-z0-9._-]+==\S+", block), block[:60]
        assert "--hash=sha256:" in block, block[:60]


def test_the_lock_holds_every_declared_dependency() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = project["dependencies"] + extras["edge"] + extras["local"] + extras["dev"]
    lock = (REPOSITORY / "requirements.lock").read_text()
    locked = {name.replace("_", "-") for name in re.findall(r"^([a-z0-9._-]+)==", lock, re.M)}
    for requirement in declared:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert name is not None
        assert name[0].lower() in locked


def test_a_harness_is_pinned_to_the_version_that_its_checks_are_counted_for() -> None:
    asked = (REPOSITORY / "requirements-inspect.in").read_text()
    version = re.search(r"^inspect_ai==(\S+)$", asked, re.M)
    assert version is not None
    lock = (REPOSITORY / "requirements-inspect.lock").read_text()
    assert f"\ninspect-ai=={version[1]} " in lock


def test_each_dependency_says_why_it_is_there() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    for line in re.findall(r'^  "[a-z][a-z0-9-]*(?:\[.*?\])?>=.*$', text, re.M):
        assert re.search(r'", +# \S+', line), line


def test_every_make_target_is_in_its_help() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.M)
    assert phony is not None
    help_text = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout
    listed = set(re.findall(r"^  (\S+) ", help_text, re.M))
    assert listed == set(phony[1].split())


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    found = subprocess.run(
        ["git", "grep", "-lF", f"{REPOSITORY}/"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert found.stdout == ""
