"""One call on a stream: where its copies and launches go, and what the caller holds of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from linkweave.collectives.calls.gpu_launcher import GpuLauncher
from linkweave.collectives.calls.gradient_queue import number_of
from linkweave.collectives.calls.request import How, Request
from linkweave.collectives.errors import CollectiveError, CollectiveTimeout
from linkweave.collectives.planning.goals import Root
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.gpu.counters import Counted
from linkweave.collectives.runtime.gpu.team import Call
from linkweave.collectives.tensors import as_buffer, stream_of

POLL = 0.0005  # s


class OnStream:
    """A `CallContext` on a GPU: copies and launches go to `stream`; the caller's is `caller`."""

    def __init__(self, gpu: GpuLauncher, caller: int, stream: int) -> None:
        self.rank, self.size = gpu.rank, gpu.size
        self.gpu, self.caller, self.stream = gpu, caller, stream
        self.choices, self.trace = gpu.choices, gpu.trace
        self.begun = False  # something may have been enqueued
        self.kept: list[object] = []  # the call's tensors and contiguous copies of them
        self.layers: int | None = None  # how many, of a gradient queue
        self.made: tuple[Call, Counted | None] | None = None
        self.events: list[int] = []  # of a queue: behind which it counts from zero; of its checks
        self._later: list[Callable[[], None]] = []

    def telling(self) -> AbstractContextManager[None]:
        return nullcontext()  # ranks do not meet, so nobody can be told

    def buffer(self, x: Any, written: bool = True) -> tuple[Buffer, Callable[[], None]]:
        buffer, done = as_buffer(x, written, self.gpu.index)
        self.kept += [x, buffer.owner]
        return buffer, lambda: self._later.append(done)

    def scratch(self, like: Buffer, nbytes: int) -> Buffer:
        address = self.gpu.scratch(nbytes, self.caller)
        return Buffer(address, like.nbytes, like.dtype, like.itemsize)

    def staged(self, whole: Buffer) -> Buffer:
        return whole

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        self._begin()
        if nbytes and dst != src:
            self.gpu.device.copy(dst, src, nbytes, self.stream)

    def request(
        self, kind: str, buffer: Buffer, op: str, root: Root = 0, algorithm: How = "auto",
        layout: int = 0,
    ) -> Request:  # fmt: skip
        made = self.gpu.choices.request(kind, buffer, op, root, algorithm, layout, "gpu")
        self.gpu.know_occupancy(buffer.dtype, op, self.caller)
        if kind == "allreduce":  # of others some ranks' buffers are scratch, or nothing is pushed
            made = replace(made, spot=self.gpu.spot(buffer))
        return made

    def make(self, request: Request) -> None:
        self._begin()
        if request.layers is not None:
            self.layers, self.events = len(request.layers), [self.gpu.device.make_event()]
        self.made = self.gpu.make(request, self.stream, *self.events)

    def free(self) -> None:
        """Nothing of a queue is under way: its events and counters are needed no more."""
        while self.events:
            self.gpu.device.free_event(self.events.pop())
        if self.made and self.made[1]:
            self.gpu.team.gpu.counters.give_back(self.made[1])
            self.made = None

    def _begin(self) -> None:
        """Behind what the caller has enqueued, contiguous copies of its tensors included."""
        if not self.begun:
            self.gpu.join(self.stream, self.caller)
            self.begun = True

    def finish(self) -> None:
        """Copy back into tensors that are not contiguous, on the caller's stream."""
        for done in self._later:
            done()
        self._later.clear()


class StreamWork:
    """A collective on a stream of its own, beside the caller's. Keeps its tensors until it is
    over."""

    def __init__(
        self, gpu: GpuLauncher, context: OnStream, x: Any, result: Any, event: int, captured: bool
    ) -> None:
        self._gpu, self._context, self._x, self._result = gpu, context, x, result
        self._event: int | None = event  # behind it
        self._captured = captured

    def wait(self, timeout: float | None = None) -> Any:
        """What the collective returns. What the current stream is given from now on comes after
        it; the host waits only where a `timeout` (s) is given. Raises what went wrong so far, or
        CollectiveTimeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while deadline is not None and not self.done():
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"the collective is not done after {timeout} s")
            time.sleep(POLL)
        self._gpu.check()
        if self._event is not None:
            self._gpu.device.wait(self._event, stream_of(self._x))
        self._context.finish()
        return self._result

    def done(self) -> bool:
        if self._captured:
            raise CollectiveError("a call in a graph is not done before the graph's replay is")
        return self._event is None or self._gpu.ready(self._event)

    def over(self) -> bool:
        """Whether nothing of it is under way; then its event is given back."""
        if self.done():
            self.free()
            return True
        return False

    def free(self) -> None:
        if self._event is not None:
            self._gpu.device.free_event(self._event)
            self._context.free()
            self._event = None


class StreamQueue(StreamWork):
    """An all-reduce on a stream of its own whose layers other streams can wait for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._checked: dict[int, int] = {}  # for each stream an event behind its last check

    def dequeue(self, layer: int) -> None:
        at = number_of(layer, self._context.layers or 0)
        stream = stream_of(self._x)
        call, counted = self._context.made or (None, None)
        if self._event is None or call is None or counted is None:
            return
        if self._captured and not self._gpu.device.capturing(stream):
            raise CollectiveError("a queue in a graph can be dequeued within its capture only")
        if stream not in self._checked:
            self._checked[stream] = self._gpu.device.make_event()
            self._context.events.append(self._checked[stream])
        begun = self._context.events[0]
        self._gpu.dequeue(call, counted, at, begun, self._checked[stream], stream)

    def over(self) -> bool:
        checks = self._checked.values() if self._event is not None else ()
        return all(self._gpu.ready(event) for event in checks) and super().over()
