"""Where counters and slots of ranks on GPUs lie: in memory of this process, or of several."""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.plan import ALIGN
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.cpu.mapping import PAGE, pages
from linkweave.collectives.runtime.gpu.device import Device
from linkweave.collectives.runtime.gpu.peers import Gather, advice, troubles

log = logging.getLogger("linkweave")

_BLOCK = 2 << 20  # bytes: CUDA shares no less with another process
_LEAVING = 5.0  # s that the others have to let go of our memory
_TOLD = 200  # characters of an error that the others are told


Spot = tuple[int, int]
"""Where a buffer lies: number of a `Shared` in the order in which they were made, and offset."""


class _Owner:
    """Lives as long as a tensor."""


class Lease:
    """Memory of a GPU that a tensor lies in: given back when neither it nor the ranks need it."""

    def __init__(self, device: Device, address: int) -> None:
        self.address = address
        # a collector may run `release` while it runs
        self._device, self._holders, self._lock = device, 2, threading.RLock()

    def tensor(self, nbytes: int) -> Any:
        """An array of bytes there, with which its half of the lease ends. Not at exit: CUDA may be
        gone by then."""
        owner = _Owner()
        weakref.finalize(owner, self.release).atexit = False
        return self._device.array(self.address, nbytes, owner)

    def release(self) -> None:
        """To be called by each of the two, once."""
        with self._lock:
            self._holders -= 1
            unneeded = self._holders == 0
        if unneeded:
            self._device.free(self.address)


@dataclass(frozen=True, slots=True)
class Shared:
    """Memory of `nbytes` on each rank's GPU, for tensors.

    `addresses`: where this process sees each rank's; `unseen`: (a, b) where rank a does not see
    rank b's, the same on all ranks; `leases`: of the ranks of this process.
    """

    nbytes: int
    addresses: tuple[int, ...]
    unseen: frozenset[tuple[int, int]]
    leases: Mapping[int, Lease]


class Memory(Protocol):
    """Where all ranks' counters and slots lie, and tensors that others may write."""

    def bases(self, nbytes: Sequence[int], pairs: Collection[tuple[int, int]]) -> list[int]:
        """Zeroed memory of so many bytes for each rank: its address in this process, of the ranks
        whose memory ours touch. `pairs`: (a, b) where rank a touches rank b's."""

    def share(self, nbytes: int) -> Shared:
        """Zeroed memory for a tensor on each rank, which outlives us where that is still there.
        Raises CollectiveError, on all ranks, where one has no room."""

    def close(self) -> None:
        """Give all of it back; nothing may be running, here or on a peer."""


