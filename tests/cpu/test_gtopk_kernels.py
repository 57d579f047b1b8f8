"""Selection of gTop-k on the CPU, against NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linkweave.kernels import gtopk
from linkweave.kernels.gtopk import steps
from linkweave.kernels.parallel import parts
from linkweave.kernels.topk import sparsify
from tests.cpu.casting import same, special
from tests.cpu.triton_checks import OnGpu

HALVES = (torch.float16, torch.bfloat16)
SIZES = (0, 1, 2, 63, 64, 65, 1009, 40009)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparsify, "parts", partial(parts, least=64))


# ---- selection ----------------------------------------------------------------------------------
def ties(n: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-3, 4, n).astype(np.float32))


def zeros_of_both_signs(n: int, seed: int) -> torch.Tensor:
    return ties(n, seed) * 0


def equal(n: int, seed: int) -> torch.Tensor:
    return torch.full((n,), seed + 1.5)


KINDS: tuple[Callable[[int, int], torch.Tensor], ...] = (
    special, ties, equal, zeros_of_both_signs, lambda n, seed: special(n, seed).nan_to_num(2, 1, 1),
)  # fmt: skip


def expected(grad: torch.Tensor, residual: torch.Tensor, k: int) -> list[torch.Tensor]:
    """[values, indices, grad, residual] after a selection."""
    with np.errstate(all="ignore"):
        r = residual.numpy() + grad.float().numpy()
    keys = np.minimum(r.view(np.uint32) & 0x7FFFFFFF, 0x7F800001).astype(np.int64)
    chosen = np.sort(np.argsort(-keys, kind="stable")[:k])
    values = r[chosen]
    r[chosen] = 0
    values, indices, residual = map(torch.from_numpy, (values, chosen.astype(np.int32), r))
    return [plain(x) for x in (values, indices, torch.zeros_like(grad), residual)]


def plain(x: torch.Tensor) -> torch.Tensor:
    """All NaN become one."""
    return torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x


@pytest.mark.parametrize("dtype", (torch.float32, *HALVES), ids=str)
def test_selection_returns_the_bits_of_the_definition(dtype: torch.dtype, threads: int) -> None:
    cases = product(SIZES, KINDS) if threads == 1 else product(SIZES[-1:], KINDS[:2])
    for n, kind in cases:
        for k in sorted({0, min(1, n), n // 100, n // 2, n}):
            grad, residual = kind(n, 0).to(dtype), kind(n, 1)
            want = expected(grad, residual, k)
            values, indices = gtopk.select(grad, residual, k)
            found = [plain(x) for x in (values, indices, grad, residual)]
            assert all(a.shape == b.shape for a, b in zip(found, want, strict=True))
            assert all(same(a, b) for a, b in zip(found, want, strict=True) if a.numel()), (n, k)


@pytest.mark.parametrize("dtype", (torch.float32, *HALVES))
def test_only_the_slices_given_are_written(dtype: torch.dtype) -> None:
    for n, shift in ((1, 1), (65, 3), (1009, 5)):
        whole = [torch.full((n + 8,), 3.0) for _ in range(2)]
        whole[0] = whole[0].to(dtype)
        grad, residual = (x[shift : n + shift] for x in whole)
        values, indices = gtopk.select(grad, residual, n // 2)
        assert (values == 6).all() and indices.tolist() == [*range(n // 2)]
        for x, inside in zip(whole, (0, 6), strict=True):
            want = torch.full((n + 8,), 3.0)
            want[shift : n + shift] = inside
            if x is whole[1]:
                want[shift : shift + n // 2] = 0
            assert same(x, want.to(x.dtype))


def test_parameters_that_require_gradients_may_be_given() -> None:
    grad, residual = torch.ones(3, requires_grad=True), torch.zeros(3)
    gtopk.select(grad, residual, 1)
    assert residual.tolist() == [0, 1, 1] and not grad.any()


integers = st.integers(-(1 << 18), 1 << 18)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(integers, integers), max_size=300), st.floats(0, 1))
def test_nothing_is_lost(rows: list[tuple[int, int]], share: float) -> None:
    g, before = np.array(rows, np.int64).reshape(-1, 2).T
    grad, residual = (torch.from_numpy(x.astype(np.float32)) for x in (g, before))
    values, indices = gtopk.select(grad, residual, int(share * len(g)))
    after = residual.long().numpy().copy()
    after[indices.numpy()] += values.long().numpy()
    assert (after == before + g).all() and not grad.any()


# ---- what is refused ----------------------------------------------------------------------------
X, BUFFER = torch.ones(4), torch.ones(8)
META = torch.ones(4, device="meta")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"grad": None}, "grad must be a tensor on the CPU or a GPU, not NoneType"),
        ({"grad": META}, "grad must be a tensor on the CPU or a GPU, not meta"),
        ({"grad": torch.ones(4).double()}, "grad must be a tensor of torch.float32 or torch.float16"
         " or torch.bfloat16, not torch.float64"),
        ({"grad": torch.ones(2, 2)}, "grad must be contiguous of one dimension, not (2, 2)"),
        ({"grad": BUFFER[::2]}, "grad must be contiguous of one dimension, not (4,)"),
        ({"residual": torch.ones(4).half()}, "residual must be a tensor of torch.float32, not"),
        ({"residual": np.ones(4)}, "residual must be a tensor of torch.float32, not float64"),
        ({"residual": META}, "residual must be on cpu as the others, not on meta"),
        ({"residual": torch.ones(5)}, "residual must be contiguous of shape (4,), not (5,)"),
        ({"grad": BUFFER[:4], "residual": BUFFER[3:7]}, "grad and residual overlap in memory"),
        ({"k": 5}, "k must be from 0 to 4, not 5"),
        ({"k": 1.0}, "k must be an integer, not 1.0"),
    ],
)  # fmt: skip
def test_bad_selections_change_nothing(arguments: dict[str, Any], words: str) -> None:
    usual = {"grad": X.clone(), "residual": X.clone(), "k": 2}
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        gtopk.select(**{**usual, **arguments})
    assert all(torch.equal(usual[name], X) for name in ("grad", "residual"))
    assert BUFFER.eq(1).all()


def test_positions_must_fit_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MOST", 4)
    with pytest.raises(ValueError, match=re.escape("grad has 4 elements; there must be fewer")):
        gtopk.select(X.clone(), X.clone(), 1)


def test_tensors_on_a_gpu_go_to_sparsify(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def sparsified(grad: Any, residual: Any, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(k)
        return torch.zeros(k), torch.zeros(k, dtype=torch.int32)

    monkeypatch.setattr(steps, "sparsify", sparsified)
    grad, residual, none = (torch.ones(n).as_subclass(OnGpu) for n in (4, 4, 0))
    values, _ = gtopk.select(grad, residual, 2)
    assert len(values) == 2 and not grad.any()
    gtopk.select(grad, residual, 0)
    assert not len(gtopk.select(none, none.clone().as_subclass(OnGpu), 0)[0])
    assert calls == [2, 0]
    with pytest.raises(TypeError, match="residual must be on cuda:0 as the others, not on cpu"):
        gtopk.select(grad, torch.ones(4), 2)
