"""The communicator of ranks on several machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch._C._distributed_c10d as c10d

from linkweave.collectives.calls import operations
from linkweave.collectives.calls.communicator import MOST_LANES, Communicator
from linkweave.collectives.calls.host import Again
from linkweave.collectives.calls.methods import Methods
from linkweave.collectives.calls.operations import exchange
from linkweave.collectives.calls.work import HostQueue, Worker
from linkweave.collectives.cluster.calls import LONGER, ClusterCalls, sparse_allreduce
from linkweave.collectives.cluster.cluster_map import most_along
from linkweave.collectives.cluster.connections import Connections
from linkweave.collectives.cluster.gloo import Across
from linkweave.collectives.cluster.kinds import ClusterCall
from linkweave.collectives.cluster.machines import Machines
from linkweave.collectives.cluster.roll_call import RollCall
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.cpu.layer_counters import LayerCounters
from linkweave.collectives.settings import Settings
from linkweave.topology.checks import integer

Meet = Callable[[int, int, Any], Any]
"""Makes the communicator of a rank, of so many, that meet over a store of torch.distributed."""


class ClusterCommunicator(Methods):
    """The ranks of several machines, and the collectives among them, on CPU tensors.

    `machine` is the communicator of this machine's ranks; `across` connects it to the ranks with
    the same local rank on the other machines, over torch.distributed (None for a rank whose local
    rank some machine does not have). All ranks compare what they ask for before a result can be
    read; if that differs, each raises CollectiveError. Of a short broadcast, scatter, gather or
    reduce, a rank compares what it hears from another machine; the others compare it in the next
    call in which they hear from one, and the communicator has then ended. If a rank dies or a
    machine cannot be reached, each raises CollectiveAborted or CollectiveTimeout, and it has ended
    too.
    """

    _calls: ClusterCalls

    def __init__(
        self, rank: int, machines: Machines, machine: Communicator, store: Any,
        settings: Settings, meet: Meet,
    ) -> None:  # fmt: skip
        self.rank, self.size = rank, machines.size
        self.machine, self.machines, self.settings = machine, machines, settings
        self._store, self._meet = store, meet
        fixed = settings.order == "fixed"
        self._links = Connections(rank, machines, machine, store, settings.longest, fixed)
        roll_call: RollCall | None = None
        if machine.rank == 0:
            names = [machines.describe(m) for m in range(machines.count)]
            control = c10d.PrefixStore("control/", store)
            limit = settings.longest + 2 * LONGER
            room = most_along(machines.count, machines.most)
            roll_call = RollCall(control, self._links.index, names, room, limit)
        self._calls = ClusterCalls(self._links, roll_call, settings.longest)
        self._worker = Worker()
        self._parts = []
        self._before_close: list[Callable[[], None]] = []
        self._numbers = count()
        machine.leave_cores()  # gloo's threads need them
        self.barrier()

    @property
    def compares(self) -> bool:
        """Whether calls are compared before they begin. All ranks may set this to False, at the
        same place between two calls, if they make the same calls anyway. Then a difference is seen
        by chance only, as with gloo: it is an error, a timeout, a wrong result, or gloo aborts the
        process; and a call that a rank refuses ends the communicator. Barriers, sparse all-reduces
        and calls that go along with their comparison (most short ones, but no all-to-all, gather or
        scatter of more than 64 KiB) are compared all the same.
        """
        return self._calls.compares

    @compares.setter
    def compares(self, value: bool) -> None:
        if value != self._calls.compares:
            self._worker.drain()  # calls under way are those of before
            self._calls.compares = value

    # ---- calls ---------------------------------------------------------------------------------
    def _call(
        self, again: Callable[[], Again | None], async_op: bool, x: Any,
        body: Callable[..., Any], *args: Any,
    ) -> Any:  # fmt: skip
        if not async_op and self._worker.idle and (found := again()) is not None:
            owners = x, found.result
            if self._calls.repeat(*found.arguments, owners=owners):
                return found.result
        return self._submit(async_op, x, body, *args)

    def _submit(
        self, async_op: bool, x: Any, body: Callable[..., Any], *args: Any, again: Any = None
    ) -> Any:
        self._calls.check()
        return self._worker.submit(async_op, self._calls.carry_out, body, *args)

    def allreduce_queue(
        self, x: Any, layers: Sequence[int], op: str = "sum", *, algorithm: Any = "auto"
    ) -> HostQueue:
        """As `Communicator.allreduce_queue`, for CPU tensors. Layers arrive in the order in which
        they are in `x`, each with the piece that has its end (`pieces.QUEUED` bytes); with
        order="fixed" all of them at the end."""
        self._calls.check()
        arrivals = LayerCounters()
        call = operations.queued, x, layers, op, algorithm, arrivals
        future = self._worker.enqueue(self._calls.carry_out, *call)
        queue = HostQueue(future, arrivals, self.machine.calls.control.arena.abort_address)
        self._worker.keep(queue)
        return queue

    def sparse_allreduce(
        self, values: Any, indices: Any, numel: int, k: int, op: str = "sum", *,
        residual: Any = None, mode: str = "auto", conserve: bool = True, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """As `Communicator.sparse_allreduce`. Vectors are merged inside each machine first."""
        arguments = (values, indices, numel, k, op, residual, mode, conserve)
        return self._submit(async_op, None, sparse_allreduce, *arguments)

    def exchange(self, x: Any, counts: Sequence[Sequence[int]]) -> Any:
        """An all-to-all of `counts[src][dst]` rows from rank `src` to rank `dst`, as all know."""
        return self._submit(False, x, exchange, x, counts)

    def send(self, x: Any, to: int, *, async_op: bool = False) -> Any:
        """As `Communicator.send`."""
        self._calls.check()
        return self._links.send(x, to, async_op)

    def recv(self, x: Any, source: int, *, async_op: bool = False) -> Any:
        """As `Communicator.recv`."""
        self._calls.check()
        return self._links.recv(x, source, async_op)

    def sendrecv(self, x: Any, pairs: Sequence[tuple[int, int]]) -> None:
        """As `Communicator.sendrecv`."""
        for source, target in pairs:
            if self.rank == source:
                self.send(x, target)
            elif self.rank == target:
                self.recv(x, source)

    # ---- memory and parts --------------------------------------------------------------------
    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """As `Communicator.empty`, in memory that this machine's ranks share."""
        return self.machine.empty(shape, dtype)

    def split(self, color: int = 0) -> Any:
        """As `Communicator.split`. Returns a `Communicator` for ranks of one machine."""
        colors = self._submit(False, None, split, color)
        ranks = [r for r, c in enumerate(colors) if c == color]
        where = c10d.PrefixStore(f"split/{next(self._numbers)}/{color}/", self._store)
        part = self._meet(ranks.index(self.rank), len(ranks), where)
        self._keep([part])
        return part

    def lanes(self, n: int) -> list[ClusterCommunicator]:
        """`n` communicators of all ranks, for calls that run at once, each from its own thread."""
        n, number = self._submit(False, None, lanes, n), next(self._numbers)
        made = [
            ClusterCommunicator(
                self.rank, self.machines, lane,
                c10d.PrefixStore(f"lanes/{number}/{i}/", self._store), self.settings, self._meet,
            )
            for i, lane in enumerate([self.machine.split() for _ in range(n)])
        ]  # fmt: skip
        self._keep(made)
        return made

    # ---- the end -----------------------------------------------------------------------------
    @property
    def across(self) -> Across | None:
        """The ranks with this local rank, one of each machine."""
        return self._links.across

    @property
    def timeout(self) -> float:
        """Longest wait for a peer, in seconds."""
        return self.settings.longest

    @property
    def closed(self) -> bool:
        return self.machine.closed

    def before_close(self, call: Callable[[], None]) -> None:
        """As `Communicator.before_close`."""
        self._before_close.append(call)

    def close(self) -> None:
        """Finish asynchronous calls and free all resources; nothing in a forked process.

        Waits until the other machines have received what this one sent; while an exception is
        handled, for a few seconds at most. Raises CollectiveTimeout or CollectiveAborted if they do
        not. A call that another thread has under way raises CollectiveError, at its timeout at the
        latest.
        """
        if self.closed or self.machine.calls.health.foreign:
            return
        with ExitStack() as last:  # in reverse order; if one step fails, the others still run
            last.callback(self.machine.close)
            last.callback(self._calls.close)
            last.callback(self._calls.finish)
            last.callback(self._close_parts)  # those too that a call before it makes
            last.callback(self._worker.close, self.rank)
            while self._before_close:
                last.callback(self._before_close.pop())

    def abort(self, why: int) -> None:
        """Make this machine's calls raise CollectiveAborted, and let the other machines know."""
        if not (self.closed or self.machine.calls.health.foreign):
            self._calls.abort(why)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Communicator, name):
            raise _OfOneMachine(f"{name} is for the ranks of one machine: see `machine`")
        raise AttributeError(f"'ClusterCommunicator' object has no attribute {name!r}")

    def __enter__(self) -> ClusterCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OfOneMachine(CollectiveError, AttributeError):
    """A method that communicators of one machine have."""


def split(calls: ClusterCalls, color: Any) -> list[int]:
    """The color of every rank."""
    with calls.sharing_errors():
        mine = integer(color, "color")
    return [int(found) for found in calls.gather("split", str(mine).encode())]


def lanes(calls: ClusterCalls, n: Any) -> int:
    with calls.sharing_errors():
        n = integer(n, "the number of lanes", 1, MOST_LANES)
    calls.make_call(ClusterCall(f"lanes({n})", lambda: None))
    return int(n)
