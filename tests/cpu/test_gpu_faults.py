"""What a GPU or its driver may do wrong in the middle of things, and what users may: no rank is
left waiting, nothing is given back too early or kept for ever."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_ranks import MODES, Faulty, Machine, Numbered, failure, gpus, on_gpus, said, tensor
from host_gpu import CURRENT, HostDevice, HostTensor, needs_compiler

from linkweave import collectives
from linkweave.collectives import CollectiveError
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.gpu import memory
from tests.cpu.helpers import hurry

pytestmark = needs_compiler
PROCESSES = MODES["a process a GPU"]
THREADS = MODES["threads on one GPU"]


def with_a_fault(rank: int, fault: str, machine: Machine) -> tuple[list[str], float]:
    comm = get_default()
    comm.allreduce(tensor([1.0] * 4))
    comm.synchronize()
    comm.barrier()
    machine.ours()[0].fault = fault
    start = time.monotonic()
    pair = [tensor([1.0] * 4, "float64") for _ in range(2)]  # a list needs memory of its own
    found = [said(lambda: [comm.allreduce(pair), comm.synchronize()])]
    found.append(said(lambda: [comm.allreduce(tensor([1.0] * 4)), comm.synchronize()]))
    return found, time.monotonic() - start


@pytest.mark.parametrize("fault", ["ready", "launch", "allocate"])
def test_a_fault_of_one_gpu_ends_the_calls_of_all(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpus(monkeypatch, Faulty) as machine:
        arguments = fault, machine
        found = collectives.spawn(with_a_fault, 3, "mesh-3", arguments, timeout=200, **PROCESSES)
    first, after = found[1][0]
    assert first == f"CollectiveError: rank 1 on GPU 1: cudaErrorIllegalAddress in {fault}"
    assert after.startswith("CollectiveError: this communicator failed before (CollectiveError: ra")
    for rank in (0, 2):
        (first, after), seconds = found[rank]
        assert "rank 1 raised an exception" in (after if first == "no error" else first)
        assert seconds < 100  # of 200


def test_a_kernel_that_one_rank_lacks_is_an_error_on_all_and_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with gpus(monkeypatch, Faulty) as machine:
        found = collectives.spawn(with_a_fault, 3, "mesh-3", ("resident", machine), **PROCESSES)
    words = "CollectiveError: no kernel for sum of float64: rank 1: cudaErrorIllegalAddress in res"
    for (first, after), _ in found:
        assert first.startswith(words)
        assert after == "no error"


@on_gpus(2, "a process a GPU", make=Faulty)
def test_memory_that_cannot_be_shared_goes_through_the_host(rank: int, machine: Machine) -> None:
    machine(CURRENT.index).fault = "ipc_handle"
    comm = get_default()
    comm.allreduce(x := tensor([1.0] * 4))
    comm.synchronize()
    assert x.array.tolist() == [2.0] * 4


class Missing(Machine):
    """Rank 1's GPU cannot be used."""

    def __call__(self, index: int) -> HostDevice:
        if index == 1 and CURRENT.__dict__.get("index") == 1:
            raise CollectiveError("GPU 1 cannot be used: no memory")
        return super().__call__(index)


def first_call(rank: int) -> str:
    return said(lambda: get_default().allreduce(tensor([1.0])))


def test_a_gpu_that_cannot_be_used_is_told_to_all(machine: Machine) -> None:
    machine.__class__ = Missing
    found = collectives.spawn(first_call, 3, "mesh-3", timeout=60, **PROCESSES)
    assert all("ranks [1]: refused its arguments" in text for text in found[::2])
    assert "GPU 1 cannot be used: no memory" in found[1]


@on_gpus(2, "a process a GPU", timeout=60)
def test_known_calls_that_differ_are_noticed_though_nothing_hangs(rank: int) -> None:
    """Both sizes have memory in common, so their chunks would pair up."""
    comm = get_default()
    for n in (50_000, 40_000):
        comm.allreduce(tensor([1.0] * n), algorithm="tree")
    comm.synchronize()
    found = []
    for _ in range(3):
        n = 40_000 if rank else 50_000
        found.append(said(lambda n=n: comm.allreduce(tensor([1.0] * n), algorithm="tree")))
        time.sleep(0.1)
    found.append(said(comm.synchronize))
    first = next(text for text in found if text != "no error")
    assert first.startswith("CollectiveAborted: the ranks' calls on the GPU differ; rank 0 ")
    assert "the last allreduce(50000 x float32" in first
    assert "the last allreduce(40000 x float32" in first


