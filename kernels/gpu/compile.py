"""Compile CUDA sources with NVRTC, and cache the machine code in files.

CuPy's RawModule is no alternative: it appends `-ftz=true`, which flushes subnormals to zero.
"""

from __future__ import annotations

import hashlib
import os
import tempfile

from linkweave.kernels.caches import folder


def cubin(source: str, options: tuple[str, ...], architecture: int) -> bytes:
    """Machine code that GPUs of sm_`architecture` run: a compiler that is older than the GPU makes
    that of its latest architecture of the same generation. Raises RuntimeError with the compiler's
    messages."""
    from cupy_backends.cuda.libs import nvrtc

    same = [a for a in nvrtc.getSupportedArchs() if a // 10 == architecture // 10]
    known = max((a for a in same if a <= architecture), default=architecture)
    words = (*options, f"-arch=sm_{known}")
    key = hashlib.sha256(repr((nvrtc.getVersion(), words, source)).encode()).hexdigest()
    path = folder() / f"{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        made = _compile(nvrtc, source, words)
    try:  # atomically, as other ranks may read the file
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(fd, "wb") as file:
            file.write(made)
        os.replace(name, path)
    except OSError:
        pass  # the cache is optional
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
