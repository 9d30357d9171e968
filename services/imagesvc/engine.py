"""A container engine: its local images, and builds.

Owns: the one use of the ``docker`` package in this service, builds of Dockerfiles. Does
not own: the archive's format. Builds share no cache: what one client's build left could
be another's input.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import docker
import requests
import urllib3
from docker.errors import APIError, DockerException, ImageNotFound
from docker.utils.build import PatternMatcher

from services.imagesvc.dockerfiles import DOCKERFILE_MAX_BYTES, images_of
from services.imagesvc.intake import allowed_registry
from services.imagesvc.names import DEFAULT_TAG, parse_registry
from services.imagesvc.tarheaders import BoundedTar
from services.imagesvc.tarlayer import XATTR_KEYWORD
from shared.errors import Forbidden, InvalidRequest, NotFound, Unavailable

SAVE_CHUNK_BYTES = 1024 * 1024
FIELD = "docker"
BUILD_FIELD = "dockerfile"
BUILD_SILENCE_S = 1800.0
"""Longest step of a build that says nothing."""
SAID_LINES = 20
"""Of a failed build's output, in its error."""
IGNORE_NAME, IGNORE_MAX_BYTES = ".dockerignore", 1024 * 1024
IGNORE_PATTERNS_MAX, IGNORE_STARS_MAX = 1_000, 4
"""Each wildcard of a pattern multiplies what it costs to match a name."""
UNPACKED_MAX_BYTES = 256 * 1024**3
LABEL = "dsec.build"
"""What builds leave until they are imported: nobody else's to read."""
STEP_END = re.compile(r" ---> ([0-9a-f]{12,64})\n")
BUILT_KEEP_S = 24 * 3_600.0
"""Far longer than a build and its import take: then a crash left it."""


