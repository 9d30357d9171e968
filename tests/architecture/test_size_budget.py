"""The size budget: small files, small functions."""

from __future__ import annotations

import ast
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MEDIAN_FUNCTION_LINES = 10
P90_FUNCTION_LINES = 30
GENERATED = {"libdsec/_wire.py"}


def python_files() -> list[Path]:
    """Tracked and new files, not the ignored ones."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = (REPOSITORY / line for line in listed.stdout.splitlines() if line not in GENERATED)
    return [path for path in paths if path.exists()]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines without the docstring) of each function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                doc = node.body[0]
                lines -= (doc.end_lineno or doc.lineno) - doc.lineno + 1
            yield f"{path.relative_to(REPOSITORY)}:{node.lineno} {node.name}", lines


def test_no_file_is_too_long() -> None:
    files = python_files()
    assert files
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    assert {p.name: n for p, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    long = [
        (name, lines)
        for path in python_files()
        for name, lines in functions(path)
        if lines > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_functions_are_small_on_the_whole() -> None:
    lengths = sorted(lines for path in python_files() for _, lines in functions(path))
    assert statistics.median(lengths) <= MEDIAN_FUNCTION_LINES
    assert lengths[int(len(lengths) * 0.9)] <= P90_FUNCTION_LINES
