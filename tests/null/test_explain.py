"""The planner's own account of its choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from linkweave import collectives
from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.explain import SIZES
from linkweave.collectives.planning.planner import candidates, choose
from linkweave.topology import allreduce_bound, load
from linkweave.topology.timings import Timing


@pytest.mark.parametrize(("name", "nbytes"), [("mesh-4", 1 << 20), ("dgx1-p100", 8192)])
def test_rows_are_what_is_planned_and_simulated(name: str, nbytes: int) -> None:
    topo = load(name)
    told = collectives.explain(topo, nbytes)
    assert {row.algorithm for row in told.rows} == set(candidates(topo))
    assert [r.seconds for r in told.rows] == sorted(r.seconds for r in told.rows)
    assert told.choice == told.rows[0].algorithm == choose(topo, nbytes)
    for row in told.rows:
        plan = collectives.plan_allreduce(topo, nbytes, row.algorithm, row.num_chunks)
        line = collectives.simulate(plan, topo, nbytes)
        assert (row.seconds, row.first_chunk_seconds) == (line.seconds, line.first_chunk_seconds)
        assert row.share == pytest.approx(line.algbw / allreduce_bound(topo), rel=1e-12)
        assert row.share <= 1 and row.detours == len(plan.detours)


def test_crossovers_follow_the_choice() -> None:
    topo = load("mesh-3")
    told = collectives.explain(topo, 1 << 20)
    assert told.crossovers[0][0] == SIZES[0]
    for size in SIZES:
        name = [name for start, name in told.crossovers if start <= size][-1]
        assert name == choose(topo, size)


def test_what_cannot_run_is_told_with_the_reason() -> None:
    told = collectives.explain(load("mesh-3"), 1024)
    refused = dict(told.refused)
    assert "mesh-3 is wired differently" in refused["ccube_dgx1"]
    assert refused["ccube_dgx1"] in " ".join(str(told).split())


def test_words() -> None:
    text = str(collectives.explain(load("dgx1-v100"), 8192))
    assert "start-ups decide: one_shot has the fewest" in text
    assert "bottleneck: each GPU's six links" in " ".join(text.split())
    longer = collectives.explain(load("dgx-h100"), 1 << 20)
    assert longer.reason.startswith("start-ups count beside bytes: two_shot is 1.51 times faster")
    alone = collectives.explain(load("mesh-1"), 1024)
    assert "nothing to choose between" in alone.reason


def test_a_choice_that_is_not_the_fastest_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timing("chain", 8192, 1, 1e-3)
    told = collectives.explain(replace(load("mesh-4"), timings=(timed,)), 8192)
    assert told.choice == "chain" and "chain is the fastest of those measured" in told.reason
    monkeypatch.setenv("LINKWEAVE_ALGORITHM", "tree")
    told = collectives.explain(load("dgx1-v100"), 8192)
    assert told.reason == "LINKWEAVE_ALGORITHM asks for tree; the fastest is one_shot"


def test_large_clusters_compare_what_suits_them() -> None:
    topo = load("33 x mesh-2")
    refused = dict(collectives.explain(topo, 1 << 20).refused)
    assert refused["chain"] == "not compared on clusters of more than 64 GPUs"


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(PlanError, match="nbytes must be an integer from 0 to"):
        collectives.explain(load("mesh-2"), -1)


def test_sparse_ways_are_told_with_k() -> None:
    told = collectives.explain(load("dgx1-v100"), 100_000_000, 25_000)
    assert {row.mode: row.equation for row in told.sparse} == {"dense": 5, "topk": 6, "gtopk": 7}
    assert [row.seconds for row in told.sparse] == sorted(row.seconds for row in told.sparse)
    text = str(told)
    assert (
        f"sparse, 25000 entries a rank of 25000000 float32 (0.001 of all): {told.sparse[0].mode}"
        in text
    )
    assert "(7) 78.0 us" in text  # 2 x 3 (5 us + 200 KB at 25 GB/s)
    assert "sparse" not in str(collectives.explain(load("dgx1-v100"), 100_000_000))


@pytest.mark.parametrize("k", [-1, 26, True])
def test_k_that_makes_no_sense(k: int) -> None:
    with pytest.raises(PlanError, match=r"k must be an integer from 0 to 25"):
        collectives.explain(load("mesh-2"), 100, k)
