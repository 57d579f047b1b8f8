"""Ranks on several machines, as processes that know each other only by a store and the network."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import signal
import tempfile
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._C._distributed_c10d as c10d
from machines import across, forked, on_machines

from linkweave.collectives import CollectiveError, Communicator
from linkweave.collectives.cluster import join, pieces
from linkweave.collectives.cluster.calls import ClusterCalls
from linkweave.collectives.cluster.cluster_map import AT_ONCE
from linkweave.collectives.cluster.communicator import ClusterCommunicator
from linkweave.collectives.cluster.gloo import Across
from linkweave.collectives.cluster.roll_call import RollCall
from linkweave.collectives.runtime.diagnose import RAISED
from linkweave.collectives.settings import Settings

SIZES = [(1, 1), (2, 2), (1, 2), (3, 1, 2)]
DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int32", "int64")
COUNTS = (0, 1, 2, 3, 7, 1000, 30_011, 200_003)  # the last does not go along


def values(rank: int, n: int, dtype: Any = "float32") -> np.ndarray:
    return np.random.default_rng(rank).integers(-4, 5, n).astype(dtype)


def reductions(comm: ClusterCommunicator) -> None:
    ranks = range(comm.size)
    for n in COUNTS:
        for dtype in DTYPES if n == 1000 else ("float32",):
            total = sum(values(r, n, dtype) for r in ranks).astype(dtype)
            comm.allreduce(x := values(comm.rank, n, dtype))
            assert (x == total).all()
            out = np.empty_like(x)
            comm.allreduce(x := values(comm.rank, n, dtype), out=out)
            assert (out == total).all() and (x == values(comm.rank, n, dtype)).all()
            comm.reduce(x, root=1)
            assert (x == (total if comm.rank == 1 else values(comm.rank, n, dtype))).all()
            comm.broadcast(x := values(comm.rank, n, dtype), comm.size - 1)
            assert (x == values(comm.size - 1, n, dtype)).all()
            part = comm.reduce_scatter(values(comm.rank, comm.size * n, dtype))
            every = sum(values(r, comm.size * n, dtype) for r in ranks).astype(dtype)
            assert (part == every[comm.rank * n : (comm.rank + 1) * n]).all()


def movements(comm: ClusterCommunicator) -> None:
    ranks, rank = range(comm.size), comm.rank
    for n in COUNTS:
        got = comm.allgather(values(rank, n).reshape(n, 1))
        assert got.shape == (comm.size, n, 1)
        assert all((got[r, :, 0] == values(r, n)).all() for r in ranks)
        got = comm.alltoall(values(rank, comm.size * n))
        sent = [values(r, comm.size * n)[rank * n : (rank + 1) * n] for r in ranks]
        assert (got == np.concatenate(sent)).all()
        comm.alltoall(x := values(rank, comm.size * n), x)
        assert (x == got).all()
        for root in {0, comm.size - 1}:
            got = comm.gather(values(rank, n), root)
            assert (got is None) == (rank != root)
            assert got is None or all((got[r] == values(r, n)).all() for r in ranks)
            part = np.empty(n, got.dtype if rank == root else values(rank, n).dtype)
            whole = values(root, comm.size * n) if rank == root else None
            assert comm.scatter(whole, root, out=part) is part
            assert (part == values(root, comm.size * n)[rank * n : (rank + 1) * n]).all()
    got = comm.allgather(np.full((rank + 1, 3), rank), counts=[r + 1 for r in ranks])
    assert (got == np.concatenate([np.full((r + 1, 3), r) for r in ranks])).all()

    def splits(r: int) -> list[int]:
        return [(r + to) % 3 for to in ranks]

    def given(r: int) -> np.ndarray:
        return 1000 * r + np.arange(2 * sum(splits(r))).reshape(-1, 2)

    here = [given(r)[sum(splits(r)[:rank]) : sum(splits(r)[: rank + 1])] for r in ranks]
    receives = [splits(r)[rank] for r in ranks]
    got = comm.alltoall(given(rank), in_splits=splits(rank), out_splits=receives)
    assert (got == np.concatenate(here)).all()
    assert (comm.exchange(given(rank), [splits(r) for r in ranks]) == got).all()
    for counts in ([[1] * comm.size] * comm.size, [splits(r) for r in ranks]):  # a few bytes
        mine = values(rank, 3 * sum(counts[rank]), "int8").reshape(-1, 3)
        expected = comm.alltoall(mine, in_splits=counts[rank])
        assert (comm.exchange(mine, counts) == expected).all()
    nothing = [[0] * comm.size] * comm.size
    assert comm.exchange(np.ones((0, 3)), nothing).shape == (0, 3)
    for source in ranks:
        to = (source + 1) % comm.size
        if rank == source != to:
            comm.send(np.arange(5) + source, to)
        elif rank == to != source:
            comm.recv(x := np.zeros(5, np.int64), source)
            assert (x == np.arange(5) + source).all()


@across((1, 2))
def test_the_least_and_the_greatest(comm: ClusterCommunicator) -> None:
    """Of floats, in messages that gloo combines: all magnitudes, both zeros, infinities, NaN."""
    n, infinity = 200_003, float("inf")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):

        def given(rank: int, kind: torch.dtype = dtype) -> Any:
            x = torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
            x = (x.sign() * 10.0 ** (8 * x)).to(kind)
            x[:6] = torch.tensor([0.0, -0.0, infinity, -infinity, rank, -rank])
            x[6 + rank] = -float("nan") if rank % 2 else float("nan")
            return x

        every = torch.stack([given(rank) for rank in range(comm.size)])
        for op, want in (("min", every.amin(0)), ("max", every.amax(0))):
            assert want[6 : 6 + comm.size].isnan().all()
            comm.allreduce(x := given(comm.rank), op)
            assert torch.equal(x.nan_to_num(3.5), want.nan_to_num(3.5)), (dtype, op)
            comm.reduce(given(comm.rank), op, 1, out=(x := torch.zeros(n, dtype=dtype)))
            if comm.rank == 1:
                assert torch.equal(x.nan_to_num(3.5), want.nan_to_num(3.5)), (dtype, op)


def others(comm: ClusterCommunicator) -> None:
    """Ops, 16-bit floats, NaN, lists, asynchronous calls, strides, parts."""
    size, rank = comm.size, comm.rank
    for n in (5, AT_ONCE, 30_011):  # with and after the comparison
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            comm.allreduce(x := torch.full((n,), float(rank), dtype=dtype), "avg")
            assert (x == torch.tensor((size - 1) / 2, dtype=dtype)).all()
        for op in ("min", "max"):
            x = np.ones(n)
            x[rank % n] = np.nan
            comm.allreduce(x, op)
            assert np.isnan(x[:size]).all() and (x[size:] == 1).all()
        for op, result in (("and", 1), ("or", 7), ("xor", size % 2 + 6 * ((size + 1) // 2 % 2))):
            comm.allreduce(x := np.full(n, 1 if rank % 2 else 7), op)
            assert (x == result).all()
        for op in ("sum", "max", "or"):
            comm.allreduce(x := np.arange(n) % size == rank, op)
            assert (x.view(np.uint8) == 1).all()
        comm.allreduce(x := np.arange(n) % size != rank, "prod")
        assert not x.any()
        comm.allreduce(x := np.full(n, 100, np.int8))
        assert (x == np.int8(np.int64(100 * size) & 255)).all()
        comm.reduce(x := np.full(n, rank), "prod", size - 1, out=(out := np.zeros(n, np.int64)))
        assert (x == rank).all() and (out == 0).all()
        comm.allreduce(y := torch.ones(n, 4).t())
        assert (y == size).all()
        a, b = np.full(3, rank), np.full((n, 1), rank)
        comm.allreduce([a, b])
        assert (a == sum(range(size))).all() and (b == sum(range(size))).all()
    works = [comm.allreduce(np.full(1000, i + rank), async_op=True) for i in range(5)]
    for work in works:
        work.wait()
    part = comm.split(rank % 2)
    part.allreduce(x := np.ones(3))
    assert x[0] == part.size == sum(r % 2 == rank % 2 for r in range(size))
    works = [comm.allreduce(np.ones(100_000), async_op=True) for _ in range(3)]
    lanes = comm.lanes(2)  # after these calls
    for work in works:
        work.wait()
    tensors = [np.full(10_000, float(i)) for i in range(2)]
    works = [lane.allreduce(x, async_op=True) for lane, x in zip(lanes, tensors, strict=True)]
    for i, work in enumerate(works):
        work.wait()
        assert (tensors[i] == i * size).all()


@across((1, 2))
def test_a_part_made_while_closing_is_closed(comm: ClusterCommunicator) -> None:
    made: list[Any] = []
    part = comm.split()
    part.before_close(lambda: made.append(part.split()))
    part.close()
    assert made[0].closed


@across((1, 1), (2, 1), timeout=3)
def test_a_call_that_another_threads_close_overtakes_says_so(
    comm: ClusterCommunicator, tmp_path: Path
) -> None:
    """Whether it waits for its own machine or for another one."""
    ended = tmp_path / "ended"
    if comm.rank:
        while not ended.exists():
            time.sleep(0.01)
        return
    said: list[str] = []

    def call() -> None:
        try:
            comm.allreduce(np.ones(5))
        except CollectiveError as error:
            said.append(str(error))
        finally:
            ended.touch()

    calling = threading.Thread(target=call)
    calling.start()
    while calling.is_alive() and not comm._calls._asked.startswith("allreduce"):
        time.sleep(0.01)
    comm.close()
    calling.join()
    assert said == ["this communicator is closed"]


def sparse(comm: ClusterCommunicator) -> None:
    """Nothing is lost: the result and all residuals add up to what was given."""
    n, k = 1000, 20
    for mode in ("gtopk", "topk", "dense", "auto"):
        for op in ("sum", "avg"):
            rng = np.random.default_rng(comm.rank)
            indices = np.sort(rng.choice(n, k, replace=False)).astype(np.int32)
            given = rng.integers(-50, 51, k).astype(np.float32)
            residual, total = np.zeros(n, np.float32), np.zeros(n, np.float32)
            found, where = comm.sparse_allreduce(
                given, indices, n, k, op, residual=residual, mode=mode
            )
            total[indices] = given
            comm.allreduce(total)
            comm.allreduce(residual)
            residual[where] += found * (comm.size if op == "avg" else 1)
            np.testing.assert_allclose(residual, total, rtol=1e-6)
            assert mode != "gtopk" or len(where) == k


def queues(comm: ClusterCommunicator) -> None:
    total, layers = sum(range(1, comm.size + 1)), [1, 0, 4999, 20_000, 5011]
    ends = np.cumsum(layers)
    for count, order, dtype, op in (
        (0, [0], "float64", "sum"), (30_011, [0, 1, 2, 3, 4], "float16", "sum"),
        (30_011, [4, 0, 3], "float64", "avg"), (30_011, [1, 0, 3, 2], "int8", "sum"),
    ):  # fmt: skip
        x = np.full(count, comm.rank + 1, dtype)
        queue = comm.allreduce_queue(x, layers if count else [0], op)
        result = total / comm.size if op == "avg" else total
        for layer in order:
            queue.dequeue(layer)
            assert (x[: ends[layer]] == result).all()
        queue.wait()
        assert queue.done() and (x == result).all()
        with pytest.raises(CollectiveError, match="layer must be an integer from 0 to"):
            queue.dequeue(5)


def everything(comm: ClusterCommunicator, compares: bool = True) -> None:
    comm.compares = compares
    pieces.PIECE = pieces.QUEUED = pieces._ALONE = 1 << 14  # so that the largest tensors take many
    for body in (reductions, movements, others, sparse, queues):
        body(comm)


@pytest.mark.parametrize(
    "sizes", [pytest.param(s, marks=pytest.mark.slow) if s == (2, 2) else s for s in SIZES]
)
def test_collectives(sizes: tuple[int, ...]) -> None:
    assert on_machines(sizes, everything) == [None] * sum(sizes)


def test_calls_that_are_not_compared_and_ranks_dealt_to_machines_in_turn() -> None:
    assert on_machines((2, 2), everything, False, dealt=True) == [None] * 4


@pytest.mark.parametrize("n", [30, 600_000])  # the long ones do not travel with the comparison
@across((1, 1, 1), (2, 1))
def test_calls_that_are_made_again(comm: ClusterCommunicator, n: int) -> None:
    """Calls of the same tensors with new values, which are remembered by their addresses."""
    size, rank = comm.size, comm.rank
    x, part = torch.zeros(size, n), torch.zeros(n)
    out, mine = torch.zeros(size, n), torch.zeros(n)
    held = weakref.ref(x)
    for step in range(4):
        if step == 3:
            size_before = len(comm._calls._known)
        rows = [torch.arange(size * n).view(size, n) * 1.0 + 1000 * r + step for r in range(size)]
        x.copy_(rows[rank])
        comm.alltoall(x, out)
        assert torch.equal(out, torch.stack([row[rank] for row in rows]))
        comm.reduce_scatter(x, out=mine.view(1, n))
        assert torch.equal(mine, sum(row[rank] for row in rows))  # type: ignore[arg-type]
        comm.scatter(x if rank == 1 else None, 1, out=mine.view(1, n))
        assert torch.equal(mine, rows[1][rank])
        part.copy_(rows[rank][0])
        comm.allgather(part, out=out)
        assert torch.equal(out, torch.stack([row[0] for row in rows]))
        out.zero_()
        comm.gather(part, 1, out=out if rank == 1 else None)
        assert torch.equal(out, torch.stack([row[0] for row in rows]) * (rank == 1))
        comm.broadcast(part, 1)
        assert torch.equal(part, rows[1][0])
        comm.reduce(x, "max", 1, out=out)
        assert rank != 1 or torch.equal(out, torch.stack(rows).amax(0))
        comm.allreduce(x)
        assert torch.equal(x, sum(rows))  # type: ignore[arg-type]
        with pytest.raises(CollectiveError):  # a refusal between them
            comm.allreduce(x[rank:], "max")
        with pytest.raises(CollectiveError, match="unknown op"):
            comm.allreduce(x, ["sum"] if rank == 1 else "sum")  # type: ignore[arg-type]
    assert len(comm._calls._known) == size_before > 0
    os.environ["LINKWEAVE_ALGORITHM"] = "ring"
    with pytest.raises(CollectiveError, match="LINKWEAVE_ALGORITHM=ring on several machines"):
        comm.allreduce(x)
    del os.environ["LINKWEAVE_ALGORITHM"]
    del x, rows
    assert held() is None


@pytest.mark.parametrize("unit", [30_000, 400_000])  # in pieces, and to two machines at once
@across((2, 1), (1, 1, 1))
def test_uneven_rows_are_exchanged(comm: ClusterCommunicator, unit: int) -> None:
    rank, ranks = comm.rank, range(comm.size)
    counts = [[unit * source * (to + 1) for to in ranks] for source in ranks]
    x = torch.cat([torch.full((counts[rank][to],), 10.0 * rank + to) for to in ranks])
    got = comm.exchange(x, counts)
    want = [torch.full((counts[source][rank],), 10.0 * source + rank) for source in ranks]
    assert torch.equal(got, torch.cat(want))


def in_order(comm: ClusterCommunicator) -> None:
    """Every element is combined in the order of the ranks, in messages of any size."""
    size, n = comm.size, 60_000
    rows = np.random.default_rng(0).normal(size=(size, n)).astype(np.float32)
    total = np.add.accumulate(rows)[-1]
    x = rows[comm.rank].copy()
    comm.allreduce(x)
    assert (x == total).all()
    parts = np.split(rows[comm.rank].copy(), [1, 30, 1000, 20_000])
    for part in parts:
        comm.allreduce(part, "avg")
    assert (np.concatenate(parts) == total / np.float32(size)).all()
    comm.allreduce([x := rows[comm.rank, :7].copy(), y := rows[comm.rank, 7:].copy()])
    assert (np.concatenate([x, y]) == total).all()
    comm.reduce(x := rows[comm.rank, :100].copy(), root=1)
    assert comm.rank != 1 or (x == total[:100]).all()
    found = comm.reduce_scatter(rows[comm.rank, : 10 * size].copy())
    assert (found == total[10 * comm.rank : 10 * (comm.rank + 1)]).all()
    queue = comm.allreduce_queue(x := rows[comm.rank].copy(), [n // 2, n // 2])
    queue.dequeue(0)
    assert (x[: n // 2] == total[: n // 2]).all()
    queue.wait()
    half = torch.from_numpy(rows[comm.rank]).bfloat16()
    comm.allreduce(half)
    exact = sum(torch.from_numpy(row).bfloat16().float() for row in rows).bfloat16()
    assert (half == exact).all()


def test_a_fixed_order() -> None:
    sizes = (3, 1, 2)
    assert on_machines(sizes, in_order, order="fixed") == [None] * sum(sizes)
    assert on_machines((2, 2), in_order, dealt=True, order="fixed") == [None] * 4


@across((1, 2))
def test_methods_of_one_machine_are_refused_by_name(comm: ClusterCommunicator) -> None:
    for name in ("run", "symmetric_empty"):
        with pytest.raises(CollectiveError, match=f"{name} is for the ranks of one machine"):
            getattr(comm, name)
    assert not hasattr(comm, "nonsense")
    child = os.fork()
    if child == 0:
        comm.close()  # does nothing
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    comm.barrier()


@across((1, 1))
def test_a_layer_of_a_queue_is_final_before_the_rest_is_sent(comm: ClusterCommunicator) -> None:
    """The call cannot send its fourth piece until the first layer has been dequeued."""
    pieces.QUEUED = 1 << 14
    used, sent, allreduce = threading.Event(), itertools.count(), Across.allreduce

    def held_back(across: Across, x: Any, op: str = "sum") -> Any:
        assert next(sent) < 3 or used.wait(10)
        return allreduce(across, x, op)

    Across.allreduce = held_back  # type: ignore[method-assign]
    x = np.ones(30_011, np.float32)
    queue = comm.allreduce_queue(x, [100, 29_911])
    queue.dequeue(0)
    assert (x[:100] == 2).all()
    used.set()
    queue.wait()
    assert (x == 2).all()


@across((1, 2))
def test_queues_that_ranks_ask_for_wrongly(comm: ClusterCommunicator) -> None:
    said = []
    for layers in ([3, 4], [5] if comm.rank else [2, 3]):
        queue = comm.allreduce_queue(np.ones(5), layers)
        for wait in (lambda queue=queue: queue.dequeue(0), queue.wait):
            with pytest.raises(CollectiveError) as error:
                wait()
        said.append(str(error.value))
    for x, match in ((np.ones((4, 4))[:, 1:], "contiguous"), ([1.0, 2.0], "not builtins.list")):
        with pytest.raises(CollectiveError, match=match):
            comm.allreduce_queue(x, [12]).wait()
    comm.allreduce(x := np.ones(3))  # they go on
    assert (x == comm.size).all()
    agree, differ = said
    assert "layers of 7 elements for a tensor of 5: they must agree" in agree
    assert "the machines' calls differ" in differ and "layers [2, 3]" in differ


@across((3, 2))
def test_a_rank_knows_its_machine_and_its_column(comm: ClusterCommunicator) -> None:
    column = comm.across and (comm.across.rank, comm.across.size)
    found = comm.rank, comm.size, comm.machine.rank, comm.machine.size, column
    assert found == (
        (0, 5, 0, 3, (0, 2)), (1, 5, 1, 3, (0, 2)), (2, 5, 2, 3, None),
        (3, 5, 0, 2, (1, 2)), (4, 5, 1, 2, (1, 2)),
    )[comm.rank]  # fmt: skip


def test_connections_are_closed_when_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from Python 3.12 on while the interpreter exits."""

    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    across = Across(c10d.HashStore(), 0, 1, 10.0)
    held = weakref.ref(across._gloo)
    monkeypatch.setattr(threading.Thread, "start", refuses)
    across.close()
    assert held() is None
    with pytest.raises(RuntimeError, match="are closed"):
        across.broadcast(torch.zeros(1), 0)


