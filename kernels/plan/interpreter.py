"""The plan interpreter on the CPU: one thread runs the tracks of one rank over shared memory.

The tracks take turns; each runs until it reaches a WAIT that is not fulfilled. If no track can run,
the rank yields its core and later sleeps (`kernels.plan.counters`). Counters only grow and are
never reset, so the same flags and slots serve any number of calls: a rank can run ahead into the
next call only as far as it has free slots.

`call` is a whole call: the rank posts its request, sends what it can, waits until all ranks have
posted the same request, and runs its tracks. Nothing is written to the caller's buffer before all
ranks agree, so a mismatch leaves the buffers unchanged.

Memory order: a SEND writes its slot before SIGNAL stores the counter with release; the receiver's
WAIT loads the counter with acquire before it reads the slot. Freeing a slot works the same way. No
wake-up is lost: before sleeping, a rank sets its bell and tries all tracks again behind a fence;
after signalling, once per round, a rank checks the bells behind a fence. A rank posts its counter
with release after it has written its request, and reads the others' requests after it has loaded
their counters with acquire. Even and odd calls use separate memory for requests: a rank posts call
n + 2 only after all others have posted call n + 1, and so have read the requests of call n.

Op codes and the layout of `code` are those of `collectives.planning.plan` (`Op`, `Plan.encode`);
a test compares them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import carray, njit

from linkweave.kernels.atomics import (
    call_combine,
    copy_bytes,
    copy_bytes_nontemporal,
    fence,
    futex_wait,
    load_acquire,
    pointer,
    read_process,
    sched_yield,
    store_release,
)
from linkweave.kernels.plan.counters import ABORTED, DONE, IDLE, SLEEP_NS, SLEEPS, ring, wake

SEND, REDUCE, COPY, SIGNAL, WAIT = 0, 1, 2, 3, 4
DIFFERS = 3  # the result of `call` if the ranks' requests differ
UNREADABLE = 4  # its result if a rank could not read a peer's memory; no input has changed

# Fields of `state`, one int64 each. Those before CALL_FIELDS are of one call:
# `CpuExecutor.run` sets them together, in this order.
NUMBER, STAGE = 0, 1  # of the call; where it stands, if it has returned IDLE and continues
OWN, SOURCE = 2, 3  # address of the buffer; of the values (0: in place)
SHIFT = 4  # from where chunks lie in the buffer to where they are copied and combined
OUT = 5  # address to which the result is copied; 0: none
INPUT, RESULT = 6, 7  # addresses of the input and the result of a call that pulls
DIRECT = 8  # 1: ranks access each other's buffers directly if all are in shared memory; or PULLED
ROUNDS = 9  # without progress, in which this rank yields its core, before it sleeps
FINALS = 10  # address of [tracks] counters of completed chunks, or 0
CALL_FIELDS = 11
PUT, NBYTES = 11, 12  # offset in the buffer to which the values at SOURCE are copied; their bytes
NUM_CHUNKS, STRIDE, UNITS, CHUNK_BYTES = 13, 14, 15, 16
SLOTS, SLOT_BYTES, ITEM, COMBINE, DIVISOR = 17, 18, 19, 20, 21
ABORT, BELL, BASE, RANK = 22, 23, 24, 25  # addresses: abort word, own bell, shared memory; the rank
NONTEMPORAL = 26  # 1: copy to slots and from them with stores that bypass the caches
POSTED, FINISHED = 27, 28  # addresses of this rank's counters of calls
AWAITED = 29  # how many other ranks are known to have posted, or finished
SLEPT = 30  # 1: the last `call` returned IDLE
KEEP_FROM, KEEP_TO, KEEP_NBYTES = 31, 32, 33  # offsets: what is copied there from the buffer
GET, OUT_NBYTES = 34, 35  # offset of the result and its bytes
PULL = 36  # 1: ranks read each other's inputs, if all can be read, and the plan is not run
LARGE, PAST = 37, 38  # 1: it may be worth it; address of the word that says whether it is here
HUGE = 39  # 1: copy to the result with such stores, wherever the cores are
STATE_FIELDS = 40

# Rows of `frame`, each an array of `call`.
STATE, NOTICE, NOTICES, OTHERS, BELLS, WAITERS, NEEDS, READS, PIDS, CODE = range(10)
BLOCKS, FLAG, SLOT, ORIGIN, PUSHED, CURSOR, AT, PEERS, TABLE = range(10, 19)

PULLED = 2  # `state[DIRECT]` once all ranks have agreed to read each other's inputs
HIDDEN, BLIND = -1, -2  # in place of an address: nobody may read the input; we cannot read others'
_PIECE = 16 << 20  # bytes that are read before this rank looks whether another one has given up
POST, AGREE, RUN, FINISH = 0, 1, 2, 3  # stages

# Columns of `cursor`: how often each connection's two ends have acted, over all calls.
SENT, RAISED, GRANTED, READ, FREED, TAKEN = range(6)

DIRECT_SLOTS = 16
"""How many chunks a sender may run ahead in a direct call, which uses no slots."""

_MOVED, _LEFT, _ARRIVED = 1, 2, 4  # bits of `_advance`'s result


@njit(inline="always")
def move(dst, src, nbytes, nontemporal):
    """Copy to slots and from them, or to a result, with non-temporal stores where that is sooner.

    The data is not read again by this core, and between cores that share no cache a line may come
    sooner from memory than from the other's cache: on an EPYC 1 MiB takes a third of the time. On
    cores that share a cache it would take twice as long.
    """
    if nontemporal:
        head = min(-dst & 63, nbytes)
        copy_bytes(dst, src, head)
        copy_bytes_nontemporal(dst + head, src + head, nbytes - head)
    else:
        copy_bytes(dst, src, nbytes)


@njit(nogil=True, cache=True)
def _advance(state, gated, code, blocks, flag, slot, origin, pushed, cursor, at, peers, table):
    """Let every track run as far as it can.

    Returns the sum of `_MOVED` (a step was carried out), `_LEFT` (a track is not finished) and
    `_ARRIVED` (a chunk was completed). While `gated`, tracks stop at a WAIT for data.
    """
    tracks, phases = code[0], code[1]
    own, units, shift = state[OWN], state[UNITS], state[SHIFT]
    # the values that are sent before any arrive: still where the caller has them while `gated`
    values = state[SOURCE] - state[PUT] if gated and state[SOURCE] else own
    stride, num_chunks = state[STRIDE], state[NUM_CHUNKS]
    direct = state[DIRECT] != 0
    slots = DIRECT_SLOTS if direct else state[SLOTS]
    to_result = state[HUGE] != 0 or (state[NONTEMPORAL] != 0 and not direct)
    to_peer = to_result if direct else state[NONTEMPORAL] != 0
    parts, per = stride // units, state[CHUNK_BYTES]
    groups = (num_chunks + stride - 1) // stride
    found = 0
    for s in range(tracks):
        row = 2 + s * (phases + 1)
        phase, group, pc = at[s, 0], at[s, 1], at[s, 2]
        while phase < phases:
            first, stop = code[row + phase], code[row + phase + 1]
            if first == stop or group == groups:
                phase, group, pc = phase + 1, 0, 0
                continue
            if pc == 0:
                pc = first
            if pc == stop:
                group, pc = group + 1, 0
                continue
            op, n = code[pc], code[pc + 4]
            c = code[pc + 5]
            index = code[pc + 1]
            if group * stride + index < num_chunks:
                if op == WAIT:
                    if code[pc + 2]:
                        need = cursor[c, GRANTED] - slots + 1
                        if need > 0 and load_acquire(flag[c, 1]) < need:
                            break
                        cursor[c, GRANTED] += 1
                    else:
                        if gated or load_acquire(flag[c, 0]) <= cursor[c, TAKEN]:
                            break
                        cursor[c, TAKEN] += 1
                elif op == SIGNAL:
                    if code[pc + 2]:
                        cursor[c, RAISED] += 1
                        store_release(flag[c, 0], cursor[c, RAISED])
                    else:
                        cursor[c, FREED] += 1
                        store_release(flag[c, 1], cursor[c, FREED])
                else:
                    part, unit = group * parts + index // units, index % units
                    start = min(part * per, blocks[unit, 1])
                    size = min(start + per, blocks[unit, 1]) - start
                    start += blocks[unit, 0]
                    if op == SEND:
                        src = values + start
                        if code[pc + 3] >= 0:
                            f = code[pc + 3]
                            src = slot[f] + cursor[f, READ] % slots * state[SLOT_BYTES]
                            cursor[f, READ] += 1
                        done = 0  # write a slot that connections share only once
                        for j in range(n):
                            d = code[pc + 5 + j]
                            dst = slot[d] + cursor[d, SENT] % slots * state[SLOT_BYTES]
                            cursor[d, SENT] += 1
                            if direct:
                                dst = peers[pushed[d]] + start if pushed[d] >= 0 else done
                            if dst != done:
                                move(dst, src, size, to_peer)
                            done = dst
                        if to_peer:
                            fence()  # a release store does not order non-temporal stores
                    else:
                        for j in range(n):
                            d = code[pc + 5 + j]
                            table[j] = (
                                peers[origin[d]] + start
                                if direct
                                else slot[d] + cursor[d, READ] % slots * state[SLOT_BYTES]
                            )
                            cursor[d, READ] += 1
                        if op == COPY:
                            if not direct or pushed[c] < 0:
                                move(own + shift + start, table[0], size, to_result)
                        elif size:
                            divisor = float(state[DIVISOR]) if code[pc + 2] & 1 else 1.0
                            call_combine(
                                state[COMBINE], own + shift + start, table.ctypes.data, n,
                                code[pc + 2] >> 1, size // state[ITEM], divisor,
                            )  # fmt: skip
                        final = op == COPY or (op == REDUCE and code[pc + 2] & 1)
                        if final and state[FINALS]:
                            if to_result:
                                fence()
                            counter = state[FINALS] + 8 * s
                            store_release(counter, load_acquire(counter) + 1)
                            found |= _ARRIVED
                found |= _MOVED
            pc += 5 + n
        at[s, 0], at[s, 1], at[s, 2] = phase, group, pc
        if phase < phases:
            found |= _LEFT
    return found


@njit(nogil=True, cache=True)
def pull(dst, pid, src, nbytes, abort):
    """Copy from private memory of another process, until the word at `abort` is set (0: whatever
    happens); returns whether all of it could be read."""
    while nbytes > 0:
        if abort and load_acquire(abort) != 0:
            return True
        done = read_process(pid, dst, src, min(nbytes, _PIECE))
        if done <= 0:
            return False
        dst, src, nbytes = dst + done, src + done, nbytes - done
    return True


@njit(nogil=True, cache=True)
def _pull_all(state, address, notices, reads, pids):
    """Read this rank's result from the inputs of all ranks; returns whether they could be read."""
    offset = address + 1
    for i in range(reads.shape[0]):
        peer, nbytes = reads[i, 0], reads[i, 3]
        dst = state[RESULT] + reads[i, 2]
        if peer == state[RANK]:
            src = state[INPUT] + reads[i, 1]
        elif notices[peer, offset] >= 0:
            src = state[BASE] + notices[peer, offset] + reads[i, 1]
        else:
            src = notices[peer, address] + reads[i, 1]
            if not pull(dst, pids[peer], src, nbytes, state[ABORT]):
                return False
            continue
        if src != dst:
            move(dst, src, nbytes, state[HUGE] != 0 or state[NONTEMPORAL] != 0)
    return True


