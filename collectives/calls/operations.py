"""The collectives on tensors of any device: checks, and copies before and after the call."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.calls.gpu import GpuContext
from linkweave.collectives.calls.host import HostCalls, Uneven
from linkweave.collectives.calls.request import How
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.collective import COLLECTIVES, SENDRECV, Layout, Pairs, targets
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.cpu.layer_counters import LayerCounters
from linkweave.collectives.runtime.tensors import is_contiguous, output_for
from linkweave.kernels.validate import is_torch
from linkweave.topology.checks import integer

CallContext = HostCalls | GpuContext
"""One rank's buffers, copies and launches: on the CPU, or for one call on a GPU."""

_RUN = tuple(c.name for c in COLLECTIVES.values() if c.layout is Layout.WHOLE and c.root != "pairs")
"""Collectives for which `run` takes plans."""


def into(
    context: CallContext, kind: str, x: Any, op: str, root: Any = 0, algorithm: How = "auto",
    out: Any = None,
) -> Any:  # fmt: skip
    """A collective of kind `kind` on `x`, in place or from `x` into `out`. Returns `out`."""
    with context.sharing_errors():
        given = None
        if out is not None:
            given, _ = context.buffer(x, written=False)
            out = _output(x, tuple(x.shape), out, lambda out: (x, out))
        buffer, done = context.buffer(x if out is None else out)
        request = context.request(kind, buffer, op, _rank(context, root), algorithm)
    if given is None:
        context.make(request)
    else:
        context.stage(request, given, buffer)
    done()
    return out


def sendrecv(context: CallContext, x: Any, pairs: Pairs) -> None:
    """Messages from the sources of pairs to their targets, in place."""
    with context.sharing_errors():
        buffer, done = context.buffer(x, written=context.rank in targets(pairs))
        request = context.request(SENDRECV, buffer, "sum", pairs)
    context.make(request)
    done()


