"""How blocks pass between the ranks' cores, and what a call does before all ranks have come."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks

from linkweave import collectives
from linkweave.collectives import CollectiveTimeout
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.runtime.cpu import arena as arenas
from linkweave.collectives.runtime.cpu import cores, executor
from linkweave.collectives.runtime.cpu.executor import NONTEMPORAL_BYTES
from linkweave.kernels.plan import interpreter

CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("past", [False, True])
def test_a_blocks_way_is_measured_between_two_cores(past: bool) -> None:
    found = [cores.pass_s(CORES[0], CORES[-1], past) for _ in range(5)]
    # None: these cores are too busy; 512 KiB twice in 2 us: no core
    assert all(2e-6 < s < 0.1 for s in found if s is not None), found
    assert os.sched_getaffinity(0) == {*CORES}  # this thread's own is as it was


def test_what_cannot_be_measured_is_none() -> None:
    missing = max(CORES) + 4000
    assert cores.pass_s(CORES[0], missing, True) is None
    assert cores.pass_s(missing, CORES[0], False) is None


def test_busy_cores_are_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(mine: int, theirs: int, *rest: Any) -> bool:
        time.sleep(0.001)
        return False

    monkeypatch.setattr(cores, "turns", late)
    start = time.monotonic()
    assert cores.pass_s(CORES[0], CORES[-1], True) is None
    assert time.monotonic() - start < 1  # the patience is 20 ms


def test_no_thread_can_be_started_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(cores, "ThreadPoolExecutor", refuse)
    assert cores.pass_s(0, 1, True) is None


def test_cores_of_a_process_that_has_ended_are_not_measured() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert cores.past_caches(os.getpid(), gone.pid) is None


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("through", "past", "sooner"),
    [(7e-5, 13e-5, False), (9e-5, 4e-5, True), (None, 4e-5, None), (9e-5, None, None)],
)
def test_the_sooner_way_is_taken(
    monkeypatch: pytest.MonkeyPatch, through: float | None, past: float | None, sooner: bool | None
) -> None:
    monkeypatch.setattr(cores, "pass_s", lambda one, other, way: past if way else through)
    assert cores.past_caches(os.getpid(), os.getpid()) is sooner
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})  # one core has one cache
    assert cores.past_caches(os.getpid(), os.getpid()) is False


TURNS = [(0.0, True), (2.0, True), (9.0, False), (2.0, None), (11.0, False)]
"""Seconds that pass, and what a measurement then gives."""


@on_ranks(2)
def test_rank_0_of_the_whole_measures_again_after_ten_seconds(rank: int) -> None:
    """How often the cores have been measured, and the word, after each turn's calls of a part."""
    whole: Any = get_default()
    times, now, answer = 0, whole._arena._measure_at - 1.0, None

    def past_caches(first: int, last: int) -> bool | None:
        nonlocal times
        times += 1
        return answer

    arenas.time = type("Clock", (), {"monotonic": lambda: now})  # type: ignore[assignment]
    arenas.past_caches = past_caches
    part, found = whole.split(0), []
    whole._arena.words(arenas.PAST, 1)[0] = 0
    for seconds, past in TURNS:
        now, answer = now + seconds, past
        for _ in range(300):
            part.barrier()
        found.append((times, int(whole._arena.words(arenas.PAST, 1)[0])))
        part.barrier()
    if rank == 0:
        assert found == [(0, 0), (1, 1), (1, 1), (2, 1), (3, 0)]
    assert rank == 0 or not times


KINDS = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall")


def about_thresholds(rank: int, past: int, huge: int) -> None:
    """Check results of messages about the thresholds, and which use non-temporal stores: `past`
    says whether slots do, and `huge` from how many bytes on all ranks results do."""
    comm: Any = get_default()
    executor.HUGE_BYTES = huge
    calls = comm._calls
    comm._arena._measure_at = float("inf")
    for nbytes in (NONTEMPORAL_BYTES - 12 * comm.size, NONTEMPORAL_BYTES + 12 * comm.size, 600_000):
        comm.barrier()
        comm._arena.words(arenas.PAST, 1)[0] = past
        comm.barrier()
        count = nbytes // 4 // comm.size
        x = (np.arange(count * comm.size) % 101 + rank).astype(np.float32).reshape(comm.size, -1)
        for kind in KINDS:
            given = x[0].copy() if kind == "allgather" else x.copy()
            got = getattr(comm, kind)(given)
            got = given if got is None else got
            every = np.stack([x - rank + r for r in range(comm.size)])
            np.testing.assert_array_equal(got, wanted(kind, every, rank), kind)
    for key, ready in calls._known.items():
        whole = ready.staged.nbytes
        wide = key[0] in KINDS and key[1] >= NONTEMPORAL_BYTES
        if whole and key[0] in KINDS:
            assert ready.state[interpreter.NONTEMPORAL] == (past and wide), key
            copies = key[0] in ("broadcast", "allgather", "alltoall")
            assert ready.state[interpreter.HUGE] == (copies and comm.size * key[1] >= huge), key


def wanted(kind: str, every: np.ndarray, rank: int) -> np.ndarray:
    """The result of inputs `every` [ranks, ranks, elements]; a root is rank 0."""
    whole = every.sum(0)
    return {
        "allreduce": whole, "broadcast": every[0], "reduce": every[rank] if rank else whole,
        "allgather": every[:, 0], "reduce_scatter": whole[rank : rank + 1],
        "alltoall": every[:, rank],
    }[kind]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_do_not_depend_on_how_blocks_pass(ranks: int) -> None:
    for past, huge in ((0, 1 << 40), (1, 1 << 40), (0, 600_000 * ranks)):
        collectives.spawn(about_thresholds, ranks, args=(past, huge))


def early(size: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of inputs and outputs of the calls that send before all ranks come."""
    rows = size, 8
    return {
        "allgather": ((8,), rows), "gather": ((8,), rows), "alltoall": (rows, rows),
        "reduce_scatter": (rows, (1, 8)), "allreduce": (rows, rows), "reduce": (rows, rows),
    }  # fmt: skip


@pytest.mark.parametrize("kind", early(2))
@on_ranks(2, 3, timeout=20)
def test_a_rank_sends_its_input_before_the_others_come(rank: int, kind: str) -> None:
    """Rank 1, in the third call, to which rank 0 does not come."""
    comm: Any = get_default()
    shape, to = early(comm.size)[kind]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + rank
    out, call = np.empty(to, np.float32), getattr(comm, kind)
    for _ in range(2):
        call(x, out=out)
    if rank == 0:
        comm.close()
        return
    region = next(ready.region for key, ready in comm._calls._known.items() if key[0] == kind)
    sent = region.cursor[:, interpreter.SENT]
    before, given = sent.sum(), x.copy()
    out[:] = -1
    with pytest.raises((CollectiveTimeout, collectives.CollectiveAborted)):
        call(x, out=out)
    if rank == 1:
        assert sent.sum() > before and (x == given).all() and (out == -1).all()


def test_fields_of_a_call_are_in_the_order_in_which_they_are_set() -> None:
    names = ("NUMBER", "STAGE", "OWN", "SOURCE", "SHIFT", "OUT", "INPUT", "RESULT", "DIRECT",
             "ROUNDS", "FINALS")  # fmt: skip
    assert [getattr(interpreter, name) for name in names] == [*range(interpreter.CALL_FIELDS)]
