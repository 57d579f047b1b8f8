"""Parallel loops over the threads of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_LEAST = 1 << 16  # elements per thread


def threads() -> int:
    """The number of threads that torch uses if it is loaded; otherwise that of usable cores."""
    of_torch = getattr(sys.modules.get("torch"), "get_num_threads", None)
    if of_torch is not None:  # it is not there while torch is imported
        return int(of_torch())
    return len(os.sched_getaffinity(0))


def parts(n: int, unit: int = 1, least: int = _LEAST) -> list[tuple[int, int]]:
    """Divide n elements among threads: [start, stop) of each, in order; at least one part.

    Starts are multiples of `unit`; no thread is used for fewer than `least` elements.
    """
    if n == 0:
        return [(0, 0)]
    many = max(1, min(threads(), n // least))
    each = -(-n // (many * unit)) * unit
    return [(start, min(start + each, n)) for start in range(0, n, each)]


def run_parts(work: Callable[[int], T], many: int) -> list[T]:
    """[work(0), ..., work(many - 1)], computed by threads. Raises the first error of a thread."""
    if many == 1:
        return [work(0)]
    with ThreadPoolExecutor(many - 1) as pool:
        others = [pool.submit(work, i) for i in range(1, many)]
        return [work(0), *(other.result() for other in others)]
