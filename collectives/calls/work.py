"""A collective under way."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from linkweave.collectives.errors import CollectiveTimeout


class Work(Protocol):
    """What asynchronous calls return."""

    def wait(self, timeout: float | None = None) -> Any:
        """Return what the collective returns, once the tensor holds the result.

        On a GPU the current stream waits, the host only where a `timeout` (s) is given. Raises what
        the collective raised, or CollectiveTimeout after `timeout` seconds.
        """

    def done(self) -> bool:
        """Whether it is over."""


class HostWork:
    """`Work` of CPU ranks."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future
        self._heard = False

    def wait(self, timeout: float | None = None) -> Any:
        try:
            self._future.exception(timeout)
        except TimeoutError:
            raise CollectiveTimeout(f"the collective is not done after {timeout} s") from None
        self._heard = True
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()

    @property
    def unheard(self) -> BaseException | None:
        """What it raised, if nobody has waited for it."""
        if self._heard or not self._future.done():
            return None
        return self._future.exception()
