"""Sparse all-reduce: nothing is lost, for any number of ranks; what the paper's form loses."""

from __future__ import annotations

import json
import math
import time
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import on_ranks

from linkweave import collectives
from linkweave.collectives import CollectiveError, get_default
from linkweave.collectives.calls.sparse.backend import Wire
from linkweave.collectives.calls.sparse.host import HostBackend
from linkweave.collectives.calls.sparse.modes import gtopk
from linkweave.collectives.planning.sparse_tree import merge_tree
from linkweave.kernels import topk_abs
from tests.cpu.helpers import NUMEL, dense, vector


def cases(rank: int, size: int) -> list[Any]:
    found = []
    for case, (k, which) in enumerate(product((0, 1, 3, 7, 20, NUMEL), range(3))):
        entries = (k, min(NUMEL, 2 * k + 1), 0)[which]
        residual = np.full(NUMEL, float(rank), np.float32)
        result = collectives.sparse_allreduce(
            *vector(rank, case, entries), NUMEL, k, residual=residual, mode="gtopk"
        )
        found.append((k, dense(vector(rank, case, entries)), result, residual - rank))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 13, 17])
def test_no_mass_is_lost(size: int) -> None:
    ranks = collectives.spawn(cases, size, args=(size,))
    for rows in zip(*ranks, strict=True):
        k, _, (values, indices), _ = rows[0]
        assert all(r[2][0].tobytes() == values.tobytes() for r in rows)
        assert all(r[2][1].tobytes() == indices.tobytes() for r in rows)
        assert indices.size <= k and (np.diff(indices) > 0).all()
        given = np.sum([r[1] for r in rows], axis=0)
        kept = dense((values, indices)) + np.sum([r[3] for r in rows], axis=0)
        assert kept.tolist() == given.tolist()


def counted(rank: int, k: int, dtype: str) -> tuple[int, int, int, int]:
    """(entries that came up, bytes sent up, bytes of the message that comes down, entries in it)"""
    calls: Any = get_default()._calls
    sent: list[int] = []
    plain, make = calls.block, calls.make

    def block(nbytes: int) -> Any:
        sent.append(nbytes)
        return plain(nbytes)

    down: list[int] = []
    calls.block = block
    calls.make = lambda request: (down.append(request.buffer.nbytes), make(request))[1]
    backend = HostBackend(*vector(rank, 0, k), NUMEL, np.zeros(NUMEL, np.float32))
    backend.wire = Wire(dtype)
    tree = merge_tree(calls.planner.topology, backend.wire.entry * k)
    found, _, received = gtopk(calls, backend, tree, k)
    return received, sum(sent), down[-1], found[0].size


@pytest.mark.parametrize(
    ("size", "dtype"), [*zip((1, 2, 3, 5, 8, 13), 3 * ("float32", "bfloat16"), strict=True)]
)
def test_bytes_on_the_wire_are_the_models(size: int, dtype: str) -> None:
    """Full vectors: k entries over each of P - 1 hops up, and as many down; 2 (P - 1) k in all."""
    k, entry = 7, Wire(dtype).entry
    found = collectives.spawn(counted, size, args=(k, dtype))
    assert sum(row[0] for row in found) == (size - 1) * k
    assert found[0][0] == k * math.ceil(math.log2(size))  # at the root of a binomial tree
    assert sum(row[1] for row in found) == (size - 1) * k * entry
    assert all(row[2] == k * entry and row[3] == k for row in found)


def test_entries_take_8_bytes_and_6_of_short_values() -> None:
    assert [Wire(name).entry for name in ("float32", "float16", "bfloat16")] == [8, 6, 6]


