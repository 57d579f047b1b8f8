"""All-reduce, reduce and broadcast over several machines, in pieces.

A piece is combined inside each machine, so that each of the first `columns` ranks has a slice of
it; each slice is combined with those of the same local rank on the other machines; and the slices
are gathered inside each machine. While the network carries one piece, memory moves others. A
network interface so carries 2 (M - 1) / M times the message each way for an all-reduce over M
machines, however many ranks they have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from linkweave.collectives.communicator import Communicator
from linkweave.collectives.distributed.across import Across, Handle
from linkweave.collectives.distributed.cluster_map import PIECE
from linkweave.collectives.distributed.combine import undivided
from linkweave.collectives.launch.machines import Machines

QUEUED = 2 << 20
"""Bytes of the pieces of a gradient queue: few enough that layers arrive soon, and enough that
while one piece transmits the next one starts up."""

_IN_FLIGHT = 2  # pieces on the network; gloo has two threads
_ALIGN = 64  # elements

Slice = Any  # a flat tensor, or None on ranks that do not talk to other machines


def pipelined(pieces: Iterable[Iterator[None]]) -> None:
    """Carry out pieces, each up to its `yield` while earlier ones are on the network."""
    flying: deque[Iterator[None]] = deque()
    for piece in pieces:
        next(piece)
        flying.append(piece)
        if len(flying) > _IN_FLIGHT:
            next(flying.popleft(), None)
    while flying:
        next(flying.popleft(), None)


class Slices:
    """How a machine's ranks share out the rows of a piece: row s is the slice of local rank s, who
    sends it `across` to the other machines. `index` is the number of this rank's machine."""

    def __init__(
        self, machine: Communicator, across: Across | None, machines: Machines, index: int
    ) -> None:
        self.machine, self.across = machine, across
        self.machines, self.index = machines, index
        self.count = machines.columns
        self._equal = machine.size == self.count

    def reduce(self, rows: Any, op: str) -> Slice:
        """Combine `rows` over the machine, in place. Returns this rank's row; the others are then
        undefined."""
        if self._equal:
            self.machine.in_place("reduce_scatter", rows, op)
        else:
            for s in range(self.count):
                self.machine.reduce(rows[s], op, s)
        return self.row(rows)

    def row(self, rows: Any) -> Slice:
        return None if self.across is None else rows[self.machine.rank]

    def gather(self, rows: Any) -> None:
        """Give every rank all rows; each has its own."""
        if self._equal:
            self.machine.in_place("allgather", rows)
        else:
            for s in range(self.count):
                self.machine.broadcast(rows[s], s)


class Pieces:
    """The calls on flat tensors, in place."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices

    def allreduce(self, x: Any, op: str, final: Callable[[int], None] | None = None) -> None:
        """Combine `x` over all ranks. "avg" divides the sum once, before slices are gathered.
        `final` is told how many elements, from the first, are final; pieces are then small."""

        def across(mine: Any, network: Across) -> Handle:
            return self._divided(network.allreduce(mine, op), mine, op)

        self._run(x, self._reduced(op), across, final=final)

    def reduce(self, x: Any, op: str, root: int) -> None:
        """`allreduce` whose result only `root` gets; `x` of the others is then undefined."""
        at = self._slices.machines.position(root)[0]

        def across(mine: Any, network: Across) -> Handle:
            return self._divided(network.reduce(mine, op, at), mine, op)

        self._run(x, self._reduced(op), across, {at})

    def _reduced(self, op: str) -> Callable[[Any], Slice]:
        return lambda rows: self._slices.reduce(rows, undivided(op))

    def _divided(self, handle: Handle, mine: Any, op: str) -> Handle:
        size = self._slices.machines.size
        return Handle(handle.wait, lambda: mine.div_(size)) if op == "avg" else handle

    def broadcast(self, x: Any, root: int) -> None:
        at, local = self._slices.machines.position(root)

        def begin(rows: Any) -> Slice:
            if self._slices.index == at:
                self._slices.machine.broadcast(rows, local)
            return self._slices.row(rows)

        self._run(x, begin, lambda mine, network: network.broadcast(mine, at))

    def _run(
        self, x: Any, begin: Callable[[Any], Slice], across: Callable[[Any, Across], Handle],
        gather_on: Collection[int] | None = None, final: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Carry out a call piece by piece: `begin` gives this rank's slice of the rows of a piece,
        `across` sends it to the other machines, and then the machine gathers the slices, if it is
        one of those to `gather_on` (None: all)."""
        gathers = gather_on is None or self._slices.index in gather_on

        def piece(first: int, part: Any) -> Iterator[None]:
            rows = self._rows(part)
            mine = begin(rows)
            network = self._slices.across
            handle = across(mine, network) if network else None
            yield
            if handle:
                handle.wait()
            if gathers:
                self._slices.gather(rows)
            if rows.data_ptr() != part.data_ptr():
                part.copy_(rows.view(-1)[: part.numel()])
            if final:
                final(first + part.numel())

        unit = _ALIGN * self._slices.count
        step = max(unit, (QUEUED if final else PIECE) // x.element_size() // unit * unit)
        pipelined(piece(i, x[i : i + step]) for i in range(0, x.numel(), step))

    def _rows(self, part: Any) -> Any:
        """A piece as one row for each slice; a copy, if it must be padded."""
        count = self._slices.count
        if part.numel() % count == 0:
            return part.view(count, -1)
        width = -(-part.numel() // count)
        whole = part.new_zeros(count * width)
        whole[: part.numel()].copy_(part)
        return whole.view(count, width)
