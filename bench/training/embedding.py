"""`linkweave bench embedding`: steps of a language model whose table of words is most of it.

Every rank runs the command, started by torchrun on one machine or several. The same LSTM trains
from the same weights on the same batches, its table exchanged in several ways: by DDP over gloo,
and with columns divided among ranks, first with nothing scheduled (FIFO), then in two dimensions
(2D): dense gradients by the schedule that is the fastest, and rows that the next batch needs first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from linkweave import collectives
from linkweave.bench.peers import on_gloo
from linkweave.bench.timing import rounds_of, schedule, sent_bytes
from linkweave.bench.training import torchrec_table
from linkweave.bench.training.sleeping_embedding import row_seconds, step_seconds
from linkweave.bench.training.tasks import bible_words, numbered
from linkweave.bench.training.train import over_ranks, seconds_of
from linkweave.collectives import CollectiveError
from linkweave.collectives.training.tuner import SETTLED, SETTLED_NAMED

WIDTH = 512
RATE = 0.1
STEPS = 5  # of a block
LOSS_AT = 9  # the step after which rank 0's loss is told
_FIRST = "DDP, dense"
HEADER = (
    f"{'rows':>8}{'table':>7}{'ranks':>6}  {'embedding':24}{'step ms':>9}{'predicted':>10}"
    f"{'tokens/s':>10}{'x DDP':>7}{'sent MB':>9}{'loss':>9}"
)
LEGEND = (
    "table: the share of the model's bytes that the table has; ms of a step, the mean of ranks; "
    "x DDP: the\nmedian of the times of DDP with a dense gradient over this one's in the same "
    "round; sent MB: what rank\n0's network interfaces sent in a step, headers included (0 inside "
    "one machine); loss: rank 0's in step 10"
)


@dataclass(frozen=True, slots=True)
class Row:
    rows: int
    table_share: float
    ranks: int
    embedding: str
    step_ms: float
    predicted_ms: float | None
    tokens_per_second: float
    ratio: float
    sent_mb: float
    loss: float

    def __str__(self) -> str:
        predicted = "" if self.predicted_ms is None else f"{self.predicted_ms:.1f}"
        return (
            f"{self.rows:8}{self.table_share:7.0%}{self.ranks:6}  {self.embedding:24}"
            f"{self.step_ms:9.1f}{predicted:>10}{self.tokens_per_second:10.0f}{self.ratio:7.2f}"
            f"{self.sent_mb:9.2f}{self.loss:9.4f}"
        )


class Model(nn.Module):
    def __init__(self, table: Any, words: int) -> None:
        super().__init__()
        self.table = table
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.decoder = nn.Linear(WIDTH, words)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.lstm(self.table(x))[0]).flatten(0, 1)
        return logits


def batches_of(
    words: NDArray[np.int64], rows: int, batch: int, length: int, rank: int, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """A rank's inputs and next words, without end: each sample continues a part of the text of its
    own. A table with more rows than there are words is for pairs of words, hashed."""
    inputs = words
    if rows > int(words.max()) + 1:
        inputs = (np.roll(words, 1) * 1_000_003 + words) * 2_654_435_761 % (1 << 32) % rows
    part = len(words) // (batch * size)
    starts = [(rank * batch + i) * part for i in range(batch)]
    for at in cycle(range(0, part - length, length)):
        x = np.stack([inputs[first + at : first + at + length] for first in starts])
        y = np.stack([words[first + at + 1 : first + at + 1 + length] for first in starts])
        yield torch.from_numpy(x), torch.from_numpy(y).flatten()


@dataclass(frozen=True)
class Way:
    """How a table is trained: what makes it, for so many rows and a communicator; what lets a model
    and its optimizer train on all ranks; whether batches are those of `prefetch`; and the blocks of
    steps before times are taken, in which DataParallel measures, plans and tries."""

    table: Callable[[int, Any], Any]
    wrap: Callable[[Any, Any, Any], Any]
    prefetched: bool = False
    warm_up: int = 1


def _ddp(model: Any, *_: Any) -> Any:
    return DistributedDataParallel(model)


def _columns(rows: int, comm: Any) -> Any:
    return collectives.ShardedEmbedding(rows, WIDTH, group=comm)


def _by(schedule: str) -> Callable[[Any, Any, Any], Any]:
    return lambda model, optimizer, comm: collectives.DataParallel(
        model, optimizer, schedule=schedule, group=comm
    )


WAYS = {
    _FIRST: Way(lambda rows, _: nn.Embedding(rows, WIDTH), _ddp),
    "DDP, sparse=True": Way(lambda rows, _: nn.Embedding(rows, WIDTH, sparse=True), _ddp),
    "columns, FIFO": Way(_columns, _by("ddp"), warm_up=-(-(SETTLED_NAMED + 1) // STEPS)),
    "columns, 2D": Way(_columns, _by("auto"), prefetched=True, warm_up=-(-(SETTLED + 1) // STEPS)),
}
if find_spec("torchrec"):
    WAYS["TorchRec, columns"] = Way(
        lambda rows, _: torchrec_table.Table(rows, WIDTH, RATE),
        lambda model, *_: torchrec_table.divided(model, WIDTH),
    )


class _Trained:
    def __init__(self, way: Way, comm: Any, rows: int, words: int, batches: Any) -> None:
        torch.manual_seed(0)
        self._prefetched = way.prefetched
        table = way.table(rows, comm)
        self._model = Model(table, words)
        named = dict(self._model.named_parameters())
        dense = sum(p.numel() for name, p in named.items() if not name.startswith("table."))
        self.table_share = rows * WIDTH / (rows * WIDTH + dense)
        # TorchRec's tables have an optimizer of their own
        trained = [p for name, p in named.items() if not name.startswith("table.tables.")]
        self._optimizer = torch.optim.SGD(trained, RATE)
        self._wrapped = way.wrap(self._model, self._optimizer, comm)
        self._batches = iter(collectives.prefetch(batches) if way.prefetched else batches)
        self.losses: list[float] = []
        self.forget()

    def forget(self) -> None:
        self.times: list[float] = []  # seconds of a step, of each block
        self.sent = 0  # bytes

    def block(self) -> None:
        dist.barrier()
        before, batches = sent_bytes(), islice(self._batches, STEPS)
        mine = seconds_of(self._wrapped, self._optimizer, batches, self.losses)
        self.sent += sent_bytes() - before
        self.times.append(over_ranks(mine))

    def predicted(self) -> float | None:
        """The seconds of a step; None where nothing predicts."""
        schedule = getattr(self._wrapped, "schedule", None)
        if schedule is None:
            return None
        rows = row_seconds(self._model.table, schedule.network)
        return step_seconds(schedule, rows, self._prefetched)

    def close(self) -> None:
        if isinstance(self._wrapped, collectives.DataParallel):
            self._wrapped.close()
            self._model.table.close()


def measure(
    rows: int | None, batch: int, length: int, blocks: int, batch_scheduling: bool,
    only: Sequence[str] = (),
) -> list[Row]:  # fmt: skip
    """Measure as one rank of those that torchrun has started. Returns rows on rank 0.

    rows: of the table; by default, one for each word.
    only: names of ways, beside DDP's dense one; all by default.
    Raises CollectiveError for an unknown way.
    """
    if unknown := [name for name in only if name not in WAYS]:
        raise CollectiveError(f"--embedding must be one of {'; '.join(WAYS)}, not {unknown[0]!r}")
    words = numbered(bible_words())
    chosen = {name: way for name, way in WAYS.items() if not only or name in (_FIRST, *only)}
    schedule(batch_scheduling)
    with on_gloo(), collectives.init(timeout=120) as comm:
        return list(_rows(chosen, comm, words, rows, (batch, length), blocks))


def _rows(
    chosen: dict[str, Way], comm: Any, words: NDArray[np.int64], rows: int | None,
    shape: tuple[int, int], blocks: int,
) -> Iterator[Row]:  # fmt: skip
    """All ways take turns, as a machine's speed drifts; so all are in memory at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    vocabulary = int(words.max()) + 1
    rows = rows or vocabulary
    every = []
    for way in chosen.values():
        batches = batches_of(words, rows, *shape, rank, size)
        every.append(_Trained(way, comm, rows, vocabulary, batches))
        for _ in rounds_of(way.warm_up, rank == 0):
            every[-1].block()
        every[-1].forget()
    for _ in rounds_of(blocks, rank == 0):
        for trained in every:
            trained.block()
    for name, trained in zip(chosen, every, strict=True):
        step, predicted = statistics.median(trained.times), trained.predicted()
        row = Row(
            rows, trained.table_share, size, name, 1e3 * step,
            1e3 * predicted if predicted else None, size * shape[0] * shape[1] / step,
            statistics.median(a / b for a, b in zip(every[0].times, trained.times, strict=True)),
            trained.sent / (blocks * STEPS) / 1e6, trained.losses[LOSS_AT],
        )  # fmt: skip
        trained.close()
        if rank == 0:
            yield row
