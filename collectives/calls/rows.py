"""How rows are split over ranks, and the all-to-all of uneven splits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

from linkweave.collectives.calls.aliasing import refuse_overlaps
from linkweave.collectives.calls.gpu_work import GpuContext
from linkweave.collectives.calls.host import HostCalls, Uneven
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.tensors import output_for
from linkweave.topology.checks import integer


def alltoallv(context: HostCalls, x: Any, out: Any, in_splits: Any, out_splits: Any) -> Any:
    """All-to-all with uneven splits, of CPU tensors, which the ranks exchange first."""
    with context.sharing_errors():
        if isinstance(context, GpuContext):
            raise CollectiveError("alltoall with splits takes CPU tensors only")
        buffer, _ = context.buffer(x, written=False)
        row = row_bytes(x, buffer)
        sends = rows_sent(x, in_splits, context.size)
        key = splits_key("alltoall", x, buffer.dtype, in_splits, out_splits)
        known = context.known_sizes(key)
        mine = [sends, row, buffer.dtype, known.parts if known else 0]
    rows = context.gather("sizes", json.dumps(mine).encode())
    splits, widths, dtypes, expected = zip(*map(json.loads, rows), strict=True)
    if len({*widths}) > 1 or len({*dtypes}) > 1:
        raise CollectiveError(
            f"the ranks' rows differ: {list(widths)} bytes of {list(dtypes)}, by rank"
        )
    return _moved(context, x, buffer, splits, out, out_splits, (key, expected))


def exchange(context: Any, x: Any, counts: Any) -> Any:
    """All-to-all of `counts[src][dst]` rows from rank `src` to rank `dst`, as all ranks know."""
    with context.sharing_errors():
        size = context.size
        if len(counts) != size:
            raise CollectiveError(f"counts must be of {size} ranks, not {len(counts)}")
        splits = [row_counts("counts", split, size) for split in counts]
        rows_sent(x, splits[context.rank], size)
        buffer, _ = context.buffer(x, written=False)
    return _moved(context, x, buffer, splits)


def _moved(
    context: Any, x: Any, buffer: Buffer, splits: Sequence[Sequence[int]], out: Any = None,
    out_splits: Any = None, known: Any = None,
) -> Any:  # fmt: skip
    """`known`: what the ranks remember such calls by, and the checksums that they remember."""
    with context.sharing_errors():
        rank, size, row = context.rank, context.size, row_bytes(x, buffer)
        receives = [split[rank] for split in splits]
        if out_splits is not None and row_counts("out_splits", out_splits, size) != receives:
            raise CollectiveError(
                f"out_splits of rank {rank} says {list(out_splits)} rows come, by rank; the ranks "
                f"send {receives}"
            )
        given, out = out, output_for(x, (sum(receives), *x.shape[1:]), out)
        if given is not None:
            refuse_overlaps([x], [out])
        got, done = context.buffer(out)
        sizes = tuple(tuple(n * row for n in split) for split in splits)
        largest = max(map(max, sizes))
        like = replace(buffer, nbytes=largest * size)  # a size that all ranks agree on
        request = context.request("alltoall", like, "sum", parts=sizes_checksum((row, *splits)))
        if known:
            key, expected = known
            found = Uneven(len(x), sum(receives), like.nbytes, sizes, request.parts)
            context.remember_sizes(key, found)
            context.assumes = {*expected} == {request.parts}
    context.stage(replace(request, sizes=sizes), buffer, got)
    done()
    return out


def splits_key(kind: str, x: Any, dtype: str, *splits: Any) -> tuple[object, ...] | None:
    """What an uneven call is remembered by. None for a scalar and for splits that are no lists of
    int: these are read anew each time."""
    if not x.shape or not all(split is None or _plain(split) for split in splits):
        return None
    given = (None if split is None else tuple(split) for split in splits)
    return kind, tuple(x.shape[1:]), dtype, *given


def _plain(split: Any) -> bool:
    return type(split) in (list, tuple) and all(type(n) is int for n in split)


def rows_sent(x: Any, in_splits: Any, size: int) -> list[int]:
    """How many rows of `x` go to each rank: as many to each if `in_splits` is None. Raises
    CollectiveError."""
    if in_splits is None:
        return [rows_each(size, "alltoall", x)] * size
    sends = row_counts("in_splits", in_splits, size)
    if not x.shape or sum(sends) != x.shape[0]:
        raise CollectiveError(
            f"in_splits adds up to {sum(sends)} rows, for a tensor of shape {tuple(x.shape)}"
        )
    return sends


def row_counts(name: str, given: Any, size: int) -> list[int]:
    """`given` as one number of rows for each rank. Raises CollectiveError."""
    try:
        found = [integer(n, name, 0) for n in given]
    except (TypeError, CollectiveError):
        found = []
    if len(found) != size:
        raise CollectiveError(
            f"{name} must be {size} integers >= 0, the rows of each rank, not {given!r}"
        )
    return found


def row_bytes(x: Any, buffer: Buffer) -> int:
    """Bytes of one row of `x`. Raises CollectiveError for a scalar."""
    if not x.shape:
        raise CollectiveError("rows are split along the first dimension; a scalar has none")
    return int(math.prod(x.shape[1:])) * buffer.itemsize


def sizes_checksum(sizes: Iterable[Any]) -> int:
    """A checksum of the sizes of a message's parts; 0 if there are none."""
    found = list(sizes)
    return crc32(repr(found).encode()) if found else 0


def rows_each(size: int, kind: str, x: Any) -> int:
    """Rows of `x` for each rank. Raises CollectiveError if they cannot be split evenly."""
    if not x.shape or x.shape[0] % size:
        raise CollectiveError(
            f"{kind} splits rows over {size} ranks: the first dimension must be a "
            f"multiple of that, not of shape {tuple(x.shape)}"
        )
    return int(x.shape[0]) // size


def needs_out(rank: int, root: int) -> CollectiveError:
    """The error of a rank that asks a scatter for a new tensor, whose shape only the root knows."""
    return CollectiveError(f"scatter needs out on rank {rank}: its root is {root}")
