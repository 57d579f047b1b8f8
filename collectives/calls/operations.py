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
from linkweave.collectives.calls.host import Calls
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


class Place(Protocol):
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
    place: Place, kind: str, x: Any, op: str, root: Any = 0, algorithm: How = "auto",
    out: Any = None,
) -> Any:  # fmt: skip
    """In place, or of `x` into an `out`, which is returned."""
    with place.telling():
        source = None
        if out is not None:
            source, _ = place.buffer(x, written=False)
            out = _room(x, tuple(x.shape), out, lambda out: (x, out))
        buffer, done = place.buffer(x if out is None else out)
        request = place.request(kind, buffer, op, _rank(place, root), algorithm)
    place.make(replace(request, source=source))
    done()
    return out


def queued(
    place: Place, x: Any, layers: Any, op: str, algorithm: How, arrivals: Arrivals | None = None
) -> None:
    with place.telling():
        buffer, _ = place.buffer(x)
        if not stands_in_order(x):
            raise CollectiveError("a gradient queue needs a contiguous tensor")
        sizes = _layer_sizes(layers, buffer.nbytes // buffer.itemsize)
        nbytes = tuple(n * buffer.itemsize for n in sizes)
        request = place.request("allreduce", buffer, op, 0, algorithm, _layout(nbytes))
    place.make(replace(request, layers=nbytes, arrivals=arrivals))


def reduce(place: Place, x: Any, op: str, root: Any, out: Any, how: How = "auto") -> Any:
    with place.telling():
        root = _rank(place, root)
    if place.rank == root:
        return into(place, "reduce", x, op, root, how, out)
    with place.telling():  # partial results must not reach the caller
        buffer, _ = place.buffer(x, written=False)
        scratch = place.scratch(buffer, buffer.nbytes)
        request = place.request("reduce", scratch, op, root, how)
    place.make(replace(request, source=buffer))
    return None


def allgather(place: Place, x: Any, out: Any, counts: Any) -> Any:
    with place.telling():
        mine, _ = place.buffer(x, written=False)
        in_place: Callable[[Any], tuple[Any, Any]]
        if counts is None:
            shape, sizes = (place.size, *x.shape), None
            in_place = lambda out: (x, out[place.rank, ...])  # noqa: E731
        else:
            rows = _row_counts("counts", counts, place.size)
            row = _row_bytes(x, mine)
            if mine.nbytes != rows[place.rank] * row:
                raise CollectiveError(
                    f"counts says {rows[place.rank]} rows for rank {place.rank}, whose tensor has "
                    f"shape {tuple(x.shape)}"
                )
            shape, sizes = (sum(rows), *x.shape[1:]), tuple(n * row for n in rows)
            first = sum(rows[: place.rank])
            in_place = lambda out: (x, out[first : first + len(x)])  # noqa: E731
        out = _room(x, shape, out, in_place)
        whole, done = place.buffer(out)
        work = place.staged(whole)
        request = place.request("allgather", work, "sum", layout=_layout(sizes or ()))
        if sizes:
            request = uneven(request, sizes)
    before = place.rank * mine.nbytes if sizes is None else sum(sizes[: place.rank])
    place.copy(work.address + before, mine.address, mine.nbytes)
    place.make(request)
    place.copy(whole.address, work.address, whole.nbytes)
    done()
    return out


def reduce_scatter(place: Place, x: Any, op: str, out: Any) -> Any:
    with place.telling():
        buffer, _ = place.buffer(x, written=False)
        rows = _share(place, "reduce_scatter", x)
        own = slice(place.rank * rows, (place.rank + 1) * rows)
        out = _room(x, (rows, *x.shape[1:]), out, lambda out: (x[own], out))
        mine, done = place.buffer(out)
        scratch = place.scratch(buffer, buffer.nbytes)
        request = place.request("reduce_scatter", scratch, op)
    place.make(replace(request, source=buffer))
    place.copy(mine.address, scratch.address + place.rank * mine.nbytes, mine.nbytes)
    done()
    return out


def alltoall(place: Place, x: Any, out: Any) -> Any:
    with place.telling():
        buffer, _ = place.buffer(x, written=False)
        block = _share(place, "alltoall", x) * (buffer.nbytes // max(1, x.shape[0]))
        out = _room(x, tuple(x.shape), out, lambda out: (x, out))
        got, done = place.buffer(out)
        scratch = place.scratch(buffer, 2 * buffer.nbytes)
        request = place.request("alltoall", scratch, "sum")
    received, own = scratch.address + buffer.nbytes, place.rank * block
    place.copy(received + own, buffer.address + own, block)
    place.make(replace(request, source=buffer))
    place.copy(got.address, received, buffer.nbytes)
    done()
    return out


def alltoall_uneven(place: Calls, x: Any, out: Any, in_splits: Any, out_splits: Any) -> Any:
    """Of CPU tensors: ranks tell each other how many rows they send."""
    with place.telling():
        buffer, _ = place.buffer(x, written=False)
        row = _row_bytes(x, buffer)
        sent = in_splits
        if in_splits is None:
            sent = [_share(place, "alltoall", x)] * place.size
        sends = _row_counts("in_splits", sent, place.size)
        if sum(sends) != x.shape[0]:
            raise CollectiveError(
                f"in_splits deals out {sum(sends)} rows of a tensor of shape {tuple(x.shape)}"
            )
    told = place.gather("sizes", json.dumps([sends, row, buffer.dtype]).encode())
    splits, widths, dtypes = zip(*map(json.loads, told), strict=True)
    if len({*widths}) > 1 or len({*dtypes}) > 1:
        raise CollectiveError(
            f"the ranks' rows differ: {list(widths)} bytes of {list(dtypes)}, by rank"
        )
    comes = [of[place.rank] for of in splits]
    with place.telling():
        if out_splits is not None and _row_counts("out_splits", out_splits, place.size) != comes:
            raise CollectiveError(
                f"out_splits of rank {place.rank} says {list(out_splits)} rows come, by rank, but "
                f"the ranks send {comes}"
            )
        given, out = out, room_for(x, (sum(comes), *x.shape[1:]), out)
        if given is not None:
            refuse_overlaps([x], [out])
        got, done = place.buffer(out)
        sizes = tuple(tuple(n * row for n in of) for of in splits)
        largest = max(max(of) for of in sizes)
        like = replace(buffer, nbytes=largest * place.size)  # the same on all ranks
        scratch = place.scratch(like, buffer.nbytes + got.nbytes)
        request = uneven(place.request("alltoall", scratch, "sum", layout=_layout(sizes)), sizes)
    received = scratch.address + buffer.nbytes
    place.copy(
        received + sum(of[place.rank] for of in sizes[: place.rank]),
        buffer.address + sum(sizes[place.rank][: place.rank]), sizes[place.rank][place.rank],
    )  # fmt: skip
    place.make(replace(request, source=buffer))
    place.copy(got.address, received, got.nbytes)
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


def run(place: Place, plan: Any, x: Any, op: str, root: int, out: Any) -> Any:
    with place.telling():
        if not isinstance(plan, Plan):
            raise CollectiveError(f"a Plan is needed, not {type(plan).__name__}")
        if plan.collective not in _RUN:
            raise CollectiveError(
                f"run carries out {', '.join(_RUN)}, not plans of {plan.collective}"
            )
        if plan.size != place.size:
            raise CollectiveError(f"the plan is for {plan.size} ranks; there are {place.size}")
    if plan.collective == "reduce" and place.rank != root:
        return reduce(place, x, op, root, None, plan)
    return into(place, plan.collective, x, op, root, plan, out)


def allreduce_list(place: Place, tensors: list[Any], op: str, algorithm: How, out: Any) -> Any:
    with place.telling():
        if not tensors:
            raise CollectiveError("allreduce needs at least one tensor in its list")
        buffers = [place.buffer(x, written=out is None) for x in tensors]
        names = sorted({b.dtype for b, _ in buffers})
        if len(names) > 1:
            raise CollectiveError(f"the tensors of one call need one dtype, not {names}")
        results = buffers if out is None else _results(place, tensors, out)
        refuse_overlaps(*(([], tensors) if out is None else (tensors, out)))
        total = sum(b.nbytes for b, _ in buffers)
        first = buffers[0][0]
        like = Buffer(0, total, first.dtype, first.itemsize)
        flat = place.scratch(like, total)
        layout = _layout(b.nbytes for b, _ in buffers)
        request = place.request("allreduce", flat, op, 0, algorithm, layout)
    at = flat.address
    for buffer, _ in buffers:
        place.copy(at, buffer.address, buffer.nbytes)
        at += buffer.nbytes
    place.make(request)
    at = flat.address
    for buffer, done in results:
        place.copy(buffer.address, at, buffer.nbytes)
        at += buffer.nbytes
        done()
    return out


def _results(place: Place, tensors: list[Any], out: Any) -> list[tuple[Buffer, Callable[[], None]]]:
    if not isinstance(out, list | tuple) or len(out) != len(tensors):
        raise CollectiveError(f"out must be a list of {len(tensors)} tensors, as there are inputs")
    return [place.buffer(room_for(x, tuple(x.shape), y)) for x, y in zip(tensors, out, strict=True)]


def _room(
    x: Any, shape: tuple[int, ...], out: Any, in_place: Callable[[Any], tuple[Any, Any]]
) -> Any:
    """Where a result goes: `out`, or a new tensor. What is the same memory where a call is in
    place, `in_place` takes from `x` and `out`; else these must lie apart."""
    room = room_for(x, shape, out)
    if out is not None and not is_same(*in_place(out)):
        refuse_overlaps([x], [out])
    return room


def _rank(place: Place, root: Any) -> int:
    if (number := integer(root)) is None:
        raise CollectiveError(f"root {root!r} is not a rank; ranks are 0 to {place.size - 1}")
    return number


def _layout(sizes: Iterable[Any]) -> int:
    """A checksum of the sizes that a message is made of; 0 for none."""
    found = list(sizes)
    return crc32(repr(found).encode()) if found else 0


def _share(place: Place, kind: str, x: Any) -> int:
    """How many rows of `x` each rank gets."""
    if not x.shape or x.shape[0] % place.size:
        raise CollectiveError(
            f"{kind} deals out rows over {place.size} ranks: the first dimension must be a "
            f"multiple of that, not of shape {tuple(x.shape)}"
        )
    return int(x.shape[0]) // place.size


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
