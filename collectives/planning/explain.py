"""Explanations of the planner's choice: the alternatives, and how far each is from the bound."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS, Named, algorithm_for
from linkweave.collectives.planning.collective import ALLREDUCE
from linkweave.collectives.planning.lower import MOST_SQUARED
from linkweave.collectives.planning.planner import (
    candidates,
    choose,
    on_large_cluster,
    plan_allreduce,
    predict,
)
from linkweave.collectives.planning.simulate import Timeline, simulate
from linkweave.collectives.planning.sparse_tree import Sparse, sparse_costs
from linkweave.topology import Bound, Topology, Vertex, bound, load, reducing_bound
from linkweave.topology.checks import integer
from linkweave.topology.timings import measured_seconds

SIZES = tuple(1 << i for i in range(10, 31))
"""Bytes of the messages for which crossovers are listed: 1 KiB to 1 GiB."""


NCCL = "nccl"
"""The name of its measured times, beside those of algorithms."""


@dataclass(frozen=True, slots=True)
class Row:
    """One algorithm with its best number of chunks, simulated; `seconds` are measured if possible.

    `share` is algbw divided by the bound (0 if nothing moves), `crowd` the largest number of
    connections that share a strand of a link, and `busiest` the link that is busy for the largest
    share of the time, with that share.
    """

    algorithm: str
    num_chunks: int
    seconds: float
    measured: bool
    first_chunk_seconds: float
    share: float
    detours: int
    crowd: int
    busiest: tuple[tuple[Vertex, Vertex], float] | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The comparison for one message; `rows` start with the fastest algorithm."""

    topology: str
    nbytes: int
    rows: tuple[Row, ...]
    refused: tuple[tuple[str, str], ...]
    """Algorithms that were not compared, and why."""
    choice: str
    reason: str
    bound: Bound
    crossovers: tuple[tuple[int, str], ...]
    """(bytes, algorithm): from this size on `auto` takes this algorithm."""
    k: int | None = None
    sparse: tuple[Sparse, ...] = ()
    """The modes of a `sparse_allreduce` of k entries on each rank; `auto` takes the first."""

    reduced: Bound | None = None
    """The bound where switches reduce, if some do."""
    nccl: float | None = None
    """Seconds that NCCL has taken, if the machine has its times."""
    nccl_measured: bool = True
    """Whether at this size; if not, between two sizes that were measured."""

    @property
    def bottleneck(self) -> str:
        """What limits even the best possible algorithm."""
        return self.bound.bottleneck

    def __str__(self) -> str:
        lines = [
            f"all-reduce of {size_text(self.nbytes)} on {self.topology}: {self.choice}",
            *wrap(self.reason, 100),
            *wrap(str(self.bound), 100),
            *(wrap(str(self.reduced), 100) if self.reduced else ()),
            "",
            f"{'algorithm':23}{'chunks':>7}{'us':>10}{'first chunk us':>16}{'of bound':>10}"
            f"{'detours':>9}{'sharing':>9}  busiest link",
        ]
        for r in self.rows:
            ends = f"{r.busiest[0][0]}->{r.busiest[0][1]} {r.busiest[1]:.0%}" if r.busiest else "-"
            lines.append(
                f"{r.algorithm:23}{r.num_chunks:7}{r.seconds * 1e6:10.1f}"
                f"{r.first_chunk_seconds * 1e6:16.1f}{r.share:10.1%}{r.detours:9}{r.crowd:9}"
                f"  {ends}{' (measured)' * r.measured}"
            )
        lines += [
            "sharing: the most connections that take turns on a link, or on all links to a switch;",
            "busiest link: share of the time in which it carries bytes; (measured): at this size,",
            "or between two that were measured",
            *(
                line
                for name, why in self.refused
                for line in wrap(why if why.startswith(name) else f"{name}: {why}", 100)
            ),
        ]
        if self.nccl:
            ours = min(row.seconds for row in self.rows)
            took = "took" if self.nccl_measured else "takes, between the sizes that were measured,"
            told = (
                f"NCCL {took} {self.nccl * 1e6:.1f} us, {self.nbytes / self.nccl / 1e9:.2f} GB/s, "
                f"{self.nbytes / self.nccl / self.bound.algbw:.1%} of the bound, and "
                f"{self.nccl / ours:.2f} times as long as {self.rows[0].algorithm} is predicted to"
            )
            lines += ["", *wrap(told, 100)]
        spans = ", ".join(f"{name} from {size_text(size)}" for size, name in self.crossovers)
        return "\n".join([*lines, "", *wrap(f"auto takes {spans}", 100), *self._sparse()])

    def _sparse(self) -> list[str]:
        if not self.sparse:
            return []
        best, numel = self.sparse[0], self.nbytes // 4
        share = f" ({self.k / numel:.3g} of all)" if self.k and numel else ""
        lines = [
            "",
            f"sparse, {self.k} entries a rank of {numel} float32{share}: {best.mode}",
            f"{'mode':24}{'time us':>12}{'x the best':>12}  gTop-k paper, equation",
        ]
        for row in self.sparse:
            ratio = row.seconds / best.seconds if best.seconds else 1.0
            lines.append(f"{row.mode:24}{row.seconds * 1e6:12.1f}{ratio:12.1f}"
                         f"  ({row.equation}) {row.equation_seconds * 1e6:.1f} us")  # fmt: skip
        return lines


