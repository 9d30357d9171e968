"""Typed errors to and from their wire form: the bus's third of the translation."""

from __future__ import annotations

from schemas.base import BadMessage, WireError
from shared.errors import DsecError, InvalidRequest, Unsupported, from_code


def to_wire(error: DsecError) -> WireError:
    """The wire form of an error."""
    return WireError(
        code=error.code,
        message=error.message,
        field=error.field,
        retryable=error.retryable,
        cause=error.cause,
        is_infra=error.is_infra,
        retry_after_s=error.retry_after_s,
        details=error.details,
    )


def from_wire(error: WireError) -> DsecError:
    """The exception of a wire error."""
    return from_code(
        error.code,
        error.message,
        field=error.field,
        cause=error.cause,
        is_infra=error.is_infra,
        retry_after_s=error.retry_after_s,
        details=error.details,
    )


def bad_message(exc: BadMessage) -> DsecError:
    """The typed error of a body that could not be read."""
    if exc.version is not None:
        return Unsupported(str(exc), field="v")
    return InvalidRequest(str(exc), field=exc.field)
