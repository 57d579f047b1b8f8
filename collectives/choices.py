"""Which plan a call takes, on one map of the machine."""

from __future__ import annotations

from collectives.errors import CollectiveError
from collectives.planning.plan import Plan
from collectives.planning.planner import plan_collective
from collectives.request import Request
from collectives.runtime.reference import OPS
from collectives.runtime.shm import Buffer
from collectives.trace import label
from topology import Topology

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
        self._algorithms: dict[tuple[int, str], str] = {}

    def request(
        self, kind: str, buffer: Buffer, op: str, root: int = 0, algorithm: str = "auto",
        layout: int = 0, device: str = "cpu",
    ) -> Request:  # fmt: skip
        """What a rank is about to ask for. Raises CollectiveError where that is no sense."""
        if op not in OPS:
            raise CollectiveError(f"unknown op {op!r}; choose from {', '.join(OPS)}")
        if op == "avg" and "int" in buffer.dtype:
            raise CollectiveError(f"avg is not defined for {buffer.dtype}; use sum")
        if kind == "allreduce":
            taken = algorithm = self._algorithm(buffer.nbytes, algorithm)
        else:  # what cannot be planned is refused before any rank waits for it
            taken = self.plan(kind, buffer.nbytes, root).algorithm
        name = label(kind, taken, buffer.nbytes)
        return Request(kind, buffer, op, root, algorithm, layout, device, name)

    def plan(self, kind: str, nbytes: int, root: int, algorithm: str = "auto") -> Plan:
        """The plan by that algorithm, or by the one that the order of combining asks for."""
        if algorithm == "auto" and self.order == "fixed":
            algorithm = _FIXED.get(kind, "auto")
        return plan_collective(kind, self.topology, nbytes, root, algorithm)

    def _algorithm(self, nbytes: int, name: str) -> str:
        """What `name` stands for; one that cannot run is refused before any rank waits for it."""
        key = (nbytes, name)
        if key not in self._algorithms:
            if name != "auto" and self.order == "fixed":
                raise CollectiveError(f"order='fixed' chooses the algorithm: do not ask for {name}")
            self._algorithms[key] = self.plan("allreduce", nbytes, 0, name).algorithm
        return self._algorithms[key]
