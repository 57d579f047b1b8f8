"""Rows of embedding gradients: coalescing, splitting, adding."""
