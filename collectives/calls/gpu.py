"""One rank's calls on GPU tensors.

The first call of each kind synchronises the ranks on the host. Later calls are only enqueued on
the caller's stream.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from linkweave.collectives.calls.gpu_launcher import Copied, GpuLauncher, Ready
from linkweave.collectives.calls.request import How, Request
from linkweave.collectives.errors import CollectiveError, CollectiveTimeout
from linkweave.collectives.planning.collective import COLLECTIVES, Root
from linkweave.collectives.planning.layout import staging
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.gpu.executor import CallCounters
from linkweave.collectives.runtime.gpu.team import LaunchKey
from linkweave.collectives.runtime.tensors import as_buffer, fast_gpu_buffer, nothing, stream_of
from linkweave.topology.checks import integer


class GpuCalls(GpuLauncher):
    """Calls of one rank on one GPU.

    Each call waits for the one before it, on any stream. Calls captured into a graph keep their
    order among themselves, and use memory of their own; the caller must order replays of graphs
    among each other, and beside other calls leave them room (`max_blocks`).
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._under_way: deque[GpuWork] = deque()
        self._captured: list[int] = []  # events of captured asynchronous calls
        self._in_graphs: list[GpuContext] = []  # and these calls

    def submit(self, async_op: bool, x: Any, body: Callable[..., Any], *args: Any) -> Any:
        """Run `body(context, *args)` on the current stream of `x`'s library.

        With `async_op` it runs on the communicator's side stream instead and returns a `GpuWork`.
        """
        with self.enqueueing:
            caller = stream_of(x)
            key = self._key(async_op, caller, body, args)
            ready = None if key is None or self.trace.wants_more else self._repeats.get(key)
            with self.using(known=ready is not None):
                return self._submit(async_op, x, body, args, caller, key, ready)

    def _key(
        self, async_op: bool, stream: int, body: Callable[..., Any], args: Any
    ) -> tuple[object, ...] | None:
        """What is equal in calls that enqueue the same; None if this cannot be told fast."""
        key: list[object] = [async_op, stream, body]
        for each in args:
            pairs = type(each) is tuple and all(type(one) is tuple for one in each)
            if not pairs and each is not None and type(each) not in (str, int):
                each = fast_gpu_buffer(each, self.index)
                if each is None:
                    return None
            key.append(each)
        return tuple(key)

    def _submit(
        self, async_op: bool, x: Any, body: Callable[..., Any], args: Any, caller: int,
        key: object, ready: Ready | None,
    ) -> Any:  # fmt: skip
        capture = self.device.capturing(caller)
        self._captures = bool(capture)
        ready = None if capture else ready
        if not capture:
            self._release()
        stream = self._side if async_op else caller
        done = self._done_captured if capture else self._done
        if not capture or capture == self._capture:
            self.device.wait(done, stream)
        context = GpuContext(self, caller, stream)

        def enqueued() -> None:
            if context.begun:
                self.device.record(done, stream)
                self._capture = capture or self._capture

        try:
            result = context.again(ready, args) if ready else body(context, *args)
        except BaseException:
            with suppress(RuntimeError):  # from CUDA; the first error is raised
                enqueued()  # what was enqueued before the failure
                context.free()
            raise
        enqueued()
        if key and not capture and not ready:
            at = [i for i, each in enumerate(args) if each is result]
            if (at or result is None) and (ready := context.ready(at[0] if at else None)):
                self._repeats.add(key, ready)
        if not async_op:
            context.finish()
            return result
        event = self.device.make_event()
        self.device.record(event, stream)
        kind = GpuWork if context.layers is None else GpuQueue
        work = kind(self, context, x, result, event, capture)
        if capture:  # the graph needs them until the end
            self._captured.append(event)
            self._in_graphs.append(context)
        else:
            self.keep(work)
        return work

    def _release(self) -> None:
        """Let go of the tensors of asynchronous calls that are over; they end in this order."""
        while self._under_way and self._under_way[0].over():
            self._under_way.popleft()

    def keep(self, work: GpuWork) -> None:
        """Keep a work's event and tensors until it is over."""
        self._under_way.append(work)

    def synchronise(self) -> None:
        """Block until this rank's calls have finished, and raise their errors.

        Does not wait for replays of graphs. Must not be called during a capture.
        """

        known = math.inf  # since when a failure is known

        def over() -> bool:
            nonlocal known
            if self.ready(self._done):
                return True
            if self._health.broken or self._watchdog.over:
                known = min(known, time.monotonic())
                if time.monotonic() - known > STUCK:
                    self.quick_check()
            return False

        until(over)
        self.check()
        with self.enqueueing:
            self._release()

    def lead(self, stream: int) -> None:
        """Make later work on a stream wait for the calls so far."""
        with self.enqueueing, self.using(known=True):
            capture = self.device.capturing(stream)
            if not capture:
                self.device.wait(self._done, stream)
            elif capture == self._capture:
                self.device.wait(self._done_captured, stream)

    def follow(self, stream: int) -> None:
        """Make later calls wait for the work on a stream, which is not being captured."""
        with self.enqueueing, self.using(known=True):
            self.device.wait(self._done, stream)
            self.device.record(self._done, stream)

    def close(self) -> None:
        """Wait for this rank's calls and replays, and for peers that use its memory; then free it.

        If one step fails, the others are still done.
        """
        device = self.device
        with ExitStack() as last:  # runs the callbacks in reverse order
            for address, _ in chain(*self._scratch):
                last.callback(device.free, address)
            last.callback(device.free_stream, self._side)
            for event in (self._done, self._done_captured, self._joined, *self._captured):
                last.callback(device.free_event, event)
            while self._under_way:
                last.callback(self._under_way.pop().free)
            while self._in_graphs:
                last.callback(self._in_graphs.pop().free)
            if self._owns_team:
                last.callback(self.team.close)
            last.callback(self._watchdog.close)
            if self._health.broken or self._control.aborted():
                self.team.gpu.abort()
            last.callback(self._finish)

    def _finish(self) -> None:
        try:
            self.device.finish()
        except RuntimeError as error:  # from CUDA
            raise self.fail(error) from error


