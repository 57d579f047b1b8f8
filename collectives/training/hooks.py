"""Hooks that a copied or pickled module loses, what is called in a backward pass, where
torch.compile is at work, and whose process this is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn
from weakref import WeakMethod

import torch
from torch import nn
from torch._C._dynamo import eval_frame

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.uncompiled import uncompiled


class Hook:
    """Calls a method as long as its object lives. Copies do nothing: the copy of a module, such as
    an average of its parameters, takes no part in training."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = WeakMethod(method)

    @uncompiled
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


def at_end(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass of autograd that runs in this thread."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(partial(_call, function))


@uncompiled
def _call(function: Callable[[], None]) -> None:
    function()


def in_backward() -> bool:
    """Whether one runs in this thread."""
    running: int = torch._C._current_graph_task_id()
    return running != -1


def check_process(process: int, rank: int) -> None:
    """Raise CollectiveError in a process that was forked from this one: it lacks its threads."""
    if os.getpid() != process:
        raise CollectiveError(
            f"process {os.getpid()} was forked from rank {rank} (process {process}) while a step "
            "was not complete, and cannot complete it: call finish() of DataParallel before you "
            "fork"
        )


def throw(error: BaseException) -> NoReturn:
    raise error


_dynamo: Any = eval_frame


@contextmanager
def compiling_by(callback: Any) -> Iterator[Any]:
    """What is called inside is compiled by this callback of torch.compile, or by none. Yields the
    one that it was before."""
    before = _dynamo.set_eval_frame(callback)
    try:
        yield before
    finally:
        _dynamo.set_eval_frame(before)


def compiled(module: nn.Module) -> bool:
    """Whether a part is compiled, so that hooks before its layers would not run."""
    return any(
        type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None
        for part in module.modules()
    )
