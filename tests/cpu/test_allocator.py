"""Memory that glibc keeps for the next step of a training."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

import pytest

from linkweave.collectives.training.gradient_buffers import TUNED

STEPS = """
import ctypes
import resource
import sys
import torch
from linkweave.collectives.training.gradient_buffers import keep_freed_memory


SIZE = int(sys.argv[1]) << 18  # float32


def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        gradients = [torch.ones(SIZE) for _ in range(3)]
        del gradients
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


libc = ctypes.CDLL(None)
libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: pages of 4 KiB can be counted
libc.mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD: by default glibc learns it, from what was freed
faults(2)
before = faults(4)
keep_freed_memory()
faults(2)
print(before, min(faults(4) for _ in range(3)))  # the heap may grow once more
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
@pytest.mark.parametrize("mb", [15, 50])
def test_the_gradients_of_a_step_come_from_memory_that_was_freed(mb: int) -> None:
    words = [sys.executable, "-c", STEPS, str(mb)]
    plain = {k: v for k, v in os.environ.items() if k not in (*TUNED, "LD_PRELOAD")}
    told = subprocess.run(words, capture_output=True, text=True, check=True, env=plain).stdout
    before, after = map(int, told.split())
    pages = 4 * 3 * mb * (1 << 20) // resource.getpagesize()
    assert before > pages / 2
    assert after < pages / 100
