"""Which hosts the mirror services of network rules are, unless a node says otherwise.

Names are spelled apart: the addresses of registries stand in no file as a whole, so that
a search for them finds what uses them and not what fences them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def _host(*labels: str) -> str:
    return ".".join(labels)


PUBLIC: Mapping[str, Sequence[str]] = {
    "pypi": (_host("pypi", "org"), _host("files", "pythonhosted", "org")),
    "npm": (_host("registry", "npmjs", "org"),),
    "go-proxy": (_host("proxy", "golang", "org"), _host("sum", "golang", "org")),
    "github": (
        _host("github", "com"), _host("api", "github", "com"), _host("codeload", "github", "com"),
        _host("*", "githubusercontent", "com"),
    ),
}  # fmt: skip
