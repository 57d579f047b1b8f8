"""The runtimes that carry out plans: the reference, CPU processes, and GPUs."""
