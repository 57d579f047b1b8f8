"""gTop-k in training: the residuals of a model, and the sparse all-reduces of a program's ops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.training.arena import Arena
from linkweave.collectives.training.exchange import Arrived
from linkweave.collectives.training.gtopk import GTopK
from linkweave.collectives.training.packing import Packing
from linkweave.collectives.training.program import Op
from linkweave.collectives.training.sparse_average import Sent, SparseAverage
from linkweave.collectives.training.transport import Transport

log = logging.getLogger("linkweave")


class SparseExchange:
    """The gradients of a rank that are not sent yet, and what ops send of them.

    An `Exchange` for programs whose ops have whole units. Residuals lie as gradients do in the
    arena. An op takes the gradients of its units out of the arena and leaves the averages there.

    A gradient that is not finite is left out. The rank that has it sends NaN in place of the flag
    of its parameter, which no merge drops for a number: so all ranks learn that the step is to be
    skipped, and why. What they have sent then goes to the residual of rank 0.
    """

    whole = True
    dtype: torch.dtype | None = None

    def __init__(self, spec: GTopK, arena: Arena, transport: Transport) -> None:
        for unit in arena.units:
            if unit.device.type != "cpu" or unit.dtype == torch.float64:
                raise CollectiveError(
                    "GTopK takes float32, float16 and bfloat16 parameters on the CPU; those of "
                    f"{unit.name} are {unit.dtype} on {unit.device}"
                )
        self.spec, self._arena, self._transport = spec, arena, transport
        self.average_of = SparseAverage(transport, spec.mode, spec.conserve)
        self._residuals = [torch.zeros(x.numel()) for x in arena.buffers]
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
        used = self._arena.used()
        self._transport.total(used)
        self._arena.tell(used.tolist())
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
        for number, unit in enumerate(self._arena.units):
            for name, (_, view) in zip(unit.names, self._arena.gradients(number), strict=True):
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
        every = self._arena.views_of(self._residuals)
        for unit, views in zip(self._arena.units, every, strict=True):
            yield from zip(unit.names, views, strict=True)

    def network_of(self, measure: Callable[[torch.Tensor, Any], Any]) -> Any:
        """The network of sparse exchanges; "auto" chooses its modes by that of dense ones."""
        largest = max(self._arena.buffers, key=lambda buffer: buffer.nbytes)
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
        x = self._arena.raw(op.buffer, first, stop)
        at = first // x.element_size()
        return x, self._residuals[op.buffer][at : at + x.numel()]

    # ---- elements and parameters -----------------------------------------------------------------
    def _parameters(self, op: Op) -> list[tuple[str, int, int]]:
        """(name, element of the op at which its flag lies, element at which it begins)"""
        item = self._arena.buffers[op.buffer].element_size()
        found = []
        for unit in op.needs:
            first = (self._arena.slots[unit].first - op.runs[0][0]) // item
            of = self._arena.units[unit]
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
