"""The allocator of glibc, which would return the memory of gradients to the kernel at each step."""

from __future__ import annotations

import torch

_LARGEST = (32 << 20) - (64 << 10)
"""Bytes of a block that glibc may learn from: its limit is 32 MiB, with the block's header."""


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory, as it does once a block of 32 MiB was freed.

    It maps blocks that are larger than any freed so far (up to 32 MiB), and returns what is free at
    the top of the heap once that is twice as large (mallopt(3), M_MMAP_THRESHOLD). The gradients of
    a step are freed once they are in the arena, so without this each step may fault all their pages
    in again; those beyond 64 MiB still may.
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")