def size_text(nbytes: int) -> str:
    """Return a size in the largest binary unit that divides it: 64 MiB, 1000 bytes."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} bytes"


def explain(
    topology: Topology | str, nbytes: int, k: int | None = None,
    algorithms: Sequence[Named] | None = None,
) -> Explanation:  # fmt: skip
    """Compare all-reduce algorithms for a message of `nbytes`, and explain the choice.

    `algorithms` are names or functions to compare with the choice of `auto`, by default all. With
    `k`, also compare sparse all-reduces of k entries on each rank, of the message as float32.
    Raises PlanError for numbers out of range, TopologyError if the GPUs are not connected.
    """
    if k is not None:
        k = integer(k, "k", 0, nbytes // 4, PlanError)
    topology = load(topology)
    best = bound(topology)
    choice = plan_allreduce(topology, nbytes).algorithm
    rows, refused = [], []
    able = candidates(topology)
    for own in algorithms or ():
        if own != choice:
            rows.append(_row(topology, nbytes, own, best))
    few = on_large_cluster(topology)
    for name in ALGORITHMS[ALLREDUCE] if algorithms is None else (choice,):
        if name in able or name == choice:
            rows.append(_row(topology, nbytes, name, best))
        elif few:
            refused.append((name, f"not compared on clusters of more than {MOST_SQUARED} GPUs"))
        else:
            try:
                algorithm_for(name, topology)
            except PlanError as error:
                refused.append((name, str(error)))
    rows.sort(key=lambda row: (row.seconds, row.algorithm != choice))
    changes = crossovers(topology)
    return Explanation(
        topology.name, nbytes, tuple(rows), tuple(refused), choice,
        _reason(rows, choice, nbytes, changes[0][1]), best, changes, k,
        () if k is None else sparse_costs(topology, nbytes // 4, k), reducing_bound(topology),
        (measured_seconds(topology.timings, NCCL, nbytes) or (None,))[0],
        any(t.algorithm == NCCL and t.nbytes == nbytes for t in topology.timings),
    )  # fmt: skip


def _row(topology: Topology, nbytes: int, name: Named, best: Bound) -> Row:
    known = measured_seconds(topology.timings, name, nbytes) if isinstance(name, str) else None
    chunks = known[1] if known else predict(topology, nbytes, name)[1]
    plan = plan_allreduce(topology, nbytes, name, chunks)
    line: Timeline = simulate(plan, topology, nbytes)
    crowd = max(
        (-(-used // topology.by_ends[ends].parallel) for ends, used in plan.link_use.items()),
        default=0,
    )
    work = line.utilisation
    busiest = max(work.items(), key=lambda item: item[1], default=None)
    seconds = known[0] if known else line.seconds
    share = nbytes / seconds * float(best.seconds_per_byte) if seconds else 0.0
    return Row(
        plan.algorithm, plan.num_chunks, seconds, known is not None, line.first_chunk_seconds,
        share, len(plan.detours), crowd, busiest,
    )  # fmt: skip


def _reason(rows: list[Row], choice: str, nbytes: int, shortest: str) -> str:
    """`shortest` is the choice for the shortest message."""
    mine = next(row for row in rows if row.algorithm == choice)
    others = [row for row in rows if row.algorithm != choice]
    if not others or not mine.seconds:
        return f"{choice}: there is nothing to choose between"
    if os.environ.get("LINKWEAVE_ALGORITHM"):
        best = others[0].algorithm if others[0].seconds < mine.seconds else choice
        return f"LINKWEAVE_ALGORITHM asks for {choice}; the fastest is {best}"
    rival = others[0]
    factor = rival.seconds / mine.seconds
    if factor < 0.995:
        return (
            f"{choice} is the fastest of those measured; {rival.algorithm} is predicted to be "
            f"{1 / factor:.2f} times faster"
        )
    ahead = f"{factor:.2f} times faster than {rival.algorithm}"
    if mine.measured:
        return f"{choice} is the fastest by measured times, {ahead}"
    if factor < 1.005:
        return f"{choice} and {rival.algorithm} take the same time; the first named is taken"
    if mine.share > 0.5:
        return f"{choice} moves bytes at {mine.share:.0%} of what the links can carry, {ahead}"
    if rival.first_chunk_seconds > mine.seconds or nbytes < 1 << 20:
        if choice == shortest:
            return f"the message is small, so start-ups decide: {choice} has the fewest, {ahead}"
        return f"start-ups count beside bytes: {choice} is {ahead}"
    return f"{choice} is {ahead}"


def crossovers(topology: Topology) -> tuple[tuple[int, str], ...]:
    """Return (bytes, algorithm) for each size in `SIZES` where the choice of `auto` changes."""
    chosen = ((choose(topology, size), size) for size in SIZES)
    return tuple((next(sizes)[1], name) for name, sizes in groupby(chosen, key=lambda c: c[0]))
