// The plan interpreter: one launch runs a whole collective without the host (C-Cube, sections III
// and IV-B). Compiled for each (ELEMENT, OP).
//
// `width` thread blocks run each track of each rank. Every block runs the whole track on its own
// slice of every chunk, with its own counters and its own part of every slot; so the blocks of a
// track never wait for each other, and each set of corresponding blocks is an instance of the
// verified plan. A REDUCE combines peers in plan order; the own value comes first, or behind the
// first `ahead` peers. float16 and bfloat16 are combined in float32 and rounded once per REDUCE.
//
// Co-residency: blocks wait for blocks of other tracks and ranks, so all of them must be resident
// at once. The host checks the grid against the occupancy and launches cooperatively.
// Uniformity: all threads of a block reach every barrier, since `op` and `failed` are written on
// one side of a barrier and read on the other.
#include "plan/move.h"

#ifndef THREADS
#define THREADS 256
#endif

template <class T, class Op> __device__ __forceinline__ void run(const Launch& launch) {
    SHARED(ThreadBlock, block);
    const Track& track = launch.tracks[blockIdx.x / launch.width];
    Cursor* cursors = track.cursors + u64(blockIdx.x % launch.width) * track.num_ends;
    const bool near_code = track.code_words <= CODE_WORDS, near_ends = track.num_ends <= MAX_ENDS;
    if (near_code)
        for (u32 i = threadIdx.x; i < track.code_words; i += blockDim.x)
            block.code_copy[i] = track.code[i];
    if (near_ends)
        for (u32 i = threadIdx.x; i < track.num_ends; i += blockDim.x)
            block.cursor_copy[i] = cursors[i];
    if (threadIdx.x == 0) {
        block.timed_out = block.phase = block.group = block.pc = block.length = 0;
        // after a failure, a push might overwrite a tensor that is in use again
        block.failed = launch.direct && ld_acquire_sys(launch.abort);
        block.link_free = block.finals = 0;
        block.code = near_code ? block.code_copy : track.code;
        block.cursors = near_ends ? block.cursor_copy : cursors;
    }
    __syncthreads();
    for (;;) {
        if (threadIdx.x == 0) next(launch, track, block);
        __syncthreads();
        if (block.task.op == STOP) break;
        carry_out<T, Op>(launch, track, block);
        __syncthreads();
    }
    const bool never_began = block.failed && !block.pc;  // then there is no step to report
    if (threadIdx.x == 0 && !never_began) report_end(launch, track, block);
    if (near_ends)  // also after a failure, when they are no longer used
        for (u32 i = threadIdx.x; i < track.num_ends; i += blockDim.x)
            cursors[i] = block.cursor_copy[i];
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) run_plan(const Launch launch) {
    run<ELEMENT, OP>(launch);
}
