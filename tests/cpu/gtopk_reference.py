"""gTop-k S-SGD on all ranks in one process, written as plainly as it is defined."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from training_models import Batch, images, share, units

from linkweave import GTopK
from linkweave.collectives.planning.sparse_tree import binomial_tree, rounds
from linkweave.collectives.training.gradient_buffers import slots_of
from linkweave.collectives.training.program import program_of

Entries = dict[int, np.float32]
FLOAT = 4  # bytes


def batch(step: int, rank: int, size: int, each: int = 4) -> Batch:
    """A rank's, in float32."""
    x, y = share(images(step, each * size), rank, size)
    return x.float(), y


def largest(entries: Entries, k: int) -> list[int]:
    """Their elements, in ascending order; of equal ones, the lowest."""
    return sorted(sorted(entries, key=lambda at: (-abs(entries[at]), at))[:k])


class Reference:
    """Ranks with the same parameters, which are those of `model`; options are those of SGD."""

    def __init__(
        self, model: nn.Module, schedule: Any, spec: GTopK, size: int, lr: float,
        momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.spec, self.size, self.steps = model, spec, size, 0
        self.optimizer = torch.optim.SGD(
            model.parameters(), lr, momentum, weight_decay=weight_decay, nesterov=nesterov,
            maximize=maximize,
        )  # fmt: skip
        every = units(model, batch(0, 0, size)[0])
        slots = slots_of(every)
        self.ops = program_of(schedule, slots, [unit.name for unit in every]).ops
        self.n = (slots[-1].first + slots[-1].nbytes) // FLOAT
        self.positions = [
            (parameter, slot.first // FLOAT + at)
            for unit, slot in zip(every, slots, strict=True)
            for parameter, at in zip(unit.parameters, unit.offsets(), strict=False)
        ]
        self.residual = np.zeros((size, self.n), np.float32)

    def gradient(self, rank: int) -> np.ndarray:
        x, y = batch(self.steps, rank, self.size)
        self.model.zero_grad()
        cross_entropy(self.model(x), y).backward()
        flat = np.zeros(self.n, np.float32)
        for parameter, first in self.positions:
            flat[first : first + parameter.numel()] = parameter.grad.numpy().ravel()
        return flat

    def step(self) -> None:
        gradients = [self.gradient(rank) for rank in range(self.size)]
        density = self.spec.density_at(self.steps)
        average = np.zeros(self.n, np.float32)
        for op in self.ops:
            (first, stop), *_ = op.runs
            part = slice(first // FLOAT, stop // FLOAT)
            counts = op.sizes(FLOAT) if self.spec.per == "unit" else [part.stop - part.start]
            shares = [max(1, round(density * count)) for count in counts]
            mine = []
            for rank, g in enumerate(gradients):
                r = self.residual[rank][part]
                r += g[part]
                mine.append(self.selected(r, counts, shares))
            total = self.total([dict(one) for one in mine], part, sum(shares))
            for at, value in total.items():
                average[part][at] = value / np.float32(self.size)
        for parameter, first in self.positions:
            values = average[first : first + parameter.numel()].reshape(parameter.shape)
            parameter.grad = torch.from_numpy(values.copy())
        self.optimizer.step()
        self.steps += 1

    def selected(self, residual: np.ndarray, counts: list[int], shares: list[int]) -> Entries:
        """The largest entries of each part, which are taken out of the residual."""
        found, first = {}, 0
        for count, k in zip(counts, shares, strict=True):
            order = np.argsort(-np.abs(residual[first : first + count]), kind="stable")
            found |= {at: residual[at] for at in np.sort(order[:k]) + first}
            first += count
        residual[list(found)] = 0
        return found

    def total(self, given: list[Entries], part: slice, k: int) -> Entries:
        """What all ranks get. What does not arrive goes back to those who sent it; what is cut of
        an index that does arrive is lost, or with `conserve` stays with the rank that merges."""
        if self.spec.mode == "topk":
            total: Entries = {}
            for one in given:
                total = {at: total.get(at, np.float32(0)) + one.get(at, np.float32(0))
                         for at in {*total, *one}}  # fmt: skip
            return total
        own, cut = [dict(one) for one in given], []
        for pairs in rounds(binomial_tree(self.size)):
            for child, parent in pairs:
                a, b = given[parent], given[child]
                both = {at: a.get(at, np.float32(0)) + b.get(at, np.float32(0)) for at in {*a, *b}}
                kept = largest(both, k)
                cut += [(parent, at, both[at]) for at in both.keys() - {*kept}]
                given[parent] = {at: both[at] for at in kept}
        back = [(rank, at, x) for rank, one in enumerate(own) for at, x in one.items()]
        for rank, at, x in back:
            if at not in given[0]:
                self.residual[rank][part][at] += x
        for rank, at, x in cut:
            if self.spec.conserve and at in given[0]:
                self.residual[rank][part][at] += x
        return given[0]
