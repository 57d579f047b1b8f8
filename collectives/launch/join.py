"""Joins existing ranks: those of torchrun or of torch.distributed."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from linkweave.collectives.communicator import Communicator
from linkweave.collectives.errors import CollectiveError, CollectiveTimeout
from linkweave.collectives.launch.default import set_default
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.cpu.mapping import Mapping
from linkweave.collectives.settings import Settings
from linkweave.topology import Topology


def init(
    topology: Topology | str = "auto", timeout: float = 30.0, order: str = "fastest",
    max_blocks: int | None = None, peer_access: str = "prefer",
) -> Communicator:  # fmt: skip
    """Join the ranks of this job, and set the default communicator.

    The ranks are those of torch.distributed, if it is initialised; or else those of torchrun
    (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), if it has started this process; or else this
    process alone. All must be on one machine. A rank uses the GPU of the first GPU tensor that it
    passes to a collective.

    The arguments are those of `Settings`, and the same on all ranks.

    Returns the communicator.
    Raises CollectiveError if an argument or environment variable is bad or the ranks are on several
    machines, and CollectiveTimeout if they do not meet within `timeout` seconds.
    """
    communicator = meet(_job(timeout), Settings(topology, timeout, order, max_blocks, peer_access))
    set_default(communicator)
    return communicator


def meet(job: Job, settings: Settings) -> Communicator:
    """The communicator of a job's ranks. Raises as `init` does."""
    fd = -1
    try:
        location = host = ""
        if job.rank == 0:
            fd = Mapping.create(job.size)
            location, host = Mapping.location(fd), socket.gethostname()
            job.tell([location, host])
        else:
            location, host = job.look_up(settings.timeout)
        if host != socket.gethostname():
            raise CollectiveError(
                f"rank {job.rank} is on {socket.gethostname()}, rank 0 on {host}: CPU ranks "
                "must share one machine"
            )
        return Communicator(Arena(Mapping.open(location, job.size, job.rank), job.rank), settings)
    finally:
        if fd >= 0:
            os.close(fd)


_generation = iter(range(1 << 30))  # so that each `init` of this process has its own key


@dataclass
class Job:
    """The ranks of a job, and the torch.distributed store through which rank 0 reaches the others.

    Anyone who can reach the store's port can write to it, so its values are plain data and checked.
    """

    rank: int
    size: int
    store: Any
    key: str

    def tell(self, value: list[str]) -> None:
        if self.store is not None:
            self.store.set(self.key, json.dumps(value))

    def look_up(self, timeout: float) -> tuple[str, str]:
        """(location of the shared memory, host), from rank 0. Raises CollectiveError."""
        try:
            self.store.wait([self.key], timedelta(seconds=timeout))
            data = self.store.get(self.key)
        except Exception as error:
            raise CollectiveTimeout(
                f"rank {self.rank} waits for rank 0 to set up the shared memory: {error}",
                rank=self.rank, peer=0,
            ) from None  # fmt: skip
        try:
            location, host = json.loads(data)
        except (ValueError, TypeError, RecursionError):
            location = host = None
        if not isinstance(location, str) or not isinstance(host, str):
            raise CollectiveError(
                f"rank {self.rank}: {data[:80]!r} in the store is not what rank 0 writes"
            )
        return location, host


def _job(timeout: float) -> Job:
    key = f"linkweave/arena/{next(_generation)}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available():
        dist = torch.distributed
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            return Job(dist.get_rank(), dist.get_world_size(), store, key)
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return Job(0, 1, None, key)
    try:
        rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    except ValueError:
        raise CollectiveError(
            f"RANK={env['RANK']!r} and WORLD_SIZE={env['WORLD_SIZE']!r} must be integers"
        ) from None
    if not 0 <= rank < size:
        raise CollectiveError(f"RANK={rank} must be from 0 to WORLD_SIZE - 1 = {size - 1}")
    if size == 1:
        return Job(rank, size, None, key)
    if missing := [v for v in ("MASTER_ADDR", "MASTER_PORT") if v not in env]:
        raise CollectiveError(f"RANK and WORLD_SIZE are set, but {missing[0]} is not")
    import torch.distributed as dist

    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    except (RuntimeError, ValueError) as error:  # torch's DistError family derives from these
        raise CollectiveTimeout(
            f"rank {rank} cannot meet the other {size - 1} ranks at "
            f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}: {error}",
            rank=rank,
        ) from None
    return Job(rank, size, store, key)
