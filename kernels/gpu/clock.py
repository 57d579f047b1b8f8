"""Launch of `clock.cu`."""

from __future__ import annotations

import numpy as np

from linkweave.kernels.gpu.arrays import Gpu, fields, struct

TICKS = fields(("u8", "readings count"))


def readings(gpu: Gpu, count: int) -> np.ndarray:
    """int64 [count]: ns, each larger than the one before."""
    made = gpu.empty(count, "int64")
    argument = struct(TICKS, readings=gpu.address(made), count=count)
    gpu.launch("gpu/clock.cu", ("ticks",), (), argument, 1)
    return gpu.read(made)
