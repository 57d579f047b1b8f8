"""Messages and collectives among ranks of several machines, over torch.distributed's gloo."""

from __future__ import annotations

import threading
from typing import Any

import torch._C._distributed_c10d as c10d

from linkweave.collectives.distributed.combine import gloo_op
from linkweave.collectives.distributed.gloo import gloo_group

_CLOSING = 1.0
"""Seconds for which a rank that closes its connections waits for calls under way."""


class Across:
    """Rank `rank` of `size`: all ranks, or those with one local rank, one of each machine.

    All calls take contiguous CPU tensors of torch, and return a handle whose `wait` must be called,
    once. Collectives keep their order, and so do messages from one rank to another.
    Raises RuntimeError.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._gloo: Any = gloo_group(store, rank, size, timeout)

    def send(self, x: Any, to: int) -> Any:
        return self._group.send([x], to, 0)

    def recv(self, x: Any, source: int) -> Any:
        return self._group.recv([x], source, 0)

    def allreduce(self, x: Any, op: str = "sum") -> Any:
        """Combine `x` in place, with the ops of `Communicator.allreduce`; min and max of floats may
        lose a NaN. "avg" is the sum; its caller divides. 16-bit floats are rounded at each step of
        gloo's ring."""
        options = c10d.AllreduceOptions()
        options.reduceOp = gloo_op(op, x)
        return self._group.allreduce([x], options)

    def broadcast(self, x: Any, root: int) -> Any:
        options = c10d.BroadcastOptions()
        options.rootRank = root
        return self._group.broadcast([x], options)

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
