"""How many thread blocks of a kernel the ranks' GPUs hold at once, which all ranks must know."""

from __future__ import annotations

import json
from typing import Any

from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.trace import KERNELS
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.gpu.device import Device
from linkweave.collectives.runtime.gpu.executor import GpuRanks, Occupancy

_TOLD = 500  # characters of an error that the others are told


def gather_occupancy(
    calls: HostCalls, gpu: GpuRanks, device: Device, dtype: str, op: str
) -> list[Occupancy]:
    """Compile the kernel on all ranks, and gather how much room there is for it. Raises
    CollectiveError on every rank where one has no kernel."""
    said: dict[str, Any] = {}
    try:
        with calls.trace.phase("kernel"):
            rooms = gpu.occupancy(dtype, op)
        said["rooms"] = [room for room in rooms if calls.rank in room[0]]
        calls.trace.say(
            KERNELS, f"kernel plan.cu for {dtype} {op}: {device.registers(dtype, op)} "
            f"registers, {rooms} blocks at once on GPU {device.index}"
        )  # fmt: skip
    except Exception as error:  # the others must hear of it, whatever it is
        said["trouble"] = f"{error}"[:_TOLD]
    rows = [json.loads(row) for row in calls.gather("kernels", json.dumps(said).encode())]
    if trouble := {r: row["trouble"] for r, row in enumerate(rows) if "trouble" in row}:
        words = "; ".join(f"rank {r}: {why}" for r, why in trouble.items())
        raise CollectiveError(f"no kernel for {op} of {dtype}: {words}")
    return sorted({(tuple(ranks), room) for row in rows for ranks, room in row["rooms"]})
