"""The gTop-k paper's tables and figures beside ours.

Predictions follow equations 5 to 7 with the paper's a and b; nothing is fitted to what the paper
and its repository published. Seconds, elements of 4 bytes and images/s throughout.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean as mean
from typing import Any

import numpy as np

from linkweave import kernels
from linkweave.bench.reproduce.measured import Recorded, here, measured, recorded
from linkweave.bench.reproduce.pile_up import pile_up
from linkweave.bench.reproduce.rows import (
    COMPUTED,
    CORE,
    CPU_RANKS,
    NETWORK,
    SIMULATED,
    Part,
    Plot,
    Row,
    Series,
)
from linkweave.bench.sparse import medians
from linkweave.collectives.planning.equations import dense_seconds, gtopk_seconds, topk_seconds
from linkweave.collectives.planning.sparse_tree import sparse_costs
from linkweave.topology import load

ALPHA = 0.436e-3  # start-up of a message between two nodes in seconds (section IV-C)
BETA = 4 * 9e-9  # seconds an element of 4 bytes (section IV-C: 9e-6 ms a byte)
DENSITY = 0.001
PCIE = 250e6  # bytes/s of a GPU's only lane (table III)

WORKERS = (1, 4, 8, 16, 32)
METHODS = ("dense", "topk", "gtopk")


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the paper, with times in seconds and throughputs in images/s.

    `numel` counts parameters of the network that the repository trains: its VGG-16 has one fully
    connected layer, its ResNet-20 shortcuts without parameters, its AlexNet is torchvision's.
    `iteration` is of one GPU (table VI). `throughput` is for each GPU by `METHODS` and `WORKERS`
    (the script's raw figures), `printed` of 32 GPUs and `ratios` of gTop-k over other methods
    (table VII). `selection` and `communication` are of gTop-k on 32 GPUs (figure 11, raw figures).
    """

    name: str
    numel: int
    batch: int
    iteration: float
    throughput: dict[str, tuple[float, ...]]
    printed: dict[str, int]
    ratios: dict[str, float]
    selection: float
    communication: float

    @property
    def k(self) -> int:
        return int(self.numel * DENSITY)


MODELS = (
    Model(
        "VGG-16", 14_728_266, 128, 0.097,
        {"dense": (1317.333, 104.2, 92.56, 39.48, 12.6),
         "topk": (1317.333, 110.576, 109.9, 97.865, 63.002),
         "gtopk": (1317.333, 131.06, 130.551, 126.434, 123.2)},
        {"dense": 403, "topk": 2016, "gtopk": 3020},
        {"dense": 7.5, "topk": 1.5}, 0.091353, 0.811753,
    ),
    Model(
        "ResNet-20", 269_722, 128, 0.146,
        {"dense": (920.632, 821.7, 705.2, 520.4, 287.9),
         "topk": (920.632, 908.837, 752.985, 737.594, 696.029),
         "gtopk": (920.632, 916.26, 868.73, 808.5, 789.3)},
        {"dense": 9212, "topk": 22272, "gtopk": 25280},
        {"dense": 2.7, "topk": 1.1}, 0.001618, 0.024686,
    ),
    Model(
        "AlexNet", 61_100_840, 64, 0.369,
        {"dense": (173.469, 14.01, 12.118, 4.936, 1.234),
         "topk": (173.469, 14.238, 13.865, 13.352, 9.236),
         "gtopk": (173.469, 16.536, 16.446, 16.359, 15.777)},
        {"dense": 39, "topk": 296, "gtopk": 505},
        {"dense": 12.8, "topk": 1.7}, 0.383776, 3.36298,
    ),
    Model(
        "ResNet-50", 25_557_032, 256, 4.842,
        {"dense": (52.873, 39.002, 36.989, 23.176, 10.721),
         "topk": (52.873, 37.729, 35.703, 34.495, 30.583),
         "gtopk": (52.873, 39.795, 39.713, 39.06, 39.119)},
        {"dense": 343, "topk": 978, "gtopk": 1251},
        {"dense": 3.65, "topk": 1.3}, 0.15405, 1.424253,
    ),
)  # fmt: skip