def short(rank: int, dtype: str) -> list[Any]:
    """Sums beyond 2^8 and 2^11, which 16-bit floats hold only when even."""
    values, indices = vector(rank, 0, 30)
    mine = torch.from_numpy(values * (29 if dtype == "bfloat16" else 201)).to(getattr(torch, dtype))
    found = []
    for mode in ("gtopk", "topk", "dense"):
        residual = np.zeros(NUMEL, np.float32)
        total = collectives.sparse_allreduce(
            mine, torch.from_numpy(indices), NUMEL, 25, residual=residual, mode=mode
        )
        assert total[0].dtype == mine.dtype
        found.append((dense((mine.float().numpy(), indices)), residual,
                      dense((total[0].float().numpy(), total[1].numpy()))))  # fmt: skip
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_16_bits_cannot_hold_stays_in_a_residual(size: int, dtype: str) -> None:
    for rows in zip(*collectives.spawn(short, size, args=(dtype,)), strict=True):
        given, kept = (np.sum([row[i] for row in rows], axis=0) for i in (0, 1))
        assert all(row[2].tobytes() == rows[0][2].tobytes() for row in rows)
        assert (kept + rows[0][2]).tolist() == given.tolist()


def large(rank: int, mode: str) -> tuple[float, float]:
    one = np.array([60_000], np.float16)
    residual = np.zeros(4, np.float32)
    total = collectives.sparse_allreduce(
        one, np.array([2], np.int32), 4, 1, residual=residual, mode=mode
    )
    return float(total[0][0]), float(residual[2])


@pytest.mark.parametrize("mode", ["gtopk", "topk", "dense"])
def test_finite_sums_stay_finite_and_nothing_is_lost(mode: str) -> None:
    found = collectives.spawn(large, 3, args=(mode,))
    assert {total for total, _ in found} == {65504.0}
    assert 65504 + sum(kept for _, kept in found) == 3 * float(np.float16(60_000))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_wires_carry_what_they_round_to(dtype: str) -> None:
    wire = Wire(dtype)
    values = np.array([1.00390625, -3e4, 1e-40, np.inf, np.nan, 65503, 2.5], np.float32)
    rounded = wire.rounded(values)
    want = torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(rounded, want, equal_nan=True)
    room = np.zeros(wire.entry * 7, np.uint8)
    indices = np.arange(7, dtype=np.int32)
    wire.pack((rounded, indices), room)
    back = wire.unpack(room)
    assert np.array_equal(back[0], rounded, equal_nan=True) and np.array_equal(back[1], indices)


def lossy(rank: int, size: int, numel: int, k: int) -> tuple[float, float]:
    """(L1 that neither the result nor a residual holds, L1 of the result), half-correlated."""
    shared = np.random.default_rng(0).standard_normal(numel)
    own = np.random.default_rng([1, rank]).standard_normal(numel)
    gradient = (np.sqrt(0.5) * (shared + own)).astype(np.float32)
    values, indices = topk_abs(gradient, k)
    residual = np.zeros(numel, np.float32)
    result = collectives.sparse_allreduce(
        values, indices, numel, k, residual=residual, mode="gtopk", conserve=False
    )
    missing = dense((values, indices), numel) - residual
    collectives.allreduce(missing)
    missing -= dense(result, numel)
    return float(np.abs(missing).sum()), float(np.abs(result[0]).sum())


@pytest.mark.parametrize(
    ("size", "share"), [(8, 0.10), (16, 0.29), pytest.param(32, 0.56, marks=pytest.mark.slow)]
)
def test_what_the_papers_form_loses(size: int, share: float) -> None:
    lost, kept = collectives.spawn(lossy, size, args=(size, 1_000_000, 1000))[0]
    assert abs(lost / kept - share) < 0.06


