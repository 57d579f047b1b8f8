"""Times of sparse all-reduces on a network whose dense all-reduce is known.

Source: Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks", equations 5 to 7.
"""

from __future__ import annotations

from linkweave.collectives.overlap.network import Network
from linkweave.collectives.planning.sparse_equations import gtopk_seconds, topk_seconds

ENTRY = 8
"""Bytes of an entry: a float32 value and an int32 index."""


def sparse_seconds(network: Network, nbytes: float, entries: float) -> dict[str, float]:
    """The seconds of each way to add gradients of `nbytes`, with so many entries from each rank.

    The start-up and the time per byte of a message are those of which a ring's all-reduce is made
    (equation 5). "gtopk" takes ceil(log2 P) rounds up and as many down (equation 7), "topk" gathers
    all entries (equation 6), "dense" is the all-reduce of all bytes.
    """
    rounds = (network.workers - 1).bit_length()
    alpha, pace = network.message
    message = ENTRY * entries * pace
    return {
        "gtopk": gtopk_seconds(rounds, alpha, message),
        "topk": topk_seconds(network.workers, rounds, alpha, message),
        "dense": network.seconds(nbytes),
    }