class DockerEngine:
    """Reads images; ``base_url`` as ``DOCKER_HOST`` has it, ``None`` for the environment's."""

    def __init__(
        self, *, base_url: str | None = None, timeout_s: float = 60, build_network: str = "none",
        build_memory_bytes: int = 0, scratch: Path | None = None, registries: str = "",
        unpacked_bytes_max: int = UNPACKED_MAX_BYTES,
    ) -> None:  # fmt: skip
        """``registries``: those that builds may take images from, as ``intake.Allowed``."""
        self._base_url = base_url
        self._timeout_s = timeout_s
        self._build_network = build_network
        self._build_memory_bytes = build_memory_bytes
        self._scratch = scratch
        self._registries = registries
        self._unpacked_bytes_max = unpacked_bytes_max

    def save(self, reference: str, *, built: bool = False) -> Iterator[bytes]:
        """The ``docker save`` stream of one image: one that has ``reference`` as a name, or
        one that :meth:`build` made, by its id.

        Raises :class:`NotFound` or :class:`Unavailable` (no engine, stream cut).
        """
        with _typed():
            client = self._client()
            try:
                image = client.images.get(reference)
                named = LABEL not in image.labels and is_name_of(reference, image.attrs)
                if not (built or named):
                    raise NotFound(f"the engine has no image named {reference!r}", field=FIELD)
                yield from image.save(chunk_size=SAVE_CHUNK_BYTES)
            finally:
                client.close()

    def build(
        self, context: Path, *, dockerfile: str, target: str | None, tick: Callable[[int], None]
    ) -> str:
        """The id of the image that ``dockerfile`` of a context (a directory or a tar of
        one) makes, to be removed by :meth:`remove`. ``tick`` may raise to cancel.

        Raises :class:`InvalidRequest` with the last lines of a failed build,
        :class:`Forbidden` for what a build may not fetch, or :class:`Unavailable`.
        """
        with _typed(), self._packed(context, dockerfile) as packed:
            images = images_of(_the_dockerfile(packed, dockerfile))
            client = self._client(BUILD_SILENCE_S)
            client.api._set_auth_headers = lambda headers: None  # nobody's credentials here
            made: list[str] = []
            image = ""
            try:
                for image in images:
                    self._check_base(client, image, tick)
                packed.seek(0)
                image = _followed(
                    client.api.build(
                        fileobj=packed, custom_context=True, dockerfile=dockerfile, target=target,
                        nocache=True, rm=True, forcerm=True, decode=True,
                        network_mode=self._build_network, labels={LABEL: "1"},
                        container_limits={"memory": self._build_memory_bytes}
                        if self._build_memory_bytes else None,
                    ), tick, made,
                )  # fmt: skip
                return image
            finally:
                _discard(client, made, keep=image)
                client.close()

    def remove(self, image: str) -> None:
        """Forgets a built image; that it cannot be removed harms nobody."""
        with contextlib.suppress(Unavailable, NotFound), _typed():
            client = self._client()
            try:
                client.images.remove(image, force=True)
            finally:
                client.close()

    def _check_base(
        self, client: docker.DockerClient, reference: str, tick: Callable[[int], None]
    ) -> None:
        """A build may begin with what ``docker`` may name, and with what allowed registries
        have; the engine itself would take ids, and pull from anywhere."""
        if _has_base(client, reference):
            return
        try:
            name = parse_registry(reference)
            allowed_registry(name, self._registries)
        except (InvalidRequest, Forbidden) as error:
            raise Forbidden(
                f"{reference} is neither a tag of the engine's nor of a registry that images may "
                "come from", field=BUILD_FIELD,
            ) from error  # fmt: skip
        steps = client.api.pull(
            f"{name.host}/{name.repository}", tag=name.reference, stream=True, decode=True,
            auth_config={},
        )  # fmt: skip
        for step in steps:
            tick(0)
            if "error" in step:
                raise NotFound(f"{reference}: {step['error']}", field=BUILD_FIELD)
        if not _has_base(client, reference):
            raise NotFound(f"the engine did not get {reference}", field=BUILD_FIELD)

    def sweep(self) -> int:
        """Removes what builds of crashed services left; returns how many. Without an engine
        there is nothing to remove."""
        old, limit = list[str](), time.time() - BUILT_KEEP_S
        with contextlib.suppress(Unavailable, NotFound), _typed():
            client = self._client()
            try:
                for image in client.api.images(filters={"label": LABEL}):
                    tagged = set(image.get("RepoTags") or ()) - {"<none>:<none>"}
                    if image["Created"] < limit and not tagged:
                        old.append(image["Id"])
            finally:
                client.close()
        for one in old:
            self.remove(one)
        return len(old)

    @contextlib.contextmanager
    def _packed(self, context: Path, dockerfile: str) -> Iterator[IO[bytes]]:
        """The context as a tar, without what its ``.dockerignore`` names."""
        if self._scratch is not None:
            self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._scratch) as packed:
            try:
                with tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as out:
                    if context.is_dir():
                        _pack_folder(context, dockerfile, out)
                    else:
                        _pack_tar(context, dockerfile, out, bytes_max=self._unpacked_bytes_max)
            except (tarfile.TarError, EOFError) as error:
                raise InvalidRequest(f"damaged build context: {error}", field="archive") from error
            yield packed

    def _client(self, timeout_s: float | None = None) -> docker.DockerClient:
        timeout_s = timeout_s or self._timeout_s
        if self._base_url is None:
            return docker.from_env(timeout=timeout_s)
        return docker.DockerClient(base_url=self._base_url, timeout=timeout_s)


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    try:
        yield
    except ImageNotFound as error:
        raise NotFound(f"the engine has no such image: {error}", field=FIELD) from error
    except APIError as error:
        if error.status_code == requests.codes.bad_request:
            raise InvalidRequest(f"container engine: {error.explanation}", field=FIELD) from error
        raise Unavailable(f"container engine: {error}", field=FIELD) from error
    except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise Unavailable(f"container engine: {error}", field=FIELD) from error


def _has_base(client: docker.DockerClient, reference: str) -> bool:
    """Whether the engine has it by this name; one whose own steps would run is refused."""
    try:
        image = client.images.get(reference)
    except ImageNotFound:
        return False
    if (image.attrs.get("Config") or {}).get("OnBuild"):
        raise Forbidden(f"{reference} has steps of its own (ONBUILD)", field=BUILD_FIELD)
    return LABEL not in image.labels and is_name_of(reference, image.attrs)


def is_name_of(reference: str, attributes: Mapping[str, Any]) -> bool:
    """Whether an image has it as a tag or digest; an id, or how one begins, names nothing."""
    name, at, digest = reference.partition("@")
    for hub in ("docker.io/library/", "docker.io/"):  # engines leave it out
        if name.startswith(hub):
            name = name.removeprefix(hub)
            break
    path, slash, last = name.rpartition("/")
    repository, _, tag = last.partition(":")
    if at:
        wanted = f"{path}{slash}{repository}@{digest}"
        return wanted in (attributes.get("RepoDigests") or ())
    wanted = f"{path}{slash}{repository}:{tag or DEFAULT_TAG}"
    return wanted in (attributes.get("RepoTags") or ())


