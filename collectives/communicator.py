"""What users hold: a Communicator, one on each rank."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, cast

from collectives import bodies
from collectives.calls import Calls
from collectives.errors import CollectiveError
from collectives.gpu_calls import GpuCalls
from collectives.gradient_queue import GradientQueue, HostQueue
from collectives.request import NOTHING, Request
from collectives.runtime import cuda
from collectives.runtime.arena import Arena
from collectives.runtime.arrivals import Arrivals
from collectives.runtime.diagnose import CLOSED
from collectives.runtime.peers import troubles
from collectives.runtime.team import Team
from collectives.settings import Settings, topology_for
from collectives.tensors import as_buffer, gpu_of, layout_of, shaped
from collectives.work import Work
from topology import load

T = TypeVar("T")


class Communicator:
    """The ranks of one machine, and the collectives among them.

    A context manager; `close` ends it. Every rank must make the same calls in the same order: on
    the CPU each call begins by comparing what all ranks ask for, and differs anywhere ->
    CollectiveError on every rank, before any data moves; on a GPU the first one of each kind does,
    and later ones that differ end the communicator with an error. What may be set: `Settings`.
    """

    def __init__(
        self, arena: Arena, settings: Settings | None = None, team: Team | None = None,
        part: bool = False,
    ) -> None:  # fmt: skip
        self.settings = settings or Settings()
        self.rank, self.size = arena.rank, arena.size
        self.topology = topology_for(self.settings.topology, self.size)
        self._arena = arena
        self._calls = Calls(arena, self.topology, self.settings)
        self._team = team  # of ranks that are threads; None: made at the first call on a GPU
        self._part = part  # of another communicator, which has warned already
        self._gpu: GpuCalls | None = None
        self._lock = threading.Lock()
        self._splits: list[Communicator] = []  # that are not closed, as far as we know
        self._times_split = 0
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
        self, x: Any, op: str = "sum", async_op: bool = False, algorithm: str = "auto",
        out: Any = None,
    ) -> Any:  # fmt: skip
        """Combine `x` over all ranks, in place; every rank ends with the same bits.

        `x`: a torch tensor, NumPy or CuPy array of any shape and size, or a list of them with one
        dtype and device, which is one call. `op`: sum, min, max or prod; avg of floats; and, or or
        xor of integers on the CPU. 16-bit floats are combined in float32 and rounded once a hop;
        min and max propagate NaN; integers wrap. A bool takes all but avg (on a GPU xor neither):
        sum is or, prod is and. On a GPU the call is enqueued on the current stream. With
        `async_op` a `Work` is returned at once, and calls keep their order; on a GPU it goes
        beside the current stream, which `Work.wait` then makes wait for it. `out`, of the same
        shape and dtype (or a list of such), takes the result instead, and is returned; it may be
        `x`, but not overlap it otherwise: then `x` stays as it is. `algorithm`: auto, or a name, to
        compare them; refused together with order="fixed". Raises CollectiveError for bad input or
        calls that differ between ranks, CollectiveTimeout and CollectiveAborted where a peer does
        not come; on a GPU from a later call, `Work.wait` or `synchronize`.
        """
        if isinstance(x, list | tuple):
            first = x[0] if x else None
            return self._submit(async_op, first, bodies.allreduce_list, list(x), op, algorithm, out)
        return self._submit(async_op, x, bodies.into, "allreduce", x, op, 0, algorithm, out)

    def allreduce_queue(
        self, x: Any, layers: Sequence[int], op: str = "sum", algorithm: str = "auto"
    ) -> GradientQueue:
        """Start an `allreduce` of `x`, whose layers may be used as soon as each is final.

        `layers`: elements of each, in the order in which they lie in `x`, which is contiguous;
        chunks arrive in about that order (C-Cube, section III-D). `GradientQueue.dequeue` waits
        for one layer, `wait` for all. The rest as in `allreduce` with `async_op`.
        """
        if gpu_of(x) is not None:
            queue = self._submit(True, x, bodies.queued, x, layers, op, algorithm)
            return cast(GradientQueue, queue)
        self._calls.check()
        arrivals = Arrivals()
        future = self._enqueue(bodies.queued, x, layers, op, algorithm, arrivals)
        return HostQueue(future, arrivals, self._arena.base)

    def broadcast(self, x: Any, root: int = 0, async_op: bool = False) -> Work | None:
        """Copy `root`'s `x` over everyone's, in place. Same tensors and errors as `allreduce`."""
        return self._submit(async_op, x, bodies.into, "broadcast", x, "sum", root)

    def reduce(
        self, x: Any, op: str = "sum", root: int = 0, async_op: bool = False, out: Any = None
    ) -> Any:
        """Combine `x` over all ranks into `root`'s, in place; the others' stay as they are.

        `out` takes the result on `root` and is returned there; the others' is not looked at. Same
        tensors, ops and errors as `allreduce`.
        """
        return self._submit(async_op, x, bodies.reduce, x, op, root, out)

    def allgather(self, x: Any, out: Any = None, async_op: bool = False) -> Any:
        """Everyone's `x`, rank by rank: a tensor of shape (ranks, *x.shape), `out` if given.

        With `async_op` a `Work`, whose `wait` returns it. Tensors and errors as in `allreduce`.
        """
        return self._submit(async_op, x, bodies.allgather, x, out)

    def reduce_scatter(
        self, x: Any, op: str = "sum", out: Any = None, async_op: bool = False
    ) -> Any:
        """This rank's part of the combined `x`: its rows are dealt out evenly, in rank order.

        The first dimension is a multiple of the number of ranks; `x` stays as it is. `out`,
        `async_op`, tensors, ops and errors as in `allgather` and `allreduce`.
        """
        return self._submit(async_op, x, bodies.reduce_scatter, x, op, out)

    def alltoall(self, x: Any, out: Any = None, async_op: bool = False) -> Any:
        """Rows of `x`, dealt out evenly, go to the ranks in order; what comes has `x`'s shape.

        The first dimension is a multiple of the number of ranks; block r of the result is what
        rank r sent here. `out`, `async_op`, tensors and errors as in `allgather`.
        """
        return self._submit(async_op, x, bodies.alltoall, x, out)

    def sparse_allreduce(
        self, values: Any, indices: Any, numel: int, k: int, *, residual: Any = None,
        mode: str = "auto", conserve: bool = True,
    ) -> tuple[Any, Any]:  # fmt: skip
        """(values, indices) of the sum of all ranks' sparse vectors, the same on every rank.

        `values` [n] float32, float16 or bfloat16 and `indices` int32 [n], ascending, below `numel`,
        on the CPU or this rank's GPU, where they are merged; 8 bytes an entry on the wire, 6 of
        16-bit values, which are added in float32 and rounded once a hop. `mode`:
        "gtopk", the k largest of the sum by the planner's tree of merges (gTop-k paper, algorithm
        3, for any number of ranks); "topk", the whole sum; "dense", the same by a dense all-reduce
        in float32, without zeros; "auto", what is predicted to be the fastest
        (`collectives.explain` with k). `residual` (float32, `numel` elements):
        with `conserve` the rank that merges adds to its own what it drops, so that the sum of all
        residuals and the result keeps all that came in; else the paper's algorithm 4: a rank's
        entries that are not in the result come back, and what was dropped half way is lost.
        On a GPU the host waits, as the result's size is the GPU's to tell: not for graphs. Raises
        CollectiveError, on every rank where their arguments differ.
        """
        from collectives.sparse.gtopk import Asked, agreed, sparse_allreduce

        if (index := gpu_of(values)) is not None:
            if self._last is not None:
                self._last.exception()  # so that this thread goes on, whose stream is the caller's
            with self._calls.telling():
                self._refuse_other_than_ours(index)
        arguments = (values, indices, numel, k, residual, mode, conserve)
        asked = cast(Asked, self._submit(False, None, agreed, *arguments))
        return self._submit(False, values, sparse_allreduce, asked)  # type: ignore[return-value]

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._submit(False, None, lambda calls: calls.make(Request("barrier", NOTHING)))

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32", device: Any = "cpu") -> Any:
        """An uninitialised tensor in memory that all ranks share: collectives need not stage it.

        A torch dtype gives a torch tensor, anything else a NumPy or CuPy array. On the CPU it is
        faster where every rank passes one of these, and freed when the tensor and its views are.

        `device` "cuda" (this rank's GPU) or "cuda:N": this communicator's all-reduces of one tensor
        write results there from other ranks' GPUs, past the slots; where those that have to do not
        see it, it is memory like any other. All ranks must call `empty` alike, not while a graph is
        captured, and then either all pass such tensors, the same part of the same one, or none
        does: else they may be overwritten before that is noticed. After a failure what they hold is
        undefined until all ranks have closed the communicator. To be made once and used often: the
        memory is given back when the communicator is closed and the tensor gone. Raises
        CollectiveError, on every rank, where one's arguments are bad, sizes differ or there is no
        room.
        """
        self._calls.check()
        if str(device) in ("cpu", "cpu:0"):
            dims, name, item = layout_of(shape, dtype)
            return shaped(self._calls.block(math.prod(dims) * item), dims, name, dtype)
        if self._last is not None:
            self._last.exception()  # what tells the others comes behind calls on the CPU
        with self._calls.telling():
            dims, name, item = layout_of(shape, dtype)
            number, mine = cuda.gpu_named(str(device)), self._own_gpu()
            if number is None:
                number = cuda.current_device() if mine is None else mine
            elif mine not in (None, number):
                raise CollectiveError(f"rank {self.rank} runs on GPU {mine}, not on GPU {number}")
        raw = self._on_gpu(number).empty(math.prod(dims) * item)
        return shaped(raw, dims, name, dtype)

    def offset_of(self, x: Any) -> int:
        """Where a tensor of `empty` lies in the shared memory, in bytes; -1 for any other."""
        buffer, _ = as_buffer(x)
        return self._arena.offset_of(buffer.address, buffer.nbytes)

    def address_at(self, offset: int) -> int:
        """The address at which this process sees that place, on whichever rank it was made."""
        return self._arena.base + offset

    def split(self, color: int = 0) -> Communicator:
        """A communicator of its own of the ranks that give the same `color`, in the same order.

        All ranks must call it. It has memory, flags and streams of its own, so calls of several
        communicators may be under way at once; every rank must make new kinds of calls on them in
        the same order. It keeps its memory until it is closed, at the latest with this one. Raises
        CollectiveError.
        """
        if isinstance(color, bool) or not isinstance(color, int):
            raise CollectiveError(f"color must be an integer, not {color!r}")
        self._submit(False, None, lambda calls: None)  # behind what is under way
        colors = [int(said) for said in self._calls.gather("colors", str(color).encode())]
        ranks = [r for r, other in enumerate(colors) if other == color]
        spec = self.settings.topology
        if not (spec == "auto" or load(spec).devices):  # else GPUs are found by their names
            spec = self.topology.subset([self.topology.gpus[r] for r in ranks])
        settings = replace(self.settings, topology=spec)
        place, team = ranks.index(self.rank), None
        if self._team:
            team, arenas = self._team.child((self._times_split, color), ranks)
            arena = arenas[place]
        else:
            arena = self._arena_of(ranks, place)
        part = Communicator(arena, settings, team, True)
        self._splits = [p for p in self._splits if not p._calls.closed] + [part]
        self._times_split += 1
        return part

    def _arena_of(self, ranks: Sequence[int], place: int) -> Arena:
        """Memory that these ranks share, made by the first of them. Raises CollectiveError on all
        ranks where one cannot have it."""
        fd, path, arena, trouble = -1, b"", None, ""
        try:
            if place == 0:
                fd = Arena.create(len(ranks))
                path = Arena.path(fd).encode()
            paths = self._calls.gather("memory", path)
            try:
                arena = Arena.attach(paths[ranks[0]].decode(), len(ranks), place)
            except CollectiveError as error:
                trouble = str(error)
            failed = troubles(self._calls.gather, trouble)
        finally:
            if fd >= 0:
                os.close(fd)
        if arena is None or failed:
            raise CollectiveError(failed)
        return arena

    def synchronize(self) -> None:
        """Wait until this rank's calls on its GPU are over, but for replays of graphs. Raises what
        went wrong there: CollectiveTimeout, CollectiveAborted or CollectiveError."""
        self._calls.check()
        if self._gpu:
            self._gpu.synchronise()

    # ---- lifetime ----------------------------------------------------------------------------
    def close(self) -> None:
        """Finish what runs asynchronously, tell waiting peers, and let go. May be repeated.

        A rank that has used a GPU waits some seconds for the others to close as well, as their
        kernels write into its memory; if they do not, that stays until the process ends.
        """
        if self._calls.closed:
            return
        with ExitStack() as last:  # backwards, and all of it, whatever fails
            last.callback(self._leave)
            if self._gpu:
                last.callback(self._gpu.close)
            if self._worker:
                last.callback(self._worker.shutdown, wait=True)
            while self._splits:
                last.callback(self._splits.pop().close)

    def _leave(self) -> None:
        self._calls.closed = True
        if self._calls.broken is None and self._calls.differ():
            # a peer is in a call that this rank will never make
            self._calls.runtime.give_up(CLOSED)
        self._calls.runtime.close()
        self._arena.close()
        if self._team:
            self._team.leave()

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

    def _on_gpu(self, number: int) -> GpuCalls:
        """This rank's calls on its GPU; the first one brings all ranks' GPUs together."""
        self._refuse_other_than_ours(number)
        with self._lock:
            if self._last is not None:  # ranks may meet, and must do so in the order of their calls
                self._last.exception()
            if self._gpu is None:
                self._gpu = GpuCalls(number, self._calls, self.settings, self._team, self._part)
            return self._gpu

    def _own_gpu(self) -> int | None:
        """This rank's GPU, where that is known."""
        if self._team:
            return self._team.gpu.devices[self.rank].index
        return self._gpu.index if self._gpu else None

    def _refuse_other_than_ours(self, number: int) -> None:
        if (mine := self._own_gpu()) not in (None, number):
            raise CollectiveError(
                f"rank {self.rank} runs on GPU {mine}; the tensor is on GPU {number}"
            )

    # ---- one call ----------------------------------------------------------------------------
    def _submit(self, async_op: bool, x: Any, body: Callable[..., T], *args: Any) -> T | Work:
        """Carry out a body where the tensor `x` lies."""
        self._calls.check()
        if (index := gpu_of(x)) is not None:
            done_on_gpu: T | Work = self._on_gpu(index).submit(async_op, x, body, *args)
            return done_on_gpu
        if not async_op and (self._last is None or self._last.done()):
            return body(self._calls, *args)
        work = Work(self._enqueue(body, *args))
        if async_op:
            return work
        done: T = work.wait()
        return done

    def _enqueue(self, body: Callable[..., T], *args: Any) -> Future[T]:
        """Carry out a body on the CPU, behind those before it."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="linkweave")
        self._last = future = self._worker.submit(body, self._calls, *args)
        return future
