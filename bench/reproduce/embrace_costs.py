"""Seconds of communicating an embedding on the EmbRace paper's clusters, in two ways.

`equation_seconds` is table 2, in which any two workers have the bandwidth to themselves.
`shared_seconds` is the same with the workers of a node sharing its InfiniBand, and each worker's
own link as fast as that: the larger of table 2 and of what passes through a node's adapter.
"""

from __future__ import annotations

from collections.abc import Callable

from linkweave.bench.reproduce.embrace_paper import BANDWIDTH, STARTUP, Cluster
from linkweave.collectives.planning.equations import (
    allgather_seconds,
    allreduce_seconds,
    alltoall_seconds,
    parameter_server_seconds,
)

WAYS = ("alltoall", "allreduce", "ps", "allgather")

Cost = Callable[[str, Cluster, float], float]


def equation_seconds(way: str, cluster: Cluster, nbytes: float) -> float:
    """Table 2, for gradients of `nbytes` (with "allreduce", the whole table)."""
    return _equation(way, cluster, nbytes / BANDWIDTH)


def shared_seconds(way: str, cluster: Cluster, nbytes: float) -> float:
    """Table 2, or the bytes through a node's adapter and the start-ups if those take longer."""
    adapter = adapter_bytes(way, cluster, nbytes) / BANDWIDTH
    return max(equation_seconds(way, cluster, nbytes), adapter + _equation(way, cluster, 0.0))


def adapter_bytes(way: str, cluster: Cluster, nbytes: float) -> float:
    """The bytes that leave a node, and as many arrive. Rings enter and leave it once."""
    workers, nodes = cluster.workers, cluster.nodes
    if nodes == 1:
        return 0.0
    inside = workers // nodes
    if way == "alltoall":
        return 2 * inside * (workers - inside) * nbytes / workers
    if way == "allreduce":
        return 2 * (workers - 1) * nbytes / workers
    if way == "ps":
        return 2 * (workers - inside) * nbytes / nodes
    return (workers - 1) * nbytes


def _equation(way: str, cluster: Cluster, seconds: float) -> float:
    if way == "alltoall":
        return alltoall_seconds(cluster.workers, STARTUP, seconds)
    if way == "allreduce":
        return allreduce_seconds(cluster.workers, STARTUP, seconds)
    if way == "ps":
        return parameter_server_seconds(cluster.workers, cluster.nodes, STARTUP, seconds)
    return allgather_seconds(cluster.workers, STARTUP, seconds)


def wins(cost: Cost, cluster: Cluster, other: str, nbytes: float) -> tuple[float, float] | None:
    """The sparsities, from and to, at which "alltoall" of a table of `nbytes` takes no longer than
    another way; None if there are none. All costs are linear in the density."""

    def ahead(density: float) -> float:
        whole = nbytes if other == "allreduce" else density * nbytes
        return cost("alltoall", cluster, density * nbytes) - cost(other, cluster, whole)

    sparse, dense = ahead(0.0), ahead(1.0)
    if min(sparse, dense) > 0:
        return None
    if max(sparse, dense) <= 0:
        return 0.0, 1.0
    crossing = 1 - sparse / (sparse - dense)
    return (crossing, 1.0) if sparse <= 0 else (0.0, crossing)
