"""How a machine does it: kernels for GPUs and their Numba twins for CPUs."""
