"""Communicators of some of the ranks, beside the one that they come from."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from gpu_ranks import MODES, Machine, on_gpus, queues, tensor
from host_gpu import needs_compiler
from on_ranks import on_ranks

from linkweave import collectives
from linkweave.collectives import CollectiveError
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.runtime.cpu.mapping import Mapping
from linkweave.topology import GpuId, Topology, load
from tests.cpu.helpers import error_of

RANKS = 5


@on_ranks(RANKS, topology="mesh-5")
def test_parts_of_the_ranks_on_the_cpu(rank: int) -> None:
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
    assert odd_or_even.rank == rank // 2
    assert (x[0], y[0], z[-1]) == ((6, 4)[rank % 2], 10, 10)
    assert where == [((0, 2, 4), (1, 3))[rank % 2], (0, 1, 2, 3, 4)]


@on_ranks(3)
def test_a_part_of_one_rank(rank: int) -> None:
    comm = get_default()
    with comm.split(rank) as alone:
        alone.allreduce(np.ones(3, np.float32))
        assert alone.size == 1


@on_ranks(4, topology="ring-4")
def test_ranks_that_no_link_joins_are_not_split_off(rank: int) -> None:
    comm = get_default()
    said = error_of(comm.split, rank % 2)
    comm.allreduce(x := np.ones(3, np.float32))
    with comm.split(rank // 2) as pair:
        pair.allreduce(x)
    assert said == "ranks [0, 2] cannot be split from the others: no links of ring-4 join them"
    assert x[0] == 8


@on_ranks(4, topology=load("2 x mesh-2", gpu="a100"))
def test_parts_of_a_cluster_of_known_models(rank: int) -> None:
    """Its GPUs have no names by which they could be found."""
    with get_default().split(rank % 2) as pair:
        assert pair.topology.gpus == (rank % 2, 2 + rank % 2)


@on_ranks(1)
def test_a_color_is_an_integer(rank: int) -> None:
    with pytest.raises(CollectiveError) as caught:
        get_default().split("red")  # type: ignore[arg-type]
    assert str(caught.value) == "color must be an integer, not 'red'"


@needs_compiler
@queues
@on_gpus(RANKS, topology="mesh-5")
def test_several_communicators_on_gpus_at_once(rank: int) -> None:
    """Two communicators at once, each on its stream, with more calls than one has slots."""
    comm = get_default()
    with comm.split(rank % 2) as part, comm.split() as again:
        x, y = tensor([1.0] * 40_000, stream=5), tensor([1.0] * 50_000, stream=6)
        for _ in range(3):
            part.allreduce(x)
            again.allreduce(y, op="sum")
        part.synchronize()
        again.synchronize()
    found = [x.array[:2].tolist(), y.array[-2:].tolist()]
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


@needs_compiler
@on_gpus(2, "threads on one GPU", "processes on one GPU")
def test_closed_ones_hold_no_memory(rank: int, machine: Machine) -> None:
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
    assert sizes == [0] * 4


@on_gpus(24, "threads on one GPU")
def test_many_threads_have_address_space_for_several(rank: int) -> None:
    with get_default().split() as a, get_default().split() as b:
        x = np.ones(3, np.float32)
        a.allreduce(x)
        b.allreduce(x)
    assert x[0] == 24**2


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


@on_ranks(3)
def test_a_rank_that_cannot_have_memory_is_told_to_all(rank: int) -> None:
    comm = get_default()
    if rank == 1:
        Mapping.take = _fails  # type: ignore[method-assign]
    with pytest.raises(CollectiveError) as caught:
        comm.split(rank // 2 + (rank == 1))
    comm.barrier()
    assert str(caught.value) == "rank 1: no address space" and comm._arena.mapping.held() == 1


def _fails(mapping: Mapping, nbytes: int) -> tuple[int, int]:
    raise CollectiveError("no address space")


@needs_compiler
@on_gpus(2, "processes on one GPU", "a process a GPU")
def test_communicators_do_not_wait_for_each_other(rank: int) -> None:
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
    assert [x.array[:2].tolist() for x in tensors] == [[32.0] * 2] * 2
