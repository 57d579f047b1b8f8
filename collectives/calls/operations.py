"""The collectives on tensors, wherever these lie: what is copied before and after the call."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol
from zlib import crc32

from linkweave.collectives.calls.aliasing import is_same, refuse_overlaps
from linkweave.collectives.calls.choices import Choices
from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.request import How, Request
from linkweave.collectives.calls.trace import Trace
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.blocks import Sizes
from linkweave.collectives.planning.goals import Root
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.cpu.arrivals import Arrivals
from linkweave.collectives.tensors import integer, room_for, stands_in_order

_RUN = ("allreduce", "broadcast", "reduce")
"""Collectives whose plans of a user's own are run."""


class CallContext(Protocol):
    """One rank's side of calls on one kind of memory (`calls.Calls`, `gpu_calls.OnStream`)."""

    rank: int
    size: int
    choices: Choices
    trace: Trace

    def telling(self) -> AbstractContextManager[None]:
        """Around what may refuse its arguments."""

    def buffer(self, x: Any, written: bool = True) -> tuple[Buffer, Callable[[], None]]:
        """The memory of `x`, and what must be called once the collective has filled it."""

    def scratch(self, like: Buffer, nbytes: int) -> Buffer:
        """Memory of `nbytes` to work in, described as a message of the size of `like`."""

    def staged(self, whole: Buffer) -> Buffer:
        """Where to work on what must end in `whole`: there, or in scratch memory."""

    def copy(self, dst: int, src: int, nbytes: int) -> None: ...

    def request(
        self, kind: str, buffer: Buffer, op: str, root: Root = 0, algorithm: How = "auto",
        layout: int = 0,
    ) -> Request: ...  # fmt: skip

    def make(self, request: Request) -> None: ...


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
        request = context.request("allreduce", buffer, op, 0, algorithm, _layout(nbytes))
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
            rows = _row_counts("counts", counts, context.size)
            row = _row_bytes(x, mine)
            if mine.nbytes != rows[context.rank] * row:
                raise CollectiveError(
                    f"counts says {rows[context.rank]} rows for rank {context.rank}, whose tensor "
                    "has "
                    f"shape {tuple(x.shape)}"
                )
            shape, sizes = (sum(rows), *x.shape[1:]), tuple(n * row for n in rows)
            first = sum(rows[: context.rank])
            in_place = lambda out: (x, out[first : first + len(x)])  # noqa: E731
        out = _room(x, shape, out, in_place)
        whole, done = context.buffer(out)
        work = context.staged(whole)
        request = context.request("allgather", work, "sum", layout=_layout(sizes or ()))
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
        rows = _share(context, "reduce_scatter", x)
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
        block = _share(context, "alltoall", x) * (buffer.nbytes // max(1, x.shape[0]))
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


def alltoall_uneven(context: HostCalls, x: Any, out: Any, in_splits: Any, out_splits: Any) -> Any:
    """Of CPU tensors: ranks tell each other how many rows they send."""
    with context.telling():
        buffer, _ = context.buffer(x, written=False)
        row = _row_bytes(x, buffer)
        sent = in_splits
        if in_splits is None:
            sent = [_share(context, "alltoall", x)] * context.size
        sends = _row_counts("in_splits", sent, context.size)
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
        if out_splits is not None and _row_counts("out_splits", out_splits, context.size) != comes:
            raise CollectiveError(
                f"out_splits of rank {context.rank} says {list(out_splits)} rows come, by rank, "
                "but "
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
        request = uneven(context.request("alltoall", scratch, "sum", layout=_layout(sizes)), sizes)
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


def _row_counts(name: str, given: Any, size: int) -> list[int]:
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


def _row_bytes(x: Any, buffer: Buffer) -> int:
    if not x.shape:
        raise CollectiveError("rows are dealt out along the first dimension; a scalar has none")
    return int(math.prod(x.shape[1:])) * buffer.itemsize


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
        layout = _layout(b.nbytes for b, _ in buffers)
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
    context, `in_place` takes from `x` and `out`; else these must lie apart."""
    room = room_for(x, shape, out)
    if out is not None and not is_same(*in_place(out)):
        refuse_overlaps([x], [out])
    return room


def _rank(context: CallContext, root: Any) -> int:
    if (number := integer(root)) is None:
        raise CollectiveError(f"root {root!r} is not a rank; ranks are 0 to {context.size - 1}")
    return number


def _layout(sizes: Iterable[Any]) -> int:
    """A checksum of the sizes that a message is made of; 0 for none."""
    found = list(sizes)
    return crc32(repr(found).encode()) if found else 0


def _share(context: CallContext, kind: str, x: Any) -> int:
    """How many rows of `x` each rank gets."""
    if not x.shape or x.shape[0] % context.size:
        raise CollectiveError(
            f"{kind} deals out rows over {context.size} ranks: the first dimension must be a "
            f"multiple of that, not of shape {tuple(x.shape)}"
        )
    return int(x.shape[0]) // context.size


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
