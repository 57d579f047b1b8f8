"""`linkweave bench network`: collectives over machines, measured and predicted.

Every rank runs the command, started by torchrun on all machines. Predictions come from the times of
each collective at `SIZES`, and are compared with what it takes at the sizes asked for. The start-up
and the seconds a byte of all-reduces across machines alone are for `linkweave schedule`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from linkweave import collectives
from linkweave.bench.collectives import ours
from linkweave.bench.peers import IN_PLACE, by_torch, collective, given, on_gloo, room, wanted
from linkweave.bench.timing import rounds_of, schedule
from linkweave.collectives import CollectiveError
from linkweave.collectives.cluster.cluster_map import ClusterMap
from linkweave.collectives.cluster.communicator import ClusterCommunicator
from linkweave.collectives.overlap.network import Fit, fit
from linkweave.collectives.overlap.timing import Timing, increasing

ACROSS = tuple(1 << at for at in (14, 22, 24, 25))  # bytes, over all columns
SIZES = tuple(1 << at for at in (11, 15, 19, 21, 23, 25))
"""Bytes of the messages from whose times others are predicted."""
MOST_ROUNDS = 500
HEADER = (
    f"{'collective':16}{'bytes':>12}{'ms':>10}{'predicted':>10}{'error':>8}{'GB/s':>8}{'#wrong':>8}"
    f"{'gloo ms':>10}{'x gloo':>8}{'bare':>8}{'again':>8}"
)
LEGEND = (
    "gloo: all ranks by torch.distributed, by turns; x gloo: the median of the rounds' ratios, "
    "bare that with compares=False, again that of gloo once more, which is 1 but for chance"
)


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
    bare: float
    again: float

    def __str__(self) -> str:
        error, ms = self.predicted / self.seconds - 1, self.seconds * 1e3
        name = f"{self.collective} max" if self.op == "max" else self.collective
        return (
            f"{name:16}{self.nbytes:12}{ms:10.2f}{self.predicted * 1e3:10.2f}{error:8.0%}"
            f"{self.nbytes / self.seconds / 1e9:8.3f}{self.wrong:8}{self.gloo_seconds * 1e3:10.2f}"
            f"{self.ratio:8.2f}{self.bare:8.2f}{self.again:8.2f}"
        )


@dataclass(frozen=True)
class Figures:
    """The map, how well its network describes what was measured, and whole collectives."""

    map: ClusterMap
    fit: Fit
    rows: list[Row]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.map.ranks))
        network = self.map.network
        lines = [
            f"machines with {ranks} ranks; {self.map.startup_s * 1e3:.2f} ms to compare a call",
            f"all-reduces across machines: start-up {network.startup_s * 1e3:.2f} ms, "
            f"{network.seconds_per_byte * 1e9:.3f} ns a byte of the message "
            f"(r2 {self.fit.r2:.4f}, worst {self.fit.worst:.0%})",
        ]
        return "\n".join([*lines, HEADER, *map(str, self.rows), LEGEND])


def measure(
    sizes: tuple[int, ...], rounds: int, seconds: float, batch: bool,
    kinds: Sequence[str] = ("allreduce",), op: str = "sum",
) -> Figures | None:  # fmt: skip
    """Measure as one rank of several machines: each call for so many seconds, and in so many rounds
    at least. Returns the figures on rank 0.

    Raises CollectiveError if all ranks are on one machine.
    """
    schedule(batch)
    with on_gloo(), collectives.init(timeout=120) as comm:
        if not isinstance(comm, ClusterCommunicator):
            raise CollectiveError(
                "all ranks are on one machine: start them on several, by torchrun --nnodes"
            )
        return _measured(comm, [*product(kinds, sizes)], (rounds, seconds), op)


def _measured(
    comm: ClusterCommunicator, asked: list[tuple[str, int]], least: tuple[int, float], op: str
) -> Figures | None:
    columns = comm.machines.columns

    def across(nbytes: int) -> float:
        x = torch.zeros(max(1, nbytes // 4 // columns))
        whole = torch.zeros(max(1, nbytes // 4))
        carry(lambda: dist.all_reduce(whole))
        return median(lambda: comm.across and comm.across.allreduce(x).wait())

    def carry(by_gloo: Callable[[], object]) -> None:
        """Let gloo's connections carry messages of these sizes too: over a connection that has
        carried long ones, short ones take longer."""
        for _ in range(least[0]):
            by_gloo()

    def median(call: Callable[[], object]) -> float:
        return statistics.median(_times(comm, least, call)[0])

    def made(kind: str, n: int) -> tuple[int, Any, Any, Callable[[], object]]:
        """A message of about n bytes: its values, memory and call."""
        count = max(1, n // 4 // comm.size) * comm.size
        x = given(kind, comm.rank, comm.size, count)
        out = np.full(room(kind, comm.size, count), -1, np.float32)
        return count, x, out, ours(comm, kind, x, out, count, op)

    def times(kind: str, sizes: Sequence[int]) -> tuple[Timing, ...]:
        found = {}
        for n in sizes:
            count, x, out, call = made(kind, n)
            x[:] = 0
            carry(by_torch(kind, x, out, count, op=op))
            found[4 * count] = median(call)
        return tuple(map(Timing, found, increasing([*found.values()])))

    startup = median(comm.barrier)
    counts = tuple(map(len, comm.machines.ranks))
    found = fit([(n, across(n)) for n in ACROSS], len(counts))
    sizes = around({n for _, n in asked})
    kinds = dict.fromkeys(kind for kind, _ in asked)
    measured = {kind: times(kind, sizes) for kind in kinds}
    known = ClusterMap(counts, startup, found.network, measured, op)
    rows = []
    for at in rounds_of(len(asked), comm.rank == 0):
        kind, n = asked[at]
        count, x, out, call = made(kind, n)
        want = wanted(kind, comm.rank, comm.size, count, op)
        call()
        result, wrong = x if kind in IN_PLACE else out, np.zeros(1, np.int64)
        wrong[0] = 0 if want is None else int((result != want).sum())
        comm.allreduce(wrong)
        x[:] = 0
        by_gloo = by_torch(kind, x, out, count, op=op)
        calls = call, by_gloo, uncompared(comm, call), by_gloo
        ours_s, theirs, *others = _times(comm, least, *calls)
        ratios = [
            statistics.median(b / a for a, b in zip(each, theirs, strict=True))
            for each in (ours_s, *others)
        ]
        seconds, predicted = statistics.median(ours_s), known.seconds(kind, 4 * count)
        of = op if collective(kind).combines else "none"
        gloo = statistics.median(theirs)
        rows.append(Row(kind, of, 4 * count, seconds, predicted, int(wrong[0]), gloo, *ratios))
    return Figures(known, found, rows) if comm.rank == 0 else None


def uncompared(comm: ClusterCommunicator, call: Callable[[], object]) -> Callable[[], object]:
    """The call with compares=False."""

    def made() -> None:
        comm.compares = False
        call()
        comm.compares = True

    return made


def around(asked: Set[int]) -> Sequence[int]:
    """Those of `SIZES` from whose times these are predicted."""
    near = [n for n in SIZES if min(asked) <= 4 * n and n <= 2 * max(asked)]
    return near if len(near) > 1 else SIZES


def _times(
    comm: ClusterCommunicator, least: tuple[int, float], *calls: Callable[[], object]
) -> list[list[float]]:
    """The slowest rank's time of each call in each round, after one that is not counted: as many
    rounds as `least` says, and so many seconds of each call."""

    def timed(rounds: int) -> Any:
        times = np.zeros((len(calls), rounds))
        for at in range(rounds):
            for i, call in enumerate(calls):
                comm.barrier()
                start = time.perf_counter()
                call()
                times[i, at] = time.perf_counter() - start
        comm.allreduce(times, "max")
        return times

    timed(1)
    first, (rounds, seconds) = timed(1), least
    within = int(seconds / first.mean())
    more = timed(max(rounds, min(within, MOST_ROUNDS)) - 1)
    return np.hstack([first, more]).tolist()
