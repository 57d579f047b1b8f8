"""All executors give the same bits for the same plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_gpu import HostDevice, needs_compiler

from linkweave import collectives
from linkweave.collectives import CollectiveError, Plan, plan_allreduce, plan_collective
from linkweave.collectives.launch.default import get_default
from linkweave.collectives.runtime.gpu.executor import GpuRanks, virtual_ranks
from linkweave.collectives.runtime.reference import run
from linkweave.topology import load
from tests.cpu.helpers import RankPlans, buffer_of, error_of, values

SIZE = 5
CASES = [(name, n, op) for name in ("ring", "chain", "one_shot", "tree", "recursive_doubling")
         for n, op in ((0, "sum"), (1, "max"), (1009, "sum"), (5000, "avg"))]  # fmt: skip


def plans() -> list[tuple[Plan, int, str]]:
    machine = load("mesh-5")
    found = [(plan_allreduce(machine, 20_000, name, 10), n, op) for name, n, op in CASES]
    found += [(plan_collective(kind, machine, 20_000, 3 * (kind != "reduce_scatter")), 5000, "sum")
              for kind in ("broadcast", "reduce", "reduce_scatter")]  # fmt: skip
    return found


class Reference:
    ranks = range(SIZE)

    def execute(self, plan: Plan, arrays: list[Any], op: str) -> None:
        for array, result in zip(arrays, run(plan, arrays, op), strict=True):
            array[:] = result


class OnGpu:
    """All ranks on one GPU."""

    ranks = range(SIZE)

    def __init__(self, gpu: GpuRanks) -> None:
        self.gpu = gpu

    def execute(self, plan: Plan, arrays: list[Any], op: str) -> None:
        buffers = [buffer_of(x) for x in arrays]
        prepared = self.gpu.prepare(plan, buffers[0].nbytes, buffers[0].dtype, op)
        self.gpu.run(prepared, [b.address for b in buffers])
        self.gpu.check()


def carried_out(executor: Any) -> list[list[bytes]]:
    """Each plan twice, so that counters go on."""
    found = []
    for plan, n, op in plans() * 2:
        arrays = [values(r, n) for r in executor.ranks]
        executor.execute(plan, arrays, op)
        found.append([x.tobytes() for x in arrays])
    return found


def on_a_rank(rank: int) -> list[list[bytes]]:
    comm: Any = get_default()
    return carried_out(RankPlans(comm))


@needs_compiler
def test_reference_cpu_and_gpu_ranks_agree() -> None:
    want = carried_out(Reference())
    rows = collectives.spawn(on_a_rank, SIZE)
    assert [[row[i][0] for row in rows] for i in range(len(want))] == want
    with virtual_ranks(HostDevice(33), SIZE) as gpu:
        got = carried_out(OnGpu(gpu))
    for (plan, *case), ours, theirs in zip(plans() * 2, got, want, strict=True):
        assert ours == theirs, (plan.algorithm, plan.collective, *case)


def too_long(rank: int) -> str:
    comm: Any = get_default()
    x = np.ones(100_000, np.float32)
    plan = plan_allreduce(load("cpu-2"), 4, "tree", 1)
    return error_of(RankPlans(comm).execute, plan, [x])


def test_chunks_that_do_not_fit_slots_are_refused() -> None:
    assert all("do not fit slots of 65536" in said for said in collectives.spawn(too_long, 2))


def test_a_plan_for_other_ranks_is_refused() -> None:
    with pytest.raises(CollectiveError, match="the plan is for 5 ranks, not 1 inputs"):
        run(plans()[4][0], [np.ones(3)])
