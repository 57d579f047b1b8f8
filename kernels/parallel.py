"""Long loops shared out over this process's threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_LEAST = 1 << 16  # elements that are worth a thread


def threads() -> int:
    """As many as torch uses, where it is loaded; else a thread for each core that we may use."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    return len(os.sched_getaffinity(0))


def parts(n: int, unit: int = 1, least: int = _LEAST) -> list[tuple[int, int]]:
    """[start, stop) for each thread, in order; starts are multiples of `unit`. At least one;
    `least` elements are worth a thread."""
    if n == 0:
        return [(0, 0)]
    many = max(1, min(threads(), n // least))
    each = -(-n // (many * unit)) * unit
    return [(start, min(start + each, n)) for start in range(0, n, each)]


def run_parts(work: Callable[[int], T], many: int) -> list[T]:
    """[work(0), work(1), ...], side by side where they let go of the interpreter."""
    found: list[T | None] = [None] * many
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            found[i] = work(i)
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=run, args=(i,)) for i in range(1, many)]
    for other in others:
        other.start()
    run(0)
    for other in others:
        other.join()
    if errors:
        raise errors[0]
    return found  # type: ignore[return-value]
