"""Results and errors of the SDK in Inspect's words. Pure.

Owns: what is the command's own failure (a result that a model may see), what is the
caller's (builtin exceptions), and what is infrastructure (``SandboxUnavailableError``,
which no model is shown as its command's output).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from inspect_ai.util import ExecResult, OutputLimitExceededError, SandboxUnavailableError

from libdsec.errors import DeadlineExceeded, DSecError, FileError, InvalidRequest, PolicyDenied
from libdsec.results import ExecResult as Ended

REFUSED_CODE = 125
"""Exit code of a command that could not be begun as asked: no such user or directory."""
NOT_EXECUTABLE_CODE = 126
PERMISSION_TEXT = b"permission denied"


def exec_result(
    ended: Ended, command: str, *, timeout: int | None, limit_text: str
) -> ExecResult[str]:
    """Inspect's result. Raises ``TimeoutError`` (with the partial output as
    ``truncated_output``), ``OutputLimitExceededError`` and ``PermissionError``."""
    if ended.timed_out:
        raise _timeout(ended, timeout)
    if any(ended.truncated):
        stream = ended.text if ended.truncated[0] else ended.stderr_text
        raise OutputLimitExceededError(limit_text, stream)
    if ended.exit_code == NOT_EXECUTABLE_CODE and PERMISSION_TEXT in ended.stderr.lower():
        raise PermissionError(f"{command}: {ended.stderr_text.strip()}")
    if ended.exit_code is None:
        raise SandboxUnavailableError(f"{command}: its end was not seen")
    return ExecResult(
        success=ended.exit_code == 0,
        returncode=ended.exit_code,
        stdout=ended.text,
        stderr=ended.stderr_text,
    )


def _timeout(ended: Ended, timeout: int | None) -> TimeoutError:
    error = TimeoutError(f"Command timed out after {timeout} seconds")
    if partial := ended.text + ended.stderr_text:
        error.truncated_output = partial  # type: ignore[attr-defined]
    return error


def refused(error: DSecError) -> ExecResult[str]:
    """The result of a command that cannot begin as asked: it names the user, the
    directory, the argument."""
    return ExecResult(
        success=False, returncode=REFUSED_CODE, stdout="", stderr=f"{error.message}\n"
    )


def is_refusal(error: DSecError) -> bool:
    """Whether the request itself was at fault."""
    return isinstance(error, InvalidRequest | PolicyDenied) and not error.is_infra


@contextmanager
def file_errors(path: str) -> Iterator[None]:
    """Errors of file operations: the builtin ones with the path in their text,
    ``TimeoutError``, or ``SandboxUnavailableError``."""
    try:
        yield
    except DeadlineExceeded as exc:
        raise TimeoutError(f"{path}: {exc}") from exc
    except FileError as exc:
        if isinstance(exc, OSError):
            raise
        raise OSError(f"{exc}") from exc
    except DSecError as exc:
        if is_refusal(exc):
            raise OSError(f"{path}: {exc}") from exc
        raise unavailable(exc) from exc


def unavailable(error: DSecError) -> SandboxUnavailableError:
    """The sandbox cannot be used."""
    cause = f" ({error.cause})" if error.cause else ""
    return SandboxUnavailableError(f"the dsec sandbox is not available: {error}{cause}")