@across((3,))
def test_ranks_of_one_machine_need_no_cluster(comm: Any) -> None:
    assert isinstance(comm, Communicator)


def test_an_abort_ends_the_own_machine_in_any_case() -> None:
    """Also if it is interrupted while it tells the other machines."""

    def interrupted(why: str) -> None:
        raise KeyboardInterrupt(why)

    said: list[Any] = []
    calls: Any = object.__new__(ClusterCalls)
    calls.rank, calls.ended = 1, ""
    calls._roll_call = SimpleNamespace(leave=interrupted)
    calls.machine = SimpleNamespace(abort=said.append)
    calls.links = SimpleNamespace(disconnect=lambda: said.append("closed"))
    with pytest.raises(KeyboardInterrupt, match="rank 1 raised an exception"):
        calls.abort(RAISED)
    assert said == [RAISED, "closed"] and calls.ended
    calls.abort(RAISED)  # the others have been told, or cannot be
    assert said == [RAISED, "closed"] * 2


def test_who_leaves_tells_every_machine_that_it_reaches() -> None:
    told: list[int] = []

    def send(frame: Any, machine: int) -> Any:
        if machine == 1:
            raise RuntimeError("its connection is closed")
        told.append(machine)

        def wait(timeout: Any) -> None:
            raise RuntimeError("timed out")

        return SimpleNamespace(wait=wait)

    roll: Any = object.__new__(RollCall)
    roll._others, roll._across = [1, 2, 3], SimpleNamespace(send=send)
    roll.leave("rank 0 raised an exception")
    assert told == [2, 3]


