"""Plans carried out by real processes on shared memory against the reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from linkweave import collectives
from linkweave.collectives import PlanError, plan_allreduce
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS
from linkweave.collectives.planning.plan import Op, Plan
from linkweave.collectives.runtime import reference
from linkweave.collectives.runtime.cpu.executor import SLOT_BYTES
from linkweave.kernels.plan import interpreter as kernel
from linkweave.topology import load
from tests.cpu.helpers import RankPlans, misaligned, values
from tests.null.helpers import by_hand, hop, random_plan, receive, send

SIZES = (0, 1, 2, 3, 17, 1009, 4096)


def test_codes_are_the_plans() -> None:
    for op in Op:
        assert getattr(kernel, op.name) == op.value
    assert len(Op) == 5


def test_layout_of_the_code() -> None:
    plan = by_hand([hop(0, 0, 1)], {(0, 0): [send(0)], (1, 0): [receive(Op.REDUCE, 0, last=True)]})
    assert plan.encode(0).tolist() == [
        1, 1, 4, 22,
        4, 0, 1, -1, 1, 0,
        0, 0, 0, -1, 1, 0,
        3, 0, 1, -1, 1, 0,
    ]  # fmt: skip
    assert plan.encode(1).tolist() == [
        1, 1, 4, 22,
        4, 0, 0, -1, 1, 0,
        1, 0, 1, -1, 1, 0,
        3, 0, 0, -1, 1, 0,
    ]  # fmt: skip


def run_plans(rank: int, plans: list[Plan]) -> list[bytes]:
    """Each plan on each size, twice over one region, so that its counters go on."""
    executor = RankPlans(get_default())
    results = []
    for salt, plan in enumerate(plans):
        for n in SIZES:
            for again in range(2):
                x = misaligned(values(rank, n, salt + 100 * again))
                executor.execute(plan, [x])
                results.append(x.tobytes())
    return results


def test_random_plans() -> None:
    by_size: dict[int, list[Plan]] = {}
    for seed in range(24):
        plan, _ = random_plan(seed)
        assert plan.chunk_bytes(4 * max(SIZES)) <= SLOT_BYTES
        by_size.setdefault(plan.size, []).append(plan)
    assert len(by_size) >= 3
    for size, plans in by_size.items():
        got = collectives.spawn(run_plans, size, args=(plans,))
        at = 0
        for salt, plan in enumerate(plans):
            for n in SIZES:
                for again in range(2):
                    inputs = [values(r, n, salt + 100 * again) for r in range(size)]
                    want = reference.run(plan, inputs)
                    for r in range(size):
                        assert got[r][at] == want[r].tobytes(), (plan.algorithm, salt, n, r)
                    at += 1


def exchange(rank: int, plan: Plan) -> list[bytes]:
    """Smallest of zeros of both signs, where it shows who comes first."""
    executor = RankPlans(get_default())
    results = []
    for op in ("min", "max"):
        x = np.where(np.random.default_rng(rank).random(999) < 0.5, 0.0, -0.0).astype(np.float32)
        executor.execute(plan, [x], op)
        results.append(x.tobytes())
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_partners_combine_in_one_order(size: int) -> None:
    plan = plan_allreduce(load(f"mesh-{size}"), 4096, "recursive_doubling", 3)
    got = collectives.spawn(exchange, size, args=(plan,))
    assert all(rank == got[0] for rank in got)
    zeros = [np.where(np.random.default_rng(r).random(999) < 0.5, 0.0, -0.0) for r in range(size)]
    inputs = [z.astype(np.float32) for z in zeros]
    for at, op in enumerate(("min", "max")):
        assert got[0][at] == reference.run(plan, inputs, op)[0].tobytes()


LENGTHS = (1, 5, 8, 1009, 70_000)


def through_the_api(rank: int, names: list[str]) -> list[bytes]:
    """Private buffers, shared ones, a mix of both, and the private ones once more."""
    comm = get_default()
    results = []
    for name in names:
        for n in LENGTHS:
            for kind in ("private", "shared", "mixed", "private"):
                x = values(rank, n)
                if kind == "shared" or (kind == "mixed" and rank % 2):
                    y = comm.empty(n + 1)[1:]
                    y[...] = x
                    x = y
                comm.allreduce(x, algorithm=name)
                results.append(x.tobytes())
    return results


@pytest.mark.parametrize("name", ["dgx1-v100", *(f"cpu-{n}" for n in (1, 2, 3, 5, 8))])
def test_named_algorithms(name: str) -> None:
    topology = load(name)
    size = len(topology.gpus)
    names = []
    for algorithm in ALGORITHMS["allreduce"]:
        try:
            plan_allreduce(topology, 4, algorithm)
        except PlanError:
            continue
        names.append(algorithm)
    assert len(names) >= 7 and ("ccube_dgx1" in names) == (name == "dgx1-v100")
    got = collectives.spawn(through_the_api, size, topology, args=(names,))
    at = 0
    for algorithm in names:
        for n in LENGTHS:
            inputs = [values(r, n) for r in range(size)]
            nbytes = 4 * n
            plan = plan_allreduce(topology, nbytes, algorithm)
            chunks = -(-nbytes // SLOT_BYTES)
            if chunks > plan.num_chunks:
                chunks = -(-chunks // plan.stride) * plan.stride
                plan = plan_allreduce(topology, nbytes, algorithm, chunks)
            want = reference.run(plan, inputs)[0].tobytes()
            for kind in range(4):
                for r in range(size):
                    assert got[r][at] == want, (algorithm, n, kind, r)
                at += 1
