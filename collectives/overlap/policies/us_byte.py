"""US-Byte: blocks of unequal size in a near-optimal order during both passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from linkweave.collectives.overlap.communication import Communication, Piece, partition_of
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule
from linkweave.topology.text import counted

PARTITION = 4_000_000 // 8
"""Bytes of a basic block: the 4 Mb of the paper's simulations (section 6.7), read as megabits,
because the paper writes Gbps and GB elsewhere. Its published program uses 1,000,000 parameters."""


@dataclass(frozen=True, slots=True)
class First:
    """The result of the first phase."""

    sends: tuple[tuple[int, int, float], ...]
    """(layer, blocks, start in seconds) of each all-reduce."""
    left: tuple[int, ...]
    """The blocks of each layer that are left."""
    free: float
    """When the channel becomes free."""


def us_byte(profile: Profile, network: Network, partition: int = PARTITION) -> Schedule:
    """Return the schedule of algorithms 1 and 2, then the rest of each layer in order (theorem 1).

    `partition` is in bytes. Raises CollectiveError.
    """
    partition = partition_of(partition)
    first = first_phase(profile, network, partition, priorities(profile, network, partition))
    sent = [0] * len(profile.layers)
    sends = []
    rest = [(layer, blocks) for layer, blocks in enumerate(first.left) if blocks]
    for layer, blocks in [*((layer, blocks) for layer, blocks, _ in first.sends), *rest]:
        nbytes = min(blocks * partition, profile.layers[layer].nbytes - sent[layer])
        sends.append(Communication((Piece(layer, sent[layer], nbytes),)))
        sent[layer] += nbytes
    sent_first = counted(len(first.sends), "all-reduce")
    note = f"basic blocks of {partition} bytes; {sent_first} in the first phase"
    return Schedule("us-byte", profile, network, tuple(sends), True, note)


def first_phase(
    profile: Profile, network: Network, partition: int, priority: Sequence[float]
) -> First:
    """Return what is sent during the backward pass, by algorithm 1 and equations 1 to 8.

    Until the backward pass of a layer ends, blocks of the most urgent computed layer are sent: as
    many as finish by that end (equation 6), all that are left (7), or one (4). Consecutive
    all-reduces of one layer are merged into one (line 13), with one start-up and the first start.
    Where the paper is unclear, equation 6 rounds up as line 18 does, and sends at least one block
    and at most those left; lines 13 and 14 add blocks to the previous operation, as the text says
    ("i will not need to be updated").
    """
    a, b = network.startup_s, network.seconds_per_byte
    layers = profile.layers
    count = [math.ceil(layer.nbytes / partition) for layer in layers]
    left = [0] * len(layers)
    waiting: list[int] = []  # layers with blocks left, the most urgent last
    sends: list[tuple[int, int, float]] = []
    free = profile.ready[-1]
    for new in reversed(range(len(layers))):
        end = profile.ready[new]
        while end > free:
            if not waiting:
                free = end
                break
            layer = waiting[-1]
            again = bool(sends) and sends[-1][0] == layer
            startup = 0.0 if again else a
            nbytes = _bytes(layers[layer].nbytes, count[layer], left[layer], left[layer], partition)
            if end - free < startup:  # equation 4
                blocks = 1
            elif end - free < startup + b * nbytes:  # equation 5
                unit = b * partition
                blocks = math.ceil((end - free - startup) / unit) if unit else left[layer]
                blocks = min(left[layer], max(1, blocks))
            else:  # equation 7
                blocks = left[layer]
            nbytes = _bytes(layers[layer].nbytes, count[layer], left[layer], blocks, partition)
            start = free
            free += startup + b * nbytes  # equation 8 subtracts what the last block lacks
            left[layer] -= blocks
            if again:
                sends[-1] = layer, sends[-1][1] + blocks, sends[-1][2]
            else:
                sends.append((layer, blocks, start))
            if not left[layer]:
                waiting.pop()
        left[new] = count[new]
        at = len(waiting)
        while at and (priority[waiting[at - 1]], -waiting[at - 1]) < (priority[new], -new):
            at -= 1
        waiting.insert(at, new)
    return First(tuple(sends), tuple(left), free)


def _bytes(nbytes: int, count: int, left: int, blocks: int, partition: int) -> int:
    """Return the bytes of the next `blocks` of a layer that has `left` of `count` blocks left."""
    first = (count - left) * partition
    return min(blocks * partition, nbytes - first)


def priorities(profile: Profile, network: Network, partition: int) -> list[float]:
    """Return the layers' priorities in the first phase, lower first, by algorithm 2.

    From the last layer on, it raises a layer above others if that shortens the iteration (equation
    13).
    """
    size = len(profile.layers)
    priority = [float(i) for i in range(size)]
    now = first_phase(profile, network, partition, priority)
    best = iteration(profile, network, partition, now)
    layer = size - 1
    while layer >= 0:
        send = next((s for s in now.sends if s[0] == layer), None)
        if send is not None:
            done = send[2] + network.seconds(profile.layers[layer].nbytes)
            above = layer
            while above and not profile.ready[above] < done <= profile.ready[above - 1]:
                above -= 1
            trial = priority.copy()
            trial[layer] = priority[above]
            for j in range(above, layer):
                trial[j] += 1
            found = first_phase(profile, network, partition, trial)
            seconds = iteration(profile, network, partition, found)
            if seconds < best * (1 - 1e-12):  # by more than rounding
                best, priority, now, layer = seconds, trial, found, above
        layer -= 1
    return priority


def iteration(profile: Profile, network: Network, partition: int, first: First) -> float:
    """Return the seconds of an iteration by equations 9 to 12, with a second phase in order."""
    channel = max(profile.ready[0], first.free)
    at = profile.ready[0]
    for layer, blocks in enumerate(first.left):
        here = profile.layers[layer]
        if blocks:
            count = math.ceil(here.nbytes / partition)
            channel += network.seconds(_bytes(here.nbytes, count, blocks, blocks, partition))
        at = max(at, channel) + here.forward_s
    return at
