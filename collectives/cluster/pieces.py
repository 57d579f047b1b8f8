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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from linkweave.collectives.calls.communicator import Communicator
from linkweave.collectives.cluster.cluster_map import PIECE
from linkweave.collectives.cluster.gloo import Across, combined, undivided
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
        self._spare: list[Any] = []  # pieces of memory

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
            to = None if out is None else out[first : first + part.numel()]
            yield from (alone if self._machine.size == 1 else together)(part, to)
            if op == "avg" and to is not None:
                to.div_(self._machines.size)

        def alone(part: Any, to: Any) -> Iterator[None]:
            if to is not None:
                if to.data_ptr() != part.data_ptr():
                    to.copy_(part)
                yield from sent(to)
                return
            # gloo combines in place, and `x` stays as it is; new memory would cost more than a copy
            memory = self._spare.pop() if self._spare else torch.empty(PIECE, dtype=torch.uint8)
            mine = memory[: part.nbytes].view(part.dtype)
            mine.copy_(part)
            yield from sent(mine)
            self._spare.append(memory)

        def together(part: Any, to: Any) -> Iterator[None]:
            rows, size = in_rows(part, self._machines.columns), self._machine.size
            mine = self._own(rows, undivided(op))
            yield from sent(mine)
            if self._index != at:
                return
            whole = to is not None and to.numel() == size * mine.numel()
            got = self._machine.gather(mine, local, out=to.view(size, -1) if whole else None)
            if to is not None and not whole:
                put_back(got[: len(rows)], to)

        def sent(mine: Any) -> Iterator[None]:
            work = self._across.reduce(mine, op, at) if self._across else None
            yield
            if work:
                work.wait()

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
            rows, alone = in_rows(part, self._machines.columns), self._machine.size == 1
            if not alone:
                begin(rows)
            network = self._across
            finish = across(rows[self._machine.rank], network) if network else None
            yield
            if finish:
                finish()
            if not alone:
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


