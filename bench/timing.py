"""Scheduling policy, progress, and the state of the machine during a measurement."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from rich.console import Console
from rich.progress import track

from linkweave.kernels.atomics import load_acquire, sched_yield, store_release

NEAR_NS = 350  # flag round trip below which two cores share a cache that is close


def schedule(batch: bool) -> None:
    """Put the calling thread under SCHED_BATCH (no wake-up preemption) or the default policy."""
    os.sched_setscheduler(0, os.SCHED_BATCH if batch else os.SCHED_OTHER, os.sched_param(0))


@njit(nogil=True, cache=True)
def ping(mine, theirs, first, base, rounds):
    """Raise the flag at `mine` `rounds` times from `base`, in turns with the peer's `theirs`."""
    for k in range(base + 1, base + rounds + 1):
        if first:
            store_release(mine, k)
        spins = 0
        while load_acquire(theirs) < k:
            spins += 1
            if spins > 1000:  # the peer may need this core
                sched_yield()
        if not first:
            store_release(mine, k)


def round_trip_ns(comm: Any, rounds: int = 2000) -> float:
    """Return a flag's round trip between the first two cores in ns; 0 with one rank or core.

    All ranks must call it. Ranks 0 and 1 are pinned to these cores meanwhile.
    """
    cores = sorted(os.sched_getaffinity(0))
    result = np.zeros(1, np.float64)
    if comm.size > 1 and len(cores) > 1:
        words = comm.empty(32, "int64")
        words[:] = 0
        addresses = np.zeros(comm.size, np.int64)
        addresses[comm.rank] = comm.offset_of(words)
        comm.allreduce(addresses)
        if comm.rank < 2:
            os.sched_setaffinity(0, {cores[comm.rank]})
            mine, theirs = (comm.address_at(int(addresses[r])) for r in (comm.rank, 1 - comm.rank))
            ping(mine, theirs, comm.rank == 0, 0, 1)
            start = time.perf_counter()
            ping(mine, theirs, comm.rank == 0, 0, rounds)
            result[0] = (time.perf_counter() - start) / rounds * 1e9
            os.sched_setaffinity(0, cores)
        comm.barrier()
        comm.allreduce(result, "max")
    return float(result[0])


def rounds_of(count: int, shown: bool) -> Iterable[int]:
    """range(count) under a progress bar; in ranks only one of them shows it."""
    console = Console(stderr=True)
    return track(range(count), "measuring", console=console, transient=True, refresh_per_second=2,
                 disable=not (shown and console.is_terminal))  # fmt: skip


def machine() -> dict[str, Any]:
    """Today's date, and CPU, cores, kernel and versions, on which figures depend."""
    model = ""
    try:
        with open("/proc/cpuinfo") as info:
            model = next((x.split(":")[1].strip() for x in info if "model name" in x), "")
    except OSError:
        pass
    versions = {}
    for name in ("torch", "triton", "numpy", "numba", "mpi4py", "impi-rt", "openmpi", "mpich"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": date.today().isoformat(),
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def sent_bytes() -> int:
    """Bytes that the network interfaces of this machine have sent, but for the loopback."""
    counters = Path("/sys/class/net").glob("*/statistics/tx_bytes")
    return sum(int(path.read_text()) for path in counters if path.parts[4] != "lo")
