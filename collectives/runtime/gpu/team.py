"""The ranks of one process that call GPU collectives: the last one to call launches for all.

A process with one rank is a team of one. Ranks that are threads of one process share its GPUs, and
one launch a GPU must hold all of them: a launch that waited for another one on the same GPU might
never see it start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from linkweave.collectives.errors import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.gpu.counters import Counted
from linkweave.collectives.runtime.gpu.executor import GpuRanks, Prepared
from linkweave.collectives.runtime.gpu.memory import Shared, Spot

_POLL = 0.05  # s
_PER_THREAD = 2  # cudaStreamPerThread


@dataclass(frozen=True, slots=True)
class Call:
    """What is launched; equal on all ranks. `said` is it in words."""

    said: str
    plan: Plan
    nbytes: int
    dtype: str
    op: str
    width: int
    layers: tuple[int, ...] = ()  # bytes of each, for a gradient queue
    seen: bool = False  # all ranks' buffers, by those that write them


@dataclass(frozen=True, slots=True)
class Arrival:
    """One rank's side of a call. `values`: where they are read; in place the buffer itself."""

    call: Call
    buffer: int
    values: int
    stream: int
    spot: Spot | None = None
    begun: int | None = None
    """An event for a call with layers, behind which its `dequeue`s may follow."""


class Refused(CollectiveError):
    """Calls of ranks of one process that do not go together; nothing has moved, all may go on."""


class _Round:
    """One call, from the first rank's arrival to the launch."""

    def __init__(self) -> None:
        self.came: dict[int, Arrival] = {}
        self.over = False
        self.error: BaseException | None = None
        self.counted: Counted | None = None


