// Functions of a whole thread block: prefix sums, and what is made of them.
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

enum { WARP = 32, WARPS = (THREADS + WARP - 1) / WARP };  // warps of a block, at most

__device__ __forceinline__ u32 warps_per_block() { return (blockDim.x + WARP - 1) / WARP; }
__device__ __forceinline__ u64 warp_of_grid() {
    return u64(blockIdx.x) * warps_per_block() + threadIdx.x / WARP;
}

// The sum over earlier warps of `v`, which is the same in all threads of a warp; `total` receives
// the sum over all warps. `scratch` has WARPS elements, of which AT_ONCE are in registers at once.
template <int AT_ONCE = WARPS, class T>
__device__ __forceinline__ T scan_warps(T* scratch, T v, T& total) {
    const u32 warp = threadIdx.x / WARP;
    if (threadIdx.x % WARP == 0) scratch[warp] = v;
    __syncthreads();
    T before = 0, sum = 0;
#pragma unroll AT_ONCE
    for (u32 w = 0; w < WARPS; ++w) {
        const T each = w < warps_per_block() ? scratch[w] : 0;
        before += w < warp ? each : 0;
        sum += each;
    }
    total = sum;
    __syncthreads();
    return before;
}

// Exclusive prefix sum of `v` over the threads; `total` receives the sum over all threads.
template <int AT_ONCE = WARPS, class T>
__device__ __forceinline__ T scan(T* scratch, T v, T& total) {
    T sum;
    const T before = scan_warp(v, sum);
    return scan_warps<AT_ONCE>(scratch, sum, total) + before;
}

// The sum of `counts` [number], in all threads.
__device__ __forceinline__ u64 sum_of(u64* scratch, const u32* counts, u32 number) {
    u64 mine = 0, total;
    for (u32 i = threadIdx.x; i < number; i += blockDim.x) mine += counts[i];
    scan(scratch, mine, total);
    return total;
}

// How many of the ascending `sorted` are below x, or with `upto` not above it.
template <class T>
__device__ __forceinline__ u64 below(const T* sorted, u64 number, T x, bool upto = false) {
    u64 first = 0, last = number;
    while (first < last) {
        const u64 middle = (first + last) / 2;
        if (sorted[middle] < x || (upto && sorted[middle] == x)) first = middle + 1;
        else last = middle;
    }
    return first;
}

template <class T> __device__ __forceinline__ bool first_of(const T* sorted, u64 i) {
    return i == 0 || sorted[i - 1] != sorted[i];
}

// Count the positions in this block's chunk whose value differs from the previous one; the number
// goes to `counts` and is added to `summary`, if there is one.
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
        if (summary) count_up(summary, u64(total));
    }
}
