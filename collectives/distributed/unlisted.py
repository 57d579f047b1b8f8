"""Groups of gloo and NCCL beside a process group of torch.distributed, which does not list them.

Its `new_group` needs all ranks of the job, or names a group by how many others the process has
seen: ranks that differ in these would wait for each other in different places of the store.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Collection
from datetime import timedelta
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from linkweave.collectives.calls.communicator import ended_by
from linkweave.collectives.cluster.gloo import gloo_group
from linkweave.collectives.distributed.group import Group, at_once, nccl_group
from linkweave.collectives.errors import CollectiveError, CollectiveTimeout

_POLL = 0.05  # s between two looks at whether all ranks have closed a group
_PATIENCE = 5.0  # s that a program waits at its end for ranks that have not

_NAMES: WeakKeyDictionary[Any, tuple[int, count[int]]] = WeakKeyDictionary()
"""Of each group the number of its session, as the store may have kept what an earlier group of that
name has left, and the next number of those made beside it: the same on all of its ranks."""


class Unlisted:
    """A group of gloo for CPU tensors and one of NCCL for GPU tensors, of a process group's ranks.

    Without one of NCCL, gloo takes GPU tensors too. Calls are those of torch's backends.
    """

    def __init__(self, group: Any, kinds: Collection[str]) -> None:
        """`kinds`: "cpu", "cuda" or both. All ranks of the group make it, in the same order."""
        rank, size, timeout = group.rank(), group.size(), timeout_of(group)
        try:
            store = dist.distributed_c10d._get_process_group_store(group)
        except KeyError:
            raise CollectiveError("the process group has been destroyed") from None
        if group not in _NAMES:
            _NAMES[group] = (store.add("linkweave/sessions", 1) - 1) // size, count()
        session, numbers = _NAMES[group]
        name = f"linkweave/{session}/{next(numbers)}"
        store = c10d.PrefixStore(f"{name}/", store)
        self._of: dict[str, Any] = {}
        self._nccl: _Nccl | None = None
        if "cpu" in kinds:
            devices = gloo_devices_of(group)
            self._of["cpu"] = gloo_group(store, rank, size, timeout.total_seconds(), devices)
            try:  # no rank may leave while another one connects to it
                self._of["cpu"].barrier().wait()
            except RuntimeError as error:
                raise CollectiveTimeout(
                    f"rank {rank} of {size} does not meet the others: {error}", rank=rank
                ) from error
        if "cuda" in kinds:
            ranks = dist.get_process_group_ranks(group)
            name = f"{name} of {group.group_name}"
            self._of["cuda"] = made = nccl_group(store, rank, size, timeout, name, ranks)
            self._nccl = _Nccl(made, store, size)
            finalize(group, self._nccl.close).atexit = False

    def nccl_takes(self, x: Any) -> bool:
        return x.is_cuda and "cuda" in self._of

    def of(self, x: Any) -> Any:
        """The group for a tensor."""
        if self._nccl and x.is_cuda:
            self._nccl.gpus.add(x.device)
        return self._of["cuda" if self.nccl_takes(x) or "cpu" not in self._of else "cpu"]

    def call(self, name: str, x: Any, opts: Any, *arguments: Any) -> None:
        """Call a method of the group for `x`; on a GPU the current stream waits for the result."""
        opts.asyncOp = False
        if (work := getattr(self.of(x), name)(*arguments, opts)) is not None:
            work.wait()

    def allreduce(self, x: Any, op: Any = dist.ReduceOp.SUM) -> None:
        opts = c10d.AllreduceOptions()
        opts.reduceOp = op
        self.call("allreduce", x, opts, [x])

    def broadcast(self, x: Any, source: int) -> None:
        opts = c10d.BroadcastOptions()
        opts.rootRank = source
        self.call("broadcast", x, opts, [x])

    def allgather(self, x: Any, out: Any) -> None:
        """Flat tensors, of which `out` receives those of all ranks."""
        self.call("_allgather_base", x, c10d.AllgatherOptions(), out, x)

    def reduce_scatter(self, x: Any, out: Any, op: Any) -> None:
        opts = c10d.ReduceScatterOptions()
        opts.reduceOp = op
        self.call("_reduce_scatter_base", x, opts, out, x)

    def alltoall(self, x: Any, out: Any, sends: list[int], receives: list[int]) -> None:
        """Flat tensors; without numbers of elements, all ranks get as many."""
        self.call("alltoall_base", x, c10d.AllToAllOptions(), out, x, receives, sends)

    def sendrecv(self, x: Any, to: int | None, out: Any, source: int | None) -> None:
        """Send `x` and receive `out` at once, or one of the two."""
        group = self.of(x)
        messages = [("send", ([x], to, 0))] if to is not None else []
        messages += [("recv", ([out], source, 0))] if source is not None else []
        if self.nccl_takes(x):
            at_once(group, messages).wait()
            return
        for work in [getattr(group, name)(*arguments) for name, arguments in messages]:
            work.wait()

    def abort(self) -> None:
        try:
            if self._nccl:
                self._nccl.abort()
        finally:
            if "cpu" in self._of:
                self._of["cpu"].abort()

    def close(self) -> None:
        """Close the connections; ranks need not do so in one order."""
        if self._nccl:
            self._nccl.close()
        self._of.clear()


class _Nccl:
    """Frees a group of NCCL once all ranks have closed it, in whatever order they do.

    Its own `shutdown` waits for the other ranks, on the host and without end: those that close
    groups in another order, or fail. `abort` waits for nobody, and ends what is under way.
    """

    def __init__(self, group: Any, store: Any, size: int) -> None:
        self._group, self._store, self._size = group, store, size
        self.gpus: set[Any] = set()  # of its tensors
        self._lock, self._process, self._ended = threading.Lock(), os.getpid(), False
        self._thread = threading.Thread(target=self._free, name="linkweave-nccl", daemon=True)
        _OPEN.add(self)

    def close(self) -> None:
        """Free it, in a thread of its own, once the calls of all ranks have ended."""
        with self._lock:
            if self._ended or self._thread.ident or os.getpid() != self._process:
                return
            try:
                self._thread.start()
            except RuntimeError:  # Python 3.12 starts none while the interpreter exits
                self._ended = True
                self._group.abort()

    def _free(self) -> None:
        try:
            for gpu in self.gpus:
                torch.cuda.synchronize(gpu)
            self._store.add("closed", 1)
            while not self._ended and self._store.add("closed", 0) < self._size:
                time.sleep(_POLL)
        except RuntimeError:  # of a GPU or a store that is gone, and with it another rank
            pass
        self.abort()

    def abort(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, True
        if not ended and os.getpid() == self._process:
            self._group.abort()

    def join(self, timeout: float) -> None:
        if self._thread.ident:
            self._thread.join(timeout)


_OPEN: WeakSet[_Nccl] = WeakSet()


@atexit.register
def _at_exit() -> None:
    """End the groups of a program that has not closed them, or only just: those of one that has
    failed at once, so that the other ranks hear of it."""
    failed = ended_by()
    deadline = time.monotonic() + (0 if failed else _PATIENCE)
    left = list(_OPEN)
    for each in left if not failed else ():
        each.close()
    for each in left:
        each.join(max(deadline - time.monotonic(), 0))
        each.abort()
        each.join(_PATIENCE)


def kinds_of(group: Any) -> frozenset[str]:
    """The kinds of devices whose tensors a process group takes by gloo or NCCL; for a group of
    linkweave those of both. Raises CollectiveError for another backend."""
    if isinstance(group, Group):
        return frozenset({"cpu", "cuda"} if dist.is_nccl_available() else {"cpu"})
    found = set()
    for device in group._device_types:
        name = _backend(group, device).name()
        if name not in ("gloo", "nccl"):
            raise CollectiveError(
                f"the process group takes tensors on {device.type} by {name}; training needs gloo, "
                "NCCL or linkweave"
            )
        found.add("cuda" if name == "nccl" else "cpu")
    return frozenset(found)


def timeout_of(group: Any) -> timedelta:
    """A process group's, which torch.distributed tells in no other way."""
    if isinstance(group, Group):
        found: timedelta | None = group.timeout_of_others
    else:
        options = getattr(_backend(group, group._device_types[0]), "options", None)
        found = getattr(options, "_timeout", None)
    return found or dist.default_pg_timeout


def gloo_devices_of(group: Any) -> list[Any]:
    """The network interfaces of a process group's gloo; none if it has no gloo."""
    if isinstance(group, Group) or torch.device("cpu") not in group._device_types:
        return []
    return list(_backend(group, torch.device("cpu")).options._devices)


def _backend(group: Any, device: Any) -> Any:
    found = group._get_backend(device)
    return getattr(found, "wrapped_pg", found)  # TORCH_DISTRIBUTED_DEBUG wraps it
