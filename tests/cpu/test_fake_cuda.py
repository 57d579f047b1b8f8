"""The calls of a process group on CUDA tensors that have no memory: none leaves its device or is
read on the host. Where this torch is a CPU build, those that copy a tensor are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from linkweave.collectives.cluster.communicator import ClusterCommunicator
from linkweave.collectives.distributed.engine import CudaEngine
from linkweave.collectives.distributed.group import Group

SIZE = 2


class Recorder:
    """A communicator that checks that all tensors are on the GPU, and does nothing."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            every = [x for each in (*arguments, *named.values())
                     for x in (each if isinstance(each, list) else [each])]  # fmt: skip
            tensors = [x for x in every if isinstance(x, torch.Tensor)]
            assert tensors and {x.device.type for x in tensors} == {"cuda"}, name
            self.made.append(name)
            done = SimpleNamespace(wait=lambda timeout: None, done=lambda: True)
            return done if named["async_op"] else None

        return call


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Rank 0 of two, whose CUDA calls all go to linkweave."""
    stream = SimpleNamespace(record_event=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
    made: Any = Group.__new__(Group)
    torch.distributed.ProcessGroup.__init__(made, 0, SIZE)
    made.communicator, made.engine = Recorder(), CudaEngine(True, "asked for")
    made._others, made._coalesced, made._messages = {}, None, []
    with FakeTensorMode():
        yield made


def on_gpu(*shape: int, turned: bool = False) -> torch.Tensor:
    x = torch.empty(shape, device="cuda")
    return x.t() if turned else x


Call = Callable[[Any], Any]
CALLS: dict[str, Call] = {
    "allreduce": lambda g: g.allreduce([on_gpu(6)]),
    "allreduce of several": lambda g: g.allreduce([on_gpu(6), on_gpu(2, 3)]),
    "broadcast": lambda g: g.broadcast([on_gpu(6)]),
    "reduce": lambda g: g.reduce([on_gpu(6)]),
    "allgather into one": lambda g: g.all_gather_single(on_gpu(2, 6), on_gpu(6)),
    "reduce_scatter from one": lambda g: g.reduce_scatter_single(on_gpu(3), on_gpu(6)),
    "reduce_scatter": lambda g: g.reduce_scatter([on_gpu(3)], [[on_gpu(3), on_gpu(3)]]),
    "alltoall": lambda g: g.all_to_all_single(on_gpu(6), on_gpu(6), [], []),
    "scatter": lambda g: g.scatter([on_gpu(3)], [[on_gpu(3), on_gpu(3)]]),
    "alltoall of unequal parts": lambda g: g.all_to_all_single(
        on_gpu(5), on_gpu(6), [2, 3], [4, 2]
    ),
}
COPIES: dict[str, Call] = {
    "allgather of unequal parts": lambda g: g.allgather([[on_gpu(6), on_gpu(2)]], [on_gpu(6)]),
    "alltoall of a list": lambda g: g.alltoall([on_gpu(3), on_gpu(2)], [on_gpu(3), on_gpu(4)]),
    "allgather": lambda g: g.allgather([[on_gpu(6), on_gpu(2, 3)]], [on_gpu(6)]),
    "gather": lambda g: g.gather([[on_gpu(6), on_gpu(2, 3)]], [on_gpu(6)]),
    "reduce_scatter to a view": lambda g: g.reduce_scatter_single(
        on_gpu(2, 3, turned=True), on_gpu(12)),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CALLS, *COPIES])
def test_no_call_leaves_the_gpu(name: str, group: Any) -> None:
    if name in COPIES and torch.version.cuda is None:
        pytest.skip("a CPU build of torch copies no tensor of a GPU")
    work = (CALLS | COPIES)[name](group)
    assert work.wait() and work.is_completed()
    assert group.communicator.made == [name.split()[0]]
    assert all(x.is_cuda for x in work.result())


def test_uneven_rows_go_to_nccl_where_figures_choose(group: Any) -> None:
    said = []
    group.engine = CudaEngine(None, "figures", {"alltoall": [(4, 0.5), (400, 0.5)]})
    group._delegate = lambda name, *arguments: said.append(name)
    group.all_to_all_single(on_gpu(5), on_gpu(6), [2, 3], [4, 2])
    group.alltoall([on_gpu(3), on_gpu(2)], [on_gpu(3), on_gpu(4)])
    assert said == ["alltoall_base", "alltoall"] and not group.communicator.made
    group.all_to_all_single(on_gpu(6), on_gpu(6), [], [])
    assert group.communicator.made == ["alltoall"]


class Nccl:
    """What NCCL's group is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def _did(self, name: str) -> Any:
        self.asked.append(name)
        return SimpleNamespace(wait=lambda timeout: True, is_completed=lambda: True)

    def send(self, tensors: list[Any], to: int, tag: int) -> Any:
        return self._did("send")

    def recv(self, tensors: list[Any], source: int, tag: int) -> Any:
        return self._did("recv")

    def _start_coalescing(self) -> None:
        self._did("start")

    def _end_coalescing(self) -> Any:
        return self._did("end")


def test_messages_that_cross_are_sent_and_received_at_once(group: Any) -> None:
    """By themselves, two ranks that first send to each other would both wait to receive."""
    group._others["cuda"] = nccl = Nccl()
    group._start_coalescing(torch.device("cuda", 0))
    assert group.send([on_gpu(6)], 1) is None and group.recv([on_gpu(6)], 1) is None
    assert not nccl.asked
    group._end_coalescing(torch.device("cuda", 0)).wait()
    assert nccl.asked == ["start", "send", "recv", "end"]
    group.send([on_gpu(6)], 1).wait(None)
    assert nccl.asked[4:] == ["send"]
    group._start_coalescing(torch.device("cuda", 0))
    group.send([on_gpu(6)], 1)
    group.recv_anysource([on_gpu(6)])
    with pytest.raises(AttributeError, match="recv_anysource"):
        group._end_coalescing(torch.device("cuda", 0))
    assert nccl.asked[5:] == ["start", "send", "end"]  # nothing stays open


