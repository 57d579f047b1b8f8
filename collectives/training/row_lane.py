"""The thread that carries out the exchanges of an embedding, one after another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakMethod

import torch

from linkweave.collectives.errors import CollectiveAborted, CollectiveError
from linkweave.collectives.training.hooks import nothing
from linkweave.collectives.training.ranges import profiled
from linkweave.collectives.training.row_exchange import RowExchange
from linkweave.collectives.training.transport import Transport

KEPT = 64
"""How many ops are remembered."""


@dataclass(frozen=True)
class RowOp:
    """What a lane carried out: bytes sent to other ranks, and `time.perf_counter` before and
    after."""

    name: str
    nbytes: int
    start: float
    end: float


class RowLane:
    """Carries out ops in the order in which they are submitted, the same on all ranks.

    If one fails, so do all later ones, here and on the other ranks, with its error.
    """

    def __init__(self, name: str, transport: Transport, exchange: RowExchange) -> None:
        self.name, self._transport, self._exchange = name, transport, exchange
        self._thread = ThreadPoolExecutor(1, f"linkweave-rows-{name}")
        self._going: set[Future[Any]] = set()
        self._error: CollectiveError | None = None
        self.on_abort: Callable[[CollectiveError], None] = nothing
        """Called with the error that ends this lane."""
        self.ops: deque[RowOp] = deque(maxlen=KEPT)
        transport.before_close(WeakMethod(self._drain))

    def submit(self, name: str, op: Callable[[], Any]) -> Future[Any]:
        """Carry out an op after those before it."""
        going: Future[Any] = self._thread.submit(self._carry_out, name, op)
        self._going = {one for one in self._going if not one.done()} | {going}
        return going

    def _carry_out(self, name: str, op: Callable[[], Any]) -> Any:
        try:
            self._raise()
            start, before = time.perf_counter(), self._exchange.nbytes
            with profiled(f"{self.name}: {name}"), torch.no_grad():
                result = op()
            sent = self._exchange.nbytes - before
            self.ops.append(RowOp(name, sent, start, time.perf_counter()))
            return result
        except BaseException as error:
            kind = type(error) if isinstance(error, CollectiveError) else CollectiveAborted
            words = f"rank {self._transport.rank}, {name} of {self.name}: {error}"
            self.abort(kind(words))
            raise

    def wait(self, op: Future[Any]) -> Any:
        """The result of an op. Raises CollectiveError."""
        # no deadline of its own: an exchange that waits for other ranks has one, and then fails
        wait([op])
        self._raise()
        return op.result()

    def wait_all(self) -> None:
        """Wait until all ops are done. Raises CollectiveError."""
        wait(self._going)
        self._raise()

    def abort(self, error: CollectiveError) -> None:
        """End this lane, here and on the other ranks, because of this error."""
        if self._error is None:
            self._error = error
            self._transport.abort()
            self.on_abort(error)

    def fail(self, error: CollectiveError) -> NoReturn:
        """Abort, and raise the error."""
        self.abort(error)
        raise error

    def _raise(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error

    def _drain(self) -> None:
        """Before this rank leaves: send what the others wait for."""
        wait(self._going)

    def close(self) -> None:
        """End the thread, once it has carried out all ops."""
        self._thread.shutdown()
