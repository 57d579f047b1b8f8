"""NVRTC through ctypes: compiles CUDA sources to PTX and machine code with no GPU and no driver."""

from __future__ import annotations

import ctypes
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Compiled(NamedTuple):
    ptx: str
    registers: int
    spilled: int
    """Bytes of stores and loads."""
    stack: int
    shared: int


class Nvrtc:
    """The compiler of the package nvidia-cuda-nvrtc-cu12, the last that knows sm_70."""

    def __init__(self) -> None:
        spec = find_spec("nvidia.cuda_nvrtc")
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError("the package nvidia-cuda-nvrtc-cu12 is not installed")
        folder = Path(next(iter(spec.submodule_search_locations))) / "lib"
        self._library = ctypes.CDLL(str(folder / "libnvrtc.so.12"))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw

    def compile(
        self, source: str, options: tuple[str, ...], architecture: int
    ) -> dict[str, Compiled]:
        """The kernels by name; each has the PTX of all. Raises ValueError with the compiler's
        words."""
        program = ctypes.c_void_p()
        self._library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"plan/plan.cu", 0, None, None
        )
        words = [*options, f"-arch=sm_{architecture}", "--ptxas-options=-v"]
        code = self._library.nvrtcCompileProgram(
            program, len(words), (ctypes.c_char_p * len(words))(*(w.encode() for w in words))
        )
        log = self._text(program, "ProgramLog").decode()
        try:
            if code:
                raise ValueError(log)
            ptx = self._text(program, "PTX").decode()
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

        def number(unit: str, told: str) -> int:
            found = re.search(rf"(\d+) {unit}", told)
            return int(found[1]) if found else 0  # which is not told of shared memory

        _, *kernels = re.split(r"Compiling entry function '(\w+)'", log)
        return {
            name: Compiled(
                ptx, number("registers", told),
                number("bytes spill stores", told) + number("bytes spill loads", told),
                number("bytes stack frame", told), number("bytes smem", told),
            )
            for name, told in zip(kernels[::2], kernels[1::2], strict=True)
        }  # fmt: skip
