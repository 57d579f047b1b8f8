"""The CUDA kernels of rows and sparse vectors, run on the host on NumPy arrays."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from host_gpu import COMPILER, ROOT, SHIM, build_folder, sanitizing


@cache
def library(file: str, words: tuple[str, ...], sanitizer: str = "") -> ctypes.CDLL:
    """`kernels/FILE` with each kernel as a function (argument, blocks, threads)."""
    made = Path(tempfile.mkdtemp(dir=build_folder().name)) / "kernels.so"
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-std=c++17", *sanitizing(sanitizer), "-pthread", "-Wall", "-Wextra",
         "-Wno-unknown-pragmas", "-Werror", "-include", str(SHIM / "cuda_shim.h"),
         f"-I{ROOT / 'kernels'}", "-shared", "-fPIC", *words, "-x", "c++",
         str(ROOT / "kernels" / file), "-o", str(made)],
        check=True, timeout=300,
    )  # fmt: skip
    return ctypes.CDLL(str(made))


class HostKernels:
    """A `kernels.gpu.Gpu` of threads. A launch is over when it returns."""

    def __init__(self, threads: int = 4, blocks: int = 3) -> None:
        self.threads, self.blocks = threads, blocks
        self.launches: list[str] = []

    def empty(self, size: int, dtype: str) -> np.ndarray:
        bits = "uint16" if dtype == "bfloat16" else dtype
        made = np.empty(size, bits)
        made.view(np.uint8)[:] = 0xA5  # rubbish, as on a GPU
        return made

    def full(self, size: int, dtype: str, value: int) -> np.ndarray:
        return np.full(size, value, dtype)

    def contiguous(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array)

    def parted(self, arrays: Any, array: np.ndarray, among: np.ndarray) -> Any:
        first = np.isin(array, among)
        return [x[first] for x in arrays], [x[~first] for x in arrays]

    def nonzero(self, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        where = np.flatnonzero(array).astype(np.int32)
        return array[where], where

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def read(self, array: Any) -> np.ndarray:
        return np.asarray(array).copy()

    def launch(
        self, file: str, names: tuple[str, ...], words: tuple[str, ...], argument: np.ndarray,
        blocks: int,
    ) -> None:  # fmt: skip
        at = ctypes.c_void_p(argument.ctypes.data)
        for name in names:
            self.launches.append(name)
            getattr(library(file, words), name)(at, blocks, self.threads)


def source_of_layouts(file: str, structs: Mapping[str, tuple[str, ...]]) -> list[tuple[int, int]]:
    """(offset, size) of each field of each struct, then (size, 0) of the whole."""
    lines = [
        line
        for name, fields in structs.items()
        for line in (
            *(f'std::printf("%zu %zu\\n", offsetof({name}, {f}), sizeof({name}::{f}));'
              for f in fields),
            f'std::printf("%zu 0\\n", sizeof({name}));',
        )
    ]  # fmt: skip
    text = "\n".join([
        "#include <cstddef>", "#include <cstdio>", f'#include "{ROOT / "kernels" / file}"',
        "int main() {", *lines, "}", "",
    ])  # fmt: skip
    folder = Path(tempfile.mkdtemp(dir=build_folder().name))
    (folder / "layout.cpp").write_text(text)
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-std=c++17", "-pthread", "-w", "-include",
         str(SHIM / "cuda_shim.h"), f"-I{ROOT / 'kernels'}", str(folder / "layout.cpp"), "-o",
         str(folder / "layout")],
        check=True, timeout=300,
    )  # fmt: skip
    told = subprocess.run([str(folder / "layout")], capture_output=True, text=True, check=True)
    return [(int(a), int(b)) for a, b in map(str.split, told.stdout.splitlines())]
