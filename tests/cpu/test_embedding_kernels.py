"""Kernels of embeddings: the CPU against torch, and the Triton kernels with no GPU."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from itertools import accumulate, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from linkweave.kernels import embedding
from linkweave.kernels.embedding import cpu, gpu
from tests.cpu import casting
from tests.cpu.casting import fused, special
from tests.cpu.triton_checks import (
    ARCHITECTURES,
    OnGpu,
    compiled,
    resources,
    same_bits_in_the_interpreter,
)

ROWS = 300
DTYPES = (torch.float32, torch.float64)
COPIED = (*DTYPES, torch.float16, torch.bfloat16)
KINDS = (torch.int32, torch.int64)
WIDTHS = (0, 1, 3, 16, 17, 128)
COUNTS = (0, 1, 120, ROWS)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LEAST", 16)  # so that threads share few rows


@pytest.fixture
def exact_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL's square root, which torch calls, is not rounded to nearest; NumPy's is."""
    monkeypatch.setattr(
        torch.Tensor, "sqrt_", lambda x: x.copy_(torch.from_numpy(np.sqrt(x.numpy())))
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shapes and all bits are equal."""
    return a.shape == b.shape and casting.same(a.reshape(-1), b.reshape(-1))


# ---- optimizers against torch -------------------------------------------------------------------
def values(rows: int, width: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Of many sizes; a tenth are zeros."""
    rng = np.random.default_rng([rows, width, seed])
    x = rng.standard_normal((rows, width)) * 10.0 ** rng.integers(-4, 3, (rows, width))
    x[rng.random(x.shape) < 0.1] = 0
    return torch.from_numpy(x).to(dtype)


def some_rows(n: int, seed: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
    """Ascending and distinct."""
    found = np.sort(np.random.default_rng([n, seed]).permutation(ROWS)[:n])
    return torch.from_numpy(found).to(kind)


def at(*indices: int) -> torch.Tensor:
    return torch.tensor(indices, dtype=torch.int64)


def optimizer_of(name: str, param: torch.Tensor) -> torch.optim.Optimizer:
    return {
        "sgd": lambda: torch.optim.SGD([param], lr=0.1),
        "adagrad": lambda: torch.optim.Adagrad([param], lr=0.1, lr_decay=0.5, eps=1e-6),
        "adam": lambda: torch.optim.SparseAdam([param], lr=0.01, betas=(0.8, 0.99), eps=1e-6),
    }[name]()


STATES = {"sgd": (), "adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}


def step_of(name: str, step: int, tables: Any, indices: Any, gradient: Any) -> None:
    """The step of ours that is `optimizer_of`'s."""
    if name == "sgd":
        embedding.sgd_rows(*tables, indices, gradient, lr=0.1)
    elif name == "adagrad":
        rate = 0.1 / (1 + (step - 1) * 0.5)
        embedding.adagrad_rows(*tables, indices, gradient, lr=rate, eps=1e-6)
    else:
        embedding.adam_rows(
            *tables, indices, gradient, step=step, lr=0.01, betas=(0.8, 0.99), eps=1e-6
        )


@fused
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STATES)
def test_steps_return_the_bits_of_torch_but_for_the_square_root(
    name: str, dtype: torch.dtype, exact_roots: None, threads: int
) -> None:
    for width in WIDTHS[1:]:  # with a width of 0, torch's threads fail
        table = values(ROWS, width, 0, dtype)
        tables = [table, *(torch.zeros_like(table) for _ in STATES[name])]
        param = torch.nn.Parameter(table.clone())
        optimizer = optimizer_of(name, param)
        for step, n in enumerate((ROWS // 2, *COUNTS, 70), 1):
            indices, gradient = some_rows(n, step), values(n, width, step, dtype)
            param.grad = torch.sparse_coo_tensor(
                indices[None], gradient, table.shape, is_coalesced=True, check_invariants=True
            )
            optimizer.step()
            step_of(name, step, tables, indices.to(KINDS[step % 2]), gradient)
            assert same(param.detach(), table)
            for state, mine in zip(STATES[name], tables[1:], strict=True):
                assert same(optimizer.state[param][state], mine), (width, n)


@pytest.mark.parametrize("name", STATES)
def test_two_parts_of_a_step_are_one_step(name: str) -> None:
    for width, dtype in product((3, 128), DTYPES):
        tables = [values(ROWS, width, i, dtype).abs() for i in range(1 + len(STATES[name]))]
        again = [x.clone() for x in tables]
        indices, gradient = some_rows(200, 0), values(200, width, 9, dtype)
        step_of(name, 3, tables, indices, gradient)
        prior = torch.from_numpy(np.random.default_rng(0).random(200) < 0.3)
        for part in (prior, ~prior):
            step_of(name, 3, again, indices[part], gradient[part])
        assert all(map(same, tables, again))


@pytest.mark.parametrize("name", STATES)
def test_only_the_rows_named_are_written(name: str, threads: int) -> None:
    for width in (1, 17):
        memory = [torch.full((20 * width + 8,), 3.0) for _ in range(1 + len(STATES[name]))]
        tables = [x[3 : 3 + 20 * width].view(20, width) for x in memory]
        gradient = torch.full((3, width), 0.5)
        step_of(name, 2, tables, torch.tensor([0, 7, 19]), gradient)
        assert (gradient == 0.5).all()
        for flat, table in zip(memory, tables, strict=True):
            assert (table[[0, 7, 19]] != 3).all()
            table[[0, 7, 19]] = 3
            assert (flat == 3).all()


def test_a_table_of_nothing() -> None:
    for shape, indices in (((0, 4), at()), ((5, 0), at(1, 3)), ((5, 4), at())):
        table, gradient = torch.zeros(shape), torch.zeros(len(indices), shape[1])
        for name, states in STATES.items():
            step_of(name, 1, [table, *(table.clone() for _ in states)], indices, gradient)
        embedding.lookup(table, indices, gradient)


def test_parameters_that_require_gradients_may_be_given() -> None:
    table = torch.nn.Parameter(torch.ones(2, 1))
    embedding.sgd_rows(table, torch.tensor([1]), torch.ones(1, 1), lr=0.5)
    assert table.tolist() == [[1], [0.5]]


# ---- copies -------------------------------------------------------------------------------------
def wild(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """All kinds of floats, whose NaN have payloads."""
    return special(rows * width, 1).view(rows, width).to(dtype)


@pytest.mark.parametrize("dtype", COPIED)
def test_lookups_copy_rows(dtype: torch.dtype, threads: int) -> None:
    for i, (width, n) in enumerate(product(WIDTHS, (0, 1, 700))):
        table = wild(ROWS, width, dtype)
        indices = torch.from_numpy(np.random.default_rng(n).integers(0, ROWS, n)).to(KINDS[i % 2])
        whole = torch.full((n * width + 6,), 3, dtype=dtype)
        embedding.lookup(table, indices, whole[3:-3].view(n, width))
        assert same(whole[3:-3].view(n, width), table[indices])
        assert (whole[:3] == 3).all() and (whole[-3:] == 3).all()


@pytest.mark.parametrize("widths", [(), (0,), (7,), (128, 128), (0, 1, 3, 0, 16, 17, 128, 0)])
def test_columns_are_joined_and_split(widths: tuple[int, ...], threads: int) -> None:
    total = sum(widths)
    for n, dtype in product((0, 1, 90), COPIED):
        blocks = [wild(n, width, dtype) for width in widths]
        parts = torch.cat([torch.zeros(0, dtype=dtype), *(block.view(-1) for block in blocks)])
        whole = torch.full((n * total + 6,), 3, dtype=dtype)
        out = whole[3:-3].view(n, total)
        embedding.join_columns(parts, widths, out)
        for block, end in zip(blocks, accumulate(widths), strict=True):
            assert same(out[:, end - block.shape[1] : end].contiguous(), block)
        assert (whole[:3] == 3).all() and (whole[-3:] == 3).all()
        back = torch.full((n * total + 6,), 3, dtype=dtype)
        embedding.split_columns(out, widths, back[3:-3])
        assert same(back[3:-3], parts)
        assert (back[:3] == 3).all() and (back[-3:] == 3).all()


# ---- float64 on GPUs, by operations of torch -----------------------------------------------------
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kernel", ["sgd", "adagrad", "adam"])
def test_float64_is_updated_by_torch_as_by_the_cpu(kernel: str, seed: int) -> None:
    """Rows out of range are left out, as on a GPU the host does not look at them."""
    rng = np.random.default_rng(seed)
    rows, width, n = 12, 5, int(rng.integers(0, 9))
    where = np.sort(rng.choice(rows, n, False))
    beyond = [rows] * int(rng.integers(0, 4))  # what pads a list
    indices = torch.tensor([*where, *beyond], dtype=torch.int64)
    gradient = torch.from_numpy(rng.standard_normal((len(indices), width)))
    scalars = {"sgd": (-0.1,), "adagrad": (1e-10, -0.1), "adam": (0.1, 0.001, 1e-8, -0.1)}[kernel]
    tables = [torch.from_numpy(rng.random((rows, width))) for _ in range(1 + len(scalars) // 2)]
    tables = tables[: {"sgd": 1, "adagrad": 2, "adam": 3}[kernel]]
    mine = [table.clone() for table in tables]
    getattr(cpu, kernel)(indices[:n], gradient[:n], tuple(map(np.float64, scalars)),
                                   *tables)  # fmt: skip
    versions = [table._version for table in mine]
    getattr(gpu, kernel)(indices, gradient, tuple(map(np.float64, scalars)), *mine)
    for one, other in zip(mine, tables, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-15, atol=1e-16)
        untouched = torch.ones(rows, dtype=torch.bool)
        untouched[indices[:n]] = False
        assert torch.equal(one[untouched], other[untouched])
    assert [table._version for table in mine] == versions


# ---- what is refused ----------------------------------------------------------------------------
TABLE, BUFFER = torch.ones(4, 3), torch.ones(30)
META = torch.ones(4, 3, device="meta")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"table": None}, "table must be a tensor on the CPU or a GPU, not NoneType"),
        ({"table": META}, "table must be a tensor on the CPU or a GPU, not meta"),
        ({"table": TABLE.half()}, "table must be a tensor of torch.float32 or torch.float64, not"),
        ({"table": torch.ones(12)}, "table must be contiguous of shape (any, any), not (12,)"),
        ({"table": torch.ones(3, 4).T}, "table must be contiguous of shape (any, any), not (4, 3)"),
        ({"exp_avg": TABLE.double()}, "exp_avg must be a tensor of torch.float32, not torch.float"),
        ({"exp_avg_sq": torch.ones(4, 2)}, "exp_avg_sq must be contiguous of shape (4, 3), not (4"),
        ({"indices": at(1, 2).short()}, "indices must be a tensor of torch.int32 or torch.int64"),
        ({"indices": at(1, 2)[None]}, "indices must be contiguous of shape (any), not (1, 2)"),
        ({"indices": at(1)}, "gradient must be contiguous of shape (1, 3), not (2, 3)"),
        ({"indices": at(1, 4)}, "indices[1] is 4; the table has 4 rows, from 0"),
        ({"indices": at(-1, 2)}, "indices[0] is -1; the table has 4 rows, from 0"),
        ({"indices": at(2, 2)}, "indices[1] is 2 after 2; they must ascend"),
        ({"indices": at(2, 1).int()}, "indices[1] is 1 after 2; they must ascend"),
        ({"gradient": torch.ones(2, 2)}, "gradient must be contiguous of shape (2, 3), not (2, 2)"),
        ({"gradient": BUFFER[:6].view(3, 2).T}, "gradient must be contiguous of shape (2, 3)"),
        ({"gradient": torch.ones(2, 3).double()}, "gradient must be a tensor of torch.float32, no"),
        ({"table": BUFFER[:12].view(4, 3), "gradient": BUFFER[11:17].view(2, 3)},
         "table and gradient overlap in memory"),
        ({"lr": -1.0}, "lr, beta1, beta2, eps must be at least 0, not [-1.0, 0.9, 0.999, 1e-08]"),
        ({"lr": "1"}, "lr must be a number, not '1'"),
        ({"eps": torch.inf}, "eps must be finite in float32, not inf"),
        ({"betas": (0.9, 1.0)}, "betas must be less than 1, not (0.9, 1.0)"),
        ({"step": 0}, "step counts from 1, not 0"),
        ({"step": 1.0}, "step must be an integer, not 1.0"),
    ],
)  # fmt: skip
def test_bad_steps_change_nothing(arguments: dict[str, Any], words: str) -> None:
    usual = {"table": TABLE.clone(), "exp_avg": TABLE.clone(), "exp_avg_sq": TABLE.clone(),
             "indices": at(1, 2), "gradient": torch.ones(2, 3), "step": 1, "lr": 0.1}  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        embedding.adam_rows(**{**usual, **arguments})
    assert all(torch.equal(usual[name], TABLE) for name in ("table", "exp_avg", "exp_avg_sq"))
    assert BUFFER.eq(1).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"table": TABLE.int()}, "table must be a tensor of torch.float32 or torch.float64 or t"),
        ({"table": TABLE.view(-1)}, "table must be contiguous of shape (any, any), not (12,)"),
        ({"indices": at(3, 0, 4)}, "indices[2] is 4; the table has 4 rows, from 0"),
        ({"indices": at(3, -1, 4).int()}, "indices[1] is -1; the table has 4 rows, from 0"),
        ({"indices": at(3, 0)}, "out must be contiguous of shape (2, 3), not (3, 3)"),
        ({"out": torch.ones(3, 3).half()}, "out must be a tensor of torch.float32, not"),
        ({"out": META[:3]}, "out must be a tensor on the CPU or a GPU, not meta"),
        ({"table": BUFFER[:12].view(4, 3), "out": BUFFER[11:20].view(3, 3)}, "table and out overl"),
    ],
)
def test_bad_lookups_write_nothing(arguments: dict[str, Any], words: str) -> None:
    usual = {"table": TABLE * 2, "indices": at(3, 0, 3), "out": torch.ones(3, 3)}
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        embedding.lookup(**{**usual, **arguments})
    assert usual["out"].eq(1).all() and BUFFER.eq(1).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"widths": (1, 3)}, "x must be contiguous of shape (any, 4), not (4, 3)"),
        ({"widths": (4, -1)}, "widths[1] must be at least 0, not -1"),
        ({"widths": (1.0, 2)}, "widths[0] must be an integer, not 1.0"),
        ({"x": TABLE.T}, "x must be contiguous of shape (any, 3), not (3, 4)"),
        ({"x": None}, "x must be a tensor on the CPU or a GPU, not NoneType"),
        ({"out": torch.ones(11)}, "out must be contiguous of shape (12), not (11,)"),
        ({"out": torch.ones(12).double()}, "out must be a tensor of torch.float32, not"),
        ({"x": BUFFER[:12].view(4, 3), "out": BUFFER[4:16]}, "x and out overlap in memory"),
    ],
)
def test_bad_columns_write_nothing(arguments: dict[str, Any], words: str) -> None:
    usual = {"x": TABLE * 2, "widths": (1, 2), "out": torch.ones(12)} | arguments
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        embedding.split_columns(**usual)
    assert usual["out"].eq(1).all() and BUFFER.eq(1).all()
    words = words.replace("out", "PARTS").replace("x must", "out must").replace("PARTS", "parts")
    if "overlap" not in words:
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            embedding.join_columns(usual["out"], usual["widths"], usual["x"])


