"""Which files of an image are read first: programs, what they are linked to, interpreters."""

from __future__ import annotations

import stat
import struct
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from services.imagesvc.elf import linked
from services.imagesvc.startup import BYTES_MIN, LIBRARIES_MAX, read_first
from shared.erofs.layertree import Extent, Inode, LayerTree, new_whiteout


@dataclass
class Bytes:
    """Contents in memory."""

    data: bytes
    closed: int = 0

    def pread(self, length: int, offset: int) -> bytes:
        return self.data[offset : offset + length]

    def confirm(self) -> None: ...

    def close(self) -> None:
        self.closed += 1


def elf(*needed: bytes, interpreter: bytes = b"", runpath: bytes = b"") -> bytes:
    """A file that is linked so; its names lie at another place than their address."""
    names = b"\0" + b"\0".join([*needed, runpath]) + b"\0"
    at = [names.index(b"\0" + name + b"\0") + 1 for name in needed]
    dynamic = [(1, place) for place in at] + [(5, 0x5000), (10, len(names))]
    if runpath:
        dynamic.append((29, names.index(b"\0" + runpath + b"\0") + 1))
    body_at = 64 + 3 * 56
    table = b"".join(struct.pack("<QQ", *one) for one in [*dynamic, (0, 0)])
    interp = interpreter + b"\0" if interpreter else b""
    names_at = body_at + len(table)
    interp_at = names_at + len(names)
    segments = [
        (1, names_at, 0x5000, len(names)), (2, body_at, 0x4000, len(table)),
        (3 if interp else 6, interp_at, 0x6000, len(interp)),
    ]  # fmt: skip
    headers = b"".join(
        struct.pack("<IIQQQQQQ", kind, 0, offset, address, 0, size, size, 8)
        for kind, offset, address, size in segments
    )
    head = b"\x7fELF\x02\x01".ljust(32, b"\0")
    head += struct.pack("<QQIHHHHHH", 64, 0, 0, 64, 56, 3, 0, 0, 0)
    return head + headers + table + names + interp


def file(data: bytes = b"x", *, size: int | None = None) -> Inode:
    extents = (Extent(0, len(data), 0),)
    return Inode(
        stat.S_IFREG | 0o755, size=len(data) if size is None else size, source=Bytes(data),
        extents=extents,
    )  # fmt: skip


def link(target: bytes) -> Inode:
    return Inode(stat.S_IFLNK | 0o777, target=target)



def tree(entries: dict[bytes, Inode]) -> Inode:
    made = LayerTree()
    for path, inode in entries.items():
        made.add(path, inode)
    return made.root


def chosen(roots: list[Inode], *command: str) -> list[bytes]:
    """The paths of what is read first, in order."""
    names: dict[int, bytes] = {}

    def walk(inode: Inode, path: bytes) -> None:
        names.setdefault(id(inode), path)
        for name, child in inode.children.items():
            walk(child, path + b"/" + name)

    for root in roots:
        walk(root, b"")
    return [names[id(inode)] for inode in read_first(roots, command=command)]


def test_a_program_comes_with_what_it_is_linked_to() -> None:
    root = tree(
        {
            b"lib64/ld.so": file(elf()),
            b"usr/bin/tool": file(elf(b"liba.so", b"libown.so", interpreter=b"/lib64/ld.so",
                                      runpath=b"$ORIGIN/../own")),
            b"usr/lib/liba.so": link(b"liba.so.1"),
            b"usr/lib/liba.so.1": file(elf(b"libb.so", b"libmissing.so")),
            b"usr/lib/libb.so": file(elf(b"liba.so")),  # a circle
            b"usr/own/libown.so": file(elf()),
            b"usr/lib/libother.so": file(elf()),
        }
    )  # fmt: skip
    assert chosen([root], "tool", "--flag") == [
        b"/usr/bin/tool", b"/lib64/ld.so", b"/usr/lib/liba.so.1", b"/usr/own/libown.so",
        b"/usr/lib/libb.so",
    ]  # fmt: skip


