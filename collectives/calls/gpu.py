"""One rank's calls on GPU tensors: agreed with all ranks the first time that they are made, then
launched with no host between the ranks, on the caller's stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from linkweave.collectives.calls.gpu_launcher import GpuLauncher
from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.stream_work import POLL, OnStream, StreamQueue, StreamWork
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.gpu.team import Team
from linkweave.collectives.settings import Settings
from linkweave.collectives.tensors import stream_of


class GpuCalls(GpuLauncher):
    """Calls of one rank on one GPU. Each call waits for the one before it, on whatever streams.

    Calls that a graph holds keep their order among themselves. The caller must order replays and
    other calls of the same communicator.
    """

    def __init__(
        self, index: int, calls: HostCalls, settings: Settings, team: Team | None = None,
        quiet: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(index, calls, settings, team, quiet)
        self._under_way: list[StreamWork] = []
        self._captured: list[int] = []  # events of asynchronous calls in graphs
        self._in_graphs: list[OnStream] = []  # and the calls

    # ---- one call ----------------------------------------------------------------------------
    def submit(self, async_op: bool, x: Any, body: Callable[..., Any], *args: Any) -> Any:
        """Carry out one of `bodies` on the current stream of `x`'s library.

        With `async_op` on a stream of our own, so that what the caller enqueues next runs beside
        it until `StreamWork.wait`.
        """
        with self._lock, self.device.here():
            self.check()
            try:
                return self._submit(async_op, x, body, args)
            except CollectiveError:
                raise
            except (RuntimeError, MemoryError) as error:  # CUDA's; CuPy's where there is no room
                raise self.fail(error) from error

    def _submit(self, async_op: bool, x: Any, body: Callable[..., Any], args: Any) -> Any:
        caller = stream_of(x)
        capture = self.device.capturing(caller)
        self._captures = bool(capture)
        if not capture:
            self._under_way = [w for w in self._under_way if not w.over()]
        stream = self._side if async_op else caller
        done = self._done_captured if capture else self._done
        if not capture or capture == self._capture:
            self.device.wait(done, stream)
        context = OnStream(self, caller, stream)
        try:
            result = body(context, *args)
        except BaseException:
            context.free()
            raise
        finally:  # what was enqueued before a failure too
            if context.begun:
                self.device.record(done, stream)
                self._capture = capture or self._capture
        if not async_op:
            context.finish()
            return result
        event = self.device.make_event()
        self.device.record(event, stream)
        kind = StreamWork if context.layers is None else StreamQueue
        work = kind(self, context, x, result, event, bool(capture))
        if capture:  # which keeps what it needs
            self._captured.append(event)
            self._in_graphs.append(context)
        else:
            self._under_way.append(work)
        return work

    # ---- the end -----------------------------------------------------------------------------
    def synchronise(self) -> None:
        """Wait until this rank's calls are over, but for replays of graphs; not to be called while
        one is captured. Raises what went wrong."""
        while not self.ready(self._done):
            time.sleep(POLL)
        self.check()

    def close(self) -> None:
        """Wait for this rank's calls, and until no rank needs its memory; then give it back.

        Replays of graphs are waited for as well. All is given back that can be, whatever fails.
        """
        device = self.device
        with ExitStack() as last:  # backwards
            for address, _ in self._scratch:
                last.callback(device.free, address)
            last.callback(device.free_stream, self._side)
            for event in (self._done, self._done_captured, self._met, *self._captured):
                last.callback(device.free_event, event)
            while self._under_way:
                last.callback(self._under_way.pop().free)
            while self._in_graphs:
                last.callback(self._in_graphs.pop().free)
            if self._owns_team:
                last.callback(self.team.close)
            last.callback(self._watch.close)
            if self._health.broken or self._control.aborted():
                self.team.gpu.abort()
            last.callback(device.finish)
