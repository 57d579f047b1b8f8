"""The interpreters of plans, on the CPU and on GPUs."""
