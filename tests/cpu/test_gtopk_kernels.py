"""Selection and sparse vectors of gTop-k: the CPU against NumPy, the GPU against the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linkweave.kernels import gtopk
from linkweave.kernels.gtopk import cpu, gpu, steps
from linkweave.kernels.parallel import parts
from linkweave.kernels.topk import sparsify
from tests.cpu.casting import same, special
from tests.cpu.triton_checks import OnGpu, compiled, resources, same_bits_in_the_interpreter

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
        ({"grad": torch.ones(2, 2)}, "grad must be contiguous of shape (any), not (2, 2)"),
        ({"grad": BUFFER[::2]}, "grad must be contiguous of shape (any), not (4,)"),
        ({"residual": torch.ones(4).half()}, "residual must be a tensor of torch.float32, not"),
        ({"residual": np.ones(4)}, "residual must be a tensor of torch.float32, not float64"),
        ({"residual": META}, "residual must be on cpu as the others, not on meta"),
        ({"residual": torch.ones(5)}, "residual must be contiguous of shape (4), not (5,)"),
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
    monkeypatch.setattr(steps, "PAD", 4)
    with pytest.raises(ValueError, match=re.escape("grad has 4 elements; there must be fewer")):
        gtopk.select(X.clone(), X.clone(), 1)


# ---- vectors ------------------------------------------------------------------------------------
def vector(rng: np.random.Generator, n: int, room: int, kind: int) -> torch.Tensor:
    """Up to `room` entries below n: of any value, of few values, or with some not finite."""
    size = min(n, int(rng.integers(0, room + 1)))
    values = rng.standard_normal(size).astype(np.float32)
    if kind == 1:
        values = rng.integers(-2, 3, size).astype(np.float32)
    if kind == 2:
        values[rng.random(size) < 0.3] = rng.choice([np.nan, np.inf, -np.inf, -0.0, -1e-44, 1e-10])
    return cpu._vector((values, np.sort(rng.permutation(n)[:size]).astype(np.int32)), room)


def bits(vector: torch.Tensor) -> list[list[int]]:
    return [plain(gtopk.values_of(vector)).view(torch.int32).tolist(), vector[1].tolist()]


@pytest.mark.parametrize("seed", range(300))
def test_torch_and_numba_return_the_same_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs run is torch's operations, on whatever device."""
    rng, kind = np.random.default_rng(seed), seed % 3
    n, rooms = int(rng.integers(1, 60)), rng.integers(0, 12, 2)
    a, b = (vector(rng, n, int(room), kind) for room in rooms)
    k = int(rng.integers(0, sum(rooms) + 1))
    for ours, its in zip(cpu.merge(a, b, k), gpu.merge(a, b, k), strict=True):
        assert bits(ours) == bits(its)
    for arrived in (False, True):
        first = rng.choice(np.float32([0.0, -0.0, 1.5]), n)
        residuals = [torch.from_numpy(first.copy()) for _ in range(2)]
        for kernels, residual in zip((cpu, gpu), residuals, strict=True):
            if len(a[1]):
                kernels.keep(a, b, residual, arrived)
        assert residuals[0].numpy().tobytes() == residuals[1].numpy().tobytes()
    for dtype in (torch.float32, *HALVES):
        results = []
        for kernels in (cpu, gpu):
            monkeypatch.setattr(steps, "_kernels", lambda device, kernels=kernels: kernels)
            x = torch.zeros(n, dtype=dtype)
            gtopk.scatter(a, x, 3)
            results.append(plain(x).view(torch.int16 if x.itemsize == 2 else torch.int32))
        assert torch.equal(*results)


