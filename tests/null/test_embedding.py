"""Where trees go on a DGX-1: recomputed over all 40,320 labellings, by another search."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations

import pytest

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS, algorithm_for
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import candidates, plan_allreduce
from linkweave.topology import Link, Topology, load
from tests.null.helpers import SPECIAL, renumbered

Pair = tuple[int, int]
# NCCL's two trees of eight: child -> parent (src/graph/trees.cc)
TREES = ({1: 2, 2: 4, 3: 2, 4: 0, 5: 6, 6: 4, 7: 6}, {0: 1, 1: 3, 2: 1, 3: 7, 4: 5, 5: 3, 6: 5})
EDGES = [edge for tree in TREES for edge in tree.items()]


def link_counts(name: str) -> dict[Pair, int]:
    return {(link.src, link.dst): link.count for link in load(name).fabric}


def claim(left: dict[Pair, int], ways: Sequence[Pair]) -> dict[Pair, int] | None:
    """What is left once data has gone both ways over each of `ways`; None if it does not fit."""
    left = dict(left)
    for a, b in ways:
        for ends in ((a, b), (b, a)):
            if left.get(ends, 0) < 1:
                return None
            left[ends] -= 1
    return left


def detourable(left: dict[Pair, int], pairs: Sequence[Pair]) -> bool:
    """Whether each pair can go over a third GPU on links that are left."""
    if not pairs:
        return True
    a, b = pairs[0]
    after = (claim(left, [(a, m), (m, b)]) for m in range(8) if m not in (a, b))
    return any(rest is not None and detourable(rest, pairs[1:]) for rest in after)


def straight(left: dict[Pair, int], label: Sequence[int]) -> tuple[dict[Pair, int], list[Pair]]:
    """Edges go straight in tree order while a link is free; what is left, and who must detour."""
    detours = []
    for child, parent in EDGES:
        ends = label[child], label[parent]
        if (rest := claim(left, [ends])) is not None:
            left = rest
        else:
            detours.append(ends)
    return left, detours


@cache
def labellings(name: str, detours: int) -> frozenset[tuple[int, ...]]:
    """Every labelling with that many edges that cannot go straight, all of them detourable."""
    found = []
    for label in permutations(range(8)):
        left, pairs = straight(link_counts(name), label)
        if len(pairs) == detours and detourable(left, pairs):
            found.append(label)
    return frozenset(found)


def label_of(plan: Plan, among: frozenset[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Which of the labellings put NCCL's two trees where the plan has its trees."""
    return [
        label
        for label in among
        if all(
            tree.parent[label[child]] == label[parent]
            for tree, edges in zip(plan.trees, TREES, strict=True)
            for child, parent in edges.items()
        )
    ]


def test_the_plan_on_the_dgx1_is_one_of_the_sixteen() -> None:
    topo = load("dgx1-v100")
    for name in ("double_tree", "overlapped_double_tree"):
        plan = plan_allreduce(topo, 1 << 20, name)
        assert len(label_of(plan, labellings("dgx1-v100", 0))) == 1
        assert plan.detours == () and plan.exclusive and plan.notes == ()
        assert all(used <= link_counts("dgx1-v100")[ends] for ends, used in plan.link_use.items())
        assert sum(plan.link_use.values()) == 2 * 14


def test_two_detours_use_every_link_of_the_p100s_once() -> None:
    fit = labellings("dgx1-p100", 2)
    assert len(fit) == 48
    assert (0, 4, 5, 6, 1, 2, 3, 7) in fit
    assert not labellings("dgx1-p100", 0) and not labellings("dgx1-p100", 1)
    plan = plan_allreduce(load("dgx1-p100"), 1 << 20, "overlapped_double_tree")
    assert len(label_of(plan, fit)) == 1
    assert len(plan.detours) == 2 and plan.exclusive
    assert plan.link_use == dict.fromkeys(link_counts("dgx1-p100"), 1)
    assert len(plan.link_use) == 2 * 16


def automorphisms(cap: dict[Pair, int]) -> Iterator[tuple[int, ...]]:
    for to in permutations(range(8)):
        if all(cap.get((to[a], to[b])) == n for (a, b), n in cap.items()):
            yield to


PAPER_TREES = (
    {0: 0, 4: 0, 2: 4, 6: 4, 1: 2, 3: 2, 5: 6, 7: 6},
    {1: 1, 5: 1, 3: 5, 7: 5, 0: 3, 2: 3, 4: 7, 6: 7},
)
PAPER_DETOURS = {(2, 0, 4), (3, 1, 5)}


