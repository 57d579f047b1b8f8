"""Spans of the arena that do not follow one another, packed into one tensor and back."""

from __future__ import annotations

from itertools import accumulate

import torch

from linkweave.collectives.training.arena import Arena
from linkweave.collectives.training.program import Op, Program
from linkweave.collectives.training.transport import Transport


class Packing:
    """The tensors that ops send. One object serves ops that run one after another."""

    def __init__(self, transport: Transport, arena: Arena, program: Program) -> None:
        self._transport, self._arena, self._program = transport, arena, program
        self._packed: dict[int, torch.Tensor] = {}  # by buffer, as large as any op needs

    def pack(self, op: Op) -> torch.Tensor:
        """The op's spans as one flat tensor: the arena's memory itself if they lie in one run."""
        runs = self._runs(op)
        if len(runs) == 1:
            return runs[0]
        if op.buffer not in self._packed:
            most = max(
                other.nbytes for other in self._program.ops
                if other.buffer == op.buffer and len(other.runs) > 1
            )  # fmt: skip
            self._packed[op.buffer] = self._transport.empty(
                most // runs[0].element_size(), runs[0].dtype, runs[0].device
            )
        x = self._packed[op.buffer][: op.nbytes // runs[0].element_size()]
        torch.cat(runs, out=x)
        return x

    def unpack(self, op: Op, x: torch.Tensor) -> None:
        """Copy a packed tensor back to the arena."""
        runs = self._runs(op)
        if len(runs) > 1:
            for end, run in zip(accumulate(r.numel() for r in runs), runs, strict=True):
                run.copy_(x[end - run.numel() : end])

    def unpack_span(self, op: Op, number: int, x: torch.Tensor) -> None:
        """Copy one span of a packed tensor back to the arena."""
        if len(op.runs) > 1:
            sizes = op.sizes(x.element_size())
            at, span = sum(sizes[:number]), op.spans[number]
            run = self._arena.raw(op.buffer, span.first, span.stop)
            run.copy_(x[at : at + sizes[number]])

    def _runs(self, op: Op) -> list[torch.Tensor]:
        return [self._arena.raw(op.buffer, first, stop) for first, stop in op.runs]
