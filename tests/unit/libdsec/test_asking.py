"""What a script was told by something outside: asked once at a place, then recorded."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import pytest

from libdsec import _asking, _ids
from libdsec._log import Entry
from libdsec._wire import NOTE_BYTES, ExecReply, NoteReply, WireError
from libdsec.errors import Conflict, Divergence, InternalError, InvalidRequest, OutcomeUnknown
from libdsec.replay import replay
from libdsec.trajectory import record_of
from tests.unit.libdsec.test_forward import OP, UID, forward, record

TAKEN = WireError(code="conflict", message="this op_id was used", field="op_id")


def kept(verb: str, request: dict[str, Any]) -> Any:
    if verb == "note":
        return NoteReply(op_id=request["op_id"], seq=1)
    return ExecReply(op_id=request["op_id"], exit_code=0)


def note(step: int, question: Any, answer: Any, *, ended: bool = True) -> Entry:
    data = base64.b64encode(_asking.packed(answer)).decode()
    reply = NoteReply(op_id=OP, seq=step) if ended else None
    return record(step, "note", reply, about=_asking.about(question), data=data)


class Model:
    """Says something else each time."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def __call__(self, question: Any) -> Any:
        self.asked.append(question)
        return {"said": len(self.asked)}


async def test_a_model_is_asked_once_at_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    steps, link = forward(monkeypatch, [note(1, {"q": 1, "r": 2}, "then")], kept)
    assert await steps.ask({"r": 2, "q": 1}, model) == "then"
    assert (model.asked, link.asked, steps.replayed) == ([], [], 1)
    assert await steps.ask("more", model) == {"said": 1}
    (verb, request), = link.asked
    assert (verb, request["lane"], request["step"]) == ("note", "main", 2)
    assert request["op_id"] == _ids.named(UID, "main", "2")
    assert request["about"] == _asking.about("more")
    assert _asking.unpacked(base64.b64decode(request["data"])) == {"said": 1}
    await steps.exec("x")
    assert link.asked[-1][1]["step"] == 3


async def test_an_intent_has_the_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's service died before it could say that it is kept."""
    steps, link = forward(monkeypatch, [note(1, "q", "then", ended=False)], kept)
    assert await steps.ask("q", Model()) == "then"
    assert link.asked == []


async def test_another_question_at_a_recorded_place_is_a_divergence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model()
    ran = record(2, "exec", ExecReply(op_id=OP, exit_code=0), shell="x")
    steps, link = forward(monkeypatch, [note(1, "q", "a"), ran], kept)
    with pytest.raises(Divergence, match=r"main step 1 .* differ in question"):
        await steps.ask("other", model)
    with pytest.raises(Divergence, match="differ in verb"):
        await steps.exec("x")
    with pytest.raises(Divergence, match="main step 2 was recorded as 'x', asked for is 'ask "):
        await steps.ask("q", model)
    assert (model.asked, link.asked) == ([], [])


async def test_of_two_that_ask_at_one_place_the_first_one_kept_is_both_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries: list[Entry] = []

    def late(verb: str, request: dict[str, Any]) -> Any:
        entries.append(note(1, "q", "the other one's"))
        return NoteReply(op_id=request["op_id"], error=TAKEN)

    steps, link = forward(monkeypatch, entries, late)
    monkeypatch.setattr(steps, "_verdict", nothing)
    assert await steps.ask("q", Model()) == "the other one's"
    assert len(link.asked) == 1


async def nothing() -> None:
    return None


async def test_an_id_whose_text_is_lost_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ids: list[str] = []

    def lost_once(verb: str, request: dict[str, Any]) -> Any:
        ids.append(request["op_id"])
        error = TAKEN if request["op_id"] == _ids.named(UID, "main", "1") else None
        return NoteReply(op_id=request["op_id"], error=error)

    steps, _ = forward(monkeypatch, [], lost_once)
    monkeypatch.setattr(steps, "_verdict", nothing)
    assert await steps.ask("q", Model()) == {"said": 1}
    assert ids == [_ids.named(UID, "main", "1"), _ids.named(UID, "main", "1", "1")]


@pytest.mark.parametrize(("field", "error"), [("op_id", OutcomeUnknown), ("lease", Conflict)])
async def test_an_answer_that_cannot_be_kept_is_not_returned(
    monkeypatch: pytest.MonkeyPatch, field: str, error: type[Exception]
) -> None:
    def never(verb: str, request: dict[str, Any]) -> Any:
        refused = WireError(code="conflict", message="no", field=field)
        return NoteReply(op_id=request["op_id"], error=refused)

    steps, _ = forward(monkeypatch, [], never)
    monkeypatch.setattr(steps, "_verdict", nothing)
    with pytest.raises(error):
        await steps.ask("q", Model())


async def test_a_question_that_failed_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, link = forward(monkeypatch, [], kept)

    def fails(_question: Any) -> Any:
        raise OSError("no route")

    with pytest.raises(OSError, match="no route"):
        await steps.ask("q", fails)
    assert (steps.step, link.asked) == (0, [])
    assert await steps.ask("q", lambda q: [q, (1, 2)]) == ["q", [1, 2]]
    assert link.asked[0][1]["step"] == 1


async def test_what_is_no_json_or_too_long_names_its_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, link = forward(monkeypatch, [], kept)
    for question, answer, field in (
        (object(), 1, "question"), ("q", object(), "answer"),
        ("q", os.urandom(NOTE_BYTES).hex(), "answer"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as caught:
            await steps.ask(question, lambda _q, answer=answer: answer)
        assert caught.value.field == field
    assert (steps.step, link.asked) == (0, [])
    long = "token " * 2_000_000  # deflates well
    assert await steps.ask("q", lambda _q: long) == long


@pytest.mark.parametrize("data", [b"", b"none", _asking.packed("abc")[:-1]])
def test_a_note_that_was_spoiled_is_said_to_be(data: bytes) -> None:
    with pytest.raises(InternalError):
        _asking.unpacked(data)


async def test_a_note_is_read_and_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, link = forward(monkeypatch, [], kept)
    found = record_of(note(1, "q", {"a": 1}))
    assert (found.answer, found.command) == ({"a": 1}, f"ask {_asking.about('q')[:12]}")
    assert json.loads(json.dumps(found.to_json()))["answer"] == {"a": 1}
    assert (await replay([found], steps)).same
    assert link.asked == []
