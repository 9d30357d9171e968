"""A node whose disk has no room for another shell: the start is refused by name, and nothing
of it is left."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.errors import CapacityExhausted
from tests.conformance.harness import new_uid, run
from tests.integration.container.harness import container_harness

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]

DISK_BYTES, FILES = 4 << 20, 64


@contextmanager
def small(folder: Path, image: Path, lacks: str) -> Iterator[None]:
    """A file system of its own at ``folder``, small in bytes or in files."""
    if lacks == "bytes":
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        made = ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", str(image)]
        subprocess.run(made, check=True)
        how = ["-o", "loop", str(image)]
    else:
        how = ["-t", "tmpfs", "-o", f"nr_inodes={FILES}", "none"]
    subprocess.run(["mount", *how, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, lacks: str) -> list[Path]:
    """Until it takes no more; what was made."""
    made: list[Path] = []
    with contextlib.suppress(OSError):
        while lacks == "files":
            path = folder / str(len(made))
            path.touch()
            made.append(path)
    for size in (64 << 10, 1) if lacks == "bytes" else ():
        made.append(folder / str(size))
        with contextlib.suppress(OSError), made[-1].open("wb", buffering=0) as file:
            while True:
                file.write(bytes(size))
    return made


@pytest.mark.parametrize("lacks", ["bytes", "files"])
async def test_a_shell_without_room_on_the_nodes_disk_is_refused_by_name(
    tmp_path: Path, lacks: str
) -> None:
    async with container_harness(tmp_path, pool_size=0) as harness:
        driver, folder = harness.driver, harness.settings.shells_dir
        with small(folder, tmp_path / "image", lacks):
            made = fill(folder, lacks)
            before = set(folder.iterdir())
            with pytest.raises(CapacityExhausted, match="disk is full") as caught:
                await driver.start(harness.spec(uid=new_uid()))
            assert (caught.value.field, caught.value.retryable) == ("disk", True)
            assert set(folder.iterdir()) == before and not harness.leftovers()
            for path in made:
                path.unlink()
            handle = await driver.start(harness.spec(uid=new_uid()))
            assert (await run(driver, handle, "echo room")).stdout == b"room\n"
            await driver.stop(handle)
