"""Names of images."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.imagesvc.names import (
    NAME_PATTERN,
    TAG_PATTERN,
    ImageName,
    RegistryName,
    parse_name,
    parse_registry,
)
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


@pytest.mark.parametrize(
    ("text", "host", "repository", "reference"),
    [
        ("registry.example/a", "registry.example", "a", "latest"),
        ("localhost/a/b:1.2-x", "localhost", "a/b", "1.2-x"),
        ("127.0.0.1:5000/a__b/c.d:1", "127.0.0.1:5000", "a__b/c.d", "1"),
        (f"h:1/a:1@sha256:{'0' * 64}", "h:1", "a", f"sha256:{'0' * 64}"),
    ],
)
def test_names_of_registries(text: str, host: str, repository: str, reference: str) -> None:
    assert parse_registry(text) == RegistryName(host, repository, reference)


@pytest.mark.parametrize(
    "text",
    ["", "busybox", "library/busybox:1", "r.example/", "r.example/A", "r.example/../a",
     "r.example/a:", "r.example/a@sha256:0", "r.example/a?x=1", "http://r.example/a",
     "u:p@r.example/a", "r.example/a:1/b"],
)  # fmt: skip
def test_what_is_no_name_of_a_registry(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_registry(text)
    assert caught.value.field == "registry"
