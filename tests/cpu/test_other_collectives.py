"""Reduce, all-gather, reduce-scatter and all-to-all, as users call them on real processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import on_ranks

from linkweave import collectives
from linkweave.collectives.calls.communicator import Communicator, get_default
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.planner import plan_collective
from linkweave.collectives.runtime import reference
from linkweave.collectives.runtime.cpu.executor import SLOT_BYTES
from tests.cpu.helpers import TORCH_DTYPES, error_of

SIZES = [1, 2, 3, 5, 7]


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """From 0 to 4: sums of these are exact in every dtype, in every order."""
    count = int(np.prod(shape))
    return ((torch.arange(count) * (rank + 2) + rank) % 5).to(dtype).reshape(shape)


def random_floats(rank: int, count: int) -> np.ndarray:
    """Sums that round differently in every order."""
    rng = np.random.default_rng([rank, count])
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(np.float32)


def combined(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    every, dtype = torch.stack(parts), parts[0].dtype
    if op in ("min", "max"):
        return every.amin(0) if op == "min" else every.amax(0)
    if op == "xor":
        return functools.reduce(torch.bitwise_xor, parts)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = every.to(wide).sum(0)
    return (total / len(parts) if op == "avg" else total).to(dtype)


def is_same(got: Any, want: torch.Tensor, like: Any) -> bool:
    """The values, shape and dtype of `want`, in a tensor of the same library as `like`."""
    if type(got) is not type(like):
        return False
    tensor = got if isinstance(got, torch.Tensor) else torch.from_numpy(got)
    return tensor.dtype == want.dtype and torch.equal(tensor, want)


def dealt(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The rank's block of rows."""
    rows = whole.shape[0] // size
    return whole[rank * rows : (rank + 1) * rows]


def check_all(comm: Communicator, make: Callable[[torch.Tensor], Any], shape: tuple[int, ...],
              dtype: torch.dtype, ops: tuple[str, ...] = ("sum",)) -> None:  # fmt: skip
    """Every collective on one shape; `make` turns the rank's own part into what it passes."""
    rank, size = comm.rank, comm.size
    parts = [numbers(r, shape, dtype) for r in range(size)]
    mine, x = parts[rank], make(parts[rank].clone())
    case = (dtype, shape, type(x))
    assert is_same(comm.allgather(x), torch.stack(parts), x), case
    exchanged = torch.cat([dealt(p, rank, size) for p in parts])
    assert is_same(comm.alltoall(x), exchanged, x), case
    for root in {0, size - 1}:
        got = comm.gather(x, root)
        assert got is None if rank != root else is_same(got, torch.stack(parts), x), case
        rows = dealt(parts[root], rank, size)
        got = comm.scatter(x if rank == root else None, root, out=make(torch.empty_like(rows)))
        assert is_same(got, rows, x), case
    for op in ops:
        want = combined(parts, op)
        assert is_same(comm.reduce_scatter(x, op), dealt(want, rank, size), x), (*case, op)
        assert is_same(x, mine, x), case  # so far it was only read
        for root in {0, size - 1}:
            y = make(mine.clone())
            assert comm.reduce(y, op, root) is None
            assert is_same(y, want if rank == root else mine, x), (*case, op, root)


def shapes(size: int) -> list[tuple[int, ...]]:
    """One element a rank; a prime of them; no rows, or nothing in them; several dimensions."""
    return [(size,), (size * 211,), (0,), (0, 3), (size, 0), (2 * size, 3, 5), (3 * size, 1)]


@on_ranks(*SIZES[:-1])
def test_every_dtype_shape_and_op(rank: int) -> None:
    comm = get_default()
    for dtype in TORCH_DTYPES:
        ops = ("sum", "min", "max", *(("avg",) if dtype.is_floating_point else ()))
        if dtype == torch.bool:
            ops = ("sum", "xor")
        for shape in shapes(comm.size):
            check_all(comm, lambda x: x, shape, dtype, ops)
            if dtype != torch.bfloat16:  # which NumPy has not
                check_all(comm, lambda x: x.numpy(), shape, dtype)
        if not dtype.is_floating_point:
            x = numbers(rank, (comm.size,), dtype)
            for call in (comm.reduce, comm.reduce_scatter):
                assert "avg is not defined for" in error_of(call, x, "avg")


# ---- long messages, bit for bit ----------------------------------------------------------------


