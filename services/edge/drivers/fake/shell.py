"""The few commands a fake sandbox knows, and how lines of them are read.

Owns: ``true false exit echo printf cat head sleep pwd env kill test touch wait bytes
count die hang`` and lists joined by ``;``, ``&&``, ``||`` and ``&``, ``$NAME``, ``> file``,
``>> file`` and ``>&2``. Does not own: time limits, output budgets (driver). Each command
is a coroutine, so that cancelling it is killing it.
"""

from __future__ import annotations

import asyncio
import posixpath
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from services.edge.drivers.fake.tree import Tree
from shared.errors import DsecError, InvalidRequest

NOT_FOUND = 127
JOINTS = frozenset({";", "&&", "||", "&"})
Write = Callable[[str, bytes], Awaitable[None]]
CHUNK = 64 * 1024


class Exit(Exception):
    """``exit N``."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Killed(Exception):
    """``kill -SIGNAL $$``."""

    def __init__(self, signal: str) -> None:
        super().__init__(signal)
        self.signal = signal


class Died(Exception):
    """``die CAUSE``: the sandbox ends."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(slots=True)
class Shell:
    """One command's surroundings."""

    tree: Tree
    write: Write
    stdin: Callable[[], AsyncIterator[bytes]]
    clock: Callable[[], float]
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    changed: bool = False
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep
    background: set[asyncio.Future[int]] = field(default_factory=set)

    async def run(self, argv: list[str]) -> int:
        """One simple command's exit code."""
        if argv[:1] == ["setsid"]:
            argv = argv[1:]
        if argv[:1] in (["sh"], ["/bin/sh"], ["bash"]) and argv[1:2] in (["-c"], ["-lc"]):
            return await self.script(argv[2] if len(argv) > 2 else "")
        name = posixpath.basename(argv[0]) if argv else ""
        command = COMMANDS.get(name)
        if command is None:
            await self.write("stderr", f"{argv[0] if argv else ''}: not found\n".encode())
            return NOT_FOUND
        try:
            return await command(self, argv[1:])
        except DsecError as exc:
            await self.write("stderr", f"{name}: {exc.message}\n".encode())
            return 1

    async def script(self, text: str) -> int:
        """A list of commands."""
        code = 0
        try:
            for joint, words, end in split(text):
                if (joint == "&&" and code != 0) or (joint == "||" and code == 0):
                    continue
                words = [self._expand(w) for w in words]
                if end == "&":
                    self.background.add(asyncio.ensure_future(self._redirected(words)))
                    code = 0
                else:
                    code = await self._redirected(words)
        except Exit as exc:
            return exc.code
        return code

    async def _redirected(self, words: list[str]) -> int:
        if words[-2:] == [">&", "2"]:
            return await self._to_stderr(words[:-2])
        arrow = next((a for a in (">>", ">") if a in words), None)
        if arrow is None:
            return await self.run(words)
        index = words.index(arrow)
        held = bytearray()
        outer = self.write

        async def keep(stream: str, data: bytes) -> None:
            if stream == "stdout":
                held.extend(data)
            else:
                await outer(stream, data)

        self.write = keep
        try:
            code = await self.run(words[:index])
        finally:
            self.write = outer
        path = self.path("".join(words[index + 1 : index + 2]))
        self.tree.write(path, bytes(held), now=self.clock(), append=arrow == ">>")
        self.changed = True
        return code

    async def _to_stderr(self, words: list[str]) -> int:
        outer = self.write

        async def turn(stream: str, data: bytes) -> None:
            await outer("stderr", data)

        self.write = turn
        try:
            return await self.run(words)
        finally:
            self.write = outer

    def path(self, name: str) -> str:
        """An absolute path."""
        return posixpath.join(self.cwd, name)

    def _expand(self, word: str) -> str:
        if word.startswith("$") and word[1:].isidentifier():
            return self.env.get(word[1:], "")
        return word


def split(text: str) -> Iterator[tuple[str, list[str], str]]:
    """``(joint, words, end)`` of each command: what stands before and after it."""
    lexer = shlex.shlex(text.replace("\n", " ; "), posix=True, punctuation_chars=";&|><")
    lexer.whitespace_split = True
    lexer.commenters = ""
    joint = ";"
    words: list[str] = []
    try:
        for token in lexer:
            if token in JOINTS:
                if words:
                    yield joint, words, token
                joint, words = token, []
            else:
                words.append(token)
    except ValueError as exc:
        raise InvalidRequest(f"the command can't be read: {exc}", field="shell") from exc
    if words:
        yield joint, words, ";"


async def _true(shell: Shell, args: list[str]) -> int:
    return 0