@on_ranks(1, 2, 3, 6)
def test_other_modes_give_the_whole_sum(rank: int, size: int) -> None:
    mine = vector(rank, 0, 9)
    residual = np.zeros(NUMEL, np.float32)
    found = [
        collectives.sparse_allreduce(*mine, NUMEL, 9, residual=residual, mode=mode)
        for mode in ("topk", "dense", "auto")
    ]
    tensors = collectives.sparse_allreduce(
        torch.from_numpy(mine[0]), torch.from_numpy(mine[1]), NUMEL, 9, mode="topk", conserve=False
    )
    assert isinstance(tensors[0], torch.Tensor) and tensors[1].dtype == torch.int32
    assert tensors[0].numpy().tobytes() == found[0][0].tobytes()
    want = np.sum([dense(vector(r, 0, 9)) for r in range(size)], axis=0)
    for pair in found[:2]:
        assert dense(pair).tolist() == want.tolist()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": 61}, "k must be an integer from 0 to 60, not 61"),
        ({"mode": "best"}, "unknown mode 'best'; choose from auto, gtopk, topk, dense"),
        ({"residual": None}, "conserve=True needs a residual"),
        ({"residual": np.zeros(9, np.float32)}, "float32 array of 60 elements"),
        ({"numel": -1}, "numel must be an integer from 0 to 2147483647, not -1"),
        (
            {"values": np.ones(5)},
            "values must be float32, float16, bfloat16 in one dimension, one for each",
        ),
        ({"indices": np.arange(5)}, "indices must be int32, not int64"),
        ({"values": torch.ones(5)}, "values and indices must be of one library"),
        ({"mode": np.array(["gtopk", "topk"])}, "unknown mode array("),
        ({"conserve": np.array([True, False])}, "conserve must be True or False, not array("),
        ({"indices": np.array([1, 2, 2, 3, 4], np.int32)}, "indices must ascend from 0 to 59"),
        ({"indices": np.array([1, 2, 3, 4, 60], np.int32)}, "indices must ascend from 0 to 59"),
        # whose differences wrap round
        ({"indices": np.array([5, -(2**31), -1, 2, 3], np.int32)}, "indices must ascend from 0"),
    ],
)
@on_ranks(2)
def test_bad_arguments(rank: int, changes: dict[str, Any], words: str) -> None:
    values, indices = vector(0, 0, 5)
    arguments: dict[str, Any] = {
        "values": values, "indices": indices, "numel": NUMEL, "k": 5, "mode": "gtopk",
        "residual": np.zeros(NUMEL, np.float32),
    }  # fmt: skip
    with pytest.raises(CollectiveError) as caught:
        collectives.sparse_allreduce(**(arguments | changes))
    collectives.allreduce(np.ones(1, np.float32))  # the ranks are in step
    assert words in str(caught.value)


@on_ranks(2)
def test_arguments_that_differ(rank: int) -> None:
    with pytest.raises(CollectiveError) as caught:
        collectives.sparse_allreduce(
            *vector(0, 0, 5), NUMEL, 5 + rank, mode="gtopk", conserve=False
        )
    text = str(caught.value)
    assert 'rank 0: [60, 5, "sum", "gtopk", false, "float32", "cpu"]; rank 1: [60, 6,' in text


# ---- ranks in disorder --------------------------------------------------------------------------
@on_ranks(2)
def test_another_exchange_is_no_answer(rank: int) -> None:
    comm = get_default()
    with pytest.raises(CollectiveError) as caught:
        if rank:
            comm.split()
        else:
            comm.sparse_allreduce(*vector(0, 0, 5), NUMEL, 5, conserve=False)
    text = str(caught.value)
    assert "ranks [0]: told of its sparse_allreduce; ranks [1]: told of its colors" in text


@on_ranks(4)
def test_what_was_sent_is_kept_until_it_is_read(rank: int, size: int) -> None:
    """A rank that has sent takes new memory at once and fills it; a rank that merges is slow."""
    comm: Any = get_default()
    gather = comm._calls.gather

    def wrapped(what: str, said: bytes) -> list[bytes]:
        found: list[bytes] = gather(what, said)
        if what == "merges":
            if json.loads(said)[0] >= 0:
                comm._later = [comm.empty(9, "float64") for _ in range(50)]
                for x in comm._later:
                    x[:] = -1
            else:
                time.sleep(0.1)
        return found

    comm._calls.gather = wrapped
    values, indices = vector(rank, 0, 9)
    want = np.sum([dense(vector(r, 0, 9)) for r in range(size)], axis=0)
    found = comm.sparse_allreduce(values, indices, NUMEL, NUMEL, conserve=False, mode="gtopk")
    assert dense(found).tolist() == want.tolist()
