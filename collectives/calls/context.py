"""What a collective needs of the memory that its tensors lie in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from linkweave.collectives.calls.choices import Choices
from linkweave.collectives.calls.request import How, Request
from linkweave.collectives.calls.trace import Trace
from linkweave.collectives.planning.goals import Root
from linkweave.collectives.runtime.buffer import Buffer


class CallContext(Protocol):
    """One rank's side of calls: `HostCalls` on CPU tensors, `OnStream` on a GPU's."""

    rank: int
    size: int
    choices: Choices
    trace: Trace

    def telling(self) -> AbstractContextManager[None]:
        """Around what may refuse its arguments."""

    def buffer(self, x: Any, written: bool = True) -> tuple[Buffer, Callable[[], None]]:
        """The memory of `x`, and what must be called once the collective has filled it."""

    def scratch(self, like: Buffer, nbytes: int) -> Buffer:
        """Memory of `nbytes` to work in, described as a message of the size of `like`."""

    def staged(self, whole: Buffer) -> Buffer:
        """Where to work on what must end in `whole`: there, or in scratch memory."""

    def copy(self, dst: int, src: int, nbytes: int) -> None: ...

    def request(
        self, kind: str, buffer: Buffer, op: str, root: Root = 0, algorithm: How = "auto",
        layout: int = 0,
    ) -> Request: ...  # fmt: skip

    def make(self, request: Request) -> None: ...
