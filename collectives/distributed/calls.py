"""The calls of ranks on several machines: each checks its arguments, and returns what to compare
with the other ranks and what to do then."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from linkweave.collectives.calls.aliasing import refuse_overlaps
from linkweave.collectives.calls.operations import check_list, layer_sizes, one_dtype
from linkweave.collectives.calls.rows import needs_out, row_counts, rows_each, rows_sent
from linkweave.collectives.calls.subcommunicators import MOST_LANES
from linkweave.collectives.distributed.call import Call, Unequal
from linkweave.collectives.distributed.cluster_map import SMALL
from linkweave.collectives.distributed.connections import Connections
from linkweave.collectives.distributed.flat import Flat
from linkweave.collectives.distributed.queue import Arrivals
from linkweave.collectives.distributed.sparse import SparseCluster
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.dtypes import check_op
from linkweave.collectives.tensors import as_buffer, output_for
from linkweave.topology.checks import integer


def _along(*tensors: Any) -> Any:
    """Flat values in one tensor of their own if a comparison can take them along, else None."""
    return torch.cat(tensors) if 0 < sum(x.nbytes for x in tensors) <= SMALL else None


def _apart(flat: Flat | None, first: int, nbytes: int) -> Any:
    """The bytes of a tensor, if there is one, among zeros, from `first` on, if as many as `nbytes`
    can go along with a comparison, else None: their sum over all ranks has everyone's."""
    if not 0 < nbytes <= SMALL:
        return None
    values = torch.zeros(nbytes, dtype=torch.uint8)
    if flat:
        values[first : first + flat.nbytes] = flat.tensor.view(torch.uint8)
    return values


def _result(x: Any, shape: tuple[int, ...], out: Any) -> Any:
    """`out`, or a new tensor. Raises CollectiveError if `out` does not fit or overlaps `x`."""
    result = output_for(x, shape, out)
    if out is not None:
        refuse_overlaps([x], [out])
    return result


def allreduce(comm: Connections, x: Any, op: Any, out: Any, algorithm: Any) -> Call:
    _check_algorithm(algorithm)
    if isinstance(x, list | tuple):
        return _allreduce_list(comm, list(x), op, out)
    given, flat = _in_place(x, out)
    check_op(op, flat.dtype)
    source = given or flat

    def finish(total: Any) -> Any:
        flat.tensor.copy_(total)
        flat.done()
        return out

    def body() -> Any:
        if given is not None:
            flat.tensor.copy_(given.tensor)
        comm.pieces.allreduce(flat.tensor, op)
        flat.done()
        return out

    values = _along(source.tensor)
    return Call(f"allreduce({flat}, {op})", body, values, op, finish)


def allreduce_queue(
    comm: Connections, x: Any, layers: Any, op: Any, algorithm: Any, arrivals: Arrivals
) -> Call:
    _check_algorithm(algorithm)
    flat = Flat(x)
    check_op(op, flat.dtype)
    sizes = layer_sizes(x, layers, flat.tensor.numel())

    def body() -> None:
        arrivals.begin(sizes)
        comm.pieces.allreduce(flat.tensor, op, arrivals.reach)

    return Call(f"allreduce_queue({flat}, {op}, layers {sizes})", body)


ALLREDUCES = allreduce, allreduce_queue
"""The calls that `ClusterCommunicator.compares_allreduces` is about."""


def _check_algorithm(algorithm: Any) -> None:
    if algorithm != "auto":
        raise CollectiveError(f'on several machines the algorithm is "auto", not {algorithm!r}')


def _in_place(x: Any, out: Any, written: bool = True) -> tuple[Flat | None, Flat]:
    """(the values if they are elsewhere, the tensor to work on)."""
    if out is None or out is x:
        return None, Flat(x, written)
    given = Flat(x, written=False)
    return given, Flat(_result(x, tuple(x.shape), out))


def _allreduce_list(comm: Connections, tensors: list[Any], op: Any, out: Any) -> Call:
    check_list(tensors, out)
    flats = [Flat(x, written=out is None) for x in tensors]
    results = flats
    if out is not None:
        results = [Flat(y) for y in out]
        for x, y in zip(tensors, out, strict=True):
            output_for(x, tuple(x.shape), y)
    refuse_overlaps(*(([], tensors) if out is None else (tensors, out)))
    check_op(op, one_dtype(flat.dtype for flat in flats))
    sizes = [flat.tensor.numel() for flat in flats]

    def finish(whole: Any) -> Any:
        for part, flat in zip(torch.split(whole, sizes), results, strict=True):
            flat.tensor.copy_(part)
            flat.done()
        return out

    def body() -> Any:
        whole = torch.cat([flat.tensor for flat in flats])
        comm.pieces.allreduce(whole, op)
        return finish(whole)

    values = _along(*(flat.tensor for flat in flats))
    return Call(f"allreduce([{', '.join(map(str, flats))}], {op})", body, values, op, finish)


