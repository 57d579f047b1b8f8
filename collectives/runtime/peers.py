"""GPUs of several processes: who they are, which map they plan on, and each other's memory."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from zlib import crc32

from collectives.errors import CollectiveError, TopologyError
from collectives.runtime.arena import Arena
from collectives.runtime.device import Device
from collectives.runtime.doctor import examine
from collectives.settings import topology_for
from topology import Topology, load
from topology.detect import detect

log = logging.getLogger("linkweave")

Gather = Callable[[str, bytes], list[bytes]]
"""What every rank says of a thing, by rank (`Calls.gather`)."""

_BLOCK = 2 << 20  # bytes: CUDA shares no less with another process
_LEAVING = 5.0  # s that the others have to let go of our memory
_TOLD = 200  # characters of an error that the others are told


def troubles(gather: Gather, mine: str) -> str:
    """What went wrong on any rank, in words that all ranks get; empty where nothing did."""
    told = gather("troubles", mine[:_TOLD].encode())
    return "; ".join(f"rank {r}: {row.decode()}" for r, row in enumerate(told) if row)


def common_map(
    identity: tuple[str, str], rank: int, gather: Gather, spec: Topology | None, quiet: bool = False
) -> Topology:
    """The map that the ranks' GPUs plan on: `spec`, or (None) what the driver tells of them.

    `identity`: bus id and UUID of this rank's GPU. `quiet`: they are known to share GPUs.

    Ranks exchange bus ids, UUIDs and what they detected, and take their places by bus id or UUID.
    A map that knows none of these is of another machine: rank r is its r-th GPU. Ranks that share a
    GPU plan on a mesh where the driver is asked, as no links stand between them. Raises
    CollectiveError, on every rank, naming those that see different machines or are not on the map.
    """
    bus_id, uuid = identity
    seen, trouble = None, ""
    if spec is None:
        try:
            seen = detect({})  # all of the machine's GPUs, whatever this process is shown
        except Exception as error:  # the others must hear of it, whatever it is
            trouble = str(error)[:_TOLD]
    graph = crc32(seen.to_json().encode()) if seen and seen.devices else 0
    said = {"bus": bus_id, "uuid": uuid, "graph": graph, "trouble": trouble, "pid": os.getpid()}
    rows = [json.loads(row) for row in gather("GPUs", json.dumps(said).encode())]
    where = [row["bus"] for row in rows]  # parts of one GPU share it, whatever their UUIDs
    shared = {u: [r for r, v in enumerate(where) if v == u] for u in where}
    crowd = next((ranks for ranks in shared.values() if len(ranks) > 1), None)
    processes = len({row["pid"] for row in rows})
    if crowd and rank == 0 and processes > 1 and not quiet:
        log.warning(
            "ranks %s run on one GPU (%s, %s) and take turns on it; to give each its own, call "
            "torch.cuda.set_device(LOCAL_RANK) first",
            crowd, rows[crowd[0]]["bus"], rows[crowd[0]]["uuid"],
        )  # fmt: skip
    if spec is not None:
        return topology_for(spec, len(rows)) if crowd else _places(spec, rows)
    if crowd:
        return load(f"mesh-{len(rows)}")
    if any(row["trouble"] for row in rows):
        words = "; ".join(f"rank {r}: {row['trouble']}" for r, row in enumerate(rows)
                          if row["trouble"])  # fmt: skip
        raise CollectiveError(f"the GPUs' links cannot be told; say topology=...: {words}")
    graphs = {row["graph"]: [r for r, o in enumerate(rows) if o["graph"] == row["graph"]]
              for row in rows}  # fmt: skip
    if len(graphs) > 1:
        words = "; ".join(f"ranks {ranks}: {graph:08x}" for graph, ranks in graphs.items())
        raise CollectiveError(f"the ranks see different machines: {words}; say topology=...")
    if seen is None or not seen.devices:
        if rank == 0:
            log.warning("the driver tells no links (is nvidia-ml-py installed?): a mesh is assumed")
        return load(f"mesh-{len(rows)}")
    return _places(seen, rows, True)


def _places(machine: Topology, rows: list[dict[str, Any]], must: bool = False) -> Topology:
    """The part of the machine where the ranks' GPUs are. `must`: it is known to be this one."""
    places: list[int] = []
    missing: list[str] = []
    for r, row in enumerate(rows):
        try:
            places.append(machine.find(row["bus"], row["uuid"]))
        except TopologyError as error:
            missing.append(f"rank {r}'s GPU is not on the map: {error}")
    if not missing:
        return machine.subset(places)
    if must or places:
        raise CollectiveError("; ".join(missing))
    return topology_for(machine, len(rows))


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
        self._opened: list[int] = []
        self._registered: list[int] = []

    def bases(self, nbytes: Sequence[int], touched: set[int]) -> list[int]:
        rank = self._arena.rank
        # of less than a block, the driver would share what else lies in it
        mine = self._device.allocate(-(-max(nbytes[rank], 1) // _BLOCK) * _BLOCK)
        self._own.append(mine)
        try:
            handle, why = self._device.share(mine), ""
        except RuntimeError as error:
            handle, why = b"", f"{error}"
        handles = self._gather("memory of GPUs", handle)
        found = [0] * len(nbytes)
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
        if ways:
            why = next(row["why"] for row in told if row["why"])
            self._fall_back(nbytes, found, touched, ways, why)
        return found

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
        trouble = ""
        for owner in sorted({o for owners in ways.values() for o in owners}):
            size = max(nbytes[owner], 1)
            address = self._arena.base + self._arena.reserve(size)
            if owner == rank or owner in touched:
                try:
                    self._device.register(address, -(-size // 4096) * 4096)
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
            last.callback(self._arena.leave)
            while self._opened:
                last.callback(self._device.shut, self._opened.pop())

    def _free(self) -> None:
        deadline = time.monotonic() + _LEAVING
        while self._own and not self._arena.others_left():
            if time.monotonic() > deadline:
                log.warning("rank %d: others still use its GPU memory", self._arena.rank)
                return
            time.sleep(0.001)
        with ExitStack() as last:
            while self._own:
                last.callback(self._device.free, self._own.pop())
            while self._registered:
                last.callback(self._device.unregister, self._registered.pop())


def advice() -> str:
    """What `linkweave doctor` finds amiss, a line each."""
    return "".join(f"\n{check}" for check in examine() if check.state != "ok")
