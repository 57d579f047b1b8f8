"""The ranks of one process as a team: the last rank to make a call launches it for all of them.

Ranks that are threads of one process share its GPUs. A single launch per GPU must contain all of
its ranks: a kernel that waits for another kernel on the same GPU might wait for ever, as the other
one need not start. A process with one rank is a team of one.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from linkweave.collectives.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveTimeout,
    OutOfMemory,
)
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.gpu.device import Device
from linkweave.collectives.runtime.gpu.executor import Arguments, CallCounters, GpuRanks, Prepared
from linkweave.collectives.runtime.gpu.memory import SymmetricAddress, SymmetricMemory

_POLL = 0.05  # s
_PER_THREAD = 2  # cudaStreamPerThread
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class LaunchKey:
    """What is launched; equal on all ranks. `description` names it in error messages."""

    description: str
    plan: Plan
    nbytes: int
    dtype: str
    op: str
    width: int
    layers: tuple[int, ...] = ()  # bytes of each layer of a gradient queue
    seen: bool = False  # every rank sees the buffers of the ranks that it sends to
    captured: bool = False


@dataclass(frozen=True, slots=True)
class RankCall:
    """One rank's arguments of a call.

    `buffer` and `values` are device addresses: results are written to `buffer` and values read from
    `values`, which in place is the buffer itself. `begun` is an event for a call with layers, for
    which every `dequeue` waits.
    """

    call: LaunchKey
    buffer: int
    values: int
    stream: int
    symmetric: SymmetricAddress | None = None
    begun: int | None = None


@dataclass(frozen=True, slots=True)
class Repeat:
    """What a process with one rank enqueues to make a call once more."""

    mine: RankCall
    prepared: Prepared
    launches: tuple[Launch, ...]
    arguments: tuple[Arguments, ...]


class LaunchRefused(CollectiveError):
    """The calls of a process's ranks do not match. No data has moved; later calls may succeed."""


class _Rendezvous:
    """The ranks that have arrived at a call, and how its launch ended."""

    def __init__(self) -> None:
        self.came: dict[int, RankCall] = {}
        self.over = False
        self.error: BaseException | None = None
        self.counted: CallCounters | None = None


