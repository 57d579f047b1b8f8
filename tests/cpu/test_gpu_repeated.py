"""Calls on GPUs that are made again with the same tensors: nothing is prepared anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_ranks import MODES, Machine, gpus, on_gpus, tensor
from host_gpu import HostTensor, needs_compiler

from linkweave import collectives
from linkweave.collectives import CollectiveError, get_default
from linkweave.collectives.calls import host
from linkweave.collectives.runtime.gpu import executor
from tests.cpu.host_time import counted, host_times

N = 1000
Call = tuple[Callable[[Any, HostTensor, HostTensor], Any], Callable[[list[np.ndarray], int], Any]]


def total(given: list[np.ndarray], rank: int) -> np.ndarray:
    return np.sum(given, axis=0)


def rows(given: list[np.ndarray], rank: int) -> np.ndarray:
    """What rank `rank` gets by an all-to-all."""
    return np.concatenate([np.split(x, len(given))[rank] for x in given])


IN_PLACE: dict[str, Call] = {
    "sum": (lambda comm, x, out: comm.allreduce(x), total),
    "max": (lambda comm, x, out: comm.allreduce(x, "max"), lambda given, rank: np.max(given, 0)),
    "broadcast": (lambda comm, x, out: comm.broadcast(x, 1), lambda given, rank: given[1]),
    "reduce": (lambda comm, x, out: comm.reduce(x, root=1),
               lambda given, rank: total(given, 0) if rank == 1 else given[rank]),
    "async": (lambda comm, x, out: comm.allreduce(x, async_op=True).wait(60), total),
}  # fmt: skip
INTO: dict[str, Call] = {
    "out": (lambda comm, x, out: comm.allreduce(x, out=out), total),
    "alltoall": (lambda comm, x, out: comm.alltoall(x, out=out), rows),
    "reduce_scatter": (lambda comm, x, out: comm.reduce_scatter(x, out=out[:N]),
                       lambda given, rank: np.split(total(given, rank), len(given))[rank]),
    "allgather": (lambda comm, x, out: comm.allgather(x[:N], out=out.reshape(comm.size, N)),
                  lambda given, rank: np.concatenate([x[:N] for x in given])),
    "gather": (lambda comm, x, out: comm.gather(x[:N], 1, out=out.reshape(comm.size, N)),
               lambda given, rank: np.concatenate([x[:N] for x in given])),
    "scatter": (lambda comm, x, out: comm.scatter(x if comm.rank == 1 else None, 1, out=out[:N]),
                lambda given, rank: np.split(given[1], len(given))[rank]),
    "async out": (lambda comm, x, out: comm.allreduce(x, out=out, async_op=True).wait(60), total),
}  # fmt: skip


def made_again(rank: int, names: tuple[str, ...]) -> list[int]:
    """How often a launch's argument was made in each of four rounds."""
    comm, counts, made = get_default(), [], executor.launch_tables.launch
    x, out = tensor(np.zeros(N * comm.size)), tensor(np.zeros(N * comm.size))
    calls = {**IN_PLACE, **INTO}

    def counted(*arguments: Any) -> Any:
        counts[-1] += 1
        return made(*arguments)

    executor.launch_tables.launch = counted  # type: ignore[assignment]
    try:
        for step in range(4):
            counts.append(0)
            for name in names:
                given = [np.arange(N * comm.size, dtype=np.float32) + 7 * r + step
                         for r in range(comm.size)]  # fmt: skip
                comm.synchronize()
                comm.barrier()
                x.array[:], out.array[:] = given[rank], -1
                call, want = calls[name]
                found = call(comm, x, out)
                comm.synchronize()
                none = name in IN_PLACE or (name == "gather" and rank != 1)
                assert (found is None) == none, name
                if name in IN_PLACE or found is not None:
                    result = (x if found is None else found).array.reshape(-1)
                    np.testing.assert_array_equal(result, want(given, rank), name)
                if name in INTO:
                    np.testing.assert_array_equal(x.array, given[rank], name)
                comm.barrier()  # before buffers that peers may still read are filled
    finally:
        executor.launch_tables.launch = made
    return counts


