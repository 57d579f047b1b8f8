"""Host time of a repeated GPU call whose CUDA calls do nothing (python -m tests.cpu.host_time).

It prints the microseconds of the rank's own thread, the median of ten turns of 200 calls.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gpu_ranks import gpus, tensor
from host_gpu import HostDevice

from linkweave import collectives

CALLS, TURNS = 200, 10


def us(call: Callable[[], Any]) -> float:
    turns = []
    for _ in range(TURNS):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        turns.append((time.thread_time() - start) / CALLS * 1e6)
    return median(turns)


def counted(call: Callable[[], Any]) -> int:
    """The calls of Python functions that it makes."""
    profile = cProfile.Profile()
    profile.enable()
    call()
    profile.disable()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def host_times(rank: int, measure: Callable[[Callable[[], Any]], float] = us) -> dict[str, float]:
    """What `measure` says of repeated calls, on rank 0, whose GPU does nothing."""
    comm = collectives.get_default()
    x, out = tensor(np.ones(1000, np.float32)), tensor(np.ones(2000, np.float32))
    calls: dict[str, Callable[[], Any]] = {
        "all-reduce": lambda: comm.allreduce(x),
        "all-reduce, asynchronous": lambda: comm.allreduce(x, async_op=True).wait(),
        "all-gather": lambda: comm.allgather(x, out=out.reshape(2, 1000)),
    }
    for call in calls.values():
        for _ in range(3):
            call()
    comm.synchronize()
    comm.barrier()
    if rank:
        return {}
    for name in ("wait", "record", "launch", "copy", "free_event", "synchronise"):
        setattr(HostDevice, name, lambda *_: None)
    HostDevice.ready = lambda *_: True  # type: ignore[method-assign]
    HostDevice.make_event = lambda *_: 1  # type: ignore[method-assign]
    return {name: measure(call) for name, call in calls.items()}


def main() -> None:
    with pytest.MonkeyPatch.context() as patch, gpus(patch):
        found = collectives.spawn(host_times, 2, device="cuda:0")[0]
    sys.stdout.write("".join(f"{name}: {time:.1f} us\n" for name, time in found.items()))


if __name__ == "__main__":
    main()
