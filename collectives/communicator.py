"""What users hold: a Communicator, one on each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.parts import Order, Parts
from linkweave.collectives.calls.request import NOTHING, Request
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.methods import Collectives
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.gpu import executor as cuda
from linkweave.collectives.runtime.gpu.team import Team
from linkweave.collectives.settings import Settings, topology_for
from linkweave.collectives.tensors import as_buffer, layout_of, shaped


class Communicator(Collectives):
    """The ranks of one machine, and the collectives among them.

    A context manager; `close` ends it. Every rank must make the same calls in the same order. On
    the CPU each call begins by comparing what all ranks ask for; where they differ, every rank
    raises CollectiveError before any data moves. On a GPU the first call of each kind does so;
    later calls that differ end the communicator with an error. What may be set: `Settings`.
    """

    def __init__(
        self, arena: Arena, settings: Settings | None = None, team: Team | None = None,
        part: bool = False, order: Order = int,
    ) -> None:  # fmt: skip
        settings = settings or Settings()
        self.topology = topology_for(settings.topology, arena.size)
        calls = HostCalls(arena, self.topology, settings, order)
        super().__init__(calls, settings, team, part)
        self._arena = arena
        self._parts = Parts(
            arena, calls, settings, self.topology, team,
            lambda arena, settings, team, order: Communicator(arena, settings, team, True, order),
        )  # fmt: skip
        self._calls.meet(Request("barrier", NOTHING))  # all have come

    @property
    def timeout(self) -> float:
        """Seconds that a wait for a peer may last."""
        return self.settings.timeout

    # ---- memory ------------------------------------------------------------------------------
    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """An uninitialised CPU tensor in memory that all ranks share, which needs no staging.

        A torch dtype gives a torch tensor, anything else a NumPy array. A call is faster where
        every rank passes one of these, whichever communicator of these ranks made it: this one, or
        one of its splits or lanes. Its memory is given back when it and its views are gone. Each
        rank calls it by itself. Raises CollectiveError.
        """
        self._health.check()
        dims, name, item = layout_of(shape, dtype)
        return shaped(self._calls.block(math.prod(dims) * item), dims, name, dtype)

    def symmetric_empty(
        self, shape: int | Sequence[int], dtype: Any = "float32", *, device: Any = "cuda"
    ) -> Any:
        """An uninitialised GPU tensor in memory that the GPUs of all ranks see; all must call it.

        `device`: "cuda" (this rank's GPU) or "cuda:N". A torch dtype gives a torch tensor, anything
        else a CuPy array. This communicator's all-reduces of one such tensor write results there
        from other ranks' GPUs, past the slots; where a GPU does not see the memory, it is memory
        like any other. Not to be called while a graph is captured. Either all ranks pass the same
        part of the same tensor to a call or none does: else it may be overwritten before that is
        noticed. After a failure its contents are undefined until all ranks have closed the
        communicator. Make it once and use it often: the memory is given back when the communicator
        is closed and the tensor gone. Raises CollectiveError, on every rank, where one's arguments
        are bad, sizes differ or there is no room.
        """
        self._health.check()
        self._worker.settle()  # what tells the others comes behind calls on the CPU
        with self._calls.telling():
            dims, name, item = layout_of(shape, dtype)
            number, mine = cuda.gpu_named(str(device)), self._own_gpu()
            if number is None:
                number = cuda.current_device() if mine is None else mine
            elif mine not in (None, number):
                raise CollectiveError(f"rank {self.rank} runs on GPU {mine}, not on GPU {number}")
        raw = self._on_gpu(number).empty(math.prod(dims) * item)
        return shaped(raw, dims, name, dtype)

    def offset_of(self, x: Any) -> int:
        """Where a tensor of `empty` lies in the shared memory, in bytes; -1 for any other."""
        buffer, _ = as_buffer(x)
        return self._arena.mapping.offset_of(buffer.address, buffer.nbytes)

    def address_at(self, offset: int) -> int:
        """The address at which this process sees that context, on whichever rank it was made."""
        return self._arena.base + offset

    # ---- parts -------------------------------------------------------------------------------
    def split(self, color: int = 0) -> Communicator:
        """A communicator of the ranks that give the same `color`, in the same order.

        All ranks must call it. It has flags, slots and streams of its own, so calls of several
        communicators may be under way at once; on GPUs every rank must make new kinds of calls on
        them in the same order. Tensors of `empty` are shared memory on all of them. It is closed at
        the latest with this one. Raises CollectiveError, on every rank.
        """
        self._submit(False, None, lambda calls: None)  # behind what is under way
        part: Communicator = self._parts.split(color)
        return part

    def lanes(self, n: int) -> list[Communicator]:
        """`n` communicators of all ranks, for calls that are under way at once.

        All ranks must call it, and make the calls on all lanes together in the same order, which
        each call compares: so the ranks cannot wait for each other in a circle. Calls of one lane
        follow each other, one thread at a time; a short call on one does not wait for a long one on
        another. Where a call fails, all of these lanes end. The rest as for `split`. Raises
        CollectiveError, on every rank.
        """
        self._submit(False, None, lambda calls: None)
        return self._parts.lanes(n)

    def synchronize(self) -> None:
        """Wait until this rank's calls on its GPU are over, but for replays of graphs. Raises what
        went wrong there: CollectiveTimeout, CollectiveAborted or CollectiveError."""
        self._health.check()
        if self._gpu:
            self._gpu.synchronise()

    # ---- lifetime ----------------------------------------------------------------------------
    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._health.closed

    @property
    def calls(self) -> HostCalls:
        """What carries out its calls on CPU tensors."""
        return self._calls

    def close(self) -> None:
        """Finish what runs asynchronously, tell waiting peers, and let go. May be repeated.

        A rank that has used a GPU waits some seconds for the others to close as well, as their
        kernels write into its memory; if they do not, that stays until the process ends. Errors of
        asynchronous calls that nobody has waited for are logged. In a process that was forked from
        a rank it does nothing.
        """
        if self._health.closed or self._health.foreign:
            return
        with ExitStack() as last:  # backwards, and all of it, whatever fails
            last.callback(self._leave)
            last.callback(self._point_to_point.close)
            if self._gpu:
                last.callback(self._gpu.close)
            last.callback(self._worker.close, self.rank)
            last.callback(self._parts.close)

    def _leave(self) -> None:
        self._calls.close()
        if self._team:
            self._team.leave()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abort(self, why: int) -> None:
        """Make every rank's present and future calls raise CollectiveAborted."""
        if not (self._health.closed or self._health.foreign):
            self._calls.control.give_up(why)
            self._parts.abort(why)
