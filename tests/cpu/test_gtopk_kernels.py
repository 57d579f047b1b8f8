"""Selection and sparse updates of gTop-k: the CPU against NumPy, and the Triton kernels with no
GPU."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linkweave import kernels
from linkweave.kernels import gtopk, optim
from linkweave.kernels.gtopk import cpu, steps
from linkweave.kernels.parallel import parts
from linkweave.kernels.topk import sparsify
from tests.cpu.casting import same, special
from tests.cpu.triton_checks import (
    ARCHITECTURES,
    OnGpu,
    compiled,
    resources,
    same_bits_in_the_interpreter,
)

HALVES = (torch.float16, torch.bfloat16)
SIZES = (0, 1, 2, 63, 64, 65, 1009, 40009)
WAYS: tuple[dict[str, Any], ...] = (
    {}, {"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}
)  # fmt: skip
CASES = (*product((torch.float32,), WAYS), *product(HALVES, (WAYS[0], WAYS[3])))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparsify, "parts", partial(parts, least=64))
    monkeypatch.setattr(cpu, "LEAST", 16)


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


def rounded_once(x: np.ndarray, y: np.float32, z: np.ndarray) -> np.ndarray:
    """fma; the sum of a product in extended precision has no error that rounding could show."""
    return (x.astype(np.longdouble) * y + z).astype(np.float32)


def expected(
    grad: torch.Tensor, residual: torch.Tensor, velocity: torch.Tensor | None, k: int,
    momentum: float = 0.0, nesterov: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """[values, indices, grad, residual, velocity] after a selection."""
    d = g = grad.float().numpy()
    m = np.float32(momentum)
    r, v = residual.numpy(), np.zeros(0, np.float32)
    with np.errstate(all="ignore"):
        if velocity is not None:
            d = v = velocity.numpy() * m + g
            if nesterov:
                d = rounded_once(v, m, g)
        r = r + d
    keys = np.minimum(r.view(np.uint32) & 0x7FFFFFFF, 0x7F800001).astype(np.int64)
    chosen = np.sort(np.argsort(-keys, kind="stable")[:k])
    values = r[chosen]
    r[chosen] = 0
    found = values, chosen.astype(np.int32), r, v
    values, indices, residual, v = map(torch.from_numpy, found)
    return [plain(x) for x in (values, indices, torch.zeros_like(grad), residual, v)]


def plain(x: torch.Tensor) -> torch.Tensor:
    """All NaN become one."""
    return torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x


@pytest.mark.parametrize(("dtype", "way"), CASES, ids=str)
def test_selection_returns_the_bits_of_the_definition(
    dtype: torch.dtype, way: dict[str, Any], threads: int
) -> None:
    cases = product(SIZES, KINDS) if threads == 1 else product(SIZES[-1:], KINDS[:2])
    for n, kind in cases:
        for k in sorted({0, min(1, n), n // 100, n // 2, n}):
            grad, residual, velocity = kind(n, 0).to(dtype), kind(n, 1), kind(n, 2) if way else None
            want = expected(grad, residual, velocity, k, **way)
            values, indices = gtopk.select(grad, residual, velocity, k, **way)
            kept = torch.zeros(0) if velocity is None else velocity
            found = [plain(x) for x in (values, indices, grad, residual, kept)]
            assert all(a.shape == b.shape for a, b in zip(found, want, strict=True))
            assert all(same(a, b) for a, b in zip(found, want, strict=True) if a.numel()), (n, k)


def test_selection_without_momentum_is_that_of_sparsify() -> None:
    grad, residual = special(1009, 0), special(1009, 1)
    other = residual.clone()
    want = kernels.sparsify(grad, other, 50)
    found = gtopk.select(grad, residual, None, 50)
    assert all(same(plain(a), plain(b)) for a, b in zip(want, found, strict=True))
    assert same(plain(residual), plain(other))


@pytest.mark.parametrize("dtype", (torch.float32, *HALVES))
def test_only_the_slices_given_are_written(dtype: torch.dtype) -> None:
    for n, shift in ((1, 1), (65, 3), (1009, 5)):
        whole = [torch.full((n + 8,), 3.0) for _ in range(3)]
        whole[0] = whole[0].to(dtype)
        grad, residual, velocity = (x[shift : n + shift] for x in whole)
        values, indices = gtopk.select(grad, residual, velocity, n // 2, momentum=0.5)
        assert (values == 7.5).all() and indices.tolist() == [*range(n // 2)]
        for x, inside in zip(whole, (0, 7.5, 4.5), strict=True):
            want = torch.full((n + 8,), 3.0)
            want[shift : n + shift] = inside
            if x is whole[1]:
                want[shift : shift + n // 2] = 0
            assert same(x, want.to(x.dtype))


def test_parameters_that_require_gradients_may_be_given() -> None:
    grad, residual = torch.ones(3, requires_grad=True), torch.zeros(3)
    gtopk.select(grad, residual, None, 1)
    assert residual.tolist() == [0, 1, 1] and not grad.any()


integers = st.integers(-(1 << 18), 1 << 18)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(integers, integers, integers), max_size=300), st.floats(0, 1),
    st.sampled_from([{}, {"momentum": 2.0}, {"momentum": 2.0, "nesterov": True}]),
)  # fmt: skip
def test_nothing_is_lost(
    rows: list[tuple[int, int, int]], share: float, way: dict[str, Any]
) -> None:
    g, before, v = np.array(rows, np.int64).reshape(-1, 3).T
    step = 2 * v + g
    d = {0: g, 1: step, 2: 2 * step + g}[len(way)]
    grad, residual, velocity = (torch.from_numpy(x.astype(np.float32)) for x in (g, before, v))
    values, indices = gtopk.select(
        grad, residual, velocity if way else None, int(share * len(g)), **way
    )
    after = residual.long().numpy().copy()
    after[indices.numpy()] += values.long().numpy()
    assert (after == before + d).all() and not grad.any()
    if way:
        assert (velocity.numpy() == step).all()


# ---- sparse updates -----------------------------------------------------------------------------
def parameters() -> tuple[list[torch.Tensor], list[int]]:
    """Parameters with signed zeros, infinities and subnormals, and their first positions."""
    shapes = ((7,), (), (0, 2), (3, 5), (40, 100), (2, 3, 4, 5), (64,))
    params = [special(torch.Size(s).numel(), i).view(s) for i, s in enumerate(shapes)]
    params = [param.nan_to_num_(posinf=torch.inf, neginf=-torch.inf) for param in params]
    params[5] = params[5].view(2, 4, 5, 3).permute(0, 3, 1, 2)  # channels last
    params[4] = params[4].T
    firsts, at = [], 5
    for i, param in enumerate(params):
        firsts.append(at)
        at += param.numel() + i % 3
    return params, firsts


@pytest.mark.parametrize("maximize", [False, True])
def test_updates_have_the_bits_of_sgd(maximize: bool, threads: int) -> None:
    params, firsts = parameters()
    total = firsts[-1] + params[-1].numel() + 9
    rng = np.random.default_rng(3)
    for density, lr in product((0.01, 0.5, 1.0), (0.1, 3.0, 0.0)):
        indices = torch.from_numpy(np.flatnonzero(rng.random(total) < density).astype(np.int32))
        values = torch.from_numpy(rng.standard_normal(indices.numel()).astype(np.float32))
        flat = torch.zeros(total)
        if maximize:
            flat.neg_()  # as a maximized 0.0 turns a parameter of -0.0 to 0.0
        flat[indices] = values
        grads = [torch.empty_like(param) for param in params]
        for grad, first in zip(grads, firsts, strict=True):
            memory = grad.as_strided((grad.numel(),), (1,))
            memory.copy_(flat[first : first + grad.numel()])
        mine, theirs = ([p.clone() for p in params] for _ in range(2))
        optim.sgd(optim.Table(theirs, grads), lr=lr, maximize=maximize)
        layout = gtopk.Layout(mine, firsts)
        gtopk.apply(layout, values, indices, [lr if maximize else -lr] * len(mine))
        assert all(
            map(same, *([p.as_strided((p.numel(),), (1,)) for p in x] for x in (mine, theirs)))
        )


def test_each_parameter_has_its_scale() -> None:
    params = [torch.ones(2), torch.ones(3)]
    layout = gtopk.Layout(params, [1, 5])
    indices = torch.tensor([0, 2, 3, 5, 7, 8], dtype=torch.int32)
    gtopk.apply(layout, torch.arange(1.0, 7), indices, (-1, 0.5))
    assert [param.tolist() for param in params] == [[1, -1], [3, 1, 3.5]]
    gtopk.apply(layout, torch.zeros(0), indices[:0], (1, 1))


def test_a_product_is_not_rounded() -> None:
    x = 1 + 2.0**-12
    param = torch.tensor([-(x * x)])  # rounded
    gtopk.apply(gtopk.Layout([param], [0]), torch.tensor([x]), torch.tensor([0]).int(), [x])
    assert param.item() == 2.0**-24


def test_clearing() -> None:
    x = torch.full((10,), torch.nan)
    gtopk.clear(x[2:8], torch.tensor([-1, 0, 3, 5, 6, 2**31 - 1], dtype=torch.int32))
    assert x.isnan().tolist() == [True, True, False, True, True, False, True, False, True, True]


# ---- what is refused ----------------------------------------------------------------------------
X, BUFFER = torch.ones(4), torch.ones(8)
INDICES = torch.arange(4, dtype=torch.int32)
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
        ({"velocity": torch.ones(3)}, "velocity must be contiguous of shape (4,), not (3,)"),
        ({"grad": BUFFER[:4], "residual": BUFFER[3:7]}, "grad and residual overlap in memory"),
        ({"grad": BUFFER[4:], "velocity": BUFFER[1:5]}, "velocity and grad overlap in memory"),
        ({"k": 5}, "k must be from 0 to 4, not 5"),
        ({"k": 1.0}, "k must be an integer, not 1.0"),
        ({"momentum": -1}, "momentum must be at least 0, not -1.0"),
        ({"momentum": torch.nan}, "momentum must be finite in float32, not nan"),
        ({"momentum": 0.9, "velocity": None}, "momentum 0.9 needs a velocity"),
        ({"nesterov": True}, "nesterov needs a positive momentum"),
        ({"nesterov": True, "velocity": None}, "nesterov needs a positive momentum"),
    ],
)  # fmt: skip
def test_bad_selections_change_nothing(arguments: dict[str, Any], words: str) -> None:
    usual = {"grad": X.clone(), "residual": X.clone(), "velocity": X.clone(), "k": 2}
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        gtopk.select(**{**usual, **arguments})
    assert all(torch.equal(usual[name], X) for name in ("grad", "residual", "velocity"))
    assert BUFFER.eq(1).all()


def test_positions_must_fit_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MOST", 4)
    with pytest.raises(ValueError, match=re.escape("grad has 4 elements; there must be fewer")):
        gtopk.select(X.clone(), X.clone(), None, 1)


@pytest.mark.parametrize(
    ("params", "firsts", "words"),
    [
        ([], [], "a layout of 0 params with 0 firsts; there must be one for each, and at least 1"),
        ([X], [0, 4], "a layout of 1 params with 2 firsts"),
        ([X.double()], [0], "parameters of torch.float64 on cpu are not supported; choose float32"),
        ([META], [0], "parameters of torch.float32 on meta are not supported"),
        ([X, None], [0, 4], "params[1] must be a dense tensor, not NoneType"),
        ([X, META], [0, 4], "params[1] is torch.float32 on meta, params[0] torch.float32 on cpu"),
        ([BUFFER[::2]], [0], "params[0] has gaps or overlaps: its strides are (2,)"),
        ([BUFFER[:3], BUFFER[2:]], [0, 4], "params[0] and params[1] overlap in memory"),
        ([X], [-1], "firsts[0] must be at least 0, not -1"),
        ([X], [1.0], "firsts[0] must be an integer, not 1.0"),
        ([X, torch.ones(1)], [2, 5], "firsts[1] is 5; it must be at least 6, where params[0] ends"),
    ],
)  # fmt: skip
def test_bad_layouts_are_refused(params: Any, firsts: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        gtopk.Layout(params, firsts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"values": X.half()}, "values must be a tensor of torch.float32, not torch.float16"),
        ({"values": META}, "values must be on cpu as the others, not on meta"),
        ({"values": BUFFER[::2]}, "values must be contiguous of one dimension, not (4,)"),
        ({"indices": INDICES.long()}, "indices must be a tensor of torch.int32, not torch.int64"),
        ({"indices": INDICES[1:]}, "indices must be contiguous of shape (4,), not (3,)"),
        ({"scales": (1, 2)}, "2 scales for 1 parameters"),
        ({"scales": ["1"]}, "scales[0] must be a number, not '1'"),
        ({"scales": [torch.inf]}, "scales[0] must be finite in float32, not inf"),
    ],
)  # fmt: skip
def test_bad_updates_change_nothing(arguments: dict[str, Any], words: str) -> None:
    layout = gtopk.Layout([torch.ones(4)], [0])
    usual = {"values": X, "indices": INDICES, "scales": [1.0]}
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        gtopk.apply(layout, **{**usual, **arguments})
    assert torch.equal(layout.params[0], X)


@pytest.mark.parametrize(
    ("x", "indices", "words"),
    [
        (None, INDICES, "x must be a tensor on the CPU or a GPU, not NoneType"),
        (X.half(), INDICES, "x must be a tensor of torch.float32, not torch.float16"),
        (X.view(2, 2), INDICES, "x must be contiguous of one dimension, not (2, 2)"),
        (X, INDICES.long(), "indices must be a tensor of torch.int32, not torch.int64"),
        (X, INDICES.to("meta"), "indices must be on cpu as the others, not on meta"),
    ],
)
def test_bad_clearing_changes_nothing(x: Any, indices: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        gtopk.clear(x, indices)
    assert X.eq(1).all()


def test_tensors_on_a_gpu_go_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    names = ("select", "apply", "clear")
    module = SimpleNamespace(**{name: lambda *a: calls.append(a) for name in names})
    monkeypatch.setitem(sys.modules, "linkweave.kernels.gtopk.gpu", module)
    monkeypatch.setattr(gtopk, "gpu", module, raising=False)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self.as_subclass(OnGpu))
    grad, residual, velocity = (torch.ones(4).as_subclass(OnGpu) for _ in range(3))
    indices = INDICES.as_subclass(OnGpu)
    gtopk.select(grad, residual, velocity, 2, momentum=0.9, nesterov=True)
    gtopk.select(grad, residual, None, 0)
    layout = gtopk.Layout([residual], [7])
    assert layout.table.tolist() == [[7], [11], [residual.data_ptr()]]
    gtopk.apply(layout, grad, indices, [0.1])
    gtopk.clear(grad, indices)
    assert [call[3:] for call in calls[:2]] == [(2, 0.9, True), (0, 0.0, False)]
    assert calls[1][2] is None
    assert calls[2][0] is layout and calls[2][3].tolist() == [np.float32(0.1)]
    assert calls[3][1] is indices
    with pytest.raises(TypeError, match="residual must be on cuda:0 as the others, not on cpu"):
        gtopk.select(grad, torch.ones(4), None, 2)


# ---- in Triton ----------------------------------------------------------------------------------
def test_the_triton_kernels_in_the_interpreter() -> None:
    same_bits_in_the_interpreter("interpreted_gtopk")


F32, F16, I32 = "*fp32", "*u16", "*i32"
PASS = {"residual": F32, "velocity": F32, "counts": I32, "n": "i32", "momentum": "fp32"}
ONE = {"HALF": "", "NESTEROV": False, "BLOCK": 1024}
SCAN = {"n": "i32", "least": "i32"}
ENTRIES = {"ENTRIES": 256}
COMPILED: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "Nesterov": ("accumulate_kernel", {"grad": F32, **PASS}, {**ONE, "NESTEROV": True}),
    "bfloat16": ("accumulate_kernel", {"grad": F16, **PASS}, {**ONE, "HALF": "bfloat16"}),
    "float16": ("accumulate_kernel", {"grad": F16, **PASS}, {**ONE, "HALF": "float16"}),
    "plain": ("accumulate_kernel", {"grad": F32, **PASS}, {**ONE, "velocity": None}),
    "count": ("count_kernel", {"residual": F32, "counts": I32, **SCAN}, {"BLOCK": 1024}),
    "gather": ("gather_kernel", {"residual": F32, "ends": I32, "values": F32, "indices": I32,
                                 **SCAN}, {"BLOCK": 1024}),
    "clear": ("clear_kernel", {"x": F32, "indices": I32, "n": "i32", "many": "i32"}, ENTRIES),
    "apply": ("apply_kernel", {"table": "*i64", "scales": F32, "values": F32, "indices": I32,
                               "rows": "i32", "many": "i32"}, {"LEVELS": 6, **ENTRIES}),
}  # fmt: skip
VECTORS = {
    "Nesterov": {"ld.global.v4.b32": 3, "st.global.v4.b32": 3},
    "bfloat16": {"ld.global.v4.b32": 2, "st.global.v4.b32": 2, "ld.global.v2.b32": 1,
                 "st.global.v2.b32": 1},
    "float16": {"ld.global.v4.b32": 2, "st.global.v4.b32": 2, "ld.global.v2.b32": 1,
                "st.global.v2.b32": 1},
    "plain": {"ld.global.v4.b32": 2, "st.global.v4.b32": 2},
    "count": {"ld.global.v4.b32": 1},
    "gather": {"ld.global.v4.b32": 1},
}  # fmt: skip
"""Accesses of several elements per thread, in blocks that need no mask."""
OPERATIONS = {
    "Nesterov": {"mul": 1, "add": 2, "fma": 1}, "bfloat16": {"mul": 1, "add": 2},
    "float16": {"mul": 1, "add": 2}, "plain": {"add": 1},
}  # fmt: skip
"""Of each element."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", COMPILED)
def test_the_triton_kernels_compile(
    name: str, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from linkweave.kernels.gtopk import gpu

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel, signature, constants = COMPILED[name]
    aligned = [
        i for i, (argument, kind) in enumerate(signature.items())
        if kind.startswith("*") and argument not in constants
    ]  # fmt: skip
    assert (gpu.BLOCK, gpu.ENTRIES) == (1024, 256)
    made = compiled(
        getattr(gpu, kernel), signature, constants, aligned, architecture, num_warps=gpu.WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    ptx = made.asm["ptx"]
    assert Counter(re.findall(r"\b(?:ld|st)\.global\.v\S+", ptx)) == VECTORS.get(name, {})
    if name in OPERATIONS:
        found = Counter(re.findall(r"\b([a-z]+)\.rn\.f32\b", ptx))
        per_thread = 2 * gpu.BLOCK // (32 * gpu.WARPS)  # with a mask and without
        assert found == {each: per_thread * many for each, many in OPERATIONS[name].items()}
        assert "atom.global.gpu.relaxed.add" in ptx
    assert not re.search(r"\.(ftz|sat|local|approx|full)\b", ptx)
    used = resources(made.asm["cubin"], tmp_path)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    # for 2,048 or 1,536 threads of a multiprocessor
    assert used["REG"] <= (32 if architecture == 90 else 40)


def test_the_exponent_of_the_kth_largest() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from linkweave.kernels.gtopk import gpu

    counts = [0] * gpu.EXPONENTS
    counts[3], counts[100], counts[255] = 5, 7, 2
    want = {1: (255, 2), 2: (255, 2), 3: (100, 9), 9: (100, 9), 10: (3, 14), 14: (3, 14)}
    assert {k: gpu._least(counts, k) for k in want} == want
