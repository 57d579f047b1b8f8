"""All-reduce and broadcast over several machines, in pieces.

A piece is combined inside each machine, so that each of the first `columns` ranks has a slice of
it; each slice is combined with those of the same local rank on the other machines; and the slices
are gathered inside each machine. While the network carries one piece, memory moves others. A
network interface so carries 2 (M - 1) / M times the message each way for an all-reduce over M
machines, however many ranks they have.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from linkweave.collectives.calls.communicator import Communicator
from linkweave.collectives.cluster.cluster_map import PIECE
from linkweave.collectives.cluster.gloo import Across, undivided
from linkweave.collectives.cluster.machines import Machines
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.tensors import as_buffer

QUEUED = 2 << 20
"""Bytes of the pieces of a gradient queue: few enough that layers arrive soon, and enough that
while one piece transmits the next one starts up."""

_ALONE = 64 << 20  # bytes of pieces, if no machine has memory to move meanwhile
_IN_FLIGHT = 2  # pieces on the network; gloo has two threads
_ALIGN = 64  # elements


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


class Pieces:
    """The calls on flat tensors, in place. Row s of a piece is the slice of local rank s, who sends
    it `across` to the other machines. `index` is the number of this rank's machine."""

    def __init__(
        self, machine: Communicator, across: Across | None, machines: Machines, index: int
    ) -> None:
        self._machine, self._across = machine, across
        self._machines, self._index = machines, index
        self._equal = machine.size == machines.columns

    def allreduce(self, x: Any, op: str, final: Callable[[int], None] | None = None) -> None:
        """Combine the flat `x` over all ranks. "avg" divides the sum once, before slices are
        gathered. `final` is told how many elements, from the first, are final; pieces are then
        small."""

        size = self._machines.size

        def begin(rows: Any) -> None:
            if self._equal:
                self._machine.in_place("reduce_scatter", rows, undivided(op))
            else:
                for s, row in enumerate(rows):
                    self._machine.reduce(row, undivided(op), s)

        def across(mine: Any, network: Across) -> Callable[[], None]:
            work = network.allreduce(mine, op)

            def finish() -> None:
                work.wait()
                if op == "avg":
                    mine.div_(size)

            return finish

        alone = self._machines.most == 1
        most = QUEUED if final else _ALONE if alone else PIECE
        self._run(x, begin, across, most, final)

    def reduce(self, x: Any, out: Any, op: str, root: int) -> None:
        """Combine the flat `x` over all ranks to `out`, which may be `x`, on `root`; None
        elsewhere."""
        at, local = self._machines.position(root)

        def piece(first: int, part: Any) -> Iterator[None]:
            rows = in_rows(part, self._machines.columns)
            mine = self._own(rows, undivided(op))
            work = self._across.reduce(mine, op, at) if self._across else None
            yield
            if work:
                work.wait()
            if self._index == at:
                got = self._machine.gather(mine, local)
                if out is not None:
                    if op == "avg":
                        got.div_(self._machines.size)
                    put_back(got[: len(rows)], out[first : first + part.numel()])

        self._cut(x, PIECE, piece)

    def _own(self, rows: Any, op: str) -> Any:
        """This rank's slice, combined over its machine; undefined if it has none."""
        if self._equal:
            return self._machine.reduce_scatter(rows, op).view(-1)
        mine = rows.new_empty(rows.shape[1])
        for s, row in enumerate(rows):
            self._machine.reduce(total := row.clone(), op, s)
            if s == self._machine.rank:
                mine = total
        return mine

    def broadcast(self, x: Any, root: int) -> None:
        """Copy the flat `x` of `root` to all ranks."""
        at, local = self._machines.position(root)

        def begin(rows: Any) -> None:
            if self._index == at:
                self._machine.broadcast(rows, local)

        self._run(x, begin, lambda mine, network: network.broadcast(mine, at).wait, PIECE)

    def _run(
        self, x: Any, begin: Callable[[Any], None],
        across: Callable[[Any, Across], Callable[[], Any]], most: int,
        final: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Carry out a call in pieces of `most` bytes: `begin` fills this rank's slice of a piece's
        rows, `across` sends it to the other machines, and then the machine gathers the slices."""

        def piece(first: int, part: Any) -> Iterator[None]:
            rows = in_rows(part, self._machines.columns)
            begin(rows)
            network = self._across
            finish = across(rows[self._machine.rank], network) if network else None
            yield
            if finish:
                finish()
            self._gather(rows)
            put_back(rows, part)
            if final:
                final(first + part.numel())

        self._cut(x, most, piece)

    def _cut(self, x: Any, most: int, piece: Callable[[int, Any], Iterator[None]]) -> None:
        """Carry out pieces of the flat `x` of `most` bytes, each told where it begins."""
        unit = _ALIGN * self._machines.columns
        step = max(unit, most // x.element_size() // unit * unit)
        pipelined(piece(i, x[i : i + step]) for i in range(0, x.numel(), step))

    def _gather(self, rows: Any) -> None:
        """Give every rank of the machine all rows; each has its own."""
        if self._equal:
            self._machine.in_place("allgather", rows)
        else:
            for s, row in enumerate(rows):
                self._machine.broadcast(row, s)


def flat(x: Any, written: bool = True) -> tuple[Any, Callable[[], None]]:
    """`x` as a flat torch tensor over the same memory, and a function to call once that has been
    written to."""
    buffer, done = as_buffer(x, written)
    return flat_over(buffer), done


def flat_over(buffer: Buffer) -> Any:
    """A flat torch tensor over a buffer, which it keeps."""
    kind = getattr(torch, buffer.dtype)
    if not buffer.nbytes:
        return torch.empty(0, dtype=kind)
    memory: Any = (ctypes.c_char * buffer.nbytes).from_address(buffer.address)
    memory.owner = buffer
    return torch.frombuffer(memory, dtype=kind)


def in_rows(x: Any, count: int) -> Any:
    """A flat tensor as so many rows of one length; a copy, if it must be padded."""
    width = -(-x.numel() // count)
    if x.numel() == count * width:
        return x.view(count, width)
    whole = x.new_zeros(count * width)
    whole[: x.numel()] = x
    return whole.view(count, width)


def put_back(rows: Any, x: Any) -> None:
    """Copy rows to the flat tensor that they are of, if they are a copy."""
    if rows.data_ptr() != x.data_ptr():
        x.copy_(rows.view(-1)[: x.numel()])
