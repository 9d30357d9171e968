"""Snapshots through the whole system: packed, restored, branched, and by whom."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from libdsec import (
    Conflict,
    DSecClient,
    DSecContainerRunArgs,
    Forbidden,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    Sandbox,
    SandboxDied,
    Unsupported,
)
from services.local import LocalSystem
from tests.e2e.conftest import charged, open_client

pytestmark = pytest.mark.docker
ARGS = DSecContainerRunArgs(
    container_image="py:3.11", memory_limit_mb=128, env={"GIVEN": "here"}, labels={"of": "snap"}
)


@pytest_asyncio.fixture(loop_scope="session")
async def sandbox(containers: DSecClient) -> AsyncIterator[Sandbox]:
    async with await containers.create(ARGS) as sandbox:
        yield sandbox


async def said(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.exec(command)).text


async def test_a_session_becomes_an_environment(containers: DSecClient, sandbox: Sandbox) -> None:
    """(S11)"""
    await sandbox.exec(
        "echo made > /made; echo token > /root/.netrc; echo x > /tmp/x; mkdir -p /opt/keys && "
        "echo k > /opt/keys/k; rm /etc/motd; mkdir -p /r/.git/objects/ab /r/.git/refs; "
        f"echo 'ref: refs/heads/main' > /r/.git/HEAD; echo x > /r/.git/objects/ab/{'0' * 38}",
        check=True,
    )  # fmt: skip
    layer = await sandbox.pack_diff("made:1", remove=["/opt/keys/*"])
    assert layer.name == "made:1"
    assert layer.digest not in layer.parents
    removed = {(r.path, r.rule) for r in layer.removed}
    assert removed >= {
        ("/root/.netrc", "credentials"), ("/tmp/x", "temporary"), ("/opt/keys/k", "asked"),
        (f"/r/.git/objects/ab/{'0' * 38}", "git"),
    }  # fmt: skip
    image = await containers.images.get("made:1")
    found = image.provenance
    assert found is not None
    assert (found.sandbox, found.principal) == (sandbox.uid, containers.principal)
    assert [*found.parents, found.layer] == [one.digest for one in image.layers]
    args = DSecContainerRunArgs(container_image="made:1", memory_limit_mb=64)
    async with await containers.create(args) as other:
        text = await said(other, "cat /made; ls /root/.netrc /tmp/x /opt/keys/k")
        assert text == "made\n"
    # the live one has everything still
    assert await said(sandbox, "cat /root/.netrc /tmp/x /opt/keys/k") == "token\nx\nk\n"


async def test_a_restored_sandbox_equals_the_snapshot(
    containers: DSecClient, sandbox: Sandbox
) -> None:
    """(L24)"""
    await sandbox.exec("echo a > /a; mkdir /d; echo in > /d/in; echo t > /tmp/t", check=True)
    snapshot = await sandbox.snapshot()
    await sandbox.exec("echo b > /b; rm /a; rm -r /d", check=True)
    restored = await containers.restore(snapshot)
    many = await containers.restore(snapshot.name, 2)
    try:
        for one in (restored, *many):
            text = await said(one, "cat /a /d/in /tmp/t; ls /b; echo $GIVEN")
            assert text == "a\nin\nt\nhere\n"
            assert one.labels == {"of": "snap"}
    finally:
        await containers.stop_many([restored, *many])
    assert await said(sandbox, "cat /b; ls /a") == "b\n"


async def test_a_paused_sandbox_is_snapshotted_and_stays_paused(
    containers: DSecClient, sandbox: Sandbox
) -> None:
    await sandbox.exec("echo p > /p", check=True)
    await sandbox.pause()
    snapshot = await sandbox.snapshot()
    assert snapshot.frozen_s == 0.0
    assert (await sandbox.info()).state == "paused"
    async with await containers.restore(snapshot) as restored:
        assert await said(restored, "cat /p") == "p\n"


async def test_branches_are_apart_and_charged(
    container_system: LocalSystem, containers: DSecClient
) -> None:
    child = await containers.projects.create("branching", id="branching")
    async with (
        open_client(container_system, project=child.id) as client,
        await client.create(ARGS) as sandbox,
    ):
        await sandbox.exec("echo c > /common; rm /etc/hostname.x; true")
        await charged(containers, child.id, 1)
        branches = await sandbox.fork(3)
        assert {b.node for b in branches} == {sandbox.node}
        await charged(containers, child.id, 4)
        for number, branch in enumerate(branches):
            text = await said(branch, f"cat /common; echo $GIVEN; echo {number} > /common")
            assert text == "c\nhere\n"
        assert [await said(b, "cat /common") for b in branches] == ["0\n", "1\n", "2\n"]
        assert await said(sandbox, "cat /common") == "c\n"
        [twig] = await branches[2].fork(1)
        assert await said(twig, "cat /common") == "2\n"
        layer = await twig.pack_diff("twig")
        await twig.stop()
        async with await client.restore(layer) as restored:
            assert await said(restored, "cat /common") == "2\n"
        await client.stop_many(branches)


async def test_a_repeated_request_is_the_same_snapshot_and_the_same_branches(
    containers: DSecClient, sandbox: Sandbox
) -> None:
    from libdsec._ids import new

    request = new()
    first = await sandbox.snapshot(request_id=request)
    await sandbox.exec("echo later > /later", check=True)
    assert (await sandbox.snapshot(request_id=request)).digest == first.digest
    with pytest.raises(Conflict):
        await sandbox.pack_diff("other", request_id=request)
    request = new()
    branches = await sandbox.fork(2, request_id=request)
    again = await sandbox.fork(2, request_id=request)
    assert [b.uid for b in again] == [b.uid for b in branches]
    await containers.stop_many(branches)


async def test_who_may_run_may_not_pack(container_system: LocalSystem, containers: DSecClient,
                                        sandbox: Sandbox) -> None:  # fmt: skip
    """A builder's identity packs, a runtime's does not, and a name takes one grant more."""
    grants = ["sandbox.create", "sandbox.exec", "sandbox.get", "sandbox.stop", "image.get"]
    runtime = await containers.keys.create("runtime", grants=grants)
    async with open_client(container_system, api_key=runtime.secret) as client:
        mine = await client.get(sandbox.id)
        for call in (mine.snapshot(), mine.pack_diff("stolen"), mine.fork(1)):
            with pytest.raises(Forbidden):
                await call
    some = await containers.keys.create("some", grants=[*grants, "sandbox.snapshot"])
    async with open_client(container_system, api_key=some.secret) as client:
        mine = await client.get(sandbox.id)
        assert (await mine.snapshot()).sandbox == sandbox.uid
        with pytest.raises(Forbidden) as refused:
            await mine.pack_diff("stolen")
        assert refused.value.field == "name"
    with pytest.raises(NotFound):
        await containers.images.get("stolen")


async def test_what_one_project_packs_changes_nothing_for_another(
    containers: DSecClient, container_system: LocalSystem, sandbox: Sandbox
) -> None:
    """(S09) The same name in a project below is another image there, and what branches
    and restored sandboxes write in shared layers is their own."""
    await sandbox.exec("echo ours > /whose", check=True)
    ours = await sandbox.pack_diff("shared:1")
    child = await containers.projects.create("other", id="other")
    args = DSecContainerRunArgs(container_image="shared:1", memory_limit_mb=64)
    async with (
        open_client(container_system, project=child.id) as client,
        await client.create(args) as theirs,
        await containers.create(args) as before,
    ):
        assert await said(theirs, "cat /whose; echo theirs > /whose") == "ours\n"
        await theirs.pack_diff("shared:1")
        assert await said(before, "cat /whose") == "ours\n"
        async with await containers.create(args) as after, await client.create(args) as own:
            assert await said(after, "cat /whose") == "ours\n"
            assert await said(own, "cat /whose") == "theirs\n"
    assert (await containers.images.get("shared:1")).layers[-1].digest == ours.digest


async def test_bad_requests_are_named(containers: DSecClient, sandbox: Sandbox) -> None:
    with pytest.raises(Unsupported) as refused:
        await sandbox.snapshot(memory=True)
    assert refused.value.field == "memory"
    for name, field in (("NOT A NAME", "name"), ("a/../b", "name")):
        with pytest.raises(InvalidRequest) as wrong:
            await sandbox.pack_diff(name)
        assert wrong.value.field == field
    with pytest.raises(InvalidRequest) as wrong:
        await sandbox.pack_diff("x", remove=["relative"])
    assert wrong.value.field == "remove"
    with pytest.raises(NotFound):
        await containers.restore("snapshot/nothing")
    with pytest.raises(NotFound):
        await containers.restore("py:3.11")
    with pytest.raises(InvalidRequest):
        await sandbox.fork(0)
    gone = await containers.create(ARGS)
    await gone.stop()
    for call in (gone.snapshot(), gone.fork(1)):
        with pytest.raises((SandboxDied, NotFound)):
            await call


async def test_branches_are_all_or_none(
    containers: DSecClient, container_system: LocalSystem
) -> None:
    child = await containers.projects.create("few", id="few")
    await containers.quotas.create(project=child.id, sandboxes=3)
    async with (
        open_client(container_system, project=child.id) as client,
        await client.create(ARGS) as sandbox,
    ):
        with pytest.raises(QuotaExceeded):
            await sandbox.fork(3)
        left = [s async for s in client.list(state=["requested", "placed", "running"])]
        assert [s.uid for s in left] == [sandbox.uid]
        assert len(await sandbox.fork(2)) == 2


async def test_a_pack_of_what_ends_meanwhile_is_whole_or_has_no_name(
    containers: DSecClient,
) -> None:
    sandbox = await containers.create(ARGS)
    large = "head -c 200000000 /dev/zero | tr '\\0' x > /large; sha256sum /large"
    digest = (await sandbox.exec(large, check=True)).text
    packing = asyncio.ensure_future(sandbox.pack_diff("perhaps"))
    await asyncio.sleep(0.05)
    await sandbox.stop()
    try:
        layer = await packing
    except (SandboxDied, NotFound):
        with pytest.raises(NotFound):
            await containers.images.get("perhaps")
    else:  # the copy was made before its end
        async with await containers.restore(layer) as restored:
            assert await said(restored, "sha256sum /large") == digest


async def test_the_command_line_does_the_same(
    container_system: LocalSystem, containers: DSecClient, sandbox: Sandbox
) -> None:
    env = os.environ | {
        "DSEC_URL": container_system.url, "DSEC_API_KEY": container_system.admin_key,
        "DSEC_PROJECT": container_system.project,
    }  # fmt: skip

    async def dsec(*argv: str) -> Any:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "libdsec", *argv, "--json", env=env, stdout=subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, argv
        return json.loads(out)

    await sandbox.exec("echo c > /cli", check=True)
    packed = await dsec("pack-diff", sandbox.id, "by-cli:1", "--no-scrub")
    assert (packed["name"], packed["removed"]) == ("by-cli:1", [])
    kept = await dsec("snapshot", sandbox.id)
    assert kept["sandbox"] == sandbox.uid
    made = [*await dsec("restore", kept["name"]), *await dsec("fork", sandbox.id, "1")]
    try:
        for row in made:
            assert await said(await containers.get(row["id"]), "cat /cli") == "c\n"
    finally:
        await containers.stop_many([row["id"] for row in made])
