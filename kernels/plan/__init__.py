"""The plan interpreters for CPUs and GPUs, and the simulator's event loop."""
