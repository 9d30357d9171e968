"""The proof that overlay on this node's file systems does what a sandbox relies on.

Owns: two tiny layers, what must be seen through them, in words what was not. Does not own:
what follows from it (the driver). Kernels and file systems differ in whiteouts, attributes
and kinds of entries; what they get wrong shows as files that were deleted and are there, in
environments that are then packed and passed on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from services.edge.drivers.base import Layer
from services.edge.layers.mounts import LayerMounts, Upper, compose
from shared.blobs.layout import LayerFiles
from shared.erofs.dirlayer import DirectoryLayer
from shared.erofs.writer import build_layer
from shared.errors import DsecError

OPAQUE, CAPABILITY = "trusted.overlay.opaque", "security.capability"
CAPABLE: Final = bytes.fromhex("0100000200200000000000000000000000000000")
"""A file capability (net_raw) as the kernel stores it."""
ENTRIES_MAX: Final = 100


def prove(folder: Path) -> str | None:
    """Makes two layers and a root of them whose writable part is in ``folder``, which is on
    the file system of the sandboxes. What is wrong, ``None`` where nothing is. Blocking,
    some 50 ms."""
    # layers need not be on that file system, and not every one can hold them
    for place in (folder, Path(tempfile.gettempdir())):
        try:
            with _emptied_after(place) as made:
                layers = [_layer(made / "base", _base), _layer(made / "change", _change)]
                return _prove(folder, layers)
        except (OSError, DsecError) as err:
            why = f"layers cannot be made and mounted on this node: {_text(err)}"
    return why


def _prove(folder: Path, layers: list[Layer]) -> str | None:
    mounts = LayerMounts(idle_max=0)
    with _emptied_after(folder) as work:
        upper = Upper(work / "sandbox")
        try:
            upper.make()
            root = compose(mounts, layers, upper)
        except (OSError, DsecError) as err:
            return f"overlay does not work on this node: {_text(err)}"
        try:
            wrong = list(examine(Path(f"/proc/self/fd/{root}"), upper.upper))
        finally:
            os.close(root)
            mounts.close()
    return f"overlay on this node cannot be trusted: {'; '.join(wrong)}" if wrong else None


@contextlib.contextmanager
def _emptied_after(folder: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _text(err: Exception) -> str:
    return err.message if isinstance(err, DsecError) else os.strerror(getattr(err, "errno", 0))


def examine(root: Path, upper: Path) -> Iterator[str]:
    """What is not as it must be in ``root``, made of the two layers of this module and
    ``upper``; an attempt that fails is told as one."""
    checks: tuple[tuple[str, Callable[[Path, Path], str | None]], ...] = (
        ("a deleted name", _deleted), ("a replaced directory", _replaced),
        ("kinds of entries", _kinds), ("a changed file", _changed), ("hard links", _linked),
        ("a name deleted now", _deleted_now),
    )  # fmt: skip
    for what, check in checks:
        try:
            wrong = check(root, upper)
        except OSError as err:
            wrong = os.strerror(err.errno or 0)
        if wrong is not None:
            yield f"{what}: {wrong}"


def _layer(tree: Path, make: Callable[[Path], None]) -> Layer:
    tree.mkdir()
    make(tree)
    place = tree.with_suffix(".layer")
    place.mkdir()
    with DirectoryLayer(tree, entries_max=ENTRIES_MAX) as source:
        files: LayerFiles = build_layer(source.tree.root, place)
    data = str(files.data_path) if files.data_path else None
    return Layer(files.manifest().digest, str(files.meta_path), data)


def _base(tree: Path) -> None:
    (tree / "gone").write_text("base")
    for name in ("gone.d", "new.d", "kept.d"):
        (tree / name).mkdir()
        (tree / name / "old").write_text("base")
    file = tree / "kept"
    file.write_text("base")
    file.chmod(0o4750)
    os.chown(file, 1000, 2000)
    os.setxattr(file, CAPABILITY, CAPABLE)
    (tree / "one").write_text("base")
    os.link(tree / "one", tree / "two")
    (tree / "link").symlink_to("kept")


def _change(tree: Path) -> None:
    for name in ("gone", "gone.d"):
        os.mknod(tree / name, stat.S_IFCHR, os.makedev(0, 0))
    (tree / "new.d").mkdir()
    (tree / "new.d" / "new").write_text("change")
    os.setxattr(tree / "new.d", OPAQUE, b"y")


def _deleted(root: Path, _upper: Path) -> str | None:
    if {"gone", "gone.d"} & set(os.listdir(root)):
        return "it is listed"
    if any((root / name).exists() for name in ("gone", "gone.d", "gone.d/old")):
        return "it is found"
    return None


def _replaced(root: Path, _upper: Path) -> str | None:
    if os.listdir(root / "new.d") != ["new"]:
        return "it shows what was there before"
    if any(name.startswith("trusted.overlay.") for name in os.listxattr(root / "new.d")):
        return "its mark shows"
    return None


def _kinds(root: Path, upper: Path) -> str | None:
    (upper / "probe").mkdir()
    for folder, name in ((root, "kept.d"), (upper, "probe")):
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if entry.name == name]
        if not found or not found[0].is_dir(follow_symlinks=False):
            return "a directory is listed as something else"
    (upper / "probe").rmdir()
    return None if (root / "link").is_symlink() else "a link is listed as something else"


def _changed(root: Path, upper: Path) -> str | None:
    with (root / "kept").open("a") as file:
        file.write("+")
    # written in two steps, for a write takes capabilities away
    os.setxattr(root / "kept", CAPABILITY, CAPABLE)
    for place in (root / "kept", upper / "kept"):
        status = place.stat()
        if place.read_text() != "base+":
            return "its content is another"
        if (status.st_uid, status.st_gid) != (1000, 2000):
            return "its owner is another"
        if os.getxattr(place, CAPABILITY) != CAPABLE:
            return "its attributes are lost"
    os.chmod(root / "kept.d" / "old", 0o600)
    if (root / "kept.d" / "old").read_text() != "base":
        return "a file whose mode changed has lost its content"
    return None


def _linked(root: Path, _upper: Path) -> str | None:
    one, two = root / "one", root / "two"
    if one.read_text() != "base" or two.read_text() != "base":
        return "one has not its content"
    os.link(one, root / "three")
    if (root / "three").read_text() != "base" or not os.path.samefile(one, root / "three"):
        return "a new one is not the file"
    with (root / "three").open("a") as file:
        file.write("+")
    return None if one.read_text() == "base+" else "a change is not seen by its other name"


def _deleted_now(root: Path, upper: Path) -> str | None:
    os.unlink(root / "two")
    shutil.rmtree(root / "kept.d")
    if (root / "two").exists() or "two" in os.listdir(root):
        return "it is there"
    status = (upper / "two").lstat()
    if not stat.S_ISCHR(status.st_mode) or status.st_rdev != 0:
        return "nothing says so in the writable layer"
    (root / "kept.d").mkdir()
    if os.listdir(root / "kept.d"):
        return "what was in it comes back"
    with contextlib.suppress(OSError):
        if os.getxattr(upper / "kept.d", OPAQUE) == b"y":
            return None
    return "nothing says in the writable layer that it is new"
