"""The tree is laid out as the documents say, and the documents say what is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SERVICES = ("auth", "scheduler", "edge", "imagesvc", "audit", "burst")
COMMON = {"__init__.py", "__main__.py", "app.py", "handlers.py", "settings.py"}
WITH_DATABASE = {"store.py", "tables.py", "migrations"}
DOCUMENTS = sorted(
    [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")], key=lambda p: p.name
)
# written apart, so that this file does not name what it looks for
HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"), ("files", "pythonhosted", "org"), ("registry", "npmjs", "org"),
        ("registry-1", "docker", "io"), ("deb", "debian", "org"), ("ghcr", "io"),
    )
)  # fmt: skip


def tracked() -> list[Path]:
    """Files of the repository that exist."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [p for line in listed.stdout.splitlines() if (p := REPOSITORY / line).is_file()]


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_the_same_files(service: str) -> None:
    names = {path.name for path in (REPOSITORY / "services" / service).iterdir()}
    expected = COMMON if service == "edge" else COMMON | WITH_DATABASE
    assert expected <= names


def test_no_other_folder_is_a_service() -> None:
    folders = {p.parent.name for p in (REPOSITORY / "services").glob("*/__main__.py")}
    assert folders == set(SERVICES)


def test_every_module_says_what_it_is() -> None:
    import ast

    silent = [
        str(path.relative_to(REPOSITORY))
        for path in tracked()
        if path.suffix == ".py"
        and path.parts[len(REPOSITORY.parts)] in ("services", "shared", "schemas", "libdsec")
        and path.read_text().strip()
        and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


def test_no_file_names_a_registry() -> None:
    found = {}
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        hosts = [host for host in HOSTS if host in text]
        if hosts:
            found[str(path.relative_to(REPOSITORY))] = hosts
    assert found == {}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_links_between_documents_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (page.parent / link).exists()] == []


PROMISES = [p for p in DOCUMENTS if "\n| What holds | Test |\n" in p.read_text()]


def test_pages_of_promises_are_found() -> None:
    assert {"exec-and-files.md", "jobs.md", "pause-and-time.md"} <= {page.name for page in PROMISES}


@pytest.mark.parametrize("page", PROMISES, ids=lambda p: p.stem)
def test_each_line_of_a_page_of_promises_names_a_test_that_exists(page: Path) -> None:
    lines = page.read_text().splitlines()
    rows = [line for line in lines if re.match(r"\| (?!What holds)", line)]
    named = [re.findall(r"`(test_\w+)`", row.rsplit("|", 2)[1]) for row in rows]
    assert [r for r, names in zip(rows, named, strict=True) if not names] == []
    tests = "\n".join(p.read_text() for p in tracked() if p.name.startswith("test_"))
    defined = set(re.findall(r"^(?:async )?def (test_\w+)\(", tests, re.M))
    assert {name for names in named for name in names} - defined == set()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SCOPE.md", "CHANGELOG.md"])
def test_documents_name_make_targets_and_files_that_exist(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.M))
    named = set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", text, re.M))
    assert named <= targets
    paths = re.findall(
        r"`((?:services|shared|schemas|tests|scripts|devstack|deploy)/[\w./-]+)`", text
    )
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_the_architecture_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/diagrams.py", "--check"],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_decisions_are_numbered_once() -> None:
    pages = sorted(p.name for p in (REPOSITORY / "docs/adr").glob("*.md"))
    assert pages
    numbers = [page.split("-")[0] for page in pages]
    assert all(re.fullmatch(r"\d{4}", number) for number in numbers)
    assert len(set(numbers)) == len(numbers)
