"""Names: ``name[:tag]`` of our own, ``host/repository[:tag][@digest]`` of registries.

Owns the grammars and the default tag. Does not own what a name points to. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.errors import InvalidRequest

DEFAULT_TAG = "latest"
NAME_PATTERN = r"[a-z0-9][a-z0-9._/-]{0,127}"
TAG_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"

_HOST = re.compile(r"(localhost|[a-z0-9-]+(\.[a-z0-9-]+)+|\[[0-9a-f:]+\])(:[0-9]{1,5})?", re.ASCII)
_REPOSITORY = re.compile(r"[a-z0-9]+([._/-]+[a-z0-9]+)*", re.ASCII)
_REPOSITORY_MAX = 255
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_NAME = re.compile(NAME_PATTERN, re.ASCII)
_TAG = re.compile(TAG_PATTERN, re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class ImageName:
    """A parsed name; ``str()`` gives the canonical form with its tag."""

    name: str
    tag: str = DEFAULT_TAG

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}"


def parse_name(text: str, *, field: str = "name") -> ImageName:
    """Parse ``name[:tag]``.

    Raises :class:`InvalidRequest` naming ``field`` where the name or the tag
    does not match its pattern, or where a path part is empty, ``.`` or ``..``.
    """
    name, colon, tag = text.partition(":")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"image name {text!r} does not match {NAME_PATTERN}", field=field)
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise InvalidRequest(f"image name {text!r} has an empty or relative part", field=field)
    if colon and not _TAG.fullmatch(tag):
        raise InvalidRequest(f"image tag of {text!r} does not match {TAG_PATTERN}", field=field)
    return ImageName(name, tag if colon else DEFAULT_TAG)


@dataclass(frozen=True, slots=True)
class RegistryName:
    """An image of a registry: ``reference`` is its digest where there is one, else its tag."""

    host: str
    repository: str
    reference: str

    def __str__(self) -> str:
        sign = "@" if ":" in self.reference else ":"
        return f"{self.host}/{self.repository}{sign}{self.reference}"


def parse_registry(text: str) -> RegistryName:
    """Parse ``host[:port]/repository[:tag][@sha256:…]``.

    Raises :class:`InvalidRequest` (field ``registry``): the host must be named, so that
    no short name means another image from one day to the next.
    """
    whole, at, digest = text.partition("@")
    host, _, rest = whole.partition("/")
    repository, colon, tag = rest.partition(":")
    wrong = None
    if not (_HOST.fullmatch(host) or re.fullmatch(r"[a-z0-9-]+:[0-9]{1,5}", host)):
        wrong = "does not begin with a registry's host"
    elif not _REPOSITORY.fullmatch(repository) or len(repository) > _REPOSITORY_MAX:
        wrong = "has no valid repository"
    elif colon and not _TAG.fullmatch(tag):
        wrong = f"has a tag that does not match {TAG_PATTERN}"
    elif at and not _DIGEST.fullmatch(digest):
        wrong = "has a digest that is not sha256:<64 hex digits>"
    if wrong:
        raise InvalidRequest(f"image {text!r} {wrong}", field="registry")
    return RegistryName(host, repository, digest or tag or DEFAULT_TAG)


def is_repository(name: str) -> bool:
    """Whether container tools take it for a repository's name."""
    return _REPOSITORY.fullmatch(name) is not None
