"""Software engineering tasks made from pairs of source releases.

A task is: the older release as the workspace, the newer release's source changes as
the fix, the newer release's tests as the verifier. Tests that the fix makes pass
(fail-to-pass) and tests it must not break (pass-to-pass) are found once by running
both in the base image.

Owns: the recipes and the cached tasks. Does not own: running rollouts.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo.cache import cache_dir, make_once
from demo.grading import Outcome, parse_report, split_tests
from demo.reference import run_tests
from demo.sources import Sdist, download, find_archive, unpack

REPORT_PATH = "/workspace/.dsec-report.xml"
_TASK_FORMAT = "1"  # counts up when what is cached changes
_P2P_TOLERANCE = 0.10


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one task. ``source`` and ``tests`` are top directories of both
    releases. ``expected`` are the counts (fail-to-pass, pass-to-pass) once measured
    with CPython 3.11 and pytest 7.2."""

    name: str
    old: Sdist
    new: Sdist
    source: str
    tests: str
    expected: tuple[int, int]


RECIPES = (
    Recipe(
        "more-itertools",
        Sdist(
            "more-itertools",
            "10.2.0",
            "8fccb480c43d3e99a00087634c06dd02b0d50fbf088b380de5a41a015ec239e1",
        ),
        Sdist(
            "more-itertools",
            "10.3.0",
            "e5d93ef411224fbcef366a6e8ddc4c5781bc6359d43412a65dd5964e46111463",
        ),
        source="more_itertools",
        tests="tests",
        expected=(18, 629),
    ),
    Recipe(
        "sqlparse",
        Sdist(
            "sqlparse",
            "0.5.0",
            "714d0a4932c059d16189f58ef5411ec2287a4360f17cdd0edd2d09d4c5087c93",
        ),
        Sdist(
            "sqlparse",
            "0.5.1",
            "bb6b4df465655ef332548e24f08e205afc81b9ab86cb1c45657a7ff173a3a00e",
        ),
        source="sqlparse",
        tests="tests",
        expected=(11, 449),
    ),
    Recipe(
        "wcwidth",
        Sdist(
            "wcwidth",
            "0.2.12",
            "f01c104efdf57971bcb756f054dd58ddec5204dd15fa31d6503ea57947d97c02",
        ),
        Sdist(
            "wcwidth",
            "0.2.13",
            "72ea0c06399eb286d978fdedb6923a9eb47e1c486ce63e9b4e64fc18303972b5",
        ),
        source="wcwidth",
        tests="tests",
        expected=(2, 35),
    ),
    Recipe(
        "parso",
        Sdist(
            "parso",
            "0.8.3",
            "8c07be290bb59f03588915921e29e8a50002acaf2cdc5fa0e0114f91709fafa0",
        ),
        Sdist(
            "parso",
            "0.8.4",
            "eb3a7b58240fb99099a345571deecc0f9540ea5f4dd2fe14c2a99d6b281ab92d",
        ),
        source="parso",
        tests="test",
        expected=(20, 1328),
    ),
)


@dataclass(frozen=True, slots=True)
class Task:
    """One task. All paths of ``fix`` and ``tests`` are relative to ``/workspace``.

    ``workspace_dir`` is the tree of the workspace layer. ``fix`` maps files to their
    new content, ``None`` = deleted. ``tests`` are the verifier's files; ``tests_dir``
    is removed before they are brought in. ``test_command`` is a shell command for
    ``/workspace`` that writes a JUnit report to ``REPORT_PATH``."""

    name: str
    workspace_dir: Path
    fix: Mapping[str, bytes | None]
    tests: Mapping[str, bytes]
    tests_dir: str
    test_command: str
    fail_to_pass: Sequence[str]
    pass_to_pass: Sequence[str]


def build_tasks(
    rootfs: Path,
    cache: Path | None = None,
    *,
    recipes: Sequence[Recipe] = RECIPES,
    say: Callable[[str], None] = lambda _: None,
) -> list[Task]:
    """The tasks of ``recipes`` for the base image ``rootfs`` (``base_image()``), made
    when they are not cached: about a minute the first time. Needs root and pip."""
    folder = (cache or cache_dir()) / "tasks"
    entries = {recipe: folder / f"{recipe.name}-{_key(recipe, rootfs)}" for recipe in recipes}
    missing = [recipe for recipe, entry in entries.items() if not entry.exists()]
    if missing:
        say(f"making {len(missing)} tasks from source releases (a minute, once)")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".sdists-", dir=folder) as archives:
            download([recipe.old for recipe in missing], Path(archives))
            download([recipe.new for recipe in missing], Path(archives))
            for recipe in missing:
                make_once(entries[recipe], _maker(recipe, Path(archives), rootfs))
    return [_load(recipe, entry) for recipe, entry in entries.items()]


