"""The plan interpreter on the CPU: one rank's tracks, run by one thread over shared memory.

All tracks of a rank take turns: each runs until a WAIT is not yet fulfilled. A rank that can do
nothing yields its core; after `YIELDS` such rounds it sleeps on its *bell*, a word that whoever
signals it clears and wakes. Counters only grow and are never reset, so one region of flags and
slots serves any number of calls: a rank can run ahead into the next call only as far as the
slots freed by its receivers allow.

`call` is a whole call in one piece: the rank posts what it asks for, sends what it can, waits until
all ranks have posted the same, and runs its tracks. Nothing is written into the caller's buffer
before all have agreed, so a call that differs between ranks leaves the buffers alone.

Memory order: a SEND writes its slot, then SIGNAL stores the counter with release; the receiver's
WAIT loads it with acquire before it reads the slot; the way back (slot-free) is the same. A rank
that wants to sleep sets its bell, then tries all tracks once more behind a fence; a rank that has
signalled looks at the bells behind a fence, once a round, before it can sleep or return: so at
least one of the two sees the other. A rank posts with release after it has written its words, and
reads the others' words after it has loaded their counters with acquire. Words of even and odd calls
lie apart: a rank posts its next call but one only after all others have posted the next one, and so
have read the words of this one.

Op codes and the layout of `code` are those of `collectives.planning.plan` (`Op`, `Plan.encode`);
a test compares them.
"""

from __future__ import annotations

from numba import njit

from linkweave.kernels.atomics import (
    call_combine,
    copy_bytes,
    fence,
    futex_wait,
    load_acquire,
    sched_yield,
    store_release,
    stream_bytes,
)
from linkweave.kernels.plan.counters import (
    ABORTED,
    DONE,
    IDLE,
    SLEEP_NS,
    SLEEPS,
    YIELDS,
    ring,
    wake,
)

SEND, REDUCE, COPY, SIGNAL, WAIT = 0, 1, 2, 3, 4
DIFFERS = 3  # `call` returns it, or one of `kernels.counters`

# Fields of `state`, one int64 each.
OWN, SOURCE, NBYTES = 0, 1, 2  # addresses of the buffer, of the values (0: the buffer); their bytes
NUM_CHUNKS, STRIDE, UNITS, CHUNK_BYTES = 3, 4, 5, 6
SLOTS, SLOT_BYTES, ITEM, COMBINE, DIVISOR = 7, 8, 9, 10, 11
DIRECT = 12  # 1: ranks may read one another's buffers where all lie in shared memory
ABORT, BELL, BASE = 13, 14, 15  # addresses of the abort word, our bell, the shared memory
STREAMING = 16
FINALS = 17  # address of a counter for each track of the chunks it has made final, or 0
NUMBER, RANK = 18, 19  # of the call; of this rank
POSTED, FINISHED = 20, 21  # addresses of this rank's counters of calls
STAGE = 22  # of the call; kept between calls of an unfinished one
AWAITED = 23  # ranks that have posted, or finished, as far as known
SPAN = 24  # bytes of the buffer, for those who look whether it is shared; 0: it must not be
SLEPT = 25  # 1: nothing moved when `call` returned the last time
STATE_FIELDS = 26

POST, AGREE, RUN, FINISH = 0, 1, 2, 3  # stages

# Columns of `cursor`, for each connection: what its two ends have done so far, over all calls.
SENT, RAISED, GRANTED, READ, FREED, TAKEN = range(6)

DIRECT_SLOTS = 16
"""How far a sender may run ahead where no slot is used: memory does not limit it then."""

_MOVED, _LEFT, _ARRIVED = 1, 2, 4  # what `_advance` tells


@njit(inline="always")
def move(dst, src, nbytes, streaming):
    """Copy between private memory and slots; a large message's data goes past the caches.

    A result is not read again here, and a slot's line that is fetched from another core's cache
    costs more than one from memory: with cores that share no cache, 64 MB over 8 ranks takes half
    the time; with cores that do, a fifth more.
    """
    if streaming:
        head = min(-dst & 63, nbytes)
        copy_bytes(dst, src, head)
        stream_bytes(dst + head, src + head, nbytes - head)
    else:
        copy_bytes(dst, src, nbytes)


@njit(nogil=True, cache=True)
def _advance(
    state, gated, code, blocks, flag, slot, origin, pushed, cursor, at, peers, table
):  # fmt: skip
    """Let every track run as far as it can; `_MOVED`, `_LEFT` and `_ARRIVED`, added up.

    While `gated` no data is taken: a track stops at its first wait for some.
    """
    tracks, phases = code[0], code[1]
    own, units = state[OWN], state[UNITS]
    stride, num_chunks = state[STRIDE], state[NUM_CHUNKS]
    direct = state[DIRECT] != 0
    slots = DIRECT_SLOTS if direct else state[SLOTS]
    streaming = state[STREAMING] != 0 and not direct
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
                        src = own + start
                        if code[pc + 3] >= 0:
                            f = code[pc + 3]
                            src = slot[f] + cursor[f, READ] % slots * state[SLOT_BYTES]
                            cursor[f, READ] += 1
                        done = 0  # connections that share a slot are written once
                        for j in range(n):
                            d = code[pc + 5 + j]
                            dst = slot[d] + cursor[d, SENT] % slots * state[SLOT_BYTES]
                            cursor[d, SENT] += 1
                            if direct:
                                dst = peers[pushed[d]] + start if pushed[d] >= 0 else done
                            if dst != done:
                                move(dst, src, size, streaming)
                            done = dst
                        if streaming:
                            fence()  # streaming stores are not ordered by a release store
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
                            if not direct:
                                move(own + start, table[0], size, streaming)
                            elif pushed[c] < 0:
                                copy_bytes(own + start, table[0], size)
                        elif size:
                            divisor = float(state[DIVISOR]) if code[pc + 2] & 1 else 1.0
                            call_combine(
                                state[COMBINE], own + start, table.ctypes.data, n,
                                code[pc + 2] >> 1, size // state[ITEM], divisor,
                            )  # fmt: skip
                        final = op == COPY or (op == REDUCE and code[pc + 2] & 1)
                        if final and state[FINALS]:
                            if streaming:
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


