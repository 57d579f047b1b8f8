"""How a machine does it: kernels for GPUs and their Numba twins for CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linkweave.kernels.api import (
        coalesce,
        merge_topk,
        scatter_add_rows,
        sparsify,
        split_rows,
        threshold_abs,
        topk_abs,
    )

__all__ = [
    "coalesce", "merge_topk", "scatter_add_rows", "sparsify", "split_rows", "threshold_abs",
    "topk_abs",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'linkweave.kernels' has no attribute {name!r}")
    from linkweave.kernels import api as face  # Numba takes its time

    return getattr(face, name)