class LocalMemory:
    """Memory of ranks that are all in this process, each on its device.

    What a GPU that has to touch it cannot reach lies in host memory instead, with one warning
    (`quiet`: none), or is refused with CollectiveError where `required`.
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
        walls = {(a, b) for a, d in gpus.items() for b in gpus if a != b and not d.reach(b)}
        self._unseen = frozenset(
            (i, j) for i, a in enumerate(devices) for j, b in enumerate(devices)
            if (a.index, b.index) in walls
        )  # fmt: skip

    def bases(self, nbytes: Sequence[int], pairs: Collection[tuple[int, int]]) -> list[int]:
        found = []
        apart = sorted(self._unseen.intersection(pairs))
        if apart:
            self._say(apart)
        walled = {b for _, b in apart}
        for rank, (device, size) in enumerate(zip(self._devices, nbytes, strict=True)):
            if rank in walled:
                self._pinned.append(device.pinned(-(-(size + ALIGN) // 4)))
                found.append(-(-self._pinned[-1].ctypes.data // ALIGN) * ALIGN)
                continue
            found.append(device.allocate(size))
            self._made.append((device, found[-1]))
        return found

    def _say(self, apart: Sequence[tuple[int, int]]) -> None:
        gpus = dict.fromkeys((self._devices[a].index, self._devices[b].index) for a, b in apart)
        pairs = "; ".join(f"GPU {a} has no access to GPU {b}'s" for a, b in gpus)
        words = f"memory of GPUs of one process: {pairs}"
        if self._required:
            raise CollectiveError(f"{words}; peer_access='require' allows nothing else{advice()}")
        if not self._quiet:
            log.warning("%s; it goes through host memory, which is slow%s", words, advice())
        self._quiet = True

    def share(self, nbytes: int) -> Shared:
        leases: dict[int, Lease] = {}
        try:
            for rank, device in enumerate(self._devices):
                leases[rank] = Lease(device, device.allocate(nbytes))
                self._leases.append(leases[rank])
        except RuntimeError as error:
            for lease in leases.values():  # of which there will be no tensor
                lease.release()
            where = f"rank {rank} on GPU {device.index}: {error}"
            raise CollectiveError(f"no memory for a tensor of {nbytes} bytes: {where}") from error
        addresses = tuple(lease.address for lease in leases.values())
        return Shared(nbytes, addresses, self._unseen, leases)

    def close(self) -> None:
        with ExitStack() as last:
            while self._made:
                device, address = self._made.pop()
                last.callback(device.free, address)
            while self._leases:
                last.callback(self._leases.pop().release)
        self._pinned.clear()


class PeerMemory:
    """Each rank's memory on its own GPU, opened by the others through CUDA IPC.

    All ranks must ask for the same memory in the same order. What a rank cannot open lies in host
    memory instead, with one warning, or is refused on every rank where `required`.
    """

    def __init__(self, device: Device, arena: Arena, gather: Gather, required: bool) -> None:
        self._device, self._arena, self._gather = device, arena, gather
        self._required = required
        self._warned = False
        self._own: list[int] = []
        self._leases: list[Lease] = []
        self._opened: list[int] = []
        self._registered: list[int] = []

    def bases(self, nbytes: Sequence[int], pairs: Collection[tuple[int, int]]) -> list[int]:
        touched = {b for a, b in pairs if a == self._arena.rank}
        mine = self._allocate(nbytes[self._arena.rank])
        self._own.append(mine)
        found, ways, why = self._exchange(mine, touched)
        if ways:
            self._fall_back(nbytes, found, touched, ways, why)
        return found

    def share(self, nbytes: int) -> Shared:
        lease, trouble = None, ""
        try:
            lease = Lease(self._device, self._allocate(nbytes))
            self._leases.append(lease)
        except RuntimeError as error:
            trouble = str(error)
        try:
            failed = troubles(self._gather, trouble)
            if lease is None or failed:
                raise CollectiveError(f"no memory for a tensor of {nbytes} bytes: {failed}")
            found, ways, why = self._exchange(lease.address, {*range(self._arena.size)})
        except BaseException:
            if lease:
                lease.release()  # as there will be no tensor
            raise
        unseen = frozenset((rank, owner) for rank, owners in ways.items() for owner in owners)
        if unseen and self._arena.rank == 0:
            log.info("a tensor's memory is not seen by all ranks: %s (%s)", sorted(unseen), why)
        return Shared(nbytes, tuple(found), unseen, {self._arena.rank: lease})

    def _allocate(self, nbytes: int) -> int:
        # of less than a block, the driver would share what else lies in it
        return self._device.allocate(-(-max(nbytes, 1) // _BLOCK) * _BLOCK)

    def _exchange(
        self, mine: int, touched: set[int]
    ) -> tuple[list[int], dict[int, list[int]], str]:
        """Where we see the memory of the ranks `touched`; who cannot open whose, and why."""
        rank = self._arena.rank
        try:
            handle, why = self._device.share(mine), ""
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
                found[peer] = self._device.open(handles[peer])
                self._opened.append(found[peer])
            except RuntimeError as error:
                refused.append(peer)
                why = f"{error}"
        said = json.dumps({"refused": refused, "why": why[:_TOLD]}).encode()
        told = [json.loads(row) for row in self._gather("access to GPUs", said)]
        ways = {r: row["refused"] for r, row in enumerate(told) if row["refused"]}
        return found, ways, next((row["why"] for row in told if row["why"]), "")

    def _fall_back(
        self, nbytes: Sequence[int], found: list[int], touched: set[int],
        ways: dict[int, list[int]], why: str,
    ) -> None:  # fmt: skip
        """Put the memory that not everyone can open where everyone can."""
        rank = self._arena.rank
        pairs = "; ".join(f"rank {r} cannot open that of ranks {o}" for r, o in ways.items())
        words = f"GPU memory of other processes: {pairs} ({why})"
        if self._required:
            raise CollectiveError(f"{words}; peer_access='require' allows nothing else{advice()}")
        if rank == 0 and not self._warned:
            log.warning("%s; it goes through host memory, which is slow%s", words, advice())
        self._warned = True
        trouble, offset = "", -1
        owners = sorted({o for owners in ways.values() for o in owners})
        if rank in owners:
            try:
                offset, _ = self._arena.allocate(pages(max(nbytes[rank], 1)) + PAGE)
                offset = pages(offset)
                self._arena.mapping.at(offset, pages(max(nbytes[rank], 1)))[:] = 0
            except CollectiveError as error:
                trouble = str(error)
        places = [int(row) for row in self._gather("memory", str(offset).encode())]
        for owner in owners:
            if places[owner] >= 0 and (owner == rank or owner in touched):
                address = self._arena.base + places[owner]
                try:
                    self._device.register(address, pages(max(nbytes[owner], 1)))
                    self._registered.append(address)
                except RuntimeError as error:
                    trouble = str(error)
                found[owner] = address
        if failed := troubles(self._gather, trouble):
            raise CollectiveError(f"{words}; nor can the GPUs use host memory: {failed}{advice()}")

    def close(self) -> None:
        """Shut what is the others', and free our own when all of them have done so: until then
        CUDA leaves open what becomes of it. Where one does not, it stays until the process ends."""
        with ExitStack() as last:  # backwards, and all of it, whatever fails
            last.callback(self._free)
            last.callback(self._arena.leave_gpus)
            while self._opened:
                last.callback(self._device.shut, self._opened.pop())

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
