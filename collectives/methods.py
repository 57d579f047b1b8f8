"""The collectives as methods, and how a call finds the CPU or the GPU that its tensor is on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

from linkweave.collectives.calls import operations, uneven
from linkweave.collectives.calls.gpu import GpuCalls
from linkweave.collectives.calls.gradient_queue import GradientQueue, HostQueue
from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.point_to_point import PointToPoint
from linkweave.collectives.calls.request import NOTHING, How, Request
from linkweave.collectives.calls.work import HostWork, Work
from linkweave.collectives.calls.worker import Worker
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.cpu.arrivals import Arrivals
from linkweave.collectives.runtime.gpu.team import Team
from linkweave.collectives.settings import Settings
from linkweave.collectives.sparse.allreduce import agreed, sparse_allreduce, whole
from linkweave.collectives.tensors import gpu_of, quick


class Collectives:
    """One rank's collectives. `team`: of ranks that are threads of this process. `quiet`: a part of
    a communicator that has warned already."""

    def __init__(
        self, calls: HostCalls, settings: Settings, team: Team | None, quiet: bool
    ) -> None:
        self.rank, self.size, self.settings = calls.rank, calls.size, settings
        self._calls, self._health = calls, calls.health
        self._team, self._quiet = team, quiet
        self._gpu: GpuCalls | None = None  # made at the first call on a GPU
        self._lock = threading.Lock()
        self._worker = Worker()
        self._point_to_point = PointToPoint(calls, settings)

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
            return self._submit(
                async_op, first, operations.allreduce_list, list(x), op, algorithm, out
            )
        return self._submit(async_op, x, operations.into, "allreduce", x, op, 0, algorithm, out)

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
        return self._submit(async_op, x, operations.run, plan, x, op, root, out)

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
            queue = self._submit(True, x, operations.queued, x, layers, op, algorithm)
            return cast(GradientQueue, queue)
        self._health.check()
        arrivals = Arrivals()
        future = self._enqueue(operations.queued, x, layers, op, algorithm, arrivals)
        return HostQueue(future, arrivals, self._calls.control.arena.abort_address)

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """Copy `root`'s `x` over everyone's, in place. Same tensors and errors as `allreduce`."""
        if not async_op and self._again("broadcast", x, "sum", root, "auto"):
            return None
        return self._submit(async_op, x, operations.into, "broadcast", x, "sum", root)

    def reduce(
        self, x: Any, op: str = "sum", root: int = 0, *, out: Any = None, async_op: bool = False
    ) -> Any:
        """Combine `x` over all ranks into `root`'s, in place; the others' stay as they are.

        `out` takes the result on `root` and is returned there; the others' is not looked at. Same
        tensors, ops and errors as `allreduce`.
        """
        return self._submit(async_op, x, operations.reduce, x, op, root, out)

    def allgather(
        self, x: Any, *, counts: Sequence[int] | None = None, out: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Everyone's `x`, rank by rank: a tensor of shape (ranks, *x.shape), `out` if given.

        `counts`, the same on all ranks: how many rows (first dimension) each rank has, where these
        differ; then the result has shape (sum(counts), *x.shape[1:]). CPU tensors only. With
        `async_op` a `Work`, whose `wait` returns it. Tensors and errors as in `allreduce`.
        """
        return self._submit(async_op, x, operations.allgather, x, out, counts)

    def reduce_scatter(
        self, x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False
    ) -> Any:
        """This rank's part of the combined `x`: its rows are dealt out evenly, in rank order.

        The first dimension is a multiple of the number of ranks; `x` stays as it is. `out`,
        `async_op`, tensors, ops and errors as in `allgather` and `allreduce`.
        """
        return self._submit(async_op, x, operations.reduce_scatter, x, op, out)

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
            return self._submit(async_op, x, operations.alltoall, x, out)
        return self._submit(async_op, x, uneven.alltoall, x, out, in_splits, out_splits)

    def send(self, x: Any, to: int, *, async_op: bool = False) -> Work | None:
        """Send `x` to a rank, which must `recv` as many elements of the same dtype.

        CPU tensors only. Only the two ranks take part; messages from one rank to another arrive in
        the order in which they were sent. Returns when `x` may be written again; with `async_op` a
        `Work` at once. Raises as `allreduce` does.
        """
        return self._point_to_point.submit(x, self.rank, to, async_op)

    def recv(self, x: Any, source: int, *, async_op: bool = False) -> Work | None:
        """Receive into `x` what a rank `send`s here. Arguments and errors as in `send`."""
        return self._point_to_point.submit(x, source, self.rank, async_op)

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

    # ---- one call ----------------------------------------------------------------------------
    def _on_gpu(self, number: int) -> GpuCalls:
        """This rank's calls on its GPU; the first one brings all ranks' GPUs together."""
        self._refuse_other_than_ours(number)
        with self._lock:
            self._worker.settle()  # ranks may meet, and must do so in the order of their calls
            if self._gpu is None:
                self._gpu = GpuCalls(number, self._calls, self.settings, self._team, self._quiet)
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
