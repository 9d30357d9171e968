"""A git repository rebuilt at one commit.

Owns: a fresh repository whose objects are exactly what the commit reaches: no
later commit, tag, remote, reflog or hook of the source. Does not own: which
commit a task starts from. Files get the commit's time, so that the same commit
gives the same layer.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from shared.errors import DeadlineExceeded, Internal, InvalidRequest, NotFound, Unsupported

FIELD = "git"
GIT_TIMEOUT_S = 900
_REVISION = re.compile(r"[0-9A-Za-z][0-9A-Za-z._/@{}~^-]{0,199}", re.ASCII)
_UPLOAD_PACK = "git -c safe.directory=* -c uploadpack.allowAnySHA1InWant=true upload-pack"


def rebuild(source: Path, revision: str, target: Path) -> int:
    """Check ``revision`` of ``source``, a repository or a bundle, out into ``target``;
    returns the commit time (seconds).

    Raises :class:`InvalidRequest`, :class:`NotFound` (commit), :class:`Unsupported`
    (no git here), ``Internal`` where an object is left that the commit does not reach.
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


def _git(cwd: Path, *arguments: str) -> str:
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CEILING_DIRECTORIES": str(cwd.absolute().parent),
    }
    base = ("git", "-c", "safe.directory=*", "-c", "core.logAllRefUpdates=false",
            "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")  # fmt: skip
    try:
        done = subprocess.run(
            [*base, *arguments], cwd=cwd, env=environment, capture_output=True, text=True,
            errors="replace", umask=0o022, timeout=GIT_TIMEOUT_S, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise Unsupported("git is not installed here", field=FIELD) from error
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"git {arguments[0]} took over {GIT_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise InvalidRequest(f"git: {done.stderr.strip()[-500:]}", field=FIELD)
    return done.stdout.strip()
