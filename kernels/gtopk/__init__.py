"""Training with gTop-k: selection fused with momentum, and sparse updates of parameters."""

from linkweave.kernels.gtopk.layout import Layout
from linkweave.kernels.gtopk.steps import apply, clear, select

__all__ = ["Layout", "apply", "clear", "select"]
