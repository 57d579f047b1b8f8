"""Selection and sparse updates on the CPU. Threads divide the elements, or the entries."""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit

from linkweave.kernels.atomics import fma, pointer
from linkweave.kernels.gtopk.layout import Layout
from linkweave.kernels.parallel import parts, run_parts
from linkweave.kernels.topk.sparsify import sparsify

LEAST = 1 << 13  # entries for each thread: most wait for memory


@njit(nogil=True, cache=True)
def _apply(table, scales, values, indices, start, stop):
    firsts, stops, addresses = table
    row = 0
    for j in range(start, stop):
        at = np.int64(indices[j])
        while row < stops.size and stops[row] <= at:
            row += 1
        if row == stops.size:
            return
        if firsts[row] <= at:
            scale = scales[row]
            p = carray(pointer(addresses[row], scale), stops[row] - firsts[row])
            i = at - firsts[row]
            p[i] = fma(values[j], scale, p[i])


@njit(nogil=True, cache=True)
def _clear(x, indices):
    for at in indices:
        if 0 <= at < x.size:
            x[at] = 0


def select(
    grad: torch.Tensor, residual: torch.Tensor, velocity: torch.Tensor | None, k: int,
    momentum: float, nesterov: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(values, indices) of `kernels.gtopk.select`."""
    half = "" if grad.dtype == torch.float32 else str(grad.dtype).removeprefix("torch.")
    values, found = sparsify(
        (grad.view(torch.uint16) if half else grad).numpy(), residual.numpy(), k, half=half,
        clear=True, velocity=None if velocity is None else velocity.numpy(), momentum=momentum,
        nesterov=nesterov,
    )  # fmt: skip
    return torch.from_numpy(values), torch.from_numpy(found.astype(np.int32))


def apply(layout: Layout, values: torch.Tensor, indices: torch.Tensor, scales: np.ndarray) -> None:
    """`kernels.gtopk.apply` with float32 `scales`."""
    spans = parts(values.numel(), least=LEAST)
    entries = values.numpy(), indices.numpy()
    run_parts(lambda i: _apply(layout.table, scales, *entries, *spans[i]), len(spans))


def clear(x: torch.Tensor, indices: torch.Tensor) -> None:
    """`kernels.gtopk.clear`."""
    _clear(x.numpy(), indices.numpy())
