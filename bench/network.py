"""`linkweave bench network`: collectives over machines, measured and predicted.

Every rank runs the command, started by torchrun on all machines. The start-up and the seconds a
byte come from all-reduces across machines alone and inside each machine alone; the predictions for
whole collectives are made of these, and compared with what they take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from linkweave import collectives
from linkweave.bench.collectives import ours
from linkweave.bench.peers import IN_PLACE, by_torch, collective, given, on_gloo, room, wanted
from linkweave.bench.timing import rounds_of, schedule
from linkweave.collectives import CollectiveError
from linkweave.collectives.cluster.cluster_map import PIECE, ClusterMap
from linkweave.collectives.cluster.communicator import ClusterCommunicator
from linkweave.collectives.overlap.network import Fit, fit

ACROSS = tuple(1 << at for at in (14, 22, 24, 25))  # bytes, over all columns
INSIDE = (1 << 14, 1 << 20, PIECE)
HEADER = (
    f"{'collective':16}{'bytes':>12}{'ms':>10}{'predicted':>10}{'error':>8}{'GB/s':>8}{'#wrong':>8}"
    f"{'gloo ms':>10}{'x gloo':>8}"
)
LEGEND = "gloo: all ranks by torch.distributed, by turns; x gloo: the median of the rounds' ratios"


@dataclass(frozen=True)
class Row:
    collective: str
    op: str
    nbytes: int
    seconds: float
    predicted: float
    wrong: int
    gloo_seconds: float
    ratio: float

    def __str__(self) -> str:
        error, ms = self.predicted / self.seconds - 1, self.seconds * 1e3
        name = f"{self.collective} max" if self.op == "max" else self.collective
        return (
            f"{name:16}{self.nbytes:12}{ms:10.2f}{self.predicted * 1e3:10.2f}{error:8.0%}"
            f"{self.nbytes / self.seconds / 1e9:8.3f}{self.wrong:8}{self.gloo_seconds * 1e3:10.2f}"
            f"{self.ratio:8.2f}"
        )


@dataclass(frozen=True)
class Figures:
    """The map, how well the fits describe what was measured, and whole collectives."""

    map: ClusterMap
    fits: dict[str, Fit]
    rows: list[Row]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.map.ranks))
        lines = [
            f"machines with {ranks} ranks; {self.map.startup_s * 1e3:.2f} ms to compare a call"
        ]
        for name, found in self.fits.items():
            network = found.network
            lines.append(
                f"{name}: start-up {network.startup_s * 1e3:.2f} ms, "
                f"{network.seconds_per_byte * 1e9:.3f} ns a byte of the message "
                f"(r2 {found.r2:.4f}, worst {found.worst:.0%})"
            )
        return "\n".join([*lines, HEADER, *map(str, self.rows), LEGEND])


def measure(
    sizes: tuple[int, ...], rounds: int, batch: bool, kinds: Sequence[str] = ("allreduce",),
    op: str = "sum",
) -> Figures | None:  # fmt: skip
    """Measure as one rank of several machines. Returns the figures on rank 0.

    Raises CollectiveError if all ranks are on one machine.
    """
    schedule(batch)
    with on_gloo(), collectives.init(timeout=120) as comm:
        if not isinstance(comm, ClusterCommunicator):
            raise CollectiveError(
                "all ranks are on one machine: start them on several, by torchrun --nnodes"
            )
        return _measured(comm, [*product(kinds, sizes)], rounds, op)


def _measured(
    comm: ClusterCommunicator, asked: list[tuple[str, int]], rounds: int, op: str
) -> Figures | None:
    columns, machine = comm.machines.columns, comm.machine

    def across(nbytes: int) -> float:
        x = torch.zeros(max(1, nbytes // 4 // columns))
        return median(lambda: comm.across and comm.across.allreduce(x).wait())

    def inside(nbytes: int) -> float:
        x = torch.zeros(machine.size, max(1, nbytes // 4 // machine.size))

        def both() -> None:
            machine.in_place("reduce_scatter", x)
            machine.in_place("allgather", x)

        return median(both if machine.size > 1 else lambda: None)

    def median(call: Callable[[], object], rounds: int = rounds) -> float:
        return statistics.median(_times(comm, rounds, call)[0])

    startup = median(comm.barrier, 10 * rounds)
    counts = tuple(map(len, comm.machines.ranks))
    fits = {
        "across machines": fit([(n, across(n)) for n in ACROSS], len(counts)),
        "inside machines": fit([(n, inside(n)) for n in INSIDE], max(2, *counts)),
    }
    made = ClusterMap(counts, startup, *(found.network for found in fits.values()))
    rows = []
    for at in rounds_of(len(asked), comm.rank == 0):
        kind, n = asked[at]
        count = n // 4 // comm.size * comm.size
        x = given(kind, comm.rank, comm.size, count)
        out = np.full(room(kind, comm.size, count), -1, np.float32)
        call, want = (
            ours(comm, kind, x, out, count, op),
            wanted(kind, comm.rank, comm.size, count, op),
        )
        call()
        result, wrong = x if kind in IN_PLACE else out, np.zeros(1, np.int64)
        wrong[0] = 0 if want is None else int((result != want).sum())
        comm.allreduce(wrong)
        x[:] = 0
        ours_s, theirs = _times(comm, rounds, call, by_torch(kind, x, out, count, op=op))
        ratio = statistics.median(b / a for a, b in zip(ours_s, theirs, strict=True))
        seconds, predicted = statistics.median(ours_s), made.seconds(kind, 4 * count)
        of = op if collective(kind).combines else "none"
        gloo = statistics.median(theirs)
        rows.append(Row(kind, of, 4 * count, seconds, predicted, int(wrong[0]), gloo, ratio))
    return Figures(made, fits, rows) if comm.rank == 0 else None


def _times(
    comm: ClusterCommunicator, rounds: int, *calls: Callable[[], object]
) -> list[list[float]]:
    """The slowest rank's time of each call in each round, after a round that is not timed."""
    times = np.zeros((len(calls), rounds + 1))
    for at in range(rounds + 1):
        for i, call in enumerate(calls):
            comm.barrier()
            start = time.perf_counter()
            call()
            times[i, at] = time.perf_counter() - start
    comm.allreduce(times, "max")
    return times[:, 1:].tolist()
