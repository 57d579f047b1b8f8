"""What ranks tell each other of an embedding whose columns are divided among them.

Source: Li et al., "EmbRace: Accelerating Sparse Communication for Distributed Training of Deep
Neural Networks", section 4.1.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast
from weakref import WeakMethod

import torch

from linkweave.collectives.errors import CollectiveAborted, CollectiveError
from linkweave.collectives.training.hooks import check_process, nothing
from linkweave.collectives.training.ranges import profiled
from linkweave.collectives.training.transport import Counts, Transport
from linkweave.kernels import embedding

NONE, OUTSIDE = -1, -2
"""The number of tokens of a rank that does not know them, or has one out of range."""

Lengths = Generator[torch.Tensor, list[int], Any]
"""What an op does that needs lengths which are on its device: it yields them, and goes on with
them on the host."""


def columns_of(width: int, size: int) -> list[int]:
    """How many columns each rank has: as equal as can be, the first ranks one more."""
    return [width // size + (rank < width % size) for rank in range(size)]


class RowExchange:
    """The exchanges of one embedding, on the first lane. All ranks make the same; on CPUs each
    blocks, on GPUs it is enqueued.

    table: the parameter, [rows, columns of this rank], which is read.
    widths: the columns of each rank.
    """

    def __init__(self, transport: Transport, table: torch.Tensor, widths: Sequence[int]) -> None:
        self._transport = transport
        self.table, self._widths = table, list(widths)
        self.rank, self._size = transport.rank, transport.size
        self._index = torch.int32 if len(table) <= 1 << 31 else torch.int64
        self.nbytes = 0
        """Bytes that this rank has sent to other ranks."""

    @property
    def device(self) -> torch.device:
        return self.table.device

    def tokens(self, own: torch.Tensor | None, count: torch.Tensor) -> Lengths:
        """Returns the tokens of all ranks, by rank; None if a rank does not know its own.

        own: int64, ascending and distinct, `count` [1] of them. Raises CollectiveError on all ranks
        if a count is OUTSIDE.
        """
        counts = yield self._to_all(count, [1] * self._size)
        if OUTSIDE in counts:
            raise CollectiveError(
                f"ids of rank {counts.index(OUTSIDE)} must be from 0 to {len(self.table) - 1}"
            )
        if own is None or NONE in counts:
            return None
        found = self._to_all(own[: counts[self.rank]].to(self._index), counts)
        return [part.long() for part in torch.split(found, counts)]

    def fetch(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole rows of this rank's tokens, [own tokens, width]; `tokens` are all ranks'."""
        mine, own = self._widths[self.rank], len(tokens[self.rank])
        wanted = torch.cat(list(tokens))
        sent = self.table.detach().new_empty(len(wanted), mine)
        if sent.numel():
            embedding.lookup(self.table.detach(), wanted, sent, check=False)
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

        Returns (rows, ascending and distinct; their gradients), with more of no row on a GPU. They
        are added in rank order and divided by the number of ranks; in float64 if they are float64,
        else in float32.
        """
        mine, lengths = self._widths[self.rank], [*map(len, tokens)]
        if not any(lengths):  # which all ranks know
            return tokens[0], gradient.new_empty(0, mine)
        parts = gradient.new_empty(gradient.numel())
        if gradient.numel():
            embedding.split_columns(gradient, self._widths, parts)
        got = self._alltoall(parts, [[n * w for w in self._widths] for n in lengths])
        wanted = torch.cat(list(tokens))
        got = got.view(len(wanted), mine)
        rows, sums = embedding.sum_rows(wanted, lengths, got, len(self.table))
        # by a tensor: on GPUs torch multiplies by the inverse of a number, which rounds otherwise
        return rows, sums.div_(sums.new_full((1,), self._size))

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
    after; on a GPU, before and after it was enqueued."""

    name: str
    nbytes: int
    start: float
    end: float


