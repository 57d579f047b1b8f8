"""The C-Cube paper's figures of all-reduces alone, beside simulated plans.

C1 is the overlapped double tree of figure 10 with its detours; B is the same trees and detours
without overlap, as in section V-B; R is a ring. The text prints few values: what it says of
averages and extremes is compared.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from statistics import fmean as mean

from linkweave import collectives
from linkweave.bench.reproduce import scale
from linkweave.bench.reproduce.rows import COMPUTED, SIMULATED, Part, Plot, Row, Series
from linkweave.collectives import overlap
from linkweave.collectives.overlap import Network
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
