// Functions of a whole thread block: prefix sums, and the bin in which a count is reached.
//
// They contain barriers, so all threads of the block must call them: the bounds of loops around
// these functions are uniform.
#pragma once
#include "gpu/sync.h"

#ifndef THREADS
#define THREADS 512  // per block, at most
#endif
#ifndef ELEMENT
#define ELEMENT float
#endif

// A grid-stride loop over i from 0 to n - 1.
#define EACH(i, n) \
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < (n); \
         i += u64(gridDim.x) * blockDim.x)

// Exclusive prefix sum of `v` over the threads; `total` receives the sum over all threads.
template <class T> __device__ __forceinline__ T scan(T* scratch, T v, T& total) {
    const u32 t = threadIdx.x;
    scratch[t] = v;
    __syncthreads();
    for (u32 step = 1; step < blockDim.x; step *= 2) {
        const T before = t >= step ? scratch[t - step] : 0;
        __syncthreads();
        scratch[t] += before;
        __syncthreads();
    }
    const T upto = scratch[t];
    total = scratch[blockDim.x - 1];
    __syncthreads();
    return upto - v;
}

// The sum of `counts[i * stride]` for i below `number`, in all threads.
__device__ __forceinline__ u64 sum_of(u64* scratch, const u32* counts, u32 number, u32 stride) {
    u64 mine = 0;
    for (u32 i = threadIdx.x; i < number; i += blockDim.x) mine += counts[u64(i) * stride];
    if (threadIdx.x == 0) *scratch = 0;
    __syncthreads();
    if (mine) count_up(scratch, mine);
    __syncthreads();
    const u64 found = *scratch;
    __syncthreads();
    return found;
}

template <class T> __device__ __forceinline__ bool first_of(const T* sorted, u64 i) {
    return i == 0 || sorted[i - 1] != sorted[i];
}

// Count the positions in this block's chunk whose value differs from the previous one; the number
// goes to `counts` and is added to `summary`.
template <class T>
__device__ __forceinline__ void count_firsts(u32* scratch, const T* sorted, u64 number, u64 chunk,
                                             u32* counts, u64* summary) {
    const u64 start = blockIdx.x * chunk;
    u32 firsts = 0;
    for (u64 i = start + threadIdx.x; i < start + chunk && i < number; i += blockDim.x)
        firsts += first_of(sorted, i);
    u32 total;
    scan(scratch, firsts, total);
    if (threadIdx.x == 0) {
        counts[blockIdx.x] = total;
        count_up(summary, u64(total));
    }
}

struct Found { u64 above, at; u32 bin; };  // counts in the bins above `bin`, and in it

// The highest bin that together with the bins above it holds at least `wanted` > 0; bin 0 if all
// bins hold less. Each thread adds a run of adjacent bins.
__device__ __forceinline__ Found reach(u64* sums, Found& scratch, const u64* bins, u32 number,
                                       u64 wanted) {
    const u32 each = (number + blockDim.x - 1) / blockDim.x, t = threadIdx.x;
    u64 mine = 0;
    for (u32 i = t * each; i < (t + 1) * each && i < number; ++i) mine += bins[number - 1 - i];
    if (t == 0) scratch.above = scratch.at = scratch.bin = 0;
    u64 total;
    u64 above = scan(sums, mine, total);
    if (above < wanted && above + mine >= wanted)
        for (u32 i = t * each; i < number; ++i) {
            const u32 bin = number - 1 - i;
            if (above + bins[bin] >= wanted) {
                scratch.above = above, scratch.at = bins[bin], scratch.bin = bin;
                break;
            }
            above += bins[bin];
        }
    __syncthreads();
    const Found found = scratch;
    __syncthreads();
    return found;
}