class Team:
    """The ranks that `gpu` runs; all of them must `launch` the same calls in the same order."""

    def __init__(self, gpu: GpuRanks) -> None:
        self.gpu = gpu
        self._prepared: dict[LaunchKey, Prepared] = {}
        self._forgotten: dict[LaunchKey, None] = {}
        self._changed = threading.Condition()
        self._children: dict[tuple[int, int], Team] = {}
        self._symmetric: dict[int, SymmetricMemory | Exception] = {}
        self._left = 0
        self._rendezvous = _Rendezvous()
        # recorded behind the streams of a call's ranks, then behind the latest launch
        self._events = {i: device.make_event() for i, (device, _) in gpu.shares.items()}
        self._resident: dict[tuple[str, str], list[int]] = {}  # as `GpuRanks.occupancy`

    def prepare(self, call: LaunchKey) -> Prepared:
        """Allocate a call's memory and tables. For a team of one, this is collective. Raises
        OutOfMemory."""
        if call not in self._prepared:
            self._prepared[call] = self.gpu.prepare(
                call.plan, call.nbytes, call.dtype, call.op, call.width, call.layers,
                call.seen or None, call.captured,
            )  # fmt: skip
        self._forgotten.pop(call, None)
        return self._prepared[call]

    def is_prepared(self, call: LaunchKey) -> bool:
        return call in self._prepared

    def undo(self, call: LaunchKey) -> None:
        """Free the tables of a call that has not been launched."""
        if (prepared := self._prepared.pop(call, None)) is not None:
            self.gpu.release(prepared)

    def forget(self, calls: Iterable[LaunchKey]) -> None:
        """Free the tables of calls, which `prepare` makes again; not those in CUDA graphs.

        Collective. Waits until the GPUs are idle. The tables of gradient queues are kept until no
        queue is in use.
        """
        with self._changed:
            self._forgotten |= dict.fromkeys(calls)
            queues = self.gpu.counters.lent
            gone = [c for c in self._forgotten if not (c.layers and queues)]
            for call in gone:
                del self._forgotten[call]
            found = [self._prepared.pop(call) for call in gone if call in self._prepared]
            for device, _ in self.gpu.shares.values() if found else ():
                device.finish()
            for prepared in found:
                self.gpu.release(prepared)

    def allocate_symmetric(self, number: int, nbytes: int) -> SymmetricMemory:
        """The `number`-th symmetric memory, allocated by the first rank of the team that asks.

        An error is raised on every rank of the team.
        """
        with self._changed:
            if number not in self._symmetric:
                try:
                    self._symmetric[number] = self.gpu.allocate_symmetric(nbytes)
                except Exception as error:
                    self._symmetric[number] = error
            found = self._symmetric[number]
        if isinstance(found, Exception):
            raise _copy_of(found) from found
        return found

    def launch(
        self, rank: int, mine: RankCall, patience: Callable[[str, int], None]
    ) -> CallCounters | None:
        """Enqueue a call on its CUDA stream; returns as soon as it is enqueued.

        Returns the counters for `dequeue` if the call has layers. While other ranks of this process
        have not made the call, `patience(what, peer)` is called periodically; it raises once that
        takes too long. Raises CollectiveError on every rank of the team if their calls differ.
        """
        if len(self.gpu.devices) == 1:
            return self._run({rank: mine})
        with self._changed:
            now = self._rendezvous
            now.came[rank] = mine
            if len(now.came) == len(self.gpu.devices):
                try:
                    now.counted = self._launch_together(now.came)
                    self._end(now)
                except MemoryError as error:  # before anything was launched
                    self._end(now, OutOfMemory(str(error) or "out of memory"))
                except RuntimeError as error:
                    self._end(now, self._named(error))
                except Exception as error:
                    self._end(now, error)
            try:
                while not now.over:
                    self._changed.wait(_POLL)
                    if not now.over:
                        late = next(r for r in self.gpu.devices if r not in now.came)
                        patience(mine.call.description, late)
            except BaseException as error:  # this rank's buffer must not be used any more
                self._end(now, error)
                raise
        if now.error is not None:
            raise _copy_of(now.error) from now.error
        return now.counted

    def _named(self, error: RuntimeError) -> CollectiveError:
        """An error from CUDA, with the GPUs that can no longer be used."""
        dead = []
        for index, (device, _) in self.gpu.shares.items():
            try:
                device.ready(self._events[index])
            except RuntimeError:
                dead.append(index)
        names = ", ".join(f"GPU {index}" for index in dead or self.gpu.shares)
        return CollectiveError(f"{names}: {error}")

    def _end(self, now: _Rendezvous, error: BaseException | None = None) -> None:
        now.over, now.error, self._rendezvous = True, error, _Rendezvous()
        self._changed.notify_all()

    def _run(self, came: dict[int, RankCall]) -> CallCounters | None:
        """Enqueue a call on each GPU, on the stream of its first rank, behind its ranks' streams.

        These streams then wait for the call.
        """
        ranks = [came[r] for r in self.gpu.devices]
        call, everyone = ranks[0].call, self._everyone(ranks[0])
        begun = {r: a.begun for r, a in came.items() if a.begun is not None}
        prepared = self.prepare(call)
        first = {i: came[mine[0]].stream for i, (_, mine) in self.gpu.shares.items()}
        others = [
            (device, self._events[i], first[i], other)
            for i, (device, mine) in self.gpu.shares.items()
            for other in {came[r].stream for r in mine} - {first[i]}
        ]
        launches = [] if call.captured else self._launches(call, prepared, first)

        def enqueue() -> CallCounters | None:
            for device, event, stream, other in others:
                device.record(event, other)
                device.wait(event, stream)
            return self.gpu.run(
                prepared, [a.buffer for a in ranks], first, begun=begun or None,
                inputs=[a.values for a in ranks], everyone=everyone,
            )  # fmt: skip

        counted = LAUNCH_ORDER.enqueue(launches, enqueue)
        for device, event, _, other in others:
            device.wait(event, other)
        return counted

    def _everyone(self, mine: RankCall) -> list[int]:
        """The addresses of all ranks' buffers, where they lie in symmetric memory."""
        if not (mine.call.seen and mine.symmetric):
            return []
        number, offset = mine.symmetric
        memory = self._symmetric[number]
        assert isinstance(memory, SymmetricMemory)
        return [address + offset for address in memory.addresses]

    def repeatable(self, mine: RankCall) -> Repeat:
        """A call that has been made, for `repeat`, by a team of one."""
        prepared = self.prepare(mine.call)
        launches = self._launches(mine.call, prepared, dict.fromkeys(self.gpu.shares, mine.stream))
        arguments = self.gpu.arguments(prepared, [mine.buffer], [mine.values], self._everyone(mine))
        return Repeat(mine, prepared, tuple(launches), tuple(arguments))

    def repeat(self, made: Repeat) -> None:
        """Enqueue a call once more, on the same stream."""
        streams = dict.fromkeys(self.gpu.shares, made.mine.stream)
        LAUNCH_ORDER.enqueue(
            made.launches, self.gpu.enqueue, made.prepared, made.arguments, streams
        )

    def _launches(
        self, call: LaunchKey, prepared: Prepared, streams: dict[int, int]
    ) -> list[Launch]:
        if (call.dtype, call.op) not in self._resident:
            found = [resident for _, resident in self.gpu.occupancy(call.dtype, call.op)]
            self._resident[call.dtype, call.op] = found
        each = zip(streams, prepared.parts, self._resident[call.dtype, call.op], strict=True)
        width = prepared.config.width
        return [
            Launch(part.device, streams[i], self._events[i], len(part.programs) * width, most)
            for i, part, most in each if part.programs
        ]  # fmt: skip

    def _launch_together(self, came: dict[int, RankCall]) -> CallCounters | None:
        calls = {a.call for a in came.values()}
        if len(calls) > 1:
            asked: dict[str, list[int]] = {}
            for rank, arrival in sorted(came.items()):
                asked.setdefault(arrival.call.description, []).append(rank)
            words = "; ".join(f"ranks {ranks}: {call}" for call, ranks in asked.items())
            raise LaunchRefused(f"the ranks' calls on the GPU differ: {words}")
        offsets = {rank: a.symmetric[1] for rank, a in sorted(came.items()) if a.symmetric}
        if len({*offsets.values()}) > 1:
            words = ", ".join(f"rank {rank}: {offset}" for rank, offset in offsets.items())
            raise LaunchRefused(
                f"the ranks' tensors lie at different bytes of shared memory: {words}"
            )
        streams = {a.stream for a in came.values()}
        if _PER_THREAD in streams:
            raise LaunchRefused(
                "cudaStreamPerThread is another stream on every thread; ranks that are "
                "threads need streams of their own"
            )
        for rank, device in self.gpu.devices.items():
            if len(streams) > 1 and device.capturing(came[rank].stream):
                raise LaunchRefused(
                    "ranks that are threads can be captured into a graph from one stream only"
                )
        return self._run(came)

    def child(self, key: tuple[int, int], ranks: Sequence[int]) -> Team:
        """The team of some of these ranks, renumbered from 0; one team for each key.

        It is closed when all of its ranks have left or this team is closed.
        """
        with self._changed:
            if key not in self._children:
                try:
                    gpus = self.gpu.like([self.gpu.devices[r] for r in ranks])
                    self._children[key] = Team(gpus)
                except RuntimeError as error:
                    raise self._named(error) from error
            return self._children[key]

    def leave(self) -> None:
        """Called by each rank that is done with the team; the last one closes it."""
        with self._changed:
            self._left += 1
            if self._left < len(self.gpu.devices):
                return
        self.close()

    def close(self) -> None:
        """Free all memory; no launch may be running. Can be called again."""
        self._prepared.clear()
        with ExitStack() as last:  # runs every callback even if one raises
            last.callback(self.gpu.close)
            while self._events:
                index, event = self._events.popitem()
                device, _ = self.gpu.shares[index]
                LAUNCH_ORDER.forget(device, event)
                last.callback(device.free_event, event)
            while self._children:
                last.callback(self._children.popitem()[1].close)


