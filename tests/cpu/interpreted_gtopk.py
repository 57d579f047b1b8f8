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

SIZES = (0, 1, 1023, 1024, 2100)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def on(kernels: Any) -> None:
    """Choose the kernels."""
    steps._kernels = lambda device: kernels


def plain(x: torch.Tensor) -> torch.Tensor:
    """All NaN become one, as their payloads may differ."""
    return torch.where(x.isnan(), torch.nan, x)


def selected(n: int, k: int, dtype: torch.dtype, shift: int) -> list[Any]:
    """The result, and all memory afterwards; arrays begin `shift` elements off alignment."""
    whole = [special(n + 5, seed) for seed in range(2)]
    whole[0] = whole[0].to(dtype)
    if n % 2:
        whole[1] = (whole[1] % 3).nan_to_num(nan=1).floor()  # many ties
    grad, residual = (x[shift : shift + n] for x in whole)
    pair = gtopk.select(grad, residual, k)
    assert not grad.any()
    return [plain(x) for x in (*pair, *whole)]


def main() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    from linkweave.kernels.gtopk import gpu

    for n, dtype in product(SIZES, DTYPES):
        for k, shift in {(0, 0), (min(1, n), 1), (n // 100, 0), (n, 1)}:
            found = []
            for kernels in (cpu, gpu):
                on(kernels)
                found.append(selected(n, k, dtype, shift))
            assert all(map(same, *found)), (n, k, dtype, shift)
    x = special(300)
    gpu.clear(x[1:], torch.tensor([-1, 0, 7, 298, 299, 2**31 - 1], dtype=torch.int32))
    want = special(300)
    want[[1, 8, 299]] = 0
    assert same(x, want)
    print("same bits")


if __name__ == "__main__":
    main()
