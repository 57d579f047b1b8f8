"""`collectives.sparse_allreduce` on GPUs made of threads: what the CPU's gives, bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu_ranks import MODES, Machine, failure, on_gpus
from gpu_vectors import StreamKernels, sparse_gpus
from host_gpu import CURRENT, HostTensor, needs_compiler

from linkweave import collectives
from linkweave.collectives import CollectiveAborted, CollectiveTimeout, get_default
from linkweave.collectives.calls.sparse import gpu
from linkweave.collectives.planning.sparse_tree import sparse_costs
from linkweave.collectives.runtime.gpu import device as cuda
from linkweave.topology import load
from tests.cpu.helpers import dense, hurry, vector

pytestmark = needs_compiler
NUMEL = 60


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with sparse_gpus(monkeypatch) as found:
        yield found


def put(array: np.ndarray, stream: int = 0, device: int | None = None) -> HostTensor:
    return HostTensor(array.copy(), CURRENT.index if device is None else device, stream)


CASES = [
    (mode, dtype, conserve)
    for mode in ("gtopk", "topk", "dense", "auto")
    for dtype in ("float32", "float16")
    for conserve in (True, False)
]


def both(rank: int, machine: Machine, forked: bool) -> list[Any]:
    """Each case on the CPU and on a GPU."""
    found = []
    for case, (mode, dtype, conserve) in enumerate(CASES):
        k = (9, 0, NUMEL, 1)[case % 4]
        values, indices = vector(rank, case, (20, 9, 0)[case % 3])
        values = (values * 201).astype(dtype)  # sums that 16 bits do not hold
        mine = np.full(NUMEL, rank, np.float32)
        theirs = put(mine)
        how: dict[str, Any] = {"mode": mode, "conserve": conserve}
        want = collectives.sparse_allreduce(values, indices, NUMEL, k, residual=mine, **how)
        got = collectives.sparse_allreduce(
            put(values), put(indices), NUMEL, k, residual=theirs, **how
        )
        get_default().synchronize()
        found.append([*want, mine, *got, theirs.array])
    if forked:
        get_default().close()
        assert not machine.left()
    return found


@pytest.mark.parametrize(
    ("mode", "size"),
    [*(("threads on one GPU", size) for size in (1, 2, 5)), *((mode, 3) for mode in MODES)],
)
def test_the_same_as_on_the_cpu(mode: str, size: int, machine: Machine) -> None:
    forked = "virtual" not in MODES[mode]
    ranks = collectives.spawn(both, size, f"mesh-{size}", (machine, forked), **MODES[mode])
    for rows in ranks:
        for case, row in zip(CASES, rows, strict=True):
            for want, got in zip(row[:3], row[3:], strict=True):
                assert want.dtype == got.dtype and want.tobytes() == got.tobytes(), case


class Counted(StreamKernels):
    """Counts what makes the host wait."""

    waits: dict[int, int] = {}  # noqa: RUF012

    def _wait(self) -> None:
        self.waits[threading.get_ident()] = self.waits.get(threading.get_ident(), 0) + 1

    def read(self, array: Any) -> np.ndarray:
        self._wait()
        return super().read(array)

    def nonzero(self, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._wait()
        return super().nonzero(array)

    def parted(self, arrays: Any, array: np.ndarray, among: np.ndarray) -> Any:
        self._wait()
        return super().parted(arrays, array, among)


def waits(rank: int, mode: str) -> int:
    values, indices = vector(rank, 0, 20)
    residual = put(np.zeros(NUMEL, np.float32))
    me = threading.get_ident()
    before = Counted.waits.get(me, 0)
    collectives.sparse_allreduce(put(values), put(indices), NUMEL, 9, residual=residual, mode=mode)
    return Counted.waits.get(me, 0) - before


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_host_waits_twice_for_any_number_of_ranks(
    size: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "LibraryGpu", Counted)
    for mode in ("gtopk", "topk", "dense"):
        how = MODES["threads on one GPU"]
        assert collectives.spawn(waits, size, f"mesh-{size}", (mode,), **how) == [2] * size


def with_detours(rank: int) -> list[Any]:
    values, indices = vector(rank, 1, 30)
    residual = put(np.zeros(NUMEL, np.float32))
    found = collectives.sparse_allreduce(
        put(values), put(indices), NUMEL, 12, residual=residual, mode="gtopk"
    )
    get_default().synchronize()
    return [dense((values, indices)), found, residual.array]


@pytest.mark.parametrize("name", ["ring-7", "dgx1-v100"])
@pytest.mark.parametrize("mode", ["threads on one GPU", "a process a GPU"])
def test_no_mass_is_lost_where_ranks_forward(mode: str, name: str, machine: Machine) -> None:
    size = 7 if name == "ring-7" else 8
    rows = collectives.spawn(with_detours, size, name, **MODES[mode])
    assert all(np.array_equal(row[1], rows[0][1]) for row in rows)
    kept = dense(rows[0][1]) + np.sum([row[2] for row in rows], axis=0)
    assert kept.tolist() == np.sum([row[0] for row in rows], axis=0).tolist()


@on_gpus(1, "processes on one GPU")
def test_results_have_memory_of_their_own(rank: int) -> None:
    """Nothing of the result lies in what was given."""
    values, indices = (put(x) for x in vector(0, 0, 9))
    found = collectives.sparse_allreduce(values, indices, NUMEL, 9, conserve=False, mode="gtopk")
    assert not any(
        np.shares_memory(a, b.array) for a, b in zip(found, (values, indices), strict=True)
    )


@on_gpus(2, "threads on one GPU", "processes on one GPU")
def test_what_a_rank_gives_wrong_is_told_to_all_who_may_go_on(rank: int) -> None:
    values, indices = vector(rank, 0, 9)
    said = []

    def call(values: Any, indices: Any, k: int = 9, residual: Any = None) -> None:
        residual = put(np.zeros(NUMEL, np.float32)) if residual is None else residual
        error = failure(
            lambda: collectives.sparse_allreduce(values, indices, NUMEL, k, residual=residual)
        )
        said.append(str(error or "no error"))

    call(put(values), put(indices))  # from now on its GPU is known
    assert said.pop() == "no error"
    call(put(values), put(indices[::-1] if rank == 1 else indices))
    call(put(values), put(indices), k=9 - rank)
    call(put(values), put(indices), residual=np.zeros(NUMEL, np.float32) if rank == 1 else None)
    call(put(values), indices)
    if rank:
        call(values, indices, residual=np.zeros(NUMEL, np.float32))
    else:
        call(put(values), put(indices))
    far = {"device": 5} if rank == 1 else {}
    call(put(values, **far), put(indices, **far), residual=put(np.zeros(NUMEL, np.float32), **far))
    call(put(values), put(indices))
    assert '[60, 9, "sum", "auto", true, "float32", "gpu"]; rank 1: [60, 8,' in said[1]
    assert said[3] == "values and indices must be of one library and on one device"
    assert '"gpu"]; rank 1: [60, 9, "sum", "auto", true, "float32", "cpu"]' in said[4]
    assert said[6] == "no error"
    if rank == 1:
        assert said[5] == "rank 1 runs on GPU 0; the tensor is on GPU 5"
        assert said[0] == f"indices must ascend from 0 to {NUMEL - 1} at most, all different"
        assert "on the values' device" in said[2]
    else:
        assert all("ranks [1]: refused its arguments" in said[i] for i in (0, 2, 5))
        assert "ranks [0]: told of its sparse_allreduce" in said[5]


@on_gpus(2, "processes on one GPU")
def test_a_graph_is_refused(rank: int, machine: Machine) -> None:
    machine.ours()[0].captured[9] = 1
    values, indices = (put(x, 9) for x in vector(rank, 0, 9))
    found = failure(lambda: collectives.sparse_allreduce(values, indices, NUMEL, 9, conserve=False))
    machine.ours()[0].captured.clear()
    assert "cannot be captured into a graph" in str(found)


@pytest.mark.parametrize("how", ["gtopk", "topk", "dense"])
@on_gpus(3, "threads on one GPU", "a process a GPU", timeout=60)
def test_no_result_is_given_when_a_rank_leaves_half_way(rank: int, how: str, mode: str) -> None:
    """Rank 2 makes the first half of a second call. Nothing but the deadline frees the others,
    whatever they wait for. Where each has its own, rank 1's is far, as it may begin to wait long
    before rank 0 does."""
    comm = get_default()
    values, indices = vector(rank, 0, 9)
    rest = put(np.zeros(NUMEL, np.float32))

    def call() -> None:
        comm.sparse_allreduce(put(values), put(indices), NUMEL, 9, residual=rest, mode=how)

    call()
    hurry(comm, 30 if rank == 1 and mode == "a process a GPU" else 1)
    if rank == 2:
        agree = comm._calls.gather

        def leave(what: str, said: bytes) -> list[bytes]:
            agree(what, said)
            comm._calls.gather = agree  # type: ignore[method-assign]
            raise ValueError("rank 2 leaves")

        comm._calls.gather = leave  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="rank 2 leaves"):
            call()
        return
    with pytest.raises((CollectiveTimeout, CollectiveAborted)) as raised:
        call()
    # where all send to all, 0 and 1 wait for each other as well
    assert "rank 2" in str(raised.value) or how == "dense", raised.value


@on_gpus(4, "a process a GPU", timeout=60)
def test_what_was_not_received_is_not_sent_on(rank: int) -> None:
    """Rank 3 comes when the others gave up. Rank 2 waits for it, and the root for 2, which has
    failed before the root's own deadline."""
    comm, rest = get_default(), put(np.zeros(NUMEL, np.float32))

    def call(case: int) -> None:
        values, indices = vector(rank, case, 9)
        comm.sparse_allreduce(put(values), put(indices), NUMEL, 9, residual=rest, mode="gtopk")

    call(0)
    cuda.open_device(CURRENT.index).synchronise(0)
    before = rest.array.copy()
    hurry(comm, 1)
    agree = comm._calls.gather

    def wait(what: str, said: bytes) -> list[bytes]:
        rows = agree(what, said)
        comm._calls.gather = agree  # type: ignore[method-assign]
        time.sleep({3: 3.0, 0: 0.1}.get(rank, 0))
        return rows

    comm._calls.gather = wait  # type: ignore[method-assign]
    raised = failure(lambda: call(1))
    cuda.open_device(CURRENT.index).synchronise(0)
    assert type(raised).__name__ in ("CollectiveTimeout", "CollectiveAborted"), raised
    assert (rest.array == before).all()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
