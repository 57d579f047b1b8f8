// A block, which is one block of one track: its state, and how it waits.
//
// No wait is without end: each looks at the abort word and the clock every SPINS tries, writes
// where it stands into the report once it does, and raises the abort word when its time is over.
#pragma once
#include "plan/launch.h"

enum { SPINS = 256 };

struct Task {  // from = source, or value; REDUCE: combined with slots; then to `out`, and to `own`
    u32 op, n, m, ahead, last;
    u32 keep;  // the result goes to `own`
    i64 nbytes;  // of this block's slice
    u8* own;
    const u8* value;  // the own chunk
    const u8* source;  // the slot that is copied or passed on, or 0
    u32 source_use;
    const u8* slot[MOST_PEERS];  // [n]
    u32 use[MOST_PEERS];  // the low-latency flag: the connection's number of this use
    u8* out[MOST_PEERS];  // [m]
    u32 out_use[MOST_PEERS];
};

struct ThreadBlock {  // in shared memory
    Task task;
    u32 failed;  // a wait was given up
    u32 timed_out;  // and that was its own deadline
    int phase, group, pc;  // where the first thread stands
    int length;  // of the one or two steps there that the block has carried out; 0: none
    u32 finals;  // chunks made final
    u64 link_free;  // emulated links: when the last send's time is over
    const int* code;
    Cursor* cursors;
    int code_copy[CODE_WORDS];
    Cursor cursor_copy[MOST_ENDS];
};

__device__ __forceinline__ void report(const Launch& l, const Group& g, const ThreadBlock& block,
                                       State state) {
    u32* row = g.report + blockIdx.x % l.width * REPORT;
    st_relaxed_sys(row + 1, block.phase);
    st_relaxed_sys(row + 2, block.group);
    st_relaxed_sys(row + 3, block.pc);
    st_release_sys(row, state);
}

// How the launch ended. One that finds everybody stopped must not hide where an earlier one stood.
// A thread of this block that began to wait meanwhile may have put WAITS over a deadline.
__device__ __forceinline__ void report_end(const Launch& l, const Group& g, const ThreadBlock& block) {
    if (!block.failed) {
        report(l, g, block, DONE);
        return;
    }
    const u32 before = ld_acquire_sys(g.report + blockIdx.x % l.width * REPORT);
    if (before != TIMED_OUT && before != ABORTED)
        report(l, g, block, block.timed_out ? TIMED_OUT : ABORTED);
}

// Counts the tries of one wait; false once it must be given up.
struct Patience {
    u32 spins;
    u64 since;
    __device__ __forceinline__ bool more(const Launch& l, const Group& g, ThreadBlock& block) {
        spin_pause();
        if (++spins % SPINS) return true;
        if (ld_acquire_sys(l.abort)) {
            raise(&block.failed);
            return false;
        }
        const u64 now = clock_ns();
        if (!since) {
            since = now;
            report(l, g, block, WAITS);
        }
        if (now - since < l.timeout_ns) return true;
        raise(&block.timed_out);
        raise(&block.failed);
        report(l, g, block, TIMED_OUT);  // before the host can see that anybody has stopped
        st_release_sys(l.abort, 1);
        return false;
    }
};

__device__ __forceinline__ bool await(const u8* counter, u32 value, const Launch& l,
                                      const Group& g, ThreadBlock& block) {
    Patience patience = {0, 0};
    while (int(ld_acquire_sys((const u32*)counter) - value) < 0)
        if (!patience.more(l, g, block)) return false;
    return true;
}