@njit(inline="always")
def _is_there(finals, needs, layer):
    """Whether each track has completed the chunks that a layer needs."""
    missing = 0
    for s in range(needs.shape[1]):
        missing += load_acquire(finals + 8 * s) < needs[layer, s]
    return missing == 0


def frame_of(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The argument of `call` for its arrays, which must outlive it: addresses, lengths and widths.
    Numba takes one array in an eighth of the time that it takes for so many. Rows that lie apart
    become as wide as that."""
    frame = np.zeros((len(arrays), 3), np.int64)
    for row, x in zip(frame, arrays, strict=True):
        assert x.size == 0 or x.strides[-1] == x.itemsize
        row[:2] = x.ctypes.data, len(x)
        if x.ndim == 2:
            row[2] = x.shape[1] if x.flags.c_contiguous else x.strides[0] // x.itemsize
    return frame


@njit(inline="always")
def _line(frame, i):
    return carray(pointer(frame[i, 0], frame[i, 1]), frame[i, 1])


@njit(inline="always")
def _rows(frame, i):
    return carray(pointer(frame[i, 0], frame[i, 1]), (frame[i, 1], frame[i, 2]))


@njit(nogil=True, cache=True)
def call(frame):
    """Make a call, or continue one that returned IDLE: returns DONE, DIFFERS, IDLE, ABORTED or
    UNREADABLE.

    `frame` is `frame_of` these arrays, in the order of its rows.

    All arrays are int64 except `code` (int32). Agreement: `notice` [words] is this rank's request.
    Its last word is the offset of its buffer in shared memory, or -1; the one before it the address
    of an input that other ranks may read, or `HIDDEN`, or `BLIND`. `notices` [ranks, words] holds
    all requests; the word behind them is 1 if a rank could not read what it had to. `others`
    [2, ranks - 1] are the addresses of the other ranks' counters of posted and finished calls,
    `bells` those of their bells.

    Gradient queue: `waiters` [layers] are the addresses of the bells on which threads wait for a
    layer, `needs` [layers, tracks] the chunks that each track must have completed for it; both are
    empty without a queue.

    Plan: `code` is `Plan.encode`; `blocks` [units, 2] offset and bytes of each block of this rank's
    buffer. By connection: `flag` [n, 2] addresses of the data-ready and slot-free counters, `slot`
    address of the first slot, `origin` rank whose data it carries, `pushed` rank whose chunk the
    sender may write (or -1), `cursor` [n, 6]. `at` [tracks, 3] is phase, group and offset in the
    code. `peers` [ranks] and `table` are scratch memory for addresses.

    In a direct call (all buffers are in shared memory) no slots are used: a REDUCE reads the
    chunks of the ranks from which the data originates; a SEND over a `pushed` connection writes the
    receiver's chunk, and the COPY there does nothing. Such a call ends when all ranks have
    finished. Any other call may end earlier, as the data for the other ranks is in their slots.

    A call that pulls does not run the plan if all inputs can be read. Each of `reads` [n, 4] is
    (rank, offset in its input, offset in our result, bytes); the offset in the notice is then that
    of the input. `pids` [ranks] are the ranks' processes. It ends when all ranks have finished.
    """
    state, notice, notices = _line(frame, STATE), _line(frame, NOTICE), _rows(frame, NOTICES)
    others, bells = _rows(frame, OTHERS), _line(frame, BELLS)
    waiters, needs = _line(frame, WAITERS), _rows(frame, NEEDS)
    reads, pids = _rows(frame, READS), _line(frame, PIDS)
    code = carray(pointer(frame[CODE, 0], np.int32(0)), frame[CODE, 1])
    blocks, flag, slot = _rows(frame, BLOCKS), _rows(frame, FLAG), _line(frame, SLOT)
    origin, pushed, cursor = _line(frame, ORIGIN), _line(frame, PUSHED), _rows(frame, CURSOR)
    at, peers, table = _rows(frame, AT), _line(frame, PEERS), _line(frame, TABLE)
    number, offset = state[NUMBER], notice[notice.size - 1]
    address = notice.size - 2
    if state[STAGE] == POST:
        for i in range(notice.size):
            notices[state[RANK], i] = notice[i]
        notices[state[RANK], notice.size] = 0
        store_release(state[POSTED], number)
        state[STAGE], state[AWAITED], state[SLEPT] = AGREE, 0, 0
        state[NONTEMPORAL] = state[LARGE] != 0 and load_acquire(state[PAST]) != 0
        at[:] = 0
        state[DIRECT] = state[DIRECT] != 0 and offset >= 0 and not state[PULL]
        if not state[DIRECT] and (not state[PULL] or notice[address] == HIDDEN):
            _advance(
                state, True, code, blocks, flag, slot, origin, pushed, cursor, at, peers, table
            )
        ring(bells)
    yields = state[ROUNDS]
    idle = yields if state[SLEPT] else 0
    sleeps = 0
    while True:
        moved = False
        if state[STAGE] == AGREE:
            i = state[AWAITED]
            while i < others.shape[1] and load_acquire(others[0, i]) >= number:
                i += 1
            state[AWAITED] = i
            if i == others.shape[1]:
                pulled, sighted, shared = state[PULL] != 0, True, True
                for r in range(notices.shape[0]):
                    for w in range(address):
                        if notices[r, w] != notice[w]:
                            return DIFFERS
                    pulled = pulled and notices[r, address] != HIDDEN
                    sighted = sighted and notices[r, address] != BLIND
                    shared = shared and notices[r, address + 1] >= 0
                    peers[r] = state[BASE] + notices[r, notice.size - 1]
                    if notices[r, notice.size - 1] < 0:
                        state[DIRECT] = 0
                if pulled and (sighted or shared):
                    state[DIRECT] = PULLED
                    if not _pull_all(state, address, notices, reads, pids):
                        notices[state[RANK], notice.size] = 1
                    store_release(state[FINISHED], number)
                    state[STAGE], state[AWAITED] = FINISH, 0
                    ring(bells)
                    continue
                put = state[OWN] + state[PUT]
                if state[SOURCE] and state[SOURCE] != put:
                    copy_bytes(put, state[SOURCE], state[NBYTES])
                keep = state[OWN] + state[KEEP_TO] + state[SHIFT]
                if state[KEEP_NBYTES] and keep != state[OWN] + state[KEEP_FROM]:
                    copy_bytes(keep, state[OWN] + state[KEEP_FROM], state[KEEP_NBYTES])
                state[STAGE] = RUN
        if state[STAGE] == RUN:
            found = _advance(
                state, False, code, blocks, flag, slot, origin, pushed, cursor, at, peers, table
            )
            moved = found & _MOVED != 0
            if found & _LEFT == 0:
                store_release(state[FINISHED], number)
                state[STAGE], state[AWAITED] = FINISH, 0
                if state[OUT]:
                    copy_bytes(state[OUT], state[OWN] + state[GET], state[OUT_NBYTES])
            if moved or state[STAGE] == FINISH:
                ring(bells)
            if found & _ARRIVED:
                for i in range(waiters.size):
                    if load_acquire(waiters[i]) != 0 and _is_there(state[FINALS], needs, i):
                        wake(waiters[i])
        if state[STAGE] == FINISH:
            if not state[DIRECT]:
                return DONE
            i = state[AWAITED]
            while i < others.shape[1] and load_acquire(others[1, i]) >= number:
                i += 1
            state[AWAITED] = i
            if i == others.shape[1]:
                if state[DIRECT] == PULLED:
                    if load_acquire(state[ABORT]) != 0:  # a rank has gone, perhaps before we read
                        return ABORTED
                    for r in range(notices.shape[0]):
                        if notices[r, notice.size] != 0:
                            return UNREADABLE
                return DONE
        if moved:
            if idle > yields:
                store_release(state[BELL], 0)
            idle, sleeps = 0, 0
            continue
        if load_acquire(state[ABORT]) != 0:
            return ABORTED
        idle += 1
        if idle <= yields:
            sched_yield()
        elif idle == yields + 1:
            store_release(state[BELL], 1)
            fence()  # then try all tracks again before sleeping
        else:
            futex_wait(state[BELL], 1, SLEEP_NS)
            rung = load_acquire(state[BELL]) == 0
            store_release(state[BELL], 0)
            sleeps += 1
            if sleeps == SLEEPS:
                state[SLEPT] = 1
                return IDLE
            idle = yields // 2 if rung else yields  # yielding is slow on a busy machine
