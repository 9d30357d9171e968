"""What a start asks for, read and judged. Pure.

Owns: refusing what containers cannot honour, limits as the driver needs them. Does not
own: putting them into force.
"""

from __future__ import annotations

from services.edge.disks.plan import Room, room_for
from services.edge.drivers.base import StartSpec
from services.edge.machine.cgroups import Limits
from shared.errors import InvalidRequest, Unsupported


def check(spec: StartSpec) -> None:
    """Raises ``InvalidRequest`` or ``Unsupported`` naming the field."""
    if not spec.uid or "/" in spec.uid or spec.uid.startswith("."):
        raise InvalidRequest("the uid is not a name", field="uid")
    room_of(spec)
    for name in spec.options:  # ignored, a misspelt or dangerous one would seem granted
        raise Unsupported(f"containers have no option {name}", field=f"options.{name}")
    for name in ("cpu_cores", "memory_mb", "pids"):
        value = getattr(spec, name)
        if value is not None and value <= 0:
            raise InvalidRequest(f"{name} is not positive", field=name)
    if len(spec.hostname) > 63 or not all(c.isalnum() or c in "-." for c in spec.hostname):
        raise InvalidRequest("not a host name", field="hostname")


def room_of(spec: StartSpec) -> Room | None:
    """The limits of its disk. Raises ``InvalidRequest`` naming one that is impossible."""
    return room_for(spec.disk_mb, spec.inodes)


def limits(spec: StartSpec) -> Limits:
    """The limits of its control groups."""
    return Limits(cpu_cores=spec.cpu_cores, memory_mb=spec.memory_mb, pids=spec.pids)
