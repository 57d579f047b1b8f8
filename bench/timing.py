"""Scheduling policy, progress, and the state of the machine during a measurement."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track


def schedule(batch: bool) -> None:
    """Put the calling thread under SCHED_BATCH (no wake-up preemption) or the default policy."""
    os.sched_setscheduler(0, os.SCHED_BATCH if batch else os.SCHED_OTHER, os.sched_param(0))


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
    for name in ("linkweave", "torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "numpy", "numba",
                 "mpi4py", "impi-rt", "openmpi", "mpich"):  # fmt: skip
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
    counters = Path("/sys/class/net").glob("*/statistics/tx_bytes")
    return sum(int(path.read_text()) for path in counters if path.parts[4] != "lo")
