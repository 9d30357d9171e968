"""``python -m services.local``: one command up, one Ctrl-C down, nothing left, no secret shown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import psutil
import pytest

from libdsec import DSecClient, DSecContainerRunArgs
from services.local import LocalOptions, LocalSystem, default_state_dir
from services.localkeeper import CLEARING
from tests.e2e.conftest import UNMOVED, open_client, until
from tests.integration.container.images import busybox_tree

REPOSITORY = Path(__file__).parents[2]
GONE_S = 60
"""Whoever dies with another is gone by then."""


class Command:
    """The command line, started."""

    def __init__(self, state_dir: Path, *options: str) -> None:
        argv = [sys.executable, "-m", "services.local", "--json", "--driver", "fake"]
        self.process = subprocess.Popen(
            [*argv, "--state-dir", str(state_dir), *options], cwd=REPOSITORY, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        report: dict[str, Any] = json.loads(line)
        return report

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Any]:
    made: list[Command] = []

    def start(*options: str) -> Command:
        made.append(Command(tmp_path / "state", *options))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


def gone(family: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(family, timeout=GONE_S)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_it_starts_again_on_its_state_and_ctrl_c_leaves_nothing(
    command: Any, tmp_path: Path
) -> None:
    first = command()
    report = first.ready()
    names = [row["name"] for row in report["processes"]]
    assert names[:3] == ["nats", "postgres", "valkey"]
    assert names[-1].startswith("edge-")
    config = tomllib.loads(Path(report["config"]).read_text())
    assert (config["url"], config["project"]) == (report["url"], "root")
    for name in ("client.env", "config.toml", "secrets.json", "access.json"):
        assert (tmp_path / "state" / name).stat().st_mode & 0o777 == 0o600
    family = first.family()
    assert first.end(signal.SIGINT) == 0
    assert gone(family)
    again = command()
    same = tomllib.loads(Path(again.ready()["config"]).read_text())
    assert same["api_key"] == config["api_key"], "the key lives on"
    again.end(signal.SIGTERM)


def test_a_killed_supervisor_takes_its_children_with_it(command: Any) -> None:
    one = command()
    one.ready()
    family = one.family()
    assert len(family) >= 9
    one.end(signal.SIGKILL)
    assert gone(family)


@pytest.mark.docker
def test_a_system_that_is_killed_with_its_edge_leaves_no_sandbox(
    command: Any, tmp_path: Path
) -> None:
    """No one of them can tidy up: whoever waits for their death does. A start on the same
    state meanwhile waits for that, and knows what became of the sandbox."""
    images = tmp_path / "images"
    one = command("--driver", "container", "--image-root", str(tmp_path))
    report = one.ready()
    node = next(r["name"] for r in report["processes"] if r["name"].startswith("edge-"))[5:]
    sandbox = asyncio.run(running_container(report, busybox_tree(images)))
    assert len(containers(node)) >= 1
    folders = tmp_path / f"state/nodes/{node}/drivers/container/sandboxes"
    assert [f.name for f in folders.iterdir()]
    family = one.family()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # a short one may have ended by itself
            if "services.edge" in process.cmdline():
                process.kill()
    one.end(signal.SIGKILL)
    clearing(tmp_path / "state/lock")
    again = command("--driver", "container")
    known = asyncio.run(state_of(again.ready(), sandbox))
    assert gone(family)
    assert known in ("lost", "failed", "stopped")
    assert not list(folders.iterdir())
    assert "cleared 1 sandboxes" in (tmp_path / "state/logs/keeper.log").read_text()
    again.end(signal.SIGINT)
    assert not containers(node)


def clearing(lock: Path) -> None:
    """Returns when whoever waits for the system's death has begun its work."""
    end = time.monotonic() + GONE_S
    while CLEARING not in lock.read_text():
        assert time.monotonic() < end, "nobody tidies up"
        time.sleep(0.02)


def containers(node: str) -> list[str]:
    engine = docker.APIClient()
    try:
        found = engine.containers(all=True, filters={"label": f"dsec.node={node}"})
        return [c["Id"] for c in found]
    finally:
        engine.close()


def client_of(report: dict[str, Any]) -> DSecClient:
    config = tomllib.loads(Path(report["config"]).read_text())
    return DSecClient(
        url=config["url"], api_key=config["api_key"], project=config["project"], keep=True
    )


async def running_container(report: dict[str, Any], tree: Path) -> str:
    async with client_of(report) as client:
        await client.images.create("small:1", path=str(tree))
        args = DSecContainerRunArgs(container_image="small:1", memory_limit_mb=64)
        sandbox = await client.create(args, timeout=60)
        return sandbox.id