def test_ranks_of_another_version_are_told() -> None:
    with tempfile.TemporaryDirectory() as folder:

        def body(rank: int) -> None:
            join._version = lambda: "0.2.0" if rank == 2 else "0.1.0"
            path = Path(folder) / "port"
            if rank == 0:  # whose process holds the store
                store = c10d.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
                path.with_suffix(".new").write_text(str(store.port))
                path.with_suffix(".new").rename(path)
            else:
                while not path.exists():
                    time.sleep(0.01)
                store = c10d.TCPStore("127.0.0.1", int(path.read_text()), 3, False)
            join.meet(join.Job(rank, 3, store, "test"), Settings(timeout=60))

        words = "all ranks need the same linkweave, but rank 1 has 0.1.0, rank 2 has 0.2.0"
        assert forked(3, body) == [f"CollectiveError: {words}"] * 3


@across((2, 2))
def test_calls_that_differ_are_refused_everywhere(comm: ClusterCommunicator) -> None:
    said = []
    for call in (
        lambda: comm.allreduce(np.ones(3 if comm.rank else 4)),
        lambda: comm.barrier() if comm.rank else comm.broadcast(np.ones(1)),
        lambda: comm.allreduce(np.ones(3) if comm.rank != 2 else "x"),
        lambda: comm.allreduce(np.ones(3), "nonsense"),
        lambda: comm.broadcast(np.ones(3), 9),
        lambda: comm.alltoall(np.ones(3)),
        lambda: comm.allreduce(np.ones(3), algorithm="ring"),
        lambda: comm.allreduce(torch.ones(3).to(torch.float8_e5m2)),
        lambda: comm.split("red" if comm.rank == 1 else 0),
        lambda: comm.lanes(comm.rank + 1),
        lambda: comm.alltoall(np.ones(4), out_splits=[1, 1, 1, 1 + (comm.rank == 2)]),
        lambda: comm.alltoall(np.ones(4), np.ones(4 + (comm.rank == 1))),
        lambda: comm.exchange(np.ones(4), [[1 + (comm.rank == 1)] * 4] + [[1] * 4] * 3),
        lambda: comm.exchange(np.ones(4), [[1] * 4] * (3 + (comm.rank == 1))),
        lambda: comm.allreduce([np.ones(n + (n == 90 and comm.rank == 3)) for n in range(100)]),
        lambda: comm.scatter(np.ones(4) if comm.rank == 0 else None),
        lambda: comm.broadcast(np.ones(1 << (20 + comm.rank // 2))),
    ):
        try:
            call()
        except CollectiveError as error:
            said.append(str(error))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CollectiveError) as forced:
        if comm.rank == 1:
            patch.setenv("LINKWEAVE_ALGORITHM", "ring")
        comm.allreduce(np.ones(3))
    said.append(str(forced.value))
    comm.allreduce(x := np.ones(2))  # all may go on
    assert x[0] == 4 and len(said) == 18
    assert "scatter needs out on rank " in said[15]
    assert "host0 (ranks 0, 1): broadcast(1048576 x float64, root 0); host1" in said[16]
    assert "algorithm='ring' on several machines, where only \"auto\"" in said[6]
    assert "float8_e5m2 is combined on one machine only" in said[7]
    assert "LINKWEAVE_ALGORITHM=ring on several machines" in said[17]
    assert "rank 0: allreduce(4 x float64, sum)" in said[0]
    assert "rank 0: broadcast(1 x float64, root 0); rank 1: barrier" in said[1]
    assert "color must be an integer, not 'red'" in said[8] and "lanes(1)" in said[9]
    assert "out_splits of rank 2 says [1, 1, 1, 2] rows come" in said[10]
    assert "out must be of shape (4,) and float64, not (5,)" in said[11]
    assert ("rank 2: " in said[2]) == (comm.rank != 2) and "not builtins.str" in said[2]


@across((1, 2), (2, 1, 1), (1, 1, 1))
def test_long_calls_that_differ_move_nothing(comm: ClusterCommunicator) -> None:
    """Of ranks that make the same call while another one does not, or passes what is refused."""
    size, rank = comm.size, comm.rank
    width, root = 3 << 18, 1  # of 3 MiB, which do not go along with the comparison
    calls: dict[str, Any] = {
        "alltoall": lambda x, out: comm.alltoall(x, out),
        "in place": lambda x, out: comm.alltoall(x, x),
        "allgather": lambda x, out: comm.allgather(x[0], out=out),
        "gather": lambda x, out: comm.gather(x[0], root, out=out if rank == root else None),
        "scatter": lambda x, out: comm.scatter(x if rank == root else None, root, out=out[:1]),
    }
    kept = []
    for name, call in calls.items():
        x = np.arange(size * width, dtype=np.float32).reshape(size, width) + rank
        before, out = x.copy(), np.zeros_like(x)
        fewer = slice(rank == size - 1, None)  # the last rank's call is of fewer elements
        with pytest.raises(CollectiveError, match="calls differ: "):
            call(x[:, fewer].copy() if rank == size - 1 else x, out[:, fewer].copy())
        with pytest.raises(CollectiveError, match=r"builtins\.str"):
            call("x" if rank == 1 else x, out)
        assert (x == before).all() and not out.any(), name
        kept.append((x, before, out))
        again, got = x + 1, np.zeros_like(x)  # the same call once more
        mine = again.copy()
        call(again, got)
        if name in ("alltoall", "in place"):
            got = again if name == "in place" else got
            right = [mine[rank] + r - rank for r in range(size)]
        elif name == "scatter":
            got, right = got[:1], [mine[rank] - rank + root]
        else:
            got = got[: size * (rank == root or name == "allgather")]
            right = [mine[0] + r - rank for r in range(len(got))]
        assert all((row == each).all() for row, each in zip(got, right, strict=True)), name
    comm.barrier()
    assert all((x == before).all() and not out.any() for x, before, out in kept)  # nor later


@across((2, 2), (1, 1, 1))
def test_which_calls_are_compared(comm: ClusterCommunicator) -> None:
    comm.compares = False
    roll, told = comm._calls._roll_call, []
    if roll:
        compare = roll.compare
        roll.compare = lambda call, *of: told.append(call.asked) or compare(call, *of)  # type: ignore[method-assign, func-returns-value]
    size, long = comm.size, np.ones((comm.size, 1 << 20), np.float32)
    out = np.empty_like(long)
    comm.allreduce(long)
    comm.broadcast(long)
    comm.reduce(long, root=1)
    comm.allgather(long[0].copy(), out=out)
    comm.reduce_scatter(long, out=out[:1])
    comm.gather(long[0].copy(), out=out if comm.rank == 0 else None)
    comm.scatter(long, out=out[:1])
    comm.alltoall(long, out=out)
    comm.allreduce_queue(long[0, :5].copy(), [5]).wait()  # never goes along
    middle, part = np.ones((size, 10_000), np.float32), np.empty((1, 10_000), np.float32)
    comm.scatter(middle, out=part)  # these would go along, but are faster without
    comm.gather(middle[0], out=middle.copy() if comm.rank == 0 else None)
    comm.alltoall(middle)
    assert told == []
    comm.allreduce(long[0, :5].copy())
    comm.barrier()
    words = ["allreduce(5 x float32, sum)", "barrier"]
    assert told == (words if roll else [])
    comm.compares = True
    comm.allreduce(long)
    words.append(f"allreduce({size << 20} x float32, sum)")
    assert told == (words if roll else [])


@pytest.mark.parametrize("kind", ["allreduce", "allgather", "reduce_scatter", "alltoall"])
@pytest.mark.parametrize("n", [20, 1 << 18])  # the long ones have begun on other ranks
@across((2, 2), (1, 1, 1))
def test_an_argument_that_is_refused_ends_calls_that_are_not_compared(
    comm: ClusterCommunicator, kind: str, n: int
) -> None:
    """Rank 2 passes an argument that is refused."""
    comm.compares = False
    said = []
    for _ in range(2):
        with pytest.raises(CollectiveError) as error:
            getattr(comm, kind)(np.ones((comm.size, n)) if comm.rank != 2 else "x")
        said.append(f"{type(error.value).__name__}: {error.value}")
    first, second = said
    assert first.startswith("CollectiveAborted") and "not builtins.str" in first
    assert "this communicator failed before" in second


def error_of(call: Any) -> str:
    try:
        call()
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    "what", ["broadcast", "scatter", "gather", "reduce", "reduce sum", "refused"]
)
@across((2, 2))
def test_one_way_calls_that_differ_are_named_everywhere(
    comm: ClusterCommunicator, what: str, ends: bool
) -> None:
    """Ranks differ in a call in which only some machines hear from another one."""
    x, far = np.ones(3 if comm.rank < 2 else 4), comm.size - 1
    calls = {
        "broadcast": lambda: comm.broadcast(x),
        "scatter": lambda: comm.scatter(np.ones(4 * len(x)) if comm.rank == 0 else None, out=x),
        "gather": lambda: comm.gather(x, far),
        "reduce": lambda: comm.reduce(x, "max", far),
        "reduce sum": lambda: comm.reduce(x, "sum" if comm.rank < 2 else "avg", far),
        "refused": lambda: comm.broadcast(x if comm.rank != 2 else "x"),
    }
    said = [error_of(calls[what])]
    said.append(error_of(comm.close if ends else lambda: comm.allreduce(np.ones(3))))
    said.append("" if ends else error_of(comm.barrier))
    word = "broadcast" if what == "refused" else what.split()[0]
    first, second, _ = said
    assert bool(first) == (comm.rank >= 2), said  # who hears from the other machine
    told = first or second
    if ends and not first:  # the other machine names what this one has called
        assert not told, said
    elif what == "refused":
        assert "not builtins.str" in told, said
    else:
        at = "close" if ends else "allreduce(3 x float64, sum)"
        assert f"host0 (ranks 0, 1): {at} after {word}(" in told, said
        assert f"host1 (ranks 2, 3): {word}(" in told and "rank 1: " not in told, said
    if not ends:
        assert all("failed before" in words for words in said[1 if first else 2 :]), said


@pytest.mark.parametrize(
    ("machines", "what"),
    [((1, 1), "roots"), ((1, 1), "own"), ((2, 1), "local"), ((1, 1, 1), "roots")],
)
@across(timeout=16)
def test_ranks_that_wait_for_each_other_name_their_calls(
    comm: ClusterCommunicator, what: str
) -> None:
    """Ranks that wait for each other, or that one machine's ranks call differently."""
    x, last = np.ones(3), comm.size - 1
    kinds = [comm.broadcast, comm.gather]
    roots = {"roots": [last, 0], "own": [comm.rank, comm.rank], "local": [last, 0]}[what]
    root = roots[comm.rank == (1 if what == "local" else last)]
    call = kinds[what == "own" or (what == "local" and comm.rank == 1)]
    start = time.monotonic()
    said = error_of(lambda: call(x, root))
    if what == "local":  # the other machine has gone on
        said = said or error_of(lambda: comm.allreduce(np.ones(2)))
    seconds = time.monotonic() - start
    if what != "local":
        comm.allreduce(x := np.ones(2))
        assert (x == comm.size).all()
    assert "calls differ: " in said and seconds < 16, said
    assert said.startswith("CollectiveAborted" if what == "local" else "CollectiveError"), said


def lonely(comm: ClusterCommunicator) -> str:
    """Rank 1 dies; rank 0 only sends."""
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for i in range(200):
        if error := error_of(lambda: comm.broadcast(np.ones(3))):
            return f"{i} {error}"
        time.sleep(0.001)
    return ""


def test_a_rank_that_only_sends_hears_of_a_death() -> None:
    for sizes in ((1, 1), (2, 1)):
        found = on_machines(sizes, lonely, lost=[1] if sizes == (1, 1) else [])
        said = found[0]
        assert int(said.split()[0]) <= 70 and "CollectiveAborted" in said, found
        assert "has closed its connection" in said or "died" in said, found


@across((1, 1, 1))
def test_a_refusal_after_calls_that_were_the_same(comm: ClusterCommunicator) -> None:
    """A refusal after calls that not all have compared, which were the same."""
    comm.broadcast(np.ones(3))
    said = [error_of(lambda: comm.allreduce(np.ones(3), "nonsense"))]
    comm.broadcast(np.ones(3))
    said.append(error_of(lambda: comm.allreduce(np.ones(3 + comm.rank))))
    comm.allreduce(x := np.ones(2))
    assert (x == comm.size).all()
    assert said[0].startswith("CollectiveError: unknown op 'nonsense'"), said
    assert "host1 (rank 1): allreduce(4 x float64, sum);" in said[1], said


@across((1, 1, 1))
def test_calls_that_go_one_way_after_refusals(comm: ClusterCommunicator) -> None:
    """A broadcast that one rank refuses, and then more of them than go one way in a row."""
    for i in range(3):
        x = np.full(3, comm.rank + i) if comm.rank != 1 else "x"
        with pytest.raises(CollectiveError):
            comm.broadcast(x, 1)  # nobody hears from it
        comm.allreduce(np.ones(2))
        for j in range(150):
            comm.broadcast(y := np.full(3, comm.rank + j), j % comm.size)
            assert (y == j % comm.size + j).all()


@across((1, 1))
def test_calls_are_traced(comm: ClusterCommunicator) -> None:
    os.environ["LINKWEAVE_DEBUG"] = "2"  # which lanes read
    (lane,) = comm.lanes(1)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        lane.broadcast(np.ones(3))
        lane.allreduce(np.ones(1 << 17))
    rank, lines = comm.rank, said.getvalue().splitlines()
    lines = [line for line in lines if f"[{rank}] broad" in line or "1072" in line]
    assert re.fullmatch(
        rf"linkweave\[{rank}\] broadcast\(3 x float64, root 0\), \d+ us, along with the "
        rf"comparison\nlinkweave\[{rank}\] allreduce\(131072 x float64, sum\), \d+ us",
        "\n".join(lines),
    ), said.getvalue()


@across((1, 1), timeout=100)
def test_a_root_that_is_slow(comm: ClusterCommunicator) -> None:
    """Ranks wait long for the root, and remind it of their calls, which it need not receive."""
    start = time.monotonic()
    control = comm.machine.calls.control
    assert control._heart
    control._heart.stop()
    control._heart, control.timeout = None, 0.4  # beats eight times as often
    for i in range(10):
        if comm.rank == 0:
            time.sleep(0.12)
        comm.broadcast(x := np.full(3, comm.rank + i))
        assert (x == i).all()
    assert comm.rank == 0 or len(comm._calls._roll_call._reminders) > 8
    assert time.monotonic() - start < 60


@across((1, 1), (2, 1), (1, 1, 1))
def test_a_root_that_is_ahead(comm: ClusterCommunicator) -> None:
    """The root makes many calls before others make the first."""
    if comm.rank:
        time.sleep(0.3)
    for i in range(30):
        comm.broadcast(x := np.full(1000, comm.rank + i))
        assert (x == i).all()
        every = comm.gather(x + comm.rank, comm.size - 1)
        assert every is None or (every == i + np.arange(comm.size)[:, None]).all()
