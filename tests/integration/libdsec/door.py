"""An edge's door for the SDK's tests: the frames of schemas/exec.py, real processes
and files of a temporary folder behind them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from schemas.base import HEADER_FRAME, HEADER_OP, WireError, decode, encode
from schemas.exec import (
    CHUNK_BYTES,
    HEADER_OFFSET,
    INLINE_BYTES,
    WINDOW_BYTES,
    ExecReply,
    ExecRequest,
    FileEntry,
    FileReply,
    FileRequest,
    InfoReply,
    InfoRequest,
)

KEEPALIVE_S = 0.5
LATE_S = 30.0
"""For output that was there when its command ended, and is not read yet."""


class Door:
    """``runs`` counts commands started, by operation id."""

    def __init__(self, node: str, alive: Callable[[str], bool]) -> None:
        self.node = node
        self.runs: dict[str, int] = {}
        self.drop_frames = 0
        """Output frames to lose, as a broken connection does."""
        self.mute = False
        self.refuse_busy = 0
        """Requests to answer with `unavailable`."""
        self.max_unacked = 0
        self.root = Path(tempfile.mkdtemp(prefix="dsec-door-"))
        self._alive = alive
        self._operations: dict[str, _Operation] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.client = Client()

    async def open(self, client: Client) -> None:
        self.client = client
        subject = f"dsec.exec.v1.*.{self.node}.>"
        self._subscription = await client.subscribe(subject, cb=self._message)

    def running(self) -> int:
        """Commands that have not ended."""
        return sum(operation.runs for operation in self._operations.values())

    async def leave(self) -> None:
        """The edge is away: nobody listens."""
        await self._subscription.unsubscribe()
        for _ in range(2):  # nats-py's ping overtakes what waits to be written
            await self.client.flush()

    async def close(self) -> None:
        for operation in self._operations.values():
            operation.kill()
        self.mute = True  # what is killed ends by itself, and its pipes with it
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=2)
            for task in late:
                task.cancel()

    async def _message(self, message: Msg) -> None:
        uid, verb = message.subject.split(".")[5:7]
        headers = message.headers or {}
        if verb == "io":
            operation = self._operations.get(headers[HEADER_OP])
            if operation is not None:
                operation.received(headers[HEADER_FRAME], message.data)
            return
        work = self._request(uid, verb, message)
        if work is not None:
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _request(self, uid: str, verb: str, message: Msg) -> Any:
        type_: Any = {"exec": ExecRequest, "info": InfoRequest}.get(verb, FileRequest)
        request = decode(message.data, type_)
        known = self._operations.get(request.op_id)
        if known is not None:
            return known.attach(message.reply)
        if not self._alive(uid) or self.refuse_busy:
            busy = bool(self.refuse_busy)
            self.refuse_busy = max(self.refuse_busy - 1, 0)
            code = "unavailable" if busy else "not_found"
            reply: Any = {"exec": ExecReply, "info": InfoReply}.get(verb, FileReply)
            error = WireError(code=code, message="no", retryable=busy)
            return self.send(message.reply, "x", encode(reply(op_id=request.op_id, error=error)))
        operation = self._operations[request.op_id] = _Operation(self, message.reply)
        return self._perform(operation, uid, verb, request)

    async def _perform(self, operation: _Operation, uid: str, verb: str, request: Any) -> None:
        beating = asyncio.create_task(operation.beat())
        try:
            if verb == "exec":
                self.runs[request.op_id] = self.runs.get(request.op_id, 0) + 1
                final: Any = await operation.exec(request)
            elif verb == "info":
                final = InfoReply(op_id=request.op_id, uid=uid, metrics={"execs": 1.0})
            else:
                final = await Files(self, operation).run(verb, request)
        finally:
            beating.cancel()
        await operation.finish(encode(final))

    async def send(
        self, subject: str, frame: str, data: bytes, offset: int | None = None
    ) -> None:
        if self.mute:
            return
        if self.drop_frames and frame in "oex":
            self.drop_frames -= 1
            return
        headers = {HEADER_FRAME: frame}
        if offset is not None:
            headers[HEADER_OFFSET] = str(offset)
        await self.client.publish(subject, data, headers=headers)


class _Operation:
    """One operation's frames; as the edge's, without its bounds on time."""

    def __init__(self, door: Door, reply_to: str) -> None:
        self._door, self._reply_to = door, reply_to
        self._sent = self._acked = self.taken = 0
        self._unacked: deque[tuple[int, str, bytes]] = deque()
        self._room, self._arrived = asyncio.Event(), asyncio.Event()
        self._input: deque[bytes] = deque()
        self._eof = self._wants = self.cancelled = False
        self._final: bytes | None = None
        self._silent = asyncio.timeout(None)
        self._process: asyncio.subprocess.Process | None = None

    async def send(self, frame: str, data: bytes = b"", offset: int | None = None) -> None:
        await self._door.send(self._reply_to, frame, data, offset)

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(KEEPALIVE_S)
            await self.send("k")

    async def attach(self, reply_to: str) -> None:
        self._reply_to = reply_to
        for offset, frame, data in list(self._unacked):
            await self.send(frame, data, offset)
        if self._final is not None:
            await self.send("x", self._final)
            return
        self._input.clear()
        self._eof = False
        if self._wants:
            await self.send("r")
            await self.send("a", str(self.taken).encode())
        else:
            await self.send("k")

    async def finish(self, final: bytes) -> None:
        self._final = final
        await self.send("x", final)

    def received(self, frame: str, data: bytes) -> None:
        if frame == "i":
            self._input.append(data)
        elif frame == "f":
            self._eof = True
        elif frame == "w":
            self._acked = max(self._acked, int(data))
            while self._unacked and self._unacked[0][0] + len(self._unacked[0][2]) <= self._acked:
                self._unacked.popleft()
            self._room.set()
        elif frame == "s" and self._process is not None:
            os.killpg(self._process.pid, getattr(signal, f"SIG{data.decode()}"))
        elif frame == "c":
            self.cancelled = True
            self.kill()
        self._arrived.set()

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def output(self, frame: str, data: bytes) -> None:
        for start in range(0, len(data), CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            while self._sent - self._acked + len(part) > WINDOW_BYTES:
                self._room.clear()
                await self._room.wait()
            self._unacked.append((self._sent, frame, part))
            offset, self._sent = self._sent, self._sent + len(part)
            self._door.max_unacked = max(self._door.max_unacked, self._sent - self._acked)
            await self.send(frame, part, offset)

    async def want_input(self) -> None:
        self._wants = True
        await self.send("r")

    async def input(self) -> Any:
        while True:
            while self._input:
                data = self._input.popleft()
                self.taken += len(data)
                yield data
                await self.send("a", str(self.taken).encode())
            if self._eof:
                return
            self._arrived.clear()
            await self._arrived.wait()

    async def exec(self, request: ExecRequest) -> ExecReply:
        begun = time.monotonic()
        argv = request.argv or ["/bin/sh", "-c", request.shell or ""]
        has_input = request.stdin or request.stdin_data is not None
        pipe = asyncio.subprocess.PIPE
        process = self._process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe if has_input else asyncio.subprocess.DEVNULL, stdout=pipe,
            stderr=asyncio.subprocess.STDOUT if request.merge else pipe,
            start_new_session=True, cwd=request.cwd or self._door.root,
            env={"PATH": os.environ["PATH"], **request.env},
        )  # fmt: skip
        if self.cancelled:
            self.kill()
        kept = {"o": bytearray(), "e": bytearray()}
        work = [asyncio.create_task(self._read(process.stdout, "o", request, kept))]
        if process.stderr:
            work.append(asyncio.create_task(self._read(process.stderr, "e", request, kept)))
        feeding = asyncio.create_task(self._write(process, request)) if has_input else None
        timed_out = False
        try:
            async with asyncio.timeout(request.timeout_s), asyncio.timeout(
                request.idle_timeout_s
            ) as self._silent:
                await asyncio.wait(work)
                await process.wait()
        except TimeoutError:
            timed_out = True
            self.kill()
            await process.wait()
        done, _ = await asyncio.wait(work, timeout=LATE_S)  # what was written before the end
        for one in done:
            one.result()
        if feeding is not None:
            feeding.cancel()
        code = process.returncode or 0
        name = signal.Signals(-code).name.removeprefix("SIG") if code < 0 else None
        return ExecReply(
            op_id=request.op_id, exit_code=128 - code if code < 0 else code, signal=name,
            timed_out=timed_out, duration_s=time.monotonic() - begun,
            stdout=bytes(kept["o"]), stderr=bytes(kept["e"]),
        )  # fmt: skip

    async def _read(self, source: Any, frame: str, request: ExecRequest, kept: Any) -> None:
        while data := await source.read(CHUNK_BYTES):
            if request.idle_timeout_s is not None:
                now = asyncio.get_running_loop().time()
                with contextlib.suppress(RuntimeError):  # it is over already
                    self._silent.reschedule(now + request.idle_timeout_s)
            if request.stream:
                await self.output(frame, data)
            else:
                kept[frame] += data[: INLINE_BYTES - len(kept[frame])]

    async def _write(self, process: asyncio.subprocess.Process, request: ExecRequest) -> None:
        assert process.stdin
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if request.stdin_data is not None:
                process.stdin.write(request.stdin_data)
            else:
                await self.want_input()
                async for data in self.input():
                    process.stdin.write(data)
                    await process.stdin.drain()
            process.stdin.close()


class Files:
    """File verbs on the door's temporary folder."""

    def __init__(self, door: Door, operation: _Operation) -> None:
        self._door, self._operation = door, operation

    async def run(self, verb: str, request: FileRequest) -> FileReply:
        path = self._door.root / request.path.lstrip("/")
        try:
            return await getattr(self, verb)(request, path)
        except OSError as exc:
            code = "not_found" if isinstance(exc, FileNotFoundError) else "invalid_request"
            details = {"errno": errno.errorcode[exc.errno or errno.EIO]}
            error = WireError(code=code, message=exc.strerror or "", field="path", details=details)
            return FileReply(op_id=request.op_id, error=error)

    async def file_read(self, request: FileRequest, path: Path) -> FileReply:
        size = 0
        with path.open("rb") as source:
            source.seek(request.offset)
            left = 1 << 62 if request.length is None else request.length
            while data := source.read(min(CHUNK_BYTES, left)):
                size += len(data)
                left -= len(data)
                await self._operation.output("o", data)
        return FileReply(op_id=request.op_id, size=size)

    async def file_write(self, request: FileRequest, path: Path) -> FileReply:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if request.append else "wb") as sink:
            if request.data is not None:
                sink.write(request.data)
                self._operation.taken = len(request.data)
            else:
                await self._operation.want_input()
                async for data in self._operation.input():
                    sink.write(data)
        return FileReply(op_id=request.op_id, size=self._operation.taken)

    async def file_stat(self, request: FileRequest, path: Path) -> FileReply:
        return FileReply(op_id=request.op_id, entry=_entry(request.path, path))

    async def file_list(self, request: FileRequest, path: Path) -> FileReply:
        base = request.path.rstrip("/")
        found = sorted(path.rglob("*") if request.recursive else path.iterdir())
        entries = [_entry(f"{base}/{p.relative_to(path)}", p) for p in found]
        return FileReply(op_id=request.op_id, entries=entries)

    async def file_mkdir(self, request: FileRequest, path: Path) -> FileReply:
        path.mkdir(parents=request.parents, exist_ok=request.parents)
        return FileReply(op_id=request.op_id)

    async def file_remove(self, request: FileRequest, path: Path) -> FileReply:
        path.unlink()
        return FileReply(op_id=request.op_id)

    async def file_move(self, request: FileRequest, path: Path) -> FileReply:
        path.rename(self._door.root / (request.target or "").lstrip("/"))
        return FileReply(op_id=request.op_id)


def _entry(name: str, path: Path) -> FileEntry:
    facts = path.lstat()
    type_ = "symlink" if path.is_symlink() else "dir" if path.is_dir() else "file"
    return FileEntry(
        path=name, type=type_, size=facts.st_size, mode=facts.st_mode & 0o7777,
        uid=facts.st_uid, gid=facts.st_gid, mtime=facts.st_mtime,
        target=os.readlink(path) if path.is_symlink() else None,
    )  # fmt: skip
