"""`linkweave simulate --embrace`: tables 2 and 3 and figures 4, 7 and 8 of the EmbRace paper.

Predictions follow table 2 and streams of tokens, beside what the paper published. Nothing is fitted
to it. Seconds, and MB of 2^20 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from linkweave.bench.reproduce.embrace_costs import WAYS, equation_seconds, shared_seconds, wins
from linkweave.bench.reproduce.embrace_paper import (
    BANDWIDTH,
    CLUSTERS,
    FIGURE4,
    GPUS,
    MB,
    MODELS,
    STARTUP,
    WORKERS,
    Cluster,
    Model,
)
from linkweave.bench.reproduce.embrace_step import (
    BASELINES,
    UTILISATIONS,
    Step,
    baseline_period,
    embrace_period,
    forward_seconds,
)
from linkweave.bench.reproduce.embrace_tokens import Sizes, corpus, sizes, zipf
from linkweave.collectives.overlap import Network, embedding_ways

GNMT = MODELS[1]
"""The model of table 2 and figure 4."""
SPARSITIES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
ON_HOST = ("LM", "RTX2080")
"""The model whose tables the paper keeps in host memory, on these GPUs."""
STEPPED = tuple(
    (m, g) for m in MODELS for g in range(len(GPUS)) if (m.name, GPUS[g].name) != ON_HOST
)
TOTAL = len(MODELS) + len(STEPPED)


@dataclass(frozen=True, slots=True)
class Overhead:
    """Table 2 for GNMT-8's gradients ("original" or "coalesced", by the sizes of table 3).

    `exact` is `overlap.embedding_ways` of the coalesced rows, with indices, table by table.
    """

    workers: int
    nodes: int
    gradient: str
    way: str
    equation: float
    shared: float
    exact: float | None


@dataclass(frozen=True, slots=True)
class Gradient:
    """Table 3 for one model and stream: MB of a worker's gradients, and reductions in %.

    `priority` is by the next batches of all workers, `own_priority` by the worker's own.
    """

    model: str
    stream: str
    vocabulary: int
    tokens: int
    original: float
    coalesced: float
    prior: float
    own_prior: float
    coalescing: float
    paper_coalescing: float
    priority: float
    own_priority: float
    paper_priority: float


@dataclass(frozen=True, slots=True)
class Point:
    """A point of figure 4."""

    figure: str
    sparsity: float
    way: str
    equation: float
    shared: float


@dataclass(frozen=True, slots=True)
class Crossing:
    """The sparsities, from and to, at which all-to-all is no slower than another way in figure 4;
    None if there are none."""

    figure: str
    other: str
    equation: tuple[float, float] | None
    shared: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Speed:
    """EmbRace beside the best baseline, for figures 7 and 8.

    The GPUs compute at `utilisation` of their peak. A stall is what a step takes longer than it
    computes; `stall_ratio` is the best baseline's over EmbRace's.
    """

    model: str
    gpu: str
    workers: int
    utilisation: float
    compute: float
    embrace: float
    baselines: dict[str, float]
    best: str
    speedup: float
    stall_ratio: float


@dataclass(frozen=True, slots=True)
class Rows:
    """All tables."""

    table2: tuple[Overhead, ...]
    table3: tuple[Gradient, ...]
    figure4: tuple[Point, ...]
    crossings: tuple[Crossing, ...]
    figure7: tuple[Speed, ...]


def _overheads(cluster: Cluster) -> list[Overhead]:
    steps = 2 * (cluster.workers - 1)
    net = Network(steps * STARTUP, steps / cluster.workers / BANDWIDTH, 2.0, cluster.workers)
    tokens = round(GNMT.coalesced * MB / (GNMT.tables * GNMT.width * 4))
    exact = {way.name: GNMT.tables * way.seconds
             for way in embedding_ways(net, GNMT.rows, GNMT.width, tokens)}  # fmt: skip
    found = []
    for gradient, size in (("original", GNMT.original), ("coalesced", GNMT.coalesced)):
        for way in WAYS:
            nbytes = (GNMT.embedding if way == "allreduce" else size) * MB
            found.append(Overhead(
                cluster.workers, cluster.nodes, gradient, way,
                equation_seconds(way, cluster, nbytes), shared_seconds(way, cluster, nbytes),
                exact.get(way) if gradient == "coalesced" else None,
            ))  # fmt: skip
    return found


def _gradient(model: Model, stream: str, vocabulary: int, found: Sizes) -> Gradient:
    return Gradient(
        model.name, stream, vocabulary, model.tokens(), model.megabytes(found.original),
        model.megabytes(found.coalesced), model.megabytes(found.prior),
        model.megabytes(found.own_prior),
        100 * (1 - found.coalesced / found.original), model.coalescing,
        100 * (1 - found.prior / found.coalesced), 100 * (1 - found.own_prior / found.coalesced),
        model.priority,
    )  # fmt: skip


def _points(figure: str, cluster: Cluster) -> list[Point]:
    whole = GNMT.embedding * MB
    found = []
    for sparsity in SPARSITIES:
        for way in WAYS:
            nbytes = whole if way == "allreduce" else (1 - sparsity) * whole
            found.append(Point(figure, sparsity, way, equation_seconds(way, cluster, nbytes),
                               shared_seconds(way, cluster, nbytes)))  # fmt: skip
    return found


def _crossings(figure: str, cluster: Cluster) -> list[Crossing]:
    whole = GNMT.embedding * MB
    return [
        Crossing(figure, other, wins(equation_seconds, cluster, other, whole),
                 wins(shared_seconds, cluster, other, whole))
        for other in WAYS[1:]
    ]  # fmt: skip


def _speeds(model: Model, gpu: int) -> list[Speed]:
    stream = zipf(model.rows, WORKERS[-1], model.tokens(gpu))
    found = []
    for cluster in CLUSTERS:
        rows = sizes(stream[:, : cluster.workers])
        for utilisation in UTILISATIONS:
            forward = forward_seconds(model, gpu, utilisation * GPUS[gpu].flops)
            step = Step(model, cluster, rows, forward)
            ours = embrace_period(step)
            theirs = {name: baseline_period(step, name) for name in BASELINES}
            best = min(theirs, key=lambda name: theirs[name])
            found.append(Speed(
                model.name, GPUS[gpu].name, cluster.workers, utilisation, 3 * forward, ours,
                theirs, best, theirs[best] / ours,
                (theirs[best] - 3 * forward) / (ours - 3 * forward),
            ))  # fmt: skip
    return found


def rows(done: Callable[[], None] = lambda: None, words: np.ndarray | None = None) -> Rows:
    """Compute all tables; calls `done` `TOTAL` times on the way.

    `words` are those of a text as numbers (`embrace_tokens.read_words`), for further rows of table
    3. Raises CollectiveError if they are too few.
    """
    gradients = []
    for model in MODELS:
        stream = zipf(model.rows, WORKERS[-1], model.tokens())
        gradients.append(_gradient(model, "zipf", model.rows, sizes(stream)))
        if words is not None:
            stream = corpus(words, WORKERS[-1], model.tokens())
            gradients.append(_gradient(model, "corpus", int(words.max()) + 1, sizes(stream)))
        done()
    speeds = []
    for model, gpu in STEPPED:
        speeds += _speeds(model, gpu)
        done()
    clusters = dict.fromkeys((*FIGURE4.values(), *CLUSTERS))
    return Rows(
        tuple(row for cluster in clusters for row in _overheads(cluster)),
        tuple(gradients),
        tuple(row for figure in FIGURE4.items() for row in _points(*figure)),
        tuple(row for figure in FIGURE4.items() for row in _crossings(*figure)),
        tuple(speeds),
    )
