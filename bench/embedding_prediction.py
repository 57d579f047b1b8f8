"""Predicted steps of a model with a sharded embedding before its layers.

One compute queue and one network, each with one task at a time (`reproduce.embrace_model`). Layers
take the seconds of the schedule's profile, dense gradients those of all-reduces on its network, and
rows those of messages of as many bytes as were sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

from linkweave.bench.reproduce.embrace_model import FIRST, LAST, STEPS, Tasks, period
from linkweave.collectives.overlap import Network, Schedule
from linkweave.collectives.training import ShardedEmbedding

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
