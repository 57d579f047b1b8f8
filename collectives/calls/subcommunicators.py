"""Splits and lanes: communicators of some or all ranks of another communicator."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.cpu.mapping import SEGMENT
from linkweave.collectives.runtime.diagnose import RAISED
from linkweave.collectives.runtime.gpu.team import Team
from linkweave.collectives.settings import Settings
from linkweave.topology import Topology, load
from linkweave.topology.checks import integer
from linkweave.topology.routes import connects

MOST_LANES = 64

Order = Callable[[], int]
"""Numbers the calls of all lanes together. Elsewhere it is `int`, which gives 0."""

Make = Callable[[Arena, Settings, Team | None, Order], Any]


def _fail(calls: HostCalls, error: BaseException) -> None:
    """End a lane because another lane of its family has failed."""
    if not calls.health.closed:
        calls.control.give_up(RAISED)
        calls.health.fail(error)


class Subcommunicators:
    """The subcommunicators of one rank's communicator. `make` creates one in a given arena."""

    def __init__(
        self, arena: Arena, calls: HostCalls, settings: Callable[[], Settings], topology: Topology,
        team: Team | None, make: Make,
    ) -> None:  # fmt: skip
        self._arena, self._calls, self._settings = arena, calls, settings
        self._topology, self._team, self._make = topology, team, make
        self._open: list[Any] = []  # some may have been closed since
        self._made = 0

    def split(self, color: Any) -> Any:
        with self._calls.sharing_errors():
            number = integer(color, "color")
        colors = [int(row) for row in self._calls.gather("colors", str(number).encode())]
        groups = [[r for r, c in enumerate(colors) if c == one] for one in dict.fromkeys(colors)]
        for ranks in groups:
            self._check_joined(ranks)  # raises on all ranks alike
        ((ranks, start),) = self._segments(groups)
        return self._part(ranks, start, int)

    def lanes(self, n: Any) -> list[Any]:
        with self._calls.sharing_errors():
            number = integer(n, "the number of lanes", 1, MOST_LANES)
        asked = {int(row) for row in self._calls.gather("lanes", str(number).encode())}
        if len(asked) > 1:
            raise CollectiveError(f"the ranks ask for different numbers of lanes: {sorted(asked)}")
        calls = count(1)
        parts = self._segments([[*range(self._calls.size)]] * asked.pop())
        family = [self._part(ranks, start, lambda: next(calls)) for ranks, start in parts]
        for lane in family:
            others = [other.calls for other in family if other is not lane]
            lane.calls.health.family = [partial(_fail, calls) for calls in others]
        return family

    def _segments(self, groups: Sequence[list[int]]) -> list[tuple[list[int], int]]:
        """Allocate a segment for each group of ranks; the first rank of a group does so.

        Returns (ranks, start of the segment) of the groups that contain this rank. If an allocation
        fails, all ranks raise CollectiveError.
        """
        mapping, rank = self._arena.mapping, self._calls.rank
        taken: dict[int, int] = {}
        failure = ""
        try:
            for i, ranks in enumerate(groups):
                if ranks[0] == rank:
                    taken[i] = mapping.take(SEGMENT)[0]
        except CollectiveError as error:
            failure = f"rank {rank}: {error}"
        payload = json.dumps([taken, failure]).encode()
        rows = [json.loads(row) for row in self._calls.gather("memory", payload)]
        if failed := "; ".join(row[1] for row in rows if row[1]):
            for start in taken.values():
                mapping.give(start, SEGMENT)
            raise CollectiveError(failed)
        found = {int(i): start for row in rows for i, start in row[0].items()}
        return [(g, found[i]) for i, g in enumerate(groups) if rank in g]

    def _part(self, ranks: list[int], start: int, order: Order) -> Any:
        settings, team = replace(self._settings(), topology=self._machine(ranks)), None
        if self._team:
            team = self._team.child((self._made, start), ranks)
        part = self._make(self._arena.part(ranks, start), settings, team, order)
        self._open = [p for p in self._open if not p.closed] + [part]
        self._made += 1
        return part

    def _machine(self, ranks: Sequence[int]) -> Topology | str:
        """The machine of some of the ranks."""
        spec = self._settings().topology
        if spec == "auto" or load(spec).devices:  # GPUs are found by their names
            return spec
        return self._topology.subset([self._topology.gpus[r] for r in ranks])

    def _check_joined(self, ranks: Sequence[int]) -> None:
        part = self._machine(ranks)
        if isinstance(part, Topology) and not connects(
            [(link.src, link.dst) for link in part.links], part.gpus
        ):
            raise CollectiveError(
                f"ranks {list(ranks)} cannot be split from the others: no links of "
                f"{self._topology.name} join them"
            )

    def abort(self, why: int) -> None:
        """Make all calls on the subcommunicators raise."""
        for part in self._open:
            part.abort(why)

    def close(self) -> None:
        """Close all subcommunicators; if one raises, the others are still closed."""
        with ExitStack() as last:
            while self._open:
                last.callback(self._open.pop().close)
