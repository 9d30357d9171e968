"""Scripts that run again: what is answered from the log, followed, refused and begun."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from libdsec import _ids, _log
from libdsec import replay as replaying
from libdsec._core import Core
from libdsec._log import Entry
from libdsec._wire import (
    ExecReply,
    FileEntry,
    FileReply,
    TrajectoryPage,
    TrajectoryRecord,
    WireError,
    encode,
)
from libdsec.errors import Divergence, OutcomeUnknown, SandboxDied, Unavailable
from libdsec.forward import FastForward
from libdsec.replay import replay
from libdsec.results import ExecResult
from libdsec.sandbox import Sandbox
from libdsec.trajectory import record_of

UID = _ids.named("sandbox")
FILE = FileEntry(path="/f", type="file", size=1, mode=0o644, uid=0, gid=0, mtime=0.0)
Answer = Callable[[str, dict[str, Any]], Any]


class Link:
    """Answers what is published at once, and keeps it."""

    def __init__(self, answer: Answer) -> None:
        self.config = SimpleNamespace(principal="p", project="team")
        self.connection = "c"
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._answer = answer
        self.live: dict[str, Any] = {}

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: Any = None
    ) -> None:
        verb, request = subject.split(".")[6], json.loads(data)
        if verb == "io":
            return
        self.asked.append((verb, request))
        operation = self.live[reply.rpartition(".")[2]]
        operation.on_frame("x", encode(self._answer(verb, request)), None)


def sandbox_of(answer: Answer) -> tuple[Sandbox, Link]:
    link = Link(answer)
    operations = SimpleNamespace(
        link=link, add=lambda o: link.live.__setitem__(o.token, o), remove=lambda o: None
    )
    core: Core = SimpleNamespace(operations=operations, owned={})  # type: ignore[assignment]
    return Sandbox(core, UID, project="team", state="running", node="n1"), link


def done(verb: str, request: dict[str, Any]) -> Any:
    if verb == "exec":
        return ExecReply(op_id=request["op_id"], exit_code=0, stdout=b"for real")
    return FileReply(op_id=request["op_id"], entry=FILE, size=request.get("size", 0))


def record(step: int, verb: str, reply: Any = None, *, lane: str = "main", **request: Any) -> Entry:
    fields = {"op_id": _ids.named(UID, lane, str(step)), **request}
    wire = TrajectoryRecord(
        uid=UID, project="team", seq=step, op_id=fields["op_id"], verb=verb, principal="p",
        at=step, lane=lane, step=step, request=fields,
        ended_at=None if reply is None else step + 0.5,
        reply=None if reply is None else json.loads(encode(reply)),
    )  # fmt: skip
    return Entry(step, wire)


def forward(
    monkeypatch: pytest.MonkeyPatch, entries: list[Entry], answer: Answer = done
) -> tuple[FastForward, Link]:
    async def read(_sandbox: Any) -> AsyncIterator[Entry]:
        for entry in entries:
            yield entry

    monkeypatch.setattr(_log, "entries", read)
    sandbox, link = sandbox_of(answer)
    return sandbox.fast_forward(), link


OP = _ids.new()


async def test_recorded_results_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        record(1, "exec", ExecReply(op_id=OP, exit_code=2, stdout=b"kept"), shell="x"),
        record(2, "file_read", FileReply(op_id=OP, data=b"then", size=4), path="/f"),
    ]
    steps, link = forward(monkeypatch, entries)
    assert (await steps.exec("x")).stdout == b"kept"
    assert await steps.files.read("/f") == b"then"
    assert (link.asked, steps.replayed) == ([], 2)
    assert (await steps.exec("y")).stdout == b"for real"
    verb, request = link.asked[0]
    assert (verb, request["shell"], request["lane"], request["step"]) == ("exec", "y", "main", 3)
    assert request["op_id"] == _ids.named(UID, "main", "3")


async def test_recorded_output_comes_the_way_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reply = ExecReply(op_id=OP, exit_code=1, stdout=b"a\nb\n", stderr=b"e", truncated=(3, 0))
    entries = [record(n, "exec", reply, argv=["x"]) for n in (1, 2, 3)]
    entries[1] = record(2, "exec", reply, argv=["x"], stdin=True)
    steps, link = forward(monkeypatch, entries)
    heard: list[tuple[str, bytes]] = []
    result = await steps.exec(["x"], on_output=lambda *part: heard.append(part))
    assert heard == [("stdout", b"a\nb\n"), ("stderr", b"e")]
    process = await steps.spawn(["x"])
    await process.write("taken then, taken now")
    await process.close_stdin()
    assert [line async for line in process.stdout.lines()] == ["a", "b"]
    spawned = await process.wait()
    assert (spawned.exit_code, spawned.truncated) == (1, (3, 0))
    async with await steps.spawn(["x"], stdin=False) as again:
        found = await again.wait()
    assert (found.stdout, found.stderr) == (result.stdout, result.stderr) == (b"a\nb\n", b"e")
    assert link.asked == []


async def test_an_intent_without_an_end_is_unknown_and_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its edge has forgotten it, or says that it does not know."""

    def forgotten(verb: str, request: dict[str, Any]) -> Any:
        error = WireError(code="not_found", message="no operation", field="op_id")
        return ExecReply(op_id=request["op_id"], error=error)

    steps, link = forward(monkeypatch, [record(1, "exec", shell="x")], forgotten)
    with pytest.raises(OutcomeUnknown) as caught:
        await steps.exec("x")
    assert caught.value.is_infra and not caught.value.retryable
    assert [(r["attach"], "shell" in r) for _, r in link.asked] == [(True, False)]

    steps, link = forward(monkeypatch, [record(1, "file_mkdir", path="/d")])
    with pytest.raises(OutcomeUnknown):
        await steps.files.mkdir("/d")
    assert link.asked == []


