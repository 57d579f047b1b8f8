"""How one rank's requests are enqueued on its GPU."""

from __future__ import annotations

import threading
import time
from functools import lru_cache
from typing import Any
from zlib import crc32

from linkweave.collectives.calls.choices import Choices
from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.newest import Newest
from linkweave.collectives.calls.occupancy import gather_occupancy
from linkweave.collectives.calls.request import Key, Request, key_of, notice, words
from linkweave.collectives.calls.trace import CALLS, label
from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.diagnose import RAISED
from linkweave.collectives.runtime.encoded import encode
from linkweave.collectives.runtime.gpu import executor as cuda
from linkweave.collectives.runtime.gpu.counters import Counted
from linkweave.collectives.runtime.gpu.device import Device
from linkweave.collectives.runtime.gpu.executor import GpuRanks, Occupancy, width_of
from linkweave.collectives.runtime.gpu.fuse import fused
from linkweave.collectives.runtime.gpu.memory import PeerMemory, Shared, Spot
from linkweave.collectives.runtime.gpu.peers import advice, common_map
from linkweave.collectives.runtime.gpu.team import Arrival, Call, Refused, Team
from linkweave.collectives.runtime.gpu.watch import Watch
from linkweave.collectives.settings import Settings
from linkweave.topology import load


@lru_cache(maxsize=64)
def _read(text: bytes) -> Plan:
    """One object for all ranks of this process, which compare their calls."""
    return Plan.from_json(text.decode())


