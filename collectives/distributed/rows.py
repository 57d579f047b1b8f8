"""All-gather, reduce-scatter and all-to-all over several machines, of rows for each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from linkweave.collectives.distributed.cluster_map import PIECE
from linkweave.collectives.distributed.combine import combined, undivided
from linkweave.collectives.distributed.pieces import Slices, pipelined


class Rows:
    """The calls, on contiguous CPU tensors."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._machine, self._across = slices.machine, slices.across
        self._machines, self._index = slices.machines, slices.index

    def _parts(self, width: int, item: int) -> Iterable[slice]:
        """Cuts rows so that the parts of all ranks make about one piece."""
        step = max(1, PIECE // (item * self._machines.size))
        return (slice(i, min(i + step, width)) for i in range(0, width, step))

    def allgather(self, x: Any, out: Any) -> None:
        """Gather the flat `x` of all ranks in the rows of `out`.

        Each machine gathers its own; each column sends a slice of that to the other machines, whose
        ranks put the slices together.
        """

        def piece(part: slice) -> Iterator[None]:
            width = part.stop - part.start
            packed = self._packed([self._machine.allgather(x[part].contiguous()).view(-1)], width)
            whole = packed.new_empty((len(packed), self._machines.count * packed.shape[2]))
            handle = None
            if self._across is not None:
                mine = self._slices.row(packed).view(-1)
                handle = self._across.allgather(mine, self._slices.row(whole))
            yield
            if handle:
                handle.wait()
            self._slices.gather(whole)
            out[:, part] = self._unpacked(whole.view(len(packed), self._machines.count, -1), width)

        pipelined(map(piece, self._parts(x.numel(), x.element_size())))

    def reduce_scatter(self, x: Any, out: Any, op: str) -> None:
        """Combine the rows of `x`, one for each rank, and return this rank's row in `out`.

        Slices of the other machines' rows travel by an all-to-all and are combined in the order of
        the machines, 16-bit floats in float32.
        """
        local = self._machine.rank

        def piece(part: slice) -> Iterator[None]:
            width = part.stop - part.start
            blocks = [x[list(ranks), part].reshape(-1) for ranks in self._machines.ranks]
            packed = self._packed(blocks, width)  # [columns, machines, slice]
            count, machines, each = packed.shape
            mine = self._slices.reduce(packed.view(count, -1), undivided(op))
            rows, got, handle = x.new_empty((count, each)), x.new_empty((machines, each)), None
            if self._across is not None:
                handle = self._across.alltoall(mine.view(machines, each), got)
            yield
            if handle:
                handle.wait()
                total = combined(got, op)
                self._slices.row(rows).copy_(total.div_(len(x)) if op == "avg" else total)
            self._slices.gather(rows)
            block = rows.view(-1)[: self._machine.size * width].view(-1, width)
            out[part] = block[local]

        pipelined(map(piece, self._parts(x.shape[1], x.element_size())))

    def alltoall(self, x: Any, out: Any, counts: Sequence[Sequence[int]]) -> None:
        """Send rows of `x` to each rank: `counts[src][dst]` rows from rank `src` to rank `dst`.

        A rank passes all rows for column c of other machines to its machine's local rank c, which
        exchanges them with the other machines and deals them out.
        """
        machines, columns, local = self._machines, self._machines.columns, self._machine.rank
        mine = machines.ranks[self._index]
        own = counts[mine[local]]
        of_column = [
            [r for ranks in machines.ranks for r in ranks[c::columns]] for c in range(columns)
        ]
        pieces = dict(zip(range(machines.size), x.split(list(own)), strict=True))
        order = [dst for column in of_column for dst in column]
        sends = [sum(own[d] for d in column) for column in of_column]
        sends += [0] * (self._machine.size - columns)
        got = self._machine.alltoall(torch.cat([pieces[d] for d in order]), in_splits=sends)
        if self._across is not None:
            labels = [(s, d) for s in mine for d in of_column[local]]
            got = self._swap(got, labels, counts)
            labels = [
                (s, d) for ranks in machines.ranks for s in ranks for d in mine[local::columns]
            ]
            there = sorted(labels, key=lambda pair: (mine.index(pair[1]), pair[0]))
            got = _reordered(got, labels, there, counts)
        if columns < machines.most:
            sends = [
                sum(row[to] for row in counts) if at % columns == local else 0
                for at, to in enumerate(mine)
            ]
            got = self._machine.alltoall(got, in_splits=sends)
        out.copy_(got)

    def _swap(
        self, got: Any, labels: list[tuple[int, int]], counts: Sequence[Sequence[int]]
    ) -> Any:
        """Exchange the rows of this column with the other machines."""
        assert self._across is not None
        machines = self._machines
        mine = machines.ranks[self._index]
        to = sorted(labels, key=lambda pair: machines.position(pair[1])[0])  # stable
        sends = [0] * machines.count
        receives = [0] * machines.count
        for s, d in labels:
            sends[machines.position(d)[0]] += counts[s][d]
        for m, ranks in enumerate(machines.ranks):
            receives[m] = sum(
                counts[s][d] for s in ranks for d in mine[self._machine.rank :: machines.columns]
            )
        result = got.new_empty((sum(receives), *got.shape[1:]))
        self._across.alltoall(_reordered(got, labels, to, counts), result, sends, receives).wait()
        return result

    # ---- blocks of machines in equal slices --------------------------------------------------
    def _packed(self, blocks: Sequence[Any], width: int) -> Any:
        """Flat blocks as [columns, blocks, slice], padded to those of the largest machine."""
        count, longest = self._machines.columns, self._machines.most * width
        each = -(-longest // count)
        whole = blocks[0].new_zeros((len(blocks), count * each))
        for row, block in zip(whole, blocks, strict=True):
            row[: block.numel()] = block
        return whole.view(len(blocks), count, each).transpose(0, 1).contiguous()

    def _unpacked(self, packed: Any, width: int) -> Any:
        """[columns, machines, slice] to [ranks, width], in rank order."""
        blocks = packed.transpose(0, 1).reshape(self._machines.count, -1)
        result = packed.new_empty((self._machines.size, width))
        for block, ranks in zip(blocks, self._machines.ranks, strict=True):
            result[list(ranks)] = block[: len(ranks) * width].view(-1, width)
        return result


def _reordered(
    x: Any, labels: Sequence[tuple[int, int]], to: Sequence[tuple[int, int]],
    counts: Sequence[Sequence[int]],
) -> Any:  # fmt: skip
    """The rows of `x`, grouped by (source, target) as `labels`, grouped as `to`."""
    if not labels:
        return x
    parts = dict(zip(labels, x.split([counts[s][d] for s, d in labels]), strict=True))
    return torch.cat([parts[pair] for pair in to])
