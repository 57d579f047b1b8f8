"""Floors of algorithms: what `auto` need not make a plan of."""

from __future__ import annotations

import pytest

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.registry import algorithm_for
from linkweave.collectives.planning.collective import COLLECTIVES, PUBLIC
from linkweave.collectives.planning.lower import Algorithm, Copy, Tuning, lower, lower_bound
from linkweave.collectives.planning.planner import (
    candidates,
    choose,
    plan_collective,
    predict,
    size_class,
)
from linkweave.collectives.planning.simulate import simulate
from linkweave.topology import Topology, cluster, load

MACHINES = [
    *map(load, ("dgx1-v100", "dgx-a100", "mesh-3", "mesh-8", "ring-5", "pcie-4", "cpu-4")),
    cluster(load("mesh-2"), 2), cluster(load("dgx1-v100"), 2),
]  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_no_plan_takes_less(machine: Topology) -> None:
    for name in candidates(machine):
        bound = lower_bound(algorithm_for(name, machine), machine)
        for nbytes in (0, 1 << 10, 1 << 20, 1 << 24):
            template = plan_collective("allreduce", machine, nbytes, 0, name)
            for groups in (1, 2, 7):
                plan = template.with_chunks(template.stride * groups)
                seconds = simulate(plan, machine, nbytes).seconds
                assert bound.seconds(nbytes) <= seconds, (name, nbytes, groups)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("collective", PUBLIC)
def test_what_is_left_out_is_not_the_fastest(machine: Topology, collective: str) -> None:
    names = candidates(machine, collective)
    unit = COLLECTIVES[collective].layout.parts(len(machine.gpus))
    for nbytes in (
        size_class(n * unit, unit) for n in (0, 60, 60 << 6, 60 << 12, 60 << 15, 60 << 22)
    ):
        taken = choose(machine, nbytes, collective)
        times = {name: predict(machine, nbytes, name, collective)[0] for name in names}
        assert times[taken] == pytest.approx(min(times.values()), rel=1e-9), nbytes


def test_a_chain_of_sends_and_the_busiest_link() -> None:
    """On a ring of 25 GB/s with 5 us a hop: rank 1 forwards to 2, and sends a value of its own."""
    machine = load("ring-5")
    moves = (Copy(0, (2,), 0, 0),), (Copy(2, (3,), 0, 0), Copy(1, (2,), 1, 1))
    bound = lower_bound(Algorithm("own", 5, 2, (moves,), (), {(0, 0, 2): (1,)}), machine)
    link = machine.by_ends[1, 2]
    assert bound.start_s == pytest.approx(3 * link.latency_us * 1e-6)
    assert bound.load == pytest.approx(2 / (2 * link.bandwidth * link.count))
    assert bound.guess(0) == bound.start_s >= bound.seconds(0)


def test_no_link_and_no_detour_is_an_error() -> None:
    apart = Algorithm("own", 5, 1, (((Copy(0, (2,), 0, 0),),),))
    with pytest.raises(PlanError, match="GPU 0 to GPU 2"):
        lower_bound(apart, load("ring-5"))
    with pytest.raises(PlanError):
        lower(apart, load("ring-5"), Tuning(1))
