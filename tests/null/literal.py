"""Slow readings of the papers' algorithms, one line after another, to compare the policies with.

Layers are numbered from 1 as in the papers; `r[l]` is tau_b + t_b, when layer l's gradient is
there. What had to be decided is said at the policies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations

from collectives.overlap import Network, Profile


def ready(p: Profile) -> list[float]:
    found = [0.0] * (len(p.layers) + 1)
    at = 0.0
    for number in range(len(p.layers), 0, -1):
        at += p.layers[number - 1].backward_s
        found[number] = at
    return found


def wfbp(p: Profile, n: Network) -> float:
    """ASC-WFBP, section II-B: the end of layer 1's communication, then the forward pass."""
    r, end = ready(p), 0.0
    for number in range(len(p.layers), 0, -1):
        end = max(end, r[number]) + n.startup_s + n.seconds_per_byte * p.layers[number - 1].nbytes
    return end + p.forward_s


def mg_wfbp(p: Profile, n: Network) -> list[list[int]]:
    """Groups of layers by equation 5; all times computed anew after every decision."""
    r, size = ready(p), len(p.layers)
    merged = [False] * (size + 1)

    def starts() -> list[float]:
        tau, end, waiting = [0.0] * (size + 1), 0.0, 0
        for number in range(size, 0, -1):
            waiting += p.layers[number - 1].nbytes
            tau[number] = max(end, r[number])
            if not merged[number]:
                end = tau[number] + n.startup_s + n.seconds_per_byte * waiting
                waiting = 0
        return tau

    for number in range(size, 1, -1):
        merged[number] = r[number - 1] < starts()[number] + n.startup_s
    groups: list[list[int]] = [[]]
    for number in range(size, 0, -1):
        groups[-1].append(number - 1)
        if not merged[number]:
            groups.append([])
    return groups[:-1]


def asc_types(p: Profile, n: Network) -> list[str]:
    """Algorithm 1, with CALCCOMMTIME called anew for every layer."""
    a, b, gamma, size = n.startup_s, n.seconds_per_byte, n.gamma, len(p.layers)
    r = ready(p)
    s = ["normal"] * (size + 1)

    def calc(upto: int) -> tuple[float, float, float, float, float, float]:
        """(normal start, immediate start, bytes of layer `upto`; start, bytes, end before it)."""
        m = [0.0] + [float(layer.nbytes) for layer in p.layers]
        before = (0.0, 0.0, 0.0)
        since = 0.0
        for number in range(size, upto - 1, -1):
            immediate = max(r[number], since)
            normal = max(immediate, before[2])
            if number == upto:
                return (normal, immediate, m[number], *before)
            if s[number] == "merged":
                m[number - 1] += m[number]
                since = normal
                continue
            since = 0.0
            if s[number] == "normal":
                before = (normal, m[number], normal + a + b * m[number])
            else:
                end = immediate + a + b * m[number] + penalty(before, immediate)
                before = (immediate, m[number], end)
        raise AssertionError

    def penalty(before: tuple[float, float, float], at: float) -> float:
        start, nbytes, _ = before
        if not nbytes or not a + b * nbytes:
            return 0.0
        return (gamma - 1) * b * nbytes * max(0.0, 1 - (at - start) / (a + b * nbytes))

    for number in range(size, 1, -1):
        normal, immediate, m, *before = calc(number)
        q1 = normal + a + b * m <= r[number - 1]
        q2 = r[number - 1] < normal + a
        more = penalty((before[0], before[1], before[2]), immediate)
        q3 = immediate + a + b * m + more < r[number - 1]
        s[number] = "normal" if q1 else "merged" if q2 and not q3 else "simultaneous"
    s[1] = "simultaneous"
    return s[1:]


def bytescheduler(
    p: Profile, n: Network, partition: int, credit: int
) -> list[tuple[int, int, int]]:
    """(layer, bytes, lane) in the order in which they are sent: at every moment at which a lane is
    free and a block is there, the first block of all that are there, by layer and place."""
    r = ready(p)
    blocks = [
        (number, first, min(partition, layer.nbytes - first))
        for number, layer in enumerate(p.layers, 1)
        for first in range(0, layer.nbytes, partition)
    ]
    free = [0.0] * credit
    now, sent = 0.0, []
    pace = n.seconds_per_byte * (1 if credit == 1 else n.gamma * credit / 2)
    while blocks:
        there = [x for x in blocks if r[x[0]] <= now]
        lanes = [lane for lane in range(credit) if free[lane] <= now]
        if not there or not lanes:
            later = [t for t in (*free, *(r[x[0]] for x in blocks)) if t > now]
            now = min(later)
            continue
        number, first, nbytes = min(there)
        lane = min(lanes, key=lambda x: (free[x], x))
        blocks.remove((number, first, nbytes))
        sent.append((number - 1, nbytes, lane))
        free[lane] = now + n.startup_s + pace * nbytes
    return sent


def us_byte_first(
    p: Profile, n: Network, partition: int, p1: list[float]
) -> tuple[list[list[float]], list[int], float]:
    """Algorithm 1: [layer, blocks, start] of each all-reduce, blocks left, when the channel is
    free; blocks are taken one by one."""
    a, b, size = n.startup_s, n.seconds_per_byte, len(p.layers)
    r = ready(p)
    blocks = [[]] + [
        [min(partition, layer.nbytes - x) for x in range(0, layer.nbytes, partition)]
        for layer in p.layers
    ]
    have: list[list[int]] = [[] for _ in range(size + 1)]
    operations: list[list[float]] = []
    tau = r[size]
    for number in range(size, 0, -1):
        while r[number] > tau:
            layer, best = 0, math.inf
            for other in range(size, 0, -1):  # CALCULATE_Olay
                if have[other] and p1[other] < best:
                    layer, best = other, p1[other]
            if layer == 0:
                tau = r[number]
                break
            again = bool(operations) and operations[-1][0] == layer
            startup = 0.0 if again else a
            room, rest = r[number] - tau, sum(have[layer])
            if room < startup:
                take = 1
            elif room < startup + b * rest:
                take = math.ceil((room - startup) / (b * partition)) if b else len(have[layer])
                take = min(max(take, 1), len(have[layer]))
            else:
                take = len(have[layer])
            if again:
                operations[-1][1] += take
            else:
                operations.append([layer, take, tau])
            tau += startup + b * sum(have[layer][:take])
            have[layer] = have[layer][take:]
        have[number] = list(blocks[number])
    return operations, [len(x) for x in have[1:]], tau


