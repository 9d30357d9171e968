"""What managers share: requests and reads of one entity, arguments to messages.

Owns: calls of one shape (``create get list delete``). Does not own: any entity.
"""

from __future__ import annotations

from typing import Any

import msgspec

from libdsec._core import Core
from libdsec._wire import IamReply, misfit
from libdsec.errors import InternalError, InvalidRequest


class Manager:
    """Requests and reads of one entity."""

    _entity = ""

    def __init__(self, core: Core) -> None:
        self._core = core

    def __repr__(self) -> str:
        return f"{type(self).__name__}(project={self._core.config.project!r})"

    def _project(self, project: str | None) -> str:
        return project or self._core.config.project

    async def _change(
        self, verb: str, message: Any, *, project: str | None = None, **options: Any
    ) -> Any:
        subject = self._core.calls.req_subject(self._project(project), self._entity, verb)
        type_ = options.pop("type_", IamReply)
        return await self._core.calls.change(subject, message, type_, **options)

    async def _read(
        self, verb: str, message: Any, type_: Any = IamReply, *, project: str | None = None
    ) -> Any:
        subject = self._core.calls.get_subject(self._project(project), self._entity, verb)
        return await self._core.calls.read(subject, message, type_)

    async def _put(
        self, verb: str, message: Any, type_: Any, *, project: str | None = None
    ) -> Any:
        """A change that no stream keeps; repeated until it is answered."""
        subject = self._core.calls.put_subject(self._project(project), self._entity, verb)
        return await self._core.calls.read(subject, message, type_)


def make(type_: Any, **facts: Any) -> Any:
    """A message from arguments. Raises ``InvalidRequest`` naming the argument."""
    given = {k: v for k, v in facts.items() if v is not None}
    try:
        return msgspec.convert(given, type_)
    except msgspec.ValidationError as exc:
        text, name = misfit(exc, type_, given)
        raise InvalidRequest(text, field=name) from exc


def present(value: Any, what: str) -> Any:
    if value is None:
        raise InternalError(f"the answer has no {what}")
    return value
