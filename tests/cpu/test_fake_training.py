"""A step of training on tensors without memory, from its gradients on: nothing leaves their device,
and the host reads nothing but what is said here.

Where this torch is a CPU build, they are fake CPU tensors, for which the kernels of GPUs are run;
with a CUDA build they are on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from linkweave import DataParallel, GTopK
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.units import Unit
from linkweave.collectives.training import data_parallel
from linkweave.collectives.training.admission import triton_trouble
from linkweave.collectives.training.embedding import exchange as rows_exchange
from linkweave.collectives.training.embedding.exchange import RowExchange
from linkweave.collectives.training.embedding.optimizer import Embeddings, RowOptimizer
from linkweave.collectives.training.embedding.sharded import ShardedEmbedding
from linkweave.collectives.training.exchange import Dense, Exchange
from linkweave.collectives.training.gradient_buffers import GradientBuffers
from linkweave.collectives.training.gtopk.exchange import SparseExchange
from linkweave.collectives.training.gtopk.hook import GTopKState
from linkweave.collectives.training.lanes import StreamLanes
from linkweave.collectives.training.program import Op, Program, Span
from linkweave.collectives.training.update import LossScale
from linkweave.kernels.embedding import gpu as rows_gpu
from linkweave.kernels.embedding import steps as rows
from linkweave.kernels.gtopk import gpu, steps
from tests.cpu.fake_ranks import FakeTransport
from tests.cpu.stream_stand_in import CURRENT, Stream, compute  # noqa: F401

DEVICE = "cuda" if torch.version.cuda else "cpu"
SIZE = 4


class Transport(FakeTransport):
    """A rank of four that checks where tensors are."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, SIZE)
        self.made: list[str] = []

    def told(self, name: str, x: torch.Tensor) -> None:
        assert x.device.type == DEVICE and hasattr(x, "fake_mode")
        self.made.append(name)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(steps, "_kernels", lambda device: gpu)
    with FakeTensorMode():
        yield


