"""The ranks of one process as a team: the last rank to make a call launches it for all of them.

Ranks that are threads of one process share its GPUs. A single launch per GPU must contain all of
its ranks: a kernel that waits for another kernel on the same GPU might wait for ever, as the other
one need not start. A process with one rank is a team of one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.gpu.counters import CallCounters
from linkweave.collectives.runtime.gpu.executor import GpuRanks, Prepared
from linkweave.collectives.runtime.gpu.memory import SymmetricAddress, SymmetricMemory

_POLL = 0.05  # s
_PER_THREAD = 2  # cudaStreamPerThread


@dataclass(frozen=True, slots=True)
class Call:
    """What is launched; equal on all ranks. `description` names it in error messages."""

    description: str
    plan: Plan
    nbytes: int
    dtype: str
    op: str
    width: int
    layers: tuple[int, ...] = ()  # bytes of each layer of a gradient queue
    seen: bool = False  # every rank sees the buffers of the ranks that it sends to


@dataclass(frozen=True, slots=True)
class RankCall:
    """One rank's arguments of a call.

    `buffer` and `values` are device addresses: results are written to `buffer` and values read from
    `values`, which in place is the buffer itself. `begun` is an event for a call with layers, for
    which every `dequeue` waits.
    """

    call: Call
    buffer: int
    values: int
    stream: int
    symmetric: SymmetricAddress | None = None
    begun: int | None = None


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
        self._prepared: dict[Call, Prepared] = {}
        self._held: set[Call] = set()  # calls in CUDA graphs
        self._forgotten: dict[Call, None] = {}
        self._changed = threading.Condition()
        self._children: dict[tuple[int, int], Team] = {}
        self._symmetric: dict[int, SymmetricMemory | Exception] = {}
        self._left = 0
        self._rendezvous = _Rendezvous()
        self._joins = {i: device.make_event() for i, (device, _) in gpu.shares.items()}

    def prepare(self, call: Call) -> Prepared:
        """Allocate a call's memory and tables. For a team of one, this is collective."""
        if call not in self._prepared:
            self._prepared[call] = self.gpu.prepare(
                call.plan, call.nbytes, call.dtype, call.op, call.width, call.layers,
                call.seen or None,
            )  # fmt: skip
        self._forgotten.pop(call, None)
        return self._prepared[call]

    def hold(self, call: Call) -> None:
        """Keep a call prepared for good, since a CUDA graph launches it again."""
        self._held.add(call)

    def forget(self, calls: Iterable[Call]) -> None:
        """Free the tables of calls that CUDA graphs do not hold; `prepare` makes them again.

        Collective. Waits until the GPUs are idle. The tables of gradient queues are kept until no
        queue is in use.
        """
        with self._changed:
            self._forgotten |= dict.fromkeys(c for c in calls if c not in self._held)
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
            return self._run({rank: mine}, mine.stream)
        with self._changed:
            now = self._rendezvous
            now.came[rank] = mine
            if len(now.came) == len(self.gpu.devices):
                try:
                    now.counted = self._launch_together(now.came)
                    self._end(now)
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

    def _end(self, now: _Rendezvous, error: BaseException | None = None) -> None:
        now.over, now.error, self._rendezvous = True, error, _Rendezvous()
        self._changed.notify_all()

    def _run(self, came: dict[int, RankCall], stream: int | dict[int, int]) -> CallCounters | None:
        ranks = [came[r] for r in self.gpu.devices]
        call, symmetric, everyone = ranks[0].call, ranks[0].symmetric, []
        if call.seen and symmetric:
            memory = self._symmetric[symmetric[0]]
            assert isinstance(memory, SymmetricMemory)
            everyone = [address + symmetric[1] for address in memory.addresses]
        begun = {r: a.begun for r, a in came.items() if a.begun is not None}
        return self.gpu.run(
            self.prepare(call), [a.buffer for a in ranks], stream, begun=begun or None,
            inputs=[a.values for a in ranks], everyone=everyone,
        )  # fmt: skip

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
        first = {i: came[ranks[0]].stream for i, (_, ranks) in self.gpu.shares.items()}
        others = {
            i: {came[r].stream for r in ranks} - {first[i]}
            for i, (_, ranks) in self.gpu.shares.items()
        }
        for i, (device, _) in self.gpu.shares.items():
            for other in others[i]:
                device.record(self._joins[i], other)
                device.wait(self._joins[i], first[i])
        counted = self._run(came, first)
        for i, (device, _) in self.gpu.shares.items():
            if others[i]:
                device.record(self._joins[i], first[i])
            for other in others[i]:
                device.wait(self._joins[i], other)
        return counted

    def child(self, key: tuple[int, int], ranks: Sequence[int]) -> Team:
        """The team of some of these ranks, renumbered from 0; one team for each key.

        It is closed when all of its ranks have left or this team is closed.
        """
        with self._changed:
            if key not in self._children:
                self._children[key] = Team(self.gpu.like([self.gpu.devices[r] for r in ranks]))
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
            while self._joins:
                index, event = self._joins.popitem()
                last.callback(self.gpu.shares[index][0].free_event, event)
            while self._children:
                last.callback(self._children.popitem()[1].close)


def _copy_of(error: BaseException) -> CollectiveError:
    """The same error as a new object, since each rank raises its own."""
    if isinstance(error, CollectiveTimeout | CollectiveAborted):
        return type(error)(str(error), **error.fields())
    kind = LaunchRefused if isinstance(error, LaunchRefused) else CollectiveError
    return kind(str(error))
