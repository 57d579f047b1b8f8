"""The communicator that each rank holds."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from linkweave.collectives.calls import operations
from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.methods import Collectives
from linkweave.collectives.calls.request import NOTHING, Request
from linkweave.collectives.calls.subcommunicators import Order, Subcommunicators
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.gpu import device as cuda
from linkweave.collectives.runtime.gpu.team import Team
from linkweave.collectives.runtime.tensors import as_buffer, gpu_of, parse_shape, tensor_over
from linkweave.collectives.settings import Settings, topology_for
from linkweave.topology import Topology

log = logging.getLogger("linkweave")


class Communicator(Collectives):
    """The ranks of one machine, and the collectives among them.

    Every rank must make the same calls in the same order. On the CPU every call first compares what
    the ranks ask for; if that differs, every rank raises CollectiveError before data moves. On a
    GPU only the first call of each size, dtype, op and algorithm synchronises on the host and
    compares; later calls that differ end the communicator with an error.

    `settings` are the same on all ranks. A communicator is a context manager that closes it.
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
        self._before_close: list[Callable[[], None]] = []
        self._subcommunicators = Subcommunicators(
            arena, calls, self._inherited, self.topology, team,
            lambda arena, settings, team, order: Communicator(arena, settings, team, True, order),
        )  # fmt: skip
        self._calls.agree_on(Request("barrier", NOTHING))  # waits for all ranks
        arena.measure_cores()

    def __repr__(self) -> str:
        return f"<Communicator: rank {self.rank} of {self.size} on {self.topology.name}>"

    @property
    def timeout(self) -> float:
        """Longest wait for a peer, in seconds."""
        return self._calls.control.timeout

    def _inherited(self) -> Settings:
        """The settings of a part of the ranks."""
        if self._gpu is None:
            return self.settings
        sharing = self._gpu.team.gpu.sharing
        return replace(self.settings, timeout=self.settings.longest_on_gpus, sharing=sharing)

    def lead(self, stream: int) -> None:
        """Make later work on a CUDA stream wait for this communicator's calls on its GPU."""
        if self._gpu is not None:
            self._gpu.lead(stream)

    def follow(self, stream: int) -> None:
        """Make this communicator's later calls on its GPU wait for the work on a CUDA stream."""
        if self._gpu is None:
            self._before_gpu = stream
        else:
            self._gpu.follow(stream)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """An uninitialised CPU tensor in memory that all ranks share.

        shape: int or sequence of ints.
        dtype: a torch dtype, for a torch tensor; or else a NumPy dtype, for a NumPy array.

        A call is faster if every rank passes such a tensor, because it needs no staging. The tensor
        may come from any communicator of these ranks, their splits or their lanes. Its memory is
        freed with its last view. Ranks may call `empty` independently.
        Raises CollectiveError if the arguments are bad or the memory is exhausted.
        """
        self._health.check()
        dims, name, item = parse_shape(shape, dtype)
        return tensor_over(self._calls.block(math.prod(dims) * item), dims, name, dtype)

    def symmetric_empty(
        self, shape: int | Sequence[int], dtype: Any = "float32", *, device: Any = "cuda"
    ) -> Any:
        """An uninitialised GPU tensor in memory that the GPUs of all ranks can access.

        shape: int or sequence of ints; the same size in bytes on all ranks.
        dtype: a torch dtype, for a torch tensor; or else a NumPy dtype, for a CuPy array.
        device: "cuda" (this rank's GPU) or "cuda:N".

        All ranks must call it, but not during a capture. An all-reduce of this communicator writes
        results directly into such a tensor from other GPUs, if they can access the memory. In each
        call, either all ranks pass the same part of the same tensor or none passes one; else it may
        be overwritten before the difference is noticed. After a failure the contents are
        undefined until all ranks have closed the communicator. The memory is freed when the
        communicator is closed and the tensor deleted, so make a tensor once and reuse it.
        Raises CollectiveError on every rank if the arguments of one are bad, if sizes differ or if
        the memory is exhausted.
        """
        self._health.check()
        self._worker.drain()  # the exchange below must follow calls on the CPU
        with self._calls.sharing_errors():
            dims, name, item = parse_shape(shape, dtype)
            number, mine = cuda.gpu_named(str(device)), self._own_gpu()
            if number is None:
                number = cuda.current_device() if mine is None else mine
            elif mine not in (None, number):
                raise CollectiveError(f"rank {self.rank} runs on GPU {mine}, not on GPU {number}")
        raw = self._on_gpu(number).empty(math.prod(dims) * item)
        return tensor_over(raw, dims, name, dtype)

    def leave_cores(self) -> None:
        """From now on, a CPU call that waits for other ranks sleeps soon, for computations beside
        it. Where cores are idle, it may take longer."""
        self._calls.control.leave_cores()

    def offset_of(self, x: Any) -> int:
        """The offset in shared memory of a tensor from `empty`, in bytes; -1 for other tensors."""
        buffer, _ = as_buffer(x)
        return self._arena.mapping.offset_of(buffer.address, buffer.nbytes)

    def address_at(self, offset: int) -> int:
        """The address in this process of an offset from any rank's `offset_of`."""
        return self._arena.base + offset

    def in_place(self, kind: str, x: Any, op: str = "sum") -> None:
        """A "reduce_scatter" or "allgather" in place, of as many equal rows as there are ranks.

        A reduce-scatter leaves row r of the result in row r of `x` on rank r, and the other rows
        undefined; an all-gather takes row r of `x` from rank r. Errors as in `allreduce`.
        """
        again = partial(self._whole, kind, x, None, op, 0)
        self._call(again, False, x, operations.into, kind, x, op)

    def topology_for(self, x: Any) -> Topology:
        """The links between the ranks' CPUs or GPUs, whichever `x` is on."""
        gpu = gpu_of(x)
        return (self._calls if gpu is None else self._on_gpu(gpu)).planner.topology

    def exchange(self, x: Any, counts: Sequence[Sequence[int]], out: Any) -> None:
        """An `alltoall` of `x` to `out` on GPUs of `counts[src][dst]` rows from rank `src` to rank
        `dst`, the same on all ranks, which do not compare them."""
        self._submit(False, x, operations.exchange_on_gpu, x, counts, out)

    def sendrecv(self, x: Any, pairs: Sequence[tuple[int, int]]) -> None:
        """Send `x` from the source of each pair (source, target) to its target, in place.

        All ranks must call it with the same pairs, in which each is a source once at most, and a
        target once at most, and not both. `x` of other ranks is not changed. Tensors and errors as
        in `allreduce`.
        """
        self._submit(False, x, operations.sendrecv, x, tuple(tuple(pair) for pair in pairs))

    def split(self, color: int = 0) -> Communicator:
        """A communicator of the ranks that pass the same `color`, in the same order.

        All ranks must call it. Calls of several communicators may run at once; on GPUs every rank
        must make new kinds of calls on them in the same order. Tensors of `empty` are shared memory
        on all of them. Closing this communicator also closes its splits.
        Raises CollectiveError on every rank.
        """
        self._submit(False, None, lambda calls: None)  # waits for asynchronous calls
        part: Communicator = self._subcommunicators.split(color)
        return part

    def lanes(self, n: int) -> list[Communicator]:
        """`n` communicators of all ranks, for calls that run at once.

        All ranks must call it. All ranks must make the calls on all lanes in the same order, taken
        together. Each call compares that order, so ranks cannot deadlock by waiting in a circle.
        Calls on one lane run one after the other, from one thread at a time; a short call does not
        wait for a long one on another lane. If a call fails, all lanes end. See also `split`.
        Raises CollectiveError on every rank.
        """
        self._submit(False, None, lambda calls: None)
        return self._subcommunicators.lanes(n)

    def synchronize(self) -> None:
        """Block until this rank's calls on its GPU have finished, except replays of graphs.

        Raises their errors: CollectiveTimeout, CollectiveAborted or CollectiveError.
        """
        self._health.check()
        if self._gpu:
            self._gpu.synchronise()

    @property
    def closed(self) -> bool:
        """Whether the communicator is closed."""
        return self._health.closed

    @property
    def calls(self) -> HostCalls:
        """The object that makes its calls on CPU tensors."""
        return self._calls

    def before_close(self, call: Callable[[], None]) -> None:
        """Call `call` when `close` begins, while the communicator still works."""
        self._before_close.append(call)

    def close(self) -> None:
        """Finish asynchronous calls, tell waiting peers, and free all resources. May be repeated.

        A rank that has used a GPU waits a few seconds for the others to close as well, because
        their kernels write into its memory; if they do not, the memory is kept until the process
        ends. Errors of asynchronous calls that nobody has waited for are logged, and so are errors
        of CUDA if the communicator has failed before. In a process forked from a rank, it does
        nothing.
        """
        if self._health.closed or self._health.foreign:
            return
        known = self._health.broken
        try:
            with ExitStack() as last:  # in reverse order; if one step fails, the others still run
                last.callback(self._leave)
                last.callback(self._point_to_point.close)
                if self._gpu:
                    last.callback(self._gpu.close)
                last.callback(self._worker.close, self.rank)
                last.callback(self._subcommunicators.close)
                while self._before_close:
                    last.callback(self._before_close.pop())
        except (CollectiveError, RuntimeError) as error:
            if known is None:
                words = self._health.broken or f"rank {self.rank}: {error}"
                raise CollectiveError(f"closed after a failure ({words})") from error
            log.warning("rank %d, while closing: %s", self.rank, error)

    def _leave(self) -> None:
        self._calls.close()
        if self._team:
            self._team.leave()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abort(self, why: int) -> None:
        """Make current and future calls of every rank raise CollectiveAborted."""
        if not (self._health.closed or self._health.foreign):
            self._calls.control.give_up(why)
            self._subcommunicators.abort(why)
