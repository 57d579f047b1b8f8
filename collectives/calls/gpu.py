"""One rank's calls on GPU tensors.

The first call of each kind synchronises the ranks on the host. Later calls are only enqueued on
the caller's stream.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from linkweave.collectives.calls.gpu_launcher import GpuLauncher, Ready
from linkweave.collectives.calls.gpu_work import GpuContext, GpuQueue, GpuWork, until
from linkweave.collectives.tensors import fast_gpu_buffer, stream_of


class GpuCalls(GpuLauncher):
    """Calls of one rank on one GPU.

    Each call waits for the one before it, on any stream. Calls captured into a graph keep their
    order among themselves; the caller must order replays and other calls of the communicator.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._under_way: list[GpuWork] = []
        self._captured: list[int] = []  # events of captured asynchronous calls
        self._in_graphs: list[GpuContext] = []  # and these calls

    def submit(self, async_op: bool, x: Any, body: Callable[..., Any], *args: Any) -> Any:
        """Run `body(context, *args)` on the current stream of `x`'s library.

        With `async_op` it runs on the communicator's side stream instead and returns a `GpuWork`.
        """
        with self._lock:
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
            if each is not None and type(each) not in (str, int):
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
        if not capture and self._under_way:
            self._under_way = [w for w in self._under_way if not w.over()]
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
        work = kind(self, context, x, result, event, bool(capture))
        if capture:  # the graph needs them until the end
            self._captured.append(event)
            self._in_graphs.append(context)
        else:
            self._under_way.append(work)
        return work

    def synchronise(self) -> None:
        """Block until this rank's calls have finished, and raise their errors.

        Does not wait for replays of graphs. Must not be called during a capture.
        """
        until(lambda: self.ready(self._done))
        self.check()

    def close(self) -> None:
        """Wait for this rank's calls and replays, and for peers that use its memory; then free it.

        If one step fails, the others are still done.
        """
        device = self.device
        with ExitStack() as last:  # runs the callbacks in reverse order
            for address, _ in self._scratch:
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
