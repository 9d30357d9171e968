"""Errors and messages to and from the wire."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.base import BadMessage, Versioned, WireError, decode, encode
from shared import errors
from shared.wire import bad_message, from_wire, to_wire


class Inner(Versioned, frozen=True):
    size: int


class Outer(Versioned, frozen=True):
    name: str
    inner: list[Inner] = []


@given(
    st.sampled_from(sorted(errors.BY_CODE)), st.text(max_size=30), st.none() | st.text(max_size=8),
    st.booleans(), st.none() | st.floats(0, 1e6),
)  # fmt: skip
def test_an_error_survives_the_wire(code, message, field, infra, retry) -> None:
    made = errors.from_code(
        code, message, field=field, is_infra=infra, retry_after_s=retry, details={"k": [1]}
    )
    back = from_wire(decode(encode(to_wire(made)), WireError))
    assert type(back) is type(made)
    assert vars(back) == vars(made)
    assert back.retryable == made.retryable


def test_an_unknown_code_is_internal() -> None:
    assert isinstance(from_wire(WireError(code="new_code", message="m")), errors.Internal)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{}", "name"),
        (b'{"name": 1}', "name"),
        (b'{"name": "a", "inner": [{"size": "x"}]}', "inner[0].size"),
        (b'{"name": "a", "inner": [{}]}', "inner[0].size"),
        (b"[]", None),
        (b"nonsense", None),
        (b"", None),
    ],
)
def test_a_bad_body_names_the_field(body: bytes, field: str | None) -> None:
    with pytest.raises(BadMessage) as caught:
        decode(body, Outer)
    assert caught.value.field == field
    assert isinstance(bad_message(caught.value), errors.InvalidRequest)


@pytest.mark.parametrize("body", [b'{"v": 2, "name": "a"}', b'{"v": 2, "shape": "other"}'])
def test_a_future_version_is_unsupported_whatever_its_fields(body: bytes) -> None:
    with pytest.raises(BadMessage) as caught:
        decode(body, Outer)
    assert caught.value.version == 2
    assert isinstance(bad_message(caught.value), errors.Unsupported)


def test_unknown_fields_of_a_newer_sender_are_ignored() -> None:
    assert decode(b'{"name": "a", "added_later": 1}', Outer) == Outer(name="a")


@given(st.binary(max_size=200))
def test_no_body_raises_anything_else(body: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode(body, Outer)


def test_deep_nesting_is_a_bad_message() -> None:
    with pytest.raises(BadMessage):
        decode(b'{"inner":' * 100_000, Outer)


def test_only_outages_and_the_like_are_worth_a_retry() -> None:
    retryable = {code for code, kind in errors.BY_CODE.items() if kind.retryable}
    assert retryable == {"capacity_exhausted", "unavailable", "deadline_exceeded"}


@pytest.mark.parametrize("bad", ["0" * 26 + "\n", "0" * 25 + "\n", "0" * 27, "A" * 26, ""])
def test_a_uid_that_could_break_a_subject_is_refused(bad: str) -> None:
    from schemas.sandbox import SandboxOpRequest

    body = encode({"request_id": bad})
    with pytest.raises(BadMessage) as caught:
        decode(body, SandboxOpRequest)
    assert caught.value.field == "request_id"
