"""Plans: every algorithm for every size, their forms, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS, algorithm_for
from linkweave.collectives.planning.lower import Tuning, lower
from linkweave.collectives.planning.plan import Op, Plan, Step
from linkweave.collectives.planning.planner import candidates, plan_allreduce
from linkweave.collectives.planning.verify import verify
from linkweave.collectives.runtime import reference
from linkweave.topology import load
from tests.null.helpers import SPECIAL, lowered, parts_of_dgx1

GENERAL = [name for name in ALGORITHMS["allreduce"] if name not in SPECIAL]
SLOW = ("mesh-11", "mesh-12", "mesh-14", "mesh-15", "mesh-16")
MACHINES = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
    for name in (f"{family}-{n}" for family in ("mesh", "cpu") for n in range(1, 18))
]


def general(machine: str) -> list[str]:
    """The algorithms that run on such a machine: on one memory there are no links to pack."""
    return [name for name in GENERAL if name != "packed_trees" or not machine.startswith("cpu")]


def check_sum(plan: Plan) -> None:
    """The plan's result is the exact sum on every rank, in two orders of carrying it out."""
    numel = 2 * plan.num_chunks + 1  # some chunks full, the rest empty
    inputs = [np.arange(numel, dtype=np.int64) * 1000**2 + 7**r for r in range(plan.size)]
    total = sum(inputs)
    for seed in (None, 1):
        for out in reference.run(plan, inputs, seed=seed):
            np.testing.assert_array_equal(out, total)


@pytest.mark.parametrize("machine", [*MACHINES, "dgx1-v100", "dgx1-p100"])
def test_every_algorithm_is_proved_in_short_form(machine: str) -> None:
    topo = load(machine)
    assert set(general(machine)) <= set(candidates(topo))
    for name in general(machine):
        plan = lowered(name, topo, 1000, slots=4 if len(topo.gpus) <= 8 else 1)
        assert plan.size == len(topo.gpus)
        verify(plan, topo)


SMALL = [f"{family}-{n}" for family in ("mesh", "cpu") for n in range(1, 9)]


@pytest.mark.parametrize("machine", [*SMALL, "dgx1-v100"])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5, 8, 13, 64])
def test_every_algorithm_is_proved_in_full(machine: str, num_chunks: int) -> None:
    topo = load(machine)
    for name in candidates(topo):
        plan = lowered(name, topo, num_chunks)
        verify(plan, topo, expand=True)
        if num_chunks <= 5:
            check_sum(plan)


PARTS = {2: 16, 3: 32, 4: 56, 5: 56, 6: 28, 7: 8, 8: 1}  # 197 in all


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        pytest.param(*item, marks=pytest.mark.slow if item[0] in (5, 6) else ())
        for item in PARTS.items()
    ],
)
def test_any_connected_gpus_of_the_dgx1_get_a_plan(size: int, parts: int) -> None:
    """nccl#301: a subset without an NVLink ring must not fall back to something slow, or fail."""
    found = parts_of_dgx1([size])
    assert len(found) == parts
    for part in found:
        verify(plan_allreduce(part, 1 << 20), part)


# ---- forms ---------------------------------------------------------------------------------


def decode(plan: Plan, rank: int) -> list[list[list[Step]]]:
    """The layout that `Plan.encode` documents, read back."""
    array = plan.encode(rank)
    assert array.dtype == np.int32
    data = array.tolist()
    count, phases = data[:2]
    mine = [s for s in plan.tracks if s.rank == rank]
    tracks = []
    read = 2 + count * (phases + 1)
    for s in range(count):
        row = data[2 + s * (phases + 1) :][: phases + 1]
        bodies = []
        for start, stop in pairwise(row):
            assert start == read
            steps, at = [], start
            while at < stop:
                op, chunk, flag, source, n = data[at : at + 5]
                connections = tuple(data[at + 5 : at + 5 + n])
                at += 5 + n
                last, ahead = (bool(flag & 1), flag >> 1) if op == Op.REDUCE else (False, 0)
                assert flag in (0, 1) if op != Op.REDUCE else ahead <= n
                if op in (Op.SIGNAL, Op.WAIT):
                    c = plan.connections[connections[0]]
                    assert flag == ((c.src, c.src_channel) == (rank, mine[s].channel))
                steps.append(
                    Step(Op(op), connections, chunk, None if source == -1 else source, last, ahead)
                )
            assert at == stop
            read = stop
            bodies.append(steps)
        tracks.append(bodies)
    assert read == len(data)
    return tracks


@pytest.mark.parametrize("machine", ["mesh-1", "mesh-6", "dgx1-v100", "dgx1-p100", "cpu-3"])
def test_the_device_encoding_reads_back(machine: str) -> None:
    topo = load(machine)
    for name in candidates(topo):
        plan = plan_allreduce(topo, 1 << 20, name)
        for rank in range(plan.size):
            tracks = [s for s in plan.tracks if s.rank == rank]
            assert decode(plan, rank) == [[list(body) for body in s.phases] for s in tracks]


@pytest.mark.parametrize("name", [*GENERAL, "ccube_dgx1"])
def test_a_plan_does_not_grow_with_its_chunks(name: str) -> None:
    few = lowered(name, load("dgx1-v100"), 10)
    many = lowered(name, load("dgx1-v100"), 10_000)
    assert many == few.with_chunks(10_000)
    assert many.tracks == few.tracks and many.connections == few.connections
    assert [many.encode(r).tolist() for r in range(8)] == [few.encode(r).tolist() for r in range(8)]
    assert len(many.to_json()) == len(few.to_json()) + len("10000") - len("10")
    assert many.with_chunks(10) == few


def test_steps_repeat_phase_by_phase_and_leave_out_what_is_past_the_end() -> None:
    plan = lowered("double_tree", load("mesh-4"), 5)  # two trees: groups of 2, the last cut short
    assert (plan.groups, plan.stride) == (3, 2)
    for track in plan.tracks:
        want, base = [], 0
        for body in track.phases:
            want += [
                (base + at, 2 * g + step.chunk, step)
                for g in range(3)
                for at, step in enumerate(body)
                if 2 * g + step.chunk < 5
            ]
            base += len(body)
        assert list(plan.steps(track)) == want


# ---- choice and refusals -------------------------------------------------------------------


def test_the_environment_overrides_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    topo = load("mesh-6")
    free = plan_allreduce(topo, 1 << 10).algorithm
    for name in GENERAL:
        monkeypatch.setenv("LINKWEAVE_ALGORITHM", name)
        assert plan_allreduce(topo, 1 << 10).algorithm == name
        assert plan_allreduce(topo, 1 << 10, "chain").algorithm == "chain", "only auto asks"
    monkeypatch.setenv("LINKWEAVE_ALGORITHM", "")
    assert plan_allreduce(topo, 1 << 10).algorithm == free
    monkeypatch.setenv("LINKWEAVE_ALGORITHM", "rings")
    with pytest.raises(PlanError, match="LINKWEAVE_ALGORITHM='rings' is no algorithm; choose from"):
        plan_allreduce(topo, 1 << 10)


def test_a_plan_needs_the_size_it_was_made_for() -> None:
    with pytest.raises(PlanError, match="ring is for 4 ranks; mesh-5 has 5 GPUs"):
        lower(algorithm_for("ring", load("mesh-4")), load("mesh-5"), Tuning(4))
