"""Compile the CPU's kernels into Numba's cache before tests run side by side.

Otherwise each of their processes compiles what it needs, often several the same. Kernels of one
Python function share a file in the cache, so one process compiles all of them.
"""

from __future__ import annotations

from multiprocessing import get_context

from linkweave.collectives.runtime.cpu.executor import compile_kernels
from linkweave.kernels.dtypes import DTYPES, ops_of
from linkweave.kernels.plan.combine import combine_address

SMALL = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def combine(small: bool) -> None:
    """Those of small floats and bitwise steps, or the others."""
    for dtype, about in DTYPES.items():
        for op in ops_of(dtype):
            bitwise = about.kind == "bool" or op in ("and", "or", "xor")
            if small == (dtype in SMALL or bitwise):
                combine_address(dtype, op)


def main() -> None:
    with get_context("spawn").Pool(1) as pool:
        small = pool.apply_async(combine, (True,))
        compile_kernels()
        combine(False)
        small.get()


if __name__ == "__main__":
    main()
