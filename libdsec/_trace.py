"""Where a trace begins. Owns: the ``traceparent`` header of requests.

A caller that has OpenTelemetry's API loaded and a span open continues that trace.
Otherwise one request in a hundred (``DSEC_TRACE_SHARE``, 0…1) begins a trace of its
own, which the services record where they were told to. No dependency, no span here.
"""

from __future__ import annotations

import os
import random
import sys

from libdsec._wire import HEADER_TRACE

DEFAULT_SHARE = 0.01


def share() -> float:
    """The share of requests that begin a trace; nonsense counts as the default."""
    try:
        return float(os.environ.get("DSEC_TRACE_SHARE", DEFAULT_SHARE))
    except ValueError:
        return DEFAULT_SHARE


_share = share()


def headers(more: dict[str, str] | None = None) -> dict[str, str] | None:
    """``more`` with the trace context of this request, where it has one."""
    context = _current() or _begun()
    return {**(more or {}), HEADER_TRACE: context} if context else more


def _current() -> str | None:
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _begun() -> str | None:
    if random.random() >= _share:
        return None
    return f"00-{random.getrandbits(128) or 1:032x}-{random.getrandbits(64) or 1:016x}-01"
