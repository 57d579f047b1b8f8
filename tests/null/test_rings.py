"""Rings that share no link: as many as there can be, on links that are there, the same each run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, permutations, product
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, milp

from linkweave.collectives import simulate
from linkweave.collectives.planning.algorithms.registry import algorithm_for
from linkweave.collectives.planning.algorithms.rings import Ring, over_nics, rings
from linkweave.collectives.planning.lower import Tuning, lower
from linkweave.collectives.planning.planner import plan_allreduce
from linkweave.collectives.planning.verify import verify
from linkweave.topology import Link, Topology, allreduce_bound, load
from tests.null.helpers import parts_of_dgx1

ROOT = Path(__file__).parents[2]
COUNTS = {
    "dgx1-v100": 6, "dgx1-p100": 4,
    # n - 1 ways out of a rank; for 4 and 6 ranks one less can be had (Bermond and Faber 1976)
    "mesh-3": 2, "mesh-4": 2, "mesh-5": 4, "mesh-6": 4, "mesh-7": 6, "mesh-8": 7, "mesh-9": 8,
    "mesh-16": 15,
    **{f"ring-{n}": 2 for n in range(3, 10)},
}  # fmt: skip
LONE = ["mesh-1", "mesh-2", "ring-2", "dgx2", "dgx-a100", "dgx-h100", "pcie-4", "pcie-8", "cpu-4"]
"""One ring is all there is, or messages pass switches or a memory, whose links all rings share."""


def hops(ring: Ring) -> Iterator[tuple[int, int]]:
    return zip(ring, (*ring[1:], ring[0]), strict=True)


def wires(topology: Topology) -> dict[tuple[int, int], int]:
    """How many links lead from rank to rank."""
    rank: dict[int | str, int] = {g: r for r, g in enumerate(topology.gpus)}
    return {(rank[k.src], rank[k.dst]): k.count for k in topology.fabric}


def check_apart(found: Sequence[Ring], size: int, links: Mapping[tuple[int, int], int]) -> None:
    """Each ring passes every rank once, and together they take no more links than there are."""
    assert all(sorted(ring) == list(range(size)) for ring in found)
    use = Counter(ends for ring in found for ends in hops(ring))
    assert all(n <= links.get(ends, 0) for ends, n in use.items())


@pytest.mark.parametrize(("machine", "count"), COUNTS.items())
def test_rings_that_share_no_link(machine: str, count: int) -> None:
    topo = load(machine)
    found, detours = rings(topo)
    assert len(found) == count and not detours
    check_apart(found, len(topo.gpus), wires(topo))


@pytest.mark.parametrize("machine", LONE)
def test_one_ring_where_all_would_share(machine: str) -> None:
    topo = load(machine)
    (ring,), detours = rings(topo)
    assert sorted(ring) == list(range(len(topo.gpus))) and not detours


@pytest.mark.parametrize(
    ("machine", "count", "share"),
    [("2 x dgx-h100", 8, 1.9), ("4 x dgx-a100", 8, 1.45), ("3 x dgx1-v100", 8, 1.52),
     ("2 x pcie-8", 4, 1.05), ("4 x dgx-h100 nics=1", 2, 1.3)],
)  # fmt: skip
def test_rings_of_a_cluster_use_each_nic(machine: str, count: int, share: float) -> None:
    """A NIC of n nodes of g GPUs carries 2 (1 - 1/(n g)) of its part; 2 (1 - 1/n) would do."""
    topo = load(machine)
    found, detours = rings(topo)
    assert len(found) == count and not detours
    assert all(sorted(ring) == list(range(len(topo.gpus))) for ring in found)
    links = [pair for ring in found for a, b in hops(ring) for pair in pairwise(topo.hops[a, b])]
    uses = Counter(ends for ends in links if topo.by_ends[ends].kind == "network")
    network = {ends for ends, link in topo.by_ends.items() if link.kind == "network"}
    assert set(uses) == network and len(set(uses.values())) == 1  # all, and alike
    plan = plan_allreduce(topo, 1 << 30, "ring")
    verify(plan, topo)
    assert allreduce_bound(topo) / simulate(plan, topo, 1 << 30).algbw < share + 0.1


def test_a_nic_alone_and_long_rings() -> None:
    """Of three NICs with a GPU each, two make a pair; eight nodes have as many rings as keep the
    plan small, but all can be had."""
    assert len(rings(load("2 x mesh-3"))[0]) == 2
    assert len(rings(load("8 x dgx-h100"))[0]) == 2
    assert len(over_nics(load("8 x dgx-h100"))) == 8
    # an odd number of nodes on rails has one ring
    assert len(rings(load("3 x dgx-h100"))[0]) == 1


def test_long_rings_are_fewer() -> None:
    """A plan has 2 P (P - 1) sends a ring: not more than 20,000, or those of one ring."""
    assert [len(rings(load(f"mesh-{n}"))[0]) for n in (24, 32, 128)] == [18, 10, 1]


@pytest.mark.parametrize("seed", range(40))
def test_on_links_drawn_at_random(seed: int) -> None:
    """Some one way only, some several: what is found is there."""
    rng = random.Random(seed)
    size = rng.randint(3, 8)
    around = rng.sample(range(size), size)
    links = {ends: rng.randint(1, 3) for ends in permutations(range(size), 2) if rng.random() < 0.6}
    for ends in hops(tuple(around)):  # one ring at least
        links[ends] = links.get(ends, 0) + 1
    topo = Topology(
        "drawn", tuple(range(size)), tuple(Link(a, b, 10**9, n) for (a, b), n in links.items())
    )
    found, detours = rings(topo)
    assert found and not detours
    check_apart(found, size, links)
    plan = plan_allreduce(topo, 1 << 20, "ring")
    assert plan.exclusive and plan.detours == ()


def most_rings(size: int, links: Mapping[tuple[int, int], int]) -> int:
    """An integer program with a number for every ring that there is."""
    every = [(0, *rest) for rest in permutations(range(1, size))]
    every = [ring for ring in every if all(ends in links for ends in hops(ring))]
    if not every:
        return 0
    row = {ends: i for i, ends in enumerate(links)}
    uses = np.zeros((len(links), len(every)))
    for column, ring in enumerate(every):
        for ends in hops(ring):
            uses[row[ends], column] = 1
    limits = LinearConstraint(uses, ub=list(links.values()))
    ones = np.ones(len(every))
    return round(-milp(-ones, constraints=limits, integrality=ones).fun)


def test_no_part_of_the_dgx1_has_more() -> None:
    for topo in parts_of_dgx1():
        size = len(topo.gpus)
        if size < 8:
            found, detours = rings(topo)
            most = most_rings(size, wires(topo))
            assert (0 if detours else len(found)) == most, topo.name


def test_every_connected_part_of_the_dgx1_has_a_right_plan() -> None:
    """Where no ring runs over links alone, one ring takes detours (nccl#301)."""
    with_detours = 0
    for topo in parts_of_dgx1():
        size = len(topo.gpus)
        algorithm = algorithm_for("ring", topo)
        found, detours = rings(topo)
        assert algorithm.stride == size * len(found)
        plan = lower(algorithm, topo, Tuning(2 * algorithm.stride + 1))  # two groups and a bit
        verify(plan, topo, expand=True)
        if detours:
            with_detours += 1
            assert len(found) == 1
        else:
            assert plan.exclusive
            check_apart(found, size, wires(topo))
    assert (with_detours, len(parts_of_dgx1())) == (104, 181)


def test_each_ring_is_one_track_at_a_rank_and_takes_its_share() -> None:
    """Ring r carries the chunks c with c mod R = r, and nothing else, between its neighbours."""
    topo = load("dgx1-v100")
    found, _ = rings(topo)
    plan = plan_allreduce(topo, 1 << 20, "ring", 48)
    assert {(s.rank, s.channel) for s in plan.tracks} == set(product(range(8), range(6)))
    around = {(r, a, b) for r, ring in enumerate(found) for a, b in hops(ring)}
    assert {(c.src_channel, c.src, c.dst) for c in plan.connections} == around
    assert len(plan.connections) == 48
    for track in plan.tracks:
        assert {chunk % 6 for _, chunk, _ in plan.steps(track)} == {track.channel}


NAMES = ("dgx1-v100", "dgx1-p100", "mesh-6", "mesh-9")
CODE = f"""
from linkweave.collectives.planning.algorithms.rings import rings
from linkweave.topology import load
print([rings(load(name)) for name in {NAMES}])
"""


def test_rings_are_the_same_in_every_process() -> None:
    """Ranks that plan on their own must agree: hashes of text differ from process to process."""
    told = [
        subprocess.run(
            [sys.executable, "-c", CODE], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed},
            check=True, capture_output=True, text=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert told[0] == told[1] == f"{[rings(load(name)) for name in NAMES]}\n"