def _discard(client: docker.DockerClient, made: Sequence[str], *, keep: str) -> None:
    """Forgets the steps of a build, the last first, that ``keep`` does not lie upon: those
    of other stages, and all of one that failed. What has a name was there before."""
    for step in reversed(made):
        with contextlib.suppress(APIError, requests.RequestException):
            known = client.api.inspect_image(step)
            if known["Id"] != keep and not known["RepoTags"]:
                client.api.remove_image(known["Id"])  # refused where another lies upon it


def _followed(
    steps: Iterator[dict[str, Any]], tick: Callable[[int], None], made: list[str]
) -> str:
    """The id that a build ends with. What its steps end with is added to ``made``."""
    image, said = "", list[str]()
    for step in steps:
        tick(0)
        said = [*said, *str(step.get("stream", "")).splitlines()][-SAID_LINES:]
        if ends := STEP_END.fullmatch(str(step.get("stream", ""))):
            made.append(ends[1])
        if "error" in step:
            text = "\n".join([*filter(str.strip, said), str(step["error"])])
            raise InvalidRequest(f"the build failed:\n{text}", field=BUILD_FIELD)
        image = step.get("aux", {}).get("ID", image)
    if not image:
        raise InvalidRequest("the build made no image", field=BUILD_FIELD)
    return image


def _pack_folder(context: Path, dockerfile: str, out: tarfile.TarFile) -> None:
    ignore = context / IGNORE_NAME
    ignored = _matcher(ignore.read_bytes() if ignore.is_file() else b"", dockerfile)
    for name in sorted(ignored.walk(str(context))):
        out.add(context / name, name, recursive=False)


def _pack_tar(context: Path, dockerfile: str, out: tarfile.TarFile, *, bytes_max: int) -> None:
    with BoundedTar.open(context) as tar:
        ignored = _matcher(_ignore_file(tar, bytes_max), dockerfile)
    with BoundedTar.open(context) as tar:
        for info in tar:
            info.name = info.name.removeprefix("./")
            if info.name not in ("", ".") and not ignored.matches(info.name):
                # all else in them is in the entry, or could name it otherwise
                info.pax_headers = {
                    k: v for k, v in info.pax_headers.items() if k.startswith(XATTR_KEYWORD)
                }
                if info.isreg():
                    info.type = tarfile.REGTYPE
                out.addfile(info, tar.extractfile(info) if info.isreg() else None)


def _ignore_file(tar: tarfile.TarFile, bytes_max: int) -> bytes:
    """Reads the whole tar: also whether it is bounded."""
    found, total = b"", 0
    for info in tar:
        total += info.size
        if total > bytes_max:
            raise InvalidRequest(f"a build context of over {bytes_max} bytes", field="archive")
        if info.name.removeprefix("./") == IGNORE_NAME and info.isreg() and not found:
            file = tar.extractfile(info)
            found = file.read(IGNORE_MAX_BYTES) if file is not None else b""
    return found


def _the_dockerfile(packed: IO[bytes], dockerfile: str) -> bytes:
    """Its content, where the engine can find no other by that name."""
    packed.seek(0)
    links, parents, found = set[str](), set[str](), list[bytes | None]()
    with tarfile.open(fileobj=packed, mode="r:") as tar:
        for info in tar:
            name = posixpath.normpath("/" + info.name).lstrip("/")
            links |= {name} if info.issym() else set()
            parents |= set(_above(name))
            if name == dockerfile:
                file = tar.extractfile(info) if info.isreg() else None
                found.append(file.read(DOCKERFILE_MAX_BYTES + 1) if file else None)
    if links & parents:
        raise InvalidRequest("the context has entries below a link", field="archive")
    if len(found) != 1 or found[0] is None:
        raise InvalidRequest(f"the context has no one file {dockerfile}", field=BUILD_FIELD)
    return found[0]


def _above(name: str) -> Iterator[str]:
    while name := posixpath.dirname(name):
        yield name


def _matcher(ignore: bytes, dockerfile: str) -> PatternMatcher:
    lines = [line.strip() for line in ignore.decode(errors="replace").splitlines()]
    wanted = [line for line in lines if line and not line.startswith("#")]
    stars = max((len(re.findall(r"\*+", line)) for line in wanted), default=0)
    if len(wanted) > IGNORE_PATTERNS_MAX or stars > IGNORE_STARS_MAX:
        raise InvalidRequest(
            f"{IGNORE_NAME} has over {IGNORE_PATTERNS_MAX} patterns, or one of over "
            f"{IGNORE_STARS_MAX} wildcards", field="archive",
        )  # fmt: skip
    return PatternMatcher([*wanted, f"!{dockerfile}"])
