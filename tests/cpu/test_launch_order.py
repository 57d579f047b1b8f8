"""Several communicators on the same GPUs: their launches run in one order, or fit side by side."""

from __future__ import annotations

import re
import threading
import time
from functools import partial
from typing import Any

import pytest
from gpu_ranks import MODES, Machine, Numbered, failure, gpus, on_gpus, tensor
from host_gpu import HostDevice, needs_compiler

from linkweave import collectives
from linkweave.collectives import CollectiveError, CollectiveTimeout
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.runtime.gpu.team import Launch, LaunchOrder
from tests.cpu.helpers import hurry

pytestmark = needs_compiler
SMALL = partial(Numbered, multiprocessors=3)  # one launch takes all of it


def two_lanes(n: int = 40_000) -> tuple[list[Any], list[Any]]:
    """Two lanes, and a tensor for each on a stream of its own; both have made the call once."""
    comm = get_default()
    lanes, tensors = comm.lanes(2), [tensor([1.0] * n, stream=s) for s in (5, 6)]
    for lane, x in zip(lanes, tensors, strict=True):
        lane.allreduce(x)
        lane.synchronize()
    comm.barrier()
    return lanes, tensors


@pytest.mark.parametrize(
    ("machine", "fits", "n", "max_blocks"),
    [(SMALL, False, 40_000, 1000), (Numbered, True, 40_000, 8), (Numbered, True, 256, None)],
    indirect=["machine"],
)
@on_gpus(2, "a thread a GPU", "a process a GPU", params=["max_blocks"], timeout=60)
def test_launches_wait_for_each_other_unless_they_fit_side_by_side(
    rank: int, machine: Machine, fits: bool, n: int
) -> None:
    """Rank 0's first stream is busy; its second one is not, and rank 1's are not either. Without
    the wait each of the two would get one of the GPUs, and wait for the other one. They fit because
    they are limited, or because short messages take few thread blocks."""
    (first, second), (x, y) = two_lanes(n)
    busy = threading.Event()
    if rank == 0:
        machine(0)._enqueue(5, lambda: busy.wait(100))
    first.allreduce(x)
    second.allreduce(y)
    if fits:
        second.synchronize()
        assert not first._gpu.ready(first._gpu._done)
    get_default().barrier()
    time.sleep(0.1)
    busy.set()
    first.synchronize()
    second.synchronize()
    assert x.array[-1] == y.array[-1] == 4


class Interrupted(Numbered):
    """Once `slow` is set, GPU 0 waits after a launch for that of another thread."""

    slow = False
    one_queue = True

    def launch(self, *arguments: Any) -> None:
        super().launch(*arguments)
        if self.slow:
            self.slow = False
            before, deadline = len(self.launches), time.monotonic() + 0.3
            while len(self.launches) == before and time.monotonic() < deadline:
                time.sleep(0.01)


@on_gpus(2, "a thread a GPU", make=Interrupted, timeout=60, max_blocks=4)
def test_a_call_is_enqueued_on_all_gpus_before_the_next_one(rank: int, machine: Machine) -> None:
    """Otherwise two queues hold the two calls in opposite orders."""
    lanes, tensors = two_lanes()
    machine(0).slow = True  # type: ignore[attr-defined]
    get_default().barrier()
    other = threading.Thread(target=lanes[1].allreduce, args=(tensors[1],))
    other.start()
    lanes[0].allreduce(tensors[0])
    other.join()
    for lane in lanes:
        lane.synchronize()
    assert [x.array[-1] for x in tensors] == [4, 4]
    get_default().barrier()
    orders = [[stream for stream, _ in machine(i).launches[2:]] for i in (0, 1)]
    assert orders[0] == orders[1] and sorted(orders[0]) == [5, 6]


def in_opposite_orders(rank: int) -> CollectiveError | None:
    lanes, tensors = two_lanes()
    for lane in lanes:
        hurry(lane, 1)
    for i in (rank, 1 - rank):
        lanes[i].allreduce(tensors[i])
    return failure(lambda: [lane.synchronize() for lane in lanes])


def test_processes_with_opposite_orders_run_into_their_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one that gives up makes room, so the others may still complete."""
    with gpus(monkeypatch, SMALL):
        found = collectives.spawn(
            in_opposite_orders, 2, "mesh-2", timeout=60, max_blocks=1000, **MODES["a process a GPU"]
        )
    late = [error for error in found if isinstance(error, CollectiveTimeout)]
    assert late
    for error in late:
        assert re.match(r"rank \d waits for .* from rank \d for 1 s; rank \d ", f"{error}")


class Recorder(HostDevice):
    """Says what has finished."""

    finished: tuple[int, ...] = ()

    def ready(self, event: int) -> bool:
        return event in self.finished


def test_which_launches_fit() -> None:
    """The thread blocks of all together, by the largest kernel; each communicator's most blocks."""
    device, order = Recorder(), LaunchOrder()
    events = [device.make_event() for _ in range(3)]

    def enqueue(which: int, blocks: int, resident: int) -> set[int]:
        """The launches that this one waits for."""
        device.done.clear()
        order.enqueue([Launch(device, 7, events[which], blocks, resident)], lambda: None)
        assert device.done[-1] == ("record", events[which], 7)
        return {events.index(event) for what, event, _ in device.done if what == "wait"}

    assert enqueue(0, 32, 32) == set()
    assert enqueue(0, 8, 32) == set()  # in its communicator's order
    assert enqueue(1, 8, 32) == {0}  # the one with 32 blocks may still be running
    device.finished = (events[0],)
    assert enqueue(1, 24, 32) == set()
    device.finished = ()
    assert enqueue(0, 8, 32) == set()
    assert enqueue(2, 1, 64) == {0, 1}
    device.finished = (events[0], events[2])
    assert enqueue(2, 9, 64) == {1}  # 33 blocks, of a kernel of which the GPU holds 32
    device.finished = ()
    assert enqueue(2, 8, 64) == set()
    assert enqueue(1, 24, 32) == {2}  # the one with 9 may still be running
    order.forget(device, events[1])
    assert enqueue(2, 8, 64) == set()
    device.close()
