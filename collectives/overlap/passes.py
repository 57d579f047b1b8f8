"""Profiles from measured passes: when each unit began, and when its gradients were there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.clock import Clock
from linkweave.collectives.overlap.profile import Layer, Profile


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
