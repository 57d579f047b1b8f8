"""Measured times of whole all-reduces, which the planner prefers to its model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from linkweave.topology.checks import TopologyError, integer, number, read_format, records

FORMAT = "linkweave-timings"


@dataclass(frozen=True, slots=True)
class Timing:
    """An all-reduce of `nbytes` by one algorithm in `num_chunks` chunks took `seconds`."""

    algorithm: str
    nbytes: int
    num_chunks: int
    seconds: float

    def __post_init__(self) -> None:
        for name, most in (("nbytes", 1 << 50), ("num_chunks", 1 << 20)):
            value = integer(getattr(self, name), f"timing: {name}", 1, most, TopologyError)
            object.__setattr__(self, name, value)
        number(self.seconds, "timing: seconds", 1e-12, 1e9, TopologyError)
        if not isinstance(self.algorithm, str) or not self.algorithm:
            raise TopologyError(f"timing: algorithm must be a name, not {self.algorithm!r}")


def looks_like_timings(text: str) -> bool:
    """Whether this is the JSON of `linkweave bench algorithms`."""
    return text.lstrip("\ufeff \t\r\n").startswith("{") and f'"{FORMAT}"' in text[:4000]


def parse_timings(text: str, machine: str, where: str) -> tuple[Timing, ...]:
    """Read that JSON. Raises TopologyError if it is malformed or of another machine."""
    data = read_format(text, FORMAT, where)
    if data.get("topology") != machine:
        raise TopologyError(f"{where}: times of {str(data.get('topology'))[:80]}, not of {machine}")
    return records(Timing, data.get("rows"), f"{where}: rows")


def looks_like_collectives(text: str) -> bool:
    """Whether this is the JSON of `linkweave bench collectives`."""
    return text.lstrip("\ufeff \t\r\n").startswith("{") and '"benchmark": "collectives"' in text


def parse_collectives(
    text: str, machine: str, size: int, device: str, where: str
) -> tuple[Timing, ...]:
    """Read that JSON: all-reduces of linkweave by the algorithm that it took, and NCCL's, whose
    results were right. Raises TopologyError if it is malformed, without any, or of another
    machine."""
    try:
        data = json.loads(text)
        ranks, on, name = data["ranks"], data["device"], data["topology"]
        rows = [row for row in data["rows"] if row["collective"] == "allreduce"]
        mine = [
            {
                "algorithm": row["library"] if row["library"] == "nccl" else row["algorithm"],
                "nbytes": row["size"], "num_chunks": row.get("num_chunks") or 1,
                "seconds": row["time_us"] / 1e6,
            }
            for row in rows if row["library"] in ("nccl", "linkweave") and not row["wrong"]
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TopologyError(f"{where}: no JSON of bench collectives: {error!r}") from None
    if (ranks, on) != (size, device) or name not in ("auto", machine):
        raise TopologyError(
            f"{where}: times of {ranks} {on} ranks of {str(name)[:80]}, not of {size} {device} "
            f"ranks of {machine}"
        )
    if not mine:
        raise TopologyError(f"{where}: no all-reduces of linkweave or NCCL")
    return records(Timing, mine, f"{where}: rows")


def measured_seconds(
    timings: Iterable[Timing], algorithm: str, nbytes: int
) -> tuple[float, int] | None:
    """Return (seconds, chunks) of an algorithm at a size between two measured sizes, else None.

    Seconds are interpolated linearly in logarithms; chunks are those of the nearer size.
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
