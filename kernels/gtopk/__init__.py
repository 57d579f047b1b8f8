"""Training with gTop-k: selection fused with the update of the residual, and sparse vectors."""

from linkweave.kernels.gtopk.steps import (
    GRADIENTS,
    PAD,
    drop_nonfinite,
    keep,
    merge,
    narrowed,
    scatter,
    select,
    values_of,
    vector_of,
)

__all__ = [
    "GRADIENTS",
    "PAD", "drop_nonfinite", "keep", "merge", "narrowed", "scatter", "select", "values_of",
    "vector_of",
]  # fmt: skip
