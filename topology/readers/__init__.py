"""Readers of what other tools know of a machine, and a writer for NCCL."""
