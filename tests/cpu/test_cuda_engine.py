"""CUDA calls of a process group: NCCL's or linkweave's, and their order beside each other."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_ranks import Machine, Numbered, gpus, on_gpus, tensor
from host_gpu import HostTensor, needs_compiler
from machines import forked

from linkweave import collectives
from linkweave.collectives.calls.communicator import Communicator, get_default
from linkweave.collectives.distributed import engine
from linkweave.collectives.distributed.engine import VARIABLE, CudaEngine
from linkweave.collectives.distributed.group import Group
from linkweave.torch_backend import register
from tests.cpu.stream_stand_in import CURRENT, Stream, compute  # noqa: F401

MODEL = "NVIDIA H100"
TIMES = {"linkweave": {1024: 9.0, 65536: 20.0, 1 << 20: 90.0},
         "nccl": {1024: 12.0, 65536: 20.0, 1 << 20: 60.0, 1 << 24: 500.0}}  # fmt: skip


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"collective": kind, "size": size, "library": library, "time_us": us,
             "wrong": kind == "reduce"}
            for kind in ("allreduce", "reduce") for library, times in TIMES.items()
            for size, us in times.items()]  # fmt: skip
    monkeypatch.setattr(engine, "model", lambda: MODEL)
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"ranks": 4, "gpu": MODEL, "rows": rows}))
    monkeypatch.setenv(VARIABLE, str(path))
    return path


@pytest.mark.parametrize(
    ("asked", "nccl", "every"),
    [(None, True, False), ("nccl", True, False), ("linkweave", True, True), (None, False, True),
     ("nccl", False, True)],
)  # fmt: skip
def test_nccl_unless_asked(
    asked: str | None, nccl: bool, every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if asked:
        monkeypatch.setenv(VARIABLE, asked)
    found = CudaEngine.choose(4, nccl)
    assert found.takes("allreduce", 1024) == every
    assert found.why == ("this torch has no NCCL" if not nccl else
                         f"{VARIABLE}={asked}" if asked else f"{VARIABLE} is not set")  # fmt: skip


def test_the_faster_one_by_figures(figures: Path) -> None:
    found = CudaEngine.choose(4, True)
    taken = [n for n in (1, 1023, 1024, 5000, 65536, 1 << 19, 1 << 20, 1 << 24)
             if found.takes("allreduce", n)]  # fmt: skip
    assert taken == [1024, 5000, 65536]  # up to where both are level, and nothing unmeasured
    assert not found.takes("broadcast", 1024)  # not measured
    assert not found.takes("reduce", 1024)  # whose results were wrong
    assert found.why == f"whichever is faster by {figures}"


@pytest.mark.parametrize(("ranks", "model"), [(8, MODEL), (4, "NVIDIA A100")])
def test_figures_of_another_machine_are_left_alone(
    figures: Path, ranks: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "model", lambda: model)
    found = CudaEngine.choose(ranks, True)
    assert not found.takes("allreduce", 1024)
    assert found.why == f"{figures} is of 4 x {MODEL}, and these are {ranks} x {model}"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"ranks": 4}', '{"ranks": 4, "gpu": "", "rows": [{}]}']
)
def test_a_file_without_figures_is_refused(figures: Path, text: str) -> None:
    figures.write_text(text)
    with pytest.raises(ValueError, match='must be "nccl", "linkweave" or a file of figures'):
        CudaEngine.choose(4, True)
    figures.unlink()
    with pytest.raises(ValueError, match=r"FileNotFoundError"):
        CudaEngine.choose(4, True)


def joined(rank: int, size: int, asked: Sequence[str], path: str) -> str:
    os.environ[VARIABLE] = asked[rank]
    torch.distributed.is_nccl_available = lambda: True
    torch.distributed.init_process_group(
        "linkweave", init_method=f"file://{path}", rank=rank, world_size=size
    )
    group: Any = torch.distributed.group.WORLD
    try:
        return f"{group.engine.every}"
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("asked", "said"), [
        (("nccl", "linkweave"), [f"{VARIABLE}, or its file, differs by rank: rank {r} has {what!r}"
                                 for r, what in enumerate(("nccl", "linkweave"))]),
        (("nccl", "fast"), [f"{VARIABLE}, or its file, differs", f"{VARIABLE}='fast' must be"]),
        (("linkweave", "linkweave"), ["True"] * 2),
    ],
)  # fmt: skip
def test_ranks_of_a_group_choose_alike(asked: Any, said: list[str], tmp_path: Path) -> None:
    register()
    found = forked(2, lambda rank: joined(rank, 2, asked, f"{tmp_path}/store"))
    assert all(each.startswith(words) for each, words in zip(found, said, strict=True)), found


# ---- the order of both engines' kernels ----------------------------------------------------------
class Nccl:
    """A kernel on each of two GPUs that waits for the other one, and takes a part of its GPU."""

    def __init__(self) -> None:
        self.both = threading.Barrier(2, timeout=60)

    def enqueue(self, device: Any, stream: int) -> threading.Event:
        """Returns what is set when it has begun."""
        size, begun = (4, device.resident("float32", "sum")), threading.Event()

        def run() -> None:
            with device._room:
                device._room.wait_for(lambda: device._fits(size))
                device._running.append(size)
            begun.set()
            self.both.wait()
            with device._room:
                device._running.remove(size)
                device._room.notify_all()

        device._enqueue(stream, run)
        return begun


def wait_until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def beside_nccl(rank: int, machine: Machine, nccl: Nccl, ordered: bool, first: str) -> float:
    """Each GPU would begin with another of the two calls, if that were up to it: on rank 1 the
    stream of the first one is busy."""
    comm: Any = get_default()
    device, busy = machine(rank), threading.Event()
    comm.allreduce(x := tensor([1.0] * 40_000, stream=5))  # takes all of a GPU
    comm.synchronize()
    comm.barrier()
    streams = {"linkweave": 5, "nccl": 7}

    def ours() -> None:
        if ordered and first == "nccl":
            comm.follow(7)
        comm.allreduce(x)

    def theirs() -> None:
        if ordered and first == "linkweave":
            comm.lead(7)
        begun.append(nccl.enqueue(device, 7))

    begun: list[threading.Event] = []
    if rank == 1:
        device._enqueue(streams[first], lambda: busy.wait(60))
    for call in (ours, theirs) if first == "linkweave" else (theirs, ours):
        call()
        if rank == 0 and not ordered:  # each stream is a thread, of which the other may be ahead
            wait_until(lambda: device._running)
    comm.barrier()
    if rank == 1 and not ordered:
        assert begun[0].wait(60)
    busy.set()
    comm.synchronize()
    device.synchronise(7)
    return float(x.array[-1])


@needs_compiler
@pytest.mark.parametrize("first", ["linkweave", "nccl"])
def test_calls_of_both_engines_take_turns(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus(monkeypatch, partial(Numbered, multiprocessors=3)) as machine:
        arguments = (machine, Nccl(), True, first)
        found = collectives.spawn(beside_nccl, 2, "mesh-2", arguments, device="cuda", virtual=True,
                                  max_blocks=1000)  # fmt: skip
    assert found == [4.0] * 2


@needs_compiler
def test_without_an_order_they_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above tests something."""
    with gpus(monkeypatch, partial(Numbered, multiprocessors=3)) as machine:
        nccl = Nccl()
        try:
            with pytest.raises(collectives.CollectiveError, match="waits for"):
                collectives.spawn(
                    beside_nccl, 2, "mesh-2", (machine, nccl, False, "linkweave"), device="cuda",
                    virtual=True, timeout=3, max_blocks=1000,
                )  # fmt: skip
        finally:
            nccl.both.abort()


