"""The collectives between machines: what goes along with the comparison of a call, and what
carries out a longer one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from linkweave.collectives.calls.request import Request, parts_words, values
from linkweave.collectives.cluster.cluster_map import (
    AT_ONCE,
    MIDDLE,
    QUICK,
    SHORT,
    goes_along,
    rows_along,
)
from linkweave.collectives.cluster.connections import Connections
from linkweave.collectives.cluster.gloo import combined, undivided
from linkweave.collectives.cluster.machines import Machines
from linkweave.collectives.planning.collective import COLLECTIVES

Bytes = NDArray[np.uint8]
NOTHING: Bytes = np.empty(0, np.uint8)

_LONG = 200  # characters


@dataclass
class Along:
    """A message that goes along while the first ranks of the machines compare their calls.

    given: this rank's, flat, of as many bytes on all ranks.
    lengths: the bytes that come from each machine; with an op, as many from each.
    finish: what to do with the bytes of each machine, or with the combined values.
    part: what a machine gets, flat, of the rows of this machine's ranks, or of their combined
        values; None: all.
    op: with which values of `kind` are combined; empty: only moved.
    shares: the bytes of each machine's share, if each combines one, and then sends it on.
    to: the machine that alone gets these; None: all do.
    of_first: whether only the first rank of the machine has something to give.
    for_first: whether only the first rank of a machine needs what comes.
    quick: whether this is how the call is made too where nothing need be compared.
    """

    given: Bytes
    lengths: Sequence[int]
    finish: Callable[[Any], Any]
    part: Callable[[Any, int], Bytes] | None = None
    op: str = ""
    kind: Any = None
    shares: Sequence[int] = ()
    to: int | None = None
    of_first: bool = False
    for_first: bool = False
    quick: bool = True

    @property
    def nbytes(self) -> int:
        """The bytes that each rank gets from the first one of its machine."""
        if self.for_first:
            return 0
        return sum(self.shares or (self.lengths[:1] if self.op else self.lengths))

    def parts(self, rows: NDArray[np.uint8]) -> list[Bytes]:
        """What each machine gets of `rows` of bytes, one of each local rank."""
        of, machines = self._combined(rows) if self.op else rows, range(len(self.lengths))
        if self.part is None:
            return [of.reshape(-1)] * len(machines)
        return [self.part(of, m) for m in machines]

    def merged(self, came: Sequence[Bytes], size: int) -> Sequence[Bytes]:
        """What `came` from each machine, or if there is an op, that combined for `size` ranks."""
        if not self.op:
            return came
        total = self._combined(came)
        if self.op == "avg":
            torch.from_numpy(total).view(self.kind).div_(size)
        return (total,)

    def _combined(self, rows: Any) -> Bytes:
        values = [torch.from_numpy(row).view(self.kind) for row in rows]
        total: Bytes = combined(values, undivided(self.op)).view(torch.uint8).numpy()
        return total

    def split(self, merged: Bytes) -> Sequence[Bytes]:
        """What is `merged`, which a rank has in one copy."""
        if self.op:
            return (merged,)
        return [merged[a:b] for a, b in pairwise((0, *accumulate(self.lengths)))]

    def end(self, merged: Sequence[Bytes]) -> Any:
        """Finish the call; without anything merged, that of a rank which only sends."""
        if not merged:
            return None
        if self.op:
            return self.finish(torch.from_numpy(merged[0]).view(self.kind))
        return self.finish(merged)


@dataclass
class ClusterCall:
    """One rank's side of a call.

    asked: what it asks for, as text that all ranks compare; a long one ends with its checksum.
    body: carries it out, once all ranks have compared it, or where they do not; if something goes
        `along` with a comparison, that ends the call instead.
    source: the machine from which alone the others hear what goes along; None: from all.
    target: the machine that alone hears from the others; None: all do.
    """

    asked: str
    body: Any
    along: Along | None = None
    source: int | None = None
    target: int | None = None

    def __post_init__(self) -> None:
        if self.along is None:  # nobody may begin `body` before all have compared the call
            self.source = self.target = None
        if len(self.asked) > _LONG:
            self.asked = f"{self.asked[:_LONG]}... {crc32(self.asked.encode()):08x})"

    @property
    def one_way(self) -> bool:
        """Whether some machines do not hear from the others."""
        return self.source is not None or self.target is not None

    @cached_property
    def word(self) -> int:
        """A checksum of what is asked for."""
        return int.from_bytes(blake2b(self.asked.encode(), digest_size=7).digest(), "little")


def call_of(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    """The call of a request from the flat `x` to the flat `out`, which is `x` in place, and None on
    a rank that gets no result."""
    return _KINDS[request.kind](links, request, x, out)


def _asked(request: Request) -> str:
    """What is asked for, which all ranks compare."""
    kind, buffer = request.kind, request.buffer
    if (collective := COLLECTIVES.get(kind)) is None:
        return kind
    words = [values(kind, buffer.nbytes // buffer.itemsize, buffer.dtype)]
    words += [request.op] * collective.combines
    words += [f"root {request.root}"] * (collective.root == "rank")
    if request.layers is not None:
        words.append(f"layers {[n // buffer.itemsize for n in request.layers]}")
    if request.parts:
        words.append(parts_words(request.parts))
    return f"{kind}({', '.join(words)})"


def _root(request: Request) -> int:
    assert isinstance(request.root, int)
    return request.root


def _combining(
    links: Connections, x: Any, op: str, finish: Callable[[Any], Any], to: int | None = None,
    for_first: bool = False,
) -> Along | None:  # fmt: skip
    """All values go to all machines at once; or if they are many, each machine combines a share.
    None if that would change the order in which they are combined."""
    count = links.machines.count
    if links.fixed:
        return None
    if x.nbytes * (count - 1) <= AT_ONCE:
        if not x.nbytes:
            return None
        every = [x.nbytes] * count
        return Along(_bytes(x), every, finish, op=op, kind=x.dtype, for_first=for_first)
    if not goes_along(-(-x.nbytes // count), count, SHORT):
        return None
    ends = [x.numel() * m // count * x.element_size() for m in range(count + 1)]
    shares = [stop - start for start, stop in pairwise(ends)]
    lengths = [shares[links.index]] * count

    def part(of: Bytes, m: int) -> Bytes:
        return of[ends[m] : ends[m + 1]]

    return Along(_bytes(x), lengths, finish, part, op, x.dtype, shares, to, for_first=for_first)


def _bytes(x: Any) -> Bytes:
    """The memory of a flat tensor."""
    found: Bytes = x.view(torch.uint8).numpy()
    return found


def _barrier(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    return ClusterCall(_asked(request), lambda: None)


def _allreduce(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    op, sizes = request.op, request.layers
    arrivals = request.layer_counters

    def body() -> None:
        if out is not x:
            out.copy_(x)
        if arrivals and sizes is not None:  # one track, which counts elements
            arrivals.begin(np.cumsum(sizes)[:, None] // x.element_size())
        links.allreduce(out, op, arrivals.reach if arrivals else None)

    along = None if arrivals else _combining(links, x, op, out.copy_)
    return ClusterCall(_asked(request), body, along)


def _broadcast(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    count, root = links.machines.count, _root(request)
    at, local = links.machines.position(root)
    given, along = _bytes(x), None

    def part(rows: Any, m: int) -> Bytes:
        found: Bytes = rows[local] if links.index == at else NOTHING
        return found

    def finish(came: Sequence[Bytes]) -> None:
        if links.rank != root:
            given[:] = came[at]

    if goes_along(x.nbytes, count, MIDDLE):  # others send on longer ones
        lengths = [x.nbytes * (m == at) for m in range(count)]
        along = Along(given, lengths, finish, part, of_first=local == 0)
    body = lambda: links.pieces.broadcast(x.view(torch.uint8), root)  # noqa: E731
    return ClusterCall(_asked(request), body, along, source=at)


def _reduce(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    op, root = request.op, _root(request)
    at, local = links.machines.position(root)

    def finish(total: Any) -> None:
        if out is not None:
            out.copy_(total)

    along = _combining(links, x, op, finish, at, local == 0)
    body = lambda: links.reduce(x, out, op, root)  # noqa: E731
    return ClusterCall(_asked(request), body, along, target=None if along and along.shares else at)


def _allgather(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    machines, x, out = links.machines, x.view(torch.uint8), out.view(torch.uint8)
    widths: Any = request.sizes or [x.nbytes] * links.size
    whole, ends = _bytes(out), [0, *accumulate(widths)]

    def finish(came: Sequence[Bytes]) -> None:
        for of, ranks in zip(came, machines.ranks, strict=True):
            for row, r in zip(of.reshape(len(ranks), -1), ranks, strict=True):
                whole[ends[r] : ends[r + 1]] = row[: widths[r]]

    along, longest = None, max(widths)
    if _moves_along(machines, longest):
        lengths = [longest * len(ranks) for ranks in machines.ranks]
        along = Along(_padded(_bytes(x), longest), lengths, finish)
    return ClusterCall(_asked(request), lambda: links.rows.allgather(x, out, widths), along)


def _moves_along(machines: Machines, nbytes: int) -> bool:
    """Whether rows of so many bytes for each rank go along."""
    return goes_along(machines.most * nbytes, machines.count, rows_along(machines.most))


def _padded(x: Bytes, nbytes: int) -> Bytes:
    """Bytes, followed by undefined ones up to so many."""
    return x if x.size == nbytes else np.concatenate([x, np.empty(nbytes - x.size, np.uint8)])


def _reduce_scatter(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    op, width, machines = request.op, out.nbytes, links.machines

    def part(of: Bytes, m: int) -> Bytes:
        return of.reshape(links.size, width)[machines.spans[m]].reshape(-1)

    def finish(total: Any) -> None:
        out.copy_(total.view(len(links.mine), -1)[links.machine.rank])

    along = None
    if not links.fixed and _moves_along(machines, width):
        lengths = [width * len(links.mine)] * machines.count
        along = Along(_bytes(x), lengths, finish, part, op, x.dtype)
    body = lambda: links.rows.reduce_scatter(x.view(links.size, -1), out, op)  # noqa: E731
    return ClusterCall(_asked(request), body, along)


def _gather(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    root, machines, x = _root(request), links.machines, x.view(torch.uint8)
    (at, local), rows = machines.position(root), None
    if out is not None:
        rows = out.view(torch.uint8).view(links.size, -1)

    def part(of: Any, m: int) -> Bytes:
        return of.reshape(-1) if m == at else NOTHING

    def finish(came: Sequence[Bytes]) -> None:
        if rows is not None:
            every = rows.numpy()
            for of, ranks, span in zip(came, machines.ranks, machines.spans, strict=True):
                every[span] = of.reshape(len(ranks), -1)

    along = None
    if _moves_along(machines, x.nbytes):
        lengths = [x.nbytes * len(ranks) * (links.index == at) for ranks in machines.ranks]
        quick = links.size * x.nbytes <= QUICK
        along = Along(_bytes(x), lengths, finish, part, for_first=local == 0, quick=quick)
    body = lambda: links.rows.gather(x, rows, root)  # noqa: E731
    return ClusterCall(_asked(request), body, along, target=at)


def _scatter(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    root, machines, out = _root(request), links.machines, out.view(torch.uint8)
    at, local = machines.position(root)
    given, mine = x.view(torch.uint8), _bytes(out)  # given: of the root only

    def part(rows: Any, m: int) -> Bytes:
        if links.index != at:
            return NOTHING
        found: Bytes = rows[local].reshape(links.size, -1)[machines.spans[m]].reshape(-1)
        return found

    def finish(came: Sequence[Bytes]) -> None:
        mine[:] = came[at].reshape(-1, mine.size)[links.machine.rank]

    def body() -> None:
        links.rows.scatter(given.view(links.size, -1) if links.rank == root else None, out, root)

    along = None
    if _moves_along(machines, out.nbytes):
        sent = _bytes(given)
        if links.index == at and links.rank != root and local:  # as much of each rank is gathered
            sent = links.scratch(links.size * out.nbytes)
        lengths = [out.nbytes * len(links.mine) * (m == at) for m in range(machines.count)]
        quick = links.size * out.nbytes <= QUICK
        along = Along(sent, lengths, finish, part, of_first=local == 0, quick=quick)
    return ClusterCall(_asked(request), body, along, source=at)


def _alltoall(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    x, out, rank = x.view(torch.uint8), out.view(torch.uint8), links.rank
    ranks, mine = links.machines.ranks, links.mine
    sizes: Any = request.sizes or [[x.nbytes // links.size] * links.size] * links.size
    body = lambda: links.rows.alltoall(x, out, sizes)  # noqa: E731
    if not _exchanges_along(links.machines, sizes, request.sizes is None):
        return ClusterCall(_asked(request), body)
    sent = [[0, *accumulate(sizes[source])] for source in mine]
    got = [0, *accumulate(of[rank] for of in sizes)]
    moves, lengths = [], []  # (machine, where in its bytes, rank of whom)
    for m, sources in enumerate(ranks):
        start = 0
        for source in sources:
            each = [sizes[source][to] for to in mine]
            moves.append((m, start + sum(each[: links.machine.rank]), source))
            start += sum(each)
        lengths.append(start)
    whole = _bytes(out)

    def part(rows: Any, m: int) -> Bytes:
        each = [
            row[ends[to] : ends[to + 1]]
            for row, ends in zip(rows, sent, strict=True) for to in ranks[m]
        ]  # fmt: skip
        return each[0] if len(each) == 1 else np.concatenate(each)

    def finish(came: Sequence[Bytes]) -> None:
        for m, start, source in moves:
            to = whole[got[source] : got[source + 1]]
            to[:] = came[m][start : start + to.size]

    most = max(map(sum, sizes))
    along = Along(_padded(_bytes(x), most), lengths, finish, part, quick=most <= QUICK)
    return ClusterCall(_asked(request), body, along)


def _exchanges_along(machines: Machines, sizes: Any, even: bool) -> bool:
    """Whether an all-to-all goes along: by the most bytes that a machine sends to another one."""
    frame = machines.most**2 * sizes[0][0]
    if not even:
        frame = max(
            sum(sizes[source][to] for source in ranks for to in others)
            for ranks in machines.ranks for others in machines.ranks
        )  # fmt: skip
    limit = MIDDLE if machines.most == 1 else SHORT  # else parts are cut on the way
    return goes_along(frame, machines.count, limit)


_KINDS: dict[str, Callable[[Connections, Request, Any, Any], ClusterCall]] = {
    "barrier": _barrier, "allreduce": _allreduce, "broadcast": _broadcast, "reduce": _reduce,
    "allgather": _allgather, "reduce_scatter": _reduce_scatter, "gather": _gather,
    "scatter": _scatter, "alltoall": _alltoall,
}  # fmt: skip
