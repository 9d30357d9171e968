"""The name server of one sandbox: allowed names only, and what they resolve to is opened.

Owns: answering over UDP and TCP in the sandbox's namespace. Does not own: rules, upstream
questions. Only addresses are answered: other types are empty, since a text or a service
record is a channel or a way around. What is not allowed is refused without a question to
anyone: nothing leaves in a name.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import dns.exception
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from services.edge.egress.resolver import Answer
from shared.errors import DsecError, Unavailable

QUERY_BYTES = 4096
QUERIES_MAX = 64
"""Of one sandbox at once; more are told to come again."""
QUERIES_PER_TURN = 64
TURN_S = 0.1
"""A sandbox that asked so often in one turn waits for the next."""
STREAMS_MAX = 16
STREAM_S = 30.0
ACCEPT_AGAIN_S = 0.1
"""After a connection could not be taken: there may be descriptors again."""
KINDS = (dns.rdatatype.A, dns.rdatatype.AAAA)


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a question comes to. ``answer`` is ``None`` where it is refused."""

    answer: Answer | None


Look = Callable[[str, int], Awaitable[Lookup]]


class NameServer:
    """Answers on a datagram and a listening socket, by ``look(name, kind)``."""

    def __init__(self, udp: socket.socket, tcp: socket.socket, look: Look) -> None:
        self._udp, self._tcp, self._look = udp, tcp, look
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams = 0
        self._left = QUERIES_PER_TURN
        self._again = asyncio.Event()
        self._turning: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._loop.add_reader(self._udp.fileno(), self._datagrams)
        self._spawn(self._accept())

    def close(self) -> None:
        """Ends; the sockets are the caller's."""
        if self._turning is not None:
            self._turning.cancel()
        self._loop.remove_reader(self._udp.fileno())
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _takes(self) -> bool:
        """Whether one more may be answered in this turn."""
        if not self._left:
            return False
        self._left -= 1
        if self._turning is None:
            self._turning = self._loop.call_later(TURN_S, self._turn)
        return True

    def _turn(self) -> None:
        self._turning = None
        if not self._left:
            self._loop.add_reader(self._udp.fileno(), self._datagrams)
        self._left = QUERIES_PER_TURN
        self._again.set()
        self._again.clear()

    def _datagrams(self) -> None:
        for _ in range(QUERIES_MAX):
            if not self._left:
                self._loop.remove_reader(self._udp.fileno())
                return
            try:
                data, peer = self._udp.recvfrom(QUERY_BYTES)
            except OSError:
                return
            self._takes()
            if len(self._tasks) < QUERIES_MAX:  # else it asks again
                self._spawn(self._datagram(data, peer))

    async def _datagram(self, data: bytes, peer: tuple[str, int]) -> None:
        answer = await self.answer(data)
        if answer is not None:
            with contextlib.suppress(OSError):
                self._udp.sendto(answer, peer)

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._tcp)
            except OSError:
                if self._tcp.fileno() < 0:
                    return
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if self._streams >= STREAMS_MAX:
                sock.close()
                continue
            self._spawn(self._stream(sock))

    async def _stream(self, sock: socket.socket) -> None:
        self._streams += 1
        try:
            with sock, contextlib.suppress(OSError, TimeoutError, EOFError):
                async with asyncio.timeout(STREAM_S):
                    while True:
                        size = struct.unpack(">H", await self._exactly(sock, 2))[0]
                        query = await self._exactly(sock, size)
                        while not self._takes():
                            await self._again.wait()
                        answer = await self.answer(query)
                        if answer is None:
                            return
                        await self._loop.sock_sendall(sock, struct.pack(">H", len(answer)) + answer)
        finally:
            self._streams -= 1

    async def _exactly(self, sock: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = await self._loop.sock_recv(sock, size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    async def answer(self, data: bytes) -> bytes | None:
        """The bytes of the answer; ``None`` for what is no question."""
        try:
            query = dns.message.from_wire(data, ignore_trailing=True)
            if query.flags & dns.flags.QR or query.opcode() != dns.opcode.QUERY:
                return None
            if len(query.question) != 1:
                return None
            reply = dns.message.make_response(query, recursion_available=True)
        except dns.exception.DNSException:
            return None
        reply.set_rcode(dns.rcode.Rcode(await self._fill(query, reply)))
        return reply.to_wire()

    async def _fill(self, query: dns.message.Message, reply: dns.message.Message) -> int:
        question = query.question[0]
        if question.rdclass != dns.rdataclass.IN:
            return int(dns.rcode.REFUSED)
        name = question.name.to_text(omit_final_dot=True).lower()
        try:
            found = await self._look(name, int(question.rdtype))
        except Unavailable:
            return int(dns.rcode.SERVFAIL)
        except DsecError:
            return int(dns.rcode.REFUSED)
        if found.answer is None:
            return int(dns.rcode.REFUSED)
        if found.answer.addresses:
            texts = [str(address) for address in found.answer.addresses]
            reply.answer.append(
                dns.rrset.from_text_list(
                    question.name, max(1, found.answer.ttl_s), "IN",
                    dns.rdatatype.to_text(question.rdtype), texts,
                )
            )  # fmt: skip
        return found.answer.rcode
