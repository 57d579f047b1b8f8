"""A collective under way."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from collectives.errors import CollectiveTimeout


class Work:
    """`wait` returns when the tensor holds the result."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> Any:
        """What the collective returns. Raises what it raised, or CollectiveTimeout after `timeout`
        seconds."""
        try:
            return self._future.result(timeout)
        except TimeoutError:
            raise CollectiveTimeout(f"the collective is not done after {timeout} s") from None

    def done(self) -> bool:
        return self._future.done()
