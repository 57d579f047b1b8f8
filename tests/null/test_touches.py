"""Which steps read what the caller has given, and which may write what others get."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.planning.goals import COLLECTIVES
from collectives.planning.plan import Op, Plan
from collectives.planning.planner import plan_allreduce, plan_collective
from collectives.planning.touches import input_reads, place, pushes
from collectives.planning.verify import races
from collectives.planning.walk import Visit, walk
from tests.null.helpers import random_plan
from tests.null.test_verify import inputs_of
from topology import load


def first_touches(plan: Plan, seed: int | None) -> set[tuple[int, int, int]]:
    """By every chunk's whole history, in another legal order of the steps."""
    history: dict[tuple[int, int], list[Visit]] = {}
    walk(plan, lambda v: history.setdefault((v.stream.rank, v.chunk), []).append(v), seed)
    found = set()
    for visits in history.values():
        for v in visits:
            if v.step.op is Op.REDUCE or (v.step.op is Op.SEND and v.step.source is None):
                found.add(place(v))
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


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_rank_that_has_something_to_give_reads_it_once(collective: str) -> None:
    """On a chain, where every value goes one way."""
    plan = plan_collective(collective, load("mesh-2"), 4096, 1)
    readers = {rank for rank, _, _ in input_reads(plan)}
    assert readers == ({1} if collective == "broadcast" else {0, 1})


def run_pushing(plan: Plan, seed: int | None) -> list[np.ndarray]:
    """Carried out literally; slots past which data goes hold nonsense."""
    buffers = inputs_of(plan)
    bounds = plan.chunk_bounds(buffers[0].nbytes)
    slots: dict[tuple[int, int], np.ndarray] = {}

    def visit(v: Visit) -> None:
        first, stop = (n // 8 for n in bounds[v.chunk])
        own, pushed = buffers[v.stream.rank][first:stop], place(v) in pushes(plan)
        keys = list(zip(v.step.connections, v.slots, strict=False))  # no slots: SIGNAL and WAIT
        if v.step.op is Op.SEND:
            source = own if v.step.source is None else slots[v.step.source, v.source_slot]
            for key in keys:
                slots[key] = np.full_like(source, -1) if pushed else source.copy()
                if pushed:
                    buffers[plan.connections[key[0]].dst][first:stop] = source
        elif v.step.op is Op.REDUCE:
            for key in keys:
                own += slots[key]
        elif v.step.op is Op.COPY and not pushed:
            own[...] = slots[keys[0]]

    walk(plan, visit, seed)
    return buffers


def test_an_all_reduce_may_always_push() -> None:
    """A final value contains the receiver's own: so its rank has come, and has sent that."""
    for seed in range(150):
        plan, _ = random_plan(seed)
        assert not races(plan, pushing=True), seed
        total = sum(inputs_of(plan))
        for order in (None, 1, 2, 3):
            assert all((out == total).all() for out in run_pushing(plan, order)), seed


def test_what_may_be_pushed() -> None:
    machine = load("dgx1-v100")
    for algorithm in ("ring", "ccube_dgx1", "packed_trees", "two_shot"):
        assert not races(plan_allreduce(machine, 1 << 20, algorithm), pushing=True)
    for collective in ("broadcast", "allgather"):  # a receiver might not have come yet
        plan = plan_collective(collective, machine, 1 << 20)
        assert any("the caller of rank" in words for words in races(plan, pushing=True))
    detour = plan_allreduce(machine, 1 << 20, "ccube_dgx1")
    passed_on = {(s.rank, s.channel) for s in detour.streams for body in s.phases for step in body
                 if step.source is not None}  # fmt: skip
    assert passed_on & {place[:2] for place in pushes(detour)}  # the last hop of a detour