NAMES = {"dense": "dense", "topk": "top-k", "gtopk": "gTop-k"}
SCALE = (4, 8, 16, 32, 64, 128)
NUMEL = 25 << 20  # elements of 100 MB (the repository's reading of it), for figure 9, left
CLUSTER = "{} x pcie-1 nics=1 nic=0.111111GB/s latency=436us"
"""The paper's cluster, whose GPUs meet at one switch, with 1 / BETA and ALPHA."""
OTHERS = (("dense", "dense"), ("PowerSGD, rank 1", ""), ("top-k", "topk"))
"""Other hooks, and what table VII calls them."""
DENSE = "the paper's dense all-reduce takes 6.5 to 12 times equation 5 on 32 workers"
COMMUNICATION = (
    "equation 7 explains less than 2 % of what the paper measured for its large models: about "
    "three passes of the whole gradient over PCIe do"
)
DIGITS = "a CNN on handwritten digits in place of Cifar-10"
NOTES = (
    "figures 1 to 4 are drawings, tables I to V name equations, hardware, data and models",
    "equations 5 to 7 with the paper's a and b; nothing is fitted",
    "figure 11's values are those of the authors' script, as the paper only draws them",
)


def dense(workers: int, numel: int, alpha: float = ALPHA, beta: float = BETA) -> float:
    """Equation 5, a ring's all-reduce of all elements."""
    return dense_seconds(workers, alpha, numel * beta)


def topk(workers: int, k: int, alpha: float = ALPHA, beta: float = BETA) -> float:
    """Equation 6, an all-gather of k values and k indices of each worker."""
    return topk_seconds(workers, math.log2(workers), alpha, 2 * k * beta)


def gtopk(workers: int, k: int, alpha: float = ALPHA, beta: float = BETA) -> float:
    """Equation 7, merges up a tree and a broadcast, for powers of two (log2 P is not rounded)."""
    return gtopk_seconds(math.log2(workers), alpha, 2 * k * beta)


def first_faster() -> int:
    """The workers from which `gtopk` is faster than `topk` at `NUMEL`, for them and any more."""
    k = int(NUMEL * DENSITY)
    return max((p for p in range(2, SCALE[-1]) if gtopk(p, k) >= topk(p, k)), default=1) + 1


def crossing_elements(workers: int) -> int:
    """Return the elements of the gradient from which `gtopk` is faster than `topk`.

    Raises ValueError for fewer than 7 workers, where 2 log2 P messages of k entries are no fewer
    than P - 1.
    """
    rounds = math.log2(workers)
    if workers < 7:
        raise ValueError(f"top-k is the faster for {workers} workers, whatever the size")
    k = rounds * ALPHA / (2 * BETA * (workers - 1 - 2 * rounds))
    return math.ceil(k / DENSITY)


def planned(workers: int, numel: int, k: int) -> float:
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
class Step:
    """A point of figure 10, and for 32 workers of table VII.

    The predicted step is `iteration` of table VI, the selection that the paper measured, and the
    communication by the equations. `measured_efficiency` is by the repository's throughputs.
    """

    throughput: float
    efficiency: float
    measured_efficiency: float


def step(model: Model, method: str, workers: int) -> Step:
    selection = model.selection if method != "dense" and workers > 1 else 0.0
    communication = {"dense": dense(workers, model.numel), "topk": topk(workers, model.k),
                     "gtopk": gtopk(workers, model.k)}[method]  # fmt: skip
    seconds = model.iteration + selection + communication
    speeds = model.throughput[method]
    measured = speeds[WORKERS.index(workers)] / speeds[0]
    return Step(workers * model.batch / seconds, model.iteration / seconds, measured)


