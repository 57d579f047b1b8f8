"""The collectives on tensors, wherever these lie: what is copied before and after the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol
from zlib import crc32

from collectives.aliasing import is_same, refuse_overlaps
from collectives.choices import Choices
from collectives.errors import CollectiveError
from collectives.planning.goals import Root
from collectives.request import Request
from collectives.runtime.arrivals import Arrivals
from collectives.runtime.shm import Buffer
from collectives.tensors import integer, room_for, stands_in_order
from collectives.trace import Trace


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
        self, kind: str, buffer: Buffer, op: str, root: Root = 0, algorithm: str = "auto",
        layout: int = 0,
    ) -> Request: ...  # fmt: skip

    def make(self, request: Request) -> None: ...


def into(
    place: Place, kind: str, x: Any, op: str, root: Any = 0, algorithm: str = "auto",
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
    place: Place, x: Any, layers: Any, op: str, algorithm: str, arrivals: Arrivals | None = None
) -> None:
    with place.telling():
        buffer, _ = place.buffer(x)
        if not stands_in_order(x):
            raise CollectiveError("a gradient queue needs a contiguous tensor")
        sizes = _layer_sizes(layers, buffer.nbytes // buffer.itemsize)
        nbytes = tuple(n * buffer.itemsize for n in sizes)
        request = place.request("allreduce", buffer, op, 0, algorithm, _layout(nbytes))
    place.make(replace(request, layers=nbytes, arrivals=arrivals))


def reduce(place: Place, x: Any, op: str, root: Any, out: Any) -> Any:
    with place.telling():
        root = _rank(place, root)
    if place.rank == root:
        return into(place, "reduce", x, op, root, out=out)
    with place.telling():  # partial results must not reach the caller
        buffer, _ = place.buffer(x, written=False)
        scratch = place.scratch(buffer, buffer.nbytes)
        request = place.request("reduce", scratch, op, root)
    place.make(replace(request, source=buffer))
    return None


def allgather(place: Place, x: Any, out: Any) -> Any:
    with place.telling():
        mine, _ = place.buffer(x, written=False)
        out = _room(x, (place.size, *x.shape), out, lambda out: (x, out[place.rank, ...]))
        whole, done = place.buffer(out)
        work = place.staged(whole)
        request = place.request("allgather", work, "sum")
    place.copy(work.address + place.rank * mine.nbytes, mine.address, mine.nbytes)
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


def allreduce_list(place: Place, tensors: list[Any], op: str, algorithm: str, out: Any) -> Any:
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


def _layout(sizes: Iterable[int]) -> int:
    """A checksum of the sizes that a message is made of."""
    return crc32(repr(list(sizes)).encode())


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
