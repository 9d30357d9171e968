"""What an operation's body may say, by its verb."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.base import encode
from schemas.sandbox import SandboxOpRequest, Tightening
from services.auth.asks import Ask
from services.auth.entries import Entry, prepare

UID = "0" * 26


def read(verb: str, **facts: Any) -> Entry:
    body = encode(SandboxOpRequest(request_id=UID, uids=[UID], **facts))
    return prepare(Ask("i", 0.0, "p", "sandbox", verb, "me", body), max_bytes=1 << 20)


def test_a_tightening_goes_with_its_verb() -> None:
    wanted = Tightening(network=["*"], deny=["ptrace"])
    entry = read("tighten", tighten=wanted)
    assert entry.error is None and entry.command.tighten == wanted and entry.target == UID


@pytest.mark.parametrize(
    ("verb", "facts", "field"),
    [
        ("tighten", {}, "tighten"),
        ("stop", {"tighten": Tightening(network=["*"])}, "tighten"),
        ("tighten", {"tighten": Tightening(network=["not a host"])}, "tighten.network"),
        ("tighten", {"tighten": Tightening(deny=["exec:/bin/sh"])}, "tighten.deny"),
    ],
)
def test_any_other_is_refused_by_field(verb: str, facts: dict[str, Any], field: str) -> None:
    entry = read(verb, **facts)
    assert entry.error is not None and entry.error.field == field
