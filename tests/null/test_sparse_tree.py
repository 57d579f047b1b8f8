"""gTop-k's tree and rounds, and what sparse all-reduces are predicted to take."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkweave.collectives.planning.algorithms.trees import Tree, binary_tree, chain
from linkweave.collectives.planning.sparse_tree import (
    binomial_tree,
    merge_tree,
    rounds,
    sparse_costs,
)
from linkweave.topology import load


@given(st.integers(1, 70))
def test_a_binomial_tree_takes_as_few_rounds_as_there_can_be(size: int) -> None:
    assert len(rounds(binomial_tree(size))) == math.ceil(math.log2(size))


@given(st.sampled_from([binomial_tree, binary_tree, chain]), st.integers(1, 40), st.data())
def test_rounds_merge_every_rank_once_after_its_children(
    make: object, size: int, data: st.DataObject
) -> None:
    tree: Tree = make(size)  # type: ignore[operator]
    tree = tree.rerooted(data.draw(st.integers(0, size - 1)))
    sent: set[int] = set()
    for pairs in rounds(tree):
        parents = [parent for _, parent in pairs]
        assert len(parents) == len(set(parents))  # one merge at a time
        for child, parent in pairs:
            assert tree.parent[child] == parent and child not in sent
            assert set(tree.children(child)) <= sent and parent not in sent
        sent |= {child for child, _ in pairs}
    assert sent == set(range(size)) - {tree.root}


@pytest.mark.parametrize("name", ["dgx1-v100", "dgx2", "cpu-5", "cpu-1", "pcie-8"])
def test_a_binomial_tree_where_its_hops_are_direct(name: str) -> None:
    topology = load(name)
    assert merge_tree(topology, 8000) == binomial_tree(len(topology.gpus))


@pytest.mark.parametrize("name", ["ring-9", "ring-16"])
def test_the_planners_tree_where_they_are_not(name: str) -> None:
    topology = load(name)
    tree = merge_tree(topology, 8000)
    assert tree != binomial_tree(len(topology.gpus)) and len(tree.parent) == len(topology.gpus)


@pytest.mark.parametrize("name", ["mesh-65", "ring-65", "pcie-65", "cpu-65"])
def test_trees_of_many_ranks(name: str) -> None:
    tree = merge_tree(load(name), 8000)
    assert len(tree.parent) == 65 and tree.root == 0
    assert all(row.seconds > 0 for row in sparse_costs(load(name), 1_000_000, 1000))


def test_costs_of_two_ranks_by_hand() -> None:
    found = {row.mode: row for row in sparse_costs(load("mesh-2"), 1 << 20, 1000)}
    a, wire = 5e-6, 25e9
    hop = a + 8000 / wire
    assert found["gtopk"].seconds == pytest.approx(2 * hop)
    assert found["gtopk"].equation_seconds == pytest.approx(2 * hop)
    assert found["topk"].seconds == pytest.approx(hop)
    assert found["topk"].equation_seconds == pytest.approx(hop)
    assert found["dense"].equation_seconds == pytest.approx(2 * a + 4 * (1 << 20) / wire)
    assert [found[m].equation for m in ("dense", "topk", "gtopk")] == [5, 6, 7]
    short = {row.mode: row for row in sparse_costs(load("mesh-2"), 1 << 20, 1000, 2)}
    assert short["gtopk"].seconds == pytest.approx(2 * (a + 6000 / wire))
    assert short["dense"] == found["dense"]  # which is reduced in float32


def test_gtopk_is_preferred_from_some_ranks_on() -> None:
    few, many = (sparse_costs(load(f"cpu-{n}"), 25_000_000, 25_000) for n in (2, 8))
    assert [row.mode for row in few] == ["topk", "gtopk", "dense"]
    assert [row.mode for row in many] == ["gtopk", "topk", "dense"]
    assert sparse_costs(load("mesh-4"), 1000, 1000)[0].mode == "dense"
    assert {row.seconds for row in sparse_costs(load("cpu-1"), 100, 10)} == {0}
