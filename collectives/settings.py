"""Settings of a communicator, the same on every rank."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from zlib import crc32

from linkweave.collectives.errors import CollectiveError
from linkweave.topology import Topology, load
from linkweave.topology.checks import integer

log = logging.getLogger("linkweave")

ORDERS = ("fastest", "fixed")
PEER_ACCESS = ("prefer", "require")
TIMEOUT, GPU_TIMEOUT = 30.0, 600.0
"""Seconds, by default. Ranks with GPUs may be apart for long, while one of them writes a checkpoint
or evaluates; NCCL waits as long."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a communicator; all but `sharing` are the same on every rank. Raises
    CollectiveError if one is bad.

    topology: a `Topology`, a name or a file; "auto" for the machine itself.
    timeout: longest wait for a peer, in seconds; None: 30, and 600 once the ranks use GPUs. Only
        planning on rank 0 may take longer, up to five minutes.
    order: "fastest", or "fixed" for the same order of summation at every size.
    max_blocks: most thread blocks of a launch, to leave room for other kernels and communicators;
        None: 80 of each rank or a fifth of its GPU's, whichever is less, or as many as the plan
        needs.
    peer_access: "prefer" uses host memory between GPUs that cannot access each other's memory;
        "require" raises an error instead.
    sharing: processes on a rank's GPU, if there are more than those of this communicator.
    """

    topology: Topology | str = "auto"
    timeout: float | None = None
    order: str = "fastest"
    max_blocks: int | None = None
    peer_access: str = "prefer"
    sharing: int = 1

    def __post_init__(self) -> None:
        _one_of("order", self.order, ORDERS)
        _one_of("peer_access", self.peer_access, PEER_ACCESS)
        timeout = self.timeout
        real = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and (not real or not timeout > 0 or math.isinf(timeout)):
            raise CollectiveError(f"timeout must be a positive number of seconds, not {timeout!r}")
        integer(self.sharing, "sharing", 1)
        if self.max_blocks is not None:
            blocks = integer(self.max_blocks, "max_blocks", 1)
            object.__setattr__(self, "max_blocks", blocks)

    @property
    def longest(self) -> float:
        """`timeout` of ranks that use no GPU, in seconds."""
        return self.timeout or TIMEOUT

    @property
    def longest_on_gpus(self) -> float:
        """`timeout` of ranks that use GPUs, in seconds."""
        return self.timeout or GPU_TIMEOUT

    def checksum(self, topology: Topology) -> int:
        """A checksum by which ranks detect different settings."""
        values = (topology.to_json(), self.order, self.max_blocks, self.peer_access)
        return crc32(repr(values).encode())


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise CollectiveError(f"unknown {name} {value!r}; choose from {', '.join(allowed)}")


def topology_for(spec: Topology | str, size: int) -> Topology:
    """The topology on which `size` CPU ranks plan; for "auto" it is their shared memory."""
    topology = load(f"cpu-{size}" if spec == "auto" else spec)
    has = len(topology.gpus)
    if has < size:
        raise CollectiveError(f"{topology.name} has {has} GPUs, fewer than the {size} ranks")
    if has > size:
        log.info("%d ranks on %s: its first %d GPUs", size, topology.name, size)
        return topology.subset(topology.gpus[:size])
    return topology
