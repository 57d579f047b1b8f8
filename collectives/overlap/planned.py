"""Networks as the planner sees them: times of all-reduces on a topology, from simulated plans."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from linkweave.collectives.overlap.timing import SHARES, Timing
from linkweave.collectives.planning.collective import ALLREDUCE
from linkweave.collectives.planning.plan import Plan, Step
from linkweave.collectives.planning.planner import choose, plan_collective, predict
from linkweave.collectives.planning.simulate import Timeline, simulate
from linkweave.topology import Topology

SIZES = tuple(1 << i for i in range(12, 31))
"""Bytes of the all-reduces that are planned: 4 KiB to 1 GiB."""
LARGE = 1 << 26
"""Bytes of the all-reduces from which `contention` is found."""


@dataclass(frozen=True)
class Planned:
    """The timings of a topology, and the contention of two all-reduces at once (`gamma`)."""

    timings: tuple[Timing, ...]
    gamma: float


def planned(topology: Topology, algorithm: str = "auto") -> Planned:
    """Plan and simulate all-reduces of SIZES, alone, as gradient queues, and two at once.

    With "auto" each size takes the algorithm that `planner.choose` takes; queues take the one whose
    first chunk is final earliest, as at run time. Raises PlanError.
    """
    return Planned(
        tuple(_timing(topology, nbytes, algorithm) for nbytes in SIZES),
        contention(topology, algorithm),
    )


def _timing(topology: Topology, nbytes: int, algorithm: str) -> Timing:
    queue = plan_collective(ALLREDUCE, topology, nbytes, 0, algorithm, queued=True)
    line = simulate(queue, topology, nbytes)
    chosen = choose(topology, nbytes) if algorithm == "auto" else algorithm
    return Timing(nbytes, predict(topology, nbytes, chosen)[0], arrivals_of(line))


def arrivals_of(line: Timeline) -> tuple[float, ...]:
    """`Timing.arrivals` of a simulated all-reduce.

    The first bytes up to some chunk are final once that chunk and all before it are: a gradient
    queue hands out layers in the buffer's order.
    """
    upto = np.maximum.accumulate(line.chunk_seconds)
    chunk = line.plan.chunk_bytes(line.nbytes)
    ends = [max(1, -(-line.nbytes * part // SHARES)) for part in range(1, SHARES + 1)]
    return (float(upto[0]), *(float(upto[(end - 1) // chunk]) for end in ends))


def contention(topology: Topology, algorithm: str = "auto") -> float:
    """Return gamma (`overlap.network`): how many times longer a byte takes while a second
    all-reduce by the same plan is under way.

    Both are simulated as one plan, whose links they share: 1 if they have links enough for both,
    2 or slightly more if one of them alone saturates the links that it needs.
    """
    plan = plan_collective(ALLREDUCE, topology, LARGE, 0, algorithm)
    if not plan.connections:
        return 1.0
    both = simulate(twice(plan), topology, 2 * LARGE).seconds
    return max(1.0, both / simulate(plan, topology, LARGE).seconds)


def twice(plan: Plan) -> Plan:
    """Two all-reduces at once by the same plan, as one plan of twice as many chunks, which deals
    every other group of chunks to the second one's channels. It is to be simulated, not run."""
    channels = 1 + max(track.channel for track in plan.tracks)
    beside = tuple(
        replace(c, src_channel=c.src_channel + channels, dst_channel=c.dst_channel + channels)
        for c in plan.connections
    )
    tracks = tuple(
        replace(
            track, channel=track.channel + channels,
            phases=tuple(tuple(_moved(step, plan) for step in body) for body in track.phases),
        )
        for track in plan.tracks
    )  # fmt: skip
    return replace(
        plan, num_chunks=2 * plan.num_chunks, stride=2 * plan.stride, exclusive=False,
        connections=(*plan.connections, *beside), tracks=(*plan.tracks, *tracks),
    )  # fmt: skip


def _moved(step: Step, plan: Plan) -> Step:
    """A step of the second all-reduce."""
    return replace(
        step, chunk=step.chunk + plan.stride,
        connections=tuple(i + len(plan.connections) for i in step.connections),
        source=None if step.source is None else step.source + len(plan.connections),
    )  # fmt: skip