def passes(model: Model) -> float | None:
    """What the paper's communication on 32 workers takes (figure 11), less the part that grows with
    log2 P, by its growth from 4 to 32 workers, as a multiple of the whole gradient's time over
    PCIe. None if the growth is within the noise of a step."""
    few, many = (model.throughput["gtopk"][WORKERS.index(p)] for p in (4, 32))
    growing = (model.batch / many - model.batch / few) * math.log2(32) / math.log2(32 / 4)
    left = model.communication - growing
    return left / (4 * model.numel / PCIE) if left > 0 else None


def scaling() -> Part:
    k = int(NUMEL * DENSITY)
    rows = [
        Row("figure 9, left", "workers from which gTop-k is faster than top-k at 100 MB",
            "more than few, at most 32", float(first_faster()), COMPUTED),
        Row("figure 9, left", "linkweave's planned tree on 32 workers, over equation 7", None,
            planned(32, NUMEL, k) / gtopk(32, k), SIMULATED),
        Row("figure 9, right", "MB from which it is faster on 32 workers", "large",
            crossing_elements(32) * 4e-6, COMPUTED, reason="the text says 64 workers, the caption "
            "32"),
    ]  # fmt: skip
    over: dict[str, list[float]] = {"dense": [], "topk": []}
    for model in MODELS:
        ours = {method: step(model, method, WORKERS[-1]).throughput for method in METHODS}
        reasons = {"dense": DENSE, "topk": "", "gtopk": COMMUNICATION}
        rows += [
            Row("table VII", f"{model.name}, {NAMES[method]}: images/s of 32 workers",
                model.printed[method], ours[method], COMPUTED, reason=reasons[method])
            for method in METHODS
        ]  # fmt: skip
        for other in over:
            over[other].append(ours["gtopk"] / ours[other])
            rows.append(Row(
                "table VII", f"{model.name}: gTop-k over {NAMES[other]}, 32 workers",
                model.ratios[other], over[other][-1], COMPUTED, reason=reasons[other],
            ))  # fmt: skip
    rows += [
        Row("figure 10", "gTop-k over dense on 32 workers, mean", 6.7, mean(over["dense"]),
            COMPUTED, reason=DENSE),
        Row("figure 10", "gTop-k over top-k on 32 workers, mean", 1.4, mean(over["topk"]),
            COMPUTED),
    ]  # fmt: skip
    for model in MODELS:
        rows += [
            Row("figure 11", f"{model.name}: selection, ms", 1e3 * model.selection,
                1e3 * selection_seconds(model.numel, model.k), f"{CORE}, {here()}",
                reason="torch.topk on a P102-100 there, kernels.sparsify here"),
            Row("figure 11", f"{model.name}: communication, ms", 1e3 * model.communication,
                1e3 * gtopk(32, model.k), COMPUTED, reason=COMMUNICATION),
        ]  # fmt: skip
        if (times := passes(model)) is not None:
            rows.append(Row(
                "figure 11", f"{model.name}: passes of the gradient over PCIe in what does not "
                "grow with workers", None, times, COMPUTED,
                reason="algorithm 3 returns a mask of all elements",
            ))  # fmt: skip
    rows.append(Row(
        "table VI", "speed of one P102-100", "52 to 1,317 images/s", None,
        reason="needs that GPU; its times are taken as they are printed",
    ))  # fmt: skip
    resnet = MODELS[-1]
    steps = {method: [step(resnet, method, p) for p in WORKERS] for method in METHODS}
    times9 = {"dense": [dense(p, NUMEL) for p in SCALE], "topk": [topk(p, k) for p in SCALE],
              "gtopk": [gtopk(p, k) for p in SCALE]}  # fmt: skip
    plots = [
        Plot("gTop-k, figure 10: ResNet-50", "Scaling efficiency on 1 Gbit/s: equations 5 to 7 "
             "beside the paper's raw figures.", "workers", "% of linear",
             tuple(Series(f"{NAMES[method]}{words}", WORKERS,
                          tuple(100 * (s.efficiency if ours else s.measured_efficiency)
                                for s in some))
                   for method, some in steps.items()
                   for words, ours in (("", True), (", paper", False))), log="x"),
        Plot("gTop-k, figure 9, left", "An all-reduce of 100 MB at density 0.001.", "workers", "s",
             tuple(Series(NAMES[method], SCALE, tuple(seconds))
                   for method, seconds in times9.items()), log="xy"),
    ]  # fmt: skip
    return Part(tuple(rows), tuple(plots), NOTES)


