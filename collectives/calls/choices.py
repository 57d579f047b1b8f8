"""Which plan a call takes, on one map of the machine."""

from __future__ import annotations

from collections.abc import Callable

from linkweave.collectives.calls.request import How, Request, algorithm_word, name_of
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.blocks import Sizes
from linkweave.collectives.planning.goals import Root, check
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import adopt, plan_collective, ranked
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.dtypes import check_op
from linkweave.topology import Topology

Fits = Callable[[Plan], bool]

# one tree, or the ranks' own: every element is combined in the same order, whatever the size
_FIXED = {
    "allreduce": "overlapped_tree",
    "reduce": "shortest_tree",
    "reduce_scatter": "shortest_trees",
}


class Choices:
    """`order` is that of `Settings`."""

    def __init__(self, topology: Topology, order: str) -> None:
        self.topology, self.order = topology, order

    def request(
        self, kind: str, buffer: Buffer, op: str, root: Root = 0, algorithm: How = "auto",
        layout: int = 0, device: str = "cpu", sizes: Sizes | None = None,
    ) -> Request:  # fmt: skip
        """What a rank is about to ask for. Raises CollectiveError where that makes no sense."""
        check_op(op, buffer.dtype, device)
        algorithm_word(algorithm)
        if algorithm != "auto" and self.order == "fixed":
            raise CollectiveError(
                f"order='fixed' chooses the algorithm: do not ask for {name_of(algorithm)}"
            )
        check(kind, len(self.topology.gpus), root)
        return Request(kind, buffer, op, root, algorithm, layout, device, sizes)

    def plan(self, request: Request, nbytes: int, fits: Fits | None = None) -> Plan:
        """The verified plan for a message of `nbytes`; of what `auto` may take, one that `fits`.
        Raises PlanError."""
        kind, root, asked = request.kind, request.root, request.algorithm
        if isinstance(asked, Plan):
            return adopt(asked, self.topology)
        if asked == "auto" and self.order == "fixed":
            asked = _FIXED.get(kind, "auto")
        streamed = request.layers is not None
        plan = plan_collective(kind, self.topology, nbytes, root, asked, streamed=streamed)
        if asked == "auto" and fits and not fits(plan):
            for other in ranked(self.topology, nbytes, kind, root):
                found = plan_collective(kind, self.topology, nbytes, root, other)
                if fits(found):
                    return found
        return plan  # if it does not fit, the caller says what it lacks
