"""Ranks on GPUs: persistent kernels over memory that the GPUs map."""
