"""GPU memory that ranks share: counters and slots of plans, and symmetric memory for tensors.

`LocalMemory` serves ranks of one process, `PeerMemory` one rank per process (CUDA IPC).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError, OutOfMemory, TopologyError
from linkweave.collectives.planning.layout import ALIGN
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.cpu.header import PAGE
from linkweave.collectives.runtime.cpu.mapping import pages
from linkweave.collectives.runtime.gpu.device import Device
from linkweave.collectives.runtime.gpu.doctor import examine
from linkweave.collectives.settings import topology_for
from linkweave.topology import Topology, load
from linkweave.topology.readers.detect import detect

log = logging.getLogger("linkweave")

_BLOCK = 2 << 20  # bytes: the granularity of CUDA IPC
_LEAVING = 5.0  # s to wait until the other ranks have closed our memory

SymmetricAddress = tuple[int, int]
"""(number of a `SymmetricMemory` in allocation order, byte offset within it)."""


class _Owner:
    """Lives as long as a tensor."""


class Lease:
    """GPU memory with two holders, a tensor and the ranks: freed when both have released it."""

    def __init__(self, device: Device, address: int) -> None:
        self.address = address
        # reentrant: the garbage collector may call `release` in the middle of `release`
        self._device, self._holders, self._lock = device, 2, threading.RLock()

    def tensor(self, nbytes: int) -> Any:
        """An array of uint8 [nbytes] over the memory; releases it when collected, except at exit,
        when CUDA may be gone."""
        owner = _Owner()
        weakref.finalize(owner, self.release).atexit = False
        return self._device.array(self.address, nbytes, owner)

    def release(self) -> None:
        """Called once by each holder."""
        with self._lock:
            self._holders -= 1
            unneeded = self._holders == 0
        if unneeded:
            self._device.free(self.address)


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """`nbytes` of memory on every rank's GPU, for tensors.

    `addresses` are those at which this process sees each rank's memory. `unseen` holds (a, b) if
    rank a cannot access rank b's memory; it is equal on all ranks. `leases` has an entry for each
    rank of this process.
    """

    nbytes: int
    addresses: tuple[int, ...]
    unseen: frozenset[tuple[int, int]]
    leases: Mapping[int, Lease]


@dataclass(frozen=True, slots=True)
class Bases:
    """Addresses, in this process, of the memory of each rank: on its GPU, and of those ranks whose
    memory some other cannot access, on the host as well. `apart` holds (a, b) if rank a cannot
    access rank b's; it is equal on all ranks."""

    gpu: Sequence[int]
    host: Mapping[int, int] = field(default_factory=dict)
    apart: frozenset[tuple[int, int]] = frozenset()

    def of(self, owner: int, other: int) -> int:
        """Where `owner` and `other` share the memory of `owner`."""
        return self.host[owner] if (other, owner) in self.apart else self.gpu[owner]


class Memory(Protocol):
    """Allocates memory that the ranks of a plan access across GPUs. All calls are collective."""

    def bases(self, nbytes: Sequence[int], pairs: Collection[tuple[int, int]]) -> Bases:
        """Allocate `nbytes[r]` zeroed bytes for each rank r.

        `pairs` holds (a, b) if rank a accesses rank b's memory. Addresses are valid for the ranks
        whose memory our ranks access. Raises OutOfMemory on all ranks if any rank is.
        """

    def allocate_symmetric(self, nbytes: int) -> SymmetricMemory:
        """Allocate `nbytes` zeroed bytes for a tensor on every rank.

        The memory outlives `close` while the tensor exists. Raises OutOfMemory on all ranks if any
        rank is.
        """

    def close(self) -> None:
        """Free all memory; no kernel may be running, here or on a peer."""


