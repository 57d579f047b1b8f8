"""One-shot: one step deep, and every rank combines all values in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np
import pytest

from linkweave.collectives.planning.dataflow import origins
from linkweave.collectives.planning.plan import Op
from linkweave.collectives.planning.planner import choose, plan_allreduce
from linkweave.collectives.planning.simulate import simulate
from linkweave.collectives.runtime.reference import Array, run
from linkweave.topology import load
from tests.null.helpers import lowered

MACHINES = [*(f"{family}-{n}" for family in ("mesh", "cpu") for n in range(1, 18)), "dgx1-v100"]
FOLDS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": lambda a, b: np.where(b < a, b, a),  # of equal ones, such as -0 and 0, the first
    "max": lambda a, b: np.where(b > a, b, a),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_float_sum_is_the_fold_in_the_order_of_ranks(machine: str) -> None:
    """Addition of floats is not associative: any other order has other bits somewhere."""
    plan = lowered("one_shot", load(machine), 3)
    rng = np.random.default_rng(plan.size)
    inputs = [rng.standard_normal(700).astype(np.float32) for _ in range(plan.size)]
    folded = reduce(np.add, inputs).tobytes()
    for seed in (None, 1, 2):
        assert {out.tobytes() for out in run(plan, inputs, seed=seed)} == {folded}
    if plan.size > 2:
        assert reduce(np.add, inputs[::-1]).tobytes() != folded


@pytest.mark.parametrize("machine", ["mesh-2", "mesh-3", "mesh-7", "cpu-4", "dgx1-v100"])
@pytest.mark.parametrize("op", FOLDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_every_operator_is_the_fold_in_the_order_of_ranks(
    machine: str, op: str, dtype: type
) -> None:
    """Of zeros of both signs, min and max keep the one of the lower rank, on all ranks."""
    plan = lowered("one_shot", load(machine), 2)
    rng = np.random.default_rng(plan.size)
    inputs = [rng.choice(np.array([0.0, -0.0, 1.5, -3.25], dtype), 500) for _ in range(plan.size)]
    with np.errstate(over="ignore"):
        folded = reduce(FOLDS[op], inputs).tobytes()
    assert {out.tobytes() for out in run(plan, inputs, op)} == {folded}


@pytest.mark.parametrize("machine", ["mesh-3", "dgx1-v100"])
def test_short_floats_are_rounded_once_and_an_average_divides_once(machine: str) -> None:
    plan = lowered("one_shot", load(machine), 2)
    rng = np.random.default_rng(5)
    inputs = [rng.standard_normal(500).astype(np.float16) for _ in range(plan.size)]
    total = reduce(np.add, [x.astype(np.float32) for x in inputs])
    for op, wanted in (("sum", total), ("avg", total / np.float32(plan.size))):
        outs = {out.tobytes() for out in run(plan, inputs, op)}
        assert outs == {wanted.astype(np.float16).tobytes()}


@pytest.mark.parametrize("machine", ["mesh-1", "mesh-6", "cpu-5", "dgx1-v100"])
def test_the_own_value_stands_where_its_rank_does(machine: str) -> None:
    """Also where what arrives comes over a detour."""
    plan = lowered("one_shot", load(machine), 1)
    first = origins(plan)
    reduced = []
    for track in plan.tracks:
        for _, _, step in plan.steps(track):
            if step.op is Op.REDUCE:
                order = [first[i] for i in step.connections]
                assert step.last and step.ahead == track.rank
                order.insert(step.ahead, track.rank)
                assert order == list(range(plan.size))
                reduced.append(track.rank)
    assert reduced == (list(range(plan.size)) if plan.size > 1 else [])


@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_one_start_up(size: int) -> None:
    topo = load(f"mesh-{size}")
    plan = plan_allreduce(topo, 8192, "one_shot", 1)
    assert plan.exclusive
    line = simulate(plan, topo, 8192)
    assert line.seconds == pytest.approx(5e-6 + 8192 / 25e9, rel=1e-9, abs=0)
    assert set(line.first_chunk_by_rank) == {line.seconds}


@pytest.mark.parametrize("machine", ["dgx1-v100", "dgx1-p100", "dgx-a100", "mesh-8", "cpu-4"])
def test_auto_takes_it_for_the_smallest_messages(machine: str) -> None:
    topo = load(machine)
    assert choose(topo, 256) == choose(topo, 1024) == "one_shot"
    assert choose(topo, 1 << 26) != "one_shot"


@pytest.mark.parametrize("nbytes", [256, 8192])
def test_small_messages_are_four_times_faster_than_round_rings(nbytes: int) -> None:
    """Two start-ups at most, where the pairs that NVLink does not join detour: rings take 14."""
    topo = load("dgx1-v100")
    mine, ring = (
        simulate(plan_allreduce(topo, nbytes, name), topo, nbytes).seconds
        for name in ("auto", "ring")
    )
    assert ring > 4 * mine
