"""What no schedule can beat, whatever it fuses, partitions, orders or sends at once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile


def preemptive(heads: Sequence[float], times: Sequence[float], tails: Sequence[float]) -> float:
    """The largest end + tail of jobs on one machine if each may be interrupted: of those whose head
    has passed always the one with the longest tail (Jackson's preemptive schedule).

    It is optimal: 1 | r, q, pmtn | Cmax. 0 without jobs.
    """
    coming = sorted(range(len(heads)), key=lambda i: heads[i])
    waiting: list[list[float]] = []  # [-tail, time left]
    now = worst = 0.0
    at = 0
    while at < len(coming) or waiting:
        if not waiting:
            now = max(now, heads[coming[at]])
        while at < len(coming) and heads[coming[at]] <= now:
            heapq.heappush(waiting, [-tails[coming[at]], times[coming[at]]])
            at += 1
        top = waiting[0]
        until = heads[coming[at]] if at < len(coming) else float("inf")
        if now + top[1] <= until:
            now += top[1]
            worst = max(worst, now - top[0])
            heapq.heappop(waiting)
        else:
            top[1] -= until - now
            now = until
    return worst


def jackson(profile: Profile, startup_s: float, seconds_per_byte: float) -> float:
    """The end of the forward pass if bytes could be sent one by one, the most urgent first, none
    before its gradient is there and a start-up is over: of those that are there the first layer's.
    """
    heads = [there + startup_s for there in profile.ready]
    times = [seconds_per_byte * layer.nbytes for layer in profile.layers]
    sent = preemptive(heads, times, profile.tails)
    return max(sent, profile.backward_s + profile.forward_s)


LANES = 4
"""All-reduces at once that bounds allow for, and that `optimal` uses at most."""


def lower_bound(profile: Profile, network: Network, lanes: int = LANES) -> float:
    """Seconds that an iteration takes at least, with at most `lanes` all-reduces at once.

    Valid for every schedule of `overlap.timeline`: a byte is transmitted after its gradient is
    there and the start-up of its communication is over; all lanes together transmit no faster than
    `Network.fastest`; and a layer's forward pass, and all after it, come behind its last byte. So
    Jackson's schedule with heads r + a, and no start-up after that, is no longer. It contains the
    capacity bound (all bytes after the first gradient) and that of each layer alone.
    """
    return jackson(profile, network.startup_s, network.fastest(lanes))
