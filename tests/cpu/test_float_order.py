"""Floats as integers in the same order: every pattern of 16 bits, and drawn ones of 32 and 64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from linkweave.kernels.float_order import from_integers, to_integers

KINDS = {
    torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32,
    torch.float64: torch.int64,
}  # fmt: skip


def patterns(dtype: torch.dtype) -> torch.Tensor:
    kind = KINDS[dtype]
    if kind is torch.int16:
        return torch.arange(-(1 << 15), 1 << 15).to(kind)
    ends = torch.iinfo(kind)
    rng = np.random.default_rng(3)
    drawn = torch.from_numpy(rng.integers(ends.min, ends.max, 50_000, endpoint=True)).to(kind)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-320, -1e-45],
                           dtype=dtype)  # fmt: skip
    return torch.cat([drawn, special.view(kind)])


@pytest.mark.parametrize("greatest", [False, True])
@pytest.mark.parametrize("dtype", KINDS)
def test_integers_have_the_order_of_the_floats(dtype: torch.dtype, greatest: bool) -> None:
    bits, ends = patterns(dtype), torch.iinfo(KINDS[dtype])
    floats = bits.view(dtype)
    infinity = int(torch.tensor(float("inf"), dtype=dtype).view(KINDS[dtype]))
    nan = ends.max if greatest else ends.min
    keys = bits.int() if KINDS[dtype] is torch.int16 else bits.clone()
    mask, infinite, unknown = (keys.numpy().dtype.type(v) for v in (ends.max, infinity, nan))
    to_integers(keys.numpy(), mask, infinite, unknown)

    known = ~floats.isnan()
    assert (keys[~known] == nan).all() and (keys[known] != nan).all()
    order = keys[known].sort().indices
    values = floats[known].double()[order]
    assert (values.diff() >= 0).all()
    zeros = bits[known][order][values == 0]  # those of -0 first
    assert (zeros.sort().values == zeros).all()

    from_integers(keys.numpy(), mask)
    back = keys.to(KINDS[dtype])
    assert torch.equal(back[known], bits[known]) and back.view(dtype)[~known].isnan().all()
