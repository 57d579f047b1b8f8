"""Joins existing ranks: those of torchrun or of torch.distributed."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from linkweave.collectives.calls.communicator import Communicator, find_default, set_default
from linkweave.collectives.cluster.machines import Machines, machine_id
from linkweave.collectives.errors import CollectiveError, CollectiveTimeout
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.cpu.header import LAYOUT
from linkweave.collectives.runtime.cpu.mapping import Mapping
from linkweave.collectives.settings import Settings
from linkweave.topology import Topology

if TYPE_CHECKING:
    from linkweave.collectives.cluster.communicator import ClusterCommunicator


def init(
    topology: Topology | str = "auto", timeout: float | None = None, order: str = "fastest",
    max_blocks: int | None = None, peer_access: str = "prefer",
) -> Communicator | ClusterCommunicator:  # fmt: skip
    """Join the ranks of this job, and set the default communicator.

    The ranks are those of torch.distributed, if it is initialised; or else those of torchrun
    (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), if it has started this process; or else this
    process alone, which is an error if an MPI launcher or srun has started several, or if only one
    of RANK and WORLD_SIZE is set. Ranks on several machines get a `ClusterCommunicator`, which
    takes CPU tensors. A rank uses the GPU of the first GPU tensor that it passes to a collective.

    The arguments are those of `Settings`, and the same on all ranks.

    Returns the communicator.
    Raises CollectiveError if an argument or environment variable is bad, or on a rank of `spawn`,
    which has a communicator; and CollectiveTimeout if the ranks do not meet within `timeout`
    seconds.
    """
    settings = Settings(topology, timeout, order, max_blocks, peer_access)
    communicator = meet(_job(settings.longest), settings)
    set_default(communicator)
    return communicator


def meet(job: Job, settings: Settings) -> Communicator | ClusterCommunicator:
    """The communicator of a job's ranks. Raises as `init` does."""
    machines = job.machines(settings.longest)
    index, local = machines.position(job.rank)
    size = len(machines.ranks[index])
    part = Job(local, size, job.store, f"{job.key}/memory/{index}")
    if machines.count == 1:
        return _on_one_machine(part, settings)
    from torch._C._distributed_c10d import PrefixStore

    from linkweave.collectives.cluster.calls import LONGER
    from linkweave.collectives.cluster.communicator import ClusterCommunicator

    def again(rank: int, size: int, store: Any) -> Communicator | ClusterCommunicator:
        return meet(Job(rank, size, store, "part"), settings)

    machine = _on_one_machine(part, replace(settings, timeout=settings.longest + LONGER))
    store = PrefixStore(f"{job.key}/", job.store)
    try:
        return ClusterCommunicator(job.rank, machines, machine, store, settings, again)
    except BaseException:
        machine.close()
        raise


def _on_one_machine(job: Job, settings: Settings) -> Communicator:
    fd = -1
    try:
        if job.rank == 0:
            fd = Mapping.create(job.size, job.key)
            location = Mapping.location(fd)
            job.tell(job.key, location)
        else:
            location = job.look_up(job.key, 0, "set up the shared memory", settings.longest)
        if not isinstance(location, str):
            raise job.not_ours(location)
        mapping = Mapping.open(location, job.size, job.rank, job.key)
        return Communicator(Arena(mapping, job.rank), settings)
    finally:
        if fd >= 0:
            os.close(fd)


def _version() -> str:
    """Of this package; ranks of different ones would misread each other's memory."""
    with suppress(PackageNotFoundError):  # a checkout that is not installed
        return f"{version('linkweave')} (layout {LAYOUT})"
    return f"layout {LAYOUT}"


_generation = iter(range(1 << 30))  # so that each `init` of this process has its own key


_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}  # fmt: skip
"""Variables by which Open MPI, other MPI launchers and srun tell a process the number of processes,
and its own."""

_AGAIN, _POLL = 0.5, 0.002  # s
_PARTING = 3.0  # s


