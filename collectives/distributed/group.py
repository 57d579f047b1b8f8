"""A process group of torch.distributed whose collectives run on a communicator."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.autograd import profiler
from torch.utils._pytree import tree_leaves

from linkweave.collectives.cluster.communicator import ClusterCommunicator
from linkweave.collectives.cluster.gloo import OPS, gloo_group
from linkweave.collectives.cluster.join import Job, meet
from linkweave.collectives.distributed.engine import VARIABLE, CudaEngine
from linkweave.collectives.distributed.works import GroupWork, ended, together
from linkweave.collectives.runtime.diagnose import RAISED
from linkweave.collectives.runtime.tensors import read_here
from linkweave.collectives.runtime.uncompiled import uncompiled_methods
from linkweave.collectives.settings import Settings
from linkweave.kernels.dtypes import DTYPES, ops_of

log = logging.getLogger("linkweave")

Tensors = list[Any]
_NO_RANGE = nullcontext()
_METHODS = {"all_reduce": "allreduce", "all_gather": "allgather", "all_to_all": "alltoall"}
"""The communicator's methods, where torch's verbs have other names."""
_OPS = {hash(each): name for name, each in OPS.items()}
"""By the number that torch's ReduceOp has as its hash: to look one up by itself takes 2 us."""
_OPS_OF = {getattr(torch, name): ops_of(name) for name in DTYPES if hasattr(torch, name)}
"""The ops of each of torch's dtypes."""
_MESSAGES = "send", "recv", "recv_anysource"
"""Not ordered beside collectives: ranks may make them in different places among these."""
_WITHOUT_FUTURE = "allgather", "reduce_scatter"
"""Of lists: NCCL makes several calls of unequal tensors, whose work has no future."""


def nccl_group(
    store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: list[int],
    options: Any = None,
) -> Any:  # fmt: skip
    """A group of NCCL. `ranks`: those of the job, for NCCL's messages.

    It is not split from another one, for which torch needs all ranks of that.
    """
    options = options or c10d.ProcessGroupNCCL.Options()
    options._timeout, options.group_name = timeout, name
    options.global_ranks_in_group = ranks
    return c10d.ProcessGroupNCCL(c10d.PrefixStore("nccl/", store), rank, size, options)


def at_once(nccl: Any, messages: Sequence[tuple[str, tuple[Any, ...]]]) -> Any:
    """Send and receive as one call of a group of NCCL: one by one, a send would hold up the receive
    from the same rank. `messages`: names of its methods, and their arguments."""
    nccl._start_coalescing()
    try:
        for name, arguments in messages:
            getattr(nccl, name)(*arguments)
    except BaseException:
        with suppress(RuntimeError):  # the first error is raised
            nccl._end_coalescing()
        raise
    return nccl._end_coalescing()


_Base: Any = dist.ProcessGroup  # whose stubs list overloads that torch does not call


