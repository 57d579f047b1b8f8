"""The timeline of one iteration: the backward pass, collectives on lanes, the forward pass.

Time 0 is the start of the backward pass, which computes layers from the last to the first and waits
for nothing. A communication starts when its gradients are ready and when both its predecessor on
the lane and those in `after` have ended. It first spends the start-up a (`Network.startup`), in
which it transmits nothing. Then it transmits its bytes; `Network.crowding` slows each byte by the
number of communications that transmit at that moment. Parts of streamed communications arrive as
`Network.arrivals` says, later by as much as others slow the transmission down. A reduce-scatter and
an all-gather have half of an all-reduce's start-up and bytes each (`Communication.share`). What the
communications cost the computation (`Network.overhead_s`) is added at the end, also for those that
nothing is beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from linkweave.collectives.overlap.communication import Communication
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile
from linkweave.topology.text import counted

Interval = tuple[float, float]


@dataclass(frozen=True)
class StepTimeline:
    """Seconds from the start of the backward pass.

    `sends` has the start and end of each communication, `backward` and `forward` those of each
    layer. `exposed_s` is the time that neither the backward nor the forward pass takes.
    """

    seconds: float
    exposed_s: float
    sends: tuple[Interval, ...]
    backward: tuple[Interval, ...]
    forward: tuple[Interval, ...]

    def __repr__(self) -> str:
        return (
            f"<StepTimeline: {self.seconds * 1e3:.2f} ms, "
            f"{counted(len(self.sends), 'communication')}, {self.exposed_s * 1e3:.2f} ms exposed>"
        )

    @property
    def communication_s(self) -> float:
        """In which something is on its way, until this step ends: its last bytes may have been used
        before the rank has sent its own on, beside the next step."""
        return sum(max(0.0, min(b, self.seconds) - a) for a, b in _union(self.sends))

    @property
    def hidden_s(self) -> float:
        """Of `communication_s`, what lies beside the passes."""
        passes = _union((*self.backward, *self.forward))
        return sum(
            max(0.0, min(b, d) - max(a, c)) for a, b in _union(self.sends) for c, d in passes
        )


def _union(spans: Iterable[Interval]) -> list[Interval]:
    """The times that lie in any of the spans, in order."""
    found: list[Interval] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def timeline(
    profile: Profile, network: Network, communications: Sequence[Communication], chained: bool
) -> StepTimeline:
    ready = [max(profile.ready[p.layer] for p in c.pieces) for c in communications]
    if len({c.lane for c in communications}) == 1 and not any(c.after for c in communications):
        sends, arrivals = _one_lane(network, communications, ready)
    else:
        sends, arrivals = _lanes(network, communications, ready)
    there = [0.0] * len(profile.layers)
    for c, (_, end), pieces in zip(communications, sends, arrivals, strict=True):
        for piece, arrival in zip(c.pieces, pieces if c.final else (), strict=c.final):
            done = arrival if c.streamed else end
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
    at += network.overhead_s * len(communications)
    starts = [r - layer.backward_s for r, layer in zip(profile.ready, profile.layers, strict=True)]
    backward = tuple(zip(starts, profile.ready, strict=True))
    return StepTimeline(
        at, at - profile.backward_s - profile.forward_s, tuple(sends), backward, tuple(forward)
    )


Arrivals = list[list[float]]
"""For each communication, when each of its pieces has been transmitted."""


def _one_lane(
    network: Network, communications: Sequence[Communication], ready: Sequence[float]
) -> tuple[list[Interval], Arrivals]:
    free, spans, arrivals = 0.0, [], []
    for c, there in zip(communications, ready, strict=True):
        start = max(free, there)
        if c.streamed:
            upto = accumulate(piece.nbytes for piece in c.pieces)
            arrivals.append([start + after for after in network.arrivals(c.nbytes, upto)])
            free = arrivals[-1][-1]
        else:
            free = start + c.share * network.seconds(c.nbytes)
            arrivals.append([free] * len(c.pieces))
        spans.append((start, free))
    return spans, arrivals


def _lanes(
    network: Network, communications: Sequence[Communication], ready: Sequence[float]
) -> tuple[list[Interval], Arrivals]:
    """Advance from event to event: a start, the end of a start-up, the end of a transmission."""
    queues: dict[int, list[int]] = {}
    for number, c in enumerate(communications):
        queues.setdefault(c.lane, []).append(number)
    heads = dict.fromkeys(queues, 0)
    spans: dict[int, Interval] = {}
    arrivals: Arrivals = [[] for _ in communications]
    behind: list[list[float]] = [[] for _ in communications]  # bytes left when each piece arrives
    running: dict[int, list[float]] = {}  # [start, end of the start-up, bytes left]
    least = network.least[1]
    now = 0.0
    while len(spans) < len(communications):
        waits = []
        for lane, queue in queues.items():
            if heads[lane] == len(queue) or (number := queue[heads[lane]]) in running:
                continue
            c = communications[number]
            if all(other in spans for other in c.after):
                if ready[number] <= now:
                    startup = c.share * network.startup(c.nbytes)
                    if c.streamed:
                        alone = network.arrivals(c.nbytes, accumulate(p.nbytes for p in c.pieces))
                        startup = alone[-1] - least * c.nbytes
                        arrivals[number] = [now + at for at in alone if at <= startup]
                        behind[number] = [(alone[-1] - at) / (least or 1.0) for at in alone]
                    running[number] = [now, now + startup, c.share * c.nbytes]
                else:
                    waits.append(ready[number])
        sending = [state for state in running.values() if state[1] <= now]
        pace = least * network.crowding(max(1, len(sending)))
        ends = [now + state[2] * pace for state in sending]
        ends += [state[1] for state in running.values() if state[1] > now]
        then = min([*ends, *waits])
        for number, state in list(running.items()):
            if state[1] <= now:
                before = state[2]
                over = now + before * pace <= then
                state[2] = 0.0 if over else before - (then - now) / pace
                while len(arrivals[number]) < len(behind[number]) and (
                    behind[number][len(arrivals[number])] >= state[2]
                ):
                    left = behind[number][len(arrivals[number])]
                    arrivals[number].append(min(then, now + max(0.0, before - left) * pace))
                if over:
                    missing = len(communications[number].pieces) - len(arrivals[number])
                    arrivals[number] += [then] * missing
                    spans[number] = (state[0], then)
                    del running[number]
                    heads[communications[number].lane] += 1
        now = then
    return [spans[number] for number in range(len(communications))], arrivals
