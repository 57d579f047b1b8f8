"""What carries out programs, step after step: `HostLanes` on CPUs, `StreamLanes` on GPUs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakMethod, finalize

import torch

from linkweave.collectives.errors import CollectiveAborted, CollectiveError
from linkweave.collectives.overlap.clock import StreamClock
from linkweave.collectives.overlap.units import WHOLE
from linkweave.collectives.runtime.diagnose import LEFT, REASONS
from linkweave.collectives.training.embedding.optimizer import Embeddings
from linkweave.collectives.training.exchange import Exchange, Packing
from linkweave.collectives.training.gradient_buffers import GradientBuffers
from linkweave.collectives.training.hooks import check_process, nothing
from linkweave.collectives.training.program import Op, Program, Span
from linkweave.collectives.training.ranges import profiled
from linkweave.collectives.training.transport import Queue, Transport


class Lanes(Protocol):
    """One step after another of a program, on the lanes of a transport."""

    sent: list[tuple[int, Any, Any]]
    """(op, start, end) of the step, in the order of their ends: moments of the device's clock."""

    def begin(self, measured: bool) -> None:
        """Begin a step, once the one before it is over. If it is `measured`, it makes `sent`."""

    def accumulated(self, unit: int) -> None:
        """A gradient of the unit has been accumulated, on a GPU by the current stream."""

    def collects(self, unit: int) -> None:
        """The unit's gradients are about to be brought into the buffers by the current stream."""

    def ready(self, unit: int) -> None:
        """The unit's gradients are in the buffers; they may be sent."""

    def arrivals(self, unit: int) -> Iterator[int]:
        """Wait for a unit: yields how many of its first bytes have arrived, as more do, and at last
        all. Raises CollectiveError."""

    def wait_all(self) -> None:
        """Wait until all ops are done. Raises CollectiveError."""

    def abort(self, error: CollectiveError) -> None:
        """End all lanes, here and on the other ranks, because of this error."""

    def close(self) -> None:
        """Free the lanes, once what they send has been sent."""


def lanes_of(
    transport: Transport, gradients: GradientBuffers, program: Program, exchange: Exchange,
    embeddings: Embeddings,
) -> Lanes:  # fmt: skip
    """The lanes of a program, on the buffers' device."""
    device = gradients.units[0].device
    if transport.device not in ("", device.type):
        raise CollectiveError(
            f"the parameters are on {device}; when they were passed to DataParallel they were on "
            f"{transport.device}, for which this group's transport was made: pass them anew"
        )
    for name, embedding in embeddings.named.items():
        if embedding.weight.device != device:
            raise CollectiveError(
                f"ShardedEmbedding {name} is on {embedding.weight.device}, and the other "
                f"parameters are on {device}: they must be on one device"
            )
    if device.type == "cuda":
        return StreamLanes(transport, gradients, program, exchange, embeddings)
    return HostLanes(transport, gradients, program, exchange, embeddings)


class _Board:
    """What the training loop and the threads of lanes tell each other.

    Between steps the threads hold nothing but this, so that the lanes, the buffers and the model
    end when nobody else holds them; their threads then end as well.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.steps = 0  # begun so far
        self.going: HostLanes | None = None  # as long as ops of the step are to be carried out
        self.closed = False

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def run(self, lane: int) -> None:
        """What a lane's thread does."""
        done = 0
        while True:
            with self.changed:
                while not (self.closed or self.steps > done):
                    self.changed.wait()
                if self.steps == done:
                    return
                done, lanes = self.steps, self.going
            if lanes is not None and not lanes._step(lane):
                return
            del lanes


