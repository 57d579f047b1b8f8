"""`linkweave bench links`: bytes/s and latency between every two GPUs, or CPU ranks.

The JSON it writes is laid over nominal figures by `topology.load(..., measured=FILE)`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import numpy as np
from numba import njit

from linkweave import collectives
from linkweave.bench.timing import rounds_of
from linkweave.collectives import CollectiveError
from linkweave.collectives.calls.communicator import get_default
from linkweave.kernels.atomics import copy_bytes
from linkweave.kernels.plan.turns import turns
from linkweave.topology import GpuId
from linkweave.topology.readers.measured import LinkFigures, PairFigure

NBYTES = 16 << 20  # of a copy between CPU ranks, more than a core's own caches hold
GPU_NBYTES = 256 << 20
PINGS = 2000
LOOKS = 1 << 30  # minutes: other ranks need the cores as well


def pairs(ranks: int) -> Iterator[tuple[int, int]]:
    return permutations(range(ranks), 2)


def gpus() -> int:
    """The number of GPUs that torch can use; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def measure_cpu(ranks: int, rounds: int) -> LinkFigures:
    """Measure between processes on this machine: medians over `rounds`, with checked copies.

    Bandwidth is the rate in bytes/s at which rank src writes to rank dst's shared memory while all
    others wait. `together` is the total rate of all ranks writing to the next rank at once. Latency
    is half of a flag's round trip.
    """
    figures, together = collectives.spawn(_cpu_rank, ranks, args=(rounds,))[0]
    return LinkFigures(tuple(figures), (), together, f"cpu-{ranks}")


@njit(nogil=True, cache=True)
def _copy(dst, src, nbytes):
    copy_bytes(dst, src, nbytes)


def _cpu_rank(rank: int, rounds: int) -> tuple[list[PairFigure], float | None]:
    comm = get_default()
    size = comm.size
    source = np.arange(NBYTES // 8, dtype=np.int64) ^ (rank << 40)
    buffer, words = comm.empty(NBYTES // 8, "int64"), comm.empty(32, "int64")
    buffer[:] = 0
    words[:] = 0
    at = np.zeros((2, size), np.int64)
    at[0, rank], at[1, rank] = comm.offset_of(buffer), comm.offset_of(words)
    comm.allreduce(at)
    own = comm.address_at(int(at[1, rank]))
    turns(own, own, 0, 0, 0, False, True, 0, 1, LOOKS, True)  # compiles it
    words[:] = 0

    def copy_to(dst: int) -> float:
        start = time.perf_counter()
        _copy(comm.address_at(int(at[0, dst])), source.ctypes.data, NBYTES)
        return time.perf_counter() - start

    figures: list[PairFigure] = []
    base = 0
    every = list(pairs(size))
    for i in rounds_of(len(every), rank == 0):
        src, dst = every[i]
        seconds = np.zeros(2)
        comm.barrier()
        if rank == src:
            copy_to(dst)  # the first copy touches every page
            seconds[0] = statistics.median(copy_to(dst) for _ in range(rounds))
        comm.barrier()
        if rank == dst:
            wrong = int(np.count_nonzero(buffer ^ (np.arange(NBYTES // 8) ^ (src << 40))))
            if wrong:
                raise CollectiveError(f"{wrong} words from rank {src} arrived wrong at rank {dst}")
        if rank in (src, dst):
            mine, theirs = (comm.address_at(int(at[1, r])) for r in (rank, src + dst - rank))
            trips = []
            for _ in range(rounds):
                start = time.perf_counter()
                turns(mine, theirs, 0, 0, 0, False, rank == src, base, PINGS, LOOKS, True)
                trips.append((time.perf_counter() - start) / PINGS / 2)
                base += PINGS
            if rank == src:
                seconds[1] = statistics.median(trips)
        bases = np.array([base])
        comm.allreduce(bases, "max")
        base = int(bases[0])
        words[0] = base  # later flags must exceed all earlier ones
        comm.barrier()
        comm.allreduce(seconds, "max")
        figures.append(PairFigure(src, dst, NBYTES / seconds[0], seconds[1] * 1e6))
    return figures, _together(comm, copy_to, rounds)


def _together(comm: Any, copy_to: Callable[[int], float], rounds: int) -> float | None:
    """Bytes/s over all ranks while each writes to the next."""
    if comm.size == 1:
        return None
    rates = []
    for _ in range(rounds):
        comm.barrier()
        start = time.perf_counter()
        copy_to((comm.rank + 1) % comm.size)
        comm.barrier()
        slowest = np.array([time.perf_counter() - start])
        comm.allreduce(slowest, "max")
        rates.append(comm.size * NBYTES / float(slowest[0]))
    return statistics.median(rates)


def measure_gpu(rounds: int) -> LinkFigures:
    """Measure between the GPUs that CUDA shows, with checked copies of 256 MiB and of 16 bytes.

    Latency is the time of one small copy in a long series, with its launch. GPUs without peer
    access are measured through the host. Raises CollectiveError if a copy arrives wrong.
    """
    import torch

    devices = []
    for i in range(gpus()):
        properties = torch.cuda.get_device_properties(i)  # in torch's order, which is CUDA's
        sm = 10 * properties.major + properties.minor
        devices.append(GpuId(i, uuid=f"GPU-{properties.uuid}", model=properties.name, sm=sm))
    figures = []
    every = list(pairs(len(devices)))
    for i in rounds_of(len(every), True):
        src, dst = every[i]
        with torch.cuda.device(src):
            one = torch.arange(GPU_NBYTES // 8, device=f"cuda:{src}") ^ (src << 40)
            other = torch.zeros_like(one, device=f"cuda:{dst}")

            def timed(count: int, repeat: int, one: Any = one, other: Any = other) -> float:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(repeat):
                    other[:count].copy_(one[:count], non_blocking=True)
                end.record()
                end.synchronize()
                return begin.elapsed_time(end) / 1e3 / repeat

            timed(len(one), 1)
            rate = GPU_NBYTES / statistics.median(timed(len(one), 4) for _ in range(rounds))
            latency = statistics.median(timed(2, 200) for _ in range(rounds))
            if not torch.equal(other.to(one.device), one):
                raise CollectiveError(f"a copy from GPU {src} arrived wrong at GPU {dst}")
        figures.append(PairFigure(src, dst, rate, latency * 1e6))
    return LinkFigures(tuple(figures), tuple(devices), None, "GPUs")


def table(figures: LinkFigures) -> str:
    ranks = sorted({p.src for p in figures.pairs} | {p.dst for p in figures.pairs})
    by_ends = {(p.src, p.dst): p for p in figures.pairs}
    lines = []
    for title, value in (
        ("GB/s, row to column", lambda p: f"{p.bandwidth / 1e9:8.2f}"),
        ("us, row to column", lambda p: f"{p.latency_us:8.2f}"),
    ):
        lines += [title, " " * 4 + "".join(f"{r:8}" for r in ranks)]
        lines += [
            f"{a:4}" + "".join(value(by_ends[a, b]) if a != b else f"{'-':>8}" for b in ranks)
            for a in ranks
        ]
    if figures.together:
        lines.append(f"all at once: {figures.together / 1e9:.2f} GB/s")
    return "\n".join(lines)
