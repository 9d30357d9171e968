"""What the rollouts of a run are to solve, and the images they need.

Owns: tasks of the demonstration (pairs of source releases) as tasks of
:mod:`libdsec.verify` with a repository in their workspace, and one small task of its own
for runs that must be short. Does not own: how a verdict is taken.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from demo.baseimage import base_image
from demo.grading import grade
from demo.tasks import RECIPES, REPORT_PATH, build_tasks
from demo.tasks import Task as Pair
from libdsec import DSecClient
from libdsec.verify import Evidence, Task
from sim.chaos.script import MEMORY_LIMIT_MB, PIDS_LIMIT
from sim.chaos.trace import Outcome

BASE = "chaos-base:1"
SMALL = "small"
GIT_S = 60.0
LIMITS: Mapping[str, object] = {
    "memory_limit_mb": (128, MEMORY_LIMIT_MB), "cpu_cores_limit": (0.5, 2.0),
    "pids_limit": PIDS_LIMIT, "init_user": "root",
}  # fmt: skip
BROKEN = b"raise RuntimeError('handed in unfinished')\n"


@dataclass(frozen=True)
class Exercise:
    """A task, the tree of its workspace, and what a rollout may hand in: file → content,
    ``None`` where it is removed."""

    name: str
    task: Task
    workspace: Mapping[str, bytes]
    fix: Mapping[str, bytes | None]

    def work(self, outcome: Outcome) -> Mapping[str, bytes | None]:
        """What is handed in."""
        if outcome == "wrong":
            return {min(p for p, data in self.fix.items() if data): BROKEN}
        return self.fix if outcome == "fix" else {}

    @property
    def image(self) -> str:
        """The name of its workspace layer."""
        return image_of(self.name)


def image_of(name: str) -> str:
    """The name of a task's workspace layer."""
    return f"chaos-{name}:1"


def exercises(names: Iterable[str]) -> dict[str, Exercise]:
    """The exercises by name. Those of the demonstration are made where they are not
    cached: a minute, once, with root and pip."""
    wanted = set(names)
    recipes = [recipe for recipe in RECIPES if recipe.name in wanted]
    pairs = build_tasks(base_image(), recipes=recipes) if recipes else []
    found = {pair.name: _of_pair(pair) for pair in pairs}
    if SMALL in wanted:
        found[SMALL] = _small()
    if missing := wanted - set(found):
        raise ValueError(f"there is no task {', '.join(sorted(missing))}")
    return found


def _layers(name: str) -> Sequence[str]:
    return [BASE, image_of(name)]


def _of_pair(pair: Pair) -> Exercise:
    task = Task(
        layers=_layers(pair.name), tests=pair.tests, clear=[pair.tests_dir],
        command=pair.test_command.replace(REPORT_PATH, '"$DSEC_REPORT"'), user="nobody",
        judge=partial(_judge, pair), args=LIMITS,
    )  # fmt: skip
    folder = pair.workspace_dir
    files = (p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    tree = {str(p.relative_to(folder)): p.read_bytes() for p in files}
    return Exercise(pair.name, task, tree, pair.fix)


def _judge(pair: Pair, evidence: Evidence) -> float:
    found = grade(
        evidence.report or b"", fail_to_pass=pair.fail_to_pass, pass_to_pass=pair.pass_to_pass
    )
    return found.reward


def _small() -> Exercise:
    check = (
        b"import sys; sys.path.insert(0, '/workspace')\nimport calc\nassert calc.add(2, 3) == 5\n"
    )
    task = Task(
        layers=_layers(SMALL), tests={"checks/check_add.py": check}, clear=["checks"],
        command="python3 -B checks/check_add.py", user="nobody", args=LIMITS,
    )  # fmt: skip
    wrong, right = (f"def add(a, b):\n    return a {sign} b\n".encode() for sign in "-+")
    return Exercise(SMALL, task, {"calc.py": wrong}, {"calc.py": right})


async def register(client: DSecClient, found: Iterable[Exercise], folder: Path) -> None:
    """Imports the base image and the workspaces, by way of ``folder``, from which the
    system imports."""
    known = {image.name for image in await client.images.list()}
    if BASE not in known:
        await client.images.create(BASE, path=str(base_image()))
    for exercise in found:
        if exercise.image not in known:
            tree = folder / exercise.name
            _repository(tree, exercise.workspace)
            await client.images.create(
                exercise.image, path=str(tree), kind="workspace", prefix="/workspace"
            )
            shutil.rmtree(tree)


def _repository(tree: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    git = ["git", "-C", str(tree), "-c", "user.name=base", "-c", "user.email=base@localhost"]
    for words in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-q", "-m", "base"]):
        subprocess.run([*git, *words], check=True, timeout=GIT_S, capture_output=True)
