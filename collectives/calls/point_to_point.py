"""Send and receive. Each ordered pair of ranks has a channel, a communicator of two ranks."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from typing import Any

from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.work import Work, Worker
from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.planning.collective import SENDRECV
from linkweave.collectives.runtime.cpu.mapping import SEGMENT
from linkweave.collectives.runtime.diagnose import DIED, LEFT, REASONS
from linkweave.collectives.runtime.tensors import fast_buffer, gpu_of
from linkweave.collectives.settings import Settings
from linkweave.topology import load
from linkweave.topology.checks import integer

_POLL, _SLOW = 0.0002, 0.02  # s: the first and the longest pause while waiting for a sender
_FORWARD = ((0, 1),)


class PointToPoint:
    """The channels of one rank. A channel is opened by its first call."""

    def __init__(self, calls: HostCalls, settings: Settings) -> None:
        self._calls, self._settings = calls, replace(settings, topology="auto", order="fastest")
        self._open: dict[tuple[int, int], _Channel] = {}
        self._lock = threading.Lock()

    def submit(self, x: Any, src: int, dst: int, async_op: bool) -> Work | None:
        """Send `x` from rank `src` to `dst`; this rank is one of them. Raises CollectiveError."""
        rank, size = self._calls.rank, self._calls.size
        src, dst = (integer(r, "a rank", 0, size - 1) for r in (src, dst))
        if src == dst:
            raise CollectiveError(f"rank {rank} cannot send to itself")
        if gpu_of(x) is not None:
            raise CollectiveError("send and recv take CPU tensors only")
        self._calls.health.check()
        with self._lock:
            if (src, dst) not in self._open:
                self._open[src, dst] = _Channel(self._calls, src, dst)
            channel = self._open[src, dst]
        return channel.submit(self._settings, x, dst == rank, async_op)

    def close(self) -> None:
        """Close all channels, including those that a sender has opened and this rank never used."""
        arena = self._calls.executor.arena
        for src in range(arena.size):
            start = int(arena.channel(src, arena.rank)[0])
            channel = self._open.get((src, arena.rank))
            if start and (channel is None or not channel.opened):
                arena.part([src, arena.rank], start).close()
        while self._open:
            self._open.popitem()[1].close()


class _Channel:
    """The calls of a sender and a receiver. Asynchronous ones, and those that follow them, run on
    the channel's own thread."""

    def __init__(self, calls: HostCalls, src: int, dst: int) -> None:
        self._whole, self._src, self._dst = calls, src, dst
        self._calls: HostCalls | None = None
        self._worker, self._lock = Worker(), threading.Lock()

    @property
    def opened(self) -> bool:
        return self._calls is not None

    def submit(self, settings: Settings, x: Any, written: bool, async_op: bool) -> Work | None:
        made: Work | None = self._worker.submit(async_op, self._move, settings, x, written)
        return made

    def _move(self, settings: Settings, x: Any, written: bool) -> None:
        with self._lock:
            if self._calls is None:
                self._calls = self._opened(settings)
        calls, given = self._calls, fast_buffer(x)
        if given and calls.repeat(SENDRECV, *given, "sum", _FORWARD):
            return
        with calls.sharing_errors():
            buffer, done = calls.buffer(x, written)
            request = calls.request(SENDRECV, buffer, "sum", _FORWARD)
        try:
            calls.make(request)
        except CollectiveError as error:
            error.args = (self._renamed(str(error)),)
            raise
        done()

    def _renamed(self, words: str) -> str:
        """A message about a call of the channel in words of `send` and `recv`."""
        words = re.sub(
            r"sendrecv\((.*?), pairs of checksum \w+\)( with settings of checksum \w+)?",
            r"\1",
            words,
        )
        words = words.replace("ranks [0]:", f"rank {self._src} sends")
        return words.replace("ranks [1]:", f"rank {self._dst} receives")

    def _opened(self, settings: Settings) -> HostCalls:
        """The channel's calls. The sender allocates memory; the receiver waits for its address."""
        arena, control = self._whole.executor.arena, self._whole.control
        word, begun = arena.channel(self._src, self._dst), time.monotonic()
        if arena.rank == self._src:
            word[0] = arena.mapping.take(SEGMENT)[0]
        name = f"{control.name(self._dst)} waits for {control.name(self._src)} to send"
        where = {"rank": self._dst, "peer": self._src}
        pause = _POLL
        while not word[0]:  # a failure here ends only the channel
            if control.aborted():
                control.raise_aborted(lambda: (name, where))
            dead = pause == _SLOW and self._src in arena.dead()
            # asked last: a process ends soon after it has closed
            gone = REASONS[LEFT] if arena.closed(self._src) else REASONS[DIED] if dead else ""
            if gone and not word[0]:
                raise CollectiveAborted(f"{control.name(self._src)} {gone}; {name}", **where)
            if time.monotonic() - begun > control.timeout:
                raise CollectiveTimeout(f"{name} for {control.timeout:g} s", **where)
            time.sleep(pause)
            pause = min(_SLOW, 2 * pause)
        part = arena.part([self._src, self._dst], int(word[0]))
        part.expect()
        return HostCalls(part, load("cpu-2"), replace(settings, timeout=control.timeout))

    def close(self) -> None:
        self._worker.close(self._whole.rank)
        if self._calls:
            self._calls.close()
