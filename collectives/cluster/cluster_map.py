"""What a collective over several machines takes, from measured start-ups and seconds a byte."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.network import Network
from linkweave.topology.checks import integer, number, shown

PIECE = 8 << 20
"""Bytes of the pieces that are on the network and in memory at once."""

ALONG, MOST = 512 << 10, 2 << 20
"""Bytes that go along to a machine, and to all of them, when they compare a call. For several ranks
the first one sends all. Only a quarter goes along where it has more to do than that: send the same
bytes to all machines (a broadcast, a share of an all-reduce), or cut those for each rank out (an
all-to-all)."""

ALONG_ALONE, MOST_ALONE = 2 << 20, 16 << 20
"""The same where each machine has one rank; of what only a quarter goes along, that stays."""

AT_ONCE = 64 << 10
"""Bytes to all machines up to which each gets all values, and combines them itself."""


def goes_along(nbytes: float, machines: int, most: int, quarter: bool = False) -> bool:
    """Whether a comparison of so many machines, with up to `most` ranks each, takes so many bytes
    along to each. `quarter`: at most a quarter of ALONG and MOST, also with one rank a machine."""
    to_one, to_all = _limits(most == 1 and not quarter)
    counted = 4 * nbytes if quarter else nbytes
    return 0 < counted <= to_one and counted * (machines - 1) <= to_all


def most_along(machines: int, most: int) -> int:
    """The most bytes that go along to a machine, of so many with up to `most` ranks each."""
    to_one, to_all = _limits(most == 1)
    each = max(AT_ONCE, to_all // max(1, machines - 1))
    return min(to_one, each) + 64  # a share of whole elements may exceed an equal one


def _limits(alone: bool) -> tuple[int, int]:
    return (ALONG_ALONE, MOST_ALONE) if alone else (ALONG, MOST)


@dataclass(frozen=True)
class ClusterMap:
    """Machines with `ranks` each, and their network, as `linkweave bench network` measures them.

    startup_s: to compare a call on all ranks, in seconds.
    network: an all-reduce of a message over the machines, all columns together.
    memory: a reduce-scatter and an all-gather of a message inside each machine.
    Raises CollectiveError for values that make no sense.
    """

    ranks: tuple[int, ...]
    startup_s: float
    network: Network
    memory: Network

    def __post_init__(self) -> None:
        for count in self.ranks:
            integer(count, "the ranks of a machine", 1)
        number(self.startup_s, "startup_s", 0, 1e6)

    def seconds(self, kind: str, nbytes: int) -> float:
        """The predicted time of a collective of `ClusterCommunicator`, for a message of `nbytes`:
        of the result of an all-gather and a gather, of the input of the others.

        A short message takes a comparison, or half of one if it goes one way, and what leaves a
        machine then; if machines combine shares of it, the first ranks exchange these once more. A
        longer one takes a comparison, its steps and what leaves the busiest interface; of movements
        in memory, those of one machine's rows, or of one piece, are not hidden. A
        gather and a scatter hide all.
        """
        count, most, size = len(self.ranks), max(self.ranks), sum(self.ranks)
        others, share = count - 1, most * nbytes / size  # share: of a machine's ranks
        start, memory = self.startup_s, self.memory
        pace = self.network.seconds_per_byte * count / (2 * max(1, others))  # of an interface
        if kind in ("allreduce", "reduce"):
            if nbytes * others <= AT_ONCE:
                return start / (1 + (kind == "reduce")) + pace * nbytes * others
            if goes_along(-(-nbytes // count), count, most, kind == "allreduce"):
                sent = pace * 2 * others * nbytes / count
                return 1.5 * start + sent + memory.seconds_per_byte * nbytes
            return start + self._in_pieces(nbytes)
        frame: float
        if kind == "alltoall":
            frame, leaves = most * share, share * (size - most)
        elif kind == "broadcast":
            frame, leaves = nbytes, nbytes * others.bit_length()
        else:
            frame, leaves = share, share * others
        if goes_along(frame, count, most, kind in ("broadcast", "alltoall")):
            if kind in ("broadcast", "gather", "scatter"):
                start /= 2
            return start + pace * frame * others + memory.seconds_per_byte * share
        if kind in ("gather", "scatter"):
            return start + pace * leaves
        steps = self.network.startup_s / 2  # as many as of a reduce-scatter
        return start + steps + pace * leaves + memory.seconds(nbytes / count) / 2

    def _in_pieces(self, nbytes: int) -> float:
        """While the network carries one piece, memory moves the others: the slower of the two takes
        its whole time, the other one that of a single piece."""
        piece = min(nbytes, PIECE)
        pieces = -(-nbytes // PIECE)
        over_network = self.network.seconds(nbytes) + self.memory.seconds(piece)
        in_memory = pieces * self.memory.seconds(piece) + self.network.seconds(piece)
        return max(over_network, in_memory)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> ClusterMap:
        """Raises CollectiveError for text that `to_json` has not made."""
        try:
            data = json.loads(text)
            network, memory = (Network(**data[name]) for name in ("network", "memory"))
            return ClusterMap(tuple(data["ranks"]), data["startup_s"], network, memory)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CollectiveError(f"{shown(text[:80])} is no cluster map: {error}") from None
