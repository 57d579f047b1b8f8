"""What each rank computes alone in a step of gTop-k S-SGD.

A sparse vector has a fixed room, so that no device is asked for its length: it is int32 [2, room],
the bits of float32 values above ascending indices. What follows its entries is filled with `PAD`,
an index above all others, and -0.0, which changes nothing that it is added to.

Source: Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks" (2019), algorithms 3 and 4. CPUs and GPUs return the same bits, for any
number of threads. For a NaN, this is true of its position, not of its payload. On a GPU everything
is enqueued on the current CUDA stream, and the host does not wait.
"""

from __future__ import annotations

from typing import Any

import torch

from linkweave.kernels.gtopk import cpu
from linkweave.kernels.merge.cpu import PAD
from linkweave.kernels.nvtx_ranges import ranged
from linkweave.kernels.tensors import check_overlaps, check_tensor, device_of
from linkweave.kernels.validate import at_least_0, count

GRADIENTS = (torch.float32, torch.float16, torch.bfloat16)


@ranged
def select(grad: torch.Tensor, residual: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a gradient to the residual, and take the k largest |residual| out of it.

    `grad` is [n] of float32, float16 or bfloat16, n < 2^31 - 1, and is left zero. `residual` is
    float32 [n] and is updated in place: each sum is rounded to float32; where values are taken, the
    residual becomes zero. Both are contiguous, on the CPU or one GPU, and do not overlap.

    Returns (float32 values [k], ascending int32 indices [k]) on the device. Ties and NaN are as in
    `kernels.topk_abs`: among equal magnitudes, the lowest indices are selected; NaN counts as
    larger than infinity.

    On the CPU, one pass reads and writes both: 16 bytes per float32 element. On a GPU, this is
    `kernels.sparsify`, with n bytes of scratch memory, and a pass that clears the gradient.

    ValueError, TypeError: an argument is out of range, or the tensors do not fit one another.
    """
    device = device_of(grad, "grad")
    check_tensor(grad, "grad", GRADIENTS, device, (None,))
    check_tensor(residual, "residual", (torch.float32,), device, (grad.numel(),))
    if grad.numel() >= PAD:
        raise ValueError(f"grad has {grad.numel()} elements; there must be fewer than {PAD}")
    check_overlaps({"grad": grad, "residual": residual})
    k = count(k, grad.numel())
    values, indices = _kernels(device).select(grad.detach(), residual.detach(), k)
    return values, indices


def vector_of(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The vector [2, n] of float32 values [n] and ascending int32 indices [n]."""
    return torch.stack([values.view(torch.int32), indices])


def values_of(vector: torch.Tensor) -> torch.Tensor:
    """A view of a vector's values [room]."""
    return vector[0].view(torch.float32)


@ranged
def merge(a: torch.Tensor, b: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Add two vectors; returns (the k largest entries of the sum, the other entries).

    The operator of definition 1 of the paper. Values of `a` and `b` at a common index are added in
    this order. The results have the rooms k and, of `a` with `b`, the rest. Ties and NaN are as in
    `select`.

    ValueError, TypeError: k exceeds the rooms, or the tensors are no vectors on one device.
    """
    device = device_of(a, "a")
    check_tensor(a, "a", (torch.int32,), device, (2, None))
    check_tensor(b, "b", (torch.int32,), device, (2, None))
    if (k := at_least_0(k, "k")) > a.shape[1] + b.shape[1]:
        raise ValueError(f"k is {k}, above the room of both vectors, {a.shape[1] + b.shape[1]}")
    kept, cut = _kernels(device).merge(a, b, k)
    return kept, cut


@ranged
def keep(
    own: torch.Tensor, found: torch.Tensor, residual: torch.Tensor, *, arrived: bool = False
) -> None:
    """Add to the residual the entries of `own` that are not in `found`; or with `arrived`, those
    that are.

    `own` and `found` are vectors, the residual is float32 [n], n above their indices. What is not
    finite is not kept, and counts as not found.

    ValueError, TypeError: the tensors do not fit one another.
    """
    device = device_of(residual, "residual")
    check_tensor(own, "own", (torch.int32,), device, (2, None))
    check_tensor(found, "found", (torch.int32,), device, (2, None))
    check_tensor(residual, "residual", (torch.float32,), device, (None,))
    if own.shape[1] and residual.numel():
        _kernels(device).keep(own, found, residual.detach(), arrived)


@ranged
def scatter(found: torch.Tensor, x: torch.Tensor, ranks: int) -> None:
    """x[index] = value / ranks for the entries of a vector; `x` is zero before.

    `x` is float32, float16 or bfloat16 [n], n above the vector's indices. Quotients are rounded to
    float32 and then to the dtype of `x`, in which finite ones saturate; a zero is positive.

    ValueError, TypeError: the tensors do not fit one another.
    """
    device = device_of(x, "x")
    check_tensor(found, "found", (torch.int32,), device, (2, None))
    check_tensor(x, "x", GRADIENTS, device, (None,))
    if found.shape[1] and x.numel():
        values = values_of(found)
        # by a tensor: on GPUs torch multiplies by the inverse of a number, which rounds otherwise
        values = narrowed(values / values.new_full((1,), ranks), x.dtype) + 0.0
        _kernels(device).scatter(found[1], values, x.detach())


@ranged
def drop_nonfinite(fine: torch.Tensor, residual: torch.Tensor) -> None:
    """Unless `fine`, set what is not finite in the residual to zero.

    `fine` is a bool without a dimension, the residual is float32 [n]. On a GPU, which alone reads
    `fine`, the kernel ends at once if it is true.

    ValueError, TypeError: the tensors do not fit one another.
    """
    device = device_of(residual, "residual")
    check_tensor(fine, "fine", (torch.bool,), device, ())
    check_tensor(residual, "residual", (torch.float32,), device, (None,))
    _kernels(device).drop_nonfinite(fine, residual.detach())


def narrowed(x: torch.Tensor, dtype: torch.dtype, ranks: int = 1) -> torch.Tensor:
    """Float32 values in a dtype; finite ones saturate, so that they can be added up over so many
    ranks."""
    if x.dtype == dtype:
        return x
    most = torch.finfo(dtype).max / ranks
    return torch.where(x.isinf(), x, x.clamp(-most, most)).to(dtype)


def _kernels(device: torch.device) -> Any:
    if device.type == "cpu":
        return cpu
    from linkweave.kernels.gtopk import gpu  # which imports Triton

    return gpu