SPIN, POLL = 0.001, 0.0005  # s: how long a wait does not sleep, and how long it then sleeps at once
STUCK = 30.0  # s: after a known failure, how long a launch may take to end, which may never begin


def until(done: Callable[[], bool], timeout: float = math.inf) -> None:
    """Wait for a call. Raises CollectiveTimeout after `timeout` seconds."""
    begun = time.monotonic()
    while not done():
        waited = time.monotonic() - begun
        if waited > timeout:
            raise CollectiveTimeout(f"the collective is not done after {timeout} s")
        if waited > SPIN:
            time.sleep(POLL)


class GpuContext:
    """One call on a GPU, with the methods of `HostCalls` that collectives use.

    The call's copies and launches go to `stream`, behind the work on the stream `caller`.
    """

    def __init__(self, gpu: GpuLauncher, caller: int, stream: int) -> None:
        self.rank, self.size = gpu.rank, gpu.size
        self.gpu, self.caller, self.stream = gpu, caller, stream
        self.planner, self.trace = gpu.planner, gpu.trace
        self.begun = False  # whether anything may have been enqueued
        self.launches = 0
        self.repeats = True  # whether the same arguments mean the same call
        self.copies: tuple[list[Copied], list[Copied]] = [], []  # before the launch, and behind it
        self.kept: list[object] = []  # the call's tensors, and contiguous copies of them
        self.layers: int | None = None  # the number of layers of a gradient queue
        self.made: tuple[LaunchKey, CallCounters | None] | None = None
        self.events: list[int] = []  # of a queue: the start of its counting, then its checks
        self._later: list[Callable[[], None]] = []

    def sharing_errors(self) -> AbstractContextManager[None]:
        return nullcontext()  # GPU calls do not synchronise the ranks, so no rank can be told

    def buffer(self, x: Any, written: bool = True) -> tuple[Buffer, Callable[[], None]]:
        buffer, done = as_buffer(x, written, self.gpu.index)
        self.kept += [x, buffer.owner]
        return buffer, done if done is nothing else lambda: self._later.append(done)

    def stage(self, request: Request, given: Buffer, result: Buffer | None) -> None:
        """Make a call from an input to a result; without one, this rank gets none."""
        nbytes = request.buffer.nbytes
        staged = staging(request.kind, self.size, self.rank, nbytes, root=request.root)
        message = result if result and staged.result == staged.nbytes else None
        message = message or self.scratch(request, staged.nbytes)
        request, at = replace(request, buffer=message), message.address
        if not COLLECTIVES[request.kind].combines:  # which write the rank's own block
            self.copy(at + staged.keep_to, given.address + staged.keep_from, staged.kept)
        if staged.given == nbytes:
            self.make(replace(request, source=given))
        else:
            self.copy(at + staged.put, given.address, staged.given)
            self.make(request)
        if result:
            self.copy(result.address, at + staged.get, staged.result)

    def scratch(self, request: Request, nbytes: int) -> Buffer:
        like = request.buffer
        return Buffer(self.gpu.scratch(nbytes, request), like.nbytes, like.dtype, like.itemsize)

    def gather_parts(self, mine: Buffer, whole: Buffer, sizes: Sequence[int]) -> None:
        """Gather parts of these sizes in bytes in `whole`, each by a broadcast."""
        self.repeats, at = False, whole.address
        for root, nbytes in enumerate(sizes):
            part = replace(whole, address=at, nbytes=nbytes)
            at += nbytes
            if root == self.rank:
                self.copy(part.address, mine.address, nbytes)
            if nbytes:
                self.make(self.request("broadcast", part, "sum", root))

    def move_parts(
        self, request: Request, given: Buffer, result: Buffer, sizes: Sequence[Sequence[int]]
    ) -> None:
        """Make an all-to-all of parts of `sizes[src][dst]` bytes by the even one of a request,
        whose blocks hold the largest."""
        self.repeats, nbytes = False, request.buffer.nbytes
        block, area = nbytes // self.size, self.scratch(request, 2 * nbytes)
        start, came = given.address, replace(area, address=area.address + nbytes)
        for to, n in enumerate(sizes[self.rank]):
            self.copy(area.address + to * block, start, n)
            start += n
        self.stage(request, area, came)
        start = result.address
        for source, row in enumerate(sizes):
            self.copy(start, came.address + source * block, row[self.rank])
            start += row[self.rank]

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        self._begin()
        if nbytes and dst != src:
            self.copies[self.launches > 0].append((dst, src, nbytes))
            self.gpu.device.copy(dst, src, nbytes, self.stream)

    def request(
        self, kind: str, buffer: Buffer, op: str, root: Root = 0, algorithm: How = "auto",
        parts: int = 0,
    ) -> Request:  # fmt: skip
        request = self.gpu.planner.request(kind, buffer, op, root, algorithm, parts, "gpu")
        self.gpu.ensure_occupancy(buffer.dtype, op, self.caller)
        # others are not pushed: their senders do not wait until the receiver's buffer is free
        if COLLECTIVES[kind].symmetric:
            request = replace(request, symmetric=self.gpu.symmetric_address(buffer))
        return request

    def make(self, request: Request) -> None:
        self._begin()
        if request.layers is not None:
            self.layers, self.events = len(request.layers), [self.gpu.device.make_event()]
        self.made = self.gpu.make(request, self.stream, *self.events)
        self.launches += 1

    def again(self, ready: Ready, args: tuple[Any, ...]) -> Any:
        """Make a call like one before; returns its result."""
        self.kept += args
        self._begin()
        self.gpu.again(ready, self.stream)
        return None if ready.result is None else args[ready.result]

    def ready(self, result: int | None) -> Ready | None:
        """The call, to be repeated; None if it was not one launch of this rank alone, with copies
        around it."""
        if not self.repeats or self.launches != 1 or not self.made or self.layers is not None:
            return None
        return self.gpu.repeatable(*self.copies, result)

    def free(self) -> None:
        """Free a queue's events and counters. Nothing of the queue may still be running."""
        while self.events:
            self.gpu.device.free_event(self.events.pop())
        if self.made and self.made[1]:
            self.gpu.team.gpu.counters.give_back(self.made[1])
            self.made = None

    def _begin(self) -> None:
        """Order the call behind the caller's work, including contiguous copies of its tensors."""
        if not self.begun:
            self.gpu.join(self.stream, self.caller)
            self.begun = True

    def finish(self) -> bool:
        """Copy results back into non-contiguous tensors, on the caller's stream, once; says whether
        there are any."""
        later, self._later = self._later, []
        for done in later:
            done()
        return bool(later)


