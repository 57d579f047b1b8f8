"""Results that are sent on in the step that makes them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from linkweave.collectives.planning.dataflow import passed_on, pushes
from linkweave.collectives.planning.plan import Connection, Op, Plan, Step, Track
from linkweave.collectives.planning.planner import plan_allreduce, plan_collective
from linkweave.collectives.planning.verify import races, verify
from linkweave.collectives.runtime.gpu.launch_tables import (
    FLAGS,
    HEADER,
    KEEPS,
    LENGTH,
    NUM_OPERANDS,
    NUM_OUTPUTS,
    PUSHED,
    actions,
    fused,
    programs,
)
from linkweave.topology import load
from tests.null.executor import Executor, why_wrong
from tests.null.helpers import random_plan

ALGORITHMS = [
    ("dgx1-v100", name)
    for name in ("ring", "chain", "tree", "double_tree", "overlapped_double_tree", "packed_trees",
                 "ccube_dgx1", "two_shot")
] + [("mesh-8", "halving_doubling"), ("mesh-8", "recursive_doubling"), ("mesh-8", "one_shot"),
     ("2 x dgx-a100", "hierarchical")]  # fmt: skip


class Fused(Executor):
    """What is not kept is nonsense at once: own chunks that need no result, and the slots and
    chunks of results that are pushed."""

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        super().__init__(plan, seed, calls=1)
        self.dropped: set[tuple[int, int]] = set()  # (rank, chunk), until it is sent on

    def move(self, who: int, at: int, chunk: int, step: Step) -> None:
        track = self.plan.tracks[who]
        here, rank = (track.rank, track.channel, at), track.rank
        pushed = here in pushes(self.plan)
        if step.op is Op.COPY and pushed:
            self.take(who, step.connections[0])
        else:
            super().move(who, at, chunk, step)
        if step.op is Op.SEND and pushed:
            for i in step.connections:
                slot = i, (self.cursor(rank, i)["sent"] - 1) % self.plan.slots
                theirs = self.own(who, self.plan.connections[i].dst, chunk, write=True)
                theirs[...] = self.slots[slot]
                self.slots[slot][...] = np.nan
        if step.op is Op.SEND and step.source is None and (rank, chunk) in self.dropped:
            self.dropped.remove((rank, chunk))
            first, stop = self.bounds[rank][chunk]
            self.buffers[rank][first // 8 : stop // 8] = np.nan
        if not passed_on(self.plan).get(here, True):
            self.dropped.add((rank, chunk))


@pytest.mark.parametrize(("machine", "algorithm"), ALGORITHMS)
def test_fused_plans_are_proved_and_keep_their_steps(machine: str, algorithm: str) -> None:
    topology = load(machine)
    plan = plan_allreduce(topology, 1 << 24, algorithm)
    made = fused(plan)
    verify(made, topology)
    assert not races(made, pushing=True)
    for before, after in zip(plan.tracks, made.tracks, strict=True):
        for a, b in zip(before.phases, after.phases, strict=True):
            assert Counter(a) == Counter(b)
    assert (made != plan) == bool(passed_on(plan))
    assert len(passed_on(made)) == len(passed_on(plan))
    found = {
        (s.rank, s.channel, a.move[0]): a.send
        for s in made.tracks for phase in range(len(s.phases)) for a in actions(made, s, phase)
        if a.move
    }  # fmt: skip
    assert {at for at, send in found.items() if send} == {*passed_on(made)}
    keeping = sum(bool(header[FLAGS] & KEEPS) for header in headers(made))
    receiving = sum(s.op in (Op.REDUCE, Op.COPY) for t in made.tracks for b in t.phases for s in b)
    assert keeping == receiving - sum(not kept for kept in passed_on(made).values())


def headers(plan: Plan) -> list[list[int]]:
    """The headers of all actions of the programs."""
    found = []
    for code in (p.code.tolist() for rank in range(plan.size) for p in programs(plan, rank)):
        at = code[1]
        while at < len(code):
            found.append(code[at : at + HEADER])
            at += code[at + LENGTH]
    return found


def traffic(plan: Plan, direct: bool) -> Fraction:
    """Bytes that the GPUs read and write for each byte of the message, as the programs say."""
    chunks = 0
    for header in headers(plan):
        operands, outputs, flags = (header[i] for i in (NUM_OPERANDS, NUM_OUTPUTS, FLAGS))
        outputs -= bool(direct and flags & PUSHED and flags & KEEPS)
        chunks += operands + outputs if outputs else 0
    return Fraction(chunks, plan.stride)


@pytest.mark.parametrize(("algorithm", "before", "after"), [
    ("overlapped_double_tree", 54, 33), ("double_tree", 54, 34), ("ring", 63, 36),
])  # fmt: skip
def test_bytes_that_are_moved_for_each_of_the_message(
    algorithm: str, before: int, after: int
) -> None:
    """Of 7 reduces and 7 copies, at the least 3 N and 2 N each, 14 N are slots' now."""
    plan = plan_allreduce(load("dgx1-v100"), 1 << 28, algorithm)
    assert (traffic(plan, False), traffic(fused(plan), True)) == (before, after)


