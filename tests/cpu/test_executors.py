"""All executors give the same bits for the same plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_gpu import HostDevice, needs_compiler

from linkweave import collectives
from linkweave.collectives import CollectiveError, Plan, plan_allreduce, plan_collective
from linkweave.collectives.launch.default import get_default
from linkweave.collectives.runtime.base import Executor
from linkweave.collectives.runtime.gpu.executor import virtual_ranks
from linkweave.collectives.runtime.reference import Reference
from linkweave.topology import load
from tests.cpu.helpers import buffer_of, error_of, values

SIZE = 5
CASES = [(name, n, op) for name in ("ring", "chain", "one_shot", "tree", "recursive_doubling")
         for n, op in ((0, "sum"), (1, "max"), (1009, "sum"), (5000, "avg"))]  # fmt: skip


def plans() -> list[tuple[Plan, int, str]]:
    machine = load("mesh-5")
    found = [(plan_allreduce(machine, 20_000, name, 10), n, op) for name, n, op in CASES]
    found += [(plan_collective(kind, machine, 20_000, 3 * (kind != "reduce_scatter")), 5000, "sum")
              for kind in ("broadcast", "reduce", "reduce_scatter")]  # fmt: skip
    return found


def carried_out(executor: Executor) -> list[list[bytes]]:
    """Each plan twice, so that counters go on."""
    found = []
    for plan, n, op in plans() * 2:
        arrays = [values(r, n) for r in executor.ranks]
        executor.execute(plan, [buffer_of(x) for x in arrays], op)
        found.append([x.tobytes() for x in arrays])
    return found


def on_a_rank(rank: int) -> list[list[bytes]]:
    comm: Any = get_default()
    return carried_out(comm._calls.executor)


@needs_compiler
def test_reference_cpu_and_gpu_ranks_agree() -> None:
    want = carried_out(Reference(SIZE))
    rows = collectives.spawn(on_a_rank, SIZE)
    assert [[row[i][0] for row in rows] for i in range(len(want))] == want
    with virtual_ranks(HostDevice(33), SIZE) as gpu:
        got = carried_out(gpu)
    for (plan, *case), ours, theirs in zip(plans() * 2, got, want, strict=True):
        assert ours == theirs, (plan.algorithm, plan.collective, *case)


def too_long(rank: int) -> str:
    comm: Any = get_default()
    x = np.ones(100_000, np.float32)
    plan = plan_allreduce(load("cpu-2"), 4, "tree", 1)
    return error_of(comm._calls.executor.execute, plan, [buffer_of(x)])


def test_chunks_that_do_not_fit_slots_are_refused() -> None:
    assert all("do not fit slots of 65536" in said for said in collectives.spawn(too_long, 2))


def test_a_plan_for_other_ranks_is_refused() -> None:
    with pytest.raises(CollectiveError, match="the plan is for 5 ranks, not 1 inputs"):
        Reference(1).execute(plans()[4][0], [buffer_of(np.ones(3))])
