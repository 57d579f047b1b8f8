"""What looks alike is alike: orbits, merged cuts, isomorphisms."""

from __future__ import annotations

import random
import resource
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, islice, permutations
from multiprocessing import get_context

import networkx as nx
import pytest

from linkweave.topology import Link, Topology, load
from linkweave.topology.bounds import FlowNetwork
from linkweave.topology.symmetry import mappings, pairs_alike
from tests.null.helpers import GB, Ends, both, renumbered


def machine(pairs: Sequence[Ends], gpus: int, name: str = "drawn") -> Topology:
    links = tuple(k for a, b in pairs for k in both(a, b))
    return Topology(name, tuple(range(gpus)), links)


def beside(*graphs: nx.Graph) -> nx.Graph:
    return nx.disjoint_union_all(graphs)


def cycle(n: int) -> nx.Graph:
    return nx.cycle_graph(n)


# ---- like ranks and merged cuts --------------------------------------------------------------

HEXAGON_AND_TRIANGLES = beside(cycle(6), cycle(3), cycle(3))
PRISM_AND_K33 = beside(nx.circular_ladder_graph(3), nx.complete_bipartite_graph(3, 3))
GRAPHS = {  # and the sizes of the sets of like vertices
    "path": (nx.path_graph(5), [1, 2, 2]),
    "ring": (cycle(7), [7]),
    "hexagon and triangles": (HEXAGON_AND_TRIANGLES, [6, 6]),
    "prism and K33": (PRISM_AND_K33, [6, 6]),
    "prism": (nx.circular_ladder_graph(5), [10]),
    "cube": (nx.hypercube_graph(3), [8]),
    "Petersen": (nx.petersen_graph(), [10]),
    "Frucht": (nx.frucht_graph(), [1] * 12),  # regular, and no symmetry at all
    "wheel": (nx.wheel_graph(6), [1, 5]),
}


def of_graph(graph: nx.Graph, capacity: int = 1) -> tuple[list[int], dict[Ends, int]]:
    named = nx.convert_node_labels_to_integers(graph)
    return list(named), {e: capacity for a, b in named.edges for e in ((a, b), (b, a))}


def hubbed(graph: nx.Graph, ends: Sequence[int]) -> tuple[list[int], dict[Ends, int]]:
    """The graph with double links, and a switch that joins some of its vertices."""
    ranks, capacity = of_graph(graph, 2)
    return ranks, {**capacity, **{e: 1 for g in ends for e in ((g, "hub"), ("hub", g))}}


def askew(ranks: Sequence[int], capacity: Mapping[Ends, int]) -> dict[Ends, int]:
    """One way twice as wide as the other, alike for all in a cycle that is numbered around."""
    n = len(ranks)
    return {(a, b): c * (2 if (b - a) % n == 1 else 1) for (a, b), c in capacity.items()}


def networks() -> dict[str, tuple[list[int], dict[Ends, int], list[int] | None]]:
    made: dict[str, tuple[list[int], dict[Ends, int], list[int] | None]] = {}
    for name, (graph, sizes) in GRAPHS.items():
        made[name] = (*of_graph(graph), sizes)
    for name in ("hexagon and triangles", "ring", "cube", "prism and K33"):
        graph, sizes = GRAPHS[name]
        if len(graph) < 12:
            made[f"{name} on a switch"] = (*hubbed(graph, range(len(graph))), sizes)
    made["hexagon and triangles, joined"] = (*hubbed(HEXAGON_AND_TRIANGLES, range(12)), [6, 6])
    made["hexagon and triangles, tied"] = (*hubbed(HEXAGON_AND_TRIANGLES, (0, 6, 9)), None)
    ranks, capacity = of_graph(cycle(6))
    made["one-way ring"] = (ranks, {e: 3 for e in capacity if (e[1] - e[0]) % 6 == 1}, [6])
    lopsided = {(0, "hub"): 2, (1, "hub"): 2, (2, "hub"): 2, ("hub", 0): 1, ("hub", 1): 1}
    made["unlike only in what comes in"] = ([0, 1, 2], {**lopsided, ("hub", 2): 3}, [1, 2])
    made["askew ring"] = (ranks, askew(ranks, capacity), [6])
    for seed in range(4):
        ranks, capacity = of_graph(nx.random_regular_graph(3, 8, seed=seed))
        made[f"cubic {seed}"] = (ranks, capacity, None)
        rng = random.Random(seed)
        made[f"cubic {seed}, two widths"] = (ranks, {e: rng.choice((1, 2)) for e in capacity}, None)
    return made


NETWORKS = networks()


