"""Training with gTop-k: selection fused with the update of the residual."""

from linkweave.kernels.gtopk.steps import select

__all__ = ["select"]