def training() -> Part:
    def chosen(found: Recorded, density: float, conserve: bool) -> dict[str, Any]:
        rows = (r for r in found.rows if r["gtopk"] and r["gtopk"]["density"] == density)
        return next(r for r in rows if r["gtopk"]["conserve"] == conserve)

    def beyond(density: float, conserve: bool = False) -> Callable[[Recorded], float]:
        """Points, or % of the loss, between gTop-k at this density and dense."""
        return lambda found: float(chosen(found, density, conserve)["beyond_dense"])

    def perplexity(found: Recorded) -> float:
        """% between the perplexities of gTop-k and of dense."""
        mine = chosen(found, 0.01, False)["mean"]
        return 100 * math.expm1(mine - found.row(exchange="dense")["mean"])

    record = "convergence-{}-epyc-2-cores"
    rows = [
        measured("figure 5", "accuracy above dense, 4 workers, density 0.01", "nearly the same",
                 CPU_RANKS, record.format("digits-4"), beyond(0.01), "points",
                 f"{DIGITS}, 260 steps, 8 seeds"),
        measured("figure 5", "accuracy above dense, 7 workers, density 0.01", None, CPU_RANKS,
                 record.format("digits-7"), beyond(0.01), "points",
                 f"{DIGITS}, 260 steps, 8 seeds"),
        measured("figure 7", "loss of an LSTM above dense, 4 workers", "close", CPU_RANKS,
                 record.format("bible-4"), beyond(0.01), "%",
                 "the Bible in place of PTB, density 0.01 in place of 0.005, 250 steps"),
        measured("figure 5", "accuracy above dense, 4 workers, density 0.001, without warm-up",
                 None, CPU_RANKS, record.format("digits-4"), beyond(0.001), "points",
                 f"{DIGITS}, 260 steps, 8 seeds"),
        measured("figure 12", "accuracy above dense, 4 workers, density 0.001",
                 "no big impact down to 0.0005", CPU_RANKS, record.format("digits-4-long"),
                 beyond(0.001), "points", f"{DIGITS}, 1,500 steps; the paper shows losses"),
        measured("figure 7", "perplexity of an LSTM above dense, 4 workers", None, CPU_RANKS,
                 record.format("bible-4"), perplexity, "%", "the same, as e to the loss"),
        *(
            measured("figure 5", f"accuracy above dense, 4 workers, density {density}, warm-up"
                     f"{words}", "nearly the same", CPU_RANKS, record.format("digits-4-warm-up"),
                     beyond(density, conserve), "points",
                     f"{DIGITS}, 400 steps, 5 seeds, the densities of section IV-B first")
            for density, conserve, words in ((0.001, False, ""), (0.01, False, ""),
                                             (0.001, True, ", what merges drop kept"))
        ),
        Row("figure 6", "convergence of AlexNet and ResNet-50", "close to dense", None,
            reason="needs ImageNet and GPUs"),
        measured("figure 8", "start-up of a message, ms", 0.436, NETWORK, "network-4x2-1gbit",
                 lambda f: 1e3 * _message(f)[0],
                 reason="emulated hosts of one computer, without adapters and switches; "
                 "uncertain, as start-ups are little of what is fitted, from 1 MB on"),
        measured("figure 8", "ns a byte", 9.0, NETWORK, "network-4x2-1gbit",
                 lambda f: 1e9 * _message(f)[1], reason="1 Gbit/s is 8 ns a byte at least"),
    ]  # fmt: skip
    for name, words, others in (
        ("gtopk-vgg16-4-hosts-1gbit", "VGG-16, 4 hosts at 1 Gbit/s", OTHERS),
        ("gtopk-vgg16-8-hosts-1gbit", "VGG-16, 8 hosts at 1 Gbit/s", OTHERS[:2]),
        ("gtopk-vgg16-8-hosts-250mbit", "VGG-16, 8 hosts at 250 Mbit/s", OTHERS[:1]),
        ("gtopk-resnet20-4-hosts-1gbit", "ResNet-20, 4 hosts at 1 Gbit/s", OTHERS),
        ("gtopk-resnet20-8-hosts-1gbit", "ResNet-20, 8 hosts at 1 Gbit/s", OTHERS),
        ("gtopk-resnet20-8-hosts-100mbit", "ResNet-20, 8 hosts at 100 Mbit/s", OTHERS),
    ):
        model = next((m for m in MODELS if m.name == words.partition(",")[0]), None)
        for other, method in others:
            rows.append(measured(
                "section IV", f"{words}: exchange of gTop-k over {other}", None, NETWORK, name,
                partial(_exchange, other), reason="the paper's table VII is of 32 workers with "
                f"selection on a GPU: steps {model.ratios[method]:g} times as fast"
                if model and method in model.ratios else "",
            ))  # fmt: skip
    for hosts in (16, 32):
        name = f"gtopk-half-{hosts}-hosts-100mbit"
        found = recorded(name)
        shares = [f"{_wire(found, hook):.0%}" for hook in ("top-k", "gTop-k")]
        k = found.rows[0]["values"] // 2
        rows.append(measured(
            "equations 6 and 7", f"{k:,} entries, {hosts} hosts at 100 Mbit/s: exchange of gTop-k "
            "over top-k", None, NETWORK, name, partial(_exchange, "top-k"),
            reason=f"by the equations {topk(hosts, k) / gtopk(hosts, k):.2f}; their bytes take "
            f"{shares[0]} of top-k's time and {shares[1]} of gTop-k's: all hosts merge on 2 cores, "
            "and a host sends to its children in the tree at once, which share its link",
        ))  # fmt: skip
    return Part(tuple(rows))


