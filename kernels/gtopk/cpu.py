"""Selection on the CPU. Threads divide the elements."""

from __future__ import annotations

import numpy as np
import torch

from linkweave.kernels.topk.sparsify import sparsify


def select(grad: torch.Tensor, residual: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, indices) of `kernels.gtopk.select`."""
    half = "" if grad.dtype == torch.float32 else str(grad.dtype).removeprefix("torch.")
    patterns = (grad.view(torch.uint16) if half else grad).numpy()
    values, found = sparsify(patterns, residual.numpy(), k, half=half, clear=True)
    return torch.from_numpy(values), torch.from_numpy(found.astype(np.int32))
