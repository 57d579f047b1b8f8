"""The collectives as methods, which run each call on the device of its tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from linkweave.collectives.calls import operations
from linkweave.collectives.calls.host import Again
from linkweave.collectives.calls.request import NOTHING, How, Request
from linkweave.collectives.calls.work import Worker
from linkweave.collectives.planning.collective import COLLECTIVES
from linkweave.collectives.runtime.tensors import fast_buffer, fast_result, output_for
from linkweave.collectives.runtime.uncompiled import uncompiled_methods


@uncompiled_methods
class Methods:
    """The collectives that ranks on one machine and on several have alike. How a call is made is
    the communicator's part."""

    rank: int
    size: int
    _calls: Any  # `HostCalls` or `ClusterCalls`
    _worker: Worker
    _parts: list[Any]  # splits and lanes; some may have been closed since

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

    def barrier(self, *, async_op: bool = False) -> Any:
        """Wait until all ranks have called `barrier`; with `async_op` return a handle for that."""
        known = "barrier", 0, 0, NOTHING.dtype, "sum", 0
        if not async_op and self._worker.idle and self._calls.repeat(*known):
            return None
        return self._submit(async_op, None, lambda calls: calls.make(Request("barrier", NOTHING)))

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
        collective, uneven = COLLECTIVES[kind], None
        elsewhere = collective.root == "rank" and self.rank != root  # than the input or the result
        if elsewhere and not collective.gathers:
            if (result := fast_buffer(out)) is None:
                return None
            address, whole, dtype = 0, result[1] * self.size, result[2]
        elif (given := fast_buffer(x)) is None:
            return None
        elif elsewhere:
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

    def _keep(self, parts: Sequence[Any]) -> None:
        self._parts = [p for p in self._parts if not p.closed] + [*parts]

    def _close_parts(self) -> None:
        """Close all parts; if one raises, the others are still closed."""
        with ExitStack() as last:
            while self._parts:
                last.callback(self._parts.pop().close)
