"""What ops send: spans of the arena, packed into one tensor where they lie apart or change their
dtype."""

from __future__ import annotations

from itertools import accumulate

import torch

from linkweave.collectives.training.arena import Arena
from linkweave.collectives.training.program import Op, Program
from linkweave.collectives.training.transport import Transport


class Packing:
    """The tensors that ops send. One object serves ops that run one after another.

    float32 gradients travel in `dtype`, if that is given.
    """

    def __init__(
        self, transport: Transport, arena: Arena, program: Program, dtype: torch.dtype | None = None
    ) -> None:
        self._transport, self._arena, self._program = transport, arena, program
        self._dtype = dtype
        self._packed: dict[int, torch.Tensor] = {}  # by buffer, as large as any op needs

    def pack(self, op: Op) -> torch.Tensor:
        """The op's spans as one flat tensor: the arena's memory itself if they lie in one run and
        keep their dtype."""
        runs = self._runs(op)
        if not self.copies(op):
            return runs[0]
        x = self._room(op, runs[0])[: sum(self.sizes(op))]
        torch.cat(runs, out=x)
        return x

    def unpack(self, op: Op, x: torch.Tensor) -> None:
        """Copy a packed tensor back to the arena."""
        if self.copies(op):
            for part, run in self._parts(x, self._runs(op)):
                run.copy_(part)

    def unpack_span(self, op: Op, number: int, x: torch.Tensor) -> None:
        """Copy one span of a packed tensor back to the arena."""
        if self.copies(op):
            sizes = self.sizes(op)
            at, span = sum(sizes[:number]), op.spans[number]
            run = self._arena.raw(op.buffer, span.first, span.stop)
            run.copy_(x[at : at + sizes[number]])

    def sizes(self, op: Op) -> list[int]:
        """The elements of each span."""
        return op.sizes(self._arena.buffers[op.buffer].element_size())

    def copies(self, op: Op) -> bool:
        """Whether `pack` copies: the spans lie apart, or change their dtype."""
        return len(op.runs) > 1 or self._sent_as(op.buffer) != self._arena.buffers[op.buffer].dtype

    def _sent_as(self, buffer: int) -> torch.dtype:
        own = self._arena.buffers[buffer].dtype
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
        return [self._arena.raw(op.buffer, first, stop) for first, stop in op.runs]
