"""What a grader sees of an agent's sandbox, and tells audit.

Owns: finding out what still runs and which files of the tests the work changes. Does not
own: what follows from it (audit's rules), the verdict (:mod:`libdsec.verify`): nothing
here can change a reward, and where audit cannot be told, grading goes on.
"""

from __future__ import annotations

import fnmatch
import logging
import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

from libdsec._wire import GradingObservation
from libdsec.client import DSecClient
from libdsec.errors import DSecError
from libdsec.sandbox import Sandbox

log = logging.getLogger("libdsec")

LOOK_S = 10.0
MAX_TOLD = 64
MAX_NAME = 256

# plain shell: the image may have no ps. Names as the kernel knows them, one a line. Left out
# are the looking shell itself, what is aether's (nobody in here can see what it executes),
# and the idle shells of sessions, which the trainer opened
_ALIVE = (
    'for p in /proc/[0-9]*; do n="${p#/proc/}"; [ "$n" = 1 ] || [ "$n" = $$ ] && continue; '
    'read -r c < "$p/comm" 2>/dev/null || continue; '
    'a=; IFS= read -r a 2>/dev/null < "$p/cmdline"; case "$a" in ""|*_dsec_how*) continue;; esac; '
    'case "$c" in aether*|"file operation") [ -e "$p/exe" ] || continue;; esac; '
    'printf "%s\\n" "$c"; done'
)

Edit = Literal["test_file_edited", "protected_file_edited"]


async def processes_alive(sandbox: Sandbox) -> list[GradingObservation]:
    """Commands that run in ``sandbox`` now, by name. Nothing where it cannot be said."""
    try:
        result = await sandbox.exec(_ALIVE, user="root", timeout=LOOK_S)
    except DSecError as exc:
        log.debug("what runs in %s is not known: %s", sandbox.id, exc)
        return []
    names = Counter(line[:MAX_NAME] for line in result.text.splitlines() if line)
    return [
        GradingObservation(what="process_alive", subject=name, count=count)
        for name, count in names.most_common(MAX_TOLD)
    ]


def edited_files(
    patch: bytes, *, tests: Iterable[str], protected: Iterable[str]
) -> list[GradingObservation]:
    """Files that ``patch`` (git's) changes and that are the tests' (by name) or match one
    of the ``protected`` patterns."""
    own, patterns = {posixpath.normpath(name) for name in tests}, tuple(protected)
    found: list[GradingObservation] = []
    for name in dict.fromkeys(_names(patch)):
        what = _kind(name, own, patterns)
        if what is not None and len(found) < MAX_TOLD:
            found.append(GradingObservation(what=what, subject=name[:MAX_NAME]))
    return found


def _kind(name: str, tests: set[str], patterns: tuple[str, ...]) -> Edit | None:
    if name in tests:
        return "test_file_edited"
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
        return "protected_file_edited"
    return None


def _names(patch: bytes) -> Iterator[str]:
    """Names in the headers of a patch's files. A line of content begins with a sign of
    its own, so none can be taken for a header but within a hunk, whose length is known."""
    left_old = left_new = 0
    for line in patch.split(b"\n"):
        if left_old > 0 or left_new > 0:
            left_old -= line[:1] in (b" ", b"-", b"")
            left_new -= line[:1] in (b" ", b"+", b"")
        elif line.startswith(b"@@ "):
            left_old, left_new = _lengths(line)
        elif line.startswith((b"--- a/", b"+++ b/")):
            yield _plain(line[6:])
        elif line.startswith((b'--- "a/', b'+++ "b/')):
            yield _plain(line[7:].rstrip(b'"'))
        elif line.startswith((b"rename from ", b"rename to ")):
            yield _plain(line.partition(b" ")[2].partition(b" ")[2])
        elif line.startswith(b"diff --git a/"):
            yield _plain(line.rpartition(b" b/")[2])


def _lengths(line: bytes) -> tuple[int, int]:
    """Lines that a hunk takes from the old and from the new file."""
    parts = line.split(b" ")
    counts = []
    for part in parts[1:3]:
        _, comma, count = part.partition(b",")
        counts.append(int(count) if comma and count.isdigit() else 1)
    return (counts[0], counts[1]) if len(counts) == 2 else (0, 0)


def _plain(name: bytes) -> str:
    return posixpath.normpath(name.rstrip(b"\t\r").decode("utf-8", "replace"))


async def tell(
    client: DSecClient, sandbox: Sandbox, observations: list[GradingObservation]
) -> None:
    """Tells audit, where there is something to tell and the client may."""
    if not observations:
        return
    try:
        await client.audit.report(sandbox.uid, observations, project=sandbox.project)
    except DSecError as exc:
        log.warning("audit was not told what was seen of %s: %s", sandbox.id, exc)
