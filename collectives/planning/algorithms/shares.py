"""How much each pair of GPUs should exchange, where links are shared or of several speeds.

Trees are packed into links between pairs of ranks. Where messages pass switches, or links differ in
speed, the rates of the pairs come first: a linear program (HiGHS) that raises the bound of the
pairs' network as far as the machine's links allow. The bound has a constraint for every partition
of the ranks; those that matter are found one by one, by the exact bound of each solution.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import accumulate

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.packing import Pair
from linkweave.topology import Topology, Vertex
from linkweave.topology.bounds import narrowest_partition
from linkweave.topology.cuts import FlowNetwork
from linkweave.topology.symmetry import pairs_alike

_ROUNDS = 60
_MOST = 64  # GPUs; the program has a rate for every pair
_FINE = 1 << 20  # rates are rounded down to this part of the largest


def pair_capacity(topology: Topology) -> dict[Pair, tuple[int, int]]:
    """What each pair of ranks a < b may send each other each way, and what one message can take.

    Both in one unit: link counts, and 1, where equal links join GPUs directly; else rates from the
    linear program, and lanes. Pairs that exchange nothing are left out.
    """
    rank = {g: r for r, g in enumerate(topology.gpus)}
    fabric = topology.fabric
    widths = {k.bandwidth for k in fabric}
    direct = all(isinstance(v, int) and v in rank for k in fabric for v in (k.src, k.dst))
    if direct and len(widths) == 1 and _two_way(topology):
        counts = {(rank[k.src], rank[k.dst]): k.count for k in fabric}  # type: ignore[index]
        return {(a, b): (n, 1) for (a, b), n in counts.items() if a < b}
    if len(topology.gpus) > _MOST:
        raise PlanError(
            f"sharing out {topology.name}'s links is for at most {_MOST} GPUs, not "
            f"{len(topology.gpus)}: use hierarchical"
        )
    rates = _rates(topology)
    unit = max(1, max(rates.values()) // _FINE)
    return {
        pair: (rate // unit, _lane(topology, *pair) // unit)
        for pair, rate in rates.items() if rate >= unit
    }  # fmt: skip


def _lane(topology: Topology, a: int, b: int) -> int:
    """Bytes/s of one message between two ranks."""
    path = topology.hops[topology.gpus[a], topology.gpus[b]]
    return min(topology.by_ends[ends].bandwidth_each for ends in zip(path, path[1:], strict=False))


def _two_way(topology: Topology) -> bool:
    return all(
        (back := topology.by_ends.get((k.dst, k.src))) and back.count == k.count
        for k in topology.fabric
    )


def _rates(topology: Topology) -> dict[Pair, int]:
    """Bytes/s each way for each pair that hardware joins, greatest for the bottleneck.

    Like pairs get like rates: of all solutions that symmetry exchanges, the mean is one as well.
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
                for link in zip(path, path[1:], strict=False):
                    crossing.setdefault(link, Counter())[i] += 1
    scale = max(k.bandwidth * k.count for k in topology.fabric)
    goal = len(members)  # the last column is the bound
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
        for groups in [parts, *([part] for part in parts if len(parts) > 2)]:
            part_of = {r: i for i, part in enumerate(groups) for r in part}  # the rest: one more
            across = [
                (i, -float(n)) for i, pairs in enumerate(members)
                if (n := sum(part_of.get(a) != part_of.get(b) for a, b in pairs))
            ]  # fmt: skip
            count = len(groups) + (len(part_of) < size)
            rows[*across, (goal, float(count - 1))] = 0.0
        if len(rows) == known:
            break
        data = [v for row in rows for _, v in row]
        columns = [c for row in rows for c, _ in row]
        starts = list(accumulate(map(len, rows), initial=0))
        matrix = csr_array((data, columns, starts), shape=(len(rows), goal + 1))
        # of equal solutions, one that moves little
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
