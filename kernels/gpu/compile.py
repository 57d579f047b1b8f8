"""CUDA sources to machine code: NVRTC with our options and no others, and a cache of files.

CuPy's own RawModule adds `-ftz=true` behind the caller's options, which flushes denormals.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path


def cubin(source: str, options: tuple[str, ...], architecture: int) -> bytes:
    """Machine code for sm_`architecture`. Raises RuntimeError with the compiler's words."""
    from cupy_backends.cuda.libs import nvrtc

    words = (*options, f"-arch=sm_{architecture}")
    key = hashlib.sha256(repr((nvrtc.getVersion(), words, source)).encode()).hexdigest()
    try:
        place = _folder() / f"{key}.cubin"
    except RuntimeError:  # no home
        return _compile(nvrtc, source, words)
    try:
        return place.read_bytes()
    except OSError:
        made = _compile(nvrtc, source, words)
    try:  # whole or not at all, as other ranks read it
        place.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=place.parent)
        with os.fdopen(fd, "wb") as file:
            file.write(made)
        os.replace(name, place)
    except OSError:
        pass  # no place for a cache
    return made


def _compile(nvrtc: object, source: str, words: tuple[str, ...]) -> bytes:
    program = nvrtc.createProgram(source, "plan/plan.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, words)
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"{error}: {nvrtc.getProgramLog(program)}") from None
        return bytes(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "linkweave"
