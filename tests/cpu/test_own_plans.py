"""Plans and algorithms of a user's own."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from on_ranks import on_ranks

from linkweave import collectives
from linkweave.collectives import Plan, PlanError, plan_allreduce, plan_collective
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.planning.lower import Algorithm
from linkweave.collectives.runtime import reference
from linkweave.topology import Topology, load
from tests.cpu.helpers import error_of, values

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import own_algorithm  # noqa: E402


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert own_algorithm.main() == [(6.0, 1.5)] * 4
    assert "GB/s on mesh-64, simulated" in capsys.readouterr().out


def test_a_function_goes_where_a_name_goes() -> None:
    machine = load("mesh-5")
    plan = plan_allreduce(machine, 1 << 20, own_algorithm.line)
    assert plan.algorithm == "line" and collectives.simulate(plan, machine, 1 << 20).seconds > 0
    found = collectives.explain(machine, 1 << 20, algorithms=[own_algorithm.line, "ring"])
    assert sorted(row.algorithm for row in found.rows) == sorted({"line", "ring", found.choice})
    with pytest.raises(PlanError, match="must return an Algorithm, not int"):
        plan_allreduce(machine, 1, lambda topology: 3)  # type: ignore[arg-type,return-value]


def run_them(rank: int, plans: list[str], sizes: list[int]) -> list[bytes]:
    found = []
    for text in plans:
        plan = Plan.from_json(text)
        for n in sizes:
            for _ in range(2):
                x = values(rank, n)
                collectives.run(plan, x)
                found.append(x.tobytes())
    return found


def test_a_plan_runs_as_the_reference_says() -> None:
    machine, sizes = load("ring-5"), [0, 1, 17, 5000]
    plans = [plan_allreduce(machine, 20_000, name, 10) for name in ("ring", "chain", "one_shot")]
    got = collectives.spawn(run_them, 5, machine, ([p.to_json() for p in plans], sizes))
    want = []
    for plan in plans:
        for n in sizes:
            want += [reference.run(plan, [values(r, n) for r in range(5)])[0].tobytes()] * 2
    assert all(found == want for found in got)


@on_ranks(3)
def test_chunks_that_do_not_fit_are_cut(rank: int) -> None:
    """Chunks that would not fit the slots."""
    x = np.full(1_000_000, rank, np.float32)
    collectives.run(plan_allreduce(load("cpu-3"), 64, "two_shot", 3), x, "avg")
    assert x.min() == x.max() == 1


def wrong_ones(rank: int) -> list[str]:
    comm = get_default()
    x = np.ones(100, np.float32)
    good = plan_allreduce(load("cpu-2"), 400, "tree", 2)
    shared = plan_collective("allgather", load("cpu-2"), 400)
    bad = replace(good, tracks=good.tracks[:1])
    other = good.with_chunks(2 * good.num_chunks) if rank else good
    said = [
        error_of(comm.run, bad, x), error_of(comm.run, other, x), error_of(comm.run, "tree", x),
        error_of(comm.run, shared, x),
        error_of(comm.run, plan_allreduce(load("cpu-3"), 400), x),
        error_of(comm.allreduce, x, algorithm=lambda topology: 3),
        error_of(comm.allreduce, x, algorithm=7),
    ]  # fmt: skip
    assert (x == 1).all()
    comm.run(good, x)
    assert (x == 2).all()
    return said


def test_wrong_plans_are_refused_on_every_rank() -> None:
    first, second = collectives.spawn(wrong_ones, 2)
    assert first[0] == second[0] and "PlanError" not in first[0] and first[0]
    assert "own plan of checksum " in first[1] and first[1] == second[1]
    assert "a Plan is needed, not str" in first[2]
    assert "run carries out allreduce, broadcast, reduce, not plans of allgather" in first[3]
    assert "the plan is for 3 ranks; there are 2" in first[4]
    assert "must return an Algorithm" in first[5] and first[5] == second[5]
    assert "algorithm must be a name or a function" in first[6]


@on_ranks(2)
def test_functions_that_differ_are_noticed(rank: int) -> None:
    def here(topology: Topology) -> Algorithm:
        return own_algorithm.line(topology)

    def there(topology: Topology) -> Algorithm:
        print()
        return own_algorithm.line(topology)

    said = error_of(collectives.allreduce, np.ones(9), algorithm=(here, there)[rank])
    assert "calls differ: " in said
