"""Results that are sent on in the step that makes them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from linkweave.collectives.planning.dataflow import passed_on, pushes
from linkweave.collectives.planning.plan import Op, Plan, Step
from linkweave.collectives.planning.planner import plan_allreduce, plan_collective
from linkweave.collectives.planning.verify import races, verify
from linkweave.collectives.runtime.gpu import launch_tables as tables
from linkweave.collectives.runtime.gpu.launch_tables import FLAGS, KEEPS, fused
from linkweave.topology import load
from tests.null.executor import Executor, why_wrong
from tests.null.helpers import by_hand, hop, random_plan, receive, send, step

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
        for s in made.tracks for phase in range(len(s.phases))
        for a in tables.actions(made, s, phase) if a.move
    }  # fmt: skip
    assert {at for at, send in found.items() if send} == {*passed_on(made)}
    keeping = sum(bool(header[FLAGS] & KEEPS) for header in headers(made))
    receiving = sum(s.op in (Op.REDUCE, Op.COPY) for t in made.tracks for b in t.phases for s in b)
    assert keeping == receiving - sum(not kept for kept in passed_on(made).values())


def headers(plan: Plan) -> list[list[int]]:
    """The headers of all actions of the programs."""
    found = []
    for code in (p.code.tolist() for rank in range(plan.size) for p in tables.programs(plan, rank)):
        at = code[1]
        while at < len(code):
            found.append(code[at : at + tables.HEADER])
            at += code[at + tables.LENGTH]
    return found


def traffic(plan: Plan, direct: bool) -> Fraction:
    """Bytes that the GPUs read and write for each byte of the message, as the programs say."""
    chunks = 0
    for header in headers(plan):
        operands, outputs, flags = (
            header[i] for i in (tables.NUM_OPERANDS, tables.NUM_OUTPUTS, FLAGS)
        )
        outputs -= bool(direct and flags & tables.PUSHED and flags & KEEPS)
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
    waits, signals = ([step(op, i) for i in range(6)] for op in (Op.WAIT, Op.SIGNAL))
    late = [waits[1], *send(2), step(Op.COPY, 1), signals[1]]
    total = [waits[3], waits[2], step(Op.REDUCE, 3, 2, last=True), signals[3], signals[2]]
    give = [waits[4], waits[5], step(Op.SEND, 4, 5), signals[4], signals[5]]
    tracks = {
        (0, 0): [[*send(3), *receive(Op.REDUCE, 0), *send(1), *receive(Op.COPY, 4)]],
        (1, 0): [[*send(0), *late, *receive(Op.COPY, 5)]],
        (2, 0): [[*total, *give]],
    }
    ends = [(1, 0), (0, 1), (1, 2), (0, 2), (2, 0), (2, 1)]
    plan = by_hand([hop(a, 0, b) for a, b in ends], tracks, slots=1)
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
