"""Trees packed into links: disjoint, as many as the bound allows, and as fast as it says."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.packing import (
    _rates,
    pack,
    pair_capacity,
    rooted,
    spanning_forests,
)
from linkweave.collectives.planning.planner import plan_allreduce
from linkweave.collectives.planning.simulate import simulate
from linkweave.collectives.planning.verify import verify
from linkweave.topology import Topology, allreduce_bound, bound, load
from linkweave.topology.bounds import FlowNetwork, narrowest_partition
from linkweave.topology.symmetry import pairs_alike
from tests.null.helpers import partitions, parts_of_dgx1

GIB = 1 << 30


def strength(size: int, capacity: dict[tuple[int, int], int]) -> Fraction:
    arcs = {ends: c for (a, b), c in capacity.items() for ends in ((a, b), (b, a))}
    return narrowest_partition(FlowNetwork(range(size), arcs))[0]


def share_reached(topology: Topology, rates: dict[tuple[int, int], int]) -> Fraction:
    """How much of the machine's bound the pairs reach when the fullest link is just full."""
    gpus, links = topology.gpus, topology.by_ends
    use: Counter[tuple[int | str, int | str]] = Counter()
    for (a, b), rate in rates.items():
        for ends in ((gpus[a], gpus[b]), (gpus[b], gpus[a])):
            path = topology.hops[ends]
            use.update(dict.fromkeys(zip(path, path[1:], strict=False), rate))
    fullest = max(Fraction(n, links[k].bandwidth * links[k].count) for k, n in use.items())
    return bound(topology).seconds_per_byte * strength(len(gpus), rates) / fullest


@given(st.data())
def test_as_many_disjoint_edges_as_nash_williams_allows(data: st.DataObject) -> None:
    """None of which closes a circle; all of a tree where a forest is whole."""
    size, count = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 4))
    ends = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).filter(
        lambda e: e[0] < e[1]
    )
    edges = [(a, b, i) for i, (a, b) in enumerate(data.draw(st.lists(ends, max_size=20)))]
    forests = spanning_forests(size, edges, count)
    for forest in forests:
        seen = list(range(size))
        for a, b, _ in forest:
            assert seen[a] != seen[b]
            seen = [seen[b] if s == seen[a] else s for s in seen]
        if len(forest) == size - 1:
            assert sorted(rooted(size, forest).top_down) == list(range(size))
    used = [edge for forest in forests for edge in forest]
    assert len(set(used)) == len(used) and set(used) <= set(edges)

    def between(parts: list[list[int]]) -> int:
        return sum(not any({a, b} <= {*part} for part in parts) for a, b, _ in edges)

    # the most is the least of count * (size - parts) + edges between parts
    every = partitions(range(size))
    assert len(used) == min(count * (size - len(parts)) + between(parts) for parts in every)


def test_rooted_where_it_is_least_deep() -> None:
    tree = rooted(5, [(0, 1), (1, 2), (2, 3), (3, 4)])
    assert (tree.root, tree.depth) == (2, 2)


def test_every_connected_subset_of_the_dgx1_is_packed_to_its_bound() -> None:
    subsets = parts_of_dgx1()
    assert len(subsets) == 181
    for topo in subsets:
        size = len(topo.gpus)
        links = pair_capacity(topo)
        capacity = {pair: amount for pair, (amount, _) in links.items()}
        trees = pack(size, links)
        use = Counter((min(e), max(e)) for tree in trees for e in tree.edges)
        share = max(Fraction(n, capacity[pair]) for pair, n in use.items())  # trees on a link
        reached = len(trees) / share / bound(topo).links
        assert Fraction(99, 100) <= reached <= 1, topo.name


@pytest.mark.parametrize(
    "gpus", [range(8), (1, 2, 3, 5, 6, 7), (0, 1, 3, 4, 5), (0, 3, 4), (0, 1, 2)]
)
def test_simulated_within_five_percent_of_the_bound(gpus: tuple[int, ...]) -> None:
    topo = load("dgx1-v100").subset(gpus)
    plan = plan_allreduce(topo, GIB, "packed_trees")
    verify(plan, topo)
    line = simulate(plan, topo, GIB)
    assert 0.95 * allreduce_bound(topo) < line.algbw <= allreduce_bound(topo)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_subset_simulated_within_five_percent_of_the_bound() -> None:
    for topo in parts_of_dgx1():
        line = simulate(plan_allreduce(topo, GIB, "packed_trees"), topo, GIB)
        assert 0.95 * allreduce_bound(topo) < line.algbw <= allreduce_bound(topo), topo.name


@pytest.mark.parametrize(
    "name", ["dgx1-v100", "dgx1-p100", "dgx2", "dgx-a100", "dgx-h100", "pcie-8"]
)
def test_auto_is_within_five_percent_of_the_bound(name: str) -> None:
    topo = load(name)
    line = simulate(plan_allreduce(topo, GIB), topo, GIB)
    assert 0.95 * allreduce_bound(topo) < line.algbw <= allreduce_bound(topo)


def test_one_and_a_half_times_the_double_tree_at_64_mib() -> None:
    topo = load("dgx1-v100")
    mine, trees = (
        simulate(plan_allreduce(topo, 64 << 20, name), topo, 64 << 20).seconds
        for name in ("auto", "overlapped_double_tree")
    )
    assert trees > 1.5 * mine


@pytest.mark.parametrize(
    "name",
    ["dgx-a100", "pcie-5", "pcie-8", "2 x dgx-a100", "4 x dgx-a100", "2 x dgx1-v100", "3 x pcie-4"],
)
def test_like_pairs_have_like_rates_that_reach_the_bound(name: str) -> None:
    """A rate for each pair would make programs of clusters too large to solve in time."""
    topo = load(name)
    capacity = {pair: amount for pair, (amount, _) in pair_capacity(topo).items()}
    alike = pairs_alike(topo)
    rate_of: dict[int, set[int]] = defaultdict(set)
    for a, b in combinations(range(len(topo.gpus)), 2):
        rate_of[alike[topo.gpus[a], topo.gpus[b]]].add(capacity.get((a, b), 0))
    assert all(len(rates) == 1 for rates in rate_of.values())
    assert 1 - 1e-6 < share_reached(topo, _rates(topo)) <= 1
    assert Fraction(999, 1000) < share_reached(topo, capacity) <= 1


def test_packing_one_memory_is_refused() -> None:
    with pytest.raises(PlanError, match="the ranks of cpu-4 share one memory: use two_shot"):
        plan_allreduce(load("cpu-4"), 1024, "packed_trees")
