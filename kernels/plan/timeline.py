"""The simulator's loop over events: plain Python for short plans, compiled for long.

`play` uses only what Numba compiles as it stands; it takes lists where it is called in Python and
arrays where it is compiled, and gives the same bits. Op codes and the layout of `code` are those
of `collectives.planning.plan` (`Op`, `Plan.encode`); a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from heapq import heapify, heappop, heappush
from typing import Any

SEND, REDUCE, COPY, SIGNAL, WAIT = 0, 1, 2, 3, 4


def play(
    code, ranks, num_chunks, stride, sizes,
    token_at, tokens, given, stored_at, stored,
    strand_at, strand, link, stores, strand_per_byte, per_byte, alpha, strand_free, busy, first,
    sent_connection, sent_chunk, sent_start, sent_free, sent_end,
):  # fmt: skip
    """Carry out every track of `code`; returns (end in s, sends written, whether it hangs).

    Rules: `collectives.runtime.simulate.simulate`.

    `ranks` [tracks]; `sizes` [chunks], bytes. A connection has two queues of times in s, 2i for
    its sender (a slot is free) and 2i + 1 for its receiver (data is ready): queue q lies in
    `tokens` from `token_at[q]` on, with `given[q]` entries so far. Connection i takes strands
    `strand[strand_at[i]:strand_at[i + 1]]`, with the `link` of each (an index into `busy`, s),
    whether it `stores`, and seconds a byte; `strand_free` [strands] is when each is free.
    `per_byte`, `alpha` [connections]: how long a send holds its track. Of a send that has
    begun on some of its connections only, the links into memory crossed lie in `stored` from
    `stored_at[track]` on.
    `first` [ranks] receives when chunk 0 was last written; the `sent_` arrays a row for each send
    and connection.
    """
    tracks, phases = code[0], code[1]
    groups = (num_chunks + stride - 1) // stride
    phase = [0] * tracks
    group = [0] * tracks
    place = [-1] * tracks  # in the code; -1: at the start of a phase's steps
    taken = [0] * len(given)
    parked = [-1] * len(given)
    begun = [False] * len(code)  # where the code names a connection: it has begun in this send
    going = [False] * tracks  # within a send that has not begun on all its connections
    done = [0.0] * tracks  # when those that have begun are over
    stored_n = [0] * tracks
    queue = [(0.0, s, s) for s in range(tracks)]
    heapify(queue)
    serial = tracks
    written = 0
    left = tracks
    end = 0.0
    while len(queue) > 0:
        now, _, s = heappop(queue)
        row = 2 + s * (phases + 1)
        while True:
            if phase[s] == phases:
                left -= 1
                break
            start, stop = code[row + phase[s]], code[row + phase[s] + 1]
            if start == stop or group[s] == groups:
                phase[s], group[s] = phase[s] + 1, 0
                continue
            at = place[s] if place[s] >= 0 else start
            if at == stop:
                group[s], place[s] = group[s] + 1, -1
                continue
            op, n = code[at], code[at + 4]
            chunk = group[s] * stride + code[at + 1]
            if chunk >= num_chunks:
                place[s] = at + 5 + n
                continue
            if op == WAIT:
                q = 2 * code[at + 5] + (1 - code[at + 2])
                if taken[q] == given[q]:
                    parked[q] = s
                    place[s] = at
                    break
                now = max(now, tokens[token_at[q] + taken[q]])
                taken[q] += 1
            elif op == SIGNAL:
                q = 2 * code[at + 5] + code[at + 2]
                tokens[token_at[q] + given[q]] = now
                given[q] += 1
                if parked[q] >= 0:
                    heappush(queue, (now, serial, parked[q]))
                    serial += 1
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
                    if begin > now:  # others may ask for the strand before it is free: ask again
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
                            strand_free[strand[k]] = begin + size * strand_per_byte[k]
                            busy[link[k]] += size * strand_per_byte[k]
                    free = begin + size * per_byte[i]
                    sent_connection[written], sent_chunk[written] = i, chunk
                    sent_start[written], sent_free[written] = begin, free
                    sent_end[written] = free + alpha[i]
                    done[s] = max(done[s], free + alpha[i])
                    written += 1
                if again >= 0:
                    heappush(queue, (again, serial, s))
                    place[s], going[s] = at, True
                else:
                    heappush(queue, (done[s], serial, s))
                    place[s], going[s] = at + 5 + n, False
                serial += 1
                break
            elif chunk == 0:
                first[ranks[s]] = now
            place[s] = at + 5 + n
        end = max(end, now)
    return end, written, left > 0


@cache
def compiled_play() -> Callable[..., Any]:
    """`play` as machine code, compiled at first use and cached on disk."""
    from numba import njit

    return njit(cache=True)(play)
