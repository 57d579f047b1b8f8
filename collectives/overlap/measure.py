"""Profiles of PyTorch models, measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.clock import Clock, clock_of
from linkweave.collectives.overlap.profile import Layer, Profile
from linkweave.collectives.overlap.units import Recorder, Unit, units_of
from linkweave.topology.checks import integer, shown

if TYPE_CHECKING:
    from torch import nn


WARM_UP = 2


def measure(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: tuple[Any, Any], *,
    steps: int = 10, name: str | None = None,
) -> Profile:  # fmt: skip
    """The layers of a model, with the seconds of their forward and backward passes on this device.

    loss_fn, batch: the loss is `loss_fn(model(inputs), targets)` for `batch = (inputs, targets)`.
    steps: passes after `WARM_UP` others; times are medians over them, by CUDA events on a GPU.
    name: of the profile; by default that of the model's class.

    The layers are the units of `DataParallel`, which a schedule for this profile can therefore be
    passed to. A rank of `spawn` has one thread of torch: set as many here. Nothing is averaged
    between ranks, and no parameter changes; gradients are cleared, and buffers are what they were
    before. The backward pass counts from the end of the forward pass, so that its first layer
    contains the loss. Save the profile with `Path(...).write_text(profile.to_json())` for
    `linkweave schedule --profile`.
    Raises CollectiveError if no parameter requires a gradient, or if `batch` is no pair.
    """
    import torch

    integer(steps, "steps", 1)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise CollectiveError(f"batch must be a pair of inputs and targets, not {shown(batch)}")
    inputs, targets = batch
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    with Recorder(model) as recorder:
        model(inputs)
    units = units_of(model, recorder.gates())
    if not units:
        raise CollectiveError("the model has no parameter that requires a gradient")
    found = _Marks(model, units, clock_of(units[0].device))
    passes = []
    try:
        for number in range(WARM_UP + steps):
            one = found.run(lambda: loss_fn(found.forward(inputs), targets))
            if number >= WARM_UP:
                passes.append(one)
    finally:
        found.close()
        with torch.no_grad():
            for key, value in model.named_buffers():
                value.copy_(buffers[key])
    names, sizes = [unit.name for unit in units], [unit.nbytes for unit in units]
    return profile_of(names, sizes, passes, name or type(model).__name__)


class _Marks:
    """Notes when each unit's module begins, and when its last gradient is there."""

    def __init__(self, model: nn.Module, units: list[Unit], clock: Clock) -> None:
        self._model, self._units, self._clock = model, units, clock
        self._begun: dict[int, Any] = {}
        self._ready: dict[int, Any] = {}
        self._end: Any = None
        modules = dict(model.named_modules())
        self._handles = []
        for index, unit in enumerate(units):
            self._handles.append(
                modules[unit.gate].register_forward_pre_hook(
                    lambda *_, index=index: self._begin(index)
                )
            )
            parameter: Any
            for parameter in unit.parameters:
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(
                        lambda _, index=index: self._accumulated(index)
                    )
                )

    def _begin(self, index: int) -> None:
        if index not in self._begun:  # not when activations are computed again
            self._begun[index] = self._clock.now()

    def _accumulated(self, index: int) -> None:
        self._ready[index] = self._clock.now()

    def forward(self, inputs: Any) -> Any:
        result = self._model(inputs)
        self._end = self._clock.now()
        return result

    def run(self, loss: Callable[[], Any]) -> Pass:
        """One forward and one backward pass."""
        self._begun.clear()
        self._ready.clear()
        start = self._clock.now()
        loss().backward()
        for parameter in self._model.parameters():
            parameter.grad = None
        return measured_pass(
            self._clock, len(self._units), start, self._begun, self._end, self._end, self._ready
        )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True)
class Pass:
    """A forward and a backward pass, in seconds.

    forward: when each unit's module began, and when the pass ended, from any moment.
    ready: when each unit's last gradient was there, from the start of the backward pass; None for a
        unit without one.
    update_s: the optimizer's step.
    """

    forward: tuple[float, ...]
    ready: tuple[float | None, ...]
    update_s: float = 0.0


def measured_pass(
    clock: Clock, units: int, start: Any, forward: Mapping[int, Any], end: Any, begun: Any,
    ready: Mapping[int, Any], update_s: float = 0.0,
) -> Pass:  # fmt: skip
    """A pass from moments of a clock: when the forward pass started, reached each unit, and ended;
    when the backward pass began, and each unit's gradients were there.

    A unit that was not reached took no time; nor did a forward pass of which nothing is known.
    """
    reached, at = [], 0.0
    for unit in range(units):
        if unit in forward:
            at = max(at, clock.seconds(start, forward[unit]))
        reached.append(at)
    reached.append(at if end is None else max(at, clock.seconds(start, end)))
    there = (clock.seconds(begun, ready[unit]) if unit in ready else None for unit in range(units))
    return Pass(tuple(reached), tuple(there), update_s)


def profile_of(
    names: Sequence[str], sizes: Sequence[int], passes: Sequence[Pass], name: str
) -> Profile:
    """The profile whose times are medians over the passes, for units of `sizes` bytes.

    A unit's forward pass lasts until the next unit's begins, its backward pass from the moment when
    all later units' gradients are there until its own are. The optimizer's step is divided by
    bytes and belongs to the forward passes, as it takes place before them. Raises CollectiveError
    without passes.
    """
    if not passes:
        raise CollectiveError("a profile needs at least one measured step")
    total = sum(sizes)
    layers = []
    forward = [median(column) for column in zip(*map(_forward, passes), strict=True)]
    backward = [median(column) for column in zip(*map(_backward, passes), strict=True)]
    update = median(one.update_s for one in passes)
    for unit, nbytes, before, behind in zip(names, sizes, forward, backward, strict=True):
        layers.append(Layer(unit, nbytes, before + update * nbytes / total, behind))
    return Profile(tuple(layers), name)


def _forward(one: Pass) -> list[float]:
    ends = one.forward[1:]
    return [max(0.0, end - start) for start, end in zip(one.forward, ends, strict=False)]


def _backward(one: Pass) -> list[float]:
    found, upto = [], 0.0
    for ready in reversed(one.ready):
        end = max(upto, ready or 0.0)
        found.append(end - upto)
        upto = end
    return found[::-1]
