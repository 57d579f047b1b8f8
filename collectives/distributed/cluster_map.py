"""What an all-reduce over several machines takes, from measured start-ups and seconds a byte."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.network import Network
from linkweave.topology.checks import integer, number, shown

PIECE = 8 << 20
"""Bytes of the pieces that are on the network and in memory at once."""

ALONG, MOST = 128 << 10, 512 << 10
"""Bytes that go along to a machine, and to all of them, when they compare a call."""

AT_ONCE = 64 << 10
"""Bytes to all machines up to which each gets all values, and combines them itself."""


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

    def allreduce_seconds(self, nbytes: int) -> float:
        """The predicted time of `ClusterCommunicator.allreduce`.

        While the network carries one piece, memory moves the others: the slower of the two takes
        its whole time, the other one that of a single piece.
        """
        count, pace = len(self.ranks), self.network.seconds_per_byte
        if nbytes * (count - 1) <= AT_ONCE:
            return self.startup_s + pace * nbytes * count / 2
        if nbytes <= min(ALONG * count, MOST * count // (count - 1)):
            return 2 * self.startup_s + pace * nbytes + self.memory.seconds(nbytes)
        piece = min(nbytes, PIECE)
        pieces = -(-nbytes // PIECE)
        over_network = self.network.seconds(nbytes) + self.memory.seconds(piece)
        in_memory = pieces * self.memory.seconds(piece) + self.network.seconds(piece)
        return self.startup_s + max(over_network, in_memory)

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
