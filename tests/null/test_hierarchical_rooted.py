"""Clusters: broadcast, reduce, all-gather and reduce-scatter over all NICs at once."""

from __future__ import annotations

import numpy as np
import pytest

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.planner import plan_collective
from linkweave.collectives.planning.simulate import simulate
from linkweave.collectives.planning.verify import verify
from linkweave.collectives.runtime.reference import run
from linkweave.topology import bound, load

CLUSTERS = ["2 x mesh-1", "3 x mesh-2", "5 x mesh-3", "2 x pcie-5 nics=1", "4 x pcie-4",
            "3 x dgx1-v100", "2 x dgx1-v100 nics=1"]  # fmt: skip
BLOCK = 37


@pytest.mark.parametrize("spec", CLUSTERS)
def test_blocks(spec: str) -> None:
    topo = load(spec)
    size = len(topo.gpus)
    inputs = [np.arange(size * BLOCK) * 1000 + 3 ** min(r, 30) for r in range(size)]
    blocks = [slice(r * BLOCK, (r + 1) * BLOCK) for r in range(size)]
    gather, scatter = (
        plan_collective(name, topo, inputs[0].nbytes, 0, "hierarchical")
        for name in ("allgather", "reduce_scatter")
    )
    for plan in (gather, scatter):
        verify(plan, topo)
    wanted = np.concatenate([x[block] for x, block in zip(inputs, blocks, strict=True)])
    assert all((out == wanted).all() for out in run(gather, inputs))
    for out, block in zip(run(scatter, inputs), blocks, strict=True):
        assert (out[block] == sum(inputs)[block]).all()


@pytest.mark.parametrize("spec", CLUSTERS)
@pytest.mark.parametrize("last", [False, True])
def test_roots(spec: str, last: bool) -> None:
    topo = load(spec)
    size = len(topo.gpus)
    root = size - 1 if last else 0
    inputs = [np.arange(301) * 1000 + 3 ** min(r, 30) for r in range(size)]
    out, back = (
        plan_collective(name, topo, inputs[0].nbytes, root, "hierarchical")
        for name in ("broadcast", "reduce")
    )
    for plan in (out, back):
        verify(plan, topo)
    assert all((got == inputs[root]).all() for got in run(out, inputs))
    assert (run(back, inputs)[root] == sum(inputs)).all()


@pytest.mark.parametrize(
    ("collective", "share"), [("broadcast", 0.88), ("allgather", 0.99), ("reduce_scatter", 0.98)]
)
def test_72_gpus_are_near_the_bound(collective: str, share: float) -> None:
    topo = load("9 x dgx-a100")
    root = 0 if collective == "broadcast" else None
    nbytes = 72 << 24
    plan = plan_collective(collective, topo, nbytes, root or 0)
    seconds = simulate(plan, topo, nbytes).seconds
    least = float(bound(topo, collective, root).seconds_per_byte) * nbytes
    assert plan.algorithm == "hierarchical"
    assert share * seconds < least <= seconds


def test_an_all_to_all_of_72_gpus() -> None:
    topo = load("9 x mesh-8")
    plan = plan_collective("alltoall", topo, 72 * 8)
    inputs = [np.arange(2 * 72) + 1000 * r for r in range(72)]
    for rank, x in enumerate(inputs):
        x[72 + rank] = x[rank]  # the block to itself lies there from the start
    for rank, out in enumerate(run(plan, inputs)):
        assert out[72:].tolist() == [rank + 1000 * other for other in range(72)]


def test_too_many_ranks_are_refused() -> None:
    topo = load("65 x mesh-4")
    with pytest.raises(PlanError, match=r"a plan of hierarchical grows .* at most 256 ranks"):
        plan_collective("allgather", load("33 x dgx-a100"), 264 << 10)
    with pytest.raises(PlanError, match=r"hierarchical grows as P\^2: at most 256 ranks, not 260"):
        plan_collective("allgather", topo, 260 * 64, 0, "hierarchical")
