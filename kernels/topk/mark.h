// The one pass over the whole row: `sample` before it, and `mark`.
#pragma once
#include "topk/keys.h"

struct SampleRoom { u64 bins[SAMPLE_BINS]; u64 sums[THREADS]; Found found; };

// One block.
__device__ __forceinline__ void sample_row(const Select& a) {
    SHARED(SampleRoom, room);
    u32* state = (u32*)a.choice;
    for (u32 i = threadIdx.x; i < sizeof(Choice) / 4; i += blockDim.x) state[i] = 0;
    for (u32 i = threadIdx.x; i < SAMPLE_BINS; i += blockDim.x) room.bins[i] = 0;
    __syncthreads();
    const u32 shift = bits_of(a) - 12;
    for (u32 j = threadIdx.x; j < a.samples && a.rank; j += blockDim.x) {
        // multiples of the golden ratio, which lie evenly
        const u64 i = a.samples == a.n ? j : u64(j * 2654435769u) * a.n >> 32;
        const u32 key = a.residual ? key_of(widen(a.x[i]) + a.residual[i]) : key_of(a.x[i]);
        count_up(&room.bins[key >> shift], u64(1));
    }
    __syncthreads();
    Found found = {0, 0, 0};
    if (a.rank) found = reach(room.sums, room.found, room.bins, SAMPLE_BINS, a.rank);
    if (threadIdx.x) return;
    a.choice->low = found.bin << shift;
    a.choice->step[0].left = a.k;
}

enum { AHEAD = 8 };  // loads of a thread in flight

struct MarkRoom { u32 marked; };

__device__ __forceinline__ void mark_row(const Select& a) {
    SHARED(MarkRoom, room);
    if (threadIdx.x == 0) room.marked = 0;
    __syncthreads();
    const u32 low = a.choice->low;
    const u64 start = blockIdx.x * a.chunk, whole = start + a.chunk;
    const u64 stop = whole < a.n ? whole : a.n;
    u32 marked = 0;
    for (u64 first = start; first < stop; first += u64(AHEAD) * blockDim.x) {
        const u64 mine = first + threadIdx.x, far = mine < stop ? stop - mine : 0;
        const u32 step = blockDim.x, left = far < AHEAD * step ? u32(far) : AHEAD * step;
        const ELEMENT* from = a.x + mine;
        float* to = a.residual + mine;
        ELEMENT x[AHEAD];
        u32 key[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)  // all loads before the first use
            x[u] = u * step < left ? from[u * step] : ELEMENT();
        if (a.residual) {
            float sum[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) sum[u] = u * step < left ? to[u * step] : 0.f;
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                sum[u] = widen(x[u]) + sum[u];
                key[u] = key_of(sum[u]);
                if (u * step < left) to[u * step] = sum[u];
            }
        } else {
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) key[u] = key_of(x[u]);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const u64 i = mine + u * step;
            if (i / 32 * 32 < stop)
                marked += write_bit(a.words, i, u * step < left && key[u] >= low);
        }
    }
    if (marked) count_up(&room.marked, marked);
    __syncthreads();
    if (threadIdx.x == 0 && room.marked) count_up(&a.choice->marked, u64(room.marked));
}
