"""Casts with a factor: the CPU against torch, and the Triton kernel with no GPU."""

from __future__ import annotations

import re
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from linkweave import kernels
from tests.cpu import triton_checks
from tests.cpu.casting import HALVES, SCALES, WIDE, expected, patterns, same, special, ties

ROOT = Path(__file__).parents[2]


def cast(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    kernels.cast(x, out, scale)
    return out


# ---- on the CPU ---------------------------------------------------------------------------------
@pytest.mark.parametrize("half", HALVES)
def test_every_pattern_is_widened_and_narrowed_again(half: torch.dtype) -> None:
    x = patterns(half)
    for wide in WIDE:
        found = cast(x, wide)
        numbers = ~x.isnan()
        assert same(found, expected(x, wide, 1.0)) and same(found[numbers], x.to(wide)[numbers])
        assert same(cast(found, half), expected(x, half, 1.0))
        for scale in SCALES:
            assert same(cast(x, wide, scale), expected(x, wide, scale))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("half", HALVES)
def test_ties_go_to_even_and_overflow_to_infinity(half: torch.dtype, scale: float) -> None:
    x = ties(half)
    found = cast(x, half, scale)
    assert same(found, expected(x, half, scale))
    assert scale < 1 or found.isinf().sum() >= 4  # both signs of the last midpoint and beyond


@pytest.mark.parametrize("n", [0, 1, 17, 100_003, 200_003])
@pytest.mark.parametrize("half", HALVES)
def test_values_of_all_sizes(half: torch.dtype, n: int, threads: int) -> None:
    for wide, scale in product(WIDE, SCALES):
        x = special(n).to(wide)
        assert same(cast(x, half, scale), expected(x, half, scale))
        halves = x.to(half)
        assert same(cast(halves, wide, scale), expected(halves, wide, scale))


def test_float64_is_rounded_to_float32_first_as_torch_does() -> None:
    near = [1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40]  # become ties in float32
    x = torch.tensor([*near, 1e300, -1e-300], dtype=torch.float64)
    found = cast(x, torch.bfloat16)
    assert same(found, x.to(torch.bfloat16))
    assert found.tolist() == [1.0, 1 + 2.0**-6, torch.inf, -0.0]


def test_arrays_shapes_and_gradients() -> None:
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(2, 3, 4)
    out = np.empty(24, np.float16)
    kernels.cast(x, out, np.float32(0.5))
    assert out.tobytes() == (x * np.float32(0.5)).astype(np.float16).tobytes()
    x.flags.writeable = False
    mixed = torch.empty(4, 6, dtype=torch.bfloat16)
    kernels.cast(x, mixed)
    assert same(mixed.reshape(-1), torch.tensor(x).reshape(-1).to(torch.bfloat16))
    weights = torch.nn.Parameter(torch.randn(8))
    assert same(cast(weights, torch.float16), weights.detach().half())


def test_nothing_beyond_the_output_is_written() -> None:
    for half, n in product(HALVES, (1, 17, 5000)):
        out = torch.full((n + 8,), 3, dtype=half)
        kernels.cast(torch.ones(n), out[3 : n + 3])
        assert out.tolist() == [3] * 3 + [1] * n + [3] * 5


SHARED = np.zeros(8, np.float32)


@pytest.mark.parametrize(
    ("x", "out", "scale", "words"),
    [
        (np.zeros(4, np.float32), np.zeros(4, np.float32), 1.0, "cannot cast float32 to float32"),
        (torch.zeros(4).half(), torch.zeros(4).bfloat16(), 1.0, "cannot cast float16 to bfloat16"),
        (np.zeros(4, np.int32), np.zeros(4, np.float16), 1.0,
         "cannot cast int32 to float16; one must be float32 or float64, the other float16 or "
         "bfloat16"),
        (np.zeros(4, ">f4"), np.zeros(4, np.float16), 1.0, "cannot cast >f4 to float16"),
        (torch.zeros(4), torch.zeros(5).half(), 1.0, "x has 4 elements, out 5: they must agree"),
        (torch.zeros(8)[::2], torch.zeros(4).half(), 1.0, "x must be contiguous"),
        (np.zeros(4, np.float32), np.zeros(8, np.float16)[::2], 1.0, "out must be contiguous"),
        (np.zeros(1, np.float32), np.frombuffer(b"ab", np.float16), 1.0, "out must be writable"),
        (SHARED, SHARED.view(np.float16)[:8], 1.0, "x and out overlap in memory"),
        ([1.0], np.zeros(1, np.float16), 1.0, "x must be a NumPy array or a torch tensor, not li"),
        (np.zeros(1, np.float32), None, 1.0, "out must be a NumPy array or a torch tensor, not N"),
        (torch.zeros(4), torch.zeros(4, device="meta").half(), 1.0, "out is on meta; all must be"),
        (torch.zeros(4), torch.zeros(4).half(), "2", "scale must be a number, not '2'"),
        (torch.zeros(4), torch.zeros(4).half(), True, "scale must be a number, not True"),
        (torch.zeros(4), torch.zeros(4).half(), 1e39, "scale must be finite in float32, not 1e+39"),
        (torch.zeros(4), torch.zeros(4).half(), float("nan"), "scale must be finite in float32"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(x: Any, out: Any, scale: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        kernels.cast(x, out, scale)


def test_tensors_on_a_gpu_are_checked_and_go_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from linkweave.kernels import casts

    calls: list[tuple[Any, ...]] = []
    module = SimpleNamespace(cast=lambda *arguments: calls.append(arguments))
    monkeypatch.setitem(sys.modules, "linkweave.kernels.casts.gpu", module)
    monkeypatch.setattr(casts, "gpu", module, raising=False)
    x, out = (
        torch.zeros(4).as_subclass(triton_checks.OnGpu),
        torch.zeros(4).bfloat16().as_subclass(triton_checks.OnGpu),
    )
    kernels.cast(x, out, 0.1)
    kernels.cast(out, x)
    assert [words[2:] for words in calls] == [("bfloat16", float(np.float32(0.1))), ("bfloat16", 1)]
    assert calls[0][0] is x and calls[0][1] is out and calls[1][0] is out
    for bad, words in (
        (torch.zeros(4).half(), "x is on cuda:0, out on cpu: all must be on the CPU or on one GPU"),
        (None, "x is on cuda:0, out on no device: all must be"),
        (out[:3], "x has 4 elements, out 3: they must agree"),
        (torch.zeros(8).half().as_subclass(triton_checks.OnGpu)[::2], "out must be contiguous"),
        (x.view(torch.float16)[:4], "x and out overlap in memory"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            kernels.cast(x, bad)
    assert len(calls) == 2


# ---- in Triton ----------------------------------------------------------------------------------
def test_the_triton_kernel_in_the_interpreter() -> None:
    triton_checks.same_bits_in_the_interpreter("interpreted_cast")


ACCESSES = {
    ("fp32", "u16"): {"ld.global.v4.b32": 1, "st.global.v2.b32": 1},
    ("fp64", "u16"): {"ld.global.v2.b64": 2, "st.global.v2.b32": 1},
    ("u16", "fp32"): {"ld.global.v2.b32": 1, "st.global.v4.b32": 1},
    ("u16", "fp64"): {"ld.global.v2.b32": 1, "st.global.v2.b64": 2},
}
"""Of each thread for four elements, where no mask is needed."""


@pytest.mark.parametrize("architecture", triton_checks.ARCHITECTURES)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_the_triton_kernel_compiles(
    half: str, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from linkweave.kernels.casts import gpu

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for (source, target), accesses in ACCESSES.items():
        kernel = triton_checks.compiled(
            gpu.cast_kernel,
            {"x": f"*{source}", "out": f"*{target}", "scale": "fp32", "n": "i64"},
            {"HALF": half, "NARROW": target == "u16", "BLOCK": gpu.BLOCK},
            (0, 1), architecture, num_warps=gpu.WARPS,
        )  # fmt: skip
        ptx = kernel.asm["ptx"]
        assert Counter(re.findall(r"\b(?:ld|st)\.global\.v\S+", ptx)) == accesses
        assert re.search(r"mul\.wide\.u32\s+%rd\d+, %r\d+, 1024;", ptx)  # offsets of 64 bits
        assert not re.search(r"\.(ftz|sat|local|approx)\b", ptx)
        assert ("shared" in ptx) == (target == "fp64")
        if half == "float16":
            assert ("cvt.rn.f16" in ptx) == (target == "u16")
        assert "bf16" not in ptx.replace(half, "")  # rounded in integers
        found = triton_checks.resources(kernel.asm["cubin"], tmp_path)
        assert (found["STACK"], found["LOCAL"]) == (0, 0)
        assert 2048 * found["REG"] <= 65536  # a full multiprocessor
