"""Lower bounds of schedules, however they fuse, partition, order or overlap communications."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile


def preemptive(heads: Sequence[float], times: Sequence[float], tails: Sequence[float]) -> float:
    """Return the largest end + tail of jobs on one machine that may be interrupted; 0 without jobs.

    At each moment the job with the longest tail runs, among those whose head has passed: Jackson's
    preemptive schedule, which is optimal (1 | r, q, pmtn | Cmax).
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
    """Return the end of the forward pass (s) if bytes could be sent one by one.

    A byte may be sent once its gradient is ready and a start-up has passed. The first layer's bytes
    go first among those that may be sent.
    """
    heads = [there + startup_s for there in profile.ready]
    times = [seconds_per_byte * layer.nbytes for layer in profile.layers]
    sent = preemptive(heads, times, profile.tails)
    return max(sent, profile.backward_s + profile.forward_s)


LANES = 4
"""The most all-reduces at once, for the lower bound and for `optimal`."""


def lower_bound(
    profile: Profile, network: Network, lanes: int = LANES, halves: bool = False
) -> float:  # fmt: skip
    """Return seconds that no iteration beats, with at most `lanes` all-reduces at once.

    Every schedule of `overlap.timeline` transmits a byte after its gradient is ready and the
    start-up of its communication has passed. All lanes together transmit no faster than
    `Network.least` and `Network.sharing` say. A layer's forward pass, and all passes after it,
    start after its last byte. Jackson's schedule with heads r + a and no further start-up is
    therefore no longer than any other. It includes the capacity bound (all bytes after the first
    gradient) and the bound of each layer alone. With `halves` the bound is one for schedules of
    reduce-scatters and all-gathers, too: those transmit after half of a start-up, but a layer
    waits for both.
    """
    startup, pace = network.least
    pace *= network.sharing(lanes)
    if not halves:
        return jackson(profile, startup, pace)
    each = zip(profile.layers, profile.ready, profile.tails, strict=True)
    alone = (there + startup + pace * layer.nbytes + tail for layer, there, tail in each)
    return max(jackson(profile, startup / 2, pace), *alone)
