"""The collectives between machines: what goes along with the comparison of a call, and what
carries out a longer one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from linkweave.collectives.calls.request import Request
from linkweave.collectives.cluster.call import Along, ClusterCall
from linkweave.collectives.cluster.cluster_map import AT_ONCE, goes_along
from linkweave.collectives.cluster.connections import Connections
from linkweave.collectives.planning.collective import COLLECTIVES


def call_of(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    """The call of a request from the flat `x` to the flat `out`, which is `x` in place, and None on
    a rank that gets no result."""
    return _KINDS[request.kind](links, request, x, out)


def _asked(request: Request) -> str:
    """What is asked for, which all ranks compare."""
    kind, buffer = request.kind, request.buffer
    if (collective := COLLECTIVES.get(kind)) is None:
        return kind
    words = [f"{buffer.nbytes // buffer.itemsize} x {buffer.dtype}"]
    words += [request.op] * collective.combines
    words += [f"root {request.root}"] * (collective.root == "rank")
    if request.layers is not None:
        words.append(f"layers {[n // buffer.itemsize for n in request.layers]}")
    if request.parts:
        words.append(f"parts of sizes {request.parts:08x}")
    return f"{kind}({', '.join(words)})"


def _root(request: Request) -> int:
    assert isinstance(request.root, int)
    return request.root


def _combining(
    links: Connections, x: Any, op: str, finish: Callable[[Any], Any], to: int | None = None
) -> Along | None:
    """All values go to all machines at once; or if they are many, each machine combines a share.
    None if that would change the order in which they are combined."""
    count = links.machines.count
    if links.fixed:
        return None
    if x.nbytes * (count - 1) <= AT_ONCE:
        return Along(x, [x.nbytes] * count, finish, op=op) if x.nbytes else None
    if not goes_along(-(-x.nbytes // count), count):
        return None
    ends = [x.numel() * m // count * x.element_size() for m in range(count + 1)]
    shares = [stop - start for start, stop in pairwise(ends)]
    lengths = [shares[links.index]] * count
    return Along(x, lengths, finish, lambda of, m: of[ends[m] : ends[m + 1]], op, shares, to)


def _barrier(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    return ClusterCall(_asked(request), lambda: None)


def _allreduce(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    op, sizes = request.op, request.layers
    arrivals: Any = request.layer_counters  # `communicator.Arrivals`

    def body() -> None:
        if out is not x:
            out.copy_(x)
        if sizes is not None:
            arrivals.begin([n // x.element_size() for n in sizes])
        links.allreduce(out, op, arrivals.reach if arrivals else None)

    along = None if arrivals else _combining(links, x, op, out.copy_)
    return ClusterCall(_asked(request), body, along)


def _broadcast(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    count, x, root = links.machines.count, x.view(torch.uint8), _root(request)
    at, local = links.machines.position(root)

    def part(rows: Any, m: int) -> Any:
        return rows[local] if links.index == at else rows[:0]

    along = None
    if goes_along(x.nbytes, count):
        lengths = [x.nbytes * (m == at) for m in range(count)]
        along = Along(x, lengths, lambda came: x.copy_(came[at]), part)
    body = lambda: links.pieces.broadcast(x, root)  # noqa: E731
    return ClusterCall(_asked(request), body, along, source=at)


def _reduce(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    op, root = request.op, _root(request)
    at = links.machines.position(root)[0]

    def finish(total: Any) -> None:
        if out is not None:
            out.copy_(total)

    along = _combining(links, x, op, finish, at)
    body = lambda: links.rows.reduce(x, out, op, root)  # noqa: E731
    return ClusterCall(_asked(request), body, along, target=None if along and along.shares else at)


def _allgather(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    machines, x, out = links.machines, x.view(torch.uint8), out.view(torch.uint8)
    widths: Any = request.sizes or [x.nbytes] * links.size

    def finish(came: Sequence[Any]) -> None:
        each = [of.view(len(ranks), -1) for of, ranks in zip(came, machines.ranks, strict=True)]
        positions = [machines.position(r) for r in range(links.size)]
        parts = [each[m][at, :n] for n, (m, at) in zip(widths, positions, strict=True)]
        torch.cat(parts, out=out)

    along, longest = None, max(widths)
    if goes_along(machines.most * longest, machines.count):
        lengths = [longest * len(ranks) for ranks in machines.ranks]
        along = Along(_padded(x, longest), lengths, finish, lambda rows, _: rows)
    return ClusterCall(_asked(request), lambda: links.rows.allgather(x, out, widths), along)


def _padded(x: Any, nbytes: int) -> Any:
    """Bytes, followed by undefined ones up to so many."""
    return x if x.nbytes == nbytes else torch.cat([x, x.new_empty(nbytes - x.nbytes)])


def _reduce_scatter(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    op, width, ranks = request.op, out.nbytes, links.machines.ranks

    def part(of: Any, m: int) -> Any:
        return of.view(links.size, width)[[*ranks[m]]]

    def finish(total: Any) -> None:
        out.copy_(total.view(len(links.mine), -1)[links.machine.rank])

    along = None
    if not links.fixed and goes_along(links.machines.most * width, links.machines.count):
        lengths = [width * len(links.mine)] * len(ranks)
        along = Along(x, lengths, finish, part, op)
    body = lambda: links.rows.reduce_scatter(x.view(links.size, -1), out, op)  # noqa: E731
    return ClusterCall(_asked(request), body, along)


def _gather(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    root, machines, x = _root(request), links.machines, x.view(torch.uint8)
    at, rows = machines.position(root)[0], None
    if out is not None:
        rows = out.view(torch.uint8).view(links.size, -1)

    def finish(came: Sequence[Any]) -> None:
        if rows is not None:
            for part, ranks in zip(came, machines.ranks, strict=True):
                rows[[*ranks]] = part.view(len(ranks), -1)

    along = None
    if goes_along(machines.most * x.nbytes, machines.count):
        lengths = [x.nbytes * len(ranks) * (links.index == at) for ranks in machines.ranks]
        along = Along(x, lengths, finish, lambda rows, m: rows if m == at else rows[:0])
    body = lambda: links.rows.gather(x, rows, root)  # noqa: E731
    return ClusterCall(_asked(request), body, along, target=at)


def _scatter(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    root, ranks, out = _root(request), links.machines.ranks, out.view(torch.uint8)
    at, local = links.machines.position(root)
    given = x.view(torch.uint8)  # of the root only

    def part(rows: Any, m: int) -> Any:
        return rows[local].view(links.size, -1)[[*ranks[m]]] if links.index == at else rows[:0]

    def finish(came: Sequence[Any]) -> None:
        out.copy_(came[at].view(-1, out.nbytes)[links.machine.rank])

    def body() -> None:
        links.rows.scatter(given.view(links.size, -1) if links.rank == root else None, out, root)

    along = None
    if goes_along(links.machines.most * out.nbytes, links.machines.count):
        if links.index == at and links.rank != root:  # its machine gathers as much of each rank
            given = out.new_empty(links.size * out.nbytes)
        lengths = [out.nbytes * len(links.mine) * (m == at) for m in range(len(ranks))]
        along = Along(given, lengths, finish, part)
    return ClusterCall(_asked(request), body, along, source=at)


def _alltoall(links: Connections, request: Request, x: Any, out: Any) -> ClusterCall:
    x, out = x.view(torch.uint8), out.view(torch.uint8)
    ranks, mine = links.machines.ranks, links.mine
    sizes: Any = request.sizes or [[x.nbytes // links.size] * links.size] * links.size

    def part(rows: Any, m: int) -> Any:
        parts: list[Any] = []
        for row, source in zip(rows, mine, strict=True):
            each = row[: sum(sizes[source])].split([*sizes[source]])
            parts += [each[to] for to in ranks[m]]
        return torch.cat(parts)

    def finish(came: Sequence[Any]) -> None:
        parts: dict[int, Any] = {}
        for sources, of in zip(ranks, came, strict=True):
            each = of.split([sizes[s][to] for s in sources for to in mine])
            parts |= dict(zip(sources, each[links.machine.rank :: len(mine)], strict=True))
        torch.cat([parts[s] for s in range(links.size)], out=out)

    along, longest = None, max(map(sum, sizes))
    if goes_along(links.machines.most * longest, links.machines.count):
        lengths = [sum(sizes[s][to] for s in of for to in mine) for of in ranks]
        along = Along(_padded(x, longest), lengths, finish, part)
    return ClusterCall(_asked(request), lambda: links.rows.alltoall(x, out, sizes), along)


_KINDS: dict[str, Callable[[Connections, Request, Any, Any], ClusterCall]] = {
    "barrier": _barrier, "allreduce": _allreduce, "broadcast": _broadcast, "reduce": _reduce,
    "allgather": _allgather, "reduce_scatter": _reduce_scatter, "gather": _gather,
    "scatter": _scatter, "alltoall": _alltoall,
}  # fmt: skip
