"""Names of images."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.imagesvc.names import NAME_PATTERN, TAG_PATTERN, ImageName, parse_name
from shared.errors import InvalidRequest


def test_a_name_without_tag_means_latest() -> None:
    assert parse_name("deb12/py-3.11") == ImageName("deb12/py-3.11", "latest")
    assert str(parse_name("base:v1.2_x")) == "base:v1.2_x"


@pytest.mark.parametrize(
    "bad",
    ["", ":", "A", "a:", "a b", "-a", "/a", "a//b", "a/../b", "a/.", "a/", "a:b:c", "a:-x", "é",
     "a" * 129, "a:" + "t" * 129, "a\n", "a:b\n"],
)  # fmt: skip
def test_a_bad_name_is_refused_by_field(bad: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_name(bad, field="layers[0]")
    assert caught.value.field == "layers[0]"


@given(st.from_regex(rf"{NAME_PATTERN}(:{TAG_PATTERN})?", fullmatch=True))
def test_what_parses_reads_back_the_same(text: str) -> None:
    try:
        name = parse_name(text)
    except InvalidRequest:  # empty or relative parts
        return
    assert parse_name(str(name)) == name
