"""docker-compose.yml, as Compose itself understands it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from devstack import composefiles
from devstack.credentials import load_or_make

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[3]
CONTROL_PLANE = set(composefiles.SERVICES)


def compose_command() -> list[str]:
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True)
    return ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the deployment files with secrets of its own."""
    folder = tmp_path_factory.mktemp("compose")
    for name in ("docker-compose.yml", "Dockerfile"):
        shutil.copy(REPOSITORY / name, folder / name)
    composefiles.write(folder / "deploy/run")
    return folder


@pytest.fixture(scope="module")
def config(project: Path) -> dict[str, Any]:
    done = subprocess.run(
        [*compose_command(), "--profile", "edge", "config"],
        cwd=project, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def test_compose_accepts_it_with_every_service(config: dict[str, Any]) -> None:
    assert set(config["services"]) == CONTROL_PLANE | {
        "nats", "postgres", "redis", "migrate", "edge",
    }  # fmt: skip


def test_every_command_is_a_service_of_the_repository(config: dict[str, Any]) -> None:
    for name in CONTROL_PLANE | {"edge"}:
        assert config["services"][name]["command"] == ["python", "-m", f"services.{name}"]
        assert (REPOSITORY / "services" / name / "__init__.py").exists()


def test_versions_are_recent_enough_for_the_bus_and_the_database(config: dict[str, Any]) -> None:
    images = {name: config["services"][name]["image"] for name in ("nats", "postgres", "redis")}
    numbers = {name: re.findall(r"\d+", image)[:2] for name, image in images.items()}
    assert [int(n) for n in numbers["nats"]] >= [2, 11]
    assert int(numbers["postgres"][0]) >= 16
    assert int(numbers["redis"][0]) >= 7


def test_each_service_gets_its_own_secrets_only(config: dict[str, Any], project: Path) -> None:
    made = load_or_make(project / "deploy/run/credentials.json")
    for name in CONTROL_PLANE:
        values = " ".join(str(v) for v in config["services"][name]["environment"].values())
        assert made.nats_passwords[name] in values
        others = {n: p for n, p in made.nats_passwords.items() if n not in (name, "sys")}
        assert not any(password in values for password in others.values()), name
        assert made.pg_password not in values, name
        assert (made.account_seed in values) == (name == "auth")
        assert (made.redis_password in values) == (name in ("scheduler", "burst"))


def test_everything_that_listens_has_a_health_check(config: dict[str, Any]) -> None:
    for name in CONTROL_PLANE | {"nats", "postgres", "redis"}:
        assert config["services"][name]["healthcheck"]["test"], name


def test_only_the_bus_is_published_and_only_on_loopback(config: dict[str, Any]) -> None:
    published = {n: s["ports"] for n, s in config["services"].items() if s.get("ports")}
    assert set(published) == {"nats"}
    assert "127.0.0.1" in str(published["nats"])


def test_files_keep_their_passwords_and_nobody_else_reads_them(project: Path) -> None:
    folder = project / "deploy/run"
    (folder / "edge.env").write_text("DSEC_NATS_TOKEN=of-the-operator\n")
    before = {path.name: path.read_text() for path in folder.iterdir()}
    composefiles.write(folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == before
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path.name
