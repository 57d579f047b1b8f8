"""`linkweave bench steps --tokens`: sleeping layers behind a sharded embedding, with 2D scheduling
and without, as predicted and as they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from linkweave import collectives
from linkweave.bench.embedding_prediction import row_seconds, step_seconds
from linkweave.bench.sleeping import median_step, own_seconds, sleepers
from linkweave.bench.throttled import Link, Throttled
from linkweave.bench.timing import schedule as batch_scheduling
from linkweave.collectives import overlap
from linkweave.collectives.calls.communicator import get_default

VOCABULARY, WIDTH = 30_000, 64
HEADER = f"{'policy':16}{'prefetch':>9}{'predicted ms':>14}{'measured ms':>13}{'error':>8}"
LEGEND = (
    "prefetch: rows that the next batch needs are sent first, the others beside the forward pass. "
    "measured: the\nmedian step of the slowest rank, from the end of a forward pass to the next"
)


@dataclass(frozen=True, slots=True)
class Row:
    policy: str
    prefetched: bool
    predicted_ms: float
    measured_ms: float
    chained: bool
    row_ms: dict[str, float]  # what the network takes for each op of the embedding's lane

    def __str__(self) -> str:
        error = self.measured_ms / self.predicted_ms - 1
        return (
            f"{self.policy:16}{'on' if self.prefetched else 'off':>9}{self.predicted_ms:14.1f}"
            f"{self.measured_ms:13.1f}{error:+8.1%}" + "  chained" * self.chained
        )


class _Model(nn.Module):
    def __init__(self, table: Any, layers: nn.Sequential) -> None:
        super().__init__()
        self.table, self.layers = table, layers

    def forward(self, ids: Any) -> Any:
        return self.layers(self.table(ids).sum().reshape(1))


def rows(schedules: Sequence[overlap.Schedule], ranks: int, steps: int, tokens: int) -> list[Row]:
    """Train each schedule for some steps on so many ranks, without `prefetch` and with it, on
    batches of so many words by Zipf's law. Times are medians of the slowest rank."""
    texts = [schedule.to_json() for schedule in schedules]
    found = collectives.spawn(_rank, ranks, args=(texts, steps, tokens), timeout=120)
    made = []
    for i, schedule in enumerate(schedules):
        for prefetched in (False, True):
            seconds, ops = zip(*(mine[2 * i + prefetched] for mine in found), strict=True)
            slowest = {name: max(each[name] for each in ops) for name in ops[0]}
            predicted = step_seconds(schedule, slowest, prefetched)
            of_ops = {name: 1e3 * t for name, t in slowest.items()}
            times = 1e3 * predicted, 1e3 * max(seconds)
            made.append(Row(schedule.policy, prefetched, *times, schedule.chained, of_ops))
    return made


def _rank(rank: int, texts: Sequence[str], steps: int, tokens: int) -> list[Any]:
    batch_scheduling(True)
    torch.set_num_threads(1)
    schedules = [overlap.Schedule.from_json(text) for text in texts]
    own = own_seconds(schedules[0].profile.layers)
    return [
        _train(schedule, own, steps, tokens, prefetched)
        for schedule in schedules for prefetched in (False, True)
    ]  # fmt: skip


def _batches(rank: int, tokens: int, count: int) -> Iterator[torch.Tensor]:
    drawn = torch.Generator().manual_seed(rank)
    weights = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    for _ in range(count):
        yield torch.multinomial(weights, tokens, replacement=True, generator=drawn)


def _train(
    schedule: overlap.Schedule, own: float, steps: int, tokens: int, prefetched: bool
) -> tuple[float, dict[str, float]]:
    """The median time from the end of a forward pass to the end of the next, and what the network
    takes for the embedding's ops."""
    comm = get_default()
    link = Link(schedule.network)
    table = collectives.ShardedEmbedding(
        VOCABULARY, WIDTH, group=Throttled(comm, schedule.network, link)
    )
    model = _Model(table, sleepers(schedule.profile.layers, own))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    batches: Any = [*_batches(comm.rank, tokens, steps + 3)]
    group = Throttled(comm, schedule.network, link)
    with collectives.DataParallel(model, optimizer, schedule=schedule, group=group) as trained:
        inputs = collectives.prefetch(batches) if prefetched else batches
        seconds = median_step(trained, optimizer, inputs)
    found = row_seconds(table, schedule.network)
    table.close()
    return seconds, found
