"""What ranks say to each other: who is waited for, who has left, who is no rank at all."""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from on_ranks import on_ranks

from linkweave import collectives
from linkweave.collectives import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.calls.request import EXCHANGES, KINDS, NOTHING, Request, notice
from linkweave.collectives.cluster.join import Job
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS, NAMES
from linkweave.collectives.runtime.buffer import DTYPES, OPS
from linkweave.collectives.runtime.cpu import header
from linkweave.collectives.runtime.cpu.arena import Arena
from linkweave.collectives.runtime.cpu.control import Health, HostControl
from linkweave.collectives.runtime.cpu.mapping import Mapping
from linkweave.collectives.runtime.diagnose import DIED, RAISED
from linkweave.kernels.plan import counters as kernel
from linkweave.topology import load
from tests.cpu.helpers import error_of, hurry, outlive

ROOT = Path(__file__).parents[2]


# ---- processes that are no ranks -----------------------------------------------------------------
@on_ranks(2)
def test_a_forked_child_is_not_its_rank(rank: int) -> None:
    """What a forked child of rank 0 is told, and the sums of the ranks beside it."""
    comm = get_default()
    comm.allreduce(np.ones(4))
    if rank == 0:
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            words = [error_of(collectives.allreduce, np.ones(4)) for _ in range(3)]
            words.append(error_of(comm.send, np.ones(4), 1))
            comm.close()  # which touches nothing
            os.write(write, json.dumps(words).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        for words in json.loads(os.read(read, 4096).decode()):
            assert "was forked from rank 0 (process" in words and "is not a rank itself" in words
        if (pid := os.fork()) == 0:
            collectives.shutdown()
            sys.exit(0)  # unwinds, and would close the communicator
        os.waitpid(pid, 0)
    x = np.full(4, rank + 1.0)
    comm.allreduce(x)
    assert x.tolist() == [3.0] * 4


@pytest.mark.parametrize("page", header.SPANS)
def test_no_field_of_a_page_overlaps_another(page: str) -> None:
    spans = {name: (getattr(header, name), n) for name, n in header.SPANS[page].items()}
    ends = 0
    for name, (start, nbytes) in sorted(spans.items(), key=lambda item: item[1]):
        assert ends <= start and start % 8 == 0, name
        ends = start + nbytes
    assert ends <= header.PAGE


def test_every_word_has_a_span_and_a_change_is_noticed() -> None:
    """Whoever changes what ranks read of each other gives it another `LAYOUT` as well."""
    sizes = "LAYOUT", "PAGE", "NOTICE_WORDS", "GPU_CALL_WORDS", "MAX_MESSAGE"
    words = {name for name in vars(header) if name.isupper()} - {"SPANS", *sizes}
    assert words == {name for page in header.SPANS.values() for name in page}
    offsets = {name: getattr(header, name) for name in sorted(words)}
    tables = [*KINDS], [*DTYPES], [*OPS], [*NAMES], [*EXCHANGES]
    assert (header.LAYOUT, crc32(repr((offsets, header.SPANS, tables)).encode())) == (2, 321472906)


def test_a_notice_fits_its_words() -> None:
    """With two words of memory, and whether its rank could read that of the others."""
    assert len(notice(Request("barrier", NOTHING))) + 2 + 1 <= header.NOTICE_WORDS


@on_ranks(2)
def test_a_rank_may_spawn_ranks_of_its_own(rank: int) -> None:
    comm = get_default()
    inner = collectives.spawn(one_sum, 2) if rank == 0 else []
    x = np.ones(3)
    comm.allreduce(x)
    assert x[0] == 2 and inner == ([3.0, 3.0] if rank == 0 else [])


def one_sum(rank: int) -> float:
    x = np.full(2, rank + 1.0)
    collectives.allreduce(x)
    return float(x[0])


@on_ranks(2)
def test_a_child_leaves_its_parents_tensors_alone(rank: int) -> None:
    """A child drops its copy of a tensor in shared memory, and ends."""
    comm = get_default()
    x = comm.empty(1 << 18)
    x[:] = 1
    for drop in (True, False):
        if (pid := os.fork()) == 0:
            if drop:
                del x
                os._exit(0)
            sys.exit(0)
        os.waitpid(pid, 0)
    comm.barrier()
    assert x.sum() == 1 << 18


@on_ranks(3)
def test_ranks_keep_the_same_plans_however_they_make_their_calls(rank: int) -> None:
    """More plans than are kept, by calls that ranks make in ways of their own."""
    comm: Any = get_default()
    for again in range(2):
        for i in range(90):
            n = 100 + 13 * i
            x = np.full((n, 2), rank, np.float32)
            strided = rank == 1 and i % 3 == 0
            y = x[:, 0] if strided else np.ascontiguousarray(x[:, 0])
            plan = collectives.plan_allreduce(
                load("cpu-3"), 4 * n, ("tree", "chain", "ring")[i % 3], 3
            )
            plan = replace(plan, notes=(str(i % 80),))  # a plan of its own
            if rank == 2 and i % 7 == again:
                comm.run(plan, y, async_op=True).wait()
            else:
                comm.run(plan, y)
            z = np.full(n, rank, np.float32)
            comm.allreduce(z)
            assert (y == 3).all() and (z == 3).all()
    assert len(comm._calls._regions) <= 64


@on_ranks(2)
def test_functions_are_compared_by_what_they_are_made_of(rank: int) -> None:
    """A function made anew at each call on some ranks; closures that differ."""
    comm = get_default()

    def fixed(topology: Any) -> Any:
        return ALGORITHMS["allreduce"]["tree"].make(topology)

    def make(name: str) -> Any:
        return lambda topology: ALGORITHMS["allreduce"][name].make(topology)

    for _ in range(3):
        x = np.ones(30)
        comm.allreduce(x, algorithm=fixed if rank else _again(fixed))
        assert (x == 2).all()
    said = [
        error_of(comm.allreduce, np.ones(30), algorithm=make(("tree", "chain")[rank])),
        error_of(comm.allreduce, np.ones(30), algorithm=Payload()),
    ]
    assert "calls differ: " in said[0] and "a name or a function of a topology" in said[1]


def _again(function: Any) -> Any:
    return FunctionType(
        function.__code__, function.__globals__, function.__name__, None, function.__closure__
    )


def opened_and_closed(rank: int) -> int:
    """Without a collector."""
    gc.disable()
    for _ in range(60):
        with collectives.init() as comm:
            comm.allreduce(np.ones(9))
    return sum("memfd:linkweave" in line for line in Path("/proc/self/maps").open())


def test_closed_communicators_are_unmapped_at_once() -> None:
    script = (
        "import sys; sys.path.insert(0, '.'); import tests.cpu.test_control as t; "
        "print(t.opened_and_closed(0))"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/cpu"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 0


class Store:
    """What another user has put into torch's store, which anyone can reach."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    def wait(self, *_: Any) -> None:
        pass

    def get(self, key: str) -> bytes:
        return self.value

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return True


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/linkweave-was-here",)


@pytest.mark.parametrize(
    "value",
    [
        pickle.dumps(Payload()),
        b"[" * 10_000,
        b"[[0], 2]",
        b'["a"]',
        b'{"path": 1}',
        b"\xff",
        b"3",
        b'[[[0], "host"]]',
        b'[[[0, 1, 2], "host"]]',
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_store_says_is_not_run(value: bytes, rank: int) -> None:
    with pytest.raises(CollectiveError, match="in the store is not what a rank writes"):
        Job(rank, 2, Store(value), "key").machines(1.0)
    assert not Path("/tmp/linkweave-was-here").exists()


def test_only_shared_memory_of_our_own_is_opened(tmp_path: Path) -> None:
    victim = tmp_path / "file"
    victim.write_bytes(b"mine")
    with victim.open("r+b") as file:
        for location in (str(victim), f"/proc/{os.getpid()}/fd/{file.fileno()}", "/proc/1/fd/x"):
            with pytest.raises(CollectiveError, match="rank 1"):
                Mapping.open(location, 2, 1)
    assert victim.read_bytes() == b"mine"
    fd = Mapping.create(2)
    try:
        Mapping.open(Mapping.location(fd), 2, 1).use()
    finally:
        os.close(fd)


def test_shared_memory_of_another_job_is_not_opened() -> None:
    """Who can write to the store of a job could name that of another job of the same user."""
    fd = Mapping.create(2, "job/session")
    before = os.pread(fd, 1 << 16, 0)
    try:
        for size, job in ((2, "job/other"), (3, "job/session"), (2, "")):
            with pytest.raises(CollectiveError, match="is the shared memory of another job"):
                Mapping.open(Mapping.location(fd), size, 1, job)
        assert os.pread(fd, 1 << 16, 0) == before
        Mapping.open(Mapping.location(fd), 2, 1, "job/session").use()
    finally:
        os.close(fd)


# ---- leaving -------------------------------------------------------------------------------------
@on_ranks(3, timeout=200)
def test_who_closes_first_is_named_at_once(rank: int, tmp_path: Path) -> None:
    comm = get_default()
    comm.barrier()
    if rank == 1:
        comm.close()
        outlive(tmp_path, 2)
        return
    hear(rank, tmp_path, "rank 1 has returned or was closed; rank")


def hear(rank: int, path: Path, words: str) -> None:
    """A call raises such words at once; a file says that it has."""
    start = time.monotonic()
    said = error_of(collectives.allreduce, np.ones(9))
    (path / str(rank)).touch()
    assert time.monotonic() - start < 100 and words in said, said


@pytest.mark.parametrize("close", ["comm.close", "shutdown"])
@on_ranks(2)
def test_a_call_of_another_thread_ends_where_its_communicator_is_closed(
    rank: int, close: str
) -> None:
    comm = get_default()
    x = np.ones(1000, np.float32)
    comm.allreduce(x)
    said: list[str] = []
    if rank == 0:
        waits = threading.Thread(target=lambda: said.append(error_of(comm.allreduce, x)))
        waits.start()
        time.sleep(0.05)
        (comm.close if close == "comm.close" else collectives.shutdown)()
        waits.join(20)
        assert said == ["this communicator is closed"]
    else:
        time.sleep(0.3)
        assert "rank 0" in error_of(comm.barrier)


@on_ranks(2)
def test_a_call_that_differs_as_its_communicator_is_closed(rank: int) -> None:
    """Another thread has closed it before this one can tell how the ranks' calls differ."""
    comm: Any = get_default()
    comm.allreduce(x := np.ones(9))
    if rank == 0:
        comm._calls.executor.run = lambda *_: comm.close()
        assert error_of(comm.allreduce, x) == "this communicator is closed"
    else:
        assert "rank 0" in error_of(comm.barrier)


@on_ranks(2, timeout=200)
def test_an_exception_inside_a_call_is_told_at_once(rank: int, tmp_path: Path) -> None:
    """Rank 1's call raises something that is no CollectiveError; it closes, and lives on."""
    comm: Any = get_default()
    comm.barrier()
    if rank == 1:
        comm._calls.executor.run = None  # not callable
        with pytest.raises(TypeError):
            comm.allreduce(np.ones(9))
        comm.close()
        outlive(tmp_path, 1)
        return
    hear(rank, tmp_path, "rank 1 raised an exception")


# ---- who is waited for ---------------------------------------------------------------------------
@on_ranks(3)
def test_ranks_of_a_part_are_named_by_both_numbers(rank: int, tmp_path: Path) -> None:
    """Rank 0 waits in a part for rank 1, which waits in another part for rank 2, which sleeps."""
    comm = get_default()
    first = comm.split(int(rank == 2))  # ranks 0 and 1
    second = comm.split(int(rank == 0))  # ranks 1 and 2
    x = np.ones(9)
    for part in (first, second):
        part.allreduce(x)
        comm.barrier()
        hurry(part, 1)
    if rank == 2:
        outlive(tmp_path, 2)
        return
    said = error_of((first, second)[rank].allreduce, x)
    (tmp_path / str(rank)).touch()
    assert rank == 0 or "rank 0 (1 of all) waits for rank 1 (2 of all) to make its call" in said


def in_line(rank: int, path: str) -> None:
    """All wait for the same call of rank 2, or for one who does."""
    comm = get_default()
    x = np.ones(200_000, np.float32)
    comm.allreduce(x, algorithm="chain")
    hurry(comm, 1)
    if rank == 2:
        outlive(Path(path), 3)
    try:
        comm.allreduce(x, algorithm="chain")
    except (CollectiveTimeout, CollectiveAborted) as error:
        Path(path, str(rank)).write_text(f"{error.peer}|{error}")
        raise


def test_the_chain_of_waits_ends_at_the_culprit(tmp_path: Path) -> None:
    with pytest.raises(CollectiveTimeout, match="rank 2"):
        collectives.spawn(in_line, 4, args=(str(tmp_path),), timeout=60)
    said = [p.read_text() for p in tmp_path.iterdir()]
    assert len(said) >= 3 and all("rank 2" in text for text in said)


def unheard(rank: int) -> None:
    comm = get_default()
    logging.getLogger("linkweave").addHandler(logging.StreamHandler(os.fdopen(2, "w")))
    comm.allreduce(np.ones(3 + rank), async_op=True)  # differs, and nobody waits
    comm.barrier()
    comm.close()


def test_an_error_that_nobody_waits_for_is_logged(capfd: pytest.CaptureFixture[str]) -> None:
    collectives.spawn(unheard, 2)
    assert "nobody waited for an asynchronous call, which raised" in capfd.readouterr().err


@on_ranks(3)
def test_where_a_lane_fails_its_family_ends_and_the_whole_goes_on(rank: int) -> None:
    comm: Any = get_default()
    first, second = comm.lanes(2)
    first.barrier()
    if rank == 0:
        first._calls.executor.run = None  # not callable
    said = []
    try:
        first.allreduce(np.ones(3))
    except (TypeError, CollectiveError) as error:
        said.append(str(error))
    said += [error_of(second.allreduce, np.ones(3)) for _ in range(2)]
    x = np.ones(3)
    comm.allreduce(x)
    assert x[0] == 3 and not any("calls differ: " in words for words in said)
    assert all("rank 0 raised" in w or "failed before" in w for w in said[1:]), said


@on_ranks(3)
def test_a_message_that_never_comes_is_the_receivers_error_alone(rank: int, tmp_path: Path) -> None:
    comm: Any = get_default()
    hurry(comm, 1)
    said = error_of(comm.recv, np.ones(3), 1) if rank == 0 else ""
    comm._calls.control.timeout = 60  # of the all-reduce
    if rank == 0:
        assert "rank 0 waits for rank 1 to send for 1 s" in said
        (tmp_path / "done").touch()
    outlive(tmp_path, 1)
    x = np.ones(3)
    comm.allreduce(x)
    assert x[0] == 3


@on_ranks(3)
def test_an_algorithm_that_raises_is_an_error_on_all_who_may_go_on(rank: int) -> None:
    comm = get_default()

    def broken(topology: Any) -> Any:
        return {}["nothing"]

    said = error_of(comm.allreduce, np.ones(3), algorithm=broken)
    comm.barrier()
    assert "broken on cpu-3: KeyError: 'nothing'" in said


# ---- many ----------------------------------------------------------------------------------------
@pytest.mark.slow
@on_ranks(64, timeout=120)
def test_64_ranks_have_32_parts(rank: int) -> None:
    comm = get_default()
    lanes = comm.lanes(32)
    x = np.ones(2, np.float32)
    works = [lane.allreduce(x.copy(), async_op=True) for lane in lanes[:2]]
    for work in works:
        work.wait()
    lanes[-1].allreduce(x)
    assert x[0] == 64


@on_ranks(3)
def test_lanes_of_several_threads(rank: int) -> None:
    """The lanes of a rank may be used by a thread each."""
    lanes = get_default().lanes(2)
    arrays = [np.full(1000, rank, np.float32), np.full(2000, rank, np.float64)]
    done = []

    def work(i: int) -> None:
        done.append(lanes[i].allreduce(arrays[i], async_op=True))

    for i in range(2):  # started in the same order on every rank
        thread = threading.Thread(target=work, args=(i,))
        thread.start()
        thread.join()
    for handle in done:
        handle.wait()
    assert all((x == 3).all() for x in arrays)


def test_a_wait_that_ends_while_it_is_looked_at_has_not_timed_out() -> None:
    """Rank 0 was alive all the time and has just come, so that nobody is waited for any more."""
    first, second = (HostControl(arena, 1.0, Health(arena.rank)) for arena in Arena.local(2))
    come = lambda: ("rank 1 was about to go on", {"rank": 1})  # noqa: E731
    long_ago = time.monotonic() - 5
    with first.alive():
        deadline = time.monotonic() + 60
        while not second.arena.words(second.arena.control(0) + header.BEATS, 1)[0]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    second.check(kernel.IDLE, long_ago, come, planning=60)
    with pytest.raises(CollectiveTimeout, match="about to go on"):
        second.check(kernel.IDLE, long_ago, come)
    first.close()
    second.close()


@pytest.mark.parametrize("dies", [False, True], ids=["says why", "dies first"])
def test_the_reason_is_that_of_the_rank_that_gives_up_first(dies: bool) -> None:
    """A rank that comes second waits until the first one has said why, unless that has died."""
    first, second = (HostControl(arena, 1.0, Health(arena.rank)) for arena in Arena.local(2))
    arena = first.arena
    assert kernel.claim(arena.base + arena.start + header.CLAIMED, 0, 1)  # by the first

    def say_why() -> None:
        time.sleep(0.05)
        arena.abort[1:4] = 0, DIED, 1
        kernel.raise_counter(arena.abort_address, 1, first.bells)

    thread = threading.Thread(target=(lambda: None) if dies else say_why)
    thread.start()
    second.give_up(RAISED)
    words = "rank 1 raised" if dies else r"rank 1 \(process \d+\) died"
    with pytest.raises(CollectiveAborted, match=words):
        second.raise_aborted()
    thread.join()
    first.close()
    second.close()
