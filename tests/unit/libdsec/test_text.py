"""Text is a lossy view that decodes over chunk boundaries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libdsec import ExecResult
from libdsec.results import TextView


@given(st.text(), st.lists(st.integers(0, 40)))
def test_cuts_change_nothing(text: str, cuts: list[int]) -> None:
    """(E14)"""
    data, view, got = text.encode("utf-8", "surrogatepass"), TextView(), ""
    for cut in cuts:
        got += view.feed(data[:cut])
        data = data[cut:]
    got += view.feed(data, final=True)
    assert got == text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


@given(st.binary())
def test_any_bytes_have_a_text(data: bytes) -> None:
    """(E13)"""
    result = ExecResult(exit_code=0, stdout=data)
    assert result.stdout == data
    assert result.text == data.decode("utf-8", "replace")
