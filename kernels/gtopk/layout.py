"""Where parameters lie in a flat space, which indices of sparse gradients refer to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from linkweave.kernels.optim.tables import check_columns
from linkweave.kernels.validate import at_least_0

FIRST, STOP, ADDRESS = range(3)  # rows of the table


class Layout:
    """Parameters in a flat space: `params[i]` fills the positions from `firsts[i]`.

    `params` are float32 tensors on the CPU or on one GPU, at least one, that do not overlap. Their
    strides leave no gaps (contiguous, channels last, transposed, ...); elements follow one another
    in the order of memory. `firsts` are as many integers that ascend, and parameters do not share
    positions; positions between parameters may be empty. Otherwise TypeError or ValueError is
    raised.

    It keeps the parameters alive; if a parameter's `data` is replaced, a new layout is needed.

    `table` is int64 [3, parameters] on the device, NumPy's on the CPU and torch's on a GPU: for
    each parameter its first position, the position after its last, and its address.
    """

    def __init__(self, params: Sequence[torch.Tensor], firsts: Sequence[int]) -> None:
        if not params or len(firsts) != len(params):
            raise ValueError(
                f"a layout of {len(params)} params with {len(firsts)} firsts; there must be one "
                "for each, and at least 1"
            )
        self.device = params[0].device
        if params[0].dtype != torch.float32 or self.device.type not in ("cpu", "cuda"):
            raise TypeError(
                f"parameters of {params[0].dtype} on {self.device} are not supported; choose "
                "float32 on the CPU or a GPU"
            )
        check_columns({"params": params})
        starts = [at_least_0(first, f"firsts[{i}]") for i, first in enumerate(firsts)]
        stops = [first + param.numel() for first, param in zip(starts, params, strict=True)]
        for i, (stop, first) in enumerate(zip(stops, starts[1:], strict=False)):
            if first < stop:
                raise ValueError(
                    f"firsts[{i + 1}] is {first}; it must be at least {stop}, where params[{i}] "
                    "ends"
                )
        self.params = tuple(params)
        table = np.array([starts, stops, [param.data_ptr() for param in params]], np.int64)
        self.table: Any = table
        if self.device.type != "cpu":
            self.table = torch.from_numpy(table).to(self.device)