def queued(
    context: CallContext, x: Any, layers: Any, op: str, algorithm: How,
    layer_counters: LayerCounters | None = None,
) -> None:  # fmt: skip
    """An in-place all-reduce that counts the arrival of each layer."""
    with context.sharing_errors():
        buffer, _ = context.buffer(x)
        sizes = layer_sizes(x, layers, buffer.nbytes // buffer.itemsize)
        nbytes = tuple(n * buffer.itemsize for n in sizes)
        request = context.request("allreduce", buffer, op, 0, algorithm, sizes_checksum(nbytes))
    context.make(replace(request, layers=nbytes, layer_counters=layer_counters))


def reduce(context: CallContext, x: Any, op: str, root: Any, out: Any, how: How = "auto") -> Any:
    with context.sharing_errors():
        root = _rank(context, root)
    if context.rank == root:
        return into(context, "reduce", x, op, root, how, out)
    with context.sharing_errors():  # partial sums go to scratch memory, not to the caller's tensor
        buffer, _ = context.buffer(x, written=False)
        request = context.request("reduce", buffer, op, root, how)
    context.stage(request, buffer, None)
    return None


def shape_of(kind: str, shape: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """The shape of the result for an input of this shape on `size` ranks; None if its rows cannot
    be divided between them."""
    if COLLECTIVES[kind].gathers:
        return (size, *shape)
    if not shape or shape[0] % size:
        return None
    each = COLLECTIVES[kind].layout is Layout.PER_RANK  # has one row; else one from each rank
    return (shape[0] // size, *shape[1:]) if each else shape


def allgather(context: CallContext, x: Any, out: Any, counts: Any) -> Any:
    with context.sharing_errors():
        mine, _ = context.buffer(x, written=False)
        own: Any  # where `x` goes in `out`
        if counts is None:
            shape, sizes, own = (context.size, *x.shape), None, (context.rank, ...)
            parts = 0
        else:
            rows = row_counts("counts", counts, context.size)
            row = row_bytes(x, mine)
            if len(x) != rows[context.rank]:
                raise CollectiveError(
                    f"counts says {rows[context.rank]} rows for rank {context.rank}, whose tensor "
                    f"has shape {tuple(x.shape)}"
                )
            shape, sizes = (sum(rows), *x.shape[1:]), tuple(n * row for n in rows)
            parts = sizes_checksum((row, *rows))  # whose rows may have no bytes
            first = sum(rows[: context.rank])
            own = slice(first, first + len(x))
        out = _output(x, shape, out, lambda out: (x, out[own]))
        whole, done = context.buffer(out)
        request = context.request("allgather", whole, "sum", parts=parts)
        if sizes and not isinstance(context, GpuContext):
            request = replace(request, sizes=sizes)
            key = splits_key("allgather", x, mine.dtype, counts)
            known = Uneven(len(x), shape[0], whole.nbytes, sizes, request.parts)
            context.remember_sizes(key, known)
    if sizes and isinstance(context, GpuContext):
        context.gather_parts(mine, whole, sizes)
    else:
        context.stage(request, mine, whole)
    done()
    return out


def divided(context: CallContext, kind: str, x: Any, op: str, out: Any) -> Any:
    """A "reduce_scatter" or an "alltoall", which divide the rows of `x` between the ranks."""
    with context.sharing_errors():
        given, _ = context.buffer(x, written=False)
        if COLLECTIVES[kind].combines:
            out = _dealt(context, kind, x, out)
        else:
            rows_each(context.size, kind, x)
            out = _output(x, tuple(x.shape), out, lambda out: (x, out))
        result, done = context.buffer(out)
        request = context.request(kind, given, op)
    context.stage(request, given, result)
    done()
    return out


def gather(context: CallContext, x: Any, root: Any, out: Any) -> Any:
    with context.sharing_errors():
        root, result, done = _rank(context, root), None, None
        given, _ = context.buffer(x, written=False)
        if context.rank == root:
            shape = (context.size, *x.shape)
            out = _output(x, shape, out, lambda out: (x, out[context.rank, ...]))
            result, done = context.buffer(out)
        message = replace(given, nbytes=given.nbytes * context.size)
        request = context.request("gather", message, "sum", root)
    context.stage(request, given, result)
    if done is None:
        return None
    done()
    return out


def scatter(context: CallContext, x: Any, root: Any, out: Any) -> Any:
    with context.sharing_errors():
        root = _rank(context, root)
        if context.rank == root:
            given, _ = context.buffer(x, written=False)
            out = _dealt(context, "scatter", x, out)
        elif out is None:
            raise needs_out(context.rank, root)
        result, done = context.buffer(out)
        if context.rank != root:
            given = replace(result, address=0, nbytes=0)
        message = replace(result, nbytes=result.nbytes * context.size)
        request = context.request("scatter", message, "sum", root)
    context.stage(request, given, result)
    done()
    return out


def run(context: CallContext, plan: Any, x: Any, op: str, root: int, out: Any) -> Any:
    with context.sharing_errors():
        if not isinstance(plan, Plan):
            raise CollectiveError(f"a Plan is needed, not {type(plan).__name__}")
        if plan.collective not in _RUN:
            raise CollectiveError(
                f"run carries out {', '.join(_RUN)}, not plans of {plan.collective}"
            )
        if plan.size != context.size:
            raise CollectiveError(f"the plan is for {plan.size} ranks; there are {context.size}")
    if plan.collective == "reduce" and context.rank != root:
        return reduce(context, x, op, root, None, plan)
    return into(context, plan.collective, x, op, root, plan, out)


def allreduce_list(
    context: CallContext, tensors: list[Any], op: str, algorithm: How, out: Any
) -> Any:
    """An all-reduce of several tensors as one message."""
    with context.sharing_errors():
        check_list(tensors, out)
        buffers = [context.buffer(x, written=out is None) for x in tensors]
        one_dtype(b.dtype for b, _ in buffers)
        results = buffers
        if out is not None:
            pairs = zip(tensors, out, strict=True)
            results = [context.buffer(output_for(x, tuple(x.shape), y)) for x, y in pairs]
        refuse_overlaps(*(([], tensors) if out is None else (tensors, out)))
        total = sum(b.nbytes for b, _ in buffers)
        first = buffers[0][0]
        like = Buffer(0, total, first.dtype, first.itemsize)
        parts = sizes_checksum(b.nbytes for b, _ in buffers)
        request = context.request("allreduce", like, op, 0, algorithm, parts)
        flat = context.scratch(request, total)
    starts = [*accumulate((b.nbytes for b, _ in buffers), initial=flat.address)]
    for start, (buffer, _) in zip(starts, buffers, strict=False):
        context.copy(start, buffer.address, buffer.nbytes)
    context.make(replace(request, buffer=flat))
    for start, (buffer, done) in zip(starts, results, strict=False):
        context.copy(buffer.address, start, buffer.nbytes)
        done()
    return out


def check_list(tensors: list[Any], out: Any) -> None:
    """Raise CollectiveError unless there are tensors, and as many in `out` if it is given."""
    if not tensors:
        raise CollectiveError("allreduce needs at least one tensor in its list")
    if out is not None and (not isinstance(out, list | tuple) or len(out) != len(tensors)):
        raise CollectiveError(f"out must be a list of {len(tensors)} tensors")


def one_dtype(dtypes: Iterable[str]) -> str:
    """The dtype of all tensors of a call. Raises CollectiveError if they differ."""
    names = sorted({*dtypes})
    if len(names) > 1:
        raise CollectiveError(f"the tensors of one call need one dtype, not {names}")
    return names[0]


def _dealt(context: CallContext, kind: str, x: Any, out: Any) -> Any:
    """The tensor for this rank's rows of `x`, as `_output`."""
    rows = rows_each(context.size, kind, x)
    own = slice(context.rank * rows, (context.rank + 1) * rows)
    return _output(x, (rows, *x.shape[1:]), out, lambda out: (x[own], out))


def _output(
    x: Any, shape: tuple[int, ...], out: Any, in_place: Callable[[Any], tuple[Any, Any]]
) -> Any:
    """The tensor for a result: `out`, or a new one. Raises CollectiveError if `out` overlaps `x`.

    An in-place call is allowed: `in_place(out)` are the parts of `x` and `out` that are then the
    same memory.
    """
    result = output_for(x, shape, out)
    if out is not None and not is_same(*in_place(out)):
        refuse_overlaps([x], [out])
    return result


def _rank(context: CallContext, root: Any) -> int:
    return integer(root, "root", 0, context.size - 1)


def layer_sizes(x: Any, layers: Any, elements: int) -> list[int]:
    """Elements of each layer of a gradient queue. Raises CollectiveError unless they add up to
    those of the tensor, which must be contiguous."""
    if not is_contiguous(x):
        raise CollectiveError("a gradient queue needs a contiguous tensor")
    try:
        given = list(layers)
    except TypeError:
        given = [layers]
    sizes = [integer(n, "the number of elements of a layer", 0) for n in given]
    if sum(sizes) != elements:
        raise CollectiveError(
            f"layers of {sum(sizes)} elements for a tensor of {elements}: they must agree"
        )
    return sizes


def alltoallv(context: CallContext, x: Any, out: Any, in_splits: Any, out_splits: Any) -> Any:
    """All-to-all with uneven splits, which the ranks exchange first."""
    if isinstance(context, GpuContext):
        return _alltoallv_on_gpu(context, x, out, in_splits, out_splits)
    with context.sharing_errors():
        buffer, _ = context.buffer(x, written=False)
        row = row_bytes(x, buffer)
        sends = rows_sent(x, in_splits, context.size)
        key = splits_key("alltoall", x, buffer.dtype, in_splits, out_splits)
        known = context.known_sizes(key)
        mine = [sends, row, buffer.dtype, known.parts if known else 0]
    splits, expected = _of_all_ranks(context, mine)
    return _moved(context, x, buffer, splits, out, out_splits, (key, expected))


def _of_all_ranks(host: HostCalls, mine: list[Any]) -> tuple[Any, Any]:
    """The splits of all ranks, which have rows of one kind, and what each says beside them."""
    rows = host.gather("sizes", json.dumps(mine).encode())
    splits, widths, dtypes, others = zip(*map(json.loads, rows), strict=True)
    if len({*widths}) > 1 or len({*dtypes}) > 1:
        raise CollectiveError(
            f"the ranks' rows differ: {list(widths)} bytes of {list(dtypes)}, by rank"
        )
    return splits, others


def _alltoallv_on_gpu(
    context: GpuContext, x: Any, out: Any, in_splits: Any, out_splits: Any
) -> Any:
    """As `alltoallv`, in blocks of the largest part, rounded up so that few sizes occur."""
    host, size, rank = context.gpu.host, context.size, context.rank
    with host.sharing_errors():
        context.gpu.refuse_capture(context.caller, "exchanges its splits on the host")
        buffer, _ = context.buffer(x, written=False)
        row, sends = row_bytes(x, buffer), rows_sent(x, in_splits, size)
        comes = None if out_splits is None else row_counts("out_splits", out_splits, size)
        room = written = None
        if out is not None:
            room = len(out)
            output_for(x, (room, *x.shape[1:]), out)
            refuse_overlaps([x], [out])
            written = context.buffer(out)
    splits, expected = _of_all_ranks(host, [sends, row, buffer.dtype, [comes, room]])
    for r, (told, room) in enumerate(expected):  # all ranks raise the same
        receives = [split[r] for split in splits]
        if told not in (None, receives):
            raise _other_rows(r, told, receives)
        if room not in (None, sum(receives)):
            raise CollectiveError(
                f"out of rank {r} has room for {room} rows; {sum(receives)} come, by rank "
                f"{receives}"
            )
    if written is None:
        rows = sum(split[rank] for split in splits)
        out = output_for(x, (rows, *x.shape[1:]), None)
        written = context.buffer(out)
    got, done = written
    _deal(context, buffer, got, row, splits)
    done()
    return out


def _deal(
    context: GpuContext, given: Buffer, got: Buffer, row: int, splits: Sequence[Sequence[int]]
) -> None:
    """Make an all-to-all of `splits[src][dst]` rows of so many bytes."""
    if largest := max(map(max, splits)) * row:
        like = replace(given, nbytes=context.size << (largest - 1).bit_length())
        request = context.request("alltoall", like, "sum")
        context.move_parts(request, given, got, [[n * row for n in split] for split in splits])


def exchange_on_gpu(
    context: GpuContext, x: Any, counts: Sequence[Sequence[int]], out: Any
) -> None:  # fmt: skip
    """An all-to-all of `counts[src][dst]` rows, which all ranks know: no rank tells its own."""
    given, _ = context.buffer(x, written=False)
    got, done = context.buffer(out)
    _deal(context, given, got, row_bytes(x, given), counts)
    done()


def _other_rows(rank: int, told: Sequence[int], receives: Sequence[int]) -> CollectiveError:
    return CollectiveError(
        f"out_splits of rank {rank} says {list(told)} rows come, by rank; the ranks send "
        f"{list(receives)}"
    )


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
            raise _other_rows(rank, out_splits, receives)
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


_WORK = 1000
"""Steps in which NumPy must prove that strided arrays do not share memory; else they count as
sharing it."""


def refuse_overlaps(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raise CollectiveError if an output shares memory with another output or an input.

    An output may be identical to the input at its own index.
    """
    many, tensors = len(outputs), [*outputs, *inputs]
    for i, j in _pairs(tensors):
        if i >= many or (j == i + many and is_same(tensors[i], tensors[j])):
            continue
        if j < many:
            name = "out" if inputs else "the list"
            raise CollectiveError(
                f"tensors {i} and {j} of {name} share memory: each takes a result of its own"
            )
        which = f" (out[{i}], input {j - many})" if len(inputs) > 1 else ""
        raise CollectiveError(
            f"out overlaps the input{which}: it must be the input or share no memory with it"
        )


def is_same(a: Any, b: Any) -> bool:
    """Whether two tensors are the same elements at the same addresses."""
    return _extent(_memory(a)) == _extent(_memory(b))


def _extent(x: NDArray[Any]) -> tuple[object, ...]:
    sides = [(n, s) for n, s in zip(x.shape, x.strides, strict=True) if n > 1]
    return x.__array_interface__["data"][0], sides, x.itemsize


def _pairs(tensors: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """(i, j), i < j, of tensors that share memory."""
    spans = sorted((*_span(x), i) for i, x in enumerate(tensors) if 0 not in x.shape)
    near: list[tuple[int, int]] = []  # (end, index) of tensors whose span may reach the next one
    for start, stop, i in spans:
        near = [(end, j) for end, j in near if end > start]
        for _, j in near:
            a, b = _memory(tensors[i]), _memory(tensors[j])
            if np.may_share_memory(a, b, max_work=_WORK):  # type: ignore[arg-type]
                yield min(i, j), max(i, j)
        near.append((stop, i))


def _span(x: Any) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the byte after its last."""
    if is_torch(x) and is_contiguous(x):
        start = int(x.data_ptr())
        return start, start + int(x.nbytes)
    return np.lib.array_utils.byte_bounds(_memory(x))


def _memory(x: Any) -> NDArray[Any]:
    """A NumPy array over a tensor's memory. Do not read it: the memory may be on a GPU."""
    return x if isinstance(x, np.ndarray) else np.asarray(_Described(x))


class _Described:
    def __init__(self, x: Any) -> None:
        if is_torch(x):
            item = x.element_size()
            self.__array_interface__: dict[str, Any] = {
                "version": 3, "data": (x.data_ptr(), False), "shape": tuple(x.shape),
                "strides": tuple(s * item for s in x.stride()), "typestr": f"|V{item}",
            }  # fmt: skip
        else:
            self.__array_interface__ = {**x.__cuda_array_interface__, "version": 3}