def test_tensors_on_a_gpu_go_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    names = ("sgd", "adagrad", "adam", "lookup", "join_columns", "split_columns")
    module = SimpleNamespace(**{name: lambda *a: calls.append(a) for name in names})
    module.first_outside = lambda indices, rows: cpu.first_outside(indices, rows)
    monkeypatch.setitem(sys.modules, "linkweave.kernels.embedding.gpu", module)
    monkeypatch.setattr(embedding, "gpu", module, raising=False)
    table, state, other = (TABLE.clone().as_subclass(OnGpu) for _ in range(3))
    indices, gradient = (x.as_subclass(OnGpu) for x in (at(2, 1), torch.ones(2, 3)))
    embedding.sgd_rows(table, indices, gradient, lr=0.1)
    embedding.adagrad_rows(table, state, indices, gradient, lr=0.1, eps=0.5)
    embedding.adam_rows(
        table, state, other, indices, gradient, step=2, lr=0.25, betas=(0.5, 0.75), eps=0.125
    )
    embedding.lookup(table, indices, gradient)
    columns = torch.ones(12).as_subclass(OnGpu)
    embedding.join_columns(columns, [1, 2], table)
    embedding.split_columns(table, [1, 2], columns)
    assert [call[2] for call in calls[:2]] == [(np.float32(-0.1),), (0.5, np.float32(-0.1))]
    rate = np.float32(-0.25 * (1 - 0.75**2) ** 0.5 / (1 - 0.5**2))
    assert calls[2][2] == (0.5, 0.25, 0.125, rate)
    assert [len(call) for call in calls] == [4, 5, 6, 3, 3, 3]
    assert all(call[1] == [1, 2] for call in calls[4:])
    with pytest.raises(TypeError, match="indices must be on cuda:0 as the others, not on cpu"):
        embedding.sgd_rows(table, at(1, 2), gradient, lr=0.1)
    with pytest.raises(TypeError, match=r"gradient must be a tensor of torch\.float64, not"):
        embedding.sgd_rows(table.double().as_subclass(OnGpu), indices, gradient, lr=0.1)
    with pytest.raises(TypeError, match=r"table must be a tensor of torch\.float32"):
        embedding.sgd_rows(table.half().as_subclass(OnGpu), indices, gradient, lr=0.1)
    with pytest.raises(ValueError, match=re.escape("indices[1] is 4; the table has 4 rows")):
        embedding.lookup(table, at(1, 4).as_subclass(OnGpu), gradient)


