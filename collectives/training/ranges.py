"""Ranges that profilers show: NVTX for Nsight Systems, record_function for torch.profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd.profiler import record_function

from linkweave.kernels.nvtx_ranges import annotate


@contextmanager
def profiled(name: str) -> Iterator[None]:
    with annotate(name), record_function(f"linkweave: {name}"):
        yield
