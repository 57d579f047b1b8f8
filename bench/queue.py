"""`linkweave bench queue`: how early layers of an all-reduce can be used on CPU ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linkweave import collectives
from linkweave.bench.timing import rounds_of, schedule
from linkweave.collectives import CollectiveError, get_default

DEQUEUES = 200  # of a finished layer, timed together
HEADER = (
    f"{'bytes':>12}{'layers':>8}  {'algorithm':22}{'first ms':>9}{'median ms':>10}{'last ms':>8}"
    f"{'all ms':>8}{'no queue':>9}{'us each':>8}"
)
LEGEND = (
    "ms until the first, the median and the last layer can be dequeued, and until all is done; the "
    "same\nall-reduce without a queue; us to dequeue a finished layer"
)


@dataclass(frozen=True, slots=True)
class Row:
    ranks: int
    nbytes: int
    layers: int
    algorithm: str
    first_ms: float
    median_ms: float
    last_ms: float
    all_ms: float
    plain_ms: float
    dequeue_us: float

    def __str__(self) -> str:
        return (
            f"{self.nbytes:12}{self.layers:8}  {self.algorithm:22}"
            f"{self.first_ms:9.2f}{self.median_ms:10.2f}{self.last_ms:8.2f}{self.all_ms:8.2f}"
            f"{self.plain_ms:9.2f}{self.dequeue_us:8.2f}"
        )


def _rank(
    rank: int, nbytes: int, layers: int, algorithms: Sequence[str], rounds: int
) -> list[list[float]]:
    schedule(True)
    comm = get_default()
    count = nbytes // 4
    sizes = [count * (i + 1) // layers - count * i // layers for i in range(layers)]
    stops = np.cumsum([0, *sizes])
    x = np.empty(count, np.float32)
    found = []
    for algorithm in algorithms:
        times = []
        for number in rounds_of(rounds + 1, rank == 0):
            x[:] = rank + number
            wanted = sum(r + number for r in range(comm.size))
            comm.barrier()
            start = time.perf_counter()
            queue = comm.allreduce_queue(x, sizes, algorithm=algorithm)
            arrived = []
            for layer in range(layers):
                queue.dequeue(layer)
                arrived.append(time.perf_counter() - start)
                if not number and not (x[stops[layer] : stops[layer + 1]] == wanted).all():
                    raise CollectiveError(f"layer {layer} by {algorithm} is wrong")
            queue.wait()
            done = time.perf_counter() - start
            start = time.perf_counter()
            for _ in range(DEQUEUES):
                queue.dequeue(0)
            each = (time.perf_counter() - start) / DEQUEUES
            comm.barrier()
            start = time.perf_counter()
            comm.allreduce(x, algorithm=algorithm)
            plain = time.perf_counter() - start
            times.append([arrived[0], arrived[layers // 2], arrived[-1], done, plain, each])
        found.append([statistics.median(column) for column in zip(*times[1:], strict=True)])
    return found


def queue(
    ranks: int, nbytes: int, layers: int, algorithms: Sequence[str], rounds: int
) -> list[Row]:
    """Measure under SCHED_BATCH; the first round is checked and not timed."""
    arguments = (nbytes, layers, algorithms, rounds)
    found = collectives.spawn(_rank, ranks, args=arguments, timeout=120)
    rows = []
    for at, algorithm in enumerate(algorithms):
        slowest = [max(one[at][i] for one in found) for i in range(6)]
        figures = [*(1e3 * seconds for seconds in slowest[:5]), 1e6 * slowest[5]]
        rows.append(Row(ranks, nbytes, layers, algorithm, *figures))
    return rows
