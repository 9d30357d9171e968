"""The exception of a failed file verb.

Owns: which class an errno is. Does not own: the classes (:mod:`libdsec.errors`).
"""

from __future__ import annotations

import errno as errno_

from libdsec._wire import WireError
from libdsec.errors import (
    BadPath,
    DirectoryNotEmpty,
    DSecError,
    FileAlreadyExists,
    FileChanged,
    FileError,
    FileIsADirectory,
    FileNotADirectory,
    FileNotFound,
    FilePermissionDenied,
    NoSpaceLeft,
    NotARegularFile,
    facts_of,
    from_wire,
    named,
)

_BY_ERRNO: dict[str, type[FileError]] = {
    "ENOENT": FileNotFound,
    "EACCES": FilePermissionDenied,
    "EPERM": FilePermissionDenied,
    "EROFS": FilePermissionDenied,
    "EISDIR": FileIsADirectory,
    "ENOTDIR": FileNotADirectory,
    "ENOTREG": NotARegularFile,
    "EINVAL": BadPath,
    "ELOOP": BadPath,
    "ENAMETOOLONG": BadPath,
    "EEXIST": FileAlreadyExists,
    "ENOTEMPTY": DirectoryNotEmpty,
    "ESTALE": FileChanged,
    "ENOSPC": NoSpaceLeft,
    "EDQUOT": NoSpaceLeft,
}


def file_error(error: WireError, path: str) -> DSecError:
    """The exception of a failed file verb: by ``details.errno`` (a number or a
    name); without one only a path that was not found is about the file. ``details.path``
    says which of several files it was."""
    path = str(error.details.get("path", path))
    found = error.details.get("errno")
    name = errno_.errorcode.get(found) if isinstance(found, int) else found
    type_ = _BY_ERRNO.get(str(name))
    if type_ is None:
        return FileError(named(error, path), path=path, **facts_of(error)) if name else (
            from_wire(error)
        )
    return type_(named(error, path), path=path, **facts_of(error))
