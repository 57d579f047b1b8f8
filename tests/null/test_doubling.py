"""Exchanges between pairs of ranks: few start-ups, any number of ranks, the same bits on all."""

from __future__ import annotations

import numpy as np
import pytest

from linkweave.collectives.planning.planner import plan_allreduce
from linkweave.collectives.planning.simulate import simulate
from linkweave.collectives.planning.verify import verify
from linkweave.collectives.runtime.reference import run
from linkweave.topology import load

BOTH = ["recursive_doubling", "halving_doubling"]


@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("name", BOTH)
def test_any_number_of_ranks_ends_with_the_sum_and_the_same_bits(name: str, size: int) -> None:
    topo = load(f"mesh-{size}")
    plan = plan_allreduce(topo, 4096, name, 24)
    verify(plan, topo)
    whole = [np.arange(501) * 1000 + 7**r for r in range(size)]
    assert all((out == sum(whole)).all() for out in run(plan, whole))
    rng = np.random.default_rng(size)
    outs = run(plan, [rng.standard_normal(501).astype(np.float32) for _ in range(size)])
    assert len({out.tobytes() for out in outs}) == 1


@pytest.mark.parametrize("size", [2, 3, 6, 8])
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("op", ["min", "max", "sum"])
def test_zeros_and_nans_have_the_same_bits_on_all_ranks(name: str, size: int, op: str) -> None:
    """-0 and 0 are equal, and NaNs differ in their payload: the order of two values matters."""
    plan = plan_allreduce(load(f"mesh-{size}"), 4096, name, size)
    nan = np.array([0x7FC00001, 0x7FC00002, 0xFFC00003], np.uint32).view(np.float32)
    values = np.array([0.0, -0.0, *nan, 1.0], np.float32)
    rng = np.random.default_rng(size)
    outs = run(plan, [rng.choice(values, 400) for _ in range(size)], op)
    assert len({out.tobytes() for out in outs}) == 1


@pytest.mark.parametrize(("size", "rounds"), [(2, 1), (4, 2), (8, 3), (16, 4), (6, 4), (9, 5)])
def test_start_ups(size: int, rounds: int) -> None:
    """log2 of the power of two below, and two more for the ranks beyond it."""
    topo = load(f"mesh-{size}")
    plan = plan_allreduce(topo, 0, "recursive_doubling", 1)
    assert simulate(plan, topo, 0).seconds == pytest.approx(rounds * 5e-6, rel=1e-9)
    twice = rounds if size & (size - 1) else 2 * rounds
    both = plan_allreduce(topo, 0, "halving_doubling", plan.num_chunks * 64)
    more = 2 * (size.bit_length() - 1) + (2 if size & (size - 1) else 0)
    assert simulate(both, topo, 0).seconds >= max(twice, more) * 5e-6 * (1 - 1e-9)


def test_on_the_dgx1_every_exchange_has_a_link() -> None:
    topo = load("dgx1-v100")
    plan = plan_allreduce(topo, 8192, "recursive_doubling", 1)
    assert plan.exclusive and plan.detours == ()
    assert simulate(plan, topo, 8192).seconds == pytest.approx(3 * (5e-6 + 8192 / 25e9), rel=1e-9)
