"""Checks what a call asks for, and chooses its plan on one topology."""

from __future__ import annotations

from collections.abc import Callable

from linkweave.collectives.calls.request import How, Request, algorithm_word, name_of
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.algorithms.registry import fixed_order
from linkweave.collectives.planning.collective import Root, check
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import adopt, plan_collective, ranked
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.dtypes import check_op
from linkweave.topology import Topology

Fits = Callable[[Plan], bool]


class CallPlanner:
    """Plans the calls of one communicator. `order` is that of `Settings`."""

    def __init__(self, topology: Topology, order: str) -> None:
        self.topology, self.order = topology, order

    def request(
        self, kind: str, buffer: Buffer, op: str, root: Root = 0, algorithm: How = "auto",
        parts: int = 0, device: str = "cpu",
    ) -> Request:  # fmt: skip
        """A checked request. Raises CollectiveError if the arguments are bad."""
        check_op(op, buffer.dtype, device)
        algorithm_word(algorithm)
        if algorithm != "auto" and self.order == "fixed":
            raise CollectiveError(
                f"order='fixed' chooses the algorithm: do not ask for {name_of(algorithm)}"
            )
        check(kind, len(self.topology.gpus), root)
        return Request(kind, buffer, op, root, algorithm, parts, device)

    def plan(self, request: Request, nbytes: int, fits: Fits | None = None) -> Plan:
        """The verified plan for a message of `nbytes`.

        For algorithm "auto", the fastest plan that `fits`, or the fastest one if none fits: the
        caller then reports what is missing. Raises PlanError.
        """
        kind, root, algorithm = request.kind, request.root, request.algorithm
        if isinstance(algorithm, Plan):
            return adopt(algorithm, self.topology)
        if algorithm == "auto" and self.order == "fixed":
            algorithm = fixed_order(kind)
        queued = request.layers is not None
        plan = plan_collective(kind, self.topology, nbytes, root, algorithm, queued=queued)
        if algorithm == "auto" and fits and not fits(plan):
            for other in ranked(self.topology, nbytes, kind, root):
                found = plan_collective(kind, self.topology, nbytes, root, other)
                if fits(found):
                    return found
        return plan