def _maker(recipe: Recipe, archives: Path, rootfs: Path) -> Callable[[Path], None]:
    return lambda part: _make(recipe, archives, part, rootfs)


def _key(recipe: Recipe, rootfs: Path) -> str:
    text = f"{_TASK_FORMAT} {recipe!r} {command_for(recipe)} {rootfs.name}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def command_for(recipe: Recipe) -> str:
    """pytest without the project's own configuration, which asks for plug-ins."""
    return (
        "PYTHONDONTWRITEBYTECODE=1 python3 -m pytest -q -c /dev/null --rootdir=/workspace "
        f"-p no:cacheprovider --junitxml={REPORT_PATH} {recipe.tests}"
    )


def _make(recipe: Recipe, archives: Path, part: Path, rootfs: Path) -> None:
    old, new = part / "workspace", part / "new"
    unpack(find_archive(archives, recipe.old), old)
    unpack(find_archive(archives, recipe.new), new)
    fix = diff_trees(_files(old / recipe.source, old), _files(new / recipe.source, new))
    tests = _files(new / recipe.tests, new)
    shutil.rmtree(new)
    before = _reference_run(recipe, old, {}, tests, rootfs)
    after = _reference_run(recipe, old, fix, tests, rootfs)
    fail_to_pass, pass_to_pass = split_tests(before, after)
    check_counts(recipe, len(fail_to_pass), len(pass_to_pass))
    _write_tree(part / "fix", {path: data for path, data in fix.items() if data is not None})
    _write_tree(part / "tests", tests)
    facts = {
        "deleted": sorted(path for path, data in fix.items() if data is None),
        "fail_to_pass": fail_to_pass,
        "pass_to_pass": pass_to_pass,
    }
    (part / "task.json").write_text(json.dumps(facts, indent=1))


def _reference_run(
    recipe: Recipe,
    workspace: Path,
    fix: Mapping[str, bytes | None],
    tests: Mapping[str, bytes],
    rootfs: Path,
) -> Mapping[str, Outcome]:
    with tempfile.TemporaryDirectory(prefix=".run-", dir=workspace.parent) as scratch:
        tree = Path(scratch) / "workspace"
        shutil.copytree(workspace, tree, symlinks=True)
        _write_tree(tree, fix)
        shutil.rmtree(tree / recipe.tests)
        _write_tree(tree, tests)
        report = run_tests(rootfs, tree, command=command_for(recipe), report=REPORT_PATH)
        return parse_report(report)


def check_counts(recipe: Recipe, fail_to_pass: int, pass_to_pass: int) -> None:
    """Refuse a task that is not what its recipe promises. Not exact: another
    interpreter or pytest skips a few tests or numbers parameters differently. A
    broken recipe shows as no fail-to-pass test or as whole files missing."""
    wanted_f2p, wanted_p2p = recipe.expected
    off = abs(pass_to_pass - wanted_p2p) > max(3, _P2P_TOLERANCE * wanted_p2p)
    if not 1 <= fail_to_pass <= 2 * wanted_f2p or off:
        raise RuntimeError(
            f"task {recipe.name}: {fail_to_pass} fail-to-pass and {pass_to_pass} pass-to-pass "
            f"tests, but about {wanted_f2p} and {wanted_p2p} were expected"
        )


def diff_trees(
    old: Mapping[str, bytes], new: Mapping[str, bytes]
) -> dict[str, bytes | None]:
    """What turns ``old`` into ``new``: path -> new content, ``None`` = deleted."""
    changed: dict[str, bytes | None] = {
        path: data for path, data in new.items() if old.get(path) != data
    }
    return changed | {path: None for path in old if path not in new}


def _files(folder: Path, top: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(top)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def _write_tree(top: Path, files: Mapping[str, bytes | None]) -> None:
    top.mkdir(exist_ok=True)
    for path, data in files.items():
        target = top / path
        if data is None:
            target.unlink()
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def _load(recipe: Recipe, entry: Path) -> Task:
    facts = json.loads((entry / "task.json").read_text())
    fix: dict[str, bytes | None] = dict(_files(entry / "fix", entry / "fix"))
    return Task(
        name=recipe.name,
        workspace_dir=entry / "workspace",
        fix=fix | dict.fromkeys(facts["deleted"]),
        tests=_files(entry / "tests", entry / "tests"),
        tests_dir=recipe.tests,
        test_command=command_for(recipe),
        fail_to_pass=facts["fail_to_pass"],
        pass_to_pass=facts["pass_to_pass"],
    )
