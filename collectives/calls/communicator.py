"""The communicator that each rank holds, and the default one, the only global state."""

from __future__ import annotations

import atexit
import json
import logging
import math
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from inspect import signature
from itertools import count
from typing import Any, cast

from linkweave.collectives.calls import operations
from linkweave.collectives.calls.gpu import GpuCalls
from linkweave.collectives.calls.host import Again, HostCalls
from linkweave.collectives.calls.methods import Methods
from linkweave.collectives.calls.point_to_point import PointToPoint
from linkweave.collectives.calls.request import NOTHING, How, Request
from linkweave.collectives.calls.sparse.allreduce import (
    agree,
    host_sparse_allreduce,
    sparse_allreduce,
)
from linkweave.collectives.calls.work import GradientQueue, HostQueue, Work, Worker
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.cpu.layer_counters import LayerCounters
from linkweave.collectives.runtime.cpu.mapping import SEGMENT
from linkweave.collectives.runtime.diagnose import INTERRUPTED, RAISED
from linkweave.collectives.runtime.gpu import device as cuda
from linkweave.collectives.runtime.gpu.team import Team
from linkweave.collectives.runtime.tensors import as_buffer, gpu_of, parse_shape, tensor_over
from linkweave.collectives.runtime.uncompiled import uncompiled, uncompiled_methods
from linkweave.collectives.settings import Settings, topology_for
from linkweave.topology import Topology, load
from linkweave.topology.checks import integer
from linkweave.topology.graph import connects

log = logging.getLogger("linkweave")
MOST_LANES = 64


