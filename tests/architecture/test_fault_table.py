"""The table of faults names tests that are there and that are about the fault."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROW = re.compile(r"^\| ([A-Z]\d\d) \| .* \| (.*) \|$")


def rows() -> list[tuple[str, list[str]]]:
    """Fault id and the tests named for it."""
    lines = (REPOSITORY / "docs/faults.md").read_text().splitlines()
    found = [match for line in lines if (match := ROW.match(line))]
    return [(match[1], re.findall(r"`([^`]+)`", match[2])) for match in found]


def docstring(test: str) -> str:
    """Of the test ``path::name``. Raises where there is none."""
    path, _, name = test.partition("::")
    for node in ast.parse((REPOSITORY / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
    raise LookupError(test)


def test_the_table_has_every_fault_once() -> None:
    ids = [fault for fault, _ in rows()]
    assert len(ids) == len(set(ids)) >= 40


@pytest.mark.parametrize(("fault", "tests"), rows())
def test_every_fault_has_tests_that_say_so(fault: str, tests: list[str]) -> None:
    assert tests
    for test in tests:
        assert re.search(rf"\b{fault}\b", docstring(test)), test
