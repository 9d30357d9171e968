"""Secrets of a project: set, listed, removed, and never read back.

Owns: ``client.secrets``. Does not own: where values are kept, or how the way out puts them
into requests; a create's argument ``secrets`` says which.
"""

from __future__ import annotations

from collections.abc import Sequence

from libdsec import _ids
from libdsec._manager import Manager, make, present
from libdsec._wire import IamQuery, SecretInfo, SecretRemove, SecretReply, SecretSet


class Secrets(Manager):
    """``client.secrets``. A value goes one way: in."""

    _entity = "secret"

    async def set(
        self,
        name: str,
        value: str,
        *,
        hosts: Sequence[str],
        plain: bool = False,
        project: str | None = None,
    ) -> SecretInfo:
        """Keeps ``value`` (one line of printable ASCII) as ``name``, or as its next version:
        sandboxes that run use it within seconds. ``hosts`` (``api.example.org``,
        ``*.example.org``, with ``:port`` where it is neither 443 nor 80) are where it may
        ever go; ``plain``: also over HTTP without TLS. Needs the grant ``secret.set``."""
        request = make(
            SecretSet,
            request_id=_ids.new(),
            name=name,
            value=value,
            hosts=list(hosts),
            plain=plain,
        )
        reply = await self._put("set", request, SecretReply, project=project)
        return present(reply.secret, "secret")  # type: ignore[no-any-return]

    async def list(self, *, project: str | None = None) -> Sequence[SecretInfo]:
        """The secrets of a project, without their values."""
        reply = await self._read("list", IamQuery(), SecretReply, project=project)
        return reply.secrets or []

    async def remove(self, name: str, *, project: str | None = None) -> None:
        """Forgets it: requests of sandboxes that are bound to it fail from now on."""
        request = make(SecretRemove, request_id=_ids.new(), name=name)
        await self._put("remove", request, SecretReply, project=project)