@uncompiled_methods
class Communicator(Methods):
    """The ranks of one machine, and the collectives among them.

    Every rank must make the same calls in the same order. On the CPU every call first compares what
    the ranks ask for; if that differs, every rank raises CollectiveError before data moves. On a
    GPU only the first call of each size, dtype, op and algorithm synchronises on the host and
    compares; later calls that differ end the communicator with an error.

    `settings` are the same on all ranks. A communicator is a context manager that closes it.
    """

    _calls: HostCalls

    def __init__(
        self, arena: Arena, settings: Settings | None = None, team: Team | None = None,
        part: bool = False, order: Callable[[], int] = int,
    ) -> None:  # fmt: skip
        """`team` is set if the ranks are threads of this process. A `part` does not repeat warnings
        of the whole. `order` numbers the calls of all lanes together; elsewhere it gives 0."""
        self.settings = settings = settings or Settings()
        self.topology = topology_for(settings.topology, arena.size)
        self._calls = calls = HostCalls(arena, self.topology, settings, order)
        self.rank, self.size, self._health = calls.rank, calls.size, calls.health
        self._arena, self._team, self._part = arena, team, part
        self._gpu: GpuCalls | None = None  # created by the first call on a GPU
        self._follows: set[int] = set()  # the CUDA streams that it waits for
        self._lock, self._worker = threading.Lock(), Worker()
        self._point_to_point = PointToPoint(calls, settings)
        self._before_close: list[Callable[[], None]] = []
        self._parts = []
        self._made = 0
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

    def run(
        self, plan: Plan, x: Any, op: str = "sum", *, out: Any = None, async_op: bool = False
    ) -> Any:
        """All-reduce, broadcast or reduce `x` by your own plan, in place.

        plan: from `plan_allreduce`, from `Plan.from_json` or made by hand; for as many ranks as
            there are, and the same on all of them. It is verified before it runs. Messages that
            exceed a 64 KiB slot are cut into more groups of chunks.
        op, out, async_op, rounding: as in `allreduce`.

        Returns as `allreduce` does.
        Raises as `allreduce` does; PlanError if the plan is wrong; CollectiveError with
        order="fixed".
        """
        root = plan.root if isinstance(plan, Plan) and isinstance(plan.root, int) else 0
        return self._submit(async_op, x, operations.run, plan, x, op, root, out)

    def allreduce_queue(
        self, x: Any, layers: Sequence[int], op: str = "sum", *, algorithm: How = "auto"
    ) -> GradientQueue:
        """Start an in-place `allreduce` of `x` whose layers can be used as soon as each is final.

        x: contiguous tensor.
        layers: number of elements of each layer, in the order in which the layers are in `x`.
            Chunks arrive in about that order.
        op, algorithm, rounding: as in `allreduce`. Of algorithms with nearly the same predicted
            time, "auto" takes the one whose first chunk is final first.

        Returns a `GradientQueue`: `dequeue` waits for one layer, `wait` for all of them; on the CPU
        these raise what `allreduce` raises, also for arguments.
        Source: C-Cube, section III-D.
        """
        if gpu_of(x) is not None:
            queue = self._submit(True, x, operations.queued, x, layers, op, algorithm)
            return cast(GradientQueue, queue)
        self._health.check()
        arrivals = LayerCounters()
        future = self._enqueue(operations.queued, x, layers, op, algorithm, arrivals)
        return HostQueue(future, arrivals, self._calls.control.arena.abort_address)

    def send(self, x: Any, to: int, *, async_op: bool = False) -> Work | None:
        """Send `x` to rank `to`, which must call `recv`. Only these two ranks take part.

        x: CPU tensor. The receiver's has as many elements and the same dtype.
        to: rank.
        async_op: return a `Work` at once.

        Returns when `x` may be overwritten. Messages from one rank to another arrive in order.
        Raises as `allreduce` does.
        """
        return self._point_to_point.submit(x, self.rank, to, async_op)

    def recv(self, x: Any, source: int, *, async_op: bool = False) -> Work | None:
        """Receive into `x` what rank `source` sends. Arguments and errors as in `send`."""
        return self._point_to_point.submit(x, source, self.rank, async_op)

    def sparse_allreduce(
        self, values: Any, indices: Any, numel: int, k: int, op: str = "sum", *,
        residual: Any = None, mode: str = "auto", conserve: bool = True, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Sum sparse vectors over all ranks. Every rank gets the same bits.

        values: float32, float16 or bfloat16, shape [n], on the CPU or this rank's GPU.
        indices: int32, shape [n], strictly ascending, below `numel`.
        numel: length of the dense vector, below 2^31.
        k: number of entries that mode "gtopk" keeps.
        op: "sum" or "avg". The average is divided in float32 at the end.
        residual: float32, `numel` elements, contiguous; receives what the call drops.
        mode: "gtopk", k entries of the sum, by a tree of merges that keep the k largest each: not
            always the k largest of the whole sum; "topk", the whole sum by an all-gather; "dense",
            the whole sum without zeros by a dense all-reduce in float32; "auto", the one with the
            shortest predicted time (`explain` with k).
        conserve: this rank's entries whose indices are not in the result go back to its residual;
            what a merge cuts of an index that is in the result goes to the residual of the rank
            that merges. So the result and all residuals add up to the inputs. If False, the latter
            is lost, as in the paper.
        async_op: return a `Work` whose `wait` returns the result. CPU tensors only.

        Returns (values, indices) in the library and dtype of the input. On a GPU the host waits
        twice, for the check of the indices and for the size of the result, whatever the number of
        ranks; so the call cannot be captured into a graph.
        Rounding: 16-bit values are added in float32 and rounded once at each merge. An entry takes
        8 bytes on the wire, or 6 with 16-bit values.
        Raises as `allreduce` does.
        Source: Shi et al., gTop-k S-SGD, algorithms 3 and 4.
        """
        arguments = (values, indices, numel, k, op, residual, mode, conserve)
        if (index := gpu_of(values)) is None:
            return self._submit(async_op, None, host_sparse_allreduce, *arguments)
        self._worker.drain()  # then this thread runs the call, on the caller's stream
        with self._calls.sharing_errors():
            self._refuse_other_gpu(index)
            if async_op:
                raise CollectiveError("an asynchronous sparse_allreduce takes CPU tensors only")
        call = self._submit(False, None, agree, *arguments)
        return self._submit(False, values, sparse_allreduce, call)

    def _on_gpu(self, number: int) -> GpuCalls:
        """This rank's calls on its GPU. The first one synchronises the ranks."""
        self._refuse_other_gpu(number)
        with self._lock:
            self._worker.drain()  # ranks may synchronise, which must keep the order of calls
            if self._gpu is None:
                self._gpu = GpuCalls(number, self._calls, self.settings, self._team, self._part)
                for stream in self._follows:
                    self._gpu.follow(stream)
            return self._gpu

    def _own_gpu(self) -> int | None:
        if self._team:
            return self._team.gpu.devices[self.rank].index
        return self._gpu.index if self._gpu else None

    def _refuse_other_gpu(self, number: int) -> None:
        if (mine := self._own_gpu()) not in (None, number):
            raise CollectiveError(
                f"rank {self.rank} runs on GPU {mine}; the tensor is on GPU {number}"
            )

    def _submit(
        self, async_op: bool, x: Any, body: Callable[..., Any], *args: Any,
        again: Callable[[], Again | None] | None = None,
    ) -> Any:  # fmt: skip
        self._health.check()
        if (index := gpu_of(x)) is not None:
            return self._on_gpu(index).submit(async_op, x, body, *args)
        order = self._calls.next_order()  # in this thread, so that it is the order of the calls
        return self._worker.submit(async_op, self._calls.carry_out, order, again, body, *args)

    def _enqueue(self, body: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `body` on the worker thread, after the calls before it."""
        order = self._calls.next_order()  # in this thread, so that it is the order of the calls
        return self._worker.enqueue(self._calls.carry_out, order, None, body, *args)

    def lead(self, stream: int) -> None:
        """Make later work on a CUDA stream wait for this communicator's calls on its GPU."""
        if self._gpu is not None:
            self._gpu.lead(stream)

    def follow(self, stream: int) -> None:
        """Make this communicator's later calls on its GPU wait for the work on a CUDA stream: the
        first one ever for all that is there by then."""
        if self._gpu is None:
            self._follows.add(stream)
        else:
            self._gpu.follow(stream)

    @property
    def uses_gpu(self) -> bool:
        """Whether it has made calls on its GPU."""
        return self._gpu is not None

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
        on all of them. Calls on one communicator are made from one thread at a time: give each
        thread a split. A split that is dropped keeps its memory and thread until this communicator
        closes it.
        Raises CollectiveError on every rank.
        """
        self._submit(False, None, lambda calls: None)  # waits for asynchronous calls
        with self._calls.sharing_errors():
            number = integer(color, "color")
        colors = [int(row) for row in self._calls.gather("colors", str(number).encode())]
        groups = [[r for r, c in enumerate(colors) if c == one] for one in dict.fromkeys(colors)]
        for ranks in groups:
            self._check_joined(ranks)  # raises on all ranks alike
        ((ranks, start),) = self._segments(groups)
        return self._new_part(ranks, start)

    def lanes(self, n: int) -> list[Communicator]:
        """`n` communicators of all ranks, for calls that run at once.

        All ranks must call it. All ranks must make the calls on all lanes in the same order, taken
        together. Each call compares that order, so ranks cannot deadlock by waiting in a circle.
        Calls on one lane run one after the other, from one thread at a time; a short call does not
        wait for a long one on another lane. If a call fails, all lanes end. See also `split`.
        Raises CollectiveError on every rank.
        """
        self._submit(False, None, lambda calls: None)
        with self._calls.sharing_errors():
            number = integer(n, "the number of lanes", 1, MOST_LANES)
        asked = {int(row) for row in self._calls.gather("lanes", str(number).encode())}
        if len(asked) > 1:
            raise CollectiveError(f"the ranks ask for different numbers of lanes: {sorted(asked)}")
        calls = count(1)
        parts = self._segments([[*range(self.size)]] * asked.pop())
        family = [self._new_part(ranks, start, lambda: next(calls)) for ranks, start in parts]
        for lane in family:
            others = [other.calls for other in family if other is not lane]
            lane.calls.health.family = [partial(_fail, calls) for calls in others]
        return family

    def _segments(self, groups: Sequence[list[int]]) -> list[tuple[list[int], int]]:
        """Allocate a segment for each group of ranks; the first rank of a group does so.

        Returns (ranks, start of the segment) of the groups that contain this rank. If an allocation
        fails, all ranks raise CollectiveError.
        """
        mapping, rank = self._arena.mapping, self.rank
        taken: dict[int, int] = {}
        failure = ""
        try:
            for i, ranks in enumerate(groups):
                if ranks[0] == rank:
                    taken[i] = mapping.take(SEGMENT)[0]
        except CollectiveError as error:
            failure = f"rank {rank}: {error}"
        payload = json.dumps([taken, failure]).encode()
        rows = [json.loads(row) for row in self._calls.gather("memory", payload)]
        if failed := "; ".join(row[1] for row in rows if row[1]):
            for start in taken.values():
                mapping.give(start, SEGMENT)
            raise CollectiveError(failed)
        found = {int(i): start for row in rows for i, start in row[0].items()}
        return [(g, found[i]) for i, g in enumerate(groups) if rank in g]

    def _new_part(
        self, ranks: list[int], start: int, order: Callable[[], int] = int
    ) -> Communicator:
        settings, team = replace(self._inherited(), topology=self._machine(ranks)), None
        if self._team:
            team = self._team.child((self._made, start), ranks)
        part = Communicator(self._arena.part(ranks, start), settings, team, True, order)
        self._keep([part])
        self._made += 1
        return part

    def _machine(self, ranks: Sequence[int]) -> Topology | str:
        """The machine of some of the ranks."""
        spec = self.settings.topology
        if spec == "auto" or any(d.uuid or d.bus_id for d in load(spec).devices):
            return spec  # GPUs are found by their names
        return self.topology.subset([self.topology.gpus[r] for r in ranks])

    def _check_joined(self, ranks: Sequence[int]) -> None:
        part = self._machine(ranks)
        if isinstance(part, Topology) and not connects(
            [(link.src, link.dst) for link in part.links], part.gpus
        ):
            raise CollectiveError(
                f"ranks {list(ranks)} cannot be split from the others: no links of "
                f"{self.topology.name} join them"
            )

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
                last.callback(self._close_parts)  # those too that a call before it makes
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
            for part in self._parts:
                part.abort(why)


def _fail(calls: HostCalls, error: BaseException) -> None:
    """End a lane because another lane of its family has failed."""
    if not calls.health.closed:
        calls.control.give_up(RAISED)
        calls.health.fail(error)


_default: Any = None
_threads = threading.local()  # each rank that is a thread has its own


def set_default(communicator: Any) -> None:
    """Set the communicator that the module functions use, and close the previous one."""
    global _default
    if _default is not None and _default is not communicator:
        _default.close()
    _default = communicator


def set_of_thread(communicator: Communicator | None) -> None:
    """Set the default communicator of this thread; None removes it."""
    _threads.communicator = communicator


def get_default() -> Communicator:
    """The default communicator of this rank. Raises CollectiveError if there is none.

    For ranks on several machines it is a `ClusterCommunicator`, which has most of its methods.
    """
    if (found := find_default()) is None:
        raise CollectiveError(
            "no communicator: call linkweave.init() first, or run under linkweave.spawn()"
        )
    return found


def of_default(name: str) -> Callable[..., Any]:
    """A function that calls the method `name` of the default communicator."""
    method = getattr(Communicator, name)

    @uncompiled
    @wraps(method)
    def on_default(*args: Any, **kwargs: Any) -> Any:
        return getattr(get_default(), name)(*args, **kwargs)

    on_default.__module__, on_default.__qualname__ = "linkweave.collectives", name
    on_default.__signature__ = signature(method.__get__(object()))  # type: ignore[attr-defined]
    return on_default


def find_default() -> Communicator | None:
    """As `get_default`; None if there is none."""
    found: Communicator | None = getattr(_threads, "communicator", None) or _default
    return found


def shutdown() -> None:
    """Close the default communicator. A program does so as it ends; it may be repeated."""
    global _default
    if _default is not None:
        _default.close()
        _default = None


def ended_by() -> BaseException | None:
    """The exception that has ended the program, if it ends by one."""
    if hasattr(sys, "ps1"):  # a prompt, which went on after the last exception
        return None
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


@atexit.register
def _at_exit() -> None:
    """Close the default communicator; ranks that wait for this one hear of the exception that has
    ended the program."""
    if (raised := ended_by()) and _default is not None:
        _default.abort(INTERRUPTED if isinstance(raised, KeyboardInterrupt) else RAISED)
    shutdown()