class Rows:
    """The calls, on contiguous CPU tensors. `across` connects all ranks.

    Values are combined inside each machine, by its communicator, and then from machine to machine;
    16-bit floats are rounded at each of them. If the order is `fixed`, they are combined in the
    order of the ranks, and 16-bit floats are rounded once. min and max keep NaN. "avg" divides the
    rounded sum once.
    """

    def __init__(
        self, machine: Communicator, across: Across, machines: Machines, fixed: bool
    ) -> None:
        self._fixed = fixed
        self._machine, self._across, self._machines = machine, across, machines
        self._rank, self._local = across.rank, machine.rank
        self._index, self._count = machines.position(across.rank)[0], machines.count
        self._ranks = machines.ranks
        self._mine = machines.ranks[self._index]
        self._span = machines.spans[self._index]

    def allgather(self, x: Any, out: Any, widths: Sequence[int]) -> None:
        """Gather the flat `x` of all ranks, in rank order, in the flat `out`; `widths` are the
        elements of each rank. Each machine passes on to the next one what it got from the one
        before, and shares it among its ranks meanwhile."""
        rows = out.split_with_sizes([*widths])
        rows[self._rank].copy_(x)

        def share(m: int) -> None:
            ranks = self._ranks[m]
            each = {widths[r] for r in ranks}
            if self._alike(ranks) and len(each) == 1:
                start = sum(widths[: ranks[0]])
                block = out[start : start + len(ranks) * each.pop()]
                self._machine.in_place("allgather", block.view(len(ranks), -1))
            else:
                for at, r in enumerate(ranks):
                    self._machine.broadcast(rows[r], at % len(self._mine))

        for s in range(1, self._count):
            mine, theirs = self._at(1 - s), self._at(-s)
            sends = [self._send(rows[r], to) for r, to in self._held(mine, 1)]
            receives = [self._recv(rows[r], source) for r, source in self._held(theirs, -1)]
            share(mine)
            _wait(sends + receives)
        share(theirs)

    def reduce_scatter(self, x: Any, out: Any, op: str) -> None:
        """Combine the rows of `x`, one for each rank, and return this rank's row in `out`. The
        sums for a machine pass through all others, the next one first, which add theirs; if the
        order is fixed, each rank gets all values instead."""
        inner = undivided(op)
        if self._fixed:
            rows = torch.empty_like(x)
            counts = [[x.shape[1]] * len(x)] * len(x)
            self.alltoall(x.view(-1), rows.view(-1), counts)
            total = combined(rows.unbind(), inner)
        else:
            total = self._passed_on(x, inner)
        out.copy_(total.div_(self._machines.size) if op == "avg" else total)

    def _passed_on(self, x: Any, inner: str) -> Any:
        """The sum for this rank."""
        sums = self._sums(x, self._at(-1), inner)
        for s in range(1, self._count):
            mine, theirs = self._at(-s), self._at(-s - 1)
            sends = [self._send(sums[r], to) for r, to in self._held(mine, 1)]
            got = {r: x.new_empty(x.shape[1]) for r, _ in self._held(theirs, -1)}
            receives = [self._recv(got[r], source) for r, source in self._held(theirs, -1)]
            here = self._sums(x, theirs, inner)
            _wait(sends + receives)
            sums = {r: combined([got[r], row], inner) for r, row in here.items()}
        return sums[self._rank]

    def _sums(self, x: Any, m: int, op: str) -> dict[int, Any]:
        """The rows of ranks of machine `m` that this rank combines over its machine."""
        ranks, found = self._ranks[m], {}
        if self._alike(ranks):
            row = self._machine.reduce_scatter(x[ranks[0] : ranks[-1] + 1], op)
            return {ranks[self._local]: row.view(-1)}
        for at, r in enumerate(ranks):
            row = x[r].clone()
            self._machine.reduce(row, op, at % len(self._mine))
            if at % len(self._mine) == self._local:
                found[r] = row
        return found

    def _at(self, s: int) -> int:
        """The s-th machine after this one."""
        return (self._index + s) % self._count

    def _held(self, m: int, s: int) -> list[tuple[int, int]]:
        """(rank, who holds its row on the s-th machine after this one), for the ranks of machine
        `m` whose rows this rank holds on its own."""
        ranks, there = self._ranks[m], self._ranks[self._at(s)]
        held = range(self._local, len(ranks), len(self._mine))
        return [(ranks[at], there[at % len(there)]) for at in held]

    def allreduce(self, x: Any, op: str) -> None:
        """Combine the flat `x` over all ranks, in place."""
        rows = in_rows(x, self._machines.size)
        mine = self._row(rows, op)
        self.allgather(mine, rows.view(-1), [mine.numel()] * len(rows))
        put_back(rows, x)

    def reduce(self, x: Any, out: Any, op: str, root: int) -> None:
        """Combine the flat `x` over all ranks to `out`, which may be `x`, on `root`; None
        elsewhere."""
        mine = self._row(in_rows(x, self._machines.size), op)
        total = None
        if out is not None:
            total = mine.new_empty(self._machines.size, mine.numel())
        self.gather(mine, total, root)
        if total is not None:
            put_back(total, out)

    def _row(self, rows: Any, op: str) -> Any:
        """This rank's row of the combined rows."""
        mine = rows.new_empty(rows.shape[1])
        self.reduce_scatter(rows, mine, op)
        return mine

    def gather(self, x: Any, out: Any, root: int) -> None:
        """Gather the flat `x` of all ranks in the rows of `out` on `root`; None elsewhere."""
        at, local = self._machines.position(root)
        if self._index != at:
            _wait([self._send(x, root)])
            return
        moves = []
        if self._rank == root:
            moves = [self._recv(out[r], r) for r in range(len(out)) if r not in self._mine]
        rows = out[self._span] if self._rank == root else None
        self._machine.gather(x, local, out=rows)
        if rows is not None and not isinstance(self._span, slice):  # it is a copy
            out[self._span] = rows
        _wait(moves)

    def scatter(self, x: Any, out: Any, root: int) -> None:
        """Send each rank's row of `x` on `root`, which is None elsewhere, to its flat `out`."""
        at, local = self._machines.position(root)
        sends = []
        if self._rank == root:
            sends = [self._send(x[r], r) for r in range(len(x)) if r not in self._mine]
        if self._index != at:
            _wait([self._recv(out, root)])
        else:
            rows = x[self._span] if self._rank == root else None
            self._machine.scatter(rows, local, out=out.view(1, -1))
        _wait(sends)

    def alltoall(self, x: Any, out: Any, counts: Sequence[Sequence[int]]) -> None:
        """Send parts of the flat `x` to each rank: `counts[src][dst]` elements from rank `src` to
        rank `dst`. In step s each machine sends to the s-th after it; long messages in two steps at
        once."""
        if x.data_ptr() == out.data_ptr():
            x = x.clone()
        given = x.split_with_sizes([*counts[self._rank]])
        got = out.split_with_sizes([of[self._rank] for of in counts])
        steps, most = range(1, self._count), 2 if x.nbytes > PIECE else self._count
        # gloo asks the receiver first, unless it is waiting already
        receives = [self._recv(got[r], r) for s in steps for r in self._ranks[self._at(-s)]]
        under_way: deque[list[Any]] = deque()
        for s in steps:
            under_way.append([self._send(given[r], r) for r in self._ranks[self._at(s)]])
            if s == 1:
                self._inside(x, out, counts)
            if len(under_way) > most - 1:
                _wait(under_way.popleft())
        for sends in under_way:
            _wait(sends)
        _wait(receives)

    def _inside(self, x: Any, out: Any, counts: Sequence[Sequence[int]]) -> None:
        """The part of an all-to-all among the ranks of this machine."""
        mine = self._mine
        inside = {counts[s][d] for s in mine for d in mine}
        if inside == {0}:
            return
        sends = [*counts[self._rank]]
        receives = [of[self._rank] for of in counts]
        splits = [[each[r] for r in mine] for each in (sends, receives)] * (len(inside) > 1)
        if isinstance(self._span, slice):  # their rows lie side by side
            rows, result = (
                part[sum(each[: mine[0]]) : sum(each[: mine[-1] + 1])]
                for part, each in ((x, sends), (out, receives))
            )
            self._machine.alltoall(rows, result, *splits)
            return
        given, got = x.split_with_sizes(sends), out.split_with_sizes(receives)
        rows = self._machine.alltoall(torch.cat([given[r] for r in mine]), None, *splits)
        for r, part in zip(mine, rows.split([receives[r] for r in mine]), strict=True):
            got[r].copy_(part)

    def _alike(self, ranks: Sequence[int]) -> bool:
        """Whether a machine has as many ranks as this one, and their numbers have no gaps."""
        return len(ranks) == len(self._mine) == ranks[-1] - ranks[0] + 1

    def _send(self, x: Any, rank: int) -> list[Any]:
        return [self._across.send(part, rank) for part in _cut(x)]

    def _recv(self, x: Any, rank: int) -> list[Any]:
        return [self._across.recv(part, rank) for part in _cut(x)]


def _cut(x: Any) -> Sequence[Any]:
    """A contiguous tensor in pieces, each of which may take a rank's whole timeout."""
    if x.nbytes > PIECE:
        pieces: Sequence[Any] = x.view(-1).split(PIECE // x.element_size())
        return pieces
    return (x,) if x.numel() else ()


def _wait(moves: Sequence[Sequence[Any]]) -> None:
    for move in moves:
        for work in move:
            work.wait()