@on_gpus(2, "a process a GPU")
def test_new_calls_beside_asynchronous_ones_on_the_cpu(rank: int) -> None:
    """Calls on the CPU are always under way when the GPU's next new call brings ranks together."""
    comm = get_default()
    cpu = np.ones(1000, np.float32)
    for n in range(1, 40):
        work = comm.allreduce(cpu, op="max", async_op=True)
        comm.allreduce(x := tensor([1.0] * n))
        assert work is not None
        work.wait()
        comm.synchronize()
        assert x.array.tolist() == [2.0] * n
    assert cpu[:2].tolist() == [1.0, 1.0]


def impatient(rank: int, given_up: Any) -> str:
    comm = get_default()
    comm.allreduce(x := tensor([1.0] * 4))
    comm.synchronize()
    hurry(comm, 1)
    if rank == 1:
        assert given_up.acquire(timeout=60)
        return "late"
    comm.allreduce(x)
    while (text := said(comm.synchronize)) == "no error":
        pass
    given_up.release()
    return text


def test_a_deadline_is_never_taken_for_an_abort(machine: Machine) -> None:
    given_up = get_context("fork").Semaphore(0)
    found = collectives.spawn(impatient, 2, "mesh-2", (given_up,), timeout=60, **PROCESSES)
    assert found[0].startswith("CollectiveTimeout: rank 0 waits for the data of chunk 0 on channel")


@pytest.mark.parametrize("fault", ["free_stream", "ipc_close"])
@on_gpus(2, "a process a GPU", make=Faulty, timeout=200)
def test_a_fault_at_the_end_keeps_nothing_else_from_being_given_back(
    rank: int, machine: Machine, fault: str
) -> None:
    comm: Any = get_default()
    work = comm.allreduce(tensor([1.0] * 4), async_op=True)
    work.wait()
    comm.synchronize()
    machine.ours()[0].fault = fault
    start = time.monotonic()
    error = failure(comm.close)
    comm.close()
    assert time.monotonic() - start < 100  # nobody waits for the other one to leave
    words = f"closed after a failure (rank 1: cudaErrorIllegalAddress in {fault})"
    assert str(error or "no error") == ("no error", words)[rank]
    assert comm._health.closed and not machine.left()


@on_gpus(2, "a process a GPU", timeout=60)
def test_closing_waits_for_those_that_use_our_memory_and_aborts_nobody(
    rank: int, machine: Machine, tmp_path: Path
) -> None:
    memory._LEAVING = 100.0  # a busy machine takes long
    closes = tmp_path / "closes"
    comm = get_default()
    comm.allreduce(x := tensor([1.0] * 4))
    comm.synchronize()
    hurry(comm, 1)
    if rank:
        time.sleep(1.6)
    before = said(comm.synchronize)  # the other one has closed longer ago than a wait may last
    if rank:
        closes.touch()
    comm.close()
    assert (before, closes.exists(), machine.left()) == ("no error", True, [])
    assert x.array.tolist() == [2.0] * 4


def unequal(index: int) -> HostDevice:
    return Numbered(index, (33, 2, 33)[index])


def what_is_taken(rank: int) -> set[str]:
    comm: Any = get_default()
    comm.allreduce(x := tensor([1.0] * 40_000))
    comm.synchronize()
    assert x.array.tolist() == [3.0] * 40_000
    return {call.plan.algorithm for *_, call in comm._gpu._known.values()}


def test_auto_agrees_where_gpus_have_different_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus(monkeypatch, unequal):
        found = collectives.spawn(what_is_taken, 3, "mesh-3", **PROCESSES)
    assert len({frozenset(taken) for taken in found}) == 1


# ---- streams and graphs ----------------------------------------------------------------------
@on_gpus(2, "a process a GPU")
def test_calls_in_one_capture_keep_their_order(rank: int, machine: Machine) -> None:
    """The first is on the communicator's own stream (2), the second on the caller's (1)."""
    comm, device = get_default(), machine.ours()[0]
    comm.allreduce(x := tensor([1.0] * 4))
    side = comm.allreduce(x, async_op=True)
    side.wait()
    comm.synchronize()
    stream = device.launches[-1][0]
    device.captured.update({9: 7, stream: 7})
    device.done.clear()
    y = HostTensor(x.array, x.device.id, 9)
    captured = comm.allreduce(y, async_op=True)
    comm.allreduce(y)
    assert "not done before the graph's replay" in said(captured.done)
    assert not comm._gpu._under_way or captured not in comm._gpu._under_way
    found = [(what, event, {9: 1, stream: 2}.get(s, 0)) for what, event, s in device.done]
    device.captured.clear()
    comm.synchronize()
    launches = [i for i, (what, *_) in enumerate(found) if what == "launch"]
    assert [found[i][2] for i in launches] == [2, 1]
    between = found[launches[0] + 1 : launches[1]]
    recorded = [event for what, event, stream in between if (what, stream) == ("record", 2)]
    awaited = [event for what, event, stream in between if (what, stream) == ("wait", 1)]
    assert set(recorded) & set(awaited)


