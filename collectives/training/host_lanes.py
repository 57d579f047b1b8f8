"""Lanes on the CPU: threads that carry out a program's ops, each when its gradients are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from weakref import WeakMethod, finalize

from linkweave.collectives.errors import CollectiveAborted, CollectiveError
from linkweave.collectives.training.arena import Arena
from linkweave.collectives.training.embeddings import Embeddings
from linkweave.collectives.training.exchange import Exchange
from linkweave.collectives.training.packing import Packing
from linkweave.collectives.training.program import Op, Program, Span
from linkweave.collectives.training.ranges import profiled
from linkweave.collectives.training.transport import Transport


class _Board:
    """What the training loop and the threads of lanes tell each other.

    Between steps the threads hold nothing but this, so that the lanes, the arena and the model end
    when nobody else holds them; their threads then end as well.
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
        self, transport: Transport, arena: Arena, program: Program, exchange: Exchange,
        embeddings: Embeddings,
    ) -> None:  # fmt: skip
        self._transport, self._arena, self._program = transport, arena, program
        self._exchange, self._embeddings = exchange, embeddings
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
        self._packings = [Packing(transport, arena, program, exchange.dtype) for _ in self._ops]
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
    def begin(self) -> None:
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

    def ready(self, unit: int) -> None:
        """The unit's gradients are in the arena; they may be sent."""
        with self._changed:
            self._ready[unit] = True
            if any(self._has_all(op) for op in self._carried[unit]):
                self._changed.notify_all()

    def arrivals(self, unit: int) -> Iterator[int]:
        """Block until the unit has arrived, and yield how many of its first bytes have, as more do.
        Raises CollectiveError."""
        slot, spans = self._arena.slots[unit], self._arrived[unit]
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
        """End the threads, once what they send has been sent."""
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
            label, kind_of = self._program.label(number), self._program.ops[number].kind
            words = f"rank {self._transport.rank}, {kind_of} {number} of {label}: {error}"
            kind = type(error) if isinstance(error, CollectiveError) else CollectiveAborted
            self.abort(kind(words))
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
