"""A GPU whose context dies: every later CUDA call of the process on that GPU fails."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from gpu_ranks import MODES, Machine, on_gpus, said, tensor
from host_gpu import CURRENT, HostDevice, needs_compiler

from linkweave import collectives
from linkweave.collectives.calls.communicator import get_default

pytestmark = needs_compiler
FAULT = "cudaErrorIllegalAddress: an illegal memory access"


def ready(machine: Machine) -> tuple[Any, Any, HostDevice]:
    """A communicator that has made a call, a tensor, and the GPU of this rank."""
    comm = get_default()
    comm.allreduce(x := tensor([1.0] * 4), async_op=True).wait()  # type: ignore[union-attr]
    comm.synchronize()
    comm.barrier()
    return comm, x, machine(CURRENT.index)


@pytest.mark.parametrize("when", ["before a call", "in a call"])
@on_gpus(3, timeout=200)
def test_the_first_error_is_named_and_closing_hides_nothing(
    rank: int, machine: Machine, when: str, mode: str
) -> None:
    comm, x, device = ready(machine)
    start = time.monotonic()
    if rank == 1:
        if when == "before a call":
            device.die(FAULT)
        else:  # in a kernel that the call waits for
            device._enqueue(0, lambda: device.die(FAULT))
    found = [said(lambda: [comm.allreduce(x), comm.synchronize()]),
             said(lambda: [comm.allreduce(x), comm.synchronize()]), said(comm.close)]  # fmt: skip
    assert time.monotonic() - start < 100  # of 200
    first, then, closing = found
    gpu = int(mode.startswith("a "))  # where rank 1 runs
    named = re.fullmatch(rf"CollectiveError: (rank \d on )?GPU {gpu}: {FAULT}", first)
    if rank == 1 and mode != "threads on one GPU":
        assert named, first
    told = then if first == "no error" else first
    assert named or re.search(r"rank \d raised an exception", told), told
    assert first == "no error" or then.startswith("CollectiveError: this communicator failed b")
    assert closing == "no error"


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "wait": lambda comm, x: comm._work.wait(),
    "dequeue": lambda comm, x: comm._queue.dequeue(1),
    "symmetric_empty": lambda comm, x: comm.symmetric_empty(4),
    "split": lambda comm, x: comm.split().allreduce(x),
    "close": lambda comm, x: comm.close(),
}


def dies_before(rank: int, machine: Machine, call: str) -> list[str]:
    comm, x, device = ready(machine)
    comm._work = comm.allreduce(x, async_op=True)
    comm._queue = comm.allreduce_queue(x, [2, 2])
    comm.synchronize()
    comm.barrier()
    if rank == 1:
        device.die(FAULT)
    return [said(lambda: CALLS[call](comm, x)), said(comm.close)]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", ["a process a GPU", "threads on one GPU"])
def test_whoever_finds_it_dead_says_which_one(mode: str, call: str, machine: Machine) -> None:
    start = time.monotonic()
    arguments = machine, call
    found = collectives.spawn(dies_before, 2, "mesh-2", arguments, timeout=200, **MODES[mode])
    assert time.monotonic() - start < 100
    named = rf"GPU \d(: | cannot be used: ){FAULT}"
    assert any(re.search(named, text) for texts in found for text in texts), found
    for first, closing in found:
        assert first.startswith("Collective") or first == "no error"
        assert closing == "no error" or first == "no error" or call == "split", closing
