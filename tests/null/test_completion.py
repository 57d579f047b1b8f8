"""Chunks that become final, and the layer-chunk table of a gradient queue."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linkweave.collectives import PlanError, plan_allreduce, plan_collective
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS
from linkweave.collectives.planning.dataflow import finals, layer_chunk_table
from linkweave.collectives.planning.plan import Plan
from linkweave.topology import load

MACHINES = ("dgx1-v100", "cpu-5", "cpu-2", "mesh-3")


def plans() -> list[Plan]:
    found = []
    for name in MACHINES:
        for algorithm in ALGORITHMS["allreduce"]:
            try:
                found.append(plan_allreduce(load(name), 100_000, algorithm, None))
            except PlanError:
                continue
    return found


@pytest.mark.parametrize("plan", plans(), ids=lambda plan: f"{plan.algorithm}-{plan.size}")
def test_every_chunk_is_final_once_on_every_rank(plan: Plan) -> None:
    for rank in range(plan.size):
        chunks = sorted(chunk for track in finals(plan, rank) for chunk in track)
        assert chunks == list(range(plan.num_chunks))


@pytest.mark.parametrize("plan", plans(), ids=lambda plan: f"{plan.algorithm}-{plan.size}")
def test_a_layer_needs_its_chunks_and_no_later_one(plan: Plan) -> None:
    nbytes, layers = 100_000, [4, 0, 40_000, 16, 59_980]
    bounds, start = plan.chunk_bounds(nbytes), 0
    for rank in range(plan.size):
        table = layer_chunk_table(plan, rank, nbytes, layers)
        start = 0
        for row, size in zip(table.tolist(), layers, strict=True):
            wanted = {
                c for c, (a, b) in enumerate(bounds) if a < min(b, start + size) and b > start
            }
            for count, chunks in zip(row, finals(plan, rank), strict=True):
                needed = [i for i, c in enumerate(chunks, 1) if c in wanted]
                assert count == (needed[-1] if needed and size else 0)
            start += size


@given(st.lists(st.integers(0, 3000), max_size=20), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_all_layers_together_need_every_chunk_with_data(layers: list[int], chunks: int) -> None:
    plan = plan_allreduce(load("dgx1-v100"), sum(layers), "overlapped_double_tree", 2 * chunks)
    sizes = plan.chunk_sizes(sum(layers))
    for rank in (0, 5):
        table = layer_chunk_table(plan, rank, sum(layers), layers)
        for column, track in zip(table.T, finals(plan, rank), strict=True):
            filled = [i for i, c in enumerate(track, 1) if sizes[c]]
            assert column.max(initial=0) == (filled[-1] if filled else 0)


def test_early_layers_need_few_chunks_of_an_overlapped_tree() -> None:
    plan = plan_allreduce(load("dgx1-v100"), 64 << 20, "overlapped_double_tree", 64)
    table = layer_chunk_table(plan, 7, 64 << 20, [1 << 20] * 64)
    assert table[0].sum() == 1 and table[-1].sum() == 32
    assert (np.diff(np.maximum.accumulate(table).sum(axis=1)) == 1).all()


def test_other_collectives_have_no_queue() -> None:
    plan = plan_collective("broadcast", load("dgx1-v100"), 100)
    with pytest.raises(PlanError, match=r"belongs to an allreduce, not to broadcast"):
        finals(plan, 0)
