"""What Dockerfiles would have the engine fetch."""

from __future__ import annotations

import pytest

from services.imagesvc.dockerfiles import images_of
from shared.errors import Forbidden, InvalidRequest


@pytest.mark.parametrize(
    ("text", "images"),
    [
        ("FROM scratch\nCOPY a /\n", []),
        ("# syntax=x\n\nFROM a.host/x:1 AS One\nFROM one\nCOPY --from=ONE a /\n", ["a.host/x:1"]),
        ("from --platform=linux/amd64 a\ncopy --from=0 x /\nCopy --FROM=b x /", ["a", "b"]),
        ("FROM a\nCOPY --from=1 x /", ["a", "1"]),
        ("FROM \\\n# between\n\n  a\\\n.host/x\nRUN b \\\n  FROM c", ["a.host/x"]),
        ("\ufeffFROM a\r\nCOPY --chown=1:1 --from=b.host/y x /\r\n", ["a", "b.host/y"]),
        ("FROM b AS a\nFROM a\nFROM b\nADD x.tar ./github.com/ /", ["b"]),
        ("FROM a\nADD [\"x y\", \"/\"]\nRUN echo $((1<<2)) http://x <<<y", ["a"]),
    ],
)
def test_the_images_that_it_names_are_found(text: str, images: list[str]) -> None:
    assert images_of(text.encode()) == images


@pytest.mark.parametrize(
    "line",
    [
        "ADD http://169.254.169.254/x /x",
        "add --chown=1:1 a HTTPS://h/x /x",
        "ADD \\\n  ht\\\ntp://h/x /x",
        'ADD ["\\u0068ttp://h/x", "/x"]',
        "ADD git@host:x.git /x",
        "ADD ssh://git@host/x /x",
        "ADD github.com/a/b /x",
    ],
)
def test_nothing_is_added_from_elsewhere(line: str) -> None:
    """The engine would fetch it in its own network."""
    with pytest.raises(Forbidden) as told:
        images_of(f"FROM a\n{line}\n".encode())
    assert told.value.field == "dockerfile"


@pytest.mark.parametrize(
    "text",
    [
        "ARG A=evil.host/x\nFROM $A",
        "FROM a\nENV A=http\nADD $A://h/x /x",
        'FROM a\nADD h"ttp"://h/x /x',
        'FROM a\nCOPY --fr"om"=evil.host/x a /',
        "FROM a\nCOPY --from=${B} a /",
        "FROM a\nONBUILD ADD http://h/x /x",
        "FROM a\nCOPY <<EOF /x\nFROM b AS c\nEOF\n",
        "FROM a\nRUN --mount=type=bind,from=evil.host/x true",
        "# escape=`\nFROM a\nRUN x `\nADD http://h/x",
        "FROM a AS evil.host/x\nFROM evil.host/x",
        "FROM a\x0bAS b",
        "FROM a\nONBU\u0130LD ADD http://h/x /x",
        "FROM a\nRUN x \\\\\nADD http://h/x /",
        "FROM",
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as told:
        images_of(text.encode())
    assert told.value.field == "dockerfile"