@on_gpus(2, "a process a GPU")
def test_replays_and_calls_use_memory_of_their_own(rank: int, machine: Machine) -> None:
    """Rank 0's call waits for rank 1's, which is held back, while both run what is captured."""
    comm, device, held = get_default(), machine.ours()[0], threading.Event()
    x = tensor([1.0] * 300)
    y, out = tensor([rank + 1.0] * 300, stream=9), tensor([0.0] * 300, stream=9)
    rows = tensor([rank + 1.0] * 600, stream=9)
    comm.allreduce(x)
    comm.reduce_scatter(rows, out=out)
    comm.synchronize()

    def replay() -> None:
        device.captured[9] = 1
        comm.allreduce(y)
        comm.reduce_scatter(rows, out=out)
        device.synchronise(9)
        device.captured.clear()

    replay()
    (eager,), (captured,) = comm._gpu._scratch
    assert eager[0] != captured[0]
    if rank == 1:
        device._enqueue(0, lambda: held.wait(100))
    comm.allreduce(x)
    comm.barrier()
    replay()
    held.set()
    comm.synchronize()
    assert (x.array[0], y.array[-1], out.array[-1]) == (4, 6, 3)


@on_gpus(2, "a process a GPU", "a thread a GPU", make=Faulty)
def test_a_call_without_memory_is_made_by_no_rank(rank: int, machine: Machine) -> None:
    """The first call lacks memory for slots on GPU 1, the other one for scratch; then there is
    some."""
    comm, device = get_default(), machine(rank)
    device.raises = MemoryError
    comm.allreduce(x := tensor([1.0] * 9))  # meets the other ranks
    for call in (
        lambda: comm.broadcast(x, 1),
        lambda: comm.reduce_scatter(tensor([1.0] * 18), out=x),
    ):
        device.fault = "allocate"
        words = said(call)
        assert "rank 1" in words and "no memory for" in words
        device.fault = ""
        call()
        comm.synchronize()
        assert x.array.tolist() == [2.0] * 9


@on_gpus(2, "a process a GPU", "a thread a GPU", make=Faulty)
def test_a_call_without_memory_for_tables_is_made_by_no_rank(rank: int, machine: Machine) -> None:
    """Of a call whose slots there are, and of one whose slots would be new."""
    comm, device = get_default(), machine(rank)
    device.raises = MemoryError
    comm.allreduce(x := tensor([1.0] * 9))
    for call in (lambda: comm.allreduce(tensor([1.0] * 8)), lambda: comm.broadcast(x, 1)):
        comm.barrier()
        device.fault = "upload"
        words = said(call)
        assert re.match("OutOfMemory: .* in upload", words), words
        device.fault = ""
        call()
        comm.synchronize()
    assert x.array.tolist() == [2.0] * 9


@on_gpus(2, "a process a GPU")
def test_a_rank_that_captures_alone_says_so(rank: int, machine: Machine) -> None:
    comm, device = get_default(), machine(rank)
    comm.allreduce(x := tensor([1.0] * 9))
    comm.synchronize()
    hurry(comm, 1)
    x.stream = 9
    if rank == 0:
        device.captured[9] = 1
    text = said(lambda: (comm.allreduce(x), comm.barrier()))
    device.captured.clear()
    if rank == 0:
        words = "captures allreduce(9 x float32, sum, auto) on the GPU into a graph; all must)"
        assert f"(this rank {words}" in text, text


@pytest.mark.parametrize("shared", [True, False])
@on_gpus(2, "threads on one GPU")
def test_threads_are_captured_from_one_stream_or_not_at_all(
    rank: int, machine: Machine, shared: bool
) -> None:
    comm, device = get_default(), machine.ours()[0]
    comm.allreduce(x := tensor([1.0] * 4))
    comm.synchronize()
    comm.barrier()
    stream = 9 if shared else 9 + rank
    device.captured[stream] = 5
    comm.barrier()
    text = said(lambda: comm.allreduce(HostTensor(x.array, 0, stream)))
    device.synchronise(stream)
    comm.barrier()
    device.captured.clear()
    comm.barrier()
    comm.allreduce(y := tensor([1.0] * 4))  # all may go on
    comm.synchronize()
    assert y.array.tolist() == [2.0] * 4
    assert ("no error" if shared else "captured into a graph from one stream only") in text


