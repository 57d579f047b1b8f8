"""Hooks that a copied or pickled module loses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod


class Hook:
    """Calls a method as long as its object lives. Copies do nothing: the copy of a module, such as
    an average of its parameters, takes no part in training."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        if method := self._method():
            method(*args)

    def of(self, kind: type) -> bool:
        """Whether it calls a method of an object of this kind, which lives."""
        method = self._method()
        return isinstance(getattr(method, "__self__", None), kind)

    def __reduce__(self) -> Any:  # which copies call as well
        return _copied, ()


def _copied() -> Callable[..., None]:
    return nothing


def nothing(*_: Any) -> None:
    """What copies of hooks do, and what is called where nobody listens."""
