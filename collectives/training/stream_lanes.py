"""Lanes on a GPU: CUDA streams that carry out a program's ops, ordered by events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.clock import StreamClock
from linkweave.collectives.training.arena import Arena
from linkweave.collectives.training.packing import Packing
from linkweave.collectives.training.program import Op, Program
from linkweave.collectives.training.ranges import profiled
from linkweave.collectives.training.transport import Queue, Transport, carry_out


class StreamLanes:
    """One step after another of a program, each lane on a CUDA stream of its own.

    The host enqueues, and waits only to learn whether a parameter that this rank
    has not used was used elsewhere. An op is enqueued when its gradients' kernels are, and all
    ops before it in the program, on whatever lane: so all ranks enqueue all ops in one order, as
    NCCL and kernels that need all ranks at once require. Its stream waits for the gradients and for
    the ops in `after`. `arrivals` and `wait_all` make the current stream wait. Where a rank fails,
    the communicator's or NCCL's watchdog ends the op, and a later call raises its error.
    """

    def __init__(
        self, transport: Transport, arena: Arena, program: Program, dtype: torch.dtype | None = None
    ) -> None:
        self._transport, self._program, self._slots = transport, program, arena.slots
        self._device = device = arena.units[0].device
        make: Any = torch.cuda.Stream
        self._streams = [make(device) for _ in range(program.lanes)]
        self._packing = [Packing(transport, arena, program, dtype) for _ in self._streams]
        self._clock = StreamClock(device)
        self._ready: dict[int, Any] = {}  # an event for each unit
        self._done: dict[int, Any] = {}  # an event for each op
        self._queues: dict[int, Queue] = {}
        self._carried: dict[int, list[tuple[int, int]]] = {}  # of each unit: (op, span)
        for number, op in enumerate(program.ops):
            for i, span in enumerate(op.spans if op.final else ()):
                self._carried.setdefault(span.unit, []).append((number, i))
        self._next = 0
        self._error: CollectiveError | None = None
        self.sent: list[tuple[int, Any, Any]] = []

    def begin(self) -> None:
        self.wait_all()
        self._ready, self._done, self._queues, self._next, self.sent = {}, {}, {}, 0, []

    def ready(self, unit: int) -> None:
        self._ready[unit] = torch.cuda.current_stream(self._device).record_event()
        ops = self._program.ops
        while self._next < len(ops) and all(u in self._ready for u in ops[self._next].needs):
            self._enqueue(self._next, ops[self._next])
            self._next += 1

    def _enqueue(self, number: int, op: Op) -> None:
        stream, packing = self._streams[op.lane], self._packing[op.lane]
        for unit in op.needs:
            stream.wait_event(self._ready[unit])
        for other in op.after:
            stream.wait_event(self._done[other])
        with torch.cuda.stream(stream), profiled(f"lane {op.lane}: {self._program.label(number)}"):
            start = self._clock.now()
            x = packing.pack(op)
            if op.streamed:
                queue = self._transport.stream(op.lane, x, packing.sizes(op))
                if not packing.copies(op):  # else units arrive when they have been unpacked
                    self._queues[number] = queue
                queue.wait()
            else:
                carry_out(self._transport, op, x)
            packing.unpack(op, x)
            end = self._clock.now()
        self._done[number] = end
        self.sent.append((number, start, end))

    def arrivals(self, unit: int) -> Iterator[int]:
        self._check()
        for number, span in self._carried[unit]:
            if number in self._queues:
                self._queues[number].dequeue(span)
            else:
                torch.cuda.current_stream(self._device).wait_event(self._done[number])
        yield self._slots[unit].nbytes

    def wait_all(self) -> None:
        self._check()
        for event in self._done.values():
            torch.cuda.current_stream(self._device).wait_event(event)

    def abort(self, error: CollectiveError) -> None:
        if self._error is None:
            self._error = error
            self._transport.abort()

    def close(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def _check(self) -> None:
        if self._error:
            raise self._error
