"""Slow readings of the papers, to compare the policies with: from their definitions and equations,
with no help of the code but its data. Where a paper allows two readings it is said which, and why.

Layers are numbered from 1 as in the papers; `r[l]` is tau_b + t_b, when layer l's gradient is
there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from linkweave.collectives.overlap import Network, Profile


def seconds(n: Network, nbytes: float) -> float:
    """ASC-WFBP, equation 3; US-Byte, equation 1."""
    return n.startup_s + n.seconds_per_byte * nbytes


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
        end = max(end, r[number]) + seconds(n, p.layers[number - 1].nbytes)
    return end + sum(layer.forward_s for layer in p.layers)


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
    """Theorem 1 by definitions 1 to 3; the pseudo-code of algorithm 1 says other things.

    Q1 is equation 21, about the end of layer l - 1's backward pass: line 8 adds up times of two
    layers. A normal communication waits for the one before (definition 1, equation 15), which
    line 26 forgets: then no two would ever wait for each other. A simultaneous one starts at once,
    whatever it carries (definition 3, line 34), so Q3 begins at tau_b + t_b, as in equation 29;
    equation 27 and line 12 have tau_c + t_b, which counts t_b twice. Merged bytes are sent once.
    Equation 12 holds within the communication before; behind its end nothing overlaps.
    """
    r, size = ready(p), len(p.layers)
    types = []
    sent = [(0.0, 0, 0.0)]  # (start, bytes, end), the last of which is the one before
    carried = 0
    for number in range(size, 1, -1):
        carried += p.layers[number - 1].nbytes
        begin, nbytes, end = sent[-1]
        overlapped = 0.0  # of the bytes of the one before, equation 12
        if nbytes and r[number] < begin + seconds(n, nbytes):
            overlapped = nbytes - (r[number] - begin) * nbytes / seconds(n, nbytes)
        penalty = (n.gamma - 1) * n.seconds_per_byte * overlapped
        normal, at_once = max(r[number], end), r[number]
        q1 = normal + seconds(n, carried) <= r[number - 1]
        q2 = r[number - 1] < normal + n.startup_s
        q3 = at_once + seconds(n, carried) + penalty < r[number - 1]
        if q1:
            types.append("normal")
            sent.append((normal, carried, normal + seconds(n, carried)))
        elif q2 and not q3:
            types.append("merged")
            continue
        else:
            types.append("simultaneous")
            sent.append((at_once, carried, at_once + seconds(n, carried) + penalty))
        carried = 0
    return ["simultaneous", *reversed(types)]


def bytescheduler(
    p: Profile, n: Network, partition: int, credit: int
) -> list[tuple[int, int, int]]:
    """(layer, bytes, lane) in the order in which they are sent: at every moment at which a lane is
    free and a block is there, the first block of all that are there, by layer and place.

    US-Byte, section 2.2, says no more of it; how long a block takes beside others it does not say:
    all lanes are taken to transmit all the time, at ASC-WFBP's gamma.
    """
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
    """[layer, blocks, start] of each all-reduce, blocks left, when the channel is free.

    One basic block after another: while a layer's pass lasts, the next block of the most urgent
    layer that is there joins the all-reduce before if that is of the same layer, else a new one
    starts. This is what figure 5 shows and equations 4 to 7 count: at least one block, as many as
    reach the end of the pass, rounded up, or all. That a layer's consecutive all-reduces are one,
    with one start-up, is the text's "i will not need to be updated"; lines 13 to 22 of algorithm 1
    would overwrite the blocks of the one before, and never send them.
    """
    r, size = ready(p), len(p.layers)
    blocks: list[list[int]] = [[] for _ in range(size + 1)]
    operations: list[list[float]] = []
    tau = r[size]
    for number in range(size, 0, -1):
        while tau < r[number]:
            there = [other for other in range(1, size + 1) if blocks[other]]
            if not there:
                tau = r[number]
                break
            layer = min(there, key=lambda x: p1[x])
            if operations and operations[-1][0] == layer:
                operations[-1][1] += 1
            else:
                operations.append([layer, 1, tau])
                tau += n.startup_s
            tau += n.seconds_per_byte * blocks[layer].pop(0)
        whole = p.layers[number - 1].nbytes
        blocks[number] = [min(partition, whole - x) for x in range(0, whole, partition)]
    return operations, [len(x) for x in blocks[1:]], tau


def us_byte_iteration(p: Profile, n: Network, partition: int, p1: list[float]) -> float:
    """Equations 9 to 12 behind the first phase. As printed, equation 11 lets a layer of which
    nothing is left wait for the channel too."""
    _, left, tau = us_byte_first(p, n, partition, p1)
    tau = max(tau, ready(p)[1])
    at = 0.0
    for layer, blocks in zip(p.layers, left, strict=True):
        if blocks:
            sizes = [min(partition, layer.nbytes - x) for x in range(0, layer.nbytes, partition)]
            tau += seconds(n, sum(sizes[-blocks:]))
        at = max(at, tau) + layer.forward_s
    return at


def us_byte_priorities(p: Profile, n: Network, partition: int) -> list[float]:
    """Algorithm 2, line by line. Line 10's Delta t makes tau the end of all the layer's bytes
    (equation 13); what is shorter by rounding only is not taken for shorter (line 21)."""
    size, r = len(p.layers), ready(p)
    p1 = [0.0, *(float(x) for x in range(1, size + 1))]
    best = us_byte_iteration(p, n, partition, p1)
    number = size
    while number >= 1:
        tau = 0.0
        for layer, _, start in us_byte_first(p, n, partition, p1)[0]:
            if layer == number:
                nbytes = p.layers[number - 1].nbytes
                tau = start + seconds(n, nbytes)
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
        found = us_byte_iteration(p, n, partition, trial)
        if found < best * (1 - 1e-12):
            best, p1, number = found, trial, k
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
    at = there = ready(p)[1]
    sent = 0
    for layer in p.layers:
        sent += layer.nbytes
        at = max(at, there + seconds(n, sent)) + layer.forward_s
    return at


def end_of_groups(p: Profile, n: Network, groups: list[list[int]]) -> dict[int, float]:
    """When each layer of some groups, sent in this order on one lane, has been sent."""
    r, end, there = ready(p), 0.0, {}
    for group in groups:
        start = max(r[i + 1] for i in group)
        end = max(end, start) + seconds(n, sum(p.layers[i].nbytes for i in group))
        there |= dict.fromkeys(group, end)
    return there


def chained(p: Profile, n: Network, groups: list[list[int]]) -> float:
    """The end of the forward pass, layer l of which waits for its group only."""
    there = end_of_groups(p, n, groups)
    at = ready(p)[1]
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
