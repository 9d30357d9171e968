"""Tasks really made from source releases, checked in the base image."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from demo.baseimage import base_image
from demo.grading import grade
from demo.reference import run_tests
from demo.tasks import REPORT_PATH, Task, build_tasks

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="building a root file system needs root"),
]


@pytest.fixture(scope="module")
def rootfs() -> Path:
    return base_image()


@pytest.fixture(scope="module")
def tasks(rootfs: Path) -> list[Task]:
    return build_tasks(rootfs)


def rollout(task: Task, tree: Path, rootfs: Path, *, fixed: bool) -> float:
    shutil.copytree(task.workspace_dir, tree, symlinks=True)
    changes = dict(task.fix) if fixed else {}
    for path, data in changes.items():
        if data is None:
            (tree / path).unlink()
        else:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(data)
    shutil.rmtree(tree / task.tests_dir)
    for path, data in task.tests.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(data)
    report = run_tests(rootfs, tree, command=task.test_command, report=REPORT_PATH)
    return grade(report, fail_to_pass=task.fail_to_pass, pass_to_pass=task.pass_to_pass).reward


def test_the_base_image_has_the_tools_a_task_needs(rootfs: Path) -> None:
    for tool in ("python3", "git", "ps", "pip3", "patch"):
        assert (rootfs / "usr/bin" / tool).exists()
    assert (rootfs / "workspace").is_dir()


def test_every_task_scores_one_with_its_fix_and_zero_without(
    tasks: list[Task], rootfs: Path, tmp_path: Path
) -> None:
    assert len(tasks) == 4
    for task in tasks:
        assert rollout(task, tmp_path / f"{task.name}-fix", rootfs, fixed=True) == 1.0, task.name
        assert rollout(task, tmp_path / f"{task.name}-idle", rootfs, fixed=False) == 0.0, task.name


def test_the_workspace_holds_neither_fix_nor_new_tests(tasks: list[Task]) -> None:
    for task in tasks:
        same = [
            path
            for path, data in (dict(task.fix) | dict(task.tests)).items()
            if data is not None
            and (task.workspace_dir / path).exists()
            and (task.workspace_dir / path).read_bytes() == data
        ]
        assert not set(same) & set(task.fix), task.name
        assert len(same) < len(task.tests), task.name
        assert not (task.workspace_dir / REPORT_PATH.removeprefix("/workspace/")).exists()


def test_nothing_stays_mounted_in_the_base_image(tasks: list[Task], rootfs: Path) -> None:
    assert str(rootfs) not in Path("/proc/mounts").read_text()
    assert not any((rootfs / "workspace").iterdir())


def test_a_second_build_comes_from_the_cache(tasks: list[Task], rootfs: Path) -> None:
    said: list[str] = []
    assert base_image(say=said.append) == rootfs
    assert [task.workspace_dir for task in build_tasks(rootfs, say=said.append)] == [
        task.workspace_dir for task in tasks
    ]
    assert said == []
