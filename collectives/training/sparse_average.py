"""The sparse average of a flat tensor over all ranks; what is not sent stays in a residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from linkweave.collectives.overlap import Network
from linkweave.collectives.overlap.sparse_network import sparse_seconds
from linkweave.collectives.training.transport import Transport, Vector
from linkweave.kernels import gtopk


@dataclass(frozen=True)
class Sent:
    """What all ranks together have sent: sums at the elements `where`, or if that is None, at all
    elements. `bad` are elements at which some rank had a sum that is not finite."""

    where: torch.Tensor | None
    sums: torch.Tensor
    bad: torch.Tensor


Marks = Callable[[torch.Tensor], torch.Tensor]
"""From the elements at which a rank's residual is not finite to those at which it sends NaN."""


class SparseAverage:
    """Averages flat tensors over the ranks of a transport.

    mode, conserve: as in `GTopK`. "auto" chooses by the times of `network`, a dense all-reduce's;
    all ranks must have the same. A residual is float32, with as many elements as the gradients.
    """

    def __init__(self, transport: Transport, mode: str, conserve: bool) -> None:
        self._transport, self._mode, self._conserve = transport, mode, conserve
        self.network = Network(0.0, 1e-9, workers=transport.size)  # until it is known: bytes count

    def choose(self, nbytes: int, entries: int, numel: int) -> str:
        """The mode for `numel` gradients of `nbytes`, of which each rank sends so many entries."""
        if entries == numel:
            return "dense"
        if self._mode != "auto":
            return self._mode
        seconds = sparse_seconds(self.network, nbytes, entries)
        return min(seconds, key=lambda name: seconds[name])

    def __call__(
        self, lane: int, x: torch.Tensor, residual: torch.Tensor, counts: Sequence[int],
        density: float, marks: Marks,
    ) -> Sent:  # fmt: skip
        """Replace the gradients in x by the averages of what is sent, and zeros.

        `x` is float32, float16 or bfloat16. The largest entries of each of its parts, of so many
        elements, are sent. Sums are in float32, along a tree of ranks or in their order; an average
        is a sum divided once, and rounded to the dtype of x. What is not finite is left out.
        """
        shares = [max(1, round(density * n)) for n in counts]
        mode = self.choose(x.nbytes, sum(shares), x.numel())
        if mode == "dense":
            return self._dense(lane, x, residual, marks)
        vector = _selected(x, residual, counts, shares)
        if not vector[0].isfinite().all():
            residual[vector[1]] = vector[0]
            _mark(residual, marks)
            vector = _selected(x, residual, counts, shares)
        sums, where = self._transport.sparse(
            lane, vector, x.numel(), sum(shares), residual, mode, self._conserve
        )
        fine = sums.isfinite()
        bad = where[~fine]
        if bad.numel():
            sums, where = sums[fine], where[fine]
            residual[~residual.isfinite()] = 0  # NaN that were more than the entries
        x[where] = _narrowed(sums / self._transport.size, x.dtype)
        return Sent(where, sums, bad)

    def _dense(self, lane: int, x: torch.Tensor, residual: torch.Tensor, marks: Marks) -> Sent:
        """Send all."""
        _selected(x, residual, [x.numel()], [0])
        marked = x.new_empty(0, dtype=torch.int64)
        if not residual.isfinite().all():
            marked = _mark(residual, marks)
            residual[marked] = 0
        x.copy_(_narrowed(residual, x.dtype, self._transport.size))  # whose sum is finite
        residual -= x  # what x rounds away
        x[marked] = float("nan")
        self._transport.average(lane, x)
        bad = marked[:0]
        if not x.sum().isfinite():
            bad = (~x.isfinite()).nonzero().flatten()
            x[bad] = 0
        return Sent(None, x, bad)


def _selected(
    x: torch.Tensor, residual: torch.Tensor, counts: Sequence[int], shares: Sequence[int]
) -> Vector:  # fmt: skip
    """Add x to the residual, and take the largest entries of each part out of that."""
    found, first = [], 0
    for count, k in zip(counts, shares, strict=True):
        part = slice(first, first + count)
        values, indices = gtopk.select(x[part], residual[part], k)
        found.append((values, indices + first))
        first += count
    if len(found) == 1:
        return found[0]
    return torch.cat([pair[0] for pair in found]), torch.cat([pair[1] for pair in found])


def _narrowed(x: torch.Tensor, dtype: torch.dtype, ranks: int = 1) -> torch.Tensor:
    """Finite float32 values in the dtype; what is too large to add up over the ranks saturates."""
    most = torch.finfo(dtype).max / ranks
    return x if x.dtype == dtype else x.clamp(-most, most).to(dtype)


def _mark(residual: torch.Tensor, marks: Marks) -> torch.Tensor:
    """Drop what is not finite, and put NaN, which is selected first, where `marks` says. Returns
    where that is."""
    where = (~residual.isfinite()).nonzero().flatten()
    residual[where] = 0
    marked = marks(where)
    residual[marked] = float("nan")
    return marked