def broadcast(comm: Connections, x: Any, root: Any) -> Call:
    root, flat = integer(root, "root", 0, comm.size - 1), Flat(x)

    def finish(total: Any) -> None:
        flat.tensor.view(torch.uint8).copy_(total)
        flat.done()

    def body() -> None:
        comm.pieces.broadcast(flat.tensor, root)
        flat.done()

    values = _along(flat.tensor.view(torch.uint8))
    if values is not None and comm.rank != root:
        values.zero_()  # the total is the root's bytes
    return Call(f"broadcast({flat}, root {root})", body, values, "sum", finish)


def reduce(comm: Connections, x: Any, op: Any, root: Any, out: Any) -> Call:
    root = integer(root, "root", 0, comm.size - 1)
    mine = comm.rank == root
    given, flat = _in_place(x, out if mine else None, written=mine)
    check_op(op, flat.dtype)
    source = given or flat

    def finish(total: Any) -> Any:
        if comm.rank != root:
            return None
        flat.tensor.copy_(total)
        flat.done()
        return out

    def body() -> Any:
        whole = source.tensor.clone()
        comm.pieces.reduce(whole, op, root)
        return finish(whole)

    values = _along(source.tensor)
    return Call(f"reduce({flat}, {op}, root {root})", body, values, op, finish)


def allgather(comm: Connections, x: Any, counts: Any, out: Any) -> Call:
    flat = Flat(x, written=False)
    if counts is None:
        rows, asked = None, f"allgather({flat})"
        shape = (comm.size, *x.shape)
    else:
        rows = row_counts("counts", counts, comm.size)
        if not x.shape or len(x) != rows[comm.rank]:
            raise CollectiveError(
                f"counts says {rows[comm.rank]} rows for rank {comm.rank}, whose tensor has shape "
                f"{tuple(x.shape)}"
            )
        shape = (sum(rows), *x.shape[1:])
        asked = f"allgather({flat.dtype}, rows of {tuple(x.shape[1:])}, counts {rows})"
    out = _result(x, shape, out)
    whole = Flat(out)

    def finish(every: Any) -> Any:
        whole.tensor.view(torch.uint8).copy_(every)
        whole.done()
        return out

    def body() -> Any:
        if rows is None:
            comm.rows.allgather(flat.tensor, whole.tensor.view(comm.size, -1))
        else:  # padded to the longest
            row = math.prod(x.shape[1:])
            padded = flat.tensor.new_zeros(max(rows) * row)
            padded[: flat.tensor.numel()] = flat.tensor
            every = padded.new_empty((comm.size, padded.numel()))
            comm.rows.allgather(padded, every)
            parts = [part[: n * row] for part, n in zip(every, rows, strict=True)]
            torch.cat(parts, out=whole.tensor)
        whole.done()
        return out

    row = math.prod(x.shape[1:]) * flat.tensor.element_size()
    first = sum(rows[: comm.rank]) * row if rows else comm.rank * flat.nbytes
    return Call(asked, body, _apart(flat, first, whole.nbytes), "sum", finish)


def reduce_scatter(comm: Connections, x: Any, op: Any, out: Any) -> Call:
    flat = Flat(x, written=False)
    check_op(op, flat.dtype)
    rows = rows_each(comm.size, "reduce_scatter", x)
    out = _result(x, (rows, *x.shape[1:]), out)
    mine = Flat(out)

    def body() -> Any:
        comm.rows.reduce_scatter(flat.tensor.view(comm.size, -1), mine.tensor, op)
        mine.done()
        return out

    def finish(total: Any) -> Any:
        mine.tensor.copy_(total.view(comm.size, -1)[comm.rank])
        mine.done()
        return out

    values = _along(flat.tensor)
    return Call(f"reduce_scatter({flat}, {op})", body, values, op, finish)


def gather(comm: Connections, x: Any, root: Any, out: Any) -> Call:
    root, flat = integer(root, "root", 0, comm.size - 1), Flat(x, written=False)
    mine = comm.rank == root
    out = _result(x, (comm.size, *x.shape), out) if mine else None
    whole = Flat(out) if mine else None
    counts = [[int(dst == root) for dst in range(comm.size)] for _ in range(comm.size)]

    def finish(every: Any) -> Any:
        if whole:
            whole.tensor.view(torch.uint8).copy_(every)
            whole.done()
        return out

    def body() -> Any:
        row = flat.tensor.view(1, -1)
        comm.rows.alltoall(row, whole.tensor.view(comm.size, -1) if whole else row[:0], counts)
        if whole:
            whole.done()
        return out

    values = _apart(flat, comm.rank * flat.nbytes, comm.size * flat.nbytes)
    return Call(f"gather({flat}, root {root})", body, values, "sum", finish)


