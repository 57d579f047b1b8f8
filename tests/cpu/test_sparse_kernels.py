"""Top-k, fused selection, merging and rows on the CPU against plain references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linkweave import kernels
from linkweave.kernels.topk import cpu as topk
from tests.cpu.helpers import GRADIENTS, KINDS, row


def reference(x: np.ndarray, k: int) -> np.ndarray:
    """Positions by a sort of everything: NaN first, larger first, earlier first."""
    wide = x.astype(np.float64)
    nan = np.isnan(wide)
    order = np.lexsort((np.arange(x.size), -np.where(nan, 0, np.abs(wide)), ~nan))
    return np.sort(order[:k])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_topk_is_exact(kind: str, dtype: str, threads: int) -> None:
    for n in (1, 2, 63, 64, 65, 1009, 200_003):
        x = row(kind, n).astype(dtype)
        for k in {0, 1, 2, n // 1000, n // 4, n // 2, n - 1, n} & set(range(n + 1)):
            values, indices = kernels.topk_abs(x, k)
            assert indices.dtype == np.int32 and values.dtype == x.dtype
            assert indices.tolist() == reference(x, k).tolist(), (n, k)
            assert values.tobytes() == x[indices].tobytes()


def test_nothing_of_nothing() -> None:
    values, indices = kernels.topk_abs(np.empty(0, np.float32), 0)
    assert values.shape == indices.shape == (0,)


def test_a_sample_that_misleads_is_noticed() -> None:
    """All that is large lies where nothing is sampled."""
    n = 1 << 20
    x = np.full(n, 1e-3, np.float32)
    free = np.setdiff1d(np.arange(n), topk.sample_positions(n))
    x[free[:5000]] = np.arange(1, 5001)
    values, indices = kernels.topk_abs(x, 3000)
    assert values.tolist() == list(range(2001, 5001))
    assert indices.tolist() == free[2000:5000].tolist()


def test_torch_tensors_of_every_dtype() -> None:
    x = torch.from_numpy(row("special", 100_003))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        y = x.to(dtype)
        values, indices = kernels.topk_abs(y, 500)
        assert (values.dtype, indices.dtype) == (dtype, torch.int32)
        assert indices.tolist() == reference(y.double().numpy(), 500).tolist()
        assert torch.equal(values.view(torch.uint8), y[indices.long()].view(torch.uint8))
    parts = torch.randn(1000, requires_grad=True)[::2]
    assert kernels.topk_abs(parts, 3)[1].tolist() == reference(parts.detach().numpy(), 3).tolist()


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_real_gradients(name: str, dtype: str, threads: int) -> None:
    g = GRADIENTS[name].astype(dtype)
    for k in (0, 1, g.size // 1000, g.size // 100, g.size // 4, g.size - 1, g.size):
        assert kernels.topk_abs(g, k)[1].tolist() == reference(g, k).tolist()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_indices_beyond_32_bits() -> None:
    n = (1 << 31) + 17
    x = np.zeros(n, np.float16)
    x[[5, 1 << 30, n - 1]] = 1, -2, 3
    values, indices = kernels.topk_abs(x, 4)
    assert indices.dtype == np.int64
    assert indices.tolist() == [0, 5, 1 << 30, n - 1]
    assert values.tolist() == [0, 1, -2, 3]


@pytest.mark.parametrize(
    ("x", "k", "words"),
    [
        (np.zeros(4, np.float32), 5, "k must be from 0 to 4, not 5"),
        (np.zeros(4, np.float32), -1, "k must be from 0 to 4, not -1"),
        (np.zeros(4, np.float32), 1.5, "k must be an integer, not 1.5"),
        (np.zeros(4, np.float32), True, "k must be an integer, not True"),
        (np.zeros((2, 2), np.float32), 1, "x must have one dimension, not shape (2, 2)"),
        (np.zeros(4), 1, "dtype float64 is not supported; choose from float32, float16, bfloat16"),
        ([1.0], 1, "x must be a NumPy array or a torch tensor, not list"),
        (torch.zeros(4, device="meta"), 1, "x is on meta; all must be on the CPU or on one GPU"),
    ],
)
def test_bad_rows_are_refused(x: Any, k: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        kernels.topk_abs(x, k)
    assert str(caught.value) == words


# ---- selection with a residual -----------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_sparsify_takes_the_largest_sums_and_keeps_the_rest(kind: str, threads: int) -> None:
    for n in (1, 65, 200_003):
        for k in sorted({0, 1, n // 1000, n // 3, n}):
            grad, residual = row(kind, n), row(kind, n, seed=1) * np.float32(0.1)
            total, before = grad + residual, grad.copy()
            values, indices = kernels.sparsify(grad, residual, k)
            assert indices.tolist() == reference(total, k).tolist()
            assert values.tobytes() == total[indices].tobytes()
            total[indices] = 0
            assert residual.tobytes() == total.tobytes()
            assert grad.tobytes() == before.tobytes()


@pytest.mark.parametrize(
    ("kind", "k"),
    [
        ("mostly NaN", 300), ("large where nothing is sampled", 300), ("all equal", 300),
        ("large where samples are", 20_000),
    ],
)  # fmt: skip
def test_sparsify_notices_a_sample_that_misleads(kind: str, k: int, threads: int) -> None:
    n = 200_003
    grad = np.full(n, 1e-3, np.float32)
    if kind == "mostly NaN":  # so that the threshold is NaN
        grad[np.random.default_rng(0).random(n) < 0.9] = np.nan
    elif kind == "large where nothing is sampled":
        free = np.setdiff1d(np.arange(n), topk.sample_positions(n))
        grad[free[:5000]] = np.arange(1, 5001)
    elif kind == "large where samples are":  # so that fewer than k reach the threshold
        samples = topk.sample_positions(n)
        grad[samples] = np.arange(1, samples.size + 1)
    residual = np.zeros(n, np.float32)
    values, indices = kernels.sparsify(grad, residual, k)
    assert indices.tolist() == reference(grad, k).tolist()
    assert values.tobytes() == grad[indices].tobytes()
    grad[indices] = 0
    assert residual.tobytes() == grad.tobytes()


def test_sparsify_takes_a_gradient_that_cannot_be_written() -> None:
    grad, residual = row("random", 1009), np.zeros(1009, np.float32)
    grad.flags.writeable = False
    assert kernels.sparsify(grad, residual, 9)[1].tolist() == reference(grad, 9).tolist()


def test_sparsify_of_half_floats_loses_nothing() -> None:
    grad = torch.randn(3, 1000).to(torch.bfloat16)
    residual = torch.randn(3, 1000)
    total = (grad.float() + residual).reshape(-1)
    values, indices = kernels.sparsify(grad, residual, 50)
    assert values.dtype == torch.float32
    rebuilt = residual.reshape(-1).clone()
    rebuilt[indices.long()] += values
    assert torch.equal(rebuilt, total)


def test_bad_residuals_are_refused_and_nothing_is_changed() -> None:
    grad = np.ones(4, np.float32)
    for residual, words in (
        (np.zeros(4), "residual must be a contiguous, writable float32 array, not float64"),
        (np.zeros(8, np.float32)[::2], "of strides (8,)"),
        (np.zeros(5, np.float32), "grad has shape (4,), residual (5,): they must agree"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            kernels.sparsify(grad, residual, 2)
        assert words in str(caught.value)
    residual = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"k must be from 0 to 4, not 5"):
        kernels.sparsify(grad, residual, 5)
    assert not residual.any()


# ---- merging -----------------------------------------------------------------------------------
def vector(entries: dict[int, float], dtype: Any = np.int32) -> tuple[np.ndarray, np.ndarray]:
    indices = np.array(sorted(entries), dtype)
    return np.array([entries[int(i)] for i in indices], np.float32), indices


sparse_vectors = st.dictionaries(st.integers(0, 30), st.integers(-9, 9), max_size=20)


@settings(max_examples=200, deadline=None)
@given(sparse_vectors, sparse_vectors, st.integers(0, 45))
def test_merging_conserves_the_sum(a: dict[int, int], b: dict[int, int], k: int) -> None:
    kept, dropped = kernels.merge_topk(vector(a), vector(b), k)
    total = {i: a.get(i, 0) + b.get(i, 0) for i in a.keys() | b.keys()}
    assert kept[1].size == min(k, len(total))
    found = {int(i): int(v) for part in (kept, dropped) for v, i in zip(*part, strict=True)}
    assert found == total
    for values, indices in (kept, dropped):
        assert (np.diff(indices) > 0).all() and values.dtype == np.float32
    order = sorted(total, key=lambda i: (-abs(total[i]), i))
    assert sorted(order[:k]) == kept[1].tolist()


def test_vectors_that_are_none_are_refused() -> None:
    good = vector({1: 1.0, 3: 2.0})
    for bad, words in (
        ((good[0], good[1][::-1].copy()), "the second vector's indices must ascend"),
        ((good[0], np.array([3, 3], np.int32)), "the second vector's indices must ascend"),
        ((good[0][:1], good[1]), "one for each of 2 indices, not float32 of shape (1,)"),
        ((good[0].astype(np.float64), good[1]), "b's values must be float32"),
        (vector({1: 1.0}, np.int64), "a's indices are int32, b's int64: they must agree"),
        ((good[0], good[1].astype(np.float32)), "b's indices must be int32 or int64"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            kernels.merge_topk(good, bad, 2)
        assert words in str(caught.value)


# ---- rows --------------------------------------------------------------------------------------
def summed(indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In float32, in the order in which rows come, one by one."""
    unique = np.unique(indices)
    sums = np.zeros((unique.size, *values.shape[1:]), np.float32)
    for i, v in zip(indices, values, strict=True):
        sums[np.searchsorted(unique, i)] += v.astype(np.float32)
    return unique, sums


