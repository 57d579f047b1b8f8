"""The device that one call runs on, as `operations` uses it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from linkweave.collectives.calls.call_planner import CallPlanner
from linkweave.collectives.calls.request import How, Request
from linkweave.collectives.calls.trace import Trace
from linkweave.collectives.planning.goals import Root
from linkweave.collectives.runtime.buffer import Buffer


class CallContext(Protocol):
    """Buffers, copies and launches of one rank: `HostCalls` on the CPU, `GpuContext` on a GPU."""

    rank: int
    size: int
    planner: CallPlanner
    trace: Trace

    def sharing_errors(self) -> AbstractContextManager[None]:
        """A context in which arguments are checked; the other ranks learn of an error inside."""

    def buffer(self, x: Any, written: bool = True) -> tuple[Buffer, Callable[[], None]]:
        """The memory of `x`, and a function to call once the collective has written to it."""

    def scratch(self, like: Buffer, nbytes: int) -> Buffer:
        """`nbytes` of scratch memory, as a buffer with the size and dtype of `like`."""

    def staged(self, whole: Buffer) -> Buffer:
        """The buffer in which to build the result of `whole`: itself, or scratch memory."""

    def copy(self, dst: int, src: int, nbytes: int) -> None: ...

    def request(
        self, kind: str, buffer: Buffer, op: str, root: Root = 0, algorithm: How = "auto",
        layout: int = 0,
    ) -> Request: ...  # fmt: skip

    def make(self, request: Request) -> None: ...
