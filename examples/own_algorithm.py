"""Write an all-reduce algorithm, prove it, simulate it on 64 GPUs, and run it on CPU ranks.

    python examples/own_algorithm.py

The algorithm: ranks form a line; each adds its chunk to what comes from the left, and the last one
hands the sum to everyone. An algorithm says what moves; the planner adds signals and slots.
"""

from __future__ import annotations

import numpy as np

from linkweave import collectives, topology
from linkweave.collectives.planning.lower import Algorithm, Copy, Reduce


def line(machine: topology.Topology) -> Algorithm:
    """Sum along the line of ranks, then one broadcast from its end."""
    size = len(machine.gpus)
    last, everyone = size - 1, tuple(range(size - 1))
    rounds = [(Reduce((r - 1,), r, chunk=0, channel=0),) for r in range(1, size)]
    if everyone:
        rounds.append((Copy(last, everyone, chunk=0, channel=1),))
    return Algorithm("line", size, stride=1, phases=(tuple(rounds),))


def work(rank: int, text: str) -> tuple[float, float]:
    """Run it by its function, and as a plan that was written to a file."""
    x = np.full(1_000_003, rank, np.float32)
    collectives.allreduce(x, algorithm=line)
    y = np.full(1_000_003, rank, np.float32)
    collectives.run(collectives.Plan.from_json(text), y, "avg")
    return float(x[0]), float(y[-1])


def main() -> list[tuple[float, float]]:
    machine, nbytes = topology.load("mesh-64"), 64 << 20
    for algorithm in (line, "ring", "auto"):
        plan = collectives.plan_allreduce(machine, nbytes, algorithm)
        collectives.verify(plan, machine)  # every plan has been through this already
        found = collectives.simulate(plan, machine, nbytes)
        print(f"{plan.algorithm:10} {found.algbw / 1e9:7.2f} GB/s on {machine.name}, simulated")
    text = collectives.plan_allreduce(topology.load("cpu-4"), 4_000_012, line).to_json()
    results = collectives.spawn(work, 4, args=(text,))
    print("on 4 CPU ranks:", results[0])
    return results


if __name__ == "__main__":
    main()
