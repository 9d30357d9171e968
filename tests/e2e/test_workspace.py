"""Finding, watching and comparing files of real containers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from libdsec import (
    DSecClient,
    DSecContainerRunArgs,
    FileNotFound,
    InvalidRequest,
    Sandbox,
    Unsupported,
)

pytestmark = [pytest.mark.docker, pytest.mark.slow]

REPOSITORY = """
mkdir -p /tmp/repo/sub && cd /tmp/repo && git init -q . &&
git config user.email a@b && git config user.name a &&
echo one > kept && echo two > changed && echo three > gone && printf 'a\\000b' > binary &&
echo '*.log' > .gitignore && git add -A && git commit -qm first"""
EDITS = """
cd /tmp/repo && echo more >> changed && rm gone && echo new > sub/made && chmod +x kept &&
printf 'a\\000c' > binary && echo noise > x.log && ln -s kept link && echo staged > staged &&
git add staged
"""


@pytest_asyncio.fixture(loop_scope="session")
async def sandbox(containers: DSecClient) -> AsyncIterator[Sandbox]:
    args = DSecContainerRunArgs(container_image="py:3.11", memory_limit_mb=256, pids_limit=64)
    async with await containers.run_container(args) as sandbox:
        yield sandbox


async def found(sandbox: Sandbox, pattern: str, **options: str) -> list[str]:
    return [entry.path for entry in await sandbox.files.glob(pattern, **options)]


async def test_glob_matches_within_names_and_over_directories(sandbox: Sandbox) -> None:
    for path in ("a.py", "b.txt", ".hidden.py", "d/c.py", "d/e/f.py", "d/e/[x].py"):
        await sandbox.files.write(f"/tmp/g/{path}", "x")
    await sandbox.exec("ln", "-s", "/tmp/g", "/tmp/g/d/loop")
    assert await found(sandbox, "/tmp/g/*.py") == ["/tmp/g/.hidden.py", "/tmp/g/a.py"]
    assert await found(sandbox, "/tmp/g/?.txt") == ["/tmp/g/b.txt"]
    assert await found(sandbox, "/tmp/g/**/*.py") == [
        "/tmp/g/.hidden.py", "/tmp/g/a.py", "/tmp/g/d/c.py", "/tmp/g/d/e/[x].py",
        "/tmp/g/d/e/f.py",
    ]  # fmt: skip
    assert await found(sandbox, "/tmp/g/*/e/[[]x].py") == ["/tmp/g/d/e/[x].py"]
    assert await found(sandbox, "/tmp/g/d/e/f.py") == ["/tmp/g/d/e/f.py"]
    assert len(await found(sandbox, "/tmp/g/**")) == 9
    assert await found(sandbox, "/no/such/**/place") == []


async def test_glob_shows_what_the_user_may_see(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/p/secret/x", "x")
    await sandbox.files.write("/tmp/p/open/x", "x")
    await sandbox.exec("chmod", "700", "/tmp/p/secret")
    assert await found(sandbox, "/tmp/p/*/x") == ["/tmp/p/open/x", "/tmp/p/secret/x"]
    assert await found(sandbox, "/tmp/p/*/x", user="nobody") == ["/tmp/p/open/x"]


async def test_glob_refuses_to_climb(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await sandbox.files.glob("/tmp/../etc/*")
    assert caught.value.field == "pattern"


async def test_diff_is_a_patch_that_applies_and_holds_everything(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(REPOSITORY, check=True)).ok
    await sandbox.exec(EDITS, check=True)
    status = await sandbox.exec("git status --porcelain", cwd="/tmp/repo")
    patch = await sandbox.files.diff("/tmp/repo")
    assert (await sandbox.exec("git status --porcelain", cwd="/tmp/repo")).text == status.text
    assert b"noise" not in patch
    clone = "git clone -q /tmp/repo /tmp/clone && cd /tmp/clone && git apply --index"
    await sandbox.exec(clone, stdin=patch, check=True)
    same = await sandbox.exec(
        "diff -r -x .git -x x.log /tmp/repo /tmp/clone && ls -l /tmp/clone/kept"
    )
    assert same.ok and same.text.startswith("-rwxr-xr-x"), same
    assert (await sandbox.exec("readlink", "/tmp/clone/link")).text == "kept\n"


async def test_diff_of_a_part_and_of_another_base(sandbox: Sandbox) -> None:
    await sandbox.exec(
        f"{REPOSITORY} && echo x > sub/x && git add -A && git commit -qm second", check=True
    )
    assert await sandbox.files.diff("/tmp/repo") == b""
    assert b"b/sub/x" in await sandbox.files.diff("/tmp/repo", base="HEAD~1")
    await sandbox.files.write("/tmp/repo/outside", "x")
    part = await sandbox.files.diff("/tmp/repo/sub", base="HEAD~1")
    assert b"b/x" in part and b"outside" not in part


async def test_diff_of_a_repository_without_a_commit(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir /tmp/new && cd /tmp/new && git init -q . && echo x > y", check=True)
    assert b"+x" in await sandbox.files.diff("/tmp/new")


async def test_diff_runs_nothing_that_the_workspace_configured(sandbox: Sandbox) -> None:
    await sandbox.exec(REPOSITORY, check=True)
    await sandbox.exec(
        "cd /tmp/repo && git config diff.external 'touch /tmp/ran; true' && "
        "git config core.fsmonitor 'touch /tmp/ran' && echo more >> changed",
        check=True,
    )
    assert b"+more" in await sandbox.files.diff("/tmp/repo")
    assert not await sandbox.files.exists("/tmp/ran")


async def test_diff_says_why_there_is_none(sandbox: Sandbox) -> None:
    await sandbox.exec(REPOSITORY, check=True)
    with pytest.raises(FileNotFound, match="/etc"):
        await sandbox.files.diff("/etc")
    with pytest.raises(FileNotFound, match="/no/such"):
        await sandbox.files.diff("/no/such")
    with pytest.raises(InvalidRequest) as caught:
        await sandbox.files.diff("/tmp/repo", base="no-such-branch")
    assert caught.value.field == "base"
    with pytest.raises(InvalidRequest):
        await sandbox.files.diff("/tmp/repo", base="--output=/tmp/x")
    await sandbox.files.write("/tmp/repo/big", "line\n" * 100_000)
    with pytest.raises(InvalidRequest) as caught:
        await sandbox.files.diff("/tmp/repo", limit_bytes=10_000)
    assert caught.value.field == "limit_bytes"
    await sandbox.exec("mv $(command -v git) /tmp/hidden-git")
    with pytest.raises(Unsupported, match="no git"):
        await sandbox.files.diff("/tmp/repo")


async def test_diff_for_another_user_than_the_owner(sandbox: Sandbox) -> None:
    """git refuses a repository of somebody else unless told that it is meant."""
    await sandbox.exec(
        f"{REPOSITORY} && chown -R nobody /tmp/repo && echo more >> changed", check=True
    )
    assert b"+more" in await sandbox.files.diff("/tmp/repo")
