"""What a Dockerfile would have the engine fetch, before the engine sees it. Pure.

Owns: finding the images that it names, refusing what else is fetched by the engine itself: a
build's network bounds its steps only. Does not own: which images may be used (``engine``).
Whatever could be read in two ways is refused.
"""

from __future__ import annotations

import json
import re

from shared.errors import Forbidden, InvalidRequest

FIELD = "dockerfile"
DOCKERFILE_MAX_BYTES = 1024 * 1024
_KNOWN = frozenset(
    ("add", "arg", "cmd", "copy", "entrypoint", "env", "expose", "from", "healthcheck", "label",
     "maintainer", "run", "shell", "stopsignal", "user", "volume", "workdir")
)  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_ESCAPE = re.compile(r"\s*#\s*escape\s*=(?!\s*\\\s*$)", re.IGNORECASE)
_CONTINUED = re.compile(r"\\[ \t]*\Z")
_HERE_DOCUMENT = re.compile(r"[0-9]*<<-?[^<]")
_STAGE = re.compile(r"[a-z][a-z0-9._-]*", re.ASCII)
_QUOTING = frozenset("$\"'\\")
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*:|[^/]*@[^/]*:|github\.com/", re.IGNORECASE)


def images_of(content: bytes) -> list[str]:
    """The images that a Dockerfile begins with or copies from, without its own stages.

    Raises :class:`Forbidden` for ``ADD`` of what is not in the context, and
    :class:`InvalidRequest` for what cannot be judged (variables in these names, here-documents,
    ``ONBUILD``), with the line.
    """
    found, stages, count = list[str](), set[str](), 0
    for line in _instructions(content):
        word, *rest = line.split(maxsplit=1)
        words = rest[0].split() if rest else []
        kind = word.lower() if word.isascii() else ""
        if kind not in _KNOWN:
            raise _wrong(line, "not built here")
        if kind in ("run", "add", "copy") and any(map(_HERE_DOCUMENT.match, words)):
            raise _wrong(line, "here-documents are not built here")
        if kind == "run" and words and words[0].startswith("--"):
            raise _wrong(line, "options of RUN are not built here")
        if kind == "add":
            _check_add(line, rest[0] if rest else "")
        if kind in ("add", "copy"):
            found += [n for n in _copied_from(line, words) if not _is_stage(n, stages, count)]
        if kind == "from":
            image, stage = _from(line, words)
            found += [] if image == "scratch" or image.lower() in stages else [image]
            stages |= {stage}
            count += 1
    return list(dict.fromkeys(found))


def _instructions(content: bytes) -> list[str]:
    """Lines as the engine joins them; comments and empty lines do not end an instruction."""
    if len(content) > DOCKERFILE_MAX_BYTES:
        raise InvalidRequest(f"a Dockerfile of over {DOCKERFILE_MAX_BYTES} bytes", field=FIELD)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest("a Dockerfile that is not UTF-8", field=FIELD) from error
    found, parts = list[str](), list[str]()
    for line in text.split("\n"):
        line = line.removesuffix("\r")
        if _CONTROL.search(line):
            raise _wrong(line, "control characters")
        if _ESCAPE.match(line):
            raise _wrong(line, "the escape character is the backslash here")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if line.rstrip().endswith("\\\\"):  # engines differ in whether it goes on
            raise _wrong(line, "two backslashes at the end")
        more = _CONTINUED.search(line)
        parts.append(line[: more.start()] if more else line)
        if not more:
            found.append("".join(parts))
            parts = []
    return [line for line in [*found, "".join(parts)] if line.strip()]


def _from(line: str, words: list[str]) -> tuple[str, str]:
    """The image and the stage's name, which may be empty."""
    words = [word for word in words if not word.startswith("--")]
    if len(words) == 1:
        return _plain(line, words[0]), ""
    if len(words) != 3 or words[1].lower() != "as" or not _STAGE.fullmatch(words[2].lower()):
        raise _wrong(line, "not FROM image [AS stage]")
    return _plain(line, words[0]), words[2].lower()


def _copied_from(line: str, words: list[str]) -> list[str]:
    found = []
    for word in words:
        if not word.startswith("--"):
            break
        name, _, value = _plain(line, word).partition("=")
        found += [value] if name.lower() == "--from" else []
    return found


def _is_stage(name: str, stages: set[str], count: int) -> bool:
    return name.lower() in stages or (name.isdigit() and int(name[:9]) < count)


def _check_add(line: str, rest: str) -> None:
    sources = rest.split()
    if rest.lstrip().startswith("["):
        try:
            sources = [str(one) for one in json.loads(rest)]
        except ValueError as error:
            raise _wrong(line, "not a JSON list") from error
    for source in sources:
        if _REMOTE.match(_plain(line, source)):
            raise Forbidden(f"{_short(line)!r}: only what is in the context is added", field=FIELD)


def _plain(line: str, word: str) -> str:
    if _QUOTING & set(word):
        raise _wrong(line, "no variables or quotes here")
    return word


def _wrong(line: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{_short(line)!r}: {why}", field=FIELD)


def _short(line: str) -> str:
    return line.strip()[:100]