# ---- in Triton ----------------------------------------------------------------------------------
def test_the_triton_kernels_in_the_interpreter() -> None:
    same_bits_in_the_interpreter("interpreted_embedding")


COMPILED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sgd": (("gradient", "table"), ("rate",)),
    "adagrad": (("gradient", "table", "state_sum"), ("eps", "rate")),
    "adam": (("gradient", "table", "exp_avg", "exp_avg_sq"), ("rest", "rest_2", "eps", "rate")),
    "copy": (("x", "out"), ()),
}
"""Arrays and scalars of each kernel."""
LOADS_AND_STORES = {"sgd": (2, 1), "adagrad": (3, 2), "adam": (4, 3), "copy": (1, 1)}
"""Of 16 bytes per thread, where rows are aligned."""
OPERATIONS = {
    "sgd": {"fma": 1},
    "adagrad": {"mul": 1, "add": 2, "fma": 1, "div": 1, "sqrt": 1},
    "adam": {"mul": 4, "add": 4, "sub": 2, "div": 1, "sqrt": 1},
    "copy": {},
}
"""Of each element."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", COMPILED)
def test_the_triton_kernels_compile(
    name: str, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from linkweave.kernels.embedding import gpu

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    arrays, scalars = COMPILED[name]
    pointers = dict.fromkeys(arrays, "*fp32" if scalars else "*i32")
    signature = {"indices": "*i64"} | pointers | {"n": "i32", "rows": "i32"}
    signature |= dict.fromkeys(scalars, "fp32")
    for width, most in ((100, 32), (33, 48)):
        strides = {} if scalars else {"X_STRIDE": width, "OUT_STRIDE": width}
        kernel = compiled(
            getattr(gpu, f"{name}_kernel"), signature, {**gpu.tile(width), **strides},
            range(1 + len(arrays)), architecture, num_warps=gpu.WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        ptx = kernel.asm["ptx"]
        loads, stores = LOADS_AND_STORES[name] if width % 4 == 0 else (0, 0)
        accesses = Counter(re.findall(r"\b(?:ld|st)\.global\.v\S+", ptx))
        assert accesses == Counter({"ld.global.v4.b32": loads, "st.global.v4.b32": stores})
        found = Counter(re.findall(r"\b([a-z]+)\.rn\.f32\b", ptx))
        assert found == {each: 4 * many for each, many in OPERATIONS[name].items()}
        assert not re.search(r"\.(ftz|sat|local|approx|full|shared)\b", ptx)
        used = resources(kernel.asm["cubin"], tmp_path)
        assert (used["STACK"], used["LOCAL"]) == (0, 0)
        assert used["REG"] <= most  # for 2,048 or 1,280 threads of a multiprocessor


# ---- what GPUs do by operations of torch ---------------------------------------------------------
@pytest.mark.parametrize("seed", range(40))
def test_torch_and_numba_number_and_add_alike(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, n = int(rng.integers(1, 50)), int(rng.integers(0, 40))
    ids = torch.from_numpy(rng.integers(0, rows, n))
    found, its = cpu.unique(ids, rows), gpu.unique(ids, rows)
    assert all(torch.equal(a, b) for a, b in zip(found, its, strict=True))
    want, inverse = np.unique(ids.numpy(), return_inverse=True)
    assert found[0].tolist() == [*want.tolist(), *[rows] * (n - len(want))]
    assert (found[1].tolist(), found[2].tolist()) == (inverse.tolist(), [len(want)])
    lists = [np.sort(rng.permutation(rows)[: int(rng.integers(0, rows + 1))]) for _ in range(3)]
    lengths, every = [*map(len, lists)], torch.from_numpy(np.concatenate(lists))
    values = special(3 * len(every), seed).view(-1, 3).nan_to_num(1, 2, 3)
    with np.errstate(over="ignore", invalid="ignore"):
        ours, sums = cpu.sum_rows(every, lengths, values, rows)
        theirs, others = gpu.sum_rows(every, lengths, values, rows)
    k = len(ours)
    assert torch.equal(ours, theirs[:k]) and same(sums, others[:k])
    assert (theirs[k:] == rows).all() and not others[k:].any()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: embedding.unique(torch.zeros(3), 5), "ids must be a tensor of torch.int64, not"),
        (lambda: embedding.unique(torch.zeros(3).long(), -1), "num_rows must be at least 0, not"),
        (lambda: embedding.sum_rows(torch.zeros(3).long(), [1, 1], torch.zeros(3, 2), 5),
         "lengths add up to 2, not to the 3 rows"),
        (lambda: embedding.sum_rows(torch.zeros(2).long(), [2], torch.zeros(3, 2), 5),
         "rows must be contiguous of shape (3), not (2,)"),
        (lambda: embedding.sum_rows(torch.zeros(2).long(), [2], torch.zeros(2, 2).half(), 5),
         "values must be a tensor of torch.float32"),
    ],
)  # fmt: skip
def test_what_cannot_be_added_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        call()