class Plain:
    """All cuts of a small network, one by one."""

    def __init__(self, ranks: Sequence[int], capacity: Mapping[Ends, int]) -> None:
        vertices = list(dict.fromkeys([*ranks, *(v for e in capacity for v in e)]))
        position = {v: i for i, v in enumerate(vertices)}
        self.vertices, self.ranks, self.bits = (
            vertices,
            ranks,
            {v: 1 << i for v, i in position.items()},
        )
        arcs = [(1 << position[a], 1 << position[b], c) for (a, b), c in capacity.items()]
        self.out = [0] * (1 << len(vertices))
        for side in range(len(self.out)):
            self.out[side] = sum(c for a, b, c in arcs if side & a and not side & b)

    def least(
        self, weights: Mapping[int, Fraction], inside: int, outside: int | None
    ) -> tuple[Fraction, int]:
        """The least value, and the largest side that has it."""
        need, never = self.bits[inside], 0 if outside is None else self.bits[outside]
        scale = 6
        gain = [(self.bits[r], int(weights.get(r, 0) * scale)) for r in self.ranks]
        best, union = None, 0
        for side, out in enumerate(self.out):
            if side & need and not side & never:
                value = out * scale - sum(w for bit, w in gain if side & bit)
                if best is None or value < best:
                    best, union = value, side
                elif value == best:
                    union |= side
        assert best is not None
        return Fraction(best, scale), union


@pytest.mark.parametrize("name", NETWORKS)
def test_like_ranks_have_equal_cuts(name: str) -> None:
    ranks, capacity, sizes = NETWORKS[name]
    network = FlowNetwork(ranks, capacity)
    assert sorted(r for members in network.alike for r in members) == sorted(ranks)
    if sizes is not None:
        assert sorted(map(len, network.alike)) == sizes
    plain = Plain(ranks, capacity)
    profile: dict[int, list[tuple[int, int]]] = {r: [] for r in ranks}
    for side, out in enumerate(plain.out):
        size = sum(bool(side & plain.bits[r]) for r in ranks)
        for r in ranks:
            if side & plain.bits[r]:
                profile[r].append((size, out))
    for members in network.alike:
        first = sorted(profile[members[0]])
        assert all(sorted(profile[m]) == first for m in members)


@pytest.mark.parametrize("name", NETWORKS)
def test_merged_cuts_are_plain_cuts(name: str) -> None:
    ranks, capacity, _ = NETWORKS[name]
    network, plain = FlowNetwork(ranks, capacity), Plain(ranks, capacity)
    rng = random.Random(name)
    for _ in range(4):
        weights: dict[int, Fraction] = {}
        for members in network.alike:
            weights.update(dict.fromkeys(members, Fraction(rng.randint(-9, 18), 6)))
        for rank in {members[rng.randrange(len(members))] for members in network.alike}:
            cut = network.least(rank, weights, inside=[rank])
            value, union = plain.least(weights, rank, None)
            side = sum(plain.bits[v] for v in cut.side)
            assert cut.capacity == plain.out[side]
            inside = cut.side & set(ranks)
            assert cut.capacity - sum(weights[r] for r in inside) == value
            assert side == union  # the largest such set


@pytest.mark.parametrize("name", ["cube", "hexagon and triangles, tied", "askew ring", "path"])
def test_cuts_between_a_root_and_another(name: str) -> None:
    ranks, capacity, _ = NETWORKS[name]
    plain = Plain(ranks, capacity)
    for root in (ranks[0], ranks[-1]):
        network = FlowNetwork(ranks, capacity, apart=[root])
        assert (root,) in network.alike
        for members in network.alike:
            if members != (root,):
                cut = network.least(members[-1], {}, inside=[root], outside=[members[-1]])
                assert cut.capacity == plain.least({}, root, members[-1])[0]
                assert root in cut.side and members[-1] not in cut.side


# ---- isomorphisms ----------------------------------------------------------------------------


def wires_of(topology: Topology) -> dict[Ends, tuple[str, int, int]]:
    return {(k.src, k.dst): (k.kind, k.count, k.bandwidth) for k in topology.fabric}


def brute_automorphisms(topology: Topology) -> set[tuple[int, ...]]:
    wires = wires_of(topology)
    return {
        to for to in permutations(topology.gpus)
        if all(wires.get((to[a], to[b])) == w for (a, b), w in wires.items())  # type: ignore[index]
    }  # fmt: skip


