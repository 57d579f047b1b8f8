// What a block does with its slice of a chunk: SEND, REDUCE and COPY, over plain slots or lines.
//
// Plain slots: 16-byte accesses, neighbouring threads side by side, several in flight a thread.
// A SEND that pushes writes the receivers' buffers instead, where the host has proved that nobody
// touches the chunk there before the counter that follows tells of it.
// Lines (see sync.h): 8 bytes of data as two lines; a reader polls each line for the number of this
// use, so it needs no counter and no barrier.
// A result over lines that overwrites a chunk must be stored behind the store of what it was made
// of. Where a REDUCE and its SEND are two steps, two barriers and a release (the REDUCE's SIGNAL)
// stand between that store and the lines. Where they are one, nothing that will be overwritten is
// stored (touches.py: passed_on). A load of the own chunk comes before, as the lines depend on it.
// Slots are 16-byte aligned; the caller's buffer may be aligned to its elements only, and is then
// accessed element by element.
// Bounds: no access to a buffer goes beyond the slice, and none to a slot beyond the block's part,
// as a slice has at most `stripe` bytes (the host picks the number of chunks so).
#pragma once
#include "gpu/element.h"
#include "plan/interpret.h"

// Packs of a thread in flight: as many as fit the registers with no spill (a test looks).
template <class T> struct Unroll { enum { count = sizeof(T) == 4 ? 4 : sizeof(T) == 1 ? 1 : 2 }; };
enum { CLEAN = (1 << 30) - 1 };  // uses after which a slot's lines are all written anew

// Lines that shorter messages never write would keep flags of 2^32 uses ago: so all lines of each
// slot are written when the count passes a multiple of 2^30.
__device__ __forceinline__ bool cleaning(const Launch& l, u32 use) {
    return (use & CLEAN) < l.slots;
}

// Nothing that is read after `lost` may be stored: it is not what was sent.
__device__ __forceinline__ u32 poll(const u8* at, u32 use, const Launch& l, const Group& g,
                                    ThreadBlock& block, bool& lost) {
    Patience patience = {0, 0};
    while (!lost) {
        const u64 line = ld_line((const u64*)at);
        if (u32(line >> 32) == use) return u32(line);
        lost = !patience.more(l, g, block);
    }
    return 0;
}

template <class T>
__device__ __forceinline__ Pack<T, 8> receive(const u8* slot, i64 at, u32 use, const Launch& l,
                                              const Group& g, ThreadBlock& block, bool& lost) {
    union { u32 w[2]; Pack<T, 8> v; } got;
    got.w[0] = poll(slot + 2 * at, use, l, g, block, lost);
    got.w[1] = poll(slot + 2 * at + 8, use, l, g, block, lost);
    return got.v;
}

template <class T, class Op>
__device__ __forceinline__ void move_lines(const Launch& l, const Group& g, ThreadBlock& block) {
    const Task& t = block.task;
    i64 stop = t.nbytes;
    for (u32 j = 0; j < t.m; ++j)
        if (cleaning(l, t.out_use[j])) stop = l.stripe;
    bool lost = false;
    for (i64 at = 8 * i64(threadIdx.x); at < stop; at += 8 * i64(blockDim.x)) {
        const i64 have = t.nbytes - at;
        Pack<T, 8> v = {};
        if (have > 0) {
            v = t.source ? receive<T>(t.source, at, t.source_use, l, g, block, lost)
                         : load<T, 8>(t.value + at, have);
            if (t.op == REDUCE) {
                const u32 head = t.ahead ? 1 : 0;
                Total<T, 8> total =
                    widen(head ? receive<T>(t.slot[0], at, t.use[0], l, g, block, lost) : v);
                for (u32 j = head; j <= t.n; ++j) {
                    if (head && j == t.ahead) combine<Op>(total, v);
                    if (j < t.n)
                        combine<Op>(total, receive<T>(t.slot[j], at, t.use[j], l, g, block, lost));
                }
                v = narrow<T, 8>(total, t.last ? l.divisor : 0);
            }
            if (lost) return;
        }
        if (t.m) {
            union { Pack<T, 8> v; u32 w[2]; } put;
            put.v = v;
            for (u32 j = 0; j < t.m; ++j) {
                const u64 flag = u64(t.out_use[j]) << 32;
                st_line((u64*)(t.out[j] + 2 * at), flag | put.w[0]);
                st_line((u64*)(t.out[j] + 2 * at + 8), flag | put.w[1]);
            }
        }
        if (t.keep) store<T, 8>(t.own + at, have, v);
    }
}

// COUNT packs of one thread, `step` bytes apart, of which the first `have` bytes count.
template <class T, class Op, int COUNT>
__device__ __forceinline__ void move_packs(const Task& t, u32 divisor, i64 at, i64 step) {
    Pack<T, 16> v[COUNT];
    const u8* from = t.source ? t.source : t.value;
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
        v[u] = load<T, 16>(from + at + u * step, t.nbytes - at - u * step);
    if (t.op == REDUCE) {
        const u32 head = t.ahead ? 1 : 0;
        Total<T, 16> total[COUNT];
#pragma unroll
        for (int u = 0; u < COUNT; ++u)
            total[u] = widen(head ? load<T, 16>(t.slot[0] + at + u * step,
                                                t.nbytes - at - u * step) : v[u]);
        for (u32 j = head; j <= t.n; ++j) {
            if (head && j == t.ahead)
#pragma unroll
                for (int u = 0; u < COUNT; ++u) combine<Op>(total[u], v[u]);
            if (j < t.n)
#pragma unroll
                for (int u = 0; u < COUNT; ++u)
                    combine<Op>(total[u], load<T, 16>(t.slot[j] + at + u * step,
                                                      t.nbytes - at - u * step));
        }
#pragma unroll
        for (int u = 0; u < COUNT; ++u) v[u] = narrow<T, 16>(total[u], divisor);
    }
    for (u32 j = 0; j < t.m; ++j)
#pragma unroll
        for (int u = 0; u < COUNT; ++u)
            store<T, 16>(t.out[j] + at + u * step, t.nbytes - at - u * step, v[u]);
    if (!t.keep) return;
#pragma unroll
    for (int u = 0; u < COUNT; ++u)
        store<T, 16>(t.own + at + u * step, t.nbytes - at - u * step, v[u]);
}

template <class T, class Op>
__device__ __forceinline__ void carry_out(const Launch& l, const Group& g, ThreadBlock& block) {
    if (l.low_latency) {
        move_lines<T, Op>(l, g, block);
        return;
    }
    const Task& t = block.task;
    const u32 divisor = t.last ? l.divisor : 0;
    const i64 step = 16 * i64(blockDim.x);
    i64 at = 16 * i64(threadIdx.x);
    const int count = Unroll<T>::count;
    for (; at + (count - 1) * step + 16 <= t.nbytes; at += count * step)
        move_packs<T, Op, count>(t, divisor, at, step);
    for (; at < t.nbytes; at += step) move_packs<T, Op, 1>(t, divisor, at, step);
}
