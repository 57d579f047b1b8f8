"""Plans for classes of sizes, queues' choice of an algorithm, and where blocks lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkweave import collectives
from linkweave.collectives import plan_allreduce, plan_collective
from linkweave.collectives.planning.collective import COLLECTIVES
from linkweave.collectives.planning.layout import block_table, chunk_bytes
from linkweave.collectives.planning.planner import candidates, choose, predict, size_class
from linkweave.topology import load


@given(st.integers(0, 2**50), st.integers(1, 64))
def test_a_class_is_at_most_an_eighth_too_large(nbytes: int, unit: int) -> None:
    found = size_class(nbytes * unit, unit)
    assert found % unit == 0 and nbytes * unit <= found <= nbytes * unit * 9 / 8
    assert size_class(found, unit) == found


def test_an_octave_has_eight_classes() -> None:
    for power in range(5, 30):
        octave = {
            size_class(n) for n in range(2**power + 1, 2 ** (power + 1) + 1, 2 ** (power - 5))
        }
        assert len(octave) == 8 and 2 ** (power + 1) in octave
    assert [size_class(n) for n in range(18)] == [*range(17), 18]


def test_sizes_of_a_class_have_one_plan() -> None:
    machine = load("dgx1-v100")
    plans = {plan_allreduce(machine, n) for n in range(1_000_000, 1_040_000, 4_001)}
    assert len(plans) == 1
    seconds = [predict(machine, n, "packed_trees")[0] for n in (1_000_000, 1_030_000)]
    assert seconds[0] < seconds[1] <= predict(machine, 1 << 20, "packed_trees")[0]


@pytest.mark.parametrize(("name", "nbytes"), [("dgx1-v100", 256 << 20), ("pcie-8", 64 << 20)])
def test_a_queue_takes_what_is_final_early(name: str, nbytes: int) -> None:
    """There all rings at once take the least time, and end with their first chunk."""
    machine = load(name)
    plan = plan_collective("allreduce", machine, nbytes, queued=True)
    found = collectives.simulate(plan, machine, nbytes)
    least = min(predict(machine, nbytes, a)[0] for a in candidates(machine))
    assert found.first_chunk_seconds <= 0.05 * found.seconds
    assert found.seconds <= 1.03 * least
    assert choose(machine, nbytes) == "ring" != plan.algorithm


@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "allgather", "reduce_scatter",
                                        "alltoall"])  # fmt: skip
@pytest.mark.parametrize("nbytes", [0, 60, 4_020, 100_020])
def test_equal_blocks_lie_as_the_plan_says(collective: str, nbytes: int) -> None:
    plan = plan_collective(collective, load("mesh-5"), nbytes)
    nbytes //= COLLECTIVES[collective].layout.parts(5)
    nbytes *= COLLECTIVES[collective].layout.parts(5)
    for rank in range(5):
        blocks = block_table(collective, 5, rank, nbytes)
        per, unit = chunk_bytes(blocks, plan.num_chunks), len(blocks)
        for chunk, (first, last) in enumerate(plan.chunk_bounds(nbytes, rank)):
            group, index = divmod(chunk, plan.stride)
            part = group * (plan.stride // unit) + index // unit
            start, size = blocks[index % unit]
            found = start + min(part * per, size), start + min((part + 1) * per, size)
            if collective != "alltoall" or rank in divmod(index % unit, 5):
                assert found == (first, last)
        assert (plan.chunk_sizes(nbytes) <= per).all()


@given(st.lists(st.lists(st.integers(0, 99), min_size=4, max_size=4), min_size=4, max_size=4))
def test_uneven_blocks_cover_what_is_sent_and_what_comes(sizes: list[list[int]]) -> None:
    for rank in range(4):
        blocks = block_table("alltoall", 4, rank, 0, sizes).reshape(4, 4, 2)
        sent = [tuple(blocks[rank, r]) for r in range(4) if r != rank]
        came = [tuple(blocks[r, rank]) for r in range(4) if r != rank]
        own, total = sizes[rank][rank], sum(sizes[rank]) + sum(row[rank] for row in sizes)
        taken = np.zeros(total, int)
        for first, size in [*sent, *came]:
            taken[first : first + size] += 1
        assert taken.max(initial=0) <= 1 and taken.sum() == total - 2 * own