class HostLanes:
    """One step after another of a program, on the lanes of a transport.

    Each lane has a thread, which carries out the lane's ops in the program's order. All ranks have
    the same program, so whatever the order in which their gradients become ready, calls on a lane
    meet calls of the same op. `after` names earlier ops only, so lanes cannot wait in a circle.
    If an op fails, all lanes end, and every wait raises its error.
    """

    def __init__(
        self, transport: Transport, gradients: GradientBuffers, program: Program,
        exchange: Exchange, embeddings: Embeddings,
    ) -> None:  # fmt: skip
        self._transport, self._gradients, self._program = transport, gradients, program
        self._exchange, self._embeddings = exchange, embeddings
        self._process = os.getpid()
        embeddings.join(self.abort)
        self._board = _Board()
        self._changed = self._board.changed
        self._ready = [False] * len(program.names)
        self._done = [True] * len(program.ops)
        self._carried = [
            [op for op in program.ops if unit in op.needs] for unit in range(len(program.names))
        ]
        self._ops = [
            [(n, exchange.part(op)) for n, op in enumerate(program.ops) if op.lane == lane]
            for lane in range(program.lanes)
        ]
        self._packings = [Packing(transport, gradients, program, exchange.dtype) for _ in self._ops]
        self._arrived: list[dict[int, int]] = []  # of each unit: where spans begin and end
        self._error: CollectiveError | None = None
        self.sent: list[tuple[int, float, float]] = []
        """(op, start, end) of the last step, in the order of their ends; `time.perf_counter`."""
        self._threads = [
            threading.Thread(
                target=self._board.run, args=(i,), name=f"linkweave-lane-{i}", daemon=True
            )
            for i in range(program.lanes)
        ]
        for thread in self._threads:
            thread.start()
        finalize(self, self._board.close)
        transport.before_close(WeakMethod(self._drain))

    # ---- for the training loop ---------------------------------------------------------------
    def begin(self, measured: bool = True) -> None:
        """Begin a step, once the one before it is over."""
        self.wait_all()
        with self._changed:
            self._ready = [False] * len(self._ready)
            self._done = [False] * len(self._done)
            self._arrived = [{} for _ in self._program.names]
            self.sent = []
            self._board.steps += 1
            self._board.going = self
            self._changed.notify_all()

    def accumulated(self, unit: int) -> None: ...

    def collects(self, unit: int) -> None: ...

    def ready(self, unit: int) -> None:
        """The unit's gradients are in the buffers; they may be sent."""
        with self._changed:
            self._ready[unit] = True
            if any(self._has_all(op) for op in self._carried[unit]):
                self._changed.notify_all()

    def arrivals(self, unit: int) -> Iterator[int]:
        """Block until the unit has arrived, and yield how many of its first bytes have, as more do.
        Raises CollectiveError."""
        slot, spans = self._gradients.slots[unit], self._arrived[unit]
        upto = slot.first
        while upto < slot.first + slot.nbytes:
            self._wait_until(partial(spans.__contains__, upto))
            while upto in spans:
                upto = spans[upto]
            yield upto - slot.first

    def wait_all(self) -> None:
        """Block until all ops are done. Raises CollectiveError."""
        self._wait_until(lambda: all(self._done))

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        # no deadline of its own: an op that waits for other ranks has one, and then fails
        if not (self._error or holds()):
            check_process(self._process, self._transport.rank)
        with self._changed:
            self._changed.wait_for(lambda: self._error or holds())
            error = self._error
        if error:
            raise type(error)(str(error)) from error

    def abort(self, error: CollectiveError) -> None:
        """End all lanes and embeddings, here and on the other ranks, because of this error."""
        with self._changed:
            if self._error or self._board.closed:
                return
            self._error = error
            self._board.going = None
            self._board.close()
        self._transport.abort()
        self._embeddings.abort(error)

    def _drain(self) -> None:
        """Before this rank leaves: send what the others wait for, unless gradients lack."""
        with self._changed:
            going = not (self._error or self._board.closed) and all(self._ready)
        if going:
            self.wait_all()

    def close(self) -> None:
        """End the threads, once what they send has been sent; a forked process has none."""
        if os.getpid() != self._process:
            return
        self._board.close()
        for thread in self._threads:
            thread.join()

    # ---- a lane's thread ---------------------------------------------------------------------
    def _step(self, lane: int) -> bool:
        """Carry out the ops of a step. False if the lanes have ended."""
        number = -1
        try:
            for number, op in self._ops[lane]:
                if not self._until(partial(self._may_start, op)):
                    return False
                self._carry_out(number, op)
        except BaseException as error:
            self.abort(_failed(self._transport.rank, self._program, number, error))
            return False
        return True

    def _until(self, holds: Callable[[], bool]) -> bool:
        """Wait for that; False if the lanes end first."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or holds() or self._ends())
            return not self._error and holds()

    def _ends(self) -> bool:
        """No other step follows, and this one is over or will never have all its gradients."""
        return self._board.closed and (all(self._done) or not all(self._ready))

    def _may_start(self, op: Op) -> bool:
        return self._has_all(op) and all(self._done[n] for n in op.after)

    def _has_all(self, op: Op) -> bool:
        return all(self._ready[unit] for unit in op.needs)

    def _carry_out(self, number: int, op: Op) -> None:
        start = time.perf_counter()
        with profiled(f"lane {op.lane}: {self._program.label(number)}"):
            self._exchange.carry_out(op, self._packings[op.lane], self._has_arrived)
        with self._changed:
            self._done[number] = True
            self.sent.append((number, start, time.perf_counter()))
            if all(self._done):
                self._board.going = None
            self._changed.notify_all()

    def _has_arrived(self, spans: Sequence[Span]) -> None:
        with self._changed:
            for span in spans:
                self._arrived[span.unit][span.first] = span.stop
            self._changed.notify_all()


def _failed(rank: int, program: Program, number: int, error: BaseException) -> CollectiveError:
    """What ends the lanes of all ranks when an op has raised an error."""
    kind = type(error) if isinstance(error, CollectiveError) else CollectiveAborted
    op, left = program.ops[number], REASONS[LEFT] in str(error)
    names = program.label(number)
    if not names.startswith(WHOLE):
        names = f"unit{'s'[: len(op.needs) > 1]} {names}"
    where = f"{op.kind} {number} of {names}"
    hint = "; ranks that have fewer batches than others train inside `with model.join():`" * left
    return kind(f"rank {rank}, {where}: {error}{hint}")


class StreamLanes:
    """One step after another of a program, each lane on a CUDA stream of its own.

    The host enqueues, and waits only to learn whether a parameter that this rank has not used was
    used elsewhere, and for what an exchange says. An op is enqueued when its gradients' kernels
    are, and all ops before it in the program, on whatever lane: so all ranks enqueue all ops in one
    order, as NCCL and kernels that need all ranks at once require. Its stream waits for the
    gradients, of whatever streams, and for the ops in `after`. `arrivals` and `wait_all` make the
    current stream wait. Where a rank fails, the communicator's or NCCL's watchdog ends the op, and
    a later call raises its error.
    """

    def __init__(
        self, transport: Transport, gradients: GradientBuffers, program: Program,
        exchange: Exchange, embeddings: Embeddings,
    ) -> None:  # fmt: skip
        self._transport, self._program, self._slots = transport, program, gradients.slots
        self._embeddings = embeddings
        embeddings.join(self.abort)
        self._exchange, self._units = exchange, gradients.units
        self._device = device = gradients.units[0].device
        make: Any = torch.cuda.Stream
        # with priority, so that blocks of a model's kernels that wait for room begin after theirs
        self._streams = [make(device, priority=-1) for _ in range(program.lanes)]
        self._packing = [
            Packing(transport, gradients, program, exchange.dtype) for _ in self._streams
        ]
        self._clock = StreamClock(device)
        self._measured = False
        self._made: dict[int, dict[Any, None]] = {}  # of each unit: the streams of its gradients
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
        transport.before_close(WeakMethod(self._drain))

    def begin(self, measured: bool) -> None:
        self.wait_all()
        self._ready, self._done, self._queues, self._next, self.sent = {}, {}, {}, 0, []
        self._made, self._measured = {}, measured

    def accumulated(self, unit: int) -> None:
        self._made.setdefault(unit, {})[torch.cuda.current_stream(self._device)] = None

    def collects(self, unit: int) -> None:
        current = torch.cuda.current_stream(self._device)
        for stream in self._made.pop(unit, ()):
            if stream != current:
                current.wait_event(stream.record_event())
                for parameter in self._units[unit].parameters:
                    if parameter.grad is not None:  # which is freed once it has been copied
                        parameter.grad.record_stream(current)

    def ready(self, unit: int) -> None:
        self._ready[unit] = torch.cuda.current_stream(self._device).record_event()
        ops = self._program.ops
        while self._next < len(ops) and all(u in self._ready for u in ops[self._next].needs):
            self._enqueue(self._next, ops[self._next])
            self._next += 1

    def _enqueue(self, number: int, op: Op) -> None:
        try:
            self._carry_out(number, op)
        except BaseException as error:
            failed = _failed(self._transport.rank, self._program, number, error)
            self.abort(failed)
            raise failed from error

    def _carry_out(self, number: int, op: Op) -> None:
        stream, packing = self._streams[op.lane], self._packing[op.lane]
        for unit in op.needs:
            stream.wait_event(self._ready[unit])
        for other in op.after:
            stream.wait_event(self._done[other])
        with torch.cuda.stream(stream), profiled(f"lane {op.lane}: {self._program.label(number)}"):
            start = self._clock.now() if self._measured else None
            if op.streamed:
                self._stream(number, op, packing)
            else:
                self._exchange.carry_out(op, packing, nothing)
            self._done[number] = self._clock.now() if self._measured else stream.record_event()
        if self._measured:
            self.sent.append((number, start, self._done[number]))

    def _stream(self, number: int, op: Op, packing: Packing) -> None:
        x = packing.pack(op)
        queue = self._transport.stream(op.lane, x, packing.sizes(op))
        if not packing.copies(op):  # else units arrive when they have been unpacked
            self._queues[number] = queue
        queue.wait()
        packing.unpack(op, x)

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
            self._embeddings.abort(error)

    def _drain(self) -> None:
        """Before this rank leaves: wait until what it has enqueued is sent."""
        if self._error is None:
            self.close()

    def close(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def _check(self) -> None:
        if self._error:
            raise self._error
