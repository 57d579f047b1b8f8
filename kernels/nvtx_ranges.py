"""NVTX ranges for the public kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def ranged(function: F) -> F:
    """Wrap a function in an NVTX range `kernels/NAME` of the domain linkweave, if nvtx exists."""
    try:
        import nvtx
    except ImportError:
        return function

    @wraps(function)
    def inside(*arguments: Any, **named: Any) -> Any:
        with nvtx.annotate(f"kernels/{function.__name__}", domain="linkweave"):
            return function(*arguments, **named)

    return inside  # type: ignore[return-value]
