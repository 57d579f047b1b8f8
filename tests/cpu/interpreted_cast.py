"""The Triton kernel of casts against the CPU's, bit for bit.

A script: TRITON_INTERPRET=1 chooses Triton's interpreter; without it, the kernel runs on a GPU.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import torch

from linkweave import kernels
from tests.cpu.casting import HALVES, SCALES, WIDE, device_for, patterns, same, special, ties

GUARD = 5


def check(x: torch.Tensor, dtype: torch.dtype, scale: float, shift: int = 0) -> None:
    """`shift`: elements by which the output is off alignment."""
    from linkweave.kernels.casts import gpu

    half = str(dtype if dtype in HALVES else x.dtype).removeprefix("torch.")
    want = torch.full((x.numel() + shift + GUARD,), 7, dtype=dtype)
    found = want.to(device_for(gpu))
    part = slice(shift, shift + x.numel())
    kernels.cast(x, want[part], scale)
    gpu.cast(x.to(found.device), found[part], half, float(np.float32(scale)))
    device_for(kernels)
    assert same(found, want), (x.dtype, dtype, x.shape, scale)


def main() -> None:
    for half in HALVES:
        for scale in SCALES:
            check(patterns(half), torch.float32, scale)
            check(ties(half)[::7].contiguous(), half, scale)
        for wide, n in product(WIDE, (0, 1, 17, 1023, 1024, 1025, 5000)):
            x = special(n).to(wide)
            check(x, half, 1 / 3)
            check(x.to(half), wide, 1 / 3)
        check(special(2000)[3:], half, 1.0, shift=1)
        check(special(2000).to(half)[3:], torch.float32, 0.125, shift=1)
    print("same bits")


if __name__ == "__main__":
    main()
