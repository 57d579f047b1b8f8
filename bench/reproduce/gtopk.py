"""`linkweave simulate --gtopk`: tables I and VII and figures 9 to 11 of the gTop-k paper.

Predictions follow equations 5 to 7, beside what the paper and its repository published. Nothing is
fitted to them. Seconds, elements of 4 bytes and images/s throughout.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from linkweave import kernels
from linkweave.bench.reproduce.gtopk_paper import (
    ALPHA,
    BETA,
    DENSITY,
    METHODS,
    MODELS,
    PCIE,
    SCRIPT_ALPHA,
    WORKERS,
    Model,
)
from linkweave.bench.sparse import medians
from linkweave.collectives.planning.sparse_equations import (
    dense_seconds,
    gtopk_seconds,
    topk_seconds,
)
from linkweave.collectives.planning.sparse_tree import sparse_costs
from linkweave.topology import load

SCALE = (4, 8, 16, 32, 64, 128)
NUMEL = 25 << 20
"""Elements of 100 MB (the repository's reading of it), for figure 9, left."""
SIZES = tuple(1 << i for i in range(20, 28))
"""Elements of figure 9, right, for 32 workers; the text says 64."""
MOST_PLANNED = 32
"""Workers up to which a cluster is planned within seconds."""
CLUSTER = "{} x pcie-1 nics=1 nic=0.111111GB/s latency=436us"
"""The paper's cluster, whose GPUs meet at one switch, with 1 / BETA and ALPHA."""
TOTAL = 2 * len(MODELS) + sum(workers <= MOST_PLANNED for workers in SCALE)


def dense(workers: int, numel: int, alpha: float = ALPHA, beta: float = BETA) -> float:
    """Equation 5, a ring's all-reduce of all elements."""
    return dense_seconds(workers, alpha, numel * beta)


def topk(workers: int, k: int, alpha: float = ALPHA, beta: float = BETA) -> float:
    """Equation 6, an all-gather of k values and k indices of each worker."""
    return topk_seconds(workers, math.log2(workers), alpha, 2 * k * beta)


def gtopk(workers: int, k: int, alpha: float = ALPHA, beta: float = BETA) -> float:
    """Equation 7, merges up a tree and a broadcast, for powers of two (log2 P is not rounded)."""
    return gtopk_seconds(math.log2(workers), alpha, 2 * k * beta)


def tree(workers: int, k: int, alpha: float = ALPHA, beta: float = BETA) -> float:
    """Equation 7 with the ceil(log2 P) rounds of linkweave's tree, for any number of workers."""
    return gtopk_seconds((workers - 1).bit_length(), alpha, 2 * k * beta)


def crossover(merged: Callable[..., float], k: int, alpha: float = ALPHA) -> int:
    """Return the workers from which `merged` is faster than `topk`, for them and any more."""
    slower = (p for p in range(2, SCALE[-1]) if merged(p, k, alpha) >= topk(p, k, alpha))
    return max(slower, default=1) + 1


def crossing_elements(workers: int, alpha: float = ALPHA, beta: float = BETA) -> int:
    """Return the elements of the gradient from which `gtopk` is faster than `topk`.

    Raises ValueError for fewer than 7 workers, where 2 log2 P messages of k entries are no fewer
    than P - 1.
    """
    rounds = math.log2(workers)
    if workers < 7:
        raise ValueError(f"top-k is the faster for {workers} workers, whatever the size")
    k = rounds * alpha / (2 * beta * (workers - 1 - 2 * rounds))
    return math.ceil(k / DENSITY)


def simulated(workers: int, numel: int, k: int) -> float:
    """The planned time of linkweave's tree and broadcast on `CLUSTER`, without merging."""
    costs = sparse_costs(load(CLUSTER.format(workers)), numel, k)
    return next(row.seconds for row in costs if row.mode == "gtopk")


def selection_seconds(numel: int, k: int) -> float:
    """The median time of `kernels.sparsify` on one core of this machine."""
    cores = os.sched_getaffinity(0)
    grad = np.random.default_rng(0).standard_normal(numel, np.float32)
    residual = np.zeros(numel, np.float32)
    try:
        os.sched_setaffinity(0, {min(cores)})
        return medians({"select": lambda: kernels.sparsify(grad, residual, k)}, 3)["select"]
    finally:
        os.sched_setaffinity(0, cores)


@dataclass(frozen=True, slots=True)
class Collective:
    """A point of figure 9. `script_...` are as the repository draws it; see `SCRIPT_ALPHA`."""

    workers: int
    numel: int
    dense: float
    topk: float
    gtopk: float
    script_topk: float
    script_gtopk: float
    tree: float
    simulated: float | None


@dataclass(frozen=True, slots=True)
class Step:
    """A point of figure 10, and for 32 workers of table VII.

    The predicted step is `iteration` of table VI, the selection that the paper measured, and
    `communication` by the equations. `measured` is the repository's throughput of all workers,
    `printed` the paper's. `measured_communication` is what is left of a measured step.
    """

    model: str
    method: str
    workers: int
    throughput: float
    measured: float
    printed: int | None
    efficiency: float
    measured_efficiency: float
    communication: float
    measured_communication: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Figure 11 for one model: gTop-k on 32 workers, ours beside the paper's (`measured_...`).

    `selection` is measured here (`selection_seconds`). `wide` is equation 7 with the 16 bytes an
    entry that the repository sends, a float64 for each index and value. `entries` is the time of
    a worker's entries over PCIe, 12 bytes each, down and up. `growing` is the part of the measured
    time that grows with log2 P, by its growth from 4 to 32 workers, and `copies` is the rest as a
    multiple of the whole gradient's time over PCIe; None if the growth is within the noise of
    the step.
    """

    model: str
    compute: float
    measured_compute: float
    selection: float
    measured_selection: float
    communication: float
    measured_communication: float
    wide: float
    entries: float
    growing: float
    copies: float | None
    simulated: float


@dataclass(frozen=True, slots=True)
class Rows:
    """All tables.

    `crossovers` has the workers from which gTop-k is faster than top-k, at `NUMEL`: by the
    equations, with linkweave's rounds, and as the repository's script draws it. `crossing` has the
    elements from which it is so by the equations, by the number of workers.
    """

    figure9: tuple[Collective, ...]
    figure10: tuple[Step, ...]
    figure11: tuple[Breakdown, ...]
    crossovers: dict[str, int]
    crossing: dict[int, int]


def _collective(workers: int, numel: int, planned: float | None = None) -> Collective:
    k = int(numel * DENSITY)
    return Collective(
        workers, numel, dense(workers, numel), topk(workers, k), gtopk(workers, k),
        topk(workers, k, SCRIPT_ALPHA), gtopk(workers, k, SCRIPT_ALPHA), tree(workers, k), planned,
    )  # fmt: skip


def _step(model: Model, method: str, workers: int) -> Step:
    selection = model.selection if method != "dense" and workers > 1 else 0.0
    communication = {"dense": dense(workers, model.numel), "topk": topk(workers, model.k),
                     "gtopk": gtopk(workers, model.k)}[method]  # fmt: skip
    seconds = model.iteration + selection + communication
    speeds = model.throughput[method]
    measured = speeds[WORKERS.index(workers)]
    return Step(
        model.name, method, workers, workers * model.batch / seconds, workers * measured,
        model.printed[method] if workers == WORKERS[-1] else None,
        model.iteration / seconds, measured / speeds[0], communication,
        model.batch / measured - model.iteration - selection,
    )  # fmt: skip


def _breakdown(model: Model, select: Callable[[int, int], float]) -> Breakdown:
    few, many = (model.throughput["gtopk"][WORKERS.index(p)] for p in (4, 32))
    growing = (model.batch / many - model.batch / few) * math.log2(32) / math.log2(32 / 4)
    left = model.communication - growing
    return Breakdown(
        model.name, model.iteration, model.compute, select(model.numel, model.k), model.selection,
        gtopk(32, model.k), model.communication, gtopk(32, 2 * model.k), 2 * 12 * model.k / PCIE,
        growing, left / (4 * model.numel / PCIE) if left > 0 else None,
        simulated(32, model.numel, model.k),
    )  # fmt: skip


def rows(
    done: Callable[[], None] = lambda: None,
    select: Callable[[int, int], float] = selection_seconds,
) -> Rows:
    """Compute all tables; calls `done` `TOTAL` times on the way.

    `select` gives the seconds of a selection of k from numel elements.
    """
    shown = []
    for workers in SCALE:
        planned = None
        if workers <= MOST_PLANNED:
            planned = simulated(workers, NUMEL, int(NUMEL * DENSITY))
            done()
        shown.append(_collective(workers, NUMEL, planned))
    shown += [_collective(workers, numel) for workers in (32, 64) for numel in SIZES]
    steps = []
    for model in MODELS:
        steps += [_step(model, method, p) for method in METHODS for p in WORKERS]
        done()
    parts = []
    for model in MODELS:
        parts.append(_breakdown(model, select))
        done()
    k = int(NUMEL * DENSITY)
    return Rows(tuple(shown), tuple(steps), tuple(parts), {
        "equations": crossover(gtopk, k), "tree": crossover(tree, k),
        "script": crossover(gtopk, k, SCRIPT_ALPHA),
    }, {workers: crossing_elements(workers) for workers in (32, 64)})  # fmt: skip
