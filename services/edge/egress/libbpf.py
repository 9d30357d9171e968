"""libbpf, through ctypes: objects, maps, links, the ring of events.

Owns: calls of the library and their errors. Does not own: which programs there are. No
binding on the package index is kept well enough to depend on; what is needed is a dozen
functions of a library with a stable interface.
"""

from __future__ import annotations

import ctypes as c
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shared.errors import Unsupported

BATCH = 1024
"""Entries that are read with one call."""
QUICK = frozenset({"bpf_map_update_elem", "bpf_map_lookup_elem", "bpf_map_delete_elem"})
"""What takes a microsecond: to let other threads run meanwhile takes longer."""
_Sample = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_size_t)
_Print = c.CFUNCTYPE(c.c_int, c.c_int, c.c_char_p, c.c_void_p)


def _library() -> Any:
    try:
        lib = c.CDLL("libbpf.so.1", use_errno=True)
        quick = c.PyDLL("libbpf.so.1")
    except OSError as err:
        raise Unsupported("libbpf 1.x is not installed", field="egress") from err
    pointer, number, text = c.c_void_p, c.c_int, c.c_char_p
    for name, result, *arguments in (
        ("bpf_object__open_file", pointer, text, pointer),
        ("bpf_object__load", number, pointer),
        ("bpf_object__close", None, pointer),
        ("bpf_object__find_program_by_name", pointer, pointer, text),
        ("bpf_object__find_map_by_name", pointer, pointer, text),
        ("bpf_map__fd", number, pointer),
        ("bpf_program__attach", pointer, pointer),
        ("bpf_program__attach_cgroup", pointer, pointer, number),
        ("bpf_link__destroy", number, pointer),
        ("bpf_map_update_elem", number, number, pointer, pointer, c.c_uint64),
        ("bpf_map_lookup_elem", number, number, pointer, pointer),
        ("bpf_map_delete_elem", number, number, pointer),
        ("bpf_map_lookup_batch", number, number, *(pointer,) * 6),
        ("ring_buffer__new", pointer, number, _Sample, pointer, pointer),
        ("ring_buffer__consume", number, pointer),
        ("ring_buffer__epoll_fd", number, pointer),
        ("ring_buffer__free", None, pointer),
        ("libbpf_set_print", pointer, pointer),
    ):
        function = getattr(quick if name in QUICK else lib, name)
        function.restype, function.argtypes = result, list(arguments)
        setattr(lib, name, function)
    return lib


class Programs:
    """A loaded object file. Raises ``Unsupported`` where it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        self._lib = _library()
        said: list[str] = []

        def take(_level: int, text: bytes, _arguments: int) -> int:
            said.append(text.decode(errors="replace"))
            return 0

        quiet = _Print(take)
        self._lib.libbpf_set_print(c.cast(quiet, c.c_void_p))
        self._links: list[int] = []
        try:
            self._object = self._lib.bpf_object__open_file(os.fsencode(path), None)
            if not self._object:
                raise Unsupported(f"{path.name} cannot be read", field="egress")
            failed = self._lib.bpf_object__load(self._object)
            if failed:
                self._lib.bpf_object__close(self._object)
                raise Unsupported(
                    f"the kernel does not take {path.name}: {os.strerror(-failed)}", field="egress"
                )
        finally:
            self._lib.libbpf_set_print(None)

    def map(self, name: str) -> Map:
        """A map of the object. Raises ``Unsupported`` where it has none of the name: it is
        of another build."""
        found = self._lib.bpf_object__find_map_by_name(self._object, name.encode())
        if not found:
            text = f"no map {name} in the built programs (make -C guest)"
            raise Unsupported(text, field="egress")
        return Map(self._lib, self._lib.bpf_map__fd(found))

    def attach(self, program: str, group: int) -> None:
        """Attaches a program to the control group of an open descriptor, as long as this
        process lives and the object is open."""
        found = self._lib.bpf_object__find_program_by_name(self._object, program.encode())
        link = self._lib.bpf_program__attach_cgroup(found, group)
        if not link:
            err = c.get_errno()
            raise Unsupported(f"{program} cannot be attached: {os.strerror(err)}", field="egress")
        self._links.append(link)

    def attach_hook(self, program: str) -> None:
        """Attaches a program where its section says, as long as this process lives and the
        object is open."""
        found = self._lib.bpf_object__find_program_by_name(self._object, program.encode())
        link = self._lib.bpf_program__attach(found)
        if not link:
            err = c.get_errno()
            raise Unsupported(f"{program} cannot be attached: {os.strerror(err)}", field="policy")
        self._links.append(link)

    def detach(self) -> None:
        """Takes every program off."""
        while self._links:
            self._lib.bpf_link__destroy(self._links.pop())

    def ring(self, events: Map, take: Callable[[bytes], None]) -> Ring:
        """The reader of a ring of events."""
        return Ring(self._lib, events, take)

    def close(self) -> None:
        self.detach()
        self._lib.bpf_object__close(self._object)


class Map:
    """A map by its descriptor. Keys and values are bytes."""

    def __init__(self, lib: Any, fd: int) -> None:
        self._lib, self.fd = lib, fd

    def set(self, key: bytes, value: bytes) -> None:
        """Raises ``OSError``."""
        failed = self._lib.bpf_map_update_elem(self.fd, key, value, 0)
        if failed:
            raise OSError(-failed, os.strerror(-failed))

    def get(self, key: bytes, size: int) -> bytes | None:
        """The value of ``size`` bytes."""
        room = c.create_string_buffer(size)
        if self._lib.bpf_map_lookup_elem(self.fd, key, room):
            return None
        return room.raw

    def delete(self, key: bytes) -> None:
        """A key that is not there is fine."""
        self._lib.bpf_map_delete_elem(self.fd, key)

    def items(self, key_bytes: int, value_bytes: int) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of a hash map, a part of its table at a time: what changes
        meanwhile may be repeated or left out, and never makes it start again. Raises
        ``OSError``."""
        keys = c.create_string_buffer(key_bytes * BATCH)
        values = c.create_string_buffer(value_bytes * BATCH)
        at, after = None, c.create_string_buffer(max(key_bytes, 4))
        failed = 0
        while not failed:
            count = c.c_uint32(BATCH)
            failed = self._lib.bpf_map_lookup_batch(
                self.fd, at, after, keys, values, c.byref(count), None
            )
            if failed and -failed != errno.ENOENT:  # that is the end of the table
                raise OSError(-failed, os.strerror(-failed))
            at, some, theirs = after, keys.raw, values.raw
            for n in range(count.value):
                yield (
                    some[n * key_bytes : (n + 1) * key_bytes],
                    theirs[n * value_bytes : (n + 1) * value_bytes],
                )


class Ring:
    """Events as they come. ``fd`` is readable when there are some."""

    def __init__(self, lib: Any, events: Map, take: Callable[[bytes], None]) -> None:
        def sample(_context: int, data: int, size: int) -> int:
            take(c.string_at(data, size))
            return 0

        self._lib, self._sample = lib, _Sample(sample)
        self._ring = lib.ring_buffer__new(events.fd, self._sample, None, None)
        if not self._ring:
            raise Unsupported("no ring of events", field="egress")
        self.fd: int = lib.ring_buffer__epoll_fd(self._ring)

    def consume(self) -> None:
        """Takes what is there."""
        self._lib.ring_buffer__consume(self._ring)

    def close(self) -> None:
        self._lib.ring_buffer__free(self._ring)
