"""The collectives as methods, which run each call on the device of its tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

from linkweave.collectives.calls import operations
from linkweave.collectives.calls.gpu import GpuCalls
from linkweave.collectives.calls.host import Again, HostCalls
from linkweave.collectives.calls.point_to_point import PointToPoint
from linkweave.collectives.calls.request import NOTHING, How, Request
from linkweave.collectives.calls.sparse.allreduce import (
    agree,
    host_sparse_allreduce,
    sparse_allreduce,
)
from linkweave.collectives.calls.work import GradientQueue, HostQueue, Work, Worker
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.cpu.layer_counters import LayerCounters
from linkweave.collectives.runtime.gpu.team import Team
from linkweave.collectives.runtime.tensors import fast_buffer, fast_result, gpu_of, output_for
from linkweave.collectives.settings import Settings


class Methods:
    """The collectives that ranks on one machine and on several have alike. How a call is made is
    the communicator's part."""

    rank: int
    size: int
    _calls: Any  # `HostCalls` or `ClusterCalls`
    _worker: Worker

    def allreduce(
        self, x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False,
        algorithm: How = "auto",
    ) -> Any:  # fmt: skip
        """Combine `x` over all ranks, in place. Every rank gets the same bits.

        x: torch tensor, NumPy or CuPy array of any shape, on the CPU or this rank's GPU; or a list
            of them with one dtype and one device, which is combined in one call.
        op: "sum", "min", "max" or "prod"; "avg" for floats; "and", "or" or "xor" for integers. A
            bool takes all but "avg": its sum is "or" and its product is "and".
        out: tensor (or list of tensors) of the shape and dtype of `x`, which receives the result;
            `x` is then not changed. It may be `x` itself, but must not overlap it otherwise.
        async_op: return a `Work` at once. Calls keep their order. On a GPU the call runs on a side
            stream, for which `Work.wait` makes the current stream wait.
        algorithm: "auto", a name, or a function from a topology to an `Algorithm`; the same on all
            ranks. Only "auto" is allowed with order="fixed", and on several machines.

        Returns `out`, which is None for a call in place, or a `Work`. On a GPU the call is enqueued
        on the current stream.
        Rounding: floats of 16 and 8 bits are combined in float32 and rounded once at each combining
        step. min and max propagate NaN. Integers wrap around.
        Raises CollectiveError if arguments are bad or differ between ranks, CollectiveTimeout and
        CollectiveAborted if a peer does not take part. On a GPU a later call, `Work.wait` or
        `synchronize` raises them.
        """
        if isinstance(x, list | tuple):
            first = x[0] if x else None
            return self._submit(
                async_op, first, operations.allreduce_list, list(x), op, algorithm, out
            )
        again = partial(self._whole, "allreduce", x, out, op, 0, algorithm)
        return self._call(
            again, async_op, x, operations.into, "allreduce", x, op, 0, algorithm, out
        )

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """Copy `x` of rank `root` to `x` on all ranks. Tensors and errors as in `allreduce`."""
        again = partial(self._whole, "broadcast", x, None, "sum", root)
        return self._call(again, async_op, x, operations.into, "broadcast", x, "sum", root)

    def reduce(
        self, x: Any, op: str = "sum", root: int = 0, *, out: Any = None, async_op: bool = False
    ) -> Any:
        """Combine `x` over all ranks into `x` on rank `root`, in place.

        x, op, async_op, rounding: as in `allreduce`. On other ranks `x` is not changed.
        root: rank.
        out: as in `allreduce`, on `root`. On other ranks it is ignored.

        Returns `out` on `root` and None on other ranks, or a `Work`.
        Raises as `allreduce` does.
        """
        again = partial(self._whole, "reduce", x, out, op, root)
        return self._call(again, async_op, x, operations.reduce, x, op, root, out)

    def allgather(
        self, x: Any, *, counts: Sequence[int] | None = None, out: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Gather `x` of all ranks on all ranks.

        x: tensor as in `allreduce`, of the same shape on all ranks unless `counts` is given.
        counts: number of rows (first dimension) of each rank's `x`, the same on all ranks. On
            GPUs each part is a broadcast.
        out: tensor that receives the result.
        async_op: as in `allreduce`; `Work.wait` returns the result.

        Returns a tensor of shape (ranks, *x.shape), in rank order; with `counts`, of shape
        (sum(counts), *x.shape[1:]).
        Raises as `allreduce` does.
        """
        splits = None if counts is None else (counts,)
        again = partial(self._moved, "allgather", x, out, splits=splits)
        return self._call(again, async_op, x, operations.allgather, x, out, counts)

    def reduce_scatter(
        self, x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False
    ) -> Any:
        """Combine `x` over all ranks and return this rank's rows of the result.

        x: tensor as in `allreduce`, whose first dimension is a multiple of the number of ranks. It
            is not changed.
        op, rounding: as in `allreduce`.
        out, async_op: as in `allgather`.

        Returns a tensor of shape (x.shape[0] / ranks, *x.shape[1:]). Rows go to the ranks in order.
        Raises as `allreduce` does.
        """
        again = partial(self._moved, "reduce_scatter", x, out, op)
        return self._call(again, async_op, x, operations.divided, "reduce_scatter", x, op, out)

    def gather(self, x: Any, root: int = 0, *, out: Any = None, async_op: bool = False) -> Any:
        """Gather `x` of all ranks on rank `root`.

        x: tensor as in `allreduce`, of the same shape on all ranks.
        root: rank.
        out, async_op: as in `allgather`. On other ranks than the root, `out` is ignored.

        On a GPU, every rank uses scratch memory for the whole result.

        Returns a tensor of shape (ranks, *x.shape) on `root`, in rank order, and None elsewhere.
        Raises as `allreduce` does.
        """
        again = partial(self._moved, "gather", x, out, "sum", root)
        return self._call(again, async_op, x, operations.gather, x, root, out)

    def scatter(self, x: Any, root: int = 0, *, out: Any = None, async_op: bool = False) -> Any:
        """Send rows of `x` of rank `root` to each rank, and return this rank's.

        x: on the root a tensor as in `allreduce`, whose first dimension is a multiple of the number
            of ranks. Rows go to the ranks in order. Other ranks give None.
        root: rank.
        out: as in `allgather`; other ranks than the root need it.
        async_op: as in `allgather`.

        On a GPU, every rank uses scratch memory for all of the root's rows.

        Returns a tensor of shape (x.shape[0] / ranks, *x.shape[1:]).
        Raises as `allreduce` does.
        """
        if out is None and self.rank != root and self._own_gpu() is not None:
            raise operations.needs_out(self.rank, root)
        like = out if x is None or self.rank != root else x
        again = partial(self._moved, "scatter", x, out, "sum", root)
        return self._call(again, async_op, like, operations.scatter, x, root, out)

    def alltoall(
        self, x: Any, out: Any = None, in_splits: Sequence[int] | None = None,
        out_splits: Sequence[int] | None = None, *, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Send rows of `x` to each rank, and return the rows that each rank sends to this one.

        x: tensor as in `allreduce`. Without splits, its first dimension is a multiple of the number
            of ranks, and each rank gets the same number of rows, in rank order.
        in_splits: number of rows to send to each rank.
        out_splits: number of rows to receive from each rank; if given, they are checked. The ranks
            exchange their splits on the host; on CPU ranks of one machine, where two calls in a row
            have had those of earlier calls, each assumes that the next one has, and they exchange
            them if it has not. On GPUs parts are padded to the next power of two of the largest.
        out, async_op: as in `allgather`.

        Returns a tensor of the shape of `x`, in rank order; with splits, of shape (rows received,
        *x.shape[1:]).
        Raises as `allreduce` does.
        """
        even = in_splits is None and out_splits is None
        splits = None if even else (in_splits, out_splits)
        again = partial(self._moved, "alltoall", x, out, splits=splits)
        if even:
            return self._call(again, async_op, x, operations.divided, "alltoall", x, "sum", out)
        return self._call(again, async_op, x, operations.alltoallv, x, out, in_splits, out_splits)

    def barrier(self) -> None:
        """Wait until all ranks have called `barrier`."""
        if self._worker.idle and self._calls.repeat("barrier", 0, 0, NOTHING.dtype, "sum", 0):
            return
        self._submit(False, None, lambda calls: calls.make(Request("barrier", NOTHING)))

    def _whole(
        self, kind: str, x: Any, out: Any, op: str, root: int, how: How = "auto"
    ) -> Again | None:
        """How to repeat a call of a whole message, in place or from `x` into `out`; None if it is
        to be made like a first one."""
        if type(root) is not int or (given := fast_buffer(x)) is None:
            return None
        result: int | None = None
        if kind == "reduce" and root != self.rank:  # sums of a part of the ranks are not for `x`
            result, out = 0, None
        elif out is not None:
            if (found := fast_result(x, given, out, x.shape)) is None:
                return None
            result = found[0]
        return Again((kind, *given, op, root, how, result), out)

    def _moved(
        self, kind: str, x: Any, out: Any, op: str = "sum", root: int = 0,
        splits: tuple[Any, ...] | None = None,
    ) -> Again | None:  # fmt: skip
        """How to repeat a call from `x` into `out`, or a new tensor, of another shape; `splits`
        says how its rows are split if not evenly. None as in `_whole`."""
        if type(root) is not int:
            return None
        elsewhere, uneven = self.rank != root, None  # elsewhere: than the input or the result
        if kind == "scatter" and elsewhere:
            if (result := fast_buffer(out)) is None:
                return None
            address, whole, dtype = 0, result[1] * self.size, result[2]
        elif (given := fast_buffer(x)) is None:
            return None
        elif kind == "gather" and elsewhere:
            (address, nbytes, dtype), result, out = given, (0, 0, ""), None
            whole = nbytes * self.size
        else:
            if splits is None:
                shape = operations.shape_of(kind, x.shape, self.size)
            elif kind == "allgather" or self._calls.assumes:
                key = operations.splits_key(kind, x, given[2], *splits)
                if (uneven := self._calls.known_sizes(key)) is None or uneven.given != len(x):
                    return None
                shape = (uneven.rows, *x.shape[1:])
            else:
                return None
            if shape is None:
                return None
            out = output_for(x, shape, None) if out is None else out
            if (found := fast_result(x, given, out, shape)) is None:
                return None
            (address, nbytes, dtype), result = given, found
            whole = uneven.nbytes if uneven else max(nbytes, result[1])
        parts = (uneven.parts, uneven.sizes) if uneven else ()
        return Again((kind, address, whole, dtype, op, root, "auto", result[0], *parts), out)

    def _call(
        self, again: Callable[[], Again | None], async_op: bool, x: Any,
        body: Callable[..., Any], *args: Any,
    ) -> Any:  # fmt: skip
        """Make a call `again` if it has been made before, or else by `body` as `_submit`."""
        if async_op or not self._worker.idle:
            return self._submit(async_op, x, body, *args, again=again)
        found = again()
        if found is not None and self._calls.repeat(*found.arguments):
            return found.result
        return self._submit(async_op, x, body, *args)

    def _submit(
        self, async_op: bool, x: Any, body: Callable[..., Any], *args: Any,
        again: Callable[[], Again | None] | None = None,
    ) -> Any:  # fmt: skip
        """Run `body(context, *args)` on the device of `x`; on the CPU if `x` is no tensor. `again`
        may be asked when the call's turn comes: until then tensors may get other memory."""
        raise NotImplementedError

    def _own_gpu(self) -> int | None:
        """The index of this rank's GPU, if it is known."""
        return None


class Collectives(Methods):
    """The collectives of one rank.

    `team` is set if the ranks are threads of this process. `quiet` suppresses warnings that the
    parent communicator has given already.
    """

    _calls: HostCalls

    def __init__(
        self, calls: HostCalls, settings: Settings, team: Team | None, quiet: bool
    ) -> None:
        self.rank, self.size, self.settings = calls.rank, calls.size, settings
        self._calls, self._health = calls, calls.health
        self._team, self._quiet = team, quiet
        self._gpu: GpuCalls | None = None  # created by the first call on a GPU
        self._before_gpu: int | None = None  # a CUDA stream for which that waits
        self._lock = threading.Lock()
        self._worker = Worker()
        self._point_to_point = PointToPoint(calls, settings)

    def run(
        self, plan: Plan, x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False
    ) -> Any:
        """All-reduce, broadcast or reduce `x` by your own plan, in place.

        plan: from `plan_allreduce`, from `Plan.from_json` or made by hand; for as many ranks as
            there are, and the same on all of them. It is verified before it runs. Messages that
            exceed a 64 KiB slot are cut into more groups of chunks.
        op, out, async_op, rounding: as in `allreduce`.

        Returns as `allreduce` does.
        Raises as `allreduce` does; PlanError if the plan is wrong; CollectiveError with
        order="fixed".
        """
        root = plan.root if isinstance(plan, Plan) and isinstance(plan.root, int) else 0
        return self._submit(async_op, x, operations.run, plan, x, op, root, out)

    def allreduce_queue(
        self, x: Any, layers: Sequence[int], op: str = "sum", *, algorithm: How = "auto"
    ) -> GradientQueue:
        """Start an in-place `allreduce` of `x` whose layers can be used as soon as each is final.

        x: contiguous tensor.
        layers: number of elements of each layer, in the order in which the layers are in `x`.
            Chunks arrive in about that order.
        op, algorithm, rounding: as in `allreduce`. Of algorithms with nearly the same predicted
            time, "auto" takes the one whose first chunk is final first.

        Returns a `GradientQueue`: `dequeue` waits for one layer, `wait` for all of them.
        Raises as `allreduce` does.
        Source: C-Cube, section III-D.
        """
        if gpu_of(x) is not None:
            queue = self._submit(True, x, operations.queued, x, layers, op, algorithm)
            return cast(GradientQueue, queue)
        self._health.check()
        arrivals = LayerCounters()
        future = self._enqueue(operations.queued, x, layers, op, algorithm, arrivals)
        return HostQueue(future, arrivals, self._calls.control.arena.abort_address)

    def send(self, x: Any, to: int, *, async_op: bool = False) -> Work | None:
        """Send `x` to rank `to`, which must call `recv`. Only these two ranks take part.

        x: CPU tensor. The receiver's has as many elements and the same dtype.
        to: rank.
        async_op: return a `Work` at once.

        Returns when `x` may be overwritten. Messages from one rank to another arrive in order.
        Raises as `allreduce` does.
        """
        return self._point_to_point.submit(x, self.rank, to, async_op)

    def recv(self, x: Any, source: int, *, async_op: bool = False) -> Work | None:
        """Receive into `x` what rank `source` sends. Arguments and errors as in `send`."""
        return self._point_to_point.submit(x, source, self.rank, async_op)

    def sparse_allreduce(
        self, values: Any, indices: Any, numel: int, k: int, op: str = "sum", *,
        residual: Any = None, mode: str = "auto", conserve: bool = True, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Sum sparse vectors over all ranks. Every rank gets the same bits.

        values: float32, float16 or bfloat16, shape [n], on the CPU or this rank's GPU.
        indices: int32, shape [n], strictly ascending, below `numel`.
        numel: length of the dense vector, below 2^31.
        k: number of entries that mode "gtopk" keeps.
        op: "sum" or "avg". The average is divided in float32 at the end.
        residual: float32, `numel` elements, contiguous; receives what the call drops.
        mode: "gtopk", k entries of the sum, by a tree of merges that keep the k largest each: not
            always the k largest of the whole sum; "topk", the whole sum by an all-gather; "dense",
            the whole sum without zeros by a dense all-reduce in float32; "auto", the one with the
            shortest predicted time (`explain` with k).
        conserve: this rank's entries whose indices are not in the result go back to its residual;
            what a merge cuts of an index that is in the result goes to the residual of the rank
            that merges. So the result and all residuals add up to the inputs. If False, the latter
            is lost, as in the paper.
        async_op: return a `Work` whose `wait` returns the result. CPU tensors only.

        Returns (values, indices) in the library and dtype of the input. On a GPU the host waits
        twice, for the check of the indices and for the size of the result, whatever the number of
        ranks; so the call cannot be captured into a graph.
        Rounding: 16-bit values are added in float32 and rounded once at each merge. An entry takes
        8 bytes on the wire, or 6 with 16-bit values.
        Raises as `allreduce` does.
        Source: Shi et al., gTop-k S-SGD, algorithms 3 and 4.
        """
        arguments = (values, indices, numel, k, op, residual, mode, conserve)
        if (index := gpu_of(values)) is None:
            return self._submit(async_op, None, host_sparse_allreduce, *arguments)
        self._worker.drain()  # then this thread runs the call, on the caller's stream
        with self._calls.sharing_errors():
            self._refuse_other_gpu(index)
            if async_op:
                raise CollectiveError("an asynchronous sparse_allreduce takes CPU tensors only")
        call = self._submit(False, None, agree, *arguments)
        return self._submit(False, values, sparse_allreduce, call)

    def _on_gpu(self, number: int) -> GpuCalls:
        """This rank's calls on its GPU. The first one synchronises the ranks."""
        self._refuse_other_gpu(number)
        with self._lock:
            self._worker.drain()  # ranks may synchronise, which must keep the order of calls
            if self._gpu is None:
                self._gpu = GpuCalls(number, self._calls, self.settings, self._team, self._quiet)
                if self._before_gpu is not None:
                    self._gpu.follow(self._before_gpu)
            return self._gpu

    def _own_gpu(self) -> int | None:
        if self._team:
            return self._team.gpu.devices[self.rank].index
        return self._gpu.index if self._gpu else None

    def _refuse_other_gpu(self, number: int) -> None:
        if (mine := self._own_gpu()) not in (None, number):
            raise CollectiveError(
                f"rank {self.rank} runs on GPU {mine}; the tensor is on GPU {number}"
            )

    def _submit(
        self, async_op: bool, x: Any, body: Callable[..., Any], *args: Any,
        again: Callable[[], Again | None] | None = None,
    ) -> Any:  # fmt: skip
        self._health.check()
        if (index := gpu_of(x)) is not None:
            return self._on_gpu(index).submit(async_op, x, body, *args)
        order = self._calls.next_order()  # in this thread, so that it is the order of the calls
        return self._worker.submit(async_op, self._calls.carry_out, order, again, body, *args)

    def _enqueue(self, body: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `body` on the worker thread, after the calls before it."""
        order = self._calls.next_order()  # in this thread, so that it is the order of the calls
        return self._worker.enqueue(self._calls.carry_out, order, None, body, *args)
