"""``client.images``: images, workspaces and toolkits.

Owns: where they come from and go to, as arguments. Does not own: transfers
(:mod:`libdsec._transfers`), packing of local files (:mod:`libdsec._packing`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from libdsec import _ids, _packing, _transfers
from libdsec._calls import Attempts
from libdsec._manager import Manager, make, present
from libdsec._wire import (
    Blob,
    HotSet,
    HotSetQuery,
    ImageCreate,
    ImageDelete,
    ImageExport,
    ImageInfo,
    ImageQuery,
    ImageReply,
    ImageTag,
)
from libdsec.args import Seconds, seconds
from libdsec.errors import Forbidden, InvalidRequest, NotFound

IMPORT_S = 600.0
"""Longest silence of a running import or export (its progress starts the time anew)."""
IMPORT_RESEND_S = 60.0
EXPORT_LOOK_S, EXPORT_LOOK_MAX_S = 0.05, 1.0
"""Between two looks at an export, at first and later."""
SOURCES = ("path", "oci", "git", "dockerfile", "docker", "registry")

OnProgress = Callable[[float, str], None]
"""Called with a share 0…1 and the name of the stage."""
StrPath = str | os.PathLike[str]


@dataclass
class _Wanted:
    """Where an image comes from: fields of the request, and the local path to upload."""

    facts: dict[str, Any] = field(default_factory=dict)
    local: Path | None = None


def _nothing(share: float, stage: str) -> None:
    """No one listens."""


class Images(Manager):
    """``client.images``. A name is ``name[:tag]``."""

    _entity = "image"

    async def create(
        self,
        name: str,
        *,
        path: StrPath | None = None,
        oci: StrPath | None = None,
        docker: str | None = None,
        git: StrPath | None = None,
        registry: str | None = None,
        dockerfile: StrPath | None = None,
        upload: bool = False,
        reference: str | None = None,
        commit: str | None = None,
        context: StrPath | None = None,
        target: str | None = None,
        kind: Literal["base", "workspace", "toolkit"] = "base",
        prefix: str | None = None,
        config: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> ImageInfo:
        """Registers an image, workspace or toolkit from exactly one source.

        ``path``: a directory, layer tar, ``docker save`` archive or OCI layout. ``oci``:
        only the last two; ``reference`` chooses one image of several. ``git``: a
        repository, rebuilt at ``commit`` without what came later. ``dockerfile``: built
        with its folder, or ``context``, up to ``target``. ``docker``: an image of the
        engine beside the image service. ``registry``: ``host/repository[:tag][@digest]``.

        Files are those of the image service's machine; with ``upload`` they are this
        one's and handed over first, going on where an earlier attempt broke off.
        ``prefix``: where a workspace or toolkit lands. A name that there is comes to mean
        the new image at once; sandboxes that run keep theirs.
        """
        given = dict(zip(SOURCES, (path, oci, git, dockerfile, docker, registry), strict=True))
        wanted = _wanted(
            given, upload=upload, reference=reference, commit=commit, context=context,
            target=target,
        )  # fmt: skip
        report = on_progress or _nothing
        with ExitStack() as stack:
            if wanted.local is not None:
                await self._check(name)
                wanted.facts["upload"] = await self._upload(wanted, stack, report)
            request = make(
                ImageCreate, request_id=_ids.new(), name=name, kind=kind, prefix=prefix,
                config=config, **wanted.facts,
            )  # fmt: skip

        def tell(reply: ImageReply) -> None:
            if reply.progress is not None:
                report(reply.progress, reply.stage)

        reply = await self._change(
            "create",
            request,
            type_=ImageReply,
            timeout_s=IMPORT_S,
            resend_s=IMPORT_RESEND_S,
            done=lambda r: r.image is not None,
            progress=tell,
        )
        return present(reply.image, "image")  # type: ignore[no-any-return]

    async def _check(self, name: str) -> None:
        """A name that cannot be is refused before gigabytes are handed over for it."""
        with suppress(NotFound, Forbidden):
            await self.get(name)

    async def _upload(self, wanted: _Wanted, stack: ExitStack, report: OnProgress) -> Blob:
        assert wanted.local is not None
        id, pieces, total = await asyncio.to_thread(_pieces, wanted, stack)
        report(0.0, "uploading")
        return await _transfers.upload(
            self._core, self._core.config.project, id, pieces,
            lambda done: report(min(1.0, done / max(1, total)), "uploading"),
        )  # fmt: skip

    async def get(self, name: str) -> ImageInfo:
        """One image. Raises ``NotFound``."""
        reply = await self._read("get", make(ImageQuery, name=name), ImageReply)
        image = reply.image or next(iter(reply.images or []), None)
        if image is None:
            raise NotFound(f"there is no image {name!r}", field="name")
        return image  # type: ignore[no-any-return]

    async def list(self, *, kind: str | None = None) -> Sequence[ImageInfo]:
        """Images of the project and those above it."""
        reply = await self._read("list", make(ImageQuery, kind=kind), ImageReply)
        return reply.images or []

    async def tag(self, name: str, target: str) -> ImageInfo:
        """Has ``target`` mean what ``name`` means now, at once and whole; nothing is
        copied. Sandboxes that run keep what they were started from."""
        request = make(ImageTag, request_id=_ids.new(), name=name, target=target)
        reply = await self._change("tag", request, type_=ImageReply)
        return present(reply.image, "image")  # type: ignore[no-any-return]

    async def delete(self, name: str) -> None:
        """Removes the name; layers go when nothing uses them."""
        request = make(ImageDelete, request_id=_ids.new(), name=name)
        await self._change("delete", request, type_=ImageReply)

    async def export(
        self, name: str | Sequence[str], path: StrPath, *, on_progress: OnProgress | None = None
    ) -> int:
        """Writes an image, or an environment of several (bottom to top), to ``path``: an
        archive that is both an OCI layout and what ``docker load`` takes. Returns its
        size in bytes. ``path`` is there whole or as it was before."""
        names = [name] if isinstance(name, str) else [*name]
        report = on_progress or _nothing
        wanted = await self._exported(make(ImageExport, names=names), report)
        await _transfers.download(
            self._core, self._core.config.project, wanted, Path(path),
            lambda done: report(done / max(1, wanted.size_bytes), "downloading"),
        )  # fmt: skip
        return wanted.size_bytes

    async def hot_set(self, *, share: float = 0.8, since_s: Seconds | None = None) -> HotSet:
        """The smallest set of layers that serves ``share`` of the sandboxes started lately
        (``since_s``: a week), in all projects, with the parts that are read of them:
        what to have where sandboxes are to go next. For operators: a grant at the root."""
        query = make(HotSetQuery, share=share, since_s=seconds(since_s, "since_s"))
        return await self._read("hot_set", query, HotSet)  # type: ignore[no-any-return]

    async def _exported(self, query: ImageExport, report: OnProgress) -> Blob:
        clock, wait_s, last = Attempts(IMPORT_S), EXPORT_LOOK_S, -1.0
        while True:
            reply = await self._read("export", query, ImageReply)
            if reply.export is not None:
                return reply.export  # type: ignore[no-any-return]
            share = reply.progress or 0.0
            if share != last:
                clock.alive()
                last = share
                report(share, reply.stage)
            if not clock.remaining():
                await clock.pause(TimeoutError(), "the export has not gone on")
            await asyncio.sleep(wait_s)
            wait_s = min(EXPORT_LOOK_MAX_S, wait_s * 1.5)


def _wanted(
    given: Mapping[str, Any], *, upload: bool, reference: str | None, commit: str | None,
    context: StrPath | None, target: str | None,
) -> _Wanted:  # fmt: skip
    """Arguments as fields of a request. Raises ``InvalidRequest``."""
    named = {key: os.fspath(value) for key, value in given.items() if value is not None}
    if len(named) != 1:
        raise InvalidRequest(f"name one of {', '.join(SOURCES)}", field="path")
    ((source, value),) = named.items()
    if upload and source in ("docker", "registry"):
        raise InvalidRequest(f"{source} is not on this machine", field="upload")
    if context is not None and source != "dockerfile":
        raise InvalidRequest("context goes with dockerfile", field="context")
    facts = {"reference": reference, "commit": commit, "target": target}
    if source in ("docker", "registry"):
        return _Wanted(facts | {source: value})
    facts["form"] = {"oci": "image", "path": None}.get(source, source)
    if source == "dockerfile":
        folder = os.fspath(context) if context is not None else os.path.dirname(value) or "."
        inside = os.path.relpath(value, folder)
        facts["dockerfile"], value = inside, folder
    if upload:
        return _Wanted(facts, Path(value))
    return _Wanted(facts | {"path": value})


def _pieces(wanted: _Wanted, stack: ExitStack) -> tuple[str, Iterator[bytes], int]:
    """What to send: an id for it, its bytes, about how many they are."""
    path = wanted.local
    assert path is not None
    if wanted.facts.get("form") == "git":
        path, commit = stack.enter_context(
            _packing.bundle(path, wanted.facts["commit"] or "HEAD")
        )
        wanted.facts["commit"] = commit
        return _transfers.new_id(), _transfers.file_pieces(path), path.stat().st_size
    if path.is_dir():
        if wanted.facts.get("form") is None and not _packing.is_layout(path):
            wanted.facts["form"] = "tree"
        return _transfers.new_id(), _packing.tar_pieces(path), _packing.tree_bytes(path)
    if not path.is_file():
        raise InvalidRequest(f"{path} is neither a file nor a directory", field="path")
    return _transfers.file_id(path), _transfers.file_pieces(path), path.stat().st_size
