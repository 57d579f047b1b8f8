"""What goes along when machines compare a call, and what collectives over them take."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.timing import Timing, checked, seconds, timings_of
from linkweave.topology.checks import integer, number, shown

PIECE = 8 << 20
"""Bytes of the pieces that are on the network and in memory at once."""

Limit = tuple[int, int]
SHORT, MIDDLE, LONG = (128 << 10, 512 << 10), (512 << 10, 2 << 20), (2 << 20, 16 << 20)
"""Bytes that go along to a machine, and to all of them, when they compare a call."""

AT_ONCE = 64 << 10
"""Bytes to all machines up to which each gets all values, and combines them itself."""

QUICK = 64 << 10
"""Bytes of a gather, a scatter or an all-to-all up to which it takes less time along than from rank
to rank, even where nothing is compared."""


def goes_along(nbytes: int, machines: int, limit: Limit) -> bool:
    """Whether a comparison of so many machines takes so many bytes along to each."""
    to_one, to_all = limit
    return 0 < nbytes <= to_one and nbytes * (machines - 1) <= to_all


def rows_along(most: int) -> Limit:
    """Of rows that are only moved, by machines with up to `most` ranks: for several ranks the first
    one sends all."""
    return LONG if most == 1 else MIDDLE


def most_along(machines: int, most: int) -> int:
    """The most bytes that go along to a machine, of so many with up to `most` ranks each."""
    to_one, to_all = rows_along(most)
    each = max(AT_ONCE, to_all // max(1, machines - 1))
    return min(to_one, each) + 64  # a share of whole elements may exceed an equal one


@dataclass(frozen=True)
class ClusterMap:
    """Machines with `ranks` each, and their network, as `linkweave bench network` measures them.

    startup_s: to compare a call on all ranks, in seconds.
    network: an all-reduce of a message over the machines, all columns together.
    times: of collectives of `ClusterCommunicator`, by size; combined with `op`.
    Raises CollectiveError for values that make no sense.
    """

    ranks: tuple[int, ...]
    startup_s: float
    network: Network
    times: dict[str, tuple[Timing, ...]]
    op: str = "sum"

    def __post_init__(self) -> None:
        for count in self.ranks:
            integer(count, "the ranks of a machine", 1)
        number(self.startup_s, "startup_s", 0, 1e6)
        for kind, timings in self.times.items():
            if not checked(timings):
                raise CollectiveError(f"there are no times of {kind}")

    def seconds(self, kind: str, nbytes: int) -> float:
        """The predicted time of a collective, for a message of `nbytes`: of the result of an
        all-gather and a gather, of the input of the others. Linear between the sizes measured, and
        beyond them as `timing.seconds`. Raises CollectiveError for a collective without times."""
        if kind not in self.times:
            known = ", ".join(self.times) or "none"
            raise CollectiveError(f"{kind} was not measured: this map has times of {known}")
        return seconds(self.times[kind], nbytes)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> ClusterMap:
        """Raises CollectiveError for text that `to_json` has not made."""
        try:
            data = json.loads(text)
            if "times" not in data:
                raise CollectiveError(
                    "a cluster map without times, of an earlier version: measure it again with "
                    "linkweave bench network"
                )
            times = {
                kind: timings_of(rows, f"times of {kind}") for kind, rows in data["times"].items()
            }
            ranks, network = tuple(data["ranks"]), Network(**data["network"])
            return ClusterMap(ranks, data["startup_s"], network, times, data["op"])
        except (AttributeError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise CollectiveError(f"{shown(text[:80])} is no cluster map: {error}") from None