@dataclass
class Job:
    """The ranks of a job, and the torch.distributed store through which they meet.

    Anyone who can reach the store's port can write to it, so its values are plain data and checked.
    """

    rank: int
    size: int
    store: Any
    key: str

    def machines(self, timeout: float) -> Machines:
        """Which ranks are on which machine, as rank 0 has it from all. Raises CollectiveError.

        Moves `key` to a session that is new in this store: torchrun keeps the store when it
        restarts the ranks, with all that the ranks before them have told.
        """
        mine = [machine_id(), socket.gethostname(), _version(), uuid4().hex]
        if self.size == 1:
            return Machines(((0,),), (mine[1],))
        until = time.monotonic() + timeout
        told = self._call(mine, until) if self.rank == 0 else self._answer(mine, until)
        if len(of := {row[2]: rank for rank, row in enumerate(told)}) > 1:
            words = ", ".join(f"rank {rank} has {name}" for name, rank in of.items())
            self._part()
            raise CollectiveError(f"all ranks need the same linkweave, but {words}")
        found: dict[str, tuple[list[int], str]] = {}
        for rank, (machine, host, *_) in enumerate(told):
            found.setdefault(machine, ([], host))[0].append(rank)
        rows = found.values()
        return Machines(tuple(tuple(ranks) for ranks, _ in rows), tuple(host for _, host in rows))

    def _part(self) -> None:
        """Before ranks part: rank 0, whose process may hold the store, waits until the others have
        heard why."""
        with suppress(Exception):  # an older rank tells nothing, and the store may be gone
            self.tell(f"{self.key}/heard/{self.rank}", True)
            if self.rank == 0:
                keys = [f"{self.key}/heard/{rank}" for rank in range(self.size)]
                self.store.wait(keys, timedelta(seconds=_PARTING))

    def _call(self, mine: list[str], until: float) -> list[list[str]]:
        """On rank 0: begin a session, and return what each rank has told in it."""
        session = uuid4().hex
        self.tell(f"{self.key}/session", session)
        self.key, told = f"{self.key}/{session}", [mine]
        for rank in range(1, self.size):
            left = max(0.001, until - time.monotonic())
            row = self.look_up(f"{self.key}/host/{rank}", rank, "join", left)
            if isinstance(row, list) and len(row) == 3:
                row.insert(2, "an older one")
            told.append(self._texts(row, 4))
        self.tell(f"{self.key}/told", told)
        return told

    def _answer(self, mine: list[str], until: float) -> list[list[str]]:
        """On the other ranks: tell rank 0 in its session, which has heard of this rank."""
        while (left := until - time.monotonic()) > 0:
            session = self.look_up(f"{self.key}/session", 0, "begin", left)
            key = f"{self.key}/{self._texts([session], 1)[0]}"
            self.tell(f"{key}/host/{self.rank}", mine)
            again = min(until, time.monotonic() + _AGAIN)
            while not (there := self._there(f"{key}/told")) and time.monotonic() < again:
                time.sleep(_POLL)
            if there:
                told = self.look_up(f"{key}/told", 0, "hear from all ranks", left)
                if not isinstance(told, list) or len(told) != self.size:
                    raise self.not_ours(told)
                if self._texts(told[self.rank], 4) == mine:  # else of an earlier session
                    self.key = key
                    return [self._texts(row, 4) for row in told]
                time.sleep(_POLL)
        raise CollectiveTimeout(
            f"rank {self.rank} waits for rank 0 to hear from all ranks", rank=self.rank, peer=0
        )

    def _there(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except Exception as error:  # its host has gone
            raise CollectiveTimeout(
                f"rank {self.rank} waits for rank 0 to hear from all ranks: {error}",
                rank=self.rank, peer=0,
            ) from None  # fmt: skip

    def _texts(self, value: Any, count: int) -> list[str]:
        if isinstance(value, list) and [*map(type, value)] == [str] * count:
            return value
        raise self.not_ours(value)

    def tell(self, key: str, value: Any) -> None:
        if self.store is not None:
            self.store.set(key, json.dumps(value))

    def look_up(self, key: str, peer: int, what: str, timeout: float) -> Any:
        """What rank `peer` has told under `key`. Raises CollectiveError."""
        try:
            self.store.wait([key], timedelta(seconds=timeout))
            data = self.store.get(key)
        except Exception as error:
            raise CollectiveTimeout(
                f"rank {self.rank} waits for rank {peer} to {what}: {error}",
                rank=self.rank, peer=peer,
            ) from None  # fmt: skip
        try:
            return json.loads(data)
        except (ValueError, TypeError, RecursionError):
            raise self.not_ours(data) from None

    def not_ours(self, value: Any) -> CollectiveError:
        return CollectiveError(
            f"rank {self.rank}: {str(value)[:80]!r} in the store is not what a rank writes"
        )


def _refuse_parting() -> None:
    """Raise CollectiveError if this process is one of several: of ranks that still have a
    communicator, such as those of `spawn`, or of an MPI launcher or srun, which do not tell ranks
    as torchrun does. Each of them would be alone, and sum nothing."""
    own: Any = find_default()
    if own is not None and own.size > 1 and not own.closed:
        if not getattr(own, "machine", own).calls.health.foreign:  # else a child of the rank
            raise CollectiveError(
                f"this process is rank {own.rank} of {own.size} already, and would be alone: use "
                "get_default(), or the functions of the package; or call shutdown() first"
            )
        return
    refuse_being_alone()


def by_torchrun() -> bool:
    """Whether torchrun has started this process, or who sets its variables."""
    return bool(os.environ.get("RANK") and os.environ.get("WORLD_SIZE"))


def refuse_being_alone() -> None:
    """Raise CollectiveError if the environment tells of other ranks, but not all that a rank must
    know to meet them."""
    for count, number in _LAUNCHERS.items():
        if os.environ.get(count, "1") != "1":
            raise CollectiveError(
                f"this process is one of {count}={os.environ[count]}, but RANK and WORLD_SIZE are "
                f"not both set, so it would be alone: start it by torchrun, or set RANK (to "
                f"${number}), WORLD_SIZE, MASTER_ADDR and MASTER_PORT; RANK=0 WORLD_SIZE=1 if it "
                "is to be alone"
            )
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if bool(rank) != bool(size) and size != "1":
        told, other = ("RANK", "WORLD_SIZE")[:: 1 if rank else -1]
        raise CollectiveError(
            f"{told}={os.environ[told]} is set, but {other} is not, so this process would be "
            "alone: start it by torchrun, or set both; RANK=0 WORLD_SIZE=1 if it is to be alone"
        )


def _job(timeout: float) -> Job:
    key = f"linkweave/arena/{next(_generation)}"
    # not there while torch is imported
    dist: Any = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        return Job(dist.get_rank(), dist.get_world_size(), store, key)
    if not by_torchrun():
        _refuse_parting()
        return Job(0, 1, None, key)
    env = os.environ
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
