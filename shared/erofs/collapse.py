"""From an image's layers to the layers that are stored.

Owns: overlay merging, which consecutive layers become one, what each says over the ones below.
Does not own: reading or writing them. Pure.

Consecutive layers are merged while their data stays below a threshold: fewer
mounts, no data that a later layer replaced or deleted. What lies over another
stored layer keeps the whiteouts that hide something there; parts of one
environment (base, workspace, toolkits) are never merged with each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shared.erofs.layertree import Inode, new_dir, stored_bytes

COLLAPSE_MAX_BYTES = 3 * 1024**3


def whiteouts_dropped(
    inode: Inode, *, below: Inode | None = None, below_unknown: bool = False
) -> Inode:
    """A copy of a directory without the whiteouts and opaque marks that hide nothing.

    ``below`` is the merged view under it (``None`` where there is nothing), or it
    is not known, as for a workspace. Overlay shows a whiteout in a directory that
    it does not merge as an unreadable device, so only useful ones may stay.
    """
    unknown = below_unknown and not inode.opaque
    covered = {} if below is None or not below.is_dir or inode.opaque else below.children
    kept: dict[bytes, Inode] = {}
    for name, child in inode.children.items():
        if child.is_whiteout and not unknown and name not in covered:
            continue
        if child.is_dir:
            child = whiteouts_dropped(child, below=covered.get(name), below_unknown=unknown)
        kept[name] = child
    hides = below_unknown or (below is not None and below.is_dir and bool(below.children))
    return replace(inode, children=kept, opaque=inode.opaque and hides)


def merged(below: Inode, above: Inode, *, keep_whiteouts: bool) -> Inode:
    """The overlay of two directories as one new directory; neither is changed.

    ``keep_whiteouts`` where the result itself lies over other layers: what
    either hides of them stays hidden. Without it no whiteout is left.
    """
    children = {} if above.opaque else dict(below.children)
    for name, child in above.children.items():
        old = children.get(name)
        if child.is_whiteout and not keep_whiteouts:
            children.pop(name, None)
        elif not child.is_dir:
            children[name] = child
        elif old is not None and old.is_dir:
            children[name] = merged(old, child, keep_whiteouts=keep_whiteouts)
        elif keep_whiteouts:
            hides = child.opaque or (old is not None)
            children[name] = replace(child, children=dict(child.children), opaque=hides)
        else:
            children[name] = whiteouts_dropped(child)
    frame = below if above.implicit else above
    opaque = keep_whiteouts and (above.opaque or below.opaque)
    return replace(frame, children=children, opaque=opaque, implicit=frame.implicit)


@dataclass(slots=True)
class Collapser:
    """Takes layers bottom first.

    ``view`` is everything so far as a sandbox would see it: pass it to the reader
    of the next layer. ``below_unknown``: this part lies over a base that is not
    known here, so all its whiteouts matter.
    """

    below_unknown: bool = False
    threshold_bytes: int = COLLAPSE_MAX_BYTES
    view: Inode | None = None
    _done: list[Inode] = field(default_factory=list)
    _group: Inode | None = None
    _group_bytes: int = 0
    _below: Inode | None = None  # the view under the open group

    def add(self, layer: Inode) -> None:
        """The next layer up; ``layer`` must not be changed afterwards."""
        size = stored_bytes(layer)
        if self._group is not None and self._group_bytes + size > self.threshold_bytes:
            self._close()
        base = self._group or new_dir(implicit=True)
        self._group = merged(base, layer, keep_whiteouts=self._covers)
        self._group_bytes += size
        self.view = merged(self.view or new_dir(implicit=True), layer, keep_whiteouts=False)

    @property
    def _covers(self) -> bool:
        return self.below_unknown or bool(self._done)

    def _close(self) -> None:
        if self._group is None:
            return
        self._done.append(
            whiteouts_dropped(self._group, below=self._below, below_unknown=self.below_unknown)
        )
        self._below, self._group, self._group_bytes = self.view, None, 0

    def finish(self) -> list[Inode]:
        """The trees to store, bottom first; at least one."""
        if self._group is None and not self._done:
            self.add(new_dir(implicit=True))
        self._close()
        return self._done
