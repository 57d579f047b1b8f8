"""How far apart the ranks' cores are, and what a call does before all ranks have come to it."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import numpy as np
import pytest

from linkweave import collectives
from linkweave.collectives import CollectiveTimeout
from linkweave.collectives.launch.default import get_default
from linkweave.collectives.runtime.cpu import arena as arenas
from linkweave.collectives.runtime.cpu import cores
from linkweave.collectives.runtime.cpu.executor import NONTEMPORAL_BYTES
from linkweave.kernels.plan import interpreter

CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_the_round_trip_of_a_flag_is_measured_between_two_cores() -> None:
    found = [cores.round_trip_ns(CORES[0], CORES[-1]) for _ in range(5)]
    assert 10 < min(found) < 100_000
    assert os.sched_getaffinity(0) == {*CORES}  # this thread's own is as it was


def test_a_round_trip_that_cannot_be_measured_is_none() -> None:
    missing = max(CORES) + 4000
    assert cores.round_trip_ns(CORES[0], CORES[0]) == 0
    assert cores.round_trip_ns(CORES[0], missing) == cores.round_trip_ns(missing, CORES[0]) == 0


def test_cores_of_a_process_that_has_ended_are_not_far() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert not cores.far_apart(os.getpid(), gone.pid)


@pytest.mark.parametrize("ns, far", [(0.0, False), (120.0, False), (349.0, False), (600.0, True)])
def test_far_cores_are_those_of_a_long_round_trip(
    monkeypatch: pytest.MonkeyPatch, ns: float, far: bool
) -> None:
    monkeypatch.setattr(cores, "round_trip_ns", lambda one, other: ns)
    assert cores.far_apart(os.getpid(), os.getpid()) is far


def measured(rank: int) -> list[int]:
    """How often the cores have been measured after many calls: soon after the first time, 10 s
    later, and soon after that."""
    times: list[float] = []
    whole: Any = get_default()
    clock = [whole._arena._measure_at - 1.0]
    arenas.time = type("Clock", (), {"monotonic": lambda: clock[0]})  # type: ignore[assignment]
    arenas.far_apart = lambda first, last: bool(times.append(clock[0]))
    comm, found = whole.split(0), []
    for later in (0.0, 2.0, arenas.MEASURE_EVERY - 1):
        clock[0] += later
        for _ in range(600):
            whole.barrier()
            comm.barrier()
        found.append(len(times))
    return found


def test_rank_0_of_the_whole_measures_again_after_ten_seconds() -> None:
    found = collectives.spawn(measured, 2)
    assert found == [[0, 1, 1], [0, 0, 0]]


KINDS = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall")


def with_word(rank: int, far: int) -> list[Any]:
    """Results of messages about the threshold, and whether large ones use non-temporal stores."""
    comm: Any = get_default()
    calls, found = comm._calls, []
    comm._arena._measure_at = float("inf")
    for nbytes in (NONTEMPORAL_BYTES - 12 * comm.size, NONTEMPORAL_BYTES + 12 * comm.size, 600_000):
        comm.barrier()
        comm._arena.words(arenas.FAR, 1)[0] = far
        comm.barrier()
        count = nbytes // 4 // comm.size
        x = (np.arange(count * comm.size) % 101 + rank).astype(np.float32).reshape(comm.size, -1)
        for kind in KINDS:
            given = x[0].copy() if kind == "allgather" else x.copy()
            for _ in range(2):
                got = getattr(comm, kind)(given)
            found.append(given if got is None else got)
    for key, ready in calls._known.items():
        whole = ready.staged.nbytes
        wide = key[0] in KINDS and key[1] >= NONTEMPORAL_BYTES
        if whole and key[0] in KINDS:
            assert ready.state[interpreter.NONTEMPORAL] == (far and wide), key
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_do_not_depend_on_how_far_apart_cores_are(ranks: int) -> None:
    near, far = (collectives.spawn(with_word, ranks, args=(word,)) for word in (0, 1))
    for one, other in zip(near, far, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def sent_early(rank: int, kind: str) -> tuple[int, bool, bool]:
    """On rank 0, in the second call, to which rank 1 does not come: how many chunks are in slots,
    and whether the input and the output are as they were."""
    comm: Any = get_default()
    shape = {"allgather": (8,), "alltoall": (2, 8), "reduce_scatter": (2, 8)}[kind]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    out = np.empty((1, 8) if kind == "reduce_scatter" else (2, 8), np.float32)
    getattr(comm, kind)(x, out=out)
    if rank == 1:
        comm.close()
        return 0, True, True
    region = next(ready.region for key, ready in comm._calls._known.items() if key[0] == kind)
    sent = region.cursor[:, interpreter.SENT]
    before, given = sent.sum(), x.copy()
    out[:] = -1
    with pytest.raises((CollectiveTimeout, collectives.CollectiveAborted)):
        getattr(comm, kind)(x, out=out)
    return int(sent.sum() - before), bool((x == given).all()), bool((out == -1).all())


@pytest.mark.parametrize("kind", ["allgather", "alltoall", "reduce_scatter"])
def test_a_rank_sends_its_input_before_the_others_come(kind: str) -> None:
    sent, kept, clean = collectives.spawn(sent_early, 2, args=(kind,), timeout=20)[0]
    assert sent > 0 and kept and clean
