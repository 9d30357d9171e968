"""What an edge sends, as a client tells it apart."""

from __future__ import annotations

from schemas.base import HEADER_FRAME


def kind_of(headers: dict[str, str] | None) -> str:
    """Of one message: without headers it is a final reply."""
    return headers[HEADER_FRAME] if headers else "x"
