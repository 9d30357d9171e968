"""Secrets through the whole system: used outside, and nowhere to be found."""

from __future__ import annotations

import os
import secrets as random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.errors import DSecError, Forbidden, InvalidRequest, NotFound
from services.local import LocalSystem
from tests.e2e.conftest import open_client, until
from tests.security.redteam.world import World

pytestmark = [pytest.mark.docker, pytest.mark.slow]

HOST, PLAIN_HOST = "api.test:8443", "api.test:8081"
RULES = {HOST: True, PLAIN_HOST: True}
ASK = """python3 - <<'EOF'
import os, urllib.error, urllib.request
request = urllib.request.Request("{url}", headers={{"X-Key": os.environ["HUB_KEY"]}})
try: print(urllib.request.urlopen(request, timeout=30).read().decode())
except urllib.error.HTTPError as e: print(e.code, e.read().decode())
EOF"""
SEARCH = "grep -rlsF -e {value} / --exclude-dir=proc --exclude-dir=sys; cat /proc/*/environ"


def args(binding: dict[str, object], **changes: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(
        container_image="py:3.11", memory_limit_mb=256, network_rules=RULES,
        secrets={"hub": binding}, **changes,
    )  # fmt: skip


async def ask(sandbox: Sandbox, url: str = f"https://{HOST}/v1") -> str:
    return (await sandbox.exec(ASK.format(url=url))).text.strip()


def files_below(folder: Path) -> Iterator[Path]:
    """All of them; folders may go meanwhile."""
    for root, _, names in os.walk(folder):
        yield from (Path(root, name) for name in names)


def holding(values: Iterable[bytes], files: Iterable[Path]) -> Iterator[str]:
    """The files that hold one of ``values``."""
    for file in files:
        try:
            data = file.read_bytes() if file.is_file() else b""
        except OSError:  # it went meanwhile, or is a process's that did
            continue
        if any(value in data for value in values):
            yield str(file)


async def test_a_secret_goes_out_in_requests_and_is_nowhere_else(
    containers: DSecClient, container_system: LocalSystem, outside: World
) -> None:
    """Also by a new edge; a new value is used by a sandbox that runs. Neither is in its
    environment, files, arguments or what it changed, in the log of what was done, in audit, or
    in any file of the system: journal, bus, database, logs. (S07)"""
    first, second = random.token_urlsafe(24), random.token_urlsafe(24)
    await containers.secrets.set("hub", first, hosts=[HOST, PLAIN_HOST])
    binding = {"hosts": [HOST], "header": "Authorization", "format": "Bearer {}", "env": "HUB_KEY"}
    sandbox = await containers.run_container(args(binding))
    try:
        assert await ask(sandbox) == "yes"
        assert f"Authorization: Bearer {first}".lower() in outside.heads[-1].lower()
        assert f"X-Key: {first}".lower() in outside.heads[-1].lower()
        assert await ask(sandbox, f"http://{PLAIN_HOST}/v1") == "yes"
        assert first not in outside.heads[-1]  # not bound there
        edge = next(name for name in container_system.services if name.startswith("edge"))
        await container_system.kill(edge)
        await container_system.restart(edge)

        async def again() -> bool:
            return await ask(sandbox) == "yes" and first in outside.heads[-1]

        await until(again, within_s=60, what="a new edge puts it in, and is trusted as the old one")
        changed = await containers.secrets.set("hub", second, hosts=[HOST, PLAIN_HOST])
        assert changed.version == 2

        async def used() -> bool:
            return await ask(sandbox) == "yes" and second in outside.heads[-1]

        await until(used, within_s=60, what="the new value is used")
        await sandbox.exec("echo packed > /root/packed")
        await sandbox.pack_diff("no-secret")
        seen = await sandbox.exec(SEARCH.format(value=f"{first[:12]} -e {second[:12]}"))
        assert first not in seen.text and second not in seen.text
        # the search itself has half of the value in its arguments, and finds nothing else
        assert not [line for line in seen.text.split("\0")[0].splitlines() if line.startswith("/")]
        values = [first.encode(), second.encode()]
        assert list(holding(values, files_below(container_system.state_dir))) == []
        told = [p for name in ("cmdline", "environ") for p in Path("/proc").glob(f"[0-9]*/{name}")]
        assert list(holding(values, told)) == []


        async def recorded() -> list[str]:
            told_of = [str(e.record) async for e in containers.audit.list(limit=500)]
            return told_of if any("secret.set" in text for text in told_of) else []

        told_of = await until(recorded, what="the setting is in the record")
        assert not any(v.decode() in text for v in values for text in told_of)
        done = [str(record) async for record in sandbox.trajectory()]
        assert done and not any(v.decode() in text for v in values for text in done)
        assert second not in repr(await containers.secrets.list())
        await containers.secrets.remove("hub")

        async def refused() -> bool:
            return (await ask(sandbox)).startswith("502")

        await until(refused, within_s=60, what="a secret that was removed is not used")
    finally:
        await sandbox.stop()


async def test_a_secret_is_bound_only_by_who_may_and_to_where_it_may_go(
    containers: DSecClient, container_system: LocalSystem
) -> None:
    await containers.secrets.set("hub", "value", hosts=[HOST])
    good = {"hosts": [HOST], "env": "HUB_KEY"}
    asked: list[tuple[dict[str, object], type[DSecError], str]] = [
        ({"hosts": ["evil.test"], "env": "HUB_KEY"}, Forbidden, "secrets.hub.hosts"),
        ({"hosts": [HOST]}, InvalidRequest, "secrets.hub"),
        ({"hosts": [HOST], "header": "Host"}, InvalidRequest, "secrets.hub.header"),
    ]
    for binding, kind, field in asked:
        with pytest.raises(kind) as caught:
            await containers.run_container(args(binding))
        assert caught.value.field == field
    with pytest.raises(NotFound):
        await containers.run_container(
            DSecContainerRunArgs(container_image="py:3.11", secrets={"none": good})
        )
    made = await containers.keys.create("runner", grants=["sandbox.create", "sandbox.stop"])
    assert made.secret is not None
    async with open_client(container_system, api_key=made.secret) as runner:
        with pytest.raises(Forbidden):
            await runner.run_container(args(good))
        for attempt in (
            runner.secrets.list(), runner.secrets.set("hub", "mine", hosts=["evil.test"]),
            runner.secrets.remove("hub"),
        ):  # fmt: skip
            with pytest.raises(Forbidden):
                await attempt
    await containers.secrets.remove("hub")
    with pytest.raises(NotFound):
        await containers.secrets.remove("hub")
