"""Git repositories in packed layers: what HEAD does not reach is gone, the rest works."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.edge.snapshots import gitobjects, scrubgit
from services.edge.snapshots.gitobjects import MALFORMED, Budget, Object, Pack, TooMuch
from services.edge.snapshots.scrub import Report
from services.edge.snapshots.scrubgit import scrub
from shared.erofs.dirlayer import DirectoryLayer
from shared.erofs.layertree import Inode, walk
from shared.errors import InvalidRequest, Unsupported


def git(cwd: Path, *words: str, **env: str) -> str:
    base = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    names = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL")
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "-c", "gc.auto=0", *words], cwd=cwd, check=True,
        capture_output=True, text=True, env=base | dict.fromkeys(names, "a@b") | env,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits on main, a later fix on a branch with a tag, something staged."""
    work = tmp_path / "root/workspace"
    work.mkdir(parents=True)
    git(work, "init", "-q", "-b", "main")
    rng = random.Random(1)
    for number in range(2):
        for name in range(5):
            lines = [f"{rng.random()}\n" for _ in range(300)]
            (work / f"f{name}").write_text("".join(lines) + f"version {number}\n")
        git(work, "add", "-A")
        git(work, "commit", "-qm", f"commit {number}")
    git(work, "checkout", "-qb", "solution")
    (work / "f0").write_text("the answer is 42\n")
    git(work, "commit", "-qam", "the fix")
    git(work, "tag", "-a", "v2", "-m", "annotated")
    git(work, "checkout", "-q", "main")
    (work / "staged").write_text("not committed yet\n")
    git(work, "add", "staged")
    return work


def put(root: Inode, folder: Path) -> None:
    """The tree as files."""
    for path, inode in walk(root):
        place = folder / os.fsdecode(path)
        if inode.is_dir:
            place.mkdir(exist_ok=True)
        elif inode.is_regular:
            place.write_bytes(scrubgit.content(inode))


def scrubbed(tree: Path, out: Path, below: Path | None = None) -> Report:
    def seen(path: bytes) -> bytes | None:
        place = (below or Path("/nonexistent")) / os.fsdecode(path)
        return place.read_bytes() if place.is_file() else None

    report = Report([])
    with DirectoryLayer(tree, entries_max=10_000) as layer:
        scrub(layer.tree.root, seen, report)
        out.mkdir(exist_ok=True)
        put(layer.tree.root, out)
    return report


def objects(work: Path) -> set[str]:
    text = git(
        work, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered"
    )
    return set(text.split())


