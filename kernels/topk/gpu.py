"""Launches of `select.cu` and `merge.cu`: the k largest of a row, with a residual, and of sums."""

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
_AHEAD = 8  # elements of a thread in flight in `mark`


def select(gpu: Gpu, x: Any, dtype: str, n: int, k: int, residual: Any = None) -> tuple[Any, Any]:
    """(values, indices) of the k largest |x|, indices ascending; x [n].

    With `residual` (float32 [n]): those of |x + residual|, as float32; the residual becomes what
    is left. Nothing waits for the GPU. Scratch memory: n / 8 bytes and some 60 KB.
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


MERGE = fields(
    ("u8", "a_values a_indices b_values b_indices values indices sums unique counts told"),
    ("u8", "num_a num_b chunk"),
)
PART = fields(
    ("u8", "values indices found kept_values kept_indices left_values left_indices number kept")
)
Pair = tuple[Any, Any]


def merge(gpu: Gpu, a: Pair, b: Pair, sizes: tuple[int, int], dtype: str) -> Pair | int:
    """The sum of two sparse vectors (float32 values, indices of `dtype`); or 1 or 2 where the
    first's or second's indices do not ascend. Waits for the GPU once, for the sum's size."""
    number = sum(sizes)
    merged, total = ((gpu.empty(number, "float32"), gpu.empty(number, dtype)) for _ in range(2))
    if not number:
        return total
    blocks, chunk = grid(gpu, number, gpu.threads, gpu.threads)
    counts, told = gpu.empty(blocks, "int32"), gpu.full(3, "int64", 0)
    where = [gpu.address(x) for pair in (a, b, merged, total) for x in pair]
    argument = struct(
        MERGE, **dict(zip(MERGE.names or (), where, strict=False)), counts=gpu.address(counts),
        told=gpu.address(told), num_a=sizes[0], num_b=sizes[1], chunk=chunk,
    )  # fmt: skip
    words = element(dtype, "INDEX")
    for name in ("place", "heads", "unite"):
        gpu.launch("merge/merge.cu", name, words, argument, blocks)
    unique, first, second = gpu.read(told).tolist()
    if first or second:
        return 1 if first else 2
    return total[0][:unique], total[1][:unique]


def part(
    gpu: Gpu, total: Pair, number: int, found: Any, kept: int, dtype: str
) -> tuple[Pair, Pair]:
    """A sparse vector's entries at these ascending int32 places, and the others."""
    sides = [(gpu.empty(size, "float32"), gpu.empty(size, dtype)) for size in (kept, number - kept)]
    where = [gpu.address(x) for x in (*total, found, *sides[0], *sides[1])]
    argument = struct(
        PART, **dict(zip(PART.names or (), where, strict=False)), number=number, kept=kept
    )
    blocks, _ = grid(gpu, number, gpu.threads, gpu.threads)
    gpu.launch("merge/merge.cu", "part", element(dtype, "INDEX"), argument, blocks)
    return sides[0], sides[1]
