// A stable radix sort of indices with their positions, and the runs of equal indices.
//
// A pass sorts by 8 bits: `histogram` counts the digits of each block, `offsets` (one block) adds
// them up in the order (digit, block), and `scatter` writes. A warp of it ranks adjacent elements,
// a row of them at a time, among those with the same digit, behind the earlier warps of the block,
// so the sort is stable. The first pass reads the caller's indices. Then `runs` counts and `name`
// numbers the runs. All launches go to one stream.
// Bounds: an index out of range is reported and sorted by its low bits; no address depends on the
// value of an index.
#include "gpu/block.h"

#ifndef INDEX
#define INDEX int
#endif
#ifndef KEY
#define KEY u32
#endif

enum { RADIX = 256, ROWS = 4 };  // rows that a warp ranks at a time

struct Sort {
    const INDEX* indices;  // [n]: the keys of the first pass; 0 in later passes
    const KEY* keys;
    const u32* order;
    KEY* keys_out;
    u32* order_out;
    u32* counts;  // [RADIX][blocks]; in `runs` and `name` [blocks]
    u64* summary;  // [2]: n + number of runs; the first position with an index out of range, or n
    u32* run;  // [n]: the run of each sorted position
    INDEX* unique;  // [n]: the index of each run
    u64 n;  // below 2^32
    u64 limit;  // of indices
    u64 chunk;  // elements per block
    u32 shift;
    u32 blocks;  // of the other kernels' launches, for `offsets`
};

__device__ __forceinline__ KEY key_at(const Sort& a, u64 i) {
    return a.indices ? KEY(a.indices[i]) : a.keys[i];
}

// `of` counts a warp's digits, and is then the place of its first element with each.
struct SortScratch {
    u32 bins[RADIX]; u32 of[WARPS][RADIX]; u32 scan[WARPS]; u64 sums[WARPS];
};

__device__ __forceinline__ void count_digits(const Sort& a) {
    SHARED(SortScratch, scratch);
    for (u32 i = threadIdx.x; i < RADIX; i += blockDim.x) scratch.bins[i] = 0;
    __syncthreads();
    const u64 start = blockIdx.x * a.chunk;
    for (u64 i = start + threadIdx.x; i < start + a.chunk && i < a.n; i += blockDim.x) {
        // as unsigned numbers, negative indices are out of range too
        if (a.indices && u64(i64(a.indices[i])) >= a.limit) count_down_to(a.summary + 1, i);
        count_up(&scratch.bins[key_at(a, i) >> a.shift & (RADIX - 1)], 1u);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < RADIX; i += blockDim.x)
        a.counts[i * gridDim.x + blockIdx.x] = scratch.bins[i];
}

__device__ __forceinline__ void add_offsets(const Sort& a) {
    SHARED(SortScratch, scratch);
    u32 before = 0;
    const u32 number = RADIX * a.blocks;
    for (u32 first = 0; first < number; first += blockDim.x) {
        const u32 i = first + threadIdx.x;
        const u32 mine = i < number ? a.counts[i] : 0;
        u32 total;
        const u32 upto = scan(scratch.scan, mine, total);
        if (i < number) a.counts[i] = before + upto;
        before += total;
    }
}

__device__ __forceinline__ void scatter_pairs(const Sort& a) {
    SHARED(SortScratch, scratch);
    for (u32 i = threadIdx.x; i < RADIX; i += blockDim.x)
        scratch.bins[i] = a.counts[i * gridDim.x + blockIdx.x];
    const u32 warp = threadIdx.x / WARP, t = threadIdx.x % WARP, width = warp_size();
    const u64 start = blockIdx.x * a.chunk;
    const u64 stop = start + a.chunk < a.n ? start + a.chunk : a.n;
    for (u64 first = start; first < stop; first += ROWS * blockDim.x) {
        for (u32 i = threadIdx.x; i < WARPS * RADIX; i += blockDim.x)
            scratch.of[i / RADIX][i % RADIX] = 0;
        __syncthreads();
        const u64 mine = first + u64(warp) * ROWS * width + t;
        KEY keys[ROWS];
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r)
            keys[r] = mine + r * width < stop ? key_at(a, mine + r * width) : 0;
        u32 ranks[ROWS];
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            const bool here = mine + r * width < stop;
            const u32 digit = u32(keys[r] >> a.shift) & (RADIX - 1);
            const u32 same = same_in_warp(here ? digit : u32(RADIX));
            const u32 earlier = __popc(same & ((1u << t) - 1));
            const u32 before = scratch.of[warp][digit];
            sync_warp();
            if (here && !earlier) scratch.of[warp][digit] = before + __popc(same);
            sync_warp();
            ranks[r] = before + earlier;
        }
        __syncthreads();
        for (u32 d = threadIdx.x; d < RADIX; d += blockDim.x) {
            u32 to = scratch.bins[d];
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) {
                const u32 number = scratch.of[w][d];
                scratch.of[w][d] = to;
                to += number;
            }
            scratch.bins[d] = to;  // of the next elements
        }
        __syncthreads();
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            const u64 i = mine + r * width;
            if (i < stop) {
                const u64 to = scratch.of[warp][u32(keys[r] >> a.shift) & (RADIX - 1)] + ranks[r];
                a.keys_out[to] = keys[r];
                a.order_out[to] = a.indices ? u32(i) : a.order[i];
            }
        }
        __syncthreads();
    }
}

__device__ __forceinline__ void count_runs(const Sort& a) {
    SHARED(SortScratch, scratch);
    count_firsts(scratch.scan, a.keys, a.n, a.chunk, a.counts, a.summary);
}

__device__ __forceinline__ void name_runs(const Sort& a) {
    SHARED(SortScratch, scratch);
    const u64 start = blockIdx.x * a.chunk;
    u64 before = sum_of(scratch.sums, a.counts, blockIdx.x);
    for (u64 first = start; first < start + a.chunk && first < a.n; first += blockDim.x) {
        const u64 i = first + threadIdx.x;
        const bool here = i < start + a.chunk && i < a.n, head = here && first_of(a.keys, i);
        u32 total;
        const u64 upto = before + scan(scratch.scan, u32(head), total) + head;  // > 0 if `here`
        if (here) a.run[i] = u32(upto - 1);
        if (head) a.unique[upto - 1] = INDEX(a.keys[i]);
        before += total;
    }
}

KERNEL(histogram, Sort, count_digits)
KERNEL(offsets, Sort, add_offsets)
KERNEL(scatter, Sort, scatter_pairs)
KERNEL(runs, Sort, count_runs)
KERNEL(name, Sort, name_runs)
