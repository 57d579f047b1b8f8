"""Ranges that profilers show: NVTX for Nsight Systems, record_function for torch.profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch.autograd import profiler

from linkweave.kernels.nvtx_ranges import annotate


def profiled(name: str) -> AbstractContextManager[object]:
    """A range of both. Without a profiler of torch, record_function would waste 10 us."""
    return _both(name) if profiler._is_profiler_enabled else annotate(name)


@contextmanager
def _both(name: str) -> Iterator[None]:
    with annotate(name), profiler.record_function(f"linkweave: {name}"):
        yield
