"""What an image says about processes started in it.

Owns: reading the part of the OCI and Docker image configuration that sandboxes
use, and merging it along a stack of images. Does not own: layers. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from schemas.sandbox import ImageConfig
from shared.errors import InvalidRequest


class _Process(msgspec.Struct):
    Env: list[str] | None = None
    WorkingDir: str | None = None
    User: str | None = None
    Entrypoint: list[str] | None = None
    Cmd: list[str] | None = None
    Volumes: dict[str, Any] | None = None
    Labels: dict[str, str] | None = None


class _Rootfs(msgspec.Struct):
    diff_ids: list[str] = []


class _Document(msgspec.Struct):
    config: _Process | None = None
    rootfs: _Rootfs | None = None
    os: str | None = None


def parse_config(data: bytes, *, field: str = "archive") -> tuple[ImageConfig, list[str]]:
    """The configuration and the layers' ``diff_ids`` of an image's JSON document.

    Raises :class:`InvalidRequest` with ``field``.
    """
    try:
        document = msgspec.json.decode(data, type=_Document)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"image configuration: {error}", field=field) from error
    if document.os not in (None, "", "linux"):
        raise InvalidRequest(f"an image for {document.os!r}, not linux", field=field)
    process = document.config or _Process()
    config = ImageConfig(
        env=dict(_split(pair) for pair in process.Env or []),
        workdir=process.WorkingDir or None,
        user=process.User or None,
        entrypoint=process.Entrypoint or [],
        cmd=process.Cmd or [],
        volumes=sorted(process.Volumes or {}),
        labels=process.Labels or {},
    )
    check_config(config, field=field)
    return config, document.rootfs.diff_ids if document.rootfs else []


def check_config(config: ImageConfig, *, field: str) -> None:
    """Raises ``InvalidRequest`` for a zero byte: no process can be given one, and no
    database keeps it."""
    pairs = (*config.env.items(), *config.labels.items())
    texts = (
        config.workdir or "", config.user or "", *config.entrypoint, *config.cmd,
        *config.volumes, *(text for pair in pairs for text in pair),
    )  # fmt: skip
    if any("\0" in text for text in texts):
        raise InvalidRequest("image configuration: a text with a zero byte", field=field)


def merged_config(configs: Sequence[ImageConfig]) -> ImageConfig:
    """The defaults of a stack of images, bottom first: the topmost that says anything wins.

    ``entrypoint`` and ``cmd`` go together: one that names an entry point does not
    keep the arguments meant for another.
    """
    merged = ImageConfig()
    for config in configs:
        starts = bool(config.entrypoint or config.cmd)
        merged = ImageConfig(
            env=merged.env | config.env,
            workdir=config.workdir or merged.workdir,
            user=config.user or merged.user,
            entrypoint=config.entrypoint if starts else merged.entrypoint,
            cmd=config.cmd if starts else merged.cmd,
            volumes=sorted({*merged.volumes, *config.volumes}),
            labels=merged.labels | config.labels,
        )
    return merged


def _split(pair: str) -> tuple[str, str]:
    name, _, value = pair.partition("=")
    return name, value
