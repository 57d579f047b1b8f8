"""Measured times of whole collectives: what a planner may trust more than its model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from linkweave.topology.errors import TopologyError

FORMAT = "linkweave-timings"


@dataclass(frozen=True, slots=True)
class Timing:
    """An all-reduce of `nbytes` by one algorithm in `num_chunks` chunks took `seconds`."""

    algorithm: str
    nbytes: int
    num_chunks: int
    seconds: float

    def __post_init__(self) -> None:
        for name, value, most in (
            ("nbytes", self.nbytes, 1 << 50), ("num_chunks", self.num_chunks, 1 << 20),
        ):  # fmt: skip
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not 1 <= value <= most:
                raise TopologyError(
                    f"timing: {name} must be an integer from 1 to {most}, not {value!r}"
                )
        number = isinstance(self.seconds, int | float) and not isinstance(self.seconds, bool)
        if not number or not 0 < self.seconds < 1e9:
            raise TopologyError(
                f"timing: seconds must be a positive number up to 1e9, not {self.seconds!r}"
            )
        if not isinstance(self.algorithm, str) or not self.algorithm:
            raise TopologyError(f"timing: algorithm must be a name, not {self.algorithm!r}")


def timing_rows(rows: object, where: str) -> tuple[Timing, ...]:
    """Timings of a JSON list. Raises TopologyError naming the entry that is malformed."""
    if not isinstance(rows, list):
        raise TopologyError(f"{where}: timings must be a list")
    found = []
    for i, row in enumerate(rows):
        try:
            found.append(Timing(**row))
        except TopologyError as error:
            raise TopologyError(f"{where}: timings[{i}]: {error}") from None
        except TypeError:
            raise TopologyError(
                f'{where}: timings[{i}] must be an object with "algorithm", "nbytes", '
                f'"num_chunks" and "seconds", not {str(row)[:200]}'
            ) from None
    return tuple(found)


def looks_like_timings(text: str) -> bool:
    """Whether this is the JSON of `linkweave bench algorithms`."""
    return text.lstrip("\ufeff \t\r\n").startswith("{") and f'"{FORMAT}"' in text[:4000]


def parse_timings(text: str, machine: str, where: str) -> tuple[Timing, ...]:
    """The timings in that JSON. Raises TopologyError where they are of another machine."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"{where}: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != 1:
        raise TopologyError(f'{where}: needs "format": "{FORMAT}", "version": 1 at the top')
    if data.get("topology") != machine:
        raise TopologyError(f"{where}: times of {str(data.get('topology'))[:80]}, not of {machine}")
    return timing_rows(data.get("rows"), where)


def measured_seconds(
    timings: Iterable[Timing], algorithm: str, nbytes: int
) -> tuple[float, int] | None:
    """(seconds, chunks) of an algorithm at a size between two measured ones, else None.

    Seconds lie on a straight line between them in logarithms; chunks are those of the nearer one.
    """
    rows = sorted((t for t in timings if t.algorithm == algorithm), key=lambda t: t.nbytes)
    below = [t for t in rows if t.nbytes <= nbytes]
    above = [t for t in rows if t.nbytes >= nbytes]
    if not below or not above:
        return None
    low, high = below[-1], above[0]
    if low.nbytes == high.nbytes:
        return low.seconds, low.num_chunks
    part = math.log(nbytes / low.nbytes) / math.log(high.nbytes / low.nbytes)
    near = low if part < 0.5 else high
    return low.seconds ** (1 - part) * high.seconds**part, near.num_chunks
