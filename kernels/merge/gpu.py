"""Launches of `merge.cu`: sums of sparse vectors, and their division into two."""

from __future__ import annotations

from typing import Any

from linkweave.kernels.gpu.arrays import Gpu, element, fields, grid, struct

MERGE = fields(
    ("u8", "a_values a_indices b_values b_indices values indices sums unique counts summary"),
    ("u8", "num_a num_b chunk"),
)
PART = fields(
    ("u8", "values indices found kept_values kept_indices left_values left_indices number kept")
)
Pair = tuple[Any, Any]


def merge(gpu: Gpu, a: Pair, b: Pair, sizes: tuple[int, int], dtype: str) -> Pair | int:
    """The sum of two sparse vectors (float32 values, indices of `dtype`).

    Returns 1 or 2 instead if the first or second vector's indices do not ascend. Waits for the GPU
    once, for the size of the sum.
    """
    number = sum(sizes)
    merged, total = ((gpu.empty(number, "float32"), gpu.empty(number, dtype)) for _ in range(2))
    if not number:
        return total
    blocks, chunk = grid(gpu.blocks, number, gpu.threads, gpu.threads)
    counts, summary = gpu.empty(blocks, "int32"), gpu.full(3, "int64", 0)
    where = [gpu.address(x) for pair in (a, b, merged, total) for x in pair]
    argument = struct(
        MERGE, **dict(zip(MERGE.names or (), where, strict=False)), counts=gpu.address(counts),
        summary=gpu.address(summary), num_a=sizes[0], num_b=sizes[1], chunk=chunk,
    )  # fmt: skip
    words = element(dtype, "INDEX")
    gpu.launch("merge/merge.cu", ("merge", "heads", "unite"), words, argument, blocks)
    unique, first, second = gpu.read(summary).tolist()
    if first or second:
        return 1 if first else 2
    return total[0][:unique], total[1][:unique]


def part(
    gpu: Gpu, total: Pair, number: int, found: Any, kept: int, dtype: str
) -> tuple[Pair, Pair]:
    """A sparse vector's entries at the ascending int32 positions `found`, and the others."""
    sides = [(gpu.empty(size, "float32"), gpu.empty(size, dtype)) for size in (kept, number - kept)]
    where = [gpu.address(x) for x in (*total, found, *sides[0], *sides[1])]
    argument = struct(
        PART, **dict(zip(PART.names or (), where, strict=False)), number=number, kept=kept
    )
    blocks, _ = grid(gpu.blocks, number, gpu.threads, gpu.threads)
    gpu.launch("merge/merge.cu", ("part",), element(dtype, "INDEX"), argument, blocks)
    return sides[0], sides[1]
