"""What no schedule can beat, whatever it fuses, partitions, orders or sends at once."""

from __future__ import annotations

import heapq

from collectives.overlap.network import Network
from collectives.overlap.profile import Profile


def jackson(profile: Profile, startup_s: float, seconds_per_byte: float) -> float:
    """The end of the forward pass if bytes could be sent one by one, the most urgent first
    (Jackson's preemptive schedule), none before its gradient is there and a start-up is over.

    It is optimal for one machine with heads and tails and preemption: 1 | r, q, pmtn | Cmax. Of
    those whose gradients are there the one with the longest tail is sent, which is the first layer.
    """
    order = sorted(range(len(profile.layers)), key=lambda i: profile.ready[i])
    waiting: list[list[float]] = []  # [-tail, seconds left]
    now, worst, at = 0.0, profile.backward_s + profile.forward_s, 0
    while at < len(order) or waiting:
        if not waiting:
            now = max(now, profile.ready[order[at]] + startup_s)
        while at < len(order) and profile.ready[order[at]] + startup_s <= now:
            i = order[at]
            work = seconds_per_byte * profile.layers[i].nbytes
            heapq.heappush(waiting, [-profile.tails[i], work])
            at += 1
        top = waiting[0]
        until = profile.ready[order[at]] + startup_s if at < len(order) else float("inf")
        if now + top[1] <= until:
            now += top[1]
            worst = max(worst, now - top[0])
            heapq.heappop(waiting)
        else:
            top[1] -= until - now
            now = until
    return worst


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
