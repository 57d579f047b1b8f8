"""Hooks that a copied or pickled module loses, and what is called in a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakMethod

import torch


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


at_end: Any = torch.autograd.Variable._execution_engine.queue_callback
"""Calls a function at the end of the backward pass of autograd that runs in this thread."""


def in_backward() -> bool:
    """Whether one runs in this thread."""
    running: int = torch._C._current_graph_task_id()
    return running != -1


def throw(error: BaseException) -> NoReturn:
    raise error
