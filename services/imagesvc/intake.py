"""From an image request to an import: what may be asked for, and of what. Almost pure.

Owns: the checks of an ``image.create`` before anything is read, allowed folders.
Does not own: grants (auth), the import.
"""

from __future__ import annotations

import os
from pathlib import Path

from schemas.image import ImageCreate, Kind
from services.imagesvc.importer import DockerSource, ImportRequest, PathSource, Source
from shared.errors import Forbidden, InvalidRequest

DEFAULT_PREFIX: dict[Kind, str] = {"base": "/", "workspace": "/workspace", "toolkit": "/"}


def import_request(create: ImageCreate, *, roots: str) -> ImportRequest:
    """What to import; ``roots`` as in the settings.

    Raises :class:`InvalidRequest` or :class:`Forbidden`, naming the field.
    """
    if (create.path is None) == (create.docker is None):
        raise InvalidRequest("give exactly one of path and docker", field="path")
    prefix = create.prefix or DEFAULT_PREFIX[create.kind]
    if create.kind == "base" and prefix.strip("/"):
        raise InvalidRequest("a base image has no prefix", field="prefix")
    return ImportRequest(_source(create, roots), kind=create.kind, prefix=_clean(prefix))


def _clean(prefix: str) -> str:
    parts = [part for part in prefix.split("/") if part]
    if any(part in (".", "..") for part in parts):
        raise InvalidRequest(f"prefix {prefix!r} has relative parts", field="prefix")
    return "/" + "/".join(parts)


def _source(create: ImageCreate, roots: str) -> Source:
    if create.docker is not None:
        if not create.docker or create.docker.startswith("-"):
            raise InvalidRequest("not an image of the engine", field="docker")
        return DockerSource(create.docker)
    return PathSource(allowed_path(create.path or "", roots))


def allowed_path(path: str, roots: str) -> Path:
    """``path`` without links, if it lies below an allowed folder."""
    if not path.startswith("/") or "\0" in path:
        raise InvalidRequest(f"{path!r} is not an absolute path", field="path")
    real = Path(os.path.realpath(path))
    for root in filter(None, roots.split(":")):
        if real.is_relative_to(os.path.realpath(root)):
            return real
    raise Forbidden(f"{path} is not below a folder that images may come from", field="path")