@pytest.mark.parametrize("num_rows", [7, 1000, 1 << 20, (1 << 40) + 3])
@pytest.mark.parametrize("width", [None, 1, 2, 17, 64])
def test_coalesce_is_exact_and_in_order(num_rows: int, width: int | None, threads: int) -> None:
    rng = np.random.default_rng([num_rows % 1009, width or 0])
    for n in (0, 1, 300):
        indices = rng.integers(0, num_rows, n)
        if n > 200:
            indices[:100] = indices[0]  # many of one row
        shape = (n,) if width is None else (n, width)
        values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(
            np.float32
        )
        unique, sums = kernels.coalesce(indices, values, num_rows)
        want = summed(indices, values)
        assert unique.tolist() == want[0].tolist() and unique.dtype == np.int64
        assert sums.tobytes() == want[1].tobytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_rows_are_summed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    indices = torch.randint(0, 5, (200,), dtype=torch.int32)
    values = torch.randn(200, 3, 2).to(dtype)
    unique, sums = kernels.coalesce(indices, values, 5)
    want = summed(indices.numpy(), values.float().numpy())
    assert (unique.dtype, sums.dtype, tuple(sums.shape)) == (torch.int32, dtype, (5, 3, 2))
    assert unique.tolist() == want[0].tolist()
    assert torch.equal(sums, torch.from_numpy(want[1]).to(dtype))


