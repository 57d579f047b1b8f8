"""What rank 0 does for all CPU ranks: plan a call, or find the plan that was made before."""

from __future__ import annotations

import os
import time
from hashlib import sha256
from typing import NamedTuple

from linkweave.collectives.calls.choices import Choices
from linkweave.collectives.calls.plan_store import LONG, PlanStore
from linkweave.collectives.calls.request import Request
from linkweave.collectives.calls.trace import Trace, label
from linkweave.collectives.planning.completion import finals
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import proved
from linkweave.collectives.runtime.cpu.executor import SLOT_BYTES
from linkweave.collectives.runtime.encoded import Encoded, encode

_MOST = 64  # plans that rank 0 keeps at hand


class Made(NamedTuple):
    """An encoded plan, its name, and the number of chunks for a class of sizes."""

    name: str
    encoded: Encoded
    num_chunks: int


class Plans:
    """Plans on one map, kept on disk once planning has taken `LONG`."""

    def __init__(self, choices: Choices, trace: Trace) -> None:
        self._choices, self._trace = choices, trace
        self._store = PlanStore(choices.topology.to_json() + choices.order)
        self._encoded: dict[Plan, tuple[str, Encoded]] = {}
        self._slow = False  # planning has taken long here, as it would for a later process

    def make(self, request: Request, nbytes: int) -> Made:
        """For messages of the class of `nbytes`. Raises PlanError."""
        question = None
        if isinstance(request.algorithm, str) and not self._trace.level:
            forced = os.environ.get("LINKWEAVE_ALGORITHM", "")
            streamed = request.layers is not None
            question = request.kind, nbytes, request.root, request.algorithm, streamed, forced
            if found := self._found(question):
                return found
        start = time.perf_counter()
        made = self._planned(request, nbytes)
        self._slow = self._slow or time.perf_counter() - start > LONG
        if question and self._slow:
            self._store.write(made.name, made.encoded.to_bytes())
            self._store.write(question, f"{made.name} {made.num_chunks}".encode())
        return made

    def _found(self, question: object) -> Made | None:
        if (said := self._store.read(question)) is None:
            return None
        name, num_chunks = said.decode().split()
        body = self._store.read(name)
        return None if body is None else Made(name, Encoded.from_bytes(body), int(num_chunks))

    def _planned(self, request: Request, nbytes: int) -> Made:
        """The algorithm is the topology's; the number of chunks is the CPU runtime's own tuning."""
        plan, topology = self._choices.plan(request, nbytes), self._choices.topology
        needed = -(-plan.volume(nbytes) // SLOT_BYTES)
        if needed > plan.num_chunks:
            chunks = -(-needed // plan.stride) * plan.stride
            plan = proved(plan.with_chunks(chunks), topology)
        template = plan.with_chunks(plan.stride)
        if request.layers is not None:
            for rank in range(plan.size):
                finals(template, rank)  # refuses what no queue can count
        name = label(request.kind, plan.algorithm, nbytes)
        self._trace.planned(name, plan, topology, nbytes)
        if template not in self._encoded:
            encoded = encode(plan)
            if len(self._encoded) >= _MOST:
                self._encoded.pop(next(iter(self._encoded)))
            self._encoded[template] = sha256(encoded.to_bytes()).hexdigest(), encoded
        return Made(*self._encoded[template], plan.num_chunks)