async def state_of(report: dict[str, Any], sandbox: str) -> str:
    async with client_of(report) as client:
        async with asyncio.timeout(90):
            while (state := (await client.get(sandbox)).state) == "running":
                await asyncio.sleep(0.2)
        return state


def test_ctrl_c_before_it_is_ready_leaves_nothing(command: Any) -> None:
    one = command()
    end = time.monotonic() + GONE_S
    while not (family := one.family()):
        assert time.monotonic() < end, "nothing is started"
        time.sleep(0.05)
    one.end(signal.SIGINT)
    assert gone(family)


def test_no_secret_is_in_an_argument_or_a_log(command: Any, tmp_path: Path) -> None:
    """(S07)"""
    one = command()
    one.ready()
    state = tmp_path / "state"
    secrets = set(json.loads((state / "secrets.json").read_text())["pg_passwords"].values())
    access = json.loads((state / "access.json").read_text())
    secrets |= {access["admin_key"], *access["node_keys"].values()}
    infra = json.loads((state / "infra/credentials.json").read_text())
    secrets |= {infra["account_seed"], infra["pg_password"], *infra["nats_passwords"].values()}
    # read at once by the iterator, which skips those that end meanwhile
    running = [p for p in psutil.process_iter(["cmdline"]) if p.pid != os.getpid()]
    shown = [" ".join(p.info["cmdline"] or ()) for p in running]
    logs = [p.read_text(errors="replace") for p in state.rglob("*.log")]
    assert len(logs) >= 9
    for secret in secrets:
        assert len(secret) > 20
        assert not [text for text in (*shown, *logs) if secret in text]
    one.end(signal.SIGINT)


def test_two_on_one_state_directory_are_refused(command: Any) -> None:
    command().ready()
    second = command()
    assert second.process.wait(GONE_S) == 1
    assert "another local system runs there" in second.process.communicate()[1]


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for options in ({"driver": "nimbus"}, {"driver": ()}, {"driver": "container", "nodes": 2},
                    {"driver": "fake", "nodes": 0}):  # fmt: skip
        with pytest.raises(ValueError, match=r"driver|nodes"):
            LocalSystem(LocalOptions(state_dir=tmp_path, **options))  # type: ignore[arg-type]
    assert default_state_dir().is_absolute()


async def test_a_crashed_service_is_started_again(fake_system: LocalSystem) -> None:
    pid = fake_system.pids()["audit"]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    async def another() -> bool:
        return fake_system.pids()["audit"] not in (None, pid)

    await until(another, what="a new audit")
    await fake_system.wait_ready()


async def test_every_kind_of_verb_is_recorded_once_with_its_outcome(
    fake_system: LocalSystem,
) -> None:
    """(O08) Also where it failed: one record a verb, with principal, target, outcome."""
    from libdsec import DSecError, DSecRunArgs

    async with open_client(fake_system) as client:
        project = (await client.projects.create("audited")).id
    async with open_client(fake_system, project=project) as client:
        args = DSecRunArgs(backend="fake", cpu_cores_limit=0.1, memory_limit_mb=16)
        sandbox = await client.create(args, timeout=60)
        await sandbox.exec("echo", "once")
        await sandbox.files.write("/tmp/x", b"y")
        await sandbox.stop()
        with pytest.raises(DSecError):
            await client.images.get("no-such-image")
        wanted = {
            "sandbox.create": "ok", "sandbox.exec": "ok", "sandbox.file_write": "ok",
            "sandbox.stop": "ok", "image.get": "not_found",
        }  # fmt: skip

        async def recorded() -> list[Any] | None:
            found = [e.record async for e in client.audit.list()]
            return found if wanted.keys() <= {r["verb"] for r in found} else None

        found = await until(recorded, what="all verbs in the record")
    for verb, outcome in wanted.items():
        same = [r for r in found if r["verb"] == verb]
        assert [r["outcome"] for r in same] == [outcome], (verb, same)
        assert all(r["principal"] and r["project"] == project for r in same)


async def test_the_end_stops_sandboxes_unless_they_are_to_be_kept(tmp_path: Path) -> None:
    from libdsec import DSecRunArgs

    args = DSecRunArgs(backend="fake", memory_limit_mb=16, job="outlives-its-client")
    kept: list[str] = []
    for keep in (True, False, True):
        options = LocalOptions(
            driver="fake", state_dir=tmp_path, keep_sandboxes=keep, env=UNMOVED
        )
        async with LocalSystem(options) as system, open_client(system) as client:
            found = [s.id async for s in client.list(state="running")]
            assert sorted(found) == sorted(kept)
            if not kept:
                child = (await client.projects.create(f"p{keep}".lower())).id
                async with open_client(system, project=child) as below:
                    await below.create(args, timeout=60)
                    assert [s async for s in below.list(state="running")]
                kept = [(await client.create(args, timeout=60)).id]
        kept = kept if keep else []