def scatter(comm: Connections, x: Any, root: Any, out: Any) -> Call:
    root = integer(root, "root", 0, comm.size - 1)
    source = None
    if comm.rank == root:
        source, rows = Flat(x, written=False), rows_each(comm.size, "scatter", x)
        out = _result(x, (rows, *x.shape[1:]), out)
    elif out is None:
        raise needs_out(comm.rank, root)
    flat = Flat(out)
    counts = [[int(src == root)] * comm.size for src in range(comm.size)]

    def body() -> Any:
        row = flat.tensor.view(1, -1)
        comm.rows.alltoall(source.tensor.view(comm.size, -1) if source else row[:0], row, counts)
        flat.done()
        return out

    def finish(every: Any) -> Any:
        flat.tensor.view(torch.uint8).copy_(every.view(comm.size, -1)[comm.rank])
        flat.done()
        return out

    values = _apart(source, 0, comm.size * flat.nbytes)
    return Call(f"scatter({flat}, root {root})", body, values, "sum", finish)


def alltoall(comm: Connections, x: Any, out: Any, in_splits: Any, out_splits: Any) -> Call:
    flat = Flat(x, written=False)
    sends = rows_sent(x, in_splits, comm.size)
    if in_splits is None and out_splits is None:
        out = _result(x, tuple(x.shape), out)
        return exchange(comm, x, [sends] * comm.size, out, "alltoall")
    row, wanted = math.prod(x.shape[1:]), [-1] * comm.size
    if out is not None:
        as_buffer(out)
        rows = out.shape[0] if out.shape else 0
        _result(x, (rows, *x.shape[1:]), out)
    if out_splits is not None:
        wanted = row_counts("out_splits", out_splits, comm.size)
    mine = torch.tensor([*sends, *wanted, -1 if out is None else out.shape[0]])

    def body() -> Any:
        told = mine.new_empty((comm.size, mine.numel()))
        comm.rows.allgather(mine, told)
        counts = told[:, : comm.size].tolist()
        for rank, expected in enumerate(told[:, comm.size :].tolist()):
            receives = [of[rank] for of in counts]
            if expected[0] >= 0 and expected[:-1] != receives:
                raise Unequal(
                    f"out_splits of rank {rank} says {expected[:-1]} rows come, by rank; the ranks "
                    f"send {receives}"
                )
            if expected[-1] not in (-1, sum(receives)):
                raise Unequal(
                    f"out of rank {rank} has {expected[-1]} rows; the ranks send {sum(receives)}"
                )
        given = flat.tensor.view(sum(sends), row)
        return _received(comm, x, out, counts, lambda y: comm.rows.alltoall(given, y, counts))

    return Call(f"alltoall({flat.dtype}, rows of {tuple(x.shape[1:])})", body)


def _received(
    comm: Connections, x: Any, out: Any, counts: Sequence[Sequence[int]],
    fill: Callable[[Any], Any],
) -> Any:  # fmt: skip
    """`out`, or a new tensor, with the rows that come to this rank, which `fill` writes."""
    rows, row = sum(of[comm.rank] for of in counts), math.prod(x.shape[1:])
    result = output_for(x, (rows, *x.shape[1:]), out)
    whole = Flat(result)
    fill(whole.tensor.view(rows, row))
    whole.done()
    return result


def exchange(
    comm: Connections, x: Any, counts: Sequence[Sequence[int]], out: Any = None,
    name: str = "exchange",
) -> Call:  # fmt: skip
    """An all-to-all whose `counts` all ranks know."""
    flat, row = Flat(x, written=False), math.prod(x.shape[1:])
    if len(counts) != comm.size:
        raise CollectiveError(f"counts must be of {comm.size} ranks, not {len(counts)}")
    counts = [row_counts("counts", of, comm.size) for of in counts]
    given = flat.tensor.view(sum(rows_sent(x, counts[comm.rank], comm.size)), row)

    def body() -> Any:
        return _received(comm, x, out, counts, lambda y: comm.rows.alltoall(given, y, counts))

    def finish(every: Any) -> Any:
        parts = every.view(given.dtype).view(-1, row).split([n for of in counts for n in of])
        mine = parts[comm.rank :: comm.size]
        return _received(comm, x, out, counts, lambda y: torch.cat(mine, out=y))

    first, total = (sum(map(sum, part)) for part in (counts[: comm.rank], counts))
    width = row * given.element_size()
    values = _apart(flat, first * width, total * width)
    asked = f"{name}({flat.dtype}, rows of {tuple(x.shape[1:])}, counts {counts})"
    return Call(asked, body, values, "sum", finish)


def sparse_allreduce(
    comm: Connections, values: Any, indices: Any, numel: Any, k: Any, op: Any,
    residual: Any, mode: Any, conserve: Any,
) -> Call:  # fmt: skip
    call = SparseCluster(comm, values, indices, numel, k, op, residual, mode, conserve)
    return Call(call.asked, call.carry_out)


def split(comm: Connections, color: Any) -> Call:
    """Gathers the color of every rank."""
    mine = torch.tensor([integer(color, "color")])

    def body() -> list[int]:
        colors = mine.new_empty((comm.size, 1))
        comm.rows.allgather(mine, colors)
        return [int(color) for color in colors]

    return Call("split", body)


def lanes(comm: Connections, n: Any) -> Call:
    n = integer(n, "the number of lanes", 1, MOST_LANES)
    return Call(f"lanes({n})", lambda: n)


def barrier(comm: Connections) -> Call:
    return Call("barrier", lambda: None)
