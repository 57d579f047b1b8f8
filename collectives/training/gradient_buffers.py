"""All gradients of a model in flat buffers, in the order of the forward pass."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack
from torch.utils.weak import TensorWeakRef

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


HELD = (
    "the gradient of parameter {} of an earlier backward pass is still held by a tensor or an "
    "array that shares its memory, such as p.grad.view(-1), p.grad.detach() or p.grad.numpy(), and "
    "this pass would overwrite it: keep a clone() in its place"
)


class Gradient:
    """The gradient of a parameter in a buffer, and the tensor that is the parameter's `grad`.

    A tensor that is `grad` when a backward pass begins stays that, and what arrives is copied to
    it. In place of one that the pass makes, `grad` is a view of the buffer. If somebody still has
    that view when a later pass is to overwrite the buffer, it gets memory of its own, so that it
    keeps its values.
    """

    def __init__(self, parameter: Any, name: str, part: torch.Tensor) -> None:
        self.parameter, self.name = parameter, name
        self.view = apart(part)
        self._storage = self.view.untyped_storage()
        self._alone = holders(self._storage)
        self._lent: Callable[[], torch.Tensor | None] = _nothing
        self.found = False
        """Whether this rank has a gradient."""
        self.users = False
        """Whether `grad` is a tensor of the user's own."""
        self._at = 0  # where `grad` lies, once it has been collected
        self._versions = 0, 0

    def collect(self, had: bool) -> str:
        """Bring `grad` into the buffer, zeros if it is None. had: whether there was one when the
        backward pass began. Returns why it cannot; empty if it can."""
        grad = self.parameter.grad
        self.found, self.users = grad is not None, False
        if grad is not None and grad.data_ptr() == self.view.data_ptr():
            self._at = grad.data_ptr()
            return ""
        if not self._freed():
            return HELD.format(self.name)
        if grad is None:
            self.view.zero_()
            return ""
        self.view.copy_(grad)
        self.users = had
        if not had:
            self.parameter.grad = self._lend()
        self._at = self.parameter.grad.data_ptr()
        return ""

    def _lend(self) -> torch.Tensor:
        """The view that users have, which there is as long as somebody has it."""
        if (known := self._lent()) is not None:
            return known
        view = self.view.detach()  # which shares the version, so that writes are noticed
        self._lent = TensorWeakRef(view)
        return view

    def _freed(self) -> bool:
        """Before the buffer is overwritten: whether nobody else has its memory any more."""
        if holders(self._storage) == self._alone:
            return True
        kept = self._lent()
        # more than Python may have it by its address
        if kept is not None and kept._use_count() == 1:  # type: ignore[attr-defined]
            kept.data = kept.clone()
            self._lent = _nothing
            self.view = self.view.data  # with a version of its own
        return holders(self._storage) == self._alone

    def show(self, used: bool) -> None:
        """Let `grad` be what has arrived; None if no rank has used the parameter."""
        if not used:
            self.parameter.grad = None
        elif self.users and self._is_grad():
            self.parameter.grad.data.copy_(self.view)  # which nobody's version notices
        else:
            self.parameter.grad = self._lend()

    def _is_grad(self) -> bool:
        grad = self.parameter.grad
        return grad is not None and grad.data_ptr() == self._at

    def seal(self) -> None:
        self._versions = self._read()

    def _read(self) -> tuple[int, int]:
        own = self.users and self._is_grad()
        return self.view._version, self.parameter.grad._version if own else self._versions[1]

    def written(self) -> bool:
        """Whether torch has written to the gradient since `seal`."""
        return self._read() != self._versions

    def replaced(self) -> bool:
        """Whether `grad` is no more what `collect` left there."""
        return not self._is_grad() if self.found else self.parameter.grad is not None


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

    def collect(self, unit: int, had: Container[int] = ()) -> str:
        """Bring what lies in `grad` of the unit's parameters into the buffers. Returns why they
        cannot be overwritten; empty if they can.

        A parameter without a gradient gets zeros and loses its flag; its `grad` stays None. `had`
        has the identities of the parameters that had a gradient when the backward pass began.
        """
        flags = self._flags[unit]
        flags.fill_(1 if self._flagged else 0)
        for i, gradient in enumerate(self._gradients[unit]):
            if fault := gradient.collect(id(gradient.parameter) in had):
                return fault
            if not gradient.found:
                flags[i] = 0
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

    def users(self, unit: int) -> bool:
        """Whether what arrives is copied to tensors of the user's own."""
        return any(gradient.users for gradient in self._gradients[unit])

    def _every(self) -> Iterator[Gradient]:
        return chain.from_iterable(self._gradients)

    def of(self, unit: int) -> Iterator[tuple[Any, torch.Tensor | None]]:
        """Each parameter with its gradient, once the unit's flags have arrived; None if no rank has
        one."""
        for gradient, used in self._used(unit):
            yield gradient.parameter, gradient.view if used else None

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
        rare = [one.view.any() for one, use in zip(self._every(), used, strict=True) if not use]
        arrive = iter(torch.stack(rare).tolist() if rare else ())
        every = iter([bool(use or next(arrive)) for use in used])
        self._told = [[next(every) for _ in unit] for unit in self._gradients]

    def show(self, unit: int | None = None) -> None:
        """Once the flags of a unit, or of all, have arrived, let `grad` be what arrives; None if no
        rank has used the parameter. For tensors of the user's own all must have arrived."""
        for index in range(len(self.units)) if unit is None else [unit]:
            for gradient, used in self._used(index):
                gradient.show(used)

    def raw(self, buffer: int, first: int, stop: int) -> torch.Tensor:
        """Bytes [first, stop) of a buffer, as elements; writes there count as nobody's."""
        whole = self.buffers[buffer]
        size = whole.element_size()
        return whole.data[first // size : stop // size]


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same memory in a storage of its own, which tells how many tensors share it."""
    storage = from_dlpack(x).untyped_storage()
    return x.new_empty(0).set_(storage, 0, x.shape, x.stride())  # those of DLPack may differ


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and other owners share it; known to torch alone."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def _nothing() -> None:
    return None


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
