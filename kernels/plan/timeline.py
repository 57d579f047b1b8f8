"""The simulator's event loop: plain Python for short plans, compiled by Numba for long ones.

`play` takes lists when run as Python and arrays when compiled; both give the same bits. Op codes
and the layout of `code` are those of `collectives.planning.plan` (`Op`, `Plan.encode`); a test
compares them.
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
    """Carry out every track of `code`; returns (end in s, rows of `sent_*`, whether it hangs).

    The rules are those of `collectives.planning.simulate.simulate`. All times are in seconds.

    `ranks` [tracks] is the rank of each track, `sizes` [chunks] the bytes of each chunk. Connection
    i has two queues of times: 2i for its sender (a slot is free) and 2i + 1 for its receiver (data
    is ready). Queue q begins at `tokens[token_at[q]]` and has `given[q]` entries so far. Connection
    i uses the strands `strand[strand_at[i]:strand_at[i + 1]]`; each has a `link` (an index into
    `busy`), a flag whether it `stores` into memory, and a time per byte. `strand_free` [strands] is
    when each is free. `per_byte` and `alpha` [connections] are how long a send occupies its track.
    If a send has begun on only some of its connections, the links into memory that it already uses
    are in `stored` from `stored_at[track]` on.
    `first` [ranks] receives the time at which chunk 0 was last written; the `sent_*` arrays receive
    a row for each send and connection.
    """
    tracks, phases = code[0], code[1]
    groups = (num_chunks + stride - 1) // stride
    phase = [0] * tracks
    group = [0] * tracks
    pc = [-1] * tracks  # offset in the code; -1: at the start of a phase's steps
    taken = [0] * len(given)
    parked = [-1] * len(given)
    begun = [False] * len(code)  # at a connection's offset: the current send has begun on it
    going = [False] * tracks  # whether the current send has begun on some connections only
    done = [0.0] * tracks  # when the connections on which it has begun are done
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
            at = pc[s] if pc[s] >= 0 else start
            if at == stop:
                group[s], pc[s] = group[s] + 1, -1
                continue
            op, n = code[at], code[at + 4]
            chunk = group[s] * stride + code[at + 1]
            if chunk >= num_chunks:
                pc[s] = at + 5 + n
                continue
            if op == WAIT:
                q = 2 * code[at + 5] + (1 - code[at + 2])
                if taken[q] == given[q]:
                    parked[q] = s
                    pc[s] = at
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
                    pc[s], going[s] = at, True
                else:
                    heappush(queue, (done[s], serial, s))
                    pc[s], going[s] = at + 5 + n, False
                serial += 1
                break
            elif chunk == 0:
                first[ranks[s]] = now
            pc[s] = at + 5 + n
        end = max(end, now)
    return end, written, left > 0


@cache
def compiled_play() -> Callable[..., Any]:
    """`play` as machine code, compiled at first use and cached on disk."""
    from numba import njit

    return njit(cache=True)(play)