def plan_of(comm: Communicator, kind: str, nbytes: int, root: int = 0) -> Plan:
    """The plan that a call of this kind has just carried out."""
    known = comm._calls._known
    ready = next(r for k, r in known.items() if (k[0], k[1], k[4]) == (kind, nbytes, root))
    name, chunks = ready.region.encoded.algorithm, ready.num_chunks
    return plan_collective(kind, comm.topology, nbytes, root, name, chunks)


def check_bits(comm: Communicator, count: int, shared: Callable[[int], bool]) -> None:
    """Blocks of `count` floats against the reference; ranks that are `shared` stage nothing."""
    rank, size = comm.rank, comm.size
    inputs = [random_floats(r, size * count) for r in range(size)]
    nbytes = inputs[0].nbytes
    mine = inputs[rank]
    x, block, whole = mine.copy(), np.empty(count, np.float32), np.empty((size, count), np.float32)
    if shared(rank):
        x, block, whole = comm.empty(x.shape), comm.empty(count), comm.empty((size, count))
        x[:] = mine
    own = slice(rank * count, (rank + 1) * count)

    assert comm.reduce_scatter(x, out=block) is block
    plan = plan_of(comm, "reduce_scatter", nbytes)
    assert max(plan.chunk_sizes(nbytes)) <= SLOT_BYTES
    assert block.tobytes() == reference.run(plan, inputs)[rank][own].tobytes()

    assert comm.allgather(x[own], out=whole) is whole
    parts = [y[r * count : (r + 1) * count] for r, y in enumerate(inputs)]
    assert (whole == np.stack(parts)).all()
    assert max(plan_of(comm, "allgather", nbytes).chunk_sizes(nbytes)) <= SLOT_BYTES

    assert comm.alltoall(x, out=whole.reshape(-1)).tobytes() == b"".join(
        y[own].tobytes() for y in inputs
    )
    assert max(plan_of(comm, "alltoall", nbytes).chunk_sizes(nbytes)) <= SLOT_BYTES

    assert x.tobytes() == mine.tobytes()
    root = size // 2
    comm.reduce(x, "sum", root)
    plan = plan_of(comm, "reduce", nbytes, root)
    want = reference.run(plan, inputs)[root] if rank == root else mine
    assert x.tobytes() == want.tobytes()


@pytest.mark.parametrize(
    ("size", "topology"), [*((size, "auto") for size in SIZES[1:]), (8, "dgx1-v100"), (7, "ring-7")]
)
@on_ranks(params=["topology"])
def test_any_length_has_the_references_bits(rank: int) -> None:
    """More than a slot's 64 KiB a block; the same plans again and again, in any memory; on a DGX-1
    and a ring data between some ranks is passed on by others."""
    comm = get_default()
    for count in (1, 13, 1009, 60_013):
        check_bits(comm, count, lambda r: False)
        check_bits(comm, count, lambda r: True)
        check_bits(comm, count, lambda r: r % 2 == 0)
    check_bits(comm, 1009, lambda r: False)


@on_ranks(3)
def test_long_messages_of_short_numbers(rank: int) -> None:
    comm = get_default()
    for rows in (1, 1009, 40_009):
        for dtype in (torch.bfloat16, torch.float16, torch.int8):
            check_all(comm, lambda x: x, (comm.size * rows,), dtype)


# ---- what is passed, and where it goes -----------------------------------------------------------


