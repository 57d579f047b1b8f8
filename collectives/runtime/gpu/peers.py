"""GPUs of several processes: who they are, and which map they plan on."""

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
"""What every rank says of a thing, by rank (`HostCalls.gather`)."""

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


def advice() -> str:
    """What `linkweave doctor` finds amiss, a line each."""
    return "".join(f"\n{check}" for check in examine() if check.state != "ok")
