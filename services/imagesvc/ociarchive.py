"""An environment as an archive that container tools load: an OCI layout in a tar, with the
index of ``docker save`` beside it.

Owns: documents, digests, the order of things. Does not own: layer tars (``layertar``),
where layers come from. Equal environments make equal archives.
"""

from __future__ import annotations

import hashlib
import io
import platform
import tarfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from schemas.sandbox import ImageConfig
from services.imagesvc.layertar import pack
from services.imagesvc.names import ImageName, is_repository
from services.imagesvc.ociimage import ARCHITECTURES, OCI_INDEX, OCI_MANIFEST, REF_NAMES

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
CREATED = "1970-01-01T00:00:00Z"
"""No clock: the same environment is the same archive."""

Tick = Callable[[int], None]
Opened = Callable[[str], AbstractContextManager[int]]
"""From a layer's digest to a descriptor on its root."""


def write_archive(
    out: IO[bytes], layers: Sequence[str], config: ImageConfig, *, name: ImageName, opened: Opened,
    tick: Tick,
) -> None:  # fmt: skip
    """Writes the archive into the empty file ``out``. Raises ``Unsupported`` for what a
    layer tar cannot hold."""
    archive = _Archive(out)
    archive.add("oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
    packed = []
    for digest in layers:
        with opened(digest) as root_fd:
            packed.append(archive.layer(root_fd, tick))
    described = archive.blob(CONFIG_TYPE, _json(_config(config, packed)))
    manifest = {
        "schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": described, "layers": packed,
    }  # fmt: skip
    entry = archive.blob(OCI_MANIFEST, _json(manifest))
    entry["annotations"] = {key: str(name) for key in REF_NAMES}
    entry["platform"] = {"os": "linux", "architecture": _architecture()}
    archive.add("index.json", _json({"schemaVersion": 2, "mediaType": OCI_INDEX,
                                     "manifests": [entry]}))  # fmt: skip
    saved = {
        "Config": _path(described), "Layers": [_path(layer) for layer in packed],
        "RepoTags": [str(name)] if is_repository(name.name) else None,
    }  # fmt: skip
    archive.add("manifest.json", _json([saved]))
    archive.end()


@dataclass(slots=True)
class _Archive:
    """A tar whose large members are written where they stay: a header has room for any
    name and size, so it is filled in afterwards."""

    out: IO[bytes]

    def add(self, name: str, data: bytes) -> None:
        self.out.write(_header(name, len(data)))
        self.out.write(data)
        self._fill(len(data))

    def blob(self, media_type: str, data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        self.add(f"blobs/sha256/{digest}", data)
        return _descriptor(media_type, digest, len(data))

    def layer(self, root_fd: int, tick: Tick) -> dict[str, Any]:
        at = self.out.tell()
        self.out.write(bytes(tarfile.BLOCKSIZE))
        hashed = _Hashed(self.out)
        pack(root_fd, hashed, tick=tick)  # type: ignore[arg-type]  # write is all it uses
        digest, size = hashed.digest.hexdigest(), hashed.size
        self._fill(size)
        end = self.out.tell()
        self.out.seek(at)
        self.out.write(_header(f"blobs/sha256/{digest}", size))
        self.out.seek(end)
        return _descriptor(LAYER_TYPE, digest, size)

    def end(self) -> None:
        self.out.write(bytes(2 * tarfile.BLOCKSIZE))

    def _fill(self, size: int) -> None:
        self.out.write(bytes(-size % tarfile.BLOCKSIZE))


class _Hashed(io.RawIOBase):
    """Counts and digests what passes."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        self._out.write(data)
        self.digest.update(data)
        self.size += len(data)
        return len(data)


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(format=tarfile.GNU_FORMAT)  # sizes beyond 8 GiB within one block


def _descriptor(media_type: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": size}


def _path(descriptor: dict[str, Any]) -> str:
    return "blobs/" + str(descriptor["digest"]).replace(":", "/")


def _config(config: ImageConfig, layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    process: dict[str, Any] = {
        "Env": [f"{key}={value}" for key, value in config.env.items()],
        "WorkingDir": config.workdir, "User": config.user,
        "Entrypoint": config.entrypoint, "Cmd": config.cmd, "Labels": config.labels,
        "Volumes": {path: {} for path in config.volumes},
    }  # fmt: skip
    return {
        "architecture": _architecture(), "os": "linux", "created": CREATED,
        "config": {key: value for key, value in process.items() if value},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
    }  # fmt: skip


def _architecture() -> str:
    machine = platform.machine()
    return ARCHITECTURES.get(machine, machine)


def _json(document: Any) -> bytes:
    return msgspec.json.encode(document, order="deterministic")
