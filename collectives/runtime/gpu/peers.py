"""GPUs of several processes: their identities, and the topology that the ranks plan on."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import Any
from zlib import crc32

from linkweave.collectives.errors import CollectiveError, TopologyError
from linkweave.collectives.runtime.gpu.doctor import examine
from linkweave.collectives.settings import topology_for
from linkweave.topology import Topology, load
from linkweave.topology.detect import detect

log = logging.getLogger("linkweave")

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
    machine: rank r is its r-th GPU. Without `spec`, ranks that share a GPU plan on a mesh, as there
    are no links between them; a warning says so unless `quiet`. Collective. Raises CollectiveError
    on every rank if the ranks see different machines or a GPU is not part of the topology.
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
    if any(row["trouble"] for row in rows):
        words = "; ".join(f"rank {r}: {row['trouble']}" for r, row in enumerate(rows)
                          if row["trouble"])  # fmt: skip
        raise CollectiveError(f"the GPUs' links cannot be detected; pass topology=...: {words}")
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
