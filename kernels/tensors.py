"""Checks of torch tensors for several kernels. Each raises TypeError or ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch


def device_of(x: Any, name: str) -> torch.device:
    """The device of `x`, which must be a tensor on the CPU or a GPU."""
    if not isinstance(x, torch.Tensor) or x.device.type not in ("cpu", "cuda"):
        found = getattr(x, "device", type(x).__name__)
        raise TypeError(f"{name} must be a tensor on the CPU or a GPU, not {found}")
    return x.device


def overlap_of(named: dict[str, torch.Tensor]) -> tuple[str, str] | None:
    """Two tensors without gaps that overlap, by name, as they lie in memory; None if none do."""
    spans = []
    for name, tensor in named.items():
        if tensor.numel() and not hasattr(tensor, "fake_mode"):  # a fake tensor has no memory
            start = tensor.data_ptr()
            spans.append((start, start + tensor.numel() * tensor.element_size(), name))
    for (_, end, one), (start, _, other) in pairwise(sorted(spans)):
        if start < end:
            return one, other
    return None


def check_overlaps(named: dict[str, torch.Tensor]) -> None:
    """Tensors without gaps must not overlap."""
    if pair := overlap_of(named):
        raise ValueError("{} and {} overlap in memory".format(*pair))


def check_tensor(
    x: Any, name: str, dtypes: Sequence[torch.dtype], device: torch.device,
    shape: tuple[int | None, ...],
) -> None:  # fmt: skip
    """`x` must be a contiguous tensor of one of the dtypes and of this shape on the device; None
    stands for any number."""
    if not isinstance(x, torch.Tensor) or x.dtype not in dtypes:
        found = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"{name} must be a tensor of {' or '.join(map(str, dtypes))}, not {found}")
    if x.device != device:
        raise TypeError(f"{name} must be on {device} as the others, not on {x.device}")
    if x.ndim != len(shape) or not x.is_contiguous() or any(
        want not in (None, size) for want, size in zip(shape, x.shape, strict=True)
    ):  # fmt: skip
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must be contiguous of shape ({wanted}), not {tuple(x.shape)}")
