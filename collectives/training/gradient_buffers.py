"""All gradients of a model in flat buffers, in the order of the forward pass."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.units import Unit
from linkweave.collectives.training.hooks import nothing

Empty = Callable[[int, torch.dtype, torch.device], torch.Tensor]
"""Allocates a flat buffer of so many elements, in memory that a lane can send."""


@dataclass(frozen=True)
class Slot:
    """Where a unit lies: its buffer, and its first byte there."""

    buffer: int
    first: int
    nbytes: int


def slots_of(units: Sequence[Unit]) -> list[Slot]:
    """One buffer for each dtype on each device; units follow one another in their order."""
    keys: dict[Any, int] = {}
    ends: list[int] = []
    slots = []
    for unit in units:
        buffer = keys.setdefault((unit.dtype, unit.device), len(keys))
        ends.extend([0] * (len(keys) - len(ends)))
        slots.append(Slot(buffer, ends[buffer], unit.nbytes))
        ends[buffer] += unit.nbytes
    return slots


class Gradient:
    """The gradient of a parameter: `part` of a buffer, which is sent, and the tensor that is the
    parameter's `grad`, which is the user's. What has arrived is copied to that, as in DDP.
    """

    def __init__(self, parameter: Any, name: str, part: torch.Tensor) -> None:
        self.parameter, self.name, self.part = parameter, name, part
        self.found = False
        """Whether this rank has a gradient."""
        self._grad: Callable[[], torch.Tensor | None] = nothing
        self._version = 0

    def collect(self) -> None:
        """Copy `grad` to the buffer; zeros if it is None."""
        grad = self.parameter.grad
        self.found = grad is not None
        if grad is None:
            self.part.zero_()
            self._grad = nothing
        else:
            self.part.copy_(grad)
            self._grad = TensorWeakRef(grad)  # so that zero_grad frees it

    def seal(self) -> None:
        grad = self._grad()
        self._version = 0 if grad is None else grad._version

    def written(self) -> bool:
        """Whether torch has written to `grad` since `seal`."""
        grad = self._grad()
        return grad is not None and grad._version != self._version

    def replaced(self) -> bool:
        """Whether `grad` is no more what was collected."""
        return self.parameter.grad is not self._grad()

    def show(self, used: bool) -> None:
        """Let `grad` be what has arrived; None if no rank has used the parameter."""
        grad = self.give()
        if not used:
            grad = None
        elif grad is None:
            grad = self.part.clone()
        if self.parameter.grad is not grad:
            self.parameter.grad = grad

    def give(self) -> torch.Tensor | None:
        """Copy what has arrived to the tensor that was collected, if somebody has it."""
        grad, self._grad = self._grad(), nothing
        if grad is not None:
            grad.data.copy_(self.part)  # which nobody's version notices
        return grad


class GradientBuffers:
    """The gradients of `units` in flat buffers, and what is each parameter's `grad` (`Gradient`).

    A unit begins with a flag for each parameter, which is 1 if this rank has a gradient for it and
    0 if it has none. Flags travel with the gradients, so that ranks learn without a message of its
    own which parameters no rank has used. Unless `flagged`, they are 0, and `tell` says that.
    """

    def __init__(self, units: Sequence[Unit], empty: Empty, flagged: bool = True) -> None:
        if units[0].device.type == "cpu":
            keep_freed_memory()
        self.units, self._flagged = tuple(units), flagged
        self.slots = slots_of(units)
        ends: dict[int, int] = {}
        for slot in self.slots:
            ends[slot.buffer] = slot.first + slot.nbytes
        kinds = {s.buffer: (u.dtype, u.device) for u, s in zip(units, self.slots, strict=True)}
        self.buffers = [
            empty(nbytes // kinds[i][0].itemsize, *kinds[i]).zero_() for i, nbytes in ends.items()
        ]
        self._flags = []
        self._told: list[list[bool]] = []  # whether some rank has a gradient, if `tell` has said it
        for unit, slot in zip(units, self.slots, strict=True):
            first = slot.first // unit.dtype.itemsize
            self._flags.append(self.buffers[slot.buffer][first : first + len(unit.parameters)])
        self._gradients = [
            [Gradient(*one) for one in zip(unit.parameters, unit.names, parts, strict=True)]
            for unit, parts in zip(units, self.views_of(self.buffers), strict=True)
        ]

    def views_of(self, buffers: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """For each unit and parameter, its part of buffers with as many elements as these."""
        return [
            [
                _view(buffers[slot.buffer], slot.first // unit.dtype.itemsize + at, parameter, name)
                for at, parameter, name in zip(
                    unit.offsets(), unit.parameters, unit.names, strict=False
                )
            ]
            for unit, slot in zip(self.units, self.slots, strict=True)
        ]

    def address(self, unit: int) -> int:
        """Where the unit begins in memory."""
        slot = self.slots[unit]
        return self.buffers[slot.buffer].data_ptr() + slot.first

    def collect(self, unit: int) -> None:
        """Copy `grad` of the unit's parameters into the buffers.

        A parameter without a gradient gets zeros and loses its flag; its `grad` stays None.
        """
        flags = self._flags[unit]
        flags.fill_(1 if self._flagged else 0)
        for i, gradient in enumerate(self._gradients[unit]):
            gradient.collect()
            if not gradient.found:
                flags[i] = 0

    def fault(self) -> str:
        """What is wrong with the gradients that were collected; empty if nothing is."""
        seen: dict[int, Gradient] = {}
        for gradient in self._every():
            grad = gradient.parameter.grad
            if grad is None or not grad.numel():
                continue
            if (other := seen.setdefault(grad.data_ptr(), gradient)) is not gradient:
                return (
                    f"p.grad of {other.name} and of {gradient.name} are one tensor, in which their "
                    "gradients are added up before they are averaged: give each its own"
                )
        return ""

    def seal(self) -> None:
        """All gradients have been collected, and shall stay as they are until they are shown."""
        for gradient in self._every():
            gradient.seal()

    def written(self, unit: int) -> bool:
        """Whether torch has written to a gradient of the unit since `seal`."""
        return any(gradient.written() for gradient in self._gradients[unit])

    def changed(self) -> bool:
        """Whether a gradient was written to since `seal`, or is no more its parameter's `grad`."""
        return any(gradient.written() or gradient.replaced() for gradient in self._every())

    def _every(self) -> Iterator[Gradient]:
        return chain.from_iterable(self._gradients)

    def of(self, unit: int) -> Iterator[tuple[Any, torch.Tensor | None]]:
        """Each parameter with its gradient, once the unit's flags have arrived; None if no rank has
        one."""
        for gradient, used in self._used(unit):
            yield gradient.parameter, gradient.part if used else None

    def _used(self, unit: int) -> Iterator[tuple[Gradient, bool]]:
        """Each gradient of the unit, and whether some rank has one."""
        flags: Sequence[Any] = [gradient.found for gradient in self._gradients[unit]]
        if self._told:
            flags = self._told[unit]
        elif not all(flags):
            flags = self._flags[unit].tolist()  # read, and wait, only if need be
        for gradient, flag in zip(self._gradients[unit], flags, strict=True):
            yield gradient, bool(flag)

    def used(self) -> torch.Tensor:
        """1 for each parameter of which this rank has a gradient, else 0; on their device."""
        every = [gradient.found for gradient in self._every()]
        used = torch.ones(len(every), dtype=torch.float32, device=self.buffers[0].device)
        for i, found in enumerate(every):
            if not found:
                used[i].zero_()
        return used

    def tell(self, used: Sequence[float]) -> None:
        """What arrives is of parameters that some rank has used, and of those of which something
        arrives all the same."""
        rare = [one.part.any() for one, use in zip(self._every(), used, strict=True) if not use]
        arrive = iter(torch.stack(rare).tolist() if rare else ())
        every = iter([bool(use or next(arrive)) for use in used])
        self._told = [[next(every) for _ in unit] for unit in self._gradients]

    def show(self) -> None:
        """Once all have arrived, let `grad` be what arrives; None if no rank has used the
        parameter."""
        for unit in range(len(self.units)):
            for gradient, used in self._used(unit):
                gradient.show(used)

    @contextmanager
    def lent(self, unit: int) -> Iterator[None]:
        """Once the unit's flags have arrived, let each `grad` be its part of the buffer inside, and
        afterwards what it was, to which all that has arrived is copied."""
        gradients = [*self._used(unit)]
        kept = [gradient.parameter.grad for gradient, _ in gradients]
        for gradient, used in gradients:
            gradient.parameter.grad = gradient.part if used else None
        yield
        for (gradient, _), grad in zip(gradients, kept, strict=True):
            gradient.give()
            gradient.parameter.grad = grad

    def raw(self, buffer: int, first: int, stop: int) -> torch.Tensor:
        """Bytes [first, stop) of a buffer, as elements; writes there count as nobody's."""
        whole = self.buffers[buffer]
        size = whole.element_size()
        return whole.data[first // size : stop // size]


def _view(whole: torch.Tensor, first: int, parameter: Any, name: str) -> torch.Tensor:
    """A view with the parameter's strides; a copy of a gradient keeps its memory format."""
    dense = torch.empty_like(parameter, device="meta")  # keeps strides that leave no gaps
    if dense.untyped_storage().nbytes() != parameter.numel() * parameter.element_size():
        raise CollectiveError(f"parameter {name} has gaps in memory")
    return whole[first : first + parameter.numel()].as_strided(
        parameter.shape, dense.stride(), first
    )


TUNED = (
    "GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)  # fmt: skip
"""Variables by which users tune glibc's allocator themselves."""

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h
_MOST = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Let glibc keep memory that this process frees: all that lies below a block in use, and up to
    2 GiB at the top of its heap.

    By default it maps large blocks and unmaps them when they are freed, always those of more than
    32 MiB, and gives back what is free at the top of the heap (mallopt(3), M_MMAP_MAX and
    M_TRIM_THRESHOLD). A step frees its activations, and zero_grad its gradients; the next one would
    fault all their pages in again. Does nothing with other allocators, and if the environment sets
    one of TUNED.
    """
    if any(name in os.environ for name in TUNED):
        return
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _MOST)
