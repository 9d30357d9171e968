"""From what the kernel denied in a container to the rule that audit finds, and from ordinary
work to none. Audit's rules are pure: they get here what a driver really tells."""

from __future__ import annotations

import asyncio

import pytest

from schemas.audit import Finding
from services.audit.engine import Engine
from services.audit.events import event
from services.audit.owners import Owner
from services.audit.records import from_violation
from services.audit.settings import Settings
from services.edge.drivers.base import Handle
from shared.policies.model import DENIABLE
from tests.conformance.harness import until
from tests.security.redteam.conftest import Field

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.docker]

ENGINE = Engine(Settings(pg_dsn="postgresql://x").rules())
NODE, GOOD, BAD = "n1", "198.51.100.10", "198.51.100.20"


def found(field: Field, handle: Handle) -> dict[str, Finding]:
    """What audit makes of everything that was told of a sandbox: rule → last finding."""
    owner = Owner(handle.uid, NODE, "p1", "k1", "j1", "t1")
    rows = [
        from_violation(NODE, told, {handle.uid: owner}, root="root", now=told.at)
        for told in field.of(handle)
    ]
    events = [event(f"{NODE}/{n}", row.record) for n, row in enumerate(rows)]
    return {f.rule: f for f in ENGINE.fold(ENGINE.take(events), {})}


async def test_a_scan_is_found_with_its_count(field: Field) -> None:
    handle = await field.start(rules={f"{GOOD}:8080": True})
    assert await field.attempt(handle, "scan", BAD, "3000") == "3000 ok"
    await field.when_told(handle, "bpf_net", 3000)
    await until(lambda: {"port_scan", "egress_attempt"} <= found(field, handle).keys())
    findings = found(field, handle)
    assert {"port_scan", "egress_attempt"} <= findings.keys() <= {
        "port_scan", "egress_attempt", "events_lost",
    }  # fmt: skip
    scan = findings["port_scan"]
    assert (scan.severity, scan.uid, scan.principal) == ("high", handle.uid, "k1")
    assert 32 <= scan.count <= 3000


async def test_an_extent_swap_and_calls_out_of_the_sandbox_are_found(field: Field) -> None:
    handle = await field.start({"processes": {"deny": list(DENIABLE)}})
    for what in ("swapext-high", "ptrace", "io_uring", "packet", "vsock"):
        assert await field.attempt(handle, what, BAD) == "EPERM", what
    await field.when_told(handle, "seccomp", 5)
    await until(lambda: len(found(field, handle)) >= 2)
    findings = found(field, handle)
    assert findings.keys() == {"extent_swap_ioctl", "privilege_attempt"}
    assert findings["extent_swap_ioctl"].severity == "critical"
    assert "attempt tried ioctl XFS_IOC_SWAPEXT" in findings["extent_swap_ioctl"].explanation


async def test_names_of_module_proxies_are_found_though_none_resolves(field: Field) -> None:
    handle = await field.start(rules={"good.test": True})
    for name in ("proxy.golang.test", "pypi.test", "pypi.test"):
        await field.sh(handle, f"nslookup {name} >/dev/null 2>&1")
    named = {"source_proxy_detour", "newer_release_fetch"}
    await until(lambda: named <= found(field, handle).keys())
    findings = found(field, handle)
    assert "proxy.golang.test" in findings["source_proxy_detour"].explanation


async def test_a_policy_that_is_gone_is_found(field: Field) -> None:
    handle = await field.start(rules={f"{GOOD}:8080": True})
    egress = field.driver._enforcing.egress
    held = egress._held[handle.uid]
    egress._kernel.drop_policy(held.gate.cookie)  # type: ignore[union-attr]
    assert await field.attempt(handle, "tcp", GOOD, "8080") == "EPERM"
    await field.when_told(handle, "bpf_net")
    assert found(field, handle)["policy_not_in_force"].severity == "critical"


async def test_ordinary_work_under_a_policy_finds_nothing(field: Field) -> None:
    handle = await field.start(
        {"preset": "locked", "network": {f"{GOOD}:8080": True, "good.test": True}}
    )
    assert await field.attempt(handle, "tcp", GOOD, "8080") == "ok"
    await field.sh(
        handle,
        "nslookup good.test >/dev/null 2>&1; cp /bin/busybox /tmp/ && /tmp/busybox true; "
        "httpd -p 127.0.0.1:8000 -h /etc && wget -q -O- http://127.0.0.1:8000/group >/dev/null; "
        "tar -C /etc -cf - group | tar -tf - >/dev/null; "
        "for i in 1 2 3 4 5; do sleep 0 & done; wait",
    )
    await asyncio.sleep(1.2)
    assert found(field, handle) == {}
