"""Where compilers keep what they have made, if the folders that they take by default cannot be
written: as in a container whose user has no home and has not installed the packages.

Without one, Numba refuses to import the kernels and Triton to launch its own, and each process
compiles CUDA sources anew.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent / "__pycache__"


def folder() -> Path:
    """The folder of the machine code of CUDA sources."""
    usual = _caches() / "linkweave"
    return usual if _writable(usual) else temporary() / "cuda"


def use_writable() -> list[str]:
    """Set the environment variables that name the folders of Numba, Triton and CuPy, where these
    could write none and the user has named none. Returns the variables."""
    triton = Path(os.environ["TRITON_HOME"]) if os.environ.get("TRITON_HOME") else _home()
    usual = {
        "NUMBA_CACHE_DIR": (HERE, _caches() / "numba"),
        "TRITON_CACHE_DIR": (triton / ".triton",),
        "CUPY_CACHE_DIR": (_home() / ".cupy",),
    }
    found = [
        name for name, folders in usual.items()
        if not os.environ.get(name) and not any(map(_writable, folders))
    ]  # fmt: skip
    for name in found:
        os.environ[name] = str(temporary() / name.partition("_")[0].lower())
    if found and "numba" in sys.modules:
        sys.modules["numba"].config.reload_config()
    return found


def _caches() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    return Path(named) if named else _home() / ".cache"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # the system does not know the user
        return Path("/")


def _writable(path: Path) -> bool:
    """Whether files can be made in a folder, or else the folder can."""
    while not os.path.exists(path) and path != path.parent:  # Path's raises for closed folders
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


@cache
def temporary() -> Path:
    """A folder that no other user can write, since programs run what they find in it."""
    path = Path(tempfile.gettempdir()) / f"linkweave-{os.geteuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return path if ours and not found.st_mode & 0o077 else Path(tempfile.mkdtemp())
