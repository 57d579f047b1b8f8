"""Inputs of casts that are hard to round, and torch's results."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

HALVES = (torch.float16, torch.bfloat16)
WIDE = (torch.float32, torch.float64)
SCALES = (1.0, 0.125, 1 / 3)
_NAN = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.float32: 0x7FC00000,
        torch.float64: 0x7FF8 << 48}  # fmt: skip
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's kernels run in its interpreter, on CPU tensors; otherwise on a GPU."""

_device = {"special": "cpu"}

fused = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch fuses no operations here",
)


def patterns(half: torch.dtype) -> torch.Tensor:
    """[65536] of every bit pattern."""
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(half)


def ties(half: torch.dtype) -> torch.Tensor:
    """float32 of all finite 16-bit values, the midpoints above them, and the neighbours of these;
    the largest midpoint is where overflow begins."""
    limits = torch.finfo(half)
    exact = patterns(half).double()
    exact = exact[exact.isfinite()]
    size = exact.abs().clamp(min=limits.smallest_normal)
    unit = (size.log2().floor().exp2() * limits.eps).copysign(exact)
    middle = (exact + unit / 2).float()
    around = [torch.nextafter(middle, torch.tensor(side)) for side in (torch.inf, -torch.inf)]
    return torch.cat([exact.float(), middle, *around])


def device_for(kernels: Any) -> str:
    """The device of the tensors that a module of kernels takes; `special` makes them there."""
    on_gpu = kernels.__name__.endswith(".gpu") and not INTERPRETED
    _device["special"] = "cuda" if on_gpu else "cpu"
    return _device["special"]


def special(n: int, seed: int = 0) -> torch.Tensor:
    """float32 [n] over the whole range: NaN of both signs, infinities, subnormals, zeros."""
    rng = np.random.default_rng([n, seed])
    bits = rng.integers(0, 1 << 32, n, dtype=np.uint32)  # any float32, of which few fit float16
    x = bits.view(np.float32)
    usual = rng.random(n) < 0.6
    x[usual] = rng.standard_normal(n)[usual] * 10.0 ** rng.integers(-9, 5, n)[usual]
    few = np.array(
        [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFF812345, 1, 0x80000001, 0x007FFFFF,
         0x477FEFFF, 0x477FF000, 0x7F7F7FFF, 0x7F7F8000], np.uint32
    )  # fmt: skip
    bits[:] = np.where(rng.random(n) < 0.1, rng.choice(few, n), bits)
    bits[: few.size] = few[:n]
    return torch.from_numpy(x).to(_device["special"])


def expected(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """torch's result; every NaN is the positive quiet one."""
    out = (x.float() * torch.tensor(scale, dtype=torch.float32)).to(dtype)
    nan = torch.tensor(_NAN[dtype]).to(_BITS[out.element_size()]).view(dtype)
    return torch.where(out.isnan(), nan, out)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits are equal."""
    bits = [x.cpu().view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and torch.equal(*bits)