async def _false(shell: Shell, args: list[str]) -> int:
    return 1


async def _exit(shell: Shell, args: list[str]) -> int:
    raise Exit(_number(args, 0) & 0xFF)


async def _echo(shell: Shell, args: list[str]) -> int:
    end = "" if args[:1] == ["-n"] else "\n"
    words = args[1:] if args[:1] == ["-n"] else args
    await shell.write("stdout", (" ".join(words) + end).encode("utf-8", "surrogateescape"))
    return 0


async def _printf(shell: Shell, args: list[str]) -> int:
    text, rest = (args[0] if args else ""), args[1:]
    raw = text.encode("utf-8").decode("unicode_escape").encode("latin-1", "replace")
    for word in rest:
        raw = raw.replace(b"%s", word.encode(), 1)
    await shell.write("stdout", raw)
    return 0


async def _cat(shell: Shell, args: list[str]) -> int:
    if not args:
        async for chunk in shell.stdin():
            await shell.write("stdout", chunk)
    for name in args:
        data = shell.tree.read(shell.path(name))
        for start in range(0, len(data), CHUNK):
            await shell.write("stdout", data[start : start + CHUNK])
    return 0


async def _head(shell: Shell, args: list[str]) -> int:
    """``head -c N FILE``, also of the endless /dev/zero."""
    size, path = _number(args[1:], 0), shell.path(args[2]) if len(args) > 2 else ""
    data = None if path == "/dev/zero" else shell.tree.read(path)
    for start in range(0, size, CHUNK):
        part = min(CHUNK, size - start)
        await shell.write("stdout", bytes(part) if data is None else data[start:][:part])
        await asyncio.sleep(0)
    return 0


async def _test(shell: Shell, args: list[str]) -> int:
    try:
        shell.tree.find(shell.path(args[-1]))
    except DsecError:
        return 1
    return 0


async def _touch(shell: Shell, args: list[str]) -> int:
    for name in args:
        shell.tree.write(shell.path(name), b"", now=shell.clock(), append=True)
    shell.changed = True
    return 0


async def _wait(shell: Shell, args: list[str]) -> int:
    await asyncio.gather(*shell.background)
    return 0


async def _sleep(shell: Shell, args: list[str]) -> int:
    await shell.rest(float(args[0]) if args else 0.0)
    return 0


async def _pwd(shell: Shell, args: list[str]) -> int:
    await shell.write("stdout", f"{shell.cwd}\n".encode())
    return 0


async def _env(shell: Shell, args: list[str]) -> int:
    lines = [f"{k}={v}\n" for k, v in sorted(shell.env.items())]
    await shell.write("stdout", "".join(lines).encode())
    return 0


async def _kill(shell: Shell, args: list[str]) -> int:
    names = {"-9": "KILL", "-15": "TERM", "-6": "ABRT", "-11": "SEGV"}
    option = args[0] if len(args) > 1 else "-15"
    raise Killed(names.get(option, option.lstrip("-").removeprefix("SIG")))


async def _bytes(shell: Shell, args: list[str]) -> int:
    """``bytes N``: N bytes of a known pattern (the position modulo 251)."""
    left, at = _number(args, 0), 0
    pattern = bytes(range(251)) * (CHUNK // 251 + 2)
    while left > 0:
        size = min(CHUNK, left)
        await shell.write("stdout", pattern[at % 251 : at % 251 + size])
        at, left = at + size, left - size
        await asyncio.sleep(0)
    return 0


async def _count(shell: Shell, args: list[str]) -> int:
    """``count FILE``: adds one line to FILE: how often did this run?"""
    path = shell.path(args[0])
    shell.tree.write(path, b"ran\n", now=shell.clock(), append=True)
    shell.changed = True
    return 0


async def _die(shell: Shell, args: list[str]) -> int:
    raise Died(args[0] if args else "runtime")


async def _hang(shell: Shell, args: list[str]) -> int:
    await asyncio.Event().wait()
    return 0


def _number(args: list[str], default: int) -> int:
    try:
        return int(args[0]) if args else default
    except ValueError:
        raise InvalidRequest(f"{args[0]}: not a number", field="argv") from None


COMMANDS: dict[str, Callable[[Shell, list[str]], Awaitable[int]]] = {
    "true": _true, ":": _true, "false": _false, "exit": _exit, "echo": _echo,
    "printf": _printf, "cat": _cat, "sleep": _sleep, "pwd": _pwd, "env": _env,
    "kill": _kill, "bytes": _bytes, "count": _count, "die": _die, "hang": _hang,
    "head": _head, "test": _test, "touch": _touch, "wait": _wait,
}  # fmt: skip
