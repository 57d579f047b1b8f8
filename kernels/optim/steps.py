"""Steps of SGD and Adam on the tensors of a table, as `torch.optim` takes them.

Each value below is rounded to the dtype, except that `fma(x, y, z)` = x y + z is rounded once. The
order and the fused operations are those of torch 2.13 (`foreach` or not, but not `fused`) on x86
processors with AVX2 or AVX-512. Scalars are computed in float64 and rounded once. With g the
gradient, or its negative to maximize, and p the parameter:

    SGD     g = fma(p, weight_decay, g)                         if weight_decay != 0
            b = fma(g, 1 - dampening, b momentum)
            p = fma(d, -lr, p)   where d = g without momentum, fma(b, momentum, g) with Nesterov,
                                 otherwise b
    Adam    p = p (1 - lr weight_decay)  if decoupled, otherwise g = fma(p, weight_decay, g)
            m = fma(g - m, w, m)        where w = 1 - beta1; if w >= 1/2, fma(g - m, w - 1, g)
            v = fma((1 - beta2) g, g, v beta2)
            p = p + (-lr / (1 - beta1^step) m) / (sqrt(v) / sqrt(1 - beta2^step) + eps)

In float32 and float64, SGD's p and b have the same bits as torch's on the CPU, as have Adam's m and
v after a step from the same values. Adam's p has them too if torch rounds square roots to nearest.
Those of Intel's MKL, which torch's wheels call, are off by up to 1 ulp, depending on the processor;
then p differs by at most 1 ulp if the last line changes it by at most a tenth. CPUs and GPUs return
the same bits. For a NaN, all this is true of its position, not of its payload; and with beta1 = 0,
the sign of a zero in torch's m depends on its position.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from linkweave.kernels.nvtx_ranges import ranged
from linkweave.kernels.optim import cpu
from linkweave.kernels.optim.tables import Table
from linkweave.kernels.validate import at_least_0, float32_value, floats_at_least_0

SCALARS = {torch.float32: np.float32, torch.float64: np.float64}


@ranged
def sgd(
    table: Table, *, lr: float, momentum: float = 0.0, dampening: float = 0.0,
    weight_decay: float = 0.0, nesterov: bool = False, maximize: bool = False,
) -> None:  # fmt: skip
    """One step of `torch.optim.SGD` for all tensors of `table`.

    With momentum, the table has one state, the buffers. The first step, which only writes them, is
    not taken here. On a GPU, the step is enqueued on the current CUDA stream.

    ValueError, TypeError: an argument is out of range, or the table does not fit.
    """
    lr, momentum, weight_decay = floats_at_least_0(
        lr=lr, momentum=momentum, weight_decay=weight_decay
    )
    dampening = float32_value(dampening, "dampening")
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError("nesterov needs a positive momentum and no dampening")
    _need_states(table, 1 if momentum else 0)
    scalars = (-1 if maximize else 1, weight_decay, momentum, 1 - dampening, -lr)
    scalars = tuple(map(SCALARS[table.dtype], scalars))
    _kernels(table).sgd(table, scalars, bool(nesterov))


@ranged
def adam(
    table: Table, *, step: int, lr: float, betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8, weight_decay: float = 0.0, decoupled: bool = False, maximize: bool = False,
) -> None:  # fmt: skip
    """One step of `torch.optim.Adam`, or of AdamW if weight decay is `decoupled`.

    It is for all tensors of `table`, whose two states are `exp_avg` and `exp_avg_sq`. `step` counts
    from 1. There is no amsgrad. Errors are as in `sgd`.
    """
    lr, beta1, beta2, eps, weight_decay = floats_at_least_0(
        lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay
    )
    if not max(beta1, beta2) < 1:
        raise ValueError(f"betas must be less than 1, not {betas}")
    if (step := at_least_0(step, "step")) == 0:
        raise ValueError("step counts from 1, not 0")
    _need_states(table, 2)
    kind = SCALARS[table.dtype]
    weight = kind(1 - beta1)
    near = bool(abs(weight) < 0.5)  # torch's lerp begins at the nearer end
    scalars = (
        kind(-1 if maximize else 1), kind(1 - lr * weight_decay if decoupled else 1),
        kind(0 if decoupled else weight_decay), weight if near else weight - kind(1), kind(beta2),
        kind(1 - beta2), kind((1 - beta2**step) ** 0.5), kind(eps), kind(-lr / (1 - beta1**step)),
    )  # fmt: skip
    _kernels(table).adam(table, scalars, near)


def _kernels(table: Table) -> Any:
    """The updates on the table's device."""
    if table.device.type == "cpu":
        return cpu
    from linkweave.kernels.optim import gpu  # which imports Triton

    return gpu


def _need_states(table: Table, many: int) -> None:
    if table.states < many:
        raise ValueError(f"the table has {table.states} states; this optimizer needs {many}")
