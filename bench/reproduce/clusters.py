"""`linkweave reproduce clusters`: what `auto` reaches of the bound on clusters, and why no more.

All-reduces of 1 GiB on nodes of DGX machines, joined by a NIC for each GPU (or PCIe switch) on
rails: those with which they are sold; or NICs of 24 GB/s on rails, on leaves that are
oversubscribed, or one a node.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from linkweave import collectives, topology
from linkweave.bench.command import options
from linkweave.topology import Topology
from linkweave.topology.graph import KINDS

NODES = (2, 4, 8, 16, 32, 64, 128)
MACHINES = ("dgx1-v100", "dgx-a100", "dgx-h100")
NETWORKS = ("", "nic=24GB/s", "nic=24GB/s leaf=4 oversubscription=2", "nic=24GB/s nics=1")
NBYTES = 1 << 30
TOTAL = len(NODES) * len(MACHINES) * len(NETWORKS)


@dataclass(frozen=True, slots=True)
class Row:
    """One cluster: algbw and bound in bytes/s, the kind of link that is busiest and the share of
    the time in which it carries bytes, the seconds to plan and prove."""

    cluster: str
    algorithm: str
    algbw: float
    bound: float
    busiest: str
    busy: float
    planning: float

    @property
    def share(self) -> float:
        return self.algbw / self.bound


def row(cluster: str) -> Row:
    start = time.perf_counter()
    machine: Topology = topology.load(cluster)
    plan = collectives.plan_allreduce(machine, NBYTES)
    seconds = time.perf_counter() - start
    line = collectives.simulate(plan, machine, NBYTES)
    ends, busy = max(line.utilisation.items(), key=lambda item: item[1])
    return Row(cluster, plan.algorithm, line.algbw, topology.allreduce_bound(machine),
               KINDS[machine.by_ends[ends].kind][1], busy, seconds)  # fmt: skip


def rows() -> Iterator[Row]:
    for network, machine, nodes in product(NETWORKS, MACHINES, NODES):
        yield row(f"{nodes} x {machine} {network}".strip())


def table(found: list[Row]) -> str:
    rows = [
        (r.cluster, r.algorithm, f"{r.algbw / 1e9:.1f}", f"{r.bound / 1e9:.1f}", f"{r.share:.1%}",
         f"{r.busiest} {r.busy:.0%}", f"{r.planning:.1f}") for r in found
    ]  # fmt: skip
    heads = ("cluster", "auto takes", "GB/s", "bound", "share", "busiest", "s to plan")
    below = sum(r.share < 0.9 for r in found)
    return (
        f"{options.table(heads, rows, (0, 1, 5), wrapped=(0,))}\n\nbelow 90 % of the bound: "
        f"{below} of {len(found)}. Packed trees are for at most 64 GPUs. On DGX-1 nodes, slices\n"
        "cross the cube mesh unevenly, or PCIe between CPUs. Beyond 16 nodes there are several\n"
        "rings of nodes; what they send to each other crosses oversubscribed uplinks together."
    )
