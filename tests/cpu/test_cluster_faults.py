"""What ranks on several machines learn when one of them dies, stops or leaves."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machines import across, on_machines

from linkweave.collectives import CollectiveError
from linkweave.collectives.cluster import pieces
from linkweave.collectives.cluster.communicator import ClusterCommunicator
from linkweave.collectives.cluster.roll_call import GRACE

ROOT = Path(__file__).parents[2]
MEBI = 1 << 20


def first_error(call: Callable[[], Any]) -> str:
    start = time.monotonic()
    try:
        for _ in range(3):
            call()
    except CollectiveError as error:
        return f"{time.monotonic() - start:.1f} s, {type(error).__name__}: {error}"
    return "nothing was noticed"


def lose(
    comm: ClusterCommunicator, who: int, how: str, compares: bool = True, kind: str = "allreduce"
) -> str:
    """Rank `who` gets a signal, or raises; the others go on."""
    comm.compares = compares
    x = np.ones((comm.size, MEBI // comm.size))
    call = lambda: getattr(comm, kind)(x)  # noqa: E731
    call()
    if kind == "allreduce":
        assert (x == comm.size).all()
    if comm.rank == who:
        if how == "raises":
            raise ValueError("I have had enough")
        os.kill(os.getpid(), getattr(signal, how))
    return first_error(call)


def seconds(said: str) -> float:
    return float(said.split()[0])


@pytest.mark.parametrize(
    ("who", "compares", "kind"),
    [(0, True, "allreduce"), (3, True, "allreduce"), (0, False, "allreduce"),
     (3, False, "allreduce"), (0, False, "reduce_scatter"), (3, False, "alltoall")],
)  # fmt: skip
def test_a_rank_that_dies(who: int, compares: bool, kind: str) -> None:
    found = on_machines((2, 2), lose, who, "SIGKILL", compares, kind)
    for rank in {0, 1, 2, 3} - {who}:
        assert seconds(found[rank]) < 15 and "CollectiveAborted" in found[rank], found
        if who == 3 or rank == 1:  # its neighbour, or that one's machine, has told
            assert re.search(rf"rank {who} \(process \d+\) died", found[rank]), found
        else:
            assert "host0 (ranks 0, 1) has closed its connection" in found[rank], found


@pytest.mark.parametrize(
    ("who", "compares"),
    [pytest.param(0, True, marks=pytest.mark.slow), (3, True), (3, False),
     pytest.param(0, False, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_rank_that_stops(who: int, compares: bool) -> None:
    timeout = 1.0
    found = on_machines((2, 2), lose, who, "SIGSTOP", compares, timeout=timeout, lost=[who])
    for rank in {0, 1, 2, 3} - {who}:
        assert seconds(found[rank]) < timeout + 2 * GRACE, found
        assert "CollectiveTimeout" in found[rank], found
        if who == 3:  # its neighbour tells, unless a busy machine lets that come too late
            late = "host1 (ranks 2, 3) has not answered for" in found[rank] and rank < 2
            assert late or "rank 2 waits for rank 3" in found[rank], found
        elif rank == 1:
            assert "rank 1 waits for rank 0" in found[rank], found
        else:
            assert "host0 (ranks 0, 1) has not answered for" in found[rank], found


def inside(comm: ClusterCommunicator, what: str) -> str:
    """Rank 2 dies after all have compared the call, before it does its part."""
    from linkweave.collectives.cluster.connections import Connections
    from linkweave.collectives.cluster.pieces import Pieces

    x = np.ones(MEBI)
    if what == "again":
        comm.broadcast(x, 1)
    run, views = Pieces._run, []

    def viewed(self: Pieces, x: Any, *rest: Any) -> None:
        views.append(x)  # as a connection does that goes on after an error
        run(self, x, *rest)

    Pieces._run = viewed  # type: ignore[method-assign]
    if comm.rank == 2:
        die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        Connections._move = Pieces._run = die  # type: ignore[method-assign,assignment]
    indices = np.arange(10, dtype=np.int32)
    if what == "sparse":
        return first_error(
            lambda: comm.sparse_allreduce(
                np.ones(10, np.float32), indices, 10, 5, mode="gtopk", conserve=False
            )
        )
    said, held = first_error(partial(comm.broadcast, x, 1)), weakref.ref(x)
    del x
    comm.close()
    comm._calls._known.clear()
    kept = held() is not None
    views.clear()
    gc.collect()
    return (
        said
        if kept and held() is None
        else f"memory in use is kept: {kept}, then freed: {held() is None}"
    )


@pytest.mark.parametrize("what", ["sparse", "broadcast", "again"])
def test_a_rank_that_dies_inside_a_call(what: str) -> None:
    found = on_machines((2, 1), inside, what)
    for said in found[:2]:
        assert "CollectiveAborted" in said and seconds(said) < 15, found
        assert "host1 (rank 2) has closed its connection" in said, found


def in_a_ring(comm: ClusterCommunicator) -> str:
    """Rank 1 dies before it sends its row; all but rank 2 hear of it only from others."""
    if comm.rank == 1:
        pieces.Rows._send = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    return first_error(lambda: comm.allgather(np.ones(MEBI, np.float32)))


def test_a_machine_that_dies_in_a_ring() -> None:
    found = on_machines((1, 1, 1, 1), in_a_ring, lost=[1])
    for rank in (0, 2, 3):
        assert "CollectiveAborted" in found[rank] and seconds(found[rank]) < 5, found
        assert "host1 (rank 1) has closed its connection" in found[rank], found


def test_a_rank_that_leaves() -> None:
    found = on_machines((1, 2), lose, 2, "raises")
    assert found[2] == "ValueError: I have had enough"
    assert all("CollectiveAborted" in said for said in found[:2])


def ended(comm: ClusterCommunicator) -> list[str]:
    said = lose(comm, 1, "SIGKILL")
    return [said, first_error(lambda: comm.barrier()), first_error(lambda: comm.send(said, 0))]


def test_a_communicator_that_has_failed_says_so() -> None:
    for said in on_machines((1, 1, 1), ended)[::2]:
        assert all("this communicator failed before" in words for words in said[1:])
        assert "host1 (rank 1) has closed its connection" in said[1]


@across((1, 1), timeout=1.0)
def test_a_message_that_does_not_come(comm: ClusterCommunicator) -> None:
    if comm.rank == 1:
        time.sleep(2)
        return
    said = first_error(lambda: comm.recv(np.zeros(3), 1))
    assert "CollectiveTimeout: rank 0 waits for rank 1 to send" in said


def injected(comm: ClusterCommunicator, seed: int, who: int, how: str) -> str:
    """Some calls, whose sums are checked, and then a fault of rank `who`."""
    rng = random.Random(seed)
    for _ in range(rng.randrange(4)):
        n = rng.choice([1, 1000, MEBI])
        comm.allreduce(x := np.full(n, comm.rank + 1.0))
        assert (x == sum(range(1, comm.size + 1))).all()
    if how != "differs":
        kind = rng.choice(["allreduce", "reduce_scatter", "alltoall", "allgather"])
        return lose(comm, who, how, rng.random() < 0.5, kind)
    said = first_error(lambda: comm.allreduce(np.ones(2 if comm.rank == who else 1)))
    comm.allreduce(x := np.ones(2))
    assert (x == comm.size).all()
    return said


def files() -> tuple[int, int]:
    """How many descriptors this process has, and how many children."""
    gc.collect()  # closures of ranks refer to each other, and hold their pipes
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return len(os.listdir("/proc/self/fd")), len(children)


def inject(seed: int) -> None:
    """One job with a fault: every rank that is left raises, soon."""
    rng = random.Random(seed)
    sizes = rng.choice([(1, 1), (2, 2), (1, 2), (1, 1, 1), (2, 1)])
    total = sum(sizes)
    who, how = rng.randrange(total), rng.choice(["SIGKILL", "SIGSTOP", "raises", "differs"])
    start = time.monotonic()
    lost = [who] if how != "differs" else []
    found = on_machines(sizes, injected, seed, who, how, timeout=2.0, lost=lost)
    assert time.monotonic() - start < 40, (seed, sizes, how)
    for rank, said in enumerate(found):
        if rank != who or how == "differs":
            assert "Collective" in str(said), (seed, sizes, how, found)


def loop(count: int) -> None:
    inject(0)
    before = files()
    for seed in range(count):
        inject(seed)
        assert files() == before, (seed, files(), before)


def test_faults_in_a_loop() -> None:
    loop(1)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_200_faults_in_a_loop() -> None:
    loop(200)


FOUR = (1, 1, 1, 1)


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "raises"])
def test_one_of_four_machines_fails(who: int, how: str) -> None:
    found = on_machines(FOUR, lose, who, how, timeout=1.0, lost=[who])
    for rank in {0, 1, 2, 3} - {who}:
        kind, word = "CollectiveAborted", "closed its connection"
        if how == "SIGSTOP":
            kind, word = "CollectiveTimeout", "not answered"
        assert seconds(found[rank]) < 10 and kind in found[rank], found
        assert f"host{who} (rank {who}) has {word}" in found[rank], found
        assert all(f"host{r} (rank {r}) has not" not in found[rank] for r in {1, 3}), found


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("what", ["barrier", "short", "refused", "one way"])
@across(FOUR, timeout=4.0)
def test_one_of_four_machines_makes_another_call(
    comm: ClusterCommunicator, who: int, what: str
) -> None:
    """Rank `who` makes another call than the others."""
    x = np.ones(MEBI)
    calls = {
        "barrier": lambda: comm.barrier() if comm.rank == who else comm.allreduce(x),
        "short": lambda: comm.allgather(x[:9]) if comm.rank == who else comm.allgather(x),
        "refused": lambda: comm.allreduce("x" if comm.rank == who else x),
        "one way": lambda: comm.barrier() if comm.rank == who else comm.broadcast(x[:9], who),
    }
    said = first_error(calls[what])
    if what != "one way":
        comm.allreduce(x := np.ones(MEBI))
        assert (x == comm.size).all()
    assert seconds(said) < 3, said
    if what == "refused":
        assert "not builtins.str" in said
        return
    own, others = {
        "barrier": ("barrier", "allreduce(1048576 x float64, sum)"),
        "short": ("allgather(36 x float64 in all)", "allgather(4194304 x float64 in all)"),
        "one way": ("barrier", f"broadcast(9 x float64, root {who})"),
    }[what]
    assert f"host{who} (rank {who}): {own}" in said
    assert f"host3 (rank 3): {others}" in said
