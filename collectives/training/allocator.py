"""The allocator of glibc, which would return the memory of gradients to the kernel at each step."""

from __future__ import annotations

import ctypes
import os

TUNED = (
    "GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)  # fmt: skip
"""Variables by which users tune glibc's allocator themselves."""

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h
_MOST = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Let glibc keep memory that this process frees: all that lies below a block in use, and up to
    2 GiB at the top of its heap.

    By default it maps large blocks and unmaps them when they are freed, always those of more than
    32 MiB, and gives back what is free at the top of the heap (mallopt(3), M_MMAP_MAX and
    M_TRIM_THRESHOLD). A step frees its activations, and gradients once they are in the arena; the
    next one would fault all their pages in again. Does nothing with other allocators, and if the
    environment sets one of TUNED.
    """
    if any(name in os.environ for name in TUNED):
        return
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _MOST)
