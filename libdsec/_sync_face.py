"""How the synchronous face is made of the asynchronous one.

Owns: one class for each public async class, with the same names and signatures.
Does not own: any behaviour. A coroutine method becomes a method that waits, an async
iterator an iterator, an async context manager a context manager; what is returned is
wrapped where it has a synchronous face of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from libdsec._portal import portal

if TYPE_CHECKING:
    from libdsec._faces import Part

_faces: dict[type, type] = {}
"""Async class → its synchronous face."""


class Face:
    """Base of all faces: holds the async object it stands for."""

    _async: Any

    def __repr__(self) -> str:
        return repr(self._async)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Face) and self._async is other._async

    def __hash__(self) -> int:
        return hash(id(self._async))


def wrap(value: Any) -> Any:
    """``value`` with every async object in it replaced by its face."""
    face = next((_faces[kind] for kind in type(value).__mro__ if kind in _faces), None)
    if face is not None:
        return _faced(face, value)
    if isinstance(value, list):
        return [wrap(item) for item in value]
    return _iterate(value) if inspect.isasyncgen(value) else value


def _faced(face: type, value: Any) -> Any:
    """One face for each object, so that identity and attributes stay."""
    known = value.__dict__.get("_sync_face")
    if known is None:
        known = object.__new__(face)
        known._async = value
        value.__dict__["_sync_face"] = known
    return known


def unwrap(value: Any) -> Any:
    """The async object behind a face, in lists too."""
    if isinstance(value, Face):
        return value._async
    if isinstance(value, list | tuple):
        return type(value)(unwrap(item) for item in value)
    return value


def _iterate(source: AsyncIterator[Any]) -> Iterator[Any]:
    try:
        while True:
            try:
                item = portal().call(_step(source))
            except StopAsyncIteration:
                return
            yield wrap(item)
    finally:
        close = getattr(source, "aclose", None)
        if close is not None:
            portal().call(close())


async def _step(source: AsyncIterator[Any]) -> Any:
    return await source.__anext__()


def _arguments(args: tuple[Any, ...], kw: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    return [unwrap(a) for a in args], {k: unwrap(v) for k, v in kw.items()}


def make_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The synchronous face of an async function."""

    @functools.wraps(function)
    def call(*args: Any, **kw: Any) -> Any:
        given, named = _arguments(args, kw)
        return wrap(portal().call(function(*given, **named)))

    return _marked(call, function)


def make_module(namespace: dict[str, Any], part: Part) -> list[str]:
    """Fills a module with the faces of ``part`` and the rest that it exports; the names."""
    names: list[str] = list(part.source.__all__)
    for name in names:
        if name in part.functions:
            namespace[name] = make_function(getattr(part.source, name))
        elif name in part.faces:
            source, attributes = part.faces[name]
            namespace[name] = make_face(
                source, module=namespace["__name__"], attributes=attributes
            )
        else:
            namespace[name] = getattr(part.source, name)
    return names


def _waits(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Face, *args: Any, **kw: Any) -> Any:
        given, named = _arguments(args, kw)
        return wrap(portal().call(method(self._async, *given, **named)))

    return _marked(call, method)


def _iterates(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Face, *args: Any, **kw: Any) -> Iterator[Any]:
        given, named = _arguments(args, kw)
        return _iterate(method(self._async, *given, **named))

    return _marked(call, method)


def _makes(method: Callable[..., Any]) -> Callable[..., Any]:
    """A plain method, called on the loop: what it makes belongs there."""

    @functools.wraps(method)
    def call(self: Face, *args: Any, **kw: Any) -> Any:
        given, named = _arguments(args, kw)

        async def make() -> Any:
            return method(self._async, *given, **named)

        return wrap(portal().call(make()))

    return _marked(call, method)


def _marked(call: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """The signature stays visible, without the async function behind it."""
    call.__signature__ = inspect.signature(method)
    del call.__wrapped__
    made: Callable[..., Any] = call
    return made


def _reads(name: str, doc: str | None) -> property:
    return property(lambda self: wrap(getattr(self._async, name)), doc=doc)


_DUNDERS = {"__aenter__": "__enter__", "__aexit__": "__exit__"}


def make_face(source: type, *, module: str, attributes: tuple[str, ...] = ()) -> Any:
    """The synchronous face of an async class. ``attributes`` are instance attributes
    that are shown beside methods and properties."""
    members: dict[str, Any] = {"__doc__": source.__doc__, "__module__": module}
    for name, member in _members(source):
        if inspect.isasyncgenfunction(member):
            members[name] = _iterates(member)
        elif inspect.iscoroutinefunction(member):
            members[_DUNDERS.get(name, name)] = _waits(member)
        elif inspect.isfunction(member):
            members[name] = _makes(member)
        elif isinstance(member, property):
            members[name] = _reads(name, member.__doc__)
    for name in attributes:
        members[name] = _reads(name, None)
    if hasattr(source, "__anext__"):
        members["__iter__"] = lambda self: self
        members["__next__"] = _next
        members.pop("__anext__", None)
    if "open" in members:
        members["__init__"] = _maker(source)
    face = type(source.__name__, (Face,), members)
    _faces[source] = face
    return face


def _members(source: type) -> Iterator[tuple[str, Any]]:
    """Public members and the dunders that have a synchronous counterpart."""
    for base in reversed(source.__mro__[:-1]):
        for name, member in vars(base).items():
            if not name.startswith("_") or name in (*_DUNDERS, "__anext__"):
                yield name, member


def _next(self: Face) -> Any:
    try:
        return wrap(portal().call(_step(self._async)))
    except StopAsyncIteration:
        raise StopIteration from None


def _maker(source: type) -> Any:
    def __init__(self: Face, *args: Any, **kw: Any) -> None:
        given, named = _arguments(args, kw)

        async def make() -> Any:
            return source(*given, **named)

        self._async = portal().call(make())
        self._async._sync_face = self

    __init__.__signature__ = inspect.signature(source.__init__)  # type: ignore[attr-defined, misc]
    return __init__
