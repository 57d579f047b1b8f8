// SEND, REDUCE and COPY: how a thread block moves its slice of a chunk, over plain slots or lines.
//
// Plain slots: coalesced 16-byte accesses, several in flight per thread. A SEND that pushes writes
// the receivers' buffers instead; the host has proved that no other step accesses that chunk before
// the counter is signalled.
// Lines (sync.h): 8 data bytes are two lines. The reader polls each line for the flag of this use,
// so it needs no counter and no barrier.
// Order of stores over lines: a result that overwrites a chunk must be stored after the partial sum
// that it was computed from. If a REDUCE and its SEND are two steps, two barriers and a release
// (the REDUCE's SIGNAL) lie between the store of the partial sum and the lines. If they are fused,
// a partial sum that will be overwritten is not stored (planning/dataflow.py: passed_on). Loads of
// the own chunk come first because the lines depend on them.
// Alignment: slots are aligned to 16 bytes. The caller's buffer may be aligned to its elements
// only, and is then accessed element by element.
// Bounds: no access goes beyond the slice in a buffer or beyond the block's part of a slot. The
// host chooses the number of chunks so that a slice has at most `stripe` bytes.
#pragma once
#include "gpu/element.h"
#include "plan/interpret.h"

// Packs in flight per thread: as many as fit the registers without spilling (checked by a test).
template <class T> struct Unroll { enum { count = sizeof(T) == 4 ? 4 : sizeof(T) == 1 ? 1 : 2 }; };
enum { CLEAN = (1 << 30) - 1 };

// Flags wrap after 2^32 uses, so a line that short messages never write could hold an old flag that
// is valid again. Whenever the count passes a multiple of 2^30, all lines of each slot are written.
__device__ __forceinline__ bool cleaning(const Launch& l, u32 use) {
    return (use & CLEAN) < l.slots;
}

// The data of a line; sets `lost` if the wait was given up, after which no result may be stored.
__device__ __forceinline__ u32 poll(const u8* at, u32 use, const Launch& l, const Track& track,
                                    ThreadBlock& block, bool& lost) {
    Patience patience = {0, 0};
    while (!lost) {
        const u64 line = ld_line((const u64*)at);
        if (u32(line >> 32) == use) return u32(line);
        lost = !patience.more(l, track, block);
    }
    return 0;
}

template <class T>
__device__ __forceinline__ Pack<T, 8> receive(const u8* slot, i64 at, u32 use, const Launch& l,
                                              const Track& track, ThreadBlock& block, bool& lost) {
    union { u32 w[2]; Pack<T, 8> v; } got;
    got.w[0] = poll(slot + 2 * at, use, l, track, block, lost);
    got.w[1] = poll(slot + 2 * at + 8, use, l, track, block, lost);
    return got.v;
}

template <class T, class Op>
__device__ __forceinline__ void move_lines(const Launch& l, const Track& track,
                                           ThreadBlock& block) {
    const Task& t = block.task;
    i64 stop = t.nbytes;
    for (u32 j = 0; j < t.m; ++j)
        if (cleaning(l, t.out_use[j])) stop = l.stripe;
    bool lost = false;
    for (i64 at = 8 * i64(threadIdx.x); at < stop; at += 8 * i64(blockDim.x)) {
        const i64 have = t.nbytes - at;
        Pack<T, 8> v = {};
        if (have > 0) {
            v = t.source ? receive<T>(t.source, at, t.source_use, l, track, block, lost)
                         : load<T, 8>(t.value + at, have);
            if (t.op == REDUCE) {
                const u32 head = t.ahead ? 1 : 0;
                Total<T, 8> total =
                    widen(head ? receive<T>(t.slot[0], at, t.use[0], l, track, block, lost) : v);
                for (u32 j = head; j <= t.n; ++j) {
                    if (head && j == t.ahead) combine<Op>(total, v);
                    if (j < t.n)
                        combine<Op>(total,
                                    receive<T>(t.slot[j], at, t.use[j], l, track, block, lost));
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

// Move COUNT packs of one thread, `step` bytes apart.
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
__device__ __forceinline__ void carry_out(const Launch& l, const Track& track, ThreadBlock& block) {
    if (l.low_latency) {
        move_lines<T, Op>(l, track, block);
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
