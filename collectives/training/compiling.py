"""Training beside torch.compile: what it compiles, and our own code, which it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._C._dynamo import eval_frame

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


def left_alone(function: Any) -> Any:
    """A decorator: torch.compile does not compile the function, but what it calls. So does
    torch.compiler.disable(recursive=False), whose import takes a second."""
    skip, other = _dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT
    _dynamo.set_code_exec_strategy(function.__code__, _dynamo._FrameExecStrategy(skip, other))
    return function
