"""The C-Cube paper's figures of all-reduces alone, beside simulated plans.

C1 is the overlapped double tree of figure 10 with its detours; B is the same trees and detours
without overlap, as in section V-B; R is a ring. The text prints few values: what it says of
averages and extremes is compared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from statistics import fmean as mean

import torch
from scipy.stats import spearmanr
from torch.nn.functional import cross_entropy

from linkweave import collectives
from linkweave.bench.command.predict import PEAKS, REACHED
from linkweave.bench.reproduce import scale
from linkweave.bench.reproduce.measured import Recorded, here, measured, recorded
from linkweave.bench.reproduce.rows import (
    COMPUTED,
    CORE,
    CPU_RANKS,
    NETWORK,
    SIMULATED,
    SLEEPING,
    Part,
    Plot,
    Row,
    Series,
)
from linkweave.bench.training.train_models import resnet50
from linkweave.collectives import overlap
from linkweave.collectives.overlap import Layer, Network, Profile, Schedule
from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.planning.algorithms.over_trees import (
    broadcast_down,
    ccube_dgx1,
    reduce_up,
)
from linkweave.collectives.planning.algorithms.registry import Named
from linkweave.collectives.planning.equations import dense_seconds
from linkweave.collectives.planning.explain import size_text
from linkweave.collectives.planning.lower import Algorithm
from linkweave.topology import Topology, load

MB = 1 << 20
SIZES = tuple(n * MB for n in (1, 4, 16, 64, 128, 256, 512))
ALPHA, BETA = 5e-6, 1 / 25e9
"""Start-up, which the paper does not tell, and seconds a byte of a link, for equations 2, 5, 7."""
SLICE = 200_000  # bytes of a slice: 50,000 parameters, as in P3, which the paper cites for slicing

DRAWINGS = "figures 2 and 6 to 11 draw the method and have no values"


@cache
def machine(alpha_us: float = 5.0) -> Topology:
    """The DGX-1; the paper does not tell the start-up of its links."""
    made = load("dgx1-v100")
    return replace(made, links=tuple(replace(one, latency_us=alpha_us) for one in made.links))


def baseline(topology: Topology) -> Algorithm:
    """B: each tree reduces all its chunks before it broadcasts one."""
    made = ccube_dgx1(topology)
    phases = reduce_up(made.trees), broadcast_down(made.trees)
    return replace(made, name="ccube_baseline", phases=phases)


def seconds(algorithm: Named, nbytes: int, alpha_us: float = 5.0) -> float:
    plan = collectives.plan_allreduce(machine(alpha_us), nbytes, algorithm)
    return collectives.simulate(plan, machine(alpha_us), nbytes).seconds


def gain(nbytes: int, alpha_us: float = 5.0) -> float:
    return seconds(baseline, nbytes, alpha_us) / seconds("ccube_dgx1", nbytes, alpha_us)


def tree_seconds(size: int, nbytes: float) -> float:
    """Equation 5: a tree with its best number of chunks, without overlap."""
    depth = math.log2(size)
    root = math.sqrt(ALPHA * BETA * nbytes * depth)
    return 2 * depth * ALPHA + 2 * BETA * nbytes + 4 * root


def overlapped_seconds(size: int, nbytes: float) -> float:
    depth = math.log2(size)
    return 2 * depth * ALPHA + BETA * nbytes + 3 * math.sqrt(ALPHA * BETA * nbytes * depth)


def equation_ratio(nbytes: int) -> float:
    """Equation 5 over equation 7, for half of the message on each of the two trees."""
    return tree_seconds(8, nbytes / 2) / overlapped_seconds(8, nbytes / 2)


def ring_ratio(size: int, nbytes: int) -> float:
    """Equation 5 over equation 2, a ring."""
    return tree_seconds(size, nbytes) / dense_seconds(size, ALPHA, BETA * nbytes)


def communication() -> Part:
    gains = {n: gain(n) for n in SIZES}
    model = {n: equation_ratio(n) for n in SIZES}
    large = [n for n in SIZES if n >= 64 * MB]
    resnet, net = overlap.model("resnet50"), Network.from_topology(machine())
    one = net.seconds(resnet.nbytes)
    layers = sum(net.seconds(layer.nbytes) for layer in resnet.layers) / one
    slices = sum(
        net.seconds(min(SLICE, layer.nbytes - first))
        for layer in resnet.layers for first in range(0, layer.nbytes, SLICE)
    ) / one  # fmt: skip
    four = scale.wired("tree of 4", 4, ((0, 1), (1, 2), (1, 3)), 25 * 10**9)
    apart = "our all-reduces follow one another; NCCL's were enqueued together"
    rows = [
        Row("figure 3", "layer by layer against one-shot, ResNet-50", 2.0, layers, SIMULATED,
            reason=f"161 all-reduces, each by the algorithm that is fastest for its size; {apart}"),
        Row("figure 3", "sliced against one-shot", "above 4", slices, SIMULATED,
            reason=f"slices of {SLICE // 1000} kB, as in P3 (the paper gives no size); {apart}"),
        Row("figure 4", "ring over tree, large messages, few nodes, up to", 1.14,
            ring_ratio(4, 64 * MB), COMPUTED,
            reason="4 nodes, 64 MiB, 5 us and 25 GB/s; the paper takes alpha, beta and sizes from "
            f"its reference 25 and prints none. 8 nodes: {ring_ratio(8, 64 * MB):.2f}; 256 nodes: "
            f"{ring_ratio(256, 64 * MB):.2f}; 8 nodes, 1 GiB: {ring_ratio(8, 1 << 30):.2f}"),
    ]  # fmt: skip
    rows += [
        Row("figure 5", f"steps of 4 chunks on 4 nodes, {name.replace('_', ' ')}", theirs,
            _steps(name, four), SIMULATED)
        for name, theirs in (("tree", 10), ("overlapped_tree", 7))
    ]  # fmt: skip
    rows += [
        Row("figure 12a", "C1 over B at 64 MB", 1.75, gains[64 * MB], SIMULATED,
            reason=f"a start-up of 5 us is assumed: {gain(64 * MB, 1.0):.2f} with 1 us, "
            f"{gain(64 * MB, 20.0):.2f} with 20 us"),
        Row("figure 12a", "C1 over B, larger, up to", 1.80, max(gains[n] for n in large),
            SIMULATED, reason="of 512 MB here; the paper's largest size is not in the text"),
        Row("figure 12b", "C1 over B at 64 MB, equations 5 and 7 over the simulated plan", None,
             model[64 * MB] / gains[64 * MB], COMPUTED,
            reason="two models; the paper has a measurement, which its model closely matches"),
    ]  # fmt: skip
    at = tuple(n / MB for n in SIZES)
    plot = Plot(
        "C-Cube, figure 12: overlapping the phases",
        "Time of figure 10's double tree without overlap over that with it, on a DGX-1.",
        "MiB", "B over C1",
        (Series("simulated plan", at, tuple(gains.values())),
         Series("equations 5 and 7", at, tuple(model.values()))),
        log="x", level=1.0,
    )  # fmt: skip
    return Part(tuple(rows), (plot,), (DRAWINGS,))


def _steps(name: str, topology: Topology) -> int:
    plan = collectives.plan_allreduce(topology, 4096, name, 4)
    return round(collectives.simulate(plan, topology, 0, 1.0).seconds)


def scaling() -> Part:
    found = [*scale.rows()]
    small = [r for r in found if r.nbytes < scale.SIZES[-1]]
    large = [r for r in found if r.nbytes == scale.SIZES[-1]]
    waits = [r.baseline_turnaround / r.turnaround for r in large]
    thin = (
        f"up to {scale.RANKS[-1]:,} ranks of the same bandwidth, with links from rank to rank; the "
        "paper has switches, and names neither node counts nor link speeds"
    )
    chunks = "64 MB in 256 chunks: 128 + 2 d - 1 steps against 2 d on trees of depth d"
    rows = (
        Row("figure 14a", "C1 over R at 16 KB and 1 MB, up to", 20.0,
            max(r.ring / r.thin_tree for r in small), SIMULATED, reason=thin),
        Row("figure 14a", "C1 over R at 64 MB, up to", 1.35,
            max(r.ring / r.thin_tree for r in large), SIMULATED, reason=thin),
        Row("figure 14b", "turnaround, B over C1, mean", 29.0, mean(waits), SIMULATED,
            reason=f"{chunks}, so at most 33 on 4 nodes"),
        Row("figure 14b", "turnaround, B over C1, up to", 69.0, max(waits), SIMULATED,
            reason=f"{chunks}; 256 chunks on each tree would give 65 on 4 nodes"),
    )  # fmt: skip
    sizes = {n: [r for r in found if r.nbytes == n] for n in scale.SIZES}
    plots = (
        Plot("C-Cube, figure 14a: a ring's time over C1's", "Simulated; same bandwidth a rank.",
             "ranks", "R over C1",
             tuple(Series(size_text(n), tuple(r.ranks for r in some),
                          tuple(r.ring / r.thin_tree for r in some)) for n, some in sizes.items()),
             log="xy", level=1.0),
        Plot("C-Cube, figure 14b: gradient turnaround", "Chunks of 256 KiB, simulated.",
             "ranks", "B over C1",
             tuple(Series(size_text(n), tuple(r.ranks for r in some),
                          tuple(r.baseline_turnaround / r.turnaround for r in some))
                   for n, some in sizes.items()), log="xy", level=1.0),
    )  # fmt: skip
    return Part(rows, plots)


ALGORITHMS: dict[str, Named] = {
    "B": baseline, "C1": "ccube_dgx1", "C2": baseline, "CC": "ccube_dgx1", "R": "ring",
}  # fmt: skip
MEANS = " The paper's are means over three other models on a DGX-1."
CHAINED = ("C2", "CC")
MODELS = ("zfnet", "vgg16", "resnet50")
BATCHES = (16, 32, 64)  # the text names 64 only, and "small" ones
SLOWER = {"high bandwidth": 1, "low bandwidth": 4}
FLOPS = REACHED * PEAKS[70][0] * 1e12
CASES = {
    "case 1": ((3, 6, 12, 24, 48), (16, 8, 4, 2, 1)),
    "case 2": ((3, 6, 12, 24, 48), (1, 2, 4, 8, 16)),
    "case 3": ((48, 24, 12, 6, 3), (16, 8, 4, 2, 1)),
}
"""MiB of gradients and 100 us of forward time of each layer: computation falls or grows, gradients
grow or fall."""
KEY = (
    "B: all-reduces by figure 10's double tree after the backward pass. C1: the same with both "
    "phases overlapped. C2: B chained with the next forward pass. CC: C1 and C2. R: a ring"
)
WHY_13 = (
    "batch sizes, reached bandwidths and layer times are not in the text: batches of 16, 32 and 64 "
    f"at {FLOPS / 1e12:.2f} TFLOP/s, links at 25 GB/s, a fourth of it for low bandwidth"
)


@cache
def network(algorithm: Named, slower: int = 1) -> Network:
    """The DGX-1 by one algorithm, with links that are so many times slower.

    A chunk takes alpha and its bytes over the bandwidth: n bytes on slower links take as long as
    `slower` times n on full ones.
    """
    found = Network.from_topology(machine(), algorithm)
    timings = tuple(replace(one, nbytes=one.nbytes // slower) for one in found.timings)
    return replace(found, seconds_per_byte=found.seconds_per_byte * slower, timings=timings)


def step(system: str, profile: Profile, slower: int = 1) -> Schedule:
    """A training step with one all-reduce after the backward pass ("one-shot")."""
    chained = system in CHAINED
    sends = whole(profile, tuple(range(len(profile.layers))), streamed=chained)
    return Schedule(system, profile, network(ALGORITHMS[system], slower), (sends,), chained)


def training() -> Part:
    shares: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    where = []
    for words, slower in SLOWER.items():
        for model in MODELS:
            for batch in BATCHES:
                profile = overlap.model_at(model, batch, FLOPS)
                compute = profile.forward_s + profile.backward_s
                where.append((words, model, batch))
                for name in ALGORITHMS:
                    found = step(name, profile, slower)
                    shares[name].append(compute / found.predicted_seconds)

    def named(case: tuple[str, str, int]) -> str:
        return f"{case[1]} {case[2]}, {case[0]}"

    def over(one: str, other: str) -> list[float]:
        return [a / b for a, b in zip(shares[one], shares[other], strict=True)]

    chaining = [a - b for a, b in zip(over("C2", "B"), over("C1", "B"), strict=True)]
    best = max(range(len(where)), key=chaining.__getitem__)
    worst = min(range(len(where)), key=chaining.__getitem__)
    on_full_links = max(over("C1", "B")[: len(where) // len(SLOWER)])
    against_ring = over("CC", "R")
    behind = [named(case) for case, ratio in zip(where, against_ring, strict=True) if ratio < 1]
    ring = (
        "the ring of ours uses all links and reaches 85 GB/s; NCCL's was measured at 74 on 8 V100"
    )
    rows = (
        Row("figure 13", "CC over B, mean", 1.32, mean(over("CC", "B")), SIMULATED, reason=WHY_13),
        Row("figure 13", "CC over B, up to", 1.61, max(over("CC", "B")), SIMULATED,
            reason="ZFNet, batch 16, low bandwidth, where communication takes most of the step"),
        Row("figure 13", "C1 over B, mean", 1.10, mean(over("C1", "B")), SIMULATED, reason=WHY_13),
        Row("figure 13", "C1 over B, up to", 1.20, max(over("C1", "B")), SIMULATED,
            reason=f"as above; {on_full_links:.2f} without the low bandwidth"),
        Row("figure 13", "C2 over B less C1 over B, mean", "slightly above 0",
            mean(chaining), SIMULATED,
            reason=f"most, {chaining[best]:+.2f}: {named(where[best])}; least, "
                   f"{chaining[worst]:+.2f}: {named(where[worst])}, whose communication outlasts "
                   "the forward pass"),
        Row("figure 13", "R over C1, up to", 1.27, max(over("R", "C1")), SIMULATED, reason=ring),
        Row("figure 13", "CC over R, up to", 1.31, max(against_ring), SIMULATED, reason=ring),
        Row("figure 13", "CC below R", "ZFNet, small batch", "; ".join(behind) or "nowhere",
            SIMULATED),
        Row("figure 13", "CC, efficiency up to", 98.0, 100 * max(shares["CC"]), SIMULATED, "%",
            "queues, updates and detours cost nothing in the simulator"),
    )  # fmt: skip
    names = tuple(f"{model} {batch}" for _, model, batch in where[: len(where) // 2])
    plots = tuple(
        Plot(
            f"C-Cube, figure 13, {words}", "Computation's share of a step on 8 GPUs, simulated.",
            "model and batch", "share of linear speed-up",
            tuple(Series(name, names, tuple(found[i * len(names) : (i + 1) * len(names)]))
                  for name, found in shares.items()), "bar", level=1.0,
        )
        for i, words in enumerate(SLOWER)
    )  # fmt: skip
    return Part(rows, plots, (KEY,))


def patterns() -> Part:
    """Figures 16 and 17: which order of computation and gradients chaining needs; and the figures
    that only a DGX-1 can give."""
    idle, first = {}, {}
    for name, (sizes, times) in CASES.items():
        layers = (Layer(str(i), n << 20, t * 1e-4, 2e-4 * t)
                  for i, (n, t) in enumerate(zip(sizes, times, strict=True)))  # fmt: skip
        line = step("CC", Profile(tuple(layers), name)).timeline
        starts, ends = zip(*line.forward, strict=True)
        idle[name] = 1e6 * sum(b - a for a, b in zip(ends, starts[1:], strict=False))
        first[name] = 1e6 * (starts[0] - line.backward[0][1])
    resnet = overlap.model_at("resnet50", 64, FLOPS)
    kernels = [(i, layer) for i, layer in enumerate(resnet.layers) if "conv" in layer.name]
    order = [i for i, _ in kernels]
    falls = float(spearmanr(order, [layer.forward_s for _, layer in kernels]).statistic)
    grows = float(spearmanr(order, [layer.nbytes for _, layer in kernels]).statistic)
    by_flops = "times by FLOPs; the paper measured them: a large map costs more than its FLOPs"
    rows = (
        Row("figure 16", "case 1: idle between layers", "no bubbles", idle["case 1"], SIMULATED,
            "us", "five layers of 3 to 48 MB, 100 to 1,600 us; the paper draws no scale"),
        Row("figure 16", "case 2: idle between layers", "bubbles", idle["case 2"], SIMULATED, "us"),
        Row("figure 16", "case 3: wait for the first layer over case 1's", "later",
            first["case 3"] / first["case 1"], SIMULATED),
        Row("figure 17", "layer's place and forward time, rank correlation", "falls", falls,
            COMPUTED, reason=by_flops),
        Row("figure 17", "layer's place and size, rank correlation", "grows", grows, COMPUTED),
        Row("figure 1", "all-reduce's share of a step, up to", 60.0, None, "", "%",
            "needs MLPerf's detection, translation and recommendation models on 8 V100"),
        Row("figure 15", "loss of GPUs that forward detours, up to", "3 to 4 %", None,
            reason="needs a DGX-1: threads that copy take time from other kernels, which is not "
                   "modelled"),
    )  # fmt: skip
    plot = Plot(
        "C-Cube, figure 17: ResNet-50's convolutions", "Share of the total, in the order of the "
        "forward pass; times by FLOPs.", "convolution", "share",
        (Series("forward time", tuple(range(len(kernels))),
                _shares([layer.forward_s for _, layer in kernels])),
         Series("parameters", tuple(range(len(kernels))),
                _shares([float(layer.nbytes) for _, layer in kernels]))),
    )  # fmt: skip
    return Part(rows, (plot,))


def layers() -> Part:
    found = [unit for unit in resnet50_times().layers if unit.nbytes > 64 << 10]
    slows = float(spearmanr(range(len(found)), [unit.forward_s for unit in found]).statistic)
    rows = (
        Row("figure 17", "layer's place and forward time, rank correlation, measured", "falls",
            slows, f"{CORE}, {here()}", reason="a ResNet-50 of torch with 4 images, by "
            "overlap.measure, not a GPU: its caches and vectors favour other layers"),
    )  # fmt: skip
    return Part(rows)


def resnet50_times() -> Profile:
    """ResNet-50's layers, with times on one core of this machine."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        os.sched_setaffinity(0, {min(cores)})
        torch.set_num_threads(1)
        batch = torch.randn(4, 3, 224, 224), torch.randint(1000, (4,))
        return overlap.measure(resnet50(), cross_entropy, batch, steps=3)
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)


