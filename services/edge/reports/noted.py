"""Which commands are worth a word to audit. Pure.

Owns: finding in a command, or in what a program was executed with, ways into git's history
beyond the checked-out commit, and questions to package indexes for what is not installed.
Does not own: whether that is anything bad (audit's rules). Only the bare form is told
(``git log --all``), nothing else of the text: commands may hold secrets.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

MAX_TEXT = 65_536
MAX_NOTED = 8
VERBS = frozenset({"log", "show", "rev-list", "reflog", "fsck", "fetch", "ls-remote", "branch",
                   "for-each-ref", "cat-file", "stash", "checkout", "diff"})  # fmt: skip
"""Verbs of git that can show what is not in the checked-out commit's history."""
ALWAYS = frozenset({"reflog", "fetch", "ls-remote"})
UPKEEP = frozenset({"expire", "delete", "drop", "exists"})
"""Of ``reflog``: they show nothing, and git runs itself so."""
FLAGS = re.compile(
    r"--(all|reflog|lost-found|unreachable|dangling|remotes|batch-all-objects|walk-reflogs)\b.*"
)
REMOTE = re.compile(r"(origin|upstream)/.+|(ORIG_HEAD|FETCH_HEAD)(\W.*)?|.*@\{.*\}")
_WITH_VALUE = frozenset({"-C", "-c", "--git-dir", "--work-tree", "--namespace"})
NPM_VERBS: Mapping[str, str] = {"pack": "pack", "view": "view", "info": "view", "show": "view"}


def noted(argv: Sequence[str] | None, shell: str | None) -> list[str]:
    """The bare forms of what is worth a word in one command, each once."""
    if not any(map(_NAMED.search, (shell,) if shell is not None else argv or ())):
        return []  # nearly every command
    found: dict[str, None] = {}
    for words in _calls(argv, shell):
        if (form := form_of(words)) is not None:
            found.setdefault(form)
    return list(found)[:MAX_NOTED]


def form_of(argv: Sequence[str]) -> str | None:
    """The bare form of one call, ``argv`` its program's name and arguments; ``None`` where
    it is not worth a word."""
    form = FORMS.get(argv[0].rpartition("/")[2]) if argv else None
    return form(list(argv[1:])) if form else None


def _calls(argv: Sequence[str] | None, shell: str | None) -> Iterator[list[str]]:
    """The calls of programs that have forms."""
    if argv and argv[0].rpartition("/")[2] in FORMS:
        yield list(argv)
        return
    text = shell if shell is not None else " ".join(argv or ())
    for match in _CALL.finditer(text[:MAX_TEXT]):
        try:
            yield [match[1], *shlex.split(match[2])]
        except ValueError:  # an open quote: a text that holds a call, perhaps
            yield [match[1], *match[2].split()]


def _git(words: list[str]) -> str | None:
    rest = iter(words)
    verb = next(_plain(rest), None)
    if verb not in VERBS:
        return None
    left_out = False
    for number, word in enumerate(rest):
        if verb == "reflog" and not number and word in UPKEEP:
            return None
        if word == "--not":
            left_out = not left_out
        elif left_out:
            continue
        elif flag := FLAGS.match(word):
            return f"git {verb} --{flag[1]}"
        elif named := REMOTE.match(word):
            return f"git {verb} {named[1]}/…" if named[1] else f"git {verb} {named[2] or '@{…}'}"
    return f"git {verb}" if verb in ALWAYS else None


def _pip(words: list[str]) -> str | None:
    match [word for word in words if not word.startswith("-")]:
        case ["download", _, *_]:
            return "pip download"
        case ["index", "versions", *_]:
            return "pip index versions"
    return None


def _npm(words: list[str]) -> str | None:
    """``npm pack`` alone packs what is here."""
    match [word for word in words if not word.startswith("-")]:
        case [verb, name, *_] if verb in NPM_VERBS and not name.startswith((".", "/")):
            return f"npm {NPM_VERBS[verb]}"
    return None


def _go(words: list[str]) -> str | None:
    """``go mod download`` alone fetches what the module says it needs."""
    match words:
        case ["mod", "download", *rest] if any("@" in word for word in rest):
            return "go mod download …@…"
        case ["list", *rest] if {"-m", "-versions"} <= {w.replace("--", "-") for w in rest}:
            return "go list -m -versions"
    return None


FORMS: Mapping[str, Callable[[list[str]], str | None]] = {
    "git": _git, "pip": _pip, "pip3": _pip, "npm": _npm, "go": _go,
}  # fmt: skip
"""By the program's name."""
_NAMED = re.compile("|".join(FORMS))
_CALL = re.compile(rf"(?:^|[\s;&|(`])({'|'.join(FORMS)})\s+([^;&|)`\n]{{1,1000}})")


def _plain(words: Iterator[str]) -> Iterator[str]:
    """Words that are no options of git itself."""
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            yield word
