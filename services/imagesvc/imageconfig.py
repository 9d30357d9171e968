"""What an image says about processes started in it.

Owns: the part of the OCI and Docker image configuration that sandboxes use. Does
not own: layers. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shared.errors import InvalidRequest


class ImageConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """``env`` by name; ``entrypoint`` and ``cmd`` are argument vectors; ``volumes`` are paths.

    Declared volumes are plain directories of the writable layer; they are listed
    so that tools can tell.
    """

    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""
    entrypoint: list[str] = []
    cmd: list[str] = []
    volumes: list[str] = []
    labels: dict[str, str] = {}


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


def parse_config(data: bytes) -> tuple[ImageConfig, list[str]]:
    """The configuration and the layers' ``diff_ids`` of an image's JSON document.

    Raises :class:`InvalidRequest` with field ``archive``.
    """
    try:
        document = msgspec.json.decode(data, type=_Document)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"image configuration: {error}", field="archive") from error
    if document.os not in (None, "", "linux"):
        raise InvalidRequest(f"an image for {document.os!r}, not linux", field="archive")
    process = document.config or _Process()
    config = ImageConfig(
        env=dict(_split(pair) for pair in process.Env or []),
        workdir=process.WorkingDir or "",
        user=process.User or "",
        entrypoint=process.Entrypoint or [],
        cmd=process.Cmd or [],
        volumes=sorted(process.Volumes or {}),
        labels=process.Labels or {},
    )
    return config, document.rootfs.diff_ids if document.rootfs else []


def _split(pair: str) -> tuple[str, str]:
    name, _, value = pair.partition("=")
    return name, value