class GpuWork:
    """`Work` of a call on a side stream. Keeps the call's tensors alive until it has finished."""

    def __init__(
        self, gpu: GpuCalls, context: GpuContext, x: Any, result: Any, event: int, captured: int
    ) -> None:
        self._gpu, self._context, self._x, self._result = gpu, context, x, result
        self._event: int | None = event  # recorded behind the call
        self._captured = captured  # the id of the capture, or 0
        self._lock = threading.Lock()  # a call of another thread may free the event

    def wait(self, timeout: float | None = None) -> Any:
        """Make the current stream wait for the call and return the call's result.

        Work enqueued on the current stream after this call waits for the collective. The host
        blocks only if `timeout` (seconds) is given. Raises errors known so far, CollectiveTimeout,
        or CollectiveError on the other side of the begin or the end of a capture.
        """
        if timeout is not None:
            until(self.done, timeout)
        stream = stream_of(self._x)
        with self._gpu.using(known=timeout is None), self._lock:  # who waits learns of all
            if self._event is not None:
                if self._crosses(stream):
                    raise CollectiveError(
                        "a captured call can only be waited for within the same capture"
                        if self._captured else "wait for this call before the capture begins"
                    )  # fmt: skip
                self._gpu.device.wait(self._event, stream)
            if self._context.finish():  # for which waits of other streams shall wait too
                if self._event is None:
                    self._event = self._gpu.device.make_event()
                    self._gpu.keep(self)
                self._gpu.device.record(self._event, stream)
        return self._result

    def _crosses(self, stream: int) -> bool:
        """Whether a wait on this stream is on the other side of the begin or the end of a capture.
        A stream that is no part of the call's own capture becomes one by the wait."""
        device = self._gpu.device
        capture = device.capturing(stream)
        if not self._captured:
            return bool(capture)
        going_on = device.capturing(self._context.caller) == self._captured
        return not going_on or capture not in (0, self._captured)

    def done(self) -> bool:
        if self._captured:
            raise CollectiveError("a captured call is not done before the graph's replay is")
        with self._lock:
            return self._event is None or self._gpu.ready(self._event)

    def over(self) -> bool:
        """Whether nothing of the call is running; if so, its event is freed."""
        if self.done():
            self.free()
            return True
        return False

    def free(self) -> None:
        with self._lock:
            if self._event is not None:
                self._gpu.device.free_event(self._event)
                self._context.free()
                self._event = None


class GpuQueue(GpuWork):
    """`GradientQueue` of a call on a side stream."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._checked: dict[int, int] = {}  # for each stream, an event behind its last check

    def dequeue(self, layer: int) -> None:
        index = integer(layer, "layer", 0, (self._context.layers or 0) - 1)
        stream = stream_of(self._x)
        # a call of another thread may free what is over
        with self._gpu.using(), self._gpu.enqueueing:
            call, counted = self._context.made or (None, None)
            if self._event is None or call is None or counted is None:
                return
            if self._crosses(stream):
                raise CollectiveError(
                    "a captured queue can only be dequeued within the same capture"
                    if self._captured else "dequeue this queue outside of captures"
                )  # fmt: skip
            if stream not in self._checked:
                self._checked[stream] = self._gpu.device.make_event()
                self._context.events.append(self._checked[stream])
            begun = self._context.events[0]
            self._gpu.dequeue(call, counted, index, begun, self._checked[stream], stream)

    def over(self) -> bool:
        checks = self._checked.values() if self._event is not None else ()
        return all(self._gpu.ready(event) for event in checks) and super().over()
