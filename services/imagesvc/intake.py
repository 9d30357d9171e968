"""From an image request to an import: what may be asked for, and of what. Almost pure.

Owns: the checks of an ``image.create`` before anything is read, allowed folders and
registries. Does not own: grants (auth), uploads' bytes, the import.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from schemas.image import ImageCreate, Kind
from services.imagesvc.imageconfig import check_config
from services.imagesvc.names import RegistryName, parse_registry
from services.imagesvc.sources import (
    BuildSource,
    DockerSource,
    GitSource,
    ImportRequest,
    PathSource,
    RegistrySource,
    Source,
)
from shared.errors import Forbidden, InvalidRequest

DEFAULT_PREFIX: dict[Kind, str] = {"base": "/", "workspace": "/workspace", "toolkit": "/"}
SOURCES = ("path", "upload", "docker", "registry")
ANY = "*"
_LOOPBACK = re.compile(r"(localhost|127(\.[0-9]+){3})(:[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the operator lets clients import. ``roots``: folders divided by ``:``.
    ``registries``: hosts divided by ``,``, ``http://host`` for one without TLS (those
    on this machine need not say so), ``*`` for all. ``builds``: whether Dockerfiles are
    built. Empty means nothing."""

    roots: str = ""
    registries: str = ""
    builds: bool = False


def import_request(
    create: ImageCreate, allowed: Allowed, *, uploaded: Path | None = None
) -> ImportRequest:
    """What to import; ``uploaded`` is where the bytes of ``upload`` are.

    Raises :class:`InvalidRequest` or :class:`Forbidden`, naming the field.
    """
    given = [name for name in SOURCES if getattr(create, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"give exactly one of {', '.join(SOURCES)}", field="path")
    prefix = create.prefix or DEFAULT_PREFIX[create.kind]
    if create.kind == "base" and prefix.strip("/"):
        raise InvalidRequest("a base image has no prefix", field="prefix")
    _check_options(create, given[0])
    if create.config is not None:
        check_config(create.config, field="config")
    source = _source(create, allowed, uploaded)
    return ImportRequest(source, kind=create.kind, prefix=_clean(prefix))


def _clean(prefix: str) -> str:
    parts = [part for part in prefix.split("/") if part]
    if any(part in (".", "..") for part in parts):
        raise InvalidRequest(f"prefix {prefix!r} has relative parts", field="prefix")
    return "/" + "/".join(parts)


def _check_options(create: ImageCreate, source: str) -> None:
    """An option that the source does not have would be ignored unseen."""
    in_files = source in ("path", "upload")
    forms = {"commit": "git", "dockerfile": "dockerfile", "target": "dockerfile"}
    for name, form in forms.items():
        if getattr(create, name) is not None and create.form != form:
            raise InvalidRequest(f"{name} is for form {form!r}", field=name)
    if create.form != "auto" and not in_files:
        raise InvalidRequest("form is for path and upload", field="form")
    if create.reference is not None and not (in_files and create.form in ("auto", "image")):
        raise InvalidRequest("reference chooses an image of an archive", field="reference")


def _source(create: ImageCreate, allowed: Allowed, uploaded: Path | None) -> Source:
    if create.docker is not None:
        if not create.docker or create.docker.startswith("-"):
            raise InvalidRequest("not an image of the engine", field="docker")
        return DockerSource(create.docker)
    if create.registry is not None:
        return _registry(create.registry, allowed.registries)
    if create.form == "dockerfile" and not allowed.builds:
        raise Forbidden("Dockerfiles are not built here", field="form")
    path = uploaded or allowed_path(create.path or "", allowed.roots)
    if create.form == "git":
        return GitSource(path, create.commit or "HEAD")
    if create.form == "dockerfile":
        dockerfile = _inside(create.dockerfile or "Dockerfile")
        return BuildSource(path, dockerfile=dockerfile, target=create.target)
    return PathSource(path, reference=create.reference, form=create.form)


def _inside(dockerfile: str) -> str:
    parts = dockerfile.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in dockerfile:
        raise InvalidRequest(f"{dockerfile!r} is not a file of the context", field="dockerfile")
    return dockerfile


def _registry(text: str, registries: str) -> RegistrySource:
    name = parse_registry(text)
    return RegistrySource(name, plain_http=allowed_registry(name, registries))


def allowed_registry(name: RegistryName, registries: str) -> bool:
    """Whether it is to be asked without TLS; :class:`Forbidden` where it is not to be asked."""
    entries = {entry.strip() for entry in registries.split(",")}
    plain, safe = f"http://{name.host}" in entries, f"https://{name.host}" in entries
    if not (plain or safe or entries & {name.host, ANY}):
        raise Forbidden(f"{name.host} is not a registry that images may come from",
                        field="registry")  # fmt: skip
    # as container tools do: what never leaves this machine needs no certificate
    loopback = _LOOPBACK.fullmatch(name.host) is not None and not safe
    return plain or loopback


def named_hosts(registries: str) -> set[str]:
    """The hosts that the operator named; ``*`` names none."""
    entries = (entry.strip() for entry in registries.split(","))
    return {entry.rpartition("//")[2] for entry in entries} - {"", ANY}


def allowed_path(path: str, roots: str) -> Path:
    """``path`` without links, if it lies below an allowed folder."""
    if not path.startswith("/") or "\0" in path:
        raise InvalidRequest(f"{path!r} is not an absolute path", field="path")
    real = Path(os.path.realpath(path))
    for root in filter(None, roots.split(":")):
        if real.is_relative_to(os.path.realpath(root)):
            return real
    raise Forbidden(f"{path} is not below a folder that images may come from", field="path")
