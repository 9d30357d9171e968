"""A store by its URL and settings. Owns: which kinds there are, how credentials come."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from shared.blobs.base import BlobStore
from shared.blobs.folder import FolderStore
from shared.blobs.objects import REQUEST_S, RETRIES, ObjectStore
from shared.errors import InvalidRequest, Unsupported
from shared.settings import Common


class StoreSettings(Common, kw_only=True):
    """What says where layers are. ``store_url`` is ``file:///folder`` or
    ``s3://bucket/prefix``; credentials that are not given here are taken from the
    machine's environment, as cloud providers set it."""

    store_url: str = "file:///var/lib/dsec/store"
    store_endpoint: str | None = None
    """Of an S3-compatible service, ``https://host``; default: the provider's own."""
    store_region: str = "us-east-1"
    store_key_id: str | None = None
    store_secret: str | None = None


def is_remote(url: str) -> bool:
    """Whether layers at ``url`` must be fetched before they can be mounted."""
    return urlsplit(url).scheme != "file"


def folder(url: str) -> Path:
    """The folder of a ``file:///`` URL. Raises :class:`InvalidRequest`."""
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    local = parts.scheme == "file" and parts.netloc in ("", "localhost")
    if not local or not path.is_absolute() or path == Path("/"):
        raise InvalidRequest(f"store {url!r} is not file:///folder", field="store_url")
    return path


def open_store(
    settings: StoreSettings, *, scratch: Path | None = None, retries: int = RETRIES,
    request_s: float = REQUEST_S,
) -> BlobStore:  # fmt: skip
    """The store of ``settings``; a folder is made where it is missing.

    ``scratch``: a local folder for work in progress, needed to write to a remote store.
    ``retries`` and ``request_s`` bound each request to a remote one.
    """
    parts = urlsplit(settings.store_url)
    if parts.scheme == "file":
        return FolderStore(folder(settings.store_url))
    if parts.scheme != "s3":
        raise Unsupported(
            f"store {settings.store_url!r}: only file:/// and s3:// are supported",
            field="store_url",
        )
    if not parts.netloc or parts.query or parts.username:
        raise InvalidRequest("DSEC_STORE_URL: s3://bucket/prefix", field="store_url")
    config: dict[str, Any] = {"region": settings.store_region}
    if settings.store_endpoint:
        config["endpoint"] = settings.store_endpoint
    if settings.store_key_id:
        config["access_key_id"] = settings.store_key_id
        config["secret_access_key"] = settings.store_secret or ""
    return ObjectStore(
        parts.netloc, prefix=unquote(parts.path).strip("/"), config=config, scratch=scratch,
        retries=retries, request_s=request_s,
    )  # fmt: skip
