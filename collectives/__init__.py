"""linkweave's public face: plan, prove, simulate and run collectives.

Planning and simulating need neither torch nor a GPU; what runs is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from linkweave.collectives.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveTimeout,
    PlanError,
    TopologyError,
)
from linkweave.collectives.planning.explain import Explanation, explain
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import plan_allreduce, plan_collective
from linkweave.collectives.planning.simulate import Timeline, simulate
from linkweave.collectives.planning.verify import verify

if TYPE_CHECKING:
    from linkweave.collectives.calls.gradient_queue import GradientQueue
    from linkweave.collectives.calls.work import Work
    from linkweave.collectives.communicator import Communicator
    from linkweave.collectives.launch.default import get_default, shutdown
    from linkweave.collectives.launch.join import init
    from linkweave.collectives.launch.processes import spawn

__all__ = [
    "CollectiveAborted", "CollectiveError", "CollectiveTimeout", "Communicator", "Explanation",
    "GradientQueue", "Plan", "PlanError", "Timeline", "TopologyError", "Work", "allgather",
    "allreduce", "allreduce_queue", "alltoall", "barrier", "broadcast", "empty", "explain",
    "get_default", "init", "overlap", "plan_allreduce", "plan_collective", "recv", "reduce",
    "reduce_scatter", "run", "send", "shutdown", "simulate", "sparse_allreduce", "spawn",
    "symmetric_empty", "verify",
]  # fmt: skip

_RUNNING = {
    "Communicator": "communicator",
    "GradientQueue": "calls.gradient_queue",
    "Work": "calls.work",
    "init": "launch.join",
    "spawn": "launch.processes",
    "shutdown": "launch.default",
    "get_default": "launch.default",
}


def __getattr__(name: str) -> Any:
    if name == "overlap":
        return import_module(f"{__name__}.overlap")
    if name not in _RUNNING:
        raise AttributeError(f"module 'linkweave.collectives' has no attribute {name!r}")
    return getattr(import_module(f"linkweave.collectives.{_RUNNING[name]}"), name)


def _default() -> Communicator:
    from linkweave.collectives.launch.default import get_default

    return get_default()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def allreduce(
    x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False, algorithm: Any = "auto"
) -> Any:
    """`Communicator.allreduce` on the default communicator."""
    return _default().allreduce(x, op, out=out, async_op=async_op, algorithm=algorithm)


def allreduce_queue(
    x: Any, layers: Sequence[int], op: str = "sum", *, algorithm: Any = "auto"
) -> GradientQueue:
    """`Communicator.allreduce_queue` on the default communicator."""
    return _default().allreduce_queue(x, layers, op, algorithm=algorithm)


def run(plan: Plan, x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False) -> Any:
    """`Communicator.run` on the default communicator."""
    return _default().run(plan, x, op, out=out, async_op=async_op)


def broadcast(x: Any, root: int = 0, *, async_op: bool = False) -> Any:
    """`Communicator.broadcast` on the default communicator."""
    return _default().broadcast(x, root, async_op=async_op)


def reduce(
    x: Any, op: str = "sum", root: int = 0, *, out: Any = None, async_op: bool = False
) -> Any:
    """`Communicator.reduce` on the default communicator."""
    return _default().reduce(x, op, root, out=out, async_op=async_op)


def allgather(
    x: Any, *, counts: Sequence[int] | None = None, out: Any = None, async_op: bool = False
) -> Any:
    """`Communicator.allgather` on the default communicator."""
    return _default().allgather(x, counts=counts, out=out, async_op=async_op)


def reduce_scatter(x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False) -> Any:
    """`Communicator.reduce_scatter` on the default communicator."""
    return _default().reduce_scatter(x, op, out=out, async_op=async_op)


def alltoall(
    x: Any, out: Any = None, in_splits: Sequence[int] | None = None,
    out_splits: Sequence[int] | None = None, *, async_op: bool = False,
) -> Any:  # fmt: skip
    """`Communicator.alltoall` on the default communicator."""
    return _default().alltoall(x, out, in_splits, out_splits, async_op=async_op)


def send(x: Any, to: int, *, async_op: bool = False) -> Work | None:
    """`Communicator.send` on the default communicator."""
    return _default().send(x, to, async_op=async_op)


def recv(x: Any, source: int, *, async_op: bool = False) -> Work | None:
    """`Communicator.recv` on the default communicator."""
    return _default().recv(x, source, async_op=async_op)


def sparse_allreduce(
    values: Any, indices: Any, numel: int, k: int, op: str = "sum", *, residual: Any = None,
    mode: str = "auto", conserve: bool = True, async_op: bool = False,
) -> Any:  # fmt: skip
    """`Communicator.sparse_allreduce` on the default communicator."""
    return _default().sparse_allreduce(
        values, indices, numel, k, op, residual=residual, mode=mode, conserve=conserve,
        async_op=async_op,
    )  # fmt: skip


def barrier() -> None:
    """`Communicator.barrier` on the default communicator."""
    _default().barrier()


def empty(shape: Any, dtype: Any = "float32") -> Any:
    """`Communicator.empty` on the default communicator."""
    return _default().empty(shape, dtype)


def symmetric_empty(shape: Any, dtype: Any = "float32", *, device: Any = "cuda") -> Any:
    """`Communicator.symmetric_empty` on the default communicator."""
    return _default().symmetric_empty(shape, dtype, device=device)
