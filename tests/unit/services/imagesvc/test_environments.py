"""Which image a project sees and what a stack of images makes."""

from __future__ import annotations

import pytest

from schemas.image import ImageInfo, Kind, ResolveItem
from schemas.sandbox import ImageConfig, LayerRef
from services.imagesvc.environments import Found, nearest, resolve, visible, wanted
from services.imagesvc.imageconfig import merged_config
from services.imagesvc.names import ImageName
from shared.errors import NotFound


def image(
    name: str, project: str = "root", kind: Kind = "base", config: ImageConfig | None = None
) -> ImageInfo:
    return ImageInfo(
        name=f"{name}:latest",
        project=project,
        kind=kind,
        layers=[LayerRef(digest=f"{project}-{name}", size_bytes=1)],
        config=config or ImageConfig(),
        size_bytes=1,
        created_at=0.0,
    )


def known(*images: ImageInfo) -> Found:
    return {(i.project, ImageName(i.name.partition(":")[0])): i for i in images}


def test_layers_are_stacked_bottom_to_top_with_merged_defaults() -> None:
    found = known(
        image("py", config=ImageConfig(env={"PATH": "/bin", "A": "1"}, cmd=["sh"], user="root")),
        image("task", kind="workspace", config=ImageConfig(env={"A": "2"}, workdir="/workspace")),
    )
    answer = resolve(ResolveItem(names=["py", "task"], projects=["root"]), found, names_max=8)
    assert [layer.digest for layer in answer.layers] == ["root-py", "root-task"]
    assert answer.config.env == {"PATH": "/bin", "A": "2"}
    assert (answer.config.workdir, answer.config.user) == ("/workspace", "root")
    assert answer.config.cmd == ["sh"]


def test_the_nearest_project_wins_and_foreign_ones_are_unseen() -> None:
    found = known(image("py"), image("py", "team"), image("own", "other"))
    item = ResolveItem(names=["py"], projects=["team", "root"])
    assert resolve(item, found, names_max=8).layers[0].digest == "team-py"
    item = ResolveItem(names=["own"], projects=["team", "root"])
    error = resolve(item, found, names_max=8).error
    assert error is not None
    assert (error.code, error.field, error.cause) == ("not_found", "container_image", "image")


@pytest.mark.parametrize(
    ("names", "code", "field"),
    [
        (["py", "missing"], "not_found", "layers[1]"),
        (["py", "Bad Name"], "invalid_request", "layers[1]"),
        (["task", "py"], "invalid_request", "layers[0]"),
        (["task"], "invalid_request", "container_image"),
        ([], "invalid_request", None),
        (["py"] * 9, "invalid_request", None),
    ],
)
def test_a_bad_stack_names_its_fault(names: list[str], code: str, field: str | None) -> None:
    found = known(image("py"), image("task", kind="workspace"))
    error = resolve(ResolveItem(names=names, projects=["root"]), found, names_max=8).error
    assert error is not None
    assert (error.code, error.field, error.cause) == (code, field, "image")


def test_one_bad_name_does_not_keep_others_from_being_looked_up() -> None:
    items = [
        ResolveItem(names=["Bad Name"], projects=["a"]),
        ResolveItem(names=["py:3"], projects=["a", "b"]),
    ]
    assert wanted(items, names_max=8) == {
        ("a", ImageName("py", "3")),
        ("b", ImageName("py", "3")),
    }


def test_a_list_shows_each_name_once_from_the_nearest_project() -> None:
    images = [image("b"), image("a", "team"), image("a")]
    assert [(i.name, i.project) for i in visible(images, ["team", "root"])] == [
        ("a:latest", "team"),
        ("b:latest", "root"),
    ]


def test_nobody_sees_anything_without_a_project() -> None:
    with pytest.raises(NotFound):
        nearest(ImageName("py"), [], known(image("py")), field="name")


def test_an_entry_point_does_not_get_the_arguments_of_another() -> None:
    merged = merged_config(
        [ImageConfig(entrypoint=["/old"], cmd=["old"]), ImageConfig(entrypoint=["/new"])]
    )
    assert (merged.entrypoint, merged.cmd) == (["/new"], [])
