"""Plans for calls on one topology: made once by `CallPlanner`, which checks what a call asks
for; on the CPU by rank 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from linkweave.collectives.calls.request import How, Request, algorithm_word, name_of
from linkweave.collectives.calls.trace import Trace, label
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.algorithms.registry import fixed_order
from linkweave.collectives.planning.collective import Root, check
from linkweave.collectives.planning.dataflow import finals
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import adopt, plan_collective, proved, ranked
from linkweave.collectives.runtime.buffer import Buffer, check_op
from linkweave.collectives.runtime.cpu.executor import SLOT_BYTES
from linkweave.collectives.runtime.encoded import Encoded, encode
from linkweave.topology import Topology


@lru_cache(maxsize=64)
def _encoded(template: Plan) -> Encoded:
    return encode(template)


class HostPlans:
    """Encoded plans on one topology."""

    def __init__(self, planner: CallPlanner, trace: Trace) -> None:
        self._planner, self._trace = planner, trace

    def make(self, request: Request, nbytes: int) -> tuple[Plan, Encoded, int]:
        """The plan of one group, it encoded, and the number of chunks for a class of sizes, whose
        largest is `nbytes`: as many as make each one fit a slot. Raises PlanError."""
        plan, topology = self._planner.plan(request, nbytes), self._planner.topology
        needed = -(-plan.volume(nbytes) // SLOT_BYTES)
        if needed > plan.num_chunks:
            chunks = -(-needed // plan.stride) * plan.stride
            plan = proved(plan.with_chunks(chunks), topology)
        template = plan.with_chunks(plan.stride)
        if request.layers is not None:
            for rank in range(plan.size):
                finals(template, rank)  # raises if a queue cannot count arrivals
        name = label(request.kind, plan.algorithm, nbytes)
        self._trace.planned(name, plan, topology, nbytes)
        return template, _encoded(template), plan.num_chunks


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
        check_op(op, buffer.dtype)
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
