"""Launches of `sort.cu` and `rows.cu`: sort rows by index, and sum rows of the same index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linkweave.kernels.gpu.arrays import Gpu, element, fields, grid, struct

SORT = fields(
    ("u8", "indices keys order keys_out order_out counts summary run unique n limit chunk"),
    ("u4", "shift blocks"),
)
ROWS = fields(("u8", "values order run sums head tail n width"))
WINDOW = 32  # rows per window
_RADIX, _BITS = 256, 8


@dataclass(frozen=True, slots=True)
class Sorted:
    """Rows sorted by their index.

    Sorted row i is row `order[i]` and belongs to run `run[i]`; a run is all rows of one index,
    which is `unique[run]`. There are `runs` runs.
    """

    n: int
    order: Any
    run: Any
    unique: Any
    runs: int


def sort(gpu: Gpu, indices: Any, dtype: str, n: int, limit: int) -> Sorted | int:
    """Sort `indices` [n] (int32 or int64), n > 0. Waits for the GPU once, for the number of runs.

    If an index is not from 0 to `limit` - 1, returns the first position of such an index instead.
    """
    wide = limit > 1 << 32
    key, stored = ("u64", "int64") if wide else ("u32", "int32")
    words = (*element(dtype, "INDEX"), f"-DKEY={key}")
    blocks, chunk = grid(gpu.blocks, n, 4 * gpu.threads, gpu.threads)
    pairs = [(gpu.empty(n, stored), gpu.empty(n, "int32")) for _ in range(2)]
    counts, summary = gpu.empty(_RADIX * blocks, "int32"), gpu.full(2, "int64", n)
    run, unique = gpu.empty(n, "int32"), gpu.empty(n, dtype)
    argument = struct(
        SORT, counts=gpu.address(counts), summary=gpu.address(summary), run=gpu.address(run),
        unique=gpu.address(unique), n=n, limit=limit, chunk=chunk, blocks=blocks,
        indices=gpu.address(indices),
    )  # fmt: skip
    for shift in range(0, max(1, (limit - 1).bit_length()), _BITS):
        source, target = pairs
        argument["keys"], argument["order"] = map(gpu.address, source)
        argument["keys_out"], argument["order_out"] = map(gpu.address, target)
        argument["shift"] = shift
        gpu.launch("rows/sort.cu", ("histogram",), words, argument, blocks)
        gpu.launch("rows/sort.cu", ("offsets",), words, argument, 1)
        gpu.launch("rows/sort.cu", ("scatter",), words, argument, blocks)
        argument["indices"] = 0
        pairs.reverse()
    argument["keys"] = gpu.address(pairs[0][0])
    gpu.launch("rows/sort.cu", ("runs", "name"), words, argument, blocks)
    runs, outside = gpu.read(summary).tolist()
    runs -= n
    if outside < n:
        return int(outside)
    return Sorted(n, pairs[0][1], run, unique[:runs], runs)


def add(gpu: Gpu, rows: Sorted, values: Any, dtype: str, width: int) -> Any:
    """Sum the rows of each run, in the order of `rows.cu`; returns [runs * width] of `dtype`."""
    sums = gpu.empty(rows.runs * width, dtype)
    if not width:
        return sums
    windows = -(-rows.n // WINDOW)
    wide = "float64" if dtype == "float64" else "float32"
    head, tail = (gpu.empty(windows * width, wide) for _ in range(2))
    argument = struct(
        ROWS, values=gpu.address(values), order=gpu.address(rows.order),
        run=gpu.address(rows.run), sums=gpu.address(sums), head=gpu.address(head),
        tail=gpu.address(tail), n=rows.n, width=width,
    )  # fmt: skip
    blocks = max(1, min(16 * gpu.blocks, -(-windows * width // gpu.threads)))
    gpu.launch("rows/rows.cu", ("windows", "join"), element(dtype), argument, blocks)
    return sums
