"""Which commands are worth a word to audit. Pure.

Owns: finding ways into git's history beyond the checked-out commit in the text of a
command. Does not own: whether that is anything bad (audit's rules). Only the bare form is
told (``git log --all``), nothing else of the text: commands may hold secrets.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

MAX_TEXT = 65_536
MAX_NOTED = 8
VERBS = frozenset({"log", "show", "rev-list", "reflog", "fsck", "fetch", "ls-remote", "branch",
                   "for-each-ref", "cat-file", "stash", "checkout", "diff"})  # fmt: skip
"""Verbs that can show what is not in the checked-out commit's history."""
ALWAYS = frozenset({"reflog", "fetch", "ls-remote"})
FLAGS = re.compile(
    r"--(all|reflog|lost-found|unreachable|dangling|remotes|batch-all-objects|walk-reflogs)\b.*"
)
REMOTE = re.compile(r"(origin|upstream)/.+|(ORIG_HEAD|FETCH_HEAD)(\W.*)?|.*@\{.*\}")
_CALL = re.compile(r"(?:^|[\s;&|(`])git\s+([^;&|)`\n]{1,1000})")
_WITH_VALUE = frozenset({"-C", "-c", "--git-dir", "--work-tree", "--namespace"})


def noted(argv: Sequence[str] | None, shell: str | None) -> list[str]:
    """The bare forms of what is worth a word in one command, each once."""
    if "git" not in (shell or "") and not any("git" in word for word in argv or ()):
        return []  # nearly every command
    found: dict[str, None] = {}
    for words in _calls(argv, shell):
        if (form := _form(words)) is not None:
            found.setdefault(form)
    return list(found)[:MAX_NOTED]


def _calls(argv: Sequence[str] | None, shell: str | None) -> Iterator[list[str]]:
    """The arguments of each call of git."""
    if argv and argv[0].rpartition("/")[2] == "git":
        yield list(argv[1:])
        return
    text = shell if shell is not None else " ".join(argv or ())
    for match in _CALL.finditer(text[:MAX_TEXT]):
        try:
            yield shlex.split(match[1])
        except ValueError:  # an open quote: a text that holds a call, perhaps
            yield match[1].split()


def _form(words: list[str]) -> str | None:
    rest = iter(words)
    verb = next((w for w in _plain(rest)), None)
    if verb not in VERBS:
        return None
    for word in rest:
        if flag := FLAGS.match(word):
            return f"git {verb} --{flag[1]}"
        if named := REMOTE.match(word):
            return f"git {verb} {named[1]}/…" if named[1] else f"git {verb} {named[2] or '@{…}'}"
    return f"git {verb}" if verb in ALWAYS else None


def _plain(words: Iterator[str]) -> Iterator[str]:
    """Words that are no options of git itself."""
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            yield word