def carried_over(plan: Plan, rank_of: Sequence[int], symmetries: list[tuple[int, ...]]) -> bool:
    """Whether the plan is the paper's, seen through one of the DGX-1's symmetries."""
    for to in symmetries:
        at = [rank_of[to[g]] for g in range(8)]
        if all(
            tree.parent[at[child]] == at[parent]
            for tree, edges in zip(plan.trees, PAPER_TREES, strict=True)
            for child, parent in edges.items()
        ):
            ends = {(frozenset((at[a], at[b])), at[via]) for a, via, b in PAPER_DETOURS}
            return ends == {(frozenset((a, b)), via) for a, via, b in plan.detours}
    return False


def test_ccube_follows_the_dgx1_through_any_numbering() -> None:
    cap = link_counts("dgx1-v100")
    symmetries = list(automorphisms(cap))
    for seed in range(10):
        to = random.Random(seed).sample(range(8), 8)
        topo = renumbered(load("dgx1-v100"), to, f"seed-{seed}")
        plan = plan_allreduce(topo, 1 << 20, "ccube_dgx1")
        assert carried_over(plan, to, symmetries)
        assert all(used <= topo.by_ends[ends].count for ends, used in plan.link_use.items())
        # the same GPUs in another order: rank r is the r-th of them
        reordered = plan_allreduce(load("dgx1-v100").subset(to), 1 << 20, "ccube_dgx1")
        assert carried_over(reordered, [to.index(g) for g in range(8)], symmetries)


@pytest.mark.parametrize("name", ["dgx1-p100", "mesh-8", "mesh-4", "dgx-a100", "cpu-8"])
def test_ccube_is_for_the_dgx1_with_v100_only(name: str) -> None:
    words = rf"ccube_dgx1 .* dgx1-v100; {name} is wired differently: use overlapped_double_tree"
    with pytest.raises(PlanError, match=words):
        plan_allreduce(load(name), 1 << 20, "ccube_dgx1")
    assert "ccube_dgx1" not in candidates(load(name))


MACHINES = [
    "dgx1-v100", "dgx1-p100", "dgx2", "dgx-h100", "mesh-8", "mesh-5", "ring-6", "pcie-8", "cpu-4"
]  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_a_plan_that_shares_links_says_so_and_no_other_does(machine: str) -> None:
    topo = load(machine)
    for name in candidates(topo):
        plan = plan_allreduce(topo, 1 << 20, name)
        share = {ends: used / topo.by_ends[ends].count for ends, used in plan.link_use.items()}
        assert plan.exclusive == (max(share.values()) <= 1), name
        if plan.exclusive:
            assert plan.notes == ()
            assert "exclusive links" in str(plan).splitlines()[0]
            continue
        (note,) = plan.notes
        told = re.search(r"puts (\d+) connections on (\d+) links? (\w+)->(\w+)$", note)
        assert told, note
        a, b = (int(v) if v.isdigit() else v for v in told.group(3, 4))
        assert plan.link_use[a, b] == int(told[1])
        assert topo.by_ends[a, b].count == int(told[2])
        assert share[a, b] == max(share.values())
        assert "shared links" in str(plan).splitlines()[0] and f"note: {note}" in str(plan)


@pytest.mark.parametrize("machine", ["dgx1-v100", "dgx1-p100"])
@pytest.mark.parametrize("seed", range(5))
def test_the_double_tree_does_not_depend_on_the_numbering(machine: str, seed: int) -> None:
    topo = renumbered(load(machine), random.Random(seed).sample(range(8), 8))
    plan = plan_allreduce(topo, 1 << 20, "overlapped_double_tree")
    assert plan.exclusive
    assert len(plan.detours) == (0 if machine == "dgx1-v100" else 2)


def test_detours_join_pairs_over_links_that_exist() -> None:
    for machine in ("dgx1-v100", "dgx1-p100", "ring-6"):
        topo = load(machine)
        for name in candidates(topo):
            for a, via, b in plan_allreduce(topo, 1 << 20, name).detours:
                assert {(a, via), (via, b), (b, via), (via, a)} <= set(topo.by_ends)
                assert len({a, via, b}) == 3


def test_gpus_that_nothing_can_join_are_named() -> None:
    with pytest.raises(PlanError, match=r"ring-6: GPUs \d and \d are not joined, and no GPU next"):
        algorithm_for("two_shot", load("ring-6"))
    pairs = ((0, 1), (1, 0), (2, 3), (3, 2))
    islands = Topology("islands", (0, 1, 2, 3), tuple(Link(a, b, 10**9) for a, b in pairs))
    for name in ALGORITHMS["allreduce"]:
        if name not in SPECIAL:
            with pytest.raises(PlanError, match=r"islands: GPUs \d and \d are not joined"):
                algorithm_for(name, islands)
    with pytest.raises(PlanError, match=r"no allreduce runs on islands: .* are not joined"):
        plan_allreduce(islands, 1 << 20)