@pytest.mark.parametrize("name", ["dgx1-v100", "dgx1-p100", "mesh-4", "ring-5", "ring-8", "ring-2"])
def test_automorphisms_are_those_of_brute_force(name: str) -> None:
    topo = load(name)
    found = [tuple(m[g] for g in topo.gpus) for m in mappings(topo, topo)]
    assert len(found) == len(set(found))
    assert set(found) == brute_automorphisms(topo)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("ring-5", 10), ("mesh-4", 24), ("mesh-1", 1), ("ring-2", 2), ("pcie-4", 24), ("cpu-4", 24),
        ("pcie-8", 1152),  # 4! in each switch, and the two switches
        ("pcie-5", 24),
        ("2 x mesh-2", 4),  # the nodes, and the rails
        ("2 x mesh-2 nics=1", 8),
    ],
)  # fmt: skip
def test_how_many_automorphisms(name: str, count: int) -> None:
    topo = load(name)
    every = [tuple(m[g] for g in topo.gpus) for m in mappings(topo, topo)]
    assert len(every) == len(set(every)) == count
    assert topo.gpus in every


def test_swapped_switches_are_no_renumbering() -> None:
    topo = machine([(g, s) for g in range(3) for s in ("a", "b", "c")], 3)
    assert len(list(mappings(topo, topo))) == 6  # and not six times six


ALIKE = {  # the sizes of the classes of pairs
    "mesh-1": [], "mesh-5": [10], "ring-6": [3, 6, 6], "dgx1-p100": [4, 12, 12],
    "dgx1-v100": [2, 2, 2, 2, 4, 4, 4, 4, 4], "dgx-a100": [28], "dgx2": [120],
    "pcie-8": [12, 16],  # on one switch, on two
    # in a node; on one rail; neither
    "2 x dgx-a100": [8, 56, 56], "4 x dgx-a100": [48, 112, 336], "2 x mesh-2": [2, 2, 2],
    "2 x mesh-2 nics=1": [2, 4],
}  # fmt: skip


@pytest.mark.parametrize(("spec", "sizes"), ALIKE.items())
def test_pairs_alike(spec: str, sizes: list[int]) -> None:
    topo = load(spec)
    number = pairs_alike(topo)
    assert set(number) == set(combinations(topo.gpus, 2))
    assert sorted(Counter(number.values()).values()) == sizes


