"""All gradients of a model in flat buffers, in the order of the forward pass."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.units import Unit

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


class GradientBuffers:
    """The gradients of `units`, each parameter's `grad` a view of a shared buffer.

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
        self._found: list[list[bool]] = []  # whether this rank has a gradient for each parameter
        self._told: list[list[bool]] = []  # whether some rank has, if `tell` has said it
        for unit, slot in zip(units, self.slots, strict=True):
            first = slot.first // unit.dtype.itemsize
            self._found.append([False] * len(unit.parameters))
            self._flags.append(self.buffers[slot.buffer][first : first + len(unit.parameters)])
        self._views = self.views_of(self.buffers)

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
        """Bring what lies in `grad` of the unit's parameters into the buffers.

        A parameter without a gradient gets zeros and loses its flag; its `grad` stays None.
        """
        flags, found = self._flags[unit], self._found[unit]
        flags.fill_(1 if self._flagged else 0)
        for i, parameter in enumerate(self.units[unit].parameters):
            found[i] = parameter.grad is not None
            if found[i]:
                self._bring(parameter, self._views[unit][i])
            else:
                self._views[unit][i].zero_()
                flags[i] = 0

    def _bring(self, parameter: Any, view: torch.Tensor) -> None:
        """Copy a parameter's gradient to its view, unless it lies there, and let it be `grad`."""
        if parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view

    def holds_all(self) -> bool:
        """Whether `grad` of every parameter is still what `collect` made it."""
        for unit, views, found in zip(self.units, self._views, self._found, strict=True):
            for parameter, view, had in zip(unit.parameters, views, found, strict=True):
                grad = parameter.grad
                if (grad is not None) != had:
                    return False
                if grad is not None and grad.data_ptr() != view.data_ptr():
                    return False
        return True

    def of(self, unit: int) -> Iterator[tuple[Any, torch.Tensor | None]]:
        """Each parameter with its gradient, once the unit's flags have arrived; None if no rank has
        one."""
        flags: Sequence[Any] = self._found[unit]
        if self._told:
            flags = self._told[unit]
        elif not all(flags):
            flags = self._flags[unit].tolist()  # read, and wait, only if need be
        for parameter, view, flag in zip(
            self.units[unit].parameters, self._views[unit], flags, strict=True
        ):
            yield parameter, view if flag else None

    def used(self) -> torch.Tensor:
        """1 for each parameter of which this rank has a gradient, else 0; on their device."""
        every = [found for unit in self._found for found in unit]
        used = torch.ones(len(every), dtype=torch.float32, device=self.buffers[0].device)
        for i, found in enumerate(every):
            if not found:
                used[i].zero_()
        return used

    def tell(self, used: Sequence[float]) -> None:
        """What arrives is of parameters that some rank has used, and of those of which something
        arrives all the same."""
        views = [view for unit in self._views for view in unit]
        rare = [view.any() for view, use in zip(views, used, strict=True) if not use]
        arrive = iter(torch.stack(rare).tolist() if rare else ())
        every = iter([bool(use or next(arrive)) for use in used])
        self._told = [[next(every) for _ in unit] for unit in self._found]

    def show(self, unit: int) -> None:
        """Once a unit's flags have arrived, let `grad` be what arrives; None if no rank has used
        the parameter."""
        for parameter, gradient in self.of(unit):
            parameter.grad = gradient

    @property
    def version(self) -> int:
        """Rises with each operation of torch that writes to a gradient in the buffers."""
        return sum(buffer._version for buffer in self.buffers)

    def raw(self, buffer: int, first: int, stop: int) -> torch.Tensor:
        """Bytes [first, stop) of a buffer, as elements; writing there does not raise `version`."""
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
    M_TRIM_THRESHOLD). A step frees its activations, and gradients once they are in the buffers; the
    next one would fault all their pages in again. Does nothing with other allocators, and if the
    environment sets one of TUNED.
    """
    if any(name in os.environ for name in TUNED):
        return
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _MOST)