class LocalMemory:
    """Memory of ranks that are all in this process; rank r uses `devices[r]`.

    What a GPU shares with one that has no peer access to it is on the host, with one warning unless
    `quiet`; if peer access is `required`, raises CollectiveError.
    """

    def __init__(
        self, devices: Sequence[Device], required: bool = False, quiet: bool = False
    ) -> None:
        self._devices = devices
        self._made: list[tuple[Device, int]] = []
        self._pinned: list[NDArray[np.uint32]] = []
        self._leases: list[Lease] = []
        self._required, self._quiet = required, quiet
        gpus = {d.index: d for d in devices}
        blocked = {
            (a, b) for a, device in gpus.items() for b in gpus
            if a != b and not device.enable_peer_access(b)
        }  # fmt: skip
        self._unseen = frozenset(
            (i, j) for i, a in enumerate(devices) for j, b in enumerate(devices)
            if (a.index, b.index) in blocked
        )  # fmt: skip

    def bases(self, nbytes: Sequence[int], pairs: Collection[tuple[int, int]]) -> Bases:
        apart = self._unseen.intersection(pairs)
        if apart:
            self._warn(sorted(apart))
        host, made = {}, []
        for rank in {b for _, b in apart}:
            words = self._devices[rank].pinned(-(-(nbytes[rank] + ALIGN) // 4))
            self._pinned.append(words)
            host[rank] = -(-words.ctypes.data // ALIGN) * ALIGN
        for rank, (device, size) in enumerate(zip(self._devices, nbytes, strict=True)):
            try:
                made.append((device, device.allocate(size)))
            except MemoryError as error:
                for other, address in made:
                    other.free(address)
                raise OutOfMemory(f"rank {rank}: {lacking(size, device, error)}") from error
        self._made += made
        return Bases([address for _, address in made], host, apart)

    def _warn(self, apart: Sequence[tuple[int, int]]) -> None:
        gpus = dict.fromkeys((self._devices[a].index, self._devices[b].index) for a, b in apart)
        pairs = "; ".join(f"GPU {a} has no access to GPU {b}'s" for a, b in gpus)
        words = f"memory of GPUs of one process: {pairs}"
        _use_host_memory(words, self._required, not self._quiet)
        self._quiet = True

    def allocate_symmetric(self, nbytes: int) -> SymmetricMemory:
        leases: dict[int, Lease] = {}
        try:
            for rank, device in enumerate(self._devices):
                leases[rank] = Lease(device, device.allocate(nbytes))
                self._leases.append(leases[rank])
        except MemoryError as error:
            for lease in leases.values():  # for the tensors that will never exist
                lease.release()
            raise OutOfMemory(f"rank {rank}: {lacking(nbytes, device, error)}") from error
        addresses = tuple(lease.address for lease in leases.values())
        return SymmetricMemory(nbytes, addresses, self._unseen, leases)

    def like(self, devices: Sequence[Device]) -> LocalMemory:
        """Memory for some of these ranks, by the same rules."""
        return LocalMemory(devices, self._required, quiet=True)

    def close(self) -> None:
        with ExitStack() as last:
            while self._made:
                device, address = self._made.pop()
                last.callback(device.free, address)
            while self._leases:
                last.callback(self._leases.pop().release)
        self._pinned.clear()


class PeerMemory:
    """Memory of ranks in different processes: on the rank's GPU, opened by others with CUDA IPC.

    What a rank shares with one that cannot open its memory is on the host, with one warning; if
    peer access is `required`, every rank raises CollectiveError.
    """

    def __init__(self, device: Device, arena: Arena, gather: Gather, required: bool) -> None:
        self._device, self._arena, self._gather = device, arena, gather
        self._required = required
        self._warned = False
        self._own: list[int] = []
        self._leases: list[Lease] = []
        self._opened: list[int] = []
        self._registered: list[int] = []

    def bases(self, nbytes: Sequence[int], pairs: Collection[tuple[int, int]]) -> Bases:
        touched = {b for a, b in pairs if a == self._arena.rank}
        mine = self._allocate_together(nbytes[self._arena.rank])
        self._own.append(mine)
        found, ways, why = self._exchange(mine, touched)
        if not ways:
            return Bases(found)
        apart = frozenset((rank, owner) for rank, owners in ways.items() for owner in owners)
        return Bases(found, self._on_host(nbytes, ways, why), apart)

    def allocate_symmetric(self, nbytes: int) -> SymmetricMemory:
        lease = Lease(self._device, self._allocate_together(nbytes))
        self._leases.append(lease)
        try:
            found, ways, why = self._exchange(lease.address, {*range(self._arena.size)})
        except BaseException:
            lease.release()  # for the tensor that will never exist
            raise
        unseen = frozenset((rank, owner) for rank, owners in ways.items() for owner in owners)
        if unseen and self._arena.rank == 0:
            log.info("a tensor's memory is not seen by all ranks: %s (%s)", sorted(unseen), why)
        return SymmetricMemory(nbytes, tuple(found), unseen, {self._arena.rank: lease})

    def _allocate_together(self, nbytes: int) -> int:
        """Allocate memory on all ranks or on none."""
        mine, problem = 0, ""
        try:  # the driver exports whole blocks: a smaller allocation would expose its neighbours
            mine = self._device.allocate(-(-max(nbytes, 1) // _BLOCK) * _BLOCK)
        except MemoryError as error:
            problem = lacking(nbytes, self._device, error)
        failed = "unknown"
        try:
            failed = gather_errors(self._gather, problem)
        finally:
            if failed and mine:
                self._device.free(mine)
        if failed:
            raise OutOfMemory(failed)
        return mine

    def _exchange(
        self, mine: int, touched: set[int]
    ) -> tuple[list[int], dict[int, list[int]], str]:
        """Export `mine` and open the memory of the ranks `touched`.

        Returns ([size] addresses here, rank -> ranks whose memory it cannot open, a reason).
        """
        rank = self._arena.rank
        try:
            handle, why = self._device.ipc_handle(mine), ""
        except RuntimeError as error:
            handle, why = b"", f"{error}"
        handles = self._gather("memory of GPUs", handle)
        found = [0] * self._arena.size
        found[rank] = mine
        refused: list[int] = []
        for peer in sorted(touched - {rank}):
            if not handles[peer]:
                refused.append(peer)
                continue
            try:
                found[peer] = self._device.ipc_open(handles[peer])
                self._opened.append(found[peer])
            except RuntimeError as error:
                refused.append(peer)
                why = f"{error}"
        message = json.dumps({"refused": refused, "why": why[:ERROR_CHARS]}).encode()
        rows = [json.loads(row) for row in self._gather("access to GPUs", message)]
        ways = {r: row["refused"] for r, row in enumerate(rows) if row["refused"]}
        return found, ways, next((row["why"] for row in rows if row["why"]), "")

    def _on_host(
        self, nbytes: Sequence[int], ways: dict[int, list[int]], why: str
    ) -> dict[int, int]:
        """Allocate memory on the host for the ranks whose own some rank cannot open; the addresses
        of those that this rank needs."""
        rank, found = self._arena.rank, {}
        pairs = "; ".join(f"rank {r} cannot open that of ranks {o}" for r, o in ways.items())
        words = f"GPU memory of other processes: {pairs} ({why})"
        _use_host_memory(words, self._required, rank == 0 and not self._warned)
        self._warned = True
        problem, offset = "", -1
        owners = sorted({o for owners in ways.values() for o in owners})
        if rank in owners:
            try:
                offset, _ = self._arena.allocate(pages(max(nbytes[rank], 1)) + PAGE)
                offset = pages(offset)
                self._arena.mapping.at(offset, pages(max(nbytes[rank], 1)))[:] = 0
            except CollectiveError as error:
                problem = str(error)
        offsets = [int(row) for row in self._gather("memory", str(offset).encode())]
        for owner in owners:
            if offsets[owner] >= 0 and (owner == rank or owner in ways.get(rank, ())):
                address = self._arena.base + offsets[owner]
                try:
                    self._device.register(address, pages(max(nbytes[owner], 1)))
                    self._registered.append(address)
                except RuntimeError as error:
                    problem = str(error)
                found[owner] = address
        if failed := gather_errors(self._gather, problem):
            raise CollectiveError(f"{words}; nor can the GPUs use host memory: {failed}{advice()}")
        return found

    def close(self) -> None:
        """Close the others' memory, then free our own once all other ranks have closed it.

        CUDA leaves it undefined to free memory that another process has open. If a rank does not
        close it in time, the memory stays allocated until this process ends.
        """
        with ExitStack() as last:  # in reverse order; runs every callback even if one raises
            last.callback(self._free)
            last.callback(self._arena.leave_gpus)
            while self._opened:
                last.callback(self._device.ipc_close, self._opened.pop())

    def _free(self) -> None:
        deadline = time.monotonic() + _LEAVING
        while (self._own or self._leases) and not self._arena.others_left_gpus():
            if time.monotonic() > deadline:
                log.warning("rank %d: others still use its GPU memory", self._arena.rank)
                return
            time.sleep(0.001)
        with ExitStack() as last:
            while self._own:
                last.callback(self._device.free, self._own.pop())
            while self._leases:
                last.callback(self._leases.pop().release)
            while self._registered:
                last.callback(self._device.unregister, self._registered.pop())


def lacking(nbytes: int, device: Device, error: Exception) -> str:
    return f"no memory for {nbytes} bytes on GPU {device.index}: {error}"


def _use_host_memory(words: str, required: bool, warn: bool) -> None:
    if required:
        raise CollectiveError(f"{words}; peer_access='require' forbids host memory{advice()}")
    if warn:
        log.warning("%s; it is in host memory, which is slow%s", words, advice())


Gather = Callable[[str, bytes], list[bytes]]
"""Gathers one message from every rank, in rank order (`HostCalls.gather`)."""

ERROR_CHARS = 200
"""An error message sent to other ranks is cut to this many characters."""


def gather_errors(gather: Gather, error: str) -> str:
    """The errors of all ranks as one message; empty if no rank has one. Collective."""
    rows = gather("troubles", error[:ERROR_CHARS].encode())
    return "; ".join(f"rank {r}: {row.decode()}" for r, row in enumerate(rows) if row)


def common_topology(
    identity: tuple[str, str], rank: int, gather: Gather, spec: Topology | None, quiet: bool = False
) -> tuple[Topology, int]:
    """The topology that the ranks plan on: `spec` or, if None, what the driver reports; and how
    many processes have ranks on this rank's GPU.

    `identity` is the (PCI bus id, UUID) of this rank's GPU. Each rank is mapped to the topology's
    GPU with its bus id or UUID. If a given topology has none of these GPUs, it describes another
    machine: rank r is its r-th GPU. Without `spec`, ranks plan on a mesh if they share a GPU, as
    there are no links between them, or if the driver does not answer; warnings say so, the first
    one unless `quiet`. Collective. Raises CollectiveError on every rank if the ranks see different
    machines or a GPU is not part of the topology.
    """
    bus_id, uuid = identity
    seen, trouble = None, ""
    if spec is None:
        try:
            seen = detect({})  # ignores CUDA_VISIBLE_DEVICES: all GPUs of the machine
        except Exception as error:  # must reach the other ranks, whatever it is
            trouble = str(error)[:ERROR_CHARS]
    graph = crc32(seen.to_json().encode()) if seen and seen.devices else 0
    mine = {"bus": bus_id, "uuid": uuid, "graph": graph, "trouble": trouble, "pid": os.getpid()}
    rows = [json.loads(row) for row in gather("GPUs", json.dumps(mine).encode())]
    buses = [row["bus"] for row in rows]  # MIG instances of a GPU share it, but not a UUID
    shared = {bus: [r for r, other in enumerate(buses) if other == bus] for bus in buses}
    crowd = next((ranks for ranks in shared.values() if len(ranks) > 1), None)
    processes = len({row["pid"] for row in rows})
    if crowd and rank == 0 and processes > 1 and not quiet:
        log.warning(
            "ranks %s run on one GPU (%s, %s) and take turns on it; to give each its own, call "
            "torch.cuda.set_device(LOCAL_RANK) first",
            crowd, rows[crowd[0]]["bus"], rows[crowd[0]]["uuid"],
        )  # fmt: skip
    sharing = len({row["pid"] for row in rows if (row["bus"], row["uuid"]) == identity})
    if spec is not None:
        return topology_for(spec, len(rows)) if crowd else _subset(spec, rows), sharing
    if crowd:
        return load(f"mesh-{len(rows)}"), sharing
    if failed := {r: row["trouble"] for r, row in enumerate(rows) if row["trouble"]}:
        if rank == min(failed):
            log.warning("rank %d cannot ask for the GPUs' links: %s; assuming a mesh (pass "
                        "topology=... if it is none)", rank, failed[rank])  # fmt: skip
        return load(f"mesh-{len(rows)}"), sharing
    graphs = {row["graph"]: [r for r, o in enumerate(rows) if o["graph"] == row["graph"]]
              for row in rows}  # fmt: skip
    if len(graphs) > 1:
        words = "; ".join(f"ranks {ranks}: {graph:08x}" for graph, ranks in graphs.items())
        raise CollectiveError(f"the ranks see different machines: {words}; pass topology=...")
    if seen is None or not seen.devices:
        if rank == 0:
            log.warning("the driver reports no links (is nvidia-ml-py installed?): assuming a mesh")
        return load(f"mesh-{len(rows)}"), sharing
    return _subset(seen, rows, here=True), sharing


def _subset(machine: Topology, rows: list[dict[str, Any]], here: bool = False) -> Topology:
    """The ranks' GPUs on `machine`. `here`: it is certainly this machine."""
    gpus: list[int] = []
    missing: list[str] = []
    for r, row in enumerate(rows):
        try:
            gpus.append(machine.find(row["bus"], row["uuid"]))
        except TopologyError as error:
            missing.append(f"rank {r}'s GPU is not part of the topology: {error}")
    if not missing:
        return machine.subset(gpus)
    if here or gpus:
        raise CollectiveError("; ".join(missing))
    return topology_for(machine, len(rows))


def advice() -> str:
    """The warnings and problems that `linkweave doctor` finds, one per line."""
    return "".join(f"\n{check}" for check in examine() if check.state != "ok")
