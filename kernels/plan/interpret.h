// The control flow of a block: one thread walks the track's steps, waits and signals, and stops at
// each step that moves data, which the whole block then carries out (move.h).
//
// Memory order: a block's data is written before a barrier, behind which its first thread stores
// the counter with release; the receiver's first thread loads it with acquire, and a barrier stands
// before its block's reads. Releases are cumulative over the barrier (PTX memory model, causality
// order), so all threads' data is covered. Counters only grow and wrap: they are compared by their
// signed difference, which is right as long as the ends are less than 2^31 apart; only calls of no
// bytes, which need not be launched, could take them there. Nothing is reset between calls.
#pragma once
#include "plan/thread_block.h"

__device__ __forceinline__ u8* slot_of(const Launch& l, const End& end, const Cursor& at) {
    const u64 bytes = u64(l.stripe) << l.low_latency;  // a line is twice its data
    return end.slot + (u64(at.slot) * l.width + blockIdx.x % l.width) * bytes;
}

__device__ __forceinline__ void advance(const Launch& l, Cursor& at) {
    ++at.moved;
    at.slot = at.slot + 1 == l.slots ? 0 : at.slot + 1;
}

// An emulated link holds what was sent until its time is over.
__device__ __forceinline__ bool held(const Launch& l, const Group& g, ThreadBlock& block) {
    Patience patience = {0, 0};
    while (l.ps_per_byte && clock_ns() < block.link_free)
        if (!patience.more(l, g, block)) return false;
    return true;
}

// WAIT and SIGNAL. With lines a wait for data is the receiver's poll of each line.
__device__ __forceinline__ bool synchronise(const Launch& l, const Group& g, ThreadBlock& block,
                                            const int* step) {
    const End& end = g.ends[step[5]];
    Cursor& at = block.cursors[step[5]];
    const u64 line = u64(blockIdx.x % l.width) * LINE;
    const bool sender = step[2] & SENDER, data = step[2] & DATA;
    const bool counted = !(data && l.low_latency);
    if (step[0] == WAIT) {
        ++at.waited;
        if (sender) return await(end.free + line, at.waited - l.slots, l, g, block);
        return !counted || await(end.ready + line, at.waited, l, g, block);
    }
    ++at.signalled;
    if (!sender) {
        st_release_sys((u32*)(end.free + line), at.signalled);
        return true;
    }
    if (data && !held(l, g, block)) return false;
    if (counted) st_release_sys((u32*)(end.ready + line), at.signalled);
    return true;
}

// SEND, REDUCE and COPY: what the block is to do. Returns the words of code that it stands for.
__device__ __forceinline__ int prepare(const Launch& l, const Group& g, ThreadBlock& block,
                                       const int* step, int chunk) {
    Task& t = block.task;
    const i64 size = g.place[2 * chunk + 1];
    const i64 slice = (size + 16 * l.width - 1) / (16 * l.width) * 16;
    const i64 start = i64(blockIdx.x % l.width) * slice;
    const i64 at = g.place[2 * chunk] + start;
    const bool reduces = step[0] == REDUCE;
    // over lines an emulated link's time passes before the SEND: so behind the data, apart from it
    // (what is stored and overwritten is then kept in order by that time alone)
    const bool passes_on = step[0] != SEND && (step[2] & PASSES_ON) &&
                           !(l.low_latency && l.ps_per_byte);
    const int* send = step[0] == SEND ? step : passes_on ? step + 5 + step[4] : 0;
    t.op = step[0];
    t.n = reduces ? step[4] : 0;
    t.m = send ? send[4] : 0;
    t.last = reduces && (step[2] & LAST);
    t.ahead = reduces ? step[2] >> AHEAD : 0;
    t.keep = step[0] != SEND && !(passes_on && (step[2] & DROPS));
    t.nbytes = start >= size ? 0 : (size - start < slice ? size - start : slice);
    t.own = l.buffers[g.rank] + at;
    t.value = step[3] == INPUT ? l.inputs[g.rank] + at : t.own;
    t.source = 0;
    const int from = step[0] == COPY ? step[5] : step[3];
    if (from >= 0) {
        Cursor& end = block.cursors[from];
        t.source = slot_of(l, g.ends[from], end);
        t.source_use = end.moved + 1;
        advance(l, end);
    }
    if (step[0] == COPY && l.direct && (step[2] & PUSHES)) {  // its sender has written it here
        t.source = 0;
        t.keep = 0;
        if (!t.m) t.nbytes = 0;
    }
    for (u32 j = 0; j < t.n; ++j) {
        Cursor& end = block.cursors[step[5 + j]];
        t.slot[j] = slot_of(l, g.ends[step[5 + j]], end);
        t.use[j] = end.moved + 1;
        advance(l, end);
    }
    for (u32 j = 0; j < t.m; ++j) {
        const End& end = g.ends[send[5 + j]];
        Cursor& to = block.cursors[send[5 + j]];
        t.out[j] = l.direct && (send[2] & PUSHES) ? l.buffers[end.peer] + at : slot_of(l, end, to);
        t.out_use[j] = to.moved + 1;
        advance(l, to);
    }
    if (t.m && l.ps_per_byte) {
        const u64 now = clock_ns();
        if (block.link_free < now) block.link_free = now;
        block.link_free += u64(t.nbytes) * l.width * l.ps_per_byte / 1000;
    }
    return 5 + step[4] + (passes_on ? 5 + send[4] : 0);
}

// The first thread's part: on to the next step that moves data, or to the end.
__device__ __forceinline__ void next(const Launch& l, const Group& g, ThreadBlock& block) {
    const int* code = block.code;
    const int groups = (l.num_chunks + l.stride - 1) / l.stride;
    if (block.failed) {  // while the block moved data: pc stays where that was
        block.task.op = STOP;
        return;
    }
    const Task& done = block.task;
    if (block.length && l.finals && (done.op == COPY || (done.op == REDUCE && done.last)))
        st_release_sys(l.finals + blockIdx.x, ++block.finals);  // behind the block's barrier
    block.pc += block.length;
    block.length = 0;
    while (block.phase < code[0]) {
        const int first = code[1 + block.phase], stop = code[2 + block.phase];
        if (first == stop || block.group == groups) {
            ++block.phase;
            block.group = block.pc = 0;
            continue;
        }
        if (!block.pc) block.pc = first;
        if (block.pc == stop) {
            ++block.group;
            block.pc = 0;
            continue;
        }
        const int* step = code + block.pc;
        const i64 chunk = i64(block.group) * l.stride + step[1];
        if (chunk < l.num_chunks) {
            if (step[0] < SIGNAL) {
                const int length = prepare(l, g, block, step, int(chunk));
                // lines are seen as soon as they are written: their time passes before
                if (l.low_latency && block.task.m && !held(l, g, block)) break;
                block.length = length;
                return;
            }
            if (!synchronise(l, g, block, step)) break;
        }
        block.pc += 5 + step[4];
    }
    block.task.op = STOP;
}
