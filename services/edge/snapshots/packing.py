"""From the copy of what a sandbox changed to a layer's files where they are wanted.

Owns: one tree of several folders, the scrub of it, writing and checking the layer, putting
it to its place. Does not own: the copy (the driver's), the store, who may pack. Blocking;
called in threads. The live sandbox is not touched: everything here is about its copy.
"""

from __future__ import annotations

import http.client
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from schemas.control import UploadTarget
from services.edge.snapshots import scrub, scrubgit
from shared.blobs.layout import CHUNKS_NAME, DATA_NAME, META_NAME, LayerFiles, LayerManifest
from shared.blobs.scratch import disk_errors
from shared.erofs.collapse import merged
from shared.erofs.dirlayer import DirectoryLayer
from shared.erofs.kernelmount import open_beneath
from shared.erofs.layertree import Inode
from shared.erofs.writer import build_layer
from shared.errors import InvalidRequest, Unavailable

ENTRIES_MAX = 2_000_000
SEEN_BYTES_MAX = 1 << 20
PUT_S = 60.0
"""A store that takes nothing for so long has failed."""
PUT_TRIES = 3
PUT_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Packed:
    """A layer that is where it was wanted, and what was left out of it."""

    manifest: LayerManifest
    report: scrub.Report


@dataclass(frozen=True, slots=True)
class Scrub:
    """What to leave out. ``root``: where the sandbox's files are seen, to tell which of
    git's objects are needed; ``None``: git's objects stay."""

    rules: Sequence[scrub.Rule] = ()
    root: Path | None = None


def pack(
    folders: Sequence[Path], target: UploadTarget, *, leave_out: Scrub, scratch: Path,
    tick: Callable[[int], None],
) -> Packed:  # fmt: skip
    """Makes one layer of ``folders`` (bottom to top) and puts it to ``target``. ``scratch``
    is a folder to work in where that is remote; ``tick`` is called often and may raise.

    Raises ``Unavailable`` (the store is full or away), ``Unsupported`` (what no layer can
    hold) or ``Internal`` (the result differs from the copy); then nothing is left there."""
    place = _emptied(Path(target.folder) if target.folder is not None else scratch)
    with ExitStack() as stack:
        root = _tree(folders, stack)
        report = scrub.scrub(root, leave_out.rules, tick=tick)
        if leave_out.root is not None:
            scrubgit.scrub(root, partial(_seen, leave_out.root), report, tick=tick)
        try:
            with disk_errors():
                files = build_layer(root, place, progress=tick)
                _hand_over(place)
        except BaseException:
            _emptied(place)
            raise
    if target.folder is None:
        _put(files, target.urls)
    return Packed(files.manifest(), report)


def _emptied(folder: Path) -> Path:
    """Without what an earlier attempt left there."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    return folder


def _tree(folders: Sequence[Path], stack: ExitStack) -> Inode:
    roots = [
        stack.enter_context(DirectoryLayer(folder, entries_max=ENTRIES_MAX)).tree.root
        for folder in folders
    ]
    tree = roots[0]
    for above in roots[1:]:
        tree = merged(tree, above, keep_whiteouts=True)
    return tree


def _seen(root: Path, path: bytes) -> bytes | None:
    """A small file of the sandbox as it sees it; no link leads out of it."""
    try:
        top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = open_beneath(top, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        finally:
            os.close(top)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        whole = stat.S_ISREG(os.fstat(fd).st_mode)
        return file.read(SEEN_BYTES_MAX) if whole else None


def _hand_over(folder: Path) -> None:
    """To the folder's owner, who need not be root as we are."""
    owner = folder.stat()
    for path in folder.iterdir():
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _put(files: LayerFiles, urls: Mapping[str, str]) -> None:
    paths = {
        META_NAME: files.meta_path, DATA_NAME: files.data_path, CHUNKS_NAME: files.chunks_path
    }
    for name, path in paths.items():
        if path is None:
            continue
        if name not in urls:
            raise InvalidRequest(f"no place for {name}", field="target")
        _put_file(urls[name], path)


def _put_file(url: str, path: Path) -> None:
    for left in reversed(range(PUT_TRIES)):
        try:
            _put_once(url, path)
            return
        except (OSError, http.client.HTTPException, Unavailable) as error:
            if not left:
                why = error.message if isinstance(error, Unavailable) else repr(error)
                raise Unavailable(f"the store takes no layer: {why}", cause="image") from error


def _put_once(url: str, path: Path) -> None:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=PUT_S, blocksize=PUT_BLOCK_BYTES)
    try:
        with path.open("rb") as body:
            size = os.fstat(body.fileno()).st_size
            where = f"{parts.path}?{parts.query}" if parts.query else parts.path
            connection.request("PUT", where, body=body, headers={"Content-Length": str(size)})
            answer = connection.getresponse()
            answer.read()
        if answer.status >= http.HTTPStatus.MULTIPLE_CHOICES:
            raise Unavailable(f"{answer.status} {answer.reason}")
    finally:
        connection.close()

