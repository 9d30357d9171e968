"""What runs inside needs nothing of the image: no libc, no shell, no file at all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from services.edge.drivers.base import Handle, Layer
from services.edge.drivers.container import ContainerDriver
from shared import policies
from shared.errors import Unsupported
from tests.conformance.harness import Recorder, new_uid, run
from tests.integration.container import images
from tests.integration.container.harness import ContainerHarness

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]

TREES: dict[str, Callable[[Path], Path]] = {
    "scratch": images.scratch_tree, "musl": images.musl_tree, "debian": images.debian_tree,
}  # fmt: skip
PROGRAM = {"scratch": "/hello", "musl": "/bin/hello", "debian": "/usr/bin/hello"}
WITH_SHELL = ["musl", "debian"]  # a busybox image runs every other test of this folder

Box = tuple[ContainerDriver, Handle]


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Layer]:
    """Layers by name of the image, each built once."""
    made: dict[str, Layer] = {}

    def get(name: str) -> Layer:
        if name not in made:
            made[name] = images.pack(TREES[name](tmp_path_factory.mktemp(name)), name)
        return made[name]

    return get


@pytest_asyncio.fixture(loop_scope="module")
async def box(
    harness: ContainerHarness, layers: Callable[[str], Layer], image: str
) -> AsyncIterator[Box]:
    spec = harness.spec(uid=new_uid(), layers=[layers(image)])
    handle = await harness.driver.start(spec)
    yield harness.driver, handle
    await harness.driver.stop(handle)


async def one(data: bytes) -> AsyncIterator[bytes]:
    yield data


@pytest.mark.parametrize("image", TREES)
async def test_an_argv_runs_in_any_image(box: Box, image: str) -> None:
    io = Recorder()
    io.stdin = [b"typed"]
    ran = await run(*box, [PROGRAM[image], "a b", "$HOME"], io=io, stdin=True)
    assert (ran.code, ran.stdout) == (3, b"a b\n$HOME\ntyped")
    ran = await run(*box, [PROGRAM[image]], user="1000", cwd="/tmp" if image != "scratch" else "/")
    assert ran.code == 1
    missing = await run(*box, ["/no/such/program"])
    assert missing.code == 127 and b"/no/such/program" in missing.stderr


@pytest.mark.parametrize("image", TREES)
@pytest.mark.parametrize("watched", [False, True])
async def test_a_start_writes_nothing_into_a_sandboxs_own_layer(
    harness: ContainerHarness, layers: Callable[[str], Layer], image: str, watched: bool
) -> None:
    policy = policies.read({"resources": {"open_files": 64}} if watched else None, {})
    spec = harness.spec(uid=new_uid(), layers=[layers(image)], policy=policy)
    handle = await harness.driver.start(spec)
    try:
        upper = harness.settings.sandboxes_dir / handle.uid / "upper"
        assert [str(path.relative_to(upper)) for path in upper.rglob("*")] == []
        for name in ("hosts", "hostname", "resolv.conf"):
            text = [c async for c in harness.driver.read(handle, f"/etc/{name}", user="root")]
            assert text != []
        assert (await harness.driver.stat(handle, "/dev/null", user="root")).size == 0
    finally:
        await harness.driver.stop(handle)


@pytest.mark.parametrize("image", TREES)
async def test_files_work_in_any_image(box: Box, image: str) -> None:
    driver, handle = box
    await driver.write(handle, "/data/deep/file", one(b"\0\xff"), user="root", mode=0o640)
    assert [c async for c in driver.read(handle, "/data/deep/file", user="root")] == [b"\0\xff"]
    assert (await driver.stat(handle, "/data/deep/file", user="root")).mode == 0o640
    await driver.mkdir(handle, "/data/more", user="root", mode=0o755, parents=True)
    await driver.move(handle, "/data/deep/file", "/data/more/file", user="root")
    listing = driver.list(handle, "/data", user="root")
    names = [info.path async for batch in listing for info in batch]
    assert sorted(names) == ["/data/deep", "/data/more"]
    await driver.remove(handle, "/data", user="root", recursive=True)
    listing = driver.list(handle, "/", user="root")
    assert "/data" not in [info.path async for batch in listing for info in batch]


@pytest.mark.parametrize("image", ["scratch"])
@pytest.mark.parametrize("facts", [{}, {"session": "s"}])
async def test_where_there_is_no_shell_shell_text_is_refused_in_words(
    box: Box, image: str, facts: dict[str, str]
) -> None:
    for _ in range(2):
        with pytest.raises(Unsupported, match="no shell") as caught:
            await run(*box, "true", **facts)
        assert caught.value.field == "shell"
    assert (await run(*box, [PROGRAM[image]])).code == 1


@pytest.mark.parametrize("image", WITH_SHELL)
async def test_shells_and_sessions_run_in_any_image_that_has_one(box: Box, image: str) -> None:
    ran = await run(*box, "cat <<E; exit 5\n$((6*7)) $USER\nE", user="agent")
    assert (ran.code, ran.stdout) == (5, b"42 agent\n")
    await run(*box, "cd /tmp; X='a  b'; f() { hello \"$X\"; }", session="s")
    ran = await run(*box, "pwd; f", session="s")
    assert (ran.code, ran.stdout) == (2, b"/tmp\na  b\n")
    ran = await run(*box, "sleep 100 & hello; exit 9", session="s")
    assert (ran.code, ran.outcome.session_ended) == (9, True)
    ran = await run(*box, "sleep 100", timeout_s=0.2)
    assert ran.outcome.timed_out
