"""gTop-k in training: the residuals of a model, and the sparse all-reduces of a program's ops."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.training.arena import Arena
from linkweave.collectives.training.exchange import Arrived
from linkweave.collectives.training.gtopk import GTopK
from linkweave.collectives.training.momentum import Momentum
from linkweave.collectives.training.packing import Packing
from linkweave.collectives.training.program import Op
from linkweave.collectives.training.sparse_average import Kept, Sent, SparseAverage
from linkweave.collectives.training.transport import Transport
from linkweave.collectives.training.update import Update
from linkweave.kernels import gtopk

log = logging.getLogger("linkweave")


class SparseExchange:
    """The gradients of a rank that are not sent yet, and what ops send of them.

    Residuals and velocities lie as gradients do in the arena. An op takes the gradients of its
    units out of the arena and leaves the averages there.

    `Exchange` for a program whose ops have whole units.

    A gradient that is not finite is left out. The rank that has it sends NaN in place of the flag
    of its parameter, which no merge drops for a number: so all ranks learn that the step is to be
    skipped, and why. What they have sent then goes to the residual of rank 0.
    """

    whole = True

    def __init__(
        self, spec: GTopK, arena: Arena, transport: Transport, momentum: Momentum | None
    ) -> None:
        for unit in arena.units:
            if unit.device.type != "cpu" or unit.dtype == torch.float64:
                raise CollectiveError(
                    "GTopK takes float32, float16 and bfloat16 parameters on the CPU; those of "
                    f"{unit.name} are {unit.dtype} on {unit.device}"
                )
        self.spec, self._arena, self._transport = spec, arena, transport
        self._momentum = momentum
        self.average_of = SparseAverage(transport, spec.mode)
        self._kept = [
            Kept(torch.zeros(x.numel()), torch.zeros(x.numel()) if momentum else None)
            for x in arena.buffers
        ]
        self._velocities: list[tuple[Any, torch.Tensor]] = []  # of each parameter
        if momentum:
            for unit, views in zip(arena.units, self._views("velocity"), strict=True):
                self._velocities += zip(unit.parameters, views, strict=True)
        self.steps = 0
        """Steps made, without those that were skipped."""
        self.bad: tuple[str, ...] = ()
        """The parameters because of which the last step is to be skipped."""
        self._sent: dict[Op, Sent] = {}
        self._rehearsed: dict[tuple[int, int], Kept] = {}
        self._layouts: dict[Op, tuple[list[int], gtopk.Layout]] = {}

    # ---- a step ------------------------------------------------------------------------------
    def begin(self) -> None:
        """Begin a step."""
        self._sent, self.bad = {}, ()
        if self._momentum:
            self._momentum.read()
            for kept in self._kept:
                kept.factors = self._momentum.factors
            for parameter, velocity in self._velocities:
                self._momentum.take_over(parameter, velocity)

    def collected(self, unit: int) -> None:
        """Add weight decay to a unit's gradients, which are in the arena."""
        if self._momentum:
            for parameter, view in self._arena.gradients(unit):
                if view is not None:  # zeros where this rank has no gradient, but others may
                    self._momentum.decay(parameter, view)

    def part(self, op: Op) -> Op:
        return op

    def carry_out(self, op: Op, packing: Packing, arrived: Arrived) -> None:
        """Carry out an op; blocks. A lane has one at a time."""
        x, kept = self._memory(op)
        counts = op.sizes(x.element_size()) if self.spec.per == "unit" else [x.numel()]
        density = self.spec.density_at(self.steps)
        marks = partial(self._flags, op)
        self._sent[op] = self.average_of(op.lane, x, kept, counts, density, marks)
        arrived(op.spans)

    def settle(self) -> None:
        """After all ops of a step: if it is to be skipped, give back what was sent."""
        bad = [name for op, sent in self._sent.items() for name in self._names(op, sent.bad)]
        self.bad = tuple(dict.fromkeys(bad))
        if not self.bad:
            self.steps += 1
            return
        log.warning("a step is skipped: gradients are not finite: %s", ", ".join(self.bad))
        for op, sent in self._sent.items():
            x, kept = self._memory(op)
            if self._transport.rank == 0 and sent.where is None:
                kept.residual += x.float() * self._transport.size
            elif self._transport.rank == 0:
                kept.residual[sent.where] += sent.sums
            x.zero_()
        for number, unit in enumerate(self._arena.units):
            for name, (_, view) in zip(unit.names, self._arena.gradients(number), strict=True):
                if name in self.bad and view is not None:
                    view.fill_(float("nan"))  # which GradScaler and clip_grad_norm_ look at

    def apply(self, update: Update) -> bool:
        """Apply what has arrived to the parameters, entry by entry, for the options of the last
        `snapshot`. Returns False, and does nothing, where that is not the whole step."""
        if self._momentum is None or not self._sent:
            return False
        entries = []
        for op, sent in self._sent.items():
            parameters = [p for unit in op.needs for p in self._arena.units[unit].parameters]
            rates = [_rate(update.options_of(parameter)) for parameter in parameters]
            if sent.where is None or None in rates or parameters[0].dtype != torch.float32:
                return False
            entries.append((op, sent.where, parameters, rates))
        for op, where, parameters, rates in entries:
            gtopk.apply(self._layout_of(op, parameters), self._memory(op)[0][where], where, rates)
            increment_version(parameters)
        return True

    def _layout_of(self, op: Op, parameters: list[Any]) -> gtopk.Layout:
        """Where the op's parameters are, kept as long as they stay there."""
        at = [parameter.data_ptr() for parameter in parameters]
        if (known := self._layouts.get(op)) is None or known[0] != at:
            firsts = [first for _, _, first in self._parameters(op)]
            known = at, gtopk.Layout([parameter.detach() for parameter in parameters], firsts)
            self._layouts[op] = known
        return known[1]

    # ---- the state of a rank ---------------------------------------------------------------------
    def state_dict(self, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """What this rank must keep to go on to the bit; for parameters that are not trained now,
        what was kept `before`."""
        known = before or {"residual": {}, "velocity": {}}
        return {
            "rank": self._transport.rank, "size": self._transport.size, "steps": self.steps,
            "residual": {**known["residual"], **self._named("residual")},
            "velocity": {**known["velocity"], **self._named("velocity")},
        }  # fmt: skip

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from a `state_dict`, or from nothing; what it lacks begins at zero."""
        state = state or {"residual": {}, "velocity": {}, "steps": 0}
        for part in ("residual", "velocity"):
            for name, x in self._named(part, copied=False).items():
                x.copy_(state[part].get(name, torch.zeros_like(x)))
        self.steps = int(state["steps"])

    def _views(self, part: str) -> list[list[torch.Tensor]]:
        """The residual or the velocity of each unit's parameters."""
        return self._arena.views_of([getattr(kept, part) for kept in self._kept])

    def _named(self, part: str, copied: bool = True) -> dict[str, torch.Tensor]:
        """The same by name; nothing if there is no velocity."""
        if part == "velocity" and not self._momentum:
            return {}
        return {
            name: view.clone() if copied else view
            for unit, views in zip(self._arena.units, self._views(part), strict=True)
            for name, view in zip(unit.names, views, strict=True)
        }

    def give_back(self) -> None:
        """Let the optimizer have the momentum: the average of all ranks' velocities. All ranks must
        call it, while nothing is sent."""
        if self._momentum:
            for kept in self._kept:
                assert kept.velocity is not None
                self._transport.average(0, kept.velocity)
            for parameter, velocity in self._velocities:
                self._momentum.give_back(parameter, velocity)

    def adopted(self) -> None:
        self._layouts = {}

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
            noise = torch.randn(x.numel(), generator=torch.Generator().manual_seed(lane))
            self._rehearsed[key] = Kept(noise, torch.zeros_like(noise) if self._momentum else None)
        counts = [x.numel()]
        self.average_of(lane, x, self._rehearsed[key], counts, self.spec.density, lambda at: at)

    @property
    def skips(self) -> bool:
        return bool(self.bad)

    def _memory(self, op: Op) -> tuple[torch.Tensor, Kept]:
        """The op's gradients, and what is kept of them."""
        (first, stop), *others = op.runs
        assert not others
        x = self._arena.raw(op.buffer, first, stop)
        at = first // x.element_size()
        return x, self._kept[op.buffer].part(at, at + x.numel())

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


def _rate(options: dict[str, Any] | None) -> float | None:
    """What SGD multiplies a gradient by; None if that is not all of its step."""
    if options is None:
        return 0.0
    plain = isinstance(options["lr"], float) and not options["momentum"]
    if not plain or options["weight_decay"]:
        return None
    rate: float = options["lr"]
    return rate if options["maximize"] else -rate
