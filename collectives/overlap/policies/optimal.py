"""The best schedule: exact for few tensors, else the best one found with its gap to the bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from linkweave.collectives.overlap.communication import ALIGN, Communication, Piece
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.policies import NAMED
from linkweave.collectives.overlap.profile import MAX_NUMBER, Profile
from linkweave.collectives.overlap.schedule import LANES, Schedule
from linkweave.topology.checks import number

EXACT = 7
"""The most blocks for which every fusion in every order is compared."""
_LANES = (1, 2, LANES)
_SPANS = (0.0, 0.5, 1.0, 2.0, 4.0)  # the least time of a communication, in start-ups
_ALL = 1 << 62
_BLOCKS = (_ALL, 1 << 24, 1 << 22, 1 << 20)  # the most bytes of one during the backward pass
_SENDS = 2000  # the most communications during the backward pass
_PARTS = (1, 4, 16)  # parts on each lane of a streamed communication


def optimal(profile: Profile, network: Network, limit_s: float = 10.0) -> Schedule:
    """Return the shortest of many schedules, found in about `limit_s` seconds.

    These are the schedules of all named policies, all fusions and orders of a few blocks
    (`every_fusion`), and many plans of `two_phases` on one or more lanes. The note gives the gap to
    the lower bound and the loss of the best named policy.
    Raises CollectiveError.
    """
    number(limit_s, "limit_s", 0, MAX_NUMBER)
    deadline = time.monotonic() + limit_s
    named = [policy(profile, network) for policy in NAMED.values()]
    found = named.copy()
    exact = len(profile.layers) <= EXACT
    if exact:
        found.append(every_fusion(profile, network))
    for made in _by_two_phases(profile, network):
        found.append(made)
        if time.monotonic() > deadline:
            break
    rival, best = min(named, key=_length), min(found, key=_length)
    words = [f"at most {best.gap:.1%} above the optimum"]
    if best.policy != "optimal":
        words.append(f"this is {best.policy}")
    elif best.predicted_seconds:
        ratio = rival.predicted_seconds / best.predicted_seconds
        words.append(
            f"{ratio:.2f} times faster than {rival.policy}, the best named policy" if ratio >= 1.005
            else f"as fast as {rival.policy}, the best named policy"
        )  # fmt: skip
    if exact and not network.overhead_s:  # which `every_fusion` does not know
        cut = "" if len(profile.layers) * 2 > EXACT else f" cut into {EXACT // len(profile.layers)}"
        words.append(f"on one lane no fusion of neighbours and order of tensors{cut} is shorter")
    return replace(best, policy="optimal", note="; ".join(words))


def _length(schedule: Schedule) -> tuple[float, int]:
    """Of schedules that take as long but for rounding, that with the fewest communications counts
    as the shorter."""
    return float(f"{schedule.predicted_seconds:.12g}"), len(schedule.communications)


def _by_two_phases(profile: Profile, network: Network) -> Iterator[Schedule]:
    """Yield the plans of `two_phases` on one lane, and in turns on several, which hide one
    another's start-ups. If simultaneous transmissions are faster than a single one, every
    all-reduce is cut into a part for each lane; a streamed one into more parts, so that its first
    bytes do not share the network with its last."""
    for lanes in sorted(_LANES, key=network.sharing):
        cut = network.sharing(lanes) < 1
        startup = network.startup_s if cut else network.startup_s / lanes
        startup += network.overhead_s * (lanes if cut else 1)
        pace = network.seconds_per_byte * network.sharing(lanes)
        narrow = replace(network, startup_s=startup, seconds_per_byte=pace)
        for sends in two_phases(profile, narrow):
            several = lanes > 1 and any(c.streamed for c in sends)
            for parts in _PARTS if several else (1,):
                made = [
                    replace(c, pieces=part)
                    for c in sends
                    for part in _parts(
                        c.pieces, (lanes if cut else 1) * (parts if c.streamed else 1)
                    )
                ]
                dealt = (replace(c, lane=i % lanes) for i, c in enumerate(made))
                yield Schedule("optimal", profile, network, tuple(dealt), True)


def _cut(layer: int, nbytes: int, parts: int) -> list[Piece]:
    """Return at most `parts` blocks of a layer, as equal as ALIGN permits."""
    ends = [0, *(nbytes * n // parts // ALIGN * ALIGN for n in range(1, parts)), nbytes]
    return [Piece(layer, a, b - a) for a, b in pairwise(ends) if a < b]


def every_fusion(profile: Profile, network: Network) -> Schedule:
    """Return the best of all fusions of neighbouring blocks, in all orders, chained on one lane.

    Every tensor is cut into equal blocks, up to EXACT in total. Dynamic programming over the sets
    of blocks already sent keeps, for each set, the Pareto front of (channel free, largest end +
    tail).
    """
    ready, tails = profile.ready, profile.tails
    parts = max(1, EXACT // len(profile.layers))
    blocks = [b for i, layer in enumerate(profile.layers) for b in _cut(i, layer.nbytes, parts)]
    sets = [
        tuple(b for n, b in enumerate(blocks) if mask >> n & 1) for mask in range(1 << len(blocks))
    ]
    fusions = [
        (
            mask,
            max(ready[b.layer] for b in of),
            max(tails[b.layer] for b in of),
            network.seconds(sum(b.nbytes for b in of)),
        )
        for mask, of in enumerate(sets)
        if of and "01" not in f"{mask:b}"  # consecutive bits
    ]
    State = tuple[float, float, tuple[int, ...]]
    fronts: list[list[State]] = [[] for _ in sets]
    fronts[0] = [(0.0, 0.0, ())]
    for done in range(len(sets)):
        front: list[State] = []
        for state in sorted(fronts[done]):
            if not front or state[1] < front[-1][1]:
                front.append(state)
        fronts[done] = front
        for mask, there, tail, seconds in fusions:
            if mask & done:
                continue
            for free, worst, path in front:
                end = max(free, there) + seconds
                fronts[done | mask].append((end, max(worst, end + tail), (*path, mask)))
    best = min(fronts[-1], key=lambda state: state[1])
    sends = tuple(Communication(sets[mask]) for mask in best[2])
    return Schedule("optimal", profile, network, sends, True)


Pieces = tuple[Piece, ...]


def two_phases(profile: Profile, network: Network) -> Iterator[list[Communication]]:
    """Yield plans for one lane.

    During the backward pass they send the most urgent, or the oldest, gradients that are ready, cut
    or fused to between a span and a block. Then they send the rest in forward order: either as
    streamed all-reduces of one run each, or fused as far as deadlines permit (`_deadlines`). Every
    communication is one run of bytes in a buffer of the gradients in forward order.
    """
    for block in _BLOCKS:
        for span in _SPANS:
            for take in (_urgent, _oldest):
                sends, rest, free = _in_backward_pass(profile, network, take, span, block)
                first = [Communication(pieces) for pieces in sends]
                streamed = [Communication(run, streamed=True) for run in _runs(profile, rest)]
                yield [*first, *streamed]
                late = _deadlines(profile, network, rest, free)
                yield [*first, *(Communication(pieces) for pieces in late)]


def _in_backward_pass(
    profile: Profile, network: Network, take: Callable[..., Pieces], span: float, block: int
) -> tuple[list[Pieces], Pieces, float]:
    """Return the communications, the pieces that are left, and when the channel is free."""
    a, b = network.startup_s, network.seconds_per_byte
    end = profile.backward_s
    sends: list[Pieces] = []
    waiting: list[Piece] = []  # in forward order
    free, here = 0.0, 0  # here: bytes that wait
    for new in reversed(range(len(profile.layers))):
        waiting.insert(0, Piece(new, 0, profile.layers[new].nbytes))
        here += waiting[0].nbytes
        soon = profile.ready[new - 1] if new else end
        free = max(free, profile.ready[new])
        while free < soon and waiting and len(sends) < _SENDS:
            fits = (end - free - a) / b if b else float("inf")
            room = int(min(block, fits))
            if room < ALIGN or min(room, here) * b < span * a:
                break  # too short for a start-up
            pieces = take(profile, waiting, room)
            if not pieces:
                break
            sends.append(pieces)
            nbytes = sum(piece.nbytes for piece in pieces)
            here -= nbytes
            free += a + b * nbytes
    return sends, tuple(waiting), max(free, end)


def _urgent(profile: Profile, waiting: list[Piece], room: int) -> Pieces:
    """Take at most `room` bytes from the front of what waits, within one run."""
    taken: list[Piece] = []
    while waiting and (not taken or _adjoin(profile, taken[-1], waiting[0])):
        p = waiting[0]
        nbytes = p.nbytes if p.nbytes <= room else room // ALIGN * ALIGN
        if not nbytes:
            break
        taken.append(Piece(p.layer, p.first, nbytes))
        room -= nbytes
        if nbytes < p.nbytes:
            waiting[0] = Piece(p.layer, p.first + nbytes, p.nbytes - nbytes)
            break
        del waiting[0]
    return tuple(taken)


def _oldest(profile: Profile, waiting: list[Piece], room: int) -> Pieces:
    """Take at most `room` bytes from the back of what waits, which is always one run."""
    taken: list[Piece] = []
    while waiting:
        p = waiting[-1]
        first = max(0, -(-(p.nbytes - room) // ALIGN) * ALIGN)
        if first >= p.nbytes:
            break
        taken.append(Piece(p.layer, first, p.nbytes - first))
        room -= p.nbytes - first
        if first:
            waiting[-1] = Piece(p.layer, 0, first)
            break
        del waiting[-1]
    return tuple(reversed(taken))


def _adjoin(profile: Profile, one: Piece, other: Piece) -> bool:
    """Return whether `other` begins where `one` ends, in a buffer of all gradients in order."""
    if other.layer == one.layer:
        return other.first == one.first + one.nbytes
    over = one.first + one.nbytes == profile.layers[one.layer].nbytes
    return over and other.layer == one.layer + 1 and not other.first


def _runs(profile: Profile, pieces: Pieces) -> list[Pieces]:
    """Split pieces in forward order into runs of adjacent ones."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and _adjoin(profile, runs[-1][-1], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [tuple(run) for run in runs]


