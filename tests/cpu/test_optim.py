"""Steps of SGD and Adam: the CPU against torch, and the Triton kernels with no GPU."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from linkweave.kernels import optim
from linkweave.kernels.optim import cpu
from linkweave.kernels.optim.tables import BLOCK
from tests.cpu import triton_checks
from tests.cpu.casting import fused, same

ROOT = Path(__file__).parents[2]
DTYPES = (torch.float32, torch.float64)
SHAPES = ((), (0,), (1,), (7,), (1009,), (64, 3, 7, 7), (BLOCK,), (5 * BLOCK + 1,), (40009,))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LEAST", 4)  # so that threads share small tables


def values(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Tensors of SHAPES that follow one another in a buffer; of many sizes, a tenth zeros."""
    numels = [torch.Size(shape).numel() for shape in SHAPES]
    rng = np.random.default_rng(seed)
    flat = rng.standard_normal(sum(numels)) * 10.0 ** rng.integers(-4, 3, sum(numels))
    flat[rng.random(flat.size) < 0.1] = 0
    parts = torch.from_numpy(flat).to(dtype).split(numels)
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def bits(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class Both:
    """torch's parameters and ours, from the same values."""

    def __init__(self, dtype: torch.dtype, states: int) -> None:
        self.dtype = dtype
        self.torchs = [torch.nn.Parameter(x.clone()) for x in values(dtype, 0)]
        self.params = [x.clone() for x in values(dtype, 0)]
        self.grads = values(dtype, 1)
        self.states = [[torch.zeros_like(x) for x in self.params] for _ in range(states)]
        self.table = optim.Table(self.params, self.grads, *self.states)

    def new_gradients(self, seed: int) -> None:
        for param, grad, x in zip(self.torchs, self.grads, values(self.dtype, seed), strict=True):
            param.grad = grad.copy_(x).clone()

    def take(self, optimizer: torch.optim.Optimizer, *names: str) -> None:
        """Copy torch's parameters and states."""
        for i, param in enumerate(self.torchs):
            self.params[i].copy_(param.detach())
            for name, state in zip(names, self.states, strict=True):
                state[i].copy_(optimizer.state[param][name])

    def same_params(self) -> bool:
        return same(bits(self.torchs), bits(self.params))

    def same_states(self, optimizer: torch.optim.Optimizer, *names: str) -> bool:
        return all(
            same(bits([optimizer.state[param][name] for param in self.torchs]), bits(state))
            for name, state in zip(names, self.states, strict=True)
        )


# ---- against torch ------------------------------------------------------------------------------
SGD = (
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01, "maximize": True},
    {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
)
ADAM = tuple(
    {"betas": (beta1, 0.99), "weight_decay": decay, "maximize": maximize}
    for (beta1, decay), maximize in product(((0.9, 0.1), (0.5, 0.0), (0.2, 0.01)), (False, True))
)


@fused
@pytest.mark.parametrize("options", SGD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sgd_returns_the_bits_of_torch(
    dtype: torch.dtype, options: dict[str, Any], threads: int
) -> None:
    both = Both(dtype, 1 if "momentum" in options else 0)
    optimizer = torch.optim.SGD(both.torchs, lr=0.1, **options)
    for step in range(3):
        both.new_gradients(10 + step)
        optimizer.step()
        if step == 0 and both.states:  # which is torch's own
            both.take(optimizer, "momentum_buffer")
            continue
        optim.sgd(both.table, lr=0.1, **options)
        assert both.same_params()
        assert not both.states or both.same_states(optimizer, "momentum_buffer")


@pytest.fixture
def exact_roots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MKL's square root, which torch calls, is not rounded to nearest; NumPy's is."""
    monkeypatch.setattr(
        torch.Tensor, "sqrt", lambda x: torch.from_numpy(np.asarray(np.sqrt(x.numpy())))
    )
    yield


@fused
@pytest.mark.parametrize("options", ADAM)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_returns_the_bits_of_torch_but_for_the_square_root(
    decoupled: bool, dtype: torch.dtype, options: dict[str, Any], exact_roots: None, threads: int
) -> None:
    both = Both(dtype, 2)
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
        both.torchs, lr=0.01, **options
    )
    for step in (1, 2, 3):
        both.new_gradients(10 + step)
        optimizer.step()
        optim.adam(both.table, step=step, lr=0.01, **options, decoupled=decoupled)
        assert both.same_params() and both.same_states(optimizer, "exp_avg", "exp_avg_sq")


@fused
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_differs_from_torch_by_an_ulp(
    decoupled: bool, dtype: torch.dtype, foreach: bool
) -> None:
    for lr in (0.001, 1.0):
        both = Both(dtype, 2)
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        optimizer = kind(both.torchs, lr=lr, weight_decay=1e-4, foreach=foreach)
        both.new_gradients(11)
        before = bits(both.params).clone().numpy()
        optimizer.step()
        optim.adam(both.table, step=1, lr=lr, weight_decay=1e-4, decoupled=decoupled)
        assert both.same_states(optimizer, "exp_avg", "exp_avg_sq")
        wanted, found = bits(both.torchs).numpy(), bits(both.params).numpy()
        ulp = np.spacing(np.maximum(abs(wanted), abs(found)))
        little = abs(found - before) <= abs(before) / 11
        assert little.sum() > 5_000
        assert (abs(wanted - found)[little] <= ulp[little]).all()


@fused
def test_adam_with_no_memory_of_the_mean(exact_roots: None) -> None:
    both = Both(torch.float32, 2)
    optimizer = torch.optim.Adam(both.torchs, lr=0.01, betas=(0.0, 0.9), maximize=True)
    for step in (1, 2, 3):
        both.new_gradients(10 + step)
        optimizer.step()
        optim.adam(both.table, step=step, lr=0.01, betas=(0.0, 0.9), maximize=True)
        assert both.same_params()
        means = [optimizer.state[param]["exp_avg"] for param in both.torchs]
        assert torch.equal(bits(means), bits(both.states[0]))  # but for the signs of zeros


def test_what_is_not_finite_spreads_as_in_torch() -> None:
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-45, -0.0, 3e38])
    grads = odd.repeat_interleave(6).clone()
    start = odd.repeat(6)
    for decay in (0.0, 0.1):
        param = torch.nn.Parameter(start.clone())
        param.grad = grads.clone()
        torch.optim.SGD([param], lr=0.1, weight_decay=decay).step()
        mine = start.clone()
        optim.sgd(optim.Table([mine], [grads]), lr=0.1, weight_decay=decay)
        assert torch.equal(mine.isnan(), param.isnan())
        assert torch.equal(mine.isinf(), param.isinf())


# ---- layouts ------------------------------------------------------------------------------------
def test_strides_without_gaps_are_updated_in_the_order_of_memory() -> None:
    flat = torch.arange(1.0, 1 + 2 * 3 * 4 * 5)
    arena = torch.full((flat.numel() + 8,), 7.0)
    for make in (
        lambda x: x.view(2, 4, 5, 3).permute(0, 3, 1, 2),  # channels last
        lambda x: x.view(10, 12).T,
        lambda x: x.as_strided((120, 1), (1, 77)),
    ):
        arena[3:-5] = flat
        params, grads = [make(flat.clone())], [make(arena[3:-5])]
        before = params[0].clone()
        optim.sgd(optim.Table(params, grads), lr=0.5)
        assert torch.equal(params[0], before / 2)
        assert arena[:3].tolist() == [7] * 3 and arena[-5:].tolist() == [7] * 5


def test_only_parameters_and_states_are_written() -> None:
    for n in (1, 17, 3 * BLOCK + 1):
        memory = torch.full((4, n + 8), 3.0)
        columns = [[row[3 : n + 3]] for row in memory]
        optim.adam(optim.Table(*columns), step=2, lr=0.25)
        assert (memory[:, :3] == 3).all() and (memory[:, n + 3 :] == 3).all()
        assert (memory[1] == 3).all()
        assert (memory[:, 3] != 3).tolist() == [True, False, False, True]


def test_a_table_of_nothing() -> None:
    empty = torch.zeros(0, 3)
    table = optim.Table([empty], [empty.clone()], [empty.clone()], [empty.clone()])
    assert table.blocks == 0
    optim.adam(table, step=1, lr=1.0)


# ---- what is refused ----------------------------------------------------------------------------
def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


BUFFER = zeros(8)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (([], []), "a table of 0 parameters with 0 states each"),
        (([zeros(1)],) * 5, "a table of 1 parameters with 3 states each; there must be at least 1"),
        (([zeros(2).half()], [zeros(2).half()]),
         "parameters of torch.float16 on cpu are not supported; choose float32, or float64 on the"),
        (([zeros(2)], []), "1 params, but 0 grads"),
        (([zeros(2)], [None]), "grads[0] must be a dense tensor, not NoneType"),
        (([zeros(2)], [zeros(2).to_sparse()]), "grads[0] must be a dense tensor, not torch.sparse"),
        (([zeros(2)], [zeros(2, dtype=torch.float64)]),
         "grads[0] is torch.float64 on cpu, params[0] torch.float32 on cpu: they must agree"),
        (([zeros(2)], [torch.zeros(2, device="meta")]), "grads[0] is torch.float32 on meta"),
        (([zeros(2, 3)], [zeros(3, 2)]), "grads[0] has shape (3, 2) and strides (2, 1), p"),
        (([zeros(2, 3)], [zeros(3, 2).T]), "grads[0] has shape (2, 3) and strides (1, 2), p"),
        (([zeros(4)[::2]], [zeros(4)[::2]]), "params[0] has gaps or overlaps: its strides are (2"),
        (([zeros(1).expand(3)], [zeros(1).expand(3)]), "params[0] has gaps or overlaps"),
        (([BUFFER[:5]], [BUFFER[3:]]), "params[0] and grads[0] overlap in memory"),
        (([BUFFER, BUFFER], [zeros(8), zeros(8)]), "params[0] and params[1] overlap in memory"),
        (([zeros(8)], [zeros(8)], [BUFFER], [BUFFER]), "states[0][0] and states[1][0] overlap in"),
    ],
)  # fmt: skip
def test_tables_of_bad_tensors_are_refused(columns: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        optim.Table(*columns)


@pytest.mark.parametrize(
    ("states", "arguments", "words"),
    [
        (0, {"lr": -1.0}, "lr, momentum, weight_decay must be at least 0, not [-1.0, 0.0, 0.0]"),
        (0, {"lr": "1"}, "lr must be a number, not '1'"),
        (0, {"lr": float("nan")}, "lr must be finite in float32, not nan"),
        (0, {"lr": 1.0, "momentum": 0.9}, "the table has 0 states; this optimizer needs 1"),
        (1, {"lr": 1.0, "nesterov": True}, "nesterov needs a positive momentum and no dampening"),
        (1, {"lr": 1.0, "momentum": 0.9, "dampening": 0.1, "nesterov": True}, "nesterov needs"),
        (1, {"lr": 1.0, "step": 1}, "the table has 1 states; this optimizer needs 2"),
        (2, {"lr": 1.0, "step": 0}, "step counts from 1, not 0"),
        (2, {"lr": 1.0, "step": 1.0}, "step must be an integer, not 1.0"),
        (2, {"lr": 1.0, "step": 1, "betas": (0.9, 1.0)}, "betas must be less than 1, not (0.9, 1"),
        (2, {"lr": 1.0, "step": 1, "betas": (-0.9, 0.9)}, "must be at least 0, not [1.0, -0.9, 0"),
    ],
)  # fmt: skip
def test_bad_arguments_change_nothing(states: int, arguments: dict[str, Any], words: str) -> None:
    param = torch.ones(BLOCK + 1)
    table = optim.Table(*([param + i] for i in range(2 + states)))
    step = optim.adam if "step" in arguments else optim.sgd
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        step(table, **arguments)
    assert all((column[0] == 1 + i).all() for i, column in enumerate(table.tensors))


def test_gradients_may_move() -> None:
    """A table that keeps nothing alive finds them where they are said to be, one by one."""
    params = [torch.zeros(BLOCK + 1), torch.zeros(0), torch.zeros(3)]
    table = optim.Table(params, [torch.ones_like(p) for p in params]).without_tensors()
    for value in (2.0, 5.0):
        memory = torch.zeros(4 * BLOCK)
        grads = [memory[5 : 6 + BLOCK], memory[:0], memory[2 * BLOCK : 2 * BLOCK + 3]]
        for grad in grads:
            grad.fill_(value)
        table.move([grad.data_ptr() for grad in grads])
        before = table.blocks_before(grads[2].data_ptr())
        optim.sgd(table, lr=1.0)
        assert before == 2 and table.blocks == 3
    assert all(p.eq(-7).all() for p in params)


def test_tables_on_a_gpu_go_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    module = SimpleNamespace(sgd=lambda *a: calls.append(a), adam=lambda *a: calls.append(a))
    monkeypatch.setitem(sys.modules, "linkweave.kernels.optim.gpu", module)
    monkeypatch.setattr(optim, "gpu", module, raising=False)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, device: self.as_subclass(triton_checks.OnGpu)
    )
    table = optim.Table(*([zeros(BLOCK + 1).as_subclass(triton_checks.OnGpu)] for _ in range(4)))
    assert table.rows.dtype == torch.int64 and table.rows.shape == (2, 5)
    optim.sgd(table, lr=0.1, maximize=True)
    optim.adam(table, step=1, lr=0.1)
    assert calls[0] == (table, (-1, 0, 0, 1, np.float32(-0.1)), False)
    assert calls[1][2:] == (True,)
    double = zeros(2, dtype=torch.float64).as_subclass(triton_checks.OnGpu)
    with pytest.raises(TypeError, match="float64 on cuda:0 are not supported"):
        optim.Table([double], [double])


# ---- in Triton ----------------------------------------------------------------------------------
def test_the_triton_kernels_in_the_interpreter() -> None:
    triton_checks.same_bits_in_the_interpreter("interpreted_optim")


SGD_SCALARS = ("sign", "decay", "momentum", "rest", "rate")
ADAM_SCALARS = ("sign", "shrink", "decay", "weight", "beta2", "rest", "root", "eps", "rate")
PLAIN = dict.fromkeys(("MOMENTUM", "NESTEROV", "DECAY"), False)
COMPILED = {
    "SGD": ("sgd_kernel", SGD_SCALARS, PLAIN),
    "momentum": ("sgd_kernel", SGD_SCALARS,
                 {**PLAIN, "MOMENTUM": True, "NESTEROV": True, "DECAY": True}),
    "Adam": ("adam_kernel", ADAM_SCALARS, {"NEAR": True, "DECAY": True}),
}  # fmt: skip
LOADS_AND_STORES = {"SGD": (2, 1), "momentum": (3, 2), "Adam": (4, 3)}
"""Of 16 bytes per thread, where no mask is needed."""
OPERATIONS = {
    "SGD": {"mul": 1, "fma": 1},
    "momentum": {"mul": 2, "fma": 4},
    "Adam": {"mul": 5, "fma": 3, "add": 2, "sub": 1, "div": 2, "sqrt": 1},
}
"""Of each element."""


def machine_code(name: str, architecture: int) -> Any:
    from linkweave.kernels.optim import gpu

    kernel, scalars, flags = COMPILED[name]
    signature = {"rows": "*i64"} | dict.fromkeys(scalars, "fp32")
    return triton_checks.compiled(
        getattr(gpu, kernel), signature, {**flags, "BLOCK": BLOCK}, range(1), architecture,
        num_warps=gpu.WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@pytest.mark.parametrize("architecture", triton_checks.ARCHITECTURES)
@pytest.mark.parametrize("name", COMPILED)
def test_the_triton_kernels_compile(
    name: str, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = machine_code(name, architecture)
    ptx = kernel.asm["ptx"]
    loads, stores = LOADS_AND_STORES[name]
    accesses = Counter(re.findall(r"\b(?:ld|st)\.global\.v\S+", ptx))
    assert accesses == {"ld.global.v4.b32": loads, "st.global.v4.b32": stores}
    found = Counter(re.findall(r"\b([a-z]+)\.rn\.f32\b", ptx))
    per_thread = 2 * BLOCK // (32 * 8)  # with a mask and without
    assert found == {each: per_thread * many for each, many in OPERATIONS[name].items()}
    assert "f64" not in ptx
    assert not re.search(r"\.(ftz|sat|local|approx|full)\b", ptx)
    used = triton_checks.resources(kernel.asm["cubin"], tmp_path)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    assert used["REG"] <= 48  # for 1,280 threads of a multiprocessor
