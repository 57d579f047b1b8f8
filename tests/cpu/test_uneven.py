"""Parts of different sizes, and sparse all-reduces that average or run beside other work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from on_ranks import on_ranks

from linkweave.collectives.calls.communicator import get_default
from tests.cpu.helpers import error_of


def rows(rank: int, size: int, salt: int) -> list[int]:
    """How many rows a rank sends to each."""
    return [(rank * 7 + other * 5 + salt * 3) % 6 for other in range(size)]


def dealt(rank: int, dtype: torch.dtype, width: int) -> None:
    comm = get_default()
    size = comm.size
    for salt in range(4):
        splits = [rows(r, size, salt) for r in range(size)]
        sent = [
            torch.arange(sum(of) * width).reshape(-1, width).add(100 * r).to(dtype)
            for r, of in enumerate(splits)
        ]
        want = torch.cat([torch.split(sent[r], splits[r])[rank] for r in range(size)])
        comes = [of[rank] for of in splits]
        got = comm.alltoall(sent[rank], None, splits[rank], comes if salt % 2 else None)
        assert torch.equal(got, want), (salt, got, want)
        out = torch.zeros_like(want)
        work = comm.alltoall(sent[rank], out, splits[rank], async_op=True)
        assert work.wait() is out and torch.equal(out, want)
    counts = [(3 * r + 1) % 4 for r in range(size)]
    parts = [np.full((n, width), r, np.int32) for r, n in enumerate(counts)]
    found = comm.allgather(parts[rank], counts=counts)
    assert np.array_equal(found, np.concatenate(parts))
    assert comm.allgather(parts[rank][:0], counts=[0] * size).shape == (0, width)


@pytest.mark.parametrize(
    ("size", "topology"),
    [(1, "auto"), *((n, name) for n in (2, 3, 5, 8) for name in ("auto", f"ring-{n}"))],
)
@on_ranks(params=["topology"])
def test_uneven_parts(rank: int) -> None:
    for dtype, width in ((torch.float32, 3), (torch.bfloat16, 1), (torch.bool, 5)):
        dealt(rank, dtype, width)


@pytest.mark.parametrize("topology", ["auto", "ring-3", "mesh-3"])
@on_ranks(3, params=["topology"])
def test_long_parts(rank: int) -> None:
    """Blocks longer than a slot, and one rank that sends nothing."""
    comm = get_default()
    sizes = [[0, 0, 0], [40_001, 3, 17], [9, 70_000, 0]]
    x = np.arange(sum(sizes[rank]), dtype=np.float64) + rank * 1e6
    starts = [np.cumsum([0, *of]) for of in sizes]
    want = [np.arange(starts[r][rank], starts[r][rank + 1]) + r * 1e6 for r in range(3)]
    found = comm.alltoall(x, in_splits=sizes[rank])
    assert np.array_equal(found, np.concatenate(want))


@on_ranks(2)
def test_splits_that_make_no_sense_are_refused(rank: int) -> None:
    comm = get_default()
    x = np.ones((4, 2), np.float32)
    said = [
        error_of(comm.alltoall, x, in_splits=[4]),
        error_of(comm.alltoall, x, in_splits=[3, -1 + 2 * rank]),
        error_of(comm.alltoall, x, in_splits=[3, 2]),
        error_of(comm.alltoall, x, in_splits=[3, 1], out_splits=[3, 3]),
        error_of(comm.alltoall, x[:, : 1 + rank], in_splits=[3, 1]),
        error_of(comm.alltoall, x if rank else x.astype(np.float64), in_splits=[3, 1]),
        error_of(comm.alltoall, np.float32(1), in_splits=[3, 1]),
        error_of(comm.allgather, x, counts=[4, 3]),
        error_of(comm.allgather, x, counts="44"),
        error_of(comm.allgather, x, counts=[4, 4], out=np.ones((4, 4), np.float32)),
        error_of(comm.alltoall, x, np.ones(3, np.float32), [2, 2]),
    ]
    comm.barrier()
    if rank == 1:
        assert "refused its arguments" in said[1] or "in_splits adds up" in said[1]
        return
    for found, words in zip(said, (
        "in_splits must be 2 integers >= 0", "in_splits must be 2 integers",
        "in_splits adds up to 5 rows",
        "out_splits of rank 0 says [3, 3] rows come, by rank, but the ranks send [3, 3]",
        "the ranks' rows differ: [4, 8] bytes", "the ranks' rows differ: [16, 8] bytes",
        "a torch tensor", "refused its arguments: counts says 3 rows", "counts must be 2 integers",
        "out must be of shape (8, 2)", "out must be of shape (4, 2)",
    ), strict=True):  # fmt: skip
        assert words in found or "refused its arguments" in found, (words, found)


@on_ranks(1, 3)
def test_sparse_averages_and_asynchronous_calls(rank: int) -> None:
    comm = get_default()
    rng = np.random.default_rng(rank)
    indices = np.sort(rng.choice(60, 9, replace=False)).astype(np.int32)
    vectors = rng.integers(-8, 9, 9).astype(np.float32)
    found = []
    for mode in ("gtopk", "topk", "dense", "auto"):
        total = comm.sparse_allreduce(vectors, indices, 60, 9, mode=mode, conserve=False)
        mean = comm.sparse_allreduce(vectors, indices, 60, 9, "avg", mode=mode, conserve=False)
        works = [
            comm.sparse_allreduce(
                vectors, indices, 60, 9, "avg", mode=mode, conserve=False, async_op=True
            )
            for _ in range(2)
        ]
        found.append(np.array_equal(mean[0], total[0] / np.float32(comm.size)))
        found += [np.array_equal(work.wait()[0], mean[0]) for work in works]
    half = torch.from_numpy(vectors).to(torch.float16), torch.from_numpy(indices)
    mean = comm.sparse_allreduce(*half, 60, 60, "avg", mode="topk", conserve=False)
    found.append(mean[0].dtype == torch.float16)
    found.append("op sum or avg, not 'max'" in error_of(
        comm.sparse_allreduce, vectors, indices, 60, 9, "max", conserve=False))  # fmt: skip
    assert all(found)
