"""`Communicator.empty` on GPUs made of threads: tensors that other ranks' GPUs write."""

from __future__ import annotations

import gc
import re
from typing import Any

import numpy as np
import pytest
import torch
from gpu_ranks import MODES, Choosy, Machine, Numbered, failure, gpus, on_gpus, tensor
from host_gpu import needs_compiler

from linkweave import collectives
from linkweave.bench.gpu.api import exact as values
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.runtime.tensors import tensor_over
from linkweave.topology import load

pytestmark = needs_compiler

LARGE = 100_003  # elements: chunks that pass plain slots
CALLS = [
    ("ring", LARGE), ("overlapped_double_tree", LARGE), ("two_shot", LARGE), ("one_shot", 331),
    ("tree", 1), ("tree", 0),
]  # fmt: skip


def pushed(comm: Any) -> list[bool]:
    """Of each kind of call that was launched whether results are written into buffers."""
    return [p.direct for p in comm._gpu.team._prepared.values()]


def all_reduces(
    rank: int, machine: Machine, calls: list[tuple[str, int]], threads: bool
) -> list[Any]:
    comm = get_default()
    whole = comm.symmetric_empty((2, LARGE), device="cuda")
    assert whole.shape == (2, LARGE) and whole.dtype == np.float32
    found = []
    for row, (algorithm, n) in zip((0, 1) * 4, calls, strict=False):
        x, want = whole[row][:n], np.sum([values(r, n) for r in range(comm.size)], axis=0)
        x.array[:] = values(rank, n)
        comm.allreduce(x, algorithm=algorithm)
        comm.synchronize()
        assert (x.array == want).all(), (algorithm, n)
        x.array[:] = -1
        comm.allreduce(given := tensor(values(rank, n)), algorithm=algorithm, out=x)
        comm.allreduce(ordinary := tensor(values(rank, n)), algorithm=algorithm)
        comm.synchronize()
        for result in (x, ordinary):
            assert (result.array == want).all(), (algorithm, n)
        assert (given.array == values(rank, n)).all()
        found.append(pushed(comm))
    whole.array[:] = values(rank, LARGE)
    layers = [1000, LARGE - 1000]
    queue = comm.allreduce_queue(whole[0], layers)
    queue.dequeue(0)
    queue.wait()
    comm.synchronize()
    found.append(pushed(comm))
    del x, whole, queue
    comm.close()
    gc.collect()
    return [found, [] if threads else machine.left()]


@pytest.mark.parametrize("mode", MODES)
def test_results_are_written_where_they_belong(mode: str, machine: Machine) -> None:
    arguments = (machine, CALLS, "thread" in mode)
    for found, left in collectives.spawn(all_reduces, 3, "mesh-3", arguments, **MODES[mode]):
        last = found[-1]
        if mode == "threads on one GPU":  # one launch: whatever is passed
            assert sum(last) == 4
        else:  # the tensors of `empty`, but not the ordinary ones
            assert sum(last) == 4 and len(last) > 8
        assert not left


DGX1 = load("dgx1-v100")


class Linked(Choosy):
    """A GPU of a DGX-1: reaches those at the other ends of its NVLinks only."""

    def reach(self, peer: int) -> bool:
        return (self.index, peer) in DGX1.by_ends

    sees = reach


