"""How one rank reaches the others: on its machine, on other machines, and all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch._C._distributed_c10d as c10d

from linkweave.collectives.calls.communicator import Communicator
from linkweave.collectives.calls.work import Worker
from linkweave.collectives.cluster.gloo import Across, timed_out
from linkweave.collectives.cluster.machines import Machines
from linkweave.collectives.cluster.pieces import Pieces, Rows, flat
from linkweave.collectives.errors import CollectiveAborted, CollectiveTimeout
from linkweave.topology.checks import integer


class Connections:
    """The connections of rank `rank`; `machine` is the communicator of its machine's ranks.

    fixed: whether values are combined in the order of the ranks, whatever the size of a message.
    direct: to all ranks, for messages.
    across: to the ranks with its local rank, one of each machine, if all machines have one.
    """

    def __init__(
        self, rank: int, machines: Machines, machine: Communicator, store: Any, timeout: float,
        fixed: bool,
    ) -> None:  # fmt: skip
        self.rank, self.size = rank, machines.size
        self.machines, self.machine, self.fixed = machines, machine, fixed
        self.index = machines.position(rank)[0]
        self.mine = machines.ranks[self.index]
        self.direct = Across(c10d.PrefixStore("direct/", store), rank, self.size, timeout)
        self.across: Across | None = None
        local = machine.rank
        if local < machines.columns:
            column = c10d.PrefixStore(f"across/{local}/", store)
            self.across = Across(column, self.index, machines.count, timeout)
        self._scratch = np.empty(0, np.uint8)
        self._workers: dict[tuple[int, bool], Worker] = {}  # of messages to and from each rank
        # of its own: gloo closes all connections of a group if it waits in vain for one message
        self._between = Across(c10d.PrefixStore("rows/", store), rank, self.size, timeout)
        self.pieces = Pieces(machine, self.across, machines, self.index)
        self.rows = Rows(machine, self._between, machines, fixed)

    def scratch(self, nbytes: int) -> Any:
        """Bytes that nobody reads, the same ones for all calls."""
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes]

    def allreduce(self, x: Any, op: str, final: Callable[[int], None] | None = None) -> None:
        """Combine the flat `x` over all ranks, in place. `final` as in `Pieces.allreduce`."""
        if self.fixed:
            self.rows.allreduce(x, op)
            if final:
                final(x.numel())
        else:
            self.pieces.allreduce(x, op, final)

    def reduce(self, x: Any, out: Any, op: str, root: int) -> None:
        """As `Pieces.reduce`."""
        (self.rows if self.fixed else self.pieces).reduce(x, out, op, root)

    def send(self, x: Any, to: int, async_op: bool = False) -> Any:
        """Send `x` to a rank."""
        return self._move(x, to, True, async_op)

    def recv(self, x: Any, source: int, async_op: bool = False) -> Any:
        """Receive `x` from a rank."""
        return self._move(x, source, False, async_op)

    def _move(self, x: Any, peer: int, sends: bool, async_op: bool) -> Any:
        peer = integer(peer, "a rank", 0, self.size - 1)
        index, local = self.machines.position(peer)
        if index == self.index:
            call = self.machine.send if sends else self.machine.recv
            return call(x, local, async_op=async_op)
        message, done = flat(x, written=not sends)
        worker = self._workers.setdefault((peer, sends), Worker())
        return worker.submit(async_op, self._carry, message, done, peer, sends)

    def _carry(self, message: Any, done: Callable[[], None], peer: int, sends: bool) -> None:
        try:
            (self.direct.send if sends else self.direct.recv)(message, peer).wait()
        except RuntimeError as error:
            kind = CollectiveTimeout if timed_out(error) else CollectiveAborted
            words = f"rank {self.rank} waits for rank {peer} to {'receive' if sends else 'send'}"
            raise kind(f"{words}: {error}", peer=peer) from error
        if not sends:
            done()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close(self.rank)
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connections, so that nobody on other machines waits for this rank."""
        for group in (self.across, self._between, self.direct):
            if group:
                group.close()
