"""From names to an environment: which image a project sees, what a stack of them makes.

Owns: visibility (a project sees its own images and its ancestors'), the order of a
stack, merging of defaults. Does not own: SQL. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from schemas.image import ImageInfo, Resolved, ResolveItem
from services.imagesvc.imageconfig import merged_config
from services.imagesvc.names import ImageName, parse_name
from shared.errors import DsecError, InvalidRequest, NotFound
from shared.wire import to_wire

Key = tuple[str, ImageName]
"""Project and name."""
Found = Mapping[Key, ImageInfo]
BOTTOMS = frozenset({"base", "snapshot"})
"""Kinds that an environment can stand on."""


def wanted(items: Sequence[ResolveItem], *, names_max: int) -> set[Key]:
    """Every image that could answer one of ``items``; bad names ask for nothing."""
    keys: set[Key] = set()
    for item in items:
        for text in item.names[:names_max]:
            try:
                name = parse_name(text)
            except InvalidRequest:
                continue
            keys.update((project, name) for project in item.projects)
    return keys


def resolve(
    item: ResolveItem, found: Found, *, names_max: int, any_kind: bool = False
) -> Resolved:
    """Layers bottom to top and merged defaults, or the error of the first name at fault.
    ``any_kind``: also without a base, as nothing will run in it."""
    try:
        return _resolve(item, found, names_max, any_kind)
    except DsecError as error:
        error.cause = "image"
        return Resolved(error=to_wire(error))


def _resolve(item: ResolveItem, found: Found, names_max: int, any_kind: bool) -> Resolved:
    if not 0 < len(item.names) <= names_max:
        raise InvalidRequest(f"{len(item.names)} images; 1 to {names_max} make one environment")
    images = []
    for number, text in enumerate(item.names):
        field = f"layers[{number}]" if len(item.names) > 1 else "container_image"
        images.append(nearest(parse_name(text, field=field), item.projects, found, field=field))
    if images[0].kind not in BOTTOMS and not any_kind:
        raise InvalidRequest(
            f"{images[0].name} is a {images[0].kind}; the bottom of an environment is a base",
            field="layers[0]" if len(images) > 1 else "container_image",
        )
    return Resolved(
        layers=[layer for image in images for layer in image.layers],
        config=merged_config([image.config for image in images]),
    )


def nearest(name: ImageName, projects: Sequence[str], found: Found, *, field: str) -> ImageInfo:
    """The image of the first of ``projects`` that has the name; raises ``NotFound``."""
    for project in projects:
        image = found.get((project, name))
        if image is not None:
            return image
    raise NotFound(f"no image {name} in project {projects[0] if projects else '?'}", field=field)


def visible(images: Sequence[ImageInfo], projects: Sequence[str]) -> list[ImageInfo]:
    """What a project sees of ``images``: one per name, the nearest project's, by name."""
    rank = {project: number for number, project in enumerate(projects)}
    seen: dict[str, ImageInfo] = {}
    for image in sorted(images, key=lambda image: rank[image.project]):
        seen.setdefault(image.name, image)
    return [seen[name] for name in sorted(seen)]
