"""Launches of `select.cu`: the k largest of a row, with or without a residual."""

from __future__ import annotations

from typing import Any

from linkweave.kernels.gpu.arrays import Gpu, element, fields, grid, struct
from linkweave.kernels.topk.cpu import SAMPLE, rank_of
from linkweave.kernels.validate import index_type

SELECT = fields(
    ("u8", "x residual words counts choice values indices n k chunk"),
    ("u4", "samples rank wide digit"),
)
CHOICE_BYTES = 8 + 4 * 16 + 3 * 2048 * 8 + 8
_AHEAD = 8  # loads in flight per thread in `mark`


def select(gpu: Gpu, x: Any, dtype: str, n: int, k: int, residual: Any = None) -> tuple[Any, Any]:
    """(values, ascending indices) of the k largest |x| of x [n]. Does not wait for the GPU.

    With `residual` (float32 [n]): those of |x + residual|, with float32 values; the rest of the sum
    stays in the residual. Uses n / 8 bytes and about 60 KB of scratch memory.
    """
    wide = index_type(n)
    values = gpu.empty(k, dtype if residual is None else "float32")
    indices = gpu.empty(k, wide)
    if not k and residual is None:
        return values, indices
    unit = 32 * gpu.threads
    blocks, chunk = grid(gpu, n, _AHEAD * unit, unit)
    samples = min(n, SAMPLE)
    rank = rank_of(samples, n, k) if samples < n else k
    scratch = [
        gpu.empty(-(-n // 32), "int32"), gpu.empty(2 * blocks, "int32"),
        gpu.empty(CHOICE_BYTES // 4, "int32"),
    ]  # fmt: skip
    digits = 3 if dtype == "float32" or residual is not None else 2
    argument = struct(
        SELECT, x=gpu.address(x), residual=0 if residual is None else gpu.address(residual),
        words=gpu.address(scratch[0]), counts=gpu.address(scratch[1]),
        choice=gpu.address(scratch[2]), values=gpu.address(values),
        indices=gpu.address(indices), n=n, k=k, chunk=chunk, samples=samples,
        rank=rank if rank <= samples else 0, wide=wide == "int64",
    )  # fmt: skip
    words = element(dtype)
    gpu.launch("topk/select.cu", "sample", words, argument, 1)
    gpu.launch("topk/select.cu", "mark", words, argument, blocks)
    for digit in range(digits if k else 0):
        argument["digit"] = digit
        gpu.launch("topk/select.cu", "digit", words, argument, blocks)
    argument["digit"] = digits
    for name in ("tally", "take") if k else ():
        gpu.launch("topk/select.cu", name, words, argument, blocks)
    return values, indices