def test_random_plans_that_fuse_and_push_give_the_sum() -> None:
    """No all-reduce has a race in pushing: a final value contains the receiver's own, so its rank
    has come and has sent that."""
    kinds = Counter()
    for seed in range(200):
        plan, topology = random_plan(seed)
        made = fused(plan)
        verify(made, topology)
        assert not races(plan, pushing=True) and not races(made, pushing=True)
        for order in (1, 2):
            assert not why_wrong(Fused(made, order)), seed
        kinds.update(passed_on(made).values())
    assert kinds[True] >= 100 and kinds[False] >= 100


def test_a_chunk_that_is_read_behind_a_push_and_before_its_copy_is_a_race() -> None:
    """A right plan, whose rank 1 sends its own chunk on while what it will copy is there."""
    mesh = load("mesh-3")
    ends = [(1, 0), (0, 1), (1, 2), (0, 2), (2, 0), (2, 1)]

    def wait(i: int) -> Step:
        return Step(Op.WAIT, (i,), 0)

    def signal(i: int) -> Step:
        return Step(Op.SIGNAL, (i,), 0)

    def send(*to: int) -> list[Step]:
        return [*map(wait, to), Step(Op.SEND, to, 0), *map(signal, to)]

    def copy(i: int) -> list[Step]:
        return [wait(i), Step(Op.COPY, (i,), 0), signal(i)]

    combine = [wait(0), Step(Op.REDUCE, (0,), 0), signal(0)]
    late = [wait(1), *send(2), *copy(1)[1:]]
    total = [wait(3), wait(2), Step(Op.REDUCE, (3, 2), 0, last=True), signal(3), signal(2)]
    bodies = ([*send(3), *combine, *send(1), *copy(4)], [*send(0), *late, *copy(5)],
              [*total, *send(4, 5)])  # fmt: skip
    connections = tuple(Connection(a, 0, b, 0, mesh.hops[a, b]) for a, b in ends)
    tracks = tuple(Track(rank, 0, (tuple(body),)) for rank, body in enumerate(bodies))
    plan = Plan("by hand", "allreduce", 3, 1, 1, 1, connections, tracks, exclusive=False)
    verify(plan, mesh)
    assert any("reads what was pushed" in words for words in races(plan, pushing=True))
    assert why_wrong(Fused(plan))


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "allgather", "reduce_scatter"])
def test_nothing_of_other_collectives_is_dropped(collective: str) -> None:
    """What a rank has made or got there is not overwritten."""
    plan = plan_collective(collective, load("dgx1-v100"), 40_000, 1)
    kept = passed_on(fused(plan))
    assert kept and all(kept.values())


def test_a_ring_with_one_slot_would_hang_and_stays() -> None:
    ring = replace(plan_allreduce(load("mesh-5"), 1 << 20, "ring"), slots=1)
    assert passed_on(ring) and fused(ring) is ring
    assert fused(replace(ring, slots=2)) != replace(ring, slots=2)


def test_what_is_needed_again_is_not_dropped() -> None:
    """Recursive doubling combines a result with others after it has been sent."""
    plan = plan_allreduce(load("mesh-8"), 4096, "recursive_doubling")
    assert not passed_on(plan) and fused(plan) == plan
    tree = plan_allreduce(load("mesh-7"), 1 << 20, "overlapped_tree")
    roots = {at for at, kept in passed_on(tree).items() if kept}
    assert {rank for rank, _, _ in roots} >= {tree.trees[0].root}
    assert False in passed_on(tree).values()
