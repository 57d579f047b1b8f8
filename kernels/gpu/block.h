// What the threads of one block do together: running sums, and the bin at which a count is reached.
//
// Barriers are reached by all threads: loops around these functions have bounds that are the same
// for the whole block.
#pragma once
#include "gpu/sync.h"

#ifndef THREADS
#define THREADS 512  // of a block, at most
#endif
#ifndef ELEMENT
#define ELEMENT float
#endif

// The sum of `v` over the threads before this one; the total of all in `total`.
template <class T> __device__ __forceinline__ T scan(T* room, T v, T& total) {
    const u32 t = threadIdx.x;
    room[t] = v;
    __syncthreads();
    for (u32 step = 1; step < blockDim.x; step *= 2) {
        const T before = t >= step ? room[t - step] : 0;
        __syncthreads();
        room[t] += before;
        __syncthreads();
    }
    const T upto = room[t];
    total = room[blockDim.x - 1];
    __syncthreads();
    return upto - v;
}

// The sum of `counts[0 .. number)`, in all threads.
__device__ __forceinline__ u64 sum_of(u64* room, const u32* counts, u32 number, u32 stride) {
    u64 mine = 0;
    for (u32 i = threadIdx.x; i < number; i += blockDim.x) mine += counts[u64(i) * stride];
    if (threadIdx.x == 0) *room = 0;
    __syncthreads();
    if (mine) count_up(room, mine);
    __syncthreads();
    const u64 found = *room;
    __syncthreads();
    return found;
}

template <class T> __device__ __forceinline__ bool first_of(const T* sorted, u64 i) {
    return i == 0 || sorted[i - 1] != sorted[i];
}

// How many places of this block's chunk hold another value than the one before them: into `counts`,
// and added to `told`.
template <class T>
__device__ __forceinline__ void count_firsts(u32* room, const T* sorted, u64 number, u64 chunk,
                                             u32* counts, u64* told) {
    const u64 start = blockIdx.x * chunk;
    u32 firsts = 0;
    for (u64 i = start + threadIdx.x; i < start + chunk && i < number; i += blockDim.x)
        firsts += first_of(sorted, i);
    u32 total;
    scan(room, firsts, total);
    if (threadIdx.x == 0) {
        counts[blockIdx.x] = total;
        count_up(told, u64(total));
    }
}

struct Found { u64 above, at; u32 bin; };  // counts in the bins above, and in this one

// The highest bin such that it and those above it hold at least `wanted` (from 1); bin 0 where even
// all do not. Each thread has a run of bins.
__device__ __forceinline__ Found reach(u64* sums, Found& room, const u64* bins, u32 number,
                                       u64 wanted) {
    const u32 each = (number + blockDim.x - 1) / blockDim.x, t = threadIdx.x;
    u64 mine = 0;
    for (u32 i = t * each; i < (t + 1) * each && i < number; ++i) mine += bins[number - 1 - i];
    if (t == 0) room.above = room.at = room.bin = 0;
    u64 total;
    u64 above = scan(sums, mine, total);
    if (above < wanted && above + mine >= wanted)
        for (u32 i = t * each; i < number; ++i) {
            const u32 bin = number - 1 - i;
            if (above + bins[bin] >= wanted) {
                room.above = above, room.at = bins[bin], room.bin = bin;
                break;
            }
            above += bins[bin];
        }
    __syncthreads();
    const Found found = room;
    __syncthreads();
    return found;
}
