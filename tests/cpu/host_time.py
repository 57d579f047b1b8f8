"""Host time of a repeated GPU call whose CUDA calls do nothing (python -m tests.cpu.host_time).

It prints the microseconds of the rank's own thread, the median of ten turns of 200 calls.
"""

from __future__ import annotations

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


def host_times(rank: int) -> dict[str, float]:
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
    found = {name: us(call) for name, call in calls.items()}
    sys.stdout.write("".join(f"{name}: {time:.1f} us\n" for name, time in found.items()))
    sys.stdout.flush()
    return found


def main() -> None:
    with pytest.MonkeyPatch.context() as patch, gpus(patch):
        collectives.spawn(host_times, 2, device="cuda:0")


if __name__ == "__main__":
    main()
