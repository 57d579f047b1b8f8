"""linkweave's public API: plan, prove, simulate and run collectives.

Planning and simulating need neither torch nor a GPU. Modules that run collectives are imported
when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from linkweave.collectives.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveTimeout,
    OutOfMemory,
    PlanError,
    TopologyError,
)
from linkweave.collectives.planning.collective import PUBLIC
from linkweave.collectives.planning.explain import Explanation, explain
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import plan_allreduce, plan_collective
from linkweave.collectives.planning.simulate import Timeline, simulate
from linkweave.collectives.planning.verify import verify

if TYPE_CHECKING:
    from linkweave.collectives.calls.communicator import Communicator, get_default, shutdown
    from linkweave.collectives.calls.work import GradientQueue, Work
    from linkweave.collectives.cluster.join import init
    from linkweave.collectives.launch.processes import spawn
    from linkweave.collectives.training.data_parallel import DataParallel
    from linkweave.collectives.training.embedding.prefetch import prefetch
    from linkweave.collectives.training.embedding.sharded import ShardedEmbedding
    from linkweave.collectives.training.gtopk.options import GTopK

    # as `__getattr__` makes them: the default communicator's methods
    _default = get_default()
    allgather = _default.allgather
    allreduce = _default.allreduce
    allreduce_queue = _default.allreduce_queue
    alltoall = _default.alltoall
    barrier = _default.barrier
    broadcast = _default.broadcast
    empty = _default.empty
    gather = _default.gather
    recv = _default.recv
    reduce = _default.reduce
    reduce_scatter = _default.reduce_scatter
    run = _default.run
    scatter = _default.scatter
    send = _default.send
    sparse_allreduce = _default.sparse_allreduce
    symmetric_empty = _default.symmetric_empty

__all__ = [
    "CollectiveAborted", "CollectiveError", "CollectiveTimeout", "Communicator", "DataParallel",
    "Explanation", "GTopK", "GradientQueue", "OutOfMemory", "Plan", "PlanError", "ShardedEmbedding",
    "Timeline", "TopologyError", "Work", "allgather", "allreduce", "allreduce_queue", "alltoall",
    "barrier", "broadcast", "distributed", "empty", "explain", "gather", "get_default", "init",
    "overlap", "plan_allreduce", "plan_collective", "prefetch", "recv", "reduce", "reduce_scatter",
    "run", "scatter", "send", "shutdown", "simulate", "sparse_allreduce", "spawn",
    "symmetric_empty", "training", "verify",
]  # fmt: skip
__all__ += [name for name in PUBLIC if name not in __all__]  # type checkers read those above

_LAZY = {
    "Communicator": "calls.communicator",
    "DataParallel": "training.data_parallel",
    "GTopK": "training.gtopk.options",
    "GradientQueue": "calls.work",
    "ShardedEmbedding": "training.embedding.sharded",
    "Work": "calls.work",
    "init": "cluster.join",
    "prefetch": "training.embedding.prefetch",
    "spawn": "launch.processes",
    "shutdown": "calls.communicator",
    "get_default": "calls.communicator",
}
"""Names that need the runtimes, and their modules."""

_ROOMS = {"distributed", "overlap", "training"}
_METHODS = {*__all__} - {*_LAZY, *globals(), *_ROOMS}
"""Functions that are methods of the default communicator."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name in _METHODS:
        from linkweave.collectives.calls.communicator import of_default

        globals()[name] = function = of_default(name)
        return function
    if name not in _LAZY:
        raise AttributeError(f"module 'linkweave.collectives' has no attribute {name!r}")
    try:
        return getattr(import_module(f"linkweave.collectives.{_LAZY[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"linkweave.{name} needs torch: pip install torch==2.13.0") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
