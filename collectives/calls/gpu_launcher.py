"""Enqueues one rank's requests on its GPU."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from zlib import crc32

from linkweave.collectives.calls.host import FifoCache, HostCalls
from linkweave.collectives.calls.plans import CallPlanner
from linkweave.collectives.calls.request import Key, Request, key_of, notice, words
from linkweave.collectives.calls.trace import CALLS, KERNELS, label
from linkweave.collectives.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveTimeout,
    OutOfMemory,
)
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.diagnose import RAISED
from linkweave.collectives.runtime.encoded import encode
from linkweave.collectives.runtime.gpu import device as cuda
from linkweave.collectives.runtime.gpu.device import Device
from linkweave.collectives.runtime.gpu.executor import CallCounters, GpuRanks, Occupancy, width_of
from linkweave.collectives.runtime.gpu.launch_tables import fused
from linkweave.collectives.runtime.gpu.memory import (
    PeerMemory,
    SymmetricAddress,
    SymmetricMemory,
    advice,
    common_topology,
    gather_errors,
    lacking,
)
from linkweave.collectives.runtime.gpu.team import LaunchKey, LaunchRefused, RankCall, Repeat, Team
from linkweave.collectives.runtime.gpu.watchdog import Watchdog
from linkweave.collectives.settings import Settings
from linkweave.topology import load

_MOST_TEXT = 500  # characters of an error message that the other ranks are sent


@lru_cache(maxsize=64)
def _read(text: bytes) -> Plan:
    """A plan from JSON. Ranks that are threads get the same object, so they compare it fast."""
    return Plan.from_json(text.decode())


Copied = tuple[int, int, int]
"""(destination, source, bytes) of a copy on the GPU."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A call that can be repeated. `row` is its notice; copies are made before the launch and
    behind it; `result` says which of the arguments is what it returns, if anything."""

    text: str
    name: str
    row: bytes
    before: list[Copied]
    made: Repeat
    after: list[Copied]
    result: int | None


class GpuLauncher:
    """Enqueues one rank's requests. All ranks first agree on each new kind of call."""

    def __init__(
        self, index: int, calls: HostCalls, settings: Settings, team: Team | None, quiet: bool
    ) -> None:
        self.index, self.rank, self.size = index, calls.rank, calls.size
        self.host, self._control, self._health = calls, calls.control, calls.health
        self._arena = calls.control.arena
        self._owns_team, self.trace = team is None, calls.trace
        self._control.timeout = settings.longest_on_gpus
        with calls.sharing_errors():  # so that the others do not wait if this GPU is unusable
            self.device: Device = cuda.open_device(index)
            try:
                identity = self.device.identity()
                self.team = team or self._alone(settings)
                # recorded behind the last call: outside of graphs, and in the current capture
                self._done, self._done_captured, self._joined = (
                    self.device.make_event() for _ in range(3)
                )
                self._side = self.device.make_stream()  # for asynchronous calls
            except RuntimeError as error:
                raise CollectiveError(f"GPU {index} cannot be used: {error}{advice()}") from error
        auto = settings.topology == "auto"
        spec = None if auto else load(settings.topology)
        topology, sharing = common_topology(identity, self.rank, calls.gather, spec, quiet)
        self.team.gpu.sharing = max(sharing, settings.sharing)
        self.planner = CallPlanner(topology, settings.order)
        self.made = 0
        self._last, self._checksum = "", 0
        self._repeats = FifoCache[object, Ready]()  # by what `GpuCalls` makes of the arguments
        self._occupancy: dict[tuple[str, str], list[Occupancy]] = {}
        self._known = FifoCache[Key, tuple[str, str, LaunchKey | None]]()
        self._plans = FifoCache[Key, Plan]()
        self._capture, self._captures = 0, False
        self.latest: tuple[str, str, bytes, RankCall] | None = None  # what was launched last
        # (address, bytes), outside of graphs and in them; calls made again and graphs use old ones
        self._scratch: tuple[list[tuple[int, int]], ...] = [], []
        self._shared: list[SymmetricMemory | None] = []  # None if allocating it failed
        self.enqueueing = threading.Lock()  # held while a call is enqueued or freed
        self._watchdog = Watchdog(self.team.gpu, self._control, self._describe)

    def _alone(self, settings: Settings) -> Team:
        """The team of a process that runs one rank."""
        required = settings.peer_access == "require"
        memory = PeerMemory(self.device, self._arena, self.host.gather, required)
        return Team(
            GpuRanks(
                {self.rank: self.device}, memory, settings.longest_on_gpus, settings.max_blocks
            )
        )

    def _describe(self) -> str:
        return f"{self.made} calls on the GPU" + (f", the last {self._last}" if self._last else "")

    def check(self) -> None:
        """Raise if a GPU or another rank has failed."""
        self._health.check()
        try:
            self._watchdog.check()
        except CollectiveError as error:
            self._health.fail(error)
            raise

    def quick_check(self) -> None:
        """Raise what is known already: the watchdog finds other failures within its period."""
        self._health.check()
        if self._watchdog.over:
            self.check()

    def using(self, known: bool = False) -> _Using:
        """Make this GPU the thread's current one within a `with` block.

        Raises errors so far; `known`: only those that are known already. An error from CUDA in the
        block ends the communicator.
        """
        (self.quick_check if known else self.check)()
        return _Using(self)

    def fail(self, error: Exception) -> CollectiveError:
        """End the communicator on all ranks. Returns the error to raise here."""
        if not isinstance(error, CollectiveError):
            error = CollectiveError(f"rank {self.rank} on GPU {self.index}: {error}")
        self._health.fail(error)
        self.team.gpu.abort()
        self._control.give_up(RAISED)
        return error

    def ready(self, event: int) -> bool:
        """Whether an event has completed. Raises if the GPU has failed."""
        try:
            return self.device.ready(event)
        except RuntimeError as error:
            raise self.fail(error) from error

    def join(self, stream: int, behind: int) -> None:
        """Make work enqueued on `stream` from now on wait for the work on `behind`."""
        if stream != behind:
            self.device.record(self._joined, behind)
            self.device.wait(self._joined, stream)

    def scratch(self, nbytes: int, request: Request) -> int:
        """The address of scratch memory for a request. Calls run in order, so all share one piece,
        and those of graphs another one. Raises OutOfMemory, of which other ranks learn, for the
        first request of a kind."""
        pieces = self._scratch[self._captures]
        if not pieces or pieces[-1][1] < nbytes:
            size = max(nbytes, 2 * pieces[-1][1] if pieces else 0)
            try:
                pieces.append((self.device.allocate(size), size))
            except MemoryError as error:
                if key_of(request) in self._known:  # the other ranks do not wait to hear of it
                    raise
                with self.host.sharing_errors():
                    what = f"rank {self.rank}: {lacking(size, self.device, error)}"
                    raise OutOfMemory(what) from error
        return pieces[-1][0]

    def empty(self, nbytes: int) -> Any:
        """An array of bytes in symmetric memory. All ranks must call it."""
        with self.enqueueing, self.using():
            asked = [row.decode() for row in self.host.gather("tensors", str(nbytes).encode())]
            if len({*asked}) > 1:
                raise CollectiveError(
                    f"the ranks ask for tensors of different sizes: {', '.join(asked)} bytes, by "
                    "rank; they must agree"
                )
            self._repeats.clear()  # an old tensor's address may become a symmetric one's
            self._shared.append(None)
            self._shared[-1] = shared = self.team.allocate_symmetric(len(self._shared) - 1, nbytes)
            return shared.leases[self.rank].tensor(nbytes)

    def symmetric_address(self, buffer: Buffer) -> SymmetricAddress | None:
        """The position of a buffer in symmetric memory.

        None if it is elsewhere, or if all ranks run in one launch, which sees every buffer anyway.
        """
        if self.team.gpu.launches_all(self.size):
            return None
        for number, shared in enumerate(self._shared):
            if shared:
                offset = buffer.address - shared.leases[self.rank].address
                if 0 <= offset <= shared.nbytes - buffer.nbytes:
                    return number, offset
        return None

    def _sees(self, plan: Plan, piece: int) -> bool:
        """Whether every rank can access the symmetric memory of the ranks that it sends to."""
        shared = self._shared[piece]
        return shared is not None and not any(
            (c.src, c.dst) in shared.unseen for c in plan.connections
        )

    def ensure_occupancy(self, dtype: str, op: str, stream: int) -> None:
        """On the first call of a dtype and op, compile the kernel and gather its occupancy.

        The occupancy is the number of thread blocks that each GPU holds at once; processes that
        share it, as under MPS, get equal parts, since all their kernels must run side by side. If
        one rank has no kernel, every rank raises CollectiveError.
        """
        if (dtype, op) in self._occupancy:
            return
        self._not_captured(stream, f"is the first {op} of {dtype}, which compiles a kernel")
        mine: dict[str, Any] = {}
        try:
            with self.trace.phase("kernel"):
                found = self.team.gpu.occupancy(dtype, op)
            mine["blocks"] = [entry for entry in found if self.rank in entry[0]]
            self.trace.say(
                KERNELS, f"kernel plan.cu for {dtype} {op}: {self.device.registers(dtype, op)} "
                f"registers, {found} blocks at once on GPU {self.index}"
            )  # fmt: skip
        except Exception as error:  # of any kind: the other ranks must learn of it
            mine["error"] = f"{error}"[:_MOST_TEXT]
        rows = [json.loads(row) for row in self.host.gather("kernels", json.dumps(mine).encode())]
        if errors := [f"rank {r}: {row['error']}" for r, row in enumerate(rows) if "error" in row]:
            raise CollectiveError(f"no kernel for {op} of {dtype}: {'; '.join(errors)}")
        self._occupancy[dtype, op] = sorted(
            {(tuple(ranks), blocks) for row in rows for ranks, blocks in row["blocks"]}
        )

    def _refusal(self, plan: Plan, dtype: str, op: str) -> str:
        """Why a GPU does not hold all blocks of a plan at once; empty if every GPU does."""
        try:
            width_of(plan, self._occupancy[dtype, op], self.team.gpu.max_blocks)
        except CollectiveError as error:
            return str(error)
        return ""

    def refusal(self, request: Request) -> str:
        """Why a call would be refused because its blocks do not fit; empty if they do.

        The same on all ranks.
        """
        if key_of(request) in self._known or self.size == 1:
            return ""
        return self._refusal(self._plan(request), request.buffer.dtype, request.op)

    def _plan(self, request: Request) -> Plan:
        """The plan of a call: rank 0 makes it and the others read it, so all ranks must ask."""
        key = key_of(request)
        if key not in self._plans:
            dtype, nbytes, op = request.buffer.dtype, request.buffer.nbytes, request.op

            def make() -> bytes:
                plan = self.planner.plan(request, nbytes, lambda p: not self._refusal(p, dtype, op))
                name = label(request.kind, plan.algorithm, nbytes)
                self.trace.planned(name, plan, self.planner.topology, nbytes)
                return fused(plan).to_json().encode()

            self._plans.add(key, _read(self.host.share(make)))
        return self._plans[key]

    def make(
        self, request: Request, stream: int, begun: int | None = None
    ) -> tuple[LaunchKey, CallCounters | None] | None:
        """Enqueue a request. Returns what was launched, if anything.

        The first request of a kind synchronises the ranks. `begun` is an event for a call with
        layers.
        """
        row = notice(request)
        key = row[:-1], request.root  # as `key_of`
        if key not in self._known:
            text = words((*row[:-1], -1))
            self._not_captured(stream, f"is the first {text}, which all ranks agree on")
            with self.trace.phase("agree"):
                gone = self._known.add(key, self._agree(request, text))
            self.team.forget(old for *_, old in gone if old)
            if gone:
                self._repeats.clear()
        text, name, call = self._known[key]
        words_of_call = repr(row).encode()
        self._count(text, words_of_call)
        values = (request.source or request.buffer).address
        if call is None:
            if request.buffer.nbytes and values != request.buffer.address:
                self.device.copy(request.buffer.address, values, request.buffer.nbytes, stream)
            return None
        if self._captures:
            call = replace(call, captured=True, description=f"{text} captured into a graph")
        trace = self.trace
        trace.say(CALLS, f"GPU call {self.made}: {name} {call.dtype} {call.op} on stream "
                  f"{stream:#x}, width {call.width} at most")  # fmt: skip
        trace.flags(lambda: encode(call.plan), call.plan.num_chunks)
        start = time.monotonic()

        def patience(what: str, peer: int) -> None:
            late = f"rank {self.rank} waits for rank {peer} to make its {what}"
            self._control.patience(start, lambda: (late, {"rank": self.rank, "peer": peer}))

        with trace.call(name), trace.phase("launch"):
            try:
                mine = RankCall(
                    call, request.buffer.address, values, stream, request.symmetric, begun
                )
                counted = self.team.launch(self.rank, mine, patience)
                self.latest = (text, name, words_of_call, mine)
            except (LaunchRefused, OutOfMemory):
                raise
            except CollectiveError as error:
                if call.captured and type(error) in (CollectiveError, CollectiveTimeout):
                    error.args = (f"{error} (this rank captures {text} into a graph; all must)",)
                if isinstance(error, CollectiveTimeout | CollectiveAborted):
                    self._health.fail(error)
                    raise
                raise self.fail(error) from None
            except Exception as error:
                raise self.fail(error) from error
        return call, counted

    def _count(self, text: str, row: bytes) -> None:
        """Count a call, `row` being its notice, for the other ranks to compare."""
        self._last = text
        self.made += 1
        self._checksum = crc32(row, self._checksum)
        if self._owns_team:  # a team of several ranks compares its calls itself
            self._arena.log_call(self.made, self._checksum)

    def repeatable(
        self, before: list[Copied], after: list[Copied], result: int | None
    ) -> Ready | None:
        """The latest call, to be repeated by `again`; None if other ranks of this process are part
        of it."""
        if not self._owns_team or self.latest is None:
            return None
        text, name, row, mine = self.latest
        return Ready(text, name, row, before, self.team.repeatable(mine), after, result)

    def again(self, ready: Ready, stream: int) -> None:
        """Enqueue a call once more."""
        self._count(ready.text, ready.row)
        for copied in ready.before:
            self.device.copy(*copied, stream)
        with self.trace.call(ready.name), self.trace.phase("launch"):
            self.team.repeat(ready.made)
        for copied in ready.after:
            self.device.copy(*copied, stream)

    def dequeue(
        self, call: LaunchKey, counted: CallCounters, layer: int, begun: int, checked: int,
        stream: int,
    ) -> None:  # fmt: skip
        """Make work enqueued on `stream` from now on wait for one layer of a call.

        `begun` is the event at the start of the call's counting; `checked` is recorded behind the
        wait. The caller holds `enqueueing`.
        """
        with self.trace.phase("dequeue"):
            self.device.wait(begun, stream)
            prepared = self.team.prepare(call)
            self.team.gpu.dequeue(prepared, counted, self.rank, layer, stream)
            self.device.record(checked, stream)

    def _agree(self, request: Request, text: str) -> tuple[str, str, LaunchKey | None]:
        """Agree on a new kind of call: its text, its name for profilers, and what to launch."""
        buffer = request.buffer
        try:
            self.host.agree_on(request)
        except CollectiveTimeout as error:
            late = f"{error} (this rank asks for {text})"
            raise CollectiveTimeout(late, **error.fields()) from None
        if buffer.nbytes == 0 or self.size == 1:
            return text, request.kind, None
        plan = self._plan(request)
        width = width_of(plan, self._occupancy[buffer.dtype, request.op], self.team.gpu.max_blocks)
        layers = request.layers or ()
        seen = request.symmetric is not None and self._sees(plan, request.symmetric[0])
        call = LaunchKey(text, plan, buffer.nbytes, buffer.dtype, request.op, width, layers, seen)
        if self._owns_team:
            self._prepare(call)
        return text, label(request.kind, plan.algorithm, buffer.nbytes), call

    def _prepare(self, call: LaunchKey) -> None:
        """Prepare a new call, on all ranks or on none."""
        problem, fresh = "", not self.team.is_prepared(call)
        try:
            self.team.prepare(call)
        except OutOfMemory:
            raise
        except MemoryError as error:  # for tables; of slots all ranks have learned
            problem = str(error) or "out of memory"
        except Exception as error:
            raise self.fail(error) from error
        if failed := gather_errors(self.host.gather, problem):
            if fresh:
                self.team.undo(call)
            raise OutOfMemory(f"no memory for tables: {failed}")

    def _not_captured(self, stream: int, why: str) -> None:
        self.refuse_capture(stream, why, ": make it once before")

    def refuse_capture(self, stream: int, why: str, remedy: str = "") -> None:
        """Raise CollectiveError if a stream is being captured."""
        if self.device.capturing(stream):
            raise CollectiveError(f"this call {why}, and cannot be captured into a graph{remedy}")


class _Using:
    """The block of `GpuLauncher.using`; a class, as a generator takes the host twice as long."""

    __slots__ = "_gpu", "_here"

    def __init__(self, gpu: GpuLauncher) -> None:
        self._gpu = gpu

    def __enter__(self) -> None:
        try:
            self._here = self._gpu.device.here()
            self._here.__enter__()
        except RuntimeError as error:
            raise self._gpu.fail(error) from error

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        try:
            self._here.__exit__(None, None, None)
        except RuntimeError as failed:
            error = failed
        if isinstance(error, RuntimeError | MemoryError):  # CUDA's; CuPy's when out of memory
            raise self._gpu.fail(error) from error
