"""The image of ordinary work: Debian with Python, git, apt, and this machine's compiler.

Owns: its layers, made once a run. Does not own: the base (the demonstration's, cached by
its content).
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

from demo.baseimage import base_image
from services.edge.drivers.base import Layer
from tests.integration.container.images import pack

COMPILER = ("gcc", "libc6-dev")
KEPT_OUT = re.compile(r"/usr/share/(doc|man|locale|info|lintian|bug)/|/lib(asan|lsan|tsan|ubsan)")


def layers(folder: Path) -> list[Layer]:
    """The base, the compiler, a wheel and a Debian package; bottom to top."""
    base = base_image()
    kept = folder / "base.erofs"
    subprocess.run(["mkfs.erofs", "--quiet", str(kept), str(base)], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    extra = folder / "work"
    (extra / "opt/offered").mkdir(parents=True)
    (extra / "opt/answers").mkdir()
    _wheel(extra / "opt/offered")
    _package(folder / "package", extra / "opt/offered")
    _compiler(extra, base)
    return [Layer(digest=f"sha256:test-work-{base.name}", meta=str(kept)), pack(extra, "work")]


def _wheel(folder: Path) -> None:
    info = "offered-1.0.dist-info"
    files = {
        "offered.py": "def main():\n    print('offered')\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\noffered = offered:main\n",
    }  # fmt: skip
    listed = [f"{name},{_hash(text)},{len(text)}" for name, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*listed, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(folder / "offered-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


def _hash(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


def _package(tree: Path, into: Path) -> None:
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        "Package: packed\nVersion: 1\nArchitecture: all\nMaintainer: t <t@t.test>\n"
        "Description: a test\n"
    )
    (tree / "usr/bin/packed").write_text("#!/bin/sh\necho packed\n")
    (tree / "usr/bin/packed").chmod(0o755)
    made = into / "packed_1_all.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", tree, made], check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip


def _compiler(tree: Path, base: Path) -> None:
    """What this machine's compiler is made of and the base has not."""
    options = [f"--no-{what}" for what in (
        "recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]  # fmt: skip
    said = subprocess.run(
        ["apt-cache", "depends", "--recurse", "--installed", *options, *COMPILER],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    packages = re.findall(r"^([a-z0-9][a-z0-9.+-]*)$", said, re.M)
    listed = subprocess.run(
        ["dpkg", "--listfiles", *packages], capture_output=True, text=True, check=False
    ).stdout
    for line in dict.fromkeys(listed.splitlines()):
        source = Path(line)
        if not line.startswith("/usr/") or KEPT_OUT.search(line) or (base / line[1:]).exists():
            continue
        if source.is_dir() and not source.is_symlink():
            continue
        target = tree / line[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.exists():
            shutil.copy2(source, target)
