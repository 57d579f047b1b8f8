"""Steps of gTop-k on a GPU.

Merges are torch's operations: Triton has no sort of a whole array, and a vector is short. They run
alike on tensors of any device, and so do their tests. What passes over all elements is a kernel:
the selection is `kernels.sparsify`, in CUDA C++, and `drop_nonfinite` is in Triton. Both are
operators of torch, whose results' shapes are known without a GPU.

`drop_nonfinite` reads and writes nothing but a flag as a rule. Otherwise each element is read once,
and written where it is not finite. Block i has elements i * BLOCK to (i + 1) * BLOCK - 1; offsets
are int64. Blocks share nothing, so no order is needed beyond that of the CUDA stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from linkweave.kernels.api import sparsify
from linkweave.kernels.merge.cpu import PAD
from linkweave.kernels.topk.cpu import Keys

BLOCK, WARPS = 1024, 8
_KEYS = Keys("float32")


@torch.library.custom_op("linkweave::sparsify", mutates_args=("residual",))
def _sparsify(
    grad: torch.Tensor, residual: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = sparsify(grad, residual, k)
    return values, indices


@_sparsify.register_fake
def _(grad: torch.Tensor, residual: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return residual.new_empty(k), residual.new_empty(k, dtype=torch.int32)


@triton.jit(do_not_specialize=["n"])
def drop_nonfinite_kernel(fine, residual, n, BLOCK: tl.constexpr):
    """Where `fine` is 0: residual[i] = 0 if it is not finite."""
    if tl.load(fine) == 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(residual + at, mask=at < n, other=0)
        tl.store(residual + at, tl.zeros_like(v), mask=(at < n) & ~(tl.abs(v) < float("inf")))


@torch.library.custom_op("linkweave::drop_nonfinite", mutates_args=("residual",))
def _drop_nonfinite(fine: torch.Tensor, residual: torch.Tensor) -> None:
    with torch.cuda.device_of(residual):
        drop_nonfinite_kernel[(triton.cdiv(residual.numel(), BLOCK),)](
            fine, residual, residual.numel(), BLOCK=BLOCK, num_warps=WARPS
        )


@_drop_nonfinite.register_fake
def _(fine: torch.Tensor, residual: torch.Tensor) -> None:
    return None


def select(grad: torch.Tensor, residual: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.gtopk.select`."""
    if not grad.numel():
        return residual.new_empty(0), residual.new_empty(0, dtype=torch.int32)
    values, indices = _sparsify(grad, residual, k)
    grad.zero_()
    return values, indices


def drop_nonfinite(fine: torch.Tensor, residual: torch.Tensor) -> None:
    """`kernels.gtopk.drop_nonfinite`."""
    if residual.numel():
        _drop_nonfinite(fine.to(torch.int32), residual)


def merge(a: torch.Tensor, b: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.gtopk.merge`."""
    bits, indices = torch.cat([a, b], 1)
    indices, order = indices.sort(stable=True)  # of equal indices, that of `a` comes first
    values = bits[order].view(torch.float32)
    twins = (indices[1:] == indices[:-1]) & (indices[1:] != PAD)
    sums = torch.where(twins, values[:-1] + values[1:], values[:-1])
    values = torch.cat([sums, values[-1:]])
    first = torch.cat([twins.new_ones(1), ~twins])[: len(values)]
    indices, values = torch.where(first, indices, PAD), torch.where(first, values, -0.0)
    keys = (values.view(torch.int32) & int(_KEYS.mask)).clamp(max=int(_KEYS.nan))
    keys = torch.where(indices == PAD, -1, keys)
    largest = keys.sort(descending=True, stable=True).indices
    return _ascending(values, indices, largest[:k]), _ascending(values, indices, largest[k:])


def _ascending(values: torch.Tensor, indices: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The vector of the entries at these positions."""
    found, order = indices[at].sort()
    return torch.stack([values[at][order].view(torch.int32), found])


def keep(own: torch.Tensor, found: torch.Tensor, residual: torch.Tensor, arrived: bool) -> None:
    """`kernels.gtopk.keep`."""
    values = own[0].view(torch.float32)
    kept = values.isfinite()
    there = torch.zeros_like(kept)
    if last := found.shape[1]:
        at = torch.searchsorted(found[1], own[1]).clamp(max=last - 1)
        there = (found[1][at] == own[1]) & found[0].view(torch.float32)[at].isfinite()
    _add(residual, own[1], values, kept & (there == arrived) & (own[1] != PAD))


def scatter(indices: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> None:
    """x[indices] = values, for the indices that are no `PAD`; x is zero, no value is -0.0."""
    _add(x, indices, values, indices != PAD)


def _add(x: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, which: torch.Tensor) -> None:
    """x[indices] += values for those entries, which have different indices."""
    # not index_add_, whose atomic additions flush subnormals: the other entries write what one of
    # those does, or if there is none, the first element as it is
    if not len(indices):
        return
    one = which.to(torch.uint8).argmax(keepdim=True)
    at = torch.where(which, indices, 0)
    sums = torch.where(which, x[at] + values, x[at])
    x.index_copy_(0, torch.where(which, at, at[one]).long(), torch.where(which, sums, sums[one]))
