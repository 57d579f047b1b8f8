"""One rank's calls on GPU tensors: agreed with all ranks the first time that they are made, then
launched with no host between the ranks, on the caller's stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from collectives.calls import Calls
from collectives.choices import Choices
from collectives.errors import CollectiveError, CollectiveTimeout
from collectives.planning.plan import Plan
from collectives.request import NOTHING, Request, notice, words
from collectives.runtime import cuda
from collectives.runtime.cuda import Device, GpuRanks
from collectives.runtime.diagnose import RAISED
from collectives.runtime.peers import PeerMemory, common_map
from collectives.runtime.shm import Buffer
from collectives.runtime.team import Call, Team
from collectives.runtime.watch import Watch
from collectives.settings import Settings, topology_for
from collectives.tensors import as_buffer, stream_of
from collectives.trace import CALLS, KERNELS
from collectives.work import Work

_POLL = 0.0005  # s
_QUIET = 2.0  # s that a launch has to end once it was aborted


class GpuCalls:
    """Calls of one rank on one GPU. Later calls come behind earlier ones, on whatever streams.

    A graph replays its calls in the order in which it holds them; replays and other calls of the
    same communicator must be ordered by the caller.
    """

    def __init__(
        self, index: int, calls: Calls, settings: Settings, team: Team | None = None
    ) -> None:
        self.index, self.rank, self.size = index, calls.rank, calls.size
        self.device: Device = cuda.open_device(index)
        self._calls, self._runtime = calls, calls.runtime
        self._owns_team = team is None
        if team is None:
            required = settings.peer_access == "require"
            memory = PeerMemory(self.device, calls.runtime.arena, calls.gather, required)
            ranks = {self.rank: self.device}
            team = Team(GpuRanks(ranks, memory, settings.timeout, settings.max_blocks))
        self.team = team
        auto = settings.topology == "auto"
        spec = None if auto else topology_for(settings.topology, self.size)
        topology = common_map(self.device, self.rank, calls.gather, spec)
        self.choices = Choices(topology, settings.order)
        self.made = 0
        self._last = ""
        self._known: dict[tuple[int, ...], Call | None] = {}
        self._stream: int | None = None  # of the last call, and the event behind it
        self._done, self._met = self.device.make_event(), self.device.make_event()
        self._side: int | None = None
        self._scratch: list[tuple[int, int]] = []  # (address, bytes): graphs may hold old ones
        self._under_way: list[GpuWork] = []
        self._lock = threading.Lock()
        self._watch = Watch(self.team.gpu, self._runtime, self._describe)

    def _describe(self) -> str:
        return f"{self.made} calls on the GPU" + (f", the last {self._last}" if self._last else "")

    def check(self) -> None:
        """Raise what went wrong on a GPU or another rank, if anything has."""
        self._calls.check()
        try:
            self._watch.check()
        except CollectiveError as error:
            self._calls.broken = f"{type(error).__name__}: {error}"
            raise

    # ---- one call ----------------------------------------------------------------------------
    def submit(self, async_op: bool, x: Any, body: Callable[..., Any], *args: Any) -> Any:
        """Carry out one of `bodies` on the current stream of `x`'s library.

        With `async_op` on a stream of our own, so that what the caller enqueues next runs beside
        it until `GpuWork.wait`.
        """
        with self._lock:
            self.check()
            caller = stream_of(x)
            captured = self.device.capturing(caller)
            if not captured:
                self._forget()
            stream = self._own_stream() if async_op else caller
            if not captured and self._stream not in (None, stream):
                self.device.wait(self._done, stream)
            place = OnStream(self, caller, stream)
            result = body(place, *args)
            if not captured:
                self.device.record(self._done, stream)
                self._stream = stream
            if not async_op:
                place.finish()
                return result
            work = GpuWork(self, place, x, result, captured)
            self._under_way.append(work)
            return work

    def _own_stream(self) -> int:
        if self._side is None:
            self._side = self.device.make_stream()
        return self._side

    def _forget(self) -> None:
        """Let go of the tensors of calls that are over."""
        self._under_way = [w for w in self._under_way if not w.over()]

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

    def make(self, request: Request, stream: int) -> None:
        """Enqueue what is asked for. The first time, all ranks meet and agree on it."""
        said = notice(request)
        if said not in self._known:
            self._not_captured(stream, f"is the first {words(said)}, which all ranks agree on")
            try:
                with self._calls.trace.phase("agree"):
                    self._known[said] = self._agree(request, words(said))
            except CollectiveTimeout as error:
                raise CollectiveTimeout(
                    f"{error} (this rank asks for {words(said)})", **error.fields()
                ) from None
        call = self._known[said]
        self.made += 1
        self._last = words(said)
        if call is None:
            return
        trace = self._calls.trace
        trace.say(CALLS, f"GPU call {self.made}: {request.label} {call.dtype} {call.op} on stream "
                  f"{stream:#x}, {call.lanes} lanes at most")  # fmt: skip
        trace.flags(call.plan)
        start = time.monotonic()

        def patience(what: str, peer: int) -> None:
            late = f"rank {self.rank} waits for rank {peer} to make its {what}"
            where = {"rank": self.rank, "peer": peer}
            self._runtime.patience(start, lambda: (late, where))

        with trace.call(request.label), trace.phase("launch"):
            self.team.launch(self.rank, call, request.buffer.address, stream, patience)

    def _agree(self, request: Request, said: str) -> Call | None:
        buffer = request.buffer
        if buffer.nbytes == 0 or self.size == 1:
            self._calls.meet(request)
            return None
        plan = self.choices.plan(request)
        trouble = None
        try:
            with self._calls.trace.phase("kernel"):
                lanes = self.team.gpu.lanes(plan, buffer.dtype, request.op)
        except CollectiveError as error:
            lanes, trouble = 0, error
        trace = self._calls.trace
        trace.planned(request.label, plan, self.choices.topology, buffer.nbytes)
        if trouble is None:
            trace.say(KERNELS, self._kernel(buffer.dtype, request.op))
        rooms = self._calls.meet(request, lanes)
        if trouble:
            raise trouble
        if 0 in rooms:
            raise CollectiveError(
                f"rank {rooms.index(0)}'s GPU has no room for the blocks of {plan.algorithm}"
            )
        call = Call(said, plan, buffer.nbytes, buffer.dtype, request.op, min(rooms))
        if self._owns_team:
            try:
                self.team.prepare(call)
            except BaseException as error:
                self._calls.broken = f"{type(error).__name__}: {error}"
                self._runtime.give_up(RAISED)
                raise
        return call

    def room_for(self, dtype: str, op: str) -> Callable[[Plan], bool]:
        """Whether our GPUs hold all blocks of a plan at once."""

        def fits(plan: Plan) -> bool:
            try:
                return self.team.gpu.lanes(plan, dtype, op) > 0
            except CollectiveError:
                return False

        return fits

    def _kernel(self, dtype: str, op: str) -> str:
        return (
            f"kernel plan.cu for {dtype} {op}: {self.device.registers(dtype, op)} registers, "
            f"{self.device.resident(dtype, op)} blocks at once on GPU {self.index}"
        )

    def _not_captured(self, stream: int, why: str) -> None:
        if self.device.capturing(stream):
            raise CollectiveError(
                f"this call {why}, and cannot be captured into a graph: make it once before"
            )

    # ---- the end -----------------------------------------------------------------------------
    def synchronise(self) -> None:
        """Wait until this rank's calls are over. Raises what went wrong."""
        while not self.device.ready(self._done):
            time.sleep(_POLL)
        self.check()

    def close(self) -> None:
        """Wait for this rank's calls, and until no rank needs its memory; then give it back."""
        if not (self._calls.broken or self._runtime.arena.abort[0]):
            try:
                self.synchronise()
                self._calls.meet(Request("barrier", NOTHING))
            except CollectiveError:
                pass  # a peer's failure: its memory is given back below all the same
        self._watch.close()
        if self._owns_team:
            self._leave()
        for event in (self._done, self._met):
            self.device.free_event(event)
        for work in self._under_way:
            work.free()
        for address, _ in self._scratch:
            self.device.free(address)
        if self._side is not None:
            self.device.free_stream(self._side)

    def _leave(self) -> None:
        deadline = time.monotonic() + _QUIET
        if self._calls.broken or self._runtime.arena.abort[0]:
            self.team.gpu.abort()
            while not self.device.ready(self._done) and time.monotonic() < deadline:
                time.sleep(_POLL)
            time.sleep(0.1)  # the peers' GPUs hear of it as well
        self.team.close()