class Reads:
    """Counts what the host reads, which is 1 everywhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(FakeTensor, "tolist", self._read())

    def _read(self) -> Callable[[torch.Tensor], list[float]]:
        def read(x: torch.Tensor) -> list[float]:
            self.count += 1
            return [1.0] * x.numel()

        return read


def units_of(dtypes: Sequence[torch.dtype]) -> list[Unit]:
    return [
        Unit(str(i), ("w", "b"), tuple(
            nn.Parameter(torch.empty(n, dtype=dtype, device=DEVICE)) for n in (300 * (i + 1), 7)
        )) for i, dtype in enumerate(dtypes)
    ]  # fmt: skip


def one_op_a_unit(gradients: GradientBuffers) -> Program:
    ops = []
    for number, slot in enumerate(gradients.slots):
        span = Span(number, slot.first, slot.first + slot.nbytes)
        ops.append(Op(slot.buffer, (span,), number % 2))
    return Program("wfbp", tuple(ops), tuple(unit.name for unit in gradients.units))


def a_step(transport: Transport, exchange_of: Callable[[GradientBuffers], Exchange]) -> Exchange:
    """Of two units of each dtype, on stream lanes, up to the arrival of all."""
    units = units_of([torch.float32, torch.float32, torch.bfloat16, torch.bfloat16])
    gradients = GradientBuffers(units, transport.empty, flagged=False)
    program, exchange = one_op_a_unit(gradients), exchange_of(gradients)
    lanes = StreamLanes(transport, gradients, program, exchange, Embeddings())  # type: ignore[arg-type]
    exchange.begin()
    lanes.begin(False)
    for number, unit in enumerate(units):
        for parameter in unit.parameters:
            parameter.grad = torch.empty_like(parameter)
        lanes.collects(number)
        gradients.collect(number)
        lanes.ready(number)
    lanes.wait_all()
    return exchange


def test_a_host_where_triton_cannot_launch_is_told_of_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Runtime:
        @property
        def driver(self) -> Any:
            raise RuntimeError("Failed to find C compiler")

    closed, told = [], []
    transport = SimpleNamespace(rank=0, size=2, close=lambda: closed.append("transport"))
    monkeypatch.setattr(
        data_parallel, "compare_exchanges", lambda *_, triton, **others: told.append(triton)
    )
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(runtime=Runtime()))
    monkeypatch.setattr(data_parallel, "transport_of", lambda group, device: transport)
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(3, device="cuda"))
    with pytest.raises(CollectiveError, match=r"find C compiler.*gcc and python3-dev") as raised:
        DataParallel(model, torch.optim.SGD(model.parameters(), 0.1))
    assert closed == ["transport"] and told == [str(raised.value)]  # all ranks learn of it
    model.weight = nn.Parameter(torch.empty(3, device="cuda", dtype=torch.float64))
    assert triton_trouble(model) == ""  # torch's own steps update it


def scaled() -> LossScale:
    scaler: Any = torch.amp.GradScaler("cpu")
    scaler._scale = torch.full((), 8.0, device=DEVICE)
    return LossScale(scaler)


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("conserve", [False, True])
@pytest.mark.parametrize(
    ("mode", "density", "calls"),
    [("gtopk", 0.01, ["pairwise", "pairwise", "broadcast"]), ("topk", 0.01, ["allgather"]),
     ("gtopk", 1.0, ["average"])],
)  # fmt: skip
def test_gtopk(
    mode: str, density: float, calls: list[str], conserve: bool, rank: int,
    monkeypatch: pytest.MonkeyPatch, compute: Stream,  # noqa: F811
) -> None:  # fmt: skip
    transport = Transport(rank)
    spec = GTopK(density, mode=mode, conserve=conserve)
    scale = scaled() if conserve else None
    exchange: Any = a_step(transport, lambda g: SparseExchange(spec, g, transport, scale))  # type: ignore[arg-type]
    assert transport.made == calls * 4
    reads = Reads(monkeypatch)
    exchange.settle()
    assert reads.count == 1  # whether to skip the step
    assert transport.made[-1] == "total"
    assert not exchange.skips and exchange.steps == 1


class Bucket:
    """One of DistributedDataParallel's, of two parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._x = torch.empty(600, dtype=dtype, device=DEVICE)
        self._of = [nn.Parameter(torch.empty(300, dtype=dtype, device=DEVICE)) for _ in range(2)]
        self.index, self.is_last = lambda: 0, lambda: True
        self.buffer, self.parameters = lambda: self._x, lambda: self._of
        self.gradients = lambda: [*self._x.split(300)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["gtopk", "topk"])
def test_gtopk_as_a_hook(
    mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, compute: Stream  # noqa: F811
) -> None:  # fmt: skip
    futures: list[Any] = []

    class Future:
        """Of tensors on a GPU: whoever uses its value waits for an event of this stream."""

        def __init__(self, devices: Any) -> None:
            assert DEVICE == "cpu" or [device.type for device in devices] == [DEVICE]

        def set_result(self, x: torch.Tensor) -> None:
            futures.append((x, CURRENT[-1]))

    transport = Transport(1)
    state = GTopKState(transport, density=0.01, mode=mode)
    monkeypatch.setattr(torch.futures, "Future", Future)
    bucket: Any = Bucket(dtype)
    for _ in range(2):
        if DEVICE == "cuda":
            state.start(bucket)
        else:
            state._enqueue(0, bucket.buffer(), state._residual_of(bucket), state.steps)
    calls = ["pairwise", "pairwise", "broadcast"] if mode == "gtopk" else ["allgather"]
    assert transport.made == calls * 2
    assert futures == [(bucket.buffer(), state._stream)] * 2 and state._stream is not compute
    state.close()


