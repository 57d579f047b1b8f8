"""When everything of one iteration happens: the backward pass, all-reduces on lanes, the forward
pass. One timeline for all policies.

Time 0 is the start of the backward pass, which computes layers from the last to the first and waits
for nothing. A communication starts when its gradients are there, the one before it on its lane and
those it waits for are over; it takes the start-up a, in which it does not transmit, and then its
bytes, each as long as `Network.crowding` says of those that transmit at that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from collectives.overlap.network import Network
from collectives.overlap.profile import Profile

if TYPE_CHECKING:
    from collectives.overlap.schedule import Communication

Span = tuple[float, float]


@dataclass(frozen=True)
class Timeline:
    """Seconds from the start of the backward pass. `sends`: start and end of each communication;
    `backward`, `forward`: of each layer. `exposed_s`: what is neither backward nor forward pass."""

    seconds: float
    exposed_s: float
    sends: tuple[Span, ...]
    backward: tuple[Span, ...]
    forward: tuple[Span, ...]


def timeline(
    profile: Profile, network: Network, communications: Sequence[Communication], chained: bool
) -> Timeline:
    ready = [max(profile.ready[p.layer] for p in c.pieces) for c in communications]
    if len({c.lane for c in communications}) == 1 and not any(c.after for c in communications):
        sends = _one_lane(network, communications, ready)
    else:
        sends = _lanes(network, communications, ready)
    there = [0.0] * len(profile.layers)
    for c, (start, end) in zip(communications, sends, strict=True):
        sent, total = 0, c.nbytes
        first = min(end, start + network.startup_s)
        for piece in c.pieces:
            sent += piece.nbytes
            done = first + (end - first) * sent / total if c.streamed else end
            there[piece.layer] = max(there[piece.layer], done)
    at = max(end for _, end in sends)
    forward = []
    if chained:
        at = profile.backward_s
    at = max(at, profile.backward_s)
    for layer, own in zip(profile.layers, there, strict=True):
        start = max(at, own) if chained else at
        at = start + layer.forward_s
        forward.append((start, at))
    starts = [r - layer.backward_s for r, layer in zip(profile.ready, profile.layers, strict=True)]
    backward = tuple(zip(starts, profile.ready, strict=True))
    return Timeline(
        at, at - profile.backward_s - profile.forward_s, tuple(sends), backward, tuple(forward)
    )


def _one_lane(
    network: Network, communications: Sequence[Communication], ready: Sequence[float]
) -> list[Span]:
    free, found = 0.0, []
    for c, there in zip(communications, ready, strict=True):
        start = max(free, there)
        free = start + network.seconds(c.nbytes)
        found.append((start, free))
    return found


def _lanes(
    network: Network, communications: Sequence[Communication], ready: Sequence[float]
) -> list[Span]:
    """From event to event: a start, the end of a start-up, the end of a transmission."""
    queues: dict[int, list[int]] = {}
    for number, c in enumerate(communications):
        queues.setdefault(c.lane, []).append(number)
    heads = dict.fromkeys(queues, 0)
    spans: dict[int, Span] = {}
    running: dict[int, list[float]] = {}  # [start, end of the start-up, bytes left]
    now = 0.0
    while len(spans) < len(communications):
        waits = []
        for lane, queue in queues.items():
            if heads[lane] == len(queue) or (number := queue[heads[lane]]) in running:
                continue
            c = communications[number]
            if all(other in spans for other in c.after):
                if ready[number] <= now:
                    running[number] = [now, now + network.startup_s, float(c.nbytes)]
                else:
                    waits.append(ready[number])
        sending = [state for state in running.values() if state[1] <= now]
        pace = network.seconds_per_byte * network.crowding(max(1, len(sending)))
        ends = [now + state[2] * pace for state in sending]
        ends += [state[1] for state in running.values() if state[1] > now]
        then = min([*ends, *waits])
        for number, state in list(running.items()):
            if state[1] <= now:
                left = state[2] * pace
                state[2] = 0.0 if now + left <= then else state[2] - (then - now) / pace
                if state[2] <= 0:
                    spans[number] = (state[0], then)
                    del running[number]
                    heads[communications[number].lane] += 1
        now = then
    return [spans[number] for number in range(len(communications))]
