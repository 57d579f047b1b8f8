"""Calls of a kind that is known: from one tensor into another, wherever these lie."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import on_ranks

from linkweave.collectives import CollectiveError
from linkweave.collectives.calls.communicator import get_default
from tests.cpu.helpers import error_of

COUNTS = 1, 16, 50_000  # elements of a row: through slots, at once and in many chunks


def given(rank: int, size: int, count: int) -> np.ndarray:
    """Row r is for rank r in calls that divide rows."""
    return (np.arange(size * count).reshape(size, count) + 1000 * rank).astype(np.int64)


def expected(kind: str, rank: int, size: int, count: int, root: int = 0) -> np.ndarray:
    every = [given(r, size, count) for r in range(size)]
    if kind in ("allgather", "gather"):
        return np.stack(every)
    if kind == "scatter":
        return every[root][rank : rank + 1]
    if kind == "alltoall":
        return np.stack([x[rank] for x in every])
    total = sum(every)
    return total[rank : rank + 1] if kind == "reduce_scatter" else total


def made(kind: str, how: str, comm: Any, shape: tuple[int, ...], fill: Any = None) -> Any:
    """A tensor: private, or in shared memory on all ranks or on every other one."""
    shared = how == "shared" or (how == "mixed" and comm.rank % 2 == 0)
    x = comm.empty(shape, np.int64) if shared else np.empty(shape, np.int64)
    x[...] = -7 if fill is None else fill
    return torch.from_numpy(np.asarray(x)) if how == "torch" else x


@on_ranks(1, 2, 3, 5)
def test_calls_from_one_tensor_into_another(rank: int) -> None:
    comm: Any = get_default()
    size = comm.size
    for count in COUNTS:
        x = given(rank, size, count)
        for kind in ("allgather", "reduce_scatter", "alltoall", "reduce", "allreduce"):
            want = expected(kind, rank, size, count)
            call = getattr(comm, kind)
            for how in ("private", "torch", "shared", "mixed") * 2:  # made anew each time
                mine, out = made(kind, how, comm, x.shape, x), made(kind, how, comm, want.shape)
                found = call(mine, out=out)
                if kind == "reduce" and rank:
                    assert found is None and (np.asarray(out) == -7).all()
                else:
                    assert found is out and np.array_equal(np.asarray(out), want), (kind, how)
                assert np.array_equal(np.asarray(mine), x), (kind, how)
                if kind not in ("reduce", "allreduce"):
                    assert np.array_equal(np.asarray(call(mine)), want)


@pytest.mark.parametrize(
    ("size", "topology"), [*((size, "auto") for size in (1, 2, 3, 5)), (4, "ring-4")]
)
@on_ranks(params=["topology"])
def test_gather_and_scatter(rank: int) -> None:
    """Only the root has the result of a gather, or the input of a scatter."""
    comm: Any = get_default()
    size = comm.size
    for count, root in product(COUNTS, {0, size - 1}):
        x = given(rank, size, count)
        whole, part = (expected(kind, rank, size, count, root) for kind in ("gather", "scatter"))
        for how in ("private", "torch", "shared", "mixed") * 2:
            mine, out = made("", how, comm, x.shape, x), made("", how, comm, whole.shape)
            found = comm.gather(mine, root, out=out)
            if rank == root:
                assert found is out and np.array_equal(np.asarray(out), whole), how
            else:
                assert found is None and (np.asarray(out) == -7).all(), how
            assert np.array_equal(np.asarray(mine), x), how
            out = made("", how, comm, part.shape)
            found = comm.scatter(mine if rank == root else None, root, out=out)
            assert found is out and np.array_equal(np.asarray(out), part), how
            assert np.array_equal(np.asarray(mine), x), how
            found = comm.gather(mine, root)
            assert np.array_equal(np.asarray(found), whole) if rank == root else found is None
            if rank == root:
                assert np.array_equal(np.asarray(comm.scatter(mine, root)), part)
            else:
                comm.scatter(None, root, out=out)
        scalar = np.full((), float(rank))
        out = np.zeros(size) if rank == root else None
        comm.gather(scalar, root, out=out)
        assert out is None or out.tolist() == list(range(size))
        if rank == root:  # in place
            every = np.zeros(whole.shape, np.int64)
            every[rank] = x
            comm.gather(every[rank], root, out=every)
            assert np.array_equal(every, whole)
            comm.scatter(every[rank], root, out=every[rank, rank : rank + 1])
            assert np.array_equal(every, whole)
        else:
            comm.gather(x, root)
            comm.scatter(None, root, out=x[:1])


@on_ranks(2)
def test_wrong_gathers_and_scatters_are_told(rank: int) -> None:
    comm: Any = get_default()
    said = [
        error_of(comm.gather, np.ones(2 + rank)),
        error_of(comm.gather, np.ones(2), 2),
        error_of(comm.gather, np.ones(2), out=None if rank else np.ones((2, 3))),
        error_of(lambda: comm.scatter(None if rank else np.ones(4))),
        error_of(lambda: comm.scatter(None if rank else np.ones(3), out=np.ones(2))),
        error_of(lambda: comm.scatter(None if rank else np.ones(4), out=np.ones(2 + rank))),
    ]
    comm.allreduce(x := np.ones(2))
    words = ("gather(4 x", "root must be an integer from 0 to 1, not 2",
             "out must be of shape (2, 2)", "scatter needs out on rank 1: its root is 0",
             "scatter splits rows over 2 ranks", "scatter(6 x float64, root 0)")  # fmt: skip
    assert x[0] == 2
    assert rank or "gather(6 x float64 in all, root 0)" in said[0]
    for at, (found, word) in enumerate(zip(said, words, strict=True)):
        assert word in found or (at == 0 and rank == 1), found


@on_ranks(1, 2, 3, 5, 7)
def test_results_in_the_memory_of_the_input(rank: int) -> None:
    """Results that lie in, or right behind, the memory of the input."""
    comm: Any = get_default()
    size, count = comm.size, 40
    x = given(rank, size, count)
    for _ in range(3):
        both = np.concatenate([x, x])
        assert comm.alltoall(both[:size], both[size:]) is not None
        assert np.array_equal(both[size:], expected("alltoall", rank, size, count))
        assert np.array_equal(both[:size], x)
        same = x.copy()
        comm.alltoall(same, same)
        assert np.array_equal(same, expected("alltoall", rank, size, count))
        whole = x.copy()
        comm.reduce_scatter(whole, out=whole[rank : rank + 1])
        assert np.array_equal(whole[rank : rank + 1], expected("reduce_scatter", rank, size, count))
        assert np.array_equal(np.delete(whole, rank, 0), np.delete(x, rank, 0))
        every = np.zeros((size, *x.shape), np.int64)
        every[rank] = x
        comm.allgather(every[rank], out=every)
        assert np.array_equal(every, expected("allgather", rank, size, count))


@on_ranks(2)
def test_tensors_of_another_shape_are_checked_as_in_a_first_call(rank: int) -> None:
    """With as many bytes as a call that is known."""
    comm: Any = get_default()
    comm.reduce_scatter(np.ones((4, 3)))
    comm.alltoall(np.ones((4, 3)))
    for call in (comm.reduce_scatter, comm.alltoall):
        said = error_of(call, np.ones((3, 4)))
        assert "splits rows over 2 ranks" in said, said
        said = error_of(call, np.ones(()))
        assert "splits rows over 2 ranks" in said, said
    comm.allgather(np.ones(6))
    assert comm.allgather(np.ones((2, 3))).shape == (2, 2, 3)
    for out in (np.empty((3, 4)), np.empty((2, 6), np.float32), torch.empty(2, 6)):
        with pytest.raises(CollectiveError, match="out must be"):
            comm.allgather(np.ones(6), out=out)
    frozen = np.ones(6)
    frozen.flags.writeable = False
    assert comm.allgather(frozen).tolist() == [[1.0] * 6] * 2


@on_ranks(2)
def test_a_call_works_on_the_memory_that_a_tensor_has_when_its_turn_comes(rank: int) -> None:
    """A tensor that gets other memory after an asynchronous call was asked for."""
    comm: Any = get_default()
    x = torch.ones(8)
    comm.allreduce(x)
    with comm._worker._calls._turn:  # so that nobody begins the call
        work = comm.allreduce(x, async_op=True)
        x.data = torch.full((8,), 5.0)
    work.wait()
    assert x[0] == 10
