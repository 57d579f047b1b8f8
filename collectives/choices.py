"""Which plan a call takes, on one map of the machine."""

from __future__ import annotations

from collections.abc import Callable

from collectives.errors import CollectiveError
from collectives.planning.goals import Root
from collectives.planning.plan import Plan
from collectives.planning.planner import plan_collective, ranked
from collectives.request import Request
from collectives.runtime.dtypes import check_op
from collectives.runtime.shm import Buffer
from collectives.trace import label
from topology import Topology

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
        self._taken: dict[tuple[object, ...], str] = {}

    def request(
        self, kind: str, buffer: Buffer, op: str, root: Root = 0, algorithm: str = "auto",
        layout: int = 0, device: str = "cpu", fits: Callable[[], Fits] | None = None,
    ) -> Request:  # fmt: skip
        """What a rank is about to ask for. Raises CollectiveError where that is no sense.

        `fits`, called the first time for each kind of call, gives what must hold for what `auto`
        takes.
        """
        check_op(op, buffer.dtype, device)
        if not isinstance(algorithm, str):
            raise CollectiveError(f"algorithm must be a name, not {algorithm!r}")
        if algorithm != "auto" and self.order == "fixed":
            raise CollectiveError(
                f"order='fixed' chooses the algorithm: do not ask for {algorithm}"
            )
        asked = (kind, buffer.nbytes, root, algorithm)
        key = (*asked, buffer.dtype, op)  # to which `fits` belongs
        if key not in self._taken:
            self._taken[key] = self._algorithm(*asked, fits() if fits else None)
        taken = self._taken[key]
        name = label(kind, taken, buffer.nbytes)
        return Request(kind, buffer, op, root, taken, layout, device, name)

    def plan(self, request: Request) -> Plan:
        """The plan of what is asked for."""
        kind, nbytes = request.kind, request.buffer.nbytes
        return plan_collective(kind, self.topology, nbytes, request.root, request.algorithm)

    def _algorithm(self, kind: str, nbytes: int, root: Root, name: str, fits: Fits | None) -> str:
        """What `name` stands for; what cannot run is refused before any rank waits for it."""
        if name == "auto" and self.order == "fixed":
            name = _FIXED.get(kind, "auto")
        plan = plan_collective(kind, self.topology, nbytes, root, name)
        if name == "auto" and fits and not fits(plan):
            for other in ranked(self.topology, nbytes, kind, root):
                if fits(plan_collective(kind, self.topology, nbytes, root, other)):
                    return other
        return plan.algorithm  # if it does not fit, the caller says what it lacks
