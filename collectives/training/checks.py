"""Why a training cannot go on: gradients and parameters that are not as they must be, and
parameters that differ between ranks, of which a part is compared at a time.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.units import Unit
from linkweave.collectives.training.transport import Transport

BROKEN = "a backward pass ended with an error, so its gradients were not all sent"
LATE = "a gradient was changed after optimizer.step(), while it was being sent"
CHANGED = (
    "gradients were changed between backward() and step(), while they were being averaged: call "
    "clip_grad_norm_ of DataParallel in place of torch's, or its synchronize() before you change "
    "gradients; and step with the optimizer that DataParallel was given"
)
WRITTEN = (
    "{} was changed after optimizer.step(), before its update, which the schedule chains with the "
    "next forward pass: call finish() of DataParallel before you change parameters, or take a "
    "schedule that is not chained"
)
FOREIGN = (
    "{} was changed between backward() and step(), while its gradient was being averaged: a "
    "chained schedule needs one optimizer for all parameters, the one that DataParallel was given"
)
LOCAL = (
    "step() was called, but gradients of {} {}, so that they are this rank's alone: make a "
    "backward pass outside of no_sync() before each step"
)
COMPILED = (
    "the backward pass was one of compiled autograd, which calls no hooks: set "
    "torch._dynamo.config.compiled_autograd = False"
)
UNREACHED = (
    "step() was called after a forward pass, but a backward pass since then, if there was any, has "
    "reached no parameter on this rank, so that gradients were not averaged, and other ranks may "
    "wait for them: add 0 * output.sum() to a loss that may not depend on the model; where all "
    "ranks leave out backward(), leave out step() as well"
)
HOOKED = (
    "{} has a post-accumulate hook beside DataParallel's, which would see the gradient of this "
    "rank before it is averaged, or while it is: do its work after backward()"
)


def unreached() -> str:
    """Why the backward pass before a step has reached no parameter."""
    config = sys.modules.get("torch._dynamo.config")
    return COMPILED if config is not None and config.compiled_autograd else UNREACHED


def fault_of(
    gradient: torch.Tensor | None, name: str, unit: str = "", stale: bool = False,
    sent: bool = False,
) -> str:  # fmt: skip
    """What is wrong with the gradient of the parameter `name` of a unit; empty if nothing is.

    gradient: None if the parameter was frozen after the forward pass.
    stale: the forward pass has used the parameter before it was updated. sent: the unit's gradients
    are under way.
    """
    if gradient is not None and gradient.layout is not torch.strided:
        return f"the gradient of {name} is sparse; only dense ones are averaged"
    if gradient is not None and gradient.requires_grad:
        return (
            f"the gradient of {name} has a graph of its own, which averages lose: call "
            "torch.autograd.grad in place of backward(create_graph=True)"
        )
    if stale:
        return (
            f"{name} was used before it was updated, by another module than in the first forward "
            "pass: pass a schedule that is not chained"
        )
    if sent:
        return (
            f"{unit} got gradients twice in a backward pass: pass use_reentrant=False to checkpoint"
        )
    return ""


EVERY = 16
"""Steps from one check to the next."""
PARTS = 16
"""Checks that cover all parameters: a difference is found within EVERY * PARTS steps."""
BITS = 64


@dataclass(frozen=True)
class _Part:
    """Elements [first, stop) of a parameter, as they lie in memory."""

    name: str
    parameter: torch.Tensor
    first: int
    stop: int

    def checksum(self) -> torch.Tensor:
        """The sum of their words of up to 4 bytes, each times an odd number of its own, modulo
        2^64."""
        x = self.parameter.detach()
        flat = x.as_strided((x.numel(),), (1,), x.storage_offset())[self.first : self.stop]
        kind = {1: torch.uint8, 2: torch.int16}.get(x.element_size(), torch.int32)
        words = flat.view(kind).long()
        first = 2 * self.first + 1
        words *= torch.arange(first, first + 2 * len(words), 2, device=words.device)
        return words.sum()


class DivergenceCheck:
    """Compares a checksum of a part of the parameters over all ranks, every EVERY steps.

    Each bit of the checksum is sent twice, as it is and inverted. Where both sums are above 0, some
    ranks have a 1 and others a 0, however a sum is rounded. So one small all-reduce tells all ranks
    alike, and only then they compare each parameter to name it. A checksum is a weighted sum of a
    parameter's words, which a single bit always changes, and values that trade positions do.
    """

    def __init__(self, units: Sequence[Unit], transport: Transport) -> None:
        self._transport = transport
        named = [pair for unit in units for pair in zip(unit.names, unit.parameters, strict=True)]
        named = [pair for pair in named if pair[1].numel()]
        self._parts: list[list[_Part]] = [[] for _ in range(PARTS)]
        whole, at = sum(p.numel() for _, p in named), 0
        for name, parameter in named:  # large ones are divided
            done = 0
            while done < parameter.numel():
                part = min(PARTS - 1, at * PARTS // whole)
                stop = min(parameter.numel(), done + -(-(part + 1) * whole // PARTS) - at)
                self._parts[part].append(_Part(name, parameter, done, stop))
                at, done = at + stop - done, stop

    def step(self, number: int) -> None:
        """After a step's backward pass, while no parameter changes. Raises CollectiveError on every
        rank if a difference is found. All ranks must call it."""
        part = self._parts[number // EVERY % PARTS]
        if number % EVERY or not part:
            return
        total = torch.stack([one.checksum() for one in part]).sum()
        bits = (total >> torch.arange(BITS, device=total.device)) & 1
        sums = torch.cat([bits, 1 - bits]).float()
        self._transport.total(sums)
        if bool(((sums[:BITS] > 0) & (sums[BITS:] > 0)).any()):
            self._name(part, number)

    def _name(self, part: Sequence[_Part], number: int) -> None:
        mine = [int(one.checksum()) for one in part]
        rows = [json.loads(row) for row in self._transport.share(json.dumps(mine).encode())]
        for one, column in zip(part, zip(*rows, strict=True), strict=True):
            ((usual, _), *others) = Counter(column).most_common()
            if others:
                ranks = [str(rank) for rank, value in enumerate(column) if value != usual]
                raise CollectiveError(
                    f"ranks have parted: {one.name} of rank {', '.join(ranks)} differs from that "
                    f"of the other ranks since a step from {max(0, number - EVERY * PARTS)} to "
                    f"{number}. A parameter was changed on some ranks only, such as by a step with "
                    "gradients that were not averaged or with other options of the optimizer, or "
                    "by loading a state on one rank"
                )