@pytest.mark.parametrize("packed", ["loose", "packed", "both"])
def test_what_head_does_not_reach_is_gone(repository: Path, tmp_path: Path, packed: str) -> None:
    """(S02) Commits of other branches, tags, reflogs, what they name; HEAD, its history and
    what is staged stay, and git finds nothing wrong."""
    fix = git(repository, "rev-parse", "solution")
    if packed != "loose":
        git(repository, "repack", "-adq", "--depth=50", "--window=50")
        git(repository, "pack-refs", "--all")
    if packed == "both":
        words = ("commit-tree", "-p", "solution", "-m", "another fix", "solution^{tree}")
        git(repository, "update-ref", "refs/heads/solution", git(repository, *words))
    before = git(repository, "log", "--format=%H %s", "main")
    report = scrubbed(tmp_path / "root", tmp_path / "out")
    work = tmp_path / "out/workspace"
    assert git(work, "log", "--all", "--format=%H %s") == before
    reached = git(work, "rev-list", "--objects", "--no-object-names", "HEAD").split()
    assert objects(work) == {*reached, git(work, "rev-parse", ":staged")}
    assert fix not in objects(work)
    assert git(work, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert git(work, "reflog", "--all") == ""
    git(work, "fsck", "--strict", "--no-dangling")
    assert git(work, "status", "--porcelain") == "A  staged"
    found = b"".join(p.read_bytes() for p in work.rglob("*") if p.is_file())
    assert b"the answer is 42" not in found
    assert {one.rule for one in report.removed} == {"git"}
    assert report.count > 0


def test_a_change_over_a_repository_below_is_read_with_it(
    repository: Path, tmp_path: Path
) -> None:
    """Of a repository in the layers below only what the sandbox added is in the tree."""
    root, below = tmp_path / "root", tmp_path / "below"
    subprocess.run(["cp", "-a", str(root), str(below)], check=True)
    (repository / "f1").write_text("own work\n")
    git(repository, "commit", "-qam", "own")
    git(repository, "checkout", "-qb", "aside")
    git(repository, "commit", "-q", "--allow-empty", "-m", "aside")
    git(repository, "checkout", "-q", "main")
    diff, old = tmp_path / "diff", {p.relative_to(below) for p in below.rglob("*")}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        same = name in old and path.is_file() and path.read_bytes() == (below / name).read_bytes()
        if path.is_file() and not same:
            (diff / name).parent.mkdir(parents=True, exist_ok=True)
            (diff / name).write_bytes(path.read_bytes())
    aside = git(repository, "rev-parse", "aside")
    out = tmp_path / "out"
    scrubbed(diff, out, root)
    merged = tmp_path / "merged"
    subprocess.run(["cp", "-a", str(below), str(merged)], check=True)
    subprocess.run(["cp", "-a", f"{out}/.", str(merged)], check=True)
    work = merged / "workspace"
    assert git(work, "log", "-1", "--format=%s") == "own"
    assert aside not in objects(work)
    git(work, "fsck", "--no-dangling")


def test_a_repository_that_is_nothing_else_stays_as_it_is(
    repository: Path, tmp_path: Path
) -> None:
    git(repository, "branch", "-qD", "solution")
    git(repository, "tag", "-d", "v2")
    git(repository, "reflog", "expire", "--expire=now", "--all")
    git(repository, "repack", "-adq")
    git(repository, "prune", "--expire=now")
    packs = {p.name for p in repository.glob(".git/objects/pack/*")}
    scrubbed(tmp_path / "root", tmp_path / "out")
    assert {p.name for p in tmp_path.glob("out/workspace/.git/objects/pack/*")} == packs


@pytest.mark.parametrize("seed", range(6))
def test_what_is_malformed_is_refused_by_name(
    repository: Path, tmp_path: Path, seed: int
) -> None:
    git(repository, "repack", "-adq")
    rng = random.Random(seed)
    for path in repository.glob(".git/objects/pack/*"):
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        for _ in range(40):
            data[rng.randrange(8, len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(100, len(data))])
    with pytest.raises(InvalidRequest) as refused:
        scrubbed(tmp_path / "root", tmp_path / "out")
    assert refused.value.field == "scrub"


@pytest.mark.parametrize("packed", [False, True])
def test_other_ids_are_refused_by_name(tmp_path: Path, packed: bool) -> None:
    work = tmp_path / "root/workspace"
    work.mkdir(parents=True)
    git(work, "init", "-q", "--object-format=sha256")
    (work / "f").write_text("x")
    git(work, "add", "f")
    git(work, "commit", "-qm", "one")
    if packed:
        git(work, "repack", "-adq")
        git(work, "prune-packed")
    with pytest.raises(InvalidRequest) as refused:
        scrubbed(tmp_path / "root", tmp_path / "out")
    assert refused.value.field == "scrub"


def test_deltas_that_make_too_much_are_refused() -> None:
    for delta in (b"\x04\x7f\x90\x04", b"\x04\x04\x00", b"\x05\x01a", b"\x04\x02\x01a"):
        with pytest.raises(MALFORMED):
            gitobjects.patched(b"base", delta)


def pack_of(id: bytes, entry: bytes) -> tuple[bytes, bytes]:
    """A pack of one entry under ``id``, and its index."""
    data = struct.pack(">4sII", b"PACK", 2, 1) + entry
    data += hashlib.sha1(data).digest()
    fanout = b"".join(struct.pack(">I", first >= id[0]) for first in range(256))
    idx = b"\xfftOc\0\0\0\x02" + fanout + id + bytes(4) + struct.pack(">I", 12)
    return data, idx + bytes(40)


def test_a_delta_upon_itself_is_unpacked_once() -> None:
    id, ticks = b"\x11" * 20, 0

    def tick(_done: int) -> None:
        nonlocal ticks
        ticks += 1

    pack = Pack(*pack_of(id, b"\x74" + id + zlib.compress(b"\x04\x04\x90\x04")), Budget(tick=tick))
    with pytest.raises(ValueError, match="without end"):
        pack.read(id)
    assert ticks == 1


def test_an_object_under_another_ones_id_is_refused(repository: Path, tmp_path: Path) -> None:
    head, fix = (git(repository, "rev-parse", name) for name in ("main", "solution"))
    place, other = (repository / ".git/objects" / id[:2] / id[2:] for id in (head, fix))
    place.unlink()
    place.write_bytes(other.read_bytes())
    with pytest.raises(InvalidRequest, match="another one's id") as refused:
        scrubbed(tmp_path / "root", tmp_path / "out")
    assert refused.value.field == "scrub"
    pack = Pack(*pack_of(b"\x11" * 20, b"\x31" + zlib.compress(b"x")), Budget())
    with pytest.raises(ValueError, match="another one's id"):
        pack.read(b"\x11" * 20)


@pytest.mark.parametrize("name", ["packed-refs", "refs/heads/x", "HEAD", "index"])
def test_files_are_read_within_bounds_whatever_size_they_claim(
    repository: Path, tmp_path: Path, name: str
) -> None:
    with (repository / ".git" / name).open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(Unsupported) as refused:
        scrubbed(tmp_path / "root", tmp_path / "out")
    assert refused.value.field == "scrub"


def test_objects_that_stay_are_read_one_by_one_within_the_budget() -> None:
    read: list[bytes] = []

    def content(id: bytes) -> Object:
        read.append(id)
        return Object(b"blob", random.Random(id).randbytes(1000))

    ids = [bytes([number]) * 20 for number in range(100)]
    with pytest.raises(TooMuch):
        gitobjects.written(ids, content, Budget(held_bytes=5000))
    assert read == ids[: len(read)]
    assert len(read) < 10


def test_what_is_unpacked_is_within_the_budget() -> None:
    id = Object(b"blob", b"x" * 15).id
    data, idx = pack_of(id, b"\x3f" + zlib.compress(b"x" * 15))
    assert Pack(data, idx, Budget(unpacked_bytes=15)).read(id).content == b"x" * 15
    with pytest.raises(TooMuch):
        Pack(data, idx, Budget(unpacked_bytes=14)).read(id)


def test_links_lead_nowhere(tmp_path: Path) -> None:
    def folders() -> Iterator[Path]:
        for name in ("HEAD", "objects", "refs", "index", "packed-refs"):
            work = tmp_path / name / ".git"
            work.mkdir(parents=True)
            (work / name).symlink_to("/etc/passwd")
            yield tmp_path / name

    for folder in list(folders()):
        scrubbed(folder, folder.with_suffix(".out"))
