"""The closed set of errors of dsec.

Owns: error codes, which of them are worth a retry, and the wire form. Does not
own: translation to exceptions of other libraries (the bus, the edge's exec door
and libdsec do that, nowhere else).
"""

from __future__ import annotations

from typing import Any, ClassVar


class DsecError(Exception):
    """Root of all typed errors.

    ``field`` names the offending request field or limit (``None`` where there is
    none); ``cause`` is a sandbox cause (see :mod:`shared.lifecycle`) when the
    error is about one; ``retry_after_s`` is a hint in seconds.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        cause: str | None = None,
        is_infra: bool | None = None,
        retry_after_s: float | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.cause = cause
        self.is_infra = self._infra_default() if is_infra is None else is_infra
        self.retry_after_s = retry_after_s
        self.details = details or {}

    def _infra_default(self) -> bool:
        return self.code in INFRA_CODES

    def __repr__(self) -> str:
        where = f", field={self.field!r}" if self.field else ""
        return f"{type(self).__name__}({self.code}: {self.message!r}{where})"


class InvalidRequest(DsecError):
    code = "invalid_request"


class Unauthenticated(DsecError):
    code = "unauthenticated"


class Forbidden(DsecError):
    code = "forbidden"


class NotFound(DsecError):
    code = "not_found"


class Conflict(DsecError):
    code = "conflict"


class QuotaExceeded(DsecError):
    code = "quota_exceeded"


class Unsupported(DsecError):
    code = "unsupported"


class PolicyDenied(DsecError):
    code = "policy_denied"


class CapacityExhausted(DsecError):
    code = "capacity_exhausted"
    retryable = True


class SandboxDied(DsecError):
    code = "sandbox_died"


class Unavailable(DsecError):
    code = "unavailable"
    retryable = True


class DeadlineExceeded(DsecError):
    code = "deadline_exceeded"
    retryable = True


class Internal(DsecError):
    code = "internal"


INFRA_CODES = frozenset(
    {"capacity_exhausted", "unavailable", "deadline_exceeded", "internal", "sandbox_died"}
)

BY_CODE: dict[str, type[DsecError]] = {
    c.code: c
    for c in (
        InvalidRequest, Unauthenticated, Forbidden, NotFound, Conflict, QuotaExceeded,
        Unsupported, PolicyDenied, CapacityExhausted, SandboxDied, Unavailable,
        DeadlineExceeded, Internal,
    )
}  # fmt: skip


def from_code(code: str, message: str, **kw: Any) -> DsecError:
    """The error for a wire ``code``; an unknown one becomes :class:`Internal`."""
    return BY_CODE.get(code, Internal)(message, **kw)
