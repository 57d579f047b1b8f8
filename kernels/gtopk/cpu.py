"""Steps of gTop-k on the CPU. Threads divide the elements of a selection."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from linkweave.kernels.merge import cpu as merging
from linkweave.kernels.merge.cpu import PAD
from linkweave.kernels.topk.cpu import U
from linkweave.kernels.topk.sparsify import sparsify

NOTHING = np.float32(-0.0)


@njit(nogil=True, cache=True)
def _keep(values, indices, found_values, found_indices, residual, arrived):
    """Both vectors ascend, so one pass over them is enough."""
    at = U(0)
    for i in range(U(values.size)):
        while at < U(found_indices.size) and found_indices[at] < indices[i]:
            at += U(1)
        there = (
            at < U(found_indices.size) and found_indices[at] == indices[i]
            and np.isfinite(found_values[at])
        )  # fmt: skip
        if there == arrived and np.isfinite(values[i]):
            residual[U(indices[i])] += values[i]


@njit(nogil=True, cache=True)
def _drop_nonfinite(residual):
    for i in range(U(residual.size)):
        if not np.isfinite(residual[i]):
            residual[i] = 0


def select(grad: torch.Tensor, residual: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, indices) of `kernels.gtopk.select`."""
    half = "" if grad.dtype == torch.float32 else str(grad.dtype).removeprefix("torch.")
    patterns = (grad.view(torch.uint16) if half else grad).numpy()
    values, found = sparsify(patterns, residual.numpy(), k, half=half, clear=True)
    return torch.from_numpy(values), torch.from_numpy(found.astype(np.int32))


def merge(a: torch.Tensor, b: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.gtopk.merge`."""
    kept, cut = merging.merge_topk(entries(a), entries(b), k)
    return _vector(kept, k), _vector(cut, a.shape[1] + b.shape[1] - k)


def keep(own: torch.Tensor, found: torch.Tensor, residual: torch.Tensor, arrived: bool) -> None:
    """`kernels.gtopk.keep`."""
    _keep(*entries(own), *entries(found), residual.numpy(), arrived)


def scatter(indices: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> None:
    """x[indices] = values, for the indices that are no `PAD`."""
    size = int(np.searchsorted(indices.numpy(), PAD))
    x[indices[:size]] = values[:size]


def drop_nonfinite(fine: torch.Tensor, residual: torch.Tensor) -> None:
    """`kernels.gtopk.drop_nonfinite`."""
    if not fine:
        _drop_nonfinite(residual.numpy())


def entries(vector: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Views of a vector's values and indices without what follows them."""
    bits, indices = vector.numpy()
    size = int(np.searchsorted(indices, PAD))
    return bits[:size].view(np.float32), indices[:size]


def _vector(pair: tuple[np.ndarray, np.ndarray], room: int) -> torch.Tensor:
    made = np.empty((2, room), np.int32)
    size = pair[1].size
    made[0, :size].view(np.float32)[:], made[1, :size] = pair
    made[0, size:].view(np.float32)[:], made[1, size:] = NOTHING, PAD
    return torch.from_numpy(made)