def _copy_of(error: BaseException) -> CollectiveError:
    """The same error as a new object, since each rank raises its own."""
    if isinstance(error, CollectiveTimeout | CollectiveAborted):
        return type(error)(str(error), **error.fields())
    kinds = LaunchRefused, OutOfMemory
    return next((k for k in kinds if isinstance(error, k)), CollectiveError)(str(error))


class Launch(NamedTuple):
    """A launch of `blocks` thread blocks on `stream`; the GPU holds `resident` of its kernel.

    `event` is recorded behind it. Each communicator has one event for each GPU.
    """

    device: Device
    stream: int
    event: int
    blocks: int
    resident: int


class LaunchOrder:
    """Orders the launches of all communicators of a process.

    One call at a time enqueues its launches, on all of its GPUs; so calls have the same order on
    every GPU of the process. On each GPU a launch waits for earlier ones of other communicators,
    unless it fits beside all that may be running: since kernels differ in size, the thread blocks
    of all together may not exceed the least number that the GPU holds of one kernel.

    Nothing orders calls across processes: all processes must make the calls of communicators that
    share GPUs in the same order. Otherwise calls that do not fit beside each other, or whose
    streams CUDA maps to one queue, raise CollectiveTimeout. The caller orders launches that are
    captured into CUDA graphs, and captures while no other thread calls: events are queried here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Device, dict[int, Launch]] = defaultdict(dict)  # by event

    def enqueue(
        self, launches: Sequence[Launch], body: Callable[..., _Result], *args: Any
    ) -> _Result:
        """Call `body(*args)`, which enqueues these launches, one for each GPU of a call."""
        with self._lock:
            for launch in launches:
                self._wait_for_others(launch)
            try:
                return body(*args)
            finally:  # some may have been enqueued before one failed
                for launch in launches:
                    self._record(launch)

    def _record(self, launch: Launch) -> None:
        launch.device.record(launch.event, launch.stream)
        running = self._running[launch.device]
        before = running.get(launch.event)  # may still be running
        if before is not None and before is not launch:
            most = max(before.blocks, launch.blocks)
            least = min(before.resident, launch.resident)
            launch = launch._replace(blocks=most, resident=least)
        running[launch.event] = launch

    def _wait_for_others(self, launch: Launch) -> None:
        if self._fits(launch):
            return
        running = self._running[launch.device]
        for event in [event for event in running if launch.device.ready(event)]:
            del running[event]
        if not self._fits(launch):
            for event in running.keys() - {launch.event}:
                launch.device.wait(event, launch.stream)

    def _fits(self, launch: Launch) -> bool:
        """Whether it fits beside the launches of other communicators that may be running."""
        running = self._running[launch.device]
        others = [other for event, other in running.items() if event != launch.event]
        if not others:
            return True
        blocks = launch.blocks + sum(other.blocks for other in others)
        return blocks <= min(launch.resident, *(other.resident for other in others))

    def forget(self, device: Device, event: int) -> None:
        """Called before a communicator's event is freed, when its launches have finished."""
        with self._lock:
            self._running[device].pop(event, None)


LAUNCH_ORDER = LaunchOrder()
"""The order of this process's launches."""