@njit(inline="always")
def _is_there(finals, needs, layer):
    """Whether each track has made as many chunks final as a layer needs."""
    missing = 0
    for s in range(needs.shape[1]):
        missing += load_acquire(finals + 8 * s) < needs[layer, s]
    return missing == 0


@njit(nogil=True, cache=True)
def call(
    state, said, notices, others, bells, waiters, needs,
    code, blocks, flag, slot, origin, pushed, cursor, at, peers, table,
):  # fmt: skip
    """One call of this rank, or what is left of it: DONE, DIFFERS, IDLE (nothing moves; call
    again) or ABORTED.

    `said` [words]: what this rank asks for, last the offset of its buffer in shared memory or -1.
    `notices` [ranks, words]: where ranks say so. `others` [2, ranks - 1]: addresses of the other
    ranks' counters of calls posted and finished; `bells`: of their bells. `waiters` [layers]:
    addresses of the bells of those who wait for a layer, `needs` [layers, tracks]: chunks that
    each track must have made final for it; both empty where nobody may wait.

    `blocks` [units, 2]: first byte and bytes of each block of this rank's buffer;
    `flag` [connections, 2]: addresses of the data-ready and slot-free counters;
    `slot`, `origin`, `pushed` [connections]: address of the first slot, rank whose data it carries,
    rank whose chunk it may write (or -1); `cursor` [connections, 6]; `at` [tracks, 3]: phase,
    group, place in the code (zero at first); `peers` [ranks], `table`: scratch for addresses.

    Where all buffers lie in shared memory (DIRECT), no slot is used: a REDUCE reads the chunks of
    the ranks that the data comes from; a SEND over a connection that is `pushed` (its receiver
    copies) writes the receiver's chunk, and its COPY has nothing to do; and the call ends when all
    ranks have finished theirs. Otherwise a rank need not wait for the others to send, as their
    slots are free.
    """
    number, offset = state[NUMBER], said[said.size - 1]
    if state[STAGE] == POST:
        for i in range(said.size):
            notices[state[RANK], i] = said[i]
        store_release(state[POSTED], number)
        state[STAGE], state[AWAITED], state[SLEPT] = AGREE, 0, 0
        state[DIRECT] = state[DIRECT] != 0 and offset >= 0
        if not state[DIRECT] and not state[SOURCE]:
            _advance(
                state, True, code, blocks, flag, slot, origin, pushed, cursor, at, peers, table
            )  # fmt: skip
        ring(bells)
    idle = YIELDS if state[SLEPT] else 0
    sleeps = 0
    while True:
        moved = False
        if state[STAGE] == AGREE:
            i = state[AWAITED]
            while i < others.shape[1] and load_acquire(others[0, i]) >= number:
                i += 1
            state[AWAITED] = i
            if i == others.shape[1]:
                for r in range(notices.shape[0]):
                    for w in range(said.size - 1):
                        if notices[r, w] != said[w]:
                            return DIFFERS
                    peers[r] = state[BASE] + notices[r, said.size - 1]
                    if notices[r, said.size - 1] < 0:
                        state[DIRECT] = 0
                if state[SOURCE] and state[SOURCE] != state[OWN]:
                    copy_bytes(state[OWN], state[SOURCE], state[NBYTES])
                state[STAGE] = RUN
        if state[STAGE] == RUN:
            found = _advance(
                state, False, code, blocks, flag, slot, origin, pushed, cursor, at, peers, table
            )  # fmt: skip
            moved = found & _MOVED != 0
            if found & _LEFT == 0:
                store_release(state[FINISHED], number)
                state[STAGE], state[AWAITED] = FINISH, 0
            if moved or state[STAGE] == FINISH:  # after streaming stores, too: they are ordered
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
                return DONE
        if moved:
            if idle > YIELDS:
                store_release(state[BELL], 0)
            idle, sleeps = 0, 0
            continue
        if load_acquire(state[ABORT]) != 0:
            return ABORTED
        idle += 1
        if idle <= YIELDS:
            sched_yield()
        elif idle == YIELDS + 1:
            store_release(state[BELL], 1)
            fence()  # and once more round all tracks before sleeping
        else:
            futex_wait(state[BELL], 1, SLEEP_NS)
            rung = load_acquire(state[BELL]) == 0
            store_release(state[BELL], 0)
            sleeps += 1
            if sleeps == SLEEPS:
                state[SLEPT] = 1
                return IDLE
            idle = YIELDS // 2 if rung else YIELDS  # to yield may take long on a busy machine
