"""The plan interpreter on the CPU: one rank's streams, run by one thread over shared memory.

All streams of a rank take turns: each runs until a WAIT is not yet fulfilled. A rank that can do
nothing yields its core; after `YIELDS` such rounds it sleeps on its *bell*, a word that whoever
signals it clears and wakes. Counters only grow and are never reset, so one region of flags and
slots serves any number of calls: a rank can run ahead into the next call only as far as the
slots freed by its receivers allow.

Memory order: a SEND writes its slot, then SIGNAL stores the counter with release; the receiver's
WAIT loads it with acquire before it reads the slot; the way back (slot-free) is the same. A rank
that wants to sleep sets its bell, then tries all streams once more behind a fence; a rank that has
signalled looks at the bells behind a fence, once a round, before it can sleep or return: so at
least one of the two sees the other.

Op codes and the layout of `code` are those of `collectives.planning.plan` (`Op`, `Plan.encode`);
a test compares them.
"""

from __future__ import annotations

from numba import njit

from kernels.atomics import (
    call_combine,
    copy_bytes,
    fence,
    futex_wait,
    futex_wake,
    load_acquire,
    sched_yield,
    store_release,
    stream_bytes,
)

SEND, REDUCE, COPY, SIGNAL, WAIT = 0, 1, 2, 3, 4
DONE, IDLE, ABORTED = 0, 1, 2  # what `interpret` and `await_counters` return

YIELDS = 400  # rounds without progress before sleeping
SLEEP_NS = 10_000_000
SLEEPS = 10  # after so many sleeps in a row the caller gets control: deadlines, ctrl-C

# Fields of `call`, one int64 each.
OWN, NUM_CHUNKS, STRIDE, SLOTS, SLOT_BYTES, ITEM, COMBINE, DIVISOR, DIRECT = range(9)
ABORT, BELL = 9, 10  # addresses of the abort word and of this rank's bell
STREAMING = 11
FINALS = 12  # address of a counter for each stream of the chunks it has made final, or 0
QUEUE = 13  # address of the bell of who waits for these
CALL_FIELDS = 14

# Columns of `cursor`, for each connection: what its two ends have done so far, over all calls.
SENT, RAISED, GRANTED, READ, FREED, TAKEN = range(6)


@njit(inline="always")
def wake(bell):
    """Wake who sleeps on it; behind a fence."""
    if load_acquire(bell) != 0:
        store_release(bell, 0)
        futex_wake(bell)


