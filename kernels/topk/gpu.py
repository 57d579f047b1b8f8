"""Launches of `select.cu`: the k largest of a row, with or without a residual."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from linkweave.kernels.dtypes import DTYPES
from linkweave.kernels.gpu.arrays import Gpu, Words, element, fields, grid, struct
from linkweave.kernels.topk.cpu import rank_of
from linkweave.kernels.validate import index_type

SELECT = fields(
    ("u8", "x residual values indices state rows totals counts offsets bits n k part"),
    ("u4", "room packs rank wide"),
)
STATE_BYTES = 4 * 16 + 3 * 2048 * 8 + 8
_LAST_BINS = 512
_AHEAD = 4  # loads of 16 bytes in flight per thread in `gather`
_PACKS = 512  # of 16 bytes, sampled
_SHARE = 8  # a list has room for one element of so many


class Launches(NamedTuple):
    """What all selections of one size have in common."""

    names: Words
    words: Words
    blocks: int
    argument: np.ndarray  # SELECT as 8-byte words, with offsets for addresses in the scratch memory
    scratch: int  # bytes
    dtypes: tuple[str, str]  # of values and indices


@lru_cache(maxsize=256)
def launches_of(
    n: int, k: int, dtype: str, residual: bool, threads: int, most_blocks: int
) -> Launches:
    """There is a block for each 32 KiB of x, which a block's threads read by _AHEAD loads each, up
    to `most_blocks`."""
    pack = 16 // DTYPES[dtype].size
    warps, width = -(-threads // 32), min(threads, 32)
    tile = warps * width * _AHEAD * pack
    blocks, chunk = grid(most_blocks, n, tile, tile)
    room = -(-chunk // warps // _SHARE)
    packs = min(n // pack, _PACKS)
    rank = rank_of(packs * pack, n, k) if k else 0
    if rank > packs * pack:
        rank = 0  # the sample is of no use
    values, wide = "float32" if residual else dtype, index_type(n)
    names = ("sample",) * (residual and rank > 0) + ("gather",) * (residual or k > 0)
    digits = ("upper",) * (values == "float32") + ("middle", "lower", "take")
    sizes = {
        "state": STATE_BYTES, "rows": 4 * blocks * (_LAST_BINS + 1), "totals": 4 * blocks,
        "counts": 4 * blocks * warps, "offsets": 4 * blocks * warps * room,
        "bits": 4 * blocks * warps * room,
    }  # fmt: skip
    argument = struct(
        SELECT, n=n, k=k, part=chunk // warps, room=room, packs=packs, rank=rank,
        wide=wide == "int64", **dict(zip(sizes, accumulate((0, *sizes.values())), strict=False)),
    ).view(np.uint64)  # fmt: skip
    return Launches(
        names + digits * (k > 0), element(dtype), blocks, argument, sum(sizes.values()),
        (values, wide),
    )  # fmt: skip


def select(gpu: Gpu, x: Any, dtype: str, n: int, k: int, residual: Any = None) -> tuple[Any, Any]:
    """(values, ascending indices) of the k largest |x| of x [n]. Does not wait for the GPU.

    With `residual` (float32 [n]): those of |x + residual|, with float32 values; the rest of the sum
    stays in the residual. Uses n bytes and about 1 MB of scratch memory.
    """
    made = launches_of(n, k, dtype, residual is not None, gpu.threads, gpu.blocks)
    values, indices = gpu.empty(k, made.dtypes[0]), gpu.empty(k, made.dtypes[1])
    if made.names:
        scratch = gpu.empty(made.scratch, "uint8")
        argument = made.argument.copy()
        argument[:4] = (
            gpu.address(x), 0 if residual is None else gpu.address(residual),
            gpu.address(values), gpu.address(indices),
        )  # fmt: skip
        argument[4:10] += gpu.address(scratch)
        gpu.launch("topk/select.cu", made.names, made.words, argument, made.blocks)
    return values, indices
