"""Embeddings with columns divided among ranks: sparse optimizers, and copies for all-to-all."""

from linkweave.kernels.embedding.steps import (
    adagrad_rows,
    adam_rows,
    join_columns,
    lookup,
    sgd_rows,
    split_columns,
    sum_rows,
    unique,
)

__all__ = [
    "adagrad_rows",
    "adam_rows",
    "join_columns",
    "lookup",
    "sgd_rows",
    "split_columns",
    "sum_rows",
    "unique",
]
