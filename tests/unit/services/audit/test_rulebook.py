"""A rules file is read as a whole or refused with what is wrong with it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.audit.rulebook import collect, read
from shared.errors import InvalidRequest

GOOD = """
[[rule]]
id = "a_rule"
title = "A"
severity = "low"
confidence = 0.5
explanation = "{comm} did {target}"
match = [ { source = ["dns"] } ]
"""


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_a_good_file_is_read() -> None:
    (rule,) = read(GOOD)
    assert (rule.id, rule.threshold, rule.respond) == ("a_rule", 1, "alert")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[[rule]", "Expected"),
        ("", "rule"),
        (changed('"low"', '"awful"'), "severity"),
        (changed("0.5", "1.5"), "confidence"),
        (changed('"a_rule"', '"A-Rule"'), "id"),
        (changed('"a_rule"', '"a_rule\\n"'), "id"),
        (changed("title", "titel"), "titel"),
        (changed("source", "sorce"), "sorce"),
        (changed('{ source = ["dns"] }', "{ }"), "empty match"),
        (changed('["dns"]', "[]"), "match"),
        (changed('["dns"]', "[7]"), "no text"),
        (changed('source = ["dns"]', 'port = ["http"]'), "neither a number nor a range"),
        (changed("{target}", "{uid.__class__}"), "explanation"),
        (changed("{target}", "{nothing}"), "nothing"),
        (changed("{target}", "{"), "explanation"),
        (GOOD + "threshold = 3", "window_s"),
        (GOOD + 'respond = "shoot"', "respond"),
    ],
)
def test_what_is_wrong_is_named(text: str, what: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(text, "mine.toml")
    assert "mine.toml" in caught.value.message
    assert what in caught.value.message


def test_an_id_is_one_rules_only() -> None:
    with pytest.raises(InvalidRequest, match="two rules a_rule"):
        collect({"one.toml": GOOD, "two.toml": GOOD})


@given(st.text(max_size=300))
def test_any_text_is_rules_or_a_typed_refusal(text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        read(text)
