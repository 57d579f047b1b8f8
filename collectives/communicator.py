"""What users hold: a Communicator, one on each rank."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import index
from types import TracebackType
from typing import Any, TypeVar
from zlib import crc32

import numpy as np

from collectives.calls import Calls
from collectives.errors import CollectiveError
from collectives.request import NOTHING, Request
from collectives.runtime.arena import Arena
from collectives.runtime.diagnose import CLOSED
from collectives.runtime.reference import DTYPES
from collectives.runtime.shm import Buffer
from collectives.tensors import Block, as_buffer, bytes_of, numpy_name, room_for
from collectives.work import Work
from topology import Topology, load

log = logging.getLogger("linkweave")

ORDERS = ("fastest", "fixed")
T = TypeVar("T")


class Communicator:
    """The ranks of one machine, and the collectives among them.

    A context manager; `close` ends it. Every rank must make the same calls in the same order:
    each call begins by comparing what all ranks ask for, and differs anywhere -> CollectiveError
    on every rank, before any data moves. `timeout` (s) bounds every wait for a peer.
    """

    def __init__(
        self,
        arena: Arena,
        topology: Topology | str = "auto",
        timeout: float = 30.0,
        order: str = "fastest",
    ) -> None:
        self.rank, self.size = arena.rank, arena.size
        self.topology = topology_for(topology, self.size)
        if order not in ORDERS:
            raise CollectiveError(f"unknown order {order!r}; choose from {', '.join(ORDERS)}")
        if not isinstance(timeout, int | float) or not timeout > 0 or math.isinf(timeout):
            raise CollectiveError(f"timeout must be a positive number of seconds, not {timeout!r}")
        self.order = order
        self._arena = arena
        self._calls = Calls(arena, self.topology, timeout, order)
        self._worker: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None
        self._calls.make(Request("barrier", NOTHING))  # all have mapped the arena
        arena.watch()

    @property
    def timeout(self) -> float:
        """Seconds that a wait for a peer may last."""
        return self._calls.runtime.timeout

    # ---- collectives -------------------------------------------------------------------------
    def allreduce(
        self, x: Any, op: str = "sum", async_op: bool = False, algorithm: str = "auto"
    ) -> Work | None:
        """Combine `x` over all ranks, in place; every rank ends with the same bits.

        `x`: a torch CPU tensor or NumPy array of any shape and size, or a list of them with one
        dtype, which is one call. `op`: sum, avg, min, max or prod; avg is refused for integers.
        16-bit floats are combined in float32 and rounded once a hop; min and max propagate NaN;
        integers wrap. With `async_op` a `Work` is returned at once; calls keep their order.
        `algorithm`: auto, or a name, to compare them; refused together with order="fixed".
        Raises CollectiveError for bad input or calls that differ between ranks, CollectiveTimeout
        and CollectiveAborted where a peer does not come.
        """
        if isinstance(x, list | tuple):
            return self._submit(async_op, self._allreduce_list, list(x), op, algorithm)
        return self._submit(async_op, self._in_place, "allreduce", x, op, 0, algorithm)

    def broadcast(self, x: Any, root: int = 0, async_op: bool = False) -> Work | None:
        """Copy `root`'s `x` over everyone's, in place. Same tensors and errors as `allreduce`."""
        return self._submit(async_op, self._in_place, "broadcast", x, "sum", root)

    def reduce(self, x: Any, op: str = "sum", root: int = 0, async_op: bool = False) -> Work | None:
        """Combine `x` over all ranks into `root`'s, in place; the others' stay as they are.

        Same tensors, ops and errors as `allreduce`.
        """
        return self._submit(async_op, self._reduce, x, op, root)

    def allgather(self, x: Any, out: Any = None, async_op: bool = False) -> Any:
        """Everyone's `x`, rank by rank: a tensor of shape (ranks, *x.shape), `out` if given.

        With `async_op` a `Work`, whose `wait` returns it. Tensors and errors as in `allreduce`.
        """
        return self._submit(async_op, self._allgather, x, out)

    def reduce_scatter(
        self, x: Any, op: str = "sum", out: Any = None, async_op: bool = False
    ) -> Any:
        """This rank's part of the combined `x`: its rows are dealt out evenly, in rank order.

        The first dimension is a multiple of the number of ranks; `x` stays as it is. `out`,
        `async_op`, tensors, ops and errors as in `allgather` and `allreduce`.
        """
        return self._submit(async_op, self._reduce_scatter, x, op, out)

    def alltoall(self, x: Any, out: Any = None, async_op: bool = False) -> Any:
        """Rows of `x`, dealt out evenly, go to the ranks in order; what comes has `x`'s shape.

        The first dimension is a multiple of the number of ranks; block r of the result is what
        rank r sent here. `out`, `async_op`, tensors and errors as in `allgather`.
        """
        return self._submit(async_op, self._alltoall, x, out)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._submit(False, self._calls.make, Request("barrier", NOTHING))

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """An uninitialised tensor in memory that all ranks share: collectives need not stage it.

        A torch dtype gives a torch tensor, anything else a NumPy array. It is faster where every
        rank passes one of these. Freed when the tensor and its views are.
        """
        self._calls.check()
        try:
            dims = tuple(map(index, shape if isinstance(shape, Iterable) else (shape,)))
        except TypeError:
            dims = (-1,)
        if any(d < 0 for d in dims):
            raise CollectiveError(f"a shape is made of integers >= 0, not {shape!r}")
        torch_dtype = type(dtype).__module__ == "torch"
        name = str(dtype).removeprefix("torch.") if torch_dtype else numpy_name(dtype)
        if name not in DTYPES or (name == "bfloat16" and not torch_dtype):
            raise CollectiveError(f"unsupported dtype {name}; choose from {', '.join(DTYPES)}")
        item = 2 if name == "bfloat16" else np.dtype(name).itemsize
        nbytes = math.prod(dims) * item
        offset, memory = self._arena.allocate(nbytes)
        block = Block(memory)
        weakref.finalize(block, self._arena.free, offset)
        array = np.asarray(block)
        if torch_dtype:
            import torch

            return torch.from_numpy(array).view(dtype).reshape(dims)
        return array.view(name).reshape(dims)

    def offset_of(self, x: Any) -> int:
        """Where a tensor of `empty` lies in the shared memory, in bytes; -1 for any other."""
        buffer, _ = as_buffer(x)
        return self._arena.offset_of(buffer.address, buffer.nbytes)

    def address_at(self, offset: int) -> int:
        """The address at which this process sees that place, on whichever rank it was made."""
        return self._arena.base + offset

    # ---- lifetime ----------------------------------------------------------------------------
    def close(self) -> None:
        """Finish what runs asynchronously, tell waiting peers, and let go. May be repeated."""
        if self._calls.closed:
            return
        if self._worker:
            self._worker.shutdown(wait=True)
        self._calls.closed = True
        if self._calls.broken is None and self._calls.differ():
            self._calls.runtime.give_up(
                CLOSED
            )  # a peer is in a call that this rank will never make
        self._calls.runtime.close()
        self._arena.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def abort(self, why: int) -> None:
        """Make every rank's present and future calls raise CollectiveAborted."""
        if not self._calls.closed:
            self._calls.runtime.give_up(why)

    # ---- one call ----------------------------------------------------------------------------
    def _submit(self, async_op: bool, function: Callable[..., T], *args: Any) -> T | Work:
        self._calls.check()
        if not async_op and (self._last is None or self._last.done()):
            return function(*args)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="linkweave")
        self._last = self._worker.submit(function, *args)
        work = Work(self._last)
        if async_op:
            return work
        done: T = work.wait()
        return done

    def _in_place(self, kind: str, x: Any, op: str, root: int, algorithm: str = "auto") -> None:
        with self._calls.telling():
            buffer, done = as_buffer(x)
            request = self._calls.request(kind, buffer, op, root, algorithm)
        self._calls.make(request)
        done()

    def _reduce(self, x: Any, op: str, root: int) -> None:
        if self.rank == root:
            self._in_place("reduce", x, op, root)
            return
        with self._calls.telling():  # partial results must not reach the caller
            buffer, _ = as_buffer(x, written=False)
            scratch = self._scratch(buffer, buffer.nbytes)
            request = self._calls.request("reduce", scratch[0], op, root)
        scratch[1][:] = bytes_of(buffer)
        self._calls.make(request)

    def _allgather(self, x: Any, out: Any) -> Any:
        with self._calls.telling():
            mine, _ = as_buffer(x, written=False)
            out = room_for(x, (self.size, *x.shape), out)
            whole, done = as_buffer(out)
            scratch, memory = self._scratch(whole, whole.nbytes)
            request = self._calls.request("allgather", scratch, "sum")
        start = self.rank * mine.nbytes
        memory[start : start + mine.nbytes] = bytes_of(mine)
        self._calls.make(request)
        bytes_of(whole)[:] = memory
        done()
        return out

    def _reduce_scatter(self, x: Any, op: str, out: Any) -> Any:
        with self._calls.telling():
            buffer, _ = as_buffer(x, written=False)
            out = room_for(x, (self._share("reduce_scatter", x), *x.shape[1:]), out)
            mine, done = as_buffer(out)
            scratch, memory = self._scratch(buffer, buffer.nbytes)
            request = self._calls.request("reduce_scatter", scratch, op)
        memory[:] = bytes_of(buffer)
        self._calls.make(request)
        start = self.rank * mine.nbytes
        bytes_of(mine)[:] = memory[start : start + mine.nbytes]
        done()
        return out

    def _alltoall(self, x: Any, out: Any) -> Any:
        with self._calls.telling():
            buffer, _ = as_buffer(x, written=False)
            block = self._share("alltoall", x) * (buffer.nbytes // max(1, x.shape[0]))
            out = room_for(x, tuple(x.shape), out)
            got, done = as_buffer(out)
            scratch, memory = self._scratch(buffer, 2 * buffer.nbytes)
            request = self._calls.request("alltoall", scratch, "sum")
        memory[: buffer.nbytes] = bytes_of(buffer)
        start = self.rank * block
        own = memory[start : start + block]
        memory[buffer.nbytes + start :][:block] = own
        self._calls.make(request)
        bytes_of(got)[:] = memory[buffer.nbytes :]
        done()
        return out

    def _share(self, kind: str, x: Any) -> int:
        """How many rows of `x` each rank gets."""
        if not x.shape or x.shape[0] % self.size:
            raise CollectiveError(
                f"{kind} deals out rows over {self.size} ranks: the first dimension must be a "
                f"multiple of that, not of shape {tuple(x.shape)}"
            )
        return int(x.shape[0]) // self.size

    def _scratch(self, like: Buffer, nbytes: int) -> tuple[Buffer, Any]:
        """Memory to work in, for a message of the size of `like`; and its bytes."""
        memory = self.empty(nbytes, "uint8")
        return Buffer(int(memory.ctypes.data), like.nbytes, like.dtype, like.itemsize), memory

    def _allreduce_list(self, tensors: list[Any], op: str, algorithm: str) -> None:
        with self._calls.telling():
            if not tensors:
                raise CollectiveError("allreduce needs at least one tensor in its list")
            buffers = [as_buffer(x) for x in tensors]
            names = sorted({b.dtype for b, _ in buffers})
            if len(names) > 1:
                raise CollectiveError(f"the tensors of one call need one dtype, not {names}")
            total = sum(b.nbytes for b, _ in buffers)
            flat = self.empty(total, "uint8")
            first = buffers[0][0]
            whole = Buffer(int(flat.ctypes.data), total, first.dtype, first.itemsize)
            layout = crc32(repr([b.nbytes for b, _ in buffers]).encode())
            request = self._calls.request("allreduce", whole, op, 0, algorithm, layout)
        views, at = [], 0
        for buffer, _ in buffers:
            views.append(flat[at : at + buffer.nbytes])
            at += buffer.nbytes
        for view, (buffer, _) in zip(views, buffers, strict=True):
            view[...] = bytes_of(buffer)
        self._calls.make(request)
        for view, (buffer, done) in zip(views, buffers, strict=True):
            bytes_of(buffer)[...] = view
            done()


def topology_for(spec: Topology | str, size: int) -> Topology:
    """The map that `size` CPU ranks plan on: `auto` is their common memory."""
    topology = load(f"cpu-{size}" if spec == "auto" else spec)
    has = len(topology.gpus)
    if has < size:
        raise CollectiveError(f"{topology.name} has {has} GPUs, fewer than the {size} ranks")
    if has > size:
        log.info("%d ranks on %s: its first %d GPUs", size, topology.name, size)
        return topology.subset(topology.gpus[:size])
    return topology
