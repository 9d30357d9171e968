"""Copies of writable layers: exact, and brought up to date by what changed only."""

from __future__ import annotations

import gc
import os
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.edge.snapshots import mirror
from services.edge.snapshots.mirror import Cancelled, Mirror, mapped_for_writing
from shared.erofs.verify import data_spans
from shared.errors import Conflict

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners and devices need root")


Made = Callable[..., Mirror]


@pytest.fixture(params=["in turn", "side by side"])
def mirrored(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Contents one after the other, or all of them in threads."""
    if request.param == "in turn":
        yield Mirror
        return
    monkeypatch.setattr(mirror, "BESIDE_BYTES", 0)
    with ThreadPoolExecutor(2) as threads:
        yield partial(Mirror, threads=threads)


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    """A folder with one of everything that overlay leaves in a writable layer."""
    made = tmp_path / "upper"
    (made / "deep/er").mkdir(parents=True)
    (made / "deep/er/file").write_bytes(b"content")
    (made / "deep/other").hardlink_to(made / "deep/er/file")
    (made / "link").symlink_to("/etc/shadow")
    os.mknod(made / "gone", stat.S_IFCHR, 0)
    os.mknod(made / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mkfifo(made / "pipe", 0o640)
    (made / "opaque").mkdir(mode=0o751)
    os.setxattr(made / "opaque", "trusted.overlay.opaque", b"y")
    os.setxattr(made / "opaque", "trusted.overlay.origin", b"meaningless elsewhere")
    with (made / "sparse").open("wb") as file:
        file.truncate(8 << 20)
        os.pwrite(file.fileno(), b"x" * 4096, 4 << 20)
    odd = made / os.fsdecode(b"\xff name\n")
    odd.write_bytes(b"odd")
    os.chown(odd, 70_000, 4_000_000_000)
    odd.chmod(0o4755)
    os.setxattr(odd, "user.note", b"kept")
    os.utime(odd, ns=(1, 1_700_000_000_123_456_789))
    os.utime(made / "deep", ns=(1, 1_600_000_000_000_000_001))
    return made


def facts(root: Path) -> dict[bytes, Any]:
    """Everything of every entry that a layer keeps."""
    found: dict[bytes, Any] = {}
    names: dict[int, bytes] = {}
    places = [os.fsencode(root)]
    for at, folders, files in os.walk(os.fsencode(root)):
        places += [os.path.join(at, name) for name in (*folders, *files)]
    for place in sorted(places):
        status = os.lstat(place)
        keys = {k for k in os.listxattr(place, follow_symlinks=False) if "origin" not in k}
        fact: list[Any] = [status.st_mode, status.st_uid, status.st_gid, status.st_rdev]
        fact += [status.st_mtime_ns, sorted(keys)]
        if stat.S_ISREG(status.st_mode):
            with open(place, "rb") as file:
                fact += [file.read(), data_spans(file.fileno(), status.st_size)]
        if stat.S_ISLNK(status.st_mode):
            fact.append(os.readlink(place))
        if not stat.S_ISDIR(status.st_mode):
            fact.append(names.setdefault(status.st_ino, place.removeprefix(os.fsencode(root))))
        found[place.removeprefix(os.fsencode(root))] = fact
    return found


def test_a_copy_is_exact(upper: Path, tmp_path: Path, mirrored: Made) -> None:
    mirrored(upper, tmp_path / "copy").bring_up(still=True)
    assert facts(tmp_path / "copy") == facts(upper)


def test_a_second_pass_copies_what_changed_and_nothing_else(
    upper: Path, tmp_path: Path, mirrored: Made
) -> None:
    (upper / "large").write_bytes(bytes(1 << 20))
    time.sleep(mirror.SETTLED_NS / 1e9 * 2)
    copy = mirrored(upper, tmp_path / "copy")
    assert copy.bring_up().bytes > 1 << 20
    assert copy.bring_up(still=True).bytes == 0
    (upper / "deep/er/file").write_bytes(b"changed")
    (upper / "deep/new").write_bytes(b"new")
    (upper / "pipe").unlink()
    (upper / "pipe").mkdir()
    (upper / "pipe/inside").write_bytes(b"")
    (upper / "opaque").rmdir()
    (upper / "link").unlink()
    (upper / "link").hardlink_to(upper / "deep/other")
    done = copy.bring_up(still=True)
    assert done.bytes == len(b"changed" + b"new")
    assert facts(tmp_path / "copy") == facts(upper)


def test_hard_links_that_are_made_and_broken_are_followed(
    upper: Path, tmp_path: Path, mirrored: Made
) -> None:
    copy = mirrored(upper, tmp_path / "copy")
    copy.bring_up()
    (upper / "deep/other").unlink()
    (upper / "deep/other").write_bytes(b"its own now")
    (upper / "a first name").hardlink_to(upper / "sparse")
    copy.bring_up(still=True)
    assert facts(tmp_path / "copy") == facts(upper)


def test_what_is_mapped_is_copied_whatever_its_times_say(
    upper: Path, tmp_path: Path, mirrored: Made
) -> None:
    import mmap

    file = upper / "mapped"
    file.write_bytes(bytes(4096))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 4096) as memory:
        memory[0] = 1
        time.sleep(mirror.SETTLED_NS / 1e9 * 2)
        copy = mirrored(upper, tmp_path / "copy")
        copy.bring_up()
        memory[0] = 2  # the page is writable already: no time changes
        assert file.stat().st_ino in mapped_for_writing([os.getpid()], Path("/"))
        copy.bring_up(hot=[file.stat().st_ino], still=True)
        assert (tmp_path / "copy/mapped").read_bytes()[0] == 2


def test_a_link_that_takes_a_folders_place_leads_nowhere(
    upper: Path, tmp_path: Path, mirrored: Made
) -> None:
    """A workload may swap a folder for a link to a path of the host between two looks."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"host")
    copy = mirrored(upper, tmp_path / "copy")
    copy.bring_up()
    (upper / "deep/er/file").unlink()
    (upper / "deep/er").rmdir()
    (upper / "deep/er").symlink_to(secret)
    copy.bring_up(still=True)
    assert (tmp_path / "copy/deep/er").is_symlink()
    assert facts(tmp_path / "copy") == facts(upper)


def test_what_comes_and_goes_beside_it_is_no_error_until_it_should_stand_still(
    upper: Path, tmp_path: Path, mirrored: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Mirror._content

    def vanishing(self: Mirror, source: int, target: int, name: bytes) -> Future[int] | None:
        if name == b"file":
            os.unlink(name, dir_fd=source)
        return right(self, source, target, name)

    monkeypatch.setattr(Mirror, "_content", vanishing)
    copy = mirrored(upper, tmp_path / "copy")
    copy.bring_up()
    assert not (tmp_path / "copy/deep/er/file").exists()
    (upper / "deep/er/file").write_bytes(b"again")
    with pytest.raises(Conflict):
        copy.bring_up(still=True)


def test_it_ends_when_nobody_wants_it(upper: Path, tmp_path: Path, mirrored: Made) -> None:
    with pytest.raises(Cancelled):
        mirrored(upper, tmp_path / "copy", lambda: True).bring_up()


def test_a_copy_that_is_given_up_leaves_no_descriptor(
    upper: Path, tmp_path: Path, mirrored: Made
) -> None:
    (upper / "large").write_bytes(bytes(mirror.COPY_BYTES * 2))
    asked = iter([False] * 3)
    gc.collect()  # what others forgot must not go meanwhile
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Cancelled):
        mirrored(upper, tmp_path / "copy", lambda: next(asked, True)).bring_up()
    assert len(os.listdir("/proc/self/fd")) == before
