"""The times of communicating an embedding's gradients by the EmbRace paper: table 2.

`startup` is that of a message, in seconds (the paper's beta). `whole` is the time that all bytes of
the table take over a link (M / B), `sparse` that of a worker's sparse gradient (alpha M / B).
Source: Li et al., "EmbRace: Accelerating Sparse Communication for Distributed Training of Deep
Neural Networks", section 4.1.2.
"""

from __future__ import annotations

from linkweave.collectives.planning.sparse_equations import dense_seconds


def alltoall_seconds(workers: int, startup: float, sparse: float) -> float:
    """AlltoAll, of the lookups and again of the gradients."""
    return 2 * (workers - 1) * (sparse / workers + startup)


def allreduce_seconds(workers: int, startup: float, whole: float) -> float:
    """AllReduce of the dense gradient around a ring: equation 5 of the gTop-k paper."""
    return dense_seconds(workers, startup, whole)


def parameter_server_seconds(workers: int, nodes: int, startup: float, sparse: float) -> float:
    """PS, with the table divided over a server on each node: the lower bound of the paper."""
    return 2 * workers * (sparse / nodes + startup)


def allgather_seconds(workers: int, startup: float, sparse: float) -> float:
    """AllGather of the sparse gradients."""
    return (workers - 1) * (sparse + startup)