class Told(Communicator):
    """Writes down what a group asks of it."""

    uses_gpu = True  # type: ignore[assignment]

    def __init__(self, said: list[Any]) -> None:
        self.said = said

    def lead(self, stream: int) -> None:
        self.said.append(("lead", stream))

    def follow(self, stream: int) -> None:
        self.said.append(("follow", stream))


class NcclWork:
    """As NCCL's: whoever waits for the work itself releases the memory that its kernel uses."""

    def __init__(self, said: list[Any]) -> None:
        self.said, self.keeps = said, True

    def wait(self) -> None:
        self.keeps = False

    def get_future(self) -> Any:
        stream = CURRENT[-1].cuda_stream  # type: ignore[attr-defined]
        return SimpleNamespace(wait=lambda: self.said.append(("wait", stream)))


@pytest.mark.parametrize("captured", [False, True])
def test_a_group_orders_them(
    captured: bool,
    monkeypatch: pytest.MonkeyPatch,
    compute: Stream,  # noqa: F811
) -> None:
    """A collective of NCCL is led by our calls so far, and our next one follows it; messages are
    not. In a graph the stream that is captured waits for it."""
    said: list[Any] = []
    group: Any = Group.__new__(Group)
    torch.distributed.ProcessGroup.__init__(group, 0, 2)
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr(cuda, "device", lambda of: nullcontext())
    compute.cuda_stream = 1  # type: ignore[attr-defined]
    ends = SimpleNamespace(cuda_stream=20)
    monkeypatch.setattr(cuda, "Stream", lambda device: ends)

    def theirs(name: str) -> Any:
        def call(*_: Any) -> Any:
            said.append(name)
            return NcclWork(said)

        return call

    names = ("allreduce", "send", "allgather")
    nccl = SimpleNamespace(**{name: theirs(name) for name in names}, broadcast=lambda x: None)
    state = {"communicator": Told(said), "_others": {"cuda": nccl}, "_coalesced": None,
             "_ends": {}}  # fmt: skip
    for name, value in state.items():
        setattr(group, name, value)
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"))
    works = [group._delegate(name, x, [x]) for name in ("send", "allreduce")]
    order = [("wait", 20), ("follow", 20)]
    assert said == ["send", ("lead", 1), "allreduce", *([] if captured else order)]
    assert [work.keeps for work in works] == [True, not captured]
    said.clear()
    assert not group._delegate("allgather", x, [x]).keeps  # its work has no future
    assert said == [("lead", 1), "allgather", *order[1:]][: 2 if captured else 3]
    said.clear()
    assert group._delegate("broadcast", x, [x]).wait()  # synchronous, on the current stream
    assert said == [("lead", 1), *([] if captured else [("follow", 1)])]
    said.clear()
    monkeypatch.setattr(Told, "uses_gpu", False)  # nothing of ours, which a graph could wait for
    assert group._delegate("allreduce", x, [x]).keeps
    assert said == [("lead", 1), "allreduce", *([] if captured else order)]


