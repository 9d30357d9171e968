"""Images for tests: EROFS layers built from a few programs of the machine.

Owns: building them. Does not own: the product's own image conversion, on which these
tests do not depend.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from services.edge.drivers.base import Layer

PASSWD = """root:x:0:0:root:/root:/bin/sh
agent:x:1000:1000:agent:/home/agent:/bin/sh
nobody:x:65534:65534:nobody:/nonexistent:/bin/false
"""
GROUP = """root:x:0:
agent:x:1000:
tools:x:2000:agent
nogroup:x:65534:
"""
HELLO = r"""
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        printf("%s\n", argv[i]);
    for (int c; (c = getchar()) != EOF;)
        putchar(c);
    return argc;
}
"""
"""A program that prints its arguments, then its input, and exits with their number + 1."""


def pack(tree: Path, name: str) -> Layer:
    """An EROFS layer of the folder ``tree``."""
    file = tree.parent / f"{name}.erofs"
    subprocess.run(["mkfs.erofs", "--quiet", str(file), str(tree)], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    return Layer(digest=f"sha256:test-{name}-{file.stat().st_mtime_ns}", meta=str(file))


def busybox_layer(folder: Path) -> Layer:
    """A layer of :func:`busybox_tree`."""
    return pack(busybox_tree(folder), "busybox")


def busybox_tree(folder: Path) -> Path:
    """A root file system of busybox with the users root, agent and nobody."""
    tree = folder / "busybox"
    for name in ("bin", "etc", "tmp", "root", "home/agent", "var", "lib"):
        (tree / name).mkdir(parents=True)
    (tree / "tmp").chmod(0o1777)
    (tree / "root").chmod(0o700)
    busybox = tree / "bin" / "busybox"
    shutil.copy2(shutil.which("busybox") or "/bin/busybox", busybox)
    applets = subprocess.run([str(busybox), "--list"], capture_output=True, text=True, check=True)
    for applet in applets.stdout.split():
        if applet != "busybox":
            (tree / "bin" / applet).symlink_to("busybox")
    (tree / "etc" / "passwd").write_text(PASSWD)
    (tree / "etc" / "group").write_text(GROUP)
    shutil.chown(tree / "home/agent", 1000, 1000)
    return tree


def scratch_tree(folder: Path) -> Path:
    """A root file system that holds one static program and nothing else: ``/hello``, see
    :data:`HELLO`."""
    tree = folder / "scratch"
    tree.mkdir()
    compiled(HELLO, tree / "hello", "-static")
    return tree


def musl_tree(folder: Path) -> Path:
    """As Alpine's: busybox, musl's loader, and ``/bin/hello`` linked against it."""
    tree = busybox_tree(folder)
    loader = next(Path("/lib").glob("ld-musl-*.so.1"))
    shutil.copy2(loader.resolve(), tree / "lib" / loader.name)
    compiled(HELLO, tree / "bin" / "hello", cc="musl-gcc")
    return tree.rename(folder / "musl")


def debian_tree(folder: Path) -> Path:
    """Debian's own dash, bash and coreutils, with the libraries they need."""
    tree = folder / "debian"
    for name in ("usr/bin", "usr/lib", "usr/lib64", "etc", "tmp", "root", "home/agent"):
        (tree / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (tree / name).symlink_to(f"usr/{name}")
    for program in ("bash", "dash", "cat", "ls", "echo", "sleep", "true", "seq"):
        found = Path(shutil.which(program) or program)
        shutil.copy2(found, tree / "usr/bin" / program)
        needed = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+)", needed):
            target = tree / "usr" / Path(library).relative_to("/").as_posix().removeprefix("usr/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, target)
    (tree / "usr/bin/sh").symlink_to("dash")
    compiled(HELLO, tree / "usr/bin/hello")
    (tree / "etc" / "passwd").write_text(PASSWD)
    (tree / "etc" / "group").write_text(GROUP)
    return tree


def compiled(source: str, program: Path, *options: str, cc: str = "cc") -> Path:
    """Compiles C text to ``program``."""
    argv = [cc, "-O1", "-xc", "-", "-o", str(program), *options]
    subprocess.run(argv, input=source, text=True, check=True)
    return program


def bash_layer(folder: Path) -> Layer:
    """The machine's own bash with the libraries it loads."""
    tree = folder / "bash"
    bash = shutil.which("bash") or "/bin/bash"
    said = subprocess.run(["ldd", bash], capture_output=True, text=True, check=True).stdout
    for file in ("/bin/bash", *(w for w in said.split() if w.startswith("/"))):
        (tree / file.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(bash if file == "/bin/bash" else file, tree / file.lstrip("/"))
    return pack(tree, "bash")


def small_layer(folder: Path, number: int) -> Layer:
    """A layer with one file of its own: ``/layers/<number>``."""
    tree = folder / f"layer-with-a-rather-long-name-{number:04d}"
    (tree / "layers").mkdir(parents=True)
    (tree / "layers" / str(number)).write_text(str(number))
    return pack(tree, f"layer-{number:04d}")
