"""Ranks that die, stop, raise or never come: the others say so, and nothing is left behind."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks

from linkweave import collectives
from linkweave.collectives import CollectiveAborted, CollectiveError, CollectiveTimeout
from linkweave.collectives.calls.communicator import get_default
from linkweave.collectives.launch import processes
from linkweave.collectives.runtime.cpu import executor as shm
from linkweave.collectives.runtime.cpu.mapping import _Heap
from tests.cpu.helpers import hurry, others_have_called, shared_files

BIG = 16 << 20  # float32s: 64 MiB, far longer under way than the fuse of `kill_in_the_middle`


def children() -> set[int]:
    """Processes whose parent is this one."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No file, no process; and the next job runs."""
    shm, before = shared_files(), children()
    yield
    assert shared_files() == shm
    assert children() <= before
    assert collectives.spawn(total, 3) == [3.0] * 3


def test_a_program_without_a_guard_beside_a_thread_is_told_why_ranks_cannot_start(
    tmp_path: Path,
) -> None:
    code = tmp_path / "program.py"
    code.write_text(
        "import threading, time, linkweave\n"
        "threading.Thread(target=time.sleep, args=(30,), daemon=True).start()\n"
        "linkweave.spawn(print, 1)\n"
    )
    done = subprocess.run([sys.executable, str(code)], capture_output=True, text=True, timeout=280,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                          check=False)  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert "This process runs other threads or has used CUDA" in last
    assert "if __name__ == '__main__'" in last


def total(rank: int) -> float:
    x = np.full(5, rank, np.float32)
    collectives.allreduce(x)
    return float(x[0])


def telling(path: str, rank: int, call: Callable[[], Any]) -> None:
    """Make the call; write what it raised, and when, to a file of the rank."""
    try:
        call()
    except CollectiveError as error:
        fields = [getattr(error, f, None) for f in ("rank", "peer", "channel", "step", "chunk")]
        text = f"{type(error).__name__}|{time.monotonic()}|{fields}|{error}"
        Path(path, f"{rank}").write_text(text)
        raise


def told(path: Path, ranks: set[int]) -> dict[int, tuple[str, float, list[Any], str]]:
    assert {int(p.name) for p in path.iterdir() if p.name.isdigit()} == ranks
    out = {}
    for r in ranks:
        kind, when, fields, text = (path / f"{r}").read_text().split("|", 3)
        values = [None if f == "None" else int(f) for f in fields.strip("[]").split(", ")]
        out[r] = kind, float(when), values, text
    return out


def kill_before(rank: int, path: str, signum: int, seconds: float) -> None:
    comm = get_default()
    x = np.ones(1000, np.float32)
    comm.allreduce(x)
    hurry(comm, seconds)
    if rank == 2:
        others_have_called(comm)  # or some would wait for others
        Path(path, "when").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signum)
    telling(path, rank, lambda: collectives.allreduce(x))


def test_killed_before_a_call(tmp_path: Path, patient: None) -> None:
    with pytest.raises(CollectiveError, match=r"rank 2 \(process \d+\) was killed by SIGKILL"):
        collectives.spawn(kill_before, 4, args=(str(tmp_path), signal.SIGKILL, 200), timeout=200)
    died = float((tmp_path / "when").read_text())
    for rank, (kind, when, fields, text) in told(tmp_path, {0, 1, 3}).items():
        assert kind == "CollectiveAborted" and when - died < 100
        assert fields[:2] == [rank, 2], text
        assert re.search(r"rank 2 \(process \d+\) died", text), text


def kill_in_the_middle(rank: int, path: str) -> None:
    comm = get_default()
    x = np.ones(BIG, np.float32)
    comm.allreduce(x)  # plans, compiles and touches the memory
    if rank == 1:

        def fuse() -> None:
            region = next(iter(comm._calls._regions.values()))
            before = region.cursor.sum()
            while region.cursor.sum() == before:
                time.sleep(0.0005)
            Path(path, "when").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=fuse, daemon=True).start()
    telling(path, rank, lambda: [comm.allreduce(x) for _ in range(200)])


