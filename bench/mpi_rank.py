"""One rank of the MPI peer: reads "nbytes iterations" lines, answers with times (`peers.Mpi`)."""

from __future__ import annotations

import os
import sys
import time

import numpy as np
from mpi4py import MPI


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
        nbytes, iterations = map(int, line.split())
        count = nbytes // 4
        pattern = (np.arange(count) % 251).astype(np.float32)
        x = pattern + np.float32(comm.rank)
        y = np.empty_like(x)
        comm.Allreduce(x, y)
        want = pattern * comm.size + comm.size * (comm.size - 1) // 2
        wrong = comm.allreduce(int((y != want).sum()))
        times = []
        for _ in range(iterations):
            x += np.float32(0)  # touched before each call, as for the others
            comm.Barrier()
            start = time.perf_counter()
            comm.Allreduce(x, y)
            times.append(time.perf_counter() - start)
        slowest = np.empty(iterations)
        comm.Reduce(np.array(times), slowest, MPI.MAX)
        if comm.rank == 0:
            print(wrong, *slowest, flush=True)


if __name__ == "__main__":
    main()
