"""Kernels: CUDA for GPUs, and the same functions in Numba for CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from linkweave.kernels.caches import use_writable

if TYPE_CHECKING:
    from linkweave.kernels.api import cast, coalesce, merge_topk, sparsify, split_rows, topk_abs

__all__ = ["cast", "coalesce", "merge_topk", "sparsify", "split_rows", "topk_abs"]


TEMPORARY = tuple(use_writable())  # before Numba is imported


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'linkweave.kernels' has no attribute {name!r}")
    from linkweave.kernels import api  # not before it is needed: importing Numba is slow

    return getattr(api, name)
