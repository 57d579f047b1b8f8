"""The order in which the communicators of a process use its GPUs.

The thread blocks of a call must all be resident at once, on every GPU that takes part. Without an
order, two communicators on two GPUs could fill one GPU each and wait for each other.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from linkweave.collectives.runtime.gpu.device import Device


class Launch(NamedTuple):
    """A launch of `blocks` thread blocks on `stream`; the GPU holds `resident` of its kernel.

    `event` is recorded behind it. Each communicator has one event for each GPU.
    """

    device: Device
    stream: int
    event: int
    blocks: int
    resident: int


class LaunchOrder:
    """Orders the launches of all communicators of a process.

    One call at a time enqueues its launches, on all of its GPUs; so calls have the same order on
    every GPU of the process. On each GPU a launch waits for earlier ones of other communicators,
    unless it fits beside all that may be running: since kernels differ in size, the thread blocks
    of all together may not exceed the least number that the GPU holds of one kernel.

    Nothing orders calls across processes: all processes must make the calls of communicators that
    share GPUs in the same order. Otherwise calls that do not fit beside each other, or whose
    streams CUDA maps to one queue, raise CollectiveTimeout. The caller orders launches that are
    captured into CUDA graphs, and captures while no other thread calls: events are queried here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Device, dict[int, Launch]] = defaultdict(dict)  # by event

    @contextmanager
    def enqueueing(self, launches: Sequence[Launch]) -> Iterator[None]:
        """Enqueue these launches, one for each GPU of a call, within the `with` block."""
        with self._lock:
            for launch in launches:
                self._wait_for_others(launch)
            try:
                yield
            finally:  # some may have been enqueued before one failed
                for launch in launches:
                    self._record(launch)

    def _record(self, launch: Launch) -> None:
        launch.device.record(launch.event, launch.stream)
        running = self._running[launch.device]
        before = running.get(launch.event, launch)  # may still be running
        most = max(before.blocks, launch.blocks)
        least = min(before.resident, launch.resident)
        running[launch.event] = launch._replace(blocks=most, resident=least)

    def _wait_for_others(self, launch: Launch) -> None:
        if self._fits(launch):
            return
        running = self._running[launch.device]
        for event in [event for event in running if launch.device.ready(event)]:
            del running[event]
        if not self._fits(launch):
            for event in running.keys() - {launch.event}:
                launch.device.wait(event, launch.stream)

    def _fits(self, launch: Launch) -> bool:
        """Whether it fits beside the launches of other communicators that may be running."""
        running = self._running[launch.device]
        others = [other for event, other in running.items() if event != launch.event]
        if not others:
            return True
        blocks = launch.blocks + sum(other.blocks for other in others)
        return blocks <= min(launch.resident, *(other.resident for other in others))

    def forget(self, device: Device, event: int) -> None:
        """Called before a communicator's event is freed, when its launches have finished."""
        with self._lock:
            self._running[device].pop(event, None)


LAUNCH_ORDER = LaunchOrder()
"""The order of this process's launches."""
