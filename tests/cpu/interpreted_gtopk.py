"""The Triton kernels of gTop-k in Triton's interpreter, against the CPU's, bit for bit.

A script: the interpreter is chosen when Triton is imported. `kernels.topk_abs` selects on the CPU.
"""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import torch

from linkweave.kernels import gtopk
from linkweave.kernels.gtopk import cpu, steps
from tests.cpu.casting import same, special
from tests.cpu.interpreted_optim import round_fma_once

SIZES = (0, 1, 1023, 1024, 2100)
WAYS: tuple[dict[str, Any], ...] = ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True})
CASES = (*product((torch.float32,), WAYS), *product((torch.float16, torch.bfloat16), WAYS[1:2]))


def on(kernels: Any) -> None:
    """Choose the kernels."""
    steps._kernels = lambda device: kernels


def plain(x: torch.Tensor) -> torch.Tensor:
    """All NaN become one, as their payloads may differ."""
    return torch.where(x.isnan(), torch.nan, x)


def selected(n: int, k: int, dtype: torch.dtype, shift: int, way: dict[str, Any]) -> list[Any]:
    """The result, and all memory afterwards; arrays begin `shift` elements off alignment."""
    whole = [special(n + 5, seed) for seed in range(3)]
    whole[0] = whole[0].to(dtype)
    if n % 2:
        whole[1] = (whole[1] % 3).nan_to_num(nan=1).floor()  # many ties
    grad, residual, velocity = (x[shift : shift + n] for x in whole)
    pair = gtopk.select(grad, residual, velocity if way else None, k, **way)
    assert not grad.any()
    return [plain(x) for x in (*pair, *whole)]


def applied(kernels: Any) -> list[torch.Tensor]:
    """Parameters after updates at their first and last positions, and at positions of none."""
    params = [special(n, n) for n in (5, 1, 0, 700, 40)]
    layout = gtopk.Layout(params, (3, 8, 20, 20, 720))
    if kernels is not cpu:
        layout.table = torch.from_numpy(layout.table)
    held = [*range(10), 19, 20, *range(23, 718, 3), 719, 720, 759, 760, 1 << 30, (1 << 31) - 1]
    indices = torch.tensor(held, dtype=torch.int32)
    values = special(indices.numel(), 1)
    gtopk.apply(layout, values, indices, (-0.1, 0.0, 7, 1 / 3, -1e30))
    gtopk.apply(layout, values[:0], indices[:0], [1.0] * 5)
    return [plain(param) for param in params]


def cleared() -> list[torch.Tensor]:
    x = special(300)
    gtopk.clear(x[1:], torch.tensor([-1, 0, 7, 298, 299, 2**31 - 1], dtype=torch.int32))
    return [x]


def main() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    from linkweave.kernels.gtopk import gpu

    round_fma_once()
    for n, (dtype, way) in product(SIZES, CASES):
        for k, shift in {(0, 0), (min(1, n), 1), (n // 100, 0), (n, 1)}:
            found = []
            for kernels in (cpu, gpu):
                on(kernels)
                found.append(selected(n, k, dtype, shift, way))
            assert all(map(same, *found)), (n, k, dtype, shift, way)
    for check in (applied, lambda kernels: cleared()):
        found = []
        for kernels in (cpu, gpu):
            on(kernels)
            found.append(check(kernels))
        assert all(map(same, *found)), check
    print("same bits")


if __name__ == "__main__":
    main()