class OnStream:
    """One call's `bodies.Place`: copies and launches go to `stream`, tensors come from `caller`."""

    def __init__(self, gpu: GpuCalls, caller: int, stream: int) -> None:
        self.rank, self.size = gpu.rank, gpu.size
        self.gpu, self.caller, self.stream = gpu, caller, stream
        self._joined = False
        self._later: list[Callable[[], None]] = []

    def telling(self) -> AbstractContextManager[None]:
        return nullcontext()  # ranks do not meet, so nobody can be told

    def buffer(self, x: Any, written: bool = True) -> tuple[Buffer, Callable[[], None]]:
        buffer, done = as_buffer(x, written, self.gpu.index)
        return buffer, lambda: self._later.append(done)

    def scratch(self, like: Buffer, nbytes: int) -> Buffer:
        address = self.gpu.scratch(nbytes, self.caller)
        return Buffer(address, like.nbytes, like.dtype, like.itemsize)

    def staged(self, whole: Buffer) -> Buffer:
        return whole

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        self._join()
        if nbytes and dst != src:
            self.gpu.device.copy(dst, src, nbytes, self.stream)

    def request(
        self, kind: str, buffer: Buffer, op: str, root: int = 0, algorithm: str = "auto",
        layout: int = 0,
    ) -> Request:  # fmt: skip
        fits = self.gpu.room_for(buffer.dtype, op)
        return self.gpu.choices.request(kind, buffer, op, root, algorithm, layout, "gpu", fits)

    def make(self, request: Request) -> None:
        self._join()
        self.gpu.make(request, self.stream)

    def _join(self) -> None:
        """Behind what the caller has enqueued, contiguous copies of its tensors included."""
        if not self._joined:
            self.gpu.join(self.stream, self.caller)
            self._joined = True

    def finish(self) -> None:
        """Copy back into tensors that are not contiguous, on the caller's stream."""
        for done in self._later:
            done()
        self._later.clear()


class GpuWork(Work):
    """A collective on a stream of its own, beside the caller's."""

    def __init__(self, gpu: GpuCalls, place: OnStream, x: Any, result: Any, captured: bool) -> None:
        self._gpu, self._place, self._x, self._result = gpu, place, x, result
        self._captured = captured
        self._event: int | None = gpu.device.make_event()
        gpu.device.record(self._event, place.stream)

    def wait(self, timeout: float | None = None) -> Any:
        """What the collective returns. What the current stream is given from now on comes after
        it; the host waits only where a `timeout` (s) is given. Raises what went wrong so far, or
        CollectiveTimeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while deadline is not None and not self.done():
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"the collective is not done after {timeout} s")
            time.sleep(_POLL)
        self._gpu.check()
        if self._event is not None:
            self._gpu.device.wait(self._event, stream_of(self._x))
        self._place.finish()
        return self._result

    def done(self) -> bool:
        return self._event is None or self._gpu.device.ready(self._event)

    def over(self) -> bool:
        """Whether nothing of it is under way; then its event is given back."""
        if self._captured or not self.done():
            return False
        self.free()
        return True

    def free(self) -> None:
        if self._event is not None:
            self._gpu.device.free_event(self._event)
            self._event = None