def test_what_torch_asks_of_a_backend_is_answered(group: Any) -> None:
    """With the signatures of torch's own."""
    asked = {name for name in dir(c10d.Backend) if name.startswith("supports_")}
    backend = group._get_backend(torch.device("cuda", 0))
    assert {name for name in asked if getattr(backend, name) is True} == {"supports_coalescing"}
    assert not group._get_backend(torch.device("cpu")).supports_coalescing  # as gloo's
    with pytest.raises(AttributeError, match="linkweave has no options"):
        _ = backend.options
    for name in ("_start_coalescing", "_end_coalescing"):
        assert f"{name}(self: torch._C._distributed_c10d.Backend)" in (
            getattr(c10d.Backend, name).__doc__ or ""
        )


def test_a_value_that_is_read_would_be_seen(group: Any) -> None:
    """So the tests above test something."""
    with pytest.raises(DataDependentOutputException):
        on_gpu(1).item()
    with pytest.raises(AssertionError):
        group.communicator.allreduce(torch.empty(3), async_op=False)


def test_what_a_group_needs_of_nccl_is_there() -> None:
    """Where this torch has NCCL: its options, and a method of each name that is delegated."""
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    assert hasattr(c10d.ProcessGroupNCCL.Options(), "_timeout")
    names = ("allreduce", "allreduce_coalesced", "broadcast", "reduce", "_allgather_base",
             "allgather", "_reduce_scatter_base", "reduce_scatter", "alltoall_base", "alltoall",
             "gather", "scatter", "send", "recv", "recv_anysource")  # fmt: skip
    assert not [name for name in names if not hasattr(c10d.ProcessGroupNCCL, name)]


def test_options_of_others_are_refused() -> None:
    with pytest.raises(TypeError, match=r"must be ProcessGroupNCCL\.Options, not 5"):
        Group(SimpleNamespace(), 5)


def test_a_timeout_goes_to_others_and_ours_stays(group: Any) -> None:
    found: list[timedelta] = []
    group._timeout, given = timedelta(seconds=9), timedelta(seconds=1)
    group._others["cpu"] = SimpleNamespace(_set_default_timeout=found.append)
    with pytest.warns(UserWarning, match=r"own calls keep the timeout 0:00:09, .* 0:00:01 from"):
        group.set_timeout(given)
    assert found == [given] and group.timeout_of_others == given  # of NCCL's group, once made


def test_nccls_group_ends_by_itself_before_it_is_deleted(group: Any) -> None:
    """torch would abort what it still does."""
    said: list[str] = []
    group._others["cuda"] = SimpleNamespace(shutdown=lambda: said.append("shutdown"),
                                            abort=lambda: said.append("abort"))  # fmt: skip
    group.communicator = SimpleNamespace(
        close=lambda: said.append("close"), abort=lambda why: said.append("abort ours")
    )
    group.shutdown()
    assert said == ["close", "shutdown"] and not group._others  # others may wait for this rank
    said.clear()
    group._others["cuda"] = SimpleNamespace(abort=lambda: said.append("abort"))
    group.abort()
    assert said == ["abort ours", "abort", "close"]


class Cuda:
    """What a barrier asks of torch.cuda and of the communicator."""

    def __init__(self, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[Any] = []
        self.index = 0
        put = self.said.append
        stream = SimpleNamespace(
            cuda_stream=7, synchronize=lambda: put(f"stream of {self.index}"), wait_stream=put
        )
        for name, what in (
            ("is_initialized", lambda: True), ("current_stream", lambda: stream),
            ("is_current_stream_capturing", lambda: False), ("device", self.device),
            ("current_device", lambda: 0),
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, what)
        has = lambda index: index != 2  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", has, raising=False)
        group.communicator = SimpleNamespace(
            lead=lambda stream: put("ours"), barrier=lambda async_op: put("ranks")
        )
        group._ends = {torch.device("cuda:0"): "NCCL's"}

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.index = index
        yield


def barrier(**given: Any) -> Any:
    options: Any = c10d.BarrierOptions()
    for name, value in given.items():
        setattr(options, name, value)
    return options


def test_a_barrier_waits_for_the_stream(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the group's calls on that GPU, which is the one given, or else the thread's own."""
    cuda = Cuda(group, monkeypatch)
    for device in (None, torch.device("cpu"), torch.device("cuda")):
        group.barrier(barrier(device=device))
        assert cuda.said == ["NCCL's", "ours", "stream of 0", "ranks"]
        cuda.said.clear()
    group.barrier(barrier(device=torch.device("cuda:3")))
    assert cuda.said == ["ours", "stream of 3", "ranks"]
    cuda.said.clear()
    group.barrier(barrier(device=torch.device("cuda:2")))  # which this process does not use
    assert cuda.said == ["ranks"]


def test_on_several_machines_too(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(group, monkeypatch)
    several: Any = ClusterCommunicator.__new__(ClusterCommunicator)
    monkeypatch.setattr(several, "barrier", group.communicator.barrier)
    group.communicator = several
    group.barrier()
    assert cuda.said == ["NCCL's", "stream of 0", "ranks"] and group._devices == {"cpu"}