def us_byte_iteration(p: Profile, n: Network, partition: int, p1: list[float]) -> float:
    """Equations 9 to 12 behind algorithm 1."""
    _, left, tau = us_byte_first(p, n, partition, p1)
    tau = max(tau, ready(p)[1])
    at = 0.0
    for layer, blocks in zip(p.layers, left, strict=True):
        if blocks:
            all_blocks = [
                min(partition, layer.nbytes - x) for x in range(0, layer.nbytes, partition)
            ]
            tau += n.startup_s + n.seconds_per_byte * sum(all_blocks[-blocks:])
        at = max(at, tau) + layer.forward_s
    return at


def us_byte_priorities(p: Profile, n: Network, partition: int) -> list[float]:
    """Algorithm 2, line by line."""
    size, r = len(p.layers), ready(p)
    p1 = [0.0, *(float(x) for x in range(1, size + 1))]
    best = us_byte_iteration(p, n, partition, p1)
    number = size
    while number >= 1:
        tau = 0.0
        for layer, _, start in us_byte_first(p, n, partition, p1)[0]:
            if layer == number:
                nbytes = p.layers[number - 1].nbytes
                tau = start + n.startup_s + n.seconds_per_byte * nbytes
                break
        if tau == 0:
            number -= 1
            continue
        for k in range(number, 0, -1):
            if k == 1 or r[k] < tau <= r[k - 1]:
                break
        trial = list(p1)
        trial[number] = p1[k]
        for j in range(k, number):
            trial[j] += 1
        seconds = us_byte_iteration(p, n, partition, trial)
        if seconds < best * (1 - 1e-12):
            best, p1, number = seconds, trial, k
        number -= 1
    return p1[1:]


def spans_by_small_steps(
    sends: list[tuple[float, float, int, tuple[int, ...]]], startup: float, gamma: float,
    step: float,
) -> list[tuple[float, float]]:  # fmt: skip
    """Start and end of (ready, bytes, lane, after), a byte a second alone, clock step by step."""
    state: list[list[float]] = [
        [-1.0, nbytes, -1.0] for _, nbytes, _, _ in sends
    ]  # start, left, end
    now = 0.0
    while any(end < 0 for _, _, end in state):
        for i, (there, _, lane, after) in enumerate(sends):
            before = [j for j in range(i) if sends[j][2] == lane]
            waits = any(state[j][2] < 0 for j in (*before, *after))
            if state[i][0] < 0 and not waits and there <= now + step / 2:
                state[i][0] = now
        sending = [x for x in state if x[0] >= 0 and x[2] < 0 and x[0] + startup <= now + step / 2]
        pace = 1.0 if len(sending) < 2 else 2 / (gamma * len(sending))
        for x in sending:
            x[1] -= pace * step
            if x[1] <= 1e-9:
                x[2] = now + step
        now += step
    return [(x[0], x[2]) for x in state]


def c_cube(p: Profile, n: Network) -> float:
    """Layer l computes when the bytes up to its last have arrived, and layer l - 1 is over."""
    at, sent = p.backward_s, 0
    for layer in p.layers:
        sent += layer.nbytes
        at = max(at, p.backward_s + n.startup_s + n.seconds_per_byte * sent) + layer.forward_s
    return at


def end_of_groups(p: Profile, n: Network, groups: list[list[int]]) -> float:
    """When the last of some groups, sent in this order on one lane, has been sent."""
    end = 0.0
    for group in groups:
        there = max(p.ready[i] for i in group)
        end = max(end, there) + n.seconds(sum(p.layers[i].nbytes for i in group))
    return end


def chained(p: Profile, n: Network, groups: list[list[int]]) -> float:
    """The end of the forward pass, layer l of which waits for its group only."""
    end, there = 0.0, {}
    for group in groups:
        start = max(p.ready[i] for i in group)
        end = max(end, start) + n.seconds(sum(p.layers[i].nbytes for i in group))
        there |= dict.fromkeys(group, end)
    at = p.backward_s
    for i, layer in enumerate(p.layers):
        at = max(at, there[i]) + layer.forward_s
    return at


def contiguous(size: int) -> Iterator[list[list[int]]]:
    """All ways to part the layers, last to first, into groups of neighbours."""
    for cuts in range(1 << size - 1):
        groups = [[size - 1]]
        for i in range(size - 2, -1, -1):
            if cuts >> i & 1:
                groups.append([i])
            else:
                groups[-1].append(i)
        yield groups


def ordered_partitions(size: int) -> Iterator[list[list[int]]]:
    """All ordered partitions into groups of neighbours: each order, cut in every way, once for each
    set of sets."""
    for order in permutations(range(size)):
        for cuts in range(1 << size - 1):
            groups = [[order[0]]]
            for i in range(1, size):
                if cuts >> i - 1 & 1:
                    groups.append([order[i]])
                else:
                    groups[-1].append(order[i])
            if all(group == list(range(group[0], group[-1] + 1)) for group in groups):
                yield groups
