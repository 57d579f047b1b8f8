"""What becomes of a unit's gradients, and what arrives in their place: the dense average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from linkweave.collectives.cluster import pieces
from linkweave.collectives.training.gradient_buffers import GradientBuffers
from linkweave.collectives.training.program import Op, Program, Span, in_parts
from linkweave.collectives.training.transport import Transport, carry_out

Arrived = Callable[[Sequence[Span]], None]
"""Called when spans of an op have arrived in the buffers."""


class Exchange(Protocol):
    """Carries out ops for the units of gradient buffers. The engine knows no more of it."""

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
        """Send the gradients of an op, and leave what arrives in the buffers. A lane has one at a
        time. On CPUs it blocks; on GPUs it is enqueued on the current stream."""

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
        self, gradients: GradientBuffers, transport: Transport, dtype: torch.dtype | None = None
    ) -> None:
        self._gradients, self._transport, self.dtype = gradients, transport, dtype

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
        largest = max(self._gradients.buffers, key=lambda buffer: buffer.nbytes)
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


class Packing:
    """The tensors that ops send. One object serves ops that run one after another.

    float32 gradients travel in `dtype`, if that is given.
    """

    def __init__(
        self,
        transport: Transport,
        gradients: GradientBuffers,
        program: Program,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._transport, self._gradients, self._program = transport, gradients, program
        self._dtype = dtype
        self._packed: dict[int, torch.Tensor] = {}  # by buffer, as large as any op needs

    def pack(self, op: Op) -> torch.Tensor:
        """The op's spans as one flat tensor: the buffers' memory itself if they lie in one run and
        keep their dtype."""
        runs = self._runs(op)
        if not self.copies(op):
            return runs[0]
        x = self._room(op, runs[0])[: sum(self.sizes(op))]
        torch.cat(runs, out=x)
        return x

    def unpack(self, op: Op, x: torch.Tensor) -> None:
        """Copy a packed tensor back to the buffers."""
        if self.copies(op):
            for part, run in self._parts(x, self._runs(op)):
                run.copy_(part)

    def unpack_span(self, op: Op, number: int, x: torch.Tensor) -> None:
        """Copy one span of a packed tensor back to the buffers."""
        if self.copies(op):
            sizes = self.sizes(op)
            at, span = sum(sizes[:number]), op.spans[number]
            run = self._gradients.raw(op.buffer, span.first, span.stop)
            run.copy_(x[at : at + sizes[number]])

    def sizes(self, op: Op) -> list[int]:
        """The elements of each span."""
        return op.sizes(self._gradients.buffers[op.buffer].element_size())

    def copies(self, op: Op) -> bool:
        """Whether `pack` copies: the spans lie apart, or change their dtype."""
        return (
            len(op.runs) > 1 or self._sent_as(op.buffer) != self._gradients.buffers[op.buffer].dtype
        )

    def _sent_as(self, buffer: int) -> torch.dtype:
        own = self._gradients.buffers[buffer].dtype
        return self._dtype or own if own == torch.float32 else own

    def _room(self, op: Op, like: torch.Tensor) -> torch.Tensor:
        if op.buffer not in self._packed:
            alike = [other for other in self._program.ops if other.buffer == op.buffer]
            most = max(sum(self.sizes(other)) for other in alike if self.copies(other))
            dtype = self._sent_as(op.buffer)
            self._packed[op.buffer] = self._transport.empty(most, dtype, like.device)
        return self._packed[op.buffer]

    def _parts(
        self, x: torch.Tensor, runs: list[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        ends = accumulate(run.numel() for run in runs)
        return [(x[end - run.numel() : end], run) for end, run in zip(ends, runs, strict=True)]

    def _runs(self, op: Op) -> list[torch.Tensor]:
        return [self._gradients.raw(op.buffer, first, stop) for first, stop in op.runs]
