"""A git repository rebuilt at one commit.

Owns: a fresh repository whose objects are exactly what the commit reaches: no
later commit, tag, remote, reflog or hook of the source. Does not own: which
commit a task starts from. Files get the commit's time, so that the same commit
gives the same layer.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import cast

from shared.errors import DeadlineExceeded, Internal, InvalidRequest, NotFound, Unsupported

FIELD = "git"
GIT_TIMEOUT_S = 900
PIECE_BYTES = 64 * 1024
_GIT = ("git", "-c", "safe.directory=*", "-c", "core.logAllRefUpdates=false",
        "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")  # fmt: skip
_REVISION = re.compile(r"[0-9A-Za-z][0-9A-Za-z._/@{}~^-]{0,199}", re.ASCII)
_UPLOAD_PACK = "git -c safe.directory=* -c uploadpack.allowAnySHA1InWant=true upload-pack"


def rebuild(
    source: Path, revision: str, target: Path, *, entries_max: int, bytes_max: int
) -> int:
    """Check ``revision`` of ``source``, a repository or a bundle, out into ``target``;
    returns the commit time (seconds).

    Raises :class:`InvalidRequest` (also over a limit), :class:`NotFound` (commit),
    :class:`Unsupported` (no git here), ``Internal`` where an object is left that the commit
    does not reach.
    """
    if not _REVISION.fullmatch(revision):
        raise InvalidRequest(f"{revision!r} is not a revision", field="commit")
    bundled = source.is_file()
    if not bundled and not source.is_dir():
        raise InvalidRequest(f"{source} is neither a repository nor a bundle", field=FIELD)
    commit, wanted = _bundled(source, revision) if bundled else _resolve(source, revision)
    target.mkdir()
    _git(target, "init", "-q", "--template=", "-b", "main")
    _git(
        target, "-c", "protocol.file.allow=always", "fetch", "-q", "--no-tags",
        "--no-write-fetch-head", "--no-recurse-submodules", "--upload-pack", _UPLOAD_PACK,
        "--", str(source.absolute()), wanted,
    )  # fmt: skip
    _check_size(target, commit, entries_max, bytes_max)
    _git(target, "update-ref", "refs/heads/main", commit)
    _git(target, "-c", "pack.threads=1", "repack", "-adq")
    # The index is written without file times: they would differ with each import.
    _git(target, "read-tree", commit)
    _git(target, "checkout-index", "-aq")
    _prove(target, commit)
    return int(_git(target, "show", "-s", "--format=%ct", commit))


def _bundled(source: Path, revision: str) -> tuple[str, str]:
    """The commit that a bundle's head is; a bundle is made of one commit."""
    listed = _git(source.parent, "bundle", "list-heads", str(source.absolute()))
    for commit, *names in map(str.split, listed.splitlines()):
        if revision in (commit, *names):
            return commit, names[0]
    raise NotFound(f"the bundle has no head {revision!r}", field="commit")


def _resolve(source: Path, revision: str) -> tuple[str, str]:
    """The commit, twice: it is also what is fetched, whether or not a branch has it."""
    wanted = f"{revision}^{{commit}}"
    try:
        commit = _git(source, "rev-parse", "-q", "--verify", "--end-of-options", wanted)
    except InvalidRequest as error:
        raise NotFound(f"{source} has no commit {revision!r}", field="commit") from error
    return commit, commit


def _prove(target: Path, commit: str) -> None:
    """Raise unless the object database holds what the commit reaches and nothing else."""
    held = _git(
        target, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered"
    )
    reached = _git(target, "rev-list", "--objects", "--no-object-names", commit)
    extra = set(held.split()) - set(reached.split())
    if extra:
        raise Internal(f"{len(extra)} git objects that {commit} does not reach were left")
    if _git(target, "for-each-ref", "--format=%(refname)") != "refs/heads/main":
        raise Internal("a rebuilt repository has foreign refs")


def _check_size(target: Path, commit: str, entries_max: int, bytes_max: int) -> None:
    """Raise where the commit's files are too many or too large: a few small objects, each
    named often, may be more than any disk holds, and their list too. So that is not
    awaited."""
    listed = subprocess.Popen(
        [*_GIT, "ls-tree", "-r", "-t", "-l", "-z", commit], cwd=target, env=_environment(target),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    late = threading.Timer(GIT_TIMEOUT_S, listed.kill)
    late.start()
    try:
        _count(cast(io.BufferedReader, listed.stdout), entries_max, bytes_max)
    finally:
        late.cancel()
        listed.kill()
        listed.communicate()
    if listed.returncode != 0:
        raise InvalidRequest(f"git: the files of {commit} cannot be listed", field=FIELD)


def _count(listed: io.BufferedReader, entries_max: int, bytes_max: int) -> None:
    """Reads an ``ls-tree`` to its end, or to a limit: ``InvalidRequest``."""
    rest, entries, total = b"", 0, 0
    while piece := listed.read1(PIECE_BYTES):
        *lines, rest = (rest + piece).split(b"\0")
        entries += len(lines)
        total += len(piece) + sum(map(_file_bytes, lines))
        if entries > entries_max or total > bytes_max:
            raise InvalidRequest(
                f"the commit has over {entries_max} entries or {bytes_max} bytes", field=FIELD
            )


def _file_bytes(line: bytes) -> int:
    """The size in ``mode type object size<TAB>path``; that of folders is ``-``."""
    size = line.partition(b"\t")[0].rpartition(b" ")[2]
    return int(size) if size.isdigit() else 0


def _environment(cwd: Path) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CEILING_DIRECTORIES": str(cwd.absolute().parent),
    }


def _git(cwd: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [*_GIT, *arguments], cwd=cwd, env=_environment(cwd), capture_output=True, text=True,
            errors="replace", umask=0o022, timeout=GIT_TIMEOUT_S, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise Unsupported("git is not installed here", field=FIELD) from error
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"git {arguments[0]} took over {GIT_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise InvalidRequest(f"git: {done.stderr.strip()[-500:]}", field=FIELD)
    return done.stdout.strip()
