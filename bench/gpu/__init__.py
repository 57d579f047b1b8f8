"""The rows of `bench.gpu_suite`, which one GPU runs."""
