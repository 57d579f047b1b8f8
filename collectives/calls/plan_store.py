"""A disk cache of plans that took long to make, for later processes of the same user.

The cache is in `$XDG_CACHE_HOME/linkweave/plans` (`~/.cache/linkweave/plans`). It has one file for
each key (topology, collective, class of sizes ...) and one for each encoded plan. File names are
hashes that include the sizes and times of this program's own files, so another version of the
program does not read them. A checksum detects truncated files. A folder that others may write to
is not used. If anything fails, plans are made anew.
"""

from __future__ import annotations

import os
import stat
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path

LONG = 0.05
"""Plans are stored once planning has taken longer than this (seconds)."""
_MOST_FILES = 2000
_HASH = 32  # bytes


class PlanStore:
    """The entries for one `scope`: a topology and an order. `read` returns None for a miss."""

    def __init__(self, scope: str) -> None:
        self._scope = scope

    def _path(self, key: object) -> Path | None:
        folder = _folder()
        name = sha256(repr((_program(), self._scope, key)).encode()).hexdigest()
        return None if folder is None else folder / name

    def read(self, key: object) -> bytes | None:
        path = self._path(key)
        try:
            data = path.read_bytes() if path else b""
        except OSError:
            return None
        value = data[_HASH:]
        return value if data and sha256(value).digest() == data[:_HASH] else None

    def write(self, key: object, value: bytes) -> None:
        """Store an entry atomically. Errors are ignored."""
        if (path := self._path(key)) is None:
            return
        try:
            found = sorted(path.parent.iterdir(), key=lambda p: p.stat().st_mtime)
            for old in found[: len(found) // 2] if len(found) > _MOST_FILES else ():
                old.unlink(missing_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(sha256(value).digest() + value)
            os.replace(name, path)
        except OSError:
            pass  # such as a full disk: the plan is made anew next time


@cache
def _folder() -> Path | None:
    """The cache folder, which only this user can write to; None if there cannot be one."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base) / "linkweave" / "plans"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (path.parent, path):
            found = folder.lstat()
            others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or others:
                return None
    except OSError:
        return None
    return path


@cache
def _program() -> str:
    """A hash that changes when the program's files do."""
    root = Path(__file__).parents[2]
    found = []
    for name in ("topology", "collectives", "kernels"):
        for path in sorted((root / name).rglob("*.py")):
            status = path.stat()
            found.append((str(path.relative_to(root)), status.st_size, status.st_mtime_ns))
    return sha256(repr(found).encode()).hexdigest()
