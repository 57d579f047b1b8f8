"""Times of communicating one embedding table in a training step, on a network whose all-reduce is
known, and why one way is chosen.

- "alltoall": each rank holds a range of columns. All ranks tell each other the distinct rows of
  their batches (how many, then which: int32 if they fit, otherwise int64), columns of looked-up
  rows go to the ranks that asked for them, and columns of the coalesced gradients come back.
- "allgather": all ranks hold the table and gather the coalesced gradients of all: int64 indices,
  then values, as torch's COO tensors travel over gloo and by Horovod.
- "allreduce": all ranks hold the table and add dense gradients.

Source: Li et al., "EmbRace: Accelerating Sparse Communication for Distributed Training of Deep
Neural Networks", section 4.1.2, whose table 2 leaves indices out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import wrap

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import MAX_BYTES
from linkweave.collectives.planning.equations import (
    allgather_seconds,
    allreduce_seconds,
    alltoall_seconds,
)
from linkweave.topology.checks import integer, shown

COO_INDEX = 8
"""Bytes of an index of torch's sparse tensors."""
COUNT = 8
"""Bytes by which a rank says how many rows it names."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to communicate the table.

    `nbytes` is what a rank sends (with "alltoall", the rank with the most columns), `startups` the
    messages that it sends one after another, `equation_seconds` the time by the paper's table 2.
    """

    name: str
    seconds: float
    nbytes: int
    startups: int
    equation_seconds: float


@dataclass(frozen=True, slots=True)
class EmbeddingExplanation:
    """The comparison for one table; `ways` start with the fastest, which is the choice."""

    network: Network
    rows: int
    width: int
    tokens: int
    ways: tuple[Way, ...]
    reason: str
    crossovers: tuple[tuple[int, str], ...]
    """(tokens, way): from this number of distinct rows on, this way is the fastest."""

    @property
    def choice(self) -> str:
        """The name of the fastest way."""
        return self.ways[0].name

    def __str__(self) -> str:
        best = self.ways[0]
        lines = [
            f"embedding of {self.rows} x {self.width} on {self.network.name}, "
            f"{self.network.workers} workers: {best.name}",
            *wrap(self.reason, 100),
            "",
            f"{'way':12}{'time us':>12}{'x the best':>12}{'MB sent':>12}{'start-ups':>11}"
            "  EmbRace paper, table 2",
        ]
        for way in self.ways:
            ratio = way.seconds / best.seconds if best.seconds else 1.0
            lines.append(
                f"{way.name:12}{way.seconds * 1e6:12.1f}{ratio:12.2f}{way.nbytes / 1e6:12.3f}"
                f"{way.startups:11}  {way.equation_seconds * 1e6:.1f} us"
            )
        (_, first), *others = self.crossovers
        spans = [first, *(f"{name} from {tokens / self.rows:.4g} ({tokens} rows)"
                          for tokens, name in others)]  # fmt: skip
        density = f"density {self.tokens / self.rows:.4g} ({self.tokens} distinct rows a batch)"
        return "\n".join([*lines, "", *wrap(f"{density}; by density: {', '.join(spans)}", 100)])


def embedding_ways(
    network: Network, rows: int, width: int, tokens: int, itemsize: int = 4
) -> tuple[Way, ...]:
    """Return the ways to communicate a table of rows x width in a step, the fastest first.

    `tokens` is the number of distinct rows in a rank's batch (the most, if ranks differ), and
    `itemsize` the bytes of an element: 2, 4 or 8. The start-up and the time per byte of a message
    are those of which a ring's all-reduce is made (`Network.message`). A rank with one of the
    widest ranges of columns, ceil(width / workers), sets the time of "alltoall". Where times are
    equal, the order is "alltoall", "allgather", "allreduce". Raises CollectiveError for numbers out
    of range.
    """
    rows = integer(rows, "rows", 1, MAX_BYTES)
    width = integer(width, "width", 1, MAX_BYTES)
    tokens = integer(tokens, "tokens", 0, rows)
    if itemsize not in (2, 4, 8):
        raise CollectiveError(f"itemsize must be 2, 4 or 8 bytes, not {shown(itemsize)}")
    workers, others = network.workers, network.workers - 1
    startup, pace = network.message
    columns = -(-width // workers)
    index = 4 if rows <= 1 << 31 else 8
    row, table = width * itemsize, rows * width * itemsize

    def gather(nbytes: int) -> float:
        return allgather_seconds(workers, startup, nbytes * pace)

    padded = tokens * columns * workers * itemsize  # all ranges as wide as the widest
    ways = (
        Way("alltoall",
            gather(COUNT) + gather(tokens * index)
            + alltoall_seconds(workers, startup, padded * pace),
            others * COUNT
            + tokens * (others * (index + columns * itemsize) + (width - columns) * itemsize),
            4 * others, alltoall_seconds(workers, startup, tokens * row * pace)),
        Way("allgather", gather(tokens * COO_INDEX) + gather(tokens * row),
            others * tokens * (COO_INDEX + row), 2 * others, gather(tokens * row)),
        Way("allreduce", network.seconds(table) if others else 0.0,
            2 * others * -(-rows * width // workers) * itemsize, 2 * others,
            allreduce_seconds(workers, startup, table * pace)),
    )  # fmt: skip
    return tuple(sorted(ways, key=lambda way: way.seconds))


def explain_embedding(
    network: Network, rows: int, width: int, tokens: int, itemsize: int = 4
) -> EmbeddingExplanation:
    """Compare the ways to communicate a table of rows x width, and explain the choice.

    Arguments and errors are those of `embedding_ways`.
    """
    ways = embedding_ways(network, rows, width, tokens, itemsize)

    def choice(distinct: int) -> str:
        return embedding_ways(network, rows, width, distinct, itemsize)[0].name

    return EmbeddingExplanation(
        network, rows, width, tokens, ways, _reason(ways, network.workers),
        _crossovers(choice, 0, rows),
    )  # fmt: skip


def _crossovers(choice: Callable[[int], str], start: int, rows: int) -> tuple[tuple[int, str], ...]:
    """Return where the choice changes from `start` to `rows`. As times are linear in the tokens,
    each way is the fastest on one interval at most."""
    name = choice(start)
    if name == choice(rows):
        return ((start, name),)
    after = bisect_left(range(rows + 1), True, start, key=lambda n: choice(n) != name)
    return ((start, name), *_crossovers(choice, after, rows))


def _reason(ways: tuple[Way, ...], workers: int) -> str:
    best, rival = ways[:2]
    if workers == 1:
        return "one rank has nothing to send"
    if rival.seconds < 1.005 * best.seconds:
        return f"{best.name} and {rival.name} take about the same time"
    ahead = f"{rival.seconds / best.seconds:.2f} times faster than {rival.name}"
    sent = f"{best.nbytes:,} bytes a rank against {rival.nbytes:,}"
    if best.nbytes > rival.nbytes and best.startups < rival.startups:
        return (
            f"start-ups decide: {best.name} has {best.startups} against {rival.startups}; "
            f"{ahead}, although it sends {sent}"
        )
    if best.startups > rival.startups:
        return (
            f"bytes decide: {best.name} sends {sent}; {ahead}, although it has {best.startups} "
            f"start-ups against {rival.startups}"
        )
    return f"{best.name} sends {sent}; {ahead}"