@pytest.mark.parametrize(
    ("indices", "values", "num_rows", "words"),
    [
        (np.array([0, 7]), np.ones(2, np.float32), 7, "indices[1] is 7; the table has 7 rows"),
        (np.array([0, -1]), np.ones(2, np.float32), 7, "indices[1] is -1; the table has"),
        (np.array([0.0]), np.ones(1, np.float32), 7, "indices must be int32 or int64 in one dim"),
        (np.array([[0]]), np.ones(1, np.float32), 7, "not int64 of shape (1, 1)"),
        (np.array([0]), np.ones(2, np.float32), 7, "1 indices, but values of shape (2,)"),
        (np.array([0]), np.ones(1, np.int32), 7, "dtype int32 is not supported"),
        (np.array([0]), np.ones(1, np.float32), -1, "num_rows must be at least 0, not -1"),
        (np.array([0]), np.ones(1, np.float32), 0, "indices[0] is 0; the table has 0 rows"),
        (np.array([0]), np.ones(1, np.float32), 2.0, "num_rows must be an integer, not 2.0"),
    ],
)
def test_bad_rows_of_a_table_are_refused(
    indices: Any, values: Any, num_rows: Any, words: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        kernels.coalesce(indices, values, num_rows)
    assert words in str(caught.value)


def test_rows_that_are_needed_go_first() -> None:
    indices = np.array([9, 2, 7, 2, 5])
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    prior, delayed = kernels.split_rows(indices, values, np.array([7, 2, 100, 7]))
    assert prior[0].tolist() == [2, 7, 2] and prior[1].tolist() == [[2, 3], [4, 5], [6, 7]]
    assert delayed[0].tolist() == [9, 5] and delayed[1].tolist() == [[0, 1], [8, 9]]
    found = kernels.split_rows(
        torch.from_numpy(indices), torch.from_numpy(values), torch.tensor([9])
    )
    assert found[0][0].tolist() == [9] and isinstance(found[1][1], torch.Tensor)
    with pytest.raises(ValueError, match=r"5 indices, but values of shape \(4, 2\)"):
        kernels.split_rows(indices, values[:4], indices)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_nothing_is_selected_from_nothing(shape: tuple[int, ...]) -> None:
    values, indices = kernels.sparsify(np.zeros(shape, np.float32), np.zeros(shape, np.float32), 0)
    assert (values.size, indices.size) == (0, 0)


def test_rows_of_no_width() -> None:
    indices, values = np.array([3, 1, 3]), np.zeros((3, 0), np.float32)
    unique, sums = kernels.coalesce(indices, values, 4)
    assert unique.tolist() == [1, 3] and sums.shape == (2, 0)