@on_gpus(2, "threads on one GPU")
def test_threads_need_streams_that_are_the_same_for_all(rank: int) -> None:
    text = said(lambda: get_default().allreduce(tensor([1.0], stream=2)))
    assert "cudaStreamPerThread is another stream on every thread" in text


@on_gpus(2, "a process a GPU")
def test_tensors_are_kept_until_the_call_is_over(rank: int) -> None:
    """Tensors of a call that is under way are kept until it is over."""
    comm: Any = get_default()
    comm.allreduce([HostTensor(np.ones(4, np.float32), CURRENT.index) for _ in range(2)])
    comm.synchronize()
    device = comm._gpu.device
    stream = comm._gpu._side
    event = threading.Event()
    device._enqueue(stream, event.wait)
    pair = [HostTensor(np.ones(4, np.float32), CURRENT.index) for _ in range(2)]
    second = weakref.ref(pair[1])
    comm.allreduce(pair, async_op=True)
    del pair
    gc.collect()
    alive = second() is not None
    event.set()
    comm.synchronize()
    comm.allreduce(tensor([1.0]))  # lets go of what is over
    comm.synchronize()
    gc.collect()
    assert alive and second() is None


def test_several_gpus_in_one_process_need_launches_that_return(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(CollectiveError, match=r"CUDA_LAUNCH_BLOCKING .* use one process a GPU"):
        collectives.spawn(print, 2, "mesh-2", **MODES["a thread a GPU"])


def interrupted(rank: int) -> str:
    comm = get_default()
    comm.allreduce(x := tensor([1.0] * 4))
    comm.synchronize()
    if rank == 0:
        raise KeyboardInterrupt
    return said(lambda: [comm.allreduce(x), comm.synchronize()])


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupted_rank_stops_all(mode: str, machine: Machine) -> None:
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        collectives.spawn(interrupted, 2, "mesh-2", timeout=200, **MODES[mode])
    assert time.monotonic() - start < 100


@pytest.mark.parametrize(
    ("fault", "words"),
    [("resident", "no kernel for sum of float32: rank 1: cudaErrorIllegalAddress in resident"),
     ("identity", "ranks [1]: refused its arguments")],
)  # fmt: skip
@pytest.mark.parametrize("machine", [Faulty], indirect=True)
def test_whatever_goes_wrong_on_one_rank_is_told(
    fault: str, words: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Faulty, "fault", fault)
    monkeypatch.setattr(Faulty, "raises", OSError if fault == "resident" else RuntimeError)
    found = collectives.spawn(first_call, 3, "mesh-3", timeout=60, **PROCESSES)
    assert all(words in text for text in (found[0], found[2]))
    assert f"cudaErrorIllegalAddress in {fault}" in found[1]


def test_checksums_of_calls_wrap_with_their_number() -> None:
    first, second = Arena.local(2)
    for number in (1, 2, 3, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**33):
        first.log_call(number, number % 1000)
        assert first.differing() is None and second.differing() is None
        second.log_call(number, number % 1000)
    first.log_call(2**31 + 4, 1)
    second.log_call(2**31 + 4, 2)
    assert first.differing() == 1 and second.differing() == 0


def test_ranks_far_apart_can_still_be_compared() -> None:
    first, second = Arena.local(2)
    for number in range(1, 1001):
        first.log_call(number, number % 7)
    for number in range(1, 601):
        second.log_call(number, number % 7 + (number >= 500))
    assert first.differing() == 1
    second.log_call(600, 600 % 7)
    second.log_call(512, 512 % 7)
    assert first.differing() is None


@on_gpus(2, "a process a GPU")
def test_the_watch_looks_at_what_grows_meanwhile(rank: int) -> None:
    """The watch looks while calls of new kinds are made."""
    comm: Any = get_default()
    stop = threading.Event()

    def look() -> int:
        looks = 0
        while not stop.is_set():
            comm._gpu.team.gpu.waiting()
            list(comm._gpu.team.gpu.describe_waits())
            looks += 1
        return looks

    comm.allreduce(tensor([1.0]))
    watcher = threading.Thread(target=look)
    watcher.start()
    for algorithm in ("tree", "chain", "ring", "double_tree", "one_shot", "two_shot"):
        for n in (3, 40_000):
            comm.allreduce(tensor([1.0] * n), algorithm=algorithm)
    comm.synchronize()
    stop.set()
    watcher.join()
    assert len(comm._gpu.team.gpu._launched) > 6
