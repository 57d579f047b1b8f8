"""What torch.compile leaves alone: calls that wait for other ranks, threads and hooks.

`torch.compiler.disable` does that as well, but its import takes a second, and wraps functions.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

Function = TypeVar("Function")
Kind = TypeVar("Kind", bound=type)


def uncompiled(function: Function, inside: bool = False) -> Function:
    """A decorator: torch.compile ends its graph before the function, and neither compiles it nor,
    unless `inside`, what it calls. Without effect if torch is not loaded."""
    if "torch" not in sys.modules:
        return function
    from torch._C._dynamo import eval_frame

    dynamo: Any = eval_frame
    marked: Any = function
    skip, other = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    strategy = dynamo._FrameExecStrategy(skip, other if inside else skip)
    dynamo.set_code_exec_strategy(marked.__code__, strategy)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "linkweave calls other ranks"
    return function


def uncompiled_methods(kind: Kind) -> Kind:
    """A decorator of a class, all of whose methods are so unless they say otherwise."""
    for method in vars(kind).values():
        if hasattr(method, "__code__") and not hasattr(method, "_torchdynamo_disable"):
            uncompiled(method)
    return kind
