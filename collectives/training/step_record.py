"""What a step did, and when: from a backward pass to the end of the next forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from linkweave.collectives.overlap import StepTimeline
from linkweave.collectives.overlap.clock import Clock
from linkweave.collectives.overlap.timeline import Interval
from linkweave.collectives.training.program import Program


@dataclass
class StepRecord:
    """Moments of the engine's clock; units and ops by number."""

    begun: Any = None
    """When the forward pass before the backward pass ended."""
    ready: dict[int, Any] = field(default_factory=dict)
    """When the last gradient of each unit was there."""
    backward_end: Any = None
    sent: list[tuple[int, Any, Any]] = field(default_factory=list)
    """(op, start, end), in the order of their ends."""
    step: tuple[Any, Any] = (None, None)
    """The call of the optimizer's `step`."""
    updates: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """The parts of a step that were carried out before the units' next use, each from when the last
    bytes of the unit arrived: what was updated until then took no time of its own."""
    reached: dict[int, Any] = field(default_factory=dict)
    """When the forward pass reached each unit's module."""
    forward: dict[int, Any] = field(default_factory=dict)
    """When it went on, with the unit's gradients there and its parameters updated."""
    forward_end: Any = None


def timeline_of(record: StepRecord, program: Program, clock: Clock) -> StepTimeline:
    """The times of a complete step, in seconds from the start of its backward pass.

    The parts of a communication that was divided between buffers count as one. An update before a
    unit's next use belongs to its forward pass, one by `step` to none.
    """

    def at(moment: Any) -> float:
        return clock.seconds(record.begun, moment)

    sends: dict[int, Interval] = {}
    for number, start, end in record.sent:
        source = program.ops[number].source
        known = sends.get(source, (at(start), at(end)))
        sends[source] = min(known[0], at(start)), max(known[1], at(end))
    units = range(len(program.names))
    backward, upto = [], 0.0
    for unit in reversed(units):
        until = max(upto, at(record.ready[unit]))
        backward.append((upto, until))
        upto = until
    forward, seconds = [], at(record.forward_end)
    upto = seconds
    for unit in reversed(units):
        begun = record.updates[unit][0] if unit in record.updates else record.forward.get(unit)
        start = upto if begun is None else min(upto, at(begun))
        forward.append((start, upto))
        upto = min(start, at(record.reached[unit])) if unit in record.reached else start
    computing = sum(end - start for start, end in (*backward, *forward))
    return StepTimeline(
        seconds, seconds - computing, tuple(span for _, span in sorted(sends.items())),
        tuple(reversed(backward)), tuple(reversed(forward)),
    )  # fmt: skip
