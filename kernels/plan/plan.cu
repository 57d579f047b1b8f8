// The plan interpreter: one launch runs a whole collective without the host (C-Cube, sections III
// and IV-B). Compiled for each (ELEMENT, OP).
//
// `width` thread blocks run each track of each rank. Every block runs the whole track on its own
// slice of every chunk, with its own counters and its own part of every slot; so the blocks of a
// track never wait for each other, and each set of corresponding blocks is an instance of the
// verified plan. Operands are combined in plan order. Floats of 16 and 8 bits are combined in float32
// and rounded once per REDUCE.
//
// An action: threads wait for its counters and find its addresses; barrier; the block moves the
// data; barrier; threads raise its counters.
//
// Co-residency: blocks wait for blocks of other tracks and ranks, so all of them must be resident
// at once. The host checks the grid against the occupancy and launches cooperatively.
// Uniformity: all threads follow the same code, which does not change, and leave it only where a
// barrier tells all of them that one has failed.
#include "plan/move.h"

// Copy a table, beginning with the thread `first`: short tables are then copied at the same time.
template <class T>
__device__ __forceinline__ void copy_table(T* to, const T* from, u32 number, u32 first = 0) {
    for (u32 i = (threadIdx.x + blockDim.x - first) % blockDim.x; i < number; i += blockDim.x)
        to[i] = from[i];
}

// Run the actions of a track; false if this thread or another one has failed.
template <class T, class Op>
__device__ __forceinline__ bool interpret(const Launch& l, ThreadBlock& block) {
    const int groups = (l.num_chunks + l.stride - 1) / l.stride;
    const int* code = block.code;
    bool good = true;
    for (Position p = {0, 0, 0}; p.phase < code[0]; ++p.phase)
        for (p.group = 0; p.group < groups; ++p.group)
            for (p.at = code[1 + p.phase]; p.at < code[2 + p.phase]; p.at += code[p.at + LENGTH]) {
                prepare(l, block, p);
                good = good && await_all(l, block, p);
                if (__syncthreads_or(!good)) return false;
                if (l.low_latency) good = move_lines<T, Op>(l, block, p);
                else move_plain<T, Op>(l, block, code[p.at + FLAGS]);
                if (__syncthreads_or(!good)) return false;
                good = signal_all(l, block, p);
            }
    return !__syncthreads_or(!good);
}

template <class T, class Op> __device__ __forceinline__ void run(const Launch& l) {
    SHARED(ThreadBlock, block);
    if (threadIdx.x == 0) {
        block.track = l.tracks[blockIdx.x / l.width];
        block.part = blockIdx.x % l.width;
    }
    __syncthreads();
    const Track& track = block.track;
    const bool near_code = track.code_words <= CODE_WORDS, near_ends = track.num_ends <= MAX_ENDS;
    Cursor* cursors = track.cursors + u64(block.part) * track.num_ends;
    if (near_code) copy_table(block.code_copy, track.code, track.code_words);
    if (near_ends) copy_table(block.end_copy, track.ends, track.num_ends, blockDim.x / 2);
    if (near_ends) copy_table(block.cursor_copy, cursors, track.num_ends, blockDim.x / 4);
    if (threadIdx.x == 0) {
        block.code = near_code ? block.code_copy : track.code;
        block.ends = near_ends ? block.end_copy : track.ends;
        block.cursors = near_ends ? block.cursor_copy : cursors;
        block.link_free = block.finals = block.reported = block.timed_out = 0;
    }
    // after a failure, a push might overwrite a tensor that is in use again, and what this rank has
    // not received must not be sent on
    if (__syncthreads_or(threadIdx.x == 0 && ld_acquire_sys(l.stop))) return;
    const bool good = interpret<T, Op>(l, block);
    if (threadIdx.x == 0 && block.timed_out) st_release_sys(report_of(block), TIMED_OUT);
    if (threadIdx.x == 0 && good && block.reported) st_release_sys(report_of(block), DONE);
    if (near_ends)  // also after a failure, when they are no longer used
        copy_table(cursors, block.cursor_copy, track.num_ends);
}

extern "C" __global__ void __launch_bounds__(THREADS, THREADS <= 256 ? 3 : 1) run_plan(const Launch launch) {
    run<ELEMENT, OP>(launch);
}
