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
    if not sum(sizes):
        return total
    summary = gpu.full(3, "int64", 0)
    _unite(gpu, a, b, total, sizes, dtype, gpu.address(summary))
    unique, first, second = gpu.read(summary).tolist()
    if first or second:
        return 1 if first else 2
    return total[0][:unique], total[1][:unique]


def merge_padded(gpu: Gpu, a: Pair, b: Pair, k: int, limit: int) -> tuple[Pair, Pair]:
    """The k largest entries of the sum of two vectors of int32 indices below `limit`, and the rest.

    Vectors may end in `PAD`, as in `entries`, and so do the results, whose rooms are k and what is
    left of both rooms or `limit`. The host waits for nothing, so indices that do not ascend are not
    told, and give entries at random.
    """
    sizes = int(a[1].shape[0]), int(b[1].shape[0])
    total = gpu.full(sum(sizes), "float32", 0), gpu.full(sum(sizes), "int32", PAD)
    if sum(sizes):
        _unite(gpu, a, b, total, sizes, "int32", 0)
    room = min(sum(sizes), limit)  # no sum has more entries
    total = total[0][:room], total[1][:room]
    if k >= room:
        return total, (total[0][:0], total[1][:0])
    _, found = select(gpu, total[0], "float32", room, k)  # of equal ones the first, so pads last
    return part(gpu, total, room, found, k, "int32")


def _unite(
    gpu: Gpu, a: Pair, b: Pair, total: Pair, sizes: tuple[int, int], dtype: str, summary: int
) -> None:
    """Enqueue the sum of two vectors. At the address `summary`, unless it is 0, the GPU adds up its
    number of entries, how many of a's indices do not ascend, and how many of b's."""
    number = sum(sizes)
    merged = gpu.empty(number, "float32"), gpu.empty(number, dtype)
    blocks, chunk = grid(gpu.blocks, number, gpu.threads, gpu.threads)
    counts = gpu.empty(blocks, "int32")
    where = [gpu.address(x) for pair in (a, b, merged, total) for x in pair]
    argument = struct(
        MERGE, **dict(zip(MERGE.names or (), where, strict=False)), counts=gpu.address(counts),
        summary=summary, num_a=sizes[0], num_b=sizes[1], chunk=chunk,
    )  # fmt: skip
    words = element(dtype, "INDEX")
    gpu.launch("merge/merge.cu", ("merge", "heads", "unite"), words, argument, blocks)


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
