// The parts of an action that do not move data: waits, addresses and signals, each by a thread of
// its own, so that their latencies overlap.
//
// Memory order: after a block has written its data, there is a barrier, and then a thread stores
// the counter with release. The receiver's thread loads the counter with acquire, and a barrier
// precedes its block's reads. Releases are cumulative over the barrier (PTX memory model, causality
// order), so this covers the data of all threads. Counters only grow, and wrap: they are compared
// by their signed difference, which is correct while the two ends differ by less than 2^31; only
// calls of zero bytes, which are not launched, could exceed that. Calls reset nothing.
// Over lines the flags say that a slot has been read, so no fence is needed to free it. Only a
// partial sum that stays in the own chunk must be stored first (move.h).
// Cursors: `waited` and `moved` change before an action's first barrier, `signalled` behind its
// second one, so no two threads access a field at the same time.
#pragma once
#include "plan/thread_block.h"

// The index of a chunk in the message.
__device__ __forceinline__ i64 chunk_of(const Launch& l, const Position& p, int chunk) {
    return i64(p.group) * l.stride + chunk;
}

__device__ __forceinline__ u8* slot_of(const Launch& l, const ThreadBlock& block, const End& end,
                                       const Cursor& at) {
    const u32 bytes = l.stripe << l.low_latency;  // a line is twice as large as its data
    return end.slot + u64(at.slot * l.width + block.part) * bytes;
}

__device__ __forceinline__ void advance(const Launch& l, Cursor& at) {
    ++at.moved;
    at.slot = at.slot + 1 == l.slots ? 0 : at.slot + 1;
}

// Wait until an emulated link has transmitted what was sent.
__device__ __forceinline__ bool held(u64 until, const Launch& l, ThreadBlock& block,
                                     const Position& p) {
    Patience patience = {0, 0};
    while (clock_ns() < until)
        if (!patience.more(l, block, p)) return false;
    return true;
}

// Wait for all counters of an action. Over lines a wait for data only counts, as the reader polls
// each line. False if a wait was given up.
__device__ __forceinline__ bool await_all(const Launch& l, ThreadBlock& block, Position p) {
    const u32 mine = block.part * LINE;
    const int waits = block.code[p.at + NUM_WAITS], first = p.at + HEADER;
    for (int i = threadIdx.x; i < waits; i += blockDim.x) {
        p.at = first + 2 * i;
        if (chunk_of(l, p, block.code[p.at]) >= l.num_chunks) continue;
        const int word = block.code[p.at + 1];
        const End& end = block.ends[word >> 2];
        const u32 count = ++block.cursors[word >> 2].waited;
        if (word & SENDER) {
            if (!await(end.free + mine, count - l.slots, l, block, p)) return false;
        } else if (!(word & DATA && l.low_latency)) {
            if (!await(end.ready + mine, count, l, block, p)) return false;
        }
    }
    return true;
}

// Find the addresses of an action's operands and outputs: by the second half of the threads, while
// the first ones wait.
__device__ __forceinline__ void prepare(const Launch& l, ThreadBlock& block, const Position& p) {
    const int* action = block.code + p.at;
    const int n = action[NUM_OPERANDS], flags = action[FLAGS];
    const bool pushed = l.direct && flags & PUSHED, pushes = l.direct && flags & PUSHES;
    const int sends = action[NUM_OUTPUTS] - (flags & KEEPS ? 1 : 0);
    const int m = sends + (flags & KEEPS && !pushed ? 1 : 0);
    const int* ends = action + HEADER + 2 * action[NUM_WAITS];
    const i64 chunk = chunk_of(l, p, action[CHUNK]);
    const bool moves = n && chunk < l.num_chunks;
    Task& t = block.task;
    const Track& track = block.track;
    const u32 half = blockDim.x / 2;
    const int first = threadIdx.x < half ? threadIdx.x + blockDim.x - half : threadIdx.x - half;
    if (first == 0) t.nbytes = t.n = t.m = t.sends = 0;
    if (!moves || first >= n + m) return;
    const u32 size = u32(track.chunks[2 * chunk + 1]);  // it fits a slot
    const u32 slice = (size + 16 * l.width - 1) / (16 * l.width) * 16, start = block.part * slice;
    const i64 at = track.chunks[2 * chunk] + start;
    if (first == 0) {
        t.n = n, t.m = m, t.sends = sends;
        t.nbytes = start >= size || !m ? 0 : size - start < slice ? size - start : slice;
    }
    for (int j = first; j < n + m; j += blockDim.x) {
        const int number = ends[j];
        const bool reads = j < n;
        u8* address = l.buffers[track.rank] + at;
        u32 use = 0;
        if (number >= 0) {
            Cursor& cursor = block.cursors[number];
            const End& end = block.ends[number];
            if (reads ? !pushed : !pushes) address = slot_of(l, block, end, cursor);
            else if (!reads) address = l.buffers[end.peer] + at;
            advance(l, cursor);
            use = cursor.moved;
        }
        if (reads) {
            t.in[j] = number == INPUT ? l.inputs[track.rank] + at : address;
            t.in_use[j] = use;
        } else {
            t.out[j - n] = address;
            t.out_use[j - n] = use;
        }
    }
}

// Raise all counters of an action. False if an emulated link's time was given up.
__device__ __forceinline__ bool signal_all(const Launch& l, ThreadBlock& block, Position p) {
    const int* action = block.code + p.at;
    const int first = p.at + action[LENGTH] - 2 * action[NUM_SIGNALS];
    const u32 mine = block.part * LINE;
    const bool final = l.finals && action[FLAGS] & COMPLETES &&
                       chunk_of(l, p, action[CHUNK]) < l.num_chunks;
    const int signals = action[NUM_SIGNALS];
    const bool ordered = !l.low_latency || (action[FLAGS] & (KEEPS | COMPLETES)) == KEEPS;
    for (int i = threadIdx.x; i < signals + final; i += blockDim.x) {
        if (i == signals) {
            st_release_sys(l.finals + blockIdx.x, ++block.finals);
            continue;
        }
        p.at = first + 2 * i;
        if (chunk_of(l, p, block.code[p.at]) >= l.num_chunks) continue;
        const int word = block.code[p.at + 1];
        const End& end = block.ends[word >> 2];
        const u32 count = ++block.cursors[word >> 2].signalled;
        if (!(word & SENDER)) {
            if (ordered) st_release_sys((u32*)(end.free + mine), count);
            else st_relaxed_sys((u32*)(end.free + mine), count);
        } else if (!(word & DATA && l.low_latency)) {
            if (word & DATA && l.ps_per_byte && !held(block.link_free, l, block, p)) return false;
            st_release_sys((u32*)(end.ready + mine), count);
        }
    }
    return true;
}