class GpuLauncher:
    """Enqueues one rank's requests on its GPU, after all ranks agreed on what is new."""

    def __init__(
        self, index: int, calls: HostCalls, settings: Settings, team: Team | None = None,
        quiet: bool = False,
    ) -> None:  # fmt: skip
        self.index, self.rank, self.size = index, calls.rank, calls.size
        self._calls, self._control, self._health = calls, calls.control, calls.health
        self._arena = calls.control.arena
        self._owns_team, self.trace = team is None, calls.trace
        with calls.telling():  # a GPU that cannot be used: the others must not wait
            self.device: Device = cuda.open_device(index)
            try:
                identity = self.device.identity()
                self.team = team or self._alone(settings)
                # behind the last call: outside of graphs, and within the capture of this number
                self._done, self._done_captured, self._met = (
                    self.device.make_event() for _ in range(3)
                )
                self._side = self.device.make_stream()  # of asynchronous calls
            except RuntimeError as error:
                raise CollectiveError(f"GPU {index} cannot be used: {error}{advice()}") from error
        auto = settings.topology == "auto"
        spec = None if auto else load(settings.topology)
        topology = common_map(identity, self.rank, calls.gather, spec, quiet)
        self.choices = Choices(topology, settings.order)
        self.made = 0
        self._last, self._checksum = "", 0
        self._rooms: dict[tuple[str, str], list[Occupancy]] = {}
        self._known = Newest[Key, tuple[str, str, Call | None]]()
        self._plans = Newest[Key, Plan]()
        self._capture, self._captures = 0, False
        self._scratch: list[tuple[int, int]] = []  # (address, bytes): graphs may hold old ones
        self._shared: list[Shared | None] = []  # memory of tensors; None: there was no room
        self._lock = threading.Lock()
        self._watch = Watch(self.team.gpu, self._control, self._describe)

    def _alone(self, settings: Settings) -> Team:
        """The team of a process with one rank."""
        required = settings.peer_access == "require"
        memory = PeerMemory(self.device, self._arena, self._calls.gather, required)
        return Team(
            GpuRanks({self.rank: self.device}, memory, settings.timeout, settings.max_blocks)
        )

    def _describe(self) -> str:
        return f"{self.made} calls on the GPU" + (f", the last {self._last}" if self._last else "")

    # ---- what goes wrong ---------------------------------------------------------------------
    def check(self) -> None:
        """Raise what went wrong on a GPU or another rank, if anything has."""
        self._health.check()
        try:
            self._watch.check()
        except CollectiveError as error:
            self._health.fail(error)
            raise

    def fail(self, error: Exception) -> CollectiveError:
        """End the communicator on all ranks; what is to be raised here."""
        if not isinstance(error, CollectiveError):
            error = CollectiveError(f"rank {self.rank} on GPU {self.index}: {error}")
        self._health.fail(error)
        self.team.gpu.abort()
        self._control.give_up(RAISED)
        return error

    def ready(self, event: int) -> bool:
        """Whether that is over. Raises what went wrong."""
        try:
            return self.device.ready(event)
        except RuntimeError as error:
            raise self.fail(error) from error

    def join(self, stream: int, behind: int) -> None:
        """What `stream` is given from now on comes after what `behind` holds."""
        if stream != behind:
            self.device.record(self._met, behind)
            self.device.wait(self._met, stream)

    def scratch(self, nbytes: int, stream: int) -> int:
        """The address of memory for one call; calls follow each other, so one piece serves all."""
        if not self._scratch or self._scratch[-1][1] < nbytes:
            self._not_captured(stream, "needs memory")
            size = max(nbytes, 2 * self._scratch[-1][1] if self._scratch else 0)
            self._scratch.append((self.device.allocate(size), size))
        return self._scratch[-1][0]

    def empty(self, nbytes: int) -> Any:
        """A new array of bytes in memory that all ranks' GPUs see. All ranks must call it."""
        with self._lock, self.device.here():
            self.check()
            asked = [row.decode() for row in self._calls.gather("tensors", str(nbytes).encode())]
            if len({*asked}) > 1:
                raise CollectiveError(
                    f"the ranks ask for tensors of different sizes: {', '.join(asked)} bytes, by "
                    "rank; they must agree"
                )
            self._shared.append(None)
            self._shared[-1] = shared = self.team.share(len(self._shared) - 1, nbytes)
            return shared.leases[self.rank].tensor(nbytes)

    def spot(self, buffer: Buffer) -> Spot | None:
        """Where a buffer lies in memory that all ranks' GPUs see; None: elsewhere, or all ranks run
        in one launch, which sees all of them anyway."""
        if self.team.gpu.launches_all(self.size):
            return None
        for number, shared in enumerate(self._shared):
            if shared:
                offset = buffer.address - shared.leases[self.rank].address
                if 0 <= offset <= shared.nbytes - buffer.nbytes:
                    return number, offset
        return None

    def _sees(self, plan: Plan, piece: int) -> bool:
        """Whether every rank sees the memory of those that it sends to."""
        shared = self._shared[piece]
        return shared is not None and not any(
            (c.src, c.dst) in shared.unseen for c in plan.connections
        )

    def know_occupancy(self, dtype: str, op: str, stream: int) -> None:
        """The first time for a dtype and op ranks compile the kernel, and tell each other how many
        of its blocks their GPUs hold at once."""
        if (dtype, op) not in self._rooms:
            self._not_captured(stream, f"is the first {op} of {dtype}, for which a kernel is made")
            self._rooms[dtype, op] = gather_occupancy(
                self._calls, self.team.gpu, self.device, dtype, op
            )

    def _refusal(self, plan: Plan, dtype: str, op: str) -> str:
        """Why a GPU does not hold all blocks of a plan at once; empty where all do."""
        try:
            width_of(plan, self._rooms[dtype, op], self.team.gpu.max_blocks)
        except CollectiveError as error:
            return str(error)
        return ""

    def refusal(self, request: Request) -> str:
        """Why a call would be refused for lack of room, as far as that is known before it is made;
        the same on all ranks. Empty where it would not."""
        if key_of(request) in self._known or self.size == 1:
            return ""
        return self._refusal(self._plan(request), request.buffer.dtype, request.op)

    def _plan(self, request: Request) -> Plan:
        """The plan of a call, as the kernel runs it: rank 0 plans, the others read. All ranks must
        ask for the same ones."""
        key = key_of(request)
        if key not in self._plans:
            dtype, nbytes, op = request.buffer.dtype, request.buffer.nbytes, request.op

            def make() -> bytes:
                plan = self.choices.plan(request, nbytes, lambda p: not self._refusal(p, dtype, op))
                name = label(request.kind, plan.algorithm, nbytes)
                self.trace.planned(name, plan, self.choices.topology, nbytes)
                return fused(plan).to_json().encode()

            self._plans.add(key, _read(self._calls.share(make)))
        return self._plans[key]

    def make(
        self, request: Request, stream: int, begun: int | None = None
    ) -> tuple[Call, Counted | None] | None:
        """Enqueue what is asked for; what was launched, if anything. The first time, all ranks
        meet and agree on it. `begun`: an event for a call with layers."""
        said = notice(request)
        key = said[:-1], request.root  # as `key_of`
        if key not in self._known:
            text = words((*said[:-1], -1))
            self._not_captured(stream, f"is the first {text}, which all ranks agree on")
            with self.trace.phase("agree"):
                gone = self._known.add(key, self._agree(request, text))
            self.team.forget(old for *_, old in gone if old)
        self._last, name, call = self._known[key]
        self.made += 1
        self._checksum = crc32(repr(said).encode(), self._checksum)
        if self._owns_team:  # a team of several compares its calls itself
            self._arena.log_call(self.made, self._checksum)
        values = (request.source or request.buffer).address
        if call is None:
            if request.buffer.nbytes and values != request.buffer.address:
                self.device.copy(request.buffer.address, values, request.buffer.nbytes, stream)
            return None
        if self._captures:
            self.team.hold(call)
        trace = self.trace
        trace.say(CALLS, f"GPU call {self.made}: {name} {call.dtype} {call.op} on stream "
                  f"{stream:#x}, {call.width} lanes at most")  # fmt: skip
        trace.flags(lambda: encode(call.plan), call.plan.num_chunks)
        start = time.monotonic()

        def patience(what: str, peer: int) -> None:
            late = f"rank {self.rank} waits for rank {peer} to make its {what}"
            self._control.patience(start, lambda: (late, {"rank": self.rank, "peer": peer}))

        with trace.call(name), trace.phase("launch"):
            try:
                mine = Arrival(call, request.buffer.address, values, stream, request.spot, begun)
                counted = self.team.launch(self.rank, mine, patience)
            except Refused:
                raise
            except (CollectiveTimeout, CollectiveAborted) as error:
                self._health.fail(error)
                raise
            except Exception as error:
                raise self.fail(error) from error
        return call, counted

    def dequeue(
        self, call: Call, counted: Counted, layer: int, begun: int, checked: int, stream: int
    ) -> None:
        """What `stream` is given from now on comes behind that layer of a call that began with the
        event `begun`; `checked` is recorded behind that. Raises what went wrong so far."""
        with self._lock, self.device.here(), self.trace.phase("dequeue"):
            self.check()
            try:
                self.device.wait(begun, stream)
                prepared = self.team.prepare(call)
                self.team.gpu.dequeue(prepared, counted, self.rank, layer, stream)
                self.device.record(checked, stream)
            except RuntimeError as error:  # CUDA's
                raise self.fail(error) from error

    def _agree(self, request: Request, said: str) -> tuple[str, str, Call | None]:
        """What is asked for, a name for profilers, and what is launched."""
        buffer = request.buffer
        try:
            self._calls.meet(request)
        except CollectiveTimeout as error:
            late = f"{error} (this rank asks for {said})"
            raise CollectiveTimeout(late, **error.fields()) from None
        if buffer.nbytes == 0 or self.size == 1:
            return said, request.kind, None
        plan = self._plan(request)
        rooms = self._rooms[buffer.dtype, request.op]
        lanes = width_of(plan, rooms, self.team.gpu.max_blocks)
        layers = request.layers or ()
        seen = request.spot is not None and self._sees(plan, request.spot[0])
        call = Call(said, plan, buffer.nbytes, buffer.dtype, request.op, lanes, layers, seen)
        if self._owns_team:
            try:
                self.team.prepare(call)
            except Exception as error:
                raise self.fail(error) from error
        return said, label(request.kind, plan.algorithm, buffer.nbytes), call

    def _not_captured(self, stream: int, why: str) -> None:
        if self.device.capturing(stream):
            raise CollectiveError(
                f"this call {why}, and cannot be captured into a graph: make it once before"
            )
