"""The simulator's event loop: plain Python for short plans, compiled by Numba for long ones.

`play` takes lists when run as Python and arrays when compiled; both give the same bits. Op codes
and the layout of `code` are those of `collectives.planning.plan` (`Op`, `Plan.encode`); a test
compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from heapq import heappop, heappush
from typing import Any

SEND, REDUCE, COPY, SIGNAL, WAIT = 0, 1, 2, 3, 4
_SLOTS = 1024  # of the hash table from times to queues


def _filled(count, value):
    """Return a list of equal values; an array in compiled code, where that is faster."""
    return [value] * count


def play(
    code, ranks, num_chunks, stride, limit, sizes, ready, stored_at, stored,
    strand_at, strand, link, stores, strand_per_byte, per_byte, alpha, strand_free, work, busy,
    first, sent_connection, sent_chunk, sent_start, sent_free, sent_end,
):  # fmt: skip
    """Carry out every track of `code`; returns (end in s, rows of `sent_*`, whether it hangs).

    The rules are those of `collectives.planning.simulate.simulate`. All times are in seconds.

    `ranks` [tracks] is the rank of each track, `sizes` [chunks] the bytes of each chunk. Connection
    i has two counters, which begin with the values given and are changed: `ready[2i]` is the number
    of free slots for its sender, `ready[2i + 1]` that of filled ones for its receiver. Connection i
    uses the strands `strand[strand_at[i]:strand_at[i + 1]]`; each has a `link` (an index into
    `busy`), a flag whether it `stores` into memory, and a time per byte. `strand_free` [strands] is
    when each is free. `per_byte` and `alpha` [connections] are how long a send occupies its track.
    If a send has begun on only some of its connections, the links into memory that it already uses
    are in `stored` from `stored_at[track]` on.
    `work` [strands] is for how long each is yet to be used, at least; once that puts the end behind
    `limit`, the simulation stops, with a time between them.
    `first` [ranks] receives the time at which chunk 0 was last written; the `sent_*` arrays receive
    a row for each send and connection.
    """
    tracks, phases = code[0], code[1]
    groups = (num_chunks + stride - 1) // stride
    phase = _filled(tracks, 0)
    group = _filled(tracks, 0)
    pc = _filled(tracks, -1)  # offset in the code; -1: at the start of a phase's steps
    parked = _filled(len(ready), -1)  # the track that waits for the counter
    begun = _filled(len(code), False)  # at a connection's offset: the send has begun on it
    going = _filled(tracks, False)  # whether the current send has begun on some connections only
    done = _filled(tracks, 0.0)  # when the connections on which it has begun are done
    stored_n = _filled(tracks, 0)
    blocked = _filled(tracks, -1)  # the connection, if a track waits for the strands of just one
    # Tracks that continue at the same time form a queue, in the order in which they asked for it.
    # A queue is known by its first track, which has its time, its last track, and the next queue
    # in the same slot of the hash table; each track has the one behind it.
    time = _filled(tracks, 0.0)
    last = _filled(tracks, tracks - 1)
    beside = _filled(tracks, -1)
    behind = _filled(tracks, 0)
    for s in range(tracks):
        behind[s] = s + 1
    queues = _filled(_SLOTS, -1)
    queues[0] = 0
    times = [0.0] * min(tracks, 1)  # of all queues: a heap
    recent = 0  # the queue last joined
    now = 0.0
    written = 0
    left = tracks
    while len(times) > 0:
        now = heappop(times)
        slot = int(min(now, 1e9) * 1e9) % _SLOTS
        head, before = queues[slot], -1
        while time[head] != now:
            head, before = beside[head], head
        if before < 0:
            queues[slot] = beside[head]
        else:
            beside[before] = beside[head]
        tail = last[head]
        while head >= 0:
            s = head
            head = behind[s] if s != tail else -1
            then = -1.0  # when the track continues, if it need not wait for a counter
            i = blocked[s]
            if i >= 0:
                for k in range(strand_at[i], strand_at[i + 1]):
                    then = max(then, strand_free[strand[k]])
                then = then if then > now else -1.0
            row = 2 + s * (phases + 1)
            p, g, at = phase[s], group[s], pc[s]
            while then < 0:
                if p == phases:
                    left -= 1
                    break
                start, stop = code[row + p], code[row + p + 1]
                if start == stop or g == groups:
                    p, g = p + 1, 0
                    continue
                at = at if at >= 0 else start
                if at == stop:
                    g, at = g + 1, -1
                    continue
                op, n = code[at], code[at + 4]
                chunk = g * stride + code[at + 1]
                if chunk >= num_chunks:
                    at += 5 + n
                    continue
                if op == WAIT:
                    q = 2 * code[at + 5] + (1 - code[at + 2])
                    if ready[q] == 0:
                        parked[q] = s
                        break
                    ready[q] -= 1
                elif op == SIGNAL:
                    q = 2 * code[at + 5] + code[at + 2]
                    ready[q] += 1
                    if parked[q] >= 0:  # continues now, behind the others
                        if head < 0:
                            head = parked[q]
                        else:
                            behind[tail] = parked[q]
                        tail = parked[q]
                        parked[q] = -1
                elif op == SEND:
                    size = sizes[chunk]
                    if not going[s]:
                        done[s], stored_n[s] = now, 0
                    again = -1.0
                    for j in range(at + 5, at + 5 + n):
                        if going[s] and begun[j]:
                            continue
                        i = code[j]
                        begin = now
                        for k in range(strand_at[i], strand_at[i + 1]):
                            fresh = True
                            if stores[k]:
                                for m in range(stored_at[s], stored_at[s] + stored_n[s]):
                                    fresh = fresh and stored[m] != link[k]
                            if fresh:
                                begin = max(begin, strand_free[strand[k]])
                        if begin > now:  # retry then, as another send may take the strand first
                            again = begin if again < 0 else min(again, begin)
                            begun[j] = False
                            continue
                        begun[j] = True
                        had = stored_n[s]
                        for k in range(strand_at[i], strand_at[i + 1]):
                            fresh = True
                            if stores[k]:
                                for m in range(stored_at[s], stored_at[s] + had):
                                    fresh = fresh and stored[m] != link[k]
                                if fresh:
                                    stored[stored_at[s] + stored_n[s]] = link[k]
                                    stored_n[s] += 1
                            if fresh:
                                x, seconds = strand[k], size * strand_per_byte[k]
                                if begin + work[x] > limit:
                                    return begin + work[x], written, False
                                work[x] -= seconds
                                strand_free[x] = begin + seconds
                                busy[link[k]] += seconds
                        free = begin + size * per_byte[i]
                        sent_connection[written], sent_chunk[written] = i, chunk
                        sent_start[written], sent_free[written] = begin, free
                        sent_end[written] = free + alpha[i]
                        done[s] = max(done[s], free + alpha[i])
                        written += 1
                    going[s] = again >= 0
                    then = again if going[s] else done[s]
                    blocked[s] = code[at + 5] if going[s] and n == 1 else -1
                    if going[s]:
                        break
                elif chunk == 0:
                    first[ranks[s]] = now
                at += 5 + n
            phase[s], group[s], pc[s] = p, g, at
            if then == now:
                if head < 0:
                    head = s
                else:
                    behind[tail] = s
                tail = s
            elif then > now:
                if time[recent] != then:
                    slot = int(min(then, 1e9) * 1e9) % _SLOTS
                    recent = queues[slot]
                    while recent >= 0 and time[recent] != then:
                        recent = beside[recent]
                if recent >= 0:
                    behind[last[recent]] = s
                    last[recent] = s
                else:
                    recent = s
                    time[s], last[s], beside[s] = then, s, queues[slot]
                    queues[slot] = s
                    heappush(times, then)
    return now, written, left > 0


@cache
def compiled_play() -> Callable[..., Any]:
    """`play` as machine code, compiled at first use and cached on disk."""
    import numpy as np
    from numba import extending, njit

    extending.overload(_filled)(lambda count, value: lambda count, value: np.full(count, value))
    return njit(cache=True)(play)
