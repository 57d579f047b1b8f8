"""Occupancy: how many thread blocks of a kernel each GPU holds at once, as all ranks must know."""

from __future__ import annotations

import json
from typing import Any

from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.trace import KERNELS
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.gpu.device import Device
from linkweave.collectives.runtime.gpu.executor import GpuRanks, Occupancy

_MOST_TEXT = 500  # characters of an error message that the other ranks are sent


def gather_occupancy(
    calls: HostCalls, gpu: GpuRanks, device: Device, dtype: str, op: str
) -> list[Occupancy]:
    """Compile the kernel on all ranks and gather its occupancy on their GPUs.

    If one rank has no kernel, every rank raises CollectiveError.
    """
    mine: dict[str, Any] = {}
    try:
        with calls.trace.phase("kernel"):
            found = gpu.occupancy(dtype, op)
        mine["blocks"] = [entry for entry in found if calls.rank in entry[0]]
        calls.trace.say(
            KERNELS, f"kernel plan.cu for {dtype} {op}: {device.registers(dtype, op)} "
            f"registers, {found} blocks at once on GPU {device.index}"
        )  # fmt: skip
    except Exception as error:  # of any kind: the other ranks must learn of it
        mine["error"] = f"{error}"[:_MOST_TEXT]
    rows = [json.loads(row) for row in calls.gather("kernels", json.dumps(mine).encode())]
    if errors := {r: row["error"] for r, row in enumerate(rows) if "error" in row}:
        reasons = "; ".join(f"rank {r}: {why}" for r, why in errors.items())
        raise CollectiveError(f"no kernel for {op} of {dtype}: {reasons}")
    return sorted({(tuple(ranks), blocks) for row in rows for ranks, blocks in row["blocks"]})
