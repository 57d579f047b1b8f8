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
    const Group& group = launch.groups[blockIdx.x / launch.width];
    Cursor* cursors = group.cursors + u64(blockIdx.x % launch.width) * group.num_ends;
    const bool near_code = group.code_words <= CODE_WORDS, near_ends = group.num_ends <= MOST_ENDS;
    if (near_code)
        for (u32 i = threadIdx.x; i < group.code_words; i += blockDim.x)
            block.code_copy[i] = group.code[i];
    if (near_ends)
        for (u32 i = threadIdx.x; i < group.num_ends; i += blockDim.x)
            block.cursor_copy[i] = cursors[i];
    if (threadIdx.x == 0) {
        block.timed_out = block.phase = block.group = block.pc = block.length = 0;
        // what is pushed by a launch that begins after a failure would hit tensors in other use
        block.failed = launch.direct && ld_acquire_sys(launch.abort);
        block.link_free = block.finals = 0;
        block.code = near_code ? block.code_copy : group.code;
        block.cursors = near_ends ? block.cursor_copy : cursors;
    }
    __syncthreads();
    for (;;) {
        if (threadIdx.x == 0) next(launch, group, block);
        __syncthreads();
        if (block.task.op == STOP) break;
        carry_out<T, Op>(launch, group, block);
        __syncthreads();
    }
    const bool never_began = block.failed && !block.pc;  // and so has nothing to report
    if (threadIdx.x == 0 && !never_began) report_end(launch, group, block);
    if (near_ends)  // after a failure nobody uses them again
        for (u32 i = threadIdx.x; i < group.num_ends; i += blockDim.x)
            cursors[i] = block.cursor_copy[i];
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) run_plan(const Launch launch) {
    run<ELEMENT, OP>(launch);
}
