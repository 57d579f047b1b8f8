"""The best order of whole tensors on one lane, chained with the forward pass: Carlier's algorithm.

Each tensor is a job on one machine, with a head (when its gradient is ready), a time (a + b m) and
a tail (the forward pass that follows): the problem 1 | r, q | Cmax. It is NP-hard, but branch and
bound solves it for hundreds of jobs. Source: Carlier, "The one-machine sequencing problem",
European Journal of Operational Research 11 (1982).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence

from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import MAX_NUMBER, Profile
from linkweave.collectives.overlap.schedule import Schedule, preemptive
from linkweave.topology.checks import number


def carlier(profile: Profile, network: Network, limit_s: float = 1.0) -> Schedule:
    """Return the best order of single gradients found within `limit_s` seconds.

    The note says whether it is proved optimal. Raises CollectiveError.
    """
    number(limit_s, "limit_s", 0, MAX_NUMBER)
    times = [network.seconds(layer.nbytes) for layer in profile.layers]
    _, order, proved = best_order(profile.ready, times, profile.tails, limit_s)
    sends = tuple(whole(profile, (i,)) for i in order)
    note = "the best order" if proved else f"the best order found in {limit_s:g} s"
    return Schedule("carlier", profile, network, sends, True, note)


def best_order(
    heads: Sequence[float], times: Sequence[float], tails: Sequence[float], limit_s: float = 10.0
) -> tuple[float, list[int], bool]:
    """Return the largest end + tail, the order, and whether the order is proved optimal."""
    deadline = time.monotonic() + limit_s
    best, order = _schrage(heads, times, tails)
    serial = 0
    open_nodes = [(preemptive(heads, times, tails), serial, list(heads), list(tails))]
    while open_nodes:
        bound, _, r, q = heapq.heappop(open_nodes)
        if bound >= best - 1e-12:
            return best, order, True
        if time.monotonic() > deadline:
            return best, order, False
        value, found = _schrage(r, times, q)
        true = _value(found, heads, times, tails)
        if true < best:
            best, order = true, found
        critical = _critical(found, r, times, q, value)
        if critical is None:  # this order is optimal for the node
            continue
        job, block = critical
        least_head = min(r[i] for i in block)
        least_tail = min(q[i] for i in block)
        work = sum(times[i] for i in block)
        for side in (0, 1):
            heads_, tails_ = r.copy(), q.copy()
            if side == 0:  # the job runs before the block
                tails_[job] = max(q[job], work + least_tail)
            else:  # the job runs after the block
                heads_[job] = max(r[job], least_head + work)
            lower = max(bound, least_head + work + least_tail, preemptive(heads_, times, tails_))
            if lower < best - 1e-12:
                serial += 1
                heapq.heappush(open_nodes, (lower, serial, heads_, tails_))
    return best, order, True


def _value(
    order: Sequence[int], heads: Sequence[float], times: Sequence[float], tails: Sequence[float]
) -> float:
    now = worst = 0.0
    for i in order:
        now = max(now, heads[i]) + times[i]
        worst = max(worst, now + tails[i])
    return worst


def _schrage(
    heads: Sequence[float], times: Sequence[float], tails: Sequence[float]
) -> tuple[float, list[int]]:
    """Schrage's schedule: always run the ready job with the longest tail. Returns value, order."""
    coming = sorted(range(len(heads)), key=lambda i: heads[i])
    waiting: list[tuple[float, int]] = []
    order: list[int] = []
    now = worst = 0.0
    at = 0
    while len(order) < len(coming):
        if not waiting:
            now = max(now, heads[coming[at]])
        while at < len(coming) and heads[coming[at]] <= now:
            heapq.heappush(waiting, (-tails[coming[at]], coming[at]))
            at += 1
        _, i = heapq.heappop(waiting)
        order.append(i)
        now += times[i]
        worst = max(worst, now + tails[i])
    return worst, order


def _critical(
    order: Sequence[int], heads: Sequence[float], times: Sequence[float],
    tails: Sequence[float], value: float,
) -> tuple[int, list[int]] | None:  # fmt: skip
    """Return the interference job, which is the last on the critical path with a shorter tail than
    the path's end, and the block after it; None if there is no such job."""
    now, ends, starts = 0.0, [], []
    for i in order:
        starts.append(max(now, heads[i]))
        now = starts[-1] + times[i]
        ends.append(now)
    last = max(p for p, i in enumerate(order) if abs(ends[p] + tails[i] - value) <= 1e-9 * value)
    first = last
    while first and starts[first] <= ends[first - 1]:
        first -= 1
    for position in range(last - 1, first - 1, -1):
        if tails[order[position]] < tails[order[last]]:
            return order[position], list(order[position + 1 : last + 1])
    return None
