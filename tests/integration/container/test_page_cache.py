"""What sandboxes read of a layer that they share is in memory once."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from services.edge.drivers.base import Handle, Layer
from services.edge.layers.mounts import mount_erofs
from tests.conformance.harness import new_uid, run
from tests.integration.container.harness import ContainerHarness
from tests.integration.container.images import pack, small_layer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]

SIZE = 16 << 20
PAGES = SIZE // mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def resident(path: Path) -> int:
    """Pages of a file that are in memory, as this way to it sees them; reads none."""
    with path.open("rb") as file, mmap.mmap(
        file.fileno(), SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    ) as mapped:
        view = (ctypes.c_char * SIZE).from_buffer(mapped)
        found = (ctypes.c_ubyte * PAGES)()
        failed = _libc.mincore(ctypes.byref(view), ctypes.c_size_t(SIZE), found)
        del view
        assert not failed, os.strerror(ctypes.get_errno())
        return sum(page & 1 for page in found)


def forget(path: Path) -> None:
    """Takes the file's pages out of memory."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def big(handle: Handle) -> Path:
    """The shared file as the sandbox has it."""
    return Path(f"/proc/{handle.data['pid']}/root/big")


@pytest.fixture(scope="module")
def shared(harness: ContainerHarness, tmp_path_factory: pytest.TempPathFactory) -> Layer:
    """A layer with a large file."""
    tree = tmp_path_factory.mktemp("shared") / "tree"
    tree.mkdir()
    (tree / "big").write_bytes(os.urandom(SIZE))
    return pack(tree, "shared")


@pytest_asyncio.fixture(loop_scope="module")
async def boxes(
    harness: ContainerHarness, shared: Layer, tmp_path: Path
) -> AsyncIterator[list[Handle]]:
    """Two sandboxes of one image and one of another that has a layer in common with it."""
    first, second = [harness.layer, shared], [harness.layer, shared, small_layer(tmp_path, 1)]
    made = [
        await harness.driver.start(harness.spec(uid=new_uid(), layers=layers))
        for layers in (first, first, second)
    ]
    yield made
    for handle in made:
        await harness.driver.stop(handle)


async def test_what_one_sandbox_reads_is_in_memory_for_the_others(
    harness: ContainerHarness, boxes: list[Handle]
) -> None:
    forget(big(boxes[0]))
    assert [resident(big(box)) for box in boxes] == [0, 0, 0]
    ran = await run(harness.driver, boxes[0], "md5sum < /big")
    assert [resident(big(box)) for box in boxes] == [PAGES, PAGES, PAGES]
    for box in boxes[1:]:
        assert (await run(harness.driver, box, "md5sum < /big")).stdout == ran.stdout
    # and no other copy was made: they all lose it together
    forget(big(boxes[2]))
    assert [resident(big(box)) for box in boxes] == [0, 0, 0]


async def test_what_one_changes_it_has_for_itself(
    harness: ContainerHarness, boxes: list[Handle]
) -> None:
    await run(harness.driver, boxes[0], "printf x | dd of=/big conv=notrunc 2>/dev/null")
    await run(harness.driver, boxes[1], "cat /big > /dev/null")
    forget(big(boxes[0]))
    assert resident(big(boxes[1])) == resident(big(boxes[2])) == PAGES


async def test_two_mounts_would_have_it_twice(shared: Layer) -> None:
    """The reason for one mount a layer, and the proof that sharing is seen by its lack."""
    one, two = (mount_erofs(replace(shared, digest=name)) for name in ("one", "two"))
    try:
        first, second = (Path(f"/proc/self/fd/{fd}/big") for fd in (one, two))
        first.read_bytes()
        assert (resident(first), resident(second)) == (PAGES, 0)
    finally:
        os.close(one)
        os.close(two)
