"""Checks of torch tensors for several kernels. Each raises TypeError or ValueError."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


def device_of(x: Any, name: str) -> torch.device:
    """The device of `x`, which must be a tensor on the CPU or a GPU."""
    if not isinstance(x, torch.Tensor) or x.device.type not in ("cpu", "cuda"):
        found = getattr(x, "device", type(x).__name__)
        raise TypeError(f"{name} must be a tensor on the CPU or a GPU, not {found}")
    return x.device


def check_overlaps(named: dict[str, torch.Tensor]) -> None:
    """Tensors without gaps must not overlap."""
    spans = []
    for name, tensor in named.items():
        if tensor.numel() and not hasattr(tensor, "fake_mode"):  # a fake tensor has no memory
            start = tensor.data_ptr()
            spans.append((start, start + tensor.numel() * tensor.element_size(), name))
    for (_, end, one), (start, _, other) in pairwise(sorted(spans)):
        if start < end:
            raise ValueError(f"{one} and {other} overlap in memory")
