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


@dataclass
class Kept:
    """What a rank keeps of a flat tensor's gradients: float32, as many elements.

    `velocity`, if any, has the momentum of its gradients; `factors` are (momentum, whether it is
    Nesterov's).
    """

    residual: torch.Tensor
    velocity: torch.Tensor | None = None
    factors: tuple[float, bool] = (0.0, False)

    def part(self, first: int, stop: int) -> Kept:
        velocity = None if self.velocity is None else self.velocity[first:stop]
        return Kept(self.residual[first:stop], velocity, self.factors)

    def copy_(self, other: Kept) -> None:
        """Take over what another one of as many elements keeps."""
        self.residual.copy_(other.residual)
        if self.velocity is not None and other.velocity is not None:
            self.velocity.copy_(other.velocity)


Marks = Callable[[torch.Tensor], torch.Tensor]
"""From the elements at which a rank's residual is not finite to those at which it sends NaN."""


class SparseAverage:
    """Averages flat tensors over the ranks of a transport.

    mode: as in `GTopK`. "auto" chooses by the times of `network`, a dense all-reduce's; all ranks
    must have the same.
    """

    def __init__(self, transport: Transport, mode: str) -> None:
        self._transport, self._mode = transport, mode
        self.network = Network(0.0, 1e-9, workers=transport.size)  # until it is known: bytes count

    def choose(self, nbytes: int, entries: int) -> str:
        """The mode for gradients of `nbytes`, of which each rank sends so many entries."""
        if self._mode != "auto":
            return self._mode
        seconds = sparse_seconds(self.network, nbytes, entries)
        return min(seconds, key=lambda name: seconds[name])

    def __call__(
        self, lane: int, x: torch.Tensor, kept: Kept, counts: Sequence[int], density: float,
        marks: Marks,
    ) -> Sent:  # fmt: skip
        """Replace the gradients in x by the averages of what is sent, and zeros.

        `x` is float32, float16 or bfloat16. The largest entries of each of its parts, of so many
        elements, are sent. Sums are in float32, along a tree of ranks or in their order; an average
        is a sum divided once, and rounded to the dtype of x. What is not finite is left out.
        """
        shares = [max(1, round(density * n)) for n in counts]
        mode = self.choose(x.nbytes, sum(shares))
        if mode == "dense":
            return self._dense(lane, x, kept, marks)
        vector = _selected(x, kept, counts, shares)
        if not vector[0].isfinite().all():
            kept.residual[vector[1]] = vector[0]
            _mark(kept, marks)
            vector = _selected(x, Kept(kept.residual), counts, shares)
        sums, where = self._transport.sparse(
            lane, vector, x.numel(), sum(shares), kept.residual, mode
        )
        fine = sums.isfinite()
        bad = where[~fine]
        if bad.numel():
            sums, where = sums[fine], where[fine]
            kept.residual[~kept.residual.isfinite()] = 0  # NaN that were more than the entries
        if kept.velocity is not None:  # what a merge has put back keeps its momentum
            gtopk.clear(kept.velocity, vector[1][torch.isin(vector[1], where)])
        x[where] = _narrowed(sums / self._transport.size, x.dtype)
        return Sent(where, sums, bad)

    def _dense(self, lane: int, x: torch.Tensor, kept: Kept, marks: Marks) -> Sent:
        """Send all; velocities go on, as without compression."""
        _selected(x, kept, [x.numel()], [0])
        marked = x.new_empty(0, dtype=torch.int64)
        if not kept.residual.isfinite().all():
            marked = _mark(kept, marks)
            kept.residual[marked] = 0
        x.copy_(_narrowed(kept.residual, x.dtype, self._transport.size))  # whose sum is finite
        kept.residual -= x  # what x rounds away
        x[marked] = float("nan")
        self._transport.average(lane, x)
        bad = marked[:0]
        if not x.sum().isfinite():
            bad = (~x.isfinite()).nonzero().flatten()
            x[bad] = 0
        return Sent(None, x, bad)


def _selected(x: torch.Tensor, kept: Kept, counts: Sequence[int], shares: Sequence[int]) -> Vector:
    """Add x to what is kept, and take the largest entries of each part out of that."""
    found, first = [], 0
    for count, k in zip(counts, shares, strict=True):
        part = kept.part(first, first + count)
        momentum, nesterov = part.factors
        values, indices = gtopk.select(
            x[first : first + count], part.residual, part.velocity, k, momentum=momentum,
            nesterov=nesterov,
        )  # fmt: skip
        found.append((values, indices + first))
        first += count
    if len(found) == 1:
        return found[0]
    return torch.cat([pair[0] for pair in found]), torch.cat([pair[1] for pair in found])


def _narrowed(x: torch.Tensor, dtype: torch.dtype, ranks: int = 1) -> torch.Tensor:
    """Finite float32 values in the dtype; what is too large to add up over the ranks saturates."""
    most = torch.finfo(dtype).max / ranks
    return x if x.dtype == dtype else x.clamp(-most, most).to(dtype)


def _mark(kept: Kept, marks: Marks) -> torch.Tensor:
    """Drop what is not finite, and put NaN, which is selected first, where `marks` says. Returns
    where that is."""
    where = (~kept.residual.isfinite()).nonzero().flatten()
    kept.residual[where] = 0
    if kept.velocity is not None:
        kept.velocity[where] = 0
    marked = marks(where)
    kept.residual[marked] = float("nan")
    return marked
