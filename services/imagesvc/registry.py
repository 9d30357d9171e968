"""Images of registries, over the OCI distribution API.

Owns: manifests and blobs by digest, log-in by token or password, going on where a
transfer broke off. Does not own: which registries may be asked (``intake``), what
manifests mean (``ociimage``). Nothing that a registry sends is used before its digest
was checked.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec

from services.imagesvc.meter import Meter
from services.imagesvc.ociimage import (
    INDEX_TYPES,
    JSON_MAX_BYTES,
    MANIFEST_TYPES,
    ArchiveImage,
    Descriptor,
    read_image,
)
from services.imagesvc.sources import RegistrySource
from services.imagesvc.spool import Spool
from services.imagesvc.tarlayer import FileRange
from shared.errors import DsecError, Forbidden, Internal, InvalidRequest, NotFound, Unavailable

FIELD = "registry"
TIMEOUT_S = 30.0
"""Longest silence of a registry."""
ATTEMPTS = 5
"""Of one document or blob in a row without a byte of progress."""
REDIRECTS_MAX = 5
BACKOFF_S, BACKOFF_MAX_S = 0.2, 3.0
BUSY = frozenset({408, 429, 500, 502, 503, 504})
ACCEPT = ", ".join(sorted(MANIFEST_TYPES | INDEX_TYPES))


class _Busy(Exception):
    """The registry says: later."""


class _Account(msgspec.Struct):
    auth: str | None = None
    username: str | None = None
    password: str | None = None


class _Accounts(msgspec.Struct):
    auths: dict[str, _Account] = {}


class _Token(msgspec.Struct):
    token: str | None = None
    access_token: str | None = None


class Registries:
    """Reads images; ``accounts`` is a file as container tools keep them
    (``{"auths": {host: {"auth": base64("user:password")}}}``), read at each import."""

    def __init__(
        self, *, accounts: Path | None = None, timeout_s: float = TIMEOUT_S,
        backoff_s: float = BACKOFF_S, named: Collection[str] = (),
    ) -> None:  # fmt: skip
        """``named``: the hosts that registries may send us to though they are not public."""
        self._accounts = accounts
        self._timeout_s = timeout_s
        self._backoff_s = backoff_s
        self._named = frozenset(named)

    def image(self, source: RegistrySource, spool: Spool, meter: Meter) -> ArchiveImage:
        """One image, its blobs in ``spool``.

        Raises :class:`NotFound`, :class:`Forbidden` (refused by the registry),
        :class:`InvalidRequest` (digest, damaged documents), ``Unsupported`` (media
        type, platform), :class:`Unavailable` (no answer, broken off for good).
        """
        headers = {"Accept-Encoding": "identity"}
        with httpx.Client(timeout=self._timeout_s, headers=headers) as client:
            repository = _Repository(
                client, source, spool, meter,
                account=self._account(source.name.host), backoff_s=self._backoff_s,
                named=self._named,
            )  # fmt: skip
            document, media_type = repository.root()
            return read_image(repository, spool, document, media_type)

    def _account(self, host: str) -> str | None:
        """``user:password`` of a registry."""
        if self._accounts is None:
            return None
        try:
            known = msgspec.json.decode(self._accounts.read_bytes(), type=_Accounts)
            account = known.auths.get(host) or known.auths.get(f"https://{host}")
            if account is None:
                return None
            if account.auth:
                return base64.b64decode(account.auth, validate=True).decode()
        except (OSError, ValueError) as error:
            raise Internal(f"the accounts of registries cannot be read: {error}") from error
        return f"{account.username}:{account.password}" if account.username else None


@dataclass(slots=True)
class _Repository:
    """One repository while one image is read: its authorization and what was fetched."""

    client: httpx.Client
    source: RegistrySource
    spool: Spool
    meter: Meter
    account: str | None = field(kw_only=True)
    backoff_s: float = field(kw_only=True)
    named: frozenset[str] = field(kw_only=True)
    _authorization: str | None = None
    _known: dict[str, FileRange] = field(default_factory=dict)
    field: str = FIELD

    def root(self) -> tuple[bytes, str | None]:
        """The document that the image's name means, and its media type."""
        reference, left = self.source.name.reference, ATTEMPTS
        while True:
            try:
                with self._response(f"manifests/{reference}", {}) as response:
                    document = self._bounded(response)
                break
            except (httpx.TransportError, _Busy) as error:
                left = self._again(left, str(error) or type(error).__name__, "the manifest")
        if ":" in reference:
            _same(hashlib.sha256(document).hexdigest(), reference, "the manifest")
        media_type = response.headers.get("content-type", "").partition(";")[0].strip()
        return document, media_type or None

    def begin(self, total_bytes: int) -> None:
        self.meter.start("fetching", total_bytes)

    def blob(self, descriptor: Descriptor) -> FileRange:
        known = self._known.get(descriptor.digest)
        if known is None:
            if descriptor.size is None:
                raise InvalidRequest(f"blob {descriptor.digest} without a size", field=FIELD)
            pieces = self._pieces(descriptor, descriptor.size)
            known = self._known[descriptor.digest] = self.spool.store(pieces, field=FIELD)
        return known

    def _pieces(self, descriptor: Descriptor, size: int) -> Iterator[bytes]:
        """A blob's bytes, over broken connections, and the check of its digest."""
        kind = "manifests" if descriptor.media_type in MANIFEST_TYPES | INDEX_TYPES else "blobs"
        digest, at, left = hashlib.sha256(), 0, ATTEMPTS
        while at < size:
            before = at
            try:
                for piece in self._from(f"{kind}/{descriptor.digest}", at):
                    at += len(piece)
                    if at > size:
                        raise InvalidRequest(
                            f"{descriptor.digest} has more than its {size} bytes", field=FIELD
                        )
                    digest.update(piece)
                    self.meter.advance(len(piece) if kind == "blobs" else 0)
                    yield piece
                reason = "the answer ended early"
            except (httpx.TransportError, _Busy) as error:
                reason = str(error) or type(error).__name__
            if at < size:
                left = self._again(left if at == before else ATTEMPTS, reason, f"{at} of {size}")
        _same(digest.hexdigest(), descriptor.digest, "a blob")

    def _from(self, path: str, at: int) -> Iterator[bytes]:
        with self._response(path, {"Range": f"bytes={at}-"} if at else {}) as response:
            skip = 0 if response.status_code == httpx.codes.PARTIAL_CONTENT else at
            for piece in response.iter_raw():  # as it comes: a dripping one must be seen
                if skip < len(piece):
                    yield piece[skip:]
                skip = max(0, skip - len(piece))

    def _again(self, left: int, reason: str, what: str) -> int:
        """Waits before the next attempt; ``left`` includes the one that failed."""
        if left <= 1:
            raise Unavailable(f"registry {self.source.name.host}: {reason} ({what})", field=FIELD)
        self.meter.advance(0)
        time.sleep(min(BACKOFF_MAX_S, self.backoff_s * 2 ** (ATTEMPTS - left)))
        return left - 1

    @contextmanager
    def _response(self, path: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        url = f"{self._base}/v2/{self.source.name.repository}/{path}"
        headers = headers | ({"Accept": ACCEPT} if path.startswith("manifests/") else {})
        for last in (False, True):
            if self._authorization:
                headers["Authorization"] = self._authorization
            try:
                with self._got(httpx.URL(url), headers) as response:
                    if response.status_code == httpx.codes.UNAUTHORIZED and not last:
                        self._log_in(response.headers.get("www-authenticate", ""))
                        continue
                    self._check(response, path)
                    yield response
                    return
            except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.DecodingError) as error:
                raise self._failed(str(error)) from error

    @contextmanager
    def _got(self, url: httpx.URL, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """The answer, where the registry may send us to."""
        for _ in range(REDIRECTS_MAX + 1):
            self._check_target(url)
            with self.client.stream("GET", url, headers=headers) as response:
                if not response.has_redirect_location:
                    yield response
                    return
                target = url.join(response.headers["location"])
            if (target.scheme, target.netloc) != (url.scheme, url.netloc):
                headers = {k: v for k, v in headers.items() if k != "Authorization"}
            url = target
        raise self._failed(f"more than {REDIRECTS_MAX} redirects")

    def _check_target(self, url: httpx.URL) -> None:
        """A registry, which may be anybody's, leads us to nothing that only we can reach."""
        host, own = url.netloc.decode(), self.source.name.host
        if url.scheme != "https" and not (url.scheme == "http" and self.source.plain_http):
            raise Forbidden(f"{own} leads to {url.scheme}://{host}, which is not protected",
                            field=FIELD)  # fmt: skip
        if host != own and host not in self.named and not _is_public(url.host):
            raise Forbidden(f"{own} leads to {host}, which is not public", field=FIELD)

    def _bounded(self, response: httpx.Response) -> bytes:
        document = bytearray()
        for piece in response.iter_raw():
            self.meter.advance(0)
            document += piece
            if len(document) > JSON_MAX_BYTES:
                raise InvalidRequest(f"a document of over {JSON_MAX_BYTES} bytes", field=FIELD)
        return bytes(document)

    @property
    def _base(self) -> str:
        return f"{'http' if self.source.plain_http else 'https'}://{self.source.name.host}"

    def _check(self, response: httpx.Response, path: str) -> None:
        if response.is_success:
            return
        code = response.status_code
        if code in BUSY:
            raise _Busy(f"status {code}")
        if code == httpx.codes.NOT_FOUND:
            raise NotFound(f"{self.source.name}: the registry has no {path}", field=FIELD)
        if code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise Forbidden(f"{self.source.name}: the registry refuses us ({code})", field=FIELD)
        raise self._failed(f"status {code} for {path}")

    def _failed(self, why: str) -> DsecError:
        return Unavailable(f"registry {self.source.name.host}: {why}", field=FIELD)

    def _log_in(self, challenge: str) -> None:
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self.account:
            self._authorization = _basic(self.account)
        elif scheme.lower() == "bearer":
            self._authorization = f"Bearer {self._token(dict(_PARAMETER.findall(rest)))}"

    def _token(self, asked: dict[str, str]) -> str:
        realm = urlsplit(asked.get("realm", ""))
        own = realm.scheme == "http" and self.source.plain_http
        if realm.scheme != "https" and not (own and realm.netloc == self.source.name.host):
            raise Forbidden(f"{self.source.name.host} asks to log in at {realm.geturl()!r}, "
                            "which is not protected", field=FIELD)  # fmt: skip
        scope = asked.get("scope", f"repository:{self.source.name.repository}:pull")
        url = httpx.URL(realm.geturl()).copy_merge_params(
            {"service": asked.get("service", ""), "scope": scope}
        )
        headers = {"Authorization": _basic(self.account)} if self.account else {}
        with self._got(url, headers) as response:
            self._check(response, "token")
            document = self._bounded(response)
        try:
            found = msgspec.json.decode(document, type=_Token)
        except msgspec.MsgspecError as error:
            raise self._failed(f"an unreadable token: {error}") from error
        return found.token or found.access_token or ""


_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


def _basic(account: str) -> str:
    return "Basic " + base64.b64encode(account.encode()).decode()


def _is_public(host: str) -> bool:
    """Whether all its addresses are; what has none is for the transport to tell."""
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return True
    addresses = [ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in found]
    plain = [getattr(one, "ipv4_mapped", None) or one for one in addresses]
    return all(one.is_global and not one.is_multicast for one in plain)


def _same(actual: str, wanted: str, what: str) -> None:
    if f"sha256:{actual}" != wanted:  # what came may be nothing that the client may know
        raise InvalidRequest(f"digest mismatch: {what} is not {wanted}", field=FIELD)