# ---- embeddings ----------------------------------------------------------------------------------
ROWS, WIDTH, EACH = 50, 8, 3


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to lengths and streams: every length that is read is EACH."""
    said: list[str] = []

    def copied(lengths: torch.Tensor) -> Any:
        said.append("copy")
        return SimpleNamespace(tolist=lambda: said.append("read") or [EACH] * len(lengths))

    monkeypatch.setattr(rows_exchange, "_copied", copied)
    monkeypatch.setattr(rows, "_kernels", lambda device: rows_gpu)
    monkeypatch.setattr(rows.cpu, "first_wrong", lambda *_: -1)
    monkeypatch.setattr(RowExchange, "device", property(lambda _: torch.device("cuda:0")))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
    return said


def trained(table: ShardedEmbedding, ids: torch.Tensor, upcoming: torch.Tensor | None) -> None:
    """A forward and a backward pass, whose gradients come out of nothing."""
    schedule: Any = table.schedule
    result = schedule.look_up(ids, True)
    assert result.shape == (*ids.shape, WIDTH) and result.device.type == DEVICE
    if upcoming is not None:
        schedule.announce(upcoming)
    for batch in schedule._used:
        batch.leaf.grad = torch.empty_like(batch.leaf)
    schedule.end_backward()


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_embedding(kind: Any, rank: int, told: list[str], compute: Stream) -> None:  # noqa: F811
    """The lengths of tokens that are announced are read by the next op, those of prior rows by the
    step; only the first forward pass waits for its own."""
    transport = Transport(rank)
    table = ShardedEmbedding(ROWS, WIDTH, 0, group=transport, device=DEVICE)
    optimizer = RowOptimizer(kind([table.weight], lr=0.1), [table])
    ids = [torch.empty(5, 2, dtype=torch.int64, device=DEVICE) for _ in range(3)]
    told.clear()
    for step in range(2):
        trained(table, ids[step], ids[step + 1])
        optimizer.step()
        seen, first = "".join(word[0] for word in told), "cr" * (not step)
        assert seen == first + "c" + "r" + "c" + "r", seen  # tokens; then prior rows
        told.clear()
    names = [op.name for op in table.ops]
    step_of = ["tokens", "prior", "update prior", "lookup", "delayed"]
    assert names == ["tokens", "lookup", *step_of, *step_of]
    assert {*transport.made} == {"alltoall"}
    trained(table, ids[2], None)
    optimizer.step()
    table.schedule.finish()
    table.close()


def test_rows_that_a_scaler_sees(told: list[str], compute: Stream) -> None:  # noqa: F811
    transport: Any = Transport(0)
    table = ShardedEmbedding(ROWS, WIDTH, group=transport, device=DEVICE)
    optimizer = torch.optim.SGD([table.weight], lr=0.1)
    embeddings = Embeddings()
    model = nn.Sequential(table)
    embeddings.attach(model, [optimizer], transport, lambda *_: None, lambda: False, scaled=True)
    ids = torch.empty(4, dtype=torch.int64, device=DEVICE)
    table.schedule.look_up(ids, True)
    table.schedule._used[0].leaf.grad = torch.empty_like(table.schedule._used[0].leaf)
    embeddings.end_backward()
    assert transport.made[-1] == "total"
    assert table.weight.grad.is_sparse and table.weight.grad._values().shape[1] == WIDTH // SIZE
    embeddings.step(optimizer)
    assert table.weight.grad is None
    embeddings.finish()
    table.close()


def test_two_calls_of_an_embedding(told: list[str], compute: Stream) -> None:  # noqa: F811
    transport = Transport(0)
    table = ShardedEmbedding(ROWS, WIDTH, group=transport, device=DEVICE)
    optimizer = RowOptimizer(torch.optim.SGD([table.weight], lr=0.1), [table])
    ids = torch.empty(4, dtype=torch.int64, device=DEVICE)
    table.schedule.look_up(ids, True)
    trained(table, torch.empty(6, dtype=torch.int64, device=DEVICE), None)
    assert len(table.schedule.averaged()[0]) and table.whole(table.weight).shape == (ROWS, WIDTH)
    optimizer.step()
    table.schedule.finish()
    table.close()


def test_dense(compute: Stream) -> None:  # noqa: F811
    transport = Transport(0)
    a_step(transport, lambda gradients: Dense(gradients, transport))  # type: ignore[arg-type]
    assert transport.made == ["average"] * 4


def test_a_value_that_is_read_would_be_seen() -> None:
    """So the tests above test something."""
    with pytest.raises(DataDependentOutputException):
        torch.empty(1, device=DEVICE).item()
    with pytest.raises(AssertionError):
        Transport(0).total(torch.empty(3, device="meta"))