def test_pairs_alike_on_a_cluster_are_of_one_node_one_rail_or_neither() -> None:
    topo = load("2 x dgx-a100")
    kinds = {((a // 8 == b // 8, a % 8 == b % 8), n) for (a, b), n in pairs_alike(topo).items()}
    assert len(kinds) == len({n for _, n in kinds}) == 3


@pytest.mark.parametrize(
    "name", ["dgx1-v100", "dgx1-p100", "mesh-4", "ring-5", "ring-8", "pcie-5", "2 x mesh-2",
             "2 x mesh-3 nics=1", "2 x dgx1-v100"],
)  # fmt: skip
def test_pairs_that_a_symmetry_exchanges_are_alike(name: str) -> None:
    topo = load(name)
    number = pairs_alike(topo)
    count = 0
    for to in mappings(topo, topo):
        count += 1
        for (a, b), n in number.items():
            ends = sorted((to[a], to[b]), key=topo.gpus.index)
            assert number[ends[0], ends[1]] == n
    assert count > 1


@pytest.mark.parametrize("name", ["dgx1-v100", "pcie-9", "2 x mesh-3"])
def test_pairs_alike_do_not_depend_on_the_numbering(name: str) -> None:
    topo = load(name)
    to = random.Random(1).sample(topo.gpus, len(topo.gpus))
    there = pairs_alike(renumbered(topo, to))
    both_numbers = {
        (n, there[min(to[a], to[b]), max(to[a], to[b])]) for (a, b), n in pairs_alike(topo).items()
    }
    assert len({n for n, _ in both_numbers}) == len({m for _, m in both_numbers})
    assert len(both_numbers) == len({n for n, _ in both_numbers})


def test_automorphisms_are_lazy() -> None:
    some = list(islice(mappings(load("dgx2"), load("dgx2")), 50))  # of 16!
    assert len({tuple(m.items()) for m in some}) == 50


@pytest.mark.parametrize("name", ["dgx1-v100", "dgx1-p100", "pcie-9", "ring-9", "mesh-6", "cpu-5"])
def test_a_renumbered_machine_is_found(name: str) -> None:
    topo = load(name)
    for seed in range(4):
        other = renumbered(topo, random.Random(seed).sample(topo.gpus, len(topo.gpus)))
        to = topo.isomorphic_to(other)
        assert to is not None and sorted(to.values()) == sorted(other.gpus)
        between_gpus = {e: w for e, w in wires_of(topo).items() if isinstance(e[0], int)
                        and isinstance(e[1], int)}  # fmt: skip
        for (a, b), wire in between_gpus.items():
            assert wires_of(other)[to[a], to[b]] == wire


CLUSTERS = ["16 x dgx1-v100", "16 x dgx1-p100 leaf=4", "16 x pcie-8", "16 x mesh-4 nics=1",
            "3 x dgx-h100", "16 x mesh-4"]  # fmt: skip


@pytest.mark.parametrize("spec", CLUSTERS)
def test_a_renumbered_cluster_is_found(spec: str) -> None:
    process = get_context("fork").Process(target=find_renumbered_cluster, args=(spec,))
    process.start()
    process.join(280)
    process.kill()
    process.join()
    assert process.exitcode == 0


def find_renumbered_cluster(spec: str) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))  # ends a search without end
    topo = load(spec)
    other = renumbered(topo, random.Random(1).sample(topo.gpus, len(topo.gpus)))
    to = topo.isomorphic_to(other)
    assert to is not None and sorted(to.values()) == list(topo.gpus)
    size = len(topo.gpus) // int(spec.split()[0])
    for first in range(0, len(topo.gpus), size):
        nodes = {other_node(other, to[g]) for g in range(first, first + size)}
        assert len(nodes) == 1, "GPUs of one node were put into several"


def other_node(topology: Topology, gpu: int) -> str:
    switches = (str(k.dst) for k in topology.links if k.src == gpu and isinstance(k.dst, str))
    return next(s.split(".")[0] for s in switches)


PAIRS_THAT_DIFFER = [
    ("hexagon, two triangles", cycle(6), beside(cycle(3), cycle(3))),
    ("prism, K33", nx.circular_ladder_graph(3), nx.complete_bipartite_graph(3, 3)),
    ("cube, Wagner graph", nx.hypercube_graph(3), nx.circulant_graph(8, [1, 4])),
    ("octagon, two squares", cycle(8), beside(cycle(4), cycle(4))),
    ("Petersen, pentagonal prism", nx.petersen_graph(), nx.circular_ladder_graph(5)),
]


@pytest.mark.parametrize(("name", "one", "two"), PAIRS_THAT_DIFFER)
def test_equal_degrees_do_not_make_isomorphic(name: str, one: nx.Graph, two: nx.Graph) -> None:
    mine, theirs = (
        machine(list(nx.convert_node_labels_to_integers(g).edges), len(g)) for g in (one, two)
    )
    assert mine.isomorphic_to(theirs) is None
    assert theirs.isomorphic_to(mine) is None
    for topo in (mine, theirs):
        mixed = random.Random(3).sample(topo.gpus, len(topo.gpus))
        assert topo.isomorphic_to(renumbered(topo, mixed)) is not None


@pytest.mark.parametrize(
    "change", [{"count": 2}, {"bandwidth": 5}, {"kind": "pcie"}], ids=lambda c: next(iter(c))
)
def test_one_other_link_is_another_machine(change: dict) -> None:
    ring = load("ring-5")
    other = replace(ring, links=(replace(ring.links[3], **change), *ring.links[:3],
                                 *ring.links[4:]))  # fmt: skip
    if "kind" in change:  # without it, NVLink still joins all, and is the fabric
        assert len(other.fabric) == len(ring.links) - 1
    assert ring.isomorphic_to(other) is None
    slow = replace(ring, name="slow", links=tuple(replace(k, latency_us=9) for k in ring.links))
    assert ring.isomorphic_to(slow) is not None


def test_directions_and_forwarders_count() -> None:
    out = Topology("out", (0, 1, 2), (*both(0, 1), *both(1, 2), Link(0, 2, GB)))
    into = Topology("in", (0, 1, 2), (*both(0, 1), *both(1, 2), Link(2, 0, GB)))
    assert out.isomorphic_to(into) == {0: 2, 1: 1, 2: 0}
    fans = [
        Topology("fan", (0, 1, 2, 3), (*load("ring-4").links, *more))
        for more in ((Link(0, 2, GB), Link(1, 3, GB)), (Link(0, 2, GB), Link(2, 0, GB)))
    ]
    assert fans[0].isomorphic_to(fans[1]) is None
    star = load("mesh-3").subset([0, 1], [2])
    assert star.isomorphic_to(load("mesh-3")) is None
    assert star.isomorphic_to(load("mesh-3").subset([2, 0], [1])) is not None


def test_switches_may_be_renamed() -> None:
    topo = load("pcie-9")
    names = {"switch0": "b", "switch1": "c", "switch2": "a", "host": "switch0"}
    links = tuple(
        replace(k, src=names.get(k.src, k.src), dst=names.get(k.dst, k.dst))  # type: ignore[arg-type]
        for k in topo.links
    )
    assert topo.isomorphic_to(replace(topo, links=links)) is not None
