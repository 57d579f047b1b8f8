"""The times of communication by papers: all-reduces (gTop-k, equations 5 to 7), and an embedding's
gradients (EmbRace, table 2).
"""

from __future__ import annotations


def dense_seconds(workers: int, alpha: float, whole: float) -> float:
    """Equation 5, a ring; all bytes take `whole` seconds over a link."""
    return 2 * (workers - 1) * (alpha + whole / workers)


def topk_seconds(workers: int, rounds: float, alpha: float, message: float) -> float:
    """Equation 6, an all-gather of the entries, which take `message` seconds for each worker."""
    return rounds * alpha + (workers - 1) * message


def gtopk_seconds(rounds: float, alpha: float, message: float) -> float:
    """Equation 7, merges up a tree and a broadcast."""
    return 2 * rounds * (alpha + message)


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