@needs_compiler
@pytest.mark.parametrize("mode", ["processes on one GPU", "a process a GPU"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_call_made_again_prepares_nothing(mode: str, size: int, machine: Machine) -> None:
    names = (*IN_PLACE, *INTO)
    for counts in collectives.spawn(made_again, size, f"mesh-{size}", (names,), **MODES[mode]):
        assert counts[1:] == [0, 0, 0] and counts[0] >= len(names)


@needs_compiler
def test_ranks_that_are_threads_meet_at_every_call(machine: Machine) -> None:
    """Their arguments are made by the one that comes last."""
    collectives.spawn(made_again, 2, "mesh-2", ((*IN_PLACE, *INTO),), **MODES["threads on one GPU"])


@needs_compiler
def test_over_ranks_that_forward(machine: Machine) -> None:
    names = ("gather", "scatter", "alltoall")
    collectives.spawn(made_again, 4, "ring-4", (names,), **MODES["processes on one GPU"])


@needs_compiler
@on_gpus(2, "processes on one GPU")
def test_calls_that_differ_are_others(rank: int) -> None:
    """Of what was made before, one thing differs in each call."""
    comm = get_default()
    x, y, long = tensor(np.full(N, rank + 1.0)), tensor(np.full(N, 3.0)), tensor([rank + 1.0] * 9)
    comm.allreduce(x)  # 3
    comm.allreduce(x, "max")  # 3
    comm.allreduce(y)  # 6
    comm.allreduce(long)  # 3
    x.stream = 5
    comm.allreduce(x)  # 6
    comm.allreduce(x, algorithm="chain")  # 12
    comm.allreduce(x)  # 24
    comm.allreduce(x[:10])  # 48
    comm.synchronize()
    assert (x.array[0], x.array[-1], y.array[0], long.array[0]) == (48, 24, 6, 3)


def until_the_end(rank: int, told: Path) -> None:
    comm, x = get_default(), tensor(np.ones(N))
    comm.allreduce(x)
    if rank == 1:
        raise ValueError("rank 1 leaves")
    try:
        for _ in range(10_000):
            comm.allreduce(x)
            comm.synchronize()
    except CollectiveError as error:
        told.write_text(f"{type(error).__name__}: {error}")


@needs_compiler
def test_a_rank_that_has_left_ends_calls_made_again(
    machine: Machine, tmp_path: Path, patient: None
) -> None:
    told, mode = tmp_path / "told", MODES["processes on one GPU"]
    with pytest.raises(ValueError, match="rank 1 leaves"):
        collectives.spawn(until_the_end, 2, "mesh-2", (told,), timeout=60, **mode)
    assert told.read_text().startswith("CollectiveAborted: rank 1 ")


def many(rank: int) -> None:
    """More kinds of calls than are kept, again and again."""
    comm = get_default()
    kept = [tensor(np.zeros(4 * n)) for n in range(1, 41)]
    for step in range(3):
        for x in kept:
            comm.synchronize()
            comm.barrier()
            x.array[:] = rank + step
            comm.allreduce(x)
            comm.synchronize()
            assert (x.array == 2 * step + 1).all(), (step, x.array)


@needs_compiler
def test_calls_that_were_evicted_are_made_anew(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "MOST", 16)
    collectives.spawn(many, 2, "mesh-2", **MODES["processes on one GPU"])


@needs_compiler
@on_gpus(2, "processes on one GPU")
def test_who_waits_for_calls_that_differ_is_told(rank: int) -> None:
    """Calls that differ, of kinds that are known: whoever waits on the host is told."""
    comm = get_default()
    x, y = tensor(np.ones(N)), tensor(np.ones(N))
    for call in ("sum", "max"):
        comm.allreduce(x, call)
        comm.allreduce(y, call, async_op=True).wait(20)
    comm.synchronize()
    comm.barrier()
    with pytest.raises(CollectiveError, match="calls on the GPU differ"):
        comm.allreduce(y, ("sum", "max")[rank], async_op=True).wait(20)


@needs_compiler
@on_gpus(2, "processes on one GPU")
def test_new_symmetric_memory_forgets_what_was_kept(rank: int) -> None:
    """A symmetric tensor where an ordinary one was, whose calls are kept."""
    comm: Any = get_default()
    x = tensor(np.full(N, rank + 1.0))
    comm.allreduce(x)
    comm.synchronize()
    kept = len(comm._gpu._repeats)
    y = comm.symmetric_empty(N)
    assert x.array[0] == 3
    assert kept == 1 and not comm._gpu._repeats and y is not None


@needs_compiler
@on_gpus(2, "processes on one GPU")
def test_a_call_asks_after_the_oldest_one_alone(rank: int) -> None:
    """So many events rank 0 asks after while the first of 40 calls still waits for rank 1."""
    comm: Any = get_default()
    x, works, asked = tensor(np.ones(N)), [], []
    comm.allreduce(x)
    comm.synchronize()
    comm.barrier()
    ready = comm._gpu.ready
    comm._gpu.ready = lambda event: asked.append(event) or ready(event)
    if rank == 1:
        comm.barrier()
    works = [comm.allreduce(x, async_op=True) for _ in range(40)]
    found = len(asked)
    if rank == 0:
        comm.barrier()
    for work in works:
        work.wait(60)
    assert (x.array == 2.0**41).all()
    assert rank or found == 39


COUNTED = {"all-reduce": 119, "all-reduce, asynchronous": 150, "all-gather": 139}
"""Calls of Python functions of a repeated call, at 29 us, 39 us and 30 us on an EPYC where nothing
else ran (`python -m tests.cpu.host_time`): what a change of more than a tenth has to explain."""


@needs_compiler
def test_a_call_that_is_made_again_takes_few_calls_of_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with gpus(monkeypatch):
        found = collectives.spawn(host_times, 2, args=(counted,), device="cuda:0")[0]
    assert found.keys() == COUNTED.keys()
    assert all(calls <= 1.1 * COUNTED[name] for name, calls in found.items()), found
