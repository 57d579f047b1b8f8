"""What a step did, and when: from a backward pass to the end of the next forward pass."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

Span = tuple[float, float]


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
    forward: dict[int, float] = field(default_factory=dict)
    """When each unit's module began its forward pass, with the unit updated."""
    forward_end: float = 0.0

    def mark_forward(self, unit: int) -> None:
        self.forward.setdefault(unit, time.perf_counter())