def _deadlines(profile: Profile, network: Network, rest: Pieces, free: float) -> list[Pieces]:
    """Return communications of what is left, in forward order, that end the iteration earliest.

    For an end T each communication takes as many bytes of its run as the deadline T - tail of its
    first layer permits, since more bytes can only help later ones. Bisection finds the least T.
    """
    if not rest:
        return []
    a, b = network.startup_s, network.seconds_per_byte

    def cut(end: float) -> list[Pieces] | None:
        sends: list[Pieces] = []
        waiting = list(rest)
        now = free
        while waiting:
            room = (end - profile.tails[waiting[0].layer] - now - a) / b if b else _ALL
            if room < waiting[0].nbytes:
                return None
            sends.append(_urgent(profile, waiting, int(min(room, _ALL))))
            now += a + b * sum(piece.nbytes for piece in sends[-1])
        return sends

    low = free + a + b * rest[0].nbytes
    high = free + len(rest) * a + b * sum(p.nbytes for p in rest) + profile.tails[0]
    best = cut(high) or [(piece,) for piece in rest]
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        if (found := cut(middle)) is None:
            low = middle
        else:
            high, best = middle, found
    return best


def _parts(pieces: Pieces, count: int) -> list[Pieces]:
    """Cut a run into at most `count` runs, as equal as ALIGN permits."""
    total = sum(piece.nbytes for piece in pieces)
    parts: list[list[Piece]] = [[]]
    at = 0  # bytes before this piece
    for p in pieces:
        first = 0
        while first < p.nbytes:
            to = total * len(parts) // count - at  # where this part ends, in this piece
            stop = p.nbytes if len(parts) == count else min(p.nbytes, to // ALIGN * ALIGN)
            if stop > first:
                parts[-1].append(Piece(p.layer, p.first + first, stop - first))
                first = stop
            if first < p.nbytes:
                parts.append([])
        at += p.nbytes
    return [tuple(part) for part in parts if part]
