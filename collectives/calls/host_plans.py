"""Plans for CPU calls: made on rank 0, or read from the plan store."""

from __future__ import annotations

import os
import time
from hashlib import sha256
from typing import NamedTuple

from linkweave.collectives.calls.call_planner import CallPlanner
from linkweave.collectives.calls.plan_store import LONG, PlanStore
from linkweave.collectives.calls.request import Request
from linkweave.collectives.calls.trace import Trace, label
from linkweave.collectives.planning.completion import finals
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import proved
from linkweave.collectives.runtime.cpu.executor import SLOT_BYTES
from linkweave.collectives.runtime.encoded import Encoded, encode

_MOST = 64  # encoded plans kept in memory


class HostPlan(NamedTuple):
    """An encoded plan, its name, and its number of chunks for one class of sizes."""

    name: str
    encoded: Encoded
    num_chunks: int


class HostPlans:
    """Plans on one topology. Once planning has taken longer than `LONG`, they go to disk."""

    def __init__(self, planner: CallPlanner, trace: Trace) -> None:
        self._planner, self._trace = planner, trace
        self._store = PlanStore(planner.topology.to_json() + planner.order)
        self._encoded: dict[Plan, tuple[str, Encoded]] = {}
        self._slow = False  # planning has taken longer than `LONG`, as it would in a later process

    def make(self, request: Request, nbytes: int) -> HostPlan:
        """The plan for a class of sizes, whose largest is `nbytes`. Raises PlanError."""
        key = None
        if isinstance(request.algorithm, str) and not self._trace.level:
            forced = os.environ.get("LINKWEAVE_ALGORITHM", "")
            queued = request.layers is not None
            key = request.kind, nbytes, request.root, request.algorithm, queued, forced
            if found := self._found(key):
                return found
        start = time.perf_counter()
        made = self._planned(request, nbytes)
        self._slow = self._slow or time.perf_counter() - start > LONG
        if key and self._slow:
            self._store.write(made.name, made.encoded.to_bytes())
            self._store.write(key, f"{made.name} {made.num_chunks}".encode())
        return made

    def _found(self, key: object) -> HostPlan | None:
        if (entry := self._store.read(key)) is None:
            return None
        name, num_chunks = entry.decode().split()
        body = self._store.read(name)
        return None if body is None else HostPlan(name, Encoded.from_bytes(body), int(num_chunks))

    def _planned(self, request: Request, nbytes: int) -> HostPlan:
        """Plan on the topology, with as many chunks as make each one fit a slot."""
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
        if template not in self._encoded:
            encoded = encode(plan)
            if len(self._encoded) >= _MOST:
                self._encoded.pop(next(iter(self._encoded)))
            self._encoded[template] = sha256(encoded.to_bytes()).hexdigest(), encoded
        return HostPlan(*self._encoded[template], plan.num_chunks)
