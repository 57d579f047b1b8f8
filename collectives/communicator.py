"""What users hold: a Communicator, one on each rank."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from operator import index
from types import TracebackType
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveError, CollectiveTimeout
from collectives.planning.algorithms import ALGORITHMS
from collectives.planning.plan import Plan
from collectives.planning.planner import choose, plan_allreduce, plan_collective
from collectives.request import KINDS, NOTHING, Request, difference
from collectives.runtime.arena import Arena
from collectives.runtime.diagnose import CLOSED
from collectives.runtime.reference import DTYPES, OPS
from collectives.runtime.shm import SLOT_BYTES, Buffer, Region, ShmRuntime
from collectives.tensors import as_buffer
from topology import Topology, load

log = logging.getLogger("linkweave")

ORDERS = ("fastest", "fixed")
_FIXED_ORDER = "overlapped_tree"  # one tree: every element is added in the same order


class Work:
    """A collective under way; `wait` returns when the tensor holds the result."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> None:
        """Raises what the collective raised, or CollectiveTimeout after `timeout` seconds."""
        try:
            self._future.result(timeout)
        except TimeoutError:
            raise CollectiveTimeout(f"the collective is not done after {timeout} s") from None

    def done(self) -> bool:
        return self._future.done()


class Communicator:
    """The ranks of one machine, and the collectives among them.

    A context manager; `close` ends it. Every rank must make the same calls in the same order:
    each call begins by comparing what all ranks ask for, and differs anywhere -> CollectiveError
    on every rank, before any data moves. `timeout` (s) bounds every wait for a peer.
    """

    def __init__(
        self,
        arena: Arena,
        topology: Topology | str = "auto",
        timeout: float = 30.0,
        order: str = "fastest",
    ) -> None:
        self.rank, self.size = arena.rank, arena.size
        self.topology = topology_for(topology, self.size)
        if order not in ORDERS:
            raise CollectiveError(f"unknown order {order!r}; choose from {', '.join(ORDERS)}")
        if not isinstance(timeout, int | float) or not timeout > 0 or math.isinf(timeout):
            raise CollectiveError(f"timeout must be a positive number of seconds, not {timeout!r}")
        self.order = order
        self._arena = arena
        self._runtime = ShmRuntime(arena, timeout)
        self._plans: dict[tuple[str, int, str, int], tuple[Plan, Region]] = {}
        self._algorithms: dict[tuple[int, str], str] = {}
        self._calls = 0
        self._closed = False
        self._broken: str | None = None
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._call(Request("barrier", NOTHING))  # all have mapped the arena
        arena.watch()

    @property
    def timeout(self) -> float:
        """Seconds that a wait for a peer may last."""
        return self._runtime.timeout

    # ---- collectives -------------------------------------------------------------------------
    def allreduce(
        self, x: Any, op: str = "sum", async_op: bool = False, algorithm: str = "auto"
    ) -> Work | None:
        """Combine `x` over all ranks, in place; every rank ends with the same bits.

        `x`: a torch CPU tensor or NumPy array of any shape and size, or a list of them with one
        dtype, which is one call. `op`: sum, avg, min, max or prod; avg is refused for integers.
        16-bit floats are combined in float32 and rounded once a hop; min and max propagate NaN;
        integers wrap. With `async_op` a `Work` is returned at once; calls keep their order.
        `algorithm`: auto, or a name, to compare them; refused together with order="fixed".
        Raises CollectiveError for bad input or calls that differ between ranks, CollectiveTimeout
        and CollectiveAborted where a peer does not come.
        """
        if isinstance(x, list | tuple):
            return self._submit(async_op, self._allreduce_list, list(x), op, algorithm)
        return self._submit(async_op, self._in_place, "allreduce", x, op, 0, algorithm)

    def broadcast(self, x: Any, root: int = 0, async_op: bool = False) -> Work | None:
        """Copy `root`'s `x` over everyone's, in place. Same tensors and errors as `allreduce`."""
        return self._submit(async_op, self._in_place, "broadcast", x, "sum", root, "tree")

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._submit(False, self._call, Request("barrier", NOTHING))

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """An uninitialised tensor in memory that all ranks share: collectives need not stage it.

        A torch dtype gives a torch tensor, anything else a NumPy array. It is faster where every
        rank passes one of these. Freed when the tensor and its views are.
        """
        self._check_open()
        try:
            dims = tuple(map(index, shape if isinstance(shape, Iterable) else (shape,)))
        except TypeError:
            dims = (-1,)
        if any(d < 0 for d in dims):
            raise CollectiveError(f"a shape is made of integers >= 0, not {shape!r}")
        torch_dtype = type(dtype).__module__ == "torch"
        name = str(dtype).removeprefix("torch.") if torch_dtype else _numpy_name(dtype)
        if name not in DTYPES or (name == "bfloat16" and not torch_dtype):
            raise CollectiveError(f"unsupported dtype {name}; choose from {', '.join(DTYPES)}")
        item = 2 if name == "bfloat16" else np.dtype(name).itemsize
        nbytes = math.prod(dims) * item
        offset, memory = self._arena.allocate(nbytes)
        block = _Block(memory)
        weakref.finalize(block, self._arena.free, offset)
        array = np.asarray(block)
        if torch_dtype:
            import torch

            return torch.from_numpy(array).view(dtype).reshape(dims)
        return array.view(name).reshape(dims)

    def offset_of(self, x: Any) -> int:
        """Where a tensor of `empty` lies in the shared memory, in bytes; -1 for any other."""
        buffer, _ = as_buffer(x)
        return self._arena.offset_of(buffer.address, buffer.nbytes)

    def address_at(self, offset: int) -> int:
        """The address at which this process sees that place, on whichever rank it was made."""
        return self._arena.base + offset

    # ---- lifetime ----------------------------------------------------------------------------
    def close(self) -> None:
        """Finish what runs asynchronously, tell waiting peers, and let go. May be repeated."""
        if self._closed:
            return
        if self._worker:
            self._worker.shutdown(wait=True)
        self._closed = True
        if self._broken is None and self._calls_differ():
            self._runtime.give_up(CLOSED)  # a peer is in a call that this rank will never make
        self._runtime.close()
        self._arena.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def abort(self, why: int) -> None:
        """Make every rank's present and future calls raise CollectiveAborted."""
        if not self._closed:
            self._runtime.give_up(why)

    def _calls_differ(self) -> bool:
        posted = self._runtime.posted()
        return any(call > self._calls for call in posted)

    # ---- one call ----------------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._closed:
            raise CollectiveError("this communicator is closed")
        if self._broken:
            raise CollectiveError(
                f"this communicator failed before ({self._broken}); make a new one"
            )

    def _request(
        self, kind: str, buffer: Buffer, op: str, root: int, algorithm: str, layout: int = 0
    ) -> Request:
        """What this rank is about to ask for. Raises CollectiveError where that is no sense."""
        if op not in OPS:
            raise CollectiveError(f"unknown op {op!r}; choose from {', '.join(OPS)}")
        if op == "avg" and "int" in buffer.dtype:
            raise CollectiveError(f"avg is not defined for {buffer.dtype}; use sum")
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self.size:
            raise CollectiveError(f"root {root!r} is not a rank; ranks are 0 to {self.size - 1}")
        if kind == "allreduce":
            algorithm = self._algorithm(buffer.nbytes, algorithm)
        return Request(kind, buffer, op, root, algorithm, layout)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Bad arguments of one rank are told to the others, whose calls must not pair up wrong."""
        try:
            yield
        except CollectiveError as error:
            try:
                self._call(Request("refused", NOTHING))
            except CollectiveError as others:
                if self._broken:
                    raise others from error
            raise error

    def _submit(self, async_op: bool, function: Any, *args: Any) -> Work | None:
        self._check_open()
        if not async_op and (self._last is None or self._last.done()):
            function(*args)
            return None
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="linkweave")
        self._last = self._worker.submit(function, *args)
        work = Work(self._last)
        if async_op:
            return work
        work.wait()
        return None

    def _in_place(self, kind: str, x: Any, op: str, root: int, algorithm: str) -> None:
        with self._telling():
            buffer, done = as_buffer(x)
            request = self._request(kind, buffer, op, root, algorithm)
        self._call(request)
        done()

    def _allreduce_list(self, tensors: list[Any], op: str, algorithm: str) -> None:
        with self._telling():
            if not tensors:
                raise CollectiveError("allreduce needs at least one tensor in its list")
            buffers = [as_buffer(x) for x in tensors]
            names = sorted({b.dtype for b, _ in buffers})
            if len(names) > 1:
                raise CollectiveError(f"the tensors of one call need one dtype, not {names}")
            total = sum(b.nbytes for b, _ in buffers)
            flat = self.empty(total, "uint8")
            first = buffers[0][0]
            whole = Buffer(int(flat.ctypes.data), total, first.dtype, first.itemsize)
            layout = crc32(repr([b.nbytes for b, _ in buffers]).encode())
            request = self._request("allreduce", whole, op, 0, algorithm, layout)
        views, at = [], 0
        for buffer, _ in buffers:
            views.append(flat[at : at + buffer.nbytes])
            at += buffer.nbytes
        for view, (buffer, _) in zip(views, buffers, strict=True):
            view[...] = _bytes_of(buffer)
        self._call(request)
        for view, (buffer, done) in zip(views, buffers, strict=True):
            _bytes_of(buffer)[...] = view
            done()

    def _call(self, request: Request) -> None:
        with self._lock:
            self._check_open()
            try:
                self._agree_and_run(request)
            except _Mismatch as error:
                raise CollectiveError(str(error)) from None
            except BaseException as error:
                self._broken = f"{type(error).__name__}: {error}"
                raise

    def _agree_and_run(self, request: Request) -> None:
        kind, buffer, op, root = request.kind, request.buffer, request.op, request.root
        self._calls += 1
        call = self._calls
        settings = crc32(f"{self.topology.to_json()}{self.order}".encode()) if call == 1 else 0
        algorithm = request.algorithm
        said = (
            KINDS.index(kind), OPS.index(op), DTYPES.index(buffer.dtype),
            buffer.nbytes // buffer.itemsize, root, list(ALGORITHMS).index(algorithm), settings,
            request.layout,
        )  # fmt: skip
        offset = self._arena.offset_of(buffer.address, buffer.nbytes)
        self._runtime.post(call, (*said, offset))
        rows = self._runtime.await_posts(call)
        words = len(said)
        if (rows[:, :words] != said).any():
            theirs = [tuple(row) for row in rows[:, :words].tolist()]
            # every rank sees all notices, so every rank raises, and all may go on
            self._runtime.finish(call)
            raise _Mismatch(difference(call, theirs))
        if buffer.nbytes == 0 or self.size == 1:
            self._runtime.done(call)
            return
        plan, region = self._plan(kind, buffer.nbytes, algorithm, root)
        offsets = rows[:, words]
        if region.direct and offset >= 0 and offsets.min() >= 0:
            self._runtime.run(plan, region, buffer, op, offsets.copy())
            self._runtime.finish(call)
        else:
            self._runtime.run(plan, region, buffer, op)
            self._runtime.done(call)

    def _algorithm(self, nbytes: int, name: str) -> str:
        """What `name` stands for; one that cannot run is refused before any rank waits for it."""
        key = (nbytes, name)
        if key not in self._algorithms:
            fixed = self.order == "fixed"
            if name == "auto":
                name = _FIXED_ORDER if fixed else choose(self.topology, nbytes)
            elif fixed:
                raise CollectiveError(f"order='fixed' chooses the algorithm: do not ask for {name}")
            else:
                plan_allreduce(self.topology, nbytes, name)
            self._algorithms[key] = name
        return self._algorithms[key]

    def _plan(self, kind: str, nbytes: int, algorithm: str, root: int) -> tuple[Plan, Region]:
        """The algorithm is the topology's; the number of chunks is this runtime's own tuning."""
        key = (kind, nbytes, algorithm, root)
        if key not in self._plans:
            if kind == "allreduce":
                plan = plan_allreduce(self.topology, nbytes, algorithm)
            else:
                plan = plan_collective(kind, self.topology, nbytes, root)
            chunks = -(-nbytes // SLOT_BYTES)
            if chunks > plan.num_chunks:
                chunks = -(-chunks // plan.stride) * plan.stride
                if kind == "allreduce":
                    plan = plan_allreduce(self.topology, nbytes, algorithm, chunks)
                else:
                    plan = plan_collective(kind, self.topology, nbytes, root, num_chunks=chunks)
            self._plans[key] = plan, self._runtime.prepare(plan)
            log.info("%s of %d bytes: %s, %d chunks", kind, nbytes, algorithm, plan.num_chunks)
        return self._plans[key]


class _Mismatch(Exception):
    """Ranks asked for different things; nothing has moved."""


class _Block:
    """A block of the arena; when the last array over it goes, the block is free again.

    Not an array itself: NumPy makes a view of a view refer to the first one's memory, and would
    let go of what lies between.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory  # which keeps the mapping
        self.__array_interface__ = memory.__array_interface__


def _bytes_of(buffer: Buffer) -> Any:
    import ctypes

    if not buffer.nbytes:
        return np.empty(0, np.uint8)
    raw: Any = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.address)
    return np.frombuffer(raw, np.uint8)


def _numpy_name(dtype: Any) -> str:
    try:
        return str(np.dtype(dtype))
    except TypeError:
        return str(dtype)


def topology_for(spec: Topology | str, size: int) -> Topology:
    """The map that `size` CPU ranks plan on: `auto` is their common memory."""
    topology = load(f"cpu-{size}" if spec == "auto" else spec)
    has = len(topology.gpus)
    if has < size:
        raise CollectiveError(f"{topology.name} has {has} GPUs, fewer than the {size} ranks")
    if has > size:
        log.info("%d ranks on %s: its first %d GPUs", size, topology.name, size)
        return topology.subset(topology.gpus[:size])
    return topology
