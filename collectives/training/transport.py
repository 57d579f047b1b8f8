"""What lanes run on: a communicator of linkweave, or a process group of torch.distributed."""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, cast
from weakref import WeakMethod, finalize

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from linkweave.collectives.calls.communicator import Communicator, get_default
from linkweave.collectives.cluster import pieces
from linkweave.collectives.cluster.communicator import ClusterCommunicator
from linkweave.collectives.cluster.join import by_torchrun, init, refuse_being_alone
from linkweave.collectives.cluster.sparse import tree_over
from linkweave.collectives.distributed.group import Group
from linkweave.collectives.distributed.unlisted import Unlisted, kinds_of
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.communication import ALL_GATHER, REDUCE_SCATTER
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.collective import Pairs, targets
from linkweave.collectives.planning.sparse_tree import binomial_tree, merge_tree
from linkweave.collectives.runtime.diagnose import RAISED
from linkweave.collectives.training.program import Op
from linkweave.topology.checks import shown

Counts = Sequence[Sequence[int]]
"""How many elements each rank sends to each rank: `counts[src][dst]`."""


class Queue(Protocol):
    """An all-reduce under way whose layers become final one after another."""

    def dequeue(self, layer: int) -> None:
        """Block until the layer is final."""

    def wait(self) -> Any:
        """Block until all are."""


