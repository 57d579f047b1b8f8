"""Optimizers: updates of all tensors of a layer in one launch, or one compiled call."""

from linkweave.kernels.optim.steps import adam, sgd
from linkweave.kernels.optim.tables import Table

__all__ = ["Table", "adam", "sgd"]
