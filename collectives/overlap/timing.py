"""Times of single collectives by size, measured or planned, and what lies between the sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import median_low
from typing import Any

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.profile import MAX_BYTES, MAX_NUMBER
from linkweave.topology.checks import integer, number, shown

SHARES = 16
"""Into how many equal parts `Timing.arrivals` divides the bytes."""


@dataclass(frozen=True, slots=True)
class Timing:
    """An all-reduce, or another collective, of `nbytes` that has the network to itself takes
    `seconds`.

    arrivals: of a gradient queue's all-reduce, the seconds after which the first chunk, then 1, 2,
        ... SHARES of SHARES equal parts of the bytes are final on all ranks, in the buffer's order;
        SHARES + 1 numbers that do not decrease, or none if they are not known. Raises
        CollectiveError.
    """

    nbytes: int
    seconds: float
    arrivals: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", integer(self.nbytes, "nbytes", 1, MAX_BYTES))
        number(self.seconds, "seconds", 0, MAX_NUMBER)
        if not isinstance(self.arrivals, list | tuple):
            raise CollectiveError(f"arrivals must be numbers, not {shown(self.arrivals)}")
        object.__setattr__(self, "arrivals", tuple(self.arrivals))
        if self.arrivals and len(self.arrivals) != SHARES + 1:
            raise CollectiveError(
                f"arrivals of {self.nbytes} bytes must be {SHARES + 1} numbers or none, not "
                f"{len(self.arrivals)}"
            )
        for moment in self.arrivals:
            number(moment, f"an arrival of {self.nbytes} bytes", 0, MAX_NUMBER)
        if list(self.arrivals) != sorted(self.arrivals):
            raise CollectiveError(
                f"arrivals of {self.nbytes} bytes decrease: {shown(self.arrivals)}"
            )


def checked(timings: Iterable[Timing]) -> tuple[Timing, ...]:
    """The timings, if they are of two or more increasing sizes, all with arrivals or all without,
    or none at all. Raises CollectiveError."""
    found = tuple(timings)
    sizes = [one.nbytes for one in found]
    if len(found) == 1 or any(a >= b for a, b in zip(sizes, sizes[1:], strict=False)):
        raise CollectiveError(f"timings need two or more increasing sizes, not {shown(sizes)}")
    if len({len(one.arrivals) for one in found}) > 1:
        raise CollectiveError("either all timings have arrivals or none has")
    return found


def timings_of(rows: Any, where: str) -> tuple[Timing, ...]:
    """The timings that JSON holds as a list of objects. Raises CollectiveError."""
    if not isinstance(rows, list | tuple) or not all(isinstance(row, dict) for row in rows):
        raise CollectiveError(f"{where}: timings must be a list of objects, not {shown(rows)}")
    names = [field.name for field in fields(Timing)]
    for row in rows:
        if unknown := [name for name in row if name not in names]:
            raise CollectiveError(
                f"{where}: unknown field {shown(unknown[0])} of a timing; fields are "
                f"{', '.join(names)}"
            )
        for name in names[:2]:
            if name not in row:
                raise CollectiveError(f"{where}: a timing has no {name}")
    return tuple(Timing(**row) for row in rows)


def seconds(timings: Sequence[Timing], nbytes: float) -> float:
    """The time of `nbytes`: linear between sizes. Beyond the last size it grows at the pace
    between that and the largest that is at most a quarter of it. Messages below the first size take
    as long as that one.
    """
    low, high, share = _around(timings, nbytes)
    return low.seconds + share * (high.seconds - low.seconds) + _beyond(timings, nbytes)


def arrivals(timings: Sequence[Timing], nbytes: float, upto: Iterable[float]) -> list[float]:
    """The seconds after which the first so many bytes of `nbytes` are final, by timings that have
    arrivals: linear between sizes and between shares. Increasing numbers are expected."""
    low, high, share = _around(timings, nbytes)
    beyond = _beyond(timings, nbytes)
    at = [
        a + share * (b - a) + beyond * part / SHARES
        for part, (a, b) in enumerate(zip(low.arrivals, high.arrivals, strict=True))
    ]
    found = []
    for part in (SHARES * some / nbytes for some in upto):
        i = min(int(part), SHARES - 1)
        found.append(at[i] + (part - i) * (at[i + 1] - at[i]))
    return found


def _beyond(timings: Sequence[Timing], nbytes: float) -> float:
    """The seconds that a message takes longer than the last size."""
    more = nbytes - timings[-1].nbytes
    return _paces(timings)[-1] * more if more > 0 else 0.0


def increasing(times: Sequence[float]) -> list[float]:
    """The nearest times, by the sum of absolute differences, that do not decrease: neighbours that
    do share their median, the lower one of two (pool adjacent violators)."""
    pools: list[list[float]] = []
    for time in times:
        pools.append([time])
        while len(pools) > 1 and median_low(pools[-2]) > median_low(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [median_low(pool) for pool in pools for _ in pool]


def _around(timings: Sequence[Timing], nbytes: float) -> tuple[Timing, Timing, float]:
    """The sizes on both sides, and where between them; the first or the last size outside."""
    if nbytes <= timings[0].nbytes or nbytes >= timings[-1].nbytes:
        nearest = timings[0 if nbytes <= timings[0].nbytes else -1]
        return nearest, nearest, 0.0
    at = bisect_left(timings, nbytes, key=lambda one: one.nbytes)
    low, high = timings[at - 1], timings[at]
    return low, high, (nbytes - low.nbytes) / (high.nbytes - low.nbytes)


def _paces(timings: Sequence[Timing]) -> list[float]:
    """The seconds per byte from each size that is at most a quarter of the last to the last one, by
    increasing size; from the first size alone if there is none. Between closer ones, noise could
    make bytes free."""
    *others, last = timings
    far = [one for one in others if 4 * one.nbytes <= last.nbytes] or others[:1]
    return [max(0.0, (last.seconds - one.seconds) / (last.nbytes - one.nbytes)) for one in far]


def fastest(timings: Sequence[Timing]) -> tuple[float, float]:
    """A start-up and seconds per byte that bound all timings from below.

    `seconds` is no less than the start-up plus the seconds per byte, and neither are `arrivals`,
    for the bytes that have arrived: both are linear between points for which this holds. The
    seconds per byte are those by which large messages differ, so that the bound is near the times
    of small and of large ones.
    """
    pace = min(_paces(timings))
    points: list[tuple[float, float]] = [(one.nbytes, one.seconds) for one in timings]
    for one in timings:
        points += [(one.nbytes * part / SHARES, at) for part, at in enumerate(one.arrivals)]
    startup = min(at - pace * upto for upto, at in points)
    if startup < 0:
        return 0.0, min(at / upto for upto, at in points if upto)
    return startup, pace
