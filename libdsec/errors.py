"""The SDK's exceptions: one root, children by what the caller can do.

Owns: the classes and the translation from the wire. Does not own: codes (they are
the system's closed set). ``is_infra`` is true exactly where a trainer should mask
the sample; ``retryable`` where the same call may succeed later.
"""

from __future__ import annotations

import builtins
import errno as errno_
from typing import TYPE_CHECKING, Any, ClassVar

from libdsec._wire import WireError

if TYPE_CHECKING:
    from libdsec.results import ExecResult

INFRA_CODES = frozenset(
    {"capacity_exhausted", "unavailable", "deadline_exceeded", "internal", "sandbox_died"}
)
RETRYABLE_CODES = frozenset({"capacity_exhausted", "unavailable", "deadline_exceeded"})


class DSecError(Exception):
    """Root of all errors of the SDK.

    ``code`` is stable; ``field`` names the argument or limit at fault; ``cause`` is
    a sandbox's cause of death where one died; ``retry_after_s`` is a hint.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str | None = None,
        retryable: bool | None = None,
        is_infra: bool | None = None,
        cause: str | None = None,
        retry_after_s: float | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retryable = code in RETRYABLE_CODES if retryable is None else retryable
        self.is_infra = code in INFRA_CODES if is_infra is None else is_infra
        self.cause = cause
        self.retry_after_s = retry_after_s
        self.details = details or {}

    def __str__(self) -> str:
        return f"{self.message} (field {self.field})" if self.field else self.message

    def __repr__(self) -> str:
        shown = (("field", self.field), ("cause", self.cause))
        rest = "".join(f", {k}={v!r}" for k, v in shown if v)
        return f"{type(self).__name__}({self.code}: {self.message!r}{rest})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.__dict__, self.args)


def _restore(type_: type[DSecError], state: dict[str, Any], args: tuple[Any, ...]) -> DSecError:
    """Unpickles: the class survives a process boundary, with all it knew."""
    error = type_.__new__(type_)
    error.__dict__.update(state)
    error.args = args
    if isinstance(error, FileError | PortError):
        error._mark()
    return error


class _Coded(DSecError):
    """A child whose class fixes the code."""

    default_code: ClassVar[str] = "internal"

    def __init__(self, message: str, **kw: Any) -> None:
        super().__init__(kw.pop("code", self.default_code), message, **kw)


class InvalidRequest(_Coded):
    """The request makes no sense; ``field`` says where."""

    default_code = "invalid_request"


class Unauthenticated(_Coded):
    """The key or token is not accepted."""

    default_code = "unauthenticated"


class Forbidden(_Coded):
    """A grant is missing."""

    default_code = "forbidden"


class NotFound(_Coded):
    """There is no such thing, or it is not yours to see."""

    default_code = "not_found"


class Conflict(_Coded):
    """It exists already with other content, or its state forbids the call."""

    default_code = "conflict"


class QuotaExceeded(_Coded):
    """A quota is used up; ``field`` names the limit."""

    default_code = "quota_exceeded"


class Unsupported(_Coded):
    """No node can do what was asked for."""

    default_code = "unsupported"


class PolicyDenied(_Coded):
    """A policy forbids it."""

    default_code = "policy_denied"


class CapacityExhausted(_Coded):
    """No room now; retry later."""

    default_code = "capacity_exhausted"


class SandboxDied(_Coded):
    """The sandbox ended; ``cause`` says by what, ``is_infra`` whether that was
    infrastructure's fault."""

    default_code = "sandbox_died"


class Unavailable(_Coded):
    """The service or the node cannot be reached."""

    default_code = "unavailable"


class InputLost(Unavailable):
    """The node lost input that this client no longer has: it must come from its start."""


class DeadlineExceeded(_Coded):
    """The call's own time ran out (never a command's: see :class:`ExecTimeout`)."""

    default_code = "deadline_exceeded"


class InternalError(_Coded):
    """A fault of dsec."""

    default_code = "internal"


class OutcomeUnknown(InternalError):
    """It was begun and nobody knows how it ended: it never runs again by itself."""


class Divergence(Conflict):
    """Another operation was recorded at this place of a script: ``lane``, ``step``, and both
    operations in words, ``recorded`` and ``asked``."""

    def __init__(
        self, message: str, *, lane: str = "", step: int = 0, recorded: str = "", asked: str = "",
        **kw: Any,
    ) -> None:  # fmt: skip
        super().__init__(message, **kw)
        self.lane, self.step, self.recorded, self.asked = lane, step, recorded, asked


class StdinClosed(_Coded):
    """Input was written after it was closed or after the command ended."""

    default_code = "stdin_closed"


class _WithResult(_Coded):
    def __init__(self, message: str, result: ExecResult | None = None, **kw: Any) -> None:
        super().__init__(message, **kw)
        self.result = result


class ExecFailed(_WithResult):
    """``check=True`` and the exit code was not 0; ``result`` carries everything."""

    default_code = "exec_failed"


class ExecTimeout(_WithResult):
    """``check=True`` and the command ran into its ``timeout``; ``result`` carries
    the partial output."""

    default_code = "exec_timeout"


class _WithOutput(_Coded):
    def __init__(self, message: str, before: bytes = b"", **kw: Any) -> None:
        super().__init__(message, **kw)
        self.before = before


class ExpectTimeout(_WithOutput, builtins.TimeoutError):
    """What was expected did not come in time; ``before`` is what was said so far."""

    default_code = "expect_timeout"


