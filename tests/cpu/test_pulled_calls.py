"""Calls in which each byte has one reader read the other ranks' memory, if they may; uneven ones
assume the sizes of an earlier call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks

from linkweave import collectives
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.calls.host import PULL_BYTES
from linkweave.collectives.planning.collective import COLLECTIVES
from linkweave.collectives.planning.layout import Sizes, block_table, reads, staging
from linkweave.collectives.runtime.cpu.mapping import Mapping
from tests.cpu.helpers import error_of

KINDS = "broadcast", "allgather", "gather", "scatter", "alltoall"


def sizes_of(kind: str, size: int) -> list[Sizes | None]:
    """Even blocks, and uneven ones, some of them empty."""
    if kind == "allgather":
        return [None, tuple((3 * r + 1) % 4 for r in range(size))]
    if kind == "alltoall":
        return [None, tuple(tuple((2 * s + 3 * d) % 5 for d in range(size)) for s in range(size))]
    return [None]


@pytest.mark.parametrize("kind", [*KINDS, "sendrecv"])
def test_reads_are_what_the_collective_promises(kind: str) -> None:
    """Each byte of a result is read once, from the rank that the collective says."""
    for size, root in ((s, r) for s in (1, 2, 3, 5, 7) for r in {0, s - 1}):
        at: Any = ((size - 1, 0),) if kind == "sendrecv" and size > 1 else root
        at = () if kind == "sendrecv" and size == 1 else at
        for sizes in sizes_of(kind, size):
            message = 2 * size, sizes  # bytes
            for rank in range(size):
                table = block_table(kind, size, rank, *message)
                mine = staging(kind, size, rank, *message, at)
                found = np.full(mine.result, -1)
                for peer, src, dst, count in reads(kind, size, rank, *message, at).tolist():
                    theirs = staging(kind, size, peer, *message, at)
                    assert src >= 0 and src + count <= theirs.given
                    assert (found[dst : dst + count] == -1).all()
                    found[dst : dst + count] = 1000 * peer + src + np.arange(count)
                for block, (start, count) in enumerate(table.tolist()):
                    goal = COLLECTIVES[kind].goal(size, at, rank, block)
                    if goal is None:
                        continue
                    peer = goal.bit_length() - 1
                    theirs = staging(kind, size, peer, *message, at)
                    source = int(block_table(kind, size, peer, *message)[block, 0]) - theirs.put
                    if kind == "alltoall" and peer == rank:
                        source = theirs.keep_from
                    want = 1000 * peer + source + np.arange(count)
                    assert np.array_equal(found[start - mine.get :][:count], want)
                assert mine.result == 0 or (found >= 0).all()


def ready(comm: Any) -> Any:
    """The prepared call that was made last."""
    return next(reversed(comm._calls._known.values()))


def every_kind(comm: Any, count: int) -> list[bool]:
    """Make calls with rows of `count` float64, in two ways; whether those that may were pulled."""
    rank, size = comm.rank, comm.size
    rows = [np.arange(size * count, dtype=np.float64).reshape(size, count) + r for r in range(size)]
    found = []

    def note(right: bool) -> None:
        assert right
        made = ready(comm)
        if COLLECTIVES[made.label.split("/")[0]].pulls(comm.size):
            found.append(made.pulled)
        else:
            assert not made.pulled

    for make in (np.empty, comm.empty):
        for _ in range(2):
            x, out = make((size, count)), make((size, count))
            x[...] = rows[rank]
            comm.broadcast(x, 1)
            note(np.array_equal(x, rows[1]))
            x[...] = rows[rank]
            comm.allgather(x[0], out=out)
            note(np.array_equal(out, np.stack([r[0] for r in rows])))
            comm.alltoall(x, out)
            note(np.array_equal(out, np.stack([r[rank] for r in rows])))
            out[...] = -1
            comm.gather(x[0], 1, out=out)
            gathered = np.stack([r[0] for r in rows])
            note(np.array_equal(out, gathered) if rank == 1 else out[0, 0] < 0)
            comm.scatter(x if rank == 1 else None, 1, out=out[:1])
            note(np.array_equal(out[0], rows[1][rank]))
            mine = [count + 2 * ((rank + r) % 2) - 1 for r in range(size)]
            total = sum(mine)
            sent, got = make(total), make(total)
            sent[...] = np.arange(total) + 1000 * rank
            comm.alltoall(sent, got, mine, mine)
            starts = [sum(count + 2 * ((s + r) % 2) - 1 for r in range(rank)) for s in range(size)]
            want = [
                a + np.arange(n) + 1000 * s
                for s, (a, n) in enumerate(zip(starts, mine, strict=True))
            ]
            note(np.array_equal(got, np.concatenate(want)))
            assert np.array_equal(x, rows[rank])
    return found


def pulls(rank: int, count: int) -> list[bool]:
    return every_kind(get_default(), count)


@pytest.mark.parametrize("size", [2, 4])
def test_large_calls_read_the_other_ranks_memory(size: int) -> None:
    enough = -(-PULL_BYTES // 8)
    for found in collectives.spawn(pulls, size, args=(enough,), timeout=60):
        assert found == [True] * (20 if size == 2 else 12)
    few = PULL_BYTES // 8 // size - 2
    for found in collectives.spawn(pulls, size, args=(few,), timeout=60):
        assert found == [False] * (20 if size == 2 else 12)


@pytest.mark.parametrize("how", ["at once", "later"])
@on_ranks(3)
def test_ranks_that_cannot_read_use_slots(rank: int, how: str) -> None:
    """One rank may not read, or finds out in the middle of a call."""
    comm: Any = get_default()
    comm.barrier()
    calls = comm._calls
    if how == "at once" and rank == 1:
        Mapping.is_at = lambda *_: False  # type: ignore[method-assign]
    elif how == "later":
        assert calls.executor.readable()
        if rank == 1:
            calls.executor._pids[:] = 1 << 22  # no process has this number
    found = every_kind(comm, 20_011)
    assert calls.executor.readable() == (how == "at once" and rank != 1)
    assert found == [False] * 6 + [True] * 6  # shared memory can be read


@on_ranks(3)
def test_an_input_that_is_overwritten_is_not_read(rank: int) -> None:
    """Results in the memory of the input: only where no rank reads what another one overwrites."""
    comm: Any = get_default()
    size, count = comm.size, 20_011
    rows = [np.arange(size * count, dtype=np.float64).reshape(size, count) + r for r in range(size)]
    found = []
    for _ in range(2):
        same = rows[rank].copy()
        comm.alltoall(same, same)
        assert np.array_equal(same, np.stack([r[rank] for r in rows]))
        found.append(ready(comm).pulled)
        back = rows[rank].copy()
        comm.scatter(back if rank == 0 else None, 0, out=back[rank : rank + 1])
        assert np.array_equal(back[rank], rows[0][rank])
        found.append(ready(comm).pulled)
    assert found == [False, True] * 2


# ---- uneven calls ----------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [0, 1])
@on_ranks(2, 3)
def test_sizes_that_change_are_exchanged_again(rank: int, seed: int) -> None:
    """Splits that stay, change on all ranks, or on one only, in any order, and at last stay; in how
    many meetings of ranks the last call was made."""
    comm: Any = get_default()
    size, rng = comm.size, np.random.default_rng(seed)  # the same on all ranks
    matrices = [rng.integers(0, 4, (size, size)) for _ in range(3)]
    matrices.append(matrices[0].copy())
    matrices[-1][0] = matrices[1][0]  # rank 0 sends as in another one, the others as in the first
    comm.barrier()
    counts = matrices[0]
    for number in range(80 + 4):
        if number % 4 == 0 and number < 80:
            counts = matrices[rng.integers(len(matrices))]
        told = rng.integers(3) if number < 80 else 1  # who says what comes: nobody, all, or some
        asynchronous = rng.random() < 0.1 and number < 80
        sent = [np.arange(c.sum() * 2).reshape(-1, 2) + 100 * r for r, c in enumerate(counts)]
        parts = [np.split(x, np.cumsum(c)) for x, c in zip(sent, counts, strict=True)]
        want = np.concatenate([of[rank] for of in parts])
        splits = counts[rank].tolist()
        comes = counts[:, rank].tolist() if told == 1 or (told == 2 and rank % 2) else None
        before = comm._calls.control.number
        if asynchronous and (rank + number) % 2:
            found = comm.alltoall(sent[rank], None, splits, comes, async_op=True).wait()
        else:
            found = comm.alltoall(sent[rank], None, splits, comes)
        assert np.array_equal(found, want), (number, splits)
    assert comm._calls.control.number == before + 1


@on_ranks(2)
def test_rows_of_no_bytes_are_counted(rank: int) -> None:
    """Rows of no bytes, whose number says all."""
    comm: Any = get_default()
    for _ in range(4):
        for n in (1, 3):
            found = comm.alltoall(np.zeros((2, 0)), None, [1, 1] if rank else [2 - n // 2, n // 2])
            assert found.shape == ((1 + 2 - n // 2, 1 + n // 2)[rank], 0)
    said = error_of(comm.allgather, np.zeros((1 + rank, 0)), counts=[1 + rank, 1 + rank])
    assert "calls differ: " in said and "in parts whose sizes have the checksum" in said
    said = error_of(comm.allgather, np.zeros((2, 0)), counts=[1, 2])
    assert rank or "counts says 1 rows for rank 0" in said, said


@on_ranks(2)
def test_assumed_sizes_on_lanes(rank: int) -> None:
    """A call that is called off keeps its number among the calls of all lanes."""
    comm: Any = get_default()
    first, second = comm.lanes(2)
    x = np.arange(4.0)
    for splits in ([1, 3], [1, 3], [1, 3], [2, 2], [1, 3]):
        mine = [1, 3] if rank else splits  # rank 1 assumes what rank 0 has changed
        found = first.alltoall(x, None, mine)
        assert found.tolist() == ([*x[: splits[0]], *x[:1]], [*x[splits[0] :], *x[1:]])[rank]
        second.allreduce(total := np.ones(3))
        assert total.tolist() == [2.0] * 3
    assert not first._calls.assumes


def one_reads_anew(rank: int) -> int:
    """Splits that one rank gives as an array are never remembered there: the other one learns."""
    comm: Any = get_default()
    x = np.arange(4.0)
    for _ in range(300):
        found = comm.alltoall(x, None, np.array([1, 3]) if rank else [2, 2])
        assert found.tolist() == ([0, 1, 0], [2, 3, 1, 2, 3])[rank]
    return int(comm._calls.control.number)


def test_nobody_assumes_sizes_that_one_rank_reads_anew() -> None:
    made = collectives.spawn(one_reads_anew, 2, timeout=60)
    assert made[0] == made[1] < 2 * 300 + 10


def repeated(rank: int) -> list[str]:
    comm: Any = get_default()
    x = np.arange(6.0)
    for _ in range(2):
        comm.alltoall(x, None, [1, 5] if rank else [4, 2], [2, 5] if rank else [4, 1])
    before = comm._calls.control.number
    comm.alltoall(x, None, [1, 5] if rank else [4, 2], [2, 5] if rank else [4, 1])
    assert comm._calls.control.number == before + 1  # all ranks have met once
    said = [
        error_of(comm.alltoall, x, None, [1, 5] if rank else [3, 3], [2, 5] if rank else [4, 1]),
        error_of(comm.alltoall, x, None, [1, 5] if rank else [[4], 2]),
        error_of(lambda: comm.alltoall(x, None, [1, 5]) if rank else comm.alltoall(x)),
        error_of(lambda: comm.alltoall(x, None, [1, 5]) if rank else comm.barrier()),
        error_of(comm.allgather, x[: 2 + rank], counts=[2, 3]),
        error_of(comm.allgather, x[: 2 + rank], counts=[2, 3]),
        error_of(lambda: comm.allgather(x[: 2 + rank], counts=[2, 3 + rank])),
    ]
    comm.barrier()
    return said


@on_ranks(2)
def test_a_rank_without_rows_meets_the_others_once(rank: int) -> None:
    """Ranks meet once in each call, although one gives no rows, or gets none."""
    comm: Any = get_default()
    x, made = np.arange(6.0 * (1 - rank)), []
    for splits in (([2, 4], [0, 0]), ([6, 0], [0, 0])):
        for _ in range(2):
            comm.alltoall(x, None, splits[rank])
        before = comm._calls.control.number
        got = comm.alltoall(x, None, splits[rank])
        assert got.tolist() == [*range(6)][sum(splits[0][:rank]) :][: splits[0][rank]]
        made.append(comm._calls.control.number - before)
    assert made == [1, 1]


def test_a_rank_that_changes_its_mind_is_told() -> None:
    first, second = collectives.spawn(repeated, 2, timeout=60)
    assert "out_splits of rank 1 says [2, 5] rows come, by rank" in first[0] + second[0]
    assert "in_splits must be 2 integers >= 0" in first[1] and "refused its" in second[1]
    for at, words in ((2, "alltoall("), (3, "barrier")):
        assert "calls differ: " in first[at] and words in first[at] and first[at] == second[at]
    assert first[4:6] == second[4:6] == ["", ""]
    assert "counts says 4 rows for rank 1" in second[6] and "refused its" in first[6]
