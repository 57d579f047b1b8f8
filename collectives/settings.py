"""How a communicator behaves: the same on every rank."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from zlib import crc32

from linkweave.collectives.errors import CollectiveError
from linkweave.topology import Topology, load

log = logging.getLogger("linkweave")

ORDERS = ("fastest", "fixed")
PEER_ACCESS = ("prefer", "require")


@dataclass(frozen=True, slots=True)
class Settings:
    """`timeout` (s) bounds every wait for a peer; only rank 0 may plan for longer, five minutes.
    `order`: "fixed" keeps one order of summation for every size. `max_blocks` caps the thread
    blocks of a launch beside compute (None: no cap). `peer_access`: "require" refuses GPUs that
    cannot reach each other's memory, which otherwise go through host memory. Raises
    CollectiveError.
    """

    topology: Topology | str = "auto"
    timeout: float = 30.0
    order: str = "fastest"
    max_blocks: int | None = None
    peer_access: str = "prefer"

    def __post_init__(self) -> None:
        _one_of("order", self.order, ORDERS)
        _one_of("peer_access", self.peer_access, PEER_ACCESS)
        timeout, blocks = self.timeout, self.max_blocks
        if not isinstance(timeout, int | float) or not timeout > 0 or math.isinf(timeout):
            raise CollectiveError(f"timeout must be a positive number of seconds, not {timeout!r}")
        whole = isinstance(blocks, int) and not isinstance(blocks, bool)
        if blocks is not None and not (whole and blocks > 0):
            raise CollectiveError(f"max_blocks must be a positive integer or None, not {blocks!r}")

    def checksum(self, topology: Topology) -> int:
        """By which ranks notice that they were given different settings."""
        said = (topology.to_json(), self.order, self.max_blocks, self.peer_access)
        return crc32(repr(said).encode())


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise CollectiveError(f"unknown {name} {value!r}; choose from {', '.join(allowed)}")


def topology_for(spec: Topology | str, size: int) -> Topology:
    """The map that `size` CPU ranks plan on: `auto` is their common memory."""
    topology = load(f"cpu-{size}" if spec == "auto" else spec)
    has = len(topology.gpus)
    if has < size:
        raise CollectiveError(f"{topology.name} has {has} GPUs, fewer than the {size} ranks")
    if has > size:
        log.info("%d ranks on %s: its first %d GPUs", size, topology.name, size)
        return topology.subset(topology.gpus[:size])
    return topology