async def test_what_does_no_harm_twice_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        record(1, "file_write", path="/f", data="eA==", size=1),
        record(2, "file_read", FileReply(op_id=OP, size=10_000_000), path="/f"),
    ]

    def answer(verb: str, request: dict[str, Any]) -> Any:
        if verb == "file_read":
            return FileReply(op_id=request["op_id"], data=b"now", size=3)
        return done(verb, request)

    steps, link = forward(monkeypatch, entries, answer)
    await steps.files.write("/f", b"x")
    assert await steps.files.read("/f") == b"now"
    assert [verb for verb, _ in link.asked] == ["file_write", "file_read"]


async def test_what_was_refused_before_it_began_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    error = WireError(code="unavailable", message="paused", retryable=True)
    entries = [record(1, "exec", ExecReply(op_id=OP, error=error), shell="x")]
    steps, _ = forward(monkeypatch, entries)
    assert (await steps.exec("x")).stdout == b"for real"


async def test_a_divergence_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = ExecReply(op_id=OP, exit_code=0)
    steps, link = forward(monkeypatch, [record(1, "exec", reply, shell="x", env={"A": "1"})])
    with pytest.raises(Divergence, match=r"main step 1 .* differ in cwd, env") as caught:
        await steps.exec("x", env={"A": "2"}, cwd="/")
    assert (caught.value.recorded, caught.value.asked, link.asked) == ("x", "x", [])


async def test_an_error_is_a_result_too(monkeypatch: pytest.MonkeyPatch) -> None:
    error = WireError(code="sandbox_died", message="gone", cause="oom")
    entries = [record(1, "exec", ExecReply(op_id=OP, error=error), shell="x")]
    steps, _ = forward(monkeypatch, entries)
    with pytest.raises(SandboxDied):
        await steps.exec("x")


def page(seqs: range | list[int], *, more: bool = False, last: int = 0) -> TrajectoryPage:
    records = [record(seq, "exec", shell="x").record for seq in seqs]
    return TrajectoryPage(records=[r for r in records if r], more=more, last=last)


