"""Messages and collectives among ranks of several machines, over torch.distributed's gloo."""

from __future__ import annotations

import math
import os
import re
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from operator import add, and_, mul, or_, xor
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from linkweave.collectives.errors import CollectiveTimeout
from linkweave.collectives.runtime.tensors import dtype_name
from linkweave.kernels.dtypes import step_of
from linkweave.kernels.float_order import from_integers, to_integers

_CLOSING = 1.0
"""Seconds for which a rank that closes its connections waits for calls under way."""


class Across:
    """Rank `rank` of `size`: all ranks, or those with one local rank, one of each machine.

    All calls take contiguous CPU tensors of torch, and return a handle whose `wait` is called once,
    or not at all if the connections are closed. Collectives keep their order, and so do messages
    from one rank to another. Raises RuntimeError.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._gloo: Any = gloo_group(store, rank, size, timeout)

    def send(self, x: Any, to: int) -> Any:
        return self._group.send([x], to, 0)

    def recv(self, x: Any, source: int) -> Any:
        return self._group.recv([x], source, 0)

    def allreduce(self, x: Any, op: str = "sum") -> Any:
        """Combine `x` in place, with the ops of `Communicator.allreduce`. "avg" is the sum; its
        caller divides. 16-bit floats are rounded at each step of gloo's ring. Of zeros, 0 is
        greater than -0."""
        options = c10d.AllreduceOptions()
        return self._combine(x, op, options, self._group.allreduce)

    def reduce(self, x: Any, op: str, root: int) -> Any:
        """As `allreduce`, but only `root` has the result; other ranks' `x` is undefined."""
        options = c10d.ReduceOptions()
        options.rootRank = root
        return self._combine(x, op, options, self._group.reduce, root)

    def _combine(
        self, x: Any, op: str, options: Any, call: Callable[..., Any], root: int | None = None
    ) -> Any:
        options.reduceOp = gloo_op(op, x)
        if op not in ("min", "max") or not x.is_floating_point():
            return call([x], options)
        floats = _Sorted(x, op)
        work = call([floats.keys], options)
        return work if root not in (None, self.rank) else floats.after(work)

    def broadcast(self, x: Any, root: int) -> Any:
        options = c10d.BroadcastOptions()
        options.rootRank = root
        return self._group.broadcast([x], options)

    @property
    def _group(self) -> Any:
        if self._gloo is None:
            raise RuntimeError("the connections to the other machines are closed")
        return self._gloo

    def close(self) -> None:
        """Close the connections, so that nobody waits for this rank; after calls under way."""
        held, self._gloo = [self._gloo], None
        closing = threading.Thread(target=held.clear, daemon=True)
        try:
            closing.start()
        except RuntimeError:  # the interpreter exits: Python 3.12 starts no thread any more
            held.clear()
        else:
            closing.join(_CLOSING)


class _Sorted:
    """Floats as integers in the same order, the `keys`, of which gloo finds the least or greatest:
    its own comparison of floats loses a NaN. The keys are 32-bit ones for 16-bit floats, which gloo
    has not, and else in the memory of the floats."""

    def __init__(self, x: Any, op: str) -> None:
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        self._bits = x.detach().view(-1).view(kind)
        self.keys = self._bits.int() if kind is torch.int16 else self._bits
        found: Any = self.keys.numpy()
        infinity = torch.full((1,), math.inf, dtype=x.dtype).view(kind).item()
        ends = torch.iinfo(kind)
        self._mask = found.dtype.type(ends.max)
        nan = ends.min if op == "min" else ends.max
        to_integers(found, self._mask, found.dtype.type(infinity), found.dtype.type(nan))
        self._work: Any = None

    def after(self, work: Any) -> _Sorted:
        """A handle, whose `wait` waits for `work` and turns the keys into floats again."""
        self._work = work
        return self

    def wait(self) -> None:
        self._work.wait()
        from_integers(self.keys.numpy(), self._mask)
        if self.keys is not self._bits:
            self._bits.copy_(self.keys)


def gloo_group(
    store: Any, rank: int, size: int, timeout: float, devices: Sequence[Any] = ()
) -> Any:
    """A gloo group of `size` ranks, connected to each other. Deleting it closes its connections.

    devices: gloo's own, of the network interfaces; default: the one of `_device`.

    `timeout` is in seconds. Raises CollectiveTimeout if they do not connect. Connecting later
    (gloo's `lazy_init`) would block asynchronous calls, and without a deadline while a link is
    down.
    """
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    try:
        options._devices = list(devices) or [_device()]
        return gloo(store, rank, size, options)
    except RuntimeError as error:
        why = "" if timed_out(error) else "; the process that keeps the store may have ended"
        raise CollectiveTimeout(
            f"rank {rank} of {size} cannot connect to the others{why}: {error}", rank=rank
        ) from error


def timed_out(error: Exception) -> bool:
    """Whether an error of gloo says that a deadline has passed."""
    return re.search("timed out|timeout", str(error), re.IGNORECASE) is not None


def _device() -> Any:
    """The network interface of GLOO_SOCKET_IFNAME, or else the one that leads to MASTER_ADDR."""
    gloo: Any = c10d.ProcessGroupGloo
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return gloo.create_device(interface=names.split(",")[0])
    if address := _own_address(os.environ.get("MASTER_ADDR", "")):
        return gloo.create_device(hostname=address)
    return gloo.create_default_device()


def _own_address(peer: str) -> str:
    """The address from which this machine reaches `peer`; empty if it does not.

    On the machine of `peer` itself that may be a loopback address, which no other machine reaches.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own = str(probe.getsockname()[0])
        loops = own.startswith("127.") or own == "::1"
        return "" if loops and peer not in ("localhost", own) else own
    except OSError:
        return ""


GLOO_DTYPES = {
    "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool",
}  # fmt: skip
"""Those that gloo combines, a bool as a byte."""
OPS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR, "xor": dist.ReduceOp.BXOR,
}  # fmt: skip
"""torch.distributed's name of each op."""

_OF_STEPS = OPS | {"any": OPS["max"], "all": OPS["min"], "odd": OPS["xor"]}
_PAIRWISE = {
    "sum": add, "prod": mul, "min": torch.minimum, "max": torch.maximum, "and": and_, "or": or_,
    "xor": xor, "any": or_, "all": and_, "odd": xor,
}  # fmt: skip


def gloo_op(op: str, x: Any) -> Any:
    """What gloo is asked for, to combine tensors like `x`: for an average, the sum."""
    return _OF_STEPS[step_of(op, dtype_name(x))]


def undivided(op: str) -> str:
    """The op with which values are combined before an average is divided."""
    return "sum" if op == "avg" else op


def combined(rows: Any, op: str) -> Any:
    """The rows of a tensor, or tensors, combined in their order; 16-bit floats are added in float32
    and rounded once. An average is not divided. min and max keep NaN."""
    step, kind = step_of(op, dtype_name(rows[0])), rows[0].dtype
    if step == "sum" and kind in (torch.float16, torch.bfloat16):
        rows = [row.float() for row in rows]
    return reduce(_PAIRWISE[step], rows).to(kind)
