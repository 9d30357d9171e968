"""Trace contexts that come over the bus are untrusted text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import telemetry

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_context_is_read() -> None:
    context = telemetry.parse(GOOD)
    assert context is not None
    assert f"{context.trace_id:032x}" == GOOD.split("-")[1]
    assert context.trace_flags.sampled


@pytest.mark.parametrize(
    "text", [None, "", "garbage", GOOD[:-3], "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
             GOOD.replace("a", "z"), GOOD + "-more"],
)  # fmt: skip
def test_anything_else_is_no_context(text: str | None) -> None:
    assert telemetry.parse(text) is None


@given(st.text(max_size=80))
def test_no_text_raises(text: str) -> None:
    telemetry.parse(text)


def test_without_an_exporter_nothing_is_recorded() -> None:
    with telemetry.span("x", parents=[GOOD]) as span:
        assert span is None
    assert telemetry.headers() == {}
