"""`torch.distributed.Work` over the works of a communicator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from linkweave.collectives.calls.work import HostWork, Work

_NO_TIMEOUT = timedelta(0)


class GroupWork(dist.Work):
    """Handle of a collective.

    `work` is None if the call has returned. `result` holds the tensors that `result` and the future
    give. `finish` moves the result into them, once, where the call could not.
    """

    def __init__(
        self, work: Work | None, result: list[Any], finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._work, self._result, self._finish = work, result, finish
        self._lock = threading.Lock()
        if work is None:
            self._finished()

    def _finished(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish:
                finish()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the result, `timeout` at most. Raises what the collective raised."""
        if self._work is not None:
            self._work.wait(timeout.total_seconds() if timeout > _NO_TIMEOUT else None)
            self._finished()
        return True

    def is_completed(self) -> bool:
        """Whether the result is where it belongs."""
        if self._work is None:
            return True
        if not self._work.done():
            return False
        if self._finish and self._raised() is None:
            self._finished()
        return True

    def exception(self) -> BaseException | None:
        """What the collective raised; None also while it runs."""
        return self._raised() if self.is_completed() else None

    def _raised(self) -> BaseException | None:
        """What the collective raised, which is over."""
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Any]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of tensors. On a GPU it is complete at once, as torch's own are: a
        stream that uses its value waits for the collective."""
        devices = [x.device for x in self._result if x.is_cuda]
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices or None)

        def complete(_: Future[Any] | None) -> None:
            try:
                self.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._result)

        if isinstance(self._work, HostWork):
            self._work.add_done_callback(complete)
        else:
            complete(None)
        return future