class RowLane:
    """Carries out ops in the order in which they are submitted, the same on all ranks.

    On CPUs that is the part of a thread. On a GPU an op is enqueued on a stream of its own when it
    is submitted, up to where it needs a length; these are copied to the host meanwhile, and the
    next op, or whoever waits, goes on with them. So all ranks enqueue all their collectives in one
    order, and the host seldom waits.

    If an op fails, so do all later ones, here and on the other ranks, with its error.
    """

    def __init__(self, name: str, transport: Transport, exchange: RowExchange) -> None:
        self.name, self._transport, self._exchange = name, transport, exchange
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, f"linkweave-rows-{name}")
        self._stream: Any = None
        self._before: Any = None  # where the current stream was when the last op was submitted
        self._begun: _Begun | None = None  # the op on a GPU that needs lengths
        self._going: set[Future[Any]] = set()
        self._error: CollectiveError | None = None
        self.on_abort: Callable[[CollectiveError], None] = nothing
        """Called with the error that ends this lane."""
        self.ops: deque[RowOp] = deque(maxlen=KEPT)
        transport.before_close(WeakMethod(self._drain))

    def submit(
        self, name: str, op: Callable[[], Any], uses: Sequence[torch.Tensor] = (),
        follows: bool = True,
    ) -> Future[Any]:  # fmt: skip
        """Carry out an op, which may be one of `Lengths`, after those before it.

        It `uses` tensors of the current stream, which may be freed before it has run; the table is
        one of them anyway. Unless it `follows` that stream, it calls `follow` before it reads them.
        """
        going: Future[Any]
        if self._exchange.device.type == "cpu":
            going = self._thread.submit(self._carry_out, name, op)
            self._going = {one for one in self._going if not one.done()} | {going}
            return going
        self._complete()
        if self._stream is None:
            self._stream = cast(Any, torch.cuda.Stream)(self._exchange.device, priority=-1)
        self._before = torch.cuda.current_stream(self._exchange.device).record_event()
        if follows:
            self.follow()
        for x in (self._exchange.table, *uses):
            x.record_stream(self._stream)
        going = Enqueued()
        self._begun = _Begun(self._steps(name, op), going)
        self._go_on(None)
        return going

    def follow(self) -> None:
        """Let the rest of an op come after what the current stream had when it was submitted."""
        if self._before is not None:
            self._stream.wait_event(self._before)

    def _carry_out(self, name: str, op: Callable[[], Any]) -> Any:
        """What the thread does for an op."""
        steps, lengths = self._steps(name, op), None
        while True:
            try:
                lengths = steps.send(lengths).tolist()
            except StopIteration as end:
                return end.value

    def _steps(self, name: str, op: Callable[[], Any]) -> Generator[torch.Tensor, Any, Any]:
        try:
            self._raise()
            start, before = time.perf_counter(), self._exchange.nbytes
            with profiled(f"{self.name}: {name}"), torch.no_grad():
                result = op()
            if isinstance(result, Generator):
                result = yield from _within(f"{self.name}: {name}", result)
            sent = self._exchange.nbytes - before
            self.ops.append(RowOp(name, sent, start, time.perf_counter()))
            return result
        except GeneratorExit:  # nobody needs the rest
            raise
        except BaseException as error:
            kind = type(error) if isinstance(error, CollectiveError) else CollectiveAborted
            words = f"rank {self._transport.rank}, {name} of {self.name}: {error}"
            self.abort(kind(words))
            raise

    def _go_on(self, lengths: list[int] | None) -> None:
        """Enqueue the op that has begun, up to where it needs more lengths."""
        begun, self._begun = self._begun, None
        assert begun is not None
        with torch.cuda.stream(self._stream), torch.inference_mode(False):
            try:
                needed = begun.steps.send(lengths)
                try:
                    begun.lengths, begun.copied = _copied(needed), self._stream.record_event()
                except BaseException as error:
                    begun.steps.throw(error)
                self._begun = begun
            except StopIteration as end:
                begun.going.event = self._stream.record_event()
                begun.going.set_result(end.value)
            except BaseException as error:
                _end(begun.going, error)

    def _complete(self) -> None:
        """Enqueue all of the op that has begun, or end it if the lane has failed meanwhile."""
        while (begun := self._begun) is not None:
            try:
                self._raise()
                begun.copied.synchronize()
                lengths = begun.lengths.tolist()
            except BaseException as error:
                self._begun = None
                try:
                    begun.steps.throw(error)
                except BaseException as told:
                    _end(begun.going, told)
                return
            self._go_on(lengths)

    def wait(self, op: Future[Any]) -> Any:
        """The result of an op; on a GPU the current stream waits for it. Raises CollectiveError."""
        # no deadline of its own: an exchange that waits for other ranks has one, and then fails
        if not op.done():
            check_process(self._process, self._transport.rank)
            self._complete()
        wait([op])
        self._raise()
        if isinstance(op, Enqueued):
            torch.cuda.current_stream(self._exchange.device).wait_event(op.event)
        return op.result()

    def lend(self, *made: torch.Tensor) -> None:
        """Let the current stream use tensors that ops have made, which are freed on the lane's."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._exchange.device)
            for x in made:
                x.record_stream(current)

    def wait_all(self) -> None:
        """Wait until all ops are done; on a GPU, let the current stream wait for what is enqueued:
        an op that needs lengths writes to no table. Raises CollectiveError."""
        if not all(one.done() for one in self._going):
            check_process(self._process, self._transport.rank)
        wait(self._going)
        self._raise()
        if self._stream is not None:
            current = torch.cuda.current_stream(self._exchange.device)
            current.wait_event(self._stream.record_event())

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
        self._complete()
        wait(self._going)
        if self._stream is not None and self._error is None:
            self._stream.synchronize()

    def close(self) -> None:
        """End the thread or the stream's work, once it has carried out all ops; a forked process
        has none."""
        if os.getpid() != self._process:
            return
        self._drain()
        self._thread.shutdown()


class Enqueued(Future[Any]):
    """An op on a GPU: done when all of it is enqueued, and its result is there after `event`."""

    event: Any = None


@dataclass
class _Begun:
    """An op on a GPU that has been enqueued in part, and the lengths for which it waits."""

    steps: Generator[torch.Tensor, Any, Any]
    going: Enqueued
    lengths: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    copied: Any = None


def _end(going: Enqueued, error: BaseException) -> None:
    """With an error. An interrupt is also raised here."""
    going.set_exception(error)
    if not isinstance(error, Exception):
        raise error


def _copied(lengths: torch.Tensor) -> torch.Tensor:
    """A copy on the host, under way."""
    return torch.empty_like(lengths, device="cpu", pin_memory=True).copy_(lengths, True)


def _within(name: str, steps: Lengths) -> Lengths:
    """The steps, which make no gradients and are profiled by this name while they do not rest."""
    lengths = None
    while True:
        try:
            with profiled(name), torch.no_grad():
                needed = steps.send(lengths)  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value
        lengths = yield needed
