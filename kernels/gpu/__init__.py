"""Common to all GPU kernels: arrays, compiler, device, and the public functions."""
