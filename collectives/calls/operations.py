"""The collectives on tensors of any device: checks, and copies before and after the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any

from linkweave.collectives.calls.aliasing import is_same, refuse_overlaps
from linkweave.collectives.calls.gpu_work import GpuContext
from linkweave.collectives.calls.host import HostCalls, Uneven
from linkweave.collectives.calls.request import How
from linkweave.collectives.calls.rows import (
    needs_out,
    row_bytes,
    row_counts,
    rows_each,
    sizes_checksum,
    splits_key,
)
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.collective import COLLECTIVES, Layout
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.cpu.layer_counters import LayerCounters
from linkweave.collectives.tensors import is_contiguous, output_for
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
    if kind in ("allgather", "gather"):
        return (size, *shape)
    if not shape or shape[0] % size:
        return None
    return shape if kind == "alltoall" else (shape[0] // size, *shape[1:])


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
        if sizes:
            if isinstance(context, GpuContext):
                raise CollectiveError("allgather with counts takes CPU tensors only")
            request = replace(request, sizes=sizes)
            key = splits_key("allgather", x, mine.dtype, counts)
            known = Uneven(len(x), shape[0], whole.nbytes, sizes, request.parts)
            context.remember_sizes(key, known)
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
        flat = context.scratch(like, total)
        parts = sizes_checksum(b.nbytes for b, _ in buffers)
        request = context.request("allreduce", flat, op, 0, algorithm, parts)
    starts = [*accumulate((b.nbytes for b, _ in buffers), initial=flat.address)]
    for start, (buffer, _) in zip(starts, buffers, strict=False):
        context.copy(start, buffer.address, buffer.nbytes)
    context.make(request)
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
