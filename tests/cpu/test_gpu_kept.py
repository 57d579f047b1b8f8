"""What ranks on GPUs keep of calls of many sizes: so many, on GPUs made of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_ranks import Machine, on_gpus, tensor
from host_gpu import needs_compiler

from linkweave.collectives.calls import host
from linkweave.collectives.calls.communicator import get_default

pytestmark = needs_compiler
MOST = 16


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MOST", MOST)


def kept(machine: Machine) -> tuple[int, int]:
    """Pieces of memory on this process's GPUs, and bytes."""
    pieces = [piece for device in machine.ours() for piece in device.memory.values()]
    return len(pieces), sum(map(len, pieces))


@on_gpus(3)
def test_what_is_kept_of_many_sizes_is_bounded(rank: int, machine: Machine, few: None) -> None:
    """A GPU's memory has regions of two plans at most in two protocols, and tables of the calls."""
    comm: Any = get_default()
    seen = []
    for number, n in enumerate((*range(1, 100), *range(30_000, 30_100), 7, 50)):
        comm.allreduce(x := tensor(np.full(n, rank + 1)))
        comm.synchronize()
        assert (x.array == 6).all(), n
        gpu = comm._gpu
        assert max(len(gpu._known), len(gpu._plans), len(gpu.team._prepared)) <= MOST
        if number % 50 == 49:
            comm.barrier()
            seen.append(kept(machine))
            comm.barrier()
    assert len(comm._gpu.team.gpu._regions) <= 4
    pieces, nbytes = zip(*seen, strict=True)
    assert len(pieces) == 4
    assert max(pieces) - min(pieces) <= 3 * MOST + 40, pieces
    assert max(nbytes[2:]) <= 1.1 * min(nbytes[2:]), nbytes


@on_gpus(2, "threads on one GPU", "processes on one GPU")
def test_what_a_graph_launches_stays(rank: int, machine: Machine, few: None) -> None:
    comm: Any = get_default()
    device = machine.ours()[0]
    comm.allreduce(x := tensor([1.0] * 1000))
    comm.synchronize()
    comm.barrier()
    device.captured[9] = 1
    x.stream = 9
    comm.allreduce(x)
    device.synchronise(9)
    device.captured.clear()
    (call,) = (call for call in comm._gpu.team._prepared if call.captured)
    tables = comm._gpu.team._prepared[call].tables
    for n in range(1, 3 * MOST):
        comm.allreduce(tensor([1.0] * n))
    comm.synchronize()
    assert call not in {call for *_, call in comm._gpu._known.values()}
    assert comm._gpu.team._prepared[call].tables == tables
    assert all(table in device.memory for table in tables)
    x.stream = 0
    comm.allreduce(x)  # which has been forgotten meanwhile
    comm.synchronize()
    comm.barrier()
    x.stream, device.captured[9] = 9, 1
    comm.allreduce(x)
    device.synchronise(9)
    device.captured.clear()
    assert comm._gpu.team._prepared[call].tables == tables
    assert x.array[:2].tolist() == [16.0, 16.0]


@on_gpus(2, "threads on one GPU", "processes on one GPU")
def test_queues_keep_their_tables_until_they_are_over(
    rank: int, machine: Machine, few: None
) -> None:
    """A queue is under way while calls of many sizes come and go; then queues of many sizes."""
    comm: Any = get_default()
    first = comm.allreduce_queue(x := tensor([1.0] * 60), [20, 20, 20])
    for n in range(1, 3 * MOST):
        comm.allreduce(tensor([1.0] * n))
    for layer in range(3):
        first.dequeue(layer)
    first.wait()
    comm.synchronize()
    assert x.array.tolist() == [2.0] * 60
    for n in range(1, 3 * MOST):
        queue = comm.allreduce_queue(y := tensor([1.0] * 2 * n), [n, n])
        queue.dequeue(1)
        queue.wait()
        comm.synchronize()
        assert y.array.tolist() == [2.0] * 2 * n
    prepared = len(comm._gpu.team._prepared)
    assert prepared <= MOST