@pytest.mark.parametrize("seed", range(60))
def test_a_merge_keeps_the_largest_of_the_sum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, room = int(rng.integers(1, 60)), int(rng.integers(1, 12))
    a, b = (vector(rng, n, room, 1) for _ in range(2))
    dense = np.zeros(n)
    for values, indices in map(cpu.entries, (a, b)):
        dense[indices] += values
    present = sorted({*cpu.entries(a)[1].tolist(), *cpu.entries(b)[1].tolist()})
    largest = sorted(present, key=lambda i: (-abs(dense[i]), i))
    for k in (0, 1, room, 2 * room):
        kept, cut = gtopk.merge(a, b, k)
        assert kept.shape == (2, k) and cut.shape == (2, 2 * room - k)
        for part, want in ((kept, largest[:k]), (cut, largest[k:])):
            values, indices = cpu.entries(part)
            assert indices.tolist() == sorted(want)
            assert values.tolist() == [dense[i] for i in sorted(want)]


def test_averages_are_rounded_once_and_saturate() -> None:
    made = gtopk.vector_of(torch.tensor([1.0, -1e30, float("inf")]),
                           torch.tensor([1, 2, 4], dtype=torch.int32))  # fmt: skip
    x = torch.zeros(5, dtype=torch.float16)
    gtopk.scatter(made, x, 3)
    assert x.tolist() == [0, float(torch.tensor(1 / 3).half()), -65504, 0, float("inf")]


@pytest.mark.parametrize("fine", [True, False])
def test_what_is_not_finite_is_dropped_if_anything_was(fine: bool) -> None:
    residual = torch.tensor([1.0, float("nan"), -float("inf"), 2.0])
    gtopk.drop_nonfinite(torch.tensor(fine), residual)
    assert bool(residual.isfinite().all()) is not fine
    assert residual[[0, 3]].tolist() == [1.0, 2.0]


VECTOR = gtopk.vector_of(torch.ones(2), torch.tensor([0, 3], dtype=torch.int32))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gtopk.merge(VECTOR, VECTOR, 5), "k is 5, above the room of both vectors, 4"),
        (lambda: gtopk.merge(VECTOR, VECTOR, -1), "k must be at least 0, not -1"),
        (lambda: gtopk.merge(VECTOR[0], VECTOR, 1), "a must be contiguous of shape (2, any), not"),
        (lambda: gtopk.merge(VECTOR, VECTOR.long(), 1), "b must be a tensor of torch.int32, not"),
        (lambda: gtopk.keep(VECTOR, VECTOR.as_subclass(OnGpu), X), "found must be on cpu as the"),
        (lambda: gtopk.scatter(VECTOR, X.double(), 2), "x must be a tensor of torch.float32 or"),
        (lambda: gtopk.drop_nonfinite(X, X), "fine must be a tensor of torch.bool, not"),
    ],
)  # fmt: skip
def test_bad_vectors_are_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        call()


# ---- on a GPU -----------------------------------------------------------------------------------
def test_tensors_on_a_gpu_go_to_sparsify(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def sparsified(grad: Any, residual: Any, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(k)
        return torch.zeros(k), torch.zeros(k, dtype=torch.int32)

    monkeypatch.setattr(gpu, "sparsify", sparsified)
    grad, residual, none = (torch.ones(n).as_subclass(OnGpu) for n in (4, 4, 0))
    values, _ = gtopk.select(grad, residual, 2)
    assert len(values) == 2 and not grad.any()
    gtopk.select(grad, residual, 0)
    assert not len(gtopk.select(none, none.clone().as_subclass(OnGpu), 0)[0])
    assert calls == [2, 0]
    with pytest.raises(TypeError, match="residual must be on cuda:0 as the others, not on cpu"):
        gtopk.select(grad, torch.ones(4), 2)


def test_the_kernel_in_triton() -> None:
    same_bits_in_the_interpreter("interpreted_gtopk")


@pytest.mark.parametrize("architecture", (70, 80, 90, 100))
def test_machine_code_of_the_kernel(architecture: int, tmp_path: Path) -> None:
    signature = {"fine": "*i32", "residual": "*fp32", "n": "i64"}
    constants = {"BLOCK": gpu.BLOCK}
    made = compiled(gpu.drop_nonfinite_kernel, signature, constants, (0, 1), architecture,
                    num_warps=gpu.WARPS)  # fmt: skip
    used = resources(made.asm["cubin"], tmp_path)
    assert used["REG"] <= 32 and used["LOCAL"] == 0
