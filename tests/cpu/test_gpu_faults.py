"""What a GPU or its driver may do wrong in the middle of things, and what users may: no rank is
left waiting, nothing is given back too early or kept for ever."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_ranks import MODES, Machine, failure, gpus, plain, tensor
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


def said(call: Callable[[], Any]) -> str:
    error = failure(call)
    return f"{type(error).__name__}: {error}" if error else "no error"


class Faulty(HostDevice):
    """GPU 1 does something wrong once `fault` is set on it: the name of a method."""

    fault = ""

    def __init__(self, index: int) -> None:
        super().__init__(17, index=index, bus_id=f"0000:0{index}:00.0")

    def _maybe(self, name: str) -> None:
        if self.index == 1 and self.fault == name:
            raise RuntimeError(f"cudaErrorIllegalAddress in {name}")

    def ready(self, event: int) -> bool:
        self._maybe("ready")
        return super().ready(event)

    def resident(self, dtype: str, op: str) -> int:
        self._maybe("resident")
        return super().resident(dtype, op)

    def launch(self, *arguments: Any) -> None:
        self._maybe("launch")
        super().launch(*arguments)

    def ipc_handle(self, address: int) -> bytes:
        self._maybe("share")
        return super().ipc_handle(address)

    def free_stream(self, stream: int) -> None:
        self._maybe("free_stream")
        super().free_stream(stream)

    def allocate(self, nbytes: int) -> int:
        self._maybe("allocate")
        return super().allocate(nbytes)

    def ipc_close(self, address: int) -> None:
        super().ipc_close(address)
        self._maybe("shut")


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


def without_handles(rank: int, machine: Machine) -> list[float]:
    machine(CURRENT.index).fault = "share"
    comm = get_default()
    comm.allreduce(x := tensor([1.0] * 4))
    comm.synchronize()
    return x.array.tolist()


def test_memory_that_cannot_be_shared_goes_through_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with gpus(monkeypatch, Faulty) as machine:
        found = collectives.spawn(without_handles, 2, "mesh-2", (machine,), **PROCESSES)
    assert found == [[2.0] * 4] * 2


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


def differing(rank: int) -> list[str]:
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
    return found


def test_known_calls_that_differ_are_noticed_though_nothing_hangs(machine: Machine) -> None:
    """Both sizes have memory in common, so their chunks would pair up."""
    for found in collectives.spawn(differing, 2, "mesh-2", timeout=60, **PROCESSES):
        first = next(text for text in found if text != "no error")
        assert first.startswith("CollectiveAborted: the ranks' calls on the GPU differ; rank 0 ")
        assert "the last allreduce(50000 x float32" in first
        assert "the last allreduce(40000 x float32" in first


def under_way(rank: int) -> list[float]:
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
    return cpu[:2].tolist()


def test_new_calls_beside_asynchronous_ones_on_the_cpu(machine: Machine) -> None:
    assert collectives.spawn(under_way, 2, "mesh-2", **PROCESSES) == [[1.0, 1.0]] * 2


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


def closing_with_a_fault(rank: int, machine: Machine, fault: str) -> list[Any]:
    comm: Any = get_default()
    work = comm.allreduce(tensor([1.0] * 4), async_op=True)
    work.wait()
    comm.synchronize()
    machine.ours()[0].fault = fault
    error = failure(comm.close)
    comm.close()
    return [str(error or "no error"), comm._health.closed, len(machine.left())]


@pytest.mark.parametrize("fault", ["free_stream", "shut"])
def test_a_fault_at_the_end_keeps_nothing_else_from_being_given_back(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpus(monkeypatch, Faulty) as machine:
        start = time.monotonic()
        arguments = machine, fault
        found = collectives.spawn(
            closing_with_a_fault, 2, "mesh-2", arguments, timeout=200, **PROCESSES
        )
    assert time.monotonic() - start < 100  # nobody waits for the other one to leave
    words = f"closed after a failure (rank 1: cudaErrorIllegalAddress in {fault})"
    assert found == [["no error", True, 0], [words, True, 0]]


def leaving_early(rank: int, machine: Machine, path: Path) -> list[Any]:
    comm = get_default()
    comm.allreduce(x := tensor([1.0] * 4))
    comm.synchronize()
    hurry(comm, 1)
    if rank:
        time.sleep(1.6)
    before = said(comm.synchronize)  # the other one has closed longer ago than a wait may last
    if rank:
        path.touch()
    comm.close()
    return [before, path.exists(), len(machine.left()), x.array.tolist()]


def test_closing_waits_for_those_that_use_our_memory_and_aborts_nobody(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_LEAVING", 100.0)  # a busy machine takes long
    found = collectives.spawn(
        leaving_early, 2, "mesh-2", (machine, tmp_path / "closes"), timeout=60, **PROCESSES
    )
    assert found == [["no error", True, 0, [2.0] * 4]] * 2


def unequal(index: int) -> HostDevice:
    return plain(index, (33, 2, 33)[index])


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
def in_one_capture(rank: int, machine: Machine) -> list[tuple[str, int, int]]:
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
    return found


def test_calls_in_one_capture_keep_their_order(machine: Machine) -> None:
    """The first is on the communicator's own stream (2), the second on the caller's (1)."""
    (found, _) = collectives.spawn(in_one_capture, 2, "mesh-2", (machine,), **PROCESSES)
    launches = [i for i, (what, *_) in enumerate(found) if what == "launch"]
    assert [found[i][2] for i in launches] == [2, 1]
    between = found[launches[0] + 1 : launches[1]]
    recorded = [event for what, event, stream in between if (what, stream) == ("record", 2)]
    awaited = [event for what, event, stream in between if (what, stream) == ("wait", 1)]
    assert set(recorded) & set(awaited)


def beside_a_replay(rank: int, machine: Machine) -> list[float]:
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
    return [float(v) for v in (x.array[0], y.array[-1], out.array[-1])]


def test_replays_and_calls_use_memory_of_their_own(machine: Machine) -> None:
    found = collectives.spawn(beside_a_replay, 2, "mesh-2", (machine,), **PROCESSES)
    assert found == [[4, 6, 3]] * 2


class Full(HostDevice):
    """Has no room while it is full: for large things, or for tables."""

    full = False

    def allocate(self, nbytes: int) -> int:
        if self.full == "slots":
            raise MemoryError("out of memory")
        return super().allocate(nbytes)

    def upload(self, array: np.ndarray) -> int:
        if self.full == "tables":
            raise MemoryError("no room for tables")
        return super().upload(array)


def out_of_memory(rank: int, machine: Machine) -> list[Any]:
    """The first call lacks memory for slots on GPU 1, the other one for scratch; then there is
    some."""
    comm, device, found = get_default(), machine(rank), []
    comm.allreduce(x := tensor([1.0] * 9))  # meets the other ranks
    for call in (
        lambda: comm.broadcast(x, 1),
        lambda: comm.reduce_scatter(tensor([1.0] * 18), out=x),
    ):
        device.full = rank == 1 and "slots"  # type: ignore[attr-defined]
        found.append(said(call))
        device.full = False  # type: ignore[attr-defined]
        call()
        comm.synchronize()
        found.append(x.array.tolist())
    return found


def without_tables(rank: int, machine: Machine) -> list[Any]:
    """Of a call whose slots there are, and of one whose slots would be new."""
    comm, device, found = get_default(), machine(rank), []
    comm.allreduce(x := tensor([1.0] * 9))
    for call in (lambda: comm.allreduce(tensor([1.0] * 8)), lambda: comm.broadcast(x, 1)):
        comm.barrier()
        device.full = rank == 1 and "tables"  # type: ignore[attr-defined]
        found.append(said(call))
        device.full = False  # type: ignore[attr-defined]
        call()
        comm.synchronize()
    return [*found, x.array.tolist()]


@pytest.mark.parametrize("mode", ["a process a GPU", "a thread a GPU"])
def test_a_call_without_memory_for_tables_is_made_by_no_rank(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpus(monkeypatch, lambda index: Full(17, index=index, bus_id=f"0000:0{index}:00.0")) as on:
        for *found, values in collectives.spawn(without_tables, 2, "mesh-2", (on,), **MODES[mode]):
            assert all(re.match("OutOfMemory: .*no room for tables", words) for words in found)
            assert values == [2.0] * 9


def captured_alone(rank: int, machine: Machine) -> str:
    comm, device = get_default(), machine(rank)
    comm.allreduce(x := tensor([1.0] * 9))
    comm.synchronize()
    hurry(comm, 1)
    x.stream = 9
    if rank == 0:
        device.captured[9] = 1
    text = said(lambda: (comm.allreduce(x), comm.barrier()))
    device.captured.clear()
    return text


def test_a_rank_that_captures_alone_says_so(machine: Machine) -> None:
    found = collectives.spawn(captured_alone, 2, "mesh-2", (machine,), **PROCESSES)
    words = (
        "(this rank captures allreduce(9 x float32, sum, auto) on the GPU into a graph; all must)"
    )
    assert words in found[0], found


@pytest.mark.parametrize("mode", ["a process a GPU", "a thread a GPU"])
def test_a_call_without_memory_is_made_by_no_rank(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpus(monkeypatch, lambda index: Full(17, index=index, bus_id=f"0000:0{index}:00.0")) as on:
        for found in collectives.spawn(out_of_memory, 2, "mesh-2", (on,), **MODES[mode]):
            assert all("rank 1" in words and "no memory for" in words for words in found[::2])
            assert found[1::2] == [[2.0] * 9] * 2


def captured_by_threads(rank: int, machine: Machine, shared: bool) -> str:
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
    return text


@pytest.mark.parametrize("shared", [True, False])
def test_threads_are_captured_from_one_stream_or_not_at_all(shared: bool, machine: Machine) -> None:
    found = collectives.spawn(captured_by_threads, 2, "mesh-2", (machine, shared), **THREADS)
    wanted = "no error" if shared else "captured into a graph from one stream only"
    assert all(wanted in text for text in found), found


def per_thread(rank: int) -> str:
    return said(lambda: get_default().allreduce(tensor([1.0], stream=2)))


def test_threads_need_streams_that_are_the_same_for_all(machine: Machine) -> None:
    assert all(
        "cudaStreamPerThread is another stream on every thread" in text
        for text in collectives.spawn(per_thread, 2, "mesh-2", **THREADS)
    )


def dropped(rank: int) -> bool:
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
    return alive and second() is None


def test_tensors_are_kept_until_the_call_is_over(machine: Machine) -> None:
    assert collectives.spawn(dropped, 2, "mesh-2", **PROCESSES) == [True, True]


def test_several_gpus_in_one_process_need_launches_that_return(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(CollectiveError, match=r"CUDA_LAUNCH_BLOCKING .* use one process a GPU"):
        collectives.spawn(per_thread, 2, "mesh-2", **MODES["a thread a GPU"])


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


class Broken(Faulty):
    def resident(self, dtype: str, op: str) -> int:
        if self.index == 1:
            raise FileNotFoundError("plan/plan.cu")
        return super().resident(dtype, op)


class Nameless(Faulty):
    def identity(self) -> tuple[str, str]:
        if self.index == 1:
            raise RuntimeError("cudaErrorDeviceUninitialized")
        return super().identity()


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Broken, "no kernel for sum of float32: rank 1: plan/plan.cu"),
     (Nameless, "ranks [1]: refused its arguments")],
)  # fmt: skip
def test_whatever_goes_wrong_on_one_rank_is_told(
    kind: type[Faulty], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpus(monkeypatch, kind):
        found = collectives.spawn(first_call, 3, "mesh-3", timeout=60, **PROCESSES)
    assert all(words in text for text in (found[0], found[2]))
    assert "plan/plan.cu" in found[1] or "cudaErrorDeviceUninitialized" in found[1]


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


def many_sizes(rank: int) -> int:
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
    return len(comm._gpu.team.gpu._launched)


def test_the_watch_looks_at_what_grows_meanwhile(machine: Machine) -> None:
    assert min(collectives.spawn(many_sizes, 2, "mesh-2", **PROCESSES)) > 6
