"""linkweave's public face: plan, prove, simulate and run collectives.

Planning and simulating need neither torch nor a GPU; what runs is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from collectives import _siblings as _siblings
from collectives.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveTimeout,
    PlanError,
    TopologyError,
)
from collectives.planning.explain import Explanation, explain
from collectives.planning.plan import Plan
from collectives.planning.planner import plan_allreduce, plan_collective
from collectives.planning.verify import verify
from collectives.runtime.simulate import Timeline, simulate

if TYPE_CHECKING:
    from collectives.communicator import Communicator
    from collectives.default import get_default, shutdown
    from collectives.gradient_queue import GradientQueue
    from collectives.launch import init, spawn
    from collectives.work import Work

__all__ = [
    "CollectiveAborted", "CollectiveError", "CollectiveTimeout", "Communicator", "Explanation",
    "GradientQueue", "Plan", "PlanError", "Timeline", "TopologyError", "Work", "allgather",
    "allreduce", "allreduce_queue", "alltoall", "barrier", "broadcast", "empty", "explain",
    "get_default", "init", "plan_allreduce", "plan_collective", "reduce", "reduce_scatter",
    "shutdown", "simulate", "sparse_allreduce", "spawn", "verify",
]  # fmt: skip

_RUNNING = {
    "Communicator": "communicator",
    "GradientQueue": "gradient_queue",
    "Work": "work",
    "init": "launch",
    "spawn": "launch",
    "shutdown": "default",
    "get_default": "default",
}


def __getattr__(name: str) -> Any:
    if name == "overlap":
        return import_module("collectives.overlap")
    if name not in _RUNNING:
        raise AttributeError(f"module 'collectives' has no attribute {name!r}")
    return getattr(import_module(f"collectives.{_RUNNING[name]}"), name)


def _default() -> Communicator:
    from collectives.default import get_default

    return get_default()


def allreduce(x: Any, op: str = "sum", async_op: bool = False, out: Any = None) -> Any:
    """`Communicator.allreduce` on the default communicator."""
    return _default().allreduce(x, op, async_op, out=out)


def allreduce_queue(x: Any, layers: Sequence[int], op: str = "sum") -> GradientQueue:
    """`Communicator.allreduce_queue` on the default communicator."""
    return _default().allreduce_queue(x, layers, op)


def broadcast(x: Any, root: int = 0, async_op: bool = False) -> Work | None:
    """`Communicator.broadcast` on the default communicator."""
    return _default().broadcast(x, root, async_op)


def reduce(x: Any, op: str = "sum", root: int = 0, async_op: bool = False, out: Any = None) -> Any:
    """`Communicator.reduce` on the default communicator."""
    return _default().reduce(x, op, root, async_op, out)


def allgather(x: Any, out: Any = None, async_op: bool = False) -> Any:
    """`Communicator.allgather` on the default communicator."""
    return _default().allgather(x, out, async_op)


def reduce_scatter(x: Any, op: str = "sum", out: Any = None, async_op: bool = False) -> Any:
    """`Communicator.reduce_scatter` on the default communicator."""
    return _default().reduce_scatter(x, op, out, async_op)


def alltoall(x: Any, out: Any = None, async_op: bool = False) -> Any:
    """`Communicator.alltoall` on the default communicator."""
    return _default().alltoall(x, out, async_op)


def sparse_allreduce(
    values: Any, indices: Any, numel: int, k: int, *, residual: Any = None, mode: str = "auto",
    conserve: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """`Communicator.sparse_allreduce` on the default communicator."""
    return _default().sparse_allreduce(
        values, indices, numel, k, residual=residual, mode=mode, conserve=conserve
    )


def barrier() -> None:
    """`Communicator.barrier` on the default communicator."""
    _default().barrier()


def empty(shape: Any, dtype: Any = "float32", device: Any = "cpu") -> Any:
    """`Communicator.empty` on the default communicator."""
    return _default().empty(shape, dtype, device)
