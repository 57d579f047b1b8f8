"""ByteScheduler: equal partitions, sent by priority, with a credit of partitions in flight."""

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
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule
from linkweave.topology.checks import integer

PARTITIONS = tuple(1 << i for i in range(20, 28))
"""Bytes of the partitions in the grid: 1 to 128 MiB."""
CREDITS = (1, 2, 4)
PIECES = 2000
"""The approximate limit on the pieces, beyond one for each layer, of a partition in the grid."""
MOST = 100_000
"""The limit on the pieces of a partition that the caller gives."""


def bytescheduler(
    profile: Profile, network: Network, partition: int | None = None, credit: int | None = None
) -> Schedule:
    """Return the schedule of blocks of at most `partition` bytes, `credit` of them in flight.

    There are `credit` lanes. When a lane is free, it sends the next block of the first layer whose
    gradient is ready (sequential scheduling in US-Byte, section 2.2). ByteScheduler tunes both
    parameters by Bayesian optimisation; here the best of a grid replaces those not given. Lanes are
    assumed equally fast when blocks are assigned. Raises CollectiveError.
    """
    if partition is None:
        least = profile.nbytes // PIECES // ALIGN * ALIGN + ALIGN
        sizes = {max(size, least) for size in PARTITIONS}
    else:
        sizes = {partition_of(partition)}
        pieces = sum(-(-layer.nbytes // partition) for layer in profile.layers)
        integer(pieces, f"the number of pieces with a partition of {partition} bytes", 1, MOST)
    credits = CREDITS if credit is None else (integer(credit, "credit", 1, MAX_LANES),)
    tried = [_fixed(profile, network, size, lanes) for size in sorted(sizes) for lanes in credits]
    return min(tried, key=lambda schedule: schedule.predicted_seconds)


def _fixed(profile: Profile, network: Network, partition: int, credit: int) -> Schedule:
    """Return the schedule for one partition and one credit."""
    waiting: list[tuple[int, int]] = []  # heap of (layer, first byte)
    free = [(0.0, lane) for lane in range(credit)]
    coming = list(reversed(range(len(profile.layers))))
    sends = []
    pace = network.seconds_per_byte * network.crowding(credit)
    at, now = 0, 0.0
    while at < len(coming) or waiting:
        there, lane = heapq.heappop(free)
        now = max(now, there)  # an idle lane starts now
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
