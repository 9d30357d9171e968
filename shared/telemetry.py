"""Traces across the bus: one trace from the client's call to the driver.

Owns: the tracer, context in message headers, where spans go. A batch is *one*
span with links to its requests' contexts, so that tracing costs per batch, not
per message. Without ``DSEC_TRACE_FILE`` and ``OTEL_EXPORTER_OTLP_ENDPOINT``
nothing is recorded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, TraceFlags

from schemas.base import HEADER_TRACE

ROOT_SHARE = 0.01
"""Share of traces kept that no client began."""
MAX_LINKS = 128

_tracer = trace.get_tracer("dsec")
_provider: TracerProvider | None = None
_OFF: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def setup(service: str, trace_file: str | None = None) -> None:
    """Starts recording where an exporter is configured."""
    global _provider, _tracer
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not trace_file and not endpoint:
        return
    _provider = TracerProvider(
        resource=Resource.create({"service.name": f"dsec-{service}"}),
        sampler=ParentBased(TraceIdRatioBased(ROOT_SHARE)),
    )
    if trace_file:
        out = open(trace_file, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - for the process's life
        exporter = ConsoleSpanExporter(out=out, formatter=lambda s: s.to_json(indent=None) + "\n")
        _provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    if endpoint:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _tracer = _provider.get_tracer("dsec")


def shutdown() -> None:
    """Writes out what is still held."""
    if _provider is not None:
        _provider.shutdown()


def parse(traceparent: str | None) -> SpanContext | None:
    """The context in a W3C ``traceparent``, or ``None``."""
    parts = (traceparent or "").split("-")
    if len(parts) != 4 or len(parts[1]) != 32 or len(parts[2]) != 16:
        return None
    try:
        context = SpanContext(
            int(parts[1], 16), int(parts[2], 16), True, TraceFlags(int(parts[3], 16))
        )
    except ValueError:
        return None
    return context if context.is_valid else None


def traceparent(span: Span | None = None) -> str | None:
    """The W3C form of ``span`` (default: the current one), ``None`` without one."""
    context = (span or trace.get_current_span()).get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def headers() -> dict[str, str]:
    """Headers that carry the current context."""
    value = traceparent()
    return {HEADER_TRACE: value} if value else {}


def span(
    name: str,
    *,
    parents: Sequence[str | None] = (),
    attributes: Mapping[str, str | int | float | bool] | None = None,
) -> contextlib.AbstractContextManager[Span | None]:
    """One span for a batch: child of the first sampled parent, linked to the rest.
    ``None`` when nothing is recorded: the hot path then pays nothing."""
    return _OFF if _provider is None else _span(name, parents, attributes)


@contextlib.contextmanager
def _span(
    name: str,
    parents: Sequence[str | None],
    attributes: Mapping[str, str | int | float | bool] | None,
) -> Iterator[Span | None]:
    contexts = [c for c in map(parse, dict.fromkeys(parents)) if c is not None]
    sampled = [c for c in contexts if c.trace_flags.sampled]
    parent = trace.set_span_in_context(NonRecordingSpan(sampled[0])) if sampled else None
    links = [Link(c) for c in sampled[1:MAX_LINKS]]
    with _tracer.start_as_current_span(
        name, context=parent, links=links, attributes=dict(attributes or {})
    ) as current:
        yield current