SENT = multiprocessing.get_context("fork").Event()


@needs_compiler
@on_gpus(2, "a process a GPU")
def test_the_first_call_on_a_gpu_follows_too(rank: int, machine: Machine) -> None:
    """What has been enqueued before this communicator has used its GPU, but no message: it may wait
    for what its receiver does only after the call."""
    comm: Any = get_default()
    device, busy = machine(rank), threading.Event()
    device._enqueue(7, lambda: busy.wait(60))
    if rank == 0:
        device._enqueue(9, lambda: SENT.wait(60))
    assert not comm.uses_gpu
    comm.follow(7)
    comm.allreduce(x := tensor([1.0] * 9, stream=5))
    if rank == 1:
        SENT.set()
    seen: list[bool] = []
    device._enqueue(5, lambda: seen.append(busy.is_set()))
    assert comm.uses_gpu and not seen
    busy.set()
    comm.synchronize()
    device.synchronise(5)
    assert x.array[-1] == 2 and seen == [True]


@needs_compiler
@on_gpus(2, "a process a GPU")
@pytest.mark.parametrize("over", [False, True])
def test_each_stream_that_waits_waits_for_what_is_copied_back(
    rank: int, machine: Machine, over: bool
) -> None:
    """Into a tensor with gaps, by the first stream that waits; also if the call was over by then,
    whose event has been freed."""
    comm: Any = get_default()
    device, busy = machine(rank), threading.Event()
    moved: list[int] = []
    seen: list[list[int]] = []
    x = tensor([1.0] * 9, stream=5)
    work = comm.allreduce(x, async_op=True)
    if over:
        while not work.done():
            time.sleep(0.001)
        comm.synchronize()
        assert work._event is None
    copy = partial(moved.append, 1)
    work._context._later.append(lambda: device._enqueue(5, lambda: (busy.wait(60), copy())))
    work.wait()
    x.stream = 6
    work.wait()
    device._enqueue(6, lambda: seen.append([*moved]))
    assert not seen
    busy.set()
    device.synchronise(6)
    assert seen == [[1]]


@needs_compiler
@on_gpus(2, "a process a GPU")
def test_tensors_of_calls_that_are_over_are_let_go(rank: int, machine: Machine) -> None:
    comm: Any = get_default()
    left = []
    for _ in range(4):
        x = HostTensor(np.ones(1000, np.float32), rank, 5)
        left.append(weakref.ref(x))
        comm.allreduce(x, async_op=True).wait()
    del x
    comm.synchronize()
    gc.collect()
    assert [each() for each in left] == [None] * 4
