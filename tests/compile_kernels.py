"""Compile the CPU's kernels into Numba's cache before tests run side by side.

Otherwise each of their processes compiles what it needs, often several the same. Kernels of one
Python function share a file in the cache, so one process compiles all of them.
"""

from __future__ import annotations

from multiprocessing import get_context

from linkweave.collectives.runtime.cpu.executor import compile_kernels
from linkweave.kernels.dtypes import DTYPES, ops_of
from linkweave.kernels.plan.combine import combine_address

HALVES = ("float16", "bfloat16")


def combine(halves: bool) -> None:
    """Those of 16-bit floats and bitwise steps, or the others."""
    for dtype, about in DTYPES.items():
        for op in ops_of(dtype):
            bitwise = about.kind == "bool" or op in ("and", "or", "xor")
            if halves == (dtype in HALVES or bitwise):
                combine_address(dtype, op)


def main() -> None:
    with get_context("spawn").Pool(1) as pool:
        halves = pool.apply_async(combine, (True,))
        compile_kernels()
        combine(False)
        halves.get()


if __name__ == "__main__":
    main()
