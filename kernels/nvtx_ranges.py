"""NVTX ranges, which profilers show."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def annotate(name: str) -> AbstractContextManager[object]:
    """An NVTX range of the domain linkweave; no range if nvtx is not installed."""
    nvtx = _nvtx()
    return nvtx.annotate(name, domain="linkweave") if nvtx else nullcontext()


def ranged(function: F) -> F:
    """Wrap a function in an NVTX range `kernels/NAME`."""

    @wraps(function)
    def inside(*arguments: Any, **named: Any) -> Any:
        with annotate(f"kernels/{function.__name__}"):
            return function(*arguments, **named)

    return inside  # type: ignore[return-value]


@cache
def _nvtx() -> Any:
    """The nvtx module; None if it is not installed."""
    try:
        import nvtx
    except ImportError:
        return None
    return nvtx