async def test_a_gap_shows_and_nothing_comes_twice() -> None:
    """The node has forgotten the beginning, the services do not have the end yet."""
    pages = {0: page([6, 7, 9], more=True, last=12), 9: page([10, 11], last=12)}
    sandbox, _ = sandbox_of(lambda verb, request: pages[request.get("after", 0)])

    async def read(subject: str, query: Any, _type: Any) -> TrajectoryPage:
        assert (query.uid, query.node) == (UID, "n1")
        return page([1, 2, 4, 5], more=True) if query.after == 0 else page([6, 7])

    sandbox._core.calls = SimpleNamespace(get_subject=lambda *a: "s", read=read)  # type: ignore[assignment]
    found = [r async for r in sandbox.trajectory()]
    assert [(r.seq, r.state, r.missing) for r in found] == [
        (1, "open", 0), (2, "open", 0), (3, "lost", 1), (4, "open", 0), (5, "open", 0),
        (6, "open", 0), (7, "open", 0), (8, "lost", 1), (9, "open", 0), (10, "open", 0),
        (11, "open", 0), (12, "lost", 1),
    ]  # fmt: skip
    sandbox.state = "lost"
    assert [r.seq async for r in sandbox.trajectory()] == [1, 2, 3, 4, 5, 6, 7]


async def test_a_node_that_stops_answering_half_way_is_no_end() -> None:
    def answer(_verb: str, request: dict[str, Any]) -> Any:
        if request.get("after", 0) == 0:
            return page([1, 2], more=True, last=9)
        return TrajectoryPage(error=WireError(code="not_found", message="gone"))

    sandbox, _ = sandbox_of(answer)
    found = sandbox.trajectory()
    assert [(await anext(found)).seq, (await anext(found)).seq] == [1, 2]
    with pytest.raises(Unavailable):
        await anext(found)


async def test_what_cannot_be_done_again_is_told() -> None:
    sandbox, link = sandbox_of(done)
    written = FileReply(op_id=OP, entry=FILE, size=9)
    entries = [
        record(1, "exec", ExecReply(op_id=OP, exit_code=1, stdout=b"other"), shell="x"),
        record(2, "exec", ExecReply(op_id=OP, exit_code=0), argv=["cat"], stdin=True),
        record(3, "exec", shell="open"),
        record(4, "file_write", written, path="/f", size=9),
        record(5, "file_read", FileReply(op_id=OP, data=b"x", size=1), path="/f"),
        Entry(6, missing=3),
    ]
    found = await replay([record_of(e) for e in entries], sandbox)
    assert [(d.record.seq, d.what) for d in found.differences] == [
        (1, "exit_code"), (1, "stdout"), (2, "not_replayed"), (3, "not_replayed"),
        (4, "not_replayed"), (6, "not_replayed"),
    ]  # fmt: skip
    assert (found.replayed, found.same) == (1, False)
    assert [verb for verb, _ in link.asked] == ["exec"]


async def test_what_followed_within_a_tick_of_the_clock_is_done_in_its_order() -> None:
    """The second one began after the end of the first, and both in one tick; the third one
    before the end of the second."""
    wires = [record(n, "exec", ExecReply(op_id=OP, exit_code=0), shell=f"c{n}") for n in (1, 2, 3)]
    spans = [(1.0001, 1.001), (1.002, 1.009), (1.003, 1.004)]
    done_again = []
    for entry, (begun_at, ended_at) in zip(wires, spans, strict=True):
        assert entry.record is not None
        wire = msgspec.structs.replace(entry.record, at=1.0, begun_at=begun_at, ended_at=ended_at)
        done_again.append(record_of(Entry(entry.seq, wire)))
    running: set[str] = set()
    overlaps: list[set[str]] = []

    class Again:
        async def _start(self, _verb: str, request: Any, _reply: Any) -> Any:
            running.add(request.shell)
            overlaps.append(set(running))
            return request.shell

    async def collect(shell: str) -> ExecResult:
        for _ in range(20):
            await asyncio.sleep(0)
        running.discard(shell)
        return done_again[0].result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaying, "collect", collect)
        found = await replay(done_again, Again())  # type: ignore[arg-type]
    assert (found.replayed, overlaps) == (3, [{"c1"}, {"c2"}, {"c2", "c3"}])
