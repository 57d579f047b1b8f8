// The plan interpreter: one launch runs a collective with no host in the loop (C-Cube, sections III
// and IV-B). Compiled once for each (ELEMENT, OP).
//
// A block is one block of one track of one rank. Every block runs the whole track on its own slice
// of every chunk, with counters and slots of its own: width never wait for one another, and each is
// an instance of the verified plan. Reduction order: own value, behind `ahead` of the peers, then
// the peers in plan order; float16 and bfloat16 in float32, rounded once a hop.
//
// Co-residency: a block waits for width of other blocks, so all blocks of all ranks must be resident
// at once. The host checks the grid against the occupancy and launches cooperatively.
// Uniformity: every barrier is reached by all threads of a block, as `op` and `failed` are read
// behind one and written before it or behind the next.
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
        // what is pushed by a launch that begins after a failure would hit tensors in other use
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
    const bool never_began = block.failed && !block.pc;  // and so has nothing to report
    if (threadIdx.x == 0 && !never_began) report_end(launch, track, block);
    if (near_ends)  // after a failure nobody uses them again
        for (u32 i = threadIdx.x; i < track.num_ends; i += blockDim.x)
            cursors[i] = block.cursor_copy[i];
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) run_plan(const Launch launch) {
    run<ELEMENT, OP>(launch);
}
