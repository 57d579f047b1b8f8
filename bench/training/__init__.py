"""Benchmarks of training steps, and what they train."""
