"""The way out against every known way around; each with what must go on working."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from services.edge.drivers.base import Handle
from tests.conformance.harness import HANG_S, Recorder, run, until
from tests.security.redteam.conftest import Field

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.docker]

GOOD, BAD = "198.51.100.10", "198.51.100.20"


def hello(name: str | None) -> bytes:
    """A real ClientHello for ``name``."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    made = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        made.do_handshake()
    return outgoing.read()


async def say(field: Field, handle: Handle, address: str, port: int, data: bytes) -> bytes:
    """What comes back of ``data``: the outside gives it back, and says that it ended."""
    io = Recorder(stdin=[data])
    ran = await run(
        field.driver, handle, ["nc", "-w", "30", address, str(port)], io=io, stdin=True,
        timeout_s=HANG_S,
    )  # fmt: skip
    return ran.stdout


def echoed(data: bytes) -> bytes:
    return data + b"\nend\n"


async def test_without_rules_nothing_leaves_not_even_a_name(field: Field) -> None:
    """(N01, N04, N10)"""
    handle = await field.start()
    field.world.asked.clear()
    field.world.reached.clear()
    for what in ("tcp", "mapped", "udp", "udp-connect", "fast-open", "icmp"):
        assert await field.attempt(handle, what, GOOD, "443") != "ok", what
    assert await field.attempt(handle, "tcp", "2001:db8::10", "443") != "ok"
    assert await field.sh(handle, "nslookup data.evil.test >/dev/null 2>&1 || echo none") == "none"
    assert field.world.asked == [] and field.world.reached == []
    assert await field.sh(handle, "echo the agent answers") == "the agent answers"


async def test_an_allowed_address_is_reached_and_others_by_no_call(field: Field) -> None:
    """(N01)"""
    handle = await field.start(rules={f"{GOOD}:8080": True})
    field.world.reached.clear()
    assert (await say(field, handle, GOOD, 8080, b"hi")).endswith(b"hi\nend\n")
    assert await field.attempt(handle, "mapped", GOOD, "8080") == "ok"
    for what in ("tcp", "mapped", "udp", "udp-connect", "fast-open"):
        assert await field.attempt(handle, what, BAD, "8080") == "EPERM", what
    for what in ("mptcp", "packet", "icmp"):
        assert await field.attempt(handle, what, BAD, "8080") != "ok", what
    assert await field.attempt(handle, "tcp", GOOD, "443") == "EPERM"
    assert await field.attempt(handle, "tcp", "2001:db8::10", "8080") == "EPERM"
    assert {a for a, _ in field.world.reached} == {GOOD}
    denied = {BAD, GOOD, "2001:db8::10"}
    await field.when_told(handle, "bpf_net", 7)
    await until(lambda: addresses(field, handle) >= denied)
    told = field.of(handle, "bpf_net")
    # what is only counted has no process
    assert {v.actor["comm"] for v in told if v.actor} == {"attempt"}
    assert addresses(field, handle) == denied
    assert {v.rule for v in told} == {"network.default"}


def addresses(field: Field, handle: Handle) -> set[str | None]:
    """Where it was told that the sandbox may not go."""
    return {v.destination.address for v in field.of(handle, "bpf_net") if v.destination}


async def test_ipv6_is_ruled_as_ipv4_is(field: Field) -> None:
    """(N01)"""
    handle = await field.start(rules={"[2001:db8::10]:8080": True})
    assert (await say(field, handle, "2001:db8::10", 8080, b"six")).endswith(b"six\nend\n")
    assert await field.attempt(handle, "tcp", GOOD, "8080") == "EPERM"


async def test_the_node_its_neighbours_and_other_sandboxes_are_never_reached(field: Field) -> None:
    other = await field.start(rules={"*": True})
    handle = await field.start(rules={"*": True, "198.51.100.0/24": True, "10.9.0.0/24": True})
    assert (await say(field, handle, "10.9.0.10", 8080, b"x")).endswith(b"end\n")
    assert await field.attempt(other, "tcp", "10.9.0.10", "8080") == "EPERM"  # private: unnamed
    for address in ("169.254.169.254", "192.0.0.8", "224.0.0.1", "fe80::1", "ff02::1"):
        assert await field.attempt(handle, "tcp", address, "8080") != "ok", address
    # the uplink's own address: the connection is taken and reset before anything is sent
    assert await say(field, handle, "198.51.100.1", 8080, b"x") == b""
    await until(lambda: any(v.rule == "network.never" for v in field.of(handle, "bpf_net")))
    assert await field.attempt(handle, "tcp", "127.0.0.1", "9") == "ECONNREFUSED"


