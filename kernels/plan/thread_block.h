// The state of a thread block, and its waits.
//
// Every wait ends: after each SPINS polls the thread looks at the clock and whether all must stop.
// It reports its step once after FAR_SPINS, and makes all stop when the timeout has passed.
#pragma once
#include "plan/launch.h"

// What an action moves: the operands, combined in order, go to all outputs. Lines of an operand
// carry its `use` as their flag, the number of times that the connection was used.
struct Task {
    u32 nbytes;  // of this block's slice; 0: nothing
    u32 n, m, sends;  // the first `sends` outputs go to peers
    const u8* in[MAX_PEERS + 3];  // [n], read up to a multiple of 3 (move.h: BATCH)
    u8* out[MAX_PEERS + 1];  // [m]
    u32 in_use[MAX_PEERS + 1], out_use[MAX_PEERS + 1];
};

struct ThreadBlock {  // in shared memory
    Task task;
    Track track;
    const int* code;
    const End* ends;
    Cursor* cursors;
    u32 part;  // which of the track's blocks this is
    u64 link_free;  // emulated links: when the latest send is over
    u32 finals;  // chunks completed
    u32 reported;  // a long wait was reported
    u32 timed_out;  // a wait was given up because its own timeout had passed
    int code_copy[CODE_WORDS];
    End end_copy[MAX_ENDS];
    Cursor cursor_copy[MAX_ENDS];
};

// Where a thread is in the code.
struct Position { int phase, group, at; };

__device__ __forceinline__ u32* report_of(const ThreadBlock& block) {
    return block.track.report + block.part * REPORT;
}

__device__ __forceinline__ void report(const ThreadBlock& block, State state, const Position& p) {
    u32* row = report_of(block);
    st_relaxed_sys(row + 1, p.phase);
    st_relaxed_sys(row + 2, p.group);
    st_relaxed_sys(row + 3, p.at);
    st_release_sys(row, state);
}

// Counts the polls of one wait; `more` is false once the wait must be given up.
struct Patience {
    u32 spins;
    u64 since;
    __device__ __forceinline__ bool more(const Launch& l, ThreadBlock& block, const Position& p) {
        spin_pause();
        if (++spins % SPINS) return true;
        if (stopped(l.stop, l.abort, spins)) {
            // a timeout, of this launch or an earlier one, is the cause and must stay
            if (ld_acquire_sys(report_of(block)) != TIMED_OUT) report(block, ABORTED, p);
            return false;
        }
        const u64 now = clock_ns();
        if (!since) since = now;
        if (spins == FAR_SPINS) {
            raise(&block.reported);
            report(block, WAITS, p);
        }
        if (now - since < l.timeout_ns) return true;
        raise(&block.timed_out);
        report(block, TIMED_OUT, p);  // before the abort word tells the host
        stop_all(l.stop, l.abort);
        return false;
    }
};

__device__ __forceinline__ bool await(const u8* counter, u32 value, const Launch& l,
                                      ThreadBlock& block, const Position& p) {
    Patience patience = {0, 0};
    while (int(ld_acquire_sys((const u32*)counter) - value) < 0)
        if (!patience.more(l, block, p)) return false;
    return true;
}
