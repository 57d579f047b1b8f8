"""Tensors that share memory, or are negated as they are read; ranks given as other integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from on_ranks import on_ranks

from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.calls.operations import refuse_overlaps
from linkweave.topology.checks import shown
from tests.cpu.helpers import error_of


def negated(values: list[float]) -> torch.Tensor:
    """These values, of which memory holds the opposite."""
    x = torch._neg_view(-torch.tensor(values))
    assert x.is_neg() and x.is_contiguous() and x.tolist() == values
    return x


@on_ranks(2)
def test_a_tensor_with_the_negative_bit_keeps_its_sign(rank: int) -> None:
    comm = get_default()
    mine, other = [rank + 1.0, 5.0], [2.0 - rank, 5.0]
    ranks = [[1.0, 5.0], [2.0, 5.0]]
    x = negated(mine)
    assert comm.allgather(x).tolist() == ranks
    assert comm.alltoall(x).tolist() == [mine[rank], other[rank]]
    assert comm.reduce_scatter(x).tolist() == [[3.0], [10.0]][rank]
    out = negated([0.0, 0.0])
    assert comm.allreduce(x, out=out) is out and out.tolist() == [3.0, 10.0]
    assert x.tolist() == mine
    comm.allreduce([x, out])
    assert x.tolist() == [3.0, 10.0] and out.tolist() == [6.0, 20.0]
    y = negated(mine)
    comm.broadcast(y, 1)
    assert y.tolist() == ranks[1]
    comm.allreduce(y)
    assert y.tolist() == [4.0, 10.0]
    assert "a gradient queue needs" in error_of(comm.allreduce_queue(y, [2]).wait)
    imaginary = torch.imag(torch.complex(torch.zeros(3), torch.ones(3)).conj())
    assert imaginary.is_neg() and comm.allgather(imaginary).tolist() == [[-1.0] * 3] * 2
    where = torch.tensor([0, 3], dtype=torch.int32)
    values, indices = comm.sparse_allreduce(x, where, 5, 2, conserve=False)
    assert values.tolist() == [6.0, 20.0] and indices.tolist() == [0, 3]


@on_ranks(2)
def test_overlaps_are_refused_and_nothing_is_written(rank: int) -> None:
    comm = get_default()
    told = "out overlaps the input"
    for library in (np, torch):
        x: Any = library.arange(4).reshape(2, 2)
        y, row = library.zeros(2, dtype=x.dtype), x.reshape(-1)
        calls: list[tuple[str, Callable[..., Any], Any, Any]] = [
            (told, comm.allreduce, x, x.T),
            (told, comm.alltoall, x, x.T),
            (told, comm.alltoall, row[1:3], row[:2]),
            (told, comm.reduce_scatter, x.T, x[:1]),
            (told, comm.reduce_scatter, x, x[1 - rank : 2 - rank]),
            (told, comm.allgather, x[1 - rank], x),
            ("out overlaps the input (out[0], input 1)", comm.allreduce, [*x], [x[1], y]),
            ("tensors 0 and 1 of out share memory", comm.allreduce, [*x], [y, y]),
            ("tensors 0 and 2 of the list share memory", comm.allreduce, [*x, x[:, 0]], None),
        ]
        for words, call, given, out in calls:
            assert words in error_of(call, given, out=out), words
        assert x.tolist() == [[0, 1], [2, 3]]
        comm.allreduce(x[:, 0], out=x[:, 1])  # interleaved, yet apart
        assert x.tolist() == [[0, 0], [2, 4]]
        comm.allreduce([*x], out=[x[0], y])
        assert x.tolist() == [[0, 0], [2, 4]] and y.tolist() == [4, 8]
        comm.allreduce(x.T, out=x.T)
        comm.allreduce([x[:, 0], x[:, 1]])
        assert x.tolist() == [[0, 0], [8, 16]]


def test_what_overlaps() -> None:
    row = np.arange(40)
    apart: list[tuple[Any, Any]] = [
        (row[:20], row[20:]), (row[::2], row[1::2]), (row[::-2], row[::2]), (row[:0], row[:5]),
        (row.reshape(5, 8)[:, :4], row.reshape(5, 8)[:, 4:]), (row[3:4].reshape(()), row[4:]),
    ]  # fmt: skip
    shared: list[tuple[Any, Any]] = [
        (row[:20], row[19:]), (row[::2], row[::3]), (row[::-1], row[:1]), (row, row[5:6]),
        (row.reshape(5, 8).T, row.reshape(8, 5)), (row[3:4].reshape(()), row[3:]),
    ]  # fmt: skip
    for pairs, refused in ((apart, False), (shared, True)):
        for a, b in pairs:
            cases = [[a, b], [b, a]]
            if min(*a.strides, *b.strides, 0) >= 0:  # as all of torch's are
                cases.append([torch.from_numpy(a), torch.from_numpy(b)])
            for x, y in cases:
                assert bool(error_of(refuse_overlaps, [], [x, y])) == refused, (x, y)
                assert bool(error_of(refuse_overlaps, [x], [y])) == refused, (x, y)


@on_ranks(2)
def test_roots_of_any_integer_type_and_what_is_none(rank: int) -> None:
    comm = get_default()
    for root in (1, np.int64(1), np.uint8(1), torch.tensor(1)):
        x = np.full(3, rank)
        comm.broadcast(x, root)
        assert x.tolist() == [1] * 3
        assert comm.reduce(x, root=root) is None
        assert x.tolist() == ([2] * 3 if rank == 1 else [1] * 3)
    for bad in ([0], True, np.bool_(True), 1.0, None, "0", np.array([0, 1])):
        for call in (comm.broadcast, lambda x, root: comm.reduce(x, root=root)):
            said = error_of(call, np.ones(3), bad if rank else 0)
            words = f"root must be an integer from 0 to 1, not {shown(bad)}"
            assert (words if rank else "ranks [1]: refused its arguments") in said, said
    for bad in ([], None, 3):
        said = error_of(comm.allreduce, np.ones(3), algorithm=bad if rank else "auto")
        assert (f"not {bad!r}" if rank else "ranks [1]: refused its arguments") in said, said
    for bad in ([], None, np.ones(2)):
        said = error_of(comm.allreduce, np.ones(3), bad if rank else "sum")
        assert (f"unknown op {bad!r}" if rank else "ranks [1]: refused its") in said, said
