"""The parts of a step of gTop-k S-SGD that each rank computes alone.

They are those of Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k
Sparsification for Low Bandwidth Networks" (2019), algorithm 4: `select` adds the gradient to the
residual and takes the k largest out of it, `apply` updates the weights. Velocities are those of Lin
et al., "Deep Gradient Compression" (2018), section 3: momentum correction, which accumulates
velocities in place of gradients, and momentum factor masking, which stops the momentum of what was
sent (`clear`, once it is known what a merge has put back).

Each value below is rounded to float32, except that `fma(x, y, z)` = x y + z is rounded once. With g
the gradient of an element:

    select  v = v momentum + g                  with a velocity
            residual = residual + d             where d = g without velocity, fma(v, momentum, g)
                                                with Nesterov, otherwise v
    apply   p = fma(value, scale, p)

So v and d have the bits of the buffer and the step of `kernels.optim.sgd` with no dampening, after
its first step. CPUs and GPUs return the same bits, for any number of threads. For a NaN, this is
true of its position, not of its payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from linkweave.kernels.gtopk import cpu
from linkweave.kernels.gtopk.layout import Layout
from linkweave.kernels.nvtx_ranges import ranged
from linkweave.kernels.tensors import check_overlaps, device_of
from linkweave.kernels.validate import count, float32_value

GRADIENTS = (torch.float32, torch.float16, torch.bfloat16)
MOST = 1 << 31  # positions are int32


@ranged
def select(
    grad: torch.Tensor, residual: torch.Tensor, velocity: torch.Tensor | None, k: int, *,
    momentum: float = 0.0, nesterov: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Add a gradient to the residual, and take the k largest |residual| out of it.

    `grad` is [n] of float32, float16 or bfloat16, n < 2^31, and is left zero. `residual` and
    `velocity` are float32 [n] and are updated in place; where values are taken, the residual
    becomes zero. With no velocity (None) there is no momentum. All are contiguous, on the CPU or
    one GPU, and do not overlap.

    Returns (float32 values [k], ascending int32 indices [k]) on the device. Ties and NaN are as in
    `kernels.topk_abs`: among equal magnitudes, the lowest indices are selected; NaN counts as
    larger than infinity.

    On the CPU, one pass reads and writes the three: 24 bytes per float32 element. On a GPU, work is
    enqueued on the current CUDA stream, two passes read the residual again, and the host waits
    once, unless k is 0.

    ValueError, TypeError: an argument is out of range, or the tensors do not fit one another.
    """
    device = device_of(grad, "grad")
    _check(grad, "grad", GRADIENTS, device)
    named = {"grad": grad, "residual": residual} | (
        {} if velocity is None else {"velocity": velocity}
    )
    for name, x in named.items():
        if x is not grad:
            _check(x, name, (torch.float32,), device, grad.numel())
    if grad.numel() >= MOST:
        raise ValueError(f"grad has {grad.numel()} elements; there must be fewer than 2^31")
    check_overlaps(named)
    k = count(k, grad.numel())
    if (momentum := float32_value(momentum, "momentum")) < 0:
        raise ValueError(f"momentum must be at least 0, not {momentum}")
    if momentum and velocity is None:
        raise ValueError(f"momentum {momentum} needs a velocity")
    if nesterov and not momentum:
        raise ValueError("nesterov needs a positive momentum")
    return _kernels(device).select(
        *(None if x is None else x.detach() for x in (grad, residual, velocity)), k, momentum,
        bool(nesterov),
    )  # fmt: skip


@ranged
def apply(
    layout: Layout, values: torch.Tensor, indices: torch.Tensor, scales: Sequence[float]
) -> None:
    """Add sparse values to parameters: p = fma(values[j], scale, p) at position indices[j].

    `values` is float32 [m]; `indices` is int32 [m], distinct and ascending, which is not checked:
    positions in the flat space of `layout`. Those in no parameter are ignored. `scales` are one
    number for each parameter, rounded to float32: for SGD, -lr of its group. Memory is written
    directly, so that autograd does not notice. On a GPU, one launch is enqueued on the current
    CUDA stream.

    The result has the bits of `kernels.optim.sgd` without momentum and weight decay for dense
    gradients that hold the values, and 0.0 elsewhere: fma(0.0, -lr, p) = p for each p, also for
    -0.0. (Where a dense gradient is -0.0, or with `maximize`, a parameter of -0.0 becomes 0.0.)

    ValueError, TypeError: an argument is out of range, or the tensors do not fit the layout.
    """
    _check(values, "values", (torch.float32,), layout.device)
    _check(indices, "indices", (torch.int32,), layout.device, values.numel())
    if len(scales) != len(layout.params):
        raise ValueError(f"{len(scales)} scales for {len(layout.params)} parameters")
    rounded = [float32_value(scale, f"scales[{i}]") for i, scale in enumerate(scales)]
    _kernels(layout.device).apply(layout, values.detach(), indices, np.array(rounded, np.float32))


@ranged
def clear(x: torch.Tensor, indices: torch.Tensor) -> None:
    """x[indices] = 0, in place; indices out of range are ignored.

    `x` is contiguous float32 [n] and `indices` is contiguous int32 [m], on the CPU or one GPU. On a
    GPU, one launch is enqueued on the current CUDA stream. TypeError or ValueError otherwise.
    """
    device = device_of(x, "x")
    _check(x, "x", (torch.float32,), device)
    _check(indices, "indices", (torch.int32,), device)
    _kernels(device).clear(x.detach(), indices)


def _kernels(device: torch.device) -> Any:
    if device.type == "cpu":
        return cpu
    from linkweave.kernels.gtopk import gpu  # which imports Triton

    return gpu


def _check(
    x: Any, name: str, dtypes: Sequence[torch.dtype], device: torch.device, n: int | None = None
) -> None:
    """`x` must be a contiguous tensor [n] of one of the dtypes on the device."""
    if not isinstance(x, torch.Tensor) or x.dtype not in dtypes:
        found = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"{name} must be a tensor of {' or '.join(map(str, dtypes))}, not {found}")
    if x.device != device:
        raise TypeError(f"{name} must be on {device} as the others, not on {x.device}")
    if x.ndim != 1 or not x.is_contiguous() or n not in (None, x.numel()):
        wanted = "one dimension" if n is None else f"shape ({n},)"
        raise ValueError(f"{name} must be contiguous of {wanted}, not {tuple(x.shape)}")
