// How a thread block moves its slice of a chunk, over plain slots or lines.
//
// Plain slots: 16-byte accesses; each thread loads several packs of up to three operands, or two
// packs of each four operands, before it uses the first. An action that pushes writes the receivers' buffers instead of slots; the host
// has proved that nothing else accesses that chunk before the counter is signalled.
// Lines (sync.h): 8 data bytes are two lines. The reader polls the lines of several operands
// together until all have the flags of this use, so it needs no counter and no barrier.
// Order of stores over lines: a result that overwrites a chunk must be stored after the partial sum
// that it was computed from. If a REDUCE and its SEND are two actions, the REDUCE's signal lies
// between the store of the partial sum and the lines: on every GPU a release at system scope waits
// until the block's earlier stores are performed. If they are fused, a partial sum that will be
// overwritten is not stored (planning/dataflow.py: passed_on). Loads of the own chunk come first
// because the lines depend on them.
// Alignment: slots are aligned to 16 bytes. The caller's buffer may be aligned to its elements
// only, and is then accessed element by element.
// Bounds: no access goes beyond the slice in a buffer or beyond the block's part of a slot. The
// host chooses the number of chunks so that a slice has at most `stripe` bytes.
#pragma once
#include "gpu/element.h"
#include "plan/interpret.h"

enum {
    CLEAN = (1 << 30) - 1,
    POLLED = 3,  // operands over lines that a thread polls together; more would spill
};

// Packs per thread and operand: as many as registers allow without spills (a test checks both).
// Bytes take a register each while they are combined.
template <class T, int N> struct Unroll {
    enum {
        small = sizeof(T) == 1 ? 4 - N : sizeof(T) == 8 ? 5 - N : 6 - N,  // N: 2 or 3
        count = N == 1 ? 8 : small,
    };
};

// Flags wrap after 2^32 uses, so a line that short messages never write could hold an old flag that
// is valid again. Whenever the count passes a multiple of 2^30, all lines of each slot are written.
__device__ __forceinline__ bool cleaning(const Launch& l, u32 use) {
    return (use & CLEAN) < l.slots;
}

// Receive 8 bytes of each of the operands from `base` on. False if the wait was given up, after
// which no result may be stored.
template <class T>
__device__ __forceinline__ bool receive(u64 (&v)[POLLED], const int* ends, u32 base, u32 at,
                                        const Launch& l, ThreadBlock& block, Position p) {
    const Task& t = block.task;
    Patience patience = {0, 0};
    const u8* from[POLLED];
    Lines pair[POLLED];
    u32 use[POLLED];
    bool polls[POLLED];
#pragma unroll
    for (u32 b = 0; b < POLLED; ++b) {
        polls[b] = base + b < t.n && ends[base + b] >= 0;
        from[b] = t.in[base + b] + 2 * at;
        use[b] = polls[b] ? t.in_use[base + b] : 0;
        pair[b] = {0, 0};  // as if lines with the flag 0 had come
        if (base + b < t.n && !polls[b]) {  // the own chunk
            const u64 own = load<T, 8>(t.in[base + b] + at, t.nbytes - at);
            pair[b] = {u32(own), own >> 32};
        }
    }
    for (;;) {
#pragma unroll
        for (u32 b = 0; b < POLLED; ++b) ld_lines(pair[b], from[b], polls[b]);
        u32 missing[POLLED], any = 0;
#pragma unroll
        for (u32 b = 0; b < POLLED; ++b) {
            missing[b] = (u32(pair[b].first >> 32) ^ use[b]) | (u32(pair[b].second >> 32) ^ use[b]);
            any |= missing[b];
        }
        if (!any) break;
        p.at = int(ends - block.code) + base;
#pragma unroll
        for (u32 b = POLLED; b-- > 0;)
            if (missing[b]) p.at = int(ends - block.code) + base + b;
        if (!patience.more(l, block, p)) return false;
    }
#pragma unroll
    for (u32 b = 0; b < POLLED; ++b) v[b] = u32(pair[b].first) | pair[b].second << 32;
    return true;
}

template <class T, class Op>
__device__ __forceinline__ bool move_lines(const Launch& l, ThreadBlock& block, const Position& p) {
    const Task& t = block.task;
    const int* action = block.code + p.at;
    const int* ends = action + HEADER + 2 * action[NUM_WAITS];
    const u32 divisor = action[FLAGS] & AVERAGES ? l.divisor : 0;
    const u32 sends = t.sends;
    u32 stop = t.nbytes;
    for (u32 j = 0; j < sends; ++j)
        if (cleaning(l, t.out_use[j])) stop = l.stripe;
    bool held_up = sends && l.ps_per_byte;  // an emulated link's time passes before lines appear
    u8* const out = t.out[0];  // known before the lines come
    const u64 flag = u64(t.out_use[0]) << 32;
    for (u32 at = 8 * threadIdx.x; at < stop; at += 8 * BLOCK_SIZE) {
        const bool have = at < t.nbytes;
        Total<T, 8> total = {};
        u64 result = 0;
        for (u32 base = 0; base < t.n && have; base += POLLED) {
            u64 v[POLLED] = {};
            if (!receive<T>(v, ends, base, at, l, block, p)) return false;
#pragma unroll
            for (u32 b = 0; b < POLLED; ++b)
                if (base + b < t.n) {
                    if (base + b) combine<Op>(total, v[b]);
                    else total = widen<T, 8>(result = v[b]);
                }
        }
        if (t.n > 1) result = narrow<T, 8>(total, divisor);
        if (held_up) {
            const u64 sending = u64(t.nbytes) * l.width * l.ps_per_byte / 1000;  // ns
            if (!held(clock_ns() + sending, l, block, p)) return false;
        }
        held_up = false;
        const Lines lines = {u32(result), result >> 32};
        if (sends) st_lines(out + 2 * at, {flag | lines.first, flag | lines.second});
        for (u32 j = 1; j < sends; ++j) {
            const u64 flag = u64(t.out_use[j]) << 32;
            st_lines(t.out[j] + 2 * at, {flag | lines.first, flag | lines.second});
        }
        if (sends < t.m && have) store<T, 8>(t.out[sends] + at, t.nbytes - at, result);
    }
    return true;
}