def residuals() -> Part:
    rows = [
        Row("section III", f"{ranks} ranks: L1 of the largest residual, as a multiple of the mean"
            f"{', what merges drop kept' if conserve else ', by algorithm 4'}", None,
            pile_up(ranks, conserve), f"{CORE}, {here()}",
            reason="an MLP on digits, 100 steps in one process, density 0.01; algorithm 4 loses "
            "what merges drop")
        for ranks in (16, 32) for conserve in (False, True)
    ]  # fmt: skip
    return Part(tuple(rows))


def _exchange(other: str, found: Recorded) -> float:
    theirs, mine = (found.row(hook=name)["exchange_ms"] for name in (other, "gTop-k"))
    return float(theirs / mine)


def _wire(found: Recorded, hook: str) -> float:
    """The share that the bytes of the critical path take at the rate of the hosts' links."""
    row = found.row(hook=hook)
    rate = float(found.name.rpartition("-")[2].removesuffix("mbit")) * 1e6 / 8
    ranks, nbytes = row["ranks"], 8 * (row["values"] // 2)
    messages = ranks - 1 if hook == "top-k" else 2 * math.log2(ranks)
    return float(messages * nbytes / rate / (1e-3 * row["exchange_ms"]))


def _message(found: Recorded) -> tuple[float, float]:
    """The start-up and the seconds per byte of a message, by a ring of all 8 ranks (US-Byte,
    equation 14), fitted to gloo's all-reduces from 1 MB."""
    from linkweave.collectives.overlap import fit

    rows = [r for r in found.rows if (r["collective"], r["op"]) == ("allreduce", "sum")]
    pairs = [(r["nbytes"], r["gloo_seconds"]) for r in rows if r["nbytes"] >= 1 << 20]
    return fit(pairs, workers=8).network.message
