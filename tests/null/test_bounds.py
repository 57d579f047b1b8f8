"""The best that a collective can do: exact values, against brute force and against plans."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import chain, combinations, product
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linkweave import collectives
from linkweave.collectives.planning.planner import candidates
from linkweave.topology import (
    Link,
    Topology,
    TopologyError,
    Vertex,
    allreduce_bound,
    bound,
    load,
    reducing_bound,
    to_nccl_xml,
)
from linkweave.topology.bounds import BOUNDED, _bound
from linkweave.topology.readers.parse_smi import parse_smi
from tests.null.fixtures import Machine, all_to_all, tabs
from tests.null.helpers import GB, both, partitions, renumbered

Capacities = Mapping[tuple[Vertex, Vertex], int]
Kappa = Callable[[frozenset[int]], int]


def algbw(topology: Topology, collective: str = "allreduce", root: int | None = None) -> Fraction:
    return 1 / bound(topology, collective, root).seconds_per_byte


def capacities(links: Sequence[Link]) -> dict[tuple[Vertex, Vertex], int]:
    return {(k.src, k.dst): k.bandwidth * k.count for k in links}


# ---- values derived by hand -----------------------------------------------------------------

# In links of the machine: all-reduce; all-gather and reduce-scatter; broadcast. Where P alike ranks
# with k links each hold the traffic up one by one: P k / 2 (P - 1), P k / (P - 1), k.
F = Fraction
IN_LINKS = [
    ("dgx1-v100", F(24, 7), F(48, 7), 6),  # 8 GPUs with 6 links: 48/14; two quads: 8
    ("dgx1-p100", F(16, 7), F(32, 7), 4),  # 8 with 4: 32/14; two quads: 4
    ("dgx2", F(16, 5), F(32, 5), 6),  # 16 with 6 into the switch: 96/30
    ("dgx-a100", F(48, 7), F(96, 7), 12),  # 8 with 12: 96/14
    ("dgx-h100", F(72, 7), F(144, 7), 18),  # 8 with 18: 144/14
    ("pcie-4", F(2, 3), F(4, 3), 1),  # 4 with one port: 4/6
    ("pcie-5", F(5, 8), F(5, 4), 1),  # 5 with one port: 5/8; the four against the fifth: 1
    ("pcie-8", F(4, 7), F(8, 7), 1),  # 8 with one port: 8/14; {0-3}, 4, 5, 6, 7: 5/8; quads: 1
    ("pcie-9", F(9, 16), F(9, 8), 1),  # three switches
    ("mesh-2", F(1), F(2), 1),
    ("ring-2", F(1), F(2), 1),  # one cable, not two
    # N with N - 1 links: N (N - 1) / 2 (N - 1)
    *((f"mesh-{n}", F(n, 2), F(n), n - 1) for n in range(3, 13)),
    # N with 2 links: 2 N / 2 (N - 1); an arc of them has 2 links as well
    *((f"ring-{n}", F(n, n - 1), F(2 * n, n - 1), 2) for n in range(3, 13)),
]


@pytest.mark.parametrize(("name", "allreduce", "allgather", "broadcast"), IN_LINKS)
def test_values_in_links(
    name: str, allreduce: Fraction, allgather: Fraction, broadcast: int
) -> None:
    topo = load(name)
    (width,) = {link.bandwidth for link in topo.fabric}
    expected = zip(BOUNDED, (allreduce, allgather, allgather, broadcast), strict=True)
    for collective, links in expected:
        found = bound(topo, collective)
        assert found.links == links
        assert found.seconds_per_byte == 1 / Fraction(links * width)
        assert found.algbw == pytest.approx(float(links * width), rel=1e-15)
    assert allreduce_bound(topo) == bound(topo).algbw


@pytest.mark.parametrize("n", range(2, 12))
def test_one_memory_for_all_ranks(n: int) -> None:
    """Every rank loads for itself what it gets; to combine N inputs, N - 1 have to be loaded."""
    topo = load(f"cpu-{n}")
    for collective in BOUNDED:
        crossed = (n - 1) * (2 if collective == "allreduce" else 1)
        found = bound(topo, collective)
        assert found.seconds_per_byte == Fraction(crossed, 20 * GB)
        assert (found.over, found.links) == ("memory", None)
        assert found.bottleneck == "the memory that all ranks share"
    slow = tuple(replace(k, bandwidth=GB) if k.src == "store" else k for k in topo.links)
    assert algbw(replace(topo, links=slow)) == Fraction(GB, 2 * (n - 1))


@pytest.mark.parametrize("name", ["mesh-1", "ring-1", "pcie-1", "cpu-1", "1 x mesh-1"])
@pytest.mark.parametrize("collective", BOUNDED)
def test_one_rank_has_nothing_to_wait_for(name: str, collective: str) -> None:
    found = bound(load(name), collective)
    assert found.seconds_per_byte == 0
    assert found.algbw == float("inf")
    assert str(found) == f"{collective}: nothing: one rank has all"


# ---- against all partitions and all cuts -----------------------------------------------------


def proper(ranks: Sequence[int]) -> Iterator[frozenset[int]]:
    sizes = range(1, len(ranks))
    return map(frozenset, chain.from_iterable(combinations(ranks, n) for n in sizes))


def by_flow(capacity: Capacities, ranks: Sequence[int]) -> Kappa:
    """The least capacity from some ranks to the others, as a maximum flow."""
    graph = nx.DiGraph()
    graph.add_nodes_from([*ranks, "from", "to"])
    for (a, b), c in capacity.items():
        graph.add_edge(a, b, capacity=c)

    @cache
    def kappa(side: frozenset[int]) -> int:
        ends = [("from", r) if r in side else (r, "to") for r in ranks]
        graph.add_edges_from(ends)  # no capacity: without limit
        value = nx.maximum_flow_value(graph, "from", "to")
        graph.remove_edges_from(ends)
        return value

    return kappa


def by_sides(capacity: Capacities, ranks: Sequence[int]) -> Kappa:
    """The same, with each switch tried on either side."""
    switches = sorted({v for arc in capacity for v in arc if v not in ranks}, key=str)
    groups = [
        {s for s, taken in zip(switches, choice, strict=True) if taken}
        for choice in product((False, True), repeat=len(switches))
    ]

    def kappa(side: frozenset[int]) -> int:
        return min(
            sum(c for (a, b), c in capacity.items()
                if (a in side or a in g) and b not in side and b not in g)
            for g in groups
        )  # fmt: skip

    return cache(kappa)


def least_allreduce(kappa: Kappa, ranks: Sequence[int]) -> Fraction:
    whole = frozenset(ranks)

    def into(side: frozenset[int]) -> int:
        return kappa(whole - side)

    values = [Fraction(kappa(s)) for s in proper(ranks)]  # all of S's sum has to leave S
    for parts in partitions(ranks):
        if (r := len(parts)) > 1:
            for way in (kappa, into):
                values.append(Fraction(sum(way(frozenset(p)) for p in parts), 2 * (r - 1)))
    return min(values)


def least(kappa: Kappa, ranks: Sequence[int], collective: str) -> Fraction:
    size, whole = len(ranks), frozenset(ranks)
    if collective == "allreduce":
        return least_allreduce(kappa, ranks)
    if collective == "allgather":  # what S holds has to leave S
        return min(Fraction(size * kappa(s), len(s)) for s in proper(ranks))
    if collective == "reduce_scatter":  # what S is to have has to enter S
        return min(Fraction(size * kappa(whole - s), len(s)) for s in proper(ranks))
    return min(Fraction(kappa(s)) for s in proper(ranks))  # of the worst root


DGX1_SUBSETS = [some for n in range(2, 9) for some in combinations(range(8), n)]


def test_every_subset_of_the_dgx1_against_all_partitions() -> None:
    assert len(DGX1_SUBSETS) == 247
    dgx1 = load("dgx1-v100")
    over = []
    for some in DGX1_SUBSETS:
        topo = dgx1.subset(some)
        nvlinks = capacities([k for k in topo.links if k.kind == "nvlink"])
        graph = nx.Graph(nvlinks.keys())
        graph.add_nodes_from(some)
        joined = nx.is_connected(graph)
        over.append(joined)
        kappa = by_sides(nvlinks if joined else capacities(topo.links), some)
        assert algbw(topo) == least_allreduce(kappa, some), some
        if joined:  # of trees in a graph (Nash-Williams, Tutte): links across over parts - 1
            across = min(
                Fraction(sum(sum(c for (a, b), c in nvlinks.items() if a in p and b not in p)
                             for p in map(set, parts)) // 2, len(parts) - 1)
                for parts in partitions(some) if len(parts) > 1
            )  # fmt: skip
            assert algbw(topo) == across
    # not connected by NVLink: 50 of 247, among them the twelve pairs without a link
    assert (over.count(False), over[:28].count(False)) == (50, 12)


def test_every_subset_of_the_dgx1_takes_seconds() -> None:
    _bound.cache_clear()
    begun = time.process_time()
    for some in DGX1_SUBSETS:
        assert 0 < allreduce_bound(load("dgx1-v100").subset(some)) < float("inf")
    assert time.process_time() - begun < 10  # others' use of the cores does not count


def random_network(seed: int, two_way: bool) -> Topology:
    """Two to five ranks, switches and forwarders; a tree that joins all, and more links."""
    rng = random.Random(seed)
    names = rng.sample(range(30), 7)
    ranks, helpers = names[: rng.randint(2, 5)], names[5 : 5 + rng.choice((0, 0, 1, 2))]
    vertices: list[Vertex] = [*ranks, *helpers, *"abc"[: rng.randint(0, 3)]]
    rng.shuffle(vertices)
    ends = [(rng.choice(vertices[:i]), vertices[i]) for i in range(1, len(vertices))]
    ends += [tuple(rng.sample(vertices, 2)) for _ in range(rng.randint(0, 2 * len(vertices)))]
    links: dict[tuple[Vertex, Vertex], Link] = {}
    for a, b in ends:
        width, count = rng.randint(1, 6), rng.randint(1, 3)
        links[a, b] = Link(a, b, width, count)
        if not two_way:
            width, count = rng.randint(1, 6), rng.randint(1, 3)
        if two_way or rng.random() < 0.9:
            links[b, a] = Link(b, a, width, count)
    return Topology(f"random {seed}", tuple(ranks), tuple(links.values()), (), (), tuple(helpers))


@pytest.mark.parametrize("two_way", [True, False])
@pytest.mark.parametrize("batch", range(5))
def test_random_networks_against_brute_force(batch: int, two_way: bool) -> None:
    for seed in range(100 * batch, 100 * batch + 16):
        topo = random_network(seed, two_way)
        kappa = by_flow(capacities(topo.links), topo.gpus)
        for collective in BOUNDED:
            expected = least(kappa, topo.gpus, collective)
            if expected:
                assert algbw(topo, collective) == expected, (seed, collective)
            else:
                with pytest.raises(TopologyError, match=f"random {seed}: no link leads"):
                    bound(topo, collective)
        for rank, gpu in enumerate(topo.gpus):
            from_it = min(kappa(s) for s in proper(topo.gpus) if gpu in s)
            if from_it:
                assert algbw(topo, "broadcast", rank) == from_it, (seed, rank)


def test_gathering_waits_for_the_worst_of_several_groups() -> None:
    """0-3 has two links out; its halves four each, 4-7 four, and all of them lead to 8 and 9."""
    groups = [(0, 1), (2, 3), (4, 5, 6, 7), (8, 9)]
    links = [k for group in groups for a, b in combinations(group, 2) for k in both(a, b, 20)]
    links += [*both(0, 2, 3), *both(0, 8, 1), *both(2, 9, 1), *both(4, 8, 2), *both(5, 9, 2)]
    topo = Topology("groups", tuple(range(10)), tuple(links))
    kappa = by_sides(capacities(links), topo.gpus)
    for collective in ("allgather", "reduce_scatter"):
        # what the six others hold has to reach 0-3: 10 * 2 / 6; to reach a half: 10 * 4 / 8
        assert algbw(topo, collective) == least(kappa, topo.gpus, collective) == Fraction(10, 3)


def test_ranks_alike_at_first_sight() -> None:
    """Regular graphs whose vertices one round of counting neighbours cannot tell apart."""
    hexagon = [(i, (i + 1) % 6) for i in range(6)]
    triangles = [(6, 7), (7, 8), (6, 8), (9, 10), (10, 11), (9, 11)]
    for hub_ends in (range(12), (0, 6), (0, 6, 9), (0, 1, 6, 7, 9, 10)):
        links = [k for a, b in hexagon + triangles for k in both(a, b, 3)]
        links += [k for g in hub_ends for k in both(g, "hub", 2)]
        some = [0, 3, 6, 7, 9]  # five with ranks, all others pass on
        rest = tuple(g for g in range(12) if g not in some)
        topo = Topology("regular", tuple(some), tuple(links), (), (), rest)
        if len(set(hub_ends) & {9, 10, 11}):
            kappa = by_flow(capacities(links), some)
            for collective in BOUNDED:
                assert algbw(topo, collective) == least(kappa, some, collective)
        else:
            with pytest.raises(TopologyError, match=r"GPU 9 (to|from)|GPU 0,3,6-7 (to|from)"):
                bound(topo)


# ---- no plan is faster -----------------------------------------------------------------------

SOME_DGX1 = [(0, 1), (0, 3), (0, 5), (0, 1, 2), (1, 4, 6), (0, 1, 2, 3), (0, 3, 5, 6), (2, 3, 5),
             (0, 1, 4, 5), (0, 1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6, 7)]  # fmt: skip
RUN = ["dgx1-v100", "dgx1-p100", "dgx-a100", "mesh-5", "ring-6", "pcie-8", "pcie-5", "cpu-4",
       "cpu-2", "2 x mesh-3 nic=6GB/s", *SOME_DGX1]  # fmt: skip


@pytest.mark.parametrize("which", RUN, ids=str)
def test_no_plan_is_faster(which: str | tuple[int, ...]) -> None:
    topo = load(which) if isinstance(which, str) else load("dgx1-v100").subset(which)
    free = replace(topo, links=tuple(replace(k, latency_us=0) for k in topo.links))
    most = allreduce_bound(topo)
    assert allreduce_bound(free) == most
    nbytes, best = 1 << (26 if topo.name.startswith("cpu") else 30), 0.0  # small chunks there
    for name in candidates(topo):
        plan = collectives.plan_allreduce(topo, nbytes, name)
        for machine in (topo, free):
            reached = collectives.simulate(plan, machine, nbytes).algbw
            assert reached <= most * (1 + 1e-9), name
            best = max(best, reached)
    assert best > most / 20  # of the same order, so the comparison says something


# ---- what may not matter ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dgx1-v100", "pcie-8", "ring-7", "dgx-a100", "2 x dgx1-p100"])
def test_renumbering_changes_no_value(name: str) -> None:
    topo = load(name)
    rng = random.Random(7)
    for _ in range(3):
        other = renumbered(topo, rng.sample(topo.gpus, len(topo.gpus)))
        for collective in BOUNDED:
            assert algbw(other, collective) == algbw(topo, collective)


# ---- forwarders ------------------------------------------------------------------------------


def test_forwarders_that_help() -> None:
    dgx1 = load("dgx1-v100")
    # 0 and 1: one NVLink. Over 2: 0-2 has one, 2-1 two. Over 3: 0-3 has two, 3-1 one, 3-2 two.
    assert algbw(dgx1.subset([0, 1])) == 25 * GB
    assert algbw(dgx1.subset([0, 1], [2])) == 50 * GB
    assert algbw(dgx1.subset([0, 1], [2, 3])) == 100 * GB
    assert algbw(dgx1.subset([0, 1], [2, 3, 4, 5, 6, 7])) == 150 * GB  # two more over 4 and 5
    # 0 and 5: no NVLink, and 6 GB/s between the CPUs. Over 1 the one of 0-1, over 4 that of 4-5.
    assert algbw(dgx1.subset([0, 5])) == 6 * GB
    assert algbw(dgx1.subset([0, 5], [1])) == 25 * GB
    assert algbw(dgx1.subset([0, 5], [1, 4])) == 50 * GB
    assert bound(dgx1.subset([0, 1], [2])).over == "NVLink"


def test_forwarders_never_lower_the_bound() -> None:
    dgx1, rng = load("dgx1-v100"), random.Random(1)
    raised = 0
    for some in DGX1_SUBSETS:
        rest = [g for g in range(8) if g not in some]
        helpers = rng.sample(rest, rng.randint(0, len(rest)))
        topo, helped = dgx1.subset(some), dgx1.subset(some, helpers)
        kappa = by_sides(capacities(helped.fabric), some) if len(helped.fabric) < 20 else None
        if kappa and len(some) < 5:
            assert algbw(helped) == least_allreduce(kappa, some)
        for collective in BOUNDED:
            assert algbw(helped, collective) >= algbw(topo, collective), (some, helpers)
        raised += algbw(helped) > algbw(topo)
    assert raised > 50


# ---- words -----------------------------------------------------------------------------------


def quads(between: int, within: int) -> Topology:
    """Two fully joined quads of `within` links a pair, joined by `between` single links."""
    pairs = [(a + q, b + q, within) for q in (0, 4) for a, b in combinations(range(4), 2)]
    pairs += [(g, g + 4, 1) for g in range(between)]
    links = tuple(k for a, b, n in pairs for k in both(a, b, 25 * GB, n))
    return Topology("quads", tuple(range(8)), links)


def test_words_for_every_gpu() -> None:
    found = bound(load("dgx1-v100"))
    assert found.bottleneck == "each GPU's six links"
    assert found.parts == tuple((g,) for g in range(8))
    assert found.over == "NVLink"
    assert str(found) == (
        "allreduce: at most 85.71 GB/s on the wires = 24/7 links over NVLink; bottleneck: each "
        "GPU's six links"
    )
    assert bound(load("dgx-h100")).bottleneck == "each GPU's 18 links"
    assert bound(load("mesh-2")).bottleneck == "each GPU's one link"


def test_words_for_two_halves() -> None:
    # halves: 3; all apart: (2 * 6 * 6 + 6) / 14 > 3 with double links within the quads
    found = bound(quads(3, 2))
    assert found.links == 3
    assert found.bottleneck == "the three links between 0-3 and 4-7"
    assert set(found.parts) == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert str(found).startswith("allreduce: at most 75 GB/s on the wires = 3 links over NVLink; ")
    for collective, links in (("allgather", 6), ("reduce_scatter", 6), ("broadcast", 3)):
        assert bound(quads(3, 2), collective).links == links
        words = bound(quads(3, 2), collective).bottleneck
        assert re.fullmatch("the three links between (0-3 and 4-7|4-7 and 0-3)", words)
    # with single links within, all apart is less: (2 * 12 + 2 * 3) / 14
    assert bound(quads(3, 1)).links == Fraction(15, 7)
    assert bound(quads(3, 1)).bottleneck == "the 15 links between " + ("0, 1, 2, 3, 4, 5, 6 and 7")


def test_words_for_one_weak_gpu() -> None:
    mesh = load("mesh-4")
    weak = Topology("weak", (0, 1, 2, 3, 4), (*mesh.links, *both(2, 4, 25 * GB)))
    for collective in ("allreduce", "broadcast"):
        found = bound(weak, collective)
        assert found.links == 1
        assert found.bottleneck == "GPU 4's one link"
        assert str(found).startswith(
            f"{collective}: at most 25 GB/s on the wires = 1 link over NVLink; "
        )
    assert bound(weak, "allgather").links == Fraction(5, 4)


def test_words_for_a_pcie_uplink() -> None:
    topo = load("pcie-8")
    links = tuple(replace(k, bandwidth=2 * GB) if k.kind == "host" else k for k in topo.links)
    found = bound(replace(topo, links=links))
    assert found.seconds_per_byte == Fraction(1, 2 * GB)
    assert found.bottleneck in (
        "the one link between 0-3 and 4-7 (switch0-host)",
        "the one link between 0-3 and 4-7 (host-switch1)",
    )
    assert (found.over, found.links) == ("PCIe", None)


def test_words_count_the_links_that_hold_it_up() -> None:
    """One way has three links, the other one: the one is what all collectives but one wait for."""
    links = (Link(0, 1, 4 * GB, 3), Link(1, 0, 4 * GB, 1))
    topo = Topology("askew", (0, 1), links)
    for collective, n in (("allreduce", 1), ("allgather", 2), ("reduce_scatter", 2),
                          ("broadcast", 1)):  # fmt: skip
        assert bound(topo, collective).links == n
        assert "one link" in bound(topo, collective).bottleneck, collective


def test_words_for_groups_and_kinds() -> None:
    found = bound(load("3 x mesh-4 nic=1GB/s"))  # 3 nodes with 4 GB/s: 12/4
    assert found.seconds_per_byte == Fraction(1, 3 * GB)
    assert found.bottleneck == "the four links of each of 3 groups: 0-3, 4-7 and 8-11"
    assert found.over == "NVLink, PCIe and the network"
    assert bound(load("dgx1-v100").subset([0, 1, 6])).over == "NVLink and PCIe"
    assert bound(load("dgx1-v100").subset([0, 5])).over == "PCIe"


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("collective", BOUNDED)
def test_gpus_that_nothing_joins(collective: str) -> None:
    links = (*both(0, 1, GB), *both(2, 3, GB), *both(3, 4, GB))
    topo = Topology("apart", (0, 1, 2, 3, 4), links)
    with pytest.raises(TopologyError, match=r"apart: no link .* GPU (0-1|2-4) .* the other GPUs"):
        bound(topo, collective)
    with pytest.raises(TopologyError, match=r"no link .* GPU [01] "):
        bound(Topology("loose", (0, 1), ()), collective)


def test_a_way_in_but_none_out() -> None:
    topo = Topology("one way", (0, 1, 2), (*both(0, 1, GB), Link(1, 2, GB)))
    assert algbw(topo, "broadcast", 0) == GB
    for collective in BOUNDED:
        with pytest.raises(TopologyError, match="no link leads from GPU 2 to the other GPUs"):
            bound(topo, collective)


def test_unknown_collectives_and_roots() -> None:
    topo = load("mesh-3")
    with pytest.raises(TopologyError, match="no bound for 'alltoall'; choose from allreduce, allg"):
        bound(topo, "alltoall")
    for root in (-1, 3):
        with pytest.raises(TopologyError, match=f"root {root}: .* a rank from 0 to 2"):
            bound(topo, "broadcast", root)
    for collective in ("allreduce", "allgather", "reduce_scatter"):
        with pytest.raises(TopologyError, match="root 0: only a broadcast has one"):
            bound(topo, collective, 0)


# ---- large clusters --------------------------------------------------------------------------

# A node's NICs are the least: 128 nodes with n NICs of b GB/s, 128 n b / 2 (128 - 1) GB/s.
# The leaves' uplinks of 16 nodes carry half of what these send, 8 such groups: 8 * 3072 / 14 GB/s.
LARGE = [
    pytest.param(  # a NIC a GPU
        "128 x dgx-h100 leaf=16 oversubscription=2", F(24576 * GB, 127), "eight",
        marks=pytest.mark.slow,
    ),
    ("128 x dgx1-v100", F(3072 * GB, 127), "four"),  # a NIC a PCIe switch
]  # fmt: skip


@pytest.mark.parametrize(("spec", "value", "nics"), LARGE)
def test_a_thousand_gpus(spec: str, value: Fraction, nics: str) -> None:
    topo = load(spec)
    assert len(topo.gpus) == 1024
    found = bound(topo)
    assert 1 / found.seconds_per_byte == value
    assert found.bottleneck.startswith(f"the {nics} links of each of 128 groups: 0-7, 8-15, ")
    assert [len(part) for part in found.parts] == [8] * 128


@pytest.mark.parametrize(
    ("spec", "leaves", "words"),
    [
        ("16 x dgx-h100 leaf=4 oversubscription=8", 4, "0-31, 32-63"),
        pytest.param(
            "128 x dgx-h100 leaf=16 oversubscription=32", 8, "0-127, 128-255",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_gpus_behind_narrow_leaves(spec: str, leaves: int, words: str) -> None:
    """Leaves with 8 rails of 4 * 48 / 8 = 16 * 48 / 32 = 24 GB/s, which 192 GB/s leave by."""
    topo = load(spec)
    assert algbw(topo) == F(leaves * 192 * GB, 2 * (leaves - 1))
    wanted = f"the eight links of each of {leaves} groups: {words}"
    assert bound(topo).bottleneck.startswith(wanted)


def test_words_do_not_blame_the_gpus_for_what_lies_behind_them() -> None:
    """GPUs 0 and 1 under one CPU, GPU 2 under another: its cut is the link between the CPUs."""
    ends = ((0, "cpu0"), (1, "cpu0"), (2, "cpu1"))
    ports = [k for g, cpu in ends for k in both(g, cpu, 12 * GB, kind="host")]
    socket = both("cpu0", "cpu1", 10 * GB, kind="socket")
    found = bound(Topology("sockets", (0, 1, 2), (*ports, *socket)))
    assert found.algbw == 8.5e9  # (12 + 12 + 10) / 4
    assert found.bottleneck.startswith("what leads out of 0, 1 and 2 (")
    assert "cpu" in found.bottleneck


def test_words_name_kinds_where_links_differ_and_count_them() -> None:
    two = bound(load("2 x dgx-h100")).bottleneck
    assert two == "the 18 NVLinks and one PCIe link by which each GPU is reached"
    assert bound(load("gb200-nvl72"), "broadcast").bottleneck == "each GPU's 18 links"
    ends = ((0, "cpu0"), (1, "cpu0"), (2, "cpu1"), (3, "cpu1"))
    ports = [k for g, cpu in ends for k in both(g, cpu, 12 * GB, kind="host")]
    socket = both("cpu0", "cpu1", 2 * GB, 2, kind="socket")
    found = bound(Topology("sockets", (0, 1, 2, 3), (*ports, *socket)))
    assert found.bottleneck == "the two links between 0-1 and 2-3 (2 x cpu0-cpu1)"


def test_on_one_memory_it_is_a_model_and_no_bound() -> None:
    assert str(bound(load("cpu-4"))) == "allreduce: about 3.333 GB/s by the model of one memory"


# ---- switches that reduce ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "plain", "reduced"),
    [("dgx-h100", F(18 * 25 * 4, 7), 18 * 25), ("dgx-h200", F(18 * 25 * 4, 7), 18 * 25),
     ("dgx-b200", F(18 * 50 * 4, 7), 18 * 50)],
)  # fmt: skip
def test_switches_that_reduce_take_each_byte_once(name: str, plain: F, reduced: int) -> None:
    """A port carries N bytes each way, where it carries 2 (P - 1) / P N without them."""
    machine = load(name)
    assert 1 / bound(machine).seconds_per_byte == plain * GB
    found = reducing_bound(machine)
    assert found is not None and 1 / found.seconds_per_byte == reduced * GB
    assert (found.links, found.bottleneck) == (18, "each GPU's 18 links")
    assert str(found).startswith(
        f"allreduce, reduced by the switches (NVLS): at most {reduced} GB/s on the wires = 18 "
        "links over NVLink"
    )


@pytest.mark.parametrize("name", ["dgx2", "dgx-a100", "dgx1-v100", "pcie-8", "cpu-4"])
def test_other_switches_do_not_reduce(name: str) -> None:
    assert reducing_bound(load(name)) is None


def test_switches_that_reduce_are_kept_and_told(tmp_path: Path) -> None:
    machine = load("dgx-h100")
    assert Topology.from_json(machine.to_json()).reducing == ("nvswitch",)
    assert machine.subset([0, 3]).reducing == ("nvswitch",)
    two = load("2 x dgx-h100")
    assert two.reducing == ("node0.nvswitch", "node1.nvswitch")
    reduced, plain = reducing_bound(two), bound(two)
    assert reduced is not None and reduced.seconds_per_byte <= plain.seconds_per_byte
    wrong = json.loads(machine.to_json()) | {"reducing": ["spine"]}
    with pytest.raises(TopologyError, match="no link of 'spine', which is said to reduce"):
        Topology.from_json(json.dumps(wrong))
    for name in ("dgx-h100", "dgx-b200", "dgx-a100"):
        path = tmp_path / f"{name}.xml"
        path.write_text(to_nccl_xml(load(name)))
        assert load(path).reducing == load(name).reducing


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.randoms(use_true_random=False))
def test_the_bound_of_reducing_switches_is_the_least_cut(n: int, chance: random.Random) -> None:
    """Against all subsets, on stars of unequal ports and a few links of GPUs."""
    links = [link for g in range(n)
             for link in (Link(g, "sw", chance.randint(1, 9), kind="nvlink"),
                          Link("sw", g, chance.randint(1, 9), kind="nvlink"))]  # fmt: skip
    links += [Link(a, b, chance.randint(1, 9), kind="nvlink")
              for a in range(n) for b in range(n) if a != b and chance.random() < 0.3]  # fmt: skip
    machine = Topology("star", tuple(range(n)), tuple(links), reducing=("sw",))
    least = min(
        sum(k.bandwidth for k in links if k.src in side and k.dst not in side)
        for size in range(1, n)
        for some in combinations(range(n), size)
        for side in ({*some}, {*some, "sw"})
    )
    found = reducing_bound(machine)
    assert found is not None and 1 / found.seconds_per_byte == least


@pytest.mark.parametrize(("links", "reduces"), [(18, True), (12, False), (6, False)])
def test_gpus_without_a_model_are_known_by_their_links(links: int, reduces: bool) -> None:
    table = tabs(Machine(all_to_all(4, links), "0 0 0 0", tails=[""] * 4), header="")
    assert parse_smi(table).reducing == (("nvswitch",) if reduces else ())


@pytest.mark.parametrize("name", ["2 x dgx-h100 nic=24GB/s", "4 x dgx-h100", "16 x dgx-h100"])
def test_switches_between_nodes_do_not_reduce(name: str) -> None:
    """There the rails, on which nodes are like ranks, hold the all-reduce up as before."""
    machine = load(name)
    reduced = reducing_bound(machine)
    assert reduced is not None and reduced.seconds_per_byte == bound(machine).seconds_per_byte
    assert reducing_bound(machine.subset([0, 8])) is None  # NVSwitches do not join these


def test_a_switch_without_links_reduces_nothing() -> None:
    """As of a machine whose NVLinks are taken away; what is written is read back."""
    machine = load("dgx-h100")
    bare = replace(machine, links=load("pcie-8").links)
    assert bare.reducing == () and reducing_bound(bare) is None
    assert Topology.from_json(bare.to_json()) == bare
