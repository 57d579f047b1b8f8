"""Plans that took long to make, kept on disk for later processes of this user.

One file a question (a map, a collective, a class of sizes), and one for each encoded plan, under
`$XDG_CACHE_HOME/linkweave/plans` (`~/.cache/linkweave/plans`). What they hold depends on this
program's own files, whose sizes and times are part of every name; a checksum guards against files
cut short. A folder that others may write is not used. Whatever fails, plans are made anew.
"""

from __future__ import annotations

import os
import stat
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path

LONG = 0.05
"""Seconds of planning from which on its result is kept."""
_MOST_FILES = 2000
_HASH = 32  # bytes


class PlanStore:
    """What is kept for one map. `read` gives None for what is not there."""

    def __init__(self, about: str) -> None:
        self._about = about

    def _path(self, question: object) -> Path | None:
        folder = _folder()
        name = sha256(repr((_program(), self._about, question)).encode()).hexdigest()
        return None if folder is None else folder / name

    def read(self, question: object) -> bytes | None:
        path = self._path(question)
        try:
            data = path.read_bytes() if path else b""
        except OSError:
            return None
        said = data[_HASH:]
        return said if data and sha256(said).digest() == data[:_HASH] else None

    def write(self, question: object, said: bytes) -> None:
        """Keep it, whole or not at all."""
        if (path := self._path(question)) is None:
            return
        try:
            found = sorted(path.parent.iterdir(), key=lambda p: p.stat().st_mtime)
            for old in found[: len(found) // 2] if len(found) > _MOST_FILES else ():
                old.unlink(missing_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(sha256(said).digest() + said)
            os.replace(name, path)
        except OSError:
            pass  # a full disk, say: it is made anew the next time


@cache
def _folder() -> Path | None:
    """Ours alone; None where there can be none."""
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
    """Changes when the program does."""
    root = Path(__file__).parents[2]
    found = []
    for name in ("topology", "collectives", "kernels"):
        for path in sorted((root / name).rglob("*.py")):
            told = path.stat()
            found.append((str(path.relative_to(root)), told.st_size, told.st_mtime_ns))
    return sha256(repr(found).encode()).hexdigest()
