"""`linkweave reproduce choice`: the algorithms that `auto` takes, compared with the best.

Every algorithm that a machine can run is simulated at five numbers of chunks, from a quarter to
four times the model's, at powers of two from 1 KiB to 1 GiB; `auto` is compared with the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from linkweave import collectives
from linkweave.bench.command import options
from linkweave.collectives.planning.explain import SIZES, crossovers, size_text
from linkweave.collectives.planning.planner import candidates, plan_allreduce, predict
from linkweave.collectives.planning.simulate import most_chunks
from linkweave.topology import Topology, load

MACHINES = (
    "dgx1-v100", "dgx1-p100", "dgx2", "dgx-a100", "dgx-h100", "mesh-2", "mesh-3", "mesh-5",
    "mesh-8", "ring-5", "ring-8", "pcie-4", "pcie-5", "pcie-8",
)  # fmt: skip
FACTORS = (0.25, 0.5, 1, 2, 4)


@dataclass(frozen=True, slots=True)
class Row:
    machine: str
    worst: float  # the largest ratio of `auto`'s simulated time to the best found
    worst_at: int
    crossovers: tuple[tuple[int, str], ...]


def compare(machine: Topology, nbytes: int) -> tuple[str, float]:
    """Return `auto`'s algorithm, and its simulated time over that of the best."""
    auto = plan_allreduce(machine, nbytes)
    mine = best = collectives.simulate(auto, machine, nbytes).seconds
    for name in candidates(machine):
        chunks = predict(machine, nbytes, name)[1]
        template = plan_allreduce(machine, nbytes, name, chunks)
        most = most_chunks(nbytes, template.stride)
        for factor in FACTORS:
            groups = max(1, round(chunks / template.stride * factor))
            plan = template.with_chunks(min(groups * template.stride, most))
            best = min(best, collectives.simulate(plan, machine, nbytes).seconds)
    return auto.algorithm, mine / best


def rows() -> Iterator[Row]:
    for name in MACHINES:
        machine = load(name)
        worst, at = max((compare(machine, size)[1], size) for size in SIZES)
        yield Row(name, worst, at, crossovers(machine))


def table(found: list[Row]) -> str:
    """The algorithms that `auto` takes by size, and its largest distance from the best."""
    rows = [
        (r.machine, f"{r.worst:.4f}", size_text(r.worst_at),
         ", ".join(f"{name} from {size_text(size)}" for size, name in r.crossovers))
        for r in found
    ]  # fmt: skip
    return options.table(("machine", "auto / best", "at", "auto takes"), rows, (0, 3))
