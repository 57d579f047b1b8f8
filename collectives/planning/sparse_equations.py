"""The times of all-reduces by the gTop-k paper: equations 5 to 7.

`alpha` is the start-up of a message, in seconds. `rounds` is log2 P, or the number of rounds of a
tree of P ranks that are no power of two.
Source: Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks".
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
