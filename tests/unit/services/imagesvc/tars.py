"""Layer tars and image archives made in memory for tests."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

from services.imagesvc.tarlayer import FileRange


class Member(tarfile.TarInfo):
    """An entry together with its content."""

    data: bytes | None = None


def member(name: str, data: bytes | None = None, **fields: object) -> Member:
    """A regular file (with ``data``) or, by ``type=``, any other entry."""
    info = Member(name)
    info.mtime = 1_600_000_000
    for key, value in fields.items():
        setattr(info, key, value)
    if data is not None:
        info.size = len(data)
    info.data = data
    return info


def folder(name: str, mode: int = 0o755, **fields: object) -> Member:
    return member(name, type=tarfile.DIRTYPE, mode=mode, **fields)


def symlink(name: str, target: str) -> Member:
    return member(name, type=tarfile.SYMTYPE, linkname=target)


def hardlink(name: str, target: str) -> Member:
    return member(name, type=tarfile.LNKTYPE, linkname=target)


def tar_bytes(members: Iterable[Member]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info in members:
            data = info.data
            tar.addfile(info, None if data is None else io.BytesIO(data))
    return out.getvalue()


def as_range(data: bytes, folder_path: Path) -> FileRange:
    """``data`` in an unnamed file."""
    fd = os.open(folder_path, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(fd, data)
    return FileRange(fd, 0, len(data))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def image_config(layers: list[bytes], **process: object) -> bytes:
    return json.dumps(
        {
            "os": "linux",
            "config": process,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256(one)}" for one in layers]},
        }
    ).encode()


def saved_image(layers: list[bytes], *, tag: str = "made:1", **process: object) -> bytes:
    """A ``docker save`` archive of the classic form; equal layers become links, as there."""
    config = image_config(layers, **process)
    members, names, first = [], [], {}
    for number, layer in enumerate(layers):
        name = f"{number:064x}/layer.tar"
        names.append(name)
        if layer in first:
            members.append(symlink(name, f"../{first[layer]}"))
        else:
            first[layer] = name
            members.append(member(name, layer))
    members.append(member(f"{sha256(config)}.json", config))
    manifest = [{"Config": f"{sha256(config)}.json", "RepoTags": [tag], "Layers": names}]
    members.append(member("manifest.json", json.dumps(manifest).encode()))
    return tar_bytes(members)


def oci_files(
    blobs: list[bytes], media_types: list[str], *, plain: list[bytes] | None = None
) -> dict[str, bytes]:
    """The files of an OCI layout; ``plain`` are the uncompressed layers of ``blobs``."""
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}'}

    def put(data: bytes, media_type: str) -> dict[str, object]:
        files[f"blobs/sha256/{sha256(data)}"] = data
        return {"mediaType": media_type, "digest": f"sha256:{sha256(data)}", "size": len(data)}

    config = put(
        image_config(plain or blobs, Env=["A=b"]), "application/vnd.oci.image.config.v1+json"
    )
    layers = [put(blob, kind) for blob, kind in zip(blobs, media_types, strict=True)]
    manifest = json.dumps({"schemaVersion": 2, "config": config, "layers": layers}).encode()
    entry = put(manifest, "application/vnd.oci.image.manifest.v1+json")
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    return files
