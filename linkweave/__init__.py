"""Collectives planned for the links that a machine has: plan, prove, simulate, run.

The functions of `linkweave.collectives` are here too: `linkweave.init`, `linkweave.allreduce`, ...
Nothing is imported until it is used. torch.distributed gets to know the backend "linkweave".
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from linkweave.torch_backend import register

if TYPE_CHECKING:
    from linkweave.collectives import *  # noqa: F403

if "torch" in sys.modules:  # else `import torch` does it, if the package is installed
    register()

_PACKAGES = ("bench", "collectives", "kernels", "topology")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"linkweave.{name}")
    if name == "__version__":
        return import_module("importlib.metadata").version("linkweave")
    functions = import_module("linkweave.collectives")
    if name not in functions.__all__:
        raise AttributeError(f"module 'linkweave' has no attribute {name!r}")
    globals()[name] = found = getattr(functions, name)  # looked up once
    return found


def __dir__() -> list[str]:
    return sorted({*_PACKAGES, "__version__", *import_module("linkweave.collectives").__all__})
