"""The fake backend: sandboxes are values, faults come by order.

Owns: its sandboxes' state, in memory and in one file a sandbox (so that an edge that
was killed finds them again). Does not own: anything outside its folder.

``options`` of a spec inject faults: ``start_delay_s``, ``start_error`` (a cause, or a
code of :mod:`shared.errors`), ``start_hang``, ``start_deaf_s`` (ignores cancellation for
so long), ``die_after_s`` with ``die_cause``, ``stop_hang`` (true, or for how many calls),
``stop_error`` (for how many calls), ``recover_none``, ``pause_error``, ``pause_hang``,
``resume_error``, ``reclaim_error``, ``clear_error`` (for how many calls).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from services.edge.disks.plan import FULL_SHARE
from services.edge.drivers.base import (
    BackendReport,
    ExecIO,
    ExecOutcome,
    ExecSpec,
    Exited,
    Feature,
    Handle,
    Inspection,
    OnExit,
    StartSpec,
    Usage,
)
from services.edge.drivers.counters import Counters
from services.edge.drivers.fake import commands, faults
from services.edge.drivers.fake import tree as trees
from services.edge.drivers.fake.budget import Budget
from services.edge.drivers.fake.ports import EchoPorts
from services.edge.drivers.fake.shell import Died, Exit, Killed, Shell
from services.edge.drivers.fake.standing import Standing
from services.edge.drivers.fake.state import Live, State
from services.edge.drivers.files import FileInfo
from services.edge.drivers.registry import DriverConfig
from shared import ids
from shared.errors import Internal, InvalidRequest, SandboxDied, Unavailable, Unsupported

NAME = "fake"
STATE = "state.msgpack"
CHUNK = 64 * 1024
MIB = 1 << 20
FEATURES = (
    "exec", "files", "ports", "pause", "clear", "network", "memory_limit", "disk_limit",
    "pids_limit",
)  # fmt: skip


class FakeDriver(EchoPorts, Standing):
    """See the module's text and :mod:`services.edge.drivers.base`."""

    name = NAME

    def __init__(self, config: DriverConfig) -> None:
        self._root = config.state_dir
        self._live: dict[str, Live] = {}
        self._on_exit: OnExit | None = None
        self._tasks: set[asyncio.Future[Any]] = set()

    async def probe(self) -> BackendReport:
        """Everything a fake can do."""
        features = {name: Feature(True) for name in FEATURES}
        features["pty"] = Feature(False, "a fake has no terminals")
        features["file_trees"] = Feature(False, "a fake has single files only")
        return BackendReport(True, features=features)

    async def open(self, on_exit: OnExit) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        self._on_exit = on_exit

    async def close(self) -> None:
        for live in self._live.values():
            if live.timer:
                live.timer.cancel()
        self._live.clear()

    # -- life -----------------------------------------------------------------------

    async def start(self, spec: StartSpec) -> Handle:
        _check(spec)
        folder = self._root / spec.uid
        if spec.uid in self._live or (folder / STATE).exists():
            raise Internal(f"sandbox {spec.uid} is there already")
        folder.mkdir(exist_ok=True)
        try:
            await faults.start_faults(spec.options)
            now = time.time()
            limit = spec.disk_mb * MIB if spec.disk_mb else None
            state = State(
                uid=spec.uid, boot=ids.new(), options=dict(spec.options), env=dict(spec.env),
                workdir=spec.workdir, started_at=now, tree=trees.empty(now, limit_bytes=limit),
            )  # fmt: skip
            state.tree.mkdir(spec.workdir, now=now)
            self._save(state)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._adopt(state)
        enforcement = {"network": "none"}
        if limit:
            enforcement["disk_mb"] = "tree"
        return Handle(spec.uid, NAME, {"boot": state.boot}, enforcement)

    def _adopt(self, state: State) -> Live:
        live = self._live[state.uid] = Live(state)
        after_s = state.options.get("die_after_s")
        if after_s is not None:
            loop = asyncio.get_running_loop()
            left_s = state.started_at + float(after_s) - time.time()
            cause = str(state.options.get("die_cause", "runtime"))
            live.timer = loop.call_later(max(0.0, left_s), self._die, state.uid, cause)
        return live

    async def recover(self, handle: Handle, spec: StartSpec) -> Handle | None:
        try:
            data = (self._root / handle.uid / STATE).read_bytes()
            state = msgspec.msgpack.decode(data, type=State)
        except (OSError, msgspec.DecodeError):
            return None
        if state.boot != handle.data.get("boot") or state.options.get("recover_none"):
            return None
        died_at = state.started_at + float(state.options.get("die_after_s", 1e12))
        if died_at <= time.time():
            return None
        if handle.uid not in self._live:
            self._adopt(state)
        return handle

    async def inspect(self, handle: Handle) -> Inspection:
        live = self._live.get(handle.uid)
        if live is None:
            return Inspection(False, "runtime", "it is gone")
        if live.death:
            return Inspection(False, live.death.cause, live.death.message)
        return Inspection(True)

    async def stop(self, handle: Handle, *, grace_s: float = 0.0) -> None:
        live = self._live.get(handle.uid)
        if live is not None:
            live.state.stops += 1
            await faults.stop_faults(live.state.options, live.state.stops)
            if live.timer:
                live.timer.cancel()
            self._kill_commands(live, SandboxDied("the sandbox was stopped", cause="cancelled"))
            if self._live.get(handle.uid) is live:
                del self._live[handle.uid]
        shutil.rmtree(self._root / handle.uid, ignore_errors=True)

    async def sweep(self, known: frozenset[str]) -> list[str]:
        """Removes what is in its folder and not in ``known``."""
        gone = sorted(p.name for p in self._root.iterdir() if p.name not in known)
        for uid in gone:
            self._live.pop(uid, None)
            shutil.rmtree(self._root / uid, ignore_errors=True)
        return gone

    def _die(self, uid: str, cause: str) -> None:
        live = self._live.get(uid)
        if live is None or live.death:
            return
        live.death = Exited(uid, cause, f"died: {cause}")
        self._kill_commands(live, SandboxDied("the sandbox died", cause=cause))
        if self._on_exit:
            task = asyncio.ensure_future(self._on_exit(live.death))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _kill_commands(self, live: Live, error: SandboxDied) -> None:
        for done in list(live.commands):
            if not done.done():
                done.set_exception(error)
        for task in live.background:
            task.cancel()

    def _alive(self, handle: Handle) -> Live:
        live = self._live.get(handle.uid)
        if live is None or live.death:
            cause = live.death.cause if live and live.death else "runtime"
            raise SandboxDied(f"sandbox {handle.uid} does not live", cause=cause)
        return live

    def _running(self, handle: Handle) -> Live:
        live = self._alive(handle)
        if live.state.paused:
            raise Unavailable("the sandbox is paused")
        return live

    def _save(self, state: State) -> None:
        folder = self._root / state.uid
        part = folder / (STATE + ".part")
        part.write_bytes(msgspec.msgpack.encode(state))
        part.rename(folder / STATE)

    # -- commands -------------------------------------------------------------------

    async def exec(self, handle: Handle, spec: ExecSpec, io: ExecIO) -> ExecOutcome:
        live = self._alive(handle)
        commands.check(spec)
        began = time.monotonic()
        limit = spec.output_limit_bytes
        budgets = {s: Budget(s, limit, io.output) for s in ("stdout", "stderr")}
        work = asyncio.ensure_future(self._command(live, spec, io, budgets))
        commands.signals(io, work)
        death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        live.commands.add(death)
        live.works.add(work)
        timed_out = False
        try:
            waiting: set[asyncio.Future[Any]] = {work, death}
            with contextlib.suppress(TimeoutError):
                async with live.clock.timeout(spec.timeout_s):
                    await commands.until_silent(waiting, spec, budgets.values())
            if death.done():
                death.result()
            timed_out = not work.done()
            code, signal = await commands.ended(work)
        finally:
            live.commands.discard(death)
            live.works.discard(work)
            death.cancel()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if live.death:
            raise SandboxDied("the sandbox died", cause=live.death.cause)
        for budget in budgets.values():
            await budget.close()
        return ExecOutcome(
            exit_code=code, signal=signal, timed_out=timed_out,
            truncated=(budgets["stdout"].dropped, budgets["stderr"].dropped),
            duration_s=time.monotonic() - began,
        )  # fmt: skip

    async def _command(
        self, live: Live, spec: ExecSpec, io: ExecIO, budgets: Mapping[str, Budget]
    ) -> tuple[int, str | None]:
        state = live.state

        async def write(stream: str, data: bytes) -> None:
            await live.goes.wait()
            await budgets["stdout" if spec.merge else stream].write(data)

        async def rest(seconds: float) -> None:
            with contextlib.suppress(TimeoutError):
                async with live.clock.timeout(seconds):
                    await asyncio.Event().wait()
            await live.goes.wait()

        async def nothing() -> AsyncIterator[bytes]:
            return
            yield b""

        cwd = spec.cwd or state.workdir
        shell = Shell(
            state.tree, write, io.input if spec.stdin else nothing, time.time,
            {**state.env, **spec.env}, cwd, rest=rest,
        )  # fmt: skip
        await live.goes.wait()
        if not commands.is_folder(state.tree, cwd):
            raise InvalidRequest(f"{cwd} is not a directory", field="cwd")
        killed = True
        try:
            if spec.argv is not None:
                code = await shell.run(list(spec.argv))
            else:
                code = await shell.script(spec.shell or "")
            killed = False
            return code, None
        except Exit as exc:
            return exc.code, None
        except Killed as exc:
            return 128 + commands.SIGNALS.get(exc.signal, 15), exc.signal
        except Died as exc:
            self._die(state.uid, exc.cause)
            raise SandboxDied("the sandbox died", cause=exc.cause) from exc
        finally:
            for task in shell.background:
                if killed:  # the whole tree; else they live on in the sandbox
                    task.cancel()
            live.background |= shell.background
            if shell.changed and state.uid in self._live:
                self._save(state)

    async def usage(self, handle: Handle) -> Usage:
        live = self._alive(handle)
        return Usage(disk_bytes=live.state.tree.size(), pids=1 + len(live.commands))

    async def counters(self, handles: Sequence[Handle]) -> list[Counters]:
        live = [self._live.get(handle.uid) for handle in handles]
        return [_counters(one.state.tree) if one else Counters() for one in live]

    # -- files ------------------------------------------------------------------------

    async def read(
        self, handle: Handle, path: str, *, user: str | None, offset: int = 0,
        length: int | None = None, source: str | None = None,
        opened: Callable[[str], None] | None = None,
    ) -> AsyncIterator[bytes]:  # fmt: skip
        tree = self._running(handle).state.tree
        data, is_ = tree.read(path), str(tree.info(tree.find(path)[0]).mtime)
        if source not in (None, is_):
            raise trees.failure("ESTALE", path)
        if opened is not None:
            opened(is_)
        end = len(data) if length is None else min(len(data), offset + length)
        for start in range(offset, end, CHUNK):
            yield data[start : min(end, start + CHUNK)]

    async def write(
        self, handle: Handle, path: str, chunks: AsyncIterator[bytes], *, user: str | None,
        mode: int | None = None, append: bool = False, mtime_ns: int | None = None,
        sparse: bool = False, key: str | None = None,
    ) -> FileInfo:  # fmt: skip
        live = self._running(handle)
        data = bytearray()
        async for chunk in chunks:
            data += chunk
        now = time.time() if mtime_ns is None else mtime_ns / 1e9
        info = live.state.tree.write(path, bytes(data), now=now, mode=mode, append=append)
        self._save(live.state)
        return info

    async def stat(self, handle: Handle, path: str, *, user: str | None) -> FileInfo:
        return self._running(handle).state.tree.info(path)

    async def list(
        self, handle: Handle, path: str, *, user: str | None, recursive: bool = False
    ) -> AsyncIterator[list[FileInfo]]:
        tree, todo = self._running(handle).state.tree, [path]
        while todo:
            found = tree.entries(todo.pop())
            yield found
            todo += [i.path for i in found if recursive and i.type == "dir"]

    async def mkdir(
        self, handle: Handle, path: str, *, user: str | None, mode: int = 0o755,
        parents: bool = True,
    ) -> None:  # fmt: skip
        live = self._running(handle)
        live.state.tree.mkdir(path, now=time.time(), mode=mode, parents=parents)
        self._save(live.state)

    async def remove(
        self, handle: Handle, path: str, *, user: str | None, recursive: bool = False
    ) -> None:
        live = self._running(handle)
        live.state.tree.remove(path, recursive=recursive)
        self._save(live.state)

    async def move(self, handle: Handle, src: str, dst: str, *, user: str | None) -> None:
        live = self._running(handle)
        live.state.tree.move(src, dst, now=time.time())
        self._save(live.state)


def _check(spec: StartSpec) -> None:
    if spec.inodes is not None:
        raise Unsupported("files are not counted", field="policy.resources.inodes")


def _counters(tree: trees.Tree) -> Counters:
    used = tree.size()
    full = tree.limit_bytes is not None and used >= FULL_SHARE * tree.limit_bytes
    return Counters(disk_bytes=used, disk_full=full)


def create(config: DriverConfig) -> FakeDriver:
    """See :mod:`services.edge.drivers.registry`."""
    return FakeDriver(config)
