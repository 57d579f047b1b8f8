"""What ranks tell each other of an embedding whose columns are divided among them.

Source: Li et al., "EmbRace: Accelerating Sparse Communication for Distributed Training of Deep
Neural Networks", section 4.1.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakMethod

import torch

from linkweave.collectives.errors import CollectiveAborted, CollectiveError
from linkweave.collectives.training.hooks import nothing
from linkweave.collectives.training.ranges import profiled
from linkweave.collectives.training.transport import Counts, Transport
from linkweave.kernels import embedding
from linkweave.kernels.api import coalesce

NONE = -1
"""The number of tokens of a rank that does not know them."""


def columns_of(width: int, size: int) -> list[int]:
    """How many columns each rank has: as equal as can be, the first ranks one more."""
    return [width // size + (rank < width % size) for rank in range(size)]


class RowExchange:
    """The exchanges of one embedding, on the first lane. Each blocks, and all ranks make the same.

    table: the parameter, [rows, columns of this rank], which is read.
    widths: the columns of each rank.
    """

    def __init__(self, transport: Transport, table: torch.Tensor, widths: Sequence[int]) -> None:
        self._transport = transport
        self._table, self._widths = table, list(widths)
        self.rank, self._size = transport.rank, transport.size
        self._index = torch.int32 if len(table) <= 1 << 31 else torch.int64
        self.nbytes = 0
        """Bytes that this rank has sent to other ranks."""

    def tokens(self, own: torch.Tensor | None) -> list[torch.Tensor] | None:
        """The tokens of all ranks, by rank; None if a rank does not know its own.

        own: int64, ascending and distinct.
        """
        count = NONE if own is None else len(own)
        counts = self._to_all(torch.tensor([count]), [1] * self._size).tolist()
        if own is None or NONE in counts:
            return None
        found = self._to_all(own.to(self._index), counts)
        return [part.long() for part in torch.split(found, counts)]

    def fetch(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole rows of this rank's tokens, [own tokens, width]; `tokens` are all ranks'."""
        mine, own = self._widths[self.rank], len(tokens[self.rank])
        wanted = torch.cat(list(tokens))
        sent = torch.empty(len(wanted), mine, dtype=self._table.dtype)
        if sent.numel():
            embedding.lookup(self._table.detach(), wanted, sent)
        counts = [[len(part) * width for part in tokens] for width in self._widths]
        parts = self._alltoall(sent.flatten(), counts)
        rows = parts.new_empty(own, sum(self._widths))
        if rows.numel():
            embedding.join_columns(parts, self._widths, rows)
        return rows

    def add(
        self, tokens: Sequence[torch.Tensor], gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The average gradient of the rows that any rank has, in this rank's columns.

        tokens: the rows of each rank, ascending and distinct.
        gradient: those of this rank, [own rows, width].

        Returns (rows, ascending and distinct; their gradients). They are added in rank order and
        divided by the number of ranks; in float64 if they are float64, else in float32.
        """
        mine = self._widths[self.rank]
        if not any(map(len, tokens)):  # which all ranks know
            return torch.empty(0, dtype=torch.int64), gradient.new_empty(0, mine)
        parts = torch.empty(gradient.numel(), dtype=gradient.dtype)
        if gradient.numel():
            embedding.split_columns(gradient, self._widths, parts)
        got = self._alltoall(parts, [[len(part) * w for w in self._widths] for part in tokens])
        wanted = torch.cat(list(tokens))
        rows, sums = coalesce(wanted, got.view(len(wanted), mine), len(self._table))
        return rows, sums.div_(self._size)

    def whole(self, columns: torch.Tensor) -> torch.Tensor:
        """All columns of what each rank has [rows, its columns] of."""
        counts = [len(columns) * width for width in self._widths]
        parts = self._to_all(columns.detach().contiguous().flatten(), counts)
        blocks = zip(torch.split(parts, counts), self._widths, strict=True)
        return torch.cat([block.view(len(columns), width) for block, width in blocks], 1)

    def _to_all(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The flat tensors of all ranks, of so many elements, in rank order."""
        return self._alltoall(x.repeat(self._size), [[n] * self._size for n in counts])

    def _alltoall(self, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        sends = counts[self.rank]
        self.nbytes += (sum(sends) - sends[self.rank]) * x.element_size()
        return self._transport.alltoall(0, x, counts)


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