def test_killed_in_the_middle(tmp_path: Path, patient: None) -> None:
    with pytest.raises(CollectiveError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        collectives.spawn(kill_in_the_middle, 4, args=(str(tmp_path),), timeout=200)
    died = float((tmp_path / "when").read_text())
    for rank, (kind, when, fields, text) in told(tmp_path, {0, 2, 3}).items():
        assert kind == "CollectiveAborted" and when - died < 100
        assert re.search(r"rank 1 \(process \d+\) died", text), text
        assert fields[0] == rank, text
        if "chunk" in text:
            assert None not in fields, text
            assert f"rank {rank} waits for" in text and f"chunk {fields[4]}" in text, text
            assert f"channel {fields[2]}" in text and f"rank {fields[1]}" in text, text


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that do not end are killed two seconds after the first error."""
    monkeypatch.setattr(processes, "GRACE", 2.0)


def test_stopped_rank(tmp_path: Path, impatient: None) -> None:
    with pytest.raises(CollectiveTimeout, match=r"waits for rank 2 .* for 1 s") as info:
        collectives.spawn(kill_before, 4, args=(str(tmp_path), signal.SIGSTOP, 1), timeout=60)
    assert info.value.peer == 2 and info.value.rank in (0, 1, 3)
    reports = told(tmp_path, {0, 1, 3})
    assert any(kind == "CollectiveTimeout" for kind, *_ in reports.values())
    assert all("rank 2" in text for *_, text in reports.values())


def stopped_in_a_first_call(rank: int, path: str, which: int) -> None:
    """A rank is stopped while rank 0 plans, or is rank 0 itself, which plans for longer than the
    timeout before."""
    comm = get_default()
    hurry(comm, 1)
    make = comm._calls._plans.make

    def slow(*args: Any) -> Any:
        time.sleep(1.5)
        if which == 0:
            stop()
        return make(*args)

    def stop() -> None:
        Path(path, "when").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGSTOP)

    share = comm._calls._share
    if rank == 0:
        comm._calls._plans.make = slow
    elif rank == which:
        comm._calls._share = lambda make, *rest: stop() or share(make, *rest)
    telling(path, rank, lambda: collectives.allreduce(np.ones(10, np.float32)))


@pytest.mark.parametrize("which", [0, 2])
def test_stopped_in_the_first_call_of_a_kind(tmp_path: Path, impatient: None, which: int) -> None:
    with pytest.raises(CollectiveTimeout, match=f"waits for rank {which} to make its call"):
        collectives.spawn(stopped_in_a_first_call, 3, args=(str(tmp_path), which), timeout=60)
    stopped = float((tmp_path / "when").read_text())
    for _, when, _, text in told(tmp_path, {0, 1, 2} - {which}).values():
        assert when > stopped and f"rank {which}" in text


def leaves_a_child(rank: int, path: str) -> None:
    collectives.barrier()
    if rank == 1:
        if (child := os.fork()) == 0:
            time.sleep(200)
            os._exit(0)
        Path(path, "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    telling(path, rank, collectives.barrier)


def test_killed_while_a_child_of_it_lives(tmp_path: Path, patient: None) -> None:
    start = time.monotonic()
    with pytest.raises(CollectiveError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        collectives.spawn(leaves_a_child, 3, args=(str(tmp_path),), timeout=200)
    assert time.monotonic() - start < 100
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert all("died" in text for *_, text in told(tmp_path, {0, 2}).values())


def one_call_more(rank: int, path: str) -> None:
    collectives.barrier()
    if rank:
        telling(path, rank, collectives.barrier)


def test_a_rank_that_has_returned_was_closed(tmp_path: Path, patient: None) -> None:
    with pytest.raises(
        CollectiveAborted, match=r"rank 0 has returned or was closed; rank [12] waits for rank 0"
    ):
        collectives.spawn(one_call_more, 3, args=(str(tmp_path),), timeout=60)
    assert all(
        "rank 0 has returned or was closed" in text for *_, text in told(tmp_path, {1, 2}).values()
    )


LIMITED = """
import resource, linkweave
limit = getattr(resource, "RLIMIT_" + NAME)
resource.setrlimit(limit, (VALUE, VALUE))
linkweave.spawn(linkweave.barrier, 2)
"""


@pytest.mark.parametrize(("name", "value"), [("NOFILE", 8), ("FSIZE", 1 << 20)])
def test_a_limit_of_the_system_is_an_error_that_says_so(name: str, value: int) -> None:
    code = LIMITED.replace("NAME", repr(name)).replace("VALUE", str(value))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280,
                          check=False)  # fmt: skip
    assert "CollectiveError: ranks cannot be started: " in done.stderr
    assert "`ulimit -a` shows" in done.stderr


def never_comes(rank: int, path: str) -> None:
    x = np.ones(10, np.float32)
    collectives.allreduce(x)
    hurry(get_default(), 1)
    if rank == 0:
        time.sleep(250)
    start = time.monotonic()
    try:
        telling(path, rank, lambda: collectives.allreduce(x))
    finally:
        Path(path, f"took-{rank}").write_text(str(time.monotonic() - start))


def test_never_comes(tmp_path: Path, impatient: None) -> None:
    with pytest.raises(CollectiveTimeout, match=r"waits for rank 0 .* for 1 s") as info:
        collectives.spawn(never_comes, 3, args=(str(tmp_path),), timeout=60)
    assert info.value.rank in (1, 2) and info.value.peer == 0
    for rank, (kind, _, fields, _) in told(tmp_path, {1, 2}).items():
        assert fields[:2] == [rank, 0]
        took = float((tmp_path / f"took-{rank}").read_text())
        assert took > 0.9 or kind == "CollectiveAborted"


def comes_late(rank: int) -> str:
    hurry(get_default(), 0.5)
    while rank == 1 and not get_default()._calls.control.aborted():
        time.sleep(0.01)
    with pytest.raises(CollectiveError) as error:
        collectives.barrier()
    return str(error.value)


def test_a_rank_that_comes_late_to_a_barrier_learns_that_others_have_left() -> None:
    assert "gave up waiting for rank 1; rank 1 cannot go on" in collectives.spawn(comes_late, 3)[1]


class Odd(Exception):
    def __init__(self, a: int, b: int) -> None:  # pickles, but cannot be rebuilt
        super().__init__(f"odd {a} {b}")


def failing(rank: int, how: str) -> Any:
    if rank == 1:
        if how == "raise":
            raise ZeroDivisionError("nothing to share")
        if how == "local":

            class Local(Exception):
                pass

            raise Local("of no module")
        if how == "odd":
            raise Odd(1, 2)
        if how == "result":
            return lambda: None
        if how == "exit":
            os._exit(3)
        if how == "sys.exit":
            sys.exit(0)
    collectives.barrier()
    return rank


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("raise", ZeroDivisionError, "nothing to share"),
        ("local", CollectiveError, "Local: of no module"),
        ("odd", CollectiveError, "Odd: odd 1 2"),
        ("result", Exception, "(?i)pickle"),
        ("sys.exit", CollectiveError, r"rank 1 called sys\.exit\(0\); a rank ends by returning"),
        ("exit", CollectiveError, r"rank 1 \(process \d+\) exited with status 3"),
    ],
)
def test_a_rank_that_fails(how: str, kind: type[Exception], words: str) -> None:
    start = time.monotonic()
    with pytest.raises(kind, match=words) as info:
        collectives.spawn(failing, 3, args=(how,), timeout=200)
    assert not isinstance(info.value, CollectiveAborted)
    if how != "exit":
        notes = "".join(info.value.__notes__)
        assert "rank 1:" in notes and "Traceback" in notes
    assert time.monotonic() - start < 100  # of 200


def fail() -> None:
    raise CollectiveError("what was under way has failed")


def fail_while_closing(rank: int) -> None:
    get_default().before_close(fail)


def test_an_error_while_closing_takes_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    collectives.spawn(fail_while_closing, 2)
    said = sorted(capfd.readouterr().err.splitlines())
    words = "closed after a failure (rank {0}: what was under way has failed)"
    assert said == [f"rank {rank}: {words.format(rank)}" for rank in range(2)]


@on_ranks(2)
def test_a_part_made_while_closing_is_closed(rank: int) -> None:
    made: list[Any] = []
    part = get_default().split()
    part.before_close(lambda: made.append(part.split()))
    part.close()
    assert made[0].closed


def raise_while_closing(rank: int) -> None:
    def call() -> None:
        raise OSError("no space")

    get_default().before_close(call)


def test_any_error_while_closing_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    collectives.spawn(raise_while_closing, 2)
    said = capfd.readouterr().err
    assert [said.count(f"rank {rank}: Traceback") for rank in (0, 1)] == [1, 1]
    assert said.count("OSError: no space") == 2


def test_a_failed_job_leaves_no_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            collectives.spawn(failing, 3, args=("raise",))
    assert len(os.listdir("/proc/self/fd")) <= before  # without waiting for the collector


def all_killed(rank: int) -> None:
    collectives.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_all_killed() -> None:
    with pytest.raises(CollectiveError, match="was killed by SIGKILL"):
        collectives.spawn(all_killed, 4)


PARENT = """
import os, sys, time, collectives
def fn(rank):
    open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
    collectives.barrier()
    time.sleep(60)
collectives.spawn(fn, 3)
"""


def test_parent_killed(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(collectives.__file__).parent.parent)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], env=env)
    deadline = time.monotonic() + 100
    while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = [int(p.name) for p in tmp_path.iterdir()]
    assert len(pids) == 3
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if running(pid)]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@on_ranks(4)
def test_a_rank_that_has_finished_has_not_died(rank: int) -> None:
    """Rank 2 takes its time after all have met: it compiles, say, or its core is busy. The root is
    done, and gone, before the last ranks have its data."""
    call = shm.kernel.call

    def slow(frame: Any) -> int:
        state, said, notices, _, bells = (
            np.ctypeslib.as_array((ctypes.c_int64 * (length * max(width, 1))).from_address(address))
            for address, length, width in frame[:5].tolist()
        )
        notices = notices.reshape(frame[2, 1:])
        if state[shm.kernel.STAGE] == shm.kernel.POST:  # as `call` does, but for the first sends
            notices[rank, : len(said)] = said
            state[shm.kernel.STAGE], state[shm.kernel.DIRECT] = shm.kernel.AGREE, 0
            shm.counters.raise_counter(state[shm.kernel.POSTED], state[shm.kernel.NUMBER], bells)
            time.sleep(0.6)
        return int(call(frame))

    x = np.full(4, rank, np.float32)
    collectives.broadcast(x, 0)  # planned
    if rank == 2:
        shm.kernel.call = slow
    collectives.broadcast(x, 0)
    assert x.tolist() == [0.0] * 4


def test_the_heap_is_used_by_two_threads() -> None:
    """A list's call may allocate on the worker's thread while the user frees a tensor."""
    heap = _Heap(1 << 30)
    spans = [heap.take(128) for _ in range(400)]
    for start in spans[::2]:
        heap.give(start)
    wrong: list[Any] = []
    live: set[int] = set()
    lock = threading.Lock()

    def work() -> None:
        for _ in range(4000):
            try:
                start = heap.take(128)
                with lock:
                    if start in live:
                        wrong.append(start)
                        return
                    live.add(start)
                with lock:
                    live.discard(start)
                heap.give(start)
            except Exception as error:
                wrong.append(error)
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
