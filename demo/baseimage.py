"""The base image: a Debian root file system from this machine's own package sources.

Owns: which packages it holds and its place in the cache. Does not own: making layers
of it (the image service does). Why not pulled: the demonstration needs no registry.
"""

from __future__ import annotations

import hashlib
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from demo.cache import cache_dir, make_once

PACKAGES = (
    "ca-certificates",
    "git",
    "patch",
    "procps",
    "python3",
    "python3-pip",
    "python3-pytest",
)
BUILD_TIMEOUT_S = 900
_APT_PROXY_OPTIONS = ("Acquire::http::Proxy", "Acquire::https::Proxy")
_RECIPE = "2"  # counts up when the way of building changes


def base_image(
    cache: Path | None = None,
    *,
    packages: Sequence[str] = PACKAGES,
    users: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """The root file system as a directory, built with mmdebstrap when it is not cached
    under this distribution, package list and ``users`` (each with a home directory and
    bash). Needs root. About 25 s the first time."""
    suite = codename()
    named = "".join(f" +{user}" for user in users)
    key = hashlib.sha256(f"{_RECIPE} {suite} {' '.join(sorted(packages))}{named}".encode())
    entry = (cache or cache_dir()) / "base" / f"{suite}-{key.hexdigest()[:16]}"
    if not entry.exists():
        say(f"building the base image from {suite} packages (half a minute, once)")
    return make_once(entry, lambda part: _build(part, suite, packages, users))


def codename() -> str:
    """This machine's release, such as ``bookworm``."""
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    raise RuntimeError("/etc/os-release has no VERSION_CODENAME: not a Debian-like system")


def apt_sources(etc: Path = Path("/etc/apt")) -> Path:
    """The distribution's own list of sources. Third-party lists are left out: they are
    not needed and their keys are often missing."""
    candidates = [
        etc / "sources.list.d" / "debian.sources",
        etc / "sources.list.d" / "ubuntu.sources",
        etc / "sources.list",
    ]
    for candidate in candidates:
        if candidate.is_file() and _names_a_source(candidate.read_text()):
            return candidate
    raise RuntimeError(f"no package source in {', '.join(map(str, candidates))}")


def _names_a_source(text: str) -> bool:
    return any(line.startswith(("deb ", "deb[", "Types:")) for line in text.splitlines())


def _build(rootfs: Path, suite: str, packages: Sequence[str], users: Sequence[str]) -> None:
    argv = ["mmdebstrap", "--mode=root", "--variant=minbase", "--quiet"]
    argv += [f"--aptopt={option}" for option in _apt_options()]
    argv += [
        f'--customize-hook=chroot "$1" useradd --create-home --shell /bin/bash {shlex.quote(user)}'
        for user in users
    ]
    argv += [f"--include={','.join(packages)}", suite, str(rootfs), str(apt_sources())]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"mmdebstrap exited with {done.returncode}:\n{done.stderr[-3000:]}")
    rootfs.chmod(0o755)
    (rootfs / "workspace").mkdir()  # where the workspace layer goes


def _apt_options() -> list[str]:
    """mmdebstrap reads none of the machine's apt.conf; what reaches the mirror is
    carried over: proxies, and whether an archived release may be past its date."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True)
    names = (*_APT_PROXY_OPTIONS, "Acquire::Check-Valid-Until", "Acquire::Check-Date")
    return [
        line.rstrip(";")
        for line in dump.stdout.splitlines()
        if line.startswith(names) and '""' not in line
    ]
