"""Collectives among one rank of each machine, over torch.distributed's gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._C._distributed_c10d as c10d

from linkweave.collectives.distributed.combine import combined, gloo_op
from linkweave.collectives.distributed.gloo import gloo_group

_CLOSING = 1.0
"""Seconds for which a rank that closes its connections waits for calls under way."""


class Across:
    """The ranks with one local rank, one of each machine; `rank` is the machine's number.

    All take contiguous CPU tensors of torch, of the same size on all ranks but for splits, and
    return a handle whose `wait` must be called. Calls keep their order. Raises RuntimeError.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._gloo: Any = gloo_group(store, rank, size, timeout)

    def allreduce(self, x: Any, op: str = "sum") -> Handle:
        """Combine `x` over all machines, in place, with the ops of `Communicator.allreduce`.

        "avg" is the sum; its caller divides. 16-bit floats are rounded at each step of gloo's ring.
        """
        if op in ("min", "max") and x.is_floating_point():  # gloo's may lose a NaN
            return self._in_parts(x.view(-1), op)
        options = c10d.AllreduceOptions()
        options.reduceOp = gloo_op(op, x)
        return Handle(self._group.allreduce([x], options).wait)

    def _in_parts(self, x: Any, op: str) -> Handle:
        """An all-reduce in which each machine combines one part and gathers the others'."""
        width = -(-x.numel() // self.size)
        mine = x.new_zeros((self.size, width))
        mine.view(-1)[: x.numel()] = x
        got = torch.empty_like(mine)

        def after() -> None:
            self.allgather(combined(got, op), mine).wait()
            x.copy_(mine.view(-1)[: x.numel()])

        return Handle(self.alltoall(mine, got).wait, after)

    def reduce(self, x: Any, op: str, root: int) -> Handle:
        """`allreduce` whose result only machine `root` gets; that of the others is undefined."""
        if op in ("min", "max") and x.is_floating_point():
            return self.allreduce(x, op)
        options = c10d.ReduceOptions()
        options.reduceOp, options.rootRank = gloo_op(op, x), root
        return Handle(self._group.reduce([x], options).wait)

    def broadcast(self, x: Any, root: int) -> Handle:
        """Copy `x` of machine `root` to all."""
        options = c10d.BroadcastOptions()
        options.rootRank = root
        return Handle(self._group.broadcast([x], options).wait)

    def allgather(self, x: Any, out: Any) -> Handle:
        """Gather `x` of all machines in `out`, of shape (machines, *x.shape)."""
        options = c10d.AllgatherOptions()
        return Handle(self._group._allgather_base(out.view(-1), x.view(-1), options).wait)

    def alltoall(
        self, x: Any, out: Any, in_splits: Sequence[int] = (), out_splits: Sequence[int] = ()
    ) -> Handle:
        """Send rows of `x` to each machine and receive theirs in `out`; splits are rows."""
        options = c10d.AllToAllOptions()
        splits = [*out_splits], [*in_splits]
        return Handle(self._group.alltoall_base(out, x, *splits, options).wait)

    @property
    def _group(self) -> Any:
        if self._gloo is None:
            raise RuntimeError("the connections to the other machines are closed")
        return self._gloo

    def close(self) -> None:
        """Close the connections, so that nobody waits for this rank; after calls under way."""
        held, self._gloo = [self._gloo], None
        closing = threading.Thread(target=held.clear, daemon=True)
        closing.start()
        closing.join(_CLOSING)


class Handle:
    """A call that is under way: `wait`, then `after` with its result."""

    def __init__(self, wait: Callable[[], Any], after: Callable[[], Any] | None = None) -> None:
        self._wait, self._after = wait, after

    def wait(self) -> None:
        self._wait()
        if self._after:
            self._after()