async def test_only_allowed_names_are_resolved_and_open_their_addresses(field: Field) -> None:
    """(N04, N05, N06)"""
    handle = await field.start(rules={"good.test": True, "*.good.test": True})
    field.world.asked.clear()
    assert await field.attempt(handle, "tcp", GOOD, "443") == "EPERM"  # before its name
    assert GOOD in await field.sh(handle, "nslookup good.test")
    data = hello("good.test")
    assert await say(field, handle, GOOD, 443, data) == echoed(data)
    assert await field.attempt(handle, "tcp", GOOD, "853") == "EPERM"
    out = await field.sh(handle, "nslookup bad.test; nslookup evil.notgood.test; echo over")
    assert BAD not in out
    assert "bad.test" not in field.world.asked and "evil.notgood.test" not in field.world.asked
    told = await field.when_told(handle, "dns")
    assert {v.destination.domain for v in told if v.destination} >= {"bad.test"}
    for what in ("udp", "tcp"):  # another name server
        assert await field.attempt(handle, what, field.world.resolver, "53") == "EPERM"


async def test_a_shared_address_is_reached_by_the_allowed_name_alone(field: Field) -> None:
    """(N06)"""
    handle = await field.start(rules={"good.test": True})
    await field.sh(handle, "nslookup good.test")
    field.world.reached.clear()
    good = hello("good.test")
    assert await say(field, handle, GOOD, 443, good) == echoed(good)
    ask = b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n"
    assert await say(field, handle, GOOD, 80, ask % b"good.test") == echoed(ask % b"good.test")
    assert field.world.reached == [(GOOD, 443), (GOOD, 80)]
    for data in (hello("shared.test"), hello(None), b"plain text\r\n", b"\x16\x03\x01\xff\xff"):
        assert await say(field, handle, GOOD, 443, data) == b""
    for data in (ask % b"shared.test", ask % b"a\r\nHost: good.test", b"SSH-2.0-x\r\n",
                 b"GET http://shared.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n"):  # fmt: skip
        assert await say(field, handle, GOOD, 80, data) == b""
    assert len(field.world.reached) == 2
    told = await field.when_told(handle, "sni", 8)
    assert "shared.test" in {v.destination.domain for v in told if v.destination}


async def test_answers_into_the_inside_open_nothing(field: Field) -> None:
    handle = await field.start(rules={"*.good.test": True})
    out = await field.sh(handle, "nslookup rebind.good.test; nslookup own.good.test")
    assert "10.9.0.10" not in out and "198.51.100.1\n" not in out + "\n"
    assert await field.attempt(handle, "tcp", "10.9.0.10", "443") == "EPERM"
    rules = {v.rule for v in await field.when_told(handle, "dns", 3)}
    assert {"network.private", "network.never"} <= rules


async def test_one_rule_is_enough_for_a_name_that_is_inside(field: Field) -> None:
    """(N10)"""
    handle = await field.start(rules={"inner.test": True})
    await field.sh(handle, "nslookup inner.test")
    data = hello("inner.test")
    assert await say(field, handle, "10.9.0.10", 443, data) == echoed(data)


async def test_an_answer_that_rotates_does_not_close_what_it_opened(field: Field) -> None:
    """(N06)"""
    field.world.rotating["slow.good.test"] = ["198.51.100.10", "198.51.100.11"]
    handle = await field.start(rules={"slow.good.test": True})
    for _ in range(4):
        await field.sh(handle, "nslookup slow.good.test")
    data = hello("slow.good.test")
    for address in ("198.51.100.10", "198.51.100.11"):
        assert await say(field, handle, address, 443, data) == echoed(data)


async def test_a_mirror_service_is_reached_by_its_name(field: Field) -> None:
    handle = await field.start(rules={"pypi": True, "npm": False})
    assert "198.51.100.12" in await field.sh(handle, "nslookup mirror.test")
    data = hello("mirror.test")
    assert await say(field, handle, "198.51.100.12", 443, data) == echoed(data)
    assert BAD not in await field.sh(handle, "nslookup bad.test")
    assert handle.enforcement["network.pypi"].startswith("DNS gate")


@pytest.mark.parametrize("size", [1024, 128 * 1024, 5 * 1024 * 1024])
async def test_large_uploads_and_half_closes_pass_whole(field: Field, size: int) -> None:
    """(N12)"""
    handle = await field.start(rules={"good.test": True})
    await field.sh(handle, "nslookup good.test")
    head = b"POST / HTTP/1.1\r\nHost: good.test\r\nContent-Length: %d\r\n\r\n" % size
    text = (
        f"(printf '{head.decode().encode('unicode_escape').decode()}'; head -c {size} /dev/zero) | "
        f"nc -w 60 {GOOD} 80 | (sleep 0.3; wc -c)"
    )
    assert int(await field.sh(handle, text)) == len(echoed(head)) + size


