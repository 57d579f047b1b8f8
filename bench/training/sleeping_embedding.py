"""`linkweave bench steps --tokens`: sleeping layers behind a sharded embedding, with 2D scheduling
and without, as predicted and as they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import nn

from linkweave import collectives
from linkweave.bench.reproduce.embrace_model import FIRST, LAST, STEPS, Tasks, period
from linkweave.bench.timing import schedule as batch_scheduling
from linkweave.bench.training.sleeping import Link, Throttled, median_step, own_seconds, sleepers
from linkweave.collectives import overlap
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.overlap import Network, Schedule
from linkweave.collectives.training import ShardedEmbedding

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


Seconds = Mapping[str, float]  # what each op of an embedding's lane takes, by name


def row_seconds(embedding: ShardedEmbedding, network: Network) -> dict[str, float]:
    """The seconds of an embedding's last ops: a message to each other rank, one after another.
    Tokens take two, of which the first tells how many there are."""
    startup, pace = network.message
    sent: dict[str, list[int]] = {}
    for op in embedding.ops:
        sent.setdefault(op.name, []).append(op.nbytes)
    return {
        name: (network.workers - 1) * startup * (1 + (name == "tokens")) + mean(found) * pace
        if any(found) else 0.0
        for name, found in sent.items()
    }  # fmt: skip


def step_seconds(schedule: Schedule, rows: Seconds, prefetched: bool) -> float:
    """The seconds of a step.

    After the backward pass, gradients of prior rows leave before dense gradients that wait. With
    `prefetched` batches, the next lookups follow, and delayed rows leave last; the next batch's
    tokens leave beside the forward pass. Without, the forward pass begins with tokens and lookups.
    """
    layers, network = schedule.profile.layers, schedule.network
    made, last, marks = Tasks(), -1, []
    sent: list[int] = []
    looked_up, delayed = -1, -1
    for _ in range(STEPS):
        waits = _known(last, *([] if schedule.chained else sent))
        if prefetched:
            last = made.compute(0.0, *waits, *_known(looked_up))
            tokens = made.send(rows["tokens"], LAST, last, *_known(delayed))
        else:
            tokens = made.send(rows["tokens"], FIRST, *waits)
            last = made.send(rows["lookup"], FIRST, tokens)
        for number, layer in enumerate(layers):
            of_layer = [
                task for task, c in zip(sent, schedule.communications, strict=False)
                if any(piece.layer == number for piece in c.pieces)
            ]  # fmt: skip
            last = made.compute(layer.forward_s, last, *of_layer)
        ready = {}
        for number, layer in reversed([*enumerate(layers)]):
            last = ready[number] = made.compute(layer.backward_s, last)
        sent = [
            made.send(network.seconds(c.nbytes), i, *{ready[piece.layer] for piece in c.pieces})
            for i, c in enumerate(schedule.communications)
        ]
        prior = made.send(rows["prior"], FIRST, last, tokens)
        if prefetched:
            looked_up = made.send(rows["lookup"], FIRST, prior)
            delayed = made.send(rows["delayed"], LAST, looked_up)
        else:
            last = made.compute(0.0, last, prior)
        marks.append(last)
    return period(made.tasks, marks)


def _known(*tasks: int) -> tuple[int, ...]:
    return tuple(task for task in tasks if task >= 0)
