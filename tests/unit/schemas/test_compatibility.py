"""A version only ever gains optional fields, and what was sent once is read for ever."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import libdsec._wire
from schemas import compat, export
from schemas.base import decode, encode
from schemas.registry import MESSAGES, full_name

GOLDEN = export.ROOT / "schemas" / "golden"


def test_nothing_breaks_the_locked_version() -> None:
    assert export.breaking_changes() == []


def test_every_message_has_a_golden_example() -> None:
    assert {p.stem for p in GOLDEN.glob("*.json")} == {full_name(n) for n in MESSAGES}


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_golden_examples_decode_and_lose_nothing(name: str) -> None:
    data = (GOLDEN / f"{full_name(name)}.json").read_bytes()
    message = decode(data, MESSAGES[name])
    assert _within(json.loads(data), _whole(message)) == []
    assert decode(encode(message), MESSAGES[name]) == message
    sdk = getattr(libdsec._wire, name, None)
    if sdk is not None:
        theirs = libdsec._wire.decode(data, sdk)
        assert libdsec._wire.encode(theirs) == encode(message)


def _whole(value: Any) -> Any:
    """A message as plain data, its defaults included."""
    if isinstance(value, msgspec.Struct):
        fields = {f: _whole(getattr(value, f)) for f in value.__struct_fields__}
        return list(fields.values()) if value.__struct_config__.array_like else fields
    if isinstance(value, msgspec.Raw):
        return json.loads(bytes(value))
    if isinstance(value, dict):
        return {k: _whole(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(v) for v in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _within(given: Any, kept: Any, where: str = "$") -> list[str]:
    """Parts of ``given`` that are not in ``kept``."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            text
            for key, value in given.items()
            for text in (
                _within(value, kept[key], f"{where}.{key}") if key in kept else [f"{where}.{key}"]
            )
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = zip(given, kept, strict=True)
        return [t for i, (a, b) in enumerate(pairs) for t in _within(a, b, f"{where}[{i}]")]
    return [] if given == kept else [f"{where}: {given!r} became {kept!r}"]


def test_a_field_more_is_ignored_by_who_does_not_know_it() -> None:
    data = json.loads((GOLDEN / "OpReply.v1.json").read_text())
    data["novelty"] = {"a": 1}
    assert decode(json.dumps(data).encode(), MESSAGES["OpReply"])


SCHEMA: dict[str, Any] = {
    "messages": ["M"],
    "$defs": {
        "M": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 1, "maximum": 9},
                "b": {"type": "string", "default": ""},
                "c": {"enum": ["x", "y"]},
                "d": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["a"],
        }
    },
}


def changed(**properties: Any) -> dict[str, Any]:
    new = copy.deepcopy(SCHEMA)
    fields = new["$defs"]["M"]["properties"]
    for name, value in properties.items():
        if value is None:
            del fields[name]
        else:
            fields[name] = value
    return new


@pytest.mark.parametrize(
    "new",
    [
        changed(e={"type": "string", "default": ""}),
        changed(a={"type": "integer", "minimum": 0, "maximum": 10}),
        changed(a={"type": "integer"}),
        changed(c={"enum": ["x", "y", "z"]}),
        changed(b={"type": "string", "default": "other", "description": "words"}),
    ],
)
def test_what_a_version_may_gain(new: dict[str, Any]) -> None:
    assert compat.breaking(SCHEMA, new) == []


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (changed(b=None), "M.b is gone"),
        (changed(b={"type": "integer"}), "M.b.type: 'string' became 'integer'"),
        (changed(a={"type": "integer", "minimum": 2, "maximum": 9}), "minimum 1 became 2"),
        (changed(b={"type": "string", "maxLength": 5}), "maxLength None became 5"),
        (changed(b={"type": "string", "pattern": "x"}), "pattern"),
        (changed(c={"enum": ["x"]}), "'y' is gone"),
        (changed(d={"anyOf": [{"type": "string"}]}), "2 alternatives became 1"),
        ({"messages": [], "$defs": {}}, "message M is gone"),
    ],
)
def test_what_it_may_not(new: dict[str, Any], said: str) -> None:
    assert any(said in text for text in compat.breaking(SCHEMA, new))


def test_a_field_that_becomes_required_breaks() -> None:
    new = changed()
    new["$defs"]["M"]["required"] = ["a", "b"]
    assert compat.breaking(SCHEMA, new) == ["M.b became required"]


def test_a_breaking_change_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "v1.lock.json"
    monkeypatch.setattr(export, "LOCK", lock)
    monkeypatch.setattr(export, "GENERATED", tmp_path)
    monkeypatch.setattr(export, "ROOT", tmp_path)
    monkeypatch.setattr(export, "WIRE", tmp_path / "_wire.py")
    old = export.snapshot()
    old["$defs"]["OpReply"]["properties"]["gone"] = {"type": "string"}
    lock.write_text(text := json.dumps(old))
    assert export.main([]) == 1
    assert "OpReply.gone is gone" in capsys.readouterr().err
    assert lock.read_text() == text, "the lock stays"
