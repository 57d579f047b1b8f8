"""Handles of the calls of a process group of torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from linkweave.collectives.calls.gpu import GpuWork
from linkweave.collectives.calls.work import HostWork, Work
from linkweave.collectives.runtime.uncompiled import uncompiled_methods


@cache
def stream_of_futures(device: Any) -> Any:
    """A stream of this process, on which nothing runs but the waits of futures."""
    cuda: Any = torch.cuda
    return cuda.Stream(device)


_NO_TIMEOUT = timedelta(0)


@uncompiled_methods
class GroupWork(dist.Work):
    """Handle of a collective.

    `work` is None if the call has returned. `result` holds the tensors that `result` and the future
    give. `finish` moves the result into them where the call could not: once, unless it raises.
    """

    def __init__(
        self, work: Work | None, result: list[Any], finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._work, self._result, self._finish = work, result, finish
        self._moved: Any = None  # a CUDA event behind that
        self._lock = threading.Lock() if finish else None
        if work is None:
            self._finished()

    def _finished(self) -> None:
        if self._lock is None:
            return
        with self._lock:  # also while another thread moves the result
            if self._finish is not None:
                self._finish()
                self._finish = None
                if self._work is not None and (gpu := self._gpu()):
                    self._moved = torch.cuda.current_stream(gpu).record_event()
            elif self._moved is not None:  # by the stream of another wait
                torch.cuda.current_stream(self._gpu()).wait_event(self._moved)

    def _gpu(self) -> Any:
        """The GPU of the result; None if it has none."""
        return next((x.device for x in self._result if x.is_cuda), None)

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
        if self._lock:
            self._raised()
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

    def _waits_only(self, device: Any) -> bool:
        """Whether the end of the call is a wait of a stream that is not being captured."""
        if not isinstance(self._work, GpuWork) or self._finish:
            return False
        if not all(x.is_contiguous() for x in self._result):
            return False
        with torch.cuda.device(device):
            return not torch.cuda.is_current_stream_capturing()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of tensors. On a GPU it is complete at once, as torch's own are: a
        stream that uses its value waits for the collective, but the current stream, on which
        backward may go on, does not, unless a result has to be copied to where it belongs."""
        devices = list({x.device for x in self._result if x.is_cuda})
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
        elif devices and self._waits_only(devices[0]):
            with torch.cuda.stream(stream_of_futures(devices[0])):
                complete(None)
        else:
            complete(None)
        return future


class Together:
    """A `Work` that is done when all of several are."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, timeout: float | None = None) -> None:
        for work in self._works:
            work.wait(timedelta(seconds=timeout or 0))

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)


def together(works: Sequence[Any], result: list[Any]) -> GroupWork:
    return GroupWork(Together(works), result)


def ended() -> GroupWork:
    """The work of a synchronous call of NCCL, which returns none: it is on the current stream."""
    return GroupWork(None, [])
