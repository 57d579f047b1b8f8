"""The thread that carries out a CPU rank's asynchronous calls, one behind the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from linkweave.collectives.calls.work import HostWork

log = logging.getLogger("linkweave")


class Worker:
    """One communicator's; the thread is started with its first call."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None
        self._works: list[HostWork] = []  # whose errors nobody may have seen

    @property
    def idle(self) -> bool:
        return self._last is None or self._last.done()

    def settle(self) -> None:
        """Wait until all calls are over, whatever became of them."""
        if self._last is not None:
            self._last.exception()

    def enqueue(self, body: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="linkweave")
        self._last = future = self._thread.submit(body, *args)
        return future

    def keep(self, work: HostWork) -> HostWork:
        """One that its user holds, and should wait for."""
        self._works = [w for w in self._works if w.unheard or not w.done()] + [work]
        return work

    def close(self, rank: int) -> None:
        """Finish what is under way; log the errors that nobody has waited for."""
        if self._thread:
            self._thread.shutdown(wait=True)
        for work in self._works:
            if work.unheard:
                log.error("rank %d: nobody waited for an asynchronous call, which raised %s",
                          rank, work.unheard)  # fmt: skip
