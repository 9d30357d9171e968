"""Images from a client's machine and back, through the SDK and the command line."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
import pytest_asyncio

from libdsec import (
    DSecClient,
    DSecRunArgs,
    Forbidden,
    InvalidRequest,
    NotFound,
    Sandbox,
    _transfers,
)
from schemas.base import encode
from schemas.hotset import LayerAccess, LayerAccesses
from schemas.subjects import evt
from services.local import LocalSystem
from tests.e2e.conftest import open_client, until
from tests.registry import OCI, Registry
from tests.unit.services.imagesvc.tars import image_config, member, tar_bytes

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 120


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(fake_system: LocalSystem) -> AsyncIterator[DSecClient]:
    async with open_client(fake_system) as made:
        yield made


@pytest.fixture
def served(fake_system: LocalSystem, tmp_path: Path) -> Path:
    """A folder that images may be imported from."""
    folder = Path(fake_system.options.image_roots[0]) / tmp_path.name
    folder.mkdir()
    return folder


def odd_tree(root: Path) -> Path:
    """What a careless packer loses."""
    (root / "d" / "empty").mkdir(parents=True)
    (root / "f").write_bytes(os.urandom(700_000))
    os.link(root / "f", root / "d" / "hard")
    (root / "dangling").symlink_to("/no/where")
    (root / "Case").write_bytes(b"1")
    (root / "case").write_bytes(b"2")
    (root / os.fsdecode(b"\xff")).write_bytes(b"no text")
    (root / "tool").write_bytes(b"x")
    os.setxattr(root / "tool", "user.note", b"\x00\xff")
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    os.setxattr(root / "tool", "security.capability", capability)
    os.chown(root / "case", 1516583083, 70_000)
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mkfifo(root / "pipe")
    os.chmod(root / "d", 0o2750)
    os.utime(root / "f", ns=(1, 1_600_000_000_123_456_789))
    return root


async def test_a_local_directory_arrives_as_it_is(client: DSecClient, served: Path) -> None:
    """(I04, I06, I16, I17) Handed over or read where it is, it is the same layer."""
    tree = odd_tree(served / "tree")
    told: list[tuple[float, str]] = []
    sent = await client.images.create(
        "e2e/sent:1", path=tree, upload=True, on_progress=lambda *state: told.append(state)
    )
    read = await client.images.create("e2e/read:1", path=str(tree))
    assert sent.layers == read.layers
    assert "uploading" in {stage for _, stage in told}
    assert all(0 <= share <= 1 for share, _ in told)


async def test_a_name_that_cannot_be_is_refused_before_anything_is_handed_over(
    client: DSecClient, served: Path
) -> None:
    told: list[str] = []
    with pytest.raises(InvalidRequest) as caught:
        await client.images.create(
            "No Name", path=odd_tree(served / "tree"), upload=True,
            on_progress=lambda _, stage: told.append(stage),
        )  # fmt: skip
    assert (caught.value.field, told) == ("name", [])


async def test_an_upload_goes_on_in_a_later_call(
    client: DSecClient, fake_system: LocalSystem, tmp_path: Path
) -> None:
    path = tmp_path / "layer.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(REPOSITORY / "libdsec", "libdsec")
        tar.addfile(tarfile.TarInfo("big"))
    with path.open("ab") as file:
        file.write(bytes(3 << 20))
    first = next(_transfers.file_pieces(path))
    core, project = client.images._core, fake_system.project
    await _transfers.upload(
        core, project, _transfers.file_id(path), iter([first]), lambda _: None
    )
    told: list[float] = []
    await client.images.create(
        "e2e/goes-on:1", path=path, upload=True,
        on_progress=lambda share, stage: told.append(share) if stage == "uploading" else None,
    )  # fmt: skip
    size = path.stat().st_size
    assert told[1] == len(first) / size, "what was there was not sent again"
    assert told[-1] == 1.0


async def test_a_commit_is_handed_over_without_its_future(
    client: DSecClient, served: Path
) -> None:
    """(S02) What comes out is what the service makes of the repository itself."""
    repo = served / "repo"
    repo.mkdir()

    def git(*arguments: str) -> str:
        argv = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments]
        return subprocess.run(argv, cwd=repo, check=True, capture_output=True, text=True).stdout

    git("init", "-q", "-b", "trunk")
    for version in ("first", "broken", "the reference answer"):
        (repo / "code.py").write_text(version)
        git("add", "-A")
        git("commit", "-qm", version)
    base, fix = git("rev-parse", "HEAD~1").strip(), git("rev-parse", "HEAD").strip()
    git("tag", "-am", "released", "v2")
    facts: dict[str, Any] = {"kind": "workspace", "commit": "HEAD~1"}
    sent = await client.images.create("e2e/task:1", git=repo, upload=True, **facts)
    read = await client.images.create("e2e/task:2", git=repo, **facts)
    assert sent.layers == read.layers
    later = await client.images.create("e2e/task:3", git=repo, upload=True, kind="workspace")
    assert later.layers != sent.layers
    with _packed(repo, base) as bundle:
        heads = git("bundle", "list-heads", str(bundle))
        assert base in heads and fix not in heads
    with pytest.raises(InvalidRequest):
        await client.images.create("e2e/task:4", git=repo, upload=True, commit="nowhere")


def _packed(repo: Path, commit: str) -> Any:
    from contextlib import contextmanager

    from libdsec import _packing

    @contextmanager
    def only_path() -> Any:
        with _packing.bundle(repo, commit) as (path, _):
            yield path

    return only_path()


async def test_an_export_comes_back_as_the_same_image(
    client: DSecClient, served: Path, tmp_path: Path
) -> None:
    tree = odd_tree(served / "tree")
    made = await client.images.create(
        "e2e/out:1", path=str(tree), config={"env": {"A": "b"}, "workdir": "/d"}
    )
    path = tmp_path / "out.tar"
    size = await client.images.export("e2e/out:1", path)
    assert path.stat().st_size == size
    back = await client.images.create("e2e/back:1", oci=path, upload=True)
    assert (back.layers, back.config) == (made.layers, made.config)
    with pytest.raises(NotFound):
        await client.images.export("e2e/none:1", tmp_path / "none.tar")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["out.tar"]


async def test_an_image_of_a_registry(client: DSecClient) -> None:
    layer = tar_bytes([member("big", os.urandom(9 << 20))])
    registry = Registry()
    registry.image([(layer, f"{OCI}.layer.v1.tar")], image_config([layer], Env=["A=b"]), "1")
    with registry.serving():
        made = await client.images.create("e2e/pulled:1", registry=f"{registry.host}/repo:1")
        assert made.config.env == {"A": "b"}
        registry.blobs = {digest: b"x" * len(data) for digest, data in registry.blobs.items()}
        with pytest.raises(InvalidRequest, match="digest mismatch") as caught:
            await client.images.create("e2e/damaged:1", registry=f"{registry.host}/repo:1")
    assert caught.value.field == "registry"
    with pytest.raises(NotFound):
        await client.images.get("e2e/damaged:1")


async def test_grants_open_transfers(
    client: DSecClient, fake_system: LocalSystem, tmp_path: Path
) -> None:
    """(S09) Reading images opens neither uploads nor exports; uploads are their makers'."""
    key = await client.keys.create("reader", grants=["image.get"])
    (tmp_path / "f").write_bytes(b"x")
    async with DSecClient(fake_system.url, key.secret, fake_system.project) as reader:
        with pytest.raises(Forbidden):
            await reader.images.create("e2e/x:1", path=tmp_path, upload=True)
        with pytest.raises(Forbidden):
            await reader.images.export("e2e/x:1", tmp_path / "x.tar")
    await client.keys.delete(key.id)


