// The sample, which yields a threshold, and `gather`, the only pass over the whole row.
#pragma once
#include "topk/keys.h"

enum { PACK = 16 / sizeof(ELEMENT) };  // elements of a load

__device__ __forceinline__ u32 bits_of(float v) { return float_bits(v); }
__device__ __forceinline__ u32 bits_of(float16 v) { return v.bits; }
__device__ __forceinline__ u32 bits_of(bfloat16 v) { return v.bits; }

struct GatherScratch { u32 bins[SAMPLE_BINS]; StepScratch step; };

// The threshold in all threads: a key that somewhat more than k of n elements should reach. The
// sample is of packs, as memory is read in sectors of 32 bytes anyway.
__device__ __forceinline__ u32 sample_row(const Select& a, GatherScratch& scratch) {
    for (u32 i = threadIdx.x; i < SAMPLE_BINS; i += blockDim.x) scratch.bins[i] = 0;
    __syncthreads();
    const u32 shift = full_keys(a) ? 31 - 12 : 15 - 12;
    for (u32 j = threadIdx.x; j < a.packs; j += blockDim.x) {
        // multiples of the golden ratio are evenly distributed
        const u64 first = (u64(j * 2654435769u) * (a.n / PACK) >> 32) * PACK;
#pragma unroll
        for (u64 i = first; i < first + PACK; ++i) {
            const u32 bits = a.residual ? float_bits(widen(a.x[i]) + a.residual[i])
                                        : bits_of(a.x[i]);
            count_up(&scratch.bins[key_of(a, bits) >> shift], 1u);
        }
    }
    __syncthreads();
    return reach<SAMPLE_BINS>(scratch.step, scratch.bins, a.rank).bin << shift;
}

__device__ __forceinline__ void sample_sums(const Select& a) {
    SHARED(GatherScratch, scratch);
    const u32 low = sample_row(a, scratch);
    if (blockIdx.x == 0 && threadIdx.x == 0) a.state->low = low;
}

// E elements from i on in one access; a single one is not accessed from `stop` on.
template <int E, class T> struct Access {
    union { uint4 raw; Pack<T, 16> of; };
    __device__ __forceinline__ void read(const T* from, u64 i, u64 stop) {
        if (E > 1) raw = *(const uint4*)(from + i);
        else of.e[0] = i < stop ? from[i] : T();
    }
    __device__ __forceinline__ void write(T* to, u64 i, u64 stop) const {
        if (E > 1) *(uint4*)(to + i) = raw;
        else if (i < stop) to[i] = of.e[0];
    }
};

struct List { u32* offsets; u32* bits; u32 number; };  // of a warp; only `room` are stored

// Append the elements of a tile that reach `low` to the warp's list. A thread has AHEAD times E
// elements; each E of them are beside those of its neighbours.
template <int E>
__device__ __forceinline__ void gather_tile(const Select& a, u64 start, u64 tile, u64 stop,
                                            u32 low, List& list) {
    enum { FLOATS = E == 1 ? 1 : 4, QUADS = E / FLOATS, GROUP = AHEAD / QUADS };
    const u32 step = E * warp_size();
    const u64 mine = tile + E * (threadIdx.x % warp_size());
    Access<E, ELEMENT> x[AHEAD];
    u32 reached = 0;  // a bit for each element
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) x[u].read(a.x, mine + u * step, stop);
#pragma unroll
    for (int first = 0; first < AHEAD; first += GROUP) {
        Access<FLOATS, float> sums[AHEAD];
        const u64 from = mine + first * step;
        if (a.residual) {
#pragma unroll
            for (int v = 0; v < AHEAD; ++v)
                sums[v].read(a.residual, from + v / QUADS * step + v % QUADS * FLOATS, stop);
        }
#pragma unroll
        for (int v = 0; v < GROUP * E; ++v) {
            const ELEMENT value = x[first + v / E].of.e[v % E];
            float& sum = sums[v / FLOATS].of.e[v % FLOATS];
            if (a.residual) sum = widen(value) + sum;
            const u32 key = key_of(a, a.residual ? float_bits(sum) : bits_of(value));
            const bool here = E > 1 || from + v * step < stop;
            reached |= u32(here && key >= low) << (first * E + v);
        }
        if (a.residual) {
#pragma unroll
            for (int v = 0; v < AHEAD; ++v)
                sums[v].write(a.residual, from + v / QUADS * step + v % QUADS * FLOATS, stop);
        }
    }
    u64 numbers = 0, total;  // of elements that reach `low`: 16 bits for each access
#pragma unroll
    for (int u = 0; u < AHEAD; ++u)
        numbers += u64(__popc(reached >> u * E & ((1u << E) - 1))) << 16 * u;
    const u64 before = scan_warp(numbers, total);
    const u64 upto = total + (total << 16) + (total << 32) + (total << 48);
    u64 to = before + upto - total;  // for each access, where its elements go
    for (; reached; reached &= reached - 1) {
        const u32 bit = __ffs(reached) - 1, u = bit / E;
        const u32 at = list.number + u32(to >> 16 * u & 0xffff);
        const u64 i = mine + u * step + bit % E;
        to += u64(1) << 16 * u;
        if (at >= a.room) continue;
        list.offsets[at] = u32(i - start);
        put_bits(a, list.bits, at, a.residual ? float_bits(a.residual[i]) : bits_of(a.x[i]));
    }
    list.number += u32(upto >> 48);
}

__device__ __forceinline__ void gather_row(const Select& a) {
    SHARED(GatherScratch, scratch);
    EACH(i, DIGITS * BINS) a.state->bins[i / BINS][i % BINS] = 0;
    u32 low = ~0u;
    if (a.rank) low = a.residual ? u32(a.state->low) : sample_row(a, scratch);
    const u64 warp = warp_of_grid(), start = warp * a.part;
    const u64 stop = a.n < start + a.part ? a.n : start + a.part;
    const u32 size = warp_size() * AHEAD * PACK;
    List list = {a.offsets + warp * a.room, a.bits + warp * a.room, 0};
    u64 tile = start;
    if (!((u64(a.x) | u64(a.residual)) & 15))  // aligned
        for (; tile + size <= stop; tile += size)
            gather_tile<PACK>(a, start, tile, stop, low, list);
    for (; tile < stop; tile += AHEAD * warp_size())
        gather_tile<1>(a, start, tile, stop, low, list);
    if (threadIdx.x % warp_size() == 0) a.counts[warp] = list.number;
    u64 total;
    scan_warps(scratch.step.sums, u64(list.number), total);
    if (threadIdx.x == 0) a.totals[blockIdx.x] = u32(total);
}
