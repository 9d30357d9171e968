"""Names of images, workspaces and toolkits: ``name[:tag]``.

Owns the grammar and the default tag. Does not own what a name points to. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.errors import InvalidRequest

DEFAULT_TAG = "latest"
NAME_PATTERN = r"[a-z0-9][a-z0-9._/-]{0,127}"
TAG_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"

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
