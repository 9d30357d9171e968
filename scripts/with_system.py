"""Runs a command beside the whole local system: ``python scripts/with_system.py CMD…``.

Owns: a system with real containers in a temporary folder, the image ``client:1`` with a
user ``agent`` who is not root, the variables DSEC_URL, DSEC_API_KEY and DSEC_PROJECT for
the command, whose exit code is returned. Does not own: what the command needs itself;
other people's harnesses live in environments of their own.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demo.baseimage import base_image  # noqa: E402
from libdsec import DSecClient  # noqa: E402
from services.local import LocalOptions, LocalSystem  # noqa: E402

IMAGE, USER = "client:1", "agent"
PACKAGES = ("adduser", "ca-certificates", "git", "passwd", "procps", "python3")


async def main(argv: list[str]) -> int:
    """The command's exit code."""
    rootfs = base_image(packages=PACKAGES, users=(USER,), say=print)
    with tempfile.TemporaryDirectory(prefix="dsec-client-") as state:
        options = LocalOptions(
            driver="container", state_dir=Path(state), image_roots=[rootfs.parent]
        )
        async with LocalSystem(options) as system:
            access = {"url": system.url, "api_key": system.admin_key, "project": system.project}
            async with DSecClient(**access) as client:
                await client.images.create(IMAGE, path=str(rootfs))
            env = {f"DSEC_{key.upper()}": value for key, value in access.items()}
            return await _run(argv, env)


async def _run(argv: list[str], env: dict[str, str]) -> int:
    child = await asyncio.create_subprocess_exec(*argv, env=os.environ | env, cwd=ROOT)
    try:
        return await child.wait()
    finally:
        if child.returncode is None:
            child.terminate()
            await child.wait()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(str(__doc__).splitlines()[0])
    sys.exit(asyncio.run(main(sys.argv[1:])))
