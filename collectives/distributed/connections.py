"""How one rank reaches the others: on its machine, on other machines, and all of them."""

from __future__ import annotations

from typing import Any

import torch._C._distributed_c10d as c10d

from linkweave.collectives.calls.work import HostWork, Worker
from linkweave.collectives.communicator import Communicator
from linkweave.collectives.distributed.across import Across
from linkweave.collectives.distributed.flat import Flat, move
from linkweave.collectives.distributed.gloo import gloo_group
from linkweave.collectives.distributed.pieces import Pieces, Slices
from linkweave.collectives.distributed.rows import Rows
from linkweave.collectives.launch.machines import Machines
from linkweave.topology.checks import integer


class Connections:
    """The connections of rank `rank`; `machine` is the communicator of its machine's ranks."""

    def __init__(
        self, rank: int, machines: Machines, machine: Communicator, store: Any, timeout: float
    ) -> None:
        self.rank, self.size = rank, machines.size
        self.machines, self.machine = machines, machine
        self.index, local = machines.position(rank)
        self.across: Across | None = None
        if local < machines.columns:
            column = c10d.PrefixStore(f"across/{local}/", store)
            self.across = Across(column, self.index, machines.count, timeout)
        direct = c10d.PrefixStore("direct/", store)
        self._direct: Any = gloo_group(direct, rank, self.size, timeout)
        self._workers: dict[tuple[int, bool], Worker] = {}  # of messages to and from each rank
        slices = Slices(machine, self.across, machines, self.index)
        self.pieces, self.rows = Pieces(slices), Rows(slices)

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
        flat = Flat(x, written=not sends)
        words = f"rank {self.rank} waits for rank {peer} to {'receive' if sends else 'send'}"
        worker = self._workers.setdefault((peer, sends), Worker())
        work = HostWork(worker.enqueue(move, self._direct, flat, peer, sends, words))
        return worker.keep(work) if async_op else work.wait()

    def close_across(self) -> None:
        if self.across:
            self.across.close()

    def close(self) -> None:
        self.close_across()
        for worker in self._workers.values():
            worker.close(self.rank)
        self._direct = None
