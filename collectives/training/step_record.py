"""What a step did, and when: from a backward pass to the end of the next forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

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


class Moments:
    """Takes down the moments of steps, as long as the user or the tuner asks for it."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.asking = clock, {"user": False, "tuner": False}
        self.record = StepRecord()
        self.last: StepRecord | None = None
        """Of the last complete step that was taken down."""
        self._arrived: Any = None  # when the last bytes of the unit last awaited arrived

    @property
    def on(self) -> bool:
        return any(self.asking.values())

    def forget(self) -> None:
        """The steps to come are those of another program."""
        self.record, self.last = StepRecord(self.record.forward_end or self.record.begun), None

    def forward_begins(self) -> None:
        self.record.reached.clear()
        self.record.forward.clear()

    def forward_ends(self) -> None:
        if self.on:
            self.record.forward_end = self.clock.now()

    def backward_enters(self) -> None:
        """A backward pass begins, maybe of a forward pass that nobody has noticed."""
        if self.on and self.record.forward_end is None:
            self.record.forward_end = self.clock.now()

    def next_step(self, sent: list[tuple[int, Any, Any]]) -> None:
        """The first gradient of a backward pass is there; `sent`: by the step before it."""
        done = self.record
        done.sent = sent
        complete = self.on and done.ready and done.begun is not None
        self.last = done if complete else self.last
        self.record = StepRecord(done.forward_end)

    def reached(self, unit: int) -> None:
        if self.on and torch.is_grad_enabled():  # evaluation has no record
            self.record.reached.setdefault(unit, self.clock.now())

    def goes_on(self, unit: int) -> None:
        if self.on and torch.is_grad_enabled():
            self.record.forward.setdefault(unit, self.clock.now())

    def arrived(self) -> None:
        if self.on:
            self._arrived = self.clock.now()

    def updated(self, unit: int) -> None:
        if self.on:
            self.record.updates[unit] = self._arrived, self.clock.now()

    def ready(self, unit: int) -> None:
        if self.on:
            self.record.ready[unit] = self.clock.now()

    def backward_ends(self) -> None:
        if self.on:
            self.record.backward_end = self.clock.now()

    def step_begins(self) -> Any:
        return self.clock.now() if self.on else None

    def step_ends(self, begun: Any) -> None:
        if begun is not None:
            self.record.step = begun, self.clock.now()