@pytest.mark.parametrize("mode", ["a process a GPU", "a thread a GPU"])
def test_over_detours(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank needs the memory of one that it has no link to."""
    with gpus(monkeypatch, lambda index: Linked(index, 33)) as machine:
        calls = [("ccube_dgx1", LARGE), ("tree", LARGE)]
        arguments = (machine, calls, "thread" in mode)
        found = collectives.spawn(
            all_reduces, 8, "dgx1-v100", arguments, peer_access="require", timeout=60, **MODES[mode]
        )
        for pushing, _ in found:
            assert sum(pushing[-1]) == 3


@on_gpus(2, "processes on one GPU", "a thread a GPU")
def test_parts_of_a_tensor_go_by_one_agreement(rank: int, machine: Machine) -> None:
    """One all-reduce of many parts of a tensor; then other parts on one rank than on the other."""
    comm: Any = get_default()
    x, n = comm.symmetric_empty(10 * LARGE, device="cuda"), LARGE
    x.array[:] = 1
    for i in range(10):
        comm.allreduce(x[i * n : (i + 1) * n], algorithm="tree")
    comm.synchronize()
    assert (x.array == comm.size).all()
    made = [len(comm._gpu.team._prepared), len(comm._gpu._known)]
    error = failure(lambda: comm.allreduce(x[rank * n :][:n], algorithm="tree"))
    error = error or failure(comm.synchronize)
    while error is None:  # known to both, so only noticed
        error = failure(comm.synchronize)
    words = rf"calls on the GPU differ|different bytes of shared memory: rank 0: 0, rank 1: {4 * n}"
    assert re.search(words, str(error)), error
    assert made == [1, 1]


@on_gpus(2, "processes on one GPU")
def test_a_tensor_may_outlive_the_communicator(rank: int, machine: Machine) -> None:
    comm = get_default()
    x = comm.symmetric_empty(LARGE, device="cuda")
    short = comm.symmetric_empty(7, "int8", device="cuda:0")
    x.array[:] = rank
    comm.allreduce(x)
    del short
    comm.close()
    left = [len(machine.left())]
    assert (x.array == 1).all()
    del x
    gc.collect()
    assert [*left, len(machine.left())] == [1, 0]


@on_gpus(2, "processes on one GPU", "a thread a GPU")
def test_what_is_refused_leaves_the_ranks_in_step(rank: int) -> None:
    comm = get_default()
    x = comm.symmetric_empty(LARGE, device="cuda")
    calls = [
        lambda: comm.symmetric_empty(10 + rank, device="cuda"),
        lambda: comm.symmetric_empty(5 if rank else -1, device="cuda"),
        lambda: comm.symmetric_empty(3, "float32" if rank else "complex64"),
        lambda: comm.symmetric_empty(3, device="cuda" if rank else "gpu"),
        lambda: comm.symmetric_empty(3, device="cuda" if rank else "cuda:5"),
        lambda: comm.allreduce(x if rank else tensor(values(0, LARGE))),
        lambda: comm.allreduce(x[rank:][: LARGE - 1]),
    ]
    said = [str(failure(call)) for call in calls]
    x.array[:] = rank
    comm.allreduce(x)
    comm.synchronize()
    assert (x.array == 1).all()
    assert said[0] == (
        "the ranks ask for tensors of different sizes: 40, 44 bytes, by rank; they must agree"
    )
    for words, mine in zip(said[1:5], (
        "a shape is made of integers >= 0, not -1", "unsupported dtype complex64; choose",
        "unknown device 'gpu'; choose from cpu, cuda, cuda:N",
        "rank 0 runs on GPU 0, not on GPU 5",
    ), strict=True):  # fmt: skip
        assert (mine if rank == 0 else "refused its arguments") in words
    assert "ranks [1]: allreduce(100003 x float32, sum" in said[5]
    assert "at 0 in shared memory 0 on the GPU" in said[5]
    assert "at 4 in shared memory 0 on the GPU" in said[6]


class Full(Numbered):
    """GPU 1 has no room for a tensor."""

    def allocate(self, nbytes: int) -> int:
        if self.index == 1 and nbytes >= 1 << 26:
            raise MemoryError("out of memory")
        return super().allocate(nbytes)


def without_room(rank: int) -> list[str]:
    comm = get_default()
    said = str(failure(lambda: comm.symmetric_empty(1 << 26, "uint8")))
    x = comm.symmetric_empty(LARGE, device="cuda")
    x.array[:] = 1
    comm.allreduce(x, algorithm="tree")
    comm.synchronize()
    return [said, *pushed(comm), bool((x.array == 2).all())]


@pytest.mark.parametrize("mode", ["a process a GPU", "a thread a GPU"])
def test_no_room_on_one_gpu_is_told_to_all(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus(monkeypatch, Full):
        for said, *after in collectives.spawn(without_room, 2, "mesh-2", **MODES[mode]):
            assert said.startswith("rank 1: no memory for 67108864 bytes on GPU 1: ")
            assert "rank 1" in said and "out of memory" in said
            assert after == [True, True]
        gc.collect()


@on_gpus(2, "a process a GPU", make=Choosy)
def test_memory_that_others_do_not_see_is_like_any_other(rank: int) -> None:
    comm = get_default()
    x = comm.symmetric_empty(LARGE, device="cuda")
    x.array[:] = 1
    comm.allreduce(x, algorithm="tree")
    comm.synchronize()
    assert [*pushed(comm), bool((x.array == 2).all())] == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_torch_tensors_are_made_by_dlpack(dtype: torch.dtype) -> None:
    raw = np.zeros(6 * dtype.itemsize, np.uint8)
    x = tensor_over(raw, (2, 3), str(dtype).removeprefix("torch."), dtype)
    assert isinstance(x, torch.Tensor) and x.dtype == dtype and tuple(x.shape) == (2, 3)
    assert x.data_ptr() == raw.ctypes.data
    none = tensor_over(raw[:0], (0, 3), "float32", torch.float32)
    assert tuple(none.shape) == (0, 3)
