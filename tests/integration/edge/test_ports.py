"""Connections through the door, with nothing but messages. The port 7 of a fake sandbox
sends back what it gets."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from schemas.base import HEADER_FRAME, HEADER_OP, decode, encode
from schemas.exec import (
    CHUNK_BYTES,
    CONNECT_WINDOW_BYTES,
    HEADER_HAVE,
    HEADER_OFFSET,
    ConnectReply,
    ConnectRequest,
    ExecRequest,
)
from schemas.subjects import exec_, out
from shared import ids
from tests.integration.edge.cluster import (
    NODE,
    PROJECT,
    WAIT_S,
    Answer,
    Caller,
    Cluster,
    cluster,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = 7
MOST = 3
BOUNDS = {"DSEC_CONNECTIONS_PER_SANDBOX": str(MOST), "DSEC_OPS_PER_SANDBOX": "1"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path_factory.mktemp("ports"), **BOUNDS) as made:
        yield made


async def dialled(system: Cluster, uid: str, *, port: int = ECHO) -> tuple[str, Answer]:
    request = ConnectRequest(op_id=ids.new(), port=port)
    return request.op_id, await system.caller.call(uid, "connect", request)


async def asked_again(
    caller: Caller, uid: str, op_id: str, *, have: str | None, port: int = ECHO
) -> Answer:
    """The same request from another subject, as after a lost connection."""
    reply = out(NODE, caller.principal, caller.connection, ids.new())
    answer = caller.answers[reply] = Answer(reply)
    subject = exec_(PROJECT, NODE, uid, "connect", caller.principal)
    body = encode(ConnectRequest(op_id=op_id, port=port))
    headers = {HEADER_HAVE: have} if have else None
    await caller.client.publish(subject, body, reply=reply, headers=headers)
    return answer


async def final(answer: Answer) -> ConnectReply:
    return decode(await asyncio.wait_for(answer.final, WAIT_S), ConnectReply)


async def test_both_directions_end_one_after_the_other(system: Cluster) -> None:
    uid = await system.running()
    op_id, answer = await dialled(system, uid)
    await until(lambda: "ra" in answer.kinds())
    await system.caller.io(uid, op_id, "i", b"hello")
    await until(lambda: answer.data() == b"hello")
    assert "d" not in answer.kinds()
    await system.caller.io(uid, op_id, "f")
    reply = await final(answer)
    assert answer.kinds().endswith("dx")
    assert (reply.sent, reply.received, reply.error) == (5, 5, None)


@pytest.mark.parametrize("port", [0, 65536, -1])
async def test_what_is_no_port_is_refused_before_anything(system: Cluster, port: int) -> None:
    uid = await system.running()
    request = ConnectRequest(op_id=ids.new(), port=ECHO)
    body = encode(request).replace(b'"port":7', b'"port":%d' % port)
    error = (await final(await system.caller.call(uid, "connect", request, body=body))).error
    assert error is not None and (error.code, error.field) == ("invalid_request", "port")


async def test_where_nothing_listens_the_error_names_the_port(system: Cluster) -> None:
    uid = await system.running()
    _, answer = await dialled(system, uid, port=8080)
    error = (await final(answer)).error
    assert error is not None and "8080" in error.message
    assert (error.code, error.field) == ("not_found", "port")
    assert error.details["errno"] == "ECONNREFUSED"


async def test_a_reader_that_confirms_nothing_is_sent_one_window(system: Cluster) -> None:
    uid = await system.running()
    op_id, answer = await dialled(system, uid)
    await until(lambda: "r" in answer.kinds())
    sent = 0

    def room() -> bool:
        taken = max([int(d) for kind, d, _ in answer.frames if kind == "a"], default=0)
        return sent - taken + CHUNK_BYTES <= CONNECT_WINDOW_BYTES

    while sent < CONNECT_WINDOW_BYTES * 3 // 2:
        await until(room)
        await system.caller.io(uid, op_id, "i", b"x" * CHUNK_BYTES)
        sent += CHUNK_BYTES
    await until(lambda: len(answer.data()) == CONNECT_WINDOW_BYTES)
    await asyncio.sleep(0.3)  # one byte too many would come about now
    assert len(answer.data()) == CONNECT_WINDOW_BYTES
    await system.caller.io(uid, op_id, "w", str(CONNECT_WINDOW_BYTES).encode())
    await until(lambda: len(answer.data()) == sent)


async def test_more_input_than_the_window_ends_it(system: Cluster) -> None:
    uid = await system.running()
    op_id, answer = await dialled(system, uid)
    await until(lambda: "r" in answer.kinds())
    for _ in range(20):
        await system.caller.io(uid, op_id, "i", b"x" * CHUNK_BYTES)
    error = (await final(answer)).error
    assert error is not None and error.code == "invalid_request"


async def test_who_comes_back_goes_on_and_nothing_comes_twice(system: Cluster) -> None:
    uid = await system.running()
    op_id, answer = await dialled(system, uid)
    await system.caller.io(uid, op_id, "i", b"one")
    await until(lambda: answer.data() == b"one")
    again = await asked_again(system.caller, uid, op_id, have="3 0")
    await until(lambda: "ra" in again.kinds())
    offsets = [headers[HEADER_OFFSET] for kind, _, headers in again.frames if kind == "o"]
    assert offsets == ["0"], "what was not confirmed comes with its place"
    taken = next(data for kind, data, _ in again.frames if kind == "a")
    headers = {HEADER_FRAME: "i", HEADER_OP: op_id, HEADER_OFFSET: "0"}
    subject = exec_(PROJECT, NODE, uid, "io", system.caller.principal)
    await system.caller.client.publish(subject, b"onetwo", headers=headers)
    await system.caller.io(uid, op_id, "f")
    reply = await final(again)
    assert (taken, again.data(), reply.sent) == (b"3", b"onetwo", 6)


async def test_connections_are_bounded_apart_from_commands(system: Cluster) -> None:
    uid = await system.running()
    held = [await dialled(system, uid) for _ in range(MOST)]
    for _, answer in held:
        await until(lambda a=answer: "r" in a.kinds())  # type: ignore[misc]
    _, refused = await dialled(system, uid)
    error = (await final(refused)).error
    assert error is not None and error.retryable
    assert (error.code, error.field) == ("capacity_exhausted", "port")
    done = await system.caller.exec(uid, ExecRequest(op_id=ids.new(), argv=["true"]))
    assert done.exit_code == 0
    await system.caller.io(uid, held[0][0], "c")
    await final(held[0][1])
    _, more = await dialled(system, uid)
    await until(lambda: "r" in more.kinds())


async def test_an_open_connection_is_use(system: Cluster) -> None:
    uid = await system.running()
    op_id, answer = await dialled(system, uid)
    await until(lambda: "r" in answer.kinds())
    await system.scheduler.op("set_timeout", uid, ttl_running_stop=2.0)
    await asyncio.sleep(2.5)
    assert "stopped" not in system.scheduler.seen(uid)
    await system.caller.io(uid, op_id, "f")
    assert (await final(answer)).error is None
    assert (await system.scheduler.observed(uid, "stopped")).cause == "idle_timeout"


async def test_another_principal_reaches_no_connection(system: Cluster) -> None:
    uid = await system.running()
    op_id, answer = await dialled(system, uid)
    await until(lambda: "r" in answer.kinds())
    other = await system.another_caller(ids.new())
    await other.io(uid, op_id, "i", b"not mine")
    await other.io(uid, op_id, "c")
    again = await asked_again(other, uid, op_id, have="0 0")
    error = (await final(again)).error
    assert error is not None and error.code == "not_found"
    await system.caller.io(uid, op_id, "i", b"mine")
    await until(lambda: answer.data() == b"mine")
    await other.client.close()


async def test_a_restarted_edge_begins_no_connection_anew(system: Cluster) -> None:
    uid = await system.running()
    op_id, answer = await dialled(system, uid)
    await until(lambda: "r" in answer.kinds())
    before = len(system.scheduler.joins)
    await system.edge.kill()
    await system.edge.start()
    await until(lambda: len(system.scheduler.joins) > before)
    reply = await final(await asked_again(system.caller, uid, op_id, have="0 0"))
    assert reply.error is not None and reply.error.details["errno"] == "ECONNRESET"
    assert (reply.error.code, reply.error.field) == ("conflict", "port")
    unheard = await asked_again(system.caller, uid, op_id, have=None)
    await until(lambda: "ra" in unheard.kinds())


async def test_an_edge_that_ends_says_so(system: Cluster) -> None:
    uid = await system.running()
    _, answer = await dialled(system, uid)
    await until(lambda: "r" in answer.kinds())


    await system.edge.kill(signal.SIGTERM)
    error = (await final(answer)).error
    assert error is not None and error.code == "internal"
