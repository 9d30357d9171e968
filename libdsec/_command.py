"""The request of a command, made from what users write. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from libdsec import _ids
from libdsec._wire import ExecRequest, misfit
from libdsec.args import Seconds, seconds
from libdsec.errors import InvalidRequest


def command_request(
    command: Sequence[str | Sequence[str]],
    *,
    timeout: Seconds | None,
    idle_timeout: Seconds | None = None,
    env: Mapping[str, str] | None = None,
    op_id: str | None = None,
    **facts: Any,
) -> ExecRequest:
    """The request of a command. Raises ``InvalidRequest`` naming the argument."""
    given: dict[str, Any] = {k: v for k, v in facts.items() if v is not None}
    given["op_id"] = op_id or _ids.new()
    given["env"] = dict(env or {})
    for name, value in (("timeout", timeout), ("idle_timeout", idle_timeout)):
        if (limit := seconds(value, name)) is not None:
            given[f"{name}_s"] = limit
    given |= _command(command)
    return _request(given)


def _request(given: dict[str, Any]) -> ExecRequest:
    try:
        return msgspec.convert(given, ExecRequest)
    except msgspec.ValidationError as exc:
        text, name = misfit(exc, ExecRequest, given)
        raise InvalidRequest(text, field=name and name.removesuffix("_s")) from exc


def attach_request(op_id: str, offset: int) -> ExecRequest:
    """The request that joins an operation. Raises ``InvalidRequest``."""
    given = {"op_id": op_id, "attach": True, "offset": offset, "stream": True}
    return _request(given)


def _command(command: Sequence[str | Sequence[str]]) -> dict[str, Any]:
    """A shell string or an argv. Raises ``InvalidRequest`` for neither."""
    if len(command) == 1:
        only = command[0]
        given: dict[str, Any] = {"shell": only} if isinstance(only, str) else {"argv": list(only)}
    else:
        given = {"argv": list(command)}
    words = [given["shell"]] if "shell" in given else given["argv"]
    if not words or not all(isinstance(w, str) for w in words):
        raise InvalidRequest("a command is a string, or strings for an argv", field="command")
    if any("\x00" in w for w in words):
        raise InvalidRequest("a command cannot hold NUL", field="command")
    return given


def shown(request: ExecRequest) -> str:
    """The command in words, for errors and ``repr``."""
    return request.shell if request.shell is not None else " ".join(request.argv or [])
