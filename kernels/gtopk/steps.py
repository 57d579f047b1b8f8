"""What each rank computes alone in a step of gTop-k S-SGD: selection from its residual.

Source: Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks" (2019), algorithm 4. CPUs and GPUs return the same bits, for any number of
threads. For a NaN, this is true of its position, not of its payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from linkweave.kernels.api import sparsify
from linkweave.kernels.gtopk import cpu
from linkweave.kernels.nvtx_ranges import ranged
from linkweave.kernels.tensors import check_overlaps, device_of
from linkweave.kernels.validate import count

GRADIENTS = (torch.float32, torch.float16, torch.bfloat16)
MOST = 1 << 31  # positions are int32


@ranged
def select(grad: torch.Tensor, residual: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a gradient to the residual, and take the k largest |residual| out of it.

    `grad` is [n] of float32, float16 or bfloat16, n < 2^31, and is left zero. `residual` is float32
    [n] and is updated in place: each sum is rounded to float32; where values are taken, the
    residual becomes zero. Both are contiguous, on the CPU or one GPU, and do not overlap.

    Returns (float32 values [k], ascending int32 indices [k]) on the device. Ties and NaN are as in
    `kernels.topk_abs`: among equal magnitudes, the lowest indices are selected; NaN counts as
    larger than infinity.

    On the CPU, one pass reads and writes both: 16 bytes per float32 element. On a GPU, this is
    `kernels.sparsify`, with n bytes of scratch memory, and a pass that clears the gradient; both
    are enqueued on the current CUDA stream, and the host does not wait.

    ValueError, TypeError: an argument is out of range, or the tensors do not fit one another.
    """
    device = device_of(grad, "grad")
    _check(grad, "grad", GRADIENTS, device)
    _check(residual, "residual", (torch.float32,), device, grad.numel())
    if grad.numel() >= MOST:
        raise ValueError(f"grad has {grad.numel()} elements; there must be fewer than 2^31")
    check_overlaps({"grad": grad, "residual": residual})
    grad, residual, k = grad.detach(), residual.detach(), count(k, grad.numel())
    if device.type == "cpu":
        return cpu.select(grad, residual, k)
    if not grad.numel():
        return residual.new_empty(0), residual.new_empty(0, dtype=torch.int32)
    values, indices = sparsify(grad, residual, k)
    grad.zero_()
    return values, indices


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
