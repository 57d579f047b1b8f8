"""The lock around a call on the CPU, which also reports this rank's errors to the others."""

from __future__ import annotations

import threading
from types import TracebackType

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.cpu.control import HostControl
from linkweave.collectives.runtime.diagnose import RAISED


class CallGuard:
    """Lets one call run at a time. An error inside aborts all ranks, unless it is `Refused`."""

    def __init__(self, control: HostControl) -> None:
        self._control, self._health, self._lock = control, control.health, threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        if not self._health.usable:
            self._lock.release()
            self._health.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            if error is None:
                return
            if isinstance(error, Refused):
                raise error.kind(error.text) from None
            if not self._control.aborted():  # the others must not wait for this rank
                self._control.give_up(RAISED)
            self._health.fail(error)
        finally:
            self._lock.release()


class Refused(Exception):
    """All ranks refuse a call before any data has moved; the communicator stays usable."""

    def __init__(self, kind: type[CollectiveError], text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text