class ExpectEnded(_WithOutput, builtins.EOFError):
    """The output ended before what was expected; ``before`` is the rest of it."""

    default_code = "expect_ended"


class FileError(_Coded):
    """A file operation failed; ``path`` is the file in the sandbox."""

    path: str = ""
    default_errno: ClassVar[int] = errno_.EIO

    def __init__(self, message: str, *, path: str = "", **kw: Any) -> None:
        super().__init__(message, **kw)
        self.path = path
        self._mark()

    def _mark(self) -> None:
        """What code that knows only the builtin looks at. These live in OSError's
        own slots, so a copy has to set them again."""
        if isinstance(self, OSError):
            error: Any = self
            error.errno = self.default_errno
            error.strerror = self.message
            error.filename = self.path

    def __str__(self) -> str:
        return self.message


class FileNotFound(FileError, NotFound, builtins.FileNotFoundError):
    """No such file."""

    default_code = "not_found"
    default_errno = errno_.ENOENT


class FilePermissionDenied(FileError, Forbidden, builtins.PermissionError):
    """The user may not do that to this file."""

    default_code = "forbidden"
    default_errno = errno_.EACCES


class FileIsADirectory(FileError, InvalidRequest, builtins.IsADirectoryError):
    """A file was expected, this is a directory."""

    default_code = "invalid_request"
    default_errno = errno_.EISDIR


class FileNotADirectory(FileError, InvalidRequest, builtins.NotADirectoryError):
    """A directory was expected."""

    default_code = "invalid_request"
    default_errno = errno_.ENOTDIR


class NotARegularFile(FileError, InvalidRequest, builtins.OSError):
    """A FIFO, socket or device: only regular files are read and written."""

    default_code = "invalid_request"
    default_errno = errno_.EINVAL


class BadPath(FileError, InvalidRequest, builtins.OSError):
    """The path is too long, leads round in circles, or is no path."""

    default_code = "invalid_request"
    default_errno = errno_.EINVAL


class FileAlreadyExists(FileError, Conflict, builtins.FileExistsError):
    """It exists already."""

    default_code = "conflict"
    default_errno = errno_.EEXIST


class DirectoryNotEmpty(FileError, Conflict, builtins.OSError):
    """The directory has entries; pass ``recursive=True``."""

    default_code = "conflict"
    default_errno = errno_.ENOTEMPTY


class FileChanged(FileError, Conflict, builtins.OSError):
    """It became another one while it was copied."""

    default_code = "conflict"
    default_errno = errno_.ESTALE


class NoSpaceLeft(FileError, QuotaExceeded, builtins.OSError):
    """The sandbox's disk limit is reached."""

    default_code = "quota_exceeded"
    default_errno = errno_.ENOSPC


class PortError(_Coded):
    """A connection to a port of a sandbox failed; ``port`` is the port."""

    port: int = 0
    default_errno: ClassVar[int] = errno_.EIO

    def __init__(self, message: str, *, port: int = 0, **kw: Any) -> None:
        super().__init__(message, **kw)
        self.port = port
        self._mark()

    def _mark(self) -> None:
        error: Any = self
        error.errno = self.default_errno
        error.strerror = self.message

    def __str__(self) -> str:
        return self.message


class PortRefused(PortError, NotFound, builtins.ConnectionRefusedError):
    """Nothing in the sandbox listens on the port."""

    default_code = "not_found"
    default_errno = errno_.ECONNREFUSED


class PortReset(PortError, Conflict, builtins.ConnectionResetError):
    """The connection broke off: what listens there reset it, or the way there did.
    Bytes that were on their way may be lost; none is ever sent twice."""

    default_code = "conflict"
    default_errno = errno_.ECONNRESET


BY_CODE: dict[str, type[_Coded]] = {
    c.default_code: c
    for c in (
        InvalidRequest, Unauthenticated, Forbidden, NotFound, Conflict, QuotaExceeded,
        Unsupported, PolicyDenied, CapacityExhausted, SandboxDied, Unavailable,
        DeadlineExceeded, InternalError,
    )
}  # fmt: skip

_FACTS = ("code", "field", "retryable", "is_infra", "cause", "retry_after_s", "details")


def from_wire(error: WireError) -> DSecError:
    """The exception of an error that came over the bus."""
    unknown = error.details.get("outcome") == "unknown"
    kind = OutcomeUnknown if unknown else BY_CODE.get(error.code, InternalError)
    return kind(error.message, **facts_of(error))


def port_error(error: WireError | DSecError, port: int, *, connected: bool = False) -> DSecError:
    """The exception of a connection that failed. One that was there and broke off is
    ``PortReset``, unless the sandbox died under it."""
    found = error if isinstance(error, DSecError) else from_wire(error)
    facts = {name: getattr(found, name) for name in _FACTS}
    if found.details.get("errno") == "ECONNREFUSED":
        return PortRefused(found.message, port=port, **facts)
    if found.details.get("errno") == "ECONNRESET" or (
        connected and not isinstance(found, SandboxDied)
    ):
        text = found.message if str(port) in found.message else f"port {port}: {found.message}"
        return PortReset(text, port=port, **facts)
    return found


def named(error: WireError, path: str) -> str:
    """The message, with the path in it."""
    return error.message if path in error.message else f"{path}: {error.message}"


def facts_of(error: WireError) -> dict[str, Any]:
    return {name: getattr(error, name) for name in _FACTS} | {"details": dict(error.details)}
