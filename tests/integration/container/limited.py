"""What a limited disk is held to, whatever limits it: asserted by the tests of each mechanism."""

from __future__ import annotations

from collections.abc import AsyncIterator

from services.edge.drivers.base import Handle
from services.edge.drivers.container import ContainerDriver
from tests.conformance.harness import run

MIB = 1 << 20
SAID_S = 120.0
FILL = "cat /dev/zero > /fill; echo $?; stat -c %s /fill"
FILES = "mkdir /d; i=0; while touch /d/$i; do i=$((i+1)); done; echo $i"


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def fill(driver: ContainerDriver, handle: Handle, mb: int, *, most: float = 1.0) -> None:
    """Fills a disk of ``mb``, which takes ``most`` times as much, and whoever asks is told."""
    ran = await run(driver, handle, FILL, timeout_s=SAID_S)
    code, size = ran.stdout.split()
    assert b"No space left" in ran.stderr and code != b"0"
    assert mb * MIB * 0.97 <= int(size) <= mb * MIB * most
    (counted,) = await driver.counters([handle])
    assert counted.disk_full and counted.disk_bytes >= mb * MIB * 0.97
    assert (await driver.usage(handle)).disk_bytes == counted.disk_bytes


async def fill_with_files(
    driver: ContainerDriver, handle: Handle, least: float, most: float
) -> None:
    """So many files there is room for."""
    ran = await run(driver, handle, FILES, timeout_s=SAID_S)
    assert b"No space left" in ran.stderr
    assert least <= int(ran.stdout) <= most
    assert (await driver.counters([handle]))[0].disk_full


async def free_bytes(driver: ContainerDriver, handle: Handle) -> int:
    """As a process in the sandbox is told."""
    free = await run(driver, handle, "stat -f -c '%a %S' /", timeout_s=SAID_S)
    blocks, unit = map(int, free.stdout.split())
    return blocks * unit
