"""What ranks tell each other of an embedding whose columns are divided among them.

Source: Li et al., "EmbRace: Accelerating Sparse Communication for Distributed Training of Deep
Neural Networks", section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from linkweave.collectives.training.transport import Counts, Transport
from linkweave.kernels import embedding
from linkweave.kernels.api import coalesce

NONE = -1
"""The number of tokens of a rank that does not know them."""


def columns_of(width: int, size: int) -> list[int]:
    """How many columns each rank has: as equal as can be, the first ranks one more."""
    return [width // size + (rank < width % size) for rank in range(size)]


class RowExchange:
    """The exchanges of one embedding, on the first lane. Each blocks, and all ranks make the same.

    table: the parameter, [rows, columns of this rank], which is read.
    widths: the columns of each rank.
    """

    def __init__(self, transport: Transport, table: torch.Tensor, widths: Sequence[int]) -> None:
        self._transport = transport
        self._table, self._widths = table, list(widths)
        self.rank, self._size = transport.rank, transport.size
        self._index = torch.int32 if len(table) <= 1 << 31 else torch.int64
        self.nbytes = 0
        """Bytes that this rank has sent to other ranks."""

    def tokens(self, own: torch.Tensor | None) -> list[torch.Tensor] | None:
        """The tokens of all ranks, by rank; None if a rank does not know its own.

        own: int64, ascending and distinct.
        """
        count = NONE if own is None else len(own)
        counts = self._to_all(torch.tensor([count]), [1] * self._size).tolist()
        if own is None or NONE in counts:
            return None
        found = self._to_all(own.to(self._index), counts)
        return [part.long() for part in torch.split(found, counts)]

    def fetch(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole rows of this rank's tokens, [own tokens, width]; `tokens` are all ranks'."""
        mine, own = self._widths[self.rank], len(tokens[self.rank])
        wanted = torch.cat(list(tokens))
        sent = torch.empty(len(wanted), mine, dtype=self._table.dtype)
        if sent.numel():
            embedding.lookup(self._table.detach(), wanted, sent)
        counts = [[len(part) * width for part in tokens] for width in self._widths]
        parts = self._alltoall(sent.flatten(), counts)
        rows = parts.new_empty(own, sum(self._widths))
        if rows.numel():
            embedding.join_columns(parts, self._widths, rows)
        return rows

    def add(
        self, tokens: Sequence[torch.Tensor], gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The average gradient of the rows that any rank has, in this rank's columns.

        tokens: the rows of each rank, ascending and distinct.
        gradient: those of this rank, [own rows, width].

        Returns (rows, ascending and distinct; their gradients). They are added in rank order and
        divided by the number of ranks; in float64 if they are float64, else in float32.
        """
        mine = self._widths[self.rank]
        if not any(map(len, tokens)):  # which all ranks know
            return torch.empty(0, dtype=torch.int64), gradient.new_empty(0, mine)
        parts = torch.empty(gradient.numel(), dtype=gradient.dtype)
        if gradient.numel():
            embedding.split_columns(gradient, self._widths, parts)
        got = self._alltoall(parts, [[len(part) * w for w in self._widths] for part in tokens])
        wanted = torch.cat(list(tokens))
        rows, sums = coalesce(wanted, got.view(len(wanted), mine), len(self._table))
        return rows, sums.div_(self._size)

    def whole(self, columns: torch.Tensor) -> torch.Tensor:
        """All columns of what each rank has [rows, its columns] of."""
        counts = [len(columns) * width for width in self._widths]
        parts = self._to_all(columns.detach().contiguous().flatten(), counts)
        blocks = zip(torch.split(parts, counts), self._widths, strict=True)
        return torch.cat([block.view(len(columns), width) for block, width in blocks], 1)

    def _to_all(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The flat tensors of all ranks, of so many elements, in rank order."""
        return self._alltoall(x.repeat(self._size), [[n] * self._size for n in counts])

    def _alltoall(self, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        sends = counts[self.rank]
        self.nbytes += (sum(sends) - sends[self.rank]) * x.element_size()
        return self._transport.alltoall(0, x, counts)