class Team:
    """`gpu` runs the ranks of this process; all of them must `launch` the same calls in order."""

    def __init__(self, gpu: GpuRanks) -> None:
        self.gpu = gpu
        self._prepared: dict[Call, Prepared] = {}
        self._held: set[Call] = set()  # by graphs
        self._forgotten: dict[Call, None] = {}
        self._changed = threading.Condition()
        self._children: dict[tuple[int, int], Team] = {}
        self._shared: dict[int, Shared | Exception] = {}
        self._left = 0
        self._round = _Round()
        self._meeting = {i: device.make_event() for i, (device, _) in gpu.shares.items()}

    def prepare(self, call: Call) -> Prepared:
        """Memory and tables of a call. In a team of one, all ranks must prepare it together."""
        if call not in self._prepared:
            self._prepared[call] = self.gpu.prepare(
                call.plan, call.nbytes, call.dtype, call.op, call.width, call.layers,
                call.seen or None,
            )  # fmt: skip
        self._forgotten.pop(call, None)
        return self._prepared[call]

    def hold(self, call: Call) -> None:
        """A graph is to launch it again and again: it stays prepared."""
        self._held.add(call)

    def forget(self, calls: Iterable[Call]) -> None:
        """Give back the tables of calls that all ranks would prepare anew, but for those that
        graphs hold. Waits for earlier calls, all of which have been launched on all ranks. Those
        of gradient queues stay until none is under way."""
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

    def share(self, number: int, nbytes: int) -> Shared:
        """The `number`-th piece of memory for tensors, which the first rank that asks makes for all
        ranks of this process. Raises the same on all of them."""
        with self._changed:
            if number not in self._shared:
                try:
                    self._shared[number] = self.gpu.share(nbytes)
                except Exception as error:
                    self._shared[number] = error
            found = self._shared[number]
        if isinstance(found, Exception):
            raise _again(found) from found
        return found

    def launch(
        self, rank: int, mine: Arrival, patience: Callable[[str, int], None]
    ) -> Counted | None:
        """Enqueue a call behind what its stream holds; what that is given later comes behind it.

        Returns once it is enqueued, for a call with layers the counters for `dequeue`.
        `patience(what, peer)` is called again and again while ranks of this process are missing,
        and raises when that has lasted too long. Raises CollectiveError on all of them where their
        calls differ.
        """
        if len(self.gpu.devices) == 1:
            return self._run({rank: mine}, mine.stream)
        with self._changed:
            now = self._round
            now.came[rank] = mine
            if len(now.came) == len(self.gpu.devices):
                self._end(now, self._launch_all(now))
            try:
                while not now.over:
                    self._changed.wait(_POLL)
                    if not now.over:
                        late = next(r for r in self.gpu.devices if r not in now.came)
                        patience(mine.call.said, late)
            except BaseException as error:  # nobody may launch onto a buffer that is given up
                self._end(now, error)
                raise
        if now.error is not None:
            raise _again(now.error) from now.error
        return now.counted

    def _end(self, now: _Round, error: BaseException | None) -> None:
        now.over, now.error, self._round = True, error, _Round()
        self._changed.notify_all()

    def _launch_all(self, now: _Round) -> Exception | None:
        """What went wrong, if anything did."""
        try:
            now.counted = self._launch_together(now.came)
        except Exception as error:
            return error
        return None

    def _run(self, came: dict[int, Arrival], stream: int | dict[int, int]) -> Counted | None:
        """Launch one call of all ranks."""
        arrivals = [came[r] for r in self.gpu.devices]
        call, spot, everyone = arrivals[0].call, arrivals[0].spot, []
        if call.seen and spot:
            shared = self._shared[spot[0]]
            assert isinstance(shared, Shared)
            everyone = [address + spot[1] for address in shared.addresses]
        begun = {r: a.begun for r, a in came.items() if a.begun is not None}
        return self.gpu.run(
            self.prepare(call), [a.buffer for a in arrivals], stream, begun=begun or None,
            inputs=[a.values for a in arrivals], everyone=everyone,
        )  # fmt: skip

    def _launch_together(self, came: dict[int, Arrival]) -> Counted | None:
        calls = {a.call for a in came.values()}
        if len(calls) > 1:
            asked: dict[str, list[int]] = {}
            for rank, arrival in sorted(came.items()):
                asked.setdefault(arrival.call.said, []).append(rank)
            words = "; ".join(f"ranks {ranks}: {said}" for said, ranks in asked.items())
            raise Refused(f"the ranks' calls on the GPU differ: {words}")
        spots = {rank: a.spot[1] for rank, a in sorted(came.items()) if a.spot}
        if len({*spots.values()}) > 1:
            words = ", ".join(f"rank {rank}: {offset}" for rank, offset in spots.items())
            raise Refused(f"the ranks' tensors lie at different bytes of shared memory: {words}")
        streams = {a.stream for a in came.values()}
        if _PER_THREAD in streams:
            raise Refused(
                "cudaStreamPerThread is another stream on every thread; ranks that are "
                "threads need streams of their own"
            )
        for rank, device in self.gpu.devices.items():
            if len(streams) > 1 and device.capturing(came[rank].stream):
                raise Refused(
                    "ranks that are threads can be captured into a graph from one stream only"
                )
        first = {i: came[ranks[0]].stream for i, (_, ranks) in self.gpu.shares.items()}
        others = {
            i: {came[r].stream for r in ranks} - {first[i]}
            for i, (_, ranks) in self.gpu.shares.items()
        }
        for i, (device, _) in self.gpu.shares.items():
            for other in others[i]:
                device.record(self._meeting[i], other)
                device.wait(self._meeting[i], first[i])
        counted = self._run(came, first)
        for i, (device, _) in self.gpu.shares.items():
            if others[i]:
                device.record(self._meeting[i], first[i])
            for other in others[i]:
                device.wait(self._meeting[i], other)
        return counted

    def child(self, key: tuple[int, int], ranks: Sequence[int]) -> Team:
        """The team of some of these ranks, numbered anew; the same one for all that say the same
        key. It is closed when all of them have left, or with this one."""
        with self._changed:
            if key not in self._children:
                self._children[key] = Team(self.gpu.like([self.gpu.devices[r] for r in ranks]))
            return self._children[key]

    def leave(self) -> None:
        """One rank is done with it; with the last one it is closed."""
        with self._changed:
            self._left += 1
            if self._left < len(self.gpu.devices):
                return
        self.close()

    def close(self) -> None:
        """Give all memory back; nothing may be running. May be repeated."""
        self._prepared.clear()
        with ExitStack() as last:  # all of it, whatever fails
            last.callback(self.gpu.close)
            while self._meeting:
                index, event = self._meeting.popitem()
                last.callback(self.gpu.shares[index][0].free_event, event)
            while self._children:
                last.callback(self._children.popitem()[1].close)


def _again(error: BaseException) -> CollectiveError:
    """The same error for another rank, as each raises one of its own."""
    if isinstance(error, CollectiveTimeout | CollectiveAborted):
        return type(error)(str(error), **error.fields())
    return Refused(str(error)) if isinstance(error, Refused) else CollectiveError(str(error))
