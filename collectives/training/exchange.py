"""What becomes of a unit's gradients, and what arrives in their place: the dense average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from linkweave.collectives.cluster import pieces
from linkweave.collectives.training.arena import Arena
from linkweave.collectives.training.packing import Packing
from linkweave.collectives.training.program import Op, Span, in_parts
from linkweave.collectives.training.transport import Transport, carry_out

Arrived = Callable[[Sequence[Span]], None]
"""Called when spans of an op have arrived in the arena."""


class Exchange(Protocol):
    """Carries out ops for the units of an arena. The engine knows no more of it than this."""

    whole: bool
    """Whether ops must have whole units that follow one another, and are never streamed."""
    dtype: torch.dtype | None
    """In which float32 gradients travel; None for their own."""

    @property
    def skips(self) -> bool:
        """Whether the step that has arrived is to be left out, on all ranks alike."""

    def begin(self) -> None:
        """A backward pass begins whose gradients will be sent."""

    def part(self, op: Op) -> Op:
        """The op in the parts in which it arrives."""

    def carry_out(self, op: Op, packing: Packing, arrived: Arrived) -> None:
        """Send the gradients of an op, and leave what arrives in the arena; blocks. A lane has one
        at a time."""

    def settle(self) -> None:
        """All ops of a step have been carried out."""

    def network_of(self, measure: Callable[[torch.Tensor, Any], Any]) -> Any:
        """The network on which ops run: `measure(like, average)` takes the times of averages."""

    def state_dict(self, before: dict[str, Any] | None) -> dict[str, Any] | None:
        """What this rank must keep to go on, and for parameters of no unit what was kept `before`;
        None if nothing."""

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from a `state_dict`, or from nothing."""


class Dense:
    """The average over all ranks: sums in the order of the collective, divided once.

    float32 gradients travel in `dtype`, if that is given: rounded once before, and as an all-reduce
    of that dtype rounds.
    """

    whole = False
    skips = False

    def __init__(
        self, arena: Arena, transport: Transport, dtype: torch.dtype | None = None
    ) -> None:
        self._arena, self._transport, self.dtype = arena, transport, dtype

    def carry_out(self, op: Op, packing: Packing, arrived: Arrived) -> None:
        x = packing.pack(op)
        if not op.streamed:
            carry_out(self._transport, op, x)
            packing.unpack(op, x)
            if op.final:
                arrived(op.spans)
            return
        queue = self._transport.stream(op.lane, x, packing.sizes(op))
        for number, span in enumerate(op.spans):
            queue.dequeue(number)
            packing.unpack_span(op, number, x)
            arrived([span])
        queue.wait()

    def part(self, op: Op) -> Op:
        return in_parts(op, pieces.QUEUED) if op.streamed else op

    def network_of(self, measure: Callable[[torch.Tensor, Any], Any]) -> Any:
        largest = max(self._arena.buffers, key=lambda buffer: buffer.nbytes)
        return measure(largest, self._average)

    def _average(self, lane: int, x: torch.Tensor) -> None:
        """What an op of x's bytes takes."""
        sent = x.to(self.dtype) if self.dtype and x.dtype == torch.float32 else x
        self._transport.average(lane, sent)
        if sent is not x:
            x.copy_(sent)

    def state_dict(self, before: dict[str, Any] | None) -> dict[str, Any] | None:
        return None

    def begin(self) -> None: ...

    def settle(self) -> None: ...

    def load(self, state: dict[str, Any] | None) -> None: ...
