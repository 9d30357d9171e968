"""What would cost others than its sender is refused where it is read."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.base import BadMessage, decode, encode
from schemas.exec import ExecRequest, FileRequest
from schemas.hotset import LayerAccesses

OP = "0" * 26


@pytest.mark.parametrize("message", [ExecRequest, FileRequest])
@pytest.mark.parametrize(
    "fields",
    [{"step": 2**53 + 1}, {"step": 2**63}, {"step": 0}]
    + [{"lane": lane} for lane in ("a\0b", "\0", "a\n", "\x1f", "")],
)
def test_places_in_a_script_fit_a_database(message: Any, fields: dict[str, Any]) -> None:
    given = {"v": 1, "op_id": OP, "path": "/x", "shell": "x"}
    decode(encode(given | {"lane": "main/täsk 1", "step": 2**53}), message)
    with pytest.raises(BadMessage):
        decode(encode(given | fields), message)


@pytest.mark.parametrize(
    "fields", [{"units": [2**53 + 1]}, {"units": [-1]}, {"unit_bytes": 2**30 + 1}]
)
def test_traces_fit_a_database(fields: dict[str, Any]) -> None:
    given = {"digest": "d", "unit_bytes": 4096, "units": [2**53]}
    decode(encode({"v": 1, "node": "n1", "layers": [given]}), LayerAccesses)
    with pytest.raises(BadMessage):
        decode(encode({"v": 1, "node": "n1", "layers": [given | fields]}), LayerAccesses)


@pytest.mark.parametrize(
    ("type_", "body", "field"),
    [
        (ExecRequest, encode({"op_id": OP, "env": {"PORT": 1}}), "env.PORT"),
        (ExecRequest | None, encode({"op_id": OP, "env": {"PORT": 1}}), "env"),
        (dict[str, ExecRequest], encode({"q": {"op_id": OP, "env": 1}}), "env"),
    ],
)
def test_what_does_not_fit_is_named_also_within_other_types(
    type_: Any, body: bytes, field: str
) -> None:
    with pytest.raises(BadMessage) as caught:
        decode(body, type_)
    assert caught.value.field == field