async def test_a_flood_and_a_scan_are_counted_exactly_and_told_in_few(field: Field) -> None:
    handle = await field.start(rules={f"{GOOD}:8080": True})
    assert await field.attempt(handle, "flood", BAD, "20000") == "20000 ok"
    await field.when_told(handle, "bpf_net", 20000)
    assert sum(v.count + v.lost for v in field.of(handle)) == 20000
    assert len(field.of(handle)) < 100
    assert await field.attempt(handle, "scan", BAD, "3000") == "3000 ok"
    await field.when_told(handle, "bpf_net", 23000)
    await until(lambda: sum(v.targets for v in field.of(handle)) >= 2000)
    told = field.of(handle)
    assert sum(v.count + v.lost for v in told) == 23000
    scan = [v for v in told if v.targets]
    assert scan[0].samples
    assert len(told) < 1000


async def test_a_policy_that_is_gone_reaches_nothing_and_is_told(field: Field) -> None:
    """(N09)"""
    handle = await field.start(rules={f"{GOOD}:8080": True})
    assert await field.attempt(handle, "tcp", GOOD, "8080") == "ok"
    egress = field.driver._enforcing.egress
    held = egress._held[handle.uid]
    egress._kernel.drop_policy(held.gate.cookie)  # type: ignore[union-attr]
    assert await field.attempt(handle, "tcp", GOOD, "8080") == "EPERM"
    told = await field.when_told(handle, "bpf_net")
    assert {v.rule for v in told} == {"network.missing policy"}


async def test_other_rules_are_in_force_at_once_and_open_flows_are_reset(field: Field) -> None:
    spec = field.spec(rules={f"{GOOD}:8080": True, "198.51.100.11:8080": True})
    handle = await field.begin(spec)
    stay = asyncio.ensure_future(
        run(field.driver, handle, "sleep 600 | nc 198.51.100.11 8080")
    )
    cut = asyncio.ensure_future(
        run(field.driver, handle, f"sleep 600 | nc {GOOD} 8080; echo cut")
    )
    gate = field.driver._enforcing.egress._held[handle.uid].gate
    await until(lambda: len(gate._flows) == 2)
    narrower = field.spec(rules={"198.51.100.11:8080": True}, uid=spec.uid)
    handle = await field.driver.set_policy(handle, narrower)
    assert await field.attempt(handle, "tcp", GOOD, "8080") == "EPERM"
    assert await field.attempt(handle, "tcp", "198.51.100.11", "8080") == "ok"
    await until(lambda: len(gate._flows) <= 1)
    handle = await field.driver.set_policy(handle, field.spec(uid=spec.uid))
    assert await field.attempt(handle, "tcp", "198.51.100.11", "8080") != "ok"
    assert handle.enforcement["network"] == "none (no interface)"
    handle = await field.driver.set_policy(handle, narrower)
    assert await field.attempt(handle, "tcp", "198.51.100.11", "8080") == "ok"
    for task in (stay, cut):
        task.cancel()
    await asyncio.gather(stay, cut, return_exceptions=True)


async def test_rules_hold_through_a_pause_and_a_new_edge(field: Field) -> None:
    """(N07)"""
    spec = field.spec(rules={f"{GOOD}:8080": True})
    handle = await field.begin(spec)
    await field.driver.pause(handle)
    await field.driver.resume(handle)
    assert await field.attempt(handle, "tcp", GOOD, "8080") == "ok"
    assert await field.attempt(handle, "tcp", BAD, "8080") == "EPERM"
    field.edge_dies(handle)
    assert await field.attempt(handle, "tcp", GOOD, "8080") != "ok"
    handle = await field.edge_returns(handle, spec)
    assert await field.attempt(handle, "tcp", GOOD, "8080") == "ok"
    assert await field.attempt(handle, "tcp", BAD, "8080") == "EPERM"


async def test_who_takes_the_gates_place_while_no_edge_runs_reaches_nothing(field: Field) -> None:
    """(N07)"""
    spec = field.spec(rules={f"{GOOD}:8080": True})
    handle = await field.begin(spec)
    field.edge_dies(handle)
    await field.sh(
        handle,
        "nc -l -p 53 >/dev/null 2>&1 & echo $! >/tmp/pid; "
        "until grep -q ':0035 .* 0A ' /proc/net/tcp /proc/net/tcp6; do sleep 0.02; done",
    )
    handle = await field.edge_returns(handle, spec)
    assert await field.attempt(handle, "tcp", GOOD, "8080") != "ok"
    assert [v.rule for v in await field.when_told(handle, "policy")] == ["network.gate"]
    await field.sh(
        handle, "p=$(cat /tmp/pid); kill $p; while kill -0 $p 2>/dev/null; do sleep 0.02; done"
    )
    handle = await field.driver.set_policy(handle, spec)
    assert await field.attempt(handle, "tcp", GOOD, "8080") == "ok"
