"""ByteScheduler: equal partitions, the most urgent first, a credit of them on their way at once."""

from __future__ import annotations

import heapq

from linkweave.collectives.overlap.communication import (
    ALIGN,
    MAX_LANES,
    Communication,
    Piece,
    partition_of,
)
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile, check_count
from linkweave.collectives.overlap.schedule import Schedule

PARTITIONS = tuple(1 << i for i in range(20, 28))  # bytes: 1 to 128 MiB
CREDITS = (1, 2, 4)
PIECES = 2000
"""About how many pieces the tried partitions cut a profile into at most, besides its layers."""
MOST = 100_000
"""Pieces that a given partition may cut a profile into."""


def bytescheduler(
    profile: Profile, network: Network, partition: int | None = None, credit: int | None = None
) -> Schedule:
    """Blocks of at most `partition` bytes; `credit` of them may be under way, on as many lanes.

    When a lane is free, the block of the first layer among those whose gradients are there goes
    next (US-Byte, section 2.2: sequential scheduling). What is not given is tried on a grid and the
    best taken, as ByteScheduler tunes both by Bayesian optimisation. Lanes are taken to be equally
    fast when blocks are dealt out. Raises CollectiveError.
    """
    if partition is None:
        least = profile.nbytes // PIECES // ALIGN * ALIGN + ALIGN
        sizes = {max(size, least) for size in PARTITIONS}
    else:
        sizes = {partition_of(partition)}
        pieces = sum(-(-layer.nbytes // partition) for layer in profile.layers)
        check_count(f"the number of pieces with a partition of {partition} bytes", pieces, MOST)
    credits = CREDITS if credit is None else (check_count("credit", credit, MAX_LANES),)
    tried = [_dealt(profile, network, size, lanes) for size in sorted(sizes) for lanes in credits]
    return min(tried, key=lambda schedule: schedule.predicted_seconds)


def _dealt(profile: Profile, network: Network, partition: int, credit: int) -> Schedule:
    waiting: list[tuple[int, int]] = []  # (layer, first byte): the most urgent on top
    free = [(0.0, lane) for lane in range(credit)]
    coming = list(reversed(range(len(profile.layers))))
    sends = []
    pace = network.seconds_per_byte * network.crowding(credit)
    at, now = 0, 0.0
    while at < len(coming) or waiting:
        there, lane = heapq.heappop(free)
        now = max(now, there)  # a lane that was idle is dealt to now, not before
        if not waiting:
            now = max(now, profile.ready[coming[at]])
        while at < len(coming) and profile.ready[coming[at]] <= now:
            heapq.heappush(waiting, (coming[at], 0))
            at += 1
        layer, first = heapq.heappop(waiting)
        left = profile.layers[layer].nbytes - first
        nbytes = min(left, partition)
        sends.append(Communication((Piece(layer, first, nbytes),), lane))
        if nbytes < left:
            heapq.heappush(waiting, (layer, first + nbytes))
        heapq.heappush(free, (now + network.startup_s + pace * nbytes, lane))
    note = f"partitions of {partition} bytes, credit {credit}"
    return Schedule("bytescheduler", profile, network, tuple(sends), True, note)
