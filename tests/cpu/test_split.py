"""Communicators of some of the ranks, beside the one that they come from."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from gpu_ranks import MODES, Machine, gpus, queues, tensor
from host_gpu import needs_compiler

from linkweave import collectives
from linkweave.collectives import CollectiveError
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.runtime.cpu.mapping import Mapping
from linkweave.topology import GpuId, Topology, load
from tests.cpu.helpers import error_of

RANKS = 5


def parts(rank: int) -> list[Any]:
    comm = get_default()
    with comm.split(rank % 2) as odd_or_even, comm.split() as all_again:
        assert odd_or_even.size == (3, 2)[rank % 2]
        x, y, z = (np.full(1000, rank, np.float32) for _ in range(3))
        works = [odd_or_even.allreduce(x, async_op=True), all_again.allreduce(y, async_op=True)]
        comm.allreduce(z)
        for work in works:
            assert work is not None
            work.wait()
        where = [c.topology.gpus for c in (odd_or_even, all_again)]
    comm.barrier()
    return [odd_or_even.rank, float(x[0]), float(y[0]), float(z[-1]), where]


def test_parts_of_the_ranks_on_the_cpu() -> None:
    found = collectives.spawn(parts, RANKS, "mesh-5")
    for rank, (context, part, whole, own, where) in enumerate(found):
        assert context == rank // 2
        assert (part, whole, own) == ((6.0, 4.0)[rank % 2], 10.0, 10.0)
        assert where == [((0, 2, 4), (1, 3))[rank % 2], (0, 1, 2, 3, 4)]


def one_of_its_own(rank: int) -> int:
    comm = get_default()
    with comm.split(rank) as alone:
        alone.allreduce(np.ones(3, np.float32))
        return alone.size


def test_a_part_of_one_rank() -> None:
    assert collectives.spawn(one_of_its_own, 3) == [1, 1, 1]


def not_neighbours(rank: int) -> str:
    comm = get_default()
    said = error_of(comm.split, rank % 2)
    comm.allreduce(x := np.ones(3, np.float32))
    with comm.split(rank // 2) as pair:
        pair.allreduce(x)
    return f"{said}: {x[0]}"


def test_ranks_that_no_link_joins_are_not_split_off() -> None:
    said = "ranks [0, 2] cannot be split from the others: no links of ring-4 join them: 8.0"
    assert collectives.spawn(not_neighbours, 4, "ring-4") == [said] * 4


def no_color(rank: int) -> str:
    with pytest.raises(CollectiveError) as caught:
        get_default().split("red")  # type: ignore[arg-type]
    return str(caught.value)


def test_a_color_is_an_integer() -> None:
    assert collectives.spawn(no_color, 1) == ["color must be an integer, not 'red'"]


def on_gpus(rank: int) -> list[list[float]]:
    """Two communicators at once, each on its stream, with more calls than one has slots."""
    comm = get_default()
    with comm.split(rank % 2) as part, comm.split() as again:
        x, y = tensor([1.0] * 40_000, stream=5), tensor([1.0] * 50_000, stream=6)
        for _ in range(3):
            part.allreduce(x)
            again.allreduce(y, op="sum")
        part.synchronize()
        again.synchronize()
    return [x.array[:2].tolist(), y.array[-2:].tolist()]


@needs_compiler
@queues
@pytest.mark.parametrize("mode", MODES)
def test_several_communicators_on_gpus_at_once(mode: str, machine: Machine) -> None:
    for rank, found in enumerate(collectives.spawn(on_gpus, RANKS, "mesh-5", **MODES[mode])):
        assert found == [[float((3, 2)[rank % 2] ** 3)] * 2, [125.0] * 2]


def on_a_named_map(rank: int) -> list[Any]:
    comm: Any = get_default()
    with comm.split(rank % 2) as part:
        part.allreduce(x := tensor([1.0] * 4))
        part.synchronize()
        return [part._gpu.planner.topology.gpus, x.array[:1].tolist()]


@needs_compiler
def test_ranks_of_parts_keep_their_numbers_on_a_map_that_names_gpus(machine: Machine) -> None:
    plain = load("dgx1-v100")
    devices = tuple(GpuId(g, f"0000:0{r}:00.0") for r, g in enumerate((5, 3, 4)))
    spec = Topology(plain.name, plain.gpus, plain.links, devices=devices)
    found = collectives.spawn(on_a_named_map, 3, spec, device="cuda")
    assert found == [[(5, 4), [2.0]], [(3,), [1.0]], [(5, 4), [2.0]]]


def again_and_again(rank: int, machine: Machine) -> list[int]:
    comm, sizes = get_default(), []
    before = sum(len(gpu.memory) for gpu in machine.ours())  # of `comm`
    comm.barrier()
    for _ in range(4):
        with comm.split() as part:
            part.allreduce(tensor([1.0] * 40_000))
            part.synchronize()
        comm.barrier()  # all have closed
        sizes.append(len(machine.ours()[0].memory) - before)
        comm.barrier()
    return sizes


@needs_compiler
@pytest.mark.parametrize("mode", ["threads on one GPU", "processes on one GPU"])
def test_closed_ones_hold_no_memory(mode: str, machine: Machine) -> None:
    for sizes in collectives.spawn(again_and_again, 2, "mesh-2", (machine,), **MODES[mode]):
        assert sizes == [0] * 4


def two_at_once(rank: int) -> float:
    with get_default().split() as a, get_default().split() as b:
        x = np.ones(3, np.float32)
        a.allreduce(x)
        b.allreduce(x)
    return float(x[0])


def lost(rank: int) -> float:
    """A part that nobody closes, or keeps."""
    x = tensor([1.0] * 4)
    get_default().split().allreduce(x)
    gc.collect()
    get_default().synchronize()
    return float(x.array[0])


def test_lost_ones_are_closed_with_the_one_that_they_come_from(machine: Machine) -> None:
    before = threading.active_count()
    collectives.spawn(lost, 2, "mesh-2", **MODES["a thread a GPU"])
    for device in machine.ours():
        device.close()
    assert threading.active_count() == before


def test_many_threads_have_address_space_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus(monkeypatch):
        found = collectives.spawn(two_at_once, 24, "mesh-24", device="cuda:0", virtual=True)
    assert found == [24.0**2] * 24


def without_memory(rank: int) -> str:
    comm = get_default()
    if rank == 1:
        Mapping.take = _fails  # type: ignore[method-assign]
    with pytest.raises(CollectiveError) as caught:
        comm.split(rank // 2 + (rank == 1))
    comm.barrier()
    return f"{caught.value} {comm._arena.mapping.held()}"


def _fails(mapping: Mapping, nbytes: int) -> tuple[int, int]:
    raise CollectiveError("no address space")


def test_a_rank_that_cannot_have_memory_is_told_to_all() -> None:
    assert collectives.spawn(without_memory, 3) == ["rank 1: no address space 1"] * 3


def in_no_common_order(rank: int) -> list[list[float]]:
    """Two threads of a rank, each with a communicator, that start in another order on each."""
    comm = get_default()
    made = [comm.split(), comm.split()]
    tensors = [tensor([1.0] * 1000, stream=7 + i) for i in range(2)]
    for c, x in zip(made, tensors, strict=True):
        c.allreduce(x)  # the first time ranks meet, and must do so in one order
        c.synchronize()
        x.array[:] = 1

    def run(i: int) -> None:
        for _ in range(5):
            made[i].allreduce(tensors[i])
        made[i].synchronize()

    threads = [threading.Thread(target=run, args=(i,)) for i in (rank % 2, 1 - rank % 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for c in made:
        c.close()
    return [x.array[:2].tolist() for x in tensors]


@needs_compiler
@pytest.mark.parametrize("mode", ["processes on one GPU", "a process a GPU"])
def test_communicators_do_not_wait_for_each_other(mode: str, machine: Machine) -> None:
    found = collectives.spawn(in_no_common_order, 2, "mesh-2", **MODES[mode])
    assert found == [[[32.0] * 2] * 2] * 2