def _strided(rank: int) -> None:
    """Tensors with gaps between their elements are read and written where they are."""
    comm = get_default()
    size = comm.size
    shape = (2 * size, 3)
    parts = [numbers(r, shape) for r in range(size)]
    stack, total = torch.stack(parts), combined(parts, "sum")
    exchanged = torch.cat([dealt(p, rank, size) for p in parts])

    def spread(x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((2 * x.shape[0], x.shape[1] + 2), -1.0)
        wide[::2, 1:-1] = x
        return wide

    def crossed(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()

    for as_numpy in (False, True):
        wide = spread(parts[rank])
        for x in (wide[::2, 1:-1], crossed(parts[rank])):
            assert not x.is_contiguous()
            x = x.numpy() if as_numpy else x
            assert is_same(comm.allgather(x), stack, x)
            assert is_same(comm.alltoall(x), exchanged, x)
            assert is_same(comm.reduce_scatter(x), dealt(total, rank, size), x)
            comm.reduce(x, "sum", size - 1)
            assert is_same(x, total if rank == size - 1 else parts[rank], x)
        assert (wide[1::2] == -1).all() and (wide[:, [0, -1]] == -1).all()
        x = parts[rank].numpy() if as_numpy else parts[rank]
        for call, want in (
            (comm.alltoall, exchanged), (comm.reduce_scatter, dealt(total, rank, size)),
        ):  # fmt: skip
            room = torch.full((2 * want.shape[0], want.shape[1] + 2), -1.0)
            out = room[::2, 1:-1].numpy() if as_numpy else room[::2, 1:-1]
            assert call(x, out=out) is out and is_same(out, want, x)
            assert (room[1::2] == -1).all() and (room[:, [0, -1]] == -1).all()
        room = torch.full((3, 2 * size, size), -1.0)
        out = room.permute(2, 1, 0).numpy() if as_numpy else room.permute(2, 1, 0)
        assert comm.allgather(x, out=out) is out and is_same(out, stack, x)


def _kinds(rank: int) -> None:
    comm = get_default()
    size = comm.size
    scalar = torch.tensor(float(rank))
    assert is_same(comm.allgather(scalar), torch.arange(size).float(), scalar)
    comm.reduce(scalar)
    assert scalar == (sum(range(size)) if rank == 0 else rank)
    grad = torch.full((size,), float(rank), requires_grad=True)
    assert comm.reduce_scatter(grad).tolist() == [sum(range(size))]
    assert collectives.allgather(np.array([rank])).tolist() == [[r] for r in range(size)]
    assert collectives.alltoall(np.arange(size)).tolist() == [rank] * size
    assert collectives.reduce_scatter(np.arange(size), "max").tolist() == [rank]
    x = np.array([rank])
    assert collectives.reduce(x, "min", size - 1) is None
    assert x[0] == (0 if rank == size - 1 else rank)


def _given_back(rank: int) -> None:
    """Memory to work in serves later calls, also where one is refused."""
    comm = get_default()
    x = np.ones(comm.size * 1000, np.float32)
    first = 0
    for _ in range(3):
        comm.alltoall(np.zeros((comm.size, 4000)))
        first = first or comm.offset_of(comm.empty(1000))
        for call in (comm.reduce, comm.allgather, comm.reduce_scatter, comm.alltoall):
            call(x)
        error_of(comm.alltoall, x, np.ones(3))
        error_of(comm.reduce_scatter, x, "mean")
    assert comm.offset_of(comm.empty(1000)) == first


@on_ranks(*SIZES)
def test_what_may_be_passed(rank: int) -> None:
    for job in (_strided, _kinds, _given_back):
        job(rank)


@on_ranks(1, 3, 5)
def test_calls_under_way_keep_their_order(rank: int) -> None:
    comm = get_default()
    size = comm.size
    for shape in ((size, 3), (size * 20_011,)):
        parts = [numbers(r, shape) for r in range(size)]
        total = combined(parts, "sum")
        x, y, out = parts[rank].clone(), parts[rank].clone(), torch.empty(size, *shape)
        works = [
            comm.allgather(x, async_op=True), comm.alltoall(x, async_op=True),
            comm.reduce_scatter(x, async_op=True), comm.reduce(y, root=size - 1, async_op=True),
            comm.allgather(x, out=out, async_op=True),
        ]  # fmt: skip
        refused = comm.alltoall(torch.tensor(1.0), async_op=True)
        last = comm.reduce_scatter(x)  # waits for its turn
        assert all(work.done() for work in works)
        gathered, exchanged, mine, nothing, given = [work.wait(60) for work in works]
        assert torch.equal(gathered, torch.stack(parts))
        assert torch.equal(exchanged, torch.cat([dealt(p, rank, size) for p in parts]))
        assert torch.equal(mine, dealt(total, rank, size)) and torch.equal(last, mine)
        assert nothing is None and given is out and torch.equal(out, gathered)
        assert torch.equal(y, total if rank == size - 1 else parts[rank])
        assert torch.equal(works[0].wait(), gathered)  # as often as one likes
        assert "alltoall splits rows over" in error_of(refused.wait)


# ---- what is refused -----------------------------------------------------------------------------


def still_works(comm: Communicator) -> bool:
    """All four, on what nothing else uses."""
    ranks = np.arange(comm.size)
    x, last = ranks + comm.rank, comm.size - 1
    y = x.copy()
    comm.reduce(y, "max")
    return (
        comm.allgather(x)[:, 0].tolist() == ranks.tolist()
        and comm.alltoall(x).tolist() == x.tolist()  # rank r sends r + this one
        and comm.reduce_scatter(x, "max").tolist() == [comm.rank + last]
        and y.tolist() == (ranks + last if comm.rank == 0 else x).tolist()
    )


@on_ranks(1, 3)
def test_bad_input_is_refused_and_leaves_the_ranks_in_step(rank: int) -> None:
    comm = get_default()
    size = comm.size
    x = np.ones((size, 2), np.float32)
    frozen = x.copy()
    frozen.flags.writeable = False
    calls: list[tuple[str, Callable[[], Any]]] = [
        (f"out must be of shape ({size}, {size}, 2) and float32, not ({size}, 2) and float32",
         lambda: comm.allgather(x, out=x)),
        (f"out must be of shape ({size}, 2) and float32, not ({size}, 2) and float64",
         lambda: comm.alltoall(x, np.ones((size, 2)))),
        ("out must be of shape (1, 2) and float32, not (2,) and float32",
         lambda: comm.reduce_scatter(x, "sum", out=np.ones(2, np.float32))),
        ("out must be of shape (1, 2) and float32, not (1, 2) and int32",
         lambda: comm.reduce_scatter(x, "sum", out=np.ones((1, 2), np.int32))),
        ("out must be a NumPy array like the input, not a torch tensor",
         lambda: comm.allgather(x, out=torch.ones(size, size, 2))),
        ("out must be a torch tensor like the input, not a NumPy array",
         lambda: comm.allgather(torch.ones(2), out=np.ones((size, 2), np.float32))),
        ("the array is read-only", lambda: comm.alltoall(x, frozen)),
        ("a tensor on cpu or cuda is needed, not on meta",
         lambda: comm.alltoall(torch.ones(size), torch.ones(size, device="meta"))),
        ("unknown op 'mean'; choose from sum, avg", lambda: comm.reduce_scatter(x, "mean")),
        ("unknown op 'mean'; choose from sum, avg", lambda: comm.reduce(x, "mean")),
        ("unsupported dtype complex64", lambda: comm.allgather(np.ones(2, np.complex64))),
        ("not builtins.list", lambda: comm.alltoall([1.0] * size)),
        ("not builtins.list", lambda: comm.reduce([x])),
        ("not builtins.int", lambda: comm.reduce_scatter(5)),
        (f"root must be an integer from 0 to {size - 1}, not {size}",
         lambda: comm.reduce(x, "sum", size)),
        (f"root must be an integer from 0 to {size - 1}, not True",
         lambda: comm.reduce(x, "sum", True)),
        (f"root must be an integer from 0 to {size - 1}, not -1",
         lambda: comm.reduce(x, "sum", -1)),
    ]  # fmt: skip
    for kind in ("reduce_scatter", "alltoall"):
        call = getattr(comm, kind)
        for shape in ((), *(((size + 1,), (2 * size - 1, size)) if size > 1 else ())):
            words = (
                f"{kind} splits rows over {size} ranks: the first dimension must be a multiple "
                f"of that, not of shape {shape}"
            )
            calls += [
                (words, lambda call=call, shape=shape: call(torch.ones(shape))),
                (words, lambda call=call, shape=shape: call(np.ones(shape), out=np.ones(3))),
            ]
    for words, wrong in calls:
        assert words in error_of(wrong), words
        assert still_works(comm)
    assert (x == 1).all()


@on_ranks(3)
def test_one_rank_that_is_refused_keeps_none_waiting(rank: int) -> None:
    """Rank 1 alone; the others learn of it instead of waiting."""
    comm = get_default()
    odd = rank == 1
    x = np.ones((3, 2), np.float32)
    said = []
    for call in (
        lambda: comm.allgather(x, out=np.ones(1) if odd else None),
        lambda: comm.reduce_scatter(x[:2] if odd else x),
        lambda: comm.alltoall(x, x[:, :1] if odd else None),
        lambda: comm.reduce(x, "mean" if odd else "sum"),
        lambda: comm.alltoall(x, x[:2] if odd else None, async_op=True).wait(),
    ):
        said.append(error_of(call))
        assert still_works(comm)
    assert (x == 1).all()
    for words in said:
        assert words and ("ranks [1]: refused its arguments" in words) == (rank != 1), words


@on_ranks(3)
def test_what_differs_between_ranks_is_an_error_on_every_rank(rank: int) -> None:
    comm = get_default()
    odd = rank == 1
    x = np.ones(12, np.float32)
    short, long = np.ones(4, np.float32), np.ones(24, np.float32)
    said = [
        error_of(comm.alltoall, x) if odd else error_of(comm.allgather, short),  # of 12 in all
        error_of(comm.reduce_scatter, x) if odd else error_of(comm.alltoall, x),
        error_of(comm.allreduce, x) if odd else error_of(comm.reduce, x),
        error_of(comm.allgather, x if odd else short),
        error_of(comm.alltoall, x.astype(np.int32) if odd else x),
        error_of(comm.reduce_scatter, x, "max" if odd else "sum"),
        error_of(comm.reduce, x, "sum", 1 if odd else 2),
        error_of(comm.reduce_scatter, long if odd else x),
    ]
    assert (x == 1).all() and still_works(comm)
    ones = ("alltoall(12 x", "reduce_scatter(12 x", "allreduce(12 x", "allgather(36 x",
            "alltoall(12 x int32", "reduce_scatter(12 x float32, max", "reduce(12 x",
            "reduce_scatter(24 x")  # fmt: skip
    others = ("allgather(12 x", "alltoall(12 x", "reduce(12 x", "allgather(12 x",
              "alltoall(12 x float32", "reduce_scatter(12 x float32, sum", "reduce(12 x",
              "reduce_scatter(12 x")  # fmt: skip
    for words, one, other in zip(said, ones, others, strict=True):
        assert f"ranks [1]: {one}" in words and f"ranks [0, 2]: {other}" in words, words
    assert "root 1)" in said[6] and "root 2)" in said[6]


@on_ranks(3)
def test_an_out_that_is_no_tensor_is_refused(rank: int) -> None:
    comm = get_default()
    x = np.ones(3, np.float32)
    for call in (comm.allgather, comm.alltoall, comm.reduce_scatter):
        for bad in ([1.0, 1.0, 1.0], 5, "out"):
            said = error_of(call, x, out=bad if rank == 1 else None)
            words = f"not builtins.{type(bad).__name__}" if rank == 1 else "ranks [1]: refused its"
            assert words in said, said
            assert still_works(comm)


@on_ranks(3)
def test_a_call_that_fails_leaves_out_as_it_was(rank: int) -> None:
    """Calls that differ fail before any data moves, a rank's own included."""
    comm = get_default()
    x, out = np.ones(6 if rank == 1 else 3), np.zeros((3, 3))
    said = error_of(comm.allgather, x, out=None if rank == 1 else out)
    assert "calls differ: " in said and "Parts of different lengths need counts=" in said
    assert (out == 0).all()
    said = error_of(comm.allgather, x[:3].astype(np.int32 if rank == 1 else np.int64))
    assert "calls differ: " in said and "counts=" not in said
    out = np.zeros(3)
    assert "calls differ: " in error_of(comm.alltoall, x, None if rank == 1 else out)
    said = error_of(comm.alltoall, x[:3], in_splits=[1, 1, 1] if rank == 1 else None)
    assert "calls differ: " in said and "Splits that are given on one rank must be given on" in said
    assert "calls differ: " in error_of(comm.reduce_scatter, x, out=None if rank == 1 else out[:1])
    assert (out == 0).all()


# ---- a fixed order -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "topology"), [(5, "auto"), (7, "mesh-7"), (8, "dgx1-v100"), (8, "ring-8")]
)
@on_ranks(order="fixed", params=["topology"])
def test_a_fixed_order_gives_the_same_bits_for_every_size(rank: int) -> None:
    """The first elements, of which there are ever more, of sums and of a rank's block."""
    comm = get_default()
    size, root = comm.size, comm.size // 2
    values = np.stack([random_floats(100 * rank + b, 60_000) for b in range(size)])
    summed, reduced, scattered = [], [], []
    for count in (1, 1000, 60_000):
        x = values.reshape(-1)[: size * count].copy()
        comm.allreduce(x)
        summed.append(x[:1000].tobytes())
        x = values[0, :count].copy()
        comm.reduce(x, "sum", root)
        reduced.append(x[:1000].tobytes() if rank == root else b"")
        mine = comm.reduce_scatter(np.ascontiguousarray(values[:, :count]).reshape(-1))
        scattered.append(mine[:1000].tobytes())
    for one, thousand, many in (summed, reduced, scattered):
        assert one == many[: len(one)] and thousand == many


@on_ranks(2, 3, 5)
def test_messages_along_pairs(rank: int, size: int) -> None:
    comm, found = get_default(), []
    for pairs in ([], [(0, size - 1)], [(r + 1, r) for r in range(0, size - 1, 2)]):
        for shape in ((0,), (1,), (2, 40_000)):
            x = torch.full(shape, rank, dtype=torch.int32)
            comm.sendrecv(x, pairs)
            source = {target: source for source, target in pairs}.get(rank, rank)
            assert bool((x == source).all())
    for wrong in ([(0, 0)], [(0, size)], [(0, 1), (0, 1)]):
        found.append(error_of(lambda: comm.sendrecv(torch.zeros(1), wrong)))  # noqa: B023
    assert all("sendrecv" in words for words in found), found
