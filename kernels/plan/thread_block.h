// The state of a thread block, and its waits.
//
// Every wait ends: after each SPINS polls it checks the abort word and the clock. It then reports
// the current step once, and sets the abort word when the timeout has passed.
#pragma once
#include "plan/launch.h"

enum { SPINS = 256 };

// A step that moves data: read `source`, or `value` if it is 0; REDUCE combines that with the
// slots; write the result to all of `out`, and to `own` if `keep`.
struct Task {
    u32 op, n, m, ahead, last;
    u32 keep;
    i64 nbytes;  // of this block's slice
    u8* own;
    const u8* value;  // the own chunk
    const u8* source;  // the slot to copy or to pass on, or 0
    u32 source_use;
    const u8* slot[MAX_PEERS];  // [n]
    u32 use[MAX_PEERS];  // the flag of the slot's lines: how often the connection was used
    u8* out[MAX_PEERS];  // [m]
    u32 out_use[MAX_PEERS];
};

struct ThreadBlock {  // in shared memory
    Task task;
    u32 failed;  // a wait was given up
    u32 timed_out;  // because its own timeout had passed
    int phase, group, pc;  // the current step of the first thread
    int length;  // words of code of the step (or two, if fused) that the block carries out; 0: none
    u32 finals;  // chunks completed
    u64 link_free;  // emulated links: when the latest send is over
    const int* code;
    Cursor* cursors;
    int code_copy[CODE_WORDS];
    Cursor cursor_copy[MAX_ENDS];
};

__device__ __forceinline__ void report(const Launch& l, const Track& track,
                                       const ThreadBlock& block, State state) {
    u32* row = track.report + blockIdx.x % l.width * REPORT;
    st_relaxed_sys(row + 1, block.phase);
    st_relaxed_sys(row + 2, block.group);
    st_relaxed_sys(row + 3, block.pc);
    st_release_sys(row, state);
}

// Report how the launch ended. The report of an earlier failure must stay, as its step is the
// cause; but another thread of this block may have overwritten TIMED_OUT with WAITS.
__device__ __forceinline__ void report_end(const Launch& l, const Track& track,
                                           const ThreadBlock& block) {
    if (!block.failed) {
        report(l, track, block, DONE);
        return;
    }
    const u32 before = ld_acquire_sys(track.report + blockIdx.x % l.width * REPORT);
    if (before != TIMED_OUT && before != ABORTED)
        report(l, track, block, block.timed_out ? TIMED_OUT : ABORTED);
}

// Counts the polls of one wait; `more` is false once the wait must be given up.
struct Patience {
    u32 spins;
    u64 since;
    __device__ __forceinline__ bool more(const Launch& l, const Track& track, ThreadBlock& block) {
        spin_pause();
        if (++spins % SPINS) return true;
        if (ld_acquire_sys(l.abort)) {
            raise(&block.failed);
            return false;
        }
        const u64 now = clock_ns();
        if (!since) {
            since = now;
            report(l, track, block, WAITS);
        }
        if (now - since < l.timeout_ns) return true;
        raise(&block.timed_out);
        raise(&block.failed);
        report(l, track, block, TIMED_OUT);  // before the abort word tells the host
        st_release_sys(l.abort, 1);
        return false;
    }
};

__device__ __forceinline__ bool await(const u8* counter, u32 value, const Launch& l,
                                      const Track& track, ThreadBlock& block) {
    Patience patience = {0, 0};
    while (int(ld_acquire_sys((const u32*)counter) - value) < 0)
        if (!patience.more(l, track, block)) return false;
    return true;
}
