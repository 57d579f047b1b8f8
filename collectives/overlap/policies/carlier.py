"""The best order of whole tensors on one lane, chained with the forward pass: Carlier's algorithm.

One machine with heads (when a gradient is there), times (a + b m) and tails (the forward pass that
follows): 1 | r, q | Cmax, NP-hard, solved for hundreds of jobs by branch and bound. Source:
Carlier, "The one-machine sequencing problem", European Journal of Operational Research 11 (1982).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence

from linkweave.collectives.overlap.bounds import preemptive
from linkweave.collectives.overlap.communication import whole
from linkweave.collectives.overlap.network import Network
from linkweave.collectives.overlap.profile import Profile, check_number
from linkweave.collectives.overlap.schedule import Schedule


def carlier(profile: Profile, network: Network, limit_s: float = 1.0) -> Schedule:
    """Every gradient alone, in the best order found within `limit_s`; the note tells whether it is
    proved. Raises CollectiveError."""
    check_number("limit_s", limit_s)
    times = [network.seconds(layer.nbytes) for layer in profile.layers]
    _, order, proved = best_order(profile.ready, times, profile.tails, limit_s)
    sends = tuple(whole(profile, (i,)) for i in order)
    note = "the best order" if proved else f"the best order found in {limit_s:g} s"
    return Schedule("carlier", profile, network, sends, True, note)


def best_order(
    heads: Sequence[float], times: Sequence[float], tails: Sequence[float], limit_s: float = 10.0
) -> tuple[float, list[int], bool]:
    """(largest end + tail, the order, whether no order is better)."""
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
        if critical is None:  # this order is the best of the node
            continue
        job, block = critical
        least_head = min(r[i] for i in block)
        least_tail = min(q[i] for i in block)
        work = sum(times[i] for i in block)
        for side in (0, 1):
            heads_, tails_ = r.copy(), q.copy()
            if side == 0:  # before all of the block
                tails_[job] = max(q[job], work + least_tail)
            else:  # behind all of it
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
    """Always the job with the longest tail of those that are there."""
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
    """(the job that is in the way, the block behind it): the last job of the critical path's last
    block whose tail is shorter than that of the path's end; None where there is none."""
    now, ends, starts = 0.0, [], []
    for i in order:
        starts.append(max(now, heads[i]))
        now = starts[-1] + times[i]
        ends.append(now)
    last = max(p for p, i in enumerate(order) if abs(ends[p] + tails[i] - value) <= 1e-9 * value)
    first = last
    while first and starts[first] <= ends[first - 1]:
        first -= 1
    for place in range(last - 1, first - 1, -1):
        if tails[order[place]] < tails[order[last]]:
            return order[place], list(order[place + 1 : last + 1])
    return None
