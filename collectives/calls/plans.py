"""Plans for calls on one topology: made once by `CallPlanner`, which checks what a call asks
for; on the CPU by rank 0, which keeps on disk what took long to make.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from linkweave.collectives.calls.request import How, Request, algorithm_word, name_of
from linkweave.collectives.calls.trace import Trace, label
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.algorithms.registry import fixed_order
from linkweave.collectives.planning.collective import Root, check
from linkweave.collectives.planning.completion import finals
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import adopt, plan_collective, proved, ranked
from linkweave.collectives.runtime.buffer import Buffer, check_op
from linkweave.collectives.runtime.cpu.executor import SLOT_BYTES
from linkweave.collectives.runtime.encoded import Encoded, encode
from linkweave.topology import Topology

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


LONG = 0.05
"""Plans are stored once planning has taken longer than this (seconds)."""
_MOST_FILES = 2000
_HASH = 32  # bytes


class PlanStore:
    """The entries for one `scope`: a topology and an order. `read` returns None for a miss."""

    def __init__(self, scope: str) -> None:
        self._scope = scope

    def _path(self, key: object) -> Path | None:
        folder = _folder()
        name = sha256(repr((_program(), self._scope, key)).encode()).hexdigest()
        return None if folder is None else folder / name

    def read(self, key: object) -> bytes | None:
        path = self._path(key)
        try:
            data = path.read_bytes() if path else b""
        except OSError:
            return None
        value = data[_HASH:]
        return value if data and sha256(value).digest() == data[:_HASH] else None

    def write(self, key: object, value: bytes) -> None:
        """Store an entry atomically. Errors are ignored."""
        if (path := self._path(key)) is None:
            return
        try:
            found = sorted(path.parent.iterdir(), key=lambda p: p.stat().st_mtime)
            for old in found[: len(found) // 2] if len(found) > _MOST_FILES else ():
                old.unlink(missing_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(sha256(value).digest() + value)
            os.replace(name, path)
        except OSError:
            pass  # such as a full disk: the plan is made anew next time


@cache
def _folder() -> Path | None:
    """The cache folder, which only this user can write to; None if there cannot be one."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base) / "linkweave" / "plans"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (path.parent, path):
            found = folder.lstat()
            others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or others:
                return None
    except OSError:
        return None
    return path


@cache
def _program() -> str:
    """A hash that changes when the program's files do."""
    root = Path(__file__).parents[2]
    found = []
    for name in ("topology", "collectives", "kernels"):
        for path in sorted((root / name).rglob("*.py")):
            status = path.stat()
            found.append((str(path.relative_to(root)), status.st_size, status.st_mtime_ns))
    return sha256(repr(found).encode()).hexdigest()
