"""The best schedule: exact for few tensors, else the best found and its distance from the bound."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from collectives.overlap.bounds import LANES
from collectives.overlap.network import Network
from collectives.overlap.policies import NAMED
from collectives.overlap.policies.carlier import carlier
from collectives.overlap.profile import Profile, check_number
from collectives.overlap.schedule import ALIGN, Communication, Piece, Schedule

EXACT = 7
"""Blocks up to which every fusion in every order is compared."""
_LANES = (1, 2, LANES)
_SPANS = (0.0, 0.5, 1.0, 2.0, 4.0)  # start-ups that a communication should last at least
_BLOCKS = (1 << 62, 1 << 24, 1 << 22, 1 << 20)  # bytes of one at most, while gradients come


def optimal(profile: Profile, network: Network, limit_s: float = 10.0) -> Schedule:
    """The shortest of: every named policy's, Carlier's order among them (with a fifth of the time);
    every fusion and order of few blocks (`every_fusion`); and many plans of `two_phases`, on one
    lane and over several.

    The note tells how far from the bound it may be, and how much the best named policy loses.
    Takes about `limit_s`, more only where the named policies do. Raises CollectiveError.
    """
    check_number("limit_s", limit_s)
    deadline = time.monotonic() + limit_s
    named = [policy(profile, network) for policy in NAMED.values()]
    named.append(carlier(profile, network, limit_s / 5))
    found = named.copy()
    exact = len(profile.layers) <= EXACT
    if exact:
        found.append(every_fusion(profile, network))
    for made in _by_two_phases(profile, network):
        found.append(made)
        if time.monotonic() > deadline:
            break
    rival = min(named, key=lambda schedule: schedule.predicted_seconds)
    best = min(found, key=lambda schedule: schedule.predicted_seconds)
    words = [f"at most {best.gap:.1%} above the optimum"]
    if best.policy != "optimal":
        words.append(f"this is {best.policy}")
    elif best.predicted_seconds:
        ratio = rival.predicted_seconds / best.predicted_seconds
        words.append(f"{ratio:.2f} times faster than {rival.policy}, the best named policy")
    if exact:
        cut = "" if len(profile.layers) * 2 > EXACT else f" cut into {EXACT // len(profile.layers)}"
        words.append(f"on one lane no fusion and order of whole tensors{cut} is shorter")
    return replace(best, policy="optimal", note="; ".join(words))


def _by_two_phases(profile: Profile, network: Network) -> Iterator[Schedule]:
    """On one lane; in turns on several, which hide one another's start-ups; cut into equal parts
    for several, where these together are faster than one."""
    for lanes in sorted(_LANES, key=network.fastest):  # the most promising first
        cut = network.fastest(lanes) < network.fastest(1)
        startup = network.startup_s if cut else network.startup_s / lanes
        narrow = replace(network, startup_s=startup, seconds_per_byte=network.fastest(lanes))
        for sends in two_phases(profile, narrow):
            if cut:
                yield _spread(profile, network, sends, lanes)
            else:
                made = (replace(c, lane=i % lanes) for i, c in enumerate(sends))
                yield Schedule("optimal", profile, network, tuple(made), True)


def _cut(layer: int, nbytes: int, parts: int) -> list[Piece]:
    """A layer in at most so many blocks, as equal as ALIGN admits."""
    ends = [0, *(nbytes * n // parts // ALIGN * ALIGN for n in range(1, parts)), nbytes]
    return [Piece(layer, a, b - a) for a, b in pairwise(ends) if a < b]


def every_fusion(profile: Profile, network: Network) -> Schedule:
    """The best of all ways to fuse and order blocks, chained, on one lane.

    Every tensor is cut into as many equal blocks as keep all within EXACT. By sets of blocks that
    have been sent: of each, the pairs (channel free, largest end + tail) of which no other is
    better in both. 3^EXACT steps.
    """
    ready, tails = profile.ready, profile.tails
    parts = max(1, EXACT // len(profile.layers))
    blocks = [b for i, layer in enumerate(profile.layers) for b in _cut(i, layer.nbytes, parts)]
    sets = [
        tuple(b for n, b in enumerate(blocks) if mask >> n & 1) for mask in range(1 << len(blocks))
    ]
    groups = [
        (
            mask,
            max(ready[b.layer] for b in of),
            max(tails[b.layer] for b in of),
            network.seconds(sum(b.nbytes for b in of)),
        )
        for mask, of in enumerate(sets)
        if of
    ]
    State = tuple[float, float, tuple[int, ...]]
    fronts: list[list[State]] = [[] for _ in sets]
    fronts[0] = [(0.0, 0.0, ())]
    for done in range(len(sets)):
        front: list[State] = []
        for state in sorted(fronts[done]):  # the earliest first
            if not front or state[1] < front[-1][1]:
                front.append(state)
        fronts[done] = front
        for mask, there, tail, seconds in groups:
            if mask & done:
                continue
            for free, worst, path in front:
                end = max(free, there) + seconds
                fronts[done | mask].append((end, max(worst, end + tail), (*path, mask)))
    best = min(fronts[-1], key=lambda state: state[1])
    sends = tuple(Communication(sets[mask]) for mask in best[2])
    return Schedule("optimal", profile, network, sends, True)


Sends = list[tuple[Piece, ...]]


def two_phases(profile: Profile, network: Network) -> Iterator[list[Communication]]:
    """Plans for one lane: while gradients come, the most urgent (or the oldest) of those that are
    there, fused or cut to between a span and a block; then the rest in forward order: as one
    all-reduce whose chunks are used as they arrive, or fused as much as deadlines admit
    (`_deadlines`)."""
    for block in _BLOCKS:
        for span in _SPANS:
            for urgent in (True, False):
                sends, left, free = _while_coming(profile, network, urgent, span, block)
                first = [Communication(pieces) for pieces in sends]
                rest = tuple(
                    Piece(i, profile.layers[i].nbytes - nbytes, nbytes)
                    for i, nbytes in enumerate(left) if nbytes
                )  # fmt: skip
                yield [*first, *([Communication(rest, streamed=True)] if rest else [])]
                late = _deadlines(profile, network, left, free)
                yield [*first, *(Communication(pieces) for pieces in late)]


def _while_coming(
    profile: Profile, network: Network, urgent: bool, span: float, block: int
) -> tuple[Sends, list[int], float]:
    """(communications, bytes left of each layer, when the channel is free)."""
    a, b = network.startup_s, network.seconds_per_byte
    sent = [0] * len(profile.layers)
    left = [0] * len(profile.layers)
    end = profile.backward_s
    sends: Sends = []
    free = 0.0
    waiting: list[int] = []  # layers, oldest first, which is the largest number first
    for new in reversed(range(len(profile.layers))):
        waiting.append(new)
        left[new] = profile.layers[new].nbytes
        here = profile.ready[new]
        soon = profile.ready[new - 1] if new else end
        free = max(free, here)
        while free < soon and waiting:
            fits = (end - free - a) / b if b else float("inf")
            room = min(block, fits)
            if room * b < span * a or room < ALIGN or sum(left[i] for i in waiting) * b < span * a:
                break  # too short to be worth a start-up: later, with more
            pieces = []
            while waiting:
                i = waiting[-1] if urgent else waiting[0]
                nbytes = left[i] if left[i] <= room else int(room) // ALIGN * ALIGN
                if not nbytes:
                    break
                pieces.append(Piece(i, sent[i], nbytes))
                sent[i] += nbytes
                left[i] -= nbytes
                room -= nbytes
                if not left[i]:
                    waiting.remove(i)
            if not pieces:
                break
            sends.append(tuple(pieces))
            free += a + b * sum(piece.nbytes for piece in pieces)
    return sends, left, max(free, end)


def _deadlines(profile: Profile, network: Network, left: Sequence[int], free: float) -> Sends:
    """What is left, in forward order from `free` on, such that the iteration ends soonest.

    For an end T each communication takes as many bytes as its first layer's deadline T - tail
    admits: more can only help those behind it. The least T by bisection.
    """
    rest = [(i, nbytes) for i, nbytes in enumerate(left) if nbytes]
    if not rest:
        return []
    a, b = network.startup_s, network.seconds_per_byte
    total = sum(nbytes for _, nbytes in rest)

    def cut(end: float) -> Sends | None:
        sends: Sends = []
        now, at = free, 0
        first = profile.layers[rest[0][0]].nbytes - rest[0][1]
        while at < len(rest):
            room = (end - profile.tails[rest[at][0]] - now - a) / b if b else float("inf")
            pieces: list[Piece] = []
            while at < len(rest):
                i = rest[at][0]
                stop = profile.layers[i].nbytes
                if stop - first <= room:
                    pieces.append(Piece(i, first, stop - first))
                    room -= stop - first
                    at += 1
                    if at < len(rest):
                        first = profile.layers[rest[at][0]].nbytes - rest[at][1]
                elif pieces and room >= ALIGN:  # the head of the next one fills it up
                    pieces.append(Piece(i, first, int(room) // ALIGN * ALIGN))
                    first += int(room) // ALIGN * ALIGN
                    break
                else:
                    break
            if not pieces:
                return None
            sends.append(tuple(pieces))
            now += a + b * sum(piece.nbytes for piece in pieces)
        return sends

    low = free + a + b * rest[0][1]
    high = free + len(rest) * a + b * total + profile.tails[0]
    best = cut(high) or [(Piece(i, profile.layers[i].nbytes - n, n),) for i, n in rest]
    for _ in range(40):
        middle = (low + high) / 2
        if (found := cut(middle)) is None:
            low = middle
        else:
            high, best = middle, found
    return best


def _spread(
    profile: Profile, network: Network, sends: Sequence[Communication], lanes: int
) -> Schedule:
    """Each piece cut into equal parts, one a lane, which transmit side by side: as one channel of
    `Network.fastest`."""
    made: list[Communication] = []
    before: tuple[int, ...] = ()
    for c in sends:
        number = len(made)
        for lane in range(lanes):
            part = tuple(
                Piece(p.layer, p.first + low, high - low)
                for p in c.pieces for low, high in (_share(p.nbytes, lane, lanes),) if low < high
            )  # fmt: skip
            if part:
                made.append(Communication(part, lane, before, c.streamed))
        before = tuple(range(number, len(made)))
    return Schedule("optimal", profile, network, tuple(made), True)


def _share(nbytes: int, lane: int, lanes: int) -> tuple[int, int]:
    """[first, stop) of a lane's part."""
    first, stop = (nbytes * n // lanes // ALIGN * ALIGN for n in (lane, lane + 1))
    return first, nbytes if lane + 1 == lanes else stop