@on_gpus(3, "threads on one GPU", "a process a GPU", timeout=200)
def test_a_rank_without_memory_frees_the_others_at_once(rank: int, error: type[Exception]) -> None:
    """torch says so by a RuntimeError, CuPy by a MemoryError."""
    comm = get_default()
    values, indices = vector(rank, 0, 9)
    rest = put(np.zeros(NUMEL, np.float32))

    def call() -> None:
        comm.sparse_allreduce(put(values), put(indices), NUMEL, 9, residual=rest, mode="gtopk")

    call()
    start = time.monotonic()
    if rank == 0:
        StreamKernels.fail = threading.get_ident(), error("no room")
    raised = failure(call)
    StreamKernels.fail = None
    assert time.monotonic() - start < 100
    assert ("rank 0" if rank else "no room") in str(raised)


def with_little_room(rank: int, mode: str) -> tuple[str, float]:
    values, indices = (put(x) for x in vector(rank, 0, 20))
    rest = put(np.zeros(NUMEL, np.float32))
    error = failure(
        lambda: collectives.sparse_allreduce(values, indices, NUMEL, 9, residual=rest, mode=mode)
    )
    collectives.barrier()
    return str(error or "no error"), float(np.abs(rest.array).sum())


def test_auto_takes_what_the_gpu_has_room_for(machine: Machine) -> None:
    """The all-gather, the fastest here, needs more blocks."""
    how: Any = {**MODES["a process a GPU"], "max_blocks": 4}
    assert sparse_costs(load("mesh-8"), NUMEL, 9)[0].mode == "topk"
    for mode in ("topk", "auto"):
        rows = collectives.spawn(with_little_room, 8, "mesh-8", (mode,), **how)
        assert len({said for said, _ in rows}) == 1
        assert ("no error" in rows[0][0]) == (mode == "auto")


def test_a_call_without_room_leaves_the_residual_alone(machine: Machine) -> None:
    how: Any = {**MODES["threads on one GPU"], "max_blocks": 2}
    for said, kept in collectives.spawn(with_little_room, 8, "mesh-8", ("gtopk",), **how):
        assert "pairwise needs 8 thread blocks" in said and kept == 0


@on_gpus(2, "processes on one GPU")
def test_launches_are_the_callers_own_beside_calls_on_the_cpu(rank: int) -> None:
    """The kernels of a call are launched on the thread that makes it, as a library's current stream
    is its thread's."""
    comm = get_default()
    work = comm.allreduce(np.ones(1 << 20, np.float32), async_op=True)
    values, indices = (put(x) for x in vector(rank, 0, 9))
    StreamKernels.threads_seen.clear()
    comm.sparse_allreduce(values, indices, NUMEL, 9, conserve=False)
    work.wait()
    assert StreamKernels.threads_seen == {threading.get_ident()}
