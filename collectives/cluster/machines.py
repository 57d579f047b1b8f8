"""Which ranks are on which machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Machines:
    """`ranks[m]` are the ranks on machine m, in the order of their local ranks; `hosts[m]` is the
    machine's name."""

    ranks: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]

    @property
    def size(self) -> int:
        """How many ranks there are on all machines."""
        return sum(map(len, self.ranks))

    @property
    def count(self) -> int:
        return len(self.ranks)

    @cached_property
    def columns(self) -> int:
        """How many ranks of each machine talk to other machines: the fewest that one has."""
        return min(map(len, self.ranks))

    @cached_property
    def most(self) -> int:
        """The most ranks of one machine."""
        return max(map(len, self.ranks))

    @cached_property
    def spans(self) -> tuple[slice | list[int], ...]:
        """The ranks of each machine, to index rows with."""
        return tuple(
            slice(ranks[0], ranks[-1] + 1) if ranks[-1] - ranks[0] < len(ranks) else [*ranks]
            for ranks in self.ranks
        )

    def position(self, rank: int) -> tuple[int, int]:
        """(machine, local rank)."""
        return self._positions[rank]

    @cached_property
    def _positions(self) -> dict[int, tuple[int, int]]:
        return {r: (m, at) for m, ranks in enumerate(self.ranks) for at, r in enumerate(ranks)}

    def describe(self, machine: int) -> str:
        ranks = ", ".join(map(str, self.ranks[machine]))
        return f"{self.hosts[machine]} (rank{'s'[: len(self.ranks[machine]) > 1]} {ranks})"


def machine_id() -> str:
    """The same text for two processes if they can open each other's memory.

    Containers on one computer count as machines of their own if they do not see each other's
    processes.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
