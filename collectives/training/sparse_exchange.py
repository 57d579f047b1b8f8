"""gTop-k in training: the residuals of a model, and the sparse all-reduces of a program's ops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap import Network
from linkweave.collectives.overlap.network import sparse_seconds
from linkweave.collectives.training.exchange import Arrived, Packing
from linkweave.collectives.training.gradient_buffers import GradientBuffers
from linkweave.collectives.training.gtopk import GTopK
from linkweave.collectives.training.program import Op
from linkweave.collectives.training.transport import Transport, Vector
from linkweave.kernels import gtopk

log = logging.getLogger("linkweave")


class SparseExchange:
    """The gradients of a rank that are not sent yet, and what ops send of them.

    An `Exchange` for programs whose ops have whole units. Residuals lie as gradients do in the
    buffers. An op takes the gradients of its units out of them and leaves the averages there.

    A gradient that is not finite is left out. The rank that has it sends NaN in place of the flag
    of its parameter, which no merge drops for a number: so all ranks learn that the step is to be
    skipped, and why. What they have sent then goes to the residual of rank 0.
    """

    whole = True
    dtype: torch.dtype | None = None

    def __init__(self, spec: GTopK, gradients: GradientBuffers, transport: Transport) -> None:
        for unit in gradients.units:
            if unit.device.type != "cpu" or unit.dtype == torch.float64:
                raise CollectiveError(
                    "GTopK takes float32, float16 and bfloat16 parameters on the CPU; those of "
                    f"{unit.name} are {unit.dtype} on {unit.device}"
                )
        self.spec, self._gradients, self._transport = spec, gradients, transport
        self.average_of = SparseAverage(transport, spec.mode, spec.conserve)
        self._residuals = [torch.zeros(x.numel()) for x in gradients.buffers]
        self.steps = 0
        """Steps made, without those that were skipped."""
        self.bad: tuple[str, ...] = ()
        """The parameters because of which the last step is to be skipped."""
        self._sent: dict[Op, Sent] = {}
        self._rehearsed: dict[tuple[int, int], torch.Tensor] = {}

    # ---- a step ------------------------------------------------------------------------------
    def begin(self) -> None:
        """Begin a step."""
        self._sent, self.bad = {}, ()

    def part(self, op: Op) -> Op:
        return op

    def carry_out(self, op: Op, packing: Packing, arrived: Arrived) -> None:
        """Carry out an op; blocks. A lane has one at a time."""
        x, residual = self._memory(op)
        counts = op.sizes(x.element_size()) if self.spec.per == "unit" else [x.numel()]
        density = self.spec.density_at(self.steps)
        marks = partial(self._flags, op)
        self._sent[op] = self.average_of(op.lane, x, residual, counts, density, marks)
        arrived(op.spans)

    def settle(self) -> None:
        """After all ops of a step: tell which parameters have gradients. If the step is to be
        skipped, give back what was sent."""
        used = self._gradients.used()
        self._transport.total(used)
        self._gradients.tell(used.tolist())
        bad = [name for op, sent in self._sent.items() for name in self._names(op, sent.bad)]
        self.bad = tuple(dict.fromkeys(bad))
        if not self.bad:
            self.steps += 1
            return
        log.warning("a step is skipped: gradients are not finite: %s", ", ".join(self.bad))
        for op, sent in self._sent.items():
            x, residual = self._memory(op)
            if self._transport.rank == 0 and sent.where is None:
                residual += x.float() * self._transport.size
            elif self._transport.rank == 0:
                residual[sent.where] += sent.sums
            x.zero_()
        for number, unit in enumerate(self._gradients.units):
            for name, (_, view) in zip(unit.names, self._gradients.of(number), strict=True):
                if name in self.bad and view is not None:
                    view.fill_(float("nan"))  # which clip_grad_norm_ looks at

    # ---- the state of a rank ---------------------------------------------------------------------
    def state_dict(self, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """What this rank must keep to go on to the bit; for parameters that are not trained now,
        what was kept `before`."""
        known = before["residual"] if before else {}
        mine = {name: view.clone() for name, view in self._named()}
        return {
            "rank": self._transport.rank, "size": self._transport.size, "steps": self.steps,
            "residual": {**known, **mine},
        }  # fmt: skip

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from a `state_dict`, or from nothing; what it lacks begins at zero."""
        state = state or {"residual": {}, "steps": 0}
        for name, view in self._named():
            known = state["residual"].get(name)
            view.copy_(known if known is not None and known.shape == view.shape else view * 0)
        self.steps = int(state["steps"])

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The residual of each parameter, by name."""
        every = self._gradients.views_of(self._residuals)
        for unit, views in zip(self._gradients.units, every, strict=True):
            yield from zip(unit.names, views, strict=True)

    def network_of(self, measure: Callable[[torch.Tensor, Any], Any]) -> Any:
        """The network of sparse exchanges; "auto" chooses its modes by that of dense ones."""
        largest = max(self._gradients.buffers, key=lambda buffer: buffer.nbytes)
        if self.spec.mode == "auto":
            self.average_of.network = measure(largest, self._transport.average)
        found = measure(largest, self._rehearse)
        self._rehearsed = {}
        return found

    def _rehearse(self, lane: int, x: torch.Tensor) -> None:
        """Do with other gradients what an op of as many elements does, to measure its time."""
        key = lane, x.numel()
        if key not in self._rehearsed:
            generator = torch.Generator().manual_seed(lane)
            self._rehearsed[key] = torch.randn(x.numel(), generator=generator)
        counts = [x.numel()]
        self.average_of(lane, x, self._rehearsed[key], counts, self.spec.density, lambda at: at)

    @property
    def skips(self) -> bool:
        return bool(self.bad)

    def _memory(self, op: Op) -> tuple[torch.Tensor, torch.Tensor]:
        """The op's gradients, and their residuals."""
        (first, stop), *others = op.runs
        assert not others
        x = self._gradients.raw(op.buffer, first, stop)
        at = first // x.element_size()
        return x, self._residuals[op.buffer][at : at + x.numel()]

    # ---- elements and parameters -----------------------------------------------------------------
    def _parameters(self, op: Op) -> list[tuple[str, int, int]]:
        """(name, element of the op at which its flag lies, element at which it begins)"""
        item = self._gradients.buffers[op.buffer].element_size()
        found = []
        for unit in op.needs:
            first = (self._gradients.slots[unit].first - op.runs[0][0]) // item
            of = self._gradients.units[unit]
            for i, (name, at) in enumerate(zip(of.names, of.offsets(), strict=False)):
                found.append((name, first + i, first + at))
        return found

    def _numbers(self, op: Op, where: torch.Tensor) -> list[int]:
        """The op's parameters, by number, whose elements or flags these are."""
        parameters = self._parameters(op)
        of_flag = {flag: i for i, (_, flag, _) in enumerate(parameters)}
        found = np.searchsorted([at for _, _, at in parameters], where.numpy(), "right") - 1
        every = zip(where.tolist(), found.tolist(), strict=True)
        return sorted({of_flag.get(element, number) for element, number in every})

    def _names(self, op: Op, where: torch.Tensor) -> list[str]:
        parameters = self._parameters(op)
        return [parameters[i][0] for i in self._numbers(op, where)]

    def _flags(self, op: Op, where: torch.Tensor) -> torch.Tensor:
        """The flags of the parameters at these elements, where this rank has no finite gradient."""
        names = ", ".join(self._names(op, where))
        log.warning("rank %d: the gradient is not finite: %s", self._transport.rank, names)
        parameters = self._parameters(op)
        return torch.tensor([parameters[i][1] for i in self._numbers(op, where)])


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
) -> Vector:
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
