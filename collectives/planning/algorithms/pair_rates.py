"""The rate at which each pair of GPUs exchanges data, if pairs share links or links are unequal.

`packing` packs trees into links between pairs of ranks. If messages pass switches, or links differ
in bandwidth, a linear program (HiGHS) first finds rates for the pairs that maximise the bound of
their network within the capacities of the links. The bound has one constraint for each partition of
the ranks; the exact bound of each solution yields the next violated constraints.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import accumulate, pairwise

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.packing import Pair
from linkweave.topology import Topology, Vertex
from linkweave.topology.bounds import narrowest_partition
from linkweave.topology.cuts import FlowNetwork
from linkweave.topology.symmetry import pairs_alike

_ROUNDS = 60
_MOST = 64  # GPUs, as the program has a variable for every pair
_FINE = 1 << 20  # rates are rounded down to multiples of this part of the largest


def pair_capacity(topology: Topology) -> dict[Pair, tuple[int, int]]:
    """Return the capacity of each pair of ranks a < b in each direction, and that of one message.

    The unit is one link if equal links join GPUs directly; else the capacities are rates from the
    linear program. Pairs that exchange nothing are left out. Raises PlanError if the program would
    be too large.
    """
    counts = link_counts(topology)
    backs = ((k, topology.by_ends.get((k.dst, k.src))) for k in topology.fabric)
    if counts and all(back and back.count == k.count for k, back in backs):
        return {(a, b): (n, 1) for (a, b), n in counts.items() if a < b}
    if len(topology.gpus) > _MOST:
        raise PlanError(
            f"sharing the links of {topology.name} is for at most {_MOST} GPUs, not "
            f"{len(topology.gpus)}: use hierarchical"
        )
    rates = _rates(topology)
    unit = max(1, max(rates.values()) // _FINE)
    return {
        pair: (rate // unit, _message_rate(topology, *pair) // unit)
        for pair, rate in rates.items() if rate >= unit
    }  # fmt: skip


def link_counts(topology: Topology) -> dict[Pair, int]:
    """Return the links from each rank to each other rank if equal links join GPUs directly.

    Otherwise the result is empty.
    """
    rank = {g: r for r, g in enumerate(topology.gpus)}
    fabric = topology.fabric
    if len({k.bandwidth for k in fabric}) != 1:
        return {}
    if any(v not in rank for k in fabric for v in (k.src, k.dst)):
        return {}
    return {(rank[k.src], rank[k.dst]): k.count for k in fabric}  # type: ignore[index]


def _message_rate(topology: Topology, a: int, b: int) -> int:
    """Return the bytes/s of one message between two ranks."""
    path = topology.hops[topology.gpus[a], topology.gpus[b]]
    return min(topology.by_ends[ends].bandwidth_each for ends in pairwise(path))


def _rates(topology: Topology) -> dict[Pair, int]:
    """Return the bytes/s in each direction of each pair that links join.

    Symmetric pairs get equal rates: the mean over the symmetries of a solution is a solution too.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    gpus, size = topology.gpus, len(topology.gpus)
    alike = pairs_alike(topology)
    classes: dict[int, list[Pair]] = {}
    for b in range(size):
        for a in range(b):
            if (gpus[a], gpus[b]) in topology.hops and (gpus[b], gpus[a]) in topology.hops:
                classes.setdefault(alike[gpus[a], gpus[b]], []).append((a, b))
    members = list(classes.values())
    crossing: dict[tuple[Vertex, Vertex], Counter[int]] = {}
    for i, pairs in enumerate(members):
        for a, b in pairs:
            for ends in ((gpus[a], gpus[b]), (gpus[b], gpus[a])):
                path = topology.hops[ends]
                for link in pairwise(path):
                    crossing.setdefault(link, Counter())[i] += 1
    scale = max(k.bandwidth * k.count for k in topology.fabric)
    goal = len(members)  # the column of the bound, which is the last
    rows: dict[tuple[tuple[int, float], ...], float] = {}
    for link, users in crossing.items():
        row = tuple((i, float(n)) for i, n in sorted(users.items()))
        limit = topology.by_ends[link].bandwidth * topology.by_ends[link].count / scale
        rows[row] = min(limit, rows.get(row, limit))
    parts: list[tuple[int, ...]] = [(r,) for r in range(size)]
    best: dict[Pair, int] = {}
    reached = Fraction(-1)
    for _ in range(_ROUNDS):
        known = len(rows)
        for partition in [parts, *([part] for part in parts if len(parts) > 2)]:
            # ranks in no part make up one more part
            part_of = {r: i for i, part in enumerate(partition) for r in part}
            across = [
                (i, -float(n)) for i, pairs in enumerate(members)
                if (n := sum(part_of.get(a) != part_of.get(b) for a, b in pairs))
            ]  # fmt: skip
            count = len(partition) + (len(part_of) < size)
            rows[*across, (goal, float(count - 1))] = 0.0
        if len(rows) == known:
            break
        data = [v for row in rows for _, v in row]
        columns = [c for row in rows for c, _ in row]
        starts = list(accumulate(map(len, rows), initial=0))
        matrix = csr_array((data, columns, starts), shape=(len(rows), goal + 1))
        # the small cost prefers, among optimal solutions, one that moves little
        cost = [*(1e-6 * len(pairs) / size for pairs in members), -1.0]
        solution = linprog(
            cost, A_ub=matrix, b_ub=list(rows.values()), bounds=(0, None), method="highs"
        )
        rates = {
            pair: int(x * scale)
            for pairs, x in zip(members, solution.x, strict=False) if x > 1e-9
            for pair in pairs
        }  # fmt: skip
        there: dict[tuple[Vertex, Vertex], int] = {
            ends: rate for (a, b), rate in rates.items() for ends in ((a, b), (b, a)) if rate
        }
        value, cuts = narrowest_partition(FlowNetwork(range(size), there))
        if value > reached:
            best, reached = rates, value
        if float(value) >= solution.x[goal] * scale * (1 - 1e-6):
            break
        parts = [tuple(r for r in range(size) if r in cut.side) for cut in cuts]
    return best