class Transport(Protocol):
    """The ranks that train together. Lanes are numbered from 0; each is used by one thread."""

    rank: int
    size: int
    device: str
    """The kind of device whose tensors it takes; empty for any."""

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor for gradients."""

    def open(self, lanes: int) -> None:
        """Make sure of so many lanes. All ranks must call it."""

    def average(self, lane: int, x: torch.Tensor) -> None:
        """Average a flat tensor over all ranks, in place; blocks until that is done."""

    def scatter(self, lane: int, x: torch.Tensor) -> None:
        """Average a flat tensor over all ranks, but on each only its share and the remainder
        (`share_of`), and leave anything in the rest; blocks."""

    def gather(self, lane: int, x: torch.Tensor) -> None:
        """Copy each rank's share of a flat tensor to all ranks, in place; blocks."""

    def streams(self, device: torch.device) -> bool:
        """Whether there is `stream` for tensors on the device."""

    def stream(self, lane: int, x: torch.Tensor, sizes: Sequence[int]) -> Queue:
        """Average layers of so many elements, which become final one after another."""

    def tree(self, x: torch.Tensor) -> Tree:
        """The tree along which messages like x are merged."""

    def pairwise(self, lane: int, x: torch.Tensor, pairs: Pairs) -> torch.Tensor | None:
        """Send x from the source of each pair to its target; returns what this rank receives, a
        tensor like x, if it is a target. A rank is in one pair at most. On a GPU, this and all
        other calls on lanes are enqueued on the current stream."""

    def allgather(self, lane: int, x: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, [size, *x.shape]."""

    def alltoall(self, lane: int, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        """Send elements of a flat tensor to each rank; what each rank sends to this one, in rank
        order."""

    def broadcast(self, x: torch.Tensor, source: int = 0, lane: int | None = None) -> None:
        """Copy `x` of rank `source` to all ranks. Not beside another call of this kind, unless it
        is on a lane."""

    def total(self, x: torch.Tensor) -> None:
        """Add `x` up over all ranks, in place. Not beside another call of this kind."""

    def share(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, by rank. Not beside another call of this kind."""

    def before_close(self, method: WeakMethod[Callable[[], None]]) -> None:
        """Call the method, if it still lives, when this rank leaves the others."""

    def abort(self) -> None:
        """Make every rank's calls raise, those under way as well, where this is possible."""

    def close(self) -> None:
        """Free the lanes. All ranks must call it."""


def share_of(x: torch.Tensor, rank: int, size: int) -> tuple[torch.Tensor, ...]:
    """A flat tensor's elements that are divided equally between the ranks, those of them that are
    this rank's share, and the remaining ones, fewer than ranks, which belong to every rank."""
    each = x.numel() // size
    return x[: each * size], x[each * rank : each * (rank + 1)], x[each * size :]


def carry_out(transport: Transport, op: Op, x: torch.Tensor) -> None:
    """Carry out an op of x that is not streamed, in place; blocks."""
    if op.kind == REDUCE_SCATTER:
        transport.scatter(op.lane, x)
    elif op.kind == ALL_GATHER:
        transport.gather(op.lane, x)
    else:
        transport.average(op.lane, x)


class OverCommunicator:
    """Lanes are splits of a communicator, of one machine or several."""

    device = ""

    def __init__(self, communicator: Communicator | ClusterCommunicator) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self._whole = communicator
        self._own: Any = communicator.split()  # the caller goes on using the communicator
        finalize(self, self._own.close).atexit = False  # where nobody has closed it
        self._lanes: list[Any] = []

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.empty(count, dtype=dtype, device=device)
        made: torch.Tensor = self._own.empty(count, dtype)
        return made

    def open(self, lanes: int) -> None:
        for _ in range(lanes - len(self._lanes)):
            lane = self._own.split()
            if not isinstance(lane, ClusterCommunicator):
                lane.leave_cores()
            self._lanes.append(lane)

    def _lane(self, lane: int, compares: bool = False) -> Any:
        """A lane; of the calls on it those need not be compared that are of a program, which all
        ranks have compared."""
        found = self._lanes[lane]
        if isinstance(found, ClusterCommunicator):
            found.compares = compares
        return found

    def average(self, lane: int, x: torch.Tensor) -> None:
        self._lane(lane).allreduce(x, "avg")

    def scatter(self, lane: int, x: torch.Tensor) -> None:
        whole, mine, rest = share_of(x, self.rank, self.size)
        if mine.numel():
            mine.copy_(self._lane(lane).reduce_scatter(whole, "avg"))
        if rest.numel():
            self._lane(lane).allreduce(rest, "avg")

    def gather(self, lane: int, x: torch.Tensor) -> None:
        whole, mine, _ = share_of(x, self.rank, self.size)
        if mine.numel():
            self._lane(lane).allgather(mine.clone(), out=whole.view(self.size, -1))

    def streams(self, device: torch.device) -> bool:
        return True

    def stream(self, lane: int, x: torch.Tensor, sizes: Sequence[int]) -> Queue:
        queue: Queue = self._lane(lane).allreduce_queue(x, sizes, "avg")
        return queue

    def tree(self, x: torch.Tensor) -> Tree:
        if isinstance(self._whole, ClusterCommunicator):
            return tree_over(self._whole.machines)
        return merge_tree(self._own.topology_for(x), x.nbytes)

    def pairwise(self, lane: int, x: torch.Tensor, pairs: Pairs) -> torch.Tensor | None:
        got = torch.empty_like(x) if self.rank in targets(pairs) else None
        self._lanes[lane].sendrecv(x if got is None else got, pairs)
        return got

    def allgather(self, lane: int, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._lane(lane, compares=True).allgather(x)
        return found

    def alltoall(self, lane: int, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        over = self._lanes[lane]
        found: torch.Tensor
        if isinstance(over, ClusterCommunicator):
            found = over.exchange(x, counts)
        elif x.is_cuda:
            found = x.new_empty(sum(row[self.rank] for row in counts))
            over.exchange(x, counts, found)
        else:
            found = over.alltoall(x, None, *splits(counts, self.rank))
        return found

    def broadcast(self, x: torch.Tensor, source: int = 0, lane: int | None = None) -> None:
        (self._own if lane is None else self._lane(lane, compares=True)).broadcast(x, source)

    def total(self, x: torch.Tensor) -> None:
        self._own.allreduce(x)

    def share(self, payload: bytes) -> list[bytes]:
        return shared(payload, self._own.allgather)

    def before_close(self, method: WeakMethod[Callable[[], None]]) -> None:
        self._whole.before_close(partial(_call, method))

    def abort(self) -> None:
        for part in (*self._lanes, self._own):
            part.abort(RAISED)

    def close(self) -> None:
        self._own.close()  # and its splits


class OverGroup:
    """Lanes are groups of gloo and NCCL of the same ranks, as the group has them, and for a group
    of linkweave those of both."""

    device = ""

    def __init__(self, group: Any) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise CollectiveError("this process is not in the process group that it passes")
        self._group, self._kinds = group, kinds_of(group)
        self._own = Unlisted(group, {*self._kinds, "cpu"})  # the caller goes on using the group
        self._lanes: list[Unlisted] = []
        self._met: set[int] = set()  # lanes of which NCCL knows all ranks

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    def open(self, lanes: int) -> None:
        kinds = self._kinds & {self.device} or self._kinds
        self._lanes += [Unlisted(self._group, kinds) for _ in range(lanes - len(self._lanes))]

    def average(self, lane: int, x: torch.Tensor) -> None:
        over = self._lanes[lane]
        if over.nccl_takes(x):
            over.allreduce(x, dist.ReduceOp.AVG)
        elif x.dtype == torch.float16:  # whose sum may overflow
            over.allreduce(x.div_(self.size))
        else:
            over.allreduce(x)
            x /= self.size

    def scatter(self, lane: int, x: torch.Tensor) -> None:
        over = self._lanes[lane]
        whole, mine, rest = share_of(x, self.rank, self.size)
        if mine.numel() and over.nccl_takes(x):
            found = torch.empty_like(mine)
            over.reduce_scatter(whole, found, dist.ReduceOp.AVG)
            mine.copy_(found)
        elif mine.numel():  # gloo's reduce-scatter is an all-reduce inside, which takes twice this
            rows = torch.empty_like(whole)
            over.alltoall(whole, rows, [], [])
            wide = torch.float32 if x.element_size() < 4 else x.dtype
            mine.copy_(rows.view(self.size, -1).sum(0, dtype=wide) / self.size)
        if rest.numel():
            self.average(lane, rest)

    def gather(self, lane: int, x: torch.Tensor) -> None:
        whole, mine, _ = share_of(x, self.rank, self.size)
        if mine.numel():
            self._lanes[lane].allgather(mine.clone(), whole)

    def _refuse(self, x: torch.Tensor) -> None:
        """Raise for tensors that the group would take for those of another device."""
        if x.is_cuda and not self._own.nccl_takes(x):
            raise CollectiveError(
                "gTop-k and embeddings on GPUs need a group of NCCL, or linkweave.init(), not one "
                "of gloo"
            )

    def streams(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def stream(self, lane: int, x: torch.Tensor, sizes: Sequence[int]) -> Queue:
        return GroupQueue(x, sizes, self._lanes[lane].of(x), self.size)

    def tree(self, x: torch.Tensor) -> Tree:
        return binomial_tree(self.size)

    def pairwise(self, lane: int, x: torch.Tensor, pairs: Pairs) -> torch.Tensor | None:
        over = self._lanes[lane]
        self._refuse(x)
        if x.is_cuda and lane not in self._met:  # NCCL needs all ranks before messages of some
            self._met.add(lane)
            over.allreduce(x.new_zeros(1))
        to, source = dict(pairs).get(self.rank), targets(pairs).get(self.rank)
        got = None if source is None else torch.empty_like(x)
        if to is not None or source is not None:
            over.sendrecv(x, to, got, source)
        return got

    def allgather(self, lane: int, x: torch.Tensor) -> torch.Tensor:
        return self._allgather(self._lanes[lane], x)

    def _allgather(self, over: Unlisted, x: torch.Tensor) -> torch.Tensor:
        every = x.new_empty((self.size, *x.shape))
        over.allgather(x.view(-1), every.view(-1))
        return every

    def alltoall(self, lane: int, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        sends, receives = splits(counts, self.rank)
        self._refuse(x)
        out = x.new_empty(sum(receives))
        self._lanes[lane].alltoall(x, out, sends, receives)
        return out

    def broadcast(self, x: torch.Tensor, source: int = 0, lane: int | None = None) -> None:
        (self._own if lane is None else self._lanes[lane]).broadcast(x, source)

    def total(self, x: torch.Tensor) -> None:
        self._own.allreduce(x)

    def share(self, payload: bytes) -> list[bytes]:
        return shared(payload, partial(self._allgather, self._own))

    def before_close(self, method: WeakMethod[Callable[[], None]]) -> None:
        def call(process: int) -> None:
            if os.getpid() == process:  # not in a child that was forked without the lanes' threads
                _call(method)

        atexit.register(call, os.getpid())

    def abort(self) -> None:
        with ExitStack() as last:  # one that raises does not spare the others
            for over in (*self._lanes, self._own):
                last.callback(over.abort)

    def close(self) -> None:
        for over in (*self._lanes, self._own):
            over.close()
        self._group = None  # whose store may have to end with it


def _call(method: WeakMethod[Callable[[], None]]) -> None:
    if found := method():
        found()


def shared(payload: bytes, allgather: Callable[[torch.Tensor], torch.Tensor]) -> list[bytes]:
    """The payloads of all ranks, by rank; `allgather` takes CPU tensors of one size."""
    sizes = allgather(torch.tensor([len(payload)], device="cpu")).flatten().tolist()
    padded = list(payload.ljust(max(sizes), b"\0"))
    rows = allgather(torch.tensor(padded, dtype=torch.uint8, device="cpu"))
    return [bytes(row[:size].tolist()) for row, size in zip(rows, sizes, strict=True)]


def splits(counts: Counts, rank: int) -> tuple[list[int], list[int]]:
    """What a rank sends to each rank, and receives from each."""
    return [*counts[rank]], [row[rank] for row in counts]


def parted(transport: Transport, text: str) -> int | None:
    """The first rank whose text differs from rank 0's; None if all are equal."""
    rows = transport.share(hashlib.sha256(text.encode()).digest())
    return next((rank for rank, row in enumerate(rows) if row != rows[0]), None)


def send(transport: Transport, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
    """Copy rank `source`'s tensors, of any dtype but sparse ones, to all ranks, by one broadcast a
    device."""
    devices: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and tensor.layout is torch.strided:
            devices.setdefault(tensor.device, []).append(tensor)
    with torch.no_grad():
        for same in devices.values():
            plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in same]
            flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in plain]
            whole = torch.cat(flat)
            transport.broadcast(whole, source)
            if transport.rank != source:
                for tensor, part in zip(
                    same, torch.split(whole, [x.numel() for x in flat]), strict=True
                ):
                    found = part.clone() if part.storage_offset() % 16 else part
                    # not a write that autograd sees: a graph may have saved the buffer
                    tensor.data.copy_(found.view(tensor.dtype).view(tensor.shape))


def transport_of(group: Any, device: str = "cpu") -> Transport | None:
    """The transport for tensors on a kind of device, for the `group` that a caller passes; None for
    a single rank.

    None means the default communicator, or else the default group of torch.distributed, or else
    the ranks that torchrun has started, or else this process alone, which is an error if a launcher
    has started several. On GPUs, a group of linkweave takes its own kernels for all
    calls if `CudaEngine` is to take all, and otherwise NCCL. Raises CollectiveError for anything
    else.
    """
    if group is None:
        try:
            group = get_default()
        except CollectiveError:
            if dist.is_initialized():
                group = dist.group.WORLD
            elif by_torchrun():
                group = init()
            else:
                refuse_being_alone()
                return None
    if isinstance(group, Group) and dist.get_world_size(group) > 1:
        kinds = group.communicator.allgather(
            torch.tensor([ord(x) for x in f"{device:8}"[:8]], device="cpu")
        )
        if (kinds != kinds[0]).any():
            raise CollectiveError(f"ranks have parameters on different devices; mine: {device}")
        ours = device == "cpu" or (
            group.engine.every and not isinstance(group.communicator, ClusterCommunicator)
        )
        made: Any = OverCommunicator(group.communicator) if ours else OverGroup(group)
        made.device = device
        return cast(Transport, made)
    if isinstance(group, Group):
        return None
    if isinstance(group, Communicator | ClusterCommunicator):
        return OverCommunicator(group) if group.size > 1 else None
    if isinstance(group, dist.ProcessGroup):
        return OverGroup(group) if dist.get_world_size(group) > 1 else None
    if all(hasattr(group, name) for name in ("average", "stream", "share")):
        return cast(Transport, group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise CollectiveError("this process is not in the process group that it passes")
    raise CollectiveError(
        "group must be a Communicator or a ProcessGroup of torch.distributed, such as get_group() "
        f"of a mesh gives, not {shown(group)}"
    )


class GroupQueue:
    """Averages a flat tensor in place, in pieces that the group's threads send one after another.

    A layer arrives with the piece that has its end. One thread uses it, and waits for all of it.
    """

    def __init__(self, x: torch.Tensor, sizes: Sequence[int], group: Any, size: int) -> None:
        self._ends, self._size = [*accumulate(sizes)], size
        if x.dtype == torch.float16:  # whose sum may overflow
            x.div_(size)
            self._size = 1
        self._group, self._parts = group, torch.split(x, pieces.QUEUED // x.element_size())
        self._works = [self._send(part) for part in self._parts]
        self._final = self._done = 0  # elements, and pieces

    def _send(self, part: torch.Tensor) -> Any:
        return self._group.allreduce([part], c10d.AllreduceOptions())

    def dequeue(self, layer: int) -> None:
        self._wait(self._ends[layer])

    def wait(self) -> None:
        self._wait(self._ends[-1])

    def _wait(self, end: int) -> None:
        while self._final < end:
            self._works[self._done].wait()
            self._final += self._parts[self._done].div_(self._size).numel()
            self._done += 1