def test_upper_layers_cover_lower_ones_and_links_lead_through_all() -> None:
    base = tree(
        {
            b"bin": link(b"usr/bin"), b"lib": link(b"/usr/lib"),
            b"usr/bin/bash": file(elf(b"libold.so", b"libnew.so")),
            b"usr/bin/sh": link(b"bash"), b"usr/lib/libold.so": file(elf()),
            b"usr/lib/libnew.so": file(elf()),
        }
    )  # fmt: skip
    update = tree({b"usr/lib/libnew.so": file(elf()), b"usr/lib/libold.so": new_whiteout()})
    found = read_first([base, update], command=["/bin/sh"])
    new = update.children[b"usr"].children[b"lib"].children[b"libnew.so"]
    assert [one is new for one in found] == [False, True]


def test_an_interpreter_comes_with_what_it_reads_before_its_script() -> None:
    library = b"opt/lib/python3."
    modules = {
        library + minor + b"/" + name + b".cpython-3" + minor + b".pyc": file()
        for minor in (b"10", b"12")
        for name in (b"encodings/__pycache__/utf_8", b"__pycache__/os", b"__pycache__/json")
    }
    for minor, frozen in ((b"10", False), (b"12", True)):
        entries = {b"opt/bin/python3." + minor: file(elf())} | modules
        entries[b"usr/bin/python3"] = link(b"/opt/bin/python3." + minor)
        found = chosen([tree(dict(entries))])
        assert b"/opt/bin/python3." + minor in found
        assert any(b"/encodings/__pycache__/utf_8." in path for path in found)
        assert any(b"/os." in path for path in found) != frozen
        assert not any(b"json" in path for path in found)


def test_an_interpreter_comes_with_what_files_of_paths_import() -> None:
    packages = b"usr/lib/python3/dist-packages/"
    lines = b"/opt/more\nimport os; os.x and __import__('_hack');\n  import own\n# import no\n"
    entries = {
        b"usr/bin/python3.11": file(elf()), b"usr/bin/python3": link(b"python3.11"),
        packages + b"a.pth": file(lines), packages + b"b.pth": new_whiteout(),
    }  # fmt: skip
    modules = ("_hack/__pycache__/__init__", "__pycache__/own", "__pycache__/no", "__pycache__/os")
    for module in modules:
        entries[packages + module.encode() + b".cpython-311.pyc"] = file()
    found = [path for path in chosen([tree(entries)]) if b"/dist-packages/" in path]
    names = [path.removeprefix(b"/" + packages).decode() for path in found]
    assert names == ["a.pth", *(f"{modules[n]}.cpython-311.pyc" for n in (3, 0, 1))]


def test_what_is_too_big_is_left_to_be_asked_for() -> None:
    big, small = file(elf(), size=BYTES_MIN + 1), file(elf())
    root = tree({b"bin/big": big, b"bin/sh": small})
    assert chosen([root], "big") == [b"/bin/sh"]


def test_what_is_no_program_has_nothing_read_first() -> None:
    holes = file(b"\x7fELF\x02\x01" + bytes(100))
    holes.extents = ()
    loop = tree({b"bin/sh": link(b"bash"), b"bin/bash": link(b"sh"), b"bin/python3": holes})
    assert chosen([loop], "", "x") == [b"/bin/python3"]
    assert chosen([tree({})], "relative/path") == []
    script = tree({b"bin/run": file(b"#!/bin/sh\n")})
    assert chosen([script], "/bin/run") == [b"/bin/run"]


def test_the_number_of_libraries_is_bounded() -> None:
    names = [b"lib%d.so" % number for number in range(3 * LIBRARIES_MAX)]
    entries = {b"lib/" + name: file(elf()) for name in names}
    entries[b"bin/sh"] = file(elf(*names[: 2 * LIBRARIES_MAX]))
    assert len(chosen([tree(entries)])) == LIBRARIES_MAX


@given(st.integers(0, 600), st.integers(0, 600), st.binary(max_size=16))
def test_whatever_a_file_says_of_itself_is_bounded(cut: int, at: int, change: bytes) -> None:
    data = bytearray(elf(b"liba.so", interpreter=b"/lib/ld.so", runpath=b"/x")[:cut])
    data[at : at + len(change)] = change
    found = linked(lambda start, size: bytes(data[start : start + size]))
    assert found is None or len(found.names) <= 256