async def test_nonsense_is_refused_before_anything_is_sent(client: DSecClient) -> None:
    create = client.images.create
    for fields, field in (
        ({}, "path"),
        ({"path": "/a", "docker": "b"}, "path"),
        ({"docker": "b", "upload": True}, "upload"),
        ({"path": "/a", "context": "/b"}, "context"),
        ({"path": "/no/such/file", "upload": True}, "path"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await create("e2e/x:1", **fields)  # type: ignore[arg-type]
        assert caught.value.field == field


async def test_the_command_line(
    client: DSecClient, fake_system: LocalSystem, tmp_path: Path
) -> None:
    env = {
        **os.environ, "PYTHONPATH": str(REPOSITORY), "DSEC_URL": fake_system.url,
        "DSEC_API_KEY": fake_system.admin_key, "DSEC_PROJECT": fake_system.project,
    }  # fmt: skip

    async def dsec(*argv: str, code: int = 0) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "libdsec", *argv, env=env, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
        assert process.returncode == code, err.decode()
        assert code or err == b"", "no bar where there is no terminal"
        return out.decode() or err.decode()

    tree = odd_tree(tmp_path / "tree")
    made = json.loads(await dsec("image", "import", "cli/base:1", str(tree), "--json"))
    assert (made["name"], made["kind"]) == ("cli/base:1", "base")
    tools = json.loads(await dsec("toolkit", "publish", "cli/tools:1", str(tree), "--json"))
    assert tools["kind"] == "toolkit"
    await dsec("image", "tag", "cli/base:1", "cli/base:live")
    shown = json.loads(await dsec("image", "inspect", "cli/base:live", "--json"))
    assert shown["layers"] == made["layers"]
    assert made["layers"][0]["digest"] in await dsec("image", "inspect", "cli/base:live")
    assert "cli/tools:1" in await dsec("toolkit", "ls")
    assert "cli/base:1" not in await dsec("toolkit", "ls")
    out = tmp_path / "out.tar"
    wrote = json.loads(
        await dsec("image", "export", "cli/base:1", "cli/tools:1", "-o", str(out), "--json")
    )
    assert wrote == {"path": str(out), "size_bytes": out.stat().st_size}
    short = ("image", "import", "x:1", "registry:busybox")
    failed = json.loads(await dsec(*short, "--json", code=125))
    assert failed["error"]["field"] == "registry"
    await dsec("image", "rm", "cli/base:live")
    assert "cli/base:live" not in await dsec("image", "ls")


async def test_a_new_toolkit_reaches_new_sandboxes_and_no_running_one(
    containers: DSecClient, tmp_path: Path
) -> None:
    """(I08) Each layer's file is there; a tag that moves changes what is created next."""
    for kind, name in (("workspace", "task"), ("toolkit", "tools")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("one")
        await containers.images.create(
            f"e2e/{name}:live", path=folder, upload=True, kind=kind,  # type: ignore[arg-type]
            prefix=f"/srv/{name}",
        )  # fmt: skip
    args = DSecRunArgs(layers=["py:3.11", "e2e/task:live", "e2e/tools:live"])
    async with await containers.create(args) as old:
        seen = await old.run_shell("cat /srv/task/task /srv/tools/tools && python3 -c 'print(1)'")
        assert seen.stdout == b"oneone1\n"
        (tmp_path / "tools" / "tools").write_text("two")
        await containers.images.create(
            "e2e/tools:live", path=tmp_path / "tools", upload=True, kind="toolkit",
            prefix="/srv/tools",
        )  # fmt: skip
        async with await containers.create(args) as new:
            assert (await new.run_shell("cat /srv/task/task /srv/tools/tools")).stdout == b"onetwo"
        assert (await old.run_shell("cat /srv/tools/tools")).stdout == b"one"


async def test_a_declared_volume_is_a_plain_directory(
    containers: DSecClient, tmp_path: Path
) -> None:
    """(I09) What is written there is kept over a pause as anything else."""
    (tmp_path / "data").mkdir()
    await containers.images.create(
        "e2e/volume:1", path=tmp_path, upload=True, kind="toolkit", config={"volumes": ["/data"]}
    )
    assert (await containers.images.get("e2e/volume:1")).config.volumes == ["/data"]
    args = DSecRunArgs(layers=["py:3.11", "e2e/volume:1"])
    async with await containers.create(args) as sandbox:
        await sandbox.files.write("/data/x", b"kept")
        await sandbox.pause()
        await sandbox.resume()
        assert await sandbox.files.read("/data/x") == b"kept"


async def test_the_hot_set_is_what_most_sandboxes_were_started_from(
    client: DSecClient, fake_system: LocalSystem, tmp_path: Path
) -> None:
    """Counted by the scheduler; a trace that an edge tells narrows a layer to what is read."""
    for name in ("often", "rare"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(os.urandom(3 << 20))
        await client.images.create(f"hot/{name}:1", path=tmp_path / name, upload=True)
    for name, count in (("often", 40), ("rare", 1)):
        args = DSecRunArgs(backend="fake", container_image=f"hot/{name}:1")
        made = await client.create_many([args] * count)
        await client.stop_many([one for one in made if isinstance(one, Sandbox)])
    (often,) = (await client.images.get("hot/often:1")).layers
    (rare,) = (await client.images.get("hot/rare:1")).layers
    found = await client.images.hot_set(share=0.5)
    assert [layer.digest for layer in found.layers] == [often.digest]
    assert (found.hot_bytes, found.share >= 0.5) == (often.size_bytes, True)
    assert found.layers[0].unit_bytes is None

    told = LayerAccesses(
        node="n", layers=[LayerAccess(digest=often.digest, unit_bytes=1 << 19, units=[4, 0])]
    )
    infra = fake_system.infra.endpoints
    bus = await nats.connect(
        infra.nats_url, user="imagesvc", password=infra.nats_users["imagesvc"]
    )
    await bus.jetstream().publish(evt("edge", "access_profile", "n"), encode(told))
    await bus.close()

    async def narrowed() -> Any:
        found = await client.images.hot_set(share=0.5)
        return found if found.layers[0].unit_bytes is not None else None

    found = await until(narrowed, what="the hot set knows what was read")
    assert (found.layers[0].units, found.hot_bytes) == ([0, 4], 1 << 20)
    everything = await client.images.hot_set(share=1.0)
    assert {often.digest, rare.digest} <= {layer.digest for layer in everything.layers}
    key = await client.keys.create("reader", grants=["image.*"])
    async with DSecClient(fake_system.url, key.secret, fake_system.project) as other:
        assert (await other.images.hot_set(share=0.5)).layers, "at the root"
