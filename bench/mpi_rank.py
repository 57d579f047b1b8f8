"""One rank of the MPI peer: reads lines of a collective, bytes and iterations, and answers with
times (`peers.Mpi`)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from linkweave.bench.peers import given, room, splits, wanted


def call_of(comm: Any, kind: str, x: Any, y: Any, count: int) -> Callable[[], Any]:
    """A call from `x` into `y`, of a message of `count` elements; the root is rank 0."""
    root = comm.rank == 0
    gathered, mine = (splits(rank, comm.size, count) for rank in (0, comm.rank))
    return {
        "allreduce": lambda: comm.Allreduce(x, y), "broadcast": lambda: comm.Bcast(x),
        "reduce": lambda: comm.Reduce(x, y if root else None),
        "allgather": lambda: comm.Allgather(x, y),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(x, y),
        "alltoall": lambda: comm.Alltoall(x, y),
        "allgatherv": lambda: comm.Allgatherv(x, (y, gathered)),
        "alltoallv": lambda: comm.Alltoallv((x, mine), (y, mine)),
        "gather": lambda: comm.Gather(x, y if root else None),
        "scatter": lambda: comm.Scatter(x if root else None, y),
    }[kind]  # fmt: skip


def main() -> None:
    comm = MPI.COMM_WORLD
    pids = comm.gather(os.getpid())
    if comm.rank == 0:
        name = MPI.Get_library_version().split("\n")[0].split(",")[0]
        print("ready ", name, *(pids or []), sep="\t", flush=True)
    while True:
        line = sys.stdin.readline() if comm.rank == 0 else ""
        line = comm.bcast(line)
        if not line.strip():
            return
        kind, nbytes, iterations = line.split()
        sizes = comm.rank, comm.size, int(nbytes) // 4
        x, want = given(kind, *sizes), wanted(kind, *sizes)
        whole = kind in ("allreduce", "reduce")  # from one array into another, as MPI does it best
        y = np.empty_like(x) if whole else np.empty(room(kind, *sizes[1:]), np.float32)
        call = call_of(comm, kind, x, y, sizes[2])
        call()
        result = x if kind == "broadcast" else y
        wrong = comm.allreduce(0 if want is None else int((result != want).sum()))
        times = []
        for _ in range(int(iterations)):
            x += np.float32(0)  # touched before each call, as for the others
            comm.Barrier()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        iterations = len(times)
        slowest = np.empty(iterations)
        comm.Reduce(np.array(times), slowest, MPI.MAX)
        if comm.rank == 0:
            print(wrong, *slowest, flush=True)


if __name__ == "__main__":
    main()
