"""US-Byte: blocks of unequal size in a near-optimal order, over the backward and forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from linkweave.collectives.overlap.communication import Communication, Piece, partition_of
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile
from linkweave.collectives.overlap.schedule import Schedule

PARTITION = 4_000_000 // 8
"""Bytes of a basic block: the 4 Mb of the paper's simulations (section 6.7), read as megabits: it
writes Gbps and GB elsewhere. Its published program counts parameters, 1,000,000 unless told."""


@dataclass(frozen=True, slots=True)
class First:
    """The first phase: (layer, blocks, start) of each all-reduce, then what is left of each layer,
    and when the channel is free."""

    sends: tuple[tuple[int, int, float], ...]
    left: tuple[int, ...]
    free: float


def us_byte(profile: Profile, network: Network, partition: int = PARTITION) -> Schedule:
    """Algorithms 1 and 2; then what is left of each layer, from the first on (theorem 1).

    Raises CollectiveError.
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
    note = f"basic blocks of {partition} bytes; {len(first.sends)} all-reduces in the first phase"
    return Schedule("us-byte", profile, network, tuple(sends), True, note)


def first_phase(
    profile: Profile, network: Network, partition: int, priority: Sequence[float]
) -> First:
    """Algorithm 1, equations 1 to 8: what is sent while the backward pass computes.

    Before each layer's pass ends, the blocks of the most urgent layer among those computed go: as
    many as are done by that end (equation 6), all that are left (7), or one (4). Consecutive
    all-reduces of one layer are one (line 13): its start-up is not paid again, and its start is
    kept. Decided where the paper is unclear: in equation 6 the bracket is rounded up, as in line
    18, and taken for the least of that, what is left, and at least one; lines 13 and 14 replace the
    operation before, so blocks are added to it, which is what the text says ("i will not need to be
    updated").
    """
    a, b = network.startup_s, network.seconds_per_byte
    layers = profile.layers
    count = [math.ceil(layer.nbytes / partition) for layer in layers]
    left = [0] * len(layers)
    there: list[int] = []  # layers with blocks left, the most urgent last
    sends: list[tuple[int, int, float]] = []
    free = profile.ready[-1]
    for new in reversed(range(len(layers))):
        end = profile.ready[new]
        while end > free:
            if not there:
                free = end
                break
            layer = there[-1]
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
            free += startup + b * nbytes  # equation 8 takes the short last block's excess off
            left[layer] -= blocks
            if again:
                sends[-1] = layer, sends[-1][1] + blocks, sends[-1][2]
            else:
                sends.append((layer, blocks, start))
            if not left[layer]:
                there.pop()
        left[new] = count[new]
        at = len(there)
        while at and (priority[there[at - 1]], -there[at - 1]) < (priority[new], -new):
            at -= 1
        there.insert(at, new)
    return First(tuple(sends), tuple(left), free)


def _bytes(nbytes: int, count: int, left: int, blocks: int, partition: int) -> int:
    """Of the next `blocks` of a layer of which `left` of `count` blocks are left."""
    first = (count - left) * partition
    return min(blocks * partition, nbytes - first)


def priorities(profile: Profile, network: Network, partition: int) -> list[float]:
    """Algorithm 2: which layers the first phase prefers, lower first; from the last layer on, one
    is raised above another as long as the iteration becomes shorter (equation 13)."""
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
            if seconds < best * (1 - 1e-12):  # and not by rounding only
                best, priority, now, layer = seconds, trial, found, above
        layer -= 1
    return priority


def iteration(profile: Profile, network: Network, partition: int, first: First) -> float:
    """Equations 9 to 12, the second phase in the order of the layers."""
    channel = max(profile.ready[0], first.free)
    at = profile.ready[0]
    for layer, blocks in enumerate(first.left):
        here = profile.layers[layer]
        if blocks:
            count = math.ceil(here.nbytes / partition)
            channel += network.seconds(_bytes(here.nbytes, count, blocks, blocks, partition))
        at = max(at, channel) + here.forward_s
    return at
