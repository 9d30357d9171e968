"""Rollouts for code without an event loop: :mod:`libdsec.rollout`, with the same names.

A loop may be a plain function here: it runs in a thread of its own and is handed the
synchronous face of its rollout, in this process (:func:`here`) as in a worker
(:func:`submit`).
"""

from __future__ import annotations

from libdsec._faces import MODULES
from libdsec._sync_face import make_module

__all__ = make_module(globals(), MODULES["rollout"])
