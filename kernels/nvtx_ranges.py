"""NVTX ranges round the kernels that users call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def ranged(function: F) -> F:
    """The function in a range `kernels/NAME`, domain linkweave; as it is where there is no nvtx."""
    try:
        import nvtx
    except ImportError:
        return function

    @wraps(function)
    def inside(*arguments: Any, **named: Any) -> Any:
        with nvtx.annotate(f"kernels/{function.__name__}", domain="linkweave"):
            return function(*arguments, **named)

    return inside  # type: ignore[return-value]
