"""The collectives of ranks on several machines as methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from linkweave.collectives.calls.work import Worker
from linkweave.collectives.distributed import calls
from linkweave.collectives.distributed.call import Call
from linkweave.collectives.distributed.connections import Connections
from linkweave.collectives.distributed.queue import Arrivals, ClusterQueue


class ClusterCollectives(ABC):
    """Each method submits a call of `calls`; how it is made is the communicator's part."""

    _links: Connections
    _worker: Worker

    @abstractmethod
    def _check(self) -> None:
        """Raise if no call can be made."""

    @abstractmethod
    def _call(self, prepare: Callable[..., Call], *args: Any) -> Any:
        """Make a call."""

    def _enqueue(self, prepare: Callable[..., Call], *args: Any) -> Future[Any]:
        """Make a call on the worker's thread."""
        self._check()
        return self._worker.enqueue(self._call, prepare, *args)

    def _submit(self, async_op: bool, prepare: Callable[..., Call], *args: Any) -> Any:
        self._check()
        return self._worker.submit(async_op, self._call, prepare, *args)

    def allreduce(
        self, x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False,
        algorithm: Any = "auto",
    ) -> Any:  # fmt: skip
        """As `Communicator.allreduce`; only "auto" is allowed as the algorithm."""
        return self._submit(async_op, calls.allreduce, x, op, out, algorithm)

    def allreduce_queue(
        self, x: Any, layers: Sequence[int], op: str = "sum", *, algorithm: Any = "auto"
    ) -> ClusterQueue:
        """As `Communicator.allreduce_queue`, for CPU tensors. Layers arrive in the order in which
        they are in `x`, each with the piece that has its end (`pieces.QUEUED` bytes)."""
        arrivals = Arrivals()
        future = self._enqueue(calls.allreduce_queue, x, layers, op, algorithm, arrivals)
        queue = ClusterQueue(future, arrivals)
        self._worker.keep(queue)
        return queue

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False) -> Any:
        return self._submit(async_op, calls.broadcast, x, root)

    def reduce(
        self, x: Any, op: str = "sum", root: int = 0, *, out: Any = None, async_op: bool = False
    ) -> Any:
        """As `Communicator.reduce`."""
        return self._submit(async_op, calls.reduce, x, op, root, out)

    def allgather(
        self, x: Any, *, counts: Sequence[int] | None = None, out: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        """As `Communicator.allgather`."""
        return self._submit(async_op, calls.allgather, x, counts, out)

    def reduce_scatter(
        self, x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False
    ) -> Any:
        """As `Communicator.reduce_scatter`."""
        return self._submit(async_op, calls.reduce_scatter, x, op, out)

    def gather(self, x: Any, root: int = 0, *, out: Any = None, async_op: bool = False) -> Any:
        """As `Communicator.gather`."""
        return self._submit(async_op, calls.gather, x, root, out)

    def scatter(self, x: Any, root: int = 0, *, out: Any = None, async_op: bool = False) -> Any:
        """As `Communicator.scatter`."""
        return self._submit(async_op, calls.scatter, x, root, out)

    def alltoall(
        self, x: Any, out: Any = None, in_splits: Sequence[int] | None = None,
        out_splits: Sequence[int] | None = None, *, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """As `Communicator.alltoall`."""
        return self._submit(async_op, calls.alltoall, x, out, in_splits, out_splits)

    def exchange(self, x: Any, counts: Sequence[Sequence[int]]) -> Any:
        """An all-to-all of `counts[src][dst]` rows from rank `src` to rank `dst`, as all know."""
        return self._submit(False, calls.exchange, x, counts)

    def sparse_allreduce(
        self, values: Any, indices: Any, numel: int, k: int, op: str = "sum", *,
        residual: Any = None, mode: str = "auto", conserve: bool = True, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """As `Communicator.sparse_allreduce`. Vectors are merged inside each machine first."""
        return self._submit(
            async_op, calls.sparse_allreduce, values, indices, numel, k, op, residual, mode,
            conserve,
        )  # fmt: skip

    def barrier(self) -> None:
        """Wait until all ranks have called `barrier`."""
        self._submit(False, calls.barrier)

    def send(self, x: Any, to: int, *, async_op: bool = False) -> Any:
        """As `Communicator.send`."""
        self._check()
        return self._links.send(x, to, async_op)

    def recv(self, x: Any, source: int, *, async_op: bool = False) -> Any:
        """As `Communicator.recv`."""
        self._check()
        return self._links.recv(x, source, async_op)
