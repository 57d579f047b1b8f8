"""What a step did, and when: from a backward pass to the end of the next forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from linkweave.collectives.overlap import StepTimeline
from linkweave.collectives.overlap.timeline import Span
from linkweave.collectives.training.program import Program


@dataclass
class StepRecord:
    """Times in seconds by `time.perf_counter`; units and ops by number."""

    begun: float = 0.0
    """When the forward pass before the backward pass ended."""
    ready: dict[int, float] = field(default_factory=dict)
    """When the last gradient of each unit was there."""
    backward_end: float = 0.0
    sent: list[tuple[int, float, float]] = field(default_factory=list)
    """(op, start, end), in the order of their ends."""
    step: Span = (0.0, 0.0)
    """The call of the optimizer's `step`."""
    updates: dict[int, Span] = field(default_factory=dict)
    """The parts of a step that were carried out before the units' next use."""
    reached: dict[int, float] = field(default_factory=dict)
    """When the forward pass reached each unit's module."""
    forward: dict[int, float] = field(default_factory=dict)
    """When it went on, with the unit's gradients there and its parameters updated."""
    forward_end: float = 0.0


def timeline_of(record: StepRecord, program: Program) -> StepTimeline:
    """The times of a complete step, in seconds from the start of its backward pass.

    The parts of a communication that was divided between buffers count as one. An update before a
    unit's next use belongs to its forward pass, one by `step` to none.
    """
    zero, units = record.begun, range(len(program.names))
    sends: dict[int, Span] = {}
    for number, start, end in record.sent:
        source = program.ops[number].source
        known = sends.get(source, (start, end))
        sends[source] = min(known[0], start), max(known[1], end)
    backward, upto = [], zero
    for unit in reversed(units):
        end = max(upto, record.ready[unit])
        backward.append((upto - zero, end - zero))
        upto = end
    forward, upto = [], record.forward_end
    for unit in reversed(units):
        start = min(upto, record.forward.get(unit, upto))
        begun = record.updates.get(unit, (start, start))[0]
        forward.append((min(begun, start) - zero, upto - zero))
        upto = min(upto, record.reached.get(unit, start))
    seconds = record.forward_end - zero
    computing = sum(end - start for start, end in (*backward, *forward))
    return StepTimeline(
        seconds, seconds - computing,
        tuple((start - zero, end - zero) for _, (start, end) in sorted(sends.items())),
        tuple(reversed(backward)), tuple(reversed(forward)),
    )  # fmt: skip
