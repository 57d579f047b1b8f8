"""Rows of uneven numbers: what each rank has of them, and an all-to-all of such."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from zlib import crc32

from linkweave.collectives.calls.aliasing import refuse_overlaps
from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.request import Request
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.blocks import Sizes
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.tensors import integer, room_for


def alltoall(context: HostCalls, x: Any, out: Any, in_splits: Any, out_splits: Any) -> Any:
    """Of CPU tensors: ranks tell each other how many rows they send."""
    with context.telling():
        buffer, _ = context.buffer(x, written=False)
        row = row_bytes(x, buffer)
        sent = in_splits
        if in_splits is None:
            sent = [rows_each(context.size, "alltoall", x)] * context.size
        sends = row_counts("in_splits", sent, context.size)
        if sum(sends) != x.shape[0]:
            raise CollectiveError(
                f"in_splits deals out {sum(sends)} rows of a tensor of shape {tuple(x.shape)}"
            )
    told = context.gather("sizes", json.dumps([sends, row, buffer.dtype]).encode())
    splits, widths, dtypes = zip(*map(json.loads, told), strict=True)
    if len({*widths}) > 1 or len({*dtypes}) > 1:
        raise CollectiveError(
            f"the ranks' rows differ: {list(widths)} bytes of {list(dtypes)}, by rank"
        )
    comes = [of[context.rank] for of in splits]
    with context.telling():
        if out_splits is not None and row_counts("out_splits", out_splits, context.size) != comes:
            raise CollectiveError(
                f"out_splits of rank {context.rank} says {list(out_splits)} rows come, by rank; "
                f"the ranks send {comes}"
            )
        given, out = out, room_for(x, (sum(comes), *x.shape[1:]), out)
        if given is not None:
            refuse_overlaps([x], [out])
        got, done = context.buffer(out)
        sizes = tuple(tuple(n * row for n in of) for of in splits)
        largest = max(max(of) for of in sizes)
        like = replace(buffer, nbytes=largest * context.size)  # the same on all ranks
        scratch = context.scratch(like, buffer.nbytes + got.nbytes)
        request = uneven(
            context.request("alltoall", scratch, "sum", layout=layout_of(sizes)), sizes
        )
    received = scratch.address + buffer.nbytes
    context.copy(
        received + sum(of[context.rank] for of in sizes[: context.rank]),
        buffer.address + sum(sizes[context.rank][: context.rank]),
        sizes[context.rank][context.rank],
    )  # fmt: skip
    context.make(replace(request, source=buffer))
    context.copy(got.address, received, got.nbytes)
    done()
    return out


def uneven(request: Request, sizes: Sizes) -> Request:
    """With blocks of these sizes (bytes). Raises CollectiveError on a GPU."""
    if request.device != "cpu":
        raise CollectiveError(f"{request.kind} of uneven parts takes CPU tensors only")
    return replace(request, sizes=sizes)


def row_counts(name: str, given: Any, size: int) -> list[int]:
    """One number of rows for each rank."""
    try:
        found = [integer(n) for n in given]
    except TypeError:
        found = []
    if len(found) != size or any(n is None or n < 0 for n in found):
        raise CollectiveError(
            f"{name} must be {size} integers >= 0, rows of one rank each, not {given!r}"
        )
    return [n for n in found if n is not None]


def row_bytes(x: Any, buffer: Buffer) -> int:
    if not x.shape:
        raise CollectiveError("rows are dealt out along the first dimension; a scalar has none")
    return int(math.prod(x.shape[1:])) * buffer.itemsize


def layout_of(sizes: Iterable[Any]) -> int:
    """A checksum of the sizes that a message is made of; 0 for none."""
    found = list(sizes)
    return crc32(repr(found).encode()) if found else 0


def rows_each(size: int, kind: str, x: Any) -> int:
    """How many rows of `x` each rank gets."""
    if not x.shape or x.shape[0] % size:
        raise CollectiveError(
            f"{kind} deals out rows over {size} ranks: the first dimension must be a "
            f"multiple of that, not of shape {tuple(x.shape)}"
        )
    return int(x.shape[0]) // size
