// Common to the kernels of a selection: their argument, keys, digits, and what a warp selects from.
#pragma once
#include "gpu/block.h"
#include "gpu/element.h"

enum { AHEAD = 4 };  // loads in flight per thread

// A key's digits from the highest: 11, 11 and 9 bits. A 16-bit float's key has the last two only.
enum { DIGITS = 3, LAST = DIGITS - 1, BINS = 2048, LAST_BINS = 512, SAMPLE_BINS = 4096 };
template <int D> struct Digit {
    enum { SHIFT = D == 0 ? 20 : D == 1 ? 9 : 0, NUMBER = D == LAST ? LAST_BINS : BINS };
};

struct Step {  // take keys above `prefix`, and `left` that match it
    u64 left;
    u32 prefix;
    u32 listed;  // 1: at least k elements reach the threshold
};

struct State {
    Step step[DIGITS + 1];  // before each digit, and after the last one
    u64 bins[DIGITS][BINS];  // `gather` zeroes them
    u64 low;  // the threshold, from `sample`
};

// Warps are those of the launches, which all have the same grid.
struct Select {
    const ELEMENT* x;
    float* residual;  // [n], to which x is added; or 0
    void* values;  // [k]; float if there is a residual
    void* indices;  // [k]
    State* state;
    u32* rows;  // [blocks][LAST_BINS + 1]: elements whose keys are not below each last digit
    u32* totals;  // [blocks]: elements that reach the threshold
    u32* counts;  // [warps]: the same
    u32* offsets;  // [warps][room]: their positions in the warp's part, ascending
    u32* bits;  // [warps][room]: their bit patterns
    u64 n;
    u64 k;
    u64 part;  // elements per warp
    u32 room;  // elements of a warp's list
    u32 packs;  // of 16 bytes, sampled
    u32 rank;  // of the sampled key that becomes the threshold; 0: no sample, no lists
    u32 wide;  // 1: indices have 64 bits
};

// With a residual, keys are those of the float sums, whatever the type of x.
__device__ __forceinline__ bool full_keys(const Select& a) {
    return sizeof(ELEMENT) == 4 || a.residual;
}
template <class T> __device__ __forceinline__ u32 key_of(u32 bits) {
    const u32 key = bits & ((1u << Keys<T>::BITS) - 1);
    return key < u32(Keys<T>::NAN_BITS) ? key : u32(Keys<T>::NAN_BITS);
}
__device__ __forceinline__ u32 key_of(const Select& a, u32 bits) {
    return full_keys(a) ? key_of<float>(bits) : key_of<ELEMENT>(bits);
}

// Bit patterns as they are stored in rows, lists and values.
__device__ __forceinline__ u32 get_bits(const Select& a, const void* from, u64 i) {
    return full_keys(a) ? ((const u32*)from)[i] : ((const u16*)from)[i];
}
__device__ __forceinline__ void put_bits(const Select& a, void* to, u64 i, u32 bits) {
    if (full_keys(a)) ((u32*)to)[i] = bits;
    else ((u16*)to)[i] = u16(bits);
}

// What a warp selects from: its list, or its part of the row if the list is of no use.
struct Items {
    const void* bits;
    const u32* offsets;  // 0 in a part of the row
    u64 first;  // the index of the part's first element
    u64 number;
};
__device__ __forceinline__ Items items_of(const Select& a, bool listed) {
    const u64 warp = warp_of_grid(), first = warp * a.part;
    if (listed && a.counts[warp] <= a.room)
        return {a.bits + warp * a.room, a.offsets + warp * a.room, first, a.counts[warp]};
    const u64 start = first < a.n ? first : a.n, rest = a.n - start;
    return {a.residual ? (const void*)(a.residual + start) : a.x + start, 0, first,
            rest < a.part ? rest : a.part};
}

// Call `visit` with the key of each item, in any order.
template <class F>
__device__ __forceinline__ void each_key(const Select& a, const Items& items, F visit) {
    const u32 step = warp_size();
    for (u64 i = threadIdx.x % step; i < items.number; i += AHEAD * step) {
        u32 bits[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)  // issue all loads before the first use
            bits[u] = i + u * step < items.number ? get_bits(a, items.bits, i + u * step) : 0;
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (i + u * step < items.number) visit(key_of(a, bits[u]));
    }
}

struct Found { u64 above; u32 bin; };  // the count in the bins above `bin`
struct StepScratch { u64 sums[WARPS]; Found found; };

// The highest bin that together with the bins above it holds at least `wanted` > 0; all bins do.
// A thread has a run of adjacent bins.
template <int NUMBER, class T>
__device__ __forceinline__ Found reach(StepScratch& scratch, const T* bins, u64 wanted) {
    enum { RUN = NUMBER < THREADS ? 1 : NUMBER / THREADS };
    u64 above = 0, total;
    for (i64 stop = NUMBER; stop > 0; stop -= RUN * blockDim.x, above += total) {
        const i64 first = stop - RUN * i64(threadIdx.x + 1);
        T run[RUN] = {};
        u64 mine = 0;
        if (first >= 0)
#pragma unroll
            for (int u = 0; u < RUN; ++u) mine += run[u] = bins[first + u];
        u64 before = above + scan(scratch.sums, mine, total);
#pragma unroll
        for (int u = RUN - 1; u >= 0; before += run[u--])
            if (before < wanted && before + run[u] >= wanted)
                scratch.found = {before, u32(first) + u};
    }
    __syncthreads();
    const Found found = scratch.found;
    __syncthreads();
    return found;
}

// The step before digit D, when the histograms of the digits above it are complete.
template <int D>
__device__ __forceinline__ Step step_before(const Select& a, StepScratch& scratch) {
    enum { HIGHER = D ? D - 1 : 0, NUMBER = Digit<HIGHER>::NUMBER };
    Step step;
    if (D == 0 || (D == 1 && !full_keys(a))) {  // the first digit
        step = {a.k, 0, sum_of(scratch.sums, a.totals, gridDim.x) >= a.k};
    } else {
        step = a.state->step[HIGHER];
        const Found found = reach<NUMBER>(scratch, a.state->bins[HIGHER], step.left);
        step = {step.left - found.above, step.prefix * NUMBER + found.bin, step.listed};
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) a.state->step[D] = step;  // for the next launch
    return step;
}