@uncompiled_methods
class Group(_Base):  # type: ignore[misc]
    """The ranks of a torch.distributed process group, on one machine or several.

    Collectives of dense tensors run on `communicator`; those of GPU tensors where `engine` says so.
    The others, and what the communicator does not offer (send and receive with tags, other dtypes,
    sparse tensors, GPU tensors on several machines), go to gloo on the CPU and to NCCL on GPUs.

    A collective of NCCL waits for ours before it, and ours for it: else the kernels of one could
    hold the GPU that those of the other need, and each wait for its peers.
    """

    def __init__(self, options: Any, of_nccl: Any = None) -> None:
        """`of_nccl`: options for NCCL's group."""
        if of_nccl is not None and type(of_nccl).__qualname__ != "ProcessGroupNCCL.Options":
            raise TypeError(f"pg_options must be ProcessGroupNCCL.Options, not {of_nccl!r}")
        rank, size, timeout = options.group_rank, options.group_size, options.timeout
        self._of_nccl, self._ranks = of_nccl, options.global_ranks_in_group
        super().__init__(rank, size)
        self._timeout = self.timeout_of_others = timeout
        self._name = options.group_id
        seconds = timeout.total_seconds()
        job = Job(rank, size, options.store, "linkweave")
        self.communicator = meet(job, Settings(timeout=seconds))
        self._store = c10d.PrefixStore(f"{job.key}/", options.store)
        try:
            others = gloo_group(c10d.PrefixStore("gloo/", self._store), rank, size, seconds)
            self.communicator.barrier()  # no rank may leave while another one connects to it
        except BaseException:
            self.communicator.close()
            raise
        self._others: dict[str, Any] = {"cpu": others}
        self._ends: dict[Any, Any] = {}  # on each GPU the stream behind NCCL's collectives
        self._coalesced: list[Any] | None = None
        self._messages: list[tuple[str, tuple[Any, ...]]] = []  # of NCCL, being coalesced

    @property
    def timeout(self) -> timedelta:
        """How long a call waits for other ranks."""
        found: timedelta = self._timeout
        return found

    @cached_property
    def engine(self) -> CudaEngine:
        """The engine of CUDA collectives, the same on all ranks; chosen at the first of them."""
        trouble, found = "", CudaEngine(False, "")
        try:
            found = CudaEngine.choose(self.size(), dist.is_nccl_available())
        except Exception as error:  # of any kind: the other ranks must learn of it
            trouble = str(error)
        word = -1 if trouble else found.checksum
        words = torch.tensor([word, -word], dtype=torch.int64)
        self.communicator.allreduce(words, "min")
        least, most = int(words[0]), -int(words[1])
        if trouble or least != most:
            mine = f"rank {self.rank()} has {os.environ.get(VARIABLE)!r}"
            raise RuntimeError(trouble or f"{VARIABLE}, or its file, differs by rank: {mine}")
        if self.rank() == 0:
            whose = {True: "linkweave", False: "NCCL", None: "linkweave or NCCL"}[found.every]
            log.info("CUDA collectives of group %s: %s (%s)", self._name, whose, found.why)
        return found

    def _other(self, device: str) -> Any:
        """The group of gloo or NCCL for what the communicator does not offer."""
        if device not in self._others:
            if not dist.is_nccl_available():
                raise RuntimeError("this call needs NCCL, which this torch does not have")
            self._others[device] = nccl_group(
                self._store, self.rank(), self.size(), self.timeout_of_others, self._name,
                self._ranks, self._of_nccl,
            )  # fmt: skip
        return self._others[device]

    # ---- what torch asks ---------------------------------------------------------------------
    def getBackendName(self) -> str:
        return "linkweave"

    @property
    def group_name(self) -> str:
        """torch's name of the group."""
        return str(self._name)

    def __repr__(self) -> str:
        return f"linkweave.Group(rank={self.rank()}, size={self.size()})"

    @property
    def _device_types(self) -> list[torch.device]:
        """The kinds of devices whose tensors it takes."""
        return [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of calls that go to gloo or NCCL. Warns that others keep theirs."""
        self.timeout_of_others = timeout
        for other in self._others.values():
            other._set_default_timeout(timeout)
        warnings.warn(
            f"linkweave's own calls keep the timeout {self._timeout}, as given to "
            f"init_process_group or new_group; those of gloo and NCCL have {timeout} from now on",
            stacklevel=2,
        )

    def shutdown(self) -> None:
        try:
            self.communicator.close()  # first, as others may be waiting for this rank
        finally:
            try:
                if nccl := self._others.get("cuda"):
                    nccl.shutdown()  # waits for its calls, which deleting the group would abort
            finally:
                self._others.clear()

    def abort(self) -> None:
        self.communicator.abort(RAISED)
        try:
            if nccl := self._others.pop("cuda", None):
                nccl.abort()
        finally:
            self.shutdown()

    # ---- collectives -------------------------------------------------------------------------
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceOptions()
        if not (op := self._op("allreduce", opts.reduceOp, tensors)):
            return self._delegate("allreduce", tensors[0], tensors, opts)
        x = tensors[0] if len(tensors) == 1 else tensors
        return self._run(opts, "all_reduce", tensors, None, x, op)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceCoalescedOptions()
        if not self._op("allreduce", opts.reduceOp, tensors):
            return self._delegate("allreduce_coalesced", tensors[0], tensors, opts)
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.BroadcastOptions()
        if not self._supported("broadcast", tensors):
            return self._delegate("broadcast", tensors[0], tensors, opts)
        return self._run(opts, "broadcast", tensors, None, tensors[0], opts.rootRank)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceOptions()
        if not (op := self._op("reduce", opts.reduceOp, tensors)):
            return self._delegate("reduce", tensors[0], tensors, opts)
        return self._run(opts, "reduce", tensors, None, tensors[0], op, opts.rootRank)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        if not self._supported("allgather", [output], [given]) or output.dtype != given.dtype:
            return self._delegate("_allgather_base", given, output, given, opts)
        rows, finish = _rows(output, self.size())
        return self._run(opts, "all_gather", [output], finish, given.reshape(-1), out=rows)

    def allgather(self, outputs: list[Tensors], given: Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        x, out = given[0], outputs[0]
        counts = [y.numel() for y in out]
        uneven = {*counts} != {x.numel()}
        alike = len(out) == self.size() and {y.dtype for y in out} == {x.dtype}
        if (
            not self._supported("allgather", out, given)
            or not alike
            or (uneven and self._by_nccl(x))
        ):
            return self._delegate("allgather", x, outputs, given, opts)
        whole = x.new_empty(sum(counts) if uneven else (self.size(), x.numel()))
        parts = torch.split(whole, counts) if uneven else whole
        each = {"counts": counts} if uneven else {}
        return self._run(
            opts, "all_gather", out, lambda: _spread(parts, out), x.reshape(-1), out=whole, **each
        )

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if not (op := self._op("reduce_scatter", opts.reduceOp, [given], [output])):
            return self._delegate("_reduce_scatter_base", given, output, given, opts)
        rows, finish = _rows(output, 1)
        blocks, _ = _rows(given.contiguous(), self.size())
        return self._run(opts, "reduce_scatter", [output], finish, blocks, op, out=rows)

    def reduce_scatter(self, outputs: Tensors, given: list[Tensors], opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if not self._op("reduce_scatter", opts.reduceOp, given[0], outputs) or (
            {x.numel() for x in given[0]} != {outputs[0].numel()}
        ):
            return self._delegate("reduce_scatter", outputs[0], outputs, given, opts)
        whole = torch.stack([x.reshape(-1) for x in given[0]])
        return self.reduce_scatter_single(outputs[0], whole, opts)

    def all_to_all_single(
        self, output: Any, given: Any, output_splits: Sequence[int], input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:  # fmt: skip
        opts = opts or c10d.AllToAllOptions()
        uneven = bool(output_splits or input_splits)
        if not self._supported("alltoall", [given], [output]) or (uneven and self._by_nccl(given)):
            splits = output_splits, input_splits
            return self._delegate("alltoall_base", given, output, given, *splits, opts)
        if not uneven:
            rows, finish = _rows(output, self.size())
            blocks, _ = _rows(given.contiguous(), self.size())
            return self._run(opts, "all_to_all", [output], finish, blocks, rows)
        rows, finish = _whole(output)
        each = (
            list(part or [len(x) // self.size()] * self.size())
            for part, x in ((input_splits, given), (output_splits, output))
        )
        return self._run(opts, "all_to_all", [output], finish, given.contiguous(), rows, *each)

    def alltoall(self, outputs: Tensors, given: Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.AllToAllOptions()
        if not self._supported("alltoall", given, outputs) or self._by_nccl(given[0]):
            return self._delegate("alltoall", given[0], outputs, given, opts)
        x = torch.cat([y.reshape(-1) for y in given])
        counts = [[y.numel() for y in each] for each in (given, outputs)]
        whole = x.new_empty(sum(counts[1]))

        def finish() -> None:
            _spread(torch.split(whole, counts[1]), outputs)

        return self._run(opts, "all_to_all", outputs, finish, x, whole, *counts)

    def gather(self, outputs: list[Tensors], given: Tensors, opts: Any = None) -> Any:
        opts, x = opts or c10d.GatherOptions(), given[0]
        if not self._supported("gather", given * self.size()):
            return self._delegate("gather", x, outputs, given, opts)
        if self.rank() != opts.rootRank:
            return self._run(opts, "gather", [], None, x.reshape(-1), opts.rootRank)
        out, whole = outputs[0], x.new_empty((self.size(), x.numel()))

        def finish() -> None:  # only here are the others told nothing of a wrong list
            if len(out) != len(whole):
                raise ValueError(f"gather: {len(out)} tensors for {len(whole)} ranks")
            for y in out:
                if y.numel() != x.numel():
                    raise ValueError(f"gather: {y.numel()} elements where {x.numel()} are needed")
            _spread(whole, out)

        return self._run(opts, "gather", out, finish, x.reshape(-1), opts.rootRank, out=whole)

    def gather_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        opts = opts or c10d.GatherOptions()
        rows = []
        if self.rank() == opts.rootRank:
            whole, finish = _rows(output, self.size())
            if (
                finish is not None
                or whole.dim() != 2
                or output.numel() != given.numel() * len(whole)
            ):
                raise ValueError(
                    f"gather_single: {output.numel()} elements, which must be contiguous, for "
                    f"{self.size()} ranks of {given.numel()}"
                )
            rows = [[*whole]]
        return self.gather(rows, [given.reshape(-1)], opts)

    def scatter(self, outputs: Tensors, given: list[Tensors], opts: Any = None) -> Any:
        opts, out = opts or c10d.ScatterOptions(), outputs[0]
        if not self._supported("scatter", outputs * self.size()):
            return self._delegate("scatter", out, outputs, given, opts)
        whole = None
        if given:
            whole = torch.cat([x.reshape(-1) for x in given[0]])
            if [x.numel() for x in given[0]] == [out.numel()] * self.size():
                whole = whole.view(self.size(), out.numel())  # or else it is refused on all ranks
        rows, finish = _rows(out, 1)
        return self._run(opts, "scatter", outputs, finish, whole, opts.rootRank, out=rows)

    def barrier(self, opts: Any = None) -> Any:
        """As NCCL's it also waits for the current stream of the GPU, and for the group's calls
        there; on the host in any case."""
        opts = opts or c10d.BarrierOptions()
        cuda: Any = torch.cuda
        if "cuda" in self._named and cuda.is_initialized():
            self._finish_gpu(opts.device)
        limited = opts.timeout > timedelta(0) and not opts.asyncOp
        opts.asyncOp |= limited
        work = self._run(opts, "barrier", [], None)
        if limited:
            work.wait(opts.timeout)
        return work

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        self._others["cpu"].monitored_barrier(timeout or self.timeout_of_others, wait_all_ranks)

    # ---- several at once ---------------------------------------------------------------------
    def all_gather_single_coalesced(
        self, outputs: Tensors, given: Tensors, opts: Any = None
    ) -> Any:
        pairs = zip(outputs, given, strict=True)
        return together([self.all_gather_single(out, x, opts) for out, x in pairs], outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, given: Tensors, opts: Any = None
    ) -> Any:
        pairs = zip(outputs, given, strict=True)
        return together([self.reduce_scatter_single(out, x, opts) for out, x in pairs], outputs)

    def allgather_coalesced(self, outputs: list[Tensors], given: Tensors, opts: Any = None) -> Any:
        """`outputs[r][i]` receives rank r's `given[i]`."""
        pairs = zip(zip(*outputs, strict=True), given, strict=True)
        return together([self.allgather([[*out]], [x], opts) for out, x in pairs], given)

    def _get_backend(self, device: Any) -> Abilities:
        return Abilities(device)

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced, self._messages = [], []

    def _end_coalescing(self, device: Any) -> Any:
        works, self._coalesced = self._coalesced or [], None
        messages, self._messages = self._messages, []
        if messages:
            works.append(at_once(self._other("cuda"), messages))
        return together(works, [])

    # ---- what goes to gloo or NCCL -----------------------------------------------------------
    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Any:
        return self._delegate("send", tensors[0], tensors, to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        return self._delegate("recv", tensors[0], tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self._delegate("recv_anysource", tensors[0], tensors, tag)

    # ---- how ---------------------------------------------------------------------------------
    def _supported(self, kind: str, message: Tensors, others: Sequence[Any] = ()) -> bool:
        """Whether the communicator takes the tensors of a call, and torch and the engine want it
        to; `message` holds those that make up the whole message."""
        for x in (*message, *others):
            if x.layout is not torch.strided or x.dtype not in _OPS_OF:
                return False
            if not (
                (x.is_cpu and "cpu" in self._devices) or (x.is_cuda and "cuda" in self._devices)
            ):
                return False
        if not message[0].is_cuda:
            return True
        return self.engine.takes(kind, sum(x.nbytes for x in message))

    def _by_nccl(self, x: Any) -> bool:
        """Whether a call of uneven rows goes to NCCL, which needs no exchange on the host: unless
        all calls are to be linkweave's."""
        return x.is_cuda and not self.engine.every

    def _op(self, kind: str, op: Any, message: Tensors, others: Sequence[Any] = ()) -> str:
        """The communicator's name of an op; empty if it does not take these tensors, as
        `_supported`."""
        name, dtype = _OPS.get(hash(op), ""), message[0].dtype
        if (
            name == "avg"
            and message[0].is_cpu
            and not (dtype.is_floating_point or dtype.is_complex)
        ):
            raise ValueError(f"{kind}: avg is not defined for {dtype}")
        if name not in _OPS_OF.get(dtype, ()):
            return ""
        return name if self._supported(kind, message, others) else ""

    @cached_property
    def _named(self) -> set[str]:
        """The kinds of devices whose tensors come here: "cuda" for a group that was made as
        "cpu:gloo,cuda:linkweave"."""
        named = dist.distributed_c10d._world.pg_backend_config.get(self, "")
        found = {word.partition(":")[0] for word in named.split(",") if word.endswith(":linkweave")}
        return found or {"cpu", "cuda"}

    @cached_property
    def _devices(self) -> set[str]:
        """Those whose tensors go to the communicator."""
        several = isinstance(self.communicator, ClusterCommunicator)
        return self._named & {"cpu"} if several else self._named

    def _finish_gpu(self, device: Any) -> None:
        """Wait for the current stream of a GPU, behind the group's calls there. It is the thread's
        own if `device` is not one."""
        cuda, of_torch = torch.cuda, torch._C  # type: Any, Any
        index = device.index if device and device.type == "cuda" else None
        index = cuda.current_device() if index is None else index
        if not of_torch._cuda_hasPrimaryContext(index):
            return  # nothing is there, and to wait would take memory
        with cuda.device(index):
            if cuda.is_current_stream_capturing():
                return
            stream = cuda.current_stream()
            if ends := self._ends.get(torch.device("cuda", index)):
                stream.wait_stream(ends)
            if not isinstance(self.communicator, ClusterCommunicator):
                self.communicator.lead(stream.cuda_stream)
            stream.synchronize()

    def _delegate(self, name: str, x: Any, *arguments: Any) -> Any:
        """Make a call of gloo's or NCCL's group, by the device of `x`."""
        if x.is_cuda and name in _MESSAGES and self._coalesced is not None:
            self._messages.append((name, arguments))
            return None
        call = getattr(self._other(x.device.type), name)
        nccl_only = isinstance(self.communicator, ClusterCommunicator)
        if x.is_cuda and not nccl_only and name not in _MESSAGES:
            return self._note(self._in_order(name, x, call, arguments))
        return self._note(call(*arguments) or ended())

    def _in_order(
        self, name: str, x: Any, call: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        """Make a collective of NCCL, which begins behind the current stream, after ours."""
        cuda: Any = torch.cuda
        stream = cuda.current_stream(x.device).cuda_stream
        self.communicator.lead(stream)
        work = call(*arguments) or ended()
        with cuda.device(x.device):
            if cuda.is_current_stream_capturing():  # a graph ends in the stream where it has begun
                if self.communicator.uses_gpu:
                    work.wait()
                return work
        if isinstance(work, GroupWork):  # on the current stream
            self.communicator.follow(stream)
            return work
        if x.device not in self._ends:
            self._ends[x.device] = cuda.Stream(x.device)
        ends = self._ends[x.device]
        with cuda.stream(ends):
            if name not in _WITHOUT_FUTURE:
                work.get_future().wait()
            else:
                work.wait()  # which lets go of the tensors, in use until then
                for each in tree_leaves(arguments):
                    if isinstance(each, torch.Tensor):
                        read_here(each)
        self.communicator.follow(ends.cuda_stream)
        return work

    def _run(
        self, opts: Any, verb: str, result: Tensors,
        finish: Callable[[], None] | None, *arguments: Any, **named: Any,
    ) -> Any:  # fmt: skip
        """Make a call of the communicator, at once if torch will wait for it."""
        call = getattr(self.communicator, _METHODS.get(verb, verb))
        asynchronous = opts.asyncOp or self._coalesced is not None
        shown = profiler._is_profiler_enabled
        with self._range(verb, [*arguments, *named.values()]) if shown else _NO_RANGE:
            work = call(*arguments, **named, async_op=asynchronous)
        return self._note(GroupWork(work if asynchronous else None, result, finish))

    @contextmanager
    def _range(self, verb: str, arguments: list[Any]) -> Iterator[None]:
        """A range of torch.profiler, with shapes and dtypes of the tensors as they are sent."""
        name = f"linkweave:{verb} (group {self._name})"
        every = [x for each in arguments for x in (each if isinstance(each, list) else [each])]
        tensors = [x for x in every if isinstance(x, torch.Tensor)]
        record: Any = torch.autograd
        handle = record._record_function_with_args_enter(name, *tensors)
        try:
            yield
        finally:
            record._record_function_with_args_exit(handle)

    def _note(self, work: Any) -> Any:
        """Keep a work for `_end_coalescing`, if calls are being coalesced."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


class Abilities:
    """What torch asks of a group's backend: since 2.14, whether it sends messages at once."""

    def __init__(self, device: Any) -> None:
        self.supports_coalescing = torch.device(device).type == "cuda"

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> bool:
        if name.startswith("supports_"):
            return False
        raise AttributeError(f"the backend linkweave has no {name}")


def _whole(output: Any) -> tuple[Any, Callable[[], None] | None]:
    """A contiguous tensor for a result, and what then moves it to `output`."""
    if output.is_contiguous():
        return output, None
    whole = torch.empty_like(output, memory_format=torch.contiguous_format)
    return whole, lambda: _spread([whole], [output])


def _rows(output: Any, rows: int) -> tuple[Any, Callable[[], None] | None]:
    """`_whole` with so many rows; flat if it has none, which the communicator refuses."""
    whole, finish = _whole(output)
    if whole.numel() % rows:
        return whole.view(-1), finish
    return whole.view(rows, whole.numel() // rows), finish


def _spread(parts: Any, outputs: Tensors) -> None:
    with torch.no_grad():
        for part, output in zip(parts, outputs, strict=True):
            output.copy_(part.view(output.shape))
            read_here(part)
