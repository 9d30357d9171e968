"""The SDK for code without an event loop: the same names, the same arguments.

    from libdsec.sync import DSecClient, DSecContainerRunArgs

    with DSecClient() as client:
        sandbox = client.run_container(DSecContainerRunArgs(container_image="py:3.11"))
        print(sandbox.run_shell("pytest -q").text)
        sandbox.stop()

Everything runs on one background loop of the process, so it also works inside a
running loop (a notebook) and from several threads. Callbacks (``on_output``,
``progress``) are called on that loop's thread. ``libdsec.sync.rollout`` and
``libdsec.sync.verify`` are here too. Types are in the ``.pyi`` beside each module.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Any

import libdsec
from libdsec import *  # noqa: F403
from libdsec._faces import FACES as _FACES
from libdsec._sync_face import make_face as _make_face
from libdsec.ports import http as _http

globals().update(
    {
        name: _make_face(source, module=__name__, attributes=attributes)
        for name, (source, attributes) in _FACES.items()
    }
)

__all__ = sorted({*libdsec.__all__, *_FACES})

# they need the faces above
from libdsec.sync import rollout, verify  # noqa: E402, F401

_open: weakref.WeakSet[Any] = weakref.WeakSet()


def _close_all() -> None:
    """Clients left open at the interpreter's exit end their sandboxes."""
    for client in list(_open):
        client.close()


def _tracked(open_: Any) -> Any:
    def open(self: Any) -> Any:
        """Connects. Raises ``Unauthenticated`` or ``Unavailable``. Idempotent."""
        if not _open:
            atexit.unregister(_close_all)
            atexit.register(_close_all)  # after, so before, the loop's own end
        _open.add(self)
        return open_(self)

    open.__signature__ = open_.__signature__  # type: ignore[attr-defined]
    return open


def _sync_http(http: Any) -> Any:
    def call(self: Any, port: int, **options: Any) -> Any:
        return _http().sync_client(self._async.connect, port, **options)

    call.__signature__, call.__doc__ = http.__signature__, http.__doc__  # type: ignore[attr-defined]
    return call


_sandbox: Any = globals()["Sandbox"]
_sandbox.http = _sync_http(_sandbox.http)
_client: Any = globals()["DSecClient"]
_client.open = _tracked(_client.open)
_client.__enter__ = lambda self: self.open()