@njit(inline="always")
def ring(bells):
    """Wake every rank of these bells that sleeps; call after the stores they may wait for."""
    fence()
    for i in range(bells.size):
        wake(bells[i])


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
def interpret(code, call, place, flag, bells, slot, origin, pushed, cursor, at, peers, table):
    """Run until all streams are done (DONE), nothing moves (IDLE) or someone aborts (ABORTED).

    `place` [chunks, 2]: first byte and number of bytes in this rank's buffer;
    `flag` [connections, 2]: addresses of the data-ready and slot-free counters; `bells`: addresses
    of the other ranks' bells; `slot`, `origin`, `pushed` [connections]: address of the first slot,
    rank whose data it carries, rank whose chunk it may write (or -1); `cursor` [connections, 6];
    `at` [streams, 3]: phase, group, place in the code (state between calls of an unfinished run;
    all zero at first); `table`: scratch for as many addresses as ranks.

    With DIRECT all buffers lie in shared memory at `peers` [ranks], and no slot is used: a REDUCE
    reads the chunks of the ranks that the data comes from; a SEND over a connection that is
    `pushed` (its receiver copies) writes the receiver's chunk, and its COPY has nothing to do.
    """
    streams, phases = code[0], code[1]
    own = call[OWN]
    stride, num_chunks, slots = call[STRIDE], call[NUM_CHUNKS], call[SLOTS]
    groups = (num_chunks + stride - 1) // stride
    idle = 0
    sleeps = 0
    while True:
        moved = False
        left = False
        arrived = False
        for s in range(streams):
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
                chunk = group * stride + code[pc + 1]
                if chunk < num_chunks:
                    if op == WAIT:
                        if code[pc + 2]:
                            need = cursor[c, GRANTED] - slots + 1
                            if need > 0 and load_acquire(flag[c, 1]) < need:
                                break
                            cursor[c, GRANTED] += 1
                        else:
                            if load_acquire(flag[c, 0]) <= cursor[c, TAKEN]:
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
                        start, size = place[chunk, 0], place[chunk, 1]
                        if op == SEND:
                            src = own + start
                            if code[pc + 3] >= 0:
                                f = code[pc + 3]
                                src = slot[f] + cursor[f, READ] % slots * call[SLOT_BYTES]
                                cursor[f, READ] += 1
                            done = 0  # connections that share a slot are written once
                            for j in range(n):
                                d = code[pc + 5 + j]
                                dst = slot[d] + cursor[d, SENT] % slots * call[SLOT_BYTES]
                                cursor[d, SENT] += 1
                                if call[DIRECT]:
                                    dst = peers[pushed[d]] + start if pushed[d] >= 0 else done
                                if dst != done:
                                    move(dst, src, size, call[STREAMING])
                                done = dst
                            if call[STREAMING]:
                                fence()  # streaming stores are not ordered by a release store
                        else:
                            for j in range(n):
                                d = code[pc + 5 + j]
                                table[j] = (
                                    peers[origin[d]] + start
                                    if call[DIRECT]
                                    else slot[d] + cursor[d, READ] % slots * call[SLOT_BYTES]
                                )
                                cursor[d, READ] += 1
                            if op == COPY:
                                if not call[DIRECT]:
                                    move(own + start, table[0], size, call[STREAMING])
                                elif pushed[c] < 0:
                                    copy_bytes(own + start, table[0], size)
                            elif size:
                                divisor = float(call[DIVISOR]) if code[pc + 2] & 1 else 1.0
                                call_combine(
                                    call[COMBINE], own + start, table.ctypes.data, n,
                                    code[pc + 2] >> 1, size // call[ITEM], divisor,
                                )  # fmt: skip
                            final = op == COPY or (op == REDUCE and code[pc + 2] & 1)
                            if final and call[FINALS]:
                                if call[STREAMING]:
                                    fence()
                                counter = call[FINALS] + 8 * s
                                store_release(counter, load_acquire(counter) + 1)
                                arrived = True
                    moved = True
                pc += 5 + n
            at[s, 0], at[s, 1], at[s, 2] = phase, group, pc
            left = left or phase < phases
        if moved:  # after streaming stores, too: what follows is ordered behind them
            ring(bells)
        if arrived:
            wake(call[QUEUE])
        if not left:
            return DONE
        if moved:
            if idle > YIELDS:
                store_release(call[BELL], 0)
            idle, sleeps = 0, 0
            continue
        if load_acquire(call[ABORT]) != 0:
            return ABORTED
        idle += 1
        if idle <= YIELDS:
            sched_yield()
        elif idle == YIELDS + 1:
            store_release(call[BELL], 1)
            fence()  # and once more round all streams before sleeping
        else:
            futex_wait(call[BELL], 1, SLEEP_NS)
            store_release(call[BELL], 0)
            sleeps += 1
            if sleeps == SLEEPS:
                return IDLE
            idle = YIELDS // 2


@njit(nogil=True, cache=True)
def await_counters(counters, values, own_bell, abort, yields):
    """Wait until the int64 at each address of `counters` is at least that of `values`.

    `yields`: rounds before sleeping on `own_bell`. Returns DONE, IDLE (as `interpret`) or ABORTED.
    """
    idle = 0
    sleeps = 0
    i = 0
    while i < counters.size:
        if load_acquire(counters[i]) >= values[i]:
            i += 1
            continue
        if load_acquire(abort) != 0:
            return ABORTED
        idle += 1
        if idle <= yields:
            sched_yield()
        elif idle == yields + 1:
            store_release(own_bell, 1)
            fence()
        else:
            futex_wait(own_bell, 1, SLEEP_NS)
            store_release(own_bell, 0)
            sleeps += 1
            if sleeps == SLEEPS:
                return IDLE
            idle = yields // 2
    return DONE


@njit(nogil=True, cache=True)
def raise_counter(address, value, bells):
    """Store `value` with release and wake every rank in `bells` (addresses) that sleeps."""
    store_release(address, value)
    ring(bells)


@njit(nogil=True, cache=True)
def read_counter(address):
    """The int64 at `address`, with acquire."""
    return load_acquire(address)