// Move whole packs of N aligned operands.
template <class T, class Op, int N>
__device__ __forceinline__ void move_packs(const Task& t, u32 whole, u32 divisor) {
    enum { COUNT = Unroll<T, N>::count };
    const u32 step = 16 * BLOCK_SIZE;
#pragma unroll 1
    for (u32 at = 16 * threadIdx.x; at < whole; at += COUNT * step) {
        uint4 v[N][COUNT] = {};
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const u8* from = t.in[k] + at;
#pragma unroll
            for (int u = 0; u < COUNT; ++u)
                if (u * step < whole - at) v[k][u] = load_word<16>(from + u * step);
        }
        if (N > 1)
#pragma unroll
            for (int u = 0; u < COUNT; ++u) {
                Total<T, 16> total = widen<T, 16>(v[0][u]);
#pragma unroll
                for (int k = 1; k < N; ++k) combine<Op>(total, v[k][u]);
                v[0][u] = narrow<T, 16>(total, divisor);
            }
#pragma unroll 1
        for (u32 j = 0; j < t.m; ++j) {
            u8* to = t.out[j] + at;
#pragma unroll
            for (int u = 0; u < COUNT; ++u)
                if (u * step < whole - at) store_word<16>(to + u * step, v[0][u]);
        }
    }
}

// Move whole packs of any number of aligned operands.
template <class T, class Op>
__device__ __forceinline__ void move_many(const Task& t, u32 whole, u32 divisor) {
    enum { BATCH = 4, COUNT = sizeof(T) == 1 ? 1 : 2 };
    const u32 step = 16 * BLOCK_SIZE;
#pragma unroll 1
    for (u32 at = 16 * threadIdx.x; at < whole; at += COUNT * step) {
        Total<T, 16> total[COUNT] = {};
#pragma unroll 1
        for (u32 base = 0; base < t.n; base += BATCH) {
            uint4 v[BATCH][COUNT] = {};
#pragma unroll
            for (u32 b = 0; b < BATCH; ++b)
#pragma unroll
                for (int u = 0; u < COUNT; ++u)
                    if (base + b < t.n && u * step < whole - at)
                        v[b][u] = load_word<16>(t.in[base + b] + at + u * step);
#pragma unroll
            for (u32 b = 0; b < BATCH; ++b)
#pragma unroll
                for (int u = 0; u < COUNT; ++u) {
                    if (base + b == 0) total[u] = widen<T, 16>(v[b][u]);
                    else if (base + b < t.n) combine<Op>(total[u], v[b][u]);
                }
        }
#pragma unroll
        for (int u = 0; u < COUNT; ++u) {
            const uint4 result = narrow<T, 16>(total[u], divisor);
            for (u32 j = 0; j < t.m && u * step < whole - at; ++j)
                store_word<16>(t.out[j] + at + u * step, result);
        }
    }
}

// Move from byte `from` on with any number of operands and any alignment.
template <class T, class Op>
__device__ __forceinline__ void move_any(const Task& t, u32 from, u32 divisor) {
    for (u32 at = from + 16 * threadIdx.x; at < t.nbytes; at += 16 * BLOCK_SIZE) {
        const u32 have = t.nbytes - at;
        uint4 v = load<T, 16>(t.in[0] + at, have);
        if (t.n > 1) {
            Total<T, 16> total = widen<T, 16>(v);
            for (u32 k = 1; k < t.n; ++k) combine<Op>(total, load<T, 16>(t.in[k] + at, have));
            v = narrow<T, 16>(total, divisor);
        }
        for (u32 j = 0; j < t.m; ++j) store<T, 16>(t.out[j] + at, have, v);
    }
}

template <class T, class Op>
__device__ __forceinline__ void move_plain(const Launch& l, ThreadBlock& block, u32 flags) {
    const Task& t = block.task;
    const u32 divisor = flags & AVERAGES ? l.divisor : 0;
    if (threadIdx.x == 0 && l.ps_per_byte && t.sends) {
        const u64 now = clock_ns();
        if (block.link_free < now) block.link_free = now;
        block.link_free += u64(t.nbytes) * l.width * l.ps_per_byte / 1000;
    }
    u64 all = 0;
    for (u32 k = 0; k < t.n; ++k) all |= u64(t.in[k]);
    for (u32 j = 0; j < t.m; ++j) all |= u64(t.out[j]);
    const u32 whole = all & 15 ? 0 : t.nbytes & ~15u;
    if (t.n == 1) move_packs<T, Op, 1>(t, whole, divisor);
    else if (t.n == 2) move_packs<T, Op, 2>(t, whole, divisor);
    else if (t.n == 3) move_packs<T, Op, 3>(t, whole, divisor);
    else move_many<T, Op>(t, whole, divisor);
    move_any<T, Op>(t, whole, divisor);
}
