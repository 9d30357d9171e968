"""Settings, drivers by name, layers, the machine, what is kept of ended operations."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.edge.door import finished
from services.edge.door.calls import Call
from services.edge.door.finished import Finished
from services.edge.door.operation import Operation
from services.edge.drivers import registry
from services.edge.drivers.base import Driver, Pausable
from services.edge.drivers.files import Files
from services.edge.drivers.registry import DriverConfig
from services.edge.layers.locate import FolderLocator
from services.edge.machine import probe
from services.edge.settings import Settings
from shared.clock import FakeClock
from shared.errors import InvalidRequest, NotFound
from shared.settings import load


def env(**more: str) -> dict[str, str]:
    return {"DSEC_NODE": "n1", **{f"DSEC_{k}": v for k, v in more.items()}}


def test_settings_come_from_the_environment() -> None:
    key = "dsec_01hzzzzzzzzzzzzzzzzzzzzzzz_secret"
    settings = load(Settings, env(DRIVERS="fake, container,fake", NATS_TOKEN=key, POOL="cloud"))
    assert settings.driver_names == ("fake", "container")
    assert settings.principal == "01hzzzzzzzzzzzzzzzzzzzzzzz"
    assert load(Settings, env()).principal == "n1"
    assert (settings.overcommit_cpu, settings.overcommit_memory) == (50.0, 6.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NODE", "N 1"), ("POOL", "moon"), ("STORE_URL", "http://x"), ("DRIVERS", " , "),
        ("OVERCOMMIT_CPU", "much"), ("START_CONCURRENCY", "1.5"),
    ],
)  # fmt: skip
def test_a_bad_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(Settings, {**env(), f"DSEC_{name}": value})
    assert caught.value.field == name.lower() or name in caught.value.message


def test_drivers_by_name(tmp_path: Path) -> None:
    driver: Driver = registry.create("fake", DriverConfig("n1", tmp_path))
    assert driver.name == "fake"
    assert isinstance(driver, Files) and isinstance(driver, Pausable)
    for name in ("nosuch", "base", "../fake", "os", ""):
        with pytest.raises(InvalidRequest) as caught:
            registry.create(name, DriverConfig("n1", tmp_path))
        assert caught.value.field == "drivers"
    found = registry.options("fake", {"DSEC_FAKE_SPEED": "9", "DSEC_NODE": "n1"})
    assert found == {"speed": "9"}


async def test_layers_are_found_by_digest(tmp_path: Path) -> None:
    both, one = ("meta.erofs", "data.blob"), ("meta.erofs",)
    for digest, files in (("sha256-aa", both), ("sha256-bb", one)):
        folder = tmp_path / "a store" / "layers" / digest
        folder.mkdir(parents=True)
        for name in files:
            (folder / name).touch()
    locator = FolderLocator(f"file://{tmp_path}/a%20store")
    first, second = await locator.find(["sha256-aa", "sha256-bb"])
    root = tmp_path / "a store" / "layers"
    assert (first.meta, first.data) == (
        str(root / "sha256-aa/meta.erofs"),
        str(root / "sha256-aa/data.blob"),
    )
    assert second.data is None
    for bad in ("sha256-cc", "../layers/sha256-aa", "..", "", "/etc"):
        with pytest.raises(NotFound) as caught:
            await locator.find(["sha256-aa", bad])
        assert caught.value.cause == "image" and caught.value.is_infra
    locator.forget("sha256-bb")
    (root / "sha256-bb" / "meta.erofs").unlink()
    with pytest.raises(NotFound):
        await locator.find(["sha256-bb"])


def test_the_machine_is_measured(tmp_path: Path) -> None:
    machine = probe.machine()
    assert 0 < machine.cores <= (os.cpu_count() or 1) and machine.memory_mb > 100
    measured = probe.Meter(tmp_path).measure()
    assert 0 < measured.memory_available_mb <= machine.memory_mb
    assert measured.disk_free_mb > 0 and measured.pids_free > 0
    assert all(0 <= share <= 1 for share in measured.pressure.values())
    settings = Settings(
        node="n1", capacity_cores=2.0, capacity_memory_mb=1000, state_dir=str(tmp_path)
    )
    capacity = probe.limits(settings).capacity
    assert (capacity.cores, capacity.memory_mb) == (100.0, 6000)
    assert capacity.disk_mb >= measured.disk_free_mb * settings.overcommit_disk


async def test_ended_operations_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished, "MAX_KEPT", 3)
    monkeypatch.setattr(finished, "MAX_KEPT_BYTES", 100)
    clock = FakeClock()
    kept = Finished(clock)

    async def send(subject: str, data: bytes, headers: dict[str, str]) -> None: ...

    async def put(name: str, size: int) -> None:
        call = Call("p", "n", "u", "exec", "a")
        op = Operation(call, name, hash_=b"", reply_to="r", send=send, clock=clock)
        await op.finish(bytes(size))
        kept.put(("u", name), op)

    for name in "abcd":
        await put(name, 10)
    assert kept.get(("u", "a")) is None and kept.get(("u", "b")) is not None
    await put("e", 90)
    assert [n for n in "abcde" if kept.get(("u", n))] == ["d", "e"]
    clock.advance(finished.KEPT_S + 1)
    kept.expire()
    assert not [n for n in "abcde" if kept.get(("u", n))]
