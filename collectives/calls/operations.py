"""The collectives on tensors, wherever these lie: what is copied before and after the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from linkweave.collectives.calls.aliasing import is_same, refuse_overlaps
from linkweave.collectives.calls.context import CallContext
from linkweave.collectives.calls.request import How
from linkweave.collectives.calls.uneven import layout_of, row_bytes, row_counts, rows_each, uneven
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.cpu.arrivals import Arrivals
from linkweave.collectives.tensors import integer, room_for, stands_in_order

_RUN = ("allreduce", "broadcast", "reduce")
"""Collectives whose plans of a user's own are run."""


def into(
    context: CallContext, kind: str, x: Any, op: str, root: Any = 0, algorithm: How = "auto",
    out: Any = None,
) -> Any:  # fmt: skip
    """In place, or of `x` into an `out`, which is returned."""
    with context.telling():
        source = None
        if out is not None:
            source, _ = context.buffer(x, written=False)
            out = _room(x, tuple(x.shape), out, lambda out: (x, out))
        buffer, done = context.buffer(x if out is None else out)
        request = context.request(kind, buffer, op, _rank(context, root), algorithm)
    context.make(replace(request, source=source))
    done()
    return out


def queued(
    context: CallContext,
    x: Any,
    layers: Any,
    op: str,
    algorithm: How,
    arrivals: Arrivals | None = None,
) -> None:
    with context.telling():
        buffer, _ = context.buffer(x)
        if not stands_in_order(x):
            raise CollectiveError("a gradient queue needs a contiguous tensor")
        sizes = _layer_sizes(layers, buffer.nbytes // buffer.itemsize)
        nbytes = tuple(n * buffer.itemsize for n in sizes)
        request = context.request("allreduce", buffer, op, 0, algorithm, layout_of(nbytes))
    context.make(replace(request, layers=nbytes, arrivals=arrivals))


def reduce(context: CallContext, x: Any, op: str, root: Any, out: Any, how: How = "auto") -> Any:
    with context.telling():
        root = _rank(context, root)
    if context.rank == root:
        return into(context, "reduce", x, op, root, how, out)
    with context.telling():  # partial results must not reach the caller
        buffer, _ = context.buffer(x, written=False)
        scratch = context.scratch(buffer, buffer.nbytes)
        request = context.request("reduce", scratch, op, root, how)
    context.make(replace(request, source=buffer))
    return None


def allgather(context: CallContext, x: Any, out: Any, counts: Any) -> Any:
    with context.telling():
        mine, _ = context.buffer(x, written=False)
        in_place: Callable[[Any], tuple[Any, Any]]
        if counts is None:
            shape, sizes = (context.size, *x.shape), None
            in_place = lambda out: (x, out[context.rank, ...])  # noqa: E731
        else:
            rows = row_counts("counts", counts, context.size)
            row = row_bytes(x, mine)
            if mine.nbytes != rows[context.rank] * row:
                raise CollectiveError(
                    f"counts says {rows[context.rank]} rows for rank {context.rank}, whose tensor "
                    f"has shape {tuple(x.shape)}"
                )
            shape, sizes = (sum(rows), *x.shape[1:]), tuple(n * row for n in rows)
            first = sum(rows[: context.rank])
            in_place = lambda out: (x, out[first : first + len(x)])  # noqa: E731
        out = _room(x, shape, out, in_place)
        whole, done = context.buffer(out)
        work = context.staged(whole)
        request = context.request("allgather", work, "sum", layout=layout_of(sizes or ()))
        if sizes:
            request = uneven(request, sizes)
    before = context.rank * mine.nbytes if sizes is None else sum(sizes[: context.rank])
    context.copy(work.address + before, mine.address, mine.nbytes)
    context.make(request)
    context.copy(whole.address, work.address, whole.nbytes)
    done()
    return out


def reduce_scatter(context: CallContext, x: Any, op: str, out: Any) -> Any:
    with context.telling():
        buffer, _ = context.buffer(x, written=False)
        rows = rows_each(context.size, "reduce_scatter", x)
        own = slice(context.rank * rows, (context.rank + 1) * rows)
        out = _room(x, (rows, *x.shape[1:]), out, lambda out: (x[own], out))
        mine, done = context.buffer(out)
        scratch = context.scratch(buffer, buffer.nbytes)
        request = context.request("reduce_scatter", scratch, op)
    context.make(replace(request, source=buffer))
    context.copy(mine.address, scratch.address + context.rank * mine.nbytes, mine.nbytes)
    done()
    return out


def alltoall(context: CallContext, x: Any, out: Any) -> Any:
    with context.telling():
        buffer, _ = context.buffer(x, written=False)
        block = rows_each(context.size, "alltoall", x) * (buffer.nbytes // max(1, x.shape[0]))
        out = _room(x, tuple(x.shape), out, lambda out: (x, out))
        got, done = context.buffer(out)
        scratch = context.scratch(buffer, 2 * buffer.nbytes)
        request = context.request("alltoall", scratch, "sum")
    received, own = scratch.address + buffer.nbytes, context.rank * block
    context.copy(received + own, buffer.address + own, block)
    context.make(replace(request, source=buffer))
    context.copy(got.address, received, buffer.nbytes)
    done()
    return out


def run(context: CallContext, plan: Any, x: Any, op: str, root: int, out: Any) -> Any:
    with context.telling():
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
    with context.telling():
        if not tensors:
            raise CollectiveError("allreduce needs at least one tensor in its list")
        buffers = [context.buffer(x, written=out is None) for x in tensors]
        names = sorted({b.dtype for b, _ in buffers})
        if len(names) > 1:
            raise CollectiveError(f"the tensors of one call need one dtype, not {names}")
        results = buffers if out is None else _results(context, tensors, out)
        refuse_overlaps(*(([], tensors) if out is None else (tensors, out)))
        total = sum(b.nbytes for b, _ in buffers)
        first = buffers[0][0]
        like = Buffer(0, total, first.dtype, first.itemsize)
        flat = context.scratch(like, total)
        layout = layout_of(b.nbytes for b, _ in buffers)
        request = context.request("allreduce", flat, op, 0, algorithm, layout)
    at = flat.address
    for buffer, _ in buffers:
        context.copy(at, buffer.address, buffer.nbytes)
        at += buffer.nbytes
    context.make(request)
    at = flat.address
    for buffer, done in results:
        context.copy(buffer.address, at, buffer.nbytes)
        at += buffer.nbytes
        done()
    return out


def _results(
    context: CallContext, tensors: list[Any], out: Any
) -> list[tuple[Buffer, Callable[[], None]]]:
    if not isinstance(out, list | tuple) or len(out) != len(tensors):
        raise CollectiveError(f"out must be a list of {len(tensors)} tensors, as there are inputs")
    return [
        context.buffer(room_for(x, tuple(x.shape), y)) for x, y in zip(tensors, out, strict=True)
    ]


def _room(
    x: Any, shape: tuple[int, ...], out: Any, in_place: Callable[[Any], tuple[Any, Any]]
) -> Any:
    """Where a result goes: `out`, or a new tensor. What is the same memory where a call is in
    place, `in_place` takes from `x` and `out`; else these must lie apart."""
    room = room_for(x, shape, out)
    if out is not None and not is_same(*in_place(out)):
        refuse_overlaps([x], [out])
    return room


def _rank(context: CallContext, root: Any) -> int:
    if (number := integer(root)) is None:
        raise CollectiveError(f"root {root!r} is not a rank; ranks are 0 to {context.size - 1}")
    return number


def _layer_sizes(layers: Any, elements: int) -> list[int]:
    """Elements of each layer, checked against those of the tensor."""
    try:
        sizes = list(layers)
    except TypeError:
        sizes = [layers]
    numbers = [integer(n) for n in sizes]
    if wrong := [
        n for n, number in zip(sizes, numbers, strict=True) if number is None or number < 0
    ]:
        raise CollectiveError(f"layers are numbers of elements, integers >= 0, not {wrong[0]!r}")
    sizes = [int(n) for n in sizes]
    if sum(sizes) != elements:
        raise CollectiveError(
            f"layers of {sum(sizes)} elements for a tensor of {elements}: they must agree"
        )
    return sizes
