"""Commands and files through the door, with nothing but messages."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from schemas.base import decode, encode
from schemas.exec import (
    CHUNK_BYTES,
    INLINE_BYTES,
    WINDOW_BYTES,
    ExecReply,
    ExecRequest,
    FileReply,
    FileRequest,
    InfoRequest,
)
from schemas.subjects import exec_
from shared import ids
from tests.integration.edge.cluster import (
    NODE,
    PROJECT,
    WAIT_S,
    Answer,
    Caller,
    Cluster,
    until,
)


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


async def taking(caller: Caller, uid: str, op_id: str, answer: Answer) -> bytes:
    """Reads a stream to its end, confirming what came."""
    confirmed = 0
    while not answer.final.done():
        size = len(answer.data())
        if size > confirmed:
            confirmed = size
            await caller.io(uid, op_id, "w", str(size).encode())
        await asyncio.sleep(0.002)
    return answer.data()


async def test_bytes_come_back_as_they_are(system: Cluster) -> None:
    """(E13)"""
    uid = await system.running()
    reply = await system.caller.exec(
        uid, ExecRequest(op_id=ids.new(), shell=r"printf 'a\x96\xffb'; exit 3")
    )
    assert (reply.exit_code, reply.stdout) == (3, b"a\x96\xffb")


async def test_the_exit_code_comes_after_the_last_byte(system: Cluster) -> None:
    """(E21)"""
    uid = await system.running()
    request = ExecRequest(op_id=ids.new(), shell="echo a; exit 5", stream=True)
    answer = await system.caller.call(uid, "exec", request)
    reply = decode(await asyncio.wait_for(answer.final, WAIT_S), ExecReply)
    assert (reply.exit_code, answer.kinds(), answer.data()) == (5, "ox", b"a\n")


async def test_commands_are_numbered_over_restarts_of_the_edge(system: Cluster) -> None:
    uid = await system.running()
    true = [ExecRequest(op_id=ids.new(), argv=["true"]) for _ in range(3)]
    first = [(await system.caller.exec(uid, r)).seq for r in true]
    assert first == [1, 2, 3]
    await system.edge.kill()
    await system.edge.start()
    await until(lambda: len(system.scheduler.joins) == 2)
    reply = await system.caller.exec(uid, ExecRequest(op_id=ids.new(), argv=["true"]))
    assert (reply.epoch, reply.seq) == (1, 4)


async def test_output_over_the_inline_size_keeps_head_and_tail(system: Cluster) -> None:
    uid = await system.running()
    size = INLINE_BYTES * 3
    reply = await system.caller.exec(
        uid, ExecRequest(op_id=ids.new(), shell=f"bytes {size}; echo END")
    )
    assert len(reply.stdout) == INLINE_BYTES and reply.stdout.endswith(b"END\n")
    assert reply.truncated == (size + 4 - INLINE_BYTES, 0)


async def test_a_stream_waits_for_its_reader(system: Cluster) -> None:
    uid = await system.running()
    size = WINDOW_BYTES * 3
    request = ExecRequest(
        op_id=ids.new(), shell=f"bytes {size}", stream=True, output_limit_bytes=size * 2
    )
    answer = await system.caller.call(uid, "exec", request)
    await asyncio.sleep(0.5)
    assert len(answer.data()) <= WINDOW_BYTES  # nothing was confirmed
    got = await asyncio.wait_for(taking(system.caller, uid, request.op_id, answer), WAIT_S)
    assert hashlib.sha256(got).digest() == hashlib.sha256(pattern(size)).digest()
    assert max(len(data) for kind, data, _ in answer.frames if kind == "o") <= CHUNK_BYTES


async def test_input_in_frames_reaches_the_command(system: Cluster) -> None:
    uid = await system.running()
    request = ExecRequest(op_id=ids.new(), argv=["cat"], stdin=True)
    answer = await system.caller.call(uid, "exec", request)
    await until(lambda: "r" in answer.kinds())
    await system.caller.io(uid, request.op_id, "i", b"one ")
    await system.caller.io(uid, request.op_id, "i", b"two")
    await system.caller.io(uid, request.op_id, "f")
    reply = decode(await asyncio.wait_for(answer.final, WAIT_S), ExecReply)
    assert reply.stdout == b"one two"
    assert answer.data("a").endswith(b"7")
    data = ExecRequest(op_id=ids.new(), argv=["cat"], stdin_data=b"whole")
    assert (await system.caller.exec(uid, data)).stdout == b"whole"
    none = ExecRequest(op_id=ids.new(), argv=["cat"])
    assert (await system.caller.exec(uid, none)).stdout == b""


async def test_a_signal_and_a_cancel_end_a_command(system: Cluster) -> None:
    uid = await system.running()
    for frame, data, code in (("s", b"TERM", 143), ("c", b"", 137)):
        request = ExecRequest(op_id=ids.new(), shell="echo begun; hang", stream=True)
        answer = await system.caller.call(uid, "exec", request)
        await until(answer.data)
        await system.caller.io(uid, request.op_id, frame, data)
        reply = decode(await asyncio.wait_for(answer.final, WAIT_S), ExecReply)
        assert (reply.exit_code, reply.error) == (code, None)


async def test_a_time_limit_is_no_error(system: Cluster) -> None:
    uid = await system.running()
    request = ExecRequest(op_id=ids.new(), shell="echo early; hang", timeout_s=1.5)
    reply = await system.caller.exec(uid, request)
    assert reply.timed_out and reply.stdout == b"early\n" and reply.error is None


async def test_a_silent_command_shows_that_it_lives(system: Cluster) -> None:
    uid = await system.running()
    request = ExecRequest(op_id=ids.new(), shell="sleep 5")
    answer = await system.caller.call(uid, "exec", request)
    await asyncio.wait_for(answer.final, WAIT_S)
    assert set(answer.kinds()) == {"k", "x"}


async def test_the_same_operation_never_runs_twice(system: Cluster) -> None:
    """The answer is lost, the request comes again: on another connection, in parallel,
    after the edge was killed."""
    uid = await system.running()
    request = ExecRequest(op_id=ids.new(), shell="count /ran; echo done")
    await system.caller.call(uid, "exec", request)  # nobody waits for this answer
    others = [await system.another_caller() for _ in range(5)]
    replies = await asyncio.gather(*(other.exec(uid, request) for other in others))
    assert {r.stdout for r in replies} == {b"done\n"}
    await until(lambda: any(a.verb == "sandbox.exec" for a in system.scheduler.access))
    await system.edge.kill()
    await system.edge.start()
    await until(lambda: len(system.scheduler.joins) == 2)
    assert (await others[0].exec(uid, request)).stdout == b"done\n"
    look = ExecRequest(op_id=ids.new(), shell="cat /ran")
    assert (await others[0].exec(uid, look)).stdout == b"ran\n"
    for other in others:
        await other.client.close()


async def test_another_request_under_the_same_operation_is_a_conflict(system: Cluster) -> None:
    uid = await system.running()
    op_id = ids.new()
    first = ExecRequest(op_id=op_id, shell="count /ran")
    assert (await system.caller.exec(uid, first)).error is None
    second = await system.caller.exec(uid, ExecRequest(op_id=op_id, shell="count /other"))
    assert second.error is not None
    assert (second.error.code, second.error.field) == ("conflict", "op_id")


async def test_a_command_cut_off_by_the_edges_death_is_not_run_again(system: Cluster) -> None:
    uid = await system.running()
    request = ExecRequest(op_id=ids.new(), shell="count /ran; sleep 600")
    answer = await system.caller.call(uid, "exec", request)
    await system.caller.marked(uid)
    assert not answer.final.done()
    await system.edge.kill()
    await system.edge.start()
    await until(lambda: len(system.scheduler.joins) == 2)
    reply = await system.caller.exec(uid, request)
    assert reply.error is not None and reply.error.is_infra and not reply.error.retryable
    assert "unknown" in reply.error.message


async def test_a_client_that_comes_back_gets_the_rest_of_a_stream(system: Cluster) -> None:
    uid = await system.running()
    size = WINDOW_BYTES * 2
    request = ExecRequest(
        op_id=ids.new(), shell=f"bytes {size}; echo END", stream=True, output_limit_bytes=size * 2
    )
    first = await system.caller.call(uid, "exec", request)
    await until(lambda: len(first.data()) == WINDOW_BYTES)
    await system.caller.io(uid, request.op_id, "w", str(CHUNK_BYTES).encode())
    other = await system.another_caller()
    second = await other.call(uid, "exec", request)
    await until(lambda: second.frames)
    offset = int(second.frames[0][2]["Dsec-Offset"])
    assert 0 < offset <= CHUNK_BYTES
    confirmed = 0
    while not second.final.done():
        if len(second.data()) > confirmed:
            confirmed = len(second.data())
            await other.io(uid, request.op_id, "w", str(offset + confirmed).encode())
        await asyncio.sleep(0.002)
    whole = pattern(size) + b"END\n"
    assert second.data() == whole[offset:]
    await other.client.close()


async def test_a_death_ends_commands_with_its_cause(system: Cluster) -> None:
    uid = await system.running(options={"die_after_s": 8.0, "die_cause": "oom"})
    reply = await system.caller.exec(uid, ExecRequest(op_id=ids.new(), shell="hang"))
    assert reply.error is not None
    assert (reply.error.code, reply.error.cause) == ("sandbox_died", "oom")
    assert not reply.error.is_infra


async def test_stopping_ends_commands(system: Cluster) -> None:
    uid = await system.running()
    running = asyncio.ensure_future(
        system.caller.exec(uid, ExecRequest(op_id=ids.new(), shell="count /ran; hang"))
    )
    await system.caller.marked(uid)
    await system.scheduler.op("stop", uid, cause="cancelled")
    reply = await asyncio.wait_for(running, WAIT_S)
    assert reply.error is not None
    assert (reply.error.code, reply.error.cause) == ("sandbox_died", "cancelled")


async def test_another_projects_sandbox_looks_like_none(system: Cluster) -> None:
    uid = await system.running()
    texts = []
    for target, project in ((uid, "foreign"), (ids.new(), "foreign")):
        request = ExecRequest(op_id=ids.new(), argv=["true"])
        reply = await system.caller.exec(target, request, project=project)
        assert reply.error is not None and reply.error.code == "not_found"
        texts.append(reply.error.message.replace(target, "<uid>"))
    assert texts[0] == texts[1]


async def test_answers_go_only_to_the_callers_own_subjects(system: Cluster) -> None:
    uid = await system.running()
    heard: list[bytes] = []

    async def hear(msg: object) -> None:
        heard.append(b"")

    await system.caller.client.subscribe("dsec.out.v1.>", cb=hear)
    await system.caller.client.flush()
    subject = exec_(PROJECT, NODE, uid, "exec", "mallory")
    victims = system.caller
    for reply in (
        f"dsec.out.v1.{NODE}.{victims.principal}.{victims.connection}.x",
        f"dsec.out.v1.other.mallory.{victims.connection}.x",
        f"dsec.out.v1.{NODE}.mallory.x",
    ):
        request = ExecRequest(op_id=ids.new(), shell="count /stolen")
        await system.caller.client.publish(subject, encode(request), reply=reply)
    await asyncio.sleep(0.3)
    assert heard == []
    look = ExecRequest(op_id=ids.new(), shell="cat /stolen")
    assert (await system.caller.exec(uid, look)).exit_code == 1


async def test_bad_requests_name_their_field_and_the_edge_goes_on(system: Cluster) -> None:
    uid = await system.running()
    op = ids.new()
    cases = [
        (b"not json", "invalid_request", None),
        (b'{"v":7,"op_id":"x"}', "unsupported", "v"),
        (encode({"op_id": "short"}), "invalid_request", "op_id"),
        (encode({"op_id": op, "argv": ["a"], "shell": "a"}), "invalid_request", "argv"),
        (encode({"op_id": op, "argv": ["true"], "timeout_s": -1}), "invalid_request", "timeout_s"),
        (encode({"op_id": op, "argv": ["a\0b"]}), "invalid_request", "argv"),
    ]
    for body, code, field in cases:
        reply = await system.caller.exec(uid, ExecRequest(op_id=ids.new()), body=body)
        assert reply.error is not None, body
        assert (reply.error.code, reply.error.field) == (code, field)
    assert (await system.caller.exec(uid, ExecRequest(op_id=op, argv=["true"]))).exit_code == 0


async def test_a_full_door_says_when_to_come_back(system: Cluster) -> None:
    uid, other = await system.running(), await system.running()
    hanging = [ExecRequest(op_id=ids.new(), shell="hang") for _ in range(64)]
    for request in hanging:
        await system.caller.call(uid, "exec", request)
    true = ExecRequest(op_id=ids.new(), argv=["true"])
    refused = await system.caller.exec(uid, true)
    assert refused.error is not None and refused.error.retry_after_s
    assert (refused.error.code, refused.error.retryable) == ("unavailable", True)
    assert (await system.caller.exec(other, true)).exit_code == 0  # its own bound
    await system.caller.io(uid, hanging[0].op_id, "c")
    async with asyncio.timeout(WAIT_S):
        while (await system.caller.exec(uid, true)).exit_code != 0:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "size", [0, 17_000, 18_433, INLINE_BYTES, INLINE_BYTES + 1, 1 << 20, 9 << 20]
)
async def test_files_come_back_as_they_were_written(system: Cluster, size: int) -> None:
    """(F01)"""
    uid = await system.running()
    data, path = pattern(size), '/w/é🤣 "q".txt'
    write = FileRequest(op_id=ids.new(), path=path, size=size, mode=0o640)
    answer = await system.caller.call(uid, "file_write", write)
    await until(lambda: "r" in answer.kinds())
    sent = 0
    while sent < size:
        taken = max([int(d) for k, d, _ in answer.frames if k == "a"], default=0)
        if sent - taken + CHUNK_BYTES > WINDOW_BYTES:
            await asyncio.sleep(0.001)
            continue
        await system.caller.io(uid, write.op_id, "i", data[sent : sent + CHUNK_BYTES])
        sent += CHUNK_BYTES
    await system.caller.io(uid, write.op_id, "f")
    reply = decode(await asyncio.wait_for(answer.final, WAIT_S), FileReply)
    assert reply.error is None and reply.entry is not None
    assert (reply.entry.size, reply.entry.mode) == (size, 0o640)
    read = FileRequest(op_id=ids.new(), path=path)
    answer = await system.caller.call(uid, "file_read", read)
    streamed = await asyncio.wait_for(taking(system.caller, uid, read.op_id, answer), WAIT_S)
    reply = decode(answer.final.result(), FileReply)
    assert (reply.size, (reply.data or b"") + streamed) == (size, data)


async def test_file_verbs_and_their_errors(system: Cluster) -> None:
    uid, call = await system.running(), system.caller.file

    def request(path: str, **more: object) -> FileRequest:
        return FileRequest(op_id=ids.new(), path=path, **more)  # type: ignore[arg-type]

    assert (await call(uid, "write", request("/d/f", data=b"abc"))).size == 3
    assert (await call(uid, "write", request("/d/f", data=b"d", append=True))).error is None
    assert (await call(uid, "read", request("/d/f", offset=1, length=2))).data == b"bc"
    assert (await call(uid, "mkdir", request("/d/e"))).error is None
    listed = (await call(uid, "list", request("/d"))).entries or []
    assert [(e.path, e.type, e.size) for e in listed] == [("/d/e", "dir", 0), ("/d/f", "file", 4)]
    assert (await call(uid, "move", request("/d/f", target="/d/g"))).error is None
    assert (await call(uid, "remove", request("/d", recursive=True))).error is None
    missing = (await call(uid, "stat", request("/d/g"))).error
    assert missing is not None and missing.details == {"errno": "ENOENT"}
    assert (missing.code, missing.field) == ("not_found", "path")
    folder = (await call(uid, "read", request("/tmp"))).error
    assert folder is not None and folder.details == {"errno": "EISDIR"}
    lonely = (await call(uid, "move", request("/tmp"))).error
    assert lonely is not None and lonely.field == "target"


async def test_a_write_of_the_wrong_size_leaves_nothing(system: Cluster) -> None:
    uid = await system.running()
    write = FileRequest(op_id=ids.new(), path="/f", size=10)
    answer = await system.caller.call(uid, "file_write", write)
    await until(lambda: "r" in answer.kinds())
    await system.caller.io(uid, write.op_id, "i", b"123")
    await system.caller.io(uid, write.op_id, "f")
    reply = decode(await asyncio.wait_for(answer.final, WAIT_S), FileReply)
    assert reply.error is not None and reply.error.field == "size"
    stat = await system.caller.file(uid, "stat", FileRequest(op_id=ids.new(), path="/f"))
    assert stat.error is not None and stat.error.code == "not_found"


async def test_info_tells_what_the_edge_knows(system: Cluster) -> None:
    uid = await system.running()
    info = await system.caller.info(uid, InfoRequest(op_id=ids.new()))
    assert (info.uid, info.state, info.error) == (uid, "running", None)
    assert info.metrics["pids"] >= 1 and info.enforcement
    assert info.metrics["execs"] == info.metrics["image_fetched_bytes"] == 0
    await system.caller.exec(uid, ExecRequest(op_id=ids.new(), argv=["true"]))
    metrics = (await system.caller.info(uid, InfoRequest(op_id=ids.new()))).metrics
    assert metrics["execs"] == 1 and "net_rx_bytes" not in metrics  # nobody counts that there


async def test_every_verb_is_recorded_once(system: Cluster) -> None:
    uid = await system.running()
    request = ExecRequest(op_id=ids.new(), argv=["true"])
    await system.caller.exec(uid, request)
    await system.caller.exec(uid, request)  # a repetition is no second verb
    stat = FileRequest(op_id=ids.new(), path="/nope")
    await system.caller.file(uid, "stat", stat)
    stranger = ExecRequest(op_id=ids.new(), argv=["true"])
    await system.caller.exec(ids.new(), stranger)
    await until(lambda: len(system.scheduler.access) >= 3)
    await asyncio.sleep(0.8)
    records = {(a.verb, a.outcome, a.sha256, a.bytes) for a in system.scheduler.access}
    assert records == {
        (verb, outcome, hashlib.sha256(encode(r)).hexdigest(), len(encode(r)))
        for verb, outcome, r in (
            ("sandbox.exec", "ok", request), ("sandbox.file_stat", "not_found", stat),
            ("sandbox.exec", "not_found", stranger),
        )
    }  # fmt: skip
    assert {a.principal for a in system.scheduler.access} == {system.caller.principal}
