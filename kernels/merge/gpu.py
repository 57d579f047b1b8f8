"""Launches of `merge.cu`: sums of sparse vectors, and their division into two."""

from __future__ import annotations

from typing import Any

from linkweave.kernels.gpu.arrays import Gpu, element, fields, grid, struct
from linkweave.kernels.merge.cpu import PAD
from linkweave.kernels.topk.gpu import select

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
    total = gpu.empty(sum(sizes), "float32"), gpu.empty(sum(sizes), dtype)
    unique, first, second = gpu.read(_unite(gpu, a, b, total, sizes, dtype)).tolist()
    if first or second:
        return 1 if first else 2
    return total[0][:unique], total[1][:unique]


def merge_padded(gpu: Gpu, a: Pair, b: Pair, k: int) -> tuple[Pair, Pair | None]:
    """The k largest entries of the sum of two vectors of int32 indices, and the others, if any.

    Vectors may end in `PAD`, as in `entries`, and so do the results, of rooms k and the rest. The
    host waits for nothing, so indices that do not ascend are not told, and give entries at random.
    """
    sizes = int(a[1].shape[0]), int(b[1].shape[0])
    room = sum(sizes)
    total = gpu.full(room, "float32", 0), gpu.full(room, "int32", PAD)
    _unite(gpu, a, b, total, sizes, "int32")
    if k >= room:
        return total, None
    _, found = select(gpu, total[0], "float32", room, k)  # of equal ones the first, so pads last
    return part(gpu, total, room, found, k, "int32")


def _unite(gpu: Gpu, a: Pair, b: Pair, total: Pair, sizes: tuple[int, int], dtype: str) -> Any:
    """Enqueue the sum of two vectors; returns (its number of entries, nonzero if a's indices do not
    ascend, nonzero if b's do not) on the GPU."""
    number = sum(sizes)
    summary = gpu.full(3, "int64", 0)
    if not number:
        return summary
    merged = gpu.empty(number, "float32"), gpu.empty(number, dtype)
    blocks, chunk = grid(gpu.blocks, number, gpu.threads, gpu.threads)
    counts = gpu.empty(blocks, "int32")
    where = [gpu.address(x) for pair in (a, b, merged, total) for x in pair]
    argument = struct(
        MERGE, **dict(zip(MERGE.names or (), where, strict=False)), counts=gpu.address(counts),
        summary=gpu.address(summary), num_a=sizes[0], num_b=sizes[1], chunk=chunk,
    )  # fmt: skip
    words = element(dtype, "INDEX")
    gpu.launch("merge/merge.cu", ("merge", "heads", "unite"), words, argument, blocks)
    return summary


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