def measurements() -> Part:
    """Figures 12a and 13 on CPU ranks and on hosts, which have neither NVLinks nor GPUs."""

    def over(other: str) -> Callable[[Recorded], float]:
        """How many times as fast, by what each takes of DDP's step in its own run."""
        base = recorded(other).rows[0]["ratio"]
        return lambda found: float(found.rows[0]["ratio"] / base)

    def by_ms(one: str, other: str) -> str:
        fast, slow = (recorded(name).rows[0] for name in (one, other))
        times = slow["ms"] / fast["ms"]
        return (
            f"each is a multiple of DDP's speed, by turns with it in its own run, in which DDP "
            f"took {slow['ddp_ms']:.0f} and {fast['ddp_ms']:.0f} ms; by ms alone {times:.2f}. The "
            f"other record is {other}.json"
        )

    def trees(nbytes: int) -> Callable[[Recorded], float]:
        def gain(found: Recorded) -> float:
            plain, overlapped = (
                found.row(algorithm=name, nbytes=nbytes)["seconds"]
                for name in ("double_tree", "overlapped_double_tree")
            )
            return float(plain / overlapped)

        return gain

    def turnaround(found: Recorded) -> float:
        plain, overlapped = (
            found.row(algorithm=name)["first_ms"]
            for name in ("double_tree", "overlapped_double_tree")
        )
        return float(plain / overlapped)

    def chaining(found: Recorded) -> float:
        after, chained = (found.row(chained=one)["measured_ms"] for one in (False, True))
        return float(after / chained)

    memory = "8 ranks share one memory, where no link is one-way and idle, and 2 cores"
    queue, allreduces = "queue-4-epyc-2-cores", "algorithms-cpu-8-epyc-2-cores"
    rows = [
        measured("figure 12a", "C1 over B at 64 MB, double trees on 8 CPU ranks", 1.75, CPU_RANKS,
                 allreduces, trees(64 << 20), reason=memory),
        measured("figure 12a", "C1 over B at 256 MB, double trees on 8 CPU ranks", None, CPU_RANKS,
                 allreduces, trees(256 << 20), reason=memory),
        measured("figure 14", "first of 50 layers of 64 MB on 4 CPU ranks, B over C1", None,
                 CPU_RANKS, queue, turnaround),
    ]  # fmt: skip
    for name in ("resnet50", "vgg16", "bert-base"):
        rows.append(measured(
            "figure 13", f"{name}: chained over unchained", None, SLEEPING,
            f"chaining-{name}-epyc-2-cores",
            chaining, reason="lanes on which the all-reduce takes as long as the forward pass: "
            "4/3 is the most",
        ))  # fmt: skip
    eight = "train-c-cube-{}-8-epyc-2-cores"
    for one, other, theirs in (("cc", "b", 1.32), ("c1", "b", 1.10), ("c2", "b", None),
                               ("cc", "r", None)):  # fmt: skip
        rows.append(measured(
            "figure 13", f"ResNet-18 on 8 CPU ranks: {one.upper()} over {other.upper()}", theirs,
            CPU_RANKS, eight.format(one), over(eight.format(other)),
            reason="real steps, batch 2; 8 ranks compute and send on 2 cores, so that nothing is "
            f"idle while the other is under way.{MEANS if theirs else ''} "
            f"{by_ms(eight.format(one), eight.format(other))}",
        ))  # fmt: skip
    chained, unchained = "train-c-cube-4x1-1gbit", "train-c-cube-unchained-4x1-1gbit"
    rows.append(measured(
        "figure 13", "ResNet-18 on 4 hosts: chained over unchained", None, NETWORK, chained,
        over(unchained), reason="real steps with one all-reduce of gloo; 4 hosts share 2 cores. "
        f"{by_ms(chained, unchained)}",
    ))  # fmt: skip
    return Part(tuple(rows))


def _shares(values: list[float]) -> tuple[float, ...]:
    return tuple(value / sum(values) for value in values)
