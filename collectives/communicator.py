"""What users hold: a Communicator, one on each rank."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, cast

from linkweave.collectives.calls import operations as bodies
from linkweave.collectives.calls.gpu import GpuCalls
from linkweave.collectives.calls.gradient_queue import GradientQueue, HostQueue
from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.parts import Order, Parts
from linkweave.collectives.calls.point_to_point import Channels
from linkweave.collectives.calls.request import NOTHING, How, Request
from linkweave.collectives.calls.work import HostWork, Work
from linkweave.collectives.calls.worker import Worker
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.cpu.arrivals import Arrivals
from linkweave.collectives.runtime.gpu import executor as cuda
from linkweave.collectives.runtime.gpu.team import Team
from linkweave.collectives.settings import Settings, topology_for
from linkweave.collectives.tensors import as_buffer, gpu_of, layout_of, quick, shaped


class Communicator:
    """The ranks of one machine, and the collectives among them.

    A context manager; `close` ends it. Every rank must make the same calls in the same order. On
    the CPU each call begins by comparing what all ranks ask for; where they differ, every rank
    raises CollectiveError before any data moves. On a GPU the first call of each kind does so;
    later calls that differ end the communicator with an error. What may be set: `Settings`.
    """

    def __init__(
        self, arena: Arena, settings: Settings | None = None, team: Team | None = None,
        part: bool = False, order: Order = int,
    ) -> None:  # fmt: skip
        self.settings = settings or Settings()
        self.rank, self.size = arena.rank, arena.size
        self.topology = topology_for(self.settings.topology, self.size)
        self._arena = arena
        self._calls = HostCalls(arena, self.topology, self.settings, order)
        self._health = self._calls.health
        self._team = team  # of ranks that are threads; None: made at the first call on a GPU
        self._part = part  # of another communicator, which has warned already
        self._gpu: GpuCalls | None = None
        self._lock = threading.Lock()
        self._parts = Parts(
            arena, self._calls, self.settings, self.topology, team,
            lambda arena, settings, team, order: Communicator(arena, settings, team, True, order),
        )  # fmt: skip
        self._worker = Worker()
        self._channels = Channels(self._calls, self.settings)
        self._calls.meet(Request("barrier", NOTHING))  # all have come

    @property
    def timeout(self) -> float:
        """Seconds that a wait for a peer may last."""
        return self.settings.timeout

    # ---- collectives -------------------------------------------------------------------------
    def allreduce(
        self, x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False,
        algorithm: How = "auto",
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
        `x`, but not overlap it otherwise: then `x` stays as it is. `algorithm`: auto, a name, or a
        function that makes an `Algorithm` for a topology, the same on all ranks; refused together
        with order="fixed". Raises CollectiveError for bad input or calls that differ between ranks,
        CollectiveTimeout and CollectiveAborted where a peer does not come; on a GPU from a later
        call, `Work.wait` or `synchronize`.
        """
        if out is None and not async_op and self._again("allreduce", x, op, 0, algorithm):
            return None
        if isinstance(x, list | tuple):
            first = x[0] if x else None
            return self._submit(async_op, first, bodies.allreduce_list, list(x), op, algorithm, out)
        return self._submit(async_op, x, bodies.into, "allreduce", x, op, 0, algorithm, out)

    def run(
        self, plan: Plan, x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False
    ) -> Any:
        """Carry out an all-reduce, a broadcast or a reduce by a plan of your own, in place.

        `plan`: from `plan_allreduce`, `Plan.from_json` or by hand, the same on all ranks, for as
        many ranks as there are; it is proved before it runs. Refused with order="fixed". Messages
        whose chunks would not fit 64 KiB slots are cut into more groups of chunks. `op`, `out`,
        `async_op`, tensors and errors as in `allreduce`; PlanError for a plan that is wrong.
        """
        root = plan.root if isinstance(plan, Plan) and isinstance(plan.root, int) else 0
        return self._submit(async_op, x, bodies.run, plan, x, op, root, out)

    def allreduce_queue(
        self, x: Any, layers: Sequence[int], op: str = "sum", *, algorithm: How = "auto"
    ) -> GradientQueue:
        """Start an `allreduce` of `x`, whose layers may be used as soon as each is final.

        `layers`: elements of each, in the order in which they lie in `x`, which is contiguous;
        chunks arrive in about that order (C-Cube, section III-D). `GradientQueue.dequeue` waits
        for one layer, `wait` for all. Of algorithms that take about as long, auto chooses the one
        whose first chunk is final first. The rest as in `allreduce` with `async_op`.
        """
        if gpu_of(x) is not None:
            queue = self._submit(True, x, bodies.queued, x, layers, op, algorithm)
            return cast(GradientQueue, queue)
        self._health.check()
        arrivals = Arrivals()
        future = self._enqueue(bodies.queued, x, layers, op, algorithm, arrivals)
        return HostQueue(future, arrivals, self._arena.abort_address)

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """Copy `root`'s `x` over everyone's, in place. Same tensors and errors as `allreduce`."""
        if not async_op and self._again("broadcast", x, "sum", root, "auto"):
            return None
        return self._submit(async_op, x, bodies.into, "broadcast", x, "sum", root)

    def reduce(
        self, x: Any, op: str = "sum", root: int = 0, *, out: Any = None, async_op: bool = False
    ) -> Any:
        """Combine `x` over all ranks into `root`'s, in place; the others' stay as they are.

        `out` takes the result on `root` and is returned there; the others' is not looked at. Same
        tensors, ops and errors as `allreduce`.
        """
        return self._submit(async_op, x, bodies.reduce, x, op, root, out)

    def allgather(
        self, x: Any, *, counts: Sequence[int] | None = None, out: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Everyone's `x`, rank by rank: a tensor of shape (ranks, *x.shape), `out` if given.

        `counts`, the same on all ranks: how many rows (first dimension) each rank has, where these
        differ; then the result has shape (sum(counts), *x.shape[1:]). CPU tensors only. With
        `async_op` a `Work`, whose `wait` returns it. Tensors and errors as in `allreduce`.
        """
        return self._submit(async_op, x, bodies.allgather, x, out, counts)

    def reduce_scatter(
        self, x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False
    ) -> Any:
        """This rank's part of the combined `x`: its rows are dealt out evenly, in rank order.

        The first dimension is a multiple of the number of ranks; `x` stays as it is. `out`,
        `async_op`, tensors, ops and errors as in `allgather` and `allreduce`.
        """
        return self._submit(async_op, x, bodies.reduce_scatter, x, op, out)

    def alltoall(
        self, x: Any, out: Any = None, in_splits: Sequence[int] | None = None,
        out_splits: Sequence[int] | None = None, *, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Rows of `x`, dealt out evenly, go to the ranks in order; what comes has `x`'s shape.

        The first dimension is a multiple of the number of ranks; block r of the result is what
        rank r sent here. With `in_splits` `x` is dealt out unevenly: so many rows to each rank.
        Ranks tell each other; `out_splits`, rows that come from each, is compared with that if
        given. Then the result has shape (rows that come, *x.shape[1:]), and only CPU tensors are
        taken. `out`, `async_op`, tensors and errors as in `allgather`.
        """
        if in_splits is None and out_splits is None:
            return self._submit(async_op, x, bodies.alltoall, x, out)
        return self._submit(async_op, x, bodies.alltoall_uneven, x, out, in_splits, out_splits)

    def send(self, x: Any, to: int, *, async_op: bool = False) -> Work | None:
        """Send `x` to a rank, which must `recv` as many elements of the same dtype.

        CPU tensors only. Only the two ranks take part; messages from one rank to another arrive in
        the order in which they were sent. Returns when `x` may be written again; with `async_op` a
        `Work` at once. Raises as `allreduce` does.
        """
        return self._channels.submit(x, self.rank, to, async_op)

    def recv(self, x: Any, source: int, *, async_op: bool = False) -> Work | None:
        """Receive into `x` what a rank `send`s here. Arguments and errors as in `send`."""
        return self._channels.submit(x, source, self.rank, async_op)

    def sparse_allreduce(
        self, values: Any, indices: Any, numel: int, k: int, op: str = "sum", *,
        residual: Any = None, mode: str = "auto", conserve: bool = True, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """(values, indices) of the sum of all ranks' sparse vectors, the same on every rank.

        `values` [n] float32, float16 or bfloat16 and `indices` int32 [n], ascending, below `numel`,
        on the CPU or this rank's GPU, where they are merged; 8 bytes an entry on the wire, 6 of
        16-bit values, which are added in float32 and rounded once a hop. `op`: sum, or avg, the sum
        over the number of ranks (divided in float32 at the end). `mode`:
        "gtopk", the k largest of the sum by the planner's tree of merges (gTop-k paper, algorithm
        3, for any number of ranks); "topk", the whole sum; "dense", the same by a dense all-reduce
        in float32, without zeros; "auto", what is predicted to be the fastest
        (`collectives.explain` with k). `residual` (float32, `numel` elements):
        with `conserve` the rank that merges adds to its own what it drops, so that the sum of all
        residuals and the result keeps all that came in; else the paper's algorithm 4: a rank's
        entries that are not in the result come back, and what was dropped half way is lost.
        With `async_op` a `Work`, whose `wait` returns the pair; CPU tensors only. On a GPU the host
        waits, as the result's size is known on the GPU only: not for graphs. Raises
        CollectiveError, on every rank where their arguments differ.
        """
        from linkweave.collectives.sparse.gtopk import agreed, sparse_allreduce, whole

        arguments = (values, indices, numel, k, op, residual, mode, conserve)
        if (index := gpu_of(values)) is None:
            return self._submit(async_op, None, whole, *arguments)
        self._worker.settle()  # so that this thread goes on, whose stream is the caller's
        with self._calls.telling():
            self._refuse_other_than_ours(index)
            if async_op:
                raise CollectiveError("an asynchronous sparse_allreduce takes CPU tensors only")
        asked = self._submit(False, None, agreed, *arguments)
        return self._submit(False, values, sparse_allreduce, asked)

    def barrier(self) -> None:
        """Return when every rank has come."""
        self._submit(False, None, lambda calls: calls.make(Request("barrier", NOTHING)))

    # ---- memory ------------------------------------------------------------------------------
    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """An uninitialised CPU tensor in memory that all ranks share, which needs no staging.

        A torch dtype gives a torch tensor, anything else a NumPy array. A call is faster where
        every rank passes one of these, whichever communicator of these ranks made it: this one, or
        one of its splits or lanes. Its memory is given back when it and its views are gone. Each
        rank calls it by itself. Raises CollectiveError.
        """
        self._health.check()
        dims, name, item = layout_of(shape, dtype)
        return shaped(self._calls.block(math.prod(dims) * item), dims, name, dtype)

    def symmetric_empty(
        self, shape: int | Sequence[int], dtype: Any = "float32", *, device: Any = "cuda"
    ) -> Any:
        """An uninitialised GPU tensor in memory that the GPUs of all ranks see; all must call it.

        `device`: "cuda" (this rank's GPU) or "cuda:N". A torch dtype gives a torch tensor, anything
        else a CuPy array. This communicator's all-reduces of one such tensor write results there
        from other ranks' GPUs, past the slots; where a GPU does not see the memory, it is memory
        like any other. Not to be called while a graph is captured. Either all ranks pass the same
        part of the same tensor to a call or none does: else it may be overwritten before that is
        noticed. After a failure its contents are undefined until all ranks have closed the
        communicator. Make it once and use it often: the memory is given back when the communicator
        is closed and the tensor gone. Raises CollectiveError, on every rank, where one's arguments
        are bad, sizes differ or there is no room.
        """
        self._health.check()
        self._worker.settle()  # what tells the others comes behind calls on the CPU
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
        return self._arena.mapping.offset_of(buffer.address, buffer.nbytes)

    def address_at(self, offset: int) -> int:
        """The address at which this process sees that context, on whichever rank it was made."""
        return self._arena.base + offset

    # ---- parts -------------------------------------------------------------------------------
    def split(self, color: int = 0) -> Communicator:
        """A communicator of the ranks that give the same `color`, in the same order.

        All ranks must call it. It has flags, slots and streams of its own, so calls of several
        communicators may be under way at once; on GPUs every rank must make new kinds of calls on
        them in the same order. Tensors of `empty` are shared memory on all of them. It is closed at
        the latest with this one. Raises CollectiveError, on every rank.
        """
        self._submit(False, None, lambda calls: None)  # behind what is under way
        part: Communicator = self._parts.split(color)
        return part

    def lanes(self, n: int) -> list[Communicator]:
        """`n` communicators of all ranks, for calls that are under way at once.

        All ranks must call it, and make the calls on all lanes together in the same order, which
        each call compares: so the ranks cannot wait for each other in a circle. Calls of one lane
        follow each other, one thread at a time; a short call on one does not wait for a long one on
        another. Where a call fails, all of these lanes end. The rest as for `split`. Raises
        CollectiveError, on every rank.
        """
        self._submit(False, None, lambda calls: None)
        return self._parts.lanes(n)

    def synchronize(self) -> None:
        """Wait until this rank's calls on its GPU are over, but for replays of graphs. Raises what
        went wrong there: CollectiveTimeout, CollectiveAborted or CollectiveError."""
        self._health.check()
        if self._gpu:
            self._gpu.synchronise()

    # ---- lifetime ----------------------------------------------------------------------------
    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._health.closed

    @property
    def calls(self) -> HostCalls:
        """What carries out its calls on CPU tensors."""
        return self._calls

    def close(self) -> None:
        """Finish what runs asynchronously, tell waiting peers, and let go. May be repeated.

        A rank that has used a GPU waits some seconds for the others to close as well, as their
        kernels write into its memory; if they do not, that stays until the process ends. Errors of
        asynchronous calls that nobody has waited for are logged. In a process that was forked from
        a rank it does nothing.
        """
        if self._health.closed or self._health.foreign:
            return
        with ExitStack() as last:  # backwards, and all of it, whatever fails
            last.callback(self._leave)
            last.callback(self._channels.close)
            if self._gpu:
                last.callback(self._gpu.close)
            last.callback(self._worker.close, self.rank)
            last.callback(self._parts.close)

    def _leave(self) -> None:
        self._calls.close()
        if self._team:
            self._team.leave()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abort(self, why: int) -> None:
        """Make every rank's present and future calls raise CollectiveAborted."""
        if not (self._health.closed or self._health.foreign):
            self._calls.control.give_up(why)
            self._parts.abort(why)

    def _on_gpu(self, number: int) -> GpuCalls:
        """This rank's calls on its GPU; the first one brings all ranks' GPUs together."""
        self._refuse_other_than_ours(number)
        with self._lock:
            self._worker.settle()  # ranks may meet, and must do so in the order of their calls
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
    def _again(self, kind: str, x: Any, op: str, root: int, algorithm: How) -> bool:
        """Make a call in place of a kind that has been made before; whether it was one."""
        if not self._worker.idle:
            return False
        found = quick(x)
        return found is not None and self._calls.repeat(kind, *found, op, root, algorithm)

    def _submit(self, async_op: bool, x: Any, body: Callable[..., Any], *args: Any) -> Any:
        """Carry out a body where the tensor `x` lies."""
        self._health.check()
        if (index := gpu_of(x)) is not None:
            return self._on_gpu(index).submit(async_op, x, body, *args)
        if not async_op and self._worker.idle:
            return self._calls.carry_out(self._calls.next_order(), body, *args)
        work = HostWork(self._enqueue(body, *args))
        return self._worker.keep(work) if async_op else work.wait()

    def _enqueue(self, body: Callable[..., Any], *args: Any) -> Future[Any]:
        """Carry out a body on the CPU, behind those before it."""
        order = self._calls.next_order()  # as it is asked for
        return self._worker.enqueue(self._calls.carry_out, order, body, *args)
