"""Which steps read what the caller has given, and which may write what others get."""

from __future__ import annotations

import pytest

from linkweave.collectives.planning.collective import PUBLIC
from linkweave.collectives.planning.dataflow import Visit, input_reads, pushes, step_id, walk
from linkweave.collectives.planning.plan import Op, Plan
from linkweave.collectives.planning.planner import plan_allreduce, plan_collective
from linkweave.collectives.planning.verify import races
from linkweave.topology import load
from tests.null.helpers import random_plan


def first_touches(plan: Plan, seed: int | None) -> set[tuple[int, int, int]]:
    """By every chunk's whole history, in another legal order of the steps."""
    history: dict[tuple[int, int], list[Visit]] = {}
    walk(plan, lambda v: history.setdefault((v.track.rank, v.chunk), []).append(v), seed)
    found = set()
    for visits in history.values():
        for v in visits:
            if v.step.op is Op.REDUCE or (v.step.op is Op.SEND and v.step.source is None):
                found.add(step_id(v))
            if v.step.op in (Op.REDUCE, Op.COPY):
                break  # what follows at this rank reads results
    return found


@pytest.mark.parametrize("algorithm", ["ring", "double_tree", "ccube_dgx1", "packed_trees"])
def test_any_legal_order_and_number_of_chunks_tells_the_same(algorithm: str) -> None:
    plan = plan_allreduce(load("dgx1-v100"), 1 << 20, algorithm)
    for seed in (None, 1, 2):
        for chunks in (plan.stride, 2 * plan.stride + 1):
            assert first_touches(plan.with_chunks(chunks), seed) == input_reads(plan)


@pytest.mark.parametrize("seed", range(20))
def test_random_plans(seed: int) -> None:
    plan = random_plan(seed)[0]
    assert first_touches(plan, seed) == input_reads(plan)


@pytest.mark.parametrize("collective", PUBLIC)
def test_a_rank_that_has_something_to_give_reads_it_once(collective: str) -> None:
    """On a chain, where every value goes one way."""
    plan = plan_collective(collective, load("mesh-2"), 4096, 1)
    readers = {rank for rank, _, _ in input_reads(plan)}
    givers = {"broadcast": {1}, "scatter": {1}, "gather": {0}}  # its own block stays where it is
    assert readers == givers.get(collective, {0, 1})


def test_what_may_be_pushed() -> None:
    machine = load("dgx1-v100")
    for algorithm in ("ring", "ccube_dgx1", "packed_trees", "two_shot"):
        assert not races(plan_allreduce(machine, 1 << 20, algorithm), pushing=True)
    for collective in ("broadcast", "allgather"):  # a receiver might not have come yet
        plan = plan_collective(collective, machine, 1 << 20)
        assert any("the caller of rank" in words for words in races(plan, pushing=True))
    detour = plan_allreduce(machine, 1 << 20, "ccube_dgx1")
    passed_on = {(s.rank, s.channel) for s in detour.tracks for body in s.phases for step in body
                 if step.source is not None}  # fmt: skip
    assert passed_on & {step_id[:2] for step_id in pushes(detour)}  # the last hop of a detour
