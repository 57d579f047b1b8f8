"""Jobs on several hosts with a fault in each: `faults.py HOST SIZES FIRST COUNT` runs the ranks of
one host, as forks, and prints what each rank of each job says."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch._C._distributed_c10d as c10d  # noqa: E402

from linkweave.collectives import CollectiveError  # noqa: E402
from linkweave.collectives.cluster import join  # noqa: E402
from linkweave.collectives.runtime.cpu.executor import compile_kernels  # noqa: E402
from linkweave.collectives.settings import Settings  # noqa: E402

FAULTS = ("kill", "stop", "raise", "cut", "blink", "differ", "under way", "opposite")
LOST = ("kill", "stop")
TIMEOUT = 2.0  # seconds
CALLS = 12  # of a job whose fault does no harm
_KINDS = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "gather", "scatter",
          "alltoall")  # fmt: skip


def fault(seed: int, size: int) -> tuple[str, int]:
    """(the fault, the rank that it happens to)."""
    rng = random.Random(seed)
    return FAULTS[seed % len(FAULTS)], rng.randrange(size)


def call(comm: Any, kind: str, n: int, root: int) -> None:
    """A call whose result is checked."""
    size, rank = comm.size, comm.rank
    x, total = np.full(n, rank + 1.0, np.float32), size * (size + 1) / 2
    rows = np.tile(np.arange(1.0, size + 1, dtype=np.float32)[:, None], (1, n))
    if kind == "allreduce":
        comm.allreduce(x)
        assert (x == total).all()
    elif kind == "broadcast":
        comm.broadcast(x, root)
        assert (x == root + 1).all()
    elif kind == "reduce":
        comm.reduce(x, "max", root)
        assert rank != root or (x == size).all()
    elif kind == "allgather":
        assert (comm.allgather(x) == rows).all()
    elif kind == "reduce_scatter":
        assert (comm.reduce_scatter(rows) == (rank + 1) * size).all()
    elif kind == "gather":
        found = comm.gather(x, root)
        assert found is None or (found == rows).all()
    elif kind == "scatter":
        comm.scatter(rows if rank == root else None, root, out=x[None])
        assert (x == rank + 1).all()
    else:
        assert (comm.alltoall(rows * 10 + rank) == (rank + 1) * 10 + rows - 1).all()


def job(comm: Any, seed: int) -> str:
    """Random calls, until the fault ends them; how they end."""
    kind, who = fault(seed, comm.size)
    rng = random.Random(seed)
    at, mine = rng.randrange(CALLS - 3), comm.rank == who
    delay = rng.choice([0, 0.001, 0.01, 0.05])
    lanes = comm.lanes(2) if kind == "opposite" else []
    for i in range(CALLS):
        name, root = rng.choice(_KINDS), rng.randrange(comm.size)
        n = rng.choice([1, 100, 10_000, 300_000])
        if i == at and kind == "opposite":
            for lane in lanes[::-1] if mine else lanes:
                call(lane, "allreduce", n, root)
        if i == at and mine:
            if kind == "raise":
                raise ValueError("I have had enough")
            if kind in ("kill", "stop", "cut", "blink"):
                threading.Timer(delay, _strike, (kind,)).start()
        waits = []
        if i == at and kind == "under way":
            waits = [comm.allreduce(np.ones(1 << 20, np.float32), async_op=True) for _ in range(2)]
        if i == at and mine and kind in ("differ", "under way"):
            name, n = rng.choice(_KINDS), n + 1
        call(comm, name, n, root)
        for wait in waits:
            wait.wait()
    time.sleep(0.1)
    comm.barrier()
    return "fine"


def _strike(kind: str) -> None:
    if kind in LOST:
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    _link("down")
    if kind == "blink":
        time.sleep(0.4)
        _link("up")


def _link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "eth0", state], check=True)


def _await_stop(pid: Any) -> None:
    for _ in range(6000):
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
            return
        time.sleep(0.01)


def rank_of(rank: int, sizes: list[int], seed: int, said: Any) -> None:
    torch.set_num_threads(1)
    start = time.monotonic()
    try:
        store = c10d.TCPStore(
            os.environ["MASTER_ADDR"], 30_000 + seed % 20_000, sum(sizes), rank == 0,
            timedelta(seconds=60),
        )  # fmt: skip
        store.set(f"started {rank}", "")
        store.wait([f"started {r}" for r in range(sum(sizes))], timedelta(seconds=60))
        start = time.monotonic()
        made = join.Job(rank, sum(sizes), store, f"faults {seed}")
        with join.meet(made, Settings(timeout=TIMEOUT)) as comm:
            said[rank] = job(comm, seed)
    except (CollectiveError, ValueError) as error:
        said[rank] = f"{type(error).__name__}: {error}"
    except BaseException as error:
        said[rank] = f"WRONG {type(error).__name__}: {error}"
    said[rank] = f"{time.monotonic() - start:.1f} s, {said[rank]}"


def main(host: int, sizes: list[int], first: int, count: int) -> None:
    compile_kernels()
    context = multiprocessing.get_context("fork")
    begin = sum(sizes[:host])
    mine = range(begin, begin + sizes[host])
    with context.Manager() as manager:
        for seed in range(first, first + count):
            kind, who = fault(seed, sum(sizes))
            said = manager.dict()
            ranks = {r: context.Process(target=rank_of, args=(r, sizes, seed, said)) for r in mine}
            for process in ranks.values():
                process.start()
            for rank, process in ranks.items():
                if not (kind == "stop" and rank == who):
                    process.join(90)
            if kind == "stop" and [*ranks] == [who]:  # until the other hosts have waited for it
                _await_stop(process.pid)
                time.sleep(2 * TIMEOUT + 4)
            alive = [rank for rank, process in ranks.items() if process.is_alive()]
            for process in ranks.values():
                process.kill()
                process.join()
                process.close()
            if kind == "cut" and who in mine:
                _link("up")
            files = len(os.listdir("/proc/self/fd"))
            print("job", json.dumps([seed, dict(said), alive, files]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), *map(int, sys.argv[3:]))
